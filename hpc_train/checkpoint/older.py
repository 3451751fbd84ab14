"""What manifests of formats 2 and 3 list tensor by tensor and row by row, in the columns of today."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_train.checkpoint.holdings import distinct

FORMATS = (2, 3)
"""Both say the same of tensors; 3 told that there were compressed files."""


def listed(body: dict[str, Any]) -> dict[str, Any]:
    """What listing.from_json takes. Raises KeyError, TypeError or ValueError for what is no such manifest."""
    return {
        "tensors": [name for name, _, _ in body["tensors"]],
        "kinds": _columns([[dtype, shape] for _, dtype, shape in body["tensors"]]),
        "layouts": [
            {
                **{key: layout[key] for key in ("files", "tensors", "places", "within") if key in layout},
                "cuts": _columns([list(row) for row in zip(layout["shapes"], layout["offsets"], strict=True)]),
            }
            for layout in body["layouts"]
        ],
    }


def _columns(rows: Sequence[Any]) -> dict[str, Any]:
    """The different ones, and of each row which of them it is."""
    texts, of = distinct(map(repr, rows))
    known = dict(zip(map(repr, rows), rows, strict=True))
    return {"of": of.tolist(), "are": [known[text] for text in texts]}
