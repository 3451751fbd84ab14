# shellcheck shell=bash
# The shell functions of every batch script, of runs (batch.sh) and of callables (callables.sh): which job this is, and
# what is to become of it. The settings that they read:
#   hpc_max_attempts   runs of the job, counting those after a requeue
#   hpc_threads        CPU threads of a rank; empty: its CPUs
# shellcheck disable=SC2034,SC2154

exit_requeue=75 exit_no_requeue=93
# A task that a stop signal (USR2, TERM) ended before its handler was installed; Slurm's own rules do not requeue it.
stopped_early_usr2=140 stopped_early_term=143
# Seconds for which a controller of Slurm that does not answer is asked again.
slurm_patience=900

job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}"
job="${job:-$SLURM_JOB_ID}"
# Whether this script was asked to stop, by a signal that came to it alone or to all processes of the job.
stop_asked=""
# Names a step that ends the script where it fails.
doing=""

refuse() {
  echo "$1"
  exit "$exit_no_requeue"
}

# Ranks that all take every core of a node slow each other down by an order of magnitude.
set_threads() {
  export OMP_NUM_THREADS="${hpc_threads:-${SLURM_CPUS_PER_TASK:-1}}"
}

# The ranks save and stop at these signals; this shell has to outlive them to requeue the job.
outlive_stop_signals() {
  trap : TERM USR2
}

# pass_stop_signals_on: the same, for a signal that came to the batch script alone, as by `scancel --batch`.
pass_stop_signals_on() {
  trap 'record_stop; ask_ranks_to_stop >/dev/null 2>&1 &' TERM USR2
}

# ask_ranks_to_stop: by the signal that Slurm sends before a time limit. Where Slurm itself ends the job or requeues it, all
# ranks have had a signal. scancel would then try again after 5 s, and for a minute and a half, and could meet the ranks of
# the job that has come back.
ask_ranks_to_stop() {
  [ "$(squeue -h -j "$job" -o %T | as_running)" = RUNNING ] && timeout 5 scancel --quiet --signal=USR2 "$job"
}

# stopped_early CODE: whether a stop signal ended a task before its handler was installed.
stopped_early() {
  [ "$1" -eq "$stopped_early_usr2" ] || [ "$1" -eq "$stopped_early_term" ]
}

# list_down_nodes NODES: those that do not answer, a line each. Slurm itself requeues a job whose node dies, but only
# after SlurmdTimeout (300 s by default); the ranks on the other nodes fail long before that.
list_down_nodes() {
  sinfo -h -N -n "$1" -o '%N %T' | awk '$2 ~ /[*]|^down|^fail/ { print $1 }'
}

# Print for how many seconds this node has been up. SECONDS of the shell jumps where the clock of the node is set.
read_uptime() {
  local seconds
  read -r seconds _ </proc/uptime
  echo "${seconds%.*}"
}

# ask_slurm COMMAND...: once more every few seconds while the controller does not answer. It may be restarted at any time,
# and a job that takes its silence for an answer would end, where it only has to wait.
ask_slurm() {
  local error code end=$(($(read_uptime) + slurm_patience))
  while :; do
    code=0
    { error="$("$@" 2>&1 1>&3 3>&-)" || code=$?; } 3>&1
    if [ "$code" -eq 0 ] || [ "$(read_uptime)" -ge "$end" ]; then break; fi
    grep -qiE 'unable to contact slurm controller|timed out' <<<"$error" || break
    sleep 5
  done
  [ -z "$error" ] || printf '%s\n' "$error" >&2
  return "$code"
}

# Until all nodes have passed a signal on, which a lost one never does, a job that runs is SIGNALING.
as_running() {
  sed 's/^SIGNALING/RUNNING/'
}

# Print the state of this job, and Slurm's reason. A job that was cancelled, or is requeued by Slurm, gets the signals of
# a stop, too: it is no longer RUNNING.
read_job_state() {
  ask_slurm squeue -h -j "$job" -o '%T %r' | head -n 1 | as_running | tr -cd 'A-Za-z_ '
}

may_run_again() {
  [ "$((${SLURM_RESTART_COUNT:-0} + 1))" -lt "$hpc_max_attempts" ]
}
