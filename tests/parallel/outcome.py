"""The outcome of a few steps of training as whole arrays, from an engine on any layout or from plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from plain_setup import global_batch, model, share
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import IGNORED_TARGET, Engine, MicroBatch, TensorShard, World
from hpc_train.shard_rectangles import FusedParts, find_fused_parts, list_rectangles

Array = npt.NDArray[np.float64]
Arrays = dict[str, Array]
RATES = (1e-2, 2e-2, 5e-3)
"""Learning rates of up to three steps."""


@dataclass(frozen=True)
class Held:
    """A piece without its tensor type, so that it can be sent to another process."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: Array
    replica: int


@dataclass
class Outcome:
    """What one rank observes: one entry per step, and the state after the last step."""

    losses: list[float]
    norms: list[float]
    gradients: list[list[Held]]
    state: list[Held]


def held(pieces: Iterable[TensorShard]) -> list[Held]:
    """Return copies of a rank's pieces."""
    return [Held(p.name, p.shape, p.offset, p.local.double().cpu().numpy().copy(), p.replica) for p in pieces]


def whole(ranks: Sequence[Sequence[Held]]) -> Arrays:
    """Assemble the logical tensors from all ranks' pieces. Copies must agree bit for bit and nothing may be missing."""
    arrays: Arrays = {}
    for piece in (piece for rank in ranks for piece in rank):
        array = arrays.setdefault(piece.name, np.full(piece.shape, np.nan))
        place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.local.shape, strict=True))
        assert np.all(np.isnan(array[place]) | (array[place] == piece.local)), f"copies of {piece.name} differ"
        array[place] = piece.local
    for name, array in arrays.items():
        assert not np.isnan(array).any(), f"part of {name} is in no piece"
    return arrays


def gradients(module: nn.Module) -> list[Held]:
    """Return this rank's rectangles of every parameter's gradient."""
    fused = find_fused_parts(module)
    found = [(name, p.grad, fused.get(p)) for name, p in module.named_parameters() if p.grad is not None]
    return [held for name, gradient, parts in found for held in _rectangles(name, gradient, parts)]


def _rectangles(name: str, tensor: Tensor, fused: FusedParts | None = None) -> list[Held]:
    return [
        Held(name, tuple(tensor.shape), offset, local.double().cpu().numpy().copy(), 0)
        for offset, local in list_rectangles(tensor, fused)
    ]


def engine_steps(
    engine: Engine,
    world: World,
    config: RunConfig,
    kind: str,
    accumulation: str,
    steps: Sequence[int],
    change: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
) -> Outcome:
    """Train the given steps. change: gives each step's global batch another form."""
    outcome = Outcome([], [], [], [])
    for step in steps:
        sums = engine.forward_backward(share(change(global_batch(kind, step)), world, accumulation))
        outcome.losses.append(float(sums.loss) / sums.tokens)
        outcome.gradients.append(gradients(engine.parts[0]))
        outcome.norms.append(float(engine.clip(config.optim.max_norm)))
        assert engine.update(RATES[step % len(RATES)])
    outcome.state = held(engine.shards())
    return outcome


def reference(kind: str, config: RunConfig, steps: Sequence[int]) -> Outcome:
    """Train the same steps in one process by plain autograd: the mean loss over the whole global batch, torch's
    clipping, AdamW.
    """
    module = model(kind).double()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.optim.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=tuple(config.optim.betas),
        eps=config.optim.eps,
        foreach=False,
    )
    outcome = Outcome([], [], [], [])
    for step in steps:
        batch = global_batch(kind, step)
        logits = module(batch.inputs).flatten(0, -2)
        loss = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED_TARGET)
        optimizer.zero_grad()
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.gradients.append(gradients(module))
        assert config.optim.max_norm is not None
        outcome.norms.append(float(nn.utils.clip_grad_norm_(trained, config.optim.max_norm)))
        for group in optimizer.param_groups:
            group["lr"] = RATES[step % len(RATES)]
        optimizer.step()
    outcome.state = state(module, optimizer)
    return outcome


def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Held]:
    """Return the parameters, buffers and optimizer state of a model that one process holds."""
    tensors = dict(module.state_dict())
    for name, parameter in module.named_parameters():
        tensors.update({f"optim.{key}.{name}": value for key, value in optimizer.state.get(parameter, {}).items()})
    return [held for name, tensor in tensors.items() for held in _rectangles(name, tensor)]


def assert_close(got: Arrays, wanted: Arrays, tolerance: float) -> None:
    """Check each tensor's error relative to its norm, or to a thousandth of its kind's norm, because some are zero but
    for rounding.
    """
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        floor = 1e-3 * max(float(np.linalg.norm(other)) for key, other in wanted.items() if _kind(key) == _kind(name))
        error = float(np.linalg.norm(got[name] - array)) / max(float(np.linalg.norm(array)), floor)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def _kind(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("optim.") else "parameter"
