"""The table of techniques: docs/parallelism.md shows it, its options compose, and its proofs exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.config.keys.groups import find_option_files
from hpc_train.config.parallel import compute_smallest_world
from hpc_train.parallel.rules.check import check_support
from hpc_train.parallel.rules.support_rows.technique import EXACT, INEXACT, Technique
from hpc_train.parallel.rules.support_table import SUPPORT_TABLE, format_support_table

ROOT = Path(__file__).parents[2]


def test_the_documentation_has_the_table() -> None:
    page = (ROOT / "docs/parallelism.md").read_text()
    assert "".join(re.findall(r"^\|.*\n", page, re.MULTILINE)) == format_support_table()


@pytest.mark.parametrize("row", SUPPORT_TABLE, ids=lambda row: row.option)
def test_a_line_says_what_works_and_where_it_is_proved(row: Technique, tmp_path: Path) -> None:
    words = row.option.split()
    if "model=hf" in words:
        (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "intermediate_size": 64}')
        (tmp_path / "model.safetensors").touch()  # read by ranks only
        words.append(f"model.path={tmp_path}")
    config = compose(words)
    check_support(config, max(2, compute_smallest_world(config.parallel)))
    assert row.numbers == EXACT or row.numbers.startswith(INEXACT)
    assert "def test_" in (ROOT / row.proof).read_text()
    for cell in (row.name, row.done_by, row.numbers, row.needs):
        assert "|" not in cell
        assert len(cell) <= 80


def test_every_line_is_another_and_every_choice_of_conf_parallel_is_in_it() -> None:
    assert len({row.option for row in SUPPORT_TABLE}) == len({row.name for row in SUPPORT_TABLE}) == len(SUPPORT_TABLE)
    chosen = {
        word.removeprefix("parallel=") for row in SUPPORT_TABLE for word in row.option.split() if "parallel=" in word
    }
    others = {"zero3", "auto"}  # another name of fsdp, and whichever of these the planner takes
    assert set(find_option_files("parallel")) - others == chosen
