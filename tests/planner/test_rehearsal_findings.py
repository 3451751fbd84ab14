"""What a rehearsal finds: layouts that do not add up, orders that wait for ever, and what it cannot show."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.config.parallel import resolve_degrees
from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.models.counts import count_parameters
from hpc_train.planner.rehearsal.checks import check_coverage
from hpc_train.planner.rehearsal.rehearse import choose_ranks, rehearse_run, replace_unavailable, run_in_processes
from hpc_train.planner.rehearsal.result import Rehearsal, RehearsedRank
from hpc_train.schedules import order
from hpc_train.schedules.generate import generate_order

DEGREES = resolve_degrees(compose(("parallel=fsdp",)).parallel, 2)


@pytest.fixture(scope="module")
def sharded() -> Rehearsal:
    return rehearse_run(compose(("parallel=fsdp", "model.layers=1")), 2)


def problems(sharded: Rehearsal, ranks: tuple[RehearsedRank, ...]) -> tuple[str, ...]:
    model = {piece.name: piece.shape for piece in sharded.ranks[0].pieces if not piece.name.startswith("optim.")}
    return check_coverage(model, ranks, DEGREES).problems


def with_piece(built: RehearsedRank, **changes: object) -> RehearsedRank:
    first, *others = built.pieces
    return replace(built, pieces=(replace(first, **changes), *others))  # type: ignore[arg-type]


def test_a_layout_that_adds_up_has_no_problems(sharded: Rehearsal) -> None:
    assert not sharded.problems
    assert not problems(sharded, sharded.ranks)
    assert sharded.coverage.elements == count_parameters(compose(("model.layers=1",)).model)


def test_a_shifted_a_missing_and_a_strange_piece_are_found(sharded: Rehearsal) -> None:
    first, second = sharded.ranks
    name = first.pieces[0].name
    assert "begins at (1, 0)" in problems(sharded, (first, with_piece(second, offset=(1, 0))))[0]
    assert any("not in the model" in line for line in problems(sharded, (with_piece(first, name="other"), second)))
    without = [replace(built, pieces=built.pieces[1:]) for built in sharded.ranks]
    assert problems(sharded, tuple(without)) == (f"{name} is on no rank",)


def test_a_part_that_is_on_no_rank_or_on_two_is_found(sharded: Rehearsal) -> None:
    name = sharded.ranks[0].pieces[0].name
    lie = sharded.ranks[0].tilings[name]
    rows = lie.shape[0]
    for intervals, said in {
        ((0, rows // 2), (rows // 2 + 1, rows // 2 - 1)): "is on no rank",
        ((0, rows // 2), (rows // 2 - 1, rows // 2 + 1)): "is on two ranks",
        ((0, rows // 2), (rows // 2, 1)): "are on any rank",
    }.items():
        wrong = replace(lie, intervals=(intervals, *lie.intervals[1:])).find_problem()
        assert wrong is not None
        assert said in wrong


def test_a_count_that_differs_from_the_shape_is_found(sharded: Rehearsal) -> None:
    first, second = sharded.ranks
    more = replace(first, counted=replace(first.counted, optimizer=first.counted.optimizer + 4))
    assert "bytes of optimizer" in replace(sharded, ranks=(more, second)).problems[0]


def test_an_order_that_waits_for_ever_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 wants the backward of its last micro-batch before it does that forward's."""
    file = tmp_path / "order.csv"
    rows = order.format_rows(generate_order("1f1b", 2, 4))
    forward, backward = rows[0].index("0F3"), rows[0].index("0B3")
    rows[0][forward], rows[0][backward] = "0B3", "0F3"
    file.write_text("\n".join(",".join(row) for row in rows) + "\n")
    overrides = ("parallel=pp", "parallel.pp=2", "launch.ranks=2", "train.global_batch=4", "train.micro_batch=1")
    assert main(["plan", "rehearse", *overrides, f"parallel.pipeline.schedule={file}"]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert "deadlock" in said
    assert "0B3 waits for" in said
    assert said.count("\n") == 1


def test_the_command_says_what_it_found_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = (
        "parallel=pp",
        "parallel.pp=2",
        "launch.ranks=2",
        "train.micro_batch=1",
        "parallel.recompute.mode=full",
    )
    assert main(["plan", "rehearse", "--json", *overrides]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["world"] == 2
    assert found["pipeline"]["schedule"] == "1f1b"
    assert found["pipeline"]["micro_batches"] == 16
    assert found["micro_batches"] == 4, "as many as are in flight, and then as many beside gradients"
    assert [row["rank"] for row in found["memory"]] == [0, 1]
    for row in found["memory"]:
        counted = row["counted"]
        assert {part: counted[part] for part in row["closed_form"]} == row["closed_form"]
        assert counted["peak"] == sum(counted["at_peak"].values())


def test_what_is_left_to_the_planner_is_rehearsed_as_it_decides(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("cluster=dgx_a100", "cluster.nodes=1", "precision=bf16", "train.global_batch=8", "data=text")
    tiny = ("model=llama_tiny", "train.sequence_length=64", "parallel=auto", "parallel.tp=2", "parallel.pp=1")
    assert main(["plan", "rehearse", "--ranks", "0", *machine, *tiny]) == 0
    told = capsys.readouterr().out
    assert told.startswith("parallel=auto: ")
    assert "tp=2" in told
    assert "each is held once" in told


def test_what_is_not_rehearsed_is_said() -> None:
    config = compose(
        (
            "parallel=fsdp",
            "parallel.compile=true",
            "parallel.recompute.offload=true",
            "parallel.offload.optimizer=file",
            "parallel.offload.dir=/scratch",
        )
    )
    changed, said = replace_unavailable(config)
    assert [line.split(":")[0].split("=")[0] for line in said] == [
        "parallel.compile",
        "parallel.recompute.offload",
        "parallel.offload",
        "parallel.offload",
    ]
    assert (changed.parallel.offload.optimizer, changed.parallel.offload.dir) == ("cpu", None)
    assert not changed.parallel.compile
    assert replace_unavailable(compose(("parallel=3d",)))[1] == []


def test_servers_hold_the_model_and_mpi_is_said_to_be_left_out() -> None:
    config = compose(("parallel=server", "parallel.server.servers=2", "model.layers=1"))
    rehearsed = rehearse_run(config, 2)
    numbers, tensors = rehearsed.coverage.elements, rehearsed.coverage.tensors
    assert sum(rehearsed.servers) == 3 * 4 * numbers + 4 * tensors
    assert any("MPI windows" in line for line in rehearsed.not_rehearsed)


def test_a_part_of_the_pipeline_alone_is_said_to_be_one() -> None:
    config = compose(("parallel=pp", "parallel.pp=2", "train.micro_batch=4"))
    rehearsed = rehearse_run(config, 2, "1")
    assert not rehearsed.problems
    assert [built.rank for built in rehearsed.ranks] == [1]
    assert "pipeline ranks 0" in rehearsed.not_rehearsed[0]


def test_ranks_that_are_asked_for_must_be_there() -> None:
    degrees = resolve_degrees(compose(("parallel=3d",)).parallel, 64)
    assert choose_ranks("3,1", degrees).built == (1, 3)
    assert choose_ranks("sample", degrees).built == (0, 31, 32, 33, 62, 63)
    for wrong in ("64", "x", "", "-1"):
        with pytest.raises(UserError, match="--ranks"):
            choose_ranks(wrong, degrees)


def test_a_process_that_dies_is_said() -> None:
    def die(item: int) -> int:
        if item:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with pytest.raises(UserError, match="rank 1: its process was killed"):
        run_in_processes(die, [0, 1], 2)


@pytest.mark.parametrize("optimizer", ["optim.state=8bit", pytest.param("optim=adafactor", marks=pytest.mark.long)])
def test_state_with_fewer_entries_than_its_parameter_is_no_finding(optimizer: str) -> None:
    found = rehearse_run(compose([optimizer, "parallel=fsdp", "train.sequence_length=32", "model.layers=1"]), 2, "0", 1)
    assert found.problems == ()
