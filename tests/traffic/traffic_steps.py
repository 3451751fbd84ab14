"""Layouts, small models, and engines that have completed their setup, shared by the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch._dynamo  # once here and not in every forked rank: torch loads it at the first optimizer step

from hpc_train.config.compose import compose
from hpc_train.config.model import ExpertsConfig, LatentConfig, ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import Engine, MicroBatch, StepBatch, World
from hpc_train.models.registry import build_model as build_model
from hpc_train.parallel.apply import build
from hpc_train.training.optimizer import make_optimizer

LENGTH = 16
LLAMA = TransformerConfig(
    name="llama", vocab_size=30, layers=4, hidden=32, heads=4, kv_heads=2, feed_forward=48, max_positions=LENGTH
)
"""Its vocabulary does not divide: shards are filled up."""
GPT2 = replace(
    LLAMA,
    kv_heads=None,
    activation="gelu_tanh",
    norm="layernorm",
    positions="learned",
    bias=True,
    tied_embeddings=True,
)
VIT = VisionTransformerConfig(
    name="vit", image_size=8, patch_size=4, channels=1, classes=8, layers=4, hidden=32, heads=4, feed_forward=48
)
EXPERTS = replace(
    LLAMA, query_key_norm="head", experts=ExpertsConfig(count=8, top_k=2, feed_forward=16, shared=1, first_dense=1)
)
LATENT = replace(
    EXPERTS,
    kv_heads=None,
    query_key_norm="none",
    latent=LatentConfig(kv_rank=12, q_rank=20, nope_head_dim=6, rope_head_dim=4, value_head_dim=8),
)
FULL_NORMS = replace(LLAMA, pre_norms=False, post_norms=True, query_key_norm="full")
WINDOWS = replace(LLAMA, sliding_window=3, global_every=2, attention_softcap=2.0)


@dataclass(frozen=True)
class Layout:
    """A number of ranks, how they are used, and the model."""

    ranks: int
    overrides: tuple[str, ...]
    model: ModelConfig | None = None
    """None: LLAMA."""

    def config(self) -> RunConfig:
        """Return the configuration of a step of 16 sequences."""
        kind = "vit_tiny" if isinstance(self.model, VisionTransformerConfig) else "llama_tiny"
        sizes = ("train.global_batch=16", f"train.sequence_length={LENGTH}", "train.micro_batch=4")
        config = compose((f"model={kind}", *sizes, *self.overrides))
        object.__setattr__(config, "model", self.model or LLAMA)
        return config


def engine_after_setup(config: RunConfig, world: World) -> Engine:
    """Return the engine after two steps."""
    with torch.device("meta"):
        whole = build_model(config.model)
    engine = build(whole, lambda part: make_optimizer(part, config.optim), config, world)
    for _ in range(2):
        engine.forward_backward(share_of(config, world))
        engine.clip(1.0)
        engine.update(0.0)
    return engine


def share_of(config: RunConfig, world: World) -> StepBatch:
    """Return this rank's part of a batch of zeros: only sizes matter."""
    rows = config.train.global_batch // world.dp_size
    images = isinstance(config.model, VisionTransformerConfig)
    inputs = torch.zeros(rows, 1, 8, 8) if images else torch.zeros(rows, LENGTH, dtype=torch.int64)
    targets = torch.zeros(rows, dtype=torch.int64) if images else inputs
    micro = zip(inputs.split(config.train.micro_batch), targets.split(config.train.micro_batch), strict=True)
    return StepBatch([MicroBatch(*pair) for pair in micro])
