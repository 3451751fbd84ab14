"""Define the arguments of `hpc-train plan` and its sub-commands; what they do is imported when they run."""

from __future__ import annotations

import argparse

from hpc_train.cli.arguments import add_examples, add_json, add_overrides
from hpc_train.errors import UserError

_OVERRIDES = "a setting as key=value, such as model=llama_7b, cluster=dgx_h100 or plan.tokens=2e12"
_CALIBRATE = "first calibrate each cluster with its N most informative runs, and leave those out of the errors"
_SUGGEST = "for a run with these settings, only print which three short runs would calibrate its layouts best"


def add_plan(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    add_json(command)
    add_overrides(command, _OVERRIDES)
    command.add_argument("--all", action="store_true", help="print everything, not only the 40 most important lines")
    command.add_argument(
        "--top", type=int, default=10, metavar="N", help="layouts to list with --all or --json (default 10)"
    )
    command.add_argument("--by", choices=("time", "cost", "loss"), help="what to minimise (default: plan.objective)")
    command.add_argument("--plot", metavar="FILE", help="also draw the layouts, as .png, .svg or .pdf")
    add_examples(
        command,
        "hpc-train plan model=llama_70b cluster=dgx_h100 cluster.nodes=32 precision=bf16 train.global_batch=512",
        "hpc-train plan model=llama_1b cluster=perlmutter cluster.nodes=4 parallel.tp=4 --all",
        "hpc-train plan model=llama_7b cluster=dgx_a100 plan.tokens=2e12 --by cost --json",
    )
    command.set_defaults(run=_plan)


def add_validate(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan validate`."""
    add_json(command)
    command.add_argument(
        "runs", metavar="RUNS.csv", help="measured runs, one per line; docs/run_tables.md lists the columns"
    )
    command.add_argument(
        "--plot", metavar="FILE", help="plot predicted against measured step time, as .png, .svg or .pdf"
    )
    command.add_argument("--rows", action="store_true", help="also print every run, the worst prediction first")
    command.add_argument(
        "--constants", metavar="FILE", help="use constants written by `plan fit`, not those of the package"
    )
    command.add_argument("--calibrate", type=int, default=0, metavar="N", help=_CALIBRATE)
    add_examples(
        command,
        "hpc-train plan validate runs.csv",
        "hpc-train plan validate runs.csv --calibrate 3 --rows --plot errors.png",
    )
    command.set_defaults(run=_validate)


def add_rehearse(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan rehearse`."""
    add_json(command)
    add_overrides(command, _OVERRIDES)
    command.add_argument(
        "--ranks",
        default="sample",
        metavar="WHICH",
        help="ranks to build: all, sample (default), or numbers as in 0,8,127",
    )
    add_examples(
        command,
        "hpc-train plan rehearse model=llama_8b cluster=dgx_h100 cluster.nodes=2 parallel=fsdp precision=bf16",
        "hpc-train plan rehearse model=llama_tiny launch.ranks=4 parallel=fsdp --ranks all",
    )
    command.set_defaults(run=_rehearse)


def add_schedule(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan schedule`."""
    add_json(command)
    add_overrides(command, _OVERRIDES)
    command.add_argument("--out", metavar="FILE.csv", help="write the order, for parallel.pipeline.schedule=FILE.csv")
    command.add_argument(
        "--communication",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="time of a message between ranks, as a share of a block's forward (default 0)",
    )
    add_examples(
        command,
        "hpc-train plan schedule model=llama_1b cluster=dgx_h100 parallel=pp parallel.pp=4 train.global_batch=16 "
        "train.micro_batch=1 parallel.dp_shard=2",
        "hpc-train plan schedule model=llama_tiny launch.ranks=2 parallel=pp train.micro_batch=4 --out found.csv",
    )
    command.set_defaults(run=_schedule)


def _schedule(args: argparse.Namespace) -> int:
    from hpc_train.cli.plan.schedule import schedule_command

    return schedule_command(args.overrides, args.config_dir, args.json, args.out, args.communication)


def add_fit(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan fit`."""
    add_json(command)
    command.add_argument(
        "runs", nargs="+", metavar="RUNS.csv", help="measured runs, one per line; docs/run_tables.md lists the columns"
    )
    command.add_argument("--output", metavar="FILE", help="write the constants to this file")
    command.add_argument(
        "--folds", type=int, default=5, metavar="N", help="folds of the cross-validation (default 5; 0: none)"
    )
    command.add_argument("--leave-out", action="store_true", help="also leave out each cluster in turn (takes longer)")
    add_examples(command, "hpc-train plan fit runs.csv --leave-out --output constants.json")
    command.set_defaults(run=_fit)


def add_calibrate(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan calibrate`."""
    add_json(command)
    command.add_argument("--gemm", metavar="FILE", help="result of `bench gemm --out`")
    command.add_argument("--collectives", metavar="FILE", help="result of `bench collectives --out`")
    command.add_argument(
        "--runs", nargs="+", default=[], metavar="DIR", help="run directories of two or three short runs on the cluster"
    )
    command.add_argument(
        "--against", nargs="+", default=[], metavar="DIR", help="run directories that are only predicted, as a check"
    )
    command.add_argument(
        "--out", metavar="FILE", help="write the calibration to this file, for cluster.calibration=FILE"
    )
    command.add_argument("--suggest", nargs="+", default=[], metavar="override", help=_SUGGEST)
    add_examples(
        command,
        "hpc-train plan calibrate --suggest model=llama_7b cluster=dgx_h100 cluster.nodes=4",
        "hpc-train plan calibrate --gemm gemm.json --collectives net.json --runs runs/a runs/b --out calibration.json",
    )
    command.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    from hpc_train.cli.plan.calibrate import CalibrateOptions, calibrate_command, suggest_command

    if args.suggest:
        return suggest_command(args.suggest, args.json)
    if args.out is None:
        raise UserError("plan calibrate: no file to write; give --out FILE")
    return calibrate_command(
        CalibrateOptions(args.out, args.gemm, args.collectives, tuple(args.runs), tuple(args.against), args.json)
    )


def _plan(args: argparse.Namespace) -> int:
    from hpc_train.garbage_collection import pause_gc

    with pause_gc():  # imports and the configuration are many objects, of which a collection would free none
        from hpc_train.cli.plan.plan import plan_command
        from hpc_train.planner.plan import PlanOptions

        options = PlanOptions(args.json, args.plot, args.top, args.by, args.all)
        return plan_command(args.overrides, args.config_dir, options)


def _validate(args: argparse.Namespace) -> int:
    from hpc_train.cli.plan.validate import ValidateOptions, validate_command

    return validate_command(ValidateOptions(args.runs, args.json, args.plot, args.rows, args.constants, args.calibrate))


def _rehearse(args: argparse.Namespace) -> int:
    from hpc_train.cli.plan.rehearse import rehearse_command

    return rehearse_command(args.overrides, args.config_dir, args.json, args.ranks)


def _fit(args: argparse.Namespace) -> int:
    from hpc_train.cli.plan.fit import fit_command
    from hpc_train.planner.calibration.fit_report import FitOptions

    return fit_command(FitOptions(tuple(args.runs), args.json, args.output, args.folds, args.leave_out))
