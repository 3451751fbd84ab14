"""Points composed once: sweepers compose every point to see whether it can be, and throw away what they got."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.types import HydraContext
from omegaconf import DictConfig

from hpc_train.launch.callables.calls import pickle_value


class Remembering:
    """A config loader that gives a composed point away a second time without composing it again."""

    def __init__(self, loader: ConfigLoader) -> None:
        self.loader = loader
        self._sweep: DictConfig | None = None
        self._kept: dict[tuple[str, ...], bytes] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """Hydra's: the configuration of one point."""
        if master_config is not self._sweep:
            self._sweep, self._kept = master_config, {}
        point = tuple(sweep_overrides)
        if point in self._kept:
            known: DictConfig = pickle.loads(self._kept.pop(point))
            return known
        composed = self.loader.load_sweep_config(master_config, list(sweep_overrides))
        self._kept[point] = pickle_value(composed)  # as what it is kept takes a tenth of the memory
        return composed


def remember(context: HydraContext) -> ConfigLoader:
    """Let everybody who has this Hydra context compose through a Remembering; returns Hydra's own loader."""
    loader: Any = context.config_loader
    if isinstance(loader, Remembering):
        return loader.loader
    context.config_loader = cast("ConfigLoader", Remembering(loader))
    own: ConfigLoader = loader
    return own
