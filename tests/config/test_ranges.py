"""The legal range of every field of the schema, at its limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from hpc_train.config.checks.check import check_config
from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.model import (
    CustomModelConfig,
    ImageDataConfig,
    TokenDataConfig,
    TransformerConfig,
    VisionTransformerConfig,
)
from hpc_train.config.run import RunConfig
from hpc_train.config.schema import Range
from hpc_train.errors import UserError

RUNS = [
    lambda: RunConfig(
        cluster=ClusterConfig(name="c"), model=TransformerConfig(name="m"), data=TokenDataConfig(name="d")
    ),
    lambda: RunConfig(
        cluster=ClusterConfig(name="c"), model=VisionTransformerConfig(name="m"), data=ImageDataConfig(name="digits")
    ),
    lambda: RunConfig(
        cluster=ClusterConfig(name="c"), model=CustomModelConfig(name="m"), data=TokenDataConfig(name="d")
    ),
]


@dataclass(frozen=True)
class Setting:
    """One field of one kind of run."""

    run: int
    path: str
    kinds: tuple[type, ...]
    allowed: Range

    def refusal(self, value: Any) -> str:
        """What `check` says of a run that has this value; fails if it says nothing."""
        config = RUNS[self.run]()
        *parents, name = self.path.split(".")
        node: Any = config
        for parent in parents:
            node = getattr(node, parent)
        setattr(node, name, value)
        with pytest.raises(UserError) as caught:
            check_config(config)
        return str(caught.value)


def settings(run: int, config: Any, path: str = "") -> Iterator[Setting]:
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, where = getattr(config, item.name), f"{path}{item.name}"
        if is_dataclass(value):
            yield from settings(run, value, f"{where}.")
        else:
            kinds = get_args(hints[item.name]) or (hints[item.name],)
            yield Setting(run, where, kinds, item.metadata.get("range", Range()))


ALL = list(
    {
        (setting.path, setting.allowed): setting for run, make in enumerate(RUNS) for setting in settings(run, make())
    }.values()
)
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
LIMITED = [(setting, sign) for setting in ALL for sign in SIGNS if getattr(setting.allowed, sign) is not None]


def outside(setting: Setting, sign: str) -> float:
    """The first value beyond a limit."""
    limit: float = getattr(setting.allowed, sign)
    if sign in ("gt", "lt"):
        return limit
    away = -math.inf if sign == "ge" else math.inf
    return math.nextafter(limit, away) if float in setting.kinds else int(limit + math.copysign(1, away))


def inside(setting: Setting, sign: str) -> float:
    """The last value within a limit."""
    limit: float = getattr(setting.allowed, sign)
    if sign in ("ge", "le"):
        return limit
    towards = 1 if sign == "gt" else -1
    return math.nextafter(limit, towards * math.inf) if float in setting.kinds else limit + towards


def test_the_table_has_the_whole_schema() -> None:
    assert len(ALL) > 100
    assert {"optim.schedule.decay_fraction", "cluster.node.gpus", "model.image_size"} <= {item.path for item in ALL}


@pytest.mark.parametrize(("setting", "sign"), LIMITED, ids=lambda value: getattr(value, "path", value))
def test_the_first_value_beyond_a_limit_is_refused_and_the_last_within_is_not(setting: Setting, sign: str) -> None:
    value, limit = outside(setting, sign), getattr(setting.allowed, sign)
    assert setting.refusal(value) == f"{setting.path}={value}: must be {SIGNS[sign]} {limit}"
    assert setting.allowed.problem(inside(setting, sign)) is None


@pytest.mark.parametrize("setting", [item for item in ALL if item.kinds[0] is float], ids=lambda item: item.path)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(setting: Setting, value: float) -> None:
    assert setting.refusal(value) == f"{setting.path}={value}: must be a finite number"


@pytest.mark.parametrize("setting", [item for item in ALL if item.allowed.choices], ids=lambda item: item.path)
def test_a_word_that_is_no_choice_is_refused_and_every_choice_is_not(setting: Setting) -> None:
    choices = setting.allowed.choices or ()
    assert setting.refusal("nonsense") == f"{setting.path}=nonsense: must be one of {', '.join(choices)}"
    assert [setting.allowed.problem(choice) for choice in choices] == [None] * len(choices)


@pytest.mark.parametrize("setting", [item for item in ALL if str in item.kinds], ids=lambda item: item.path)
def test_a_text_is_neither_empty_nor_more_than_a_plain_line(setting: Setting) -> None:
    assert "is empty; leave it out" in setting.refusal("")
    for character in "\n\r\t\0\x1b\x7f\x85":
        assert "control characters (newlines too) are refused" in setting.refusal(f"a{character}b")


def test_control_characters_are_found_within_lists_and_dictionaries() -> None:
    for path, value in (
        ("launch.setup", ["module load cuda", "a\nb"]),
        ("launch.extra", {"mail": "a\nb"}),
        ("launch.extra", {"a\nb": "x"}),
        ("data.sources", ["a\x1bb"]),
    ):
        setting = next(item for item in ALL if item.path == path)
        assert "control characters" in setting.refusal(value)
