"""Model FLOP utilisation: only where both the model's FLOPs and the GPU's peak are known."""

from __future__ import annotations

from hpc_train.config.run import RunConfig
from hpc_train.models.shape import flops_per_token


def peak_flops(config: RunConfig, device_name: str | None) -> float | None:
    """Peak FLOP/s of one rank's device in this run's precision.

    None unless the cluster's configuration describes just the device that is there: a figure of another GPU would look
    like a fact.
    """
    gpu = config.cluster.gpu
    if device_name is None or gpu.name is None or gpu.name.lower() not in device_name.lower():
        return None
    teraflops = gpu.peak_tflops.get(config.precision.name)
    return teraflops * 1e12 if teraflops else None


def utilisation(config: RunConfig, peak: float | None, tokens: int, seconds: float, ranks: int) -> float | None:
    """Fraction of the peak that the model's own FLOPs (no recomputation) used; tokens and seconds are of one step."""
    if peak is None:
        return None
    flops = flops_per_token(config.model, config.train.sequence_length)
    if flops is None:
        return None
    return flops * tokens / (seconds * ranks * peak)
