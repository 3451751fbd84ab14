"""checkpoint.incremental in real training: frozen bodies, adapters, embeddings, and AdamW over everything."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from drawn import draw
from torch import Tensor, nn
from training_runs import small

from hpc_train.checkpoint import Saver, list_committed_steps, load_step, verify_step
from hpc_train.checkpoint.convert.tensor_sources import SavedStepTensors, read_whole_tensors
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.save.incremental.incremental_writer import IncrementalWriter
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import TensorShard, World
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.testing import run_ranks
from hpc_train.training.assemble import assemble_run
from hpc_train.training.factory import make_engine, make_model, open_data
from hpc_train.training.loop import run_training
from hpc_train.training.rank import advise_incremental_saves, list_frozen_parameters
from hpc_train.training.run_directory import RunDirectory, locate_run_directory, prepare_run_directory

SETTINGS = ("model.hidden=256", "model.feed_forward=512", "checkpoint.every=2", "checkpoint.keep=9")
TRAINED = ("norm", "head", "output")


def tune(config: RunConfig, ranks: int = 2, frozen: bool = True) -> list[str | None]:
    """Train, all but the last layers frozen; what each rank would be told at the start."""

    def rank(world: World, folder: RunDirectory) -> str | None:
        model = make_model(config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or name.startswith(TRAINED))
        engine = make_engine(config, world, model)
        advice = advise_incremental_saves(list_frozen_parameters(engine), engine)
        run = assemble_run(config, world, folder, 0, StopRequest(), open_data(config, world), engine)
        run_training(run)
        run.close()
        return advice

    folder = locate_run_directory(config)
    prepare_run_directory(folder, config)
    return run_ranks(rank, ranks, folder, parallel=config.parallel)


def contents(directory: Path, step: int) -> dict[str, Tensor]:
    manifest = read_manifest(directory / f"step-{step}", step)
    with SavedStepTensors(directory / f"step-{step}", manifest, "") as source:
        return read_whole_tensors(source, source.tensors)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(it, other[name]) for name, it in one.items())


def events(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    lines = locate_run_directory(config).events.read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.parametrize("strategy", draw(("ddp", "zero3"), ("zero3",)))
def test_a_frozen_body_and_a_trained_head(store: Path, tmp_path: Path, strategy: str) -> None:
    settings = (*SETTINGS, f"parallel.strategy={strategy}")
    plain = small(store, tmp_path / "plain", *settings)
    sharing = small(store, tmp_path / "sharing", *settings, "checkpoint.incremental=true")
    for advice in [*tune(plain), *tune(sharing)]:
        assert "checkpoint.incremental=true" in str(advice)
    there, here = tmp_path / "plain/checkpoints", tmp_path / "sharing/checkpoints"
    for step in (2, 4, 6):
        assert same(contents(here, step), contents(there, step))
        assert verify_step(here, step) == []
    first, *later = events(sharing, "checkpoint")
    assert first["shared"] == 0
    assert all(it["bytes"] - it["shared"] < first["bytes"] / 5 for it in later)
    again = small(store, tmp_path / "sharing", *settings, "train.steps=8", "checkpoint.incremental=true")
    tune(again, ranks=1 if strategy == "ddp" else 2)
    assert list_committed_steps(here) == [2, 4, 6, 8]
    assert events(again, "checkpoint")[-1]["shared"] == 0, "it shares nothing that it has not written itself"
    assert verify_step(here, 8) == []


def test_adamw_over_everything_shares_nothing(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path / "run", *SETTINGS, "checkpoint.incremental=true")
    assert tune(config, frozen=False) == [None, None]
    assert [it["shared"] for it in events(config, "checkpoint")] == [0, 0, 0]
    assert [len(read_manifest(tmp_path / f"run/checkpoints/step-{n}", n).files) for n in (2, 4, 6)] == [2, 2, 2]


def test_a_file_system_without_links_is_an_event(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path / "run", *SETTINGS, "checkpoint.incremental=true")

    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with patch.object(os, "link", refused):
        tune(config)
    (warning,) = events(config, "warning")
    assert warning["about"] == "checkpoint"
    assert "Operation not permitted" in warning["why"]
    assert [it["shared"] for it in events(config, "checkpoint")] == [0, 0, 0]


class LowRank(nn.Module):
    """A frozen matrix and two thin ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(512, 1024, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(512, 4, bias=False), nn.Linear(4, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 512) -> (B, 1024)."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def pieces_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[TensorShard]:
    named = dict(model.named_parameters())
    state = {f"optim.{key}.{n}": it for n, p in named.items() for key, it in optimizer.state.get(p, {}).items()}
    for name, tensor in {**named, **state}.items():
        yield TensorShard(name, tuple(tensor.shape), tensor.dtype, (0,) * tensor.dim(), tensor.detach())


def trained_and_saved(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: list[Tensor]) -> Any:
    """Three steps, saved after each, and whether the last loads as it is."""
    world = World(0, 1, 0, torch.device("cpu"), cast(Any, None), 0, 1)
    saver = Saver(directory, world, background=False, incremental=IncrementalWriter())
    for step, x in enumerate(inputs, start=1):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        saver.save(step, pieces_of(model, optimizer), {})
    ended = saver.wait()
    expected = {piece.name: piece.local.clone() for piece in pieces_of(model, optimizer)}
    found = list(pieces_of(model, optimizer))
    for piece in found:
        piece.local.zero_()
    load_step(directory, len(inputs), found, world)
    assert same({piece.name: piece.local for piece in found}, expected)
    return [(it.bytes, it.shared) for it in ended]


def test_adapters_of_low_rank(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LowRank()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    (first, _), *later = trained_and_saved(tmp_path, model, optimizer, [torch.randn(8, 512) for _ in range(3)])
    for size, shared in later:
        assert shared == first
        assert size - shared < first / 10


def test_an_embedding_under_sgd(tmp_path: Path) -> None:
    """Of 32,768 rows those of the batch change."""
    torch.manual_seed(0)
    model = nn.Embedding(1 << 15, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randint(0, 5000, (16,)), torch.randint(9000, 10_000, (16,)), torch.randint(0, 100, (16,))]
    (first, _), *later = trained_and_saved(tmp_path, model, optimizer, batches)
    for size, shared in later:
        assert size - shared <= first * 0.3
