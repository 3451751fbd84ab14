"""Llama, GPT-2 and OLMo 2 of transformers, trained by plain PyTorch in one process, and ours with their weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.pipelining  # imported once here and not by every forked rank
import torch.nn.functional as F
from drawn import draw
from matrix import LENGTH, MAX_NORM, MODELS, RATES, STEPS, VOCABULARY, Case, global_batch, steps
from outcome import Held, Outcome, assert_close, whole
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
)

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.models.huggingface import State, from_huggingface
from hpc_train.models.registry import build_model as build_model
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

TOLERANCE = 1e-10
FLOAT32 = 1e-6
"""Relative; what the norms and the angles that the library's Llama computes in float32 cost."""
KINDS = ("llama", "gpt2", "olmo2")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ddp-2": (2, ("parallel=ddp",)),
    "zero3-2": (2, ("parallel=fsdp",)),
    "tp-2": (2, ("parallel.tp=2",)),
    "pp-2": (2, ("parallel.pp=2", "parallel.pipeline.schedule=1f1b")),
    "cp-2": (2, ("parallel.cp=2",)),
    "tp-2-pp-2": (4, ("parallel.tp=2", "parallel.pp=2", "parallel.pipeline.schedule=1f1b")),
}


class Angles(nn.Module):
    """In place of LlamaRotaryEmbedding, which computes in float32 whatever the model is in."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, T, hidden), position_ids (B, T) -> cosine and sine, each (B, T, head_dim)."""
        width = 8
        frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
        angles = position_ids.to(x.dtype).unsqueeze(-1) * frequencies.repeat(2)
        return angles.cos(), angles.sin()


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
"""The shape of MODELS["llama"] and of MODELS["olmo2"]: four query heads of width 8 on two key heads."""


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def _olmo2() -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**SHAPE))


def _gpt2() -> PreTrainedModel:
    """The shape of MODELS["gpt2"], with tied embeddings."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_inner=40,
            n_layer=4,
            n_head=4,
            layer_norm_epsilon=1e-5,
            initializer_range=0.2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def library_model(kind: str) -> PreTrainedModel:
    """In float64, with values that no initialisation gives: norms and biases off ones and zeros."""
    torch.manual_seed(0)
    theirs = {"llama": _llama, "gpt2": _gpt2, "olmo2": _olmo2}[kind]().double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return theirs


def in_float64(theirs: PreTrainedModel) -> PreTrainedModel:
    """The two parts of the library's Llama and OLMo 2 that are always in float32 replaced; GPT-2 has none."""
    if isinstance(theirs, (LlamaForCausalLM, Olmo2ForCausalLM)):
        theirs.model.rotary_emb = Angles()
        for name, module in list(theirs.named_modules()):
            if type(module).__name__ in ("LlamaRMSNorm", "Olmo2RMSNorm"):
                norm = nn.RMSNorm(len(module.weight), eps=1e-5)
                norm.weight = module.weight
                theirs.set_submodule(name, norm)
    return theirs


def _ours(state: dict[str, Tensor], kind: str) -> State:
    """By our names, in memory of its own."""
    return {name: tensor.detach().clone() for name, tensor in from_huggingface(state, MODELS[kind]).items()}


def _held(state: State) -> list[Held]:
    arrays = [(name, tensor.numpy()) for name, tensor in state.items()]
    return [Held(name, array.shape, (0,) * array.ndim, array, 0) for name, array in arrays]


@cache
def trained(kind: str) -> tuple[State, Outcome]:
    """Their initial weights, and two steps of theirs by autograd and AdamW, both under our names."""
    theirs, config = in_float64(library_model(kind)), Case(1, (), kind).config()
    start, parameters = _ours(theirs.state_dict(), kind), dict(theirs.named_parameters())
    matrices, vectors = ([p for p in parameters.values() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": config.optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=config.optim.eps)
    outcome = Outcome([], [], [], [])
    for step in STEPS:
        batch = global_batch(kind, step)
        logits = theirs(batch.inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED_TARGET)
        optimizer.zero_grad()
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.gradients.append(_held(_ours({name: p.grad for name, p in parameters.items()}, kind)))
        outcome.norms.append(float(nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)))
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
    outcome.state = _held(_ours(parameters, kind))
    for moment in ("exp_avg", "exp_avg_sq"):
        state = _ours({name: optimizer.state[p][moment] for name, p in parameters.items()}, kind)
        outcome.state += _held({f"optim.{moment}.{name}": tensor for name, tensor in state.items()})
    return start, outcome


def _train(world: World, cases: dict[str, Case], weights: dict[str, State]) -> dict[str, Outcome]:
    """Ours on a layout, each kind from the library's weights."""
    outcomes = {}
    for kind, case in cases.items():
        config: RunConfig = case.config()
        whole_model = build_model(MODELS[kind]).double()
        whole_model.load_state_dict(weights[kind])
        engine = build(whole_model, lambda part, optim=config.optim: make_optimizer(part, optim), config, world)
        outcomes[kind] = steps(engine, case, world, STEPS)
    return outcomes


@pytest.mark.parametrize("name", draw(LAYOUTS, ("zero3-2", "tp-2")))
def test_ours_at_any_layout_trains_as_theirs_in_one_process(name: str) -> None:
    """Loss, gradients, norm before clipping, and parameters and moments after two steps."""
    ranks, overrides = LAYOUTS[name]
    cases = {kind: Case(ranks, overrides, kind) for kind in KINDS}
    weights = {kind: trained(kind)[0] for kind in KINDS}
    outcomes = run_ranks(_train, ranks, cases, weights, parallel=cases["llama"].config().parallel)
    for kind in KINDS:
        _assert_same([outcome[kind] for outcome in outcomes], trained(kind)[1])


def _assert_same(ranks: list[Outcome], wanted: Outcome) -> None:
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, wanted.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(rank.norms, wanted.norms, rtol=TOLERANCE)
    for step, expected in enumerate(wanted.gradients):
        assert_close(whole([rank.gradients[step] for rank in ranks]), whole([expected]), TOLERANCE)
    state = whole([[piece for piece in rank.state if not piece.name.startswith("optim.step.")] for rank in ranks])
    assert_close(state, whole([wanted.state]), TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_librarys_model(kind: str) -> None:
    """What was replaced in it changes its logits by the rounding of float32 and no more."""
    tokens = global_batch(kind, 0).inputs
    with torch.no_grad():
        replaced, as_it_is = in_float64(library_model(kind))(tokens).logits, library_model(kind)(tokens).logits
    assert replaced.dtype == torch.float64
    assert (replaced - as_it_is).norm() <= FLOAT32 * as_it_is.norm()
    assert kind == "gpt2" or not torch.equal(replaced, as_it_is)
