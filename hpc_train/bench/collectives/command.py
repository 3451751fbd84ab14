"""`hpc-train bench collectives`: the network as training uses it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_train.bench.collectives.options import Options
from hpc_train.bench.collectives.result import Result, calibration_of
from hpc_train.config.compose import compose
from hpc_train.config.degrees import resolve
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from hpc_train.runtime.identity import Identity, identify

EXIT_WRONG = 1
"""Some rank received what nobody sent."""


def collectives_command(overrides: Sequence[str], options: Options) -> int:
    """Measure here, or as one rank of srun, torchrun or mpirun; rank 0 prints and writes. Returns the exit code."""
    me = identify(os.environ)
    try:
        options.check()
        config = compose(overrides)
        if me is None:
            return _start_ranks(config, ["bench", "collectives", *overrides, *options.words()])
        return _as_rank(config, options, me)
    except UserError:
        if me is None or me.process == 0:
            raise
        return EXIT_USER_ERROR  # process 0 says it


def _start_ranks(config: RunConfig, command: list[str]) -> int:
    from hpc_train.bench.local import run_as_ranks
    from hpc_train.launch.local import local_ranks, threads_of

    if config.launch.kind != "local":
        raise UserError(
            f"launch={config.launch.kind}: bench runs where it is started; use srun hpc-train bench collectives"
        )
    ranks = local_ranks(config)
    resolve(config.parallel, ranks)
    if ranks < 2:
        raise UserError(f"launch.ranks={ranks}: one rank has nobody to talk to; set 2 or more")
    return run_as_ranks(command, ranks, threads_of(config, ranks))


def _as_rank(config: RunConfig, options: Options, me: Identity) -> int:
    from hpc_train.bench.collectives.measure import measure

    result = measure(config, options)
    return finish(result, options) if me.process == 0 else code_of(result)


def finish(result: Result, options: Options) -> int:
    """Print and write what was found; no calibration if any of it was wrong. Returns the exit code.

    Raises UserError where a calibration is asked for and no level could be fitted.
    """
    _print(result, options)
    _write(result, options)
    if result.wrong:
        print(f"hpc-train: bench collectives: {_accused(result)}", file=sys.stderr)
    return code_of(result)


def code_of(result: Result) -> int:
    """0 if every rank received what was sent, else EXIT_WRONG."""
    return EXIT_WRONG if result.wrong else EXIT_DONE


def _print(result: Result, options: Options) -> None:
    if options.output == "json":
        print(result.to_json())
    elif options.output == "plain":
        from hpc_train.bench.collectives.plain import text

        print(text(result))
    else:
        from hpc_train.bench.collectives.table import show

        show(result)


def _write(result: Result, options: Options) -> None:
    if options.plot is not None:
        from hpc_train.bench.collectives.plot import write_plot

        write_plot(result, Path(options.plot))
    if options.out is not None and not result.wrong:
        from hpc_train.cluster.calibration import write_calibration

        calibration = calibration_of(result)
        if not calibration.levels:
            raise UserError(f"--out {options.out}: these sizes tell no level's bandwidth; try a larger --max")
        write_calibration(Path(options.out), calibration)


def _accused(result: Result) -> str:
    """Who was wrong, in a line."""
    rows = [row for row in result.measurements if row.wrong]
    names = ", ".join(dict.fromkeys(f"{row.operation} {row.algorithm} of {row.backend} on {row.axis}" for row in rows))
    return f"{result.wrong} wrong elements: {names or 'point to point messages'}; no calibration was written"
