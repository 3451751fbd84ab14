"""The loss in chunks equals the loss of all tokens at once, and never has the logits of more than a chunk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hpc_train.bench.loss import LossBenchOptions, measure_loss
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.models.layers import cross_entropy_sum
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.parallel.chunked_loss import ChunkedLoss, LossChunks
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

HIDDEN, CLASSES = 12, 37


def _head(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(HIDDEN, CLASSES, bias=False, dtype=dtype)


def _inputs(dtype: torch.dtype, ignored: slice) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = 3 * torch.randn(2, 9, HIDDEN, dtype=dtype)
    target = torch.randint(CLASSES, (2, 9))
    target.view(-1)[ignored] = IGNORED_TARGET
    return x.requires_grad_(), target


@pytest.mark.parametrize("ignored", [slice(0), slice(3, 8), slice(None)], ids=["none", "some", "all"])
@pytest.mark.parametrize("tokens", [1, 5, 18, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_loss_in_chunks_is_that_of_all_tokens(softcap: float | None, tokens: int, ignored: slice) -> None:
    head = _head(torch.float64)
    x, target = _inputs(torch.float64, ignored)
    logits = head(x)
    wanted = cross_entropy_sum(logits if softcap is None else softcap * torch.tanh(logits / softcap), target)
    gradients = torch.autograd.grad(wanted * 0.3, (x, head.weight))
    loss = ChunkedLoss(head, LossChunks(tokens, CLASSES, softcap=softcap))(x, target)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    for found, expected in zip(torch.autograd.grad(loss * 0.3, (x, head.weight)), gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_what_needs_no_gradient_gets_none() -> None:
    head = _head(torch.float64).requires_grad_(False)
    x, target = _inputs(torch.float64, slice(2))
    ChunkedLoss(head, LossChunks(4, CLASSES))(x, target).backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is None
    wanted = torch.autograd.grad(cross_entropy_sum(head(x), target), x)[0]
    torch.testing.assert_close(x.grad, wanted)
    with torch.no_grad():
        alone = ChunkedLoss(head, LossChunks(4, CLASSES))(x, target)
    assert not alone.requires_grad
    assert alone.item() == pytest.approx(cross_entropy_sum(head(x), target).item())


def test_a_target_outside_of_the_vocabulary_is_seen() -> None:
    x, target = _inputs(torch.float64, slice(0))
    target[1, 1] = CLASSES
    with pytest.raises(RuntimeError, match="vocabulary"):
        ChunkedLoss(_head(torch.float64), LossChunks(4, CLASSES))(x, target)


def test_bfloat16_rounds_no_more_than_the_whole_loss() -> None:
    x, target = _inputs(torch.bfloat16, slice(2))
    head, exact = _head(torch.bfloat16), _head(torch.bfloat16).double()
    wide = x.detach().double().requires_grad_()
    wanted = torch.autograd.grad(cross_entropy_sum(exact(wide), target), (wide, exact.weight))
    whole = torch.autograd.grad(cross_entropy_sum(head(x), target), (x, head.weight))
    chunked = torch.autograd.grad(ChunkedLoss(head, LossChunks(5, CLASSES))(x, target), (x, head.weight))
    for mine, theirs, true in zip(chunked, whole, wanted, strict=True):
        assert (mine - true).norm() < 1.5 * (theirs - true).norm()


def test_an_8b_model_has_the_logits_of_one_chunk() -> None:
    """Llama-3-8B's head on 8,192 tokens: beyond the gradients that any loss makes, a chunk in bfloat16 and float32."""
    found = measure_loss(LossBenchOptions(8192, 4096, 128256, 1024, "bf16", rounds=1, count=True))
    gradients = 2 * 4096 * (8192 + 128256)
    assert found.peak_bytes["full"] > 8192 * 128256 * 10
    assert found.peak_bytes["chunked"] - gradients < 2.6 * found.chunk_bytes
    assert found.memory < 0.3


REFUSED = {
    "a vision transformer": (("model=vit_tiny",), "vit_tiny is not one of our transformers"),
    "a loss of one's own": (("train.loss=mine",), "train.loss=mine takes all logits"),
    "accuracy": (("train.metrics=[perplexity,accuracy]",), "the metric accuracy takes all logits"),
    "unused parameters": (("parallel.unused_parameters=true",), "after the model's forward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_all_logits_is_refused(name: str) -> None:
    overrides, words = REFUSED[name]
    with pytest.raises(UserError, match=words):
        check_support(compose(["parallel=ddp", "train.loss_chunk=64", *overrides]), 2)


@pytest.mark.parametrize("value", ["-1", "many"])
def test_a_bad_chunk_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="loss_chunk"):
        compose([f"train.loss_chunk={value}"])


def _build_with_adapter(world: World, config: RunConfig) -> str:
    with torch.device("meta"):
        whole = build_model(config.model)
    try:
        build(whole, lambda part: make_optimizer(part, config.optim), config, world)
    except UserError as error:
        return str(error)
    return ""


def test_an_adapter_of_the_output_layer_is_refused() -> None:
    config = compose(["train.loss_chunk=64", "adapter=lora", "adapter.targets=[head]", "model.tied_embeddings=false"])
    assert "an output layer without an adapter" in run_ranks(_build_with_adapter, 1, config)[0]
