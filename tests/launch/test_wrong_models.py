"""A broken user model gives one line, with the place in the user's file, once for all ranks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import wrong_models
from drawn import draw
from jobs import Workshop

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.interfaces import MicroBatch, StepBatch, World
from hpc_train.testing import run_ranks
from hpc_train.training.factory import make_engine, make_model
from hpc_train.training.records.run_records import summarise_exception
from hpc_train.user_frames import list_user_frames

WRONG = ("model=custom", "model.module=wrong_models", "model.name=wrong")
HERE = r"\S*wrong_models\.py:\d+"
SAYS = {
    "two": HERE + r": Two\.forward\(tokens: .*, mask: .*\) -> .* is called with the inputs: missing .* 'mask'; put",
    "dict": HERE + r": Dict\.forward returned a dict \(scores, hidden\); return logits .*, alone or as",
    "raises": HERE + r", in forward: RuntimeError: .* \(in the first call of Raises\)",
    "shape": HERE + r": Shape\.forward returned a tensor \(2, 256\) of float32 for targets \(2, 16\); return logits",
    "few": HERE + r": Few\.forward returned logits over 10 classes, and a target of the data is \d+; give the model",
    "vector": HERE + r": Vector\.loss_sum returned a tensor \(32,\) of float32; return the sum of the loss",
    "detached": HERE + r": Detached\.loss_sum returned a number that depends on no trained parameter",
    "triple": HERE + r": Triple\.loss_sum\(out: .*\) -> .* is called with what forward returned and the targets: miss",
    "bug": HERE + r", in loss_sum: RuntimeError: Index tensor .* \(in the first call of Bug\)",
    "listed": r"Listed\.blocks\(\): returned a list; return a dict of module names to modules",
    "broken": HERE + r", in blocks: AttributeError: .* \(in Broken\.blocks\(\)\)",
    "empty": r"model: Empty has no method forward; give it one",
    "lazy": r"model: out\.weight of LazyLinear has no shape before the first call; give it its sizes",
    "raising": HERE + r", in raising: ValueError: no luck \(model\.name=wrong cannot be built\)",
    "directly": r"\S+: GPT2Model\.forward returned a BaseModel\w+ \(last_hidden_state.*\); return logits",
}


def _config(kind: str, *more: str) -> RunConfig:
    sizes = ("train.sequence_length=16", "train.micro_batch=2", "train.global_batch=4")
    return compose((*WRONG, f"+model.args.kind={kind}", *sizes, *more))


def _lines(world: World, configs: dict[str, RunConfig]) -> dict[str, str]:
    tokens = torch.randint(10, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    messages = {}
    for kind, config in configs.items():
        try:
            engine = make_engine(config, world, make_model(config))
            engine.forward_backward(StepBatch([MicroBatch(tokens, tokens)]))
        except UserError as error:
            messages[kind] = str(error)
    return messages


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_each_mistake_is_one_line_with_its_place(layout: str) -> None:
    assert SAYS.keys() == {*wrong_models.KINDS, "raising", "directly"}
    configs = {kind: _config(kind, f"parallel={layout}") for kind in SAYS}
    for messages in run_ranks(_lines, 2, configs, parallel=configs["two"].parallel):
        for kind, pattern in SAYS.items():
            assert re.match(pattern, messages[kind]), messages[kind]
            assert messages[kind].isprintable()


def test_the_command_says_it_once_and_ends_with_2(workshop: Workshop) -> None:
    ended = workshop.train("run", *WRONG, "+model.args.kind=raises", "train.steps=2")
    assert ended.code == EXIT_USER_ERROR
    assert re.fullmatch("hpc-train: " + SAYS["raises"] + "\n", ended.err), ended.err
    assert not (workshop.folder / "run").exists()


FROM_PYTHON = "import sys, hpc_train; hpc_train.train(hpc_train.compose(sys.argv[1:]))"
DOORS = {
    "torchrun": (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=2", "-m", "hpc_train", "train"),
    "python": (sys.executable, "-c", FROM_PYTHON),
}


@pytest.mark.parametrize("door", draw(DOORS, ["torchrun"]))
def test_a_refused_run_leaves_no_directory_whatever_started_it(workshop: Workshop, door: str) -> None:
    ended = workshop.train("run", *WRONG, "+model.args.kind=raises", "train.steps=2", command=DOORS[door])
    assert ended.code == 1  # as torchrun and Python end
    assert re.search(SAYS["raises"], ended.err), ended.err
    assert not (workshop.folder / "run").exists()


def _raised(function: str) -> BaseException:
    try:
        getattr(wrong_models, function)()
    except ValueError as error:
        return error
    raise AssertionError


def test_the_users_own_lines_come_first_and_no_others() -> None:
    error = _raised("raising")
    outer = RuntimeError("a library's own words")
    outer.__cause__ = error
    for one in (error, outer):
        frames = list_user_frames(one)
        assert frames[0].filename.endswith("wrong_models.py")
        first, *lines = summarise_exception(one)
        assert first == "ValueError: no luck"
        assert lines[0].endswith('in raising: raise ValueError("no\\nluck")')
