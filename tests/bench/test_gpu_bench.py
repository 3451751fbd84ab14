"""`bench gpu` without a GPU: its parts measure tiny shapes on the CPU, and one that fails costs only its own rows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from hpc_train.bench.gpu.gpu import PARTS, GpuBenchOptions, parse_part_output, run_in_process, run_parts, write_result
from hpc_train.bench.gpu.gpu_table import PUBLISHED, PartResult, Row, compute_published_mfu, format_markdown
from hpc_train.bench.gpu.parts import TOLERANCES, measure_part
from hpc_train.bench.gpu.step_sides import find_peak
from hpc_train.cli.main import main
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

MEASURED = [name for name in PARTS if name not in ("llama_1b", "eager")]
"""The two others are blocks_8b with another shape."""


def _measure(world: World) -> dict[str, PartResult]:
    return {name: measure_part(name, "cpu", quick=True) for name in MEASURED}


@pytest.fixture(scope="module")
def parts() -> dict[str, dict[str, Row]]:
    (found,) = run_ranks(_measure, 1)
    assert {name: part.failed for name, part in found.items()} == dict.fromkeys(MEASURED)
    return {name: {row.what: row for row in part.rows} for name, part in found.items()}


def test_every_part_measures(parts: dict[str, dict[str, Row]]) -> None:
    assert all(row.value is not None for name in ("memory", "offload", "checkpoint") for row in parts[name].values())
    assert 0.5 < (parts["memory"]["peak over plan"].value or 0) < 2
    assert (parts["offload"]["activations moved, a step"].value or 0) > 0.1
    assert (parts["checkpoint"]["third save: stall"].value or 0) > 0


def test_a_step_reads_the_device_once(parts: dict[str, dict[str, Row]]) -> None:
    assert len(parts["waits"]) >= 4
    assert {row.value for row in parts["waits"].values()} == {1}


def test_formats_are_as_far_from_float64_as_they_should_be(parts: dict[str, dict[str, Row]]) -> None:
    errors = [parts["parity"][f"{name}: error of the gradient"].value or 0.0 for name in TOLERANCES]
    assert 1e-9 < errors[0] < 1e-5 < errors[1] < errors[2] < TOLERANCES["fp8"]


def test_both_sides_of_the_speed_train_the_same(parts: dict[str, dict[str, Row]]) -> None:
    for case in ("bf16", "fp8"):
        row = parts["blocks_8b"][f"{case}: first loss, ours less the loop's"]
        assert abs(row.value or 0.0) < 1e-2
        assert (parts["blocks_8b"][f"{case}: over the hand-written loop"].value or 0) > 0
        assert parts["blocks_8b"][f"{case}: MFU"].value is None, "the peak of this CPU is not known"


def test_what_fails_costs_its_own_rows_only(tmp_path: Path) -> None:
    def run(name: str, seconds: float) -> PartResult:
        if name == "parity":
            return parse_part_output(name, -11, "", "", 1.0)
        if name == "memory":
            return parse_part_output(name, 1, "", "a traceback\nRuntimeError: CUDA error: out of | memory\n", 1.0)
        return PartResult(name, 1.0, (Row("a figure", 0.5, "share"),))

    out = str(tmp_path / "table")
    options = GpuBenchOptions(("parity", "memory", "waits"), "cpu", quick=True, out=out)
    result = run_parts(options, run, write_result)
    page = Path(f"{out}.md").read_text()
    assert "| parity | **failed** | | said nothing (signal 11) |" in page
    assert "| memory | **failed** | | RuntimeError: CUDA error: out of \\| memory (exit code 1) |" in page
    assert "| waits | a figure | 50.0% |  |" in page
    assert json.loads(Path(f"{out}.json").read_text()) == json.loads(json.dumps(asdict(result)))


def test_a_part_that_takes_too_long_is_ended() -> None:
    found = run_in_process("waits", GpuBenchOptions(device="cpu", quick=True), 0.2)
    assert found.failed == "killed after 0 s: its time was up"


def test_parts_after_the_time_are_not_begun(tmp_path: Path) -> None:
    options = GpuBenchOptions(("waits", "parity"), "cpu", quick=True, minutes=1e-9, out=str(tmp_path / "table"))
    result = run_parts(options, lambda name, _: PartResult(name, 0.0), write_result)
    assert [part.failed for part in result.parts] == ["not begun: the 1e-09 minutes are up"] * 2
    assert "not begun" in format_markdown(result)


def test_an_error_in_a_part_is_its_reason() -> None:
    (found,) = run_ranks(_fail, 1)
    assert found.failed == "KeyError: 'nothing'"
    assert found.rows == ()


def _fail(world: World) -> PartResult:
    return measure_part("nothing", "cpu", quick=True)


def test_the_longest_name_of_a_gpu_counts() -> None:
    assert find_peak("NVIDIA H200", "bf16") == pytest.approx(989.4e12)
    assert find_peak("NVIDIA H20", "bf16") != find_peak("NVIDIA H200", "bf16")
    assert find_peak("an unknown card", "bf16") is None


def test_published_figures_are_by_the_flops_of_this_project() -> None:
    assert [round(compute_published_mfu(one), 3) for one in PUBLISHED] == [0.300, 0.347, 0.444, 0.569]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "cpu"], "--device cpu: its shapes are those of a GPU; add --quick"),
        (["--device", "cpu", "--quick", "--minutes", "0"], "--minutes 0: must be more than 0"),
        (["--device", "cpu", "--quick", "--out", "no/such/table"], "--out no/such/table: name files in a folder"),
        ([], "bench gpu: torch sees no GPU here"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "gpu", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
