"""AdamW's moments in 8 bits: torchao's numbers bit for bit, whole and in every layout of shards; saved and resumed.

From the same gradients a layout gives the same bits. A model's gradients differ by rounding between layouts, so there
the losses and weights are compared within a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import draw
from matrix import MODELS, SEQUENCES, STEPS, Case, fresh, steps
from numpy.typing import NDArray
from outcome import Held, Outcome, held, whole
from test_matrix import HSDP
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchao.optim import AdamW8bit

from hpc_train.checkpoint import load_step, save_step
from hpc_train.interfaces import World
from hpc_train.parallel.optimizer_step import get_local
from hpc_train.parallel.optimizers.quantized_adamw import QuantizedAdamW
from hpc_train.testing import run_ranks

BLOCK = 32
SHAPES = {"wide": (96, 64), "odd": (72, 100), "tall": (3, 5, 384), "small": (8, 32), "vector": (4096,)}
"""Blocks fit the rows of the first and the third."""
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
UPDATES = 4


def _make_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def _make_gradients(update: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(update + 1)
    return {name: torch.randn(shape, generator=generator) * 10.0**-update for name, shape in SHAPES.items()}


def _make_ours(parameters: dict[str, nn.Parameter]) -> QuantizedAdamW:
    names = {parameter: name for name, parameter in parameters.items()}
    groups = [{"params": list(parameters.values()), "weight_decay": 0.3}]
    return QuantizedAdamW(groups, names, **SETTINGS, block_size=BLOCK)  # type: ignore[arg-type]


def _make_torchao(parameters: dict[str, nn.Parameter]) -> AdamW8bit:
    return AdamW8bit(list(parameters.values()), **SETTINGS, weight_decay=0.3, block_size=BLOCK)


def _update(
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    split: Callable[[str, Tensor], Tensor] = lambda _, whole: whole,
) -> None:
    """Four updates, torchao's without a compiler."""
    with torch.compiler.set_stance("force_eager"):
        for update in range(UPDATES):
            for name, gradient in _make_gradients(update).items():
                if name in parameters:
                    parameters[name].grad = split(name, gradient)
            optimizer.step()


def _torchao_alone(*names: str) -> tuple[dict[str, nn.Parameter], AdamW8bit]:
    parameters = {name: one for name, one in _make_parameters().items() if name in names}
    optimizer = _make_torchao(parameters)
    _update(parameters, optimizer)
    return parameters, optimizer


def test_whole_parameters_get_the_bits_of_torchao() -> None:
    parameters = _make_parameters()
    ours = _make_ours(parameters)
    _update(parameters, ours)
    wanted, theirs = _torchao_alone("wide", "tall", "small")
    for name, parameter in wanted.items():
        assert torch.equal(parameters[name], parameter), name
        own, state = ours.state[parameters[name]], theirs.state[parameter]
        for moment in ("exp_avg", "exp_avg_sq"):
            if name == "small":
                assert torch.equal(own[moment], state[moment])
            else:
                assert torch.equal(own[f"{moment}_codes"], state[moment].codes)
                assert torch.equal(own[f"{moment}_scales"].flatten(), state[moment].scale)
    full = {name for name, one in parameters.items() if "exp_avg" in ours.state[one]}
    assert full == {"odd", "small", "vector"}


PLACEMENTS = {
    "rows-2": ((2,), (Shard(0),)),
    "rows-4-uneven": ((4,), (Shard(0),)),  # 3 rows on 4 ranks: one has none
    "columns-2": ((2,), (Shard(-1),)),
    "rows-and-columns": ((2, 2), (Shard(0), Shard(-1))),
    "copies": ((2, 2), (Replicate(), Shard(0))),
    "middle": ((2,), (Shard(1),)),
}


def _train_shards(world: World, layout: str) -> tuple[dict[str, NDArray[Any]], int]:
    sizes, how = PLACEMENTS[layout]
    mesh = DeviceMesh("cpu", torch.arange(world.size).reshape(sizes))

    def split(name: str, whole: Tensor) -> Tensor:
        return distribute_tensor(whole, mesh, [replace_dimension(one, whole.ndim) for one in how])

    def replace_dimension(one: Shard | Replicate, dimensions: int) -> Shard | Replicate:
        return Shard(one.dim % dimensions) if isinstance(one, Shard) else one

    chosen = {name: one for name, one in _make_parameters().items() if name in ("wide", "tall")}
    parameters = {name: nn.Parameter(split(name, one.detach())) for name, one in chosen.items()}
    optimizer = _make_ours(parameters)
    _update(parameters, optimizer, split)
    found = {name: _gather(one) for name, one in parameters.items()}
    for name, parameter in parameters.items():
        found |= {f"{key}.{name}": _gather(v) for key, v in optimizer.state[parameter].items() if key != "step"}
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return found, sum(get_local(value).nbytes for value in states)


def _gather(tensor: Tensor) -> NDArray[Any]:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach().cpu().numpy()


@pytest.mark.parametrize("layout", draw(PLACEMENTS, ("rows-4-uneven", "rows-and-columns", "copies")))
def test_shards_get_the_bits_of_whole_parameters(layout: str) -> None:
    wanted, theirs = _torchao_alone("wide", "tall")
    ranks = run_ranks(_train_shards, int(np.prod(PLACEMENTS[layout][0])), layout)
    for name, parameter in wanted.items():
        state = theirs.state[parameter]
        for found, _ in ranks:
            assert np.array_equal(found[name], parameter.detach()), name
            for moment in ("exp_avg", "exp_avg_sq"):
                assert np.array_equal(found[f"{moment}_codes.{name}"], state[moment].codes)
                assert np.array_equal(found[f"{moment}_scales.{name}"].flatten(), state[moment].scale)
    elements = sum(one.numel() for one in wanted.values())
    copies = 2 if layout == "copies" else 1
    assert sum(held for _, held in ranks) == copies * 2 * elements * (1 + 4 / BLOCK)


def test_torchao_over_fully_shard_gives_the_same_where_its_blocks_are_ours() -> None:
    """Each rank's half of the matrix has whole blocks and 8192 elements: torchao does not keep it in full."""

    def train(world: World, ours: bool) -> NDArray[Any]:
        torch.manual_seed(0)
        layer = nn.Linear(64, 256, bias=False)
        fully_shard(layer, mesh=DeviceMesh("cpu", torch.arange(2)))
        named = {"weight": layer.weight}
        optimizer = _make_ours(named) if ours else _make_torchao(named)
        with torch.compiler.set_stance("force_eager"):
            for update in range(UPDATES):
                x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * update + world.rank))
                layer(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return _gather(layer.weight)

    ours, theirs = run_ranks(train, 2, True), run_ranks(train, 2, False)
    assert np.array_equal(ours[0], theirs[0])


MODELS["eights"] = replace(MODELS["llama"], hidden=64, feed_forward=128)  # type: ignore[call-arg]
MODELS["expert-eights"] = replace(MODELS["experts"], hidden=64, feed_forward=128)  # type: ignore[call-arg]
EIGHT = ("precision=fp32", "optim.state=8bit", f"optim.block_size={BLOCK}")
CASES = {
    "ddp-2": Case(2, ("parallel=ddp",), "eights"),
    "zero1-2": Case(2, ("parallel.strategy=zero1",), "eights"),
    "zero2-4": Case(4, ("parallel.strategy=zero2",), "eights", micro=2),
    "fsdp-4": Case(4, ("parallel=fsdp",), "eights", micro=2),
    "hsdp": Case(4, HSDP, "eights", micro=2),
    "tp-2": Case(2, ("parallel.tp=2",), "eights", micro=10),
    "tp-2-fsdp-2": Case(4, ("parallel=fsdp", "parallel.tp=2"), "eights"),
    "cp-2-fsdp": Case(4, ("parallel=fsdp", "parallel.cp=2"), "eights"),
    "pp-2-zero1": Case(4, ("parallel.strategy=zero1", "parallel.pp=2"), "eights"),
    "pp-2-fsdp": Case(4, ("parallel=fsdp", "parallel.pp=2"), "eights", micro=2),
    "ep-2": Case(2, ("parallel=fsdp", "parallel.ep=2"), "expert-eights"),
    "experts-fsdp-4": Case(4, ("parallel=fsdp",), "expert-eights"),
}
LAST = len(STEPS)
LOSS, NORM, WEIGHTS, CODES = 1e-5, 1e-4, 2e-4, 0.05
"""What rounding of gradients to float32 may change: losses, norms, all weights together, the share of other codes."""


def _with_eight(case: Case) -> Case:
    return replace(case, overrides=(*case.overrides, *EIGHT))


def _train(world: World, case: Case, other: Path, own: Path) -> tuple[Outcome, list[Held], Outcome, Outcome]:
    """Two steps and a save, the third; and, in new engines, what was loaded and the third from two checkpoints."""
    engine = fresh(case, world)
    trained = steps(engine, case, world, STEPS)
    save_step(own, LAST, engine.shards(), {}, world).wait()
    on = steps(engine, case, world, (LAST,))
    again = fresh(case, world)
    load_step(own, LAST, again.shards(), world)
    resumed = steps(again, case, world, (LAST,))
    for one, two in zip(on.state, resumed.state, strict=True):
        assert np.array_equal(one.local, two.local), f"{one.name}: resumed in the same layout, to the bit"
    elsewhere = fresh(case, world)
    load_step(other, LAST, elsewhere.shards(), world)
    loaded = held(elsewhere.shards())
    return trained, loaded, on, steps(elsewhere, case, world, (LAST,))


def _train_alone(world: World, case: Case, own: Path) -> tuple[Outcome, Outcome]:
    engine = fresh(case, world)
    trained = steps(engine, case, world, STEPS)
    save_step(own, LAST, engine.shards(), {}, world).wait()
    return trained, steps(engine, case, world, (LAST,))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Outcome, Outcome, Path]]:
    made: dict[str, tuple[Outcome, Outcome, Path]] = {}

    def train(kind: str) -> tuple[Outcome, Outcome, Path]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            case = _with_eight(Case(1, (), kind, micro=SEQUENCES))
            (outcomes,) = run_ranks(_train_alone, 1, case, folder, parallel=case.config().parallel)
            made[kind] = (*outcomes, folder)
        return made[kind]

    return train


@pytest.mark.parametrize("name", draw(CASES, ("tp-2",)))
def test_every_layout_trains_as_one_process_and_takes_its_state(
    name: str, alone: Callable[[str], tuple[Outcome, Outcome, Path]], tmp_path: Path
) -> None:
    case = _with_eight(CASES[name])
    first, after, folder = alone(case.kind)
    ranks = run_ranks(_train, case.ranks, case, folder, tmp_path, parallel=case.config().parallel, timeout=200)
    _assert_near([trained for trained, _, _, _ in ranks], first)
    _assert_near([on for _, _, on, _ in ranks], after)
    loaded, saved = whole([loaded for _, loaded, _, _ in ranks]), whole([first.state])
    assert loaded.keys() == saved.keys()
    assert sum(key.startswith("optim.exp_avg_codes.") for key in saved) > 8
    assert all(np.array_equal(loaded[key], value) for key, value in saved.items()), "from another layout, to the bit"
    _assert_near([resumed for _, _, _, resumed in ranks], after)


def _assert_near(ranks: list[Outcome], wanted: Outcome) -> None:
    for outcome in ranks:
        np.testing.assert_allclose(outcome.losses, wanted.losses, rtol=LOSS)
        np.testing.assert_allclose(outcome.norms, wanted.norms, rtol=NORM)
    found, truth = whole([outcome.state for outcome in ranks]), whole([wanted.state])
    assert found.keys() == truth.keys()
    codes = [key for key in truth if "_codes." in key]
    other = sum(np.count_nonzero(found[key] != truth[key]) for key in codes) / sum(truth[key].size for key in codes)
    weights = [key for key in truth if not key.startswith("optim.")]
    difference = sum(float(np.square(found[key] - truth[key]).sum()) for key in weights)
    error = np.sqrt(difference / sum(float(np.square(truth[key]).sum()) for key in weights))
    print(f"{other:.1e} of the codes differ; weights by {error:.1e}; losses {outcome.losses} {wanted.losses}")
    assert other < CODES
    assert error < WEIGHTS
