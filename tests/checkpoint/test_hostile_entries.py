"""Links, pipes, devices and endless files where checkpoints are: nothing waits for them, and nothing follows them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint_commands import Terminal
from checkpoint_helpers import alone, blank, holds, names, same_pieces, save_alone, whole

from hpc_train.checkpoint import (
    CheckpointError,
    list_committed_steps,
    load_step,
    prune_steps,
    resume_from_checkpoint,
    verify_step,
)
from hpc_train.checkpoint.storage.step_directory import explain_bad_step
from hpc_train.regular_files import NotRegularError, open_regular, read_regular

TENSORS = {"w": torch.arange(12.0).reshape(3, 4)}
SHARD = "shards/000/000000.h5"


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise an error if the body takes longer."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    with at_most(60):
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for step in (1, 2):
        save_alone(tmp_path / "run", step, TENSORS)
    return tmp_path / "run"


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.rename(path.with_name("moved-" + path.name))
    make(path)


def to_itself(path: Path) -> None:
    """Put a link there that leads to the file that was there."""
    path.symlink_to(path.with_name("moved-" + path.name))


def without_end(path: Path) -> None:
    """Make a sparse file of a terabyte."""
    path.touch()
    os.truncate(path, 1 << 40)


THINGS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link": to_itself,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a directory": Path.mkdir,
    "a file without end": without_end,
}
PARTS = ("manifest.json", SHARD, SHARD + ".digests", "shards", "shards/000")


@pytest.mark.parametrize("what", THINGS)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_step_is_something_else(
    directory: Path, part: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    if (part, what) in {("shards", "a directory"), ("shards/000", "a directory")}:
        return replaced_by_an_empty_one(directory, part)
    replaced(directory / "step-2" / part, THINGS[what])
    assert verify_step(directory, 2) != []
    with pytest.raises(CheckpointError, match="step 2"):
        load_step(directory, 2, blank(whole(TENSORS)), alone())
    pieces = blank(whole(TENSORS))
    with caplog.at_level(logging.WARNING):
        found = resume_from_checkpoint(directory, "auto", pieces, alone())
    assert found is not None
    assert found.step == 1
    assert "it is skipped" in caplog.text
    assert same_pieces(pieces, whole(TENSORS))
    save_alone(directory, 3, TENSORS)
    assert holds(directory, 3, TENSORS)


def replaced_by_an_empty_one(directory: Path, part: str) -> None:
    replaced(directory / "step-2" / part, Path.mkdir)
    assert verify_step(directory, 2) != []


@pytest.mark.parametrize("what", THINGS)
def test_a_mark_that_is_something_else(directory: Path, what: str) -> None:
    path = directory / "step-2"
    if what == "a link":
        (path / "moved-bad").write_text("a reason\n")
    THINGS[what](path / "bad")
    assert str(explain_bad_step(path, None)).startswith("is marked bad: ")
    found = resume_from_checkpoint(directory, "auto", blank(whole(TENSORS)), alone())
    assert found is not None
    assert found.step == 1


ENTRIES: dict[str, Callable[[Path], object]] = {
    **{what: make for what, make in THINGS.items() if what not in ("a link", "a directory")},
    "a link to a step": lambda path: path.symlink_to("step-1"),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("what", ENTRIES)
def test_a_step_that_is_something_else(
    directory: Path, what: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    ENTRIES[what](directory / "step-30")
    with caplog.at_level(logging.WARNING):
        assert list_committed_steps(directory) == [1, 2]
    assert f"{directory / 'step-30'} is passed over" in caplog.text
    terminal = Terminal(capsys)
    assert [it["step"] for it in terminal.call("ls", directory, "--json").json] == [1, 2]
    assert terminal.call("verify", directory, "--all").code == 0
    assert terminal.call("inspect", directory, "--json").json["step"] == 2
    found = resume_from_checkpoint(directory, "auto", blank(whole(TENSORS)), alone())
    assert found is not None
    assert found.step == 2
    save_alone(directory, 3, TENSORS)
    assert prune_steps(directory, 2) == [1]
    save_alone(directory, 30, TENSORS)
    assert holds(directory, 30, TENSORS)
    assert prune_steps(directory, 1) == [2, 3]
    assert names(directory) == ["step-30"]


def test_a_step_that_a_person_names_may_be_a_link(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to(directory / "step-1")
    found = resume_from_checkpoint(tmp_path / "elsewhere", str(tmp_path / "best"), blank(whole(TENSORS)), alone())
    assert found is not None
    assert (found.directory, found.step) == (directory, 1)


def test_a_run_may_lie_behind_a_link(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(directory)
    assert verify_step(tmp_path / "linked", 2) == []
    assert holds(tmp_path / "linked", 2, TENSORS)
    save_alone(tmp_path / "linked", 3, TENSORS)
    assert list_committed_steps(directory) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["trash", "tmp"])
def test_a_leftover_that_is_a_link_goes_and_what_it_leads_to_stays(directory: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (directory / f"step-9.{kind}-elsewhere.1.ab").symlink_to(tmp_path / "mine")
    prune_steps(directory, 2, sole=True)
    assert names(directory) == ["step-1", "step-2"]
    assert (tmp_path / "mine" / "file").exists()


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    assert read_regular(tmp_path / "link", 5, follow=True) == b"12345"
    for path, most, why in ((tmp_path / "file", 4, "5 bytes"), (tmp_path / "link", 5, "symbolic link")):
        with pytest.raises(NotRegularError, match=why):
            read_regular(path, most)
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(NotRegularError, match="device"):
            open_regular(Path(device))
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")
    with pytest.raises(NotRegularError, match="NUL"):
        open_regular(tmp_path / "a\0b")
