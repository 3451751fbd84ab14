"""What a published run's software does, as its source says: the columns of Jobs that no table of runs has."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Software:
    """Facts of a training stack, none of them fitted."""

    name: str
    """What runs of one software have in common."""
    stack: str
    """Of jobs.STACKS."""
    fused_attention: bool = False
    fused_elementwise: bool = False
    overlap_data: bool = False
    overlap_tensor: bool = False
    new_attention: bool = False
    """Attention kernels written for the device (cuDNN, FlashAttention-3)."""
    triton_attention: bool = False
    """FlashAttention as it first was in Triton."""
    parallel_block: bool = False
    gradient_bytes: int = 2
    """Of a 16-bit gradient kept between micro-batches."""
    logit_bytes: int = 10
    """Of a logit at the peak of the loss: 16-bit, fp32, and its gradient in fp32; a fused loss works in place."""


_OLD_MEGATRON = Software("megatron", "megatron")
_MEGATRON = Software("megatron", "megatron", True, True, True, True, True, gradient_bytes=4)
_FSDP = Software("fsdp", "fsdp", True, False, True, False, False, gradient_bytes=4)
_DEEPSPEED = Software("deepspeed", "deepspeed")

_KNOWN = (
    (r"megatron-deepspeed|deepspeed|bigscience", _DEEPSPEED),
    (r"llm-foundry", replace(_FSDP, logit_bytes=4)),
    (r"torchtitan|fms-fsdp|fsdp", _FSDP),
    (r"megatron-bridge|nemo|megatron-core|mcore", _MEGATRON),
    # FlashAttention-2, norms and activations fused, everything overlapped (section 3 of its paper).
    (r"megascale: |megascale-\d+b", replace(_MEGATRON, name="megascale", parallel_block=True, fused_elementwise=True)),
    (r"arxiv:2402\.15627", replace(_OLD_MEGATRON, fused_attention=True, gradient_bytes=4)),
    (r"megatron|arxiv:2104\.04473|arxiv:2205\.05198|arxiv:2401\.10241", _OLD_MEGATRON),
)


_QUOTED = re.compile(r"\balso in [^|)]*")
"""Who else prints a figure is not who measured it."""


def software_of(source: str, notes: str, year: int) -> Software:
    """From a run's source and notes; where they name no software, what was usual in that year."""
    text = _QUOTED.sub("", f"{source} | {notes}".lower())
    found = next((it for pattern, it in _KNOWN if re.search(pattern, text)), None)
    found = found or (_MEGATRON if year >= 2023 else _OLD_MEGATRON)
    if re.search(r"compile", text):
        found = replace(found, fused_elementwise=True)
    if re.search(r"async-?tp", text) and not re.search(r"vanilla-?tp", text):
        found = replace(found, overlap_tensor=True)
    if re.search(r"triton", text):
        found = replace(found, triton_attention=True)
    if re.search(r"flash", text):
        found = replace(found, fused_attention=True)
    return found
