"""Table of accelerators: datasheet figures, and how much of the peak the best kernels have been measured to reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One accelerator. Peaks are dense, without sparsity, as the datasheet states them."""

    memory_gb: float
    """Device memory in GB (10^9 bytes), as it is sold."""
    bandwidth: float
    """Memory bandwidth, bytes/s."""
    multiprocessors: int
    flops: dict[int, float]
    """Peak FLOP/s, by bits of the number format."""
    ceiling: float
    """Share of the 16-bit peak that the fastest matrix product of any shape reaches: "maximum achievable matmul FLOPS"
    in Bekman's Machine Learning Engineering (github.com/stas00/ml-engineering, compute/accelerator). V100's is a
    guess."""
    attention: float
    """Share of the 16-bit peak that fused causal attention reaches with the kernels of FlashAttention-2 (Dao 2023,
    arXiv:2307.08691: 225 TFLOP/s on A100, 335 on H100)."""
    new_attention: float | None = None
    """The same with kernels written for this device: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608: 740 TFLOP/s
    on H100), cuDNN on Blackwell. None: there are none."""
    triton: float = 1.0
    """Speed of FlashAttention in Triton over `attention`: at best 1 / 1.3 on A100 (Dao 2023, section 4.1). Not slower
    on Hopper, because Triton uses Hopper's instructions and FlashAttention-2 does not."""

    @property
    def multiplies_blocks(self) -> bool:
        """Whether it multiplies operands with a scale for each block (MXFP8), as all that multiply 4 bits do."""
        return 4 in self.flops


_ATTENTION_OF_PRODUCTS = 0.34 / 0.803
_MI300X_PRODUCTS = 0.803 * 620 / 720 * 989.4 / 1307.4
"""MI300X reaches 620 TFLOP/s where H100 reaches 720 in one benchmark of products (SemiAnalysis 2024, MI300X vs H100 vs
H200 Benchmark Part 1: Training); here relative to H100's ceiling."""
_HOPPER = {16: 989.4e12, 8: 1978.9e12}
# Large products are limited by power: GB300 (1,400 W per GPU) reaches more of its peak than GB200 (1,200 W).
_ACCELERATORS = {
    "V100": Accelerator(32, 0.9e12, 80, {16: 125e12}, 0.75, 0.3),
    "A100-40GB": Accelerator(40, 1.555e12, 108, {16: 312e12}, 0.869, 0.72, triton=1 / 1.3),
    "A100": Accelerator(80, 2.039e12, 108, {16: 312e12}, 0.869, 0.72, triton=1 / 1.3),
    "A800": Accelerator(80, 2.039e12, 108, {16: 312e12}, 0.869, 0.72, triton=1 / 1.3),
    # The 96 GB variant with HBM2e is limited to 500 W instead of 700 W, as torchtitan states for its benchmarks.
    "H100-96GB": Accelerator(96, 2.4e12, 132, _HOPPER, 0.803 * 0.85, 0.34 * 0.85, 0.75 * 0.85),
    "H100": Accelerator(80, 3.35e12, 132, _HOPPER, 0.803, 0.34, 0.75),
    "H800": Accelerator(80, 3.35e12, 132, _HOPPER, 0.803, 0.34, 0.75),
    "H200": Accelerator(141, 4.8e12, 132, _HOPPER, 0.803, 0.34, 0.75),
    "GB200": Accelerator(192, 8e12, 148, {16: 2500e12, 8: 5000e12, 4: 10000e12}, 0.729, 0.3, 0.64),
    "GB300": Accelerator(288, 8e12, 148, {16: 2500e12, 8: 5000e12, 4: 15000e12}, 0.729 * 1400 / 1200, 0.3, 0.7),
    "B200": Accelerator(192, 8e12, 148, {16: 2250e12, 8: 4500e12, 4: 9000e12}, 0.776, 0.3, 0.7),
    "B300": Accelerator(288, 8e12, 148, {16: 2250e12, 8: 4500e12, 4: 13500e12}, 0.776, 0.3, 0.7),
    # Attention of AMD's is assumed to be as far from the best product as FlashAttention-2 is on H100.
    "MI250X": Accelerator(64, 1.6e12, 110, {16: 191.5e12}, 0.767, 0.767 * _ATTENTION_OF_PRODUCTS),
    "MI300X": Accelerator(
        192, 5.3e12, 304, {16: 1307.4e12, 8: 2614.9e12}, _MI300X_PRODUCTS, _MI300X_PRODUCTS * _ATTENTION_OF_PRODUCTS
    ),
}


def find_accelerator(name: str) -> Accelerator | None:
    """Find the accelerator of a product name such as "NVIDIA A100-SXM4-40GB" or "H100-80GB"; None if not listed."""
    plain = name.upper().replace(" ", "-")
    variant = next(
        (key for key, size in (("A100-40GB", "40GB"), ("H100-96GB", "96GB")) if _has_size(plain, key, size)), None
    )
    if variant:
        return _ACCELERATORS[variant]
    # Longest name first, because names contain one another: "GB200" contains "B200".
    by_length = sorted(_ACCELERATORS, key=len, reverse=True)
    return next((_ACCELERATORS[key] for key in by_length if key in plain), None)


def _has_size(name: str, key: str, size: str) -> bool:
    return key.split("-")[0] in name and size in name


def attention_peak(accelerator: Accelerator, new_kernels: bool, triton: bool = False) -> float:
    """Return the share of the 16-bit peak that fused causal attention reaches.

    new_kernels: the stack has kernels written for this device, such as FlashAttention-3 on Hopper. triton: it has
    FlashAttention's first kernels in Triton.
    """
    best = (accelerator.new_attention if new_kernels else None) or accelerator.attention
    return best * (accelerator.triton if triton else 1.0)
