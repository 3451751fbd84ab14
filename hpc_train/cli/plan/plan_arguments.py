"""Arguments of `hpc-train plan`, `plan validate`, `plan rehearse`, `plan calibrate` and `plan fit`."""

from __future__ import annotations

import argparse

from hpc_train.cli.arguments import add_json, add_overrides
from hpc_train.errors import UserError

_OVERRIDES = "key=value as in conf/, such as model=llama_7b cluster=dgx_h100 plan.tokens=2e12"
_CALIBRATE = "first calibrate each cluster with the N of its runs that tell most of the others, and leave them out"
_SUGGEST = "only say which three short runs of these tell most of the ways that the planner would take"


def add_plan(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    add_json(command)
    add_overrides(command, _OVERRIDES)
    command.add_argument("--all", action="store_true", help="all of it, not the 40 lines that matter most")
    command.add_argument("--top", type=int, default=10, metavar="N", help="with --all, --json: meshes (default 10)")
    command.add_argument("--by", choices=("time", "cost", "loss"), help="what the best has least of (plan.objective)")
    command.add_argument("--plot", metavar="FILE", help="draw it too, as .png, .svg or .pdf")
    command.set_defaults(run=_plan)


def add_validate(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan validate`."""
    add_json(command)
    command.add_argument(
        "runs", metavar="RUNS.csv", help="measured runs, a line each, columns as in docs/run_tables.md"
    )
    command.add_argument("--plot", metavar="FILE", help="predicted against measured, as .png, .svg or .pdf")
    command.add_argument("--rows", action="store_true", help="every row too, the worst first")
    command.add_argument("--constants", metavar="FILE", help="of `plan fit`, in place of those of the package")
    command.add_argument("--calibrate", type=int, default=0, metavar="N", help=_CALIBRATE)
    command.set_defaults(run=_validate)


def add_rehearse(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan rehearse`."""
    add_json(command)
    add_overrides(command, _OVERRIDES)
    command.add_argument("--ranks", default="sample", metavar="WHICH", help="all, sample (default), or as in 0,8,127")
    command.set_defaults(run=_rehearse)


def add_fit(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan fit`."""
    add_json(command)
    command.add_argument("runs", nargs="+", metavar="RUNS.csv", help="measured runs, as in docs/run_tables.md")
    command.add_argument("--output", metavar="FILE", help="write the constants here")
    command.add_argument("--folds", type=int, default=5, help="of cross-validation over groups (default 5; 0: none)")
    command.add_argument("--leave-out", action="store_true", help="leave each cluster out once, too (takes longer)")
    command.set_defaults(run=_fit)


def add_calibrate(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan calibrate`."""
    add_json(command)
    command.add_argument("--gemm", metavar="FILE", help="of `bench gemm --out`")
    command.add_argument("--collectives", metavar="FILE", help="of `bench collectives --out`")
    command.add_argument("--runs", nargs="+", default=[], metavar="DIR", help="two or three short runs on the cluster")
    command.add_argument("--against", nargs="+", default=[], metavar="DIR", help="other runs, to be predicted only")
    command.add_argument("--out", metavar="FILE", help="write it here, for cluster.calibration=FILE")
    command.add_argument("--suggest", nargs="+", default=[], metavar="override", help=_SUGGEST)
    command.set_defaults(run=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> int:
    from hpc_train.cli.plan.calibrate import CalibrateOptions, calibrate_command, suggest_command

    a = arguments
    if a.suggest:
        return suggest_command(a.suggest, a.json)
    if a.out is None:
        raise UserError("plan calibrate: where to; give --out FILE")
    return calibrate_command(CalibrateOptions(a.out, a.gemm, a.collectives, tuple(a.runs), tuple(a.against), a.json))


def _plan(arguments: argparse.Namespace) -> int:
    from hpc_train.cli.plan.plan import plan_command
    from hpc_train.planner.plan import PlanOptions

    a = arguments
    return plan_command(a.overrides, a.config_dir, PlanOptions(a.json, a.plot, a.top, a.by, a.all))


def _validate(arguments: argparse.Namespace) -> int:
    from hpc_train.cli.plan.validate import ValidateOptions, validate_command

    a = arguments
    return validate_command(ValidateOptions(a.runs, a.json, a.plot, a.rows, a.constants, a.calibrate))


def _rehearse(arguments: argparse.Namespace) -> int:
    from hpc_train.cli.plan.rehearse import rehearse_command

    a = arguments
    return rehearse_command(a.overrides, a.config_dir, a.json, a.ranks)


def _fit(arguments: argparse.Namespace) -> int:
    from hpc_train.cli.plan.fit import fit_command
    from hpc_train.planner.calibration.fit_report import FitOptions

    a = arguments
    return fit_command(FitOptions(tuple(a.runs), a.json, a.output, a.folds, a.leave_out))
