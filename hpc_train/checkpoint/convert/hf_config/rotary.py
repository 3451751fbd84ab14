"""Convert the rotary position settings of a config.json, and refuse settings that no model of ours computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_train.config.model import RopeConfig, TransformerConfig
from hpc_train.errors import UserError

Json = dict[str, Any]
_NAMES = {
    "llama3": {
        "original_positions": "original_max_position_embeddings",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
    },
    "yarn": {
        "original_positions": "original_max_position_embeddings",
        "beta_slow": "beta_slow",
        "beta_fast": "beta_fast",
        "truncate": "truncate",
        "table_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
    "linear": {},
}
"""Our names of the settings of each scaling, and the library's."""


def encode_rotary(config: TransformerConfig) -> Json:
    """Return the base and the scaling, in the form that every release of transformers reads."""
    if config.rope_scaling == "none":
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    scaling: Json = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    for own_name, hf_name in _NAMES[config.rope_scaling].items():
        value = getattr(config.rope, own_name)
        if value is not None and not (own_name.startswith("mscale") and not value):
            scaling[hf_name] = value
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def parse_rotary(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a TransformerConfig: rope_theta, rope_scaling, rope_factor and rope.

    transformers 5 writes rope_parameters, older releases rope_scaling and a top-level rope_theta.
    """
    rope = body.get("rope_parameters") or body.get("rope_scaling") or {}
    return parse_scaling(rope, body, float(rope.get("rope_theta", body.get("rope_theta", 10000.0))))


def parse_scaling(rope: Mapping[str, Any], body: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Return the settings, as parse_rotary does, from one set of rotary parameters.

    Raises UserError for a scaling that we do not compute.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in _NAMES:
        raise UserError(
            f"config.json: this scaling of rotary positions ({kind}) is not one that we compute; we have "
            f"{', '.join(_NAMES)}"
        )
    names = _NAMES[kind].items()
    given: dict[str, Any] = {own_name: rope[hf_name] for own_name, hf_name in names if rope.get(hf_name) is not None}
    plain = RopeConfig()
    if kind != "linear":
        given.setdefault("original_positions", int(body["max_position_embeddings"]))
    settings: dict[str, Any] = {name: type(getattr(plain, name) or 0.0)(value) for name, value in given.items()}
    factor = rope.get("factor")
    if factor is None and kind == "yarn":  # as transformers has it
        factor = int(body["max_position_embeddings"]) / settings["original_positions"]
    if factor is None:
        raise KeyError("factor")
    return {"rope_theta": theta, "rope_scaling": kind, "rope_factor": float(factor), "rope": RopeConfig(**settings)}


def split_rotary_by_window(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the rotary settings of layers without a window, and of those with one.

    transformers 5 writes both into rope_parameters; older releases write rope_scaling, of the former only. Raises
    UserError if those of the latter are scaled.
    """
    given = body.get("rope_parameters") or {}
    rope = given.get("full_attention") or body.get("rope_scaling") or {}
    narrow = given.get("sliding_attention") or {}
    if narrow.get("rope_type", "default") != "default":
        raise UserError("config.json: layers with a window have scaled rotary positions; our model scales the others")
    return rope, narrow


def refuse_unknown(body: Mapping[str, Any], key: str, supported: set[Any], default: Any) -> None:
    """Raise UserError if a setting has a value that our models do not compute. default: where the file has none."""
    value = body.get(key, default)
    if value not in supported:
        raise UserError(f"config.json: {key} is {value!r}; our model has {' or '.join(map(repr, sorted(supported)))}")
