"""Plain lines in a log, a live line on a terminal."""

import io
from typing import Any

import pytest

from hpc_train.training.records.progress_display import format_clock, make_progress


def _record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2.5, "lr": 1e-3, "tokens_per_second": 12345.6, "step_seconds": 2.0, **more}


def _plain(*records: dict[str, Any], steps: int = 20, every: int = 10) -> list[str]:
    stream = io.StringIO()
    shown = make_progress(steps, every, stream)
    for record in records:
        shown.show(record)
    shown.close()
    return stream.getvalue().splitlines()


def test_a_plain_line() -> None:
    assert _plain(_record(10)) == ["step 10/20  loss 2.5000  lr 1.00e-03  12,346 tokens/s  left 0:00:20"]


def test_validation_loss_and_mfu_are_shown_where_they_are_known() -> None:
    assert _plain(_record(7, validation_loss=2.25, mfu=0.415)) == [
        "step  7/20  loss 2.5000  validation 2.2500  lr 1.00e-03  12,346 tokens/s  MFU 41.5%  left 0:00:26"
    ]


def test_a_loss_that_is_lost_is_said_to_be() -> None:
    assert "loss not finite" in _plain(_record(10, loss=None))[0]


def test_lines_come_at_the_first_step_then_every_few_and_at_the_last() -> None:
    lines = _plain(*(_record(step) for step in range(1, 24)), steps=23)
    assert [line.split("/")[0] for line in lines] == ["step  1", "step 10", "step 20", "step 23"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (4e5, "111:06:40")]
)
def test_the_clock(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_live_line_that_ends_at_the_newest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    bar = make_progress(20, 10, stream)
    bar.show(_record(1))
    bar.show(_record(3, validation_loss=2.25))
    bar.show(_record(4))
    bar.close()
    text = stream.getvalue()
    assert "4/20" in text.splitlines()[-1] + text.splitlines()[-2]
    assert "loss 2.5000" in text
    assert "step 3  loss 2.5000  validation 2.2500" in text, "stays on the screen"
    assert "\x1b[" in text, "in place, by control sequences"
