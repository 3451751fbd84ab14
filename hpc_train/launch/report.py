"""What a batch script runs when its ranks did not end well: record it, and tell why, in the job's own log."""

from __future__ import annotations

import sys
from pathlib import Path

from hpc_train.errors import EXIT_REQUEUE
from hpc_train.launch.failures import first_error
from hpc_train.launch.state.attempts import read_attempt
from hpc_train.training.records import add_event


def main(run_dir: str, attempt: str, code: str, requeue: str) -> int:
    """Append a requeue or a failure event and print the first failure.

    code: srun's exit code. requeue: why the job is requeued; empty if it is not.
    """
    run = Path(run_dir)
    logs = run / "logs" / attempt
    if requeue:
        add_event(run / "events.jsonl", "requeue", int(attempt), exit_code=int(code), why=requeue)
        print(f"requeued: {requeue}", flush=True)
    elif int(code) != EXIT_REQUEUE:
        error = first_error(logs)
        why = error.text if error else _unexplained(logs, code)
        line = error.line if error else why
        add_event(run / "events.jsonl", "failure", int(attempt), exit_code=int(code), why=line)
        print(f"hpc-train: {why}", flush=True)
    return 0


def _unexplained(logs: Path, code: str) -> str:
    """What the batch script knows itself, where no rank left a word."""
    result = read_attempt(logs).result
    return result.why if result and result.why else f"the ranks exited with {code} and left no reason; see {logs}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5]))
