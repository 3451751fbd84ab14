# shellcheck shell=bash
# The shell around the ranks of a run's batch job: markers, modules, signals, and what happens at the end.
#
# sbatch copies one file, so this text stands whole in every submitted script, behind that of job.sh, between the settings
# of the job and the calls of these functions (batch_script.py, sweep/arrays.py). The settings beside those of job.sh, all
# quoted:
#   run                where the run directory is; of an array: sweep, and points, a line of ids for each element
#   hpc_chain          jobs that follow each other; only the last one's end is the end of the run
#   hpc_report         command that says why the ranks failed
#   hpc_python_path    where the code of the job is; empty: where it is installed
#   hpc_modules, hpc_module_path, hpc_module_purge
#   hpc_watch          command that watches the ranks; empty: nobody does
#   hpc_restart        command that decides what follows a fault; empty: the ranks are not started again
#   hpc_fit            command that finds out which nodes a requeue leaves out, and how many it asks for; empty: as before
#   hpc_nodes, hpc_ranks, hpc_spares   nodes and ranks of the run, and nodes that the job has beside them
#   hpc_elastic        true: the ranks may start again on fewer nodes
#   hpc_losses         true: the ranks may go on without some of them
#   hpc_begin_points   (arrays) command that writes job.json of points
#   hpc_points_per_job, hpc_ranks_per_node   (arrays whose elements have several points) of the job as a whole
# shellcheck disable=SC2154

# What result.json says of an attempt.
why="" next="" state="" stopped=""
# How srun begins what it says of tasks that have failed.
srun_task_error='^srun: error: [^ ]+: tasks? [0-9,-]+: '
# Each srun that had not ended when its ranks had, and that nobody waits for, and the log directory of its attempt.
left_sruns=()
# Seconds between two looks at a run directory that cannot be written.
probe_pause=5
# Nodes that this job has lost, separated by spaces. Slurm may notice only minutes later, and nothing starts on them again.
lost_nodes=""

# write_marker NAME TEXT: readers see the whole file or none.
write_marker() {
  printf '%s\n' "$2" >"$logs/.$1" && mv "$logs/.$1" "$logs/$1"
}

# write_result CODE: how this attempt ended. Only the first call counts; the EXIT trap makes the last.
write_result() {
  [ ! -e "$logs/result.json" ] || return 0
  [ -z "$doing" ] || why="$doing failed"
  write_marker result.json "{\"exit_code\": $1, \"then\": \"$next\", \"why\": \"$why\", \"slurm\": \"$state\", \"time\": $(date +%s)}"
}

# Make the log directory of the next attempt at `run`, and its marker.
make_attempt() {
  [ -d "$run/logs" ] || refuse "$run/logs is not visible on $(hostname)"
  attempt=0
  until mkdir "$run/logs/$attempt" 2>/dev/null; do
    [ -d "$run/logs/$attempt" ] || refuse "$run/logs cannot be written from $(hostname)"
    attempt=$((attempt + 1))
  done
  logs="$run/logs/$attempt"
  rmdir "$run"/logs/*/.probe 2>/dev/null || : # of scripts that were killed in wait_until_writable
}

# A job that came back may have fewer spare nodes than it was submitted with.
count_spares() {
  local spares=$((${SLURM_JOB_NUM_NODES:-0} - ${hpc_nodes:-0}))
  [ "${hpc_spares:-0}" -gt 0 ] && [ "$spares" -gt 0 ] || spares=0
  echo "$spares"
}

mark_started() {
  write_marker attempt.json "{\"job_id\": \"$job\", \"host\": \"$(hostname)\", \"nodes\": \"$step_nodes\", \"spares\": $(count_spares), \"time\": $(date +%s)}"
}

export_attempt() {
  export HPC_TRAIN_ATTEMPT="$attempt" HPC_TRAIN_RENDEZVOUS="$logs" HPC_TRAIN_NODES="$step_nodes"
}

# A node that dies does not end the job.
outlives_nodes() {
  [ "${hpc_spares:-0}" -gt 0 ] || [ "${hpc_elastic:-false}" = true ] || [ "${hpc_losses:-false}" = true ]
}

# choose_nodes FILE: where the ranks start; sets `step_nodes`, and `step`, srun's options for that. A job that outlives
# its nodes may have more or fewer of them than the run: FILE names those to take, else they are the first ones.
choose_nodes() {
  local count
  step_nodes="$SLURM_JOB_NODELIST" step=()
  outlives_nodes || return 0
  step_nodes="$(cat "$1" 2>/dev/null)"
  [ -n "$step_nodes" ] || step_nodes="$(scontrol show hostnames "$SLURM_JOB_NODELIST" |
    grep -vxF -f <(tr ' ' '\n' <<<"$lost_nodes") | head -n "$hpc_nodes" | paste -sd ,)"
  count="$(tr ',' '\n' <<<"$step_nodes" | wc -l)"
  step=("--nodes=$count" "--ntasks=$((hpc_ranks * count / hpc_nodes))" "--nodelist=$step_nodes")
}

begin_run() {
  choose_nodes /dev/null
  make_attempt
  trap 'write_result $?; end_guards' EXIT
  pass_stop_signals_on
  mark_started
  export_attempt
  start_listener
  start_guards
}

# --- modules, code

# The code of the job comes before all that modules and the user's set-up have added.
prepend_python_path() {
  [ -z "$hpc_python_path" ] || export PYTHONPATH="$hpc_python_path${PYTHONPATH:+:$PYTHONPATH}"
}

# format_reason MESSAGE: only characters that a JSON string and a status line can hold are kept.
format_reason() {
  tr -s '[:space:]' ' ' <<<"$1" | tr -cd 'A-Za-z0-9 ._/:,()+@=-' | cut -c 1-300
}

# refuse_module WHAT MESSAGE
refuse_module() {
  why="$1: $(format_reason "$2")" doing=""
  echo "hpc-train: $why"
  exit "$exit_no_requeue"
}

# Batch scripts are no login shells: `module` may have to be defined first.
define_module_command() {
  local init
  type module >/dev/null 2>&1 && return
  for init in "$LMOD_PKG/init/bash" "$MODULESHOME/init/bash" /etc/profile.d/{lmod,z00_lmod,modules}.sh \
    /usr/share/lmod/{lmod,*}/init/bash /usr/share/{modules,Modules}/init/bash /opt/cray/pe/lmod/lmod/init/bash; do
    # shellcheck source=/dev/null
    [ ! -r "$init" ] || . "$init" >/dev/null 2>&1
    type module >/dev/null 2>&1 && return
  done
  refuse_module cluster.modules "neither Lmod nor Environment Modules is on $(hostname)"
}

use_module_path() {
  [ -d "$1" ] || refuse_module "cluster.module_path" "$1 is not there on $(hostname)"
  module use "$1"
}

is_loaded() {
  module is-loaded "$1" >/dev/null 2>&1 && return
  case ":$LOADEDMODULES:" in *":$1:"* | *":$1/"*) ;; *) return 1 ;; esac
}

load_module() {
  local output="$logs/.module" before="$LOADEDMODULES"
  module load "$1" >"$output" 2>&1 || refuse_module "cluster.modules: $1 cannot be loaded" "$(cat "$output")"
  cat "$output"
  if is_loaded "$1"; then
    loaded+=("$1")
  elif [ "$before" = "$LOADEDMODULES" ]; then # an alias is loaded under another name: the list has changed
    refuse_module "cluster.modules: $1 was not loaded" "$(cat "$output")"
  fi
  rm -f "$output"
}

# Load the modules of the job, and end the attempt with 93 where one is missing.
load_modules() {
  local name
  [ "${#hpc_modules[@]}${#hpc_module_path[@]}$hpc_module_purge" != 00false ] || return 0
  loaded=()
  define_module_command
  [ "$hpc_module_purge" != true ] || module purge
  for name in "${hpc_module_path[@]}"; do use_module_path "$name"; done
  for name in "${hpc_modules[@]}"; do load_module "$name"; done
  for name in "${loaded[@]}"; do
    is_loaded "$name" || refuse_module "cluster.modules: $name" "a later one of the list has unloaded it"
  done
  module -t list >"$logs/modules.txt" 2>&1
}

# Charliecloud refuses to start without USER.
find_charliecloud() {
  command -v ch-run >/dev/null || refuse_container "ch-run is not on the PATH of $(hostname)"
  export USER="${USER:-$(id -un)}"
}

# make_bind_places IMAGE SOURCE DESTINATION ...: Charliecloud binds only onto what is there in the image's folder.
make_bind_places() {
  local image="$1" source place
  shift
  while [ "$#" -gt 0 ]; do
    source="$1" place="$image$2"
    shift 2
    if [ -e "$place" ]; then continue; fi
    mkdir -p "$(dirname "$place")" 2>/dev/null || true
    if [ -d "$source" ]; then mkdir "$place" 2>/dev/null || true; else touch "$place" 2>/dev/null || true; fi
    [ -e "$place" ] || refuse_container "there is no ${place#"$image"} in $image to bind to, and you may not make it"
  done
}

refuse_container() {
  why="container: $1"
  refuse "$why"
}

# --- the ranks, and how they ended

# run_ranks SRUN OPTION...: nothing starts in a job that was cancelled or asked to stop by then.
run_ranks() {
  local ranks watcher code
  set -- "$1" "${step[@]}" "${@:2}"
  doing=""
  [ ! -e "$run/logs/cancel-$job" ] || return "$exit_requeue"
  if is_stop_asked; then
    why="asked to stop before the ranks had started"
    { : >"$logs/requeue"; } 2>/dev/null
    return "$exit_requeue"
  fi
  "$@" 2>"$logs/srun.err" & # a shell that waits for a command in the foreground runs no trap
  ranks=$!
  if [ "${#hpc_watch[@]}" -eq 0 ]; then
    wait_for "$ranks"
    return
  fi
  keep_watching "$ranks" >"$logs/watch.log" 2>&1 &
  watcher=$!
  wait_for "$watcher"
  if [ -e "$logs/left-srun" ]; then
    left_sruns+=("$ranks $logs")
    [ ! -e "$logs/done" ] || grep -qE "$srun_task_error" "$logs/srun.err" || return 0 # srun has missed a good end
    return 137
  fi
  wait_for "$ranks"
}

# end_left_sruns: before the job ends or is requeued. A slurmstepd that has not yet told its srun how a rank ended goes on
# trying if that was killed, and Slurm may then drain its node ("Kill task failed"). So srun gets some seconds to hear of
# it, unless a node is lost, whose slurmstepd will never report.
end_left_sruns() {
  local left srun second
  for left in "${left_sruns[@]}"; do
    srun="${left%% *}"
    for ((second = 0; second < 15; second++)); do
      ! is_own_job "$srun" && continue 2
      [ ! -e "${left#* }/lost-nodes" ] || break
      sleep 1
    done
    kill -KILL "$srun" 2>/dev/null
  done
}

# is_own_job PROCESS: whether it was started by this shell and has not ended. Its number may be another process's by now.
is_own_job() {
  jobs -pr | grep -qx "$1"
}

# keep_watching RANKS: the supervisor is started again where it has ended before the ranks, after a pause that grows.
keep_watching() {
  local pause=1 second watcher guard code
  outlive_stop_signals
  while kill -0 "$1" 2>/dev/null; do
    "${hpc_watch[@]}" "$logs" "$1" $$ "$stop_record" &
    watcher=$!
    end_if_stopped "$watcher" &
    guard=$!
    wait_for "$watcher" && code=0 || code=$?
    kill "$guard" 2>/dev/null
    [ "$code" -ne 0 ] || return 0
    for ((second = 0; second < pause; second++)); do
      kill -0 "$1" 2>/dev/null || return 0
      sleep 1
    done
    pause=$((pause < 16 ? 2 * pause : 30))
  done
}

# end_if_stopped PROCESS: kill it where it is stopped for ten seconds, by SIGSTOP or a debugger: it would watch nobody.
end_if_stopped() {
  local line state stopped=0
  while sleep 5 && read -r line 2>/dev/null <"/proc/$1/stat"; do
    state="${line##*) }"
    case "$state" in
      [Tt]*) stopped=$((stopped + 1)) ;;
      *) stopped=0 ;;
    esac
    [ "$stopped" -lt 2 ] || kill -KILL "$1"
  done
}

# wait_for PROCESS: a signal ends `wait`, not the process that it waits for.
wait_for() {
  local code
  while :; do
    wait "$1"
    code=$?
    if [ "$code" -le 128 ] || ! kill -0 "$1" 2>/dev/null; then break; fi
  done
  # The signal may have come just before the end: bash remembers how a process ended.
  [ "$code" -le 128 ] || { wait "$1" && code=0 || code=$?; }
  return "$code"
}

# Print the nodes of the job that do not answer, separated by spaces; also those that the ranks were not on.
find_lost_nodes() {
  { cat "$logs/lost-nodes" 2>/dev/null
    list_down_nodes "$SLURM_JOB_NODELIST"
    list_unreachable_nodes
    ! outlives_nodes || list_taken_nodes "$SLURM_JOB_NODELIST"
  } | sort -u | paste -sd ' '
}

# select_step_nodes NODES: those that the ranks were on. Both are names separated by spaces, or by commas.
select_step_nodes() {
  outlives_nodes || { echo "$1"; return; }
  tr ' ' '\n' <<<"$1" | grep -xF -f <(tr , '\n' <<<"$step_nodes")
}

# Print the nodes on which srun could not start the ranks: Slurm may take SlurmdTimeout to find out that they are dead.
list_unreachable_nodes() {
  sed -nE 's/^srun: error: Task launch for .* failed on node ([^ :]+): (Communication|Socket|Unable to contact).*/\1/p' \
    "$logs/srun.err" 2>/dev/null
}

# list_taken_nodes NODES: those that Slurm has taken from the job. They may be up again by now.
list_taken_nodes() {
  local left
  left="$(squeue -h -j "$job" -o %N)"
  [ -z "$left" ] || comm -23 <(scontrol show hostnames "$1" | sort) <(scontrol show hostnames "$left" | sort)
}

# failed_while_stopping CODE: whether a task has failed though the ranks stopped on purpose. srun's exit code is the highest
# of its tasks, so that it may hide one that exited with less than the others.
failed_while_stopping() {
  ! stopped_early "$1" || return 1
  [ "$1" -eq "$exit_requeue" ] || return 0
  grep -E "$srun_task_error" "$logs/srun.err" 2>/dev/null |
    grep -qvE 'Exited with exit code ('"$exit_requeue|$stopped_early_usr2|$stopped_early_term"')$|: (Terminated|User defined)'
}

# Whether srun got SIGTERM, as by `scancel --full --signal=TERM`: it kills the ranks then, none of which is to blame.
srun_was_stopped() {
  local before
  before="$(sed '/^srun: forcing job termination/q' "$logs/srun.err" 2>/dev/null)"
  [[ "$before" = *"srun: forcing job termination" ]] && ! grep -qE "$srun_task_error" <<<"$before"
}

# Whether a rank of the attempt has begun. slurmstepd may end the others with any exit code at a signal.
has_begun() {
  compgen -G "$logs/task-*.log" >/dev/null
}

# settle_losses: srun's exit code is that of a task without which the others have gone on, to their end or a stop.
settle_losses() {
  [ -e "$logs/loss-allowed" ] || return 0
  [ ! -e "$logs/requeue" ] || code="$exit_requeue"
  [ ! -e "$logs/done" ] || code=0
}

# settle_attempt CODE: find out how an attempt ended and write it down; sets `code`, and `requeue` for the job's end.
settle_attempt() {
  local lost="" culprits fault=1
  code="$1" requeue=""
  settle_losses
  # srun returns 0, too, when it gave up waiting for a step that was ended from outside.
  [ "$code" -ne 0 ] || [ -e "$logs/done" ] || { code=1 why="the ranks were ended before they were done"; }
  if [ -e "$logs/requeue" ] || stopped_early "$code"; then
    why="${why:-the ranks stopped on purpose}" stopped=1
    { [ ! -e "$logs/loss-allowed" ] && failed_while_stopping "$code"; } || fault=""
  elif [ "$code" -ne 0 ] && srun_was_stopped; then
    why="srun was asked to stop by SIGTERM, and has killed the ranks" stopped=1 fault=""
  elif [ "$code" -ne 0 ] && is_stop_asked && ! has_begun; then
    why="asked to stop before the ranks had started" stopped=1 fault=""
  fi
  [ "$code" -ne 0 ] || fault=""
  if [ -n "$fault" ]; then
    lost="$(find_lost_nodes)"
    culprits="$(select_step_nodes "$lost")"
    if [ -n "$culprits" ]; then
      why="${why:-a node of the job does not answer}" stopped=1
      # Also where Slurm has noticed, and ended the ranks: none of them is to blame.
      { tr ' ' '\n' <<<"$culprits" >"$logs/lost-nodes"; } 2>/dev/null
    fi
  fi
  [ "$code" -eq 0 ] || state="$(read_job_state)"
  if [ "$code" -ne 0 ] && [ -e "$run/logs/cancel-$job" ]; then
    why="stopped by hpc-train cancel" next=cancel
  elif [ "$code" -ne 0 ] && [ "${state%% *}" = RUNNING ]; then
    if [ "${#hpc_restart[@]}" -gt 0 ] && [ -n "$fault" ]; then
      decide_after_fault "$lost"
    elif [ -n "$stopped" ]; then
      continue_after_stop
    fi
  fi
  write_result "$code"
  report_end
}

# report_end: say why the ranks have failed. Those that start again do not wait for that.
report_end() {
  local report=("${hpc_report[@]}" "$run" "$attempt" "$code" "$requeue")
  [ "$code" -ne 0 ] || return 0
  if [ "$next" = restart ]; then
    "${report[@]}" &
  else
    "${report[@]}"
  fi
}

# decide_after_fault LOST: start again in this job, go back to the queue without the nodes that are to blame, or end. Ranks
# that were to stop do not start again, also if they fail before they have agreed on that, or if the signal comes now.
decide_after_fault() {
  ! is_stop_asked || { : >"$logs/stop-asked"; } 2>/dev/null
  lost_nodes="$(tr -s ' ' '\n' <<<"$lost_nodes $1" | sed '/^$/d' | sort -u | paste -sd ' ')"
  decide "$lost_nodes"
  case $? in
    0) if is_stop_asked; then stopped=1 why="asked to stop"; else next=restart; fi ;;
    "$exit_requeue") stopped=1 why="${why:-$(read_decision)}" ;;
    "$exit_no_requeue") code="$exit_no_requeue" why="$(read_decision)" stopped="" ;;
    *) ;; # a node that is lost has nothing to do with the program, also where nobody can decide
  esac
  [ -n "$next" ] || [ -z "$stopped" ] || continue_after_stop
}

# Print why, in characters that a JSON string can hold.
read_decision() {
  tr -cd 'A-Za-z0-9 ._/:;,()+@=#-' <"$logs/decision" | cut -c 1-300
}

# wait_until_writable: where nothing can be made in the run directory, as on a file system that is read-only or away for a
# minute, neither a decision nor another attempt could be recorded, and the run would end. A full disk is no reason to wait.
wait_until_writable() {
  local error end=$(($(read_uptime) + slurm_patience))
  while [ "$(read_uptime)" -lt "$end" ]; do
    rmdir "$logs/.probe" 2>/dev/null # of a script that was killed here
    error="$(LC_ALL=C mkdir "$logs/.probe" 2>&1)" && { rmdir "$logs/.probe"; return 0; }
    ! grep -qiE 'no space left|quota|file exists' <<<"$error" || return 0
    sleep "$probe_pause"
  done
}

# decide LOST: run the command that decides, and again if it was killed, as where the memory of this node is short, or ended
# without a decision, as where the file system did not answer for a moment. It exits with 1 to end the run, as with an error.
decide() {
  local answer pause
  wait_until_writable
  for pause in 0 1 5; do
    sleep "$pause"
    rm -f "$logs/decision"
    "${hpc_restart[@]}" "$run" "$attempt" "$code" "$1"
    answer=$?
    case $answer in
      0 | "$exit_requeue" | "$exit_no_requeue") break ;;
      1) [ ! -e "$logs/decision" ] || break ;;
    esac
  done
  return "$answer"
}

# The next job of the chain goes on, or else this one.
continue_after_stop() {
  if [ "$hpc_chain" -gt 1 ]; then
    next=chain
  elif may_run_again; then
    requeue="$why" next=requeue
  else
    why="launch.max_attempts=$hpc_max_attempts"
    echo "not requeued: $why"
  fi
}

# restart_ranks: the next attempt, in the same allocation.
restart_ranks() {
  doing="" why="" next="" state="" stopped=""
  choose_nodes "$logs/next-nodes"
  # As far as Slurm knows, the step before has its CPUs and memory until a node that does not answer is given up.
  step+=(--overlap --mem=0)
  make_attempt
  mark_started
  export_attempt
  start_ranks
}

# fit_requeue: where ranks stopped on purpose, nobody has decided about nodes. Those with strikes of earlier attempts are
# left out, those whose strikes have expired no more. It has to be quick, so that the requeue comes before the time limit.
fit_requeue() {
  [ ! -e "$logs/exclude" ] && [ -s "$run/nodes.jsonl" ] && [ "${#hpc_fit[@]}" -gt 0 ] || return 0
  timeout 5 "${hpc_fit[@]}" "$logs"
}

# list_changes: what is to change of the jobs that go on with the run, in `changes`: nodes to leave out, and how many to ask
# for.
list_changes() {
  local exclude count
  changes=()
  fit_requeue
  [ -s "$logs/exclude" ] || return 0
  exclude="${hpc_exclude:+$hpc_exclude,}$(cat "$logs/exclude")"
  changes+=("ExcNodeList=${exclude%,}")
  count="$(cat "$logs/requeue-nodes" 2>/dev/null)"
  [ -z "$count" ] || changes+=("NumNodes=$count" "NumTasks=$((hpc_ranks * count / hpc_nodes))")
}

# Back to the queue, with what a decision wants changed. Slurm ends the job step of this script by SIGTERM, which a command
# that it starts must not die of; it takes another list of nodes as soon as the job no longer runs.
requeue_job() {
  list_changes
  trap '' TERM USR2
  ask_slurm scontrol requeue "$job"
  change_job || echo "hpc-train: the job could not be changed: ${changes[*]}"
}

# change_requeued_job: as above, of a job that Slurm itself puts back into the queue, as after preemption. Slurm gives no
# reason for that, nor for a job that was cancelled, which takes no change.
change_requeued_job() {
  [ "$state" = "COMPLETING None" ] && [ ! -e "$run/logs/cancel-$job" ] && [ -s "$run/nodes.jsonl" ] || return 0
  trap '' TERM USR2
  list_changes
  change_job || true
}

# change_job: make the `changes` of this job, as soon as Slurm takes them.
change_job() {
  local error
  [ "${#changes[@]}" -gt 0 ] || return 0
  for _ in {1..50}; do
    { error="$(LC_ALL=C scontrol update jobid="$job" "${changes[@]}" 2>&1 1>&3 3>&-)" && return; } 3>&1
    ! grep -qi 'already finished' <<<"$error" || break # it was cancelled
    sleep 0.1
  done
  return 1
}

# The jobs that wait to go on with the run leave out what this one would.
change_chain() {
  local waiting
  list_changes
  [ "${#changes[@]}" -gt 0 ] || return 0
  for waiting in $(squeue -h -t PENDING -u "$(id -un)" -n "$SLURM_JOB_NAME" -o %i); do
    scontrol update jobid="$waiting" "${changes[@]}" || echo "hpc-train: job $waiting could not be changed: ${changes[*]}"
  done
}

# finish_run CODE: the end of a script that has one run.
finish_run() {
  settle_attempt "$1"
  while [ "$next" = restart ]; do
    restart_ranks
    settle_attempt $?
  done
  [ "$next" != chain ] || change_chain
  change_requeued_job
  # The jobs that wait to go on with a run that is over, however it ended, have nothing to do.
  if [ "$hpc_chain" -gt 1 ] && [ "$next" != chain ]; then
    scancel --quiet --state=PENDING --user="$(id -un)" --jobname="$SLURM_JOB_NAME"
  fi
  end_left_sruns
  [ -z "$requeue" ] || requeue_job
  [ "$next" != cancel ] || scancel "$job"
  exit "$code"
}

# --- arrays

# enter_point POINT: nothing is made where the sweep's directory cannot be seen, which make_attempt then says.
enter_point() {
  run="$sweep/points/$1"
  # shellcheck disable=SC2174 # -m is meant for the last folder alone: those above it are there
  [ ! -d "$sweep/points" ] || { mkdir -p -m 700 "$run" && mkdir -p "$run/logs"; }
}

# freeze_points POINT...: their job.json and config.yaml, from the frozen ones of the sweep.
freeze_points() {
  doing="the reading of points.jsonl"
  "${hpc_begin_points[@]}" "$sweep" "$@" || exit $?
  doing=""
}

newest_attempt() {
  find "$run/logs" -mindepth 1 -maxdepth 1 -printf '%f\n' 2>/dev/null | grep -Ex "[0-9]+" | sort -n | tail -n 1
}

# Whether this job has brought the point to its end before: it was requeued for the other points of the job.
point_is_over() {
  local last
  last="$(newest_attempt)"
  [ -n "$last" ] && grep -q "\"job_id\": \"$job\"" "$run/logs/$last/attempt.json" 2>/dev/null || return 1
  [ -e "$run/logs/$last/result.json" ] && ! grep -q '"then": "requeue"' "$run/logs/$last/result.json"
}

# for_each_attempt COMMAND...: with `run`, `attempt` and `logs` of every point that begins now, one after the other.
for_each_attempt() {
  local index
  for index in "${!begun[@]}"; do
    run="${begun[index]}" attempt="${attempts[index]}"
    logs="$run/logs/$attempt"
    "$@"
  done
}

# begin_points POINT...: those that are not over; the script ends where there is none.
begin_points() {
  local point
  choose_nodes /dev/null
  runs=() open=() begun=() attempts=()
  for point in "$@"; do
    enter_point "$point"
    runs+=("$run")
    point_is_over && continue
    make_attempt
    mark_started
    open+=("$point") begun+=("$run") attempts+=("$attempt")
  done
  trap 'code=$?; for_each_attempt write_result "$code"' EXIT
  pass_stop_signals_on
  [ "${#open[@]}" -gt 0 ] || finish_points
}

# run_points: each as a job step of its own, beside the others.
run_points() {
  local index
  cpus=$((${SLURM_CPUS_ON_NODE:-1} / hpc_ranks_per_node))
  [ "$cpus" -gt 0 ] || cpus=1
  job_cpus="$(sed -n "s/^Cpus_allowed_list:[[:space:]]*//p" /proc/self/status)"
  for index in "${!open[@]}"; do run_point "$index" & done
  until wait; do [ $? -gt 128 ] || break; done # a signal ends `wait`, not those it waits for
}

# run_point INDEX: one point, in a shell of its own. start_ranks, in the script, calls run_ranks.
run_point() (
  outlive_stop_signals
  point="${open[$1]}" run="${begun[$1]}" attempt="${attempts[$1]}"
  logs="$run/logs/$attempt"
  trap 'write_result $?' EXIT
  export_attempt
  export HPC_TRAIN_SHARE="$1/$hpc_points_per_job/$job_cpus"
  start_ranks
  settle_attempt $?
  end_left_sruns
  exit "$code"
)

# One requeue if any of the points has to go on; the exit code of the first that did not end well.
finish_points() {
  local code_of_point
  code=0 requeue=""
  for run in "${runs[@]}"; do
    logs="$run/logs/$(newest_attempt)"
    code_of_point="$(sed -n 's/.*"exit_code": \([0-9]*\).*/\1/p' "$logs/result.json" 2>/dev/null)"
    [ "$code" -ne 0 ] || code="${code_of_point:-1}"
    ! grep -q '"then": "requeue"' "$logs/result.json" 2>/dev/null || requeue=1
  done
  [ -z "$requeue" ] || ask_slurm scontrol requeue "$job"
  exit "$code"
}
