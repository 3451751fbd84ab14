"""Compute the model FLOP utilisation (MFU) of a step.

There is none unless both the FLOPs of the model and the peak of the GPU are known.
"""

from __future__ import annotations

from hpc_train.config.model import HfModelConfig, ModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.counts import compute_flops_per_token


def find_peak_flops(config: RunConfig, device_name: str | None) -> float | None:
    """Return the peak FLOP/s of one rank's device in this run's precision.

    None unless the cluster's configuration describes this very device: the peak of another GPU would give an MFU that
    looks like a fact.
    """
    gpu = config.cluster.gpu
    if device_name is None or gpu.name is None or gpu.name.lower() not in device_name.lower():
        return None
    teraflops = gpu.peak_tflops.get(config.precision.name)
    return teraflops * 1e12 if teraflops else None


def find_token_flops(model: ModelConfig, sequence_length: int, frozen: bool = False) -> float | None:
    """Return the model's FLOPs of forward and backward for one target; None if its shape is unknown.

    frozen: only adapters are trained.
    """
    if not isinstance(model, HfModelConfig):
        return compute_flops_per_token(model, sequence_length, frozen)
    from hpc_train.models.hf.decoder_shape import describe_decoder

    try:
        return compute_flops_per_token(describe_decoder(model), sequence_length, frozen)
    except UserError:  # of a family whose shape is not described
        return None


def compute_mfu(token_flops: float | None, peak: float | None, tokens: int, seconds: float, ranks: int) -> float | None:
    """Return which fraction of the peak the model's own FLOPs used in one step, recomputation not counted.

    peak: FLOP/s of one rank. None if the peak or the model's FLOPs are unknown.
    """
    if peak is None or token_flops is None:
        return None
    return token_flops * tokens / (seconds * ranks * peak)
