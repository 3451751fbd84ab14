"""A user's own components: map-style and iterable data sets, a loss, metrics, optimizers and a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.components import (
    register_dataset,
    register_loss,
    register_metric,
    register_optimizer,
    register_schedule,
)
from hpc_train.models import register

FEATURES, CLASSES = 4, 3


def sample(index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    left, right = torch.randn(2, FEATURES, generator=generator, dtype=torch.float64)
    return {"left": left, "right": right, "targets": int((left - right).sum() > 0)}


@register("pair")
class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(2 * FEATURES, 8), nn.Linear(8, CLASSES)

    def blocks(self) -> dict[str, nn.Module]:
        return {"hidden": self.hidden}

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"logits": self.out(torch.tanh(self.hidden(torch.cat((left, right), -1))))}


@register_dataset("pairs")
class Pairs:
    def __init__(self, samples: int = 64, broken: int = -1) -> None:
        self.samples, self.broken = samples, broken

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise ValueError("this sample is damaged")
        return sample(index)


@register_dataset("differences")
class Differences(Pairs):
    """Targets with a fraction, in float64 as Python has them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = sample(index)
        return {**found, "targets": float((found["left"] - found["right"]).sum())}


@register_dataset("tolerant")
class Tolerant(Pairs):
    """Takes any argument, as a class does that passes them on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(40)
        self.options = options


@register_dataset("own_share")
def own_share(dp_index: int, dp_size: int) -> Any:
    return Pairs(64 // dp_size)


@register_dataset("words")
def words(kind: str, split: str) -> Any:
    """Return a data set with a mistake; `split` has no effect."""
    return {
        "ragged": [(torch.zeros(index % 3 + 1), 0) for index in range(64)],
        "single": [torch.zeros(3)] * 64,
        "unnamed": [{"x": torch.zeros(3)}] * 64,
        "objects": [({"x": object()}, 0)] * 64,
        "number": 3,
        "once": (sample(index) for index in range(64)),
        "empty": [],
    }[kind]


class Stream:
    """Yields samples first, first + step, ... and can save its position."""

    def __init__(self, first: int, step: int, samples: int) -> None:
        self.first, self.step, self.samples, self.position = first, step, samples, 0

    def __iter__(self) -> Iterator[Any]:
        while self.first + self.position * self.step < self.samples:
            self.position += 1
            yield sample(self.first + (self.position - 1) * self.step)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@register_dataset("stream")
def stream(split: str, dp_index: int, dp_size: int, samples: int = 40) -> Stream:
    return Stream(dp_index, dp_size, samples)


class Counted(torch.utils.data.IterableDataset[Any]):
    """A stream of torch that says how long it is, as some loops want for their progress."""

    def __iter__(self) -> Iterator[Any]:
        return (sample(index) for index in range(40))

    def __len__(self) -> int:
        return 40


@register_dataset("counted")
def counted(split: str) -> Any:
    return Counted()


class Resumed(Stream):
    """As the streams of `datasets`: every pass begins where load_state_dict said, and nothing else sets that back."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        self.position = self.start
        while self.position < self.samples:
            self.position += 1
            yield sample(self.position - 1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


@register_dataset("whole")
def whole(split: str, samples: int = 41) -> Stream:
    """Return a stream of all samples, which each rank cuts its own out of."""
    return Stream(0, 1, samples)


@register_dataset("resumed")
def resumed(split: str, samples: int = 41) -> Stream:
    return Resumed(0, 1, samples)


class Forgetful(Iterable[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (sample(index) for index in range(1000))


@register_dataset("forgetful")
def forgetful(split: str) -> Any:
    return Forgetful()


@register_loss("doubled")
def doubled(out: Any, target: Tensor) -> Tensor:
    return 2 * F.cross_entropy(out["logits"].double(), target, reduction="sum")


@register_loss("squared")
def squared(out: Any, target: Tensor) -> Tensor:
    return F.mse_loss(out["logits"][:, 0], target, reduction="sum")


@register_metric("margin")
def margin(out: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mean over the samples of class 1 only."""
    chosen = target == 1
    return (out["logits"][chosen, 1] - out["logits"][chosen, 0]).double().sum(), chosen.sum()


@register_metric("crashing")
def crashing(out: Any, target: Tensor) -> Tensor:
    raise KeyError("nothing here")


@register_optimizer("momentum")
def momentum(parameters: list[nn.Parameter], lr: float, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


class Counting(torch.optim.Optimizer):
    """Sign descent whose state is not a tensor."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, where: str) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})
        self.where = where

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += self.where == "group"
            for parameter in group["params"]:
                parameter -= (1.0 if self.where == "moving" else group["lr"]) * (parameter.grad.sign() + 1)
                if self.where == "state":
                    self.state[parameter]["count"] = 1
                if self.where == "raising":
                    raise IndexError("off by one")


register_optimizer("counting")(Counting)


@register_schedule("halving")
def halving(step: int, steps: int, every: int) -> float:
    return 0.5 ** (step // every)


@register_schedule("negative")
def negative(step: int, steps: int) -> float:
    return -1.0
