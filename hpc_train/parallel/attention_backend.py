"""Check the configured attention kernel on this rank's device, and say which kernels the layers will use."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPAParams

from hpc_train._torch.attention import find_sdpa_backend
from hpc_train.config.model import TransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.models.attention.attention_kernels import MIN_BLOCK, choose_implementation
from hpc_train.models.attention.plain_attention import ScoreRule
from hpc_train.models.layers import ScaledDotProduct
from hpc_train.models.shape import compute_head_dim, count_kv_heads
from hpc_train.parallel.materialise import is_rehearsal
from hpc_train.parallel.mesh_axes import get_axis_degree
from hpc_train.parallel.precision.number_formats import DTYPES
from hpc_train.parallel.rules.attention import explain_missing_kernel

_CHECKS: dict[str, Callable[[SDPAParams, bool], bool]] = {
    "flash": torch.backends.cuda.can_use_flash_attention,
    "efficient": torch.backends.cuda.can_use_efficient_attention,
    "cudnn": torch.backends.cuda.can_use_cudnn_attention,
}


def report_attention(part: nn.Module, config: RunConfig, world: World) -> str | None:
    """Return a line that says how many layers use which kernel; None for models that are not our transformer.

    Raises UserError if the kernel of model.attention cannot compute here, with torch's own reason.
    """
    model = config.model
    cores = [module for module in part.modules() if isinstance(module, ScaledDotProduct)]
    if not isinstance(model, TransformerConfig) or not cores:
        return None
    if is_rehearsal():  # on a machine that may have no such device
        for core in cores:
            core.backend = "auto"
        return None
    ring = get_axis_degree(world, "cp") > 1 and config.parallel.context.method == "ring"
    if ring or model.dropout > 0:
        backends = Counter({"blocks of the ring" if ring else "plain operations with dropout": len(cores)})
    else:
        backends = Counter(_describe_core(core, _Shapes.of(model, config, world)) for core in cores)
    names = ", ".join(f"{name} in {count} layers" for name, count in backends.items())
    return f"attention: {names} (model.attention={model.attention})"


class _Shapes:
    """Queries and keys as a rank's attention gets them; never computed with."""

    def __init__(self, q: Tensor, k: Tensor, packed: bool) -> None:
        self.q, self.k, self.packed = q, k, packed

    @classmethod
    def of(cls, model: TransformerConfig, config: RunConfig, world: World) -> _Shapes:
        ranks = get_axis_degree(world, "tp") * get_axis_degree(world, "cp")  # of cp with ulysses, which splits heads
        batch, length = config.train.micro_batch, config.train.sequence_length
        sample = torch.empty(0, device=world.device, dtype=DTYPES[config.precision.name])
        heads, groups = model.heads // ranks, max(1, count_kv_heads(model) // ranks)
        # A view of nothing: only shapes, strides of the last dimension and dtypes decide.
        q, k = (sample.new_empty(batch, length, n, compute_head_dim(model)).transpose(1, 2) for n in (heads, groups))
        return cls(q, k, getattr(config.data, "samples", None) == "packed")


def _describe_core(core: ScaledDotProduct, shapes: _Shapes) -> str:
    """Say how this layer computes. Raises UserError if its backend cannot."""
    rule, q, k = core.rule, shapes.q, shapes.k
    problem = explain_missing_kernel(core.backend, q.device.type == "cpu")
    if problem is not None:
        raise UserError(f"model.attention={core.backend}: {problem}")
    window = f", window {rule.window}" if rule.cuts(q.shape[2]) else ""
    cap = f", soft-cap {rule.softcap:g}" if rule.softcap is not None else ""
    implementation = choose_implementation(rule, core.backend, q.shape[2], q, packed=shapes.packed)
    if implementation in ("flex", "plain"):
        return f"{'FlexAttention' if implementation == 'flex' else 'plain operations'}{window}{cap}"
    mask = _make_mask(rule, q, implementation, shapes.packed)
    if q.is_cuda and core.backend in _CHECKS:
        _check_on_gpu(core.backend, q, k, mask, rule)
    if core.backend != "auto":
        return core.backend + window
    backend = find_sdpa_backend(q, k, k, mask, rule.causal and mask is None)
    return backend.name.removesuffix("_ATTENTION").lower() + window


def _make_mask(rule: ScoreRule, q: Tensor, implementation: str, packed: bool) -> Tensor | None:
    """Return a mask of the shape that the kernel will get; None if it gets none."""
    if implementation == "window":
        size = max(rule.window or 0, MIN_BLOCK)
        rows = size if q.shape[2] > 2 * size else q.shape[2]
        return torch.ones((), dtype=torch.bool, device=q.device).expand(q.shape[2], q.shape[2])[:rows]
    if packed:
        return torch.ones((), dtype=torch.bool, device=q.device).expand(q.shape[0], 1, q.shape[2], q.shape[2])
    return None


def _check_on_gpu(backend: str, q: Tensor, k: Tensor, mask: Tensor | None, rule: ScoreRule) -> None:
    """Raise UserError with torch's own reason if this GPU's kernel does not take such tensors."""
    params = SDPAParams(q, k, k, mask, 0.0, rule.causal and mask is None, q.shape[1] != k.shape[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if _CHECKS[backend](params, True):
            return
    reasons = [" ".join(str(warning.message).split()).split(" (Triggered")[0] for warning in caught]
    reason = next((text for text in reasons if text), "torch gives no reason")
    raise UserError(f"model.attention={backend}: cannot compute this model here ({reason[:200]}); use auto")
