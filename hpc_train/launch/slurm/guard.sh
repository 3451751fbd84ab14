# shellcheck shell=bash
# The guards of a job that outlives its nodes: a process on each of up to two other nodes than the batch script's, for as
# long as the script runs. If the script's node is lost, they give the job back to the queue; Slurm would leave it running,
# without any process, up to its time limit. Agents do the same, but only while there are ranks. The setting:
#   hpc_guard   command that requeues the job if Slurm has taken the script's node from it, and exits with 75 then; its
#               argument is the log directory of the attempt. Empty: no guards
# shellcheck disable=SC2154

# Seconds between two signs of life of the script, and of silence after which a guard asks Slurm.
guard_ping_seconds=3 guard_silent_seconds=10
# Processes of this node that send the signs of life, and that keep the guards and the listener (stop_listener.sh).
guard_pings=() guard_keepers=()

# start_guards: on the last nodes, as spare ones are.
start_guards() {
  local host
  [ "${#hpc_guard[@]}" -gt 0 ] && outlives_nodes || return 0
  for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxF "$SLURMD_NODENAME" | tail -n 2); do
    run_beside_script keep_guard "$host"
  done
}

# run_beside_script COMMAND...: in the background, with the signs of life of this script as its input, until end_guards.
run_beside_script() {
  local pipe
  pipe="$(mktemp -d)/pipe"
  mkfifo "$pipe" || return 0
  "$@" <"$pipe" >/dev/null 2>&1 &
  guard_keepers+=("$!")
  send_guard_pings "${pipe%/*}" >"$pipe" 2>/dev/null &
  guard_pings+=("$!")
  disown "$!" # so that bash does not report its end
}

# send_guard_pings FOLDER: of the pipe, whose name nobody needs any more now that both of its ends are open. A script that
# was killed sends none: Slurm may leave this process alone until KillWait is over.
send_guard_pings() {
  trap '' TERM USR1 USR2
  rm -r "$1"
  while kill -0 $$ && echo; do sleep "$guard_ping_seconds" >/dev/null; done
}

# keep_guard HOST: a guard there, and another one a minute after it has failed. It ends with the signs of life.
keep_guard() {
  local program
  trap '' TERM USR2
  program="$(declare -f newest_attempt guard_job)"
  program+="; job=$job exit_requeue=$exit_requeue guard_silent_seconds=$guard_silent_seconds run=$(printf %q "$run")"
  program+='; guard_job "$@"'
  [ -z "$hpc_python_path" ] || export PYTHONPATH="$hpc_python_path${PYTHONPATH:+:$PYTHONPATH}"
  keep_step "$1" guard --output=none --error=none bash -c "$program" guard "${hpc_guard[@]}"
}

# keep_step HOST NAME SRUN OPTION OR WORD...: a job step of one task there, which takes nothing from the ranks, and another
# one a minute after it has failed.
keep_step() {
  local ping options
  options=(--overlap --nodes=1 --ntasks=1 "--nodelist=$1" --cpus-per-task=1 --mem=0 --mpi=none --cpu-bind=none)
  options+=("--job-name=$2")
  # Else srun would take these for options of the ranks' step.
  unset "${!SLURM_CPUS@}" "${!SLURM_NTASKS@}" "${!SLURM_DIST@}" SLURM_HOSTFILE
  until srun "${options[@]}" "${@:3}"; do
    for ((ping = 0; ping < 20; ping++)); do read -r || return 0; done
  done
}

# guard_job COMMAND...: the guard itself; reads signs of life.
guard_job() {
  local code
  trap '' TERM USR1 USR2
  while :; do
    read -r -t "$guard_silent_seconds" && continue
    code=$?
    [ "$code" -gt 128 ] || return 0 # the script has ended the guard
    case "$(squeue -h -j "$job" -o %T)" in
      RUNNING | SIGNALING)
        "$@" "$run/logs/$(newest_attempt)"
        [ "$?" -ne "$exit_requeue" ] || return 0
        ;;
      SUSPENDED | STOPPED | CONFIGURING | "") ;;
      # The job has ended, and would wait for the guard up to KillWait. It gives back one node after the other, also that
      # of a script that was killed.
      *) return 0 ;;
    esac
  done
}

# end_guards: before the script ends. A slurmstepd whose srun is killed first goes on trying to reach it for a minute.
end_guards() {
  local keeper tenth
  [ "${#guard_pings[@]}" -gt 0 ] || return 0
  kill -KILL "${guard_pings[@]}" 2>/dev/null || :
  for keeper in "${guard_keepers[@]}"; do
    for ((tenth = 0; tenth < 30; tenth++)); do
      is_own_job "$keeper" || break
      sleep 0.1
    done
  done
}
