"""`hpc-train chaos RUN`: break a run on purpose, by a plan, and print each fault."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.cli.arguments import add_examples

if TYPE_CHECKING:
    from hpc_train.resilience.chaos import Order

_EPILOG = """\
the plan is a YAML file:
  minutes: 10            # inject random faults for this long; default: until the run ends
  mttf_seconds: 120      # mean seconds between random faults; default: no random faults
  kinds: {kill: 4, stop: 2, exception: 1}    # weights of the random faults; default: kill 4, stop 2, others 1
  faults:                # single faults
    - {kind: kill, rank: 1, step: 200}       # step: inject the fault at this step or later
    - {kind: slow, rank: 0, step: 300, seconds: 20}
kinds:"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `chaos`."""
    from hpc_train.resilience.chaos import KINDS

    width = max(map(len, KINDS))
    command.epilog = _EPILOG + "\n" + "\n".join(f"  {kind:<{width}}  {what}" for kind, what in KINDS.items())
    command.add_argument("target", metavar="RUN", help="run directory, submitted with resilience.chaos=true")
    command.add_argument("--plan", metavar="FILE", type=Path, required=True, help="YAML file with faults (see below)")
    command.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the random faults (default 0)")
    add_examples(command, "hpc-train chaos runs/drill --plan faults.yaml --seed 1")
    command.set_defaults(run=lambda arguments: chaos_command(Path(arguments.target), arguments.plan, arguments.seed))


@dataclass(frozen=True)
class ChaosPlan:
    """The content of a plan file: single faults, and how often random ones are injected."""

    minutes: float | None = None
    mttf_seconds: float | None = None
    kinds: dict[str, float] = field(default_factory=dict)
    faults: tuple[Order, ...] = ()


def chaos_command(run: Path, plan_file: Path, seed: int) -> int:
    """Inject the faults of a plan until it or the run ends.

    Raises UserError for a run without resilience.chaos=true.
    """
    from hpc_train.launch.state.attempts import read_attempts
    from hpc_train.resilience.chaos import Order, give_order

    ranks = _check_run(run)
    plan, draw = read_plan(plan_file, ranks), random.Random(seed)
    for order in plan.faults:
        give_order(run, order)
        print(f"ordered: {order.kind} in rank {order.rank} at step {order.step}", flush=True)
    if plan.mttf_seconds is None:
        return 0
    end = time.monotonic() + 60 * plan.minutes if plan.minutes is not None else float("inf")
    # Exponential times between faults, as if faults were independent of each other.
    due = time.monotonic() + draw.expovariate(1 / plan.mttf_seconds)
    while time.monotonic() < end:
        attempts = read_attempts(run)
        result = attempts[-1].result if attempts else None
        if result is not None and not result.goes_on:
            print(f"the run has ended with exit code {result.exit_code}")
            return 0
        if time.monotonic() > due:
            kind = draw.choices(list(plan.kinds), list(plan.kinds.values()))[0]
            order = Order(kind, draw.randrange(ranks))
            give_order(run, order)
            print(f"{time.strftime('%H:%M:%S')} {order.kind} in rank {order.rank}", flush=True)
            due = time.monotonic() + draw.expovariate(1 / plan.mttf_seconds)
        time.sleep(0.2)
    return 0


def _check_run(run: Path) -> int:
    """Return the number of ranks of a run that may be broken. Raises UserError."""
    from hpc_train.errors import UserError
    from hpc_train.launch.job_spec import read_spec

    if not (run / "job.json").exists():
        raise UserError(f"{run}: no run directory; give that of a run with resilience.chaos=true")
    spec = read_spec(run / "job.json")
    if not spec.run_config().resilience.chaos:
        raise UserError(f"{run}: was not started with resilience.chaos=true, so no fault may be injected")
    return spec.ranks


def read_plan(path: Path, ranks: int) -> ChaosPlan:
    """Read and check a plan. ranks: of the run. Raises UserError, in one line."""
    import yaml  # type: ignore[import-untyped]

    from hpc_train.errors import UserError
    from hpc_train.regular_files import read_text
    from hpc_train.resilience.chaos import KINDS

    location = f"--plan {path}"
    try:
        content = yaml.safe_load(read_text(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{location}: cannot be read: {' '.join(str(error).split())[:200]}") from error
    _check_keys(content, ("minutes", "mttf_seconds", "kinds", "faults"), location)
    minutes, mttf = (_check_positive(content.get(name), f"{location}: {name}") for name in ("minutes", "mttf_seconds"))
    kinds = content.get("kinds", {**dict.fromkeys(KINDS, 1), "kill": 4, "stop": 2})
    _check_keys(kinds, KINDS, f"{location}: kinds")
    weights = {kind: _check_positive(weight, f"{location}: kinds.{kind}") or 0.0 for kind, weight in kinds.items()}
    faults = content.get("faults", [])
    if not isinstance(faults, list):
        raise UserError(f"{location}: faults must be a list")
    orders = tuple(_read_order(fault, ranks, f"{location}: faults[{index}]") for index, fault in enumerate(faults))
    if not orders and mttf is None:
        raise UserError(f"{location}: has neither faults nor mttf_seconds, so nothing would happen")
    return ChaosPlan(minutes, mttf, weights, orders)


def _read_order(value: Any, ranks: int, location: str) -> Order:
    from hpc_train.errors import UserError
    from hpc_train.resilience.chaos import AT_START, KINDS, LASTING_KINDS, Order

    _check_keys(value, ("kind", "rank", "step", "seconds"), location)
    if value.get("kind") not in KINDS:
        raise UserError(f"{location}: kind {value.get('kind')!r} is none of {', '.join(KINDS)}")
    rank, step = value.get("rank", 0), value.get("step", 0)
    if type(rank) is not int or not 0 <= rank < ranks:
        raise UserError(f"{location}: rank {rank!r} is none of the {ranks} ranks of the run, 0 to {ranks - 1}")
    if type(step) is not int or step < 0:
        raise UserError(f"{location}: step {step!r} must be an integer from 0")
    if step and value["kind"] == AT_START:
        raise UserError(f"{location}: step {step}: {AT_START} happens before the first step of a start; leave step out")
    if "seconds" in value and value["kind"] not in LASTING_KINDS:
        raise UserError(f"{location}: seconds: only {', '.join(LASTING_KINDS)} last for a time; leave seconds out")
    return Order(value["kind"], rank, step, _check_positive(value.get("seconds", 30), f"{location}: seconds") or 30.0)


def _check_keys(value: Any, names: Sequence[str] | Mapping[str, Any], location: str) -> None:
    from hpc_train.errors import UserError
    from hpc_train.near_names import suggest_names

    if not isinstance(value, dict):
        raise UserError(f"{location}: must be a mapping with the keys {', '.join(names)}")
    if unknown := [str(key) for key in value if key not in names]:
        raise UserError(f"{location}: no key {unknown[0][:80]!r}; {suggest_names(unknown[0], names)}")


def _check_positive(value: Any, location: str) -> float | None:
    """Return the number; None where there is none. Raises UserError for anything else."""
    from hpc_train.errors import UserError

    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise UserError(f"{location}: {value!r} must be a number above 0")
    return float(value)
