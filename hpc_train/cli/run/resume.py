"""`hpc-train resume RUN`: run again what a run or a sweep lacks, and print its new jobs."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.cli.output import TERMINAL, print_json
from hpc_train.errors import EXIT_DONE
from hpc_train.launch.resume import READ_ONLY, Resubmission, ResumeCandidate, read_candidates, resume_runs
from hpc_train.runtime.stop_request import StopRequest


def resume_command(target: str, mode: str, as_json: bool, stop: StopRequest) -> int:
    """Resume a run, a sweep, or a job, and return the exit code; in mode read-only, print what retry would do."""
    if mode == READ_ONLY:
        _print_candidates(read_candidates(target, mode), as_json)
        return EXIT_DONE
    return resume_runs(target, mode, stop, TERMINAL, _print_submission_as_json if as_json else _print_submission)


def _print_submission(submission: Resubmission) -> None:
    for line in submission.lines:
        print(line)


def _print_submission_as_json(submission: Resubmission) -> None:
    print_json({"points": submission.points, "jobs": submission.jobs})


def _print_candidates(candidates: Sequence[ResumeCandidate], as_json: bool) -> None:
    if as_json:
        print_json([candidate.row() for candidate in candidates])
        return
    for candidate in candidates:
        verdict = "would run again" if candidate.again else "left alone"
        print(f"{candidate.status.point}: {candidate.status.state}, {verdict}")
    print(f"{sum(candidate.again for candidate in candidates)} of {len(candidates)} would run again")
