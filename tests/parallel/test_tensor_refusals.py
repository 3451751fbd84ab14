"""Tensor parallelism: what cannot be split is said in one line."""

from __future__ import annotations

import pytest
from matrix import Case, model
from torch import Tensor, nn

from hpc_train.config.compose import compose
from hpc_train.config.parallel import ParallelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.models.layers import cross_entropy_sum
from hpc_train.parallel.apply import build
from hpc_train.parallel.rules.check import check_support
from hpc_train.parallel.tensor.tensor_plan import check_plan_coverage, read_tensor_plan
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

NO_SEQUENCE, NO_VOCABULARY = "parallel.tensor.sequence=false", "parallel.tensor.vocabulary=false"
TP2 = ("parallel.tp=2",)


REFUSED = {
    "heads": (("parallel.tp=3",), "parallel.tp=3: does not divide model.heads=4; tp can be 1, 2, 4"),
    "feed_forward": (("parallel.tp=2", "model.feed_forward=41"), "does not divide model.feed_forward=41; tp can be 1"),
    "vit": (("parallel.tp=3", "model=vit_tiny"), "does not divide model.heads=4; tp can be 1, 2, 4"),
    "length": (
        ("parallel.tp=4", "train.sequence_length=30"),
        "do not divide over tp=4; use 28 or 32, or parallel.tenso",
    ),
    "short": (("parallel.tp=4", "train.sequence_length=3"), "use 4, or parallel.tensor.sequence=false"),
    "words": (("parallel.tp=4", "model.vocab_size=5"), "a vocabulary of 5 leaves a rank without a part of it"),
    "alone": (("parallel.tensor.sequence=false",), "sequence=false: has no effect with parallel.tp=1"),
    "alone asynchronous": (("parallel.tensor.asynchronous=true",), "asynchronous=true: has no effect"),
    "asynchronous": (
        ("parallel.tp=2", "parallel.tensor.asynchronous=true", NO_SEQUENCE),
        "asynchronous=true: overlaps the exchange of positions; use parallel.tensor.sequence=true",
    ),
    "asynchronous vit": (("parallel.tp=2", "parallel.tensor.asynchronous=true", "model=vit_tiny"), "leave it out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_line_before_any_rank_starts(name: str) -> None:
    overrides, said = REFUSED[name]
    config = compose(overrides)
    with pytest.raises(UserError) as caught:
        check_support(config, max(config.parallel.tp, 1))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [("parallel.tp=4", "train.sequence_length=30", NO_SEQUENCE), ("parallel.tp=4", "model.kv_heads=1")],
    ids=["length", "kv_heads"],
)
def test_what_need_not_divide_is_not_refused(overrides: tuple[str, ...]) -> None:
    check_support(compose(overrides), 4)


PLANS = {
    "no module": ({"layers.*.nothing": "col"}, "'layers.*.nothing' matches no module; correct or remove that line"),
    "nothing to split": ({"norm": "seq"}, "no line col, row, vocab or expert matches a module"),
    "unknown": (
        {"norm": "column"},
        "'norm' is 'column'; use col, row, vocab, seq, heads, all_heads, enter, attention, head_bias, shared_key, ",
    ),
    "wrong kind": ({"norm": "col"}, "norm is RMSNorm, and only Linear can be col"),
    "twice": ({"layers.*.attention.q": "col", "layers.0.attention.*": "row"}, "layers.0.attention.q is both col and"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_wrong_plan_is_one_line(name: str) -> None:
    plan, said = PLANS[name]
    part = model("llama")
    part.plan = plan  # type: ignore[assignment]
    with pytest.raises(UserError) as caught:
        read_tensor_plan(part, whole_model=True)
    assert str(caught.value).startswith("Transformer.plan: ")
    assert said in str(caught.value)


def test_a_module_of_split_positions_must_be_in_the_plan() -> None:
    """Its gradients would be added up over ranks, or not, by guess."""
    part = model("llama")
    plan = read_tensor_plan(part, whole_model=True)
    check_plan_coverage(part, plan)
    del plan["layers.2.attention_norm"]
    with pytest.raises(UserError, match=r"names layers\.2\.attention_norm\.weight in no line, but has lines seq"):
        check_plan_coverage(part, plan)


class _OtherLoss(nn.Module):
    """A model whose loss is not the cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = {"head": "vocab"}
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 4) -> logits (B, 6)."""
        out: Tensor = self.head(x)
        return out

    def blocks(self) -> dict[str, nn.Module]:
        """None."""
        return {}

    def stage(self, names: list[str]) -> nn.Module:
        """Not used."""
        raise NotImplementedError

    def loss_sum(self, out: Tensor, target: Tensor) -> Tensor:
        """With a penalty on large normalisers."""
        return cross_entropy_sum(out, target) + out.logsumexp(-1).square().sum()


def _refused(world: World, source: str) -> str:
    config = Case(2, TP2).config()
    part = _OtherLoss() if source == "loss" else model("llama")
    if source == "heads":
        part.layers["1"].attention.q = nn.Linear(32, 24)  # type: ignore[index, union-attr]
    with pytest.raises(UserError) as caught:
        build(part, lambda split: make_optimizer(split, config.optim), config, world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("loss", "_OtherLoss.loss_sum is not the cross entropy"),
        ("heads", "layers.1.attention.q has 3 heads, which do not divide; use a divisor of 3"),
    ],
)
def test_a_model_that_cannot_be_split_is_one_line(source: str, said: str) -> None:
    for line in run_ranks(_refused, 2, source, parallel=ParallelConfig(tp=2)):
        assert said in line
        assert "\n" not in line
