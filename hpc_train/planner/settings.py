"""Convert between the columns of a search and the settings of a run.

The search works on columns of numbers (search/space.py), users on settings such as parallel.tp=8. Everything that can
be searched is listed in both tables here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_train.config.keys.overrides import MICRO_BATCH, format_override_value, get_value
from hpc_train.config.parallel import AXES, STRATEGIES
from hpc_train.config.run import RunConfig
from hpc_train.config.schema import seal_config
from hpc_train.errors import UserError
from hpc_train.planner.model.inputs import OFFLOAD, RECOMPUTE, SCHEDULES
from hpc_train.planner.search.space import FixedColumns
from hpc_train.schedules.generate import REQUIREMENTS

Settings = dict[str, Any]
"""Values by configuration key, such as parallel.tp."""
_NUMBERS = {
    "parallel.pp": "pp",
    "parallel.dp_replicate": "dp_replicate",
    "parallel.dp_shard": "dp_shard",
    "parallel.cp": "cp",
    "parallel.tp": "tp",
    "parallel.ep": "ep",
    "parallel.reshard_after_forward": "reshard",
    "parallel.tensor.sequence": "sequence_parallel",
    "parallel.tensor.asynchronous": "overlap_tensor",
    "parallel.pipeline.virtual_stages": "virtual_stages",
    "parallel.recompute.every": "recompute_every",
    "parallel.recompute.offload": "offload_activations",
    MICRO_BATCH: "micro_batch",
}
"""Keys whose value equals the value of the column."""
_CODES = {
    "parallel.strategy": ("zero", STRATEGIES),
    "parallel.context.method": ("ulysses", ("ring", "ulysses")),
    "parallel.pipeline.schedule": ("schedule", SCHEDULES),
    "parallel.recompute.mode": ("recompute", RECOMPUTE),
}
"""Keys whose value is a word: the column has the index of the word in this list."""
_OFFLOAD = ("parallel.offload.optimizer", "parallel.offload.parameters")


def list_fixed_columns(config: RunConfig, keys: Iterable[str]) -> FixedColumns:
    """Return the columns of a search space that these keys of the run fix.

    Raises UserError for a schedule from a file, which says the degrees itself.
    """
    values: dict[str, tuple[float, ...]] = {}
    keys = set(keys)
    for key in keys & _NUMBERS.keys():
        values[_NUMBERS[key]] = (float(get_value(config, key)),)
    for key in keys & _CODES.keys():
        name, words = _CODES[key]
        word = get_value(config, key)
        if word not in words:
            raise UserError(f"{key}={word}: the planner knows the schedules by name only; leave out parallel=auto")
        values[name] = (float(words.index(word)),)
    if keys & set(_OFFLOAD):
        values["offload"] = tuple(float(code) for code in range(len(OFFLOAD)) if _agrees(config, keys, code))
    return FixedColumns(values)


def _agrees(config: RunConfig, keys: set[str], code: int) -> bool:
    """Return whether an offload code agrees with the given keys of the run."""
    states = {"parallel.offload.optimizer": code > 0, "parallel.offload.parameters": code > 1}
    return all(states[key] == (get_value(config, key) != "none") for key in keys & set(_OFFLOAD))


def make_settings(row: Mapping[str, float]) -> Settings:
    """Turn a candidate's columns into settings, without those that would have no effect, which a run refuses."""
    zero, tp, pp = int(row["zero"]), int(row["tp"]), int(row["pp"])
    degrees = {f"parallel.{name}": int(row[name]) for name in AXES}
    settings: Settings = {"parallel.strategy": STRATEGIES[zero], **degrees, MICRO_BATCH: int(row["micro_batch"])}
    if row["ep"] > 1:
        settings["parallel.ep"] = int(row["ep"])
    if not row["reshard"]:
        settings["parallel.reshard_after_forward"] = False
    if tp > 1:
        settings |= {"parallel.tensor.sequence": bool(row["sequence_parallel"])}
        settings |= {"parallel.tensor.asynchronous": True} if row["overlap_tensor"] else {}
    if pp > 1:
        settings |= _make_pipeline_settings(SCHEDULES[int(row["schedule"])], int(row["virtual_stages"]))
    if mode := int(row["recompute"]):
        settings |= {"parallel.recompute.mode": RECOMPUTE[mode]}
        settings |= {"parallel.recompute.every": int(row["recompute_every"])} if row["recompute_every"] > 1 else {}
    if row["ulysses"]:
        settings["parallel.context.method"] = "ulysses"
    if row["offload_activations"]:
        settings["parallel.recompute.offload"] = True
    if offload := int(row["offload"]):
        settings[_OFFLOAD[offload - 1]] = "cpu"
    return settings


def _make_pipeline_settings(schedule: str, virtual: int) -> Settings:
    settings: Settings = {"parallel.pipeline.schedule": schedule}
    if virtual != REQUIREMENTS[schedule].virtual_stages:
        settings["parallel.pipeline.virtual_stages"] = virtual
    return settings


def settings_to_overrides(settings: Settings) -> list[str]:
    """Format settings as overrides of a command line."""
    return [f"{key}={format_override_value(value)}" for key, value in settings.items()]


def apply_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """Return the run with these settings applied, read-only and with nothing left for the planner to choose."""
    changed = config
    for key, value in {**settings, "parallel.auto": False, "parallel.fixed": None}.items():
        changed = _change_setting(changed, key.split("."), value)
    return seal_config(changed)


def _change_setting(config: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    return replace(config, **{name: _change_setting(getattr(config, name), rest, value) if rest else value})


def make_single_rank_config(config: RunConfig, global_batch: int) -> RunConfig:
    """Return the run on one rank, whose degrees a search fills in."""
    parallel = replace(config.parallel, auto=False, pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1, strategy="ddp")
    return seal_config(replace(config, parallel=parallel, train=replace(config.train, global_batch=global_batch)))
