"""Packed documents are exactly the documents alone: samples, loss, gradients and updates, on one device and ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import draw
from matrix import LENGTH, MAX_NORM, RATES, SEQUENCES, VOCABULARY, Case, fresh, model
from outcome import Outcome, assert_close, gradients, held, state, whole
from torch import nn

from hpc_train.cli.main import main
from hpc_train.config.model import TokenDataConfig
from hpc_train.data.datasets import Dataset, open_dataset
from hpc_train.data.samples.document_samples import DocumentPieces
from hpc_train.data.samples.packed_samples import PackedDocuments, pack_pieces
from hpc_train.data.token_files import TokenFile
from hpc_train.errors import EXIT_USER_ERROR
from hpc_train.interfaces import IGNORED_TARGET, MicroBatch, StepBatch, World
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

STEPS = (0, 1)
LAYOUTS = {
    "ddp-2": Case(2, ()),
    "fsdp-2": Case(2, ("parallel=fsdp",)),
    "zero1-2": Case(2, ("parallel.strategy=zero1",)),
    "tp-2": Case(2, ("parallel.tp=2",)),
    "fsdp-recomputed": Case(2, ("parallel=fsdp", "parallel.recompute.mode=full")),
    "tied-fsdp-tp-2x2": Case(4, ("parallel=fsdp", "parallel.tp=2"), "tied"),
    "gpt2-tp-2": Case(2, ("parallel.tp=2",), "gpt2"),
    "grouped-tp-2": Case(2, ("parallel.tp=2", "parallel=fsdp"), "grouped"),
    "windows-tp-2": Case(2, ("parallel.tp=2",), "windows"),
    "capped-recomputed": Case(2, ("parallel=fsdp", "parallel.recompute.mode=full"), "capped"),
}
DRAWN = {"capped-recomputed", "ddp-2", "fsdp-recomputed", "tied-fsdp-tp-2x2", "gpt2-tp-2"}


def make_documents() -> list[np.ndarray]:
    """Documents of all lengths up to more than two sequences, enough for the steps."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 2 * LENGTH + 5, 60)
    return [generator.integers(0, VOCABULARY, length) for length in lengths]


def open_packed() -> PackedDocuments:
    documents = make_documents()
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    file = TokenFile(Path("made"), np.concatenate(documents), VOCABULARY, starts=starts)
    bounds = []
    for start, one in zip(starts, documents, strict=True):
        bounds += [(start + first, min(LENGTH, len(one) - 1 - first)) for first in range(0, len(one) - 1, LENGTH)]
    begin, length = (np.array(column, np.int64) for column in zip(*bounds, strict=True))
    return PackedDocuments("made", file, LENGTH, DocumentPieces(begin, length), pack_pieces(length, LENGTH))


def list_pieces(data: PackedDocuments, indices: range) -> list[np.ndarray]:
    """The documents' pieces of some samples, each with the token after its last input."""
    pieces = range(data.first[indices.start], data.first[indices.stop])
    return [data.store.tokens[data.pieces.begin[one] :][: data.pieces.length[one] + 1] for one in pieces]


def test_samples_are_whole_documents_in_order(tmp_path: Path) -> None:
    documents = make_documents()
    np.save(tmp_path / "a.npy", np.concatenate([[*(one + 1), 0] for one in documents]).astype("<u2"))
    config = TokenDataConfig(
        name="p", path=str(tmp_path / "a.npy"), separator=0, samples="packed", validation_fraction=0.0
    )
    data: Dataset = open_dataset(config, LENGTH, "train")
    inputs, targets = data.get(np.arange(len(data)))
    assert isinstance(inputs, dict)
    found: list[list[int]] = []
    for tokens, starts, aims in zip(*inputs.values(), targets, strict=True):
        places = torch.arange(LENGTH)
        assert starts.le(places).all()
        assert starts[starts].equal(starts)
        for start in starts.unique().tolist():
            own = starts == start
            if aims[own].ne(IGNORED_TARGET).all():
                assert tokens[own][1:].equal(aims[own][:-1])
                found.append([*tokens[own].tolist(), int(aims[own][-1])])
            else:  # the padding, which is at the end
                assert own[start:].all()
                assert aims[own].eq(IGNORED_TARGET).all()
    expected = []
    for one in documents:
        framed = [*(one + 1).tolist(), 0]
        expected += [framed[first : first + LENGTH + 1] for first in range(0, len(framed) - 1, LENGTH)]
    assert found == expected
    fullness = float((targets != IGNORED_TARGET).double().mean())
    assert fullness > 0.6


@pytest.mark.parametrize("kind", ["llama", "gpt2", "grouped", "windows", "capped"])
def test_loss_and_gradients_are_those_of_the_documents_alone(kind: str) -> None:
    data = open_packed()
    inputs, targets = data.get(np.arange(8))
    packed, alone = model(kind), model(kind)
    loss = packed.loss_sum(packed(**inputs), targets)  # type: ignore[operator]
    loss.backward()
    total = 0.0
    for piece in list_pieces(data, range(8)):
        tokens = torch.from_numpy(piece.astype(np.int64))[None]
        own = alone.loss_sum(alone(tokens[:, :-1]), tokens[:, 1:])  # type: ignore[operator]
        own.backward()
        total += own.item()
    assert loss.item() == pytest.approx(total, rel=1e-13)
    for (name, got), wanted in zip(packed.named_parameters(), alone.parameters(), strict=True):
        assert got.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-11, atol=1e-13, msg=name)


def test_without_the_boundaries_it_would_differ() -> None:
    """The comparison above can fail."""
    data = open_packed()
    inputs, targets = data.get(np.arange(8))
    module = model("llama")
    with torch.no_grad():
        right = module.loss_sum(module(**inputs), targets)  # type: ignore[operator]
        wrong = module.loss_sum(module(inputs["x"]), targets)  # type: ignore[operator]
    assert abs(float(right - wrong)) > 1e-3


@cache
def truth(kind: str) -> Outcome:
    """Training on the documents one by one, in one process and plain autograd."""
    data, module = open_packed(), model(kind)
    optimizer = make_optimizer(module, Case(1, (), kind).config().optim)
    outcome = Outcome([], [], [], [])
    for step in STEPS:
        pieces = list_pieces(data, range(step * SEQUENCES, (step + 1) * SEQUENCES))
        count = sum(len(piece) - 1 for piece in pieces)
        optimizer.zero_grad()
        total = 0.0
        for piece in pieces:
            tokens = torch.from_numpy(piece.astype(np.int64))[None]
            loss = module.loss_sum(module(tokens[:, :-1]), tokens[:, 1:]) / count  # type: ignore[operator]
            loss.backward()
            total += loss.item()
        outcome.losses.append(total)
        outcome.gradients.append(gradients(module))
        outcome.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
    outcome.state = state(module, optimizer)
    return outcome


def _train(world: World, case: Case) -> Outcome:
    data, engine = open_packed(), fresh(case, world)
    outcome = Outcome([], [], [], [])
    rows = SEQUENCES // world.dp_size
    for step in STEPS:
        first = step * SEQUENCES + world.dp_index * rows
        cuts = [np.arange(first + cut, first + min(cut + case.micro, rows)) for cut in range(0, rows, case.micro)]
        batch = StepBatch([MicroBatch(*data.get(cut)) for cut in cuts], step=step)
        sums = engine.forward_backward(batch)
        outcome.losses.append(float(sums.loss) / sums.tokens)
        outcome.gradients.append([rectangle for part in engine.parts for rectangle in gradients(part)])
        outcome.norms.append(float(engine.clip(MAX_NORM)))
        assert engine.update(RATES[step])
    outcome.state = held(engine.shards())
    return outcome


@pytest.mark.parametrize("name", draw(list(LAYOUTS), DRAWN))
def test_ranks_train_on_packed_documents_as_one_device_on_each(name: str) -> None:
    case = LAYOUTS[name]
    ranks = run_ranks(_train, case.ranks, case, parallel=case.config().parallel)
    wanted = truth(case.kind)
    for outcome in ranks:
        assert outcome.losses == pytest.approx(wanted.losses, rel=1e-10)
        assert outcome.norms == pytest.approx(wanted.norms, rel=1e-10)
    assert_close(whole([outcome.state for outcome in ranks]), whole([wanted.state]), 1e-10)


BAD = [
    (["parallel.cp=2"], "data.samples=packed: not with parallel.cp=2; set it to 1"),
    (["parallel.pp=2"], "data.samples=packed: not with parallel.pp=2; set it to 1"),
    (["model.dropout=0.1"], "data.samples=packed: not with model.dropout=0.1; set it to 0"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=range(len(BAD)))
def test_what_cannot_keep_documents_apart_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    base = ["train", "data.samples=packed", f"run_dir={tmp_path}/run", "launch.ranks=2", "train.steps=1"]
    assert main([*base, *words]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert (error.count("\n"), said in error) == (1, True), error
    assert not (tmp_path / "run").exists()
