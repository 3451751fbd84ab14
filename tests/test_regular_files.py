"""A file that is replaced is never half written, has the permissions it should, and is written through no link."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.regular_files import publish_file, replace_file, write_private_file


@pytest.fixture(params=[0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_permissions_are_those_that_were_asked_for(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "file"
    for content, mode in ((b"bytes", 0o644), ("text", 0o600), ("é", None)):
        replace_file(path, content, mode, sync=mode is None)
        assert stat.S_IMODE(path.stat().st_mode) == (0o666 & ~umask if mode is None else mode)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
        assert list(tmp_path.iterdir()) == [path]


def write_half(path: Path, error: type[BaseException]) -> None:
    with publish_file(path, sync=True) as temporary:
        temporary.write_text("ne")
        assert path.read_text() == "old"
        raise error


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_the_old_file_stays_when_the_new_one_is_not_complete(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    write_private_file(path, "old")
    with pytest.raises(error):
        write_half(path, error)
    with pytest.raises(UnicodeEncodeError):
        write_private_file(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, path = tmp_path / "victim", tmp_path / "folder" / "file"
    victim.write_text("theirs")
    path.parent.mkdir()
    monkeypatch.setattr(os, "urandom", bytes)  # zeros, which nobody could guess otherwise
    (path.parent / ".file.00000000").symlink_to(victim)
    with pytest.raises(FileExistsError):
        replace_file(path, "new", 0o644)
    assert victim.read_text() == "theirs"
    replace_file(path, "new", 0o644)
    assert (path.read_text(), path.is_symlink()) == ("new", False)


def test_a_link_in_the_place_of_the_file_is_replaced(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("theirs")
    path.symlink_to(victim)
    write_private_file(path, "new")
    assert (path.read_text(), path.is_symlink(), victim.read_text()) == ("new", False, "theirs")
