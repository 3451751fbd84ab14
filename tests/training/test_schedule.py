"""The learning rate against values computed by hand, and its bounds for any schedule."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config.compose import compose
from hpc_train.config.optim import ScheduleConfig
from hpc_train.config.schema import seal_config
from hpc_train.training.optimizer import compute_learning_rate, scale_peak_rate

NAMES = ("cosine", "linear", "wsd", "constant")


def _rates(steps: int, peak: float = 1.0, **settings: object) -> list[float]:
    config = seal_config(ScheduleConfig(**settings))  # type: ignore[arg-type]
    return [compute_learning_rate(config, peak, step, steps) for step in range(steps)]


def test_cosine() -> None:
    half = 0.5 * (1 + math.cos(math.pi / 4))
    wanted = [1.0, 2.0, 0.2 + 1.8 * half, 1.1, 0.2 + 1.8 * (1 - half), 0.2]
    assert _rates(6, 2.0, name="cosine", warmup_steps=2, min_ratio=0.1) == pytest.approx(wanted)


def test_linear() -> None:
    wanted = [1.0, 2.0, 1.55, 1.1, 0.65, 0.2]
    assert _rates(6, 2.0, name="linear", warmup_steps=2, min_ratio=0.1) == pytest.approx(wanted)


def test_wsd() -> None:
    wanted = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert _rates(10, name="wsd", warmup_steps=2, decay_fraction=0.4, min_ratio=0.0) == pytest.approx(wanted)


def test_constant() -> None:
    assert _rates(5, name="constant", warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_up_longer_than_the_run_ends_with_it_at_the_peak(name: str) -> None:
    assert _rates(4, name=name, warmup_steps=1000) == pytest.approx([0.25, 0.5, 0.75, 1.0])


@given(
    name=st.sampled_from(NAMES),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    decay=st.floats(0, 1),
    floor=st.floats(0, 1),
    peak=st.floats(1e-8, 10),
)
def test_every_rate_is_within_the_peak_and_the_last_one_is_the_floor(
    name: str, steps: int, warmup: int, decay: float, floor: float, peak: float
) -> None:
    rates = _rates(steps, peak, name=name, warmup_steps=warmup, decay_fraction=decay, min_ratio=floor)
    slack = 1 + 1e-12
    assert all(0 <= value <= peak * slack for value in rates)
    after = rates[warmup:]
    assert all(later <= earlier * slack for earlier, later in pairwise(after)), "never up again"
    if after and (name in ("cosine", "linear") or (name == "wsd" and round(steps * decay) > 0)):
        assert rates[-1] == pytest.approx(peak * floor, rel=1e-9, abs=1e-15)


@given(steps=st.integers(1, 300), warmup=st.integers(0, 300), decay=st.floats(0, 1))
def test_wsd_is_stable_between_warm_up_and_decay(steps: int, warmup: int, decay: float) -> None:
    rates = _rates(steps, name="wsd", warmup_steps=warmup, decay_fraction=decay, min_ratio=0.1)
    assert set(rates[warmup : steps - round(steps * decay)]) <= {1.0}


@pytest.mark.parametrize(("scaling", "wanted"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_peak_grows_with_the_batch(scaling: str, wanted: float) -> None:
    optim = compose(["optim.lr=0.1", f"optim.lr_scaling={scaling}", "optim.base_batch=8"]).optim
    assert scale_peak_rate(optim, 32) == pytest.approx(wanted)
    assert scale_peak_rate(optim, 8) == pytest.approx(0.1)
