"""The two sides of `bench gpu`: a step of this project's engine, and the loop that one would write by hand.

Both train the same module on the same batch, in the same process. Neither shards anything, because there is only one
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.resources import files

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from hpc_train.bench.step.step_rank import make_same_model
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import Engine, MicroBatch, StepBatch, World
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.parallel.precision.number_formats import autocast_forward
from hpc_train.parallel.user_model import get_named_blocks
from hpc_train.training.numerics.step_numbers import read_step_numbers
from hpc_train.training.optimizer import make_optimizer

Step = Callable[[], float]
"""Trains one step and returns its loss."""
MAX_NORM = 1.0
_ROOMY_GIB = 100
"""With this much memory two sequences of llama_1b fit on the card, for both sides at once."""


def make_config(shape: str, quick: bool, *more: str) -> RunConfig:
    """Return the configuration of a shape: llama_1b, or blocks_8b, a few blocks of Llama 3.1 8B."""
    tiny = (
        "model=llama_tiny",
        "model.layers=2",
        "model.hidden=64",
        "model.feed_forward=128",
        "train.sequence_length=64",
    )
    rows = 2 if quick or (shape == "llama_1b" and _measure_memory_gib() > _ROOMY_GIB) else 1
    large = {
        "llama_1b": ("model=llama_1b", "train.sequence_length=4096"),
        "blocks_8b": ("model=llama_8b", "model.layers=3", "model.vocab_size=16384", "train.sequence_length=8192"),
    }
    batch = (f"train.micro_batch={rows}", f"train.global_batch={rows}")
    return compose([*(tiny if quick else large[shape]), *batch, "parallel=ddp", "precision=bf16", *more])


def _measure_memory_gib() -> float:
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0.0


def make_batch(config: RunConfig, device: torch.device) -> StepBatch:
    """Make random tokens in host memory, page-locked where there is a GPU, as a loader gives them."""
    shape = (config.train.micro_batch, config.train.sequence_length + 1)
    tokens = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(1))  # type: ignore[attr-defined]
    inputs, targets = (part.contiguous() for part in (tokens[:, :-1], tokens[:, 1:]))
    if device.type == "cuda":
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    return StepBatch([MicroBatch(inputs, targets)])


def make_engine(config: RunConfig, world: World) -> Engine:
    """Build the engine of a training; its parameters are drawn on the device."""
    with torch.device("meta"):
        model = build_model(config.model, 0)
    return build(model, partial(_make_optimizer, config=config, world=world), config, world, lambda _: None)


def _make_optimizer(split: nn.Module, config: RunConfig, world: World) -> torch.optim.Optimizer:
    return make_optimizer(split, config.optim, world)


def make_our_step(config: RunConfig, world: World) -> Step:
    """Make the device's part of a step of training: what training.step.train_step calls on the engine."""
    engine, batch = make_engine(config, world), make_batch(config, world.device)

    def step() -> float:
        sums = engine.forward_backward(batch)
        numbers = read_step_numbers(sums, engine.clip(MAX_NORM))
        engine.update(config.optim.lr)
        return numbers.loss

    return step


def make_hand_written_step(config: RunConfig, world: World) -> Step:
    """Make the step of a tuned loop in plain PyTorch: fused AdamW, autocast, compiled blocks where ours are."""
    device = world.device
    model = make_same_model(config, world)
    if config.precision.float8 != "none":
        _convert_to_float8(model, config, device)
    if config.parallel.compile:
        for block in get_named_blocks(model).values():
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    (micro,) = make_batch(config, device).micro
    inputs, targets = micro.inputs, micro.targets
    assert isinstance(inputs, Tensor)

    def step() -> float:
        x, y = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with autocast_forward(config.precision, device):
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def _convert_to_float8(model: nn.Module, config: RunConfig, device: torch.device) -> None:
    """Convert the same layers as a training does: that is one call of torchao in both."""
    from hpc_train.parallel.precision.float8 import convert_linear_layers

    convert_linear_layers(model, config.precision, device)


def find_peak(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a GPU in a precision, from the clusters of conf/; None if none of them has it.

    The longest matching name counts, so that an H200 is not taken for an H20.
    """
    matches: list[tuple[int, float]] = []
    for file in files("hpc_train.conf").joinpath("cluster").iterdir():
        if file.name.endswith(".yaml"):
            cluster = OmegaConf.create(file.read_text())
            assert isinstance(cluster, DictConfig)
            gpu = cluster.get("gpu") or {}
            name, peaks = gpu.get("name"), gpu.get("peak_tflops") or {}
            if name and name.lower() in device_name.lower() and peaks.get(precision):
                matches.append((len(name), float(peaks[precision]) * 1e12))
    return max(matches)[1] if matches else None
