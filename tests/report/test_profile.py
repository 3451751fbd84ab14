"""Traces of real runs: they can be parsed, have our ranges, change no number, and their tables add up."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli.main import main
from hpc_train.errors import UserError
from hpc_train.report.profile_tables import TraceSpan, add_up, read_profile, read_spans
from hpc_train.training.records.profile_files import TraceFile, list_traces, name_trace, read_request

PROGRAM = [sys.executable, "-m", "hpc_train"]
RUN = (
    "data=text",
    "model.layers=2",
    "model.hidden=64",
    "model.heads=4",
    "model.kv_heads=4",
    "model.feed_forward=128",
    "train.sequence_length=32",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.eval_every=0",
    "train.noise_scale.every=0",
    "train.tensorboard=false",
    "checkpoint.every=0",
    "launch.ranks=2",
    "launch.threads=1",
    "parallel=fsdp",
)
PHASES = {"data", "forward", "backward", "gradient norm", "update", "other", "between steps"}


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def traced(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run of two ranks with traces of steps 3 and 4, and what `profile --json` says of it."""
    run = tmp_path_factory.mktemp("traced") / "run"
    words = (*RUN, f"data.path={store}", f"run_dir={run}", "train.steps=5", "train.record_steps=false")
    done = call("profile", *words, "--steps", "3:4", "--ranks", "0,1", "--json")
    assert done.returncode == 0, done.stderr
    return run, json.loads(done.stdout)


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    slack = 1e-3  # microseconds
    begins = inner["ts"] >= outer["ts"] - slack
    return bool(begins and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack)


def test_a_trace_has_our_ranges_inside_one_another(traced: tuple[Path, list[dict[str, Any]]]) -> None:
    run, _ = traced
    traces = list_traces(run)
    assert [(trace.rank, trace.first, trace.last) for trace in traces] == [(0, 3, 4), (1, 3, 4)]
    for trace in traces:
        content = json.loads(gzip.decompress(trace.path.read_bytes()))
        events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
        ranges = [event for event in events if event.get("cat") == "user_annotation"]
        steps = [event for event in ranges if event["name"].startswith("ProfilerStep#")]
        assert [event["name"] for event in steps] == ["ProfilerStep#3", "ProfilerStep#4"]
        phases = [event for event in ranges if event["name"].startswith("hpc_train: ")]
        assert {event["name"].removeprefix("hpc_train: ") for event in phases} == PHASES
        assert sum(event["name"] == "hpc_train: forward" for event in phases) == 2 * 2  # steps x micro-batches
        assert all(any(inside(phase, step) for step in steps) for phase in phases)
        forwards = [event for event in phases if event["name"] == "hpc_train: forward"]
        modules = [event for event in ranges if event["name"].startswith("module: ")]
        assert {"module: layers.0.attention.q", "module: head"} <= {event["name"] for event in modules}
        assert all(any(inside(module, forward) for forward in forwards) for module in modules)
        norms = [event for event in phases if event["name"] == "hpc_train: gradient norm"]
        assert len(norms) == 2


def test_the_tables_add_up(traced: tuple[Path, list[dict[str, Any]]]) -> None:
    run, told = traced
    for trace, found in zip(list_traces(run), told, strict=True):
        profile = read_profile(trace)
        assert found["rank"] == trace.rank
        assert found["seconds"] == profile.seconds
        assert sum(profile.phases.values()) == pytest.approx(profile.seconds, rel=0.05)
        events = [span for span in read_spans(trace.path) if span.category == "cpu_op"]
        assert sum(one.calls for one in profile.operators) == pytest.approx(len(events) / 2)
        calls = {one.name: one.calls for one in profile.operators}
        # q, k, v, o, gate, up, down in each of two layers, and the head; backward twice as many; two micro-batches.
        assert calls["aten::mm"] == (7 * 2 + 1) * 3 * 2
        modules = {one.name: one for one in profile.modules}
        assert modules["layers.*.attention.q"].forward > 0
        assert modules["layers.*.attention.q"].backward > 0
        assert not any(character.isdigit() for name in modules for character in name)
        in_modules = sum(one.forward for one in profile.modules)
        assert in_modules <= profile.phases["forward"] * 1.01


@pytest.mark.long
def test_tracing_changes_no_number(traced: tuple[Path, list[dict[str, Any]]], store: Path, tmp_path: Path) -> None:
    done = call("train", *RUN, f"data.path={store}", f"run_dir={tmp_path / 'plain'}", "train.steps=5")
    assert done.returncode == 0, done.stderr

    def losses(run: Path) -> list[tuple[float, float]]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [(line["loss"], line["grad_norm"]) for line in lines]

    assert losses(traced[0]) == losses(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()


def test_a_running_job_is_traced_on_request(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = (*RUN, f"data.path={store}", f"run_dir={run}", "train.steps=100000", "profile.poll_seconds=0.2")
    job = subprocess.Popen([*PROGRAM, "train", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 90
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text().count("\n") > 2:
            assert job.poll() is None
            assert time.monotonic() < end
            time.sleep(0.2)
        assert main(["profile", str(run), "--ranks", "7"]) == 2
        assert main(["profile", str(run), "--steps", "1:2"]) == 2
        assert main(["profile", str(run), "--ranks", "1", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        request = read_request(run)
        assert request is not None
        assert found["rank"] == 1
        assert found["steps"] == 5
        assert found["first"] >= request.first
        assert found["last"] - found["first"] == 4
        assert [trace.rank for trace in list_traces(run)] == [1]
        assert main(["profile", str(run), "--stacks", "3", "--json"]) == 0
        places = json.loads(capsys.readouterr().out)
        assert sum(place["count"] for place in places) == 3 * 2
        assert {rank for place in places for rank in place["ranks"]} == {"rank 0", "rank 1"}
        assert "(no answer)" not in {place["name"] for place in places}
        (run / "profile" / "request.json").write_text('{"number": 1, "first": "x"}')  # nobody stops for it
        assert main(["cancel", str(run), "--yes", "--now"]) == 0
    finally:
        job.terminate()
        job.wait()
    capsys.readouterr()
    assert main(["profile", str(run)]) == 0  # what there is
    assert "rank 1, steps" in capsys.readouterr().out
    assert main(["profile", str(run), "--ranks", "0"]) == 2
    assert main(["profile", str(run), "--stacks", "1"]) == 2


def event(name: str, category: str, ts: float, dur: float, tid: int = 1, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": arguments}


def test_kernels_and_backward_go_to_the_module_that_started_them() -> None:
    """A trace as of a GPU: a thread of its own runs the backward, and kernels have the id of their operator."""
    numbers = {"Sequence number": 7}
    backward = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        event("ProfilerStep#1", "user_annotation", 0, 100),
        event("hpc_train: forward", "user_annotation", 0, 50),
        event("module: layers.10.up", "user_annotation", 5, 20),
        event("aten::linear", "cpu_op", 6, 12, **{"External id": 1}),
        event("aten::mm", "cpu_op", 8, 4, **{"External id": 2}, **numbers),
        event(backward, "cpu_op", 60, 10, 2, **{"External id": 3}, **numbers),
        event("aten::mm", "cpu_op", 62, 5, 2, **{"External id": 4}),
        event("aten::add", "cpu_op", 80, 5, 2, **{"External id": 5}),
        event("gemm", "kernel", 20, 30, 99, **{"External id": 2}),
        event("gemm", "kernel", 65, 70, 99, **{"External id": 4}),
        event("add", "kernel", 140, 9, 99, **{"External id": 5}),
    ]
    profile = add_up([span for span in map(TraceSpan.from_event, events) if span is not None])
    assert profile.on_device
    assert profile.steps == 1
    assert profile.seconds == pytest.approx(100e-6)
    operators = {one.name: one for one in profile.operators}
    assert operators["aten::linear"].host == pytest.approx(8e-6)
    mm = operators["aten::mm"]
    assert (mm.calls, mm.host, mm.device) == pytest.approx((2, 9e-6, 100e-6))
    assert profile.operators[0] is mm
    assert [(one.name, one.forward, one.backward) for one in profile.modules] == [
        ("layers.*.up", pytest.approx(30e-6), pytest.approx(70e-6))
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        gzip.compress(b"{", mtime=0),
        gzip.compress(b'{"traceEvents": []}', mtime=0),
        gzip.compress(b'{"traceEvents": [1]}', mtime=0)[:-3],
        gzip.compress(b'{"traceEvents": 3}', mtime=0),
        gzip.compress(b"[" * 100_000, mtime=0),
    ],
)
def test_a_damaged_trace_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name_trace(0, 1, 2)
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        read_profile(TraceFile(path, 0, 0, 1, 2))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--steps", "5"), "FIRST:LAST"),
        (("--steps", "5:3"), "last is not before"),
        (("--steps", "0:3"), "counted from 1"),
        (("--steps", "1:101"), "more than 100"),
        (("--ranks", "2"), "ranks 0 to 1"),
        (("--steps", "2:3", "train.steps=2"), "has 2 steps"),
        (("launch=slurm",), "hpc-train submit"),
        (("profile.ranks=[]",), "list the ranks"),
        (("--stacks", "3"), "run directory or job id"),
    ],
)
def test_wrong_requests_are_one_line(
    words: tuple[str, ...], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "train" if words[0].startswith("profile") else "profile"
    assert main([command, f"run_dir={tmp_path / 'run'}", "launch.ranks=2", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert part in error
    assert not (tmp_path / "run").exists()
