"""Training that begins with the weights of a step without optimizer state: saved beside the full ones, or imported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from drawn import draw
from training_runs import metrics, run, small
from transformers import LlamaForCausalLM

from hpc_train.checkpoint import list_committed_steps
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.storage.step_directory import holds_weights_only, locate_step
from hpc_train.cli.main import main
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE
from hpc_train.interfaces import World
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.testing import run_ranks
from hpc_train.training.assemble import assemble_run
from hpc_train.training.factory import make_engine, make_model, open_data
from hpc_train.training.run_directory import locate_run_directory, make_attempt

State = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Begun:
    """Rank 0 before its first step."""

    step: int
    state: State

    @property
    def weights(self) -> State:
        return {name: tensor for name, tensor in self.state.items() if not name.startswith("optim.")}

    def optimizer_is_fresh(self) -> bool:
        state = [tensor for name, tensor in self.state.items() if name.startswith("optim.")]
        return len(state) > 0 and not any(tensor.any() for tensor in state)


def begin(config: RunConfig, ranks: int = 1) -> Begun:
    """A run that is ready for its first step, of one rank, or sharded over more."""
    folder = locate_run_directory(config)
    folder.path.mkdir(exist_ok=True)
    attempt = make_attempt(folder)

    def rank(world: World) -> Begun:
        engine = make_engine(config, world, make_model(config))
        ready = assemble_run(config, world, folder, attempt, StopRequest(), open_data(config, world), engine)
        state = {piece.name: piece.local.numpy().copy() for piece in engine.shards()}
        ready.close()
        return Begun(ready.step, state)

    return run_ranks(rank, ranks, parallel=config.parallel)[0]


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_weights_are_saved_beside_the_checkpoints_and_stay(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path, "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.weights_every=2")
    assert {rank.code for rank in run(config)} == {EXIT_DONE}
    checkpoints = tmp_path / "checkpoints"
    assert list_committed_steps(checkpoints) == [6]
    assert list_committed_steps(checkpoints / "weights") == [2, 4, 6]
    for step in (2, 4, 6):
        assert holds_weights_only(read_manifest(locate_step(checkpoints / "weights", step), step).extra)
    assert not holds_weights_only(read_manifest(locate_step(checkpoints, 6), 6).extra)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sorted(event["step"] for event in events if event["event"] == "weights") == [2, 4, 6]


@pytest.mark.parametrize("parallel", draw(("ddp", "fsdp"), ("fsdp",)))
def test_a_run_from_weights_starts_at_step_0_with_a_fresh_optimizer(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], parallel: str
) -> None:
    first = small(store, tmp_path / "first", "checkpoint.every=6", "checkpoint.weights_every=6", f"parallel={parallel}")
    run(first)
    full = begin(small(store, tmp_path / "first"))
    assert (full.step, full.optimizer_is_fresh()) == (6, False)
    path = tmp_path / "first/checkpoints/weights"
    capfd.readouterr()
    for number, resume in enumerate((path, path / "step-6")):
        begun = begin(small(store, tmp_path / f"next-{number}", f"checkpoint.resume={resume}"))
        assert (begun.step, begun.optimizer_is_fresh()) == (0, True)
        assert same(begun.weights, full.weights)
        said = f"weights of step 6 in {path}: training starts at step 0 with a fresh optimizer"
        assert capfd.readouterr().out.count(said) == 1


def test_weights_of_transformers_are_trained_on(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(small(store, tmp_path / "first", "checkpoint.every=6"), ranks=1)
    full = begin(small(store, tmp_path / "first"))
    assert main(["checkpoint", "export", str(tmp_path / "first"), str(tmp_path / "hf"), "--format", "hf"]) == 0
    LlamaForCausalLM.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "theirs")
    capsys.readouterr()
    words = ["checkpoint", "import", str(tmp_path / "theirs"), str(tmp_path / "next"), "--format", "hf", "--json"]
    assert main(words) == 0
    overrides = json.loads(capsys.readouterr().out)["overrides"]
    config = small(store, tmp_path / "next", *overrides)
    begun = begin(config)
    assert (begun.step, begun.optimizer_is_fresh()) == (0, True)
    assert same(begun.weights, full.weights)
    assert {rank.code for rank in run(config)} == {EXIT_DONE}
    assert [step for (step,) in metrics(config, "step")] == [1, 2, 3, 4, 5, 6]
    first_losses, losses = (metrics(it, "loss") for it in (small(store, tmp_path / "first"), config))
    assert losses[0] < first_losses[0], "it does not start from nothing"
