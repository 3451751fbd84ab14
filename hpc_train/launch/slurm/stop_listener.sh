# shellcheck shell=bash
# The listener of a job: a process on the node of the batch script, in a job step of its own for as long as the script runs.
# It hears the stop signals that Slurm sends to all steps of the job, as by `scancel --signal=TERM` or before a preemption.
# Ranks hear them, too, but not before they are there, nor between two attempts; and the script itself gets none of them.
# shellcheck disable=SC2034,SC2154

# Descriptor of a file of this node that has stop_word once the job was asked to stop. Nobody has to remove the file, as it
# has no name: the listener's srun and the supervisor get the descriptor.
stop_record=""
stop_word=hpc-train-stop

start_listener() {
  [ "${#hpc_watch[@]}" -gt 0 ] || return 0
  open_stop_record
  [ -z "$stop_record" ] || run_beside_script keep_listener
}

open_stop_record() {
  local file
  file="$(mktemp -p /dev/shm 2>/dev/null || mktemp)" || return 0
  exec {stop_record}<>"$file"
  rm -f "$file"
}

# record_stop: for this script, and for the supervisor.
record_stop() {
  stop_asked=1
  [ -z "$stop_record" ] || echo "$stop_word" >&"$stop_record"
}

# Whether the job was asked to stop, by a signal to its steps, or one that has come to this script.
is_stop_asked() {
  [ -n "$stop_asked" ] || { [ -n "$stop_record" ] && grep -qs "$stop_word" "/dev/fd/$stop_record"; }
}

keep_listener() {
  trap '' TERM USR2
  keep_step "$SLURMD_NODENAME" listener --unbuffered --error=none \
    bash -c "$(declare -f listen_for_stop); stop_word=$stop_word; listen_for_stop" >&"$stop_record"
}

# listen_for_stop: the listener itself; it reads the signs of life of the script, and ends with them.
listen_for_stop() {
  trap 'echo "$stop_word"' TERM USR2
  trap '' USR1 INT # meant for the ranks, as those that ask for their stacks
  while :; do
    read -r && continue
    [ "$?" -gt 128 ] || return 0 # else a signal has ended the read
  done
}
