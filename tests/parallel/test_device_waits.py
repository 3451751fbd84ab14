"""A training step makes the host wait for the device once: counted on a pretended GPU, and on a real one if there is.

The pretended GPU also shows on which streams the collectives of fully_shard run, and what waits for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pretend_gpu import DEFAULT_STREAM, Entry, Trace
from traced_steps import LAYERS, LAYOUTS, LENGTH, MICRO, ROWS, SHAPE, make_engine, train

from hpc_train.config.compose import compose
from hpc_train.interfaces import MicroBatch, StepBatch
from hpc_train.runtime.start import init, leave_process_group
from hpc_train.training.numerics.step_numbers import read_step_numbers

DRAWN = ("ddp", "fsdp", "pp", "ep", "window")
OTHERS = ("fp8", "tp", "async_tp", "cp", "chunks", "recompute", "muon", "ema", "diloco")
OFFLOADED = ("activations", "optimizer")
Traces = dict[str, Trace]


def trace_layouts(*names: str) -> Traces:
    script = Path(__file__).with_name("traced_steps.py")
    done = subprocess.run([sys.executable, str(script), *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    return {
        name: Trace([Entry(**entry) for entry in one["entries"]], one["waits"], one["before"])
        for name, one in found.items()
    }


@pytest.fixture(scope="module")
def traces() -> Traces:
    return trace_layouts(*DRAWN, *OFFLOADED)


def check_one_wait(found: Trace) -> None:
    assert len(found.entries) > 1000, "the step ran on the device"
    assert found.waits == ["tolist"], "of the loss and the norm"


@pytest.mark.parametrize("name", [name for name in DRAWN if name != "ep"])
def test_a_step_waits_for_the_device_once(traces: Traces, name: str) -> None:
    check_one_wait(traces[name])


@pytest.mark.parametrize("name", ["fsdp", "pp"])
def test_gathers_and_reductions_have_streams_of_their_own(traces: Traces, name: str) -> None:
    """In these layouts all such collectives are fully_shard's."""
    found = traces[name]
    gathers, scatters = found.streams_of("_allgather_base_"), found.streams_of("_reduce_scatter_base_")
    assert len(gathers) == len(scatters) == 1
    assert DEFAULT_STREAM not in gathers | scatters
    assert gathers != scatters, "a gather does not wait for a reduction"
    assert found.count_waits(DEFAULT_STREAM, *gathers) == found.count("_allgather_base_")
    assert found.count_waits(*scatters, DEFAULT_STREAM) >= found.count("_reduce_scatter_base_")


def test_experts_wait_once_more_in_every_exchange(traces: Traces) -> None:
    """all-to-all takes from the host how many rows go where."""
    assert traces["ep"].waits == ["tolist"] * (1 + MICRO * LAYERS)


def test_activations_come_and_go_beside_the_computation(traces: Traces) -> None:
    """All copies of a block go together, on a stream of their own.

    The computation waits for the copies of a block when the next one has run, and before its backward, but never for
    those of the last block, which stays.
    """
    found = traces["activations"]
    assert found.waits == ["tolist"]
    (own,) = {entry.stream for entry in found.entries if entry.what == "aten.copy_.default"} - {DEFAULT_STREAM}
    groups = [entry.what for entry in found.entries if entry.stream == own].count(f"wait {DEFAULT_STREAM}")
    assert groups == MICRO * (LAYERS + LAYERS - 1), "out after each forward, back before all backwards but the first"
    assert found.count_waits(DEFAULT_STREAM, own) == MICRO * 2 * (LAYERS - 1)
    order = [entry for entry in found.entries if own in (entry.stream, entry.what.removeprefix("wait "))]
    first = [entry.what for entry in order].index(f"wait {own}")
    assert [entry.what for entry in order[:first]].count(f"wait {DEFAULT_STREAM}") >= 2, "beside the next forward"


def test_an_optimizer_on_the_host_waits_once_more_for_each_part(traces: Traces) -> None:
    """The model is one part."""
    found = traces["optimizer"]
    assert found.waits == ["tolist", "Event.synchronize"]
    last = [entry for entry in found.entries if entry.what.startswith("wait")][-1]
    assert last.stream == DEFAULT_STREAM, "the next forward waits for the parameters on their way back"


def test_ranks_of_a_window_connect_before_the_first_step(traces: Traces) -> None:
    """Its messages may concern a few ranks only, and NCCL waits for all in the first call of a group."""
    assert [what for what in traces["window"].before if "allreduce" in what]
    assert not traces["fsdp"].before


def test_the_trace_sees_what_waits(traces: Traces) -> None:
    """One of each kind that has been in the code, or may come into it."""
    assert len(traces["waits"].waits) == 9


@pytest.mark.long
def test_further_layouts_wait_once_too() -> None:
    found = trace_layouts(*OTHERS)
    for name in OTHERS:
        check_one_wait(found[name])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_step_on_a_gpu_waits_once(name: str) -> None:
    """torch itself counts: an operator that waits raises, but for the one place that may."""
    _, overrides = LAYOUTS[name]
    config = compose([*overrides, *SHAPE])
    world = init()
    try:
        engine = make_engine(world, config)
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64).pin_memory()
        batch = StepBatch([MicroBatch(tokens, tokens)] * MICRO)
        train(engine, batch)
        train(engine, batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            sums = engine.forward_backward(batch)
            norm = engine.clip(1.0)
            torch.cuda.set_sync_debug_mode("default")
            read_step_numbers(sums, norm)
            torch.cuda.set_sync_debug_mode("error")
            engine.update(1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finally:
        leave_process_group()
