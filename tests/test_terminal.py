"""No text from elsewhere controls a terminal, tested on a real pseudo-terminal; a pipe gets every byte unchanged."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.terminal import escape_controls, one_line

HOSTILE = {
    "title (OSC)": "\x1b]0;owned\x07",
    "clipboard (OSC 52)": "\x1b]52;c;cm0gLXJmIH4K\x1b\\",
    "link (OSC 8)": "\x1b]8;;http://evil\x1b\\text\x1b]8;;\x1b\\",
    "cursor up and erase (CSI)": "\x1b[1A\x1b[2K",
    "erase the screen": "\x1b[2J\x1b[H",
    "status report (CSI 6n)": "\x1b[6n",
    "device string (DCS)": "\x1bP$q q\x1b\\",
    "application command (APC)": "\x1b_Gi=1\x1b\\",
    "privacy message (PM)": "\x1b^x\x1b\\",
    "reset (RIS)": "\x1bc",
    "other character set": "\x1b(0\x0e",
    "C1 CSI": "\x9b31m\x9b2J",
    "C1 OSC": "\x9d0;owned\x9c",
    "raw bytes of C1": "\udc9b2J\udc9d",
    "carriage return": "harmless\rmalicious",
    "backspace": "evil\x08\x08\x08\x08good",
    "bell, NUL, DEL": "\x07\x00\x7f",
    "form feed, vertical tab": "\x0c\x0b",
    "hidden text": "\x1b[8mhidden\x1b[0m",
    "hidden among colours": "\x1b[38;5;8;8mhidden",
    "a colour that does not end": "\x1b[31",
    "private mode": "\x1b[?25l\x1b[?1049h",
    "bidirectional": "\u202egnp.exe\u2066",
    "an overlong colour": "\x1b[" + "1;" * 100 + "m",
}
STEERING = re.compile(
    r"\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_nothing_that_steers_is_left(text: str) -> None:
    for colours in (False, True):
        found = escape_controls(f"before {text} after\n\tnext", colours)
        assert not STEERING.search(found), repr(found)
        assert found.startswith("before ")
        assert found.removesuffix("\x1b[0m").endswith(" after\n\tnext")
        found.encode()
    assert "\n" not in one_line(f"{text}\n")
    assert one_line(text).isprintable()


@pytest.mark.parametrize("colour", ["\x1b[31m", "\x1b[1;38;5;208m", "\x1b[38;2;1;2;8m", "\x1b[m", "\x1b[48:5:8m"])
def test_colours_stay_and_end(colour: str) -> None:
    assert escape_controls(f"{colour}red", colours=True) == f"{colour}red\x1b[0m"
    assert escape_controls(f"{colour}red") == f"\\x1b{colour[1:]}red"


@pytest.mark.parametrize("text", ["", "plain\n", "tab\tand Grüße, 中文, 👩‍🚀\n", "dos\r\nlines\r\n"])
def test_ordinary_text_stays(text: str) -> None:
    assert escape_controls(text) == text.replace("\r\n", "\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the run directory of a failed job, as another user may have left it."""
    path: Path = tmp_path_factory.mktemp("run")
    logs = path / "logs/0"
    logs.mkdir(parents=True)
    (path / "job.json").write_text("{}")
    (path / "job.json").chmod(0o600)
    hostile = "".join(f"{text}\n" for text in HOSTILE.values())
    (logs / "task-0.log").write_bytes(
        hostile.encode("utf-8", "surrogateescape") + b"\x9b2J\xff\n\x1b[32mgreen\x1b[0m\n"
    )
    (logs / "attempt.json").write_text('{"job_id": null, "host": "h", "process": 1, "time": 1}')
    (logs / "result.json").write_text(
        '{"exit_code": 1, "then": "", "why": "\\u001b]0;owned\\u0007\\u009b2J", "slurm": "", "time": 2}'
    )
    return path


def on_a_terminal(*words: object) -> str:
    """Return what a command writes to a terminal, stdout and stderr."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "hpc_train", *map(str, words)]
    with subprocess.Popen(command, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL) as process:
        os.close(follower)
        written = bytearray()
        while True:
            try:
                data = os.read(leader, 1 << 16)
            except OSError:  # the other end has closed
                break
            if not data:
                break
            written += data
        process.wait()
    os.close(leader)
    return written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("words", [("logs",), ("logs", "--tail", 5), ("logs", "-f"), ("logs", "--error"), ("status",)])
def test_commands_on_a_terminal(run: Path, words: tuple[object, ...]) -> None:
    written = on_a_terminal(*words, run)
    assert written
    assert not STEERING.search(written), repr(written)


def test_colours_of_a_log_reach_the_terminal(run: Path) -> None:
    assert "\x1b[32mgreen\x1b[0m" in on_a_terminal("logs", run)


def test_a_pipe_gets_the_log_as_it_is(run: Path) -> None:
    command = [sys.executable, "-m", "hpc_train", "logs", str(run)]
    written = subprocess.run(command, capture_output=True, check=True).stdout
    assert written.decode() == (run / "logs/0/task-0.log").read_bytes().decode(errors="replace")


@pytest.mark.parametrize("command", ["logs", "status", "results", "checkpoint ls"])
def test_a_path_in_an_error_line(command: str, tmp_path: Path) -> None:
    name = tmp_path / "\x1b]0;owned\x07\x9b2J\r"
    written = on_a_terminal(*command.split(), name)
    assert "hpc-train: " in written
    assert not STEERING.search(written), repr(written)
    assert len(written.splitlines()) == 1
