"""`hpc-train bench step`: our training step against the loop that a person writes, in one process group."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpc_train.bench.startup import StartUp
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from hpc_train.runtime.identity import Identity, identify

_UNTIMED = ("train.eval_every=0", "checkpoint.resume=never")
"""Evaluation and checkpoints are no part of a step."""


def bench_command(overrides: Sequence[str], rounds: int, steps: int, as_json: bool, peers: bool = False) -> int:
    """Measure here, or as one rank of srun, torchrun or mpirun; rank 0 prints. Returns the exit code.

    peers: every strategy of ours and the libraries it competes with, in place of one strategy and hand-written loops.
    """
    for name, value, least in (("rounds", rounds, 2), ("steps", steps, 1)):
        if value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    startup = StartUp()
    me = identify(os.environ)
    config = compose([*overrides, *_UNTIMED])
    startup.mark("python and configuration")
    if me is None:
        options = ["--rounds", str(rounds), "--steps", str(steps), *(["--json"] if as_json else [])]
        options += ["--peers"] if peers else []
        return _start_ranks(config, ["bench", "step", *overrides, *options])
    try:
        if peers:
            return _peers_as_rank([*overrides, *_UNTIMED], me, rounds, steps, as_json)
        return _as_rank(config, me, rounds, steps, as_json, startup)
    except UserError:
        if me.process == 0:
            raise
        return EXIT_USER_ERROR  # process 0 says it


def _start_ranks(config: RunConfig, command: list[str]) -> int:
    from hpc_train.bench.local import run_as_ranks
    from hpc_train.launch.local import local_ranks, threads_of
    from hpc_train.launch.train import check_run

    if config.launch.kind != "local":
        raise UserError(f"launch={config.launch.kind}: bench runs where it is started; use srun hpc-train bench step")
    ranks = local_ranks(config)
    check_run(config, ranks)
    return run_as_ranks(command, ranks, threads_of(config, ranks))


def _as_rank(config: RunConfig, me: Identity, rounds: int, steps: int, as_json: bool, startup: StartUp) -> int:
    import torch  # noqa: F401  its import is a part of the start-up by itself

    startup.mark("import torch")
    from hpc_train.bench.measure import measure

    startup.mark("import the rest")
    result = measure(config, rounds, steps, startup)
    if me.process == 0:
        from hpc_train.bench.table import show

        print(result.to_json()) if as_json else show(result)
    return EXIT_DONE


def _peers_as_rank(overrides: list[str], me: Identity, rounds: int, steps: int, as_json: bool) -> int:
    from hpc_train.bench.against import measure_peers

    result = measure_peers(overrides, rounds, steps)
    if me.process == 0:
        from hpc_train.bench.peer_table import show

        print(result.to_json()) if as_json else show(result)
    return EXIT_DONE
