# shellcheck shell=bash
# The shell functions of batch scripts whose ranks run Python functions (launch/callables). Their text stands whole in
# every submitted script, behind that of job.sh; callables/slurm_executor.py calls them. The settings, beside those of
# job.sh:
#   calls                where the pickles, results and logs of the jobs are
#   hpc_signal_seconds   seconds before the time limit at which the job is asked to stop
# shellcheck disable=SC2154

# begin_calls: before the ranks, what the worker has to know.
begin_calls() {
  [ -d "$calls" ] || refuse "hpc_train: $calls is not visible on $(hostname)"
  trap '[ -z "$doing" ] || echo "hpc_train: $doing failed"' EXIT
  outlive_stop_signals
  [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || echo "hpc_train: run $((SLURM_RESTART_COUNT + 1)) of job $job"
  export HPC_TRAIN_ELEMENT="${SLURM_ARRAY_TASK_ID:-0}" HPC_TRAIN_SIGNAL_SECONDS="$hpc_signal_seconds"
  export HPC_TRAIN_CALL="$calls/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}_submitted.pkl"
  set_threads
}

# Whether any rank has left a result.
has_result() {
  ls "$calls/${job}_"*"_result.pkl" >/dev/null 2>&1
}

# finish_calls CODE: requeue the job if its ranks stopped on purpose or lost a node, and end with their exit code.
finish_calls() {
  local code="$1" again=""
  # srun returns 0, too, when it gave up waiting for a step that was ended from outside.
  [ "$code" -ne 0 ] || has_result || code=1
  if [ -e "$calls/${job}_requeue" ] || { stopped_early "$code" && ! has_result; }; then
    rm -f "$calls/${job}_requeue"
    again="the ranks stopped on purpose"
  elif [ "$code" -ne 0 ] && ! has_result && [ -n "$(list_down_nodes "$SLURM_JOB_NODELIST")" ]; then
    again="a node of the job does not answer"
  fi
  [ -z "$again" ] || requeue_calls "$again"
  exit "$code"
}

# requeue_calls WHY
requeue_calls() {
  local state
  state="$(read_job_state)"
  [ "${state%% *}" = RUNNING ] || return 0
  if may_run_again; then
    echo "hpc_train: requeued: $1"
    ask_slurm scontrol requeue "$job"
  else
    echo "hpc_train: not run again: $hpc_max_attempts runs were allowed"
  fi
}
