"""Constants: every number of the model that is fitted or assumed, with its meaning, its bounds and its source.

constants.json beside this file has the values that the package ships, written by `hpc-train plan fit`. A cluster's
calibration file replaces those that were measured there, and adds residuals: errors of measured runs that no constant
explains, which correct predictions for similar settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.cluster.calibration import Calibration, StepResidual, read_calibration
from hpc_train.config.cluster import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.planner.model.inputs import Column
from hpc_train.planner.model.jobs import Jobs
from hpc_train.regular_files import read_json

CONSTANTS_VERSION = 1


TIME, MEMORY, EXPERTS, PYTORCH = "time", "memory", "experts", "pytorch"
"""The data that a constant is fitted to: step times of dense models, memory, step times of mixtures of experts, step
times of dense models under PyTorch's own FSDP and tensor parallelism."""


def _declare_fitted(start: float, low: float, high: float, to: str = TIME) -> Any:
    """Declare a constant that may be fitted. start: value before the fit. low, high: bounds that physics allows."""
    return field(default=start, metadata={"bounds": (low, high), "to": to})


@dataclass(frozen=True)
class Constants:
    """Constants of the model of time and memory. The defaults are the values from which a fit starts."""

    # Computation.
    gemm_efficiency: float = _declare_fitted(0.85, 0.6, 1.0)
    """Speed of large matrix products in training over the fastest measured product (Jobs.gemm_ceiling)."""
    gemm_traffic: float = _declare_fitted(0.7, 0.0, 1.5)
    """Share of a product's memory traffic that is not hidden behind its arithmetic."""
    flash_efficiency: float = _declare_fitted(0.7, 0.4, 1.0)
    """Speed of fused attention in training over the best that its authors measured (Jobs.attention_ceiling)."""
    flash_half: float = _declare_fitted(500.0, 0.0, 4000.0)
    """Positions of a sequence at which fused attention runs at half of that speed: short ones do not fill the device
    (Dao 2023, figure 4)."""
    misaligned: float = _declare_fitted(12.0, 4.0, 20.0)
    """Slowdown of attention's products if head_dim is not a multiple of 8, so that they cannot use tensor cores. At
    most the ratio of tensor-core to vector peak, 16 on A100."""
    low_precision: float = _declare_fitted(0.85, 0.5, 1.0)
    """Additional factor on the share of the peak that 8-bit products reach, with scaling and casts."""
    rowwise: float = 0.72
    """Speed of 8-bit products with a scale per row, relative to those with one per tensor. From the times of Llama-3 8B
    on 8 H100 with both (github.com/pytorch/torchtitan, commit 7a04053); not fitted."""
    four_bits: float = _declare_fitted(0.75, 0.4, 1.0)
    """Factor of 4-bit products in place of low_precision; they scale every block of elements separately."""
    grouped_efficiency: float = _declare_fitted(0.7, 0.3, 1.0, EXPERTS)
    """Speed of the grouped products of experts over that of one large product."""
    expert_passes: float = _declare_fitted(10.0, 2.0, 60.0, EXPERTS)
    """Passes over the rows that experts take, forward: sort, gather, add up (see model.experts)."""
    launch_expert: float = _declare_fitted(5e-5, 0.0, 3e-4, EXPERTS)
    """Host seconds of a forward for each routed expert of a rank whose products are launched one by one, which the
    device waits for: the host cannot launch ahead, since it waits for the number of rows."""
    overlap_experts: float = _declare_fitted(0.5, 0.0, 1.0, EXPERTS)
    """Share of a layer's computation that hides all-to-alls of another micro-batch (Jobs.overlap_experts)."""
    exchange: float = _declare_fitted(1.0, 0.1, 4.0, EXPERTS)
    """Time of the all-to-all of tokens over that of moving its bytes at the speed of other collectives."""
    alignment: float = _declare_fitted(1.05, 1.0, 1.5)
    """Slowdown of a product whose width is not a multiple of 64 elements, so that rows are not whole 128-byte lines
    (NVIDIA, Matrix Multiplication Background User's Guide, table 1)."""
    score_passes: float = _declare_fitted(4.5, 3.0, 9.0)
    """Passes over the scores of attention that is not fused, forward. Softmax and dropout each read and write them, and
    there is a one-byte mask (4.5 in total); the rest is what the kernels do beyond that."""
    memory_efficiency: float = _declare_fitted(0.8, 0.5, 0.95)
    """Share of memory bandwidth that elementwise kernels reach."""
    eager: float = _declare_fitted(1.5, 1.0, 3.0)
    """Time of elementwise work in plain PyTorch over that of hand-fused kernels."""
    compiled: float = _declare_fitted(0.7, 0.4, 1.0)
    """Time of elementwise work with torch.compile over that of hand-fused kernels."""
    launch: float = 1.2e-5
    """Host seconds to launch one kernel, with Python and PyTorch's dispatch. Assumed, not fitted."""
    launch_deepspeed: float = _declare_fitted(3e-5, 5e-6, 6e-5)
    """The same for Megatron-DeepSpeed, whose activation checkpointing saves and restores random states in every
    layer."""
    optimizer: float = _declare_fitted(1.5, 1.0, 4.0)
    """Time of the optimizer's update over that of moving its state through memory once."""
    # Communication.
    link_efficiency: float = _declare_fitted(0.7, 0.4, 0.95)
    """Share of NVLink's bandwidth that large collectives reach."""
    nic_efficiency: float = _declare_fitted(0.75, 0.4, 0.95)
    """Share of the network's bandwidth that large collectives reach."""
    link_latency: float = _declare_fitted(3.4e-6, 1e-6, 5e-6)
    """Seconds of one hop inside an NVLink domain; NCCL's own tuning assumes 3.4e-6 (src/graph/tuning.cc)."""
    blocking: float = _declare_fitted(5e-5, 0.0, 3e-4)
    """Additional seconds of a hop if hosts wait for every kernel (Jobs.launch_blocking)."""
    nic_latency: float = _declare_fitted(1.4e-5, 5e-6, 4e-5)
    """Seconds of one hop over the network; NCCL's own tuning assumes 1.4e-5."""
    overlap_data: float = _declare_fitted(0.8, 0.0, 1.0)
    """Share of overlapping computation that hides data-parallel communication."""
    contention: float = _declare_fitted(0.0, 0.0, 0.6)
    """Seconds by which a second of hidden data-parallel communication slows down the computation that hides it:
    collectives take multiprocessors and memory bandwidth."""
    overlap_tensor: float = _declare_fitted(0.5, 0.0, 1.0)
    """Share of tp's communication that asynchronous tensor parallelism hides."""
    pipeline_exposed: float = _declare_fitted(1.0, 0.0, 2.0)
    """Share of the messages between stages that ranks wait for."""
    # PyTorch's own FSDP and tensor parallelism, over what all stacks have in common.
    products_pytorch: float = _declare_fitted(1.0, 0.7, 1.1, PYTORCH)
    """Speed of matrix products on Hopper over that of Megatron's."""
    products_blackwell: float = _declare_fitted(1.0, 0.6, 1.1, PYTORCH)
    """Speed of matrix products on Blackwell over that of Megatron's."""
    launch_dtensor: float = _declare_fitted(1e-4, 1.2e-5, 6e-4, PYTORCH)
    """Host seconds to launch one kernel of a DTensor without torch.compile: its dispatch finds the layout of each
    result."""
    # Scale.
    jitter: float = _declare_fitted(0.01, 0.0, 0.05)
    """Share of a step that each doubling of nodes adds, since the slowest rank decides (MegaScale: Jiang et al. 2024,
    arXiv:2402.15627)."""
    # Memory.
    activations: float = _declare_fitted(1.0, 0.85, 1.2, MEMORY)
    """Measured activations over counted ones."""
    fragmentation: float = _declare_fitted(0.06, 0.0, 0.15, MEMORY)
    """Memory that the allocator holds without using it, as a share of what is allocated."""
    context: float = _declare_fitted(2e9, 1e9, 4e9, MEMORY)
    """Bytes of driver, libraries and communicators."""
    scale: float = 1.0
    """Factor on every step time: differences of a cluster's clocks and software that no other constant covers. 1 after
    a fit; calibration sets it."""
    memory_margin: float = 0.12
    """Largest fraction by which a job may need less memory than predicted; no published run differed by more."""
    headroom: float = 0.05
    """Fraction by which a job may need more memory than predicted; it surely fits if this much is free as well. From
    the spread of the residuals of memory."""
    headroom_deepspeed: float = 0.3
    """headroom of DeepSpeed, whose residuals are wider: one run ran out of memory with 0.79 of it predicted."""
    headroom_unmeasured: float = 0.1
    """headroom of hpc_train itself, for which there are no published large runs."""
    spread: float = 0.05
    """Standard deviation of log(measured / predicted) of step time of runs whose source the fit has not seen: of
    Megatron in 16 bits on A100 and H100, and of all that has no constant of its own."""
    spread_narrow: float = 0.07
    """Standard deviation for Megatron in 8 or 4 bits: no column says how its operands are scaled."""
    spread_deepspeed: float = 0.1
    """Standard deviation for DeepSpeed."""
    spread_fsdp: float = 0.08
    """Standard deviation for PyTorch's own sharding without tensor parallelism, of groups that the fit has not seen:
    nearly all runs are from one source."""
    spread_pytorch: float = 0.15
    """Standard deviation for tensor parallelism of PyTorch's stacks, from the fitted runs: so few sources have it that
    a fit without one of them could not predict it."""
    spread_blackwell: float = 0.1
    """Least spread on Blackwell and later."""
    spread_experts: float = 0.15
    """Standard deviation for mixtures of experts, from the fitted runs: those of each GPU are predicted by a fit to all
    others."""
    spread_float8: float = 0.2
    """Standard deviation for products in 8 bits by torchao, from the rows of tests/planner/published_float8.csv."""
    headroom_float8: float = 0.25
    """headroom of hpc_train with a scale for each row: such a run of torchtitan took 23 % more than in 16 bits
    (github.com/pytorch/torchtitan, commit 7a04053), which the model does not have."""
    residuals: tuple[StepResidual, ...] = ()
    """Corrections for settings similar to those of a cluster's measured runs; see fit_residuals."""
    evidence: Mapping[str, int] = field(default_factory=dict)
    """How many of the runs that the constants were fitted to had each technique (evidence.find_techniques)."""


def constant_bounds(*fitted_to: str) -> dict[str, tuple[float, float]]:
    """Return the bounds of each constant that may be fitted to these data (TIME, MEMORY, EXPERTS); none: to any."""
    declared = {field.name: field.metadata for field in fields(Constants) if field.metadata}
    return {name: data["bounds"] for name, data in declared.items() if not fitted_to or data["to"] in fitted_to}


def constant_values(constants: Constants) -> dict[str, float]:
    """Return the value of every constant that is a number, by name."""
    others = ("residuals", "evidence")
    return {field.name: getattr(constants, field.name) for field in fields(Constants) if field.name not in others}


def replace_values(constants: Constants, values: Mapping[str, float]) -> Constants:
    """Return the constants with other values."""
    more: dict[str, Any] = dict(values)
    return replace(constants, **more)


def without_residuals(constants: Constants) -> Constants:
    """Return the constants that a search uses.

    Residuals of a few measured runs improve times but worsen the choice: settings without a similar measured run are
    compared uncorrected with corrected ones.
    """
    return replace(constants, residuals=())


def default_constants() -> Constants:
    """Load the constants that the package comes with, as `hpc-train plan fit` has written them."""
    return read_constants(Path(__file__).with_name("constants.json"))


def cluster_constants(cluster: ClusterConfig) -> Constants:
    """Load the constants, corrected by cluster.calibration. Raises UserError for a file that cannot be read."""
    if not cluster.calibration:
        return default_constants()
    return apply_calibration(default_constants(), read_calibration(Path(cluster.calibration)))


def apply_calibration(constants: Constants, measured: Calibration) -> Constants:
    """Replace fitted constants by measured ones: a bandwidth that a benchmark reached is assumed to be reachable."""
    values: dict[str, float] = {}
    for level, name in (("inside", "link"), ("node", "nic")):
        if measured_level := measured.get_level(level):
            values |= {f"{name}_efficiency": 1.0, f"{name}_latency": measured_level.latency}
    if measured.device:
        values |= {"gemm_efficiency": 1.0, "memory_efficiency": 1.0}
    names = constant_values(constants)
    values |= {name: value for name, value in measured.planner.items() if name in names}
    if any(set(residual.settings) != set(RESIDUAL_SETTINGS) for residual in measured.residuals):
        raise UserError(f"calibration of {measured.cluster}: of another version; run `hpc-train plan calibrate` again")
    evidence = {
        name: constants.evidence.get(name, 0) + measured.evidence.get(name, 0)
        for name in {**constants.evidence, **measured.evidence}
    }
    return replace(replace_values(constants, values), residuals=measured.residuals, evidence=evidence)


def read_constants(path: Path) -> Constants:
    """Read constants that `plan fit` wrote. Raises UserError for another file."""
    try:
        content = read_json(path)
        if content["version"] != CONSTANTS_VERSION:
            raise UserError(f"{path}: written by another version; run `hpc-train plan fit` again")
        names = constant_values(Constants())
        values = {name: float(value) for name, value in content["constants"].items() if name in names}
        evidence = {str(name): int(count) for name, count in content.get("evidence", {}).items()}
        return replace(replace_values(Constants(), values), evidence=evidence)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: not constants as `hpc-train plan fit` writes them") from None


def write_constants(path: Path, constants: Constants, **about: object) -> None:
    """Write constants as JSON. about: fields that describe where they come from."""
    content = {"version": CONSTANTS_VERSION, **about, "evidence": dict(constants.evidence)}
    path.write_text(json.dumps({**content, "constants": constant_values(constants)}, indent=1) + "\n")


Floats = NDArray[np.float64]

RESIDUAL_SETTINGS = ("hidden", "sequence", "tp", "pp", "virtual_stages", "micro_batch")
"""Columns by which the similarity of settings is measured. Techniques are not among them: their order by time must
not change within a layout."""
RESIDUAL_LENGTH = 1.5
"""Doublings of one setting over which the similarity of two jobs falls to exp(-1/2)."""
RESIDUAL_DEVIATION = 0.1
"""Standard deviation of the error of log(time). Both numbers are from all clusters' residuals, each left out once."""


def error_correlation(one: Jobs, other: Jobs) -> Floats:
    """Return the correlation [n, m] of the errors of n jobs and m others."""
    a, b = (
        np.log2([np.broadcast_to(getattr(jobs, name), jobs.n) for name in RESIDUAL_SETTINGS]) for jobs in (one, other)
    )
    correlation: Floats = np.exp(-0.5 * np.sum((a[:, :, None] - b[:, None, :]) ** 2, axis=0) / RESIDUAL_LENGTH**2)
    return correlation


def fit_residuals(jobs: Jobs, errors: Floats) -> tuple[StepResidual, ...]:
    """Express the errors of runs, [n] of log(time), as a sum of similarities. Equal runs make the matrix singular."""
    weights = np.linalg.pinv(error_correlation(jobs, jobs), rcond=1e-6, hermitian=True) @ errors
    settings = [np.broadcast_to(getattr(jobs, name), jobs.n) for name in RESIDUAL_SETTINGS]
    return tuple(
        StepResidual(
            {name: float(column[row]) for name, column in zip(RESIDUAL_SETTINGS, settings, strict=True)},
            float(weights[row]),
        )
        for row in range(jobs.n)
    )


def residual_factor(jobs: Jobs, residuals: Sequence[StepResidual]) -> Column:
    """Return the factor on each job's time that similar measured runs imply."""
    exponent = np.zeros(())
    for residual in residuals:
        distance = sum(
            (np.log2(getattr(jobs, name) / residual.settings[name]) ** 2 for name in RESIDUAL_SETTINGS), np.zeros(())
        )
        exponent = exponent + residual.weight * np.exp(-0.5 * distance / RESIDUAL_LENGTH**2)
    return np.exp(exponent)
