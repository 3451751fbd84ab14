"""Every number of the schema, set to senseless values, composes to something legal or gives one line; labels too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.compose import compose, compose_unchecked, explain_error
from hpc_train.config.keys.overrides import get_value, parse_overrides
from hpc_train.config.plain_config import check_and_seal
from hpc_train.config.run import RunConfig
from hpc_train.config.schema import Range
from hpc_train.errors import UserError
from hpc_train.launch.sweep.compose_sweep import Composer

VALUES = ("null", "0", "-1", "1" + 23 * "0", "1.0e+300", "inf", "-inf", "nan", "true", "")
BASES: tuple[list[str], ...] = ([], ["data=digits", "model=vit_tiny"])


def numbers(config: Any, path: str = "") -> Iterator[tuple[str, str, Range]]:
    """Yield (key, type, range) of every number and every list of numbers."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, kind = getattr(config, item.name), str(hints[item.name]).replace("<class '", "").rstrip("'>")
        if is_dataclass(value):
            yield from numbers(value, f"{path}{item.name}.")
        elif any(word in kind for word in ("int", "float")) and "dict" not in kind:
            yield f"{path}{item.name}", kind, item.metadata.get("range", Range())


FOUND = {key: (base, kind, allowed) for base in BASES for key, kind, allowed in numbers(compose(base))}


class Base:
    """One choice of groups, composed once; each value is set in it and then removed again."""

    def __init__(self, overrides: list[str]) -> None:
        self.plain = compose_unchecked(overrides, None)
        self.parts = {item.name: self.part(item.name) for item in fields(RunConfig)}

    def part(self, name: str) -> Any:
        node = self.plain._get_node(name)
        return OmegaConf.to_object(node) if OmegaConf.is_config(node) else self.plain[name]

    def run(self, key: str, text: str) -> RunConfig:
        """Compose the configuration with one value changed. Raises UserError."""
        name, before = key.partition(".")[0], OmegaConf.select(self.plain, key)
        before = OmegaConf.to_container(before) if OmegaConf.is_config(before) else before
        parsed = parse_overrides([text])[0]
        try:
            OmegaConf.update(self.plain, key, parsed[0].value(), merge=True)
            return check_and_seal(RunConfig(**{**deepcopy(self.parts), name: self.part(name)}), [text])
        except OmegaConfBaseException as error:
            raise UserError(explain_error(error, parsed, None)) from error
        finally:
            OmegaConf.update(self.plain, key, before, merge=True)


def test_there_are_numbers() -> None:
    assert len(FOUND) > 120
    assert {"train.steps", "optim.betas", "plan.nodes", "cluster.node.gpus", "model.image_size"} <= FOUND.keys()


@pytest.mark.parametrize("overrides", BASES, ids=range(len(BASES)))
def test_senseless_numbers(overrides: list[str]) -> None:
    base = Base(overrides)
    for key, (kind, allowed) in ((key, rest) for key, (of, *rest) in FOUND.items() if of == overrides):
        for value in VALUES:
            text = f"{key}=[{value}]" if kind.startswith("list") else f"{key}={value}"
            found, said = result(base, key, text)
            assert said.count("\n") == 0
            assert not said or any(word in said for word in key.split(".")[-2:]), f"{text}: {said}"
            if said:
                continue
            for number in found if isinstance(found, list) else [found]:
                assert_legal(number, text, kind, allowed if not isinstance(found, list) else Range())


def result(base: Base, key: str, text: str) -> tuple[Any, str]:
    """Return (the value, ""), or (None, the line that says why there is none)."""
    try:
        return get_value(base.run(key, text), key), ""
    except UserError as error:
        return None, str(error)


def assert_legal(number: Any, text: str, kind: str, allowed: Range) -> None:
    if number is None:
        assert text.endswith("=null"), text
        assert "None" in kind, text
        return
    assert isinstance(number, (int, float)), text
    assert not isinstance(number, bool), text
    assert math.isfinite(number), text
    assert abs(number) < 1e24, text
    assert allowed.problem(number) is None, text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.steps=null"], "train.steps=null: is not a number of steps; give one, or train.epochs"),
        (["train.steps=100000000000000000000000"], "train.steps=1000"),
        (["data.name=wikitext"], "data.name=wikitext: is only a label of data=stdlib, and chooses nothing"),
        (["data=text", "data.name=stdlib_bpe"], "write data=stdlib_bpe"),
        (["data.name=stdlb"], "did you mean 'stdlib'?"),
        (["data=digits", "model=vit_tiny", "data.name=mnist"], "data.name=mnist: must be one of digits"),
        (["data.kind=images"], "is only a label of data=stdlib"),
        (["model.name=llama_1b"], "write model=llama_1b"),
        (["model.kind=vit"], "is only a label of model=llama_tiny"),
        (["cluster.name=dgx_h10"], "did you mean 'dgx_h100'?"),
        (["optim.name=adam"], "did you mean 'adamw'?"),
        (["optim.schedule.name=cosin"], "did you mean 'cosine'?"),
        (["precision.name=bf61"], "did you mean 'bf16'?"),
        (["precision.reduce=fp33"], "did you mean 'fp32'?"),
        (["launch.kind=slrum"], "did you mean 'slurm'?"),
        (["parallel.auto=true", "parallel.fixed=[parallel.nope]"], "parallel.fixed: parallel.nope is neither a key"),
    ],
)
def test_what_would_mislead_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        compose(overrides)
    assert said in str(raised.value)
    assert str(raised.value).count("\n") == 0
    with pytest.raises(UserError) as again:
        Composer(frozenset({overrides[-1].lstrip("+").partition("=")[0]})).compose(tuple(overrides))
    assert str(again.value) == str(raised.value)


def test_labels_that_agree_and_those_of_your_own_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text("defaults: [token_schema, _self_]\nname: my text\nsources: [stdlib]\n")
    assert compose(["data=mine"], str(tmp_path)).data.name == "my text"
    assert compose(["data=mine", "data.name='my text'"], str(tmp_path)).data.name == "my text"
    with pytest.raises(UserError, match="is only a label of data=mine"):
        compose(["data=mine", "data.name=wikitext"], str(tmp_path))
    assert compose(["data=text", "data.name=text"]).data.name == "text"
    assert compose(["model=custom", "model.name=anything"]).model.name == "anything"
    assert compose(["train.steps=null", "train.epochs=2"]).train.wanted_steps is None


def test_a_model_of_another_shape_may_have_another_name() -> None:
    assert compose(["model=llama_tiny", "model.name=mine", "model.layers=3"]).model.name == "mine"
