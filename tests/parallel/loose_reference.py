"""DiLoCo as a plain loop over copies in one process, with which the engine of loose synchronisation is compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from plain_setup import LLAMA
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import IGNORED_TARGET, MicroBatch
from hpc_train.models.initial_values import initialise_parameters
from hpc_train.models.registry import build_model
from hpc_train.training.optimizer import make_optimizer

Parameters = dict[str, Tensor]
SEQUENCES, LENGTH = 24, 8


def make_model() -> nn.Module:
    """Make a model that tp, cp and pp can divide, with the same values at every call."""
    made = build_model(LLAMA(tied_embeddings=True, layers=4, feed_forward=28))
    initialise_parameters(made, 0)
    return made


def make_batch(step: int) -> MicroBatch:
    """Make the global batch of a step. Later sequences have more ignored targets, and the last has only such."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randint(29, (2, SEQUENCES, LENGTH), generator=generator)
    for row in range(SEQUENCES):
        targets[row, : LENGTH * row // SEQUENCES] = IGNORED_TARGET
    targets[-4:] = IGNORED_TARGET
    return MicroBatch(inputs, targets)


@dataclass
class Trained:
    """The result of a run."""

    steps: list[tuple[float, float]]
    """Loss and gradient norm of each step."""
    anchor: Parameters
    momentum: Parameters
    copies: list[Parameters]
    """Each copy's own parameters."""


def train_copies(
    config: RunConfig,
    copies: int,
    fragments: list[list[str]],
    rates: list[float],
    ends: Mapping[int, float] = MappingProxyType({}),
) -> Trained:
    """Train for as many steps as there are learning rates. fragments: names, in the order of their exchanges.

    ends: for a copy that is lost, the last step it takes part in; 3.5: it trains in step 4, and is lost before the
    exchange.
    """
    sync = config.parallel.sync
    assert sync.every is not None
    models = [make_model().double() for _ in range(copies)]
    optimizers = [make_optimizer(one, config.optim) for one in models]
    anchor = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in anchor.items()}
    waiting: dict[int, Parameters] = {}
    steps = []
    for step, rate in enumerate(rates, 1):
        batch, rows, total, tokens, squares = make_batch(step), SEQUENCES // copies, 0.0, 0, 0.0
        training = [copy for copy in range(copies) if step - 0.5 <= ends.get(copy, math.inf)]
        for copy in training:
            one, optimizer = models[copy], optimizers[copy]
            mine = MicroBatch(*(t[copy * rows : (copy + 1) * rows] for t in batch))
            count = int((mine.targets != IGNORED_TARGET).sum())
            out = one(mine.inputs)
            loss = nn.functional.cross_entropy(
                out.flatten(0, -2), mine.targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
            )
            optimizer.zero_grad()
            (loss / count).backward()
            norm = nn.utils.clip_grad_norm_(one.parameters(), config.optim.max_norm)
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("lr_factor", 1.0)
            optimizer.step()
            total, tokens, squares = total + loss.item(), tokens + count, squares + norm.item() ** 2
        steps.append((total / tokens, (squares / len(training)) ** 0.5))
        meeting = [one for copy, one in enumerate(models) if step <= ends.get(copy, math.inf)]
        with torch.no_grad():
            for index, names in enumerate(fragments):
                first = (index + 1) * sync.every // len(fragments)
                if (step - first) % sync.every == 0:
                    waiting[index] = {
                        name: sum(anchor[name] - one.get_parameter(name) for one in meeting) / len(meeting)
                        for name in names
                    }
                if step > sync.overlap and (step - sync.overlap - first) % sync.every == 0:
                    for name, delta in waiting.pop(index).items():
                        momentum[name] = sync.outer_momentum * momentum[name] + delta
                        anchor[name] -= sync.outer_lr * (delta + sync.outer_momentum * momentum[name])
                        keep = sync.merge if sync.overlap else 0.0
                        for one in meeting:
                            own = one.get_parameter(name)
                            own.copy_(keep * own + (1 - keep) * anchor[name])
    return Trained(steps, anchor, momentum, [dict(one.named_parameters()) for one in models])
