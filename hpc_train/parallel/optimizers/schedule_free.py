"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682), by the package schedulefree.

The parameters are the package's y, at which gradients are taken; z is in the optimizer's state, and the average x that
evaluations use follows from both. The package counts updates and sums learning rates in its parameter groups. Here they
are tensors of each parameter's state too, so that a checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import UserError
from hpc_train.parallel.optimizer_step import get_local

try:
    from schedulefree import AdamWScheduleFree
except ImportError:
    raise UserError(
        "optim.name=schedule_free needs the package schedulefree: pip install 'hpc_train[schedule-free]'"
    ) from None

_COUNTERS = {"step": "k", "weight_sum": "weight_sum", "lr_max": "lr_max"}
"""Names in a parameter's state of what the package keeps in a group."""


class ScheduleFreeAdamW(AdamWScheduleFree):  # type: ignore[misc]
    """schedulefree.AdamWScheduleFree, all of whose state can be saved. It stays in the package's training mode."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self.train()
        for group in self.param_groups:
            for parameter in group["params"]:
                counters = {key: torch.zeros((), dtype=torch.float64) for key in _COUNTERS}
                self.state[parameter] = {**counters, "beta1": torch.tensor(betas[0], dtype=torch.float64)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters that have a gradient."""
        assert closure is None
        saved_settings = [
            {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
        ]
        for group in self.param_groups:
            group.update(self._read_counters(group["params"]))
            if group["k"] == 0:
                self._begin(group["params"])
        super().step()
        for group, settings in zip(self.param_groups, saved_settings, strict=True):
            for parameter in group["params"]:
                for key, counter in _COUNTERS.items():
                    self.state[parameter][key].fill_(group[counter])
            group.update(settings)

    def _read_counters(self, parameters: list[Tensor]) -> dict[str, float]:
        if not parameters:
            return {}
        return {counter: self.state[parameters[0]][key].item() for key, counter in _COUNTERS.items()}

    def _begin(self, parameters: list[Tensor]) -> None:
        """Let z be the parameters, into which values may have been loaded after the state was made."""
        for parameter in parameters:
            if "z" in self.state[parameter]:
                get_local(self.state[parameter]["z"]).copy_(get_local(parameter))

    @contextmanager
    def replace_weights(self) -> Iterator[None]:
        """Let the average take the place of the parameters for a block of code, and put them back to the bit.

        The parameters are copied meanwhile, in place of gradients, which an evaluation has none of.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if not parameters or self._read_counters(parameters)["k"] == 0:  # z is not yet that of the parameters
            yield
            return
        originals = [get_local(parameter).detach().clone() for parameter in parameters]
        self.eval()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, values in zip(parameters, originals, strict=True):
                    get_local(parameter).copy_(values)
            for group in self.param_groups:
                group["train_mode"] = True
