"""`logs --merge`: lines of all ranks in the order of their times, equal ones once, whatever clocks and files say."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import FAULTY, Workshop

from hpc_train.cli.main import main
from hpc_train.errors import EXIT_USER_ERROR
from hpc_train.launch.state.attempts import RANK_MAP
from hpc_train.launch.state.merged_lines import FoldedLine, RankLine, fold_lines
from hpc_train.training.records.rank_log import LevelGuess, RankLog, StreamLines, measure_clock_offset

BEGUN = 1_700_000_000.0


def record(at: float, message: str, level: str = "info", step: int | None = None) -> dict[str, Any]:
    return {"time": BEGUN + at, "rank": 0, "level": level, "step": step, "message": message}


def write_rank(folder: Path, task: int, records: Sequence[dict[str, Any]] | None, text: str | None = None) -> None:
    """Write the two logs of a rank. text: of the text log, if it is not what the records say."""
    if records is not None:
        (folder / f"task-{task}.jsonl").write_text("".join(json.dumps(fields) + "\n" for fields in records))
        lines = [fields["message"] for fields in records if "message" in fields]
        text = "".join(f"{line}\n" for line in lines) if text is None else text
    (folder / f"task-{task}.log").write_text(text or "")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with the log directory of one attempt."""
    (tmp_path / "run" / "logs" / "0").mkdir(parents=True)
    (tmp_path / "run" / "run.yaml").write_text("")
    return tmp_path / "run"


def merged(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> list[dict[str, Any]]:
    assert main(["logs", str(run), "--merge", "--json", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def shown(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> list[str]:
    assert main(["logs", str(run), "--merge", *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_lines_come_in_the_order_of_corrected_clocks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "logs" / "0"
    write_rank(folder, 0, [record(1, "one"), record(3, "three"), record(5, "five")])
    late = {"time": BEGUN + 100, "clock_offset": -100.0, "clock_error": 1e-4}
    write_rank(folder, 1, [late, record(102, "two"), record(104, "four")])
    assert [(line["message"], line["ranks"]) for line in merged(capsys, run)] == [
        ("one", [0]),
        ("two", [1]),
        ("three", [0]),
        ("four", [1]),
        ("five", [0]),
    ]
    times = [line["time"] for line in merged(capsys, run)]
    assert times == [BEGUN + at for at in (1, 2, 3, 4, 5)]
    assert "clocks corrected by at most 100 s" in "\n".join(shown(capsys, run)[:3])


def test_equal_lines_of_several_ranks_are_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "logs" / "0"
    for rank in range(6):
        alone = [record(1.5, "only here")] if rank == 4 else []
        beside = [record(3, "some")] if rank in (0, 1, 2, 5) else []
        write_rank(folder, rank, [record(1 + rank / 100, "all"), *alone, record(2, "all"), *beside])
    assert [(line["message"], line["ranks"]) for line in merged(capsys, run)] == [
        ("all", [0, 1, 2, 3, 4, 5]),
        ("only here", [4]),
        ("all", [0, 1, 2, 3, 4, 5]),
        ("some", [0, 1, 2, 5]),
    ]
    text = shown(capsys, run)
    assert sum("x 6 ranks" in line for line in text) == 2
    assert any(line.endswith("some  [0-2,5]") and "x 4 ranks" in line for line in text)


def test_what_differs_is_not_folded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another level, step or a later time is another line."""
    folder = run / "logs" / "0"
    write_rank(folder, 0, [record(1, "a"), record(2, "b", step=1), record(3, "c")])
    write_rank(folder, 1, [record(1, "a", "warning"), record(2, "b", step=2), record(9, "c")])
    lines = [(line["message"], line["ranks"]) for line in merged(capsys, run)]
    assert lines == [("a", [0]), ("a", [1]), ("b", [0]), ("b", [1]), ("c", [0]), ("c", [1])]


def test_lines_are_chosen_by_rank_level_and_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "logs" / "0"
    levels = ["debug", "info", "warning", "error"]
    for rank in range(5):
        write_rank(
            folder, rank, [record(step + rank / 10, f"r{rank} s{step}", levels[step], step) for step in range(4)]
        )

    def chosen(*options: str) -> set[str]:
        return {line["message"] for line in merged(capsys, run, *options)}

    everything = {f"r{rank} s{step}" for rank in range(5) for step in range(4)}
    assert chosen() == everything
    assert chosen("--rank", "3") == {f"r3 s{step}" for step in range(4)}
    assert chosen("--rank", "0,2-3", "--level", "error") == {"r0 s3", "r2 s3", "r3 s3"}
    assert chosen("--step", "2") == {f"r{rank} s2" for rank in range(5)}
    assert chosen("--step", "1:2", "--level", "warning") == {f"r{rank} s2" for rank in range(5)}
    assert [line["message"] for line in merged(capsys, run, "--tail", "2")] == ["r3 s3", "r4 s3"]


def test_lines_of_libraries_stay_where_they_were_printed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What only the text log has takes the time of the line before it, and says that it has none of its own."""
    folder = run / "logs" / "0"
    write_rank(folder, 0, [record(1, "begin"), record(5, "end")], text="begin\nNCCL WARNING from C\nend\n")
    write_rank(folder, 1, [record(3, "between")])
    lines = merged(capsys, run)
    assert [line["message"] for line in lines] == ["begin", "NCCL WARNING from C", "between", "end"]
    assert lines[1]["time"] is None
    assert lines[1]["level"] == "warning"


def test_logs_without_records_have_no_times(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "logs" / "0"
    write_rank(folder, 0, None, "a\nb\nonly 0\n")
    write_rank(folder, 1, None, "a\nb\n")
    lines = merged(capsys, run)
    assert [(line["message"], line["ranks"], line["time"]) for line in lines] == [
        ("a", [0, 1], None),
        ("b", [0, 1], None),
        ("only 0", [0], None),
    ]
    assert "this run wrote no times: lines are in the order of their numbers" in "\n".join(shown(capsys, run))


def test_damaged_records_lose_only_their_times(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "logs" / "0"
    write_rank(folder, 0, [record(1, "one"), record(2, "two"), record(3, "three")])
    path = folder / "task-0.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    odd = [
        b"{not json\n",
        b"[1, 2]\n",
        b'{"time": "x", "message": "y"}\n',
        b'{"time": 1e300, "message": "far"}\n',
        b'{"time": NaN, "message": "no time"}\n',
        b'{"time": true, "message": "no time"}\n',
        b'{"time": 1, "message": 7}\n',
        b"[" * 100_000 + b"\n",
        b"\xff\x00\n",
    ]
    path.write_bytes(first + b"".join(odd) + second[: len(second) // 2] + b"\n" + third + b'{"time": 17')
    lines = merged(capsys, run)
    assert [line["message"] for line in lines] == ["one", "two", "three"]
    assert [line["time"] is None for line in lines] == [False, True, False]


def test_a_clock_that_is_set_back_does_not_reorder_a_rank(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "logs" / "0"
    write_rank(folder, 0, [record(10, "first"), record(4, "second"), record(11, "third")])
    write_rank(folder, 1, [record(10.5, "between")])
    assert [line["message"] for line in merged(capsys, run)] == ["first", "second", "between", "third"]


def test_what_a_rank_prints_cannot_control_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rank(run / "logs" / "0", 0, [record(1, "a\x1b]0;title\x07b\nfake line\r\u202e", "warning")])
    *_, line = shown(capsys, run)
    assert "\x1b" not in line
    assert "\x07" not in line
    assert "\r" not in line
    assert "\\nfake line" in line


def test_ranks_without_logs_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "logs" / "0"
    entries = [{"rank": 3 - task, "process": task, "host": "n"} for task in range(4)]
    (folder / RANK_MAP).write_text(json.dumps({"ranks": entries}))
    write_rank(folder, 0, [record(1, "of rank three")])
    write_rank(folder, 2, None, "of rank one\n")
    text = "\n".join(shown(capsys, run))
    assert "no log of ranks 0,2" in text
    assert "no times from rank 1" in text
    assert {line["message"]: line["ranks"] for line in merged(capsys, run)} == {
        "of rank three": [3],
        "of rank one": [1],
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--merge", "-f"], "leave out"),
        (["--merge", "--first-error"], "leave out"),
        (["--json"], "add --merge"),
        (["--level", "error"], "add --merge"),
        (["--step", "3"], "add --merge"),
        (["--rank", "0-3"], "add --merge"),
        (["--merge", "--rank", "9"], "attempt 0 has logs of rank 0"),
        (["--merge", "--attempt", "7"], "--attempt 7"),
    ],
)
def test_wrong_options_are_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    write_rank(run / "logs" / "0", 0, [record(1, "x")])
    assert main(["logs", str(run), *options]) == EXIT_USER_ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("step", ["x", "3:1", "1:2:3", "-1", ""])
def test_wrong_steps_are_refused(run: Path, capsys: pytest.CaptureFixture[str], step: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["logs", str(run), "--merge", f"--step={step}"])
    assert ended.value.code == EXIT_USER_ERROR
    assert "--step" in capsys.readouterr().err


def test_pipes_and_missing_files_are_no_logs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "logs" / "0"
    assert main(["logs", str(run), "--merge"]) == EXIT_USER_ERROR
    assert "no rank has printed anything" in capsys.readouterr().err
    write_rank(folder, 0, [record(1, "real")])
    os.mkfifo(folder / "task-1.log")
    os.mkfifo(folder / "task-2.jsonl")
    (folder / "task-x.log").write_text("not of a rank\n")
    (folder / "task-²3.log").write_text("not of a rank\n")
    assert [line["message"] for line in merged(capsys, run)] == ["real"]


def test_folding_against_brute_force() -> None:
    """Every line is in one group, no rank twice in a group, and no line further from the first than the window."""
    for seed in range(40):
        chooser = random.Random(seed)
        lines = sorted(
            RankLine(chooser.randrange(60) / 4, rank, number, "info", None, chooser.choice("abc"), True)
            for rank in range(5)
            for number in range(chooser.randrange(12))
        )
        folded = list(fold_lines(iter(lines), 2.0))
        assert [group.line.time for group in folded] == sorted(group.line.time for group in folded)
        assert sorted(describe(folded)) == sorted(describe(fold_slowly(lines, 2.0))), seed


def describe(groups: Sequence[FoldedLine]) -> list[tuple[RankLine, tuple[int, ...]]]:
    return [(group.line, tuple(sorted(group.ranks))) for group in groups]


def fold_slowly(lines: Sequence[RankLine], window: float) -> list[FoldedLine]:
    groups: list[FoldedLine] = []
    for line in lines:
        for group in groups:
            near = group.line.time >= line.time - window
            if near and group.line.message == line.message and line.rank not in group.ranks:
                later = [one for one in groups if line.rank in one.ranks and one.line.message == line.message]
                if all(groups.index(one) < groups.index(group) for one in later):
                    group.ranks.append(line.rank)
                    break
        else:
            groups.append(FoldedLine(line, [line.rank]))
    return groups


def test_levels_of_printed_lines() -> None:
    guess = LevelGuess()
    lines = [
        "step 3",
        "x.py:3: UserWarning: careful",
        "Traceback (most recent call last):",
        '  File "x.py"',
        "ValueError: no",
    ]
    assert [guess.level(line) for line in [*lines, "after"]] == ["info", "warning", "error", "error", "error", "info"]


def test_records_of_a_stream_are_whole_lines(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "task-0.jsonl")
    stream = StreamLines(log)
    for part in (b"hel", b"lo\nwor", b"ld\n\xff\n", b"unfinished"):
        stream.add(part)
    records = [json.loads(line) for line in (tmp_path / "task-0.jsonl").read_text().splitlines()]
    assert [fields["message"] for fields in records] == ["hello", "world", "\ufffd"]
    assert [fields["time"] for fields in records] == sorted(fields["time"] for fields in records)
    assert log.now() >= records[-1]["time"]


def test_a_clock_offset_is_within_its_error() -> None:
    clock = iter(range(100))
    offset, error = measure_clock_offset(lambda: next(clock) + 50.0, lambda: float(next(clock)))
    assert abs(offset - 50.0) <= error


def test_a_failed_run_begins_with_its_first_error(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    ended = workshop.train("run", *FAULTY, "train.steps=8", "checkpoint.every=100", faults="1:train:3:raise")
    assert ended.code != 0
    run = workshop.folder / "run"
    text = shown(capsys, run)
    assert text[0].startswith("first error: rank 1: ")
    assert "attempt 0" in text[1]
    lines = merged(capsys, run)
    assert all(line["time"] is None or abs(line["time"] - lines[0]["time"]) < 600 for line in lines)
    assert {line["step"] for line in lines if line["step"] is not None}, "lines know their steps"
    assert any(line["level"] == "error" and 1 in line["ranks"] for line in lines)
    errors = merged(capsys, run, "--level", "error")
    assert errors
    assert {line["level"] for line in errors} == {"error"}
    printed = [(run / "logs/0" / f"task-{task}.log").read_text().splitlines() for task in (0, 1)]
    assert sum(len(line["ranks"]) for line in lines) == sum(map(len, printed)), "no line is lost or twice"
