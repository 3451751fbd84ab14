"""Check a run and freeze it: from here on nothing of conf/ is read again.

freeze_run decides parallel=auto, has `checks/` check that model, data, degrees and files go together, builds the token
store if the data needs one, and writes the run directory with its job spec. Everything that can fail does so before a
rank starts.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.config.model import TokenDataConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.checks.files import check_files
from hpc_train.launch.checks.run_checks import check_run
from hpc_train.launch.command_output import Report
from hpc_train.launch.job_spec import JobSpec, make_spec
from hpc_train.regular_files import MAX_TEXT_BYTES, read_regular, write_private_file
from hpc_train.traffic.stages import is_schedule_file
from hpc_train.training.records.run_records import read_metrics
from hpc_train.training.run_directory import (
    RunDirectory,
    locate_run_directory,
    prepare_run_directory,
)

if TYPE_CHECKING:
    from hpc_train.launch.snapshot.code_snapshot import Snapshot


def freeze_run(
    config: RunConfig,
    ranks: int,
    report: Report,
    folder: RunDirectory | None = None,
    why: str | None = None,
    code: Snapshot | None = None,
) -> JobSpec:
    """Check the run and write its directory with its job spec: from here on, nothing of conf/ is read again.

    report: gets the decision of parallel=auto. why: the explanation from decide_auto_layout, if it was called before.
    code: the snapshot that the job runs.
    """
    config, plan_text = decide_auto_layout(config, ranks, report)
    why = why or plan_text
    degrees = check_run(config, ranks)
    folder = folder or locate_run_directory(config)
    check_files(config, folder)
    spec = make_spec(config, folder, ranks, asdict(degrees), find_token_store(config), code)
    schedule = read_schedule_file(config)
    prepare_run_directory(folder, spec.run_config())
    if schedule is not None:
        write_private_file(folder.schedule, schedule)
    if why is not None:
        write_private_file(folder.plan, why)
    spec.write(folder.job)
    return spec


def makes_new_directory(config: RunConfig) -> bool:
    """Return whether the run directory will be made for this run."""
    return config.run_dir is None or not Path(config.run_dir).expanduser().exists()


def decide_auto_layout(config: RunConfig, ranks: int | None, report: Report) -> tuple[RunConfig, str | None]:
    """Decide parallel=auto: return the run with its degrees, and why these, at length.

    Any other run is returned as it is.

    ranks: of the job; None where the planner may choose the number of nodes. report: gets the decision in one line.
    """
    if not config.parallel.auto:
        return config, None
    from hpc_train.planner.auto import choose_parallel

    decision = choose_parallel(config, ranks)
    report(decision.line)
    return decision.config, decision.text


def read_schedule_file(config: RunConfig) -> str | None:
    """Return the pipeline order that the run reads from a file, and of which it gets a copy; None if it reads none."""
    pipeline = config.parallel.pipeline
    return _read_schedule_text(Path(pipeline.schedule).expanduser()) if is_schedule_file(pipeline) else None


def _read_schedule_text(path: Path) -> str:
    try:
        return read_regular(path, MAX_TEXT_BYTES, follow=True).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"parallel.pipeline.schedule={path}: {why}; give a file with a pipeline's order") from error


def find_token_store(config: RunConfig, build: bool = True) -> Path | None:
    """Return the token store that the run reads, built now if necessary: the text may change later.

    None where the batch script has set-up lines: they may be what brings the text to the node, so the ranks build it.
    build: False only returns where the store will be.
    """
    if not isinstance(config.data, TokenDataConfig) or config.launch.setup:
        return None
    from hpc_train.data.corpus.build import ensure_store, locate_store

    return ensure_store(config.data) if build else locate_store(config.data)


def describe_finished_run(config: RunConfig, folder: RunDirectory) -> str | None:
    """Return a line that says that the run in this folder has made all its steps; None if steps are left.

    Only for a number of steps: how many an epoch has is known once the data is open. The ranks notice a last checkpoint
    that is damaged or has NaN in it.
    """
    total, saved = config.train.wanted_steps, folder.steps()
    if config.checkpoint.resume != "auto" or total is None or not saved or saved[-1] < total:
        return None
    from hpc_train.checkpoint import list_committed_steps, verify_step

    newest = list_committed_steps(folder.checkpoints)[-1]  # after a rollback this is not the highest
    # verify_step returns the problems that it finds.
    if newest < total or verify_step(folder.checkpoints, newest) or not _is_last_step_sound(folder, newest):
        return None
    return f"already done: {folder.path} has its {total} steps; more of them with train.steps, or use a new run_dir"


def _is_last_step_sound(folder: RunDirectory, step: int) -> bool:
    """Whether the last step is sound, and its evaluation was not skipped by a stop or has been made up for."""
    from hpc_train.checkpoint.format.manifest import read_manifest
    from hpc_train.checkpoint.storage.step_directory import explain_bad_step, locate_step

    path = locate_step(folder.checkpoints, step)
    manifest = read_manifest(path, step)
    if explain_bad_step(path, manifest) is not None:
        return False
    if not manifest.extra.get("owes_validation", False):
        return True
    rows = read_metrics(folder.metrics)
    return bool(rows) and rows[-1]["step"] == step and "validation_loss" in rows[-1]
