"""`hpc-train submit`: submit a run or a sweep, and print its jobs or, for a dry run, their scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_train.cli.output import TERMINAL, print_json
from hpc_train.config.compose import compose
from hpc_train.launch.submit import Submission, submit_run
from hpc_train.launch.sweep.arrays import JobArray
from hpc_train.launch.sweep.submit_sweep import (
    SweepSubmission,
    describe_array,
    make_sbatch_array_options,
    render_array_script,
    submit_sweep,
)


def submit_command(
    overrides: Sequence[str], config_dir: str | None, dry_run: bool, as_json: bool, after: Sequence[str] = ()
) -> int:
    """Submit one run, or print what would be submitted, and return the exit code.

    after: runs that must have ended well before this one starts.
    """
    submission = submit_run(compose(overrides, config_dir), TERMINAL.report, after=after, dry_run=dry_run)
    run, ranks, jobs = str(submission.run_dir), submission.ranks, submission.jobs
    if dry_run:
        if as_json:
            print_json({"run_dir": run, "ranks": ranks, "script": submission.script})
        else:
            print(submission.script)
    elif as_json:
        print_json({"job_id": jobs[0], "run_dir": run, "ranks": ranks, **({"job_ids": jobs} if len(jobs) > 1 else {})})
    else:
        print(f"{_describe_jobs(submission)}, run directory {run}")
    return 0


def _describe_jobs(submission: Submission) -> str:
    jobs = submission.jobs
    name = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {', '.join(jobs)}, one after the other"
    return f"{name}: nodes {submission.nodes} x ranks {submission.ranks_per_node}"


def submit_sweep_command(
    overrides: Sequence[str], config_dir: str | None, dry_run: bool, as_json: bool, after: Sequence[str] = ()
) -> int:
    """Submit a sweep, or print what would be submitted, and return the exit code."""
    submission = submit_sweep(overrides, config_dir, TERMINAL.report, dry_run=dry_run, after=after)
    if dry_run:
        _print_scripts(submission, as_json)
    else:
        _print_jobs(submission, as_json)
    return 0


def _print_scripts(submission: SweepSubmission, as_json: bool) -> None:
    folder, arrays = submission.folder, submission.arrays
    names = [f"<job of array {index + 1}>" for index in range(len(arrays))]  # the ids are not known yet
    options = [make_sbatch_array_options(arrays, array, names) for array in arrays]
    if as_json:
        rows = [
            {**_make_array_row(array), "sbatch": words, "script": render_array_script(folder, array)}
            for array, words in zip(arrays, options, strict=True)
        ]
        print_json({"run_dir": str(folder.path), "arrays": rows})
        return
    for index, (array, words) in enumerate(zip(arrays, options, strict=True)):
        print(f"# array {index + 1} of {len(arrays)}: {describe_array(array)}")
        print(f"# {' '.join(['sbatch', *words])}")
        print(render_array_script(folder, array))


def _print_jobs(submission: SweepSubmission, as_json: bool) -> None:
    folder, arrays, jobs = submission.folder, submission.arrays, submission.jobs
    if as_json:
        rows = [{"job_id": job, **_make_array_row(array)} for job, array in zip(jobs, arrays, strict=True)]
        print_json({"run_dir": str(folder.path), "points": list(submission.points), "jobs": rows})
        return
    for array, job in zip(arrays, jobs, strict=True):
        print(f"job {job}: {describe_array(array)}")
    if len(jobs) > 1 and (limit := arrays[0].config.launch.parallel_points):
        print(f"launch.parallel_points={limit} is shared by the {len(jobs)} arrays, so that no more run at a time")
    print(f"{len(submission.points)} points, sweep directory {folder.path}")


def _make_array_row(array: JobArray) -> dict[str, Any]:
    return {"nodes": array.request.nodes, "ranks": array.ranks, "points": array.points, "behind": array.behind}
