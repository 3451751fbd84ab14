"""Layouts, models and batches that the tests of this folder share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter

import torch
from torch import Tensor, nn

from hpc_train.config.compose import compose
from hpc_train.config.model import TransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.data.loader import cut_micro_batches
from hpc_train.interfaces import IGNORED_TARGET, Engine, MicroBatch, StepBatch, World
from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.training.optimizer import make_optimizer

SEQUENCES = 24
LENGTH = 7
FEATURES = 6
KEEP = "parallel.reshard_after_forward=false"
HSDP = ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2")


@dataclass(frozen=True)
class Layout:
    """A number of ranks and how they are used."""

    ranks: int
    overrides: tuple[str, ...]

    def config(self, *more: str) -> RunConfig:
        """Return the configuration; float64 unless another type is given."""
        return _compose(("precision=fp64", f"train.global_batch={SEQUENCES}", *self.overrides, *more))


@cache
def _compose(overrides: tuple[str, ...]) -> RunConfig:
    return compose(overrides)


LAYOUTS = {
    **{f"ddp-{ranks}": Layout(ranks, ("parallel=ddp",)) for ranks in (1, 2, 4)},
    **{f"zero3-{ranks}": Layout(ranks, ("parallel=fsdp",)) for ranks in (1, 2, 3, 4)},
    **{f"zero3-{ranks}-kept": Layout(ranks, ("parallel=fsdp", KEEP)) for ranks in (2, 3)},
    "hsdp-2x2": Layout(4, HSDP),
    "hsdp-2x2-kept": Layout(4, (*HSDP, KEEP)),
}

LLAMA = partial(
    TransformerConfig,
    name="llama",
    vocab_size=29,
    layers=2,
    hidden=20,
    heads=2,
    kv_heads=1,
    feed_forward=27,
    init_std=0.2,
)
GPT2 = TransformerConfig(
    name="gpt2",
    vocab_size=29,
    layers=2,
    hidden=20,
    heads=2,
    feed_forward=33,
    activation="gelu_tanh",
    norm="layernorm",
    positions="learned",
    max_positions=LENGTH,
    bias=True,
    tied_embeddings=True,
    init_std=0.2,
)


class Bare(nn.Module):
    """A user's module without a plan and without blocks, with a frozen layer, a buffer that is saved and one that is
    not.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, FEATURES))
        self.register_buffer("shift", torch.ones(FEATURES), persistent=False)
        self.frozen = nn.Linear(FEATURES, 10).requires_grad_(False)
        self.hidden = nn.Linear(10, 11)
        self.out = nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, FEATURES) -> logits (B, 5)."""
        x = torch.tanh(self.frozen(x * self.scale + self.shift))
        out: Tensor = self.out(torch.tanh(self.hidden(x)))
        return out


KINDS = ("untied", "tied", "gpt2", "half_frozen", "bare")


def model(kind: str, dropout: float = 0.0) -> nn.Module:
    """Return a model with initial values, the same at every call."""
    if kind == "bare":
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return Bare()
    module = build_model(GPT2 if kind == "gpt2" else LLAMA(tied_embeddings=kind == "tied", dropout=dropout))
    initialise_parameters(module, 0)
    if kind == "half_frozen":
        module.embed.requires_grad_(False)
        module.layers["0"].requires_grad_(False)
    return module


def engine_of(kind: str, config: RunConfig, world: World, dropout: float = 0.0) -> Engine:
    """Return the engine under test, for one of the models above."""
    return build(model(kind, dropout), lambda split: make_optimizer(split, config.optim), config, world)


def global_batch(kind: str, step: int) -> MicroBatch:
    """Return a step's whole batch, the same on every rank. Later sequences have more ignored targets, and the last has
    only such.
    """
    generator = torch.Generator().manual_seed(step)
    if kind == "bare":
        inputs = torch.randn(SEQUENCES, FEATURES, generator=generator, dtype=torch.float64)
        targets = torch.randint(5, (SEQUENCES,), generator=generator)
        targets[::5] = IGNORED_TARGET
    else:
        inputs, targets = torch.randint(29, (2, SEQUENCES, LENGTH), generator=generator)
        for row in range(SEQUENCES):
            targets[row, : LENGTH * row // SEQUENCES] = IGNORED_TARGET
    targets[-4:] = IGNORED_TARGET
    return MicroBatch(inputs, targets)


ACCUMULATIONS = ("one", "two", "short_last")


def share(batch: MicroBatch, world: World, accumulation: str = "one") -> StepBatch:
    """Return this rank's part of a global batch, cut into micro-batches."""
    rows = SEQUENCES // world.dp_size
    size = {"one": rows, "two": rows // 2, "short_last": rows // 2 + 1}[accumulation]
    mine = batch.map(itemgetter(slice(world.dp_index * rows, (world.dp_index + 1) * rows)))
    return StepBatch(cut_micro_batches(mine, rows, size))
