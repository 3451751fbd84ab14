"""What a batch script runs when its ranks did not end well: record it, and tell why, in the job's own log."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hpc_train.errors import EXIT_REQUEUE
from hpc_train.training.failure import first_failure
from hpc_train.training.records import add_event

_SRUN_LINE = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
_DEADLY = ("Killed", "Segmentation fault", "Bus error", "Illegal instruction", "Out Of Memory")


def main(run_dir: str, attempt: str, code: str, requeue: str) -> int:
    """Append a requeue or a failure event and print the first failure.

    code: srun's exit code. requeue: why the job is requeued; empty if it is not.
    """
    run = Path(run_dir)
    logs = run / "logs" / attempt
    failure = first_failure(logs)
    why = killed_by(logs / "srun.err") if failure is None or failure.lost_peer else None
    if why is None and failure is not None:
        why = failure.text()
    if requeue:
        add_event(run / "events.jsonl", "requeue", int(attempt), exit_code=int(code), why=requeue)
        print(f"requeued: {requeue}", flush=True)
    elif int(code) != EXIT_REQUEUE:
        why = why or f"the ranks exited with {code} and left no reason; see {logs}"
        add_event(run / "events.jsonl", "failure", int(attempt), exit_code=int(code), why=why.splitlines()[0])
        print(f"hpc-train: {why}", flush=True)
    return 0


def killed_by(srun_errors: Path) -> str | None:
    """The first task that a signal ended, as srun reports it, with no word of its own: the one that its peers lost."""
    text = srun_errors.read_text(errors="replace") if srun_errors.exists() else ""
    for line in _SRUN_LINE.finditer(text):
        task = re.split("[,-]", line["tasks"])[0]
        if line["how"].startswith(_DEADLY) and not (srun_errors.parent / f"task-{task}.failure.json").exists():
            return f"task {line['tasks']} on {line['host']} was ended from outside: {line['how']}"
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5]))
