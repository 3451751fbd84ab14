"""ddp's buckets and compressed gradients, which a thread of their own sends, against what real ranks hand to torch."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from traffic_steps import Layout, engine_after_setup, share_of

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks
from hpc_train.traffic.axes import Flow
from hpc_train.traffic.flows import compute_flows

METHODS = {
    "buckets": ("parallel.bucket_mib=0.05",),
    "bf16": ("parallel.compression.method=bf16",),
    "fp16": ("parallel.compression.method=fp16", "parallel.bucket_mib=0.05"),
    "powersgd": ("parallel.compression.method=powersgd", "parallel.compression.rank=2"),
    "topk": ("parallel.compression.method=topk", "parallel.compression.ratio=0.125"),
}


def _sent(world: World, layout: Layout) -> dict[tuple[str, int], int]:
    """How often which collective was handed how many bytes, in the third step."""
    config = layout.config()
    engine = engine_after_setup(config, world)
    seen: Counter[tuple[str, int]] = Counter()
    reduce, gather = dist.all_reduce, dist.all_gather

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen["all_reduce", tensor.nbytes] += 1
        return reduce(tensor, *args, **kwargs)

    def all_gather(tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        seen["all_gather", sum(tensor.nbytes for tensor in tensors)] += 1
        return gather(tensors, *args, **kwargs)

    dist.all_reduce, dist.all_gather = all_reduce, all_gather
    engine.forward_backward(share_of(config, world))
    return dict(seen)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_sends_as_many_bytes_as_it_says(method: str) -> None:
    layout = Layout(2, ("parallel=ddp", *METHODS[method]))
    ranks = run_ranks(_sent, 2, layout)
    assert ranks[0] == ranks[1]
    for collective in ("all_reduce", "all_gather"):
        found = [flow for flow in compute_flows(layout.config(), 2) if flow.collective == collective]
        calls = {size: count for (name, size), count in ranks[0].items() if name == collective}
        assert _bytes(found) == pytest.approx(sum(size * count for size, count in calls.items()), rel=1e-3)
        assert sum(flow.calls for flow in found) == sum(calls.values())


def _bytes(found: list[Flow]) -> float:
    return sum(flow.bytes * flow.calls for flow in found)


CUSTOM = ("model=custom", "model.name=mine", "train.global_batch=16")


def test_a_custom_model_moves_its_parameters_over_data() -> None:
    plain = compute_flows(compose(CUSTOM), 4, parameters=10**7)
    assert _bytes([flow for flow in plain if flow.what == "gradients"]) == 4 * 10**7
    zero = compute_flows(compose((*CUSTOM, "parallel=fsdp", "train.micro_batch=2")), 4, parameters=10**7)
    gathered = [flow for flow in zero if flow.collective == "all_gather"]
    assert _bytes(gathered) == 4 * 10**7 * 2 * 2, "two micro-batches, forward and backward"


@pytest.mark.parametrize(
    ("more", "said"),
    [((), "is unknown, because its number of parameters is"), (("parallel=tp",), r"parallel.tp=2: .* is unknown")],
)
def test_a_custom_model_is_not_guessed(more: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        compute_flows(compose((*CUSTOM, *more)), 4, parameters=10**7 if more else None)


SERVERS = {
    "synchronous": {"reduce": 1.0, "broadcast": 1.0},
    "asynchronous": {"reduce": 3.0, "broadcast": 4.0},
    "peer": {"send_recv": 2.0},
}


@pytest.mark.parametrize("mode", SERVERS)
def test_parameter_servers(mode: str) -> None:
    """In multiples of the parameters."""
    config = compose((*CUSTOM, "parallel=server", f"parallel.server.mode={mode}", "parallel.server.servers=2"))
    found = [flow for flow in compute_flows(config, 4, parameters=10**6) if flow.bytes > 100]
    assert {flow.collective: _bytes([flow]) / 4e6 for flow in found} == SERVERS[mode]


def test_one_rank_moves_nothing() -> None:
    assert compute_flows(compose(("model=llama_tiny",)), 1) == ()


def test_no_torch_is_needed() -> None:
    code = "import sys, hpc_train.traffic.flows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
