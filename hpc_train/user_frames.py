"""Find the lines of a traceback that are in the user's own files, and format them. Imports no torch."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).resolve().parent) + os.sep
_INSTALLED = tuple(
    str(Path(path).resolve()) + os.sep
    for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|socket ?timeout|failed to recv|timed out",
    re.IGNORECASE,
)
"""Error texts of a rank that only noticed that another one was gone."""
_LENGTH = 300
"""Maximum characters of an exception's text in one line."""


def list_user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames in the user's files, innermost first, of the original exception.

    If there are none, return those in installed packages that are neither ours nor torch's: a model may come from one.
    """
    frames = [frame for frame in _walk_frames(error) if not frame.filename.startswith(("<", _OURS))]
    own = [frame for frame in frames if not os.path.realpath(frame.filename).startswith(_INSTALLED)]
    return own or [frame for frame in frames if _is_package_of_models(frame.filename)]


def _is_package_of_models(path: str) -> bool:
    return "site-packages" in path and f"{os.sep}torch{os.sep}" not in path


def list_every_frame(error: BaseException) -> list[traceback.FrameSummary]:
    """Return all frames, innermost first."""
    return list(_walk_frames(error))


def _walk_frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    for raised in _list_from_cause(error):
        yield from reversed(traceback.extract_tb(raised.__traceback__))


def _list_from_cause(error: BaseException) -> list[BaseException]:
    """Return the exceptions from the root cause on: some libraries raise another one from the user's."""
    chain: list[BaseException] = []
    raised: BaseException | None = error
    while raised is not None and raised not in chain:
        chain.insert(0, raised)
        raised = raised.__cause__
    return chain


def find_root_cause(error: BaseException) -> BaseException:
    """Return the exception that started the chain."""
    return _list_from_cause(error)[0]


def describe_error(error: BaseException) -> str:
    """Format an exception's type and text in one line."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= _LENGTH else text[: _LENGTH - 3] + "..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def format_frame(frame: traceback.FrameSummary) -> str:
    """Format as `file:line, in function`; the file is relative to the current folder if it lies inside."""
    return f"{_shorten_path(frame.filename)}:{frame.lineno}, in {frame.name}"


def find_definition(function: Callable[..., Any]) -> str:
    """Return `file:line` of a function's definition; empty if it has none in a file."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return "" if code is None else f"{_shorten_path(code.co_filename)}:{code.co_firstlineno}"


def _shorten_path(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
