"""Describe how the software of published runs works, by its name in the column `software`.

To add one, give it an entry of SOFTWARE; nothing of it is fitted, so say where each trait is documented.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpc_train.planner.calibration.run_row import CsvRow


@dataclass(frozen=True)
class SoftwareTraits:
    """How a training stack works, from its documentation; nothing here is fitted."""

    name: str
    """Runs of one software are calibrated together under this name."""
    stack: str
    """One of jobs.STACKS."""
    fused_attention: bool = False
    fused_elementwise: bool = False
    overlap_data: bool = False
    overlap_tensor: bool = False
    new_attention: bool = False
    """Has attention kernels written for the device (cuDNN, FlashAttention-3)."""
    triton_attention: bool = False
    """Has FlashAttention in its first Triton version."""
    parallel_block: bool = False
    gradient_bytes: int = 2
    """Bytes of a gradient element that is accumulated over micro-batches."""
    reduce_bytes: int | None = None
    """Bytes of a gradient element in reductions over data parallelism; None: gradient_bytes."""
    logit_bytes: int = 10
    """Bytes per logit at the memory peak of the loss: 16-bit, fp32 and fp32 gradient; a fused loss works in place."""


_OLD_MEGATRON = SoftwareTraits("megatron", "megatron")
_MEGATRON = SoftwareTraits(
    "megatron",
    "megatron",
    fused_attention=True,
    fused_elementwise=True,
    overlap_data=True,
    overlap_tensor=True,
    new_attention=True,
    gradient_bytes=4,
)
_FSDP = SoftwareTraits("fsdp", "fsdp", fused_attention=True, overlap_data=True, gradient_bytes=4, reduce_bytes=2)
_DEEPSPEED = SoftwareTraits("deepspeed", "deepspeed")
_BY_YEAR = ("", "megatron", "megatron-lm")
"""Names that stand for the usual software of their year: Megatron-LM, which from 2023 is built on Megatron-Core."""
_NEW_MEGATRON_YEAR = 2023
SOFTWARE = {
    **dict.fromkeys(("deepspeed", "megatron-deepspeed"), _DEEPSPEED),
    "llm-foundry": replace(_FSDP, logit_bytes=4),
    **dict.fromkeys(("fms-fsdp", "fsdp"), _FSDP),
    "torchtitan": replace(_FSDP, reduce_bytes=4),  # training.mixed_precision_reduce
    **dict.fromkeys(("megatron-bridge", "nemo", "megatron-core"), _MEGATRON),
    # FlashAttention-2, norms and activations fused, everything overlapped (section 3 of its paper).
    "megascale": replace(_MEGATRON, name="megascale", parallel_block=True, fused_elementwise=True),
}
"""Software by name; the names in _BY_YEAR are also allowed."""
_ATTENTION = {
    "eager": (False, False, False),
    "triton": (True, False, True),
    "flash": (True, False, False),
    "flash3": (True, True, False),
    "cudnn": (True, True, False),
}
"""(fused, has kernels for the device, is FlashAttention's first Triton version) by the column `attention`."""
ATTENTION_KINDS = tuple(_ATTENTION)


def find_row_software(row: CsvRow) -> SoftwareTraits:
    """Return the software of a row, with what its other columns say of it."""
    software = _find_named_software(row.get_word("software"), row.year)
    software = replace(
        software,
        fused_elementwise=row.get_flag("compile", software.fused_elementwise),
        overlap_tensor=row.get_flag("async_tp", software.overlap_tensor),
        gradient_bytes=int(row.get_number("gradient_bytes", software.gradient_bytes)),
    )
    if row.is_stated("version"):
        software = replace(software, name=f"{software.name} {row.get_text('version')}")
    if kind := _ATTENTION.get(row.get_word("attention")):
        fused, new, triton = kind
        software = replace(software, fused_attention=fused, new_attention=new, triton_attention=triton)
    return software


def _find_named_software(name: str, year: int) -> SoftwareTraits:
    if name in _BY_YEAR:
        return _MEGATRON if year >= _NEW_MEGATRON_YEAR else _OLD_MEGATRON
    return SOFTWARE[name]


def knows_software(name: str) -> bool:
    """Return whether a name in the column `software`, in lower case, is known; an empty one is."""
    return name in SOFTWARE or name in _BY_YEAR
