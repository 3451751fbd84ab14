"""A user's own data, loss, metrics, optimizer and schedule: runs equal a plain loop, and resume elsewhere."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import own_parts
import pytest
import torch
import torch.nn.functional as F
from jobs import Workshop

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.data.own_dataset import OwnStream, StreamPart, open_own_dataset
from hpc_train.data.sample_order import order_samples
from hpc_train.data.stream_loader import StreamLoader
from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.interfaces import MicroBatch, StepBatch, World
from hpc_train.testing import run_ranks
from hpc_train.training.factory import make_engine, make_model
from hpc_train.training.optimizer import make_optimizer, make_schedule

MODEL = ("model=custom", "model.module=own_parts", "model.name=pair", "precision=fp64")
PAIRS = ("data=custom", "data.module=own_parts", "data.name=pairs", "data.validation_fraction=0.25")
MEASURED = ("train.module=own_parts", "train.metrics=[accuracy,perplexity,margin]")
OPTIM = ("optim=custom", "optim.module=own_parts", "optim.name=momentum", "+optim.args.momentum=0.5", "optim.lr=0.1")
RATE = ("optim.schedule.name=halving", "+optim.schedule.args.every=2", "optim.max_norm=null")
SIZES = ("train.global_batch=8", "train.micro_batch=2", "train.eval_every=6", "train.eval_batches=2")
ALL = (*MODEL, *PAIRS, *MEASURED, *OPTIM, *RATE, *SIZES, "checkpoint.every=3", "train.tensorboard=false")


def _records(workshop: Workshop, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workshop.folder / run / "metrics.jsonl").read_text().splitlines()]


def _train_plainly(loss_factor: float) -> tuple[list[float], dict[str, float]]:
    """Return the losses of six steps and the metrics after them, by plain torch in one process."""
    module = make_model(compose((*MODEL, *PAIRS))).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for step in range(6):
        left, right, targets = _stack(order_samples(0, 48, 8 * step, 8))
        loss = loss_factor * F.cross_entropy(module(left, right)["logits"], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (step // 2)
        optimizer.step()
        losses.append(loss.item())
    left, right, targets = _stack(48 + order_samples(0, 16, 0, 16))
    logits = module(left, right)["logits"].detach()
    loss = float(loss_factor * F.cross_entropy(logits, targets))
    chosen = targets == 1
    return losses, {
        "validation_loss": loss,
        "validation_perplexity": math.exp(loss),
        "validation_accuracy": float((logits.argmax(-1) == targets).double().mean()),
        "validation_margin": float((logits[chosen, 1] - logits[chosen, 0]).mean()),
    }


def _stack(indices: np.ndarray[Any, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    samples = [own_parts.sample(int(index)) for index in indices]
    left, right = (torch.stack([one[side] for one in samples]) for side in ("left", "right"))
    return left, right, torch.tensor([one["targets"] for one in samples])


def test_a_run_of_own_parts_is_a_plain_loop_and_resumes_in_another_layout(workshop: Workshop) -> None:
    own_loss = ("train.loss=doubled",)
    assert workshop.train("run", *ALL, *own_loss, "train.steps=6", "parallel=fsdp", "launch.ranks=2").code == 0
    losses, measured = _train_plainly(2.0)
    records = _records(workshop, "run")
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-10)
    assert {key: records[-1][key] for key in measured} == pytest.approx(measured, rel=1e-10)
    step = workshop.folder / "run" / "checkpoints" / "step-3"
    again = (*ALL, *own_loss, "train.steps=6", "parallel=ddp", "launch.ranks=1", f"checkpoint.resume={step}")
    ended = workshop.train("again", *again)
    assert ended.code == 0, ended.err
    assert re.search(r"validation \d\.\d+  accuracy \S+  perplexity \S+  margin \S+  lr", ended.out), ended.out
    records = _records(workshop, "again")
    assert [record["loss"] for record in records] == pytest.approx(losses[3:], rel=1e-10)
    assert {key: records[-1][key] for key in measured} == pytest.approx(measured, rel=1e-10)


def test_the_place_in_the_users_file_comes_first_where_a_data_set_fails(workshop: Workshop) -> None:
    ended = workshop.train("run", *ALL, "train.steps=6", "+data.args.broken=7", "launch.ranks=1")
    assert ended.code == EXIT_USER_ERROR
    assert re.search(r"own_parts\.py:\d+, in __getitem__: ValueError: this sample is damaged \(reading", ended.err)
    assert ended.err.count("\n") == 1, ended.err


def _config(*overrides: str) -> RunConfig:
    return compose((*MODEL, *PAIRS, *SIZES, *overrides))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("ragged", "data.name=words: samples of one batch have the shapes (1,) and (2,); give them one shape, or give"),
        ("single", "data.name=words: a sample is a Tensor; return (inputs, targets), or a dictionary with"),
        ("unnamed", "data.name=words: a sample has the entries x; return (inputs, targets), or a dictionary with"),
        ("objects", "data.name=words: a sample holds a object, which is not a tensor, an array or a number"),
        ("number", "data.name=words: returned a int; return a data set with __len__ and __getitem__, or one with"),
        ("once", "data.name=words: returned a generator, which can be read only once; return an object whose __iter__"),
        ("empty", "data.name=words: no sample of 0 is left for train; give more, or change"),
    ],
)
def test_data_of_another_form_are_one_line(kind: str, says: str) -> None:
    config = _config("data.name=words", f"+data.args.kind={kind}").data
    with pytest.raises(UserError) as caught:
        open_own_dataset(config, "train").get(np.arange(4))  # type: ignore[arg-type, union-attr]
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("data.name=pears",), "data.name=pears: not a registered data set; did you mean 'pairs'?"),
        (
            ("+data.args.sample=3",),
            "data.args (sample): do not fit pairs(samples: 'int' = 64, broken: 'int' = -1) -> ",
        ),
    ],
)
def test_unknown_data_are_one_line(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError) as caught:
        open_own_dataset(_config(*overrides).data, "train")  # type: ignore[arg-type]
    assert str(caught.value).startswith(says)


def test_a_data_set_that_takes_any_argument_is_cut_for_validation() -> None:
    """It does not know the split, and would give the same samples for both."""
    config = _config("data.name=tolerant", "+data.args.depth=3").data
    train, validation = (open_own_dataset(config, split) for split in ("train", "validation"))  # type: ignore[arg-type]
    assert not isinstance(train, OwnStream)
    assert not isinstance(validation, OwnStream)
    assert (len(train), len(validation)) == (30, 10)
    assert train._source.options == {"depth": 3}


def test_the_share_of_a_rank_is_not_dealt_again() -> None:
    with pytest.raises(UserError, match="own_share: takes dp_index and dp_size, and returned a data set with an"):
        open_own_dataset(_config("data.name=own_share").data, "train")  # type: ignore[arg-type]


def _said(world: World, configs: dict[str, RunConfig]) -> dict[str, str]:
    said = {}
    for name, config in configs.items():
        try:
            make_engine(config, world, make_model(config))
        except UserError as error:
            said[name] = str(error)
    return said


OPTIMIZERS = {
    "group": "optim: Counting keeps count in its parameter groups and changes it, so it would not be saved",
    "state": "optim: Counting has the state count, a int, which cannot be saved; make it a tensor",
    "moving": "optim: Counting changes parameters in a step whose gradient and learning rate are 0",
    "raising": "own_parts.py:",
    "typo": "optim.args (momentun): do not fit momentum(",
    "loss": "train.loss=doublet: not a registered loss; did you mean 'doubled'?",
    "metric": "train.metrics=acuracy: not a registered metric; did you mean 'accuracy'?",
}


def test_what_cannot_be_resumed_is_refused_before_the_first_step() -> None:
    own = ("optim=custom", "optim.module=own_parts")
    configs = {
        where: _config(*own, "optim.name=counting", f"+optim.args.where={where}") for where in list(OPTIMIZERS)[:4]
    }
    configs["typo"] = _config(*own, "optim.name=momentum", "+optim.args.momentun=1")
    configs["loss"] = _config("train.loss=doublet", "train.module=own_parts")
    configs["metric"] = _config("train.metrics=[acuracy]")
    (said,) = run_ranks(_said, 1, configs, parallel=configs["loss"].parallel)
    assert said.keys() == OPTIMIZERS.keys()
    for name, expected in OPTIMIZERS.items():
        assert expected in said[name], said[name]
        assert "\n" not in said[name]


def _regress(world: World, config: RunConfig) -> tuple[float, float]:
    """Return the loss of a batch by the engine, and by plain torch in the precision of the run."""
    data = open_own_dataset(config.data, "train")  # type: ignore[arg-type]
    assert not isinstance(data, OwnStream)
    inputs, targets = data.get(np.arange(8))
    assert targets.dtype == torch.float64
    model = make_model(config)
    wanted = own_parts.squared(model(**{name: value.float() for name, value in inputs.items()}), targets.float())
    engine = make_engine(config, world, model)
    sums = engine.forward_backward(StepBatch([MicroBatch(inputs, targets)]))
    engine.clip(1.0)
    return float(sums.loss), float(wanted)


def test_targets_with_a_fraction_have_the_type_of_the_parameters() -> None:
    config = _config("precision=fp32", "data.name=differences", "train.module=own_parts", "train.loss=squared")
    ((ours, plain),) = run_ranks(_regress, 1, config, parallel=config.parallel)
    assert ours == pytest.approx(plain, rel=1e-6)


def test_a_schedule_is_checked_when_it_is_made() -> None:
    with pytest.raises(UserError, match=r"optim.schedule.name=negative: returned -1.0 for step 0; return a factor"):
        make_schedule(_config("optim.module=own_parts", "optim.schedule.name=negative").optim, 0.1, 10)


def test_groups_of_parameters_keep_their_own_factor_of_the_rate() -> None:
    from hpc_train.parallel.optimizer_step import OptimizerUpdates

    def updated(world: World) -> list[float]:
        one, other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        groups = [{"params": [one], "lr_factor": 0.5}, {"params": [other]}]
        updates = OptimizerUpdates([torch.nn.ParameterList([one, other])], torch.optim.SGD(groups, lr=1.0), world)
        one.grad, other.grad = torch.ones(1), torch.ones(1)
        updates.update(0.1)
        return [one.item(), other.item()]

    assert run_ranks(updated, 1) == [pytest.approx([-0.05, -0.1])]


# Streams.


def _open_stream(name: str, index: int, count: int) -> OwnStream:
    config = _config(f"data.name={name}").data
    found = open_own_dataset(config, "train", StreamPart(index, count))  # type: ignore[arg-type]
    assert isinstance(found, OwnStream)
    return found


def _read(loader: StreamLoader, start: int, batches: int) -> list[torch.Tensor]:
    got = []
    for number in range(batches):
        for micro in loader.batch(start + number * loader.global_batch).micro:
            assert isinstance(micro.inputs, dict)
            got += list(micro.inputs["left"])
    return got


@pytest.mark.parametrize("name", ["stream", "whole", "resumed", "forgetful", "counted"])
def test_the_ranks_of_a_stream_read_different_samples_and_all_of_them(name: str) -> None:
    read = []
    for index in range(2):
        loader = StreamLoader(_open_stream(name, index, 2), 8, 3, index, 2)
        read.append(_read(loader, 0, 5))
        loader.close()
    together = [one for pair in zip(*read, strict=True) for one in pair]
    for index, left in enumerate(together):
        assert torch.equal(left, own_parts.sample(index)["left"])


@pytest.mark.parametrize("name", ["stream", "whole", "resumed"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_stream_goes_on_where_it_was_also_over_its_end(name: str, index: int) -> None:
    def make_loader() -> StreamLoader:
        return StreamLoader(_open_stream(name, index, 2), 8, 4, index, 2)

    whole = make_loader()
    wanted = _read(whole, 0, 13)  # 52 samples, of which this part has about 20
    whole.close()
    before = make_loader()
    got = _read(before, 0, 3)
    state = json.loads(json.dumps(before.state()))
    before.close()
    after = make_loader()
    after.restore(state, 24)
    got += _read(after, 24, 10)
    first = _read(after, 0, 1)
    after.close()
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    assert torch.equal(first[0], wanted[0])


def test_runs_of_streams_resume_exactly_or_say_that_they_do_not(workshop: Workshop) -> None:
    stream = (*ALL, "data.name=stream", "train.eval_every=0", "train.metrics=[]")
    whole = (*stream, "train.steps=6", "launch.ranks=2")
    assert workshop.train("whole", *whole).code == 0
    wanted = [record["loss"] for record in _records(workshop, "whole")]
    step = workshop.folder / "whole" / "checkpoints" / "step-3"
    assert workshop.train("again", *whole, f"checkpoint.resume={step}").code == 0
    assert [record["loss"] for record in _records(workshop, "again")] == wanted[3:]
    other = (*stream, "train.steps=4", "launch.ranks=1", f"checkpoint.resume={step}")
    ended = workshop.train("other", *other)
    assert ended.code == EXIT_USER_ERROR
    assert ended.err.startswith("hpc-train: data: the position of this stream was saved on 2 data-parallel ranks, and")
    ended = workshop.train("anew", *other, "data.resume=beginning")
    assert ended.code == 0, ended.err
    assert "data: the stream starts at its beginning again, because data.resume=beginning" in ended.out


def test_adamw_is_what_it_was() -> None:
    assert type(make_optimizer(torch.nn.Linear(2, 2), _config().optim)) is torch.optim.AdamW
