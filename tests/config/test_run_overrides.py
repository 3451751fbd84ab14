"""The overrides that are listed for a configuration make that configuration, and Hydra reads any value back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from drawn import draw
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_train.config.compose import compose
from hpc_train.config.keys.groups import GROUPS, find_option_files
from hpc_train.config.keys.overrides import format_override_value
from hpc_train.config.keys.run_overrides import list_overrides

REQUIRED = {
    "model=custom": ("model.name=x", "model.module=m", "+model.args.width=3"),
    "model=hf": ("model.path='/a folder/x'",),
    "data=custom": ("data.name=x", "+data.args.size=3"),
    "data=text": ("data.sources=[a.txt,'b, c.txt']",),
}
"""Settings that some options require, with values that are hard to quote."""
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C"]))


def list_options() -> list[str]:
    return [f"{group}={option}" for group in GROUPS if group != "experiment" for option in find_option_files(group)]


@pytest.mark.parametrize("option", draw(list_options(), {*REQUIRED, *list_options()[::9]}))
def test_every_option_is_made_again(option: str) -> None:
    config = compose([option, *REQUIRED.get(option, ())])
    assert compose(list_overrides(config)) == config


def test_a_job_of_slurm_has_its_cluster_though_submit_has_another_default() -> None:
    config = compose(["launch=slurm", "launch.exclude='n[1-3],m1'", "run_dir=/somewhere"])
    assert list_overrides(config) == ["cluster=local", "launch=slurm", 'launch.exclude="n[1-3],m1"']


def test_an_option_of_a_user_s_own_is_written_out(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("name: mine\nnode: {gpus: 8}\ngpu: {peak_tflops: {bf16: 300}}\n")
    (tmp_path / "model" / "wide.yaml").write_text("defaults: [transformer_schema]\nname: wide\nhidden: 512\nheads: 8\n")
    config = compose(["cluster=mine", "model=wide"], str(tmp_path))
    again = compose(list_overrides(config))
    assert again.model == config.model
    assert replace(again.cluster, name="mine") == config.cluster


@given(st.recursive(TEXT | st.integers() | st.booleans() | st.none(), st.lists, max_leaves=4))
@example("a,b")
@example("null")
@example("1e3")
@example("it's")
@example("back\\")
@example("back\\'")
@example(" spaces ")
@example("")
@example("[a]")
@example('say "a, b"')
@example('back\\"')
@example("~x=y")
def test_any_value_is_read_back(value: object) -> None:
    parsed = OverridesParser.create().parse_override(f"key={format_override_value(value)}")
    assert parsed.value() == value
