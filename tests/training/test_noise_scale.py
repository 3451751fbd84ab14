"""The gradient noise scale of problems whose noise scale is known."""

import numpy as np
import pytest

from hpc_train.training.numerics.noise_scale import NoiseScale

SMALL, BIG, DIM, MEASUREMENTS = 4, 32, 8, 20_000


def _square(gradients: np.ndarray) -> float:
    mean = gradients.mean(axis=0)
    return float(mean @ mean)


def _regression_gradients(rng: np.random.Generator, error: np.ndarray, sigma: float, samples: int) -> np.ndarray:
    """Of 1/2 (w . x - y)^2 with x ~ N(0, I), y = w* . x + N(0, sigma^2), at w - w* = error: (error . x - noise) x."""
    x = rng.standard_normal((samples, len(error)))
    return (x @ error - sigma * rng.standard_normal(samples))[:, None] * x


def test_the_estimate_converges_to_the_truth_of_a_linear_regression() -> None:
    """By the fourth moments of a normal: |G|^2 = |error|^2, tr(S) = (d + 1) |error|^2 + d sigma^2."""
    rng = np.random.default_rng(0)
    error, sigma = np.linspace(-0.5, 0.5, DIM), 0.8
    signal = float(error @ error)
    noise = (DIM + 1) * signal + DIM * sigma**2
    scale = NoiseScale(decay=0.9995)
    for _ in range(MEASUREMENTS):
        gradients = _regression_gradients(rng, error, sigma, BIG)
        smalls = np.mean([_square(gradients[part : part + SMALL]) for part in range(0, BIG, SMALL)])
        scale.add(float(smalls), SMALL, _square(gradients), BIG)
    assert scale.weight == pytest.approx(1, abs=1e-3)
    assert scale.signal == pytest.approx(signal, rel=0.05)
    assert scale.noise == pytest.approx(noise, rel=0.05)
    assert scale.value == pytest.approx(noise / signal, rel=0.05)


def test_two_exact_norms_give_the_exact_answer() -> None:
    """|G_B|^2 = |G|^2 + tr(S) / B with |G|^2 = 2 and tr(S) = 12."""
    scale = NoiseScale(decay=0.5)
    for _ in range(3):
        scale.add(2 + 12 / 4, 4, 2 + 12 / 24, 24)
    assert scale.value == pytest.approx(6)
    assert scale.weight == pytest.approx(1 - 0.5**3)


def test_nothing_is_claimed_before_both_parts_are_positive() -> None:
    assert NoiseScale(0.9).value is None
    scale = NoiseScale(0.9)
    scale.add(1.0, 4, 2.0, 8)
    assert scale.value is None


def test_a_restored_estimate_goes_on_bit_by_bit() -> None:
    whole, first, second = NoiseScale(0.9), NoiseScale(0.9), NoiseScale(0.9)
    pairs = np.random.default_rng(1).random((10, 2))
    for index, (small, big) in enumerate(pairs):
        if index == 5:
            second.restore(first.state())
        whole.add(small, 2, big, 16)
        (first if index < 5 else second).add(small, 2, big, 16)
    assert second == whole
