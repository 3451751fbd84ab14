"""`hpc-train bench step`: compare our training step with a hand-written loop, in one process group.

It also reports the seconds of each part of the start-up, from the start of the process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from hpc_train.garbage_collection import pause_gc
from hpc_train.processes import read_process_age
from hpc_train.runtime.identity import ProcessIdentity, identify_process

_UNTIMED_OVERRIDES = ("train.eval_every=0", "checkpoint.resume=never")
"""Switch off evaluation and checkpoints, which are not part of a step."""


def run_step_command(overrides: Sequence[str], rounds: int, steps: int, as_json: bool, peers: bool = False) -> int:
    """Measure on local ranks, or as one rank of srun, torchrun or mpirun; rank 0 prints. Returns the exit code.

    peers: compare all strategies with other libraries, instead of one strategy with hand-written loops.
    """
    for name, value, least in (("rounds", rounds, 2), ("steps", steps, 1)):
        if value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    startup = StartupTimer()
    identity = identify_process(os.environ)
    config = compose([*overrides, *_UNTIMED_OVERRIDES])
    startup.mark("python and configuration")
    if identity is None:
        options = ["--rounds", str(rounds), "--steps", str(steps), *(["--json"] if as_json else [])]
        options += ["--peers"] if peers else []
        return _start_ranks(config, ["bench", "step", *overrides, *options])
    try:
        if peers:
            return _measure_peers([*overrides, *_UNTIMED_OVERRIDES], identity, rounds, steps, as_json)
        return _measure_step(config, identity, rounds, steps, as_json, startup)
    except UserError:
        if identity.process == 0:
            raise
        return EXIT_USER_ERROR  # process 0 prints the error for all


def _start_ranks(config: RunConfig, command: list[str]) -> int:
    from hpc_train.bench.local_ranks import run_local_ranks
    from hpc_train.launch.checks.run_checks import check_run
    from hpc_train.launch.local.rank_pool import count_local_ranks, count_threads_per_rank

    if config.launch.kind != "local":
        raise UserError(f"launch={config.launch.kind}: bench runs where it is started; use srun hpc-train bench step")
    ranks = count_local_ranks(config)
    check_run(config, ranks)
    return run_local_ranks(command, ranks, count_threads_per_rank(config, ranks))


def _measure_step(
    config: RunConfig, identity: ProcessIdentity, rounds: int, steps: int, as_json: bool, startup: StartupTimer
) -> int:
    with pause_gc(freeze=True):  # as in the ranks of a training
        import torch  # noqa: F401  its import is timed as a part of the start-up

        startup.mark("import torch")
        from hpc_train.bench.step.step_rank import measure_step

    startup.mark("import the rest")
    result = measure_step(config, rounds, steps, startup)
    if identity.process == 0:
        from hpc_train.bench.step.step_table import print_step_result

        if as_json:
            print(result.to_json())
        else:
            print_step_result(result)
    return EXIT_DONE


def _measure_peers(overrides: list[str], identity: ProcessIdentity, rounds: int, steps: int, as_json: bool) -> int:
    with pause_gc(freeze=True):
        from hpc_train.bench.step.step_peers import measure_peers

    result = measure_peers(overrides, rounds, steps)
    if identity.process == 0:
        from hpc_train.bench.step.step_table import print_peer_result

        if as_json:
            print(result.to_json())
        else:
            print_peer_result(result)
    return EXIT_DONE


@dataclass
class StartupTimer:
    """Times the parts of the start-up; the first part begins with the process, before any Python code."""

    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each part, in order."""

    def mark(self, part: str) -> None:
        """End a part: record the time since the last mark as `part`."""
        age = read_process_age(os.getpid())
        assert age is not None, "this process exists"
        self.parts[part] = age - sum(self.parts.values())
