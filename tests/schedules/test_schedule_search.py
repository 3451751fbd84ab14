"""A schedule that was searched for is valid, and beats the shipped ones where a large head makes stages unequal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpc_train.cli.plan.schedule import compare_schedules
from hpc_train.config.compose import compose
from hpc_train.config.parallel import Degrees
from hpc_train.errors import UserError
from hpc_train.models.registry import build_model
from hpc_train.parallel.pipeline.build import name_stage_blocks
from hpc_train.parallel.rules.pipeline import check_pipeline_rules
from hpc_train.schedules.generate import generate_order
from hpc_train.schedules.order import read_order
from hpc_train.schedules.search import PartTimes, count_live_blocks, even_out, search_schedule
from hpc_train.schedules.simulate import simulate_order
from hpc_train.schedules.validate import find_problem, find_runtime_problem
from hpc_train.traffic.stages import list_stage_parts

RANKS, MICRO = 4, 8
LLAMA_1B = PartTimes(0.0, (1.0,) * 16, 4.28)
"""16 blocks of hidden size 2048 and a vocabulary of 128,256."""
LLAMA_8B = PartTimes(0.0, (1.0,) * 32, 2.09)
COMMAND = (sys.executable, "-m", "hpc_train")


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("parts", [LLAMA_1B, LLAMA_8B], ids=["1b", "8b"])
def test_what_is_found_can_run_and_is_faster_than_every_shipped_schedule(parts: PartTimes, split: bool) -> None:
    found = search_schedule(parts, RANKS, MICRO, split_backward=split)
    assert find_problem(found.order, MICRO) is None
    assert find_runtime_problem(found.order) is None
    assert sum(found.sizes) == len(parts.blocks)
    assert min(found.sizes) >= 1
    assert found.simulation.makespan == simulate_order(found.order, parts.of_stages(found.sizes)).makespan
    assert found.order.splits_backward or not split
    shipped = {row["name"]: row["step"] for row in compare_schedules(parts, RANKS, MICRO)}
    assert set(shipped) >= {"1f1b", "zbv"}
    if split:
        assert found.simulation.makespan < min(shipped.values())
    else:
        assert not found.order.splits_backward
        assert found.simulation.makespan <= shipped["1f1b"]


def test_a_large_head_costs_the_shipped_schedules_a_fifth() -> None:
    """The sizes of the win, at no more memory than 1F1B has with its own split."""
    found = search_schedule(LLAMA_1B, RANKS, MICRO)
    shipped = {row["name"]: row for row in compare_schedules(LLAMA_1B, RANKS, MICRO)}
    assert found.simulation.makespan < 0.85 * shipped["1f1b"]["step"]
    assert found.simulation.makespan < 0.85 * shipped["zbv"]["step"]
    assert max(found.live_blocks) <= shipped["1f1b"]["live_blocks"]


def test_equal_stages_are_left_to_what_is_best_for_them() -> None:
    even = PartTimes(0.0, (1.0,) * 8, 0.0)
    found = search_schedule(even, 4, 8)
    best = simulate_order(generate_order("zbv", 4, 8), even.of_stages((1,) * 8)).makespan
    assert found.simulation.makespan <= best


def test_the_busiest_rank_is_as_little_busy_as_brute_force_finds() -> None:
    parts = PartTimes(0.5, (1.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0), 1.5)
    placement = (0, 1, 1, 0)

    def busiest(sizes: tuple[int, ...]) -> float:
        forward = parts.of_stages(sizes).forward
        return max(forward[0] + forward[3], forward[1] + forward[2])

    every = [(a, b, c, 7 - a - b - c) for a in range(1, 5) for b in range(1, 5) for c in range(1, 5) if a + b + c < 7]
    assert busiest(even_out(parts, placement)) == pytest.approx(min(map(busiest, every)))


def test_activations_count_from_forward_to_the_gradient_of_weights() -> None:
    order = generate_order("1f1b", 2, 4)
    assert count_live_blocks(order, (3, 1)) == (6, 1)


def test_sizes_of_stages_that_do_not_fit_are_one_line() -> None:
    degrees = Degrees(2, 1, 1, 1, 1)
    usual = ["model=llama_tiny", "model.layers=4", "parallel=pp", "parallel.pp=2", "train.micro_batch=4"]
    check_pipeline_rules(compose([*usual, "parallel.pipeline.blocks=[1,3]"]), degrees)
    for more, words in (
        (["parallel.pipeline.blocks=[1,2]"], "give 2 numbers"),
        (["parallel.pipeline.blocks=[0,4]"], "each at least 1"),
        (["parallel.pipeline.blocks=[1,1,2]"], "give 2 numbers"),
        (["parallel.pipeline.blocks=[1,3]", "parallel.pipeline.costs=[0,1,1,1,1,0]"], "costs: has no effect"),
    ):
        with pytest.raises(UserError, match=words):
            check_pipeline_rules(compose([*usual, *more]), degrees)


def test_trainer_and_planner_take_the_sizes_as_they_are() -> None:
    degrees = Degrees(2, 1, 1, 1, 1)
    config = compose(["model.layers=4", "parallel=pp", "parallel.pp=2", "parallel.pipeline.blocks=[1,3]"])
    with torch.device("meta"):
        model = build_model(config.model, 0)
    assert [len(stage) for stage in name_stage_blocks(model, config, degrees)] == [1, 3]
    assert [[part.blocks for part in rank] for rank in list_stage_parts(config, 2, 4)] == [[1], [3]]


def test_a_model_without_known_blocks_or_a_pipeline_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "plan", "schedule"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("parallel.pp=1 has no pipeline; set parallel.pp")
    with pytest.raises(UserError, match="the model has 2 blocks"):
        search_schedule(PartTimes(0.0, (1.0, 1.0), 0.0), 4, 8)


@pytest.mark.long
def test_sleeping_ranks_are_faster_in_the_order_that_was_found(tmp_path: Path) -> None:
    """Real ranks run both orders by the engine's own stages, which sleep as long as the simulation says."""
    run = ["model=llama_1b", "model.vocab_size=128256", "parallel=pp", "parallel.pp=4", "launch.ranks=4"]
    sizes = ["train.global_batch=8", "train.micro_batch=1", "--json", "--out", "found.csv"]
    planned = subprocess.run(
        [*COMMAND, "plan", "schedule", *run, *sizes], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert planned.returncode == 0, planned.stderr
    result = json.loads(planned.stdout)
    steps = {row["name"]: row["step"] for row in result["schedules"]}
    assert read_order(tmp_path / "found.csv").placement == tuple(result["placement"])
    stages = {"found.csv": tuple(result["blocks"]), "1f1b": (5, 5, 5, 1), "zbv": (3, 2, 2, 2, 2, 2, 2, 1)}
    costs = {name: LLAMA_1B.of_stages(blocks).forward for name, blocks in stages.items()}
    words = [word for name in stages for word in ("--schedule", name)]
    words += [word for name, times in costs.items() for word in ("--costs", f"{name}={','.join(map(str, times))}")]
    words += ["--ranks", "4", "--micro-batches", "8", "--rounds", "2", "--milliseconds", "60", "--json"]
    done = subprocess.run(
        [*COMMAND, "bench", "bubble", *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = {one["name"]: one["measured_seconds"] for one in json.loads(done.stdout)["schedules"]}
    assert measured["found.csv"] < 0.95 * min(measured["1f1b"], measured["zbv"])
    assert steps["found"] < steps["1f1b"]
