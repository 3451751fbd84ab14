"""Sizes of weights in 4 bits (models/adapters/nf4.py), in a separate module that needs no torch."""

from __future__ import annotations

NF4_BLOCK = 64
"""Numbers that share a scale."""
NF4_BYTES = 0.5 + 4 / NF4_BLOCK
"""Bytes of a number: 4 bits, and its part of the scale in float32."""
