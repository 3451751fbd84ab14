# shellcheck shell=bash
# Ranks in containers of Podman. This text stands in the scripts of such jobs only, behind that of batch.sh.
#   podman             array: the arguments of start_podman
# shellcheck disable=SC2154

# find_podman PYTHON: start a container as those of the ranks, which ends at once; sets `podman_task`, what bash runs as a
# task of Slurm.
find_podman() {
  local error
  command -v podman >/dev/null || refuse_container "podman is not on the PATH of $(hostname)"
  [ "$(id -u)" -ne 0 ] || refuse_container "podman would start the ranks of root outside of the job; submit as another user"
  error="$(HPC_TRAIN_RENDEZVOUS="" start_podman "${podman[@]}" "$1" -c "" 2>&1)" ||
    refuse_container "podman cannot start $1 on $(hostname): $(format_reason "$error")"
  podman_task="$(declare -f start_podman report_failure pass_signal keep_cgroups remove_store remove_old_stores wait_for)"
  # shellcheck disable=SC2034 # in the line of the ranks
  podman_task+=$'\nstart_podman "$@"'
}

# start_podman RUNTIME VARIABLE... -- WORD...: `podman run WORD...` without these variables, until it ends.
#
# Podman tells nothing to a container of what it is sent, and neither Podman nor what it leaves behind may get the signals
# that are meant for a rank: so it is in a session of its own, and its container's process gets them from here. It gets a
# store of its own, since the home directory may be of a kind that it cannot use, and a container that was killed leaves a
# state with which it does not start again. Its path has to be short.
start_podman() {
  local runtime="$1" store command container signal code
  shift
  while [ "$1" != -- ]; do unset "$1" && shift; done
  shift
  command -v podman >/dev/null || { report_failure "podman is not on the PATH of $(hostname)"; return 93; }
  remove_old_stores
  store="$(mktemp -d /tmp/hpc_train-podman-XXXXXXXX)" || return 93
  exec {lock}<"$store" && flock "$lock"
  export XDG_RUNTIME_DIR="$store"
  command=(podman --log-level=error --cgroup-manager=cgroupfs "--runtime=$runtime" "--root=$store/root" "--runroot=$store/run")
  for signal in HUP INT QUIT TERM USR1 USR2; do
    # shellcheck disable=SC2064 # the signal of this turn
    trap "pass_signal $signal &" "$signal"
  done
  setsid "${command[@]}" unshare bash -c "$(declare -f keep_cgroups)"$'\nkeep_cgroups; exec "$@"' bash \
    "${command[@]}" run --pidfile="$store/pid" "$@" &
  container=$!
  wait_for "$container" && code=0 || code=$?
  remove_store
  case $code in # Podman's own, which has said why
    125 | 126 | 127) report_failure "podman could not start it on $(hostname): see srun.log beside the log of the rank" ;;
  esac
  trap - HUP INT QUIT TERM USR1 USR2
  # srun is to hear of a signal, as of a rank outside of a container.
  [ "$code" -le 128 ] || { ulimit -c 0; kill -s "$((code - 128))" "$BASHPID"; }
  return "$code"
}

# report_failure MESSAGE: as a rank would (RankFailure), where this is one.
report_failure() {
  echo "hpc-train: container: $1" >&2
  [ -n "$HPC_TRAIN_RENDEZVOUS" ] || return 0
  printf '{"task": %d, "host": "%s", "at": %d, "user_error": true, "message": "container: %s", "traceback": ""}\n' \
    "$SLURM_PROCID" "$(hostname)" "$(date +%s)" "$1" >"$HPC_TRAIN_RENDEZVOUS/task-$SLURM_PROCID.failure.json"
}

# pass_signal SIGNAL: to the process in the container, once it is there.
pass_signal() {
  trap '' HUP INT QUIT TERM USR1 USR2
  until [ -s "$store/pid" ]; do
    kill -0 "$container" 2>/dev/null || return 0
    sleep 0.05
  done
  kill -s "$1" "$(cat "$store/pid")" 2>/dev/null
}

# keep_cgroups: the container stays in the cgroups of its rank, in all of which Slurm ends the processes of a job. In those
# of version 1 a user may make others below them, and there Slurm would not find it. crun refuses to start where both
# versions are mounted. Only Podman and the container see these mounts.
keep_cgroups() {
  local place type
  while read -r _ place type _; do
    case "$type $place" in
      "cgroup "*) mount -o remount,bind,ro "$place" ;;
      "cgroup2 "*/unified) mount -t tmpfs none "$place" ;;
    esac
  done </proc/mounts
}

# remove_store: also of the process that keeps Podman's namespaces. What Podman does last may still be going on.
remove_store() {
  kill "$(cat "$store/libpod/tmp/pause.pid" 2>/dev/null)" 2>/dev/null
  for _ in {1..20}; do
    rm -rf "$store" 2>/dev/null && return
    sleep 0.1
  done
}

# remove_old_stores: of containers that were killed, on this node.
remove_old_stores() {
  find /tmp -maxdepth 1 -name 'hpc_train-podman-*' -user "$UID" -mmin +60 \
    -exec flock --nonblock {} rm -rf {} ';' 2>/dev/null
}
