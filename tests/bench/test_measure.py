import os
from collections.abc import Iterator

import numpy as np
import pytest

from hpc_train.bench.local_ranks import run_local_ranks
from hpc_train.bench.rounds import WARM_UP_STEPS, RoundTimings, Side, time_rounds, warm_up_side
from hpc_train.bench.step.step import StartupTimer
from hpc_train.bench.step.step_result import summarise_step
from hpc_train.config.compose import compose
from hpc_train.interfaces import World
from hpc_train.processes import read_process_age
from hpc_train.testing import run_ranks


def test_rounds_alternate_in_order_and_every_side_takes_its_steps() -> None:
    def on_rank(world: World) -> tuple[list[str], float, tuple[int, ...]]:
        taken: list[str] = []

        def side(name: str) -> Iterator[float]:
            while True:
                taken.append(name)
                yield float(world.rank)

        sides = [warm_up_side(name, lambda name=name: side(name)) for name in "abc"]
        assert len(taken) == 3 * WARM_UP_STEPS
        taken.clear()
        timings = time_rounds(sides, rounds=3, steps=2)
        return taken, sides[0].first_loss, timings.wall.shape

    for taken, loss, shape in run_ranks(on_rank, 2):
        assert "".join(taken) == "aabbcc" + "ccbbaa" + "aabbcc"
        assert loss == 0.5  # the mean over ranks
        assert shape == (3, 3)


def test_every_rank_gets_the_same_timings() -> None:
    def on_rank(world: World) -> RoundTimings:
        def busy() -> Iterator[float]:
            while True:
                sum(range(10_000 * (1 + 20 * world.rank)))
                yield 0.0

        return time_rounds([Side("a", busy(), 0.0, 0.0)], rounds=3, steps=3)

    first, second = run_ranks(on_rank, 2)
    np.testing.assert_array_equal(first.wall, second.wall)
    np.testing.assert_array_equal(first.cpu, second.cpu)
    assert (first.cpu > 0).all()


def test_a_ratio_above_one_says_that_ours_is_faster() -> None:
    noise = np.array([1.0, 1.5, 0.9, 2.0, 1.1])[:, None]
    timings = RoundTimings(wall=noise * [0.1, 0.2, 0.05], cpu=noise * [0.4, 0.2, 0.4])

    def on_rank(world: World) -> dict[str, tuple[float, float, float, float]]:
        sides = [Side(name, iter(()), 5.0, 1.0) for name in ("hpc_train", "hand_written", "hand_written_tuned")]
        result = summarise_step(compose([]), world, sides, timings, 100, 3, StartupTimer())
        assert result.sides[0].seconds == pytest.approx(0.11)
        assert result.sides[0].tokens_per_second == pytest.approx(100 / 0.11)
        return {name: (ratio.wall, ratio.low, ratio.high, ratio.cpu) for name, ratio in result.ratios.items()}

    ratios = run_ranks(on_rank, 1)[0]
    # Noise that hits both sides of a round alike cancels in a paired ratio.
    assert ratios["hand_written"] == pytest.approx((2.0, 2.0, 2.0, 0.5))
    assert ratios["hand_written_tuned"] == pytest.approx((0.5, 0.5, 0.5, 1.0))


def test_start_up_counts_from_the_start_of_the_process() -> None:
    startup = StartupTimer()
    startup.mark("python")
    startup.mark("nothing")
    assert list(startup.parts) == ["python", "nothing"]
    assert startup.parts["nothing"] >= 0
    assert 0 < sum(startup.parts.values()) <= (read_process_age(os.getpid()) or 0)


def test_the_exit_code_is_that_of_the_first_rank_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_local_ranks(["--version"], ranks=2, threads=1) == 0
    assert len(capfd.readouterr().out.split()) == 2
    assert run_local_ranks(["no-such-command"], ranks=2, threads=1) == 2
