"""Progress bars of long commands: on a terminal, and nowhere else."""

from __future__ import annotations

import os
import pty
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import save_alone

from hpc_train.cli.main import main

COMMANDS = {
    "verify": ("verify", "{run}"),
    "reshard": ("reshard", "{run}", "{new}", "--ranks", "2"),
    "export": ("export", "{run}", "{new}", "--format", "safetensors"),
    "import": ("import", "{file}", "{new}", "--format", "torch"),
    "index": ("inspect", "{run}", "--index"),
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """A run of one step, a file to import, and a folder that is to be made."""
    tensors = {"w": torch.randn(1024, 512), "b": torch.randn(7)}
    save_alone(tmp_path / "run/checkpoints", 3, tensors)
    torch.save(tensors, tmp_path / "tensors.pt")
    return {"run": str(tmp_path / "run"), "new": str(tmp_path / "new"), "file": str(tmp_path / "tensors.pt")}


@dataclass
class Screen:
    """A terminal that is stderr."""

    main: int
    shown: bytes = b""

    def read(self) -> None:
        """Until nobody has it open any more, which Linux tells by an error."""
        try:
            while part := os.read(self.main, 4096):
                self.shown += part
        except OSError:
            pass


@contextmanager
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """stderr is one, while the block runs."""
    main, other = pty.openpty()
    it = Screen(main)
    reader = threading.Thread(target=it.read)
    reader.start()
    with os.fdopen(other, "w") as stderr, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stderr)
        patched.setenv("TERM", "xterm")
        patched.setenv("COLUMNS", "120")
        yield it
    reader.join()
    os.close(main)


@pytest.mark.parametrize("name", COMMANDS)
def test_on_a_terminal_there_is_a_bar_but_with_json(
    name: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["checkpoint", *(word.format(**places) for word in COMMANDS[name])]
    with screen(monkeypatch) as terminal:
        assert main(words) == 0
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in terminal.shown.decode()
    assert "\x1b" not in capsys.readouterr().out
    shutil.rmtree(places["new"], ignore_errors=True)
    with screen(monkeypatch) as terminal:
        assert main([*words, "--json"]) == 0
    assert terminal.shown == b""


def test_nowhere_else(places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", places["run"]]) == 0
    assert capsys.readouterr().err == ""
