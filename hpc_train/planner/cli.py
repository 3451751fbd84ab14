"""Arguments of `hpc-train plan`, `plan validate`, `plan rehearse`, `plan calibrate` and `plan fit`.

The default, `plan [overrides]`, takes any words, so argparse cannot tell a sub-command from an override: `joined` makes
one word of `plan validate`, and each is a command of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TypeAlias

from hpc_train.errors import UserError

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_OVERRIDES = "key=value as in conf/, such as model=llama_7b cluster=dgx_h100 plan.tokens=2e12"
_PLAN = "memory, step time, MFU and cost of a run before it starts, and the best ways to spread it"
_VALIDATE = "the planner's predictions against measured runs of a table"
_REHEARSE = "build the model with its real passes for a large world, on one CPU and without its memory"
_FIT = "fit the planner's constants to measured runs, with cross-validation"
_CALIBRATE = "first calibrate each cluster with the N of its runs that tell most of the others, and leave them out"
_LEARN = "what benchmarks and short runs tell of a cluster, as one file for cluster.calibration"
_SUGGEST = "only say which three short runs of these tell most of the ways that the planner would take"
_WORDS = ("validate", "rehearse", "fit", "calibrate")


def joined(words: Sequence[str]) -> list[str]:
    """`plan validate ...` as `"plan validate" ...`, wherever options stand before it."""
    found = list(words)
    index = next((at for at, word in enumerate(found) if not word.startswith("-")), len(found))
    if found[index : index + 1] == ["plan"] and found[index + 1 : index + 2] and found[index + 1] in _WORDS:
        found[index : index + 2] = [f"plan {found[index + 1]}"]
    return found


def add_commands(commands: _Commands) -> None:
    """All five."""
    _add_calibrate(commands)
    _add_plan(commands)
    _add_validate(commands)
    _add_rehearse(commands)
    _add_fit(commands)


def _add(commands: _Commands, name: str, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary)
    command.add_argument("--json", action="store_true", help="print the answer as JSON")
    return command


def _add_overrides(command: argparse.ArgumentParser) -> None:
    command.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    command.add_argument("--config-dir", metavar="DIR", help="a folder laid out as conf/, whose options are added")


def _add_plan(commands: _Commands) -> None:
    command = _add(commands, "plan", _PLAN)
    _add_overrides(command)
    command.add_argument("--all", action="store_true", help="all of it, not the 40 lines that matter most")
    command.add_argument("--top", type=int, default=10, metavar="N", help="with --all, --json: meshes (default 10)")
    command.add_argument("--by", choices=("time", "cost", "loss"), help="what the best has least of (plan.objective)")
    command.add_argument("--plot", metavar="FILE", help="draw it too, as .png, .svg or .pdf")
    command.set_defaults(run=_plan)


def _add_validate(commands: _Commands) -> None:
    command = _add(commands, "plan validate", _VALIDATE)
    command.add_argument(
        "runs", metavar="RUNS.csv", help="measured runs, a line each, columns as in docs/run_tables.md"
    )
    command.add_argument("--plot", metavar="FILE", help="predicted against measured, as .png, .svg or .pdf")
    command.add_argument("--rows", action="store_true", help="every row too, the worst first")
    command.add_argument("--constants", metavar="FILE", help="of `plan fit`, in place of those of the package")
    command.add_argument("--calibrate", type=int, default=0, metavar="N", help=_CALIBRATE)
    command.set_defaults(run=_validate)


def _add_rehearse(commands: _Commands) -> None:
    command = _add(commands, "plan rehearse", _REHEARSE)
    _add_overrides(command)
    command.add_argument("--ranks", default="sample", metavar="WHICH", help="all, sample (default), or as in 0,8,127")
    command.set_defaults(run=_rehearse)


def _add_fit(commands: _Commands) -> None:
    command = _add(commands, "plan fit", _FIT)
    command.add_argument("runs", nargs="+", metavar="RUNS.csv", help="measured runs, as in docs/run_tables.md")
    command.add_argument("--output", metavar="FILE", help="write the constants here")
    command.add_argument("--folds", type=int, default=5, help="of cross-validation over groups (default 5; 0: none)")
    command.add_argument("--leave-out", action="store_true", help="leave each cluster out once, too (takes longer)")
    command.set_defaults(run=_fit)


def _add_calibrate(commands: _Commands) -> None:
    command = _add(commands, "plan calibrate", _LEARN)
    command.add_argument("--gemm", metavar="FILE", help="of `bench gemm --out`")
    command.add_argument("--collectives", metavar="FILE", help="of `bench collectives --out`")
    command.add_argument("--runs", nargs="+", default=[], metavar="DIR", help="two or three short runs on the cluster")
    command.add_argument("--against", nargs="+", default=[], metavar="DIR", help="other runs, to be predicted only")
    command.add_argument("--out", metavar="FILE", help="write it here, for cluster.calibration=FILE")
    command.add_argument("--suggest", nargs="+", default=[], metavar="override", help=_SUGGEST)
    command.set_defaults(run=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> int:
    from hpc_train.planner.calibrate_command import Options, calibrate_command
    from hpc_train.planner.suggest import suggest_command

    a = arguments
    if a.suggest:
        return suggest_command(a.suggest, a.json)
    if a.out is None:
        raise UserError("plan calibrate: where to; give --out FILE")
    return calibrate_command(Options(a.out, a.gemm, a.collectives, tuple(a.runs), tuple(a.against), a.json))


def _plan(arguments: argparse.Namespace) -> int:
    from hpc_train.planner.plan_command import Options, plan_command

    a = arguments
    return plan_command(a.overrides, a.config_dir, Options(a.json, a.plot, a.top, a.by, a.all))


def _validate(arguments: argparse.Namespace) -> int:
    from hpc_train.planner.validate_command import Options, validate_command

    a = arguments
    return validate_command(Options(a.runs, a.json, a.plot, a.rows, a.constants, a.calibrate))


def _rehearse(arguments: argparse.Namespace) -> int:
    from hpc_train.planner.rehearse_command import rehearse_command

    a = arguments
    return rehearse_command(a.overrides, a.config_dir, a.json, a.ranks)


def _fit(arguments: argparse.Namespace) -> int:
    from hpc_train.planner.fit_command import Options, fit_command

    a = arguments
    return fit_command(Options(tuple(a.runs), a.json, a.output, a.folds, a.leave_out))
