"""The changes of settings that a search tries: of the micro-batch, of the layout, and of how a layout is carried out.

None touches what affects the result of a training: the global batch, the data, the seed, the precision, the optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from operator import attrgetter

from hpc_train.config.compose import compose
from hpc_train.config.parallel import ParallelConfig, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.checks.run_checks import check_run
from hpc_train.report.tuning.trials import Trial

Change = tuple[tuple[str, str], ...]
"""Settings that change together, as (key, value)."""
MICRO_BATCH = "train.micro_batch"
_OPTIONS_OF_LAYOUTS = (
    "bucket_mib",
    "static_graph",
    "unused_parameters",
    "reshard_after_forward",
    "prefetch",
    "tensor.sequence",
    "tensor.vocabulary",
    "tensor.asynchronous",
    "pipeline.schedule",
    "pipeline.virtual_stages",
    "pipeline.timeline",
)
"""Settings of parallel that some layouts refuse: they would have no effect there. None changes what is learned."""


def list_changes(base: Sequence[str], best: Trial, ranks: int) -> Iterator[Change]:
    """List the changes of the best trial so far that can run, those first that meet what its report named."""
    config = compose([*base, *best.overrides])
    batches, layouts = list(_list_micro_batches(config, ranks)), list(_list_layouts(config, ranks))
    options = list(_list_options(config))
    first, second = (layouts, batches) if best.verdict in ("network", "bubble", "straggler") else (batches, layouts)
    for change in [*first[:1], *second[:1], *options, *first[1:], *second[1:]]:
        if (possible := _drop_refused_options([*base, *best.overrides], config, change, ranks)) is not None:
            yield possible


def _drop_refused_options(base: Sequence[str], config: RunConfig, change: Change, ranks: int) -> Change | None:
    """Return a change that can run: as it is, or with options at their defaults that its layout refuses; None if none.

    config: what `base` composes to.
    """

    def can_run(settings: Change) -> bool:
        return _can_run([*base, *(f"{key}={value}" for key, value in settings)], ranks)

    if can_run(change):
        return change
    resets = list(_list_resets(config.parallel)) if any(key == "parallel.strategy" for key, _ in change) else []
    possible = (*change, *resets)
    if not resets or not can_run(possible):
        return None
    for reset in resets:  # those that the layout takes stay as they are
        fewer = tuple(setting for setting in possible if setting != reset)
        possible = fewer if can_run(fewer) else possible
    return possible


def _list_resets(parallel: ParallelConfig) -> Iterator[tuple[str, str]]:
    """List settings that take the options of layouts back to their defaults, where they are not."""
    defaults = ParallelConfig()
    for name in _OPTIONS_OF_LAYOUTS:
        now, default = (attrgetter(name)(config) for config in (parallel, defaults))
        if now != default:
            yield f"parallel.{name}", default if isinstance(default, str) else json.dumps(default)


def _list_micro_batches(config: RunConfig, ranks: int) -> Iterator[Change]:
    """List larger micro-batches, the largest first, then smaller ones."""
    degrees = resolve_degrees(config.parallel, ranks)
    share = config.train.global_batch // degrees.data_parallel
    now = min(config.train.micro_batch, share)
    sizes = [size for size in range(1, share + 1) if share % size == 0 and (size & (size - 1) == 0 or size == share)]
    larger, smaller = [size for size in sizes if size > now], [size for size in sizes if size < now]
    for size in [*reversed(larger), *reversed(smaller)]:
        yield ((MICRO_BATCH, str(size)),)


def _list_layouts(config: RunConfig, ranks: int) -> Iterator[Change]:
    """List layouts of these ranks, those first that communicate least where they fit."""
    layouts = []
    for pp in _list_divisors(ranks):
        for tp in _list_divisors(ranks // pp):
            data = ranks // pp // tp
            for strategy in ("ddp", "zero1", "zero2", "zero3"):
                # With one copy of the model there is nothing that ZeRO could shard.
                if strategy == "zero1" if data == 1 else strategy != "ddp" or pp == tp == 1:
                    layouts.append((pp * tp, pp, strategy, data, tp))
    for _, pp, strategy, data, tp in sorted(layouts):
        replicate, shard = (str(data), "1") if strategy == "ddp" else ("1", str(data))
        values = {
            "parallel.pp": str(pp),
            "parallel.tp": str(tp),
            "parallel.strategy": strategy,
            "parallel.dp_replicate": replicate,
            "parallel.dp_shard": shard,
        }
        share = config.train.global_batch // data
        if config.train.micro_batch > share > 0:  # which is what the layout would use; the result says so
            values[MICRO_BATCH] = str(share)
        yield tuple(values.items())


def _list_options(config: RunConfig) -> Iterator[Change]:
    """List what only changes how the layout is carried out."""
    parallel = config.parallel
    if parallel.strategy == "ddp" and not parallel.static_graph:
        yield (("parallel.static_graph", "true"),)
    if parallel.strategy == "zero3":
        yield (("parallel.reshard_after_forward", "false"),)
        if parallel.prefetch < 2:
            yield (("parallel.prefetch", "2"),)
    if parallel.recompute.mode != "none":
        yield (("parallel.recompute.mode", "none"),)


def _list_divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def _can_run(overrides: Sequence[str], ranks: int) -> bool:
    try:
        check_run(compose(overrides), ranks)
    except UserError:
        return False
    return True
