"""parallel.static_graph and parallel.unused_parameters, and what is said where they are missing or out of place."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from outcome import Arrays, Held, Outcome, assert_close, engine_steps, gradients, held, reference, whole
from plain_setup import LAYOUTS, engine_of
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, MicroBatch, StepBatch, World
from hpc_train.parallel.apply import build
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

TOLERANCE = 1e-10
OPTIM = ("optim.max_norm=0.05", "optim.eps=1e-6", "parallel.bucket_mib=0.001")
STATIC, UNUSED = "parallel.static_graph=true", "parallel.unused_parameters=true"
LOSSLESS = ("parallel.compression.method=topk", "parallel.compression.ratio=1.0")
STEPS = (0, 1, 2)
CASES = [*product(("untied", "gpt2"), ("one", "short_last")), ("half_frozen", "two")]


def _every_case(world: World, config: RunConfig) -> dict[tuple[str, str], Outcome]:
    return {
        (kind, cut): engine_steps(engine_of(kind, config, world), world, config, kind, cut, STEPS)
        for kind, cut in CASES
    }


@pytest.mark.parametrize(
    ("layout", "more"), [("ddp-2", ()), pytest.param("ddp-4", (), marks=pytest.mark.long), ("ddp-2", LOSSLESS)]
)
def test_a_static_graph_gives_the_numbers_of_one_process(layout: str, more: tuple[str, ...]) -> None:
    config = LAYOUTS[layout].config(*OPTIM, STATIC, *more)
    ranks = run_ranks(_every_case, LAYOUTS[layout].ranks, config, parallel=config.parallel)
    for kind, cut in CASES:
        truth, seen = reference(kind, config, STEPS), [rank[kind, cut] for rank in ranks]
        for outcome in seen:
            np.testing.assert_allclose(outcome.norms, truth.norms, rtol=TOLERANCE)
        assert_close(whole([outcome.state for outcome in seen]), whole([truth.state]), TOLERANCE)


ROWS = 8


class Branches(nn.Module):
    """Rows whose first number is positive go left, the others right; a side without rows is not computed."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 4)
        self.out = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 3) -> logits (B, 5)."""
        hidden, left = x.new_zeros(len(x), 4), x[:, 0] > 0
        for branch, rows in ((self.left, left), (self.right, ~left)):
            if rows.any():
                hidden = hidden.index_put((rows.nonzero()[:, 0],), branch(x[rows]))
        logits: Tensor = self.out(torch.tanh(hidden))
        return logits


def _model() -> Branches:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Branches()


def _batch(step: int, ways: str) -> MicroBatch:
    """ways: one letter a row, l or r."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    sign = torch.tensor([1.0 if way == "l" else -1.0 for way in ways], dtype=torch.float64)
    x[:, 0] = (x[:, 0].abs() + 0.1) * sign
    return MicroBatch(x, torch.randint(5, (ROWS,), generator=generator))


WAYS = ("llllrrrr", "llllllrr", "llllllll")
"""Of each step: one rank right, one left; one of both; nobody right."""


def _engine(world: World, config: RunConfig) -> Engine:
    return build(_model(), lambda split: make_optimizer(split, config.optim), config, world)


def _step(batch: MicroBatch, world: World, micro: int) -> StepBatch:
    rows = ROWS // world.dp_size
    mine = [tensor.split(rows)[world.dp_index].split(rows // micro) for tensor in batch]
    return StepBatch([MicroBatch(*pair) for pair in zip(*mine, strict=True)])


def _branching(world: World, config: RunConfig, micro: int) -> tuple[list[list[Held]], list[Held]]:
    engine, seen = _engine(world, config), []
    for step, ways in enumerate(WAYS):
        engine.forward_backward(_step(_batch(step, ways), world, micro))
        seen.append(gradients(engine.parts[0]))
        engine.clip(config.optim.max_norm)
        engine.update(1e-2)
    return seen, [piece for piece in held(engine.shards()) if not piece.name.startswith("optim.")]


def _truth(config: RunConfig) -> tuple[list[Arrays], Arrays]:
    model, seen = _model().double(), []
    optimizer = make_optimizer(model, config.optim)
    assert config.optim.max_norm is not None
    for step, ways in enumerate(WAYS):
        batch = _batch(step, ways)
        optimizer.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
        seen.append(whole([gradients(model)]))
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        optimizer.step()
    return seen, {name: tensor.cpu().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("more", [(), LOSSLESS], ids=["plain", "compressed"])
@pytest.mark.parametrize(("layout", "micro"), [("ddp-2", 1), ("ddp-2", 2), ("ddp-4", 1)])
def test_parameters_that_take_no_part_on_some_ranks_or_on_none(layout: str, micro: int, more: tuple[str, ...]) -> None:
    config = LAYOUTS[layout].config(*OPTIM, UNUSED, *more)
    ranks = run_ranks(_branching, LAYOUTS[layout].ranks, config, micro, parallel=config.parallel)
    steps, state = _truth(config)
    for step, truth in enumerate(steps):
        got = whole([rank[0][step] for rank in ranks])
        assert not any(got[name].any() for name in got.keys() - truth.keys()), "nothing where nobody took part"
        assert_close({name: got[name] for name in truth}, truth, TOLERANCE)
    assert_close(whole([rank[1] for rank in ranks]), state, TOLERANCE)


def _first_steps(world: World, config: RunConfig, ways: tuple[str, ...], micro: int) -> str:
    engine = _engine(world, config)
    try:
        for step, way in enumerate(ways):
            engine.forward_backward(_step(_batch(step, way), world, micro))
            engine.update(1e-2)
    except UserError as error:
        return str(error)
    return ""


MIXED = "lrlrlrlr"


@pytest.mark.parametrize(("layout", "micro"), [("ddp-2", 1), ("ddp-2", 2), ("ddp-4", 1)])
def test_without_the_option_the_first_step_names_what_took_no_part(layout: str, micro: int) -> None:
    config = LAYOUTS[layout].config(*OPTIM)
    for said in run_ranks(_first_steps, LAYOUTS[layout].ranks, config, (MIXED,), micro, parallel=config.parallel):
        assert said == (
            "model: never.weight, never.bias took no part in the loss of a step, and ddp waits for every gradient; "
            "set parallel.unused_parameters=true, or freeze what is not used"
        )


def test_a_static_graph_that_changes_is_said_in_a_line() -> None:
    config = LAYOUTS["ddp-2"].config(*OPTIM, STATIC)
    for said in run_ranks(_first_steps, 2, config, (MIXED, MIXED, "l" * ROWS), 1, parallel=config.parallel):
        assert said == "parallel.static_graph=true: this step used other parameters than the first; leave it out"


@pytest.mark.parametrize(
    ("ranks", "overrides", "said"),
    [
        (2, ("parallel=fsdp", STATIC), "static_graph=true: belongs to ddp, not to zero3"),
        (2, ("parallel=fsdp", UNUSED), "unused_parameters=true: belongs to ddp, not to zero3"),
        (1, (STATIC,), "static_graph=true: has no effect on one rank"),
        (2, (STATIC, UNUSED), "unused_parameters=true: has no effect with static_graph=true"),
        (1, ("parallel.compression.method=bf16", "precision=fp32"), "method=bf16: has no effect on one rank"),
        (2, ("parallel.compression.method=fp16",), "would throw away what precision=fp64 computes"),
        (2, ("parallel=fsdp", "parallel.compression.method=topk"), "belongs to ddp, not to zero3"),
        (2, ("parallel.compression.rank=2",), "rank=2: has no effect with method=none; use powersgd"),
        (2, ("parallel.compression.method=topk", "parallel.compression.rank=2"), "rank=2: has no effect"),
        (2, ("parallel.compression.method=powersgd", "parallel.compression.ratio=0.5"), "ratio=0.5: has no effect"),
        (2, ("parallel.compression.warmup_steps=3",), "has no effect with method=none; use powersgd or topk"),
        (2, ("parallel.compression.feedback=false",), "feedback=false: has no effect with method=none"),
        (2, ("parallel.compression.method=topk", "precision=fp16"), "scales by a factor that changes"),
    ],
)
def test_what_has_no_place_or_no_effect_is_said_in_a_line(ranks: int, overrides: tuple[str, ...], said: str) -> None:
    config = LAYOUTS["ddp-2"].config(*overrides)
    with pytest.raises(UserError) as caught:
        check_support(config, ranks)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
