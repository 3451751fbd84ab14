"""The number of a commit is found without a look at all tensors, and is that of the manifest whatever else is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import alone, whole

from hpc_train.checkpoint import CheckpointError, save_step
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, read_manifest, read_sequence

LIKE_IT = ',"sequence":9,"step":1,"tensors":['


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"a": 0, "sequence": 7, "step": 1, "tensors": [1]},
        {"zz": {"a": 1, "sequence": 8, "step": 1, "tensors": []}, "text": LIKE_IT},
        {LIKE_IT: LIKE_IT},
    ],
)
def test_nothing_else_is_taken_for_it(tmp_path: Path, extra: dict[str, object]) -> None:
    state = {LIKE_IT: torch.ones(3), "sequence": torch.ones(2), "checksum": torch.ones(1)}
    for number in range(1, 4):
        save_step(tmp_path, 1, whole(state), extra, alone()).wait()
        assert read_manifest(tmp_path / "step-1", 1).sequence == read_sequence(tmp_path / "step-1", 1) == number


def test_a_damaged_text_and_that_of_another_step_are_refused(tmp_path: Path) -> None:
    save_step(tmp_path, 1, whole({"w": torch.ones(3)}), {}, alone()).wait()
    path = tmp_path / "step-1"
    with pytest.raises(CheckpointError, match="not the manifest of that step"):
        read_sequence(path, 2)
    text = (path / MANIFEST_FILE).read_bytes()
    assert b'"sequence":1,' in text
    (path / MANIFEST_FILE).write_bytes(text.replace(b'"sequence":1,', b'"sequence":2,'))
    with pytest.raises(CheckpointError, match="does not match its own checksum"):
        read_sequence(path, 1)


def test_a_text_that_somebody_has_set_out_anew_still_tells_it(tmp_path: Path) -> None:
    save_step(tmp_path, 1, whole({"w": torch.ones(3)}), {}, alone()).wait()
    path = tmp_path / "step-1"
    body = json.loads((path / MANIFEST_FILE).read_text())
    (path / MANIFEST_FILE).write_text(json.dumps(body, indent=1))
    assert read_manifest(path, 1).sequence == read_sequence(path, 1) == 1
