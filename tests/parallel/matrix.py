"""The layouts of the matrix. In each of them two steps are trained and saved, and another layout's checkpoint is
resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from outcome import Outcome, gradients, held, state
from torch import nn

from hpc_train.checkpoint import load_step, save_step
from hpc_train.config.compose import compose
from hpc_train.config.model import (
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RopeConfig,
    TransformerConfig,
    VisionTransformerConfig,
)
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import IGNORED_TARGET, Engine, MicroBatch, StepBatch, World
from hpc_train.models.dropout import Dropout, DropoutSite, SampleCounter, list_positions, make_layer_key, make_step_key
from hpc_train.models.experts import Router
from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.layers import ScaledDotProduct
from hpc_train.models.registry import build_model as build_model
from hpc_train.parallel.apply import build
from hpc_train.training.numerics.replica_check import ReplicaCheck
from hpc_train.training.optimizer import make_optimizer

SEQUENCES, LENGTH, VOCABULARY = 16, 16, 29
STEPS = (0, 1)
RATES = (1e-2, 2e-2, 5e-3, 1e-2)
MAX_NORM = 0.05
COMMON = (
    "precision=fp64",
    f"train.global_batch={SEQUENCES}",
    f"train.sequence_length={LENGTH}",
    f"optim.max_norm={MAX_NORM}",
    "optim.eps=1e-6",  # keeps AdamW from blowing up the rounding of gradients that are zero by symmetry (key biases)
)


def _llama(**changes: object) -> TransformerConfig:
    shape: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "feed_forward": 40,
        "init_std": 0.2,
    }
    return TransformerConfig(name="llama", **{**shape, **changes})  # type: ignore[arg-type]


def _gemma(**changes: object) -> TransformerConfig:
    """Return a small Gemma 2 or 3."""
    parts = {"norm": "rmsnorm_1p", "activation": "geglu", "post_norms": True, "scaled_embeddings": True}
    return _llama(**parts, **changes)


MODELS: dict[str, ModelConfig] = {
    "llama": _llama(),
    "sixteens": _llama(feed_forward=48),  # no size that 8-bit products cannot have
    "thirty-twos": _llama(kv_heads=4, feed_forward=64),  # the same for a scale for each 32 values
    "sixty-fours": _llama(hidden=64, kv_heads=4, feed_forward=128),  # and for the halves of each layer
    "tied": _llama(tied_embeddings=True),
    "deep": _llama(layers=8),
    "grouped": _llama(hidden=36, heads=6, kv_heads=3),  # over tp=2, a key head serves query heads of both ranks
    "gpt2": _llama(
        kv_heads=None,
        activation="gelu_tanh",
        norm="layernorm",
        positions="learned",
        max_positions=LENGTH,
        bias=True,
        tied_embeddings=True,
    ),
    "experts": _llama(
        query_key_norm="head", experts=ExpertsConfig(count=8, top_k=2, feed_forward=12, balance_loss=0.1)
    ),
    "wide-experts": _llama(
        kv_heads=4, experts=ExpertsConfig(count=8, top_k=2, feed_forward=12, first_dense=1), feed_forward=64
    ),
    "experts in 8 bits": _llama(
        hidden=64, kv_heads=4, experts=ExpertsConfig(count=4, top_k=2, feed_forward=64), feed_forward=128
    ),
    "shared-experts": _llama(
        tied_embeddings=True,
        experts=ExpertsConfig(
            count=8,
            top_k=3,
            feed_forward=12,
            shared=1,
            first_dense=1,
            gate="sigmoid",
            scale=2.5,
            groups=4,
            top_groups=2,
            balance_loss=0.02,
            balance_bias=0.05,
            capacity_factor=1.25,
        ),
    ),
    "latent": _llama(
        kv_heads=None,
        latent=LatentConfig(kv_rank=12, q_rank=20, nope_head_dim=6, rope_head_dim=4, value_head_dim=7),
        experts=ExpertsConfig(
            count=8,
            top_k=2,
            feed_forward=12,
            shared=1,
            first_dense=1,
            gate="sigmoid",
            groups=4,
            top_groups=2,
            balance_loss=0.02,
            balance_bias=0.05,
        ),
    ),
    "latent-dense": _llama(
        kv_heads=None,
        latent=LatentConfig(kv_rank=12, nope_head_dim=6, rope_head_dim=4, value_head_dim=10, interleaved=False),
    ),
    "windows": _gemma(sliding_window=5, global_every=2, query_key_norm="head", rope=RopeConfig(local_theta=100.0)),
    "capped": _gemma(
        tied_embeddings=True, sliding_window=6, attention_softcap=1.5, logit_softcap=2.5, attention_scale=0.3
    ),
    "olmo": _llama(pre_norms=False, post_norms=True, query_key_norm="full", sliding_window=5, global_every=4),
    "olmo2": _llama(pre_norms=False, post_norms=True, query_key_norm="full"),
    "olmo-grouped": _llama(
        hidden=36, heads=6, kv_heads=3, pre_norms=False, post_norms=True, query_key_norm="full", norm="rmsnorm_1p"
    ),
    "olmo-experts": _llama(query_key_norm="full", experts=ExpertsConfig(count=8, top_k=2, feed_forward=12)),
    "llama-dropout": _llama(dropout=0.2),
    "tied-dropout": _llama(tied_embeddings=True, dropout=0.2),
    "grouped-dropout": _llama(hidden=36, heads=6, kv_heads=3, dropout=0.2),
    "vit": VisionTransformerConfig(
        name="vit",
        image_size=8,
        patch_size=4,
        channels=1,
        classes=10,
        layers=4,
        hidden=32,
        heads=4,
        feed_forward=40,
        init_std=0.2,
    ),
}
MODELS["vit-dropout"] = replace(MODELS["vit"], dropout=0.2)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Case:
    """A layout, the techniques on it, and the model that it trains."""

    ranks: int
    overrides: tuple[str, ...]
    kind: str = "llama"
    micro: int = 4
    """Sequences of one micro-batch; the last of a step may be shorter."""

    def config(self) -> RunConfig:
        """Return the configuration: float64, with clipping at every step."""
        return _compose((*COMMON, f"train.micro_batch={self.micro}", *self.overrides), self.kind)


@cache
def _compose(overrides: tuple[str, ...], kind: str) -> RunConfig:
    config = compose((*overrides, "model=vit_tiny" if kind.startswith("vit") else "model=llama_tiny"))
    object.__setattr__(config, "model", MODELS[kind])
    return config


def model(kind: str) -> nn.Module:
    """Return the whole model with its values, in float64."""
    module = build_model(MODELS[kind]).double()
    initialise_parameters(module, 0)
    return module


def global_batch(kind: str, step: int) -> MicroBatch:
    """Return a step's whole batch, the same on every rank. Some targets are ignored, unevenly over the sequences."""
    generator = torch.Generator().manual_seed(step)
    if kind.startswith("vit"):
        images = torch.randn(SEQUENCES, 1, 8, 8, generator=generator, dtype=torch.float64)
        targets = torch.randint(10, (SEQUENCES,), generator=generator)
        targets[3::5] = IGNORED_TARGET
        return MicroBatch(images, targets)
    inputs, targets = torch.randint(VOCABULARY, (2, SEQUENCES, LENGTH), generator=generator)
    for row in range(SEQUENCES):
        targets[row, : LENGTH * row // SEQUENCES] = IGNORED_TARGET
    targets[-3:] = IGNORED_TARGET
    return MicroBatch(inputs, targets)


def share(batch: MicroBatch, world: World, micro: int, step: int = 0) -> StepBatch:
    """Return this rank's part of a global batch, cut into micro-batches."""
    rows = SEQUENCES // world.dp_size
    mine = (tensor[world.dp_index * rows : (world.dp_index + 1) * rows].split(micro) for tensor in batch)
    return StepBatch([MicroBatch(inputs, targets) for inputs, targets in zip(*mine, strict=True)], step=step)


def truth(
    kind: str, make: Callable[[nn.Module, RunConfig], torch.optim.Optimizer] | None = None
) -> tuple[Outcome, Outcome]:
    """Train the two steps, and the one after them, by plain autograd in one process. make: makes the optimizer; None:
    AdamW.
    """
    module, config = model(kind), Case(1, (), kind).config()
    optimizer = make_optimizer(module, config.optim) if make is None else make(module, config)
    outcomes, counter = [], count_samples(module)
    for steps in (STEPS, (len(STEPS),)):
        outcome = Outcome([], [], [], [])
        for step in steps:
            counter.begin(make_step_key(config.train.seed, step), 0, SEQUENCES, torch.device("cpu"))
            _plain_step(module, optimizer, global_batch(kind, step), RATES[step], outcome)
        outcome.state = state(module, optimizer)
        outcomes.append(outcome)
    return outcomes[0], outcomes[1]


def count_samples(module: nn.Module) -> SampleCounter:
    """Tell each dropout layer of a whole model which layer it is."""
    counter = SampleCounter()
    for name, layer in module.named_modules():
        if isinstance(layer, (Dropout, ScaledDotProduct)):
            layer.site = DropoutSite(counter, torch.tensor(make_layer_key(name)), list_positions)
    return counter


def _plain_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, batch: MicroBatch, lr: float, outcome: Outcome
) -> None:
    logits = module(batch.inputs).flatten(0, -2)
    loss = nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED_TARGET)
    optimizer.zero_grad()
    tokens = int((batch.targets != IGNORED_TARGET).sum())
    routers = [one for one in module.modules() if isinstance(one, Router)]
    for router in routers:
        router.balance.reset()
        router.balance.loss_scale = lambda: 1 / tokens
    loss.backward()
    outcome.losses.append(loss.item())
    outcome.gradients.append(gradients(module))
    outcome.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
    optimizer.step()
    for router in routers:
        if router.config.balance_bias:
            assert router.balance.loads is not None
            router.move_bias(router.balance.loads[:-1])


def fresh(case: Case, world: World) -> Engine:
    """Return the engine of a case, with the model's initial values drawn on the ranks that hold them."""
    config = case.config()
    with torch.device("meta"):
        whole = build_model(config.model)
    return build(whole, lambda split: make_optimizer(split, config.optim, world), config, world)


def steps(engine: Engine, case: Case, world: World, which: tuple[int, ...]) -> Outcome:
    """Train some steps and record everything observable."""
    outcome = Outcome([], [], [], [])
    for step in which:
        sums = engine.forward_backward(share(global_batch(case.kind, step), world, case.micro, step))
        outcome.losses.append(float(sums.loss) / sums.tokens)
        outcome.gradients.append([rectangle for part in engine.parts for rectangle in gradients(part)])
        outcome.norms.append(float(engine.clip(MAX_NORM)))
        assert engine.update(RATES[step])
    outcome.state = held(engine.shards())
    assert ReplicaCheck(engine, world).find_differing_ranks() == ([], True)  # a run takes other copies for a fault
    return outcome


def train_and_resume(world: World, case: Case, other: Path, own: Path) -> tuple[Outcome, Outcome]:
    """Train the two steps and save them into `own`; then continue in a new engine from another layout's save."""
    engine = fresh(case, world)
    trained = steps(engine, case, world, STEPS)
    save_step(own, len(STEPS), engine.shards(), {}, world).wait()
    again = fresh(case, world)
    load_step(other, len(STEPS), again.shards(), world)
    return trained, steps(again, case, world, (len(STEPS),))


def train_and_save(world: World, case: Case, own: Path) -> None:
    """Train the two steps and save them for other layouts."""
    engine = fresh(case, world)
    steps(engine, case, world, STEPS)
    save_step(own, len(STEPS), engine.shards(), {}, world).wait()


def resume(world: World, case: Case, other: Path) -> Outcome:
    """Train the step after the second, from the checkpoint of another layout."""
    engine = fresh(case, world)
    load_step(other, len(STEPS), engine.shards(), world)
    return steps(engine, case, world, (len(STEPS),))
