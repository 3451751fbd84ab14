"""The planner's closed forms of traffic against traffic.flows, on random small configurations."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_runs import run

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.model import network
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.jobs import Jobs
from hpc_train.planner.model.layer.layer_time import ulysses_bytes
from hpc_train.traffic.flows import compute_flows

_SMALL = {
    "number of targets", "loss", "loss and gradient norm", "largest logits", "sums of the loss", "scales of weights",
}  # fmt: skip
"""Flows of a few bytes per token or less."""


def moved(config: RunConfig, world: int) -> dict[tuple[tuple[str, ...], str], float]:
    """(axes, collective) -> bytes of a step."""
    found: dict[tuple[tuple[str, ...], str], float] = defaultdict(float)
    for flow in compute_flows(config, world):
        if flow.what not in _SMALL and "not split" not in flow.what:
            found[flow.axes, flow.collective] += flow.bytes * flow.calls
    return found


def held(jobs: Jobs) -> tuple[np.ndarray, np.ndarray]:
    """Parameters of a rank of a job without a pipeline: in layers, and in embedding and head."""
    ends = (2 - jobs.tied) * jobs.vocab * jobs.hidden / jobs.tp
    return jobs.layers * jobs.layer_parameters / jobs.tp, ends


def with_degrees(model: str, strategy: str, tp: int, cp: int, shards: int, copies: int) -> RunConfig:
    """Composed once for each model: that takes longer than all the rest."""
    base = run(f"model={model}", "precision=bf16", "train.micro_batch=2", "train.sequence_length=512", "launch.ranks=8")
    parallel = replace(base.parallel, strategy=strategy, tp=tp, cp=cp, dp_shard=shards, dp_replicate=copies)
    return replace(base, parallel=parallel)


@settings(max_examples=40)
@given(
    model=st.sampled_from(["llama_1b", "gpt3_1_3b", "llama_8b"]),
    strategy=st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    reshard=st.booleans(),
    degrees=st.sampled_from([(1, 1, 8), (1, 2, 4), (2, 1, 4), (2, 2, 2), (4, 1, 2)]),
    copies=st.sampled_from([1, 2]),
    micro_batches=st.sampled_from([1, 2, 4]),
)
def test_bytes_of_the_data_axes(
    model: str, strategy: str, reshard: bool, degrees: tuple[int, int, int], copies: int, micro_batches: int
) -> None:
    tp, cp, data = degrees
    shards = data // copies if strategy != "ddp" else 1
    assume(shards > 1 or strategy == "ddp")
    config = with_degrees(model, strategy, tp, cp, shards, data // shards)
    config = replace(config, train=replace(config.train, global_batch=2 * data * micro_batches))
    if strategy == "zero3":
        config = replace(config, parallel=replace(config.parallel, reshard_after_forward=reshard))
    try:
        check_support(config, 8)
    except UserError:
        assume(False)
    # The planner counts matrices only: biases, norms and the table of positions are up to 2 % more.
    jobs, told = jobs_from_config(config, 8), moved(config, 8)
    volume = network.data_volume(jobs, *held(jobs))
    shard = tuple(axis for axis, size in (("dp_shard", shards), ("cp", cp)) if size > 1)
    assert float(volume.gathered) == pytest.approx(told[shard, "all_gather"], rel=0.02)
    assert float(volume.scattered) == pytest.approx(told[shard, "reduce_scatter"], rel=0.02)
    reduced = sum(size for (axes_, kind), size in told.items() if kind == "all_reduce" and "dp_replicate" in axes_)
    if reduced:
        assert float(volume.reduced) == pytest.approx(reduced, rel=0.02)


def test_bytes_of_weights_that_are_gathered_in_8_bits() -> None:
    words = (
        "model=llama_8b", "cluster=dgx_h100", "cluster.nodes=1", "precision=bf16", "precision.float8=tensorwise",
        "parallel=fsdp", "train.global_batch=32", "train.micro_batch=2", "train.sequence_length=512",
    )  # fmt: skip
    gathered = []
    for more in ((), ("precision.float8_gather=true",)):
        config = run(*words, *more)
        jobs = jobs_from_config(config, 8)
        gathered.append(float(network.data_volume(jobs, *held(jobs)).gathered))
        assert gathered[-1] == pytest.approx(moved(config, 8)[("dp_shard",), "all_gather"], rel=0.001)
    layers, ends = held(jobs)
    halved = float((layers + 2 * ends / 2) / (2 * layers + 2 * ends / 2))  # the ends once for two gathers of a layer
    assert gathered[1] / gathered[0] == pytest.approx(halved, rel=1e-6)


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bytes_of_the_tensor_axis(sequence: bool, recompute: str) -> None:
    """Two all-reduces a layer each way, and as much again where it is recomputed: a gather and a scatter are one."""
    config = run(
        "model=llama_8b", "precision=bf16", "parallel.tp=4", "parallel.dp_replicate=2", "launch.ranks=8",
        "train.global_batch=8", "train.micro_batch=2", "train.sequence_length=512",
        f"parallel.recompute.mode={recompute}", f"parallel.tensor.sequence={str(sequence).lower()}",
    )  # fmt: skip
    told, jobs = moved(config, 8), jobs_from_config(config, 8)
    size = 2 * 512 * float(jobs.hidden) * 2
    sums = 4 + (2 if recompute == "full" else 0)
    planned = sums * float(jobs.layers * jobs.micro_batches) * size
    found = told[("tp",), "all_reduce"] + (told[("tp",), "all_gather"] + told[("tp",), "reduce_scatter"]) / 2
    # The planner leaves out the ends, and takes recomputation whole where torch stops a sum early.
    assert planned == pytest.approx(found, rel=0.2 if recompute == "full" else 0.03)


def test_messages_between_stages() -> None:
    config = run(
        "model=llama_8b", "precision=bf16", "parallel.tp=2", "parallel.pp=4", "launch.ranks=8", "train.global_batch=8",
        "train.micro_batch=1", "train.sequence_length=512",
    )  # fmt: skip
    told, jobs = moved(config, 8), jobs_from_config(config, 8)
    each = 512 * float(jobs.hidden) * 2 / 2
    assert told[("pp",), "send_recv"] == pytest.approx(2 * 8 * each)


@pytest.mark.parametrize(("model", "tp", "cp"), [("llama_8b", 1, 4), ("llama_8b", 4, 2), ("gpt3_1_3b", 2, 4)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_exchanges_of_heads_for_positions(model: str, tp: int, cp: int, recompute: str) -> None:
    config = run(
        f"model={model}", "precision=bf16", f"parallel.tp={tp}", f"parallel.cp={cp}", "launch.ranks=8",
        "parallel.context.method=ulysses", "train.global_batch=16", "train.micro_batch=2", "train.sequence_length=512",
        f"parallel.recompute.mode={recompute}",
    )  # fmt: skip
    told, jobs = moved(config, 8), jobs_from_config(config, 8)
    planned = float(ulysses_bytes(jobs) * jobs.layers * jobs.micro_batches)
    assert planned == pytest.approx(told[("cp",), "all_to_all"], rel=0.01)
