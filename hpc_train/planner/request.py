"""Turn a configuration into a PlanRequest: which run, on how many ranks, with which batches, and what stays fixed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_train.config.keys.overrides import MICRO_BATCH, find_chosen_parallel_option, get_value, list_explicit_settings
from hpc_train.config.parallel import AXES, compute_smallest_world
from hpc_train.config.run import RunConfig, is_loose
from hpc_train.errors import UserError
from hpc_train.placement.described_cluster import count_nodes, count_ranks_per_node
from hpc_train.planner.search.space import FixedColumns
from hpc_train.planner.settings import list_fixed_columns
from hpc_train.traffic.stages import splits_backward

LARGEST_NODES, LARGEST_BATCH = 1 << 16, 1 << 24
"""Limits on nodes, and on sequences per step, that can be requested: beyond any machine, and still searched quickly."""
MAX_NODES_TRIED = 4096
"""Limit on the nodes that are tried if the cluster's description does not say how many there are."""


@dataclass(frozen=True)
class PlanRequest:
    """A run to estimate as it is, or a space to search."""

    config: RunConfig
    fixed: FixedColumns
    complete: bool
    """Whether the run leaves nothing to choose; then it is estimated as it is."""
    ranks: tuple[int, ...]
    """World sizes to compare; empty: find the fewest nodes on which the model fits."""
    batches: tuple[int, ...]
    """Global batches to compare."""

    @property
    def chooses_nodes(self) -> bool:
        """Whether the planner chooses the number of nodes."""
        return not self.complete and (not self.ranks or bool(self.config.plan.nodes))

    @property
    def growing(self) -> Iterator[int]:
        """Yield world sizes: of the fewest nodes that the given degrees fill, then twice as many, up to the cluster."""
        per_node = count_ranks_per_node(self.config)
        largest = self.config.cluster.total_nodes or MAX_NODES_TRIED
        count = math.ceil(compute_smallest_world(self.config.parallel) / per_node)
        while count <= largest:
            yield count * per_node
            count *= 2


def make_request(config: RunConfig, overrides: Sequence[str]) -> PlanRequest:
    """Return the request of `hpc-train plan` with these overrides, from which `config` was composed.

    A run is complete if an option of the group parallel, or all degrees and train.micro_batch, are given.
    """
    _check_lists(config, overrides)
    check_not_loose(config)
    _check_recomputation(config)
    _check_goals(config)
    keys = config.parallel.fixed if config.parallel.fixed is not None else list_explicit_settings(config, overrides)
    option = find_chosen_parallel_option(overrides)
    complete = not config.parallel.auto and (option is not None or _are_all_given(config, keys))
    ranks = _choose_worlds(config, keys, complete)
    return PlanRequest(
        config, list_fixed_columns(config, () if complete else keys), complete, ranks, _list_batches(config)
    )


def make_job_request(config: RunConfig, ranks: int | None) -> PlanRequest:
    """Return the request of parallel=auto. ranks: of the job; None: the planner chooses."""
    check_not_loose(config)
    _check_recomputation(config)
    _check_goals(config)
    worlds = (ranks,) if ranks is not None else _choose_worlds(config, config.parallel.fixed or [], complete=False)
    return PlanRequest(
        config, list_fixed_columns(config, config.parallel.fixed or ()), False, worlds, _list_batches(config)
    )


def _are_all_given(config: RunConfig, keys: Sequence[str]) -> bool:
    """Whether the given degrees fill the world, and the micro-batch is given too."""
    degrees = [int(get_value(config, f"parallel.{axis}")) for axis in AXES if f"parallel.{axis}" in keys]
    if MICRO_BATCH not in keys or not degrees:
        return False
    return math.prod(degrees) == count_nodes(config) * count_ranks_per_node(config)


def _choose_worlds(config: RunConfig, keys: Sequence[str], complete: bool) -> tuple[int, ...]:
    """Return the world sizes that plan.nodes, cluster.nodes or all degrees ask for; none: the planner chooses."""
    per_node = count_ranks_per_node(config)
    if config.plan.nodes and not complete:
        return tuple(count * per_node for count in _list_node_counts(config))
    described = config.cluster.node.gpus or config.cluster.node.ranks
    undecided = described and config.cluster.nodes is None and config.launch.ranks is None
    if undecided and not complete and not all(f"parallel.{axis}" in keys for axis in AXES):
        return ()
    return tuple(count * per_node for count in _check_node_counts(config, [count_nodes(config)], "cluster.nodes"))


def _list_node_counts(config: RunConfig) -> list[int]:
    return sorted(set(_check_node_counts(config, config.plan.nodes, "plan.nodes")))


def _check_node_counts(config: RunConfig, counts: Sequence[int], key: str) -> Sequence[int]:
    """Return the counts. Raises UserError for more nodes than the cluster has."""
    total = config.cluster.total_nodes
    for count in counts:
        if count > LARGEST_NODES:
            raise UserError(f"{key}={count}: more nodes than any machine has; give at most {LARGEST_NODES:,}")
        if total and count > total:
            raise UserError(f"{key}={count}: {config.cluster.name} has {total}; use no more")
    return counts


def _list_batches(config: RunConfig) -> tuple[int, ...]:
    batches = tuple(sorted(set(config.plan.global_batches)))
    key = "plan.global_batches" if batches else "train.global_batch"
    for batch in batches or (config.train.global_batch,):
        if batch > LARGEST_BATCH:
            raise UserError(f"{key}={batch}: sequences of a step; give at most {LARGEST_BATCH:,}")
    return batches or (config.train.global_batch,)


def _check_lists(config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise UserError for a list to compare that is given but empty."""
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    for name, example in (("nodes", "[8,16]"), ("global_batches", "[256,512]")):
        if f"plan.{name}" in named and not getattr(config.plan, name):
            raise UserError(f"plan.{name}=[]: nothing to compare; give numbers such as {example}, or leave it out")


def check_not_loose(config: RunConfig) -> None:
    """Raise UserError for copies of the model that train on their own."""
    if is_loose(config):
        raise UserError(
            f"parallel.sync.every={config.parallel.sync.every}: the planner knows neither the anchors that each copy "
            "keeps nor what rare exchanges cost in convergence; plan one copy without it, and give the degrees"
        )


def _check_recomputation(config: RunConfig) -> None:
    """Raise UserError for recomputation in a split backward, if both are given."""
    parallel = config.parallel
    if parallel.pp > 1 and parallel.recompute.mode != "none" and splits_backward(parallel.pipeline):
        raise UserError(
            f"parallel.recompute.mode={parallel.recompute.mode}: the planner has no model of what waits for the "
            f"gradients of weights in {parallel.pipeline.schedule}, so it cannot plan this; plan with 1f1b or "
            "interleaved_1f1b, or count the memory of your degrees with hpc-train plan rehearse"
        )


def _check_goals(config: RunConfig) -> None:
    """Raise UserError for a limit on days or money if the run's length is not given."""
    plan = config.plan
    if plan.tokens is not None or config.train.steps is not None:
        return
    for name, value in (("deadline_days", plan.deadline_days), ("budget", plan.budget)):
        if value is not None:
            raise UserError(
                f"plan.{name}={value:g}: how long the run is must be known; give plan.tokens or train.steps"
            )
