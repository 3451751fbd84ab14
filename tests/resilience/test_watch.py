"""What a watcher concludes from what it sees of ranks, and what it sees of real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.launch.watching import HangResponse, WatchSettings, is_last_try
from hpc_train.resilience.deadlines import (
    Deadlines,
    HangLimits,
    make_hang_limits,
    merge_learned,
    read_learned,
    write_learned,
)
from hpc_train.resilience.heartbeat import (
    Heartbeat,
    Phase,
    find_folder,
    kill_ranks,
    read_beats,
    remove_entries,
    signal_ranks,
)
from hpc_train.resilience.watch import (
    GONE,
    LOOK_SECONDS,
    STOPPED,
    WAITS_FOR_DISK,
    NodeWatch,
    RankView,
    find_hang,
    read_process_state,
    seconds_to_next_look,
)
from hpc_train.training.records.run_records import append_event

LIMITS = HangLimits(step=0.5, first_step=600, start=600, load=600, save=600)


def view(task: int, silent: float = 0.0, phase: Phase = Phase.STEP, step: int = 50, state: str = "R") -> RankView:
    deadline = 600.0 if phase in (Phase.SAVE, Phase.START, Phase.LOAD) else 10.0
    return RankView(task, phase, step, silent, deadline, state, "n1")


def test_ranks_that_go_on_do_not_hang() -> None:
    assert find_hang([view(0, 9), view(1, 0.1), view(2, 3)]) is None
    assert find_hang([]) is None
    assert find_hang([view(0, 100, state=GONE)]) is None


def test_ranks_that_wait_for_one_that_saves_do_not_hang() -> None:
    waiting = [view(task, 120) for task in (1, 2, 3)]
    assert find_hang([view(0, 120, Phase.SAVE), *waiting]) is None
    assert find_hang([view(0, 120, Phase.EVALUATE), *waiting]) is not None
    hang = find_hang([view(0, 700, Phase.SAVE), *waiting])
    assert hang is not None
    assert [culprit.task for culprit in hang.culprits] == [0]


def test_the_rank_at_the_lowest_step_is_named() -> None:
    hang = find_hang([view(0, 11), view(1, 12, step=49), view(2, 11)])
    assert hang is not None
    assert hang.describe() == "task 1 on n1 has been in a step after step 49 for 12 s (deadline 10 s)"


def test_a_stopped_rank_is_named_also_while_it_starts() -> None:
    stopped = RankView(1, Phase.START, 0, 11, 10, STOPPED, "n2")
    hang = find_hang([view(0, 11, Phase.START, step=0), stopped])
    assert hang is not None
    assert hang.describe().startswith("task 1 on n2 has been starting after step 0 for 11 s")
    assert hang.describe().endswith(", stopped by a signal")


def test_a_rank_that_is_gone_is_named_and_not_those_that_wait_for_it() -> None:
    """Nobody has told whoever started them, as where that cannot read what srun says."""
    hang = find_hang([view(0, 11), view(1, 11, state=GONE), view(2, 11)])
    assert hang is not None
    assert hang.describe().startswith("task 1 on n1 has been in a step after step 50 for 11 s")
    assert hang.describe().endswith(", and its process is gone")
    ended = find_hang([view(0, 11), view(1, 60, Phase.END, state=GONE)])
    assert ended is not None
    assert [culprit.task for culprit in ended.culprits] == [0]
    assert find_hang([view(0, 3), view(1, 11, state=GONE)]) is None


def test_a_rank_that_has_never_been_seen_is_named_and_not_those_that_wait_for_it() -> None:
    waiting, hosts = [view(task, 601, Phase.START, step=0) for task in (0, 2)], ["n1", "n2", "n3"]
    hang = find_hang(waiting, hosts)
    assert hang is not None
    assert hang.describe().startswith("task 1 on n2 has been starting after step 0 for 601 s")
    assert hang.describe().endswith(", without a sign of life")
    assert find_hang([view(0, 601, Phase.START, step=0), view(2, 5, Phase.START, step=0)], hosts) is None
    assert find_hang([], hosts) is None, "perhaps none of them can be seen"
    invisible = find_hang([view(0, 11), view(2, 11)], hosts)
    assert invisible is not None
    assert invisible.culprits == (), "it goes on with the others, so it is there and only cannot be seen"


def test_a_rank_that_falls_behind_hangs_although_the_others_go_on() -> None:
    others = [view(task, 0.1, step=80) for task in (0, 2)]
    hang = find_hang([*others, view(1, 11, step=60)])
    assert hang is not None
    assert [culprit.task for culprit in hang.culprits] == [1]
    assert find_hang([*others, view(1, 11, step=78)]) is None


def test_a_rank_that_waits_for_its_disk_is_named() -> None:
    hang = find_hang([view(0, 11), view(1, 11, state=WAITS_FOR_DISK), view(2, 11)])
    assert hang is not None
    assert [culprit.task for culprit in hang.culprits] == [1]
    alike = find_hang([view(0, 11), view(1, 11)])
    assert alike is not None
    assert alike.describe() == "all 2 ranks are silent past their deadlines"


@pytest.mark.parametrize("seed", range(20))
def test_deadline_is_five_times_the_99th_percentile_and_no_less_than_the_floor(seed: int) -> None:
    draw = random.Random(seed)
    deadlines = Deadlines(HangLimits())
    seen: list[float] = []
    for _ in range(draw.randint(0, 700)):
        seen.append(draw.expovariate(1 / draw.choice([0.1, 3.0, 20.0])))
        deadlines.observe(Phase.STEP, seen[-1])
    late = sorted(seen[-500:])
    expected = 900.0 if len(seen) < 5 else max(10.0, 5 * late[min(len(late) - 1, int(0.99 * len(late)))])
    assert deadlines.seconds(Phase.STEP) == pytest.approx(expected)
    assert deadlines.seconds(Phase.LOAD) == 1800


def test_one_slow_step_does_not_make_a_watcher_patient_for_the_rest_of_the_run() -> None:
    deadlines = Deadlines(HangLimits())
    for seconds in [0.4] * 19 + [8.0]:
        deadlines.observe(Phase.STEP, seconds)
    assert deadlines.seconds(Phase.STEP) == 40
    again = Deadlines(HangLimits(), deadlines.learned())
    for count in range(101):
        assert again.seconds(Phase.STEP) == 40
        assert again.learned()[Phase.STEP] == 8.0, count
        again.observe(Phase.STEP, 0.4)
    assert again.seconds(Phase.STEP) == 10
    assert again.learned()[Phase.STEP] == 0.4


def test_stacks_are_asked_for_before_the_deadline_so_that_a_hang_is_noticed_at_it(tmp_path: Path) -> None:
    """A rank answers as real ones do: faulthandler's stack in its log."""
    logs, asked = tmp_path / "logs" / "0", []
    logs.mkdir(parents=True)
    (logs / "task-0.log").write_text("a step\n")

    def request_stacks() -> None:
        asked.append(time.monotonic())
        with (logs / "task-0.log").open("a") as log:
            log.write('Current thread 0x0f (most recent call first):\n  File "model.py", line 7 in forward\n')

    response = HangResponse(logs, WatchSettings(LIMITS, act=True), request_stacks)
    assert not response.respond([view(0, 599, Phase.START)])
    assert not response.respond([view(0, 7)])
    assert not asked, "one that starts may not handle the signal yet, and this one has time left"
    assert not response.respond([view(0, 8)])
    assert not response.respond([view(0, 9)])
    assert len(asked) == 1
    assert not response.respond([view(0, 0.1)])
    assert not response.respond([view(0, 8)])
    assert len(asked) == 2, "it had gone on in between"
    assert response.respond([view(0, 10.5)])
    assert len(asked) == 2
    (report,) = (logs / "incident-0").glob("report.json")
    assert "was in forward (model.py:7)" in report.read_text()


@pytest.mark.parametrize(
    ("views", "recorded"),
    [
        ([view(0, 15), view(1, 15)], True),
        ([view(0, 15, Phase.FIRST_STEP), view(1, 15, Phase.FIRST_STEP)], True),
        ([view(0, 2), view(1, 2)], False),  # a step since
        ([view(0, 15), view(1, 15, Phase.SAVE)], False),  # a long save
        ([view(0, 15), view(1, 15, Phase.START)], False),  # which would die of the signal
        ([view(0, 15, Phase.LOAD), view(1, 15, Phase.LOAD)], False),
    ],
)
def test_ranks_that_do_not_end_when_they_are_asked_to_are_recorded_with_their_stacks(
    tmp_path: Path, views: list[RankView], recorded: bool
) -> None:
    """Slurm kills those of a cancelled job after KillWait, before a watcher may call it a hang."""
    logs = tmp_path / "logs" / "0"
    logs.mkdir(parents=True)
    places = ("model.py", "/torch/nn.py")

    def request_stacks() -> None:
        for task, place in enumerate(places):
            said = f'Current thread 0x0f (most recent call first):\n  File "{place}", line 7 in forward\n'
            (logs / f"task-{task}.log").write_text(said)

    for task in range(2):
        (logs / f"task-{task}.log").touch()
    response = HangResponse(logs, WatchSettings(HangLimits(step=60), act=True), lambda: None)
    text = response.report_late_end([replace(view, deadline=60) for view in views], 18.0, request_stacks)
    assert bool(text) == recorded == (logs / "incident-0").exists()
    if recorded:
        assert "asked to end 18 s ago, the ranks have not: all 2" in text
        assert "task 0 was in forward (model.py:7)" in text
        assert json.loads((logs / "incident-0/report.json").read_text())["task"] == 0
        assert '"late_end"' in (tmp_path / "events.jsonl").read_text()
        assert not (logs / "hang.json").exists(), "the ranks are not ended for it"


# --- real processes

RANK = """
import sys, time
from pathlib import Path
from hpc_train.resilience.heartbeat import Heartbeat, Phase
heartbeat = Heartbeat(Path(sys.argv[1]), int(sys.argv[2]))
print("up", flush=True)
for step in range(100000):
    heartbeat.enter(Phase.DATA, step)
    heartbeat.enter(Phase.STEP, step)
    time.sleep(0.05)
"""


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    """A log directory, whose heartbeats do not outlive the test."""
    yield tmp_path / "logs" / "0"
    remove_entries(tmp_path / "logs" / "0")


@pytest.fixture
def ranks(logs: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Three processes that make steps."""
    started = [
        subprocess.Popen([sys.executable, "-c", RANK, logs, str(task)], stdout=subprocess.PIPE, text=True)
        for task in range(3)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    yield started
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_next_look_is_when_the_next_rank_may_be_late() -> None:
    assert seconds_to_next_look([]) == LOOK_SECONDS
    assert seconds_to_next_look([view(0, 1), view(1, 9.9)]) == pytest.approx(0.1)
    assert seconds_to_next_look([view(0, 10), view(1, 3)]) == 0.02
    assert seconds_to_next_look([view(0, 11), view(1, 9.9, state=GONE)]) == LOOK_SECONDS, "late, or gone, already"


def test_silence_counts_from_the_entry_and_not_from_the_look_that_found_it(tmp_path: Path) -> None:
    beat, watch = Heartbeat(tmp_path, 0), NodeWatch(tmp_path, LIMITS)
    watch.look()
    beat.enter(Phase.STEP, 1)
    time.sleep(0.3)
    (seen,) = watch.look()
    remove_entries(tmp_path)
    assert 0.3 <= seen.silent <= 1.0


def look_for(watch: NodeWatch, seconds: float, until_hang: bool) -> list[RankView]:
    """Look as an agent does; returns the last views."""
    end = time.monotonic() + seconds
    views: list[RankView] = []
    while time.monotonic() < end:
        views = watch.look()
        if until_hang and find_hang(views):
            break
        time.sleep(0.1)
    return views


def test_a_stopped_process_is_found_and_going_ones_are_not(logs: Path, ranks: list[subprocess.Popen[str]]) -> None:
    watch = NodeWatch(logs, LIMITS, "here")
    views = look_for(watch, 2, until_hang=False)
    assert [view.task for view in views] == [0, 1, 2]
    assert find_hang(views) is None
    assert all(view.step > 0 and view.phase in (Phase.STEP, Phase.DATA) for view in views)
    ranks[1].send_signal(signal.SIGSTOP)
    hang = find_hang(look_for(watch, 60, until_hang=True))
    ranks[1].send_signal(signal.SIGCONT)
    assert hang is not None
    assert [culprit.task for culprit in hang.culprits] == [1]
    assert "stopped by a signal" in hang.describe()


def test_a_rank_that_gets_on_between_short_stops_does_not_hang(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `cpulimit`, which stops and continues a process many times a second. Each look sees it stopped."""
    clock = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: clock)
    monkeypatch.setattr("hpc_train.resilience.watch.read_process_state", lambda process: STOPPED)
    watch, heartbeat = NodeWatch(logs, LIMITS), Heartbeat(logs, 0)
    for step in range(10):
        heartbeat.enter(Phase.STEP, step)
        for _ in range(2):
            clock += 0.2
            assert find_hang(watch.look()) is None
    for _ in range(2):
        clock += 0.2
        looked = watch.look()
    assert find_hang(looked) is not None, "it has not got on for longer than a step may take"


def test_the_time_before_a_stop_does_not_count_as_stopped(logs: Path) -> None:
    start = "import sys, time; from pathlib import Path; from hpc_train.resilience.heartbeat import Heartbeat"
    words = [
        sys.executable,
        "-c",
        f"{start}; h = Heartbeat(Path(sys.argv[1])); print(flush=True); time.sleep(100)",
        logs,
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        watch = NodeWatch(logs, HangLimits(step=1.5, patience=9))  # which is for ranks that may be at work
        assert find_hang(look_for(watch, 3, until_hang=True)) is None, "a start may take longer than a step"
        rank.send_signal(signal.SIGSTOP)
        while watch.look()[0].state != STOPPED:
            pass
        assert find_hang(watch.look()) is None
        hang = find_hang(look_for(watch, 60, until_hang=True))
        rank.kill()
    assert hang is not None
    assert hang.culprits[0].silent > 4


def test_a_dead_process_is_gone_and_never_hangs(logs: Path, ranks: list[subprocess.Popen[str]]) -> None:
    watch = NodeWatch(logs, LIMITS)
    look_for(watch, 1, until_hang=False)
    ranks[2].kill()
    ranks[2].wait()
    views = look_for(watch, 1, until_hang=False)
    assert views[2].state == GONE
    assert find_hang([views[2]]) is None


FORKS = """
import os, signal, sys, time
from pathlib import Path
from hpc_train.resilience.heartbeat import Heartbeat
heartbeat = Heartbeat(Path(sys.argv[1]), 3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(100)
"""


def test_what_a_rank_has_forked_is_ended_with_it_though_the_rank_is_gone_and_no_other_process(
    logs: Path, ranks: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    """It ignores SIGTERM, and has all that the rank had open."""
    other = tmp_path / "logs" / "1"
    with subprocess.Popen([sys.executable, "-c", FORKS, other], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        rank.kill()
    assert read_process_state(child) != GONE
    assert kill_ranks(other) == [3]
    while read_process_state(child) != GONE:
        time.sleep(0.01)
    assert kill_ranks(other) == []
    remove_entries(other)
    assert [rank.poll() for rank in ranks] == [None] * 3
    assert kill_ranks(logs) == [0, 1, 2]


def test_ranks_are_signalled_and_no_process_that_has_the_number_of_one_by_now(
    logs: Path, ranks: list[subprocess.Popen[str]]
) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        gone = Heartbeat(logs, 3)
        gone._process = other.pid
        gone.enter(Phase.STEP, 5)
        signal_ranks(logs, signal.SIGUSR2)
        assert [rank.wait(10) for rank in ranks] == [-signal.SIGUSR2] * 3
        assert other.poll() is None
        other.kill()


def test_entries_are_private_and_somebody_elses_folder_is_not_used(logs: Path) -> None:
    heartbeat = Heartbeat(logs, 0)
    folder = find_folder(logs)
    assert heartbeat.failure is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "0").stat().st_mode & 0o777 == 0o600
    assert [beat.process for beat in read_beats(logs)] == [os.getpid()]
    folder.chmod(0o755)
    assert read_beats(logs) == []
    refused = Heartbeat(logs, 1)
    refused.enter(Phase.STEP, 3)
    assert refused.failure is not None
    assert "others may enter" in refused.failure
    folder.chmod(0o700)


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"\xff" * 64, b"\x01\0\0\0\x63" + b"\0" * 59])
def test_damaged_entries_are_passed_over(logs: Path, content: bytes) -> None:
    Heartbeat(logs, 0)
    (find_folder(logs) / "1").write_bytes(content)
    (find_folder(logs) / "notes").write_bytes(b"")
    assert [beat.task for beat in read_beats(logs)] == [0]


def test_what_an_attempt_has_learned_is_known_to_the_next(tmp_path: Path) -> None:
    limits = HangLimits()
    first = Deadlines(limits)
    for _ in range(10):
        first.observe(Phase.STEP, 3.0)
    for seconds in (40.0, 2.0):
        first.observe(Phase.FIRST_STEP, seconds)
    first.observe(Phase.START, 5.0)
    assert first.seconds(Phase.FIRST_STEP) == 900
    write_learned(tmp_path, first.learned())
    again = Deadlines(limits, read_learned(tmp_path))
    assert again.seconds(Phase.STEP) == 15
    assert again.seconds(Phase.FIRST_STEP) == 200
    assert again.seconds(Phase.START) == 900
    assert again.seconds(Phase.EVALUATE) == 900
    assert again.learned() == read_learned(tmp_path)
    quick = Deadlines(limits, {Phase.FIRST_STEP: 0.1, Phase.STEP: 0.1})
    assert [quick.seconds(phase) for phase in (Phase.FIRST_STEP, Phase.STEP)] == [60, 10]


def test_a_first_step_that_compiles_may_take_longer_on_another_node() -> None:
    hang = {f"{name}_seconds": 900.0 for name in ("first_step", "start", "load", "save")}
    for compiles, seconds in ((True, 60), (False, 20)):
        limits = make_hang_limits({**hang, "factor": 5.0, "step_seconds": 10.0}, compiles)
        assert Deadlines(limits, {Phase.FIRST_STEP: 0.1}).seconds(Phase.FIRST_STEP) == seconds
        assert Deadlines(limits, {Phase.FIRST_STEP: 40.0}).seconds(Phase.FIRST_STEP) == 200


def test_the_last_attempt_before_a_run_is_given_up_is_more_patient(tmp_path: Path) -> None:
    hang = {f"{name}_seconds": 900.0 for name in ("first_step", "start", "load", "save")}
    earlier = {Phase.STEP: 4.0, Phase.DATA: 0.1}
    for last_try, step, data in ((False, 20, 10), (True, 180, 90)):
        limits = make_hang_limits({**hang, "factor": 5.0, "step_seconds": 10.0}, False, last_try)
        deadlines = Deadlines(limits, earlier)
        assert [deadlines.seconds(phase) for phase in (Phase.STEP, Phase.DATA, Phase.SAVE)] == [step, data, 900]

    def record(kind: str, **fields: str) -> bool:
        append_event(tmp_path / "events.jsonl", kind, 0, **fields)
        return is_last_try(tmp_path)

    assert not is_last_try(tmp_path)
    assert not record("restart", cause="a hang", host="a")
    assert not record("restart", cause="a hang", host="b"), "another node's"
    assert not record("restart", cause="a rank was killed", host="a")
    assert record("restart", cause="a hang", host="a")
    assert record("resume")
    assert not record("checkpoint")
    assert [record("restart", cause="a hang", host="a") for _ in range(2)] == [False, True]
    assert not record("submit")


@pytest.mark.parametrize("text", ["", "[]", '{"STEP": "soon"}', '{"NAP": 3}', '{"STEP": -1}', '{"STEP": NaN}'])
def test_what_was_learned_may_be_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "deadlines.json").write_text(text)
    assert read_learned(tmp_path) == {}


def test_the_longest_of_all_nodes_counts() -> None:
    assert merge_learned([{Phase.STEP: 1.0}, {Phase.STEP: 2.0, Phase.DATA: 0.5}, {}]) == {
        Phase.STEP: 2.0,
        Phase.DATA: 0.5,
    }
