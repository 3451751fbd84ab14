"""Verdicts of a rehearsal on memory: whether it keeps to the plan, whether it fits, and what offload frees."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from planner_runs import run

from hpc_train.cli.main import main
from hpc_train.planner.plan import PlanOptions, plan_overrides
from hpc_train.planner.rehearsal.checks import TOLERANCE, DeviceMemory, check_memory_fit
from hpc_train.planner.rehearsal.rehearse import rehearse_run
from hpc_train.planner.rehearsal.result import CountedMemory, RehearsedRank

GIB = 2**30
SMALL = (
    "cluster=dgx_h100", "cluster.nodes=1", "precision=bf16", "model=llama_125m", "model.layers=2", "model.hidden=1024",
    "model.heads=16", "model.feed_forward=4096", "model.vocab_size=1024", "train.sequence_length=512",
    "train.micro_batch=2", "train.global_batch=32",
)  # fmt: skip
SHARDED = (*SMALL, "parallel.strategy=zero3", "parallel.dp_shard=8")


def built(rank: int, pp: int, **parts: int) -> RehearsedRank:
    """Return a rank that counted so many GiB of each of ledger.KINDS."""
    held = {name: size * GIB for name, size in parts.items()}
    return RehearsedRank(
        rank, {"pp": pp}, (), (), {}, CountedMemory(0, 0, peak=sum(held.values()), at_peak=held), 0.0, 0
    )


PLAN = {"parameters": 4.0 * GIB, "gradients": 4.0 * GIB, "activations": 10.0 * GIB, "logits": 2.0 * GIB}
H100 = DeviceMemory(80 * GIB, fragmentation=0.06, context=2 * GIB)


def test_a_rank_that_keeps_to_the_plan_and_fits_is_said_so() -> None:
    found = check_memory_fit([built(0, 0, parameters=4, gradients=4, forward=11, other=1)], {0: PLAN}, H100)
    assert (found.within_plan, found.fits, found.ok) == (True, True, True)
    assert found.lines == (
        "fits: rank 0 needs most, 20.0 GiB, the plan says 20.0 GiB; with allocator and driver 23.2 GiB of 80.0 GiB",
    )


def test_a_rank_that_exceeds_its_plan_is_named_with_what_it_is_and_by_how_much() -> None:
    ranks = [built(0, 0, parameters=4, gradients=4, forward=12), built(8, 1, parameters=4, gradients=30, forward=12)]
    found = check_memory_fit(ranks, {0: PLAN, 8: PLAN}, H100)
    assert (found.within_plan, found.fits, found.ok) == (False, True, False)
    assert found.lines == (
        "rank 8 (pipeline rank 1) needs 46.0 GiB, 2.3 times the 20.0 GiB of the plan (allowed: 5% more); most of "
        "it gradients: 30.0 GiB counted, 4.0 GiB planned",
    )


@pytest.mark.parametrize(("share", "within"), [(TOLERANCE * 0.98, True), (TOLERANCE * 1.02, False), (-0.5, True)])
def test_five_per_cent_are_allowed(share: float, within: bool) -> None:
    one = built(0, 0)
    one = replace(one, counted=replace(one.counted, peak=round(20 * GIB * (1 + share))))
    assert check_memory_fit([one], {0: PLAN}, H100).within_plan is within


@pytest.mark.parametrize(("peak", "said"), [(1.052, "5.2% more than"), (1.34, "34% more than"), (2.26, "2.3 times")])
def test_the_excess_is_a_number_that_can_be_compared(peak: float, said: str) -> None:
    one = built(0, 0)
    one = replace(one, counted=replace(one.counted, peak=round(20 * GIB * peak)))
    assert f"{said} the 20.0 GiB of the plan" in check_memory_fit([one], {0: PLAN}, H100).lines[0]


def test_what_the_plan_says_too_may_not_fit() -> None:
    small = replace(H100, bytes=22 * GIB)
    found = check_memory_fit([built(0, 0, parameters=4, gradients=4, forward=12)], {0: PLAN}, small)
    assert (found.within_plan, found.fits, found.ok) == (True, False, False)
    assert found.lines == (
        "rank 0 does not fit: 20.0 GiB, with allocator and driver 23.2 GiB, are 1.2 GiB more than the 22.0 GiB of the "
        "device; most of it activations: 12.0 GiB",
    )


def test_what_is_not_rehearsed_counts_by_the_plan() -> None:
    """The stand-in keeps its activations on the device; the run moves 8 GiB of them to the host."""
    small, ranks = replace(H100, bytes=22 * GIB), [built(0, 0, parameters=4, gradients=4, forward=12)]
    less = check_memory_fit(ranks, {0: PLAN}, small, {0: -8.0 * GIB})
    assert less.fits
    needed, said = (sum(it.counted.peak or 0 for it in ranks) / GIB - 8, sum(PLAN.values()) / GIB - 8)
    assert f"needs most, {needed:.1f} GiB, the plan says {said:.1f} GiB" in less.lines[0], "both of the real run"
    assert not check_memory_fit(ranks, {0: PLAN}, small, {0: 8.0 * GIB}).fits


def test_what_is_not_known_is_said() -> None:
    assert check_memory_fit([], {}, H100).fits is None
    unknown = check_memory_fit([built(0, 0, forward=12)], {0: PLAN}, None)
    assert (unknown.ok, unknown.fits) == (True, None)
    assert "cluster.gpu.memory_gib is not known" in unknown.lines[0]
    assert check_memory_fit([built(0, 0, forward=90)], {}, H100).fits is False, (
        "a model that cannot be planned may not fit either"
    )


@pytest.mark.parametrize(
    ("more", "code", "last"),
    [
        ((), 0, "fits: rank 0 needs most"),
        (("cluster.gpu.memory_gib=1",), 1, "WRONG: rank 0 does not fit: "),
    ],
    ids=["fits", "too small"],
)
def test_the_command_ends_with_a_verdict(
    more: tuple[str, ...], code: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "rehearse", *SHARDED, *more, "--ranks", "0"]) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)


def test_json_has_the_verdict_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "rehearse", *SHARDED, "cluster.gpu.memory_gib=1", "--ranks", "0", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["fits"], told["within_plan"], told["problems"]) == (False, False, True, [])
    assert told["verdict"][0].startswith("rank 0 does not fit: ")


@pytest.mark.long
def test_the_first_example_of_the_documentation_fits_as_it_is_recommended() -> None:
    page = (Path(__file__).parents[2] / "docs/planner.md").read_text()
    example = re.search(r"^hpc-train plan (model=.*)$", page, re.MULTILINE)
    assert example
    best = plan_overrides(shlex.split(example[1]), options=PlanOptions(baselines=False)).best
    assert best is not None
    found = rehearse_run(best.config, best.ranks)
    assert (found.ok, found.fit.fits) == (True, True), (found.problems, found.fit.lines)


PLACES = tuple(product(("none", "cpu", "file"), repeat=2))
"""(parameters, optimizer) places."""
_PARTS = ("parameters", "optimizer")
FEW = (("none", "none"), ("none", "cpu"), ("cpu", "none"))


@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        pytest.param("zero3", FEW, id="zero3"),
        *(
            pytest.param(name, PLACES, id=f"{name}, all", marks=pytest.mark.long)
            for name in ("zero1", "zero2", "zero3")
        ),
    ],
)
def test_offload_frees_what_the_plan_says_it_frees(strategy: str, places: tuple[tuple[str, str], ...]) -> None:
    """Plan and count save the same bytes on the device, whatever else each counts; no part is held twice."""
    base = (
        *SMALL,
        "model.layers=1",
        f"parallel.strategy={strategy}",
        "parallel.dp_shard=8",
        "train.sequence_length=64",
    )
    counted, planned = {}, {}
    for place in places:
        offload = (f"parallel.offload.{name}={where}" for name, where in zip(_PARTS, place, strict=True))
        found = rehearse_run(run(*base, *offload), 8, "0", 1)
        (rank,) = found.ranks
        assert rank.counted.peak is not None
        counted[place], planned[place] = rank.counted.peak, sum(found.planned[0].values())
        part = rank.counted.parameters
        gradients = 0 if strategy == "zero1" else part  # whole gradients are added up on the device
        freed = {"none": 0, "cpu": 2 * part}[place[1].replace("file", "cpu")]
        freed = freed if place[0] == "none" else 3 * part + gradients
        assert planned["none", "none"] - planned[place] == pytest.approx(freed, rel=0.02), place
        least = freed - part if strategy == "zero2" and place[0] != "none" else freed  # its peak precedes reduction
        assert 0.98 * least <= counted["none", "none"] - counted[place] <= 1.02 * freed, place
        assert rank.counted.host == pytest.approx(3 * part + part if place[0] != "none" else freed, rel=0.02), place
