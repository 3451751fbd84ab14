"""Mixtures: exact shares at every position, a pure function of seed and position, and weights that change."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.cli.main import main
from hpc_train.config.model import MixtureDataConfig
from hpc_train.data.datasets import open_dataset
from hpc_train.data.loader import Loader
from hpc_train.data.samples.mixture import MixtureDataset
from hpc_train.data.samples.mixture_order import make_order, make_slots
from hpc_train.errors import EXIT_USER_ERROR

LENGTH = 4


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any))
@settings(max_examples=100, deadline=None)
def test_no_source_is_ever_a_sample_away_from_its_share(weights: list[int]) -> None:
    slots = make_slots(weights)
    total = sum(weights)
    for source, weight in enumerate(weights):
        given_ = np.cumsum(slots == source)
        places = np.arange(1, len(slots) + 1)
        assert (np.abs(given_ * total - weight * places) < total).all()
        assert given_[-1] * total == weight * len(slots)


def test_decimal_weights_are_exact() -> None:
    slots = make_slots([0.7, 0.2, 0.1])
    assert (len(slots), np.bincount(slots).tolist()) == (10, [7, 2, 1])


def test_an_order_is_the_same_in_whatever_pieces_it_is_asked_for() -> None:
    order = make_order([50, 30, 7], [[0.5, 0.3, 0.2], [0.1, 0, 0.9]], [333])
    whole = order.order(5, 0, 1000)
    for width in (1, 7, 250, 999):
        pieces = [order.order(5, start, min(width, 1000 - start)) for start in range(0, 1000, width)]
        assert np.concatenate(pieces).tolist() == whole.tolist()
    assert order.order(6, 0, 1000).tolist() != whole.tolist()


def test_shares_hold_in_every_stage_and_each_source_is_read_in_turn() -> None:
    """Against counting: shares of each stage to a sample, and every sample once before any comes again."""
    sizes, weights, changes = [50, 30, 7], [[0.5, 0.3, 0.2], [0.1, 0, 0.9]], [333]
    order = make_order(sizes, weights, changes)
    indices = order.order(5, 0, 2000)
    owner = np.searchsorted(np.cumsum(sizes), indices, side="right")
    for row, (begin, end) in zip(weights, [(0, 333), (333, 2000)], strict=True):
        for source, weight in enumerate(row):
            exact = Fraction(str(weight)) * (end - begin)
            assert abs(int((owner[begin:end] == source).sum()) - exact) < 1
    for source, size in enumerate(sizes):
        own = indices[owner == source] - sum(sizes[:source])
        epochs = [own[start : start + size].tolist() for start in range(0, len(own) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(epochs) < 2 or epochs[0] != epochs[1]
    assert order.count_before(2000).tolist() == np.bincount(owner, minlength=3).tolist()


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Files whose tokens say which file and which place they are from."""
    found = []
    for number, count in enumerate((400, 90)):
        np.save(tmp_path / f"{number}.npy", np.arange(count, dtype="<u2") + 1000 * number)
        found.append(str(tmp_path / f"{number}.npy"))
    return found


def mixture(paths: list[str], **changes: Any) -> MixtureDataConfig:
    facts = {"name": "m", "paths": paths, "weights": [0.75, 0.25], "validation_fraction": 0.1}
    return MixtureDataConfig(**(facts | changes))


def test_every_data_parallel_degree_and_a_resume_see_the_same_samples(paths: list[str]) -> None:
    config = mixture(paths, later_tokens=[64 * LENGTH], later_weights=[0.25, 0.75])
    data = open_dataset(config, LENGTH, "train")
    assert isinstance(data, MixtureDataset)
    seen: dict[tuple[int, int], list[list[int]]] = {}
    for size in (1, 2, 4):
        for first in (0, 48):
            rows = {start: [] for start in range(first, 160, 8)}
            for index in range(size):
                with Loader(data, 3, 8, 2, index, size) as loader:
                    for start in rows:
                        for micro in loader.batch(start).micro:
                            rows[start] += micro.inputs.tolist()
            seen[size, first] = [row for start in rows for row in rows[start]]
    assert seen[1, 0] == seen[2, 0] == seen[4, 0]
    assert all(seen[size, 48] == seen[1, 0][48:] for size in (1, 2, 4))
    second = [row[0] >= 1000 for row in seen[1, 0]]
    assert (sum(second[:64]), sum(second[64:])) == (16, 72)


def test_a_sample_and_its_targets_are_those_of_its_source(paths: list[str]) -> None:
    data = open_dataset(mixture(paths), LENGTH, "train")
    inputs, targets = data.get(np.array([89, 0, 88, 3]))
    assert inputs[:, 0].tolist() == [1000, 0, 352, 12]
    assert (targets - inputs).eq(1).all()


def test_validation_has_all_sources_once(paths: list[str]) -> None:
    data = open_dataset(mixture(paths), LENGTH, "validation")
    with Loader(data, 0, len(data), len(data), 0, 1) as loader:
        (micro,) = loader.batch(0).micro
    first = sorted(micro.inputs[:, 0].tolist())
    assert first == [*range(360, 400 - LENGTH, LENGTH), *range(1081, 1090 - LENGTH, LENGTH)]


BAD = [
    (["data.weights=[1]"], "1 weights for 2 sources in stage 0; give one each"),
    (["data.weights=[1,-1]"], "weights are 0 or more"),
    (["data.weights=[0,0]"], "weights are 0 or more, and one of them more"),
    (["data.weights=[0.123456789,0.5]"], "exact shares repeat only after"),
    (["data.later_tokens=[100]"], "0 weights for 1 changes (data.later_tokens) of 2 sources; give 2"),
    (["data.later_tokens=[100,100]", "data.later_weights=[1,1,1,2]"], "each must be larger than the one before"),
    (["data.paths=[]"], "a mixture needs token stores or token files"),
    (["data.paths=[nowhere.h5]"], "data.path=nowhere.h5: no such file"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=range(len(BAD)))
def test_a_bad_mixture_is_one_line_before_any_rank(
    tmp_path: Path, paths: list[str], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    base = [f"data.paths=[{','.join(paths)}]", "model.vocab_size=2000", f"run_dir={tmp_path}/run", "train.steps=1"]
    assert main(["train", "data=mixture", *base, *words]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert (error.count("\n"), said in error) == (1, True), error
    assert not (tmp_path / "run").exists()
