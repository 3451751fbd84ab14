"""Compose many runs that differ in a few values: Hydra composes once for each choice of groups, not for each run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.checks.secret_variables import refuse_secret_variables
from hpc_train.config.compose import compose, compose_unchecked, make_typed
from hpc_train.config.keys import overrides
from hpc_train.config.keys.groups import GROUPS
from hpc_train.config.plain_config import check_and_seal
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError

Overrides = tuple[str, ...]
_ELSEWHERE = re.compile(r"\$\{(?!oc\.env:)")
"""An interpolation that may read another part of the config."""
_FILLED = "parallel"
"""The part that checking fills in, so that every run needs its own."""


@dataclass
class _Base:
    """One choice of groups, composed, into which the swept values of run after run are written."""

    config: DictConfig
    _parts: dict[str, Any] = field(default_factory=dict)
    """Parts of the runs composed so far. Runs share the parts without a swept value, since these are read-only."""
    _checked: set[str] = field(default_factory=set)
    """Names of those parts whose values were found in range."""

    def compose_run(self, quick: Sequence[Override], words: Overrides, config_dir: str | None) -> RunConfig:
        """Write the swept values into the composed groups, and make the run of them.

        quick: the overrides with swept values. words: all overrides, for messages. Raises OmegaConfBaseException, or
        UserError.
        """
        for item in quick:
            OmegaConf.update(self.config, item.key_or_group, item.value(), merge=True)
        if not self._apart:
            return make_typed(self.config, words, config_dir)
        with refuse_secret_variables():
            self._make_parts({item.key_or_group.partition(".")[0] for item in quick})
        config = check_and_seal(RunConfig(**self._parts), words, config_dir, self._checked)
        self._checked.update(self._parts)
        return config

    def _make_parts(self, swept: set[str]) -> None:
        """Make the parts of a run: only those with a swept value are made again."""
        changed = {_FILLED, *swept}
        for name in map(str, self.config):
            if name in changed or name not in self._parts:
                node = self.config._get_node(name)
                self._parts[name] = OmegaConf.to_object(node) if OmegaConf.is_config(node) else self.config[name]
                self._checked.discard(name)

    @cached_property
    def _apart(self) -> bool:
        """Whether its parts can be composed one by one, because none of them refers to another."""
        raw = repr(OmegaConf.to_container(self.config, resolve=False))
        return {str(name) for name in self.config} == {item.name for item in fields(RunConfig)} and not (
            _ELSEWHERE.search(raw)
        )


@dataclass
class Composer:
    """Composes what `compose` does, at a hundredth of the time for each run but the first."""

    swept: frozenset[str]
    """The keys, such as optim.lr, whose values differ between runs and which all of them set."""
    config_dir: str | None = None
    _bases: dict[Overrides, _Base | None] = field(default_factory=dict)

    def compose(self, words: Overrides) -> RunConfig:
        """Compose the run of these overrides. Raises UserError as `compose` does."""
        keys = {text.partition("=")[0].lstrip("+~") for text in words}
        quick = {text: item for text in words if (item := self._parse_quick(text, keys)) is not None}
        base = self._find_base(tuple(text for text in words if text not in quick)) if quick else None
        if base is not None:
            with suppress(OmegaConfBaseException):
                return base.compose_run(list(quick.values()), words, self.config_dir)
        return compose(words, self.config_dir)  # which says in one line what is wrong

    def _parse_quick(self, text: str, keys: set[str]) -> Override | None:
        """Parse an override that can be written into a composed run; None for one that takes Hydra.

        It sets a swept value, to one that replaces what is there, and no other override touches the key. Hydra writes
        values into what the groups give, one after the other; so is it with this one, only later.
        """
        item = _parse_single_run(text)
        if item is None or item.is_delete() or item.is_add() or item.is_force_add() or item.package is not None:
            return None
        key = item.key_or_group
        if key not in self.swept or key in GROUPS or isinstance(item.value(), dict) or _ELSEWHERE.search(text):
            return None
        touched = any(other != key and (other.startswith(f"{key}.") or key.startswith(f"{other}.")) for other in keys)
        return None if touched else item

    def _find_base(self, rest: Overrides) -> _Base | None:
        """Compose the run without the swept values; None where that cannot be done."""
        if rest not in self._bases:
            self._bases[rest] = None
            with suppress(UserError):
                self._bases[rest] = _Base(compose_unchecked(list(rest), self.config_dir))
        return self._bases[rest]


@cache
def _parse_single_run(text: str) -> Override | None:
    """Parse an override of a single run; None for anything else."""
    parsed, wrong = overrides.parse_overrides([text])
    return None if wrong else parsed[0]
