"""What stands in the place of a run's config.yaml is refused in one line, at once."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.config.plain_config import config_from_dict, config_to_yaml
from hpc_train.config.run_file import load_run_file
from hpc_train.errors import UserError

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)
HOSTILE = {
    "aliases that double": BOMB,
    "a dictionary in itself": "a: &a\n  b: *a\n",
    "deep": "a: " + "[" * 20_000 + "]" * 20_000,
    "no YAML": "a: [1\nb: }",
    "two of one key": "train: {steps: 1}\ntrain: {steps: 2}\n",
    "a list": "- 1\n- 2\n",
    "a tag": "a: !!python/object/apply:os.system ['true']\n",
    "bytes": "\x00\x01\x02",
    "a long integer": "a: " + "9" * 6000,
    "an interpolation of itself": "a: ${a",
    "large": "#" * (2 << 20),
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """At most 512 MiB more than now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (512 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_run_file(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_a_pipe_and_a_device_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="give the directory of a run"):
            load_run_file(path)


def test_what_a_run_writes_is_read_back(tmp_path: Path) -> None:
    config = compose(["model=llama_tiny", "train.steps=3"])
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert config_from_dict(load_run_file(tmp_path / "config.yaml")) == config


def test_a_file_that_is_cut_off_or_changed_is_refused_in_one_line(tmp_path: Path) -> None:
    """Up to the model; a file that only lacks later settings has their defaults, as one of an earlier version does."""
    file, text = tmp_path / "config.yaml", config_to_yaml(compose())
    cut = [text[:length] for length in range(1, text.index("\nmodel:"), 200)]
    for wrong in [*cut, "model: null\n", "model: [kind]\n", "model: {kind: [a]}\n", "model: {kind: novel}\n"]:
        file.write_text(wrong)
        with pytest.raises(UserError) as refused:
            config_from_dict(load_run_file(file))
        assert "\n" not in str(refused.value)
