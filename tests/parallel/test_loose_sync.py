"""Loose synchronisation against a plain loop over copies, in every layout of a copy, saved and resumed."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from drawn import draw
from loose_reference import SEQUENCES, make_batch, make_model, train_copies
from plain_setup import share
from torch import Tensor, nn

from hpc_train.checkpoint import load_step, resume_from_checkpoint, save_step
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, MicroBatch, World
from hpc_train.parallel.apply import build
from hpc_train.parallel.data_parallel.loose_sync import cut_fragments
from hpc_train.parallel.data_parallel.outer_compression import compress_vector, decompress_vector
from hpc_train.testing import run_ranks
from hpc_train.traffic.outer_exchange import count_message_bytes
from hpc_train.training.optimizer import make_optimizer

STEPS = 8
RATES = [1e-2 * (1 + index % 3) for index in range(STEPS)]
ZBV = "parallel.pipeline.schedule=zbv"
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "2 copies": (2, 2, ()),
    "3 copies": (3, 3, ()),
    "4 copies": (4, 4, ()),
    "1 copy": (1, 1, ("parallel.dp_replicate=1",)),
    "2 copies x zero3 2": (4, 2, ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2")),
    "2 copies x zero1 2": (4, 2, ("parallel=zero1", "parallel.dp_replicate=2", "parallel.dp_shard=2")),
    "2 copies x tp 2": (4, 2, ("parallel.dp_replicate=2", "parallel.tp=2")),
    "2 copies x cp 2": (4, 2, ("parallel.dp_replicate=2", "parallel.cp=2")),
    "2 copies x pp 2": (4, 2, ("parallel=pp", "parallel.dp_replicate=2", "parallel.pp=2")),
    "2 copies x zbv 2": (4, 2, ("parallel=pp", "parallel.dp_replicate=2", "parallel.pp=2", ZBV)),
}
EVERY = "parallel.sync.every=4"
WAYS: dict[str, tuple[str, ...]] = {
    "diloco": (EVERY,),
    "local sgd": (EVERY, "parallel.sync.outer_lr=1", "parallel.sync.outer_momentum=0"),
    "fragments": (EVERY, "parallel.sync.fragments=3"),
    "streaming": (EVERY, "parallel.sync.fragments=3", "parallel.sync.overlap=2", "parallel.sync.merge=0.3"),
    "every step": ("parallel.sync.every=1",),
}
CASES = {
    **{f"{layout}, streaming": (layout, "streaming") for layout in LAYOUTS if layout != "4 copies"},
    **{f"2 copies, {way}": ("2 copies", way) for way in WAYS if way != "streaming"},
}
DRAWN = [f"2 copies, {way}" for way in WAYS] + [f"2 copies x {way}, streaming" for way in ("zero3 2", "zbv 2")]
"""Every way; a copy that is sharded, and one that has stages."""


def make_config(layout: str, *more: str) -> RunConfig:
    """float64, with a number of steps that the exchanges divide."""
    return compose(
        [
            "precision=fp64",
            f"train.global_batch={SEQUENCES}",
            f"train.steps={STEPS}",
            "train.sequence_length=8",
            *LAYOUTS[layout][2],
            *more,
        ]
    )


def make_engine(config: RunConfig, world: World) -> Engine:
    """The engine under test."""
    return build(make_model(), lambda split: make_optimizer(split, config.optim), config, world)


def train(engine: Engine, world: World, steps: range) -> list[tuple[float, float]]:
    """Return the loss and the norm of each step."""
    found = []
    for step in steps:
        batch = replace(share(make_batch(step + 1), world, "two"), step=step)
        sums = engine.forward_backward(batch)
        norm = engine.clip(1.0)
        engine.update(RATES[step])
        found.append((float(sums.loss) / sums.tokens, float(norm)))
    return found


def gather_shards(engine: Engine) -> list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]:
    """Return what this rank would save: name, whole shape, offset and values."""
    return [(one.name, one.shape, one.offset, one.local.detach().cpu().numpy().copy()) for one in engine.shards()]


def run(world: World, config: RunConfig) -> tuple[list[tuple[float, float]], list]:
    """Train a copy's rank."""
    engine = make_engine(config, world)
    return train(engine, world, range(STEPS)), gather_shards(engine)


def join_shards(ranks: list[list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]]) -> dict[str, Tensor]:
    """Put together the tensors that ranks hold; copies of a rectangle must be equal."""
    whole: dict[str, Tensor] = {}
    for name, shape, offset, values in itertools.chain.from_iterable(ranks):
        local = torch.from_numpy(values)
        tensor = whole.setdefault(name, torch.full(shape, torch.nan, dtype=local.dtype))
        place = tensor[tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))] if shape else tensor
        assert place.isnan().all() or torch.allclose(place, local, rtol=1e-12, atol=1e-14), name
        place.copy_(local)
    return whole


def cut_names(count: int) -> list[list[str]]:
    """The names of each fragment."""
    named = list(make_model().named_parameters())
    return [[name for name, _ in named[part]] for part in cut_fragments([p.numel() for _, p in named], count)]


@pytest.mark.parametrize("case", draw(CASES, DRAWN))
def test_equals_a_plain_loop(case: str) -> None:
    layout, way = CASES[case]
    ranks, copies, _ = LAYOUTS[layout]
    config = make_config(layout, *WAYS[way])
    found = run_ranks(run, ranks, config, parallel=config.parallel)
    expected = train_copies(config, copies, cut_names(config.parallel.sync.fragments), RATES)
    for steps, _ in found:
        torch.testing.assert_close(steps, expected.steps, rtol=1e-10, atol=0)
    whole = join_shards([shards for _, shards in found])
    tensors = dict(expected.anchor)
    if config.parallel.sync.outer_momentum:
        tensors |= {f"optim.outer_momentum.{name}": value for name, value in expected.momentum.items()}
    for copy, parameters in enumerate(expected.copies):
        tensors |= {f"optim.copy{copy}_parameter.{name}": value for name, value in parameters.items()}
    assert set(tensors) <= set(whole)
    for name, value in tensors.items():
        error = (whole[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert error < 1e-10, (name, error)


def average(world: World, config: RunConfig) -> dict[str, np.ndarray]:
    """Make two steps; return this copy's parameters."""
    engine = make_engine(config, world)
    train(engine, world, range(2))
    mine = f"optim.copy{world.rank}_parameter."
    return {name.removeprefix(mine): values for name, _, _, values in gather_shards(engine) if name.startswith(mine)}


def test_every_step_without_momentum_is_averaging() -> None:
    """By another way than the reference: the copies' own updates, averaged after each step."""
    overrides = ("parallel.sync.every=1", "parallel.sync.outer_lr=1", "parallel.sync.outer_momentum=0")
    config = make_config("2 copies", *overrides)
    found = run_ranks(average, 2, config, parallel=config.parallel)
    models = [make_model().double() for _ in range(2)]
    optimizers = [make_optimizer(one, config.optim) for one in models]
    for step in range(2):
        for copy, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            batch = MicroBatch(*(t[copy * 12 : copy * 12 + 12] for t in make_batch(step + 1)))
            optimizer.zero_grad()
            nn.functional.cross_entropy(one(batch.inputs).flatten(0, -2), batch.targets.flatten()).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = RATES[step] * group.get("lr_factor", 1.0)
            optimizer.step()
        with torch.no_grad():
            for first, second in zip(*(one.parameters() for one in models), strict=True):
                first.add_(second).div_(2)
                second.copy_(first)
    for parameters in found:
        for name, value in models[0].named_parameters():
            torch.testing.assert_close(torch.from_numpy(parameters[name]), value.detach(), rtol=1e-10, atol=1e-14)


def resume(world: World, config: RunConfig, folder: Path, until: int) -> tuple[list, list]:
    """Go on from step `until` of another process, from nothing but what it saved."""
    engine = make_engine(config, world)
    load_step(folder, until, engine.shards(), world)
    return train(engine, world, range(until, STEPS)), gather_shards(engine)


def save_midway(world: World, config: RunConfig, folder: Path, until: int) -> tuple[list, list]:
    """Train to the end, saving at `until`."""
    engine = make_engine(config, world)
    steps = train(engine, world, range(until))
    save_step(folder, until, engine.shards(), {}, world).wait()
    return steps + train(engine, world, range(until, STEPS)), gather_shards(engine)


@pytest.mark.parametrize("until", draw([3, 4, 5], [5]))
def test_resumes_bit_equal_while_exchanges_are_under_way(until: int, tmp_path: Path) -> None:
    config = make_config("2 copies", *WAYS["streaming"], "parallel.sync.compression=int8")
    whole = run_ranks(save_midway, 2, config, tmp_path, until, parallel=config.parallel)
    again = run_ranks(resume, 2, config, tmp_path, until, parallel=config.parallel)
    for (steps, shards), (later, restored) in zip(whole, again, strict=True):
        assert steps[until:] == later
        for (name, *_, values), (_, *_, found) in zip(shards, restored, strict=True):
            assert values.tobytes() == found.tobytes(), name


def test_resumes_in_another_layout_of_a_copy(tmp_path: Path) -> None:
    config = make_config("2 copies", *WAYS["streaming"])
    whole = run_ranks(save_midway, 2, config, tmp_path, 3, parallel=config.parallel)
    other = make_config("2 copies x zero3 2", *WAYS["streaming"])
    again = run_ranks(resume, 4, other, tmp_path, 3, parallel=other.parallel)
    expected, found = join_shards([shards for _, shards in whole]), join_shards([shards for _, shards in again])
    assert set(expected) == set(found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-13, msg=name)


def test_goes_on_with_fewer_copies_and_with_more(tmp_path: Path) -> None:
    """Copies that are left keep their own parameters; a new one starts as one of those that were saved."""
    three, two = (make_config(f"{count} copies", EVERY) for count in (3, 2))
    whole = run_ranks(save_midway, 3, three, tmp_path, 6, parallel=three.parallel)
    assert whole
    saved = run_ranks(load_only, 3, three, tmp_path, 6, parallel=three.parallel)
    for config, ranks, source in ((two, 2, [0, 1]), (make_config("4 copies", EVERY), 4, [0, 1, 2, 0])):
        found = run_ranks(load_only, ranks, config, tmp_path, 6, parallel=config.parallel)
        for own, copy in zip(found, source, strict=True):
            assert {name: values.tobytes() for name, values in own.items()} == {
                name: values.tobytes() for name, values in saved[copy].items()
            }


def load_only(world: World, config: RunConfig, folder: Path, step: int) -> dict[str, np.ndarray]:
    """Resume as a run does; return this rank's values by name, without the number of the copy."""
    engine = make_engine(config, world)
    resumed = resume_from_checkpoint(folder, str(step), engine.shards(), world)
    assert resumed is not None
    return {re.sub(r"copy\d+", "copy", name): values for name, _, _, values in gather_shards(engine)}


def evaluate(world: World, config: RunConfig) -> tuple[float, bool]:
    """Return the loss of the validation batch, and whether training is as it was before."""
    engine = make_engine(config, world)
    train(engine, world, range(6))
    before = gather_shards(engine)
    sums = engine.evaluate(share(make_batch(99), world, "two"))
    same = all(
        one.tobytes() == other.tobytes() for (*_, one), (*_, other) in zip(before, gather_shards(engine), strict=True)
    )
    return float(sums.loss) / sums.tokens, same


def test_evaluates_the_anchors() -> None:
    config = make_config("2 copies", EVERY)
    found = run_ranks(evaluate, 2, config, parallel=config.parallel)
    anchor = train_copies(config, 2, cut_names(1), RATES[:6]).anchor
    one, batch = make_model().double(), make_batch(99)
    one.load_state_dict(anchor)
    expected = nn.functional.cross_entropy(one(batch.inputs).flatten(0, -2), batch.targets.flatten()).item()
    for loss, same in found:
        assert loss == pytest.approx(expected, rel=1e-10)
        assert same


def compressed(world: World, config: RunConfig) -> tuple[dict[str, np.ndarray], list[int]]:
    """Train through one exchange; return the anchors, and the bytes of each gathered message."""
    engine = make_engine(config, world)
    sent, gather = [], dist.all_gather_into_tensor

    def count(out: Tensor, message: Tensor, **options: Any) -> Any:
        sent.append(message.nbytes)
        return gather(out, message, **options)

    dist.all_gather_into_tensor = count
    train(engine, world, range(4))
    return {name: values for name, _, _, values in gather_shards(engine) if not name.startswith("optim.")}, sent


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_compressed_exchanges_are_equal_on_all_copies_and_as_large_as_the_formula_says(method: str) -> None:
    """Against the plain loop, up to what a plain quantiser takes away."""
    ways = (EVERY, f"parallel.sync.compression={method}", "parallel.sync.block=16", "parallel.sync.outer_momentum=0")
    config = make_config("3 copies", *ways, "parallel.sync.outer_lr=1")
    found = run_ranks(compressed, 3, config, parallel=config.parallel)
    plain = train_copies(config, 3, cut_names(1), RATES[:4]).anchor
    numbers = sum(value.numel() for value in plain.values())
    start = dict(make_model().double().named_parameters())
    moved = torch.cat([(plain[name] - start[name]).flatten() for name in plain]).abs().max().item()
    for anchors, sent in found:
        assert sent == [count_message_bytes(numbers, method, 16)]
        assert {n: v.tobytes() for n, v in anchors.items()} == {n: v.tobytes() for n, v in found[0][0].items()}
        error = max(np.abs(anchors[name] - plain[name].numpy()).max() for name in plain)
        assert 0 < error <= 3 * moved / (127 if method == "int8" else 7)


@pytest.mark.parametrize(("method", "levels"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("count", [1, 31, 64])
def test_compression_rounds_to_the_nearest_level_of_its_block(method: str, levels: int, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 3
    found = decompress_vector(compress_vector(values, method, 16), count, method, 16)
    for first in range(0, count, 16):
        block = values[first : first + 16]
        scale = block.abs().max() / levels
        expected = [float(np.float32(np.rint(np.float32(v / scale))) * scale) for v in block]
        torch.testing.assert_close(found[first : first + 16], torch.tensor(expected), rtol=1e-6, atol=0)
    assert not decompress_vector(compress_vector(torch.zeros(count), method, 16), count, method, 16).any()
    values[0] = torch.inf
    assert decompress_vector(compress_vector(values, method, 16), count, method, 16)[: min(count, 16)].isnan().all()


def test_fragments_are_about_equal_and_cover_everything() -> None:
    assert cut_fragments([4, 4, 4, 4], 2) == [slice(0, 2), slice(2, 4)]
    assert cut_fragments([100, 1, 1, 1], 3) == [slice(0, 1), slice(1, 2), slice(2, 4)]
    assert cut_fragments([1, 1, 100], 3) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    with pytest.raises(UserError, match=r"fragments=4: the model trains 3 tensors; use 3 at most"):
        cut_fragments([1, 2, 3], 4)
