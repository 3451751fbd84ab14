"""`hpc-train tune`: find faster settings for a training by short runs, one change at a time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.arguments import add_examples, add_json, add_overrides, whole_number

if TYPE_CHECKING:
    from hpc_train.report.tuning.trials import Trial


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `tune`."""
    add_overrides(command, config_dir=False)
    number = whole_number(1)
    command.add_argument(
        "--minutes", type=number, default=30, metavar="N", help="budget: minutes of all ranks together (default 30)"
    )
    command.add_argument("--steps", type=whole_number(8), default=24, metavar="N", help="steps of a run (default 24)")
    command.add_argument("--folder", default="tune", metavar="DIR", help="folder of the runs (default: tune)")
    add_json(command, "print the best run and all others as JSON")
    add_examples(
        command,
        "hpc-train tune model=llama_tiny train.micro_batch=1",
        "hpc-train tune launch=slurm cluster.nodes=2 model=llama_1b --minutes 480 --folder $SCRATCH/tune",
    )
    command.set_defaults(run=_tune)


def _tune(args: argparse.Namespace) -> int:
    return tune_command(args.overrides, args.minutes, args.steps, Path(args.folder), args.json)


def tune_command(base: list[str], minutes: int, steps: int, folder: Path, as_json: bool) -> int:
    """Search, and print what was tried and kept; returns the exit code. Raises UserError as `train` would."""
    from hpc_train.cli.output import print_line, print_message
    from hpc_train.config.compose import compose
    from hpc_train.errors import EXIT_DONE, UserError
    from hpc_train.launch.checks.run_checks import check_run
    from hpc_train.launch.local.rank_pool import count_local_ranks
    from hpc_train.launch.slurm.request import node_count
    from hpc_train.report.tuning.search import Tuning, format_command
    from hpc_train.report.tuning.trials import measure_locally, measure_on_slurm, write_trial
    from hpc_train.training.records.run_records import LineFile

    config = compose(base)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--folder {folder}: is not empty; give another one")
    on_slurm = config.launch.kind == "slurm"
    ranks = node_count(config) * config.cluster.ranks_per_node if on_slurm else count_local_ranks(config)
    check_run(config, ranks)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = LineFile(folder / "tune.jsonl")
    except OSError as error:
        raise UserError(f"--folder {folder}: {error.strerror}") from error
    say = print_message if as_json else print_line

    def report(trial: Trial, best: Trial | None) -> None:
        write_trial(file, trial)
        say(describe_trial(trial, best))

    make = measure_on_slurm if on_slurm else measure_locally
    tuning = Tuning(base, make(base, folder.absolute(), steps), report, minutes, ranks)
    best = tuning.run()
    first = tuning.trials[0]
    command = format_command(base, best.settings, on_slurm)
    if as_json:
        trials = [{"settings": dict(t.settings), "seconds": t.seconds, "kept": t.kept} for t in tuning.trials]
        print(json.dumps({"best": dict(best.settings), "seconds": best.seconds, "command": command, "trials": trials}))
        return EXIT_DONE
    say(f"{len(tuning.trials)} runs, {tuning.spent:.1f} of {minutes} minutes of all ranks")
    say(f"{first.seconds / best.seconds:.2f} times as fast as at first:  {command}")
    return EXIT_DONE


def describe_trial(trial: Trial, best: Trial | None) -> str:
    """Describe a trial in one line: what was changed, how long a step takes, and whether the change was kept."""
    from hpc_train.units import format_seconds

    before = best.settings if best is not None else {}
    changed = [f"{key}={value}" for key, value in trial.settings.items() if before.get(key) != value]
    name = " ".join(changed) or "as given"
    if trial.failure:
        return f"{name}: failed ({trial.failure})"
    step = f"{format_seconds(trial.seconds)} per step ± {format_seconds(2 * trial.noise)}, {trial.verdict}"
    if best is None:
        return f"{name}: {step}"
    return f"{name}: {step}; {1 - trial.seconds / best.seconds:+.0%}, {'kept' if trial.kept else 'not kept'}"
