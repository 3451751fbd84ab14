"""checkpoint.resume: auto, never, a step, a path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_helpers import alone, save_alone

from hpc_train.checkpoint import CheckpointError, resume_from_checkpoint
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (5, 10):
        save_alone(tmp_path / "checkpoints", step, {"w": torch.full((2,), float(step))})
    return tmp_path


def choose(directory: Path, how: str, world: World | None = None) -> tuple[Path, int] | None:
    """(directory, step) of what is loaded, which is what was saved at that step."""
    piece = TensorShard("w", (2,), torch.float32, (0,), torch.zeros(2))
    resumed = resume_from_checkpoint(directory, how, [piece], world or alone())
    assert piece.local.tolist() == ([float(resumed.step)] * 2 if resumed else [0, 0])
    return (resumed.directory, resumed.step) if resumed else None


def damage(run: Path, step: int) -> None:
    (run / "checkpoints" / f"step-{step}" / "shards/000/000000.h5").unlink()


def test_what_each_word_means(run: Path) -> None:
    here = run / "checkpoints"
    assert choose(here, "never") is None
    assert choose(here, "auto") == (here, 10)
    assert choose(here, "5") == (here, 5)
    elsewhere = run / "empty"
    assert choose(elsewhere, "auto") is None
    assert choose(elsewhere, str(here / "step-5")) == (here, 5)
    assert choose(elsewhere, str(here)) == (here, 10)
    assert choose(elsewhere, str(run)) == (here, 10)


def test_auto_passes_over_a_damaged_one_and_never_starts_over_silently(run: Path) -> None:
    here = run / "checkpoints"
    damage(run, 10)
    assert choose(here, "auto") == (here, 5)
    damage(run, 5)
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        choose(here, "auto")


def test_a_wrong_step_lists_what_is_there(run: Path) -> None:
    with pytest.raises(UserError, match=r"step 7 is not in .*: it has 5, 10; choose one") as error:
        choose(run / "checkpoints", "7")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["./nowhere/step-5", "./nowhere", "/"])
def test_a_wrong_path_says_so(run: Path, path: str) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.resume=.*there is no checkpoint"):
        choose(run, path)


def test_all_ranks_choose_the_same(run: Path) -> None:
    here = run / "checkpoints"

    def choices(world: World) -> list[object]:
        with pytest.raises(UserError) as error:
            choose(here, "7", world)
        return [choose(here, "auto", world), choose(here, str(run), world), str(error.value)]

    first, second = run_ranks(choices, 2)
    assert first == second
    assert first[:2] == [(here, 10)] * 2
