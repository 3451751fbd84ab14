"""Accelerators by name: datasheet figures, and the best matrix product that has been measured on each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """Dense figures, as the data sheets have them."""

    memory_gb: float
    """10^9 bytes as it is sold."""
    bandwidth: float
    """Bytes/s of its memory."""
    multiprocessors: int
    flops: dict[int, float]
    """FLOP/s by bits of the format."""
    ceiling: float
    """Share of the 16-bit peak that the best of all matrix products reaches: the MAMF tables of Bekman's Machine
    Learning Engineering (github.com/stas00/ml-engineering, compute/accelerator); guessed for V100 and AMD's."""
    attention: float = 0.5
    """The same of fused attention, causal, by kernels that came with FlashAttention-2 (Dao 2023, arXiv:2307.08691:
    225 TFLOP/s on A100, 335 on H100)."""
    new_attention: float | None = None
    """By kernels written for the device (Shah et al. 2024, arXiv:2407.08608: 740 TFLOP/s on H100; cuDNN on Blackwell);
    None: there are none."""
    triton: float = 1.0
    """Of what `attention` says, that kernels in Triton reach: FlashAttention's first ones up to 1 / 1.3 on A100
    (Dao 2023, section 4.1); on Hopper, whose own instructions Triton uses and FlashAttention-2 does not, no less."""


_HOPPER = {16: 989.4e12, 8: 1978.9e12}
# NVIDIA's power limits are 1,200 W a GPU for GB200 and 1,400 W for GB300: what products reach grows with it.
_ACCELERATORS = {
    "V100": Accelerator(32, 0.9e12, 80, {16: 125e12}, 0.75, 0.3),
    "A100-40GB": Accelerator(40, 1.555e12, 108, {16: 312e12}, 0.869, 0.72, triton=1 / 1.3),
    "A100": Accelerator(80, 2.039e12, 108, {16: 312e12}, 0.869, 0.72, triton=1 / 1.3),
    "A800": Accelerator(80, 2.039e12, 108, {16: 312e12}, 0.869, 0.72, triton=1 / 1.3),
    # The 96 GB variant with HBM2e is limited to 500 W in place of 700 (torchtitan's benchmarks say so of theirs).
    "H100-96GB": Accelerator(96, 2.4e12, 132, _HOPPER, 0.803 * 0.85, 0.34 * 0.85, 0.75 * 0.85),
    "H100": Accelerator(80, 3.35e12, 132, _HOPPER, 0.803, 0.34, 0.75),
    "H800": Accelerator(80, 3.35e12, 132, _HOPPER, 0.803, 0.34, 0.75),
    "H200": Accelerator(141, 4.8e12, 132, _HOPPER, 0.803, 0.34, 0.75),
    "GB200": Accelerator(192, 8e12, 148, {16: 2500e12, 8: 5000e12, 4: 10000e12}, 0.729, 0.3, 0.64),
    "GB300": Accelerator(288, 8e12, 148, {16: 2500e12, 8: 5000e12, 4: 15000e12}, 0.729 * 1400 / 1200, 0.3, 0.7),
    "B200": Accelerator(192, 8e12, 148, {16: 2250e12, 8: 4500e12, 4: 9000e12}, 0.776, 0.3, 0.7),
    "B300": Accelerator(288, 8e12, 148, {16: 2250e12, 8: 4500e12, 4: 13500e12}, 0.776, 0.3, 0.7),
    "MI250X": Accelerator(64, 1.6e12, 110, {16: 191.5e12}, 0.75),
    "MI300X": Accelerator(192, 5.3e12, 304, {16: 1307.4e12, 8: 2614.9e12}, 0.55),
}


def find_accelerator(name: str) -> Accelerator | None:
    """Find an accelerator by product name, however it is written ("NVIDIA A100-SXM4-40GB", "H100-80GB"); else None."""
    plain = name.upper().replace(" ", "-")
    variant = next((key for key, size in (("A100-40GB", "40GB"), ("H100-96GB", "96GB")) if _is(plain, key, size)), None)
    if variant:
        return _ACCELERATORS[variant]
    # Longest name first: "GB200" contains "B200", "A100-40GB" contains "A100".
    by_length = sorted(_ACCELERATORS, key=len, reverse=True)
    return next((_ACCELERATORS[key] for key in by_length if key in plain), None)


def _is(name: str, key: str, size: str) -> bool:
    return key.split("-")[0] in name and size in name


def attention_peak(accelerator: Accelerator, new_kernels: bool, triton: bool = False) -> float:
    """Return the share of the 16-bit peak that fused causal attention reaches.

    new_kernels: the stack has kernels written for this device, such as FlashAttention-3 on Hopper. triton: it has
    FlashAttention's first kernels in Triton.
    """
    best = (accelerator.new_attention if new_kernels else None) or accelerator.attention
    return best * (accelerator.triton if triton else 1.0)
