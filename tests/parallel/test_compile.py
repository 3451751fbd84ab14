"""torch.compile of blocks: the numbers of one process, one graph for all blocks, also under fully_shard."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from outcome import Outcome, assert_close, engine_steps, reference, whole
from plain_setup import LAYOUTS, engine_of
from torch._dynamo.utils import counters

from hpc_train.api import World
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.memory.compiled import check_compiler
from hpc_train.testing import run_ranks

COMPILE = "parallel.compile=true"
OPTIM = ("optim.max_norm=0.05", "optim.eps=1e-6")
STEPS = (0, 1, 2)


def _steps(world: World, config: RunConfig) -> tuple[Outcome, int, int]:
    """(what was trained, graphs that were compiled, places where a graph had to end)."""
    engine = engine_of("untied", config, world)
    outcome = engine_steps(engine, world, config, "untied", "two", STEPS)
    return outcome, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("layout", "more"), [("zero3-2", ()), ("ddp-2", ("parallel.recompute.mode=full",))], ids=["zero3", "ddp-recompute"]
)
def test_compiled_blocks_give_the_numbers_of_one_process(
    layout: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no worker processes under a rank
    config = LAYOUTS[layout].config(COMPILE, *OPTIM, *more)
    ranks = run_ranks(_steps, 2, config, parallel=config.parallel, timeout=400)
    truth = reference("untied", LAYOUTS["ddp-1"].config(*OPTIM), STEPS)
    for outcome, graphs, breaks in ranks:
        np.testing.assert_allclose(outcome.losses, truth.losses, rtol=1e-10)
        np.testing.assert_allclose(outcome.norms, truth.norms, rtol=1e-10)
        assert (graphs, breaks) == (1, 0), "both blocks run the same compiled code, with nothing outside of it"
    assert_close(whole([outcome.state for outcome, _, _ in ranks]), whole([truth.state]), 1e-10)


def _refused(world: World, config: RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        engine_of("bare", config, world)
    return str(caught.value)


def test_a_model_without_blocks_is_refused() -> None:
    said = run_ranks(_refused, 1, LAYOUTS["ddp-1"].config(COMPILE))[0]
    assert said.startswith("parallel.compile=true: Bare does not say what its blocks are")
    assert "\n" not in said


def test_no_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"parallel.compile=true: there is no C\+\+ compiler no-such-compiler here"):
        check_compiler(torch.device("cpu"))
