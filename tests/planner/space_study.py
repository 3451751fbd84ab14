"""Measure how fast the planner is: `python tests/planner/space_study.py` prints candidates per second on one core.

Every configuration of calculon's space of GPT-3 175B on 4,096 GPUs (github.com/calculon-ai/calculon,
llm/optimal_execution.py: what its loops count, said once more here), each estimated by itself; the whole of our own
space of llama_8b on 64 ranks, everything estimated; and the same, and GPT-3, with bounds, as `hpc-train plan` does it.
"""

from __future__ import annotations

import time as clock
from collections.abc import Iterator
from itertools import product

import numpy as np

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.planner import constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.inputs import Column
from hpc_train.planner.model.jobs import Jobs, replace_columns
from hpc_train.planner.model.memory import estimate_memory_totals
from hpc_train.planner.model.step_time import estimate_step_time
from hpc_train.planner.search.degree_limits import find_degree_limits, list_divisors
from hpc_train.planner.search.search import CANDIDATES_AT_ONCE, SearchBase, search_space
from hpc_train.planner.search.space import SearchSpace
from hpc_train.planner.settings import make_single_rank_config

NAMES = (
    *("tp", "pp", "dp_replicate", "dp_shard", "virtual_stages", "micro_batch", "recompute", "zero"),
    *("sequence_parallel", "overlap_tensor", "overlap_data", "offload"),
)


def gpt3(world: int = 4096) -> RunConfig:
    nodes = f"cluster.nodes={world // 8}"
    shape = ("model=gpt3_175b", "train.sequence_length=2048", "train.global_batch=3072", "precision=bf16")
    return compose(["cluster=dgx_a100", nodes, *shape])


def llama(world: int = 64) -> RunConfig:
    shape = ("model=llama_8b", "train.sequence_length=4096", "train.global_batch=256", "precision=bf16")
    return compose(["cluster=leonardo", f"cluster.nodes={world // 4}", *shape])


def layouts(world: int, batch: int, layers: int, heads: int) -> Iterator[tuple[int, int, int, int, list[int]]]:
    """Yield (tp, pp, dp, interleaving, micro-batches): degrees divide the world, the heads and the layers."""
    for tp in (degree for degree in list_divisors(world) if heads % degree == 0):
        for pp in list_divisors(min(world // tp, layers)):
            dp = world // (tp * pp)
            if world % (tp * pp) or layers % pp or dp > batch:
                continue
            for virtual in [1] if pp == 1 else list_divisors(layers // pp):
                yield tp, pp, dp, virtual, list_divisors(batch // dp)


def calculon(world: int = 4096, batch: int = 3072, layers: int = 96, heads: int = 96) -> Iterator[Column]:
    """Yield [NAMES, n] columns, one layout at a time, with all of its choices, including those that do not differ in
    our model.
    """
    for tp, pp, dp, virtual, sizes in layouts(world, batch, layers, heads):
        rest = []
        for recompute, kind in product((2, 1, 0), ("ar", "p2p_rs_ag", "rs_ag")):
            again = 2 if kind == "rs_ag" and recompute != 2 else 1
            networks = 2 ** ((tp > 1) + (pp > 1) + (dp > 1))
            copies = again * networks * (1 if recompute == 2 else 2)  # and offload of activations
            choices = product(
                sizes,
                (1, 0) if dp > 1 else (0,),
                (0, 1, 1) if tp > 1 else (0,),
                (0, 1) if dp > 1 else (0,),
                (0, 1, 2, 2),
            )
            for micro, sharded, overlap, beside, offload in choices:
                degrees = (1, dp) if sharded else (dp, 1)
                row = (tp, pp, *degrees, virtual, micro, recompute, sharded, kind == "rs_ag", overlap, beside, offload)
                rest += [row] * copies
        yield np.array(rest, np.float64).T


def blocks(rows: Iterator[Column]) -> Iterator[Column]:
    waiting: list[Column] = []
    for part in rows:
        waiting.append(part)
        if sum(part.shape[1] for part in waiting) >= CANDIDATES_AT_ONCE:
            yield np.concatenate(waiting, axis=1)
            waiting = []
    if waiting:
        yield np.concatenate(waiting, axis=1)


def estimated(base: Jobs, whole: Iterator[Column]) -> tuple[int, float, float]:
    """Return (configurations, the fastest that fits, seconds of estimating them)."""
    told, count, best, spent = constants.default_constants(), 0, np.inf, 0.0
    for block in blocks(whole):
        for start in range(0, block.shape[1], CANDIDATES_AT_ONCE):
            began = clock.process_time()
            jobs = replace_columns(base, **dict(zip(NAMES, block[:, start : start + CANDIDATES_AT_ONCE], strict=True)))
            held, step = estimate_memory_totals(jobs, told), estimate_step_time(jobs, told).step
            count, best = count + len(step), min(best, float(np.where(held.fits > 0, step, np.inf).min()))
            spent += clock.process_time() - began
    return count, best, spent


def main() -> None:
    config = gpt3()
    base = jobs_from_config(make_single_rank_config(config, config.train.global_batch), 1)
    count, best, spent = estimated(base, calculon())
    print(
        f"calculon's space: {count:,} configurations in {spent:.1f} s, {count / spent:,.0f}/s; "
        f"best {best:.2f} s per step"
    )
    for run, world, exhaustive in ((llama(), 64, True), (llama(), 64, False), (config, 4096, False)):
        base = jobs_from_config(make_single_rank_config(run, run.train.global_batch), 1)
        space = SearchSpace(find_degree_limits(run), world)
        began = clock.process_time()
        found = search_space(SearchBase(base, 4.0), space, constants.default_constants(), exhaustive=exhaustive)
        spent = clock.process_time() - began
        how, rate = "all estimated" if exhaustive else "with bounds", found.searched / spent
        print(
            f"{run.model.name}, {how}: {found.searched:,} candidates in {spent:.1f} s, {rate:,.0f}/s; "
            f"{found.estimated:,} estimated; best {found.best.step.min():.2f} s per step"
        )


if __name__ == "__main__":
    main()
