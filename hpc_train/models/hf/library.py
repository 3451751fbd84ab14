"""Every use of undocumented parts of the transformers library, each with its reason.

The library is imported inside the functions: it takes seconds, and only `model=hf` needs it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.quiet_imports import without_warnings

if TYPE_CHECKING:
    from types import ModuleType

OLDEST_TESTED = 5
"""Major release; before it, models had other weights files and other names."""
_IGNORED_KEYS = re.compile(r"_?(attn|experts)_implementation|torch_dtype|dtype|auto_map|transformers_version")
"""Keys of config.json that choose code or number formats; here the run's configuration does."""


def get_class(name: str) -> Any:
    """Return one of the library's classes, such as AutoModelForCausalLM, without what is logged by its imports."""
    with without_warnings():  # of compiled parts of other packages for devices that are not here
        return getattr(import_transformers(), name)


def has_class(auto_class: str, config: Any) -> bool:
    """Return whether this automatic class, such as AutoModelForCausalLM, has a model for the library's `config`."""
    return type(config) in get_class(auto_class)._model_mapping


def import_transformers() -> ModuleType:
    """Import the library. Raises UserError if it is not installed or too old."""
    try:
        import transformers
    except ImportError:
        raise UserError("model=hf needs the package transformers: pip install 'hpc_train[hf]'") from None
    if int(transformers.__version__.partition(".")[0]) < OLDEST_TESTED:
        raise UserError(
            f"model=hf needs transformers {OLDEST_TESTED} or newer, and here is {transformers.__version__}: pip "
            "install 'hpc_train[hf]'"
        )
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it comments on settings that do not matter here
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


def make_library_config(body: dict[str, Any], model_type: str) -> Any:
    """Make the library's configuration object. Raises UserError for a type that this release does not know."""
    transformers = import_transformers()
    try:
        kind = transformers.CONFIG_MAPPING[model_type]
    except KeyError:
        raise UserError(
            f"model_type {model_type!r} is not one that transformers {transformers.__version__} knows; install a "
            "release that has it"
        ) from None
    return kind.from_dict(_drop_ignored(body))


def _drop_ignored(value: Any) -> Any:
    """Return the values of a config.json without the ignored keys, and with infinities as numbers again."""
    if isinstance(value, dict) and list(value) == ["__float__"]:
        return float(value["__float__"])
    if isinstance(value, list):
        return [_drop_ignored(item) for item in value]
    if isinstance(value, dict):
        return {key: _drop_ignored(item) for key, item in value.items() if not _IGNORED_KEYS.fullmatch(str(key))}
    return value


def is_block(model: nn.Module, module: nn.Module) -> bool:
    """Return whether `module` is of a class that the model wants left whole; the library has no public list of them.

    Models without such a list say as much by the class of their layers, which recompute themselves.
    """
    if classes := getattr(model, "_no_split_modules", None):
        return type(module).__name__ in classes
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def get_tensor_plan(model: nn.Module) -> dict[str, str]:
    """Return the model's tensor plan, by name globs. `tp_plan`, the public way, adds the plans of submodules again."""
    return dict(getattr(model, "_tp_plan", None) or {})


def get_pipeline_plan(model: nn.Module) -> list[str]:
    """Return the names of the modules that a forward runs through, in order; empty if the model has no such plan."""
    return list(getattr(model, "_pp_plan", None) or {})


def set_attention(model: nn.Module, name: str) -> None:
    """Make every attention of the model call the function registered as `name`.

    `set_attn_implementation`, the public way, refuses names whose masks the library does not make.
    """
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Register an attention function. A name without a function for masks gets none, which is what a ring needs."""
    import_transformers().AttentionInterface.register(name, function)


def plan_conversion(model: nn.Module, names: Iterable[str], targets: dict[str, Tensor]) -> dict[str, Conversion]:
    """Map the name of each tensor of the model to the tensors in the files that it is made of.

    names: the tensors in the files. targets: the model's own. A file may have older names than the model, or one tensor
    for each expert where the model has one for all. from_pretrained does the same, but reads every tensor whole.
    A name of which the model has nothing ends up under the name that it would have.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping: Any = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)
    conversions: dict[str, Conversion] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, targets)
        if target not in targets and name in targets:
            target, pattern = rename_source_key(name, [], [], prefix, targets)
        entry = conversions.setdefault(target, Conversion(model, target, by_pattern.get(pattern) if pattern else None))
        entry.sources.append((pattern or name, name))
    return _expand_outputs(conversions)


class Conversion:
    """How one tensor of the model is made of tensors in the files."""

    def __init__(self, model: nn.Module, target: str, converter: Any) -> None:
        self._model, self._target, self._converter = model, target, converter
        self.sources: list[tuple[str, str]] = []
        """(pattern of the library's converter, name in the files)"""
        self.outputs = [target]

    def list_outputs(self) -> list[str]:
        """Return the names of all tensors that come out of these sources."""
        if self._converter is None:
            return [self._target]
        first, *others = self._converter.target_patterns
        return [self._target, *(self._target.replace(first, other) for other in others)]

    def convert(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the model, by name. read: gets a tensor of the files."""
        if self._converter is None:
            return {self._target: read(self.sources[0][1])}
        import copy

        converter = copy.deepcopy(self._converter)
        for pattern, name in self.sources:
            converter.add_tensor(self._target, name, pattern, lambda name=name: read(name))
        converted = converter.convert(self._target, model=self._model, config=self._model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}


def _expand_outputs(conversions: dict[str, Conversion]) -> dict[str, Conversion]:
    return {output: conversion for conversion in conversions.values() for output in conversion.list_outputs()}


def revert_conversion(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the model under the names, and in the parts, that its files have; what save_pretrained does."""
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, state)  # type: ignore[arg-type]
    return reverted


def list_ignored_tensors(model: nn.Module) -> list[str]:
    """Return the patterns of names that the model's class lets files have in excess."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def list_unsaved_tensors(model: nn.Module) -> list[str]:
    """Return the patterns of names that files may lack, because the model's class makes these tensors itself."""
    return list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())


def limit_experts(experts: nn.Module, count: int) -> None:
    """Let a module of stacked experts compute with `count` of them, and leave out tokens whose index is `count`.

    Its code looks for such tokens where the library has split the experts itself, which this flag says.
    """
    experts.num_experts = count  # type: ignore[assignment]  # torch: attributes are modules or tensors
    experts._is_expert_parallel = True  # type: ignore[assignment]


def can_leave_out_tokens(experts: nn.Module) -> bool:
    """Return whether a module of stacked experts leaves out tokens whose index is its number of experts.

    gpt-oss's own loop looks for them, but counts one expert too few to get there.
    """
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return type(experts).__name__ != "GptOssExperts" or implementation not in (None, "eager")


_SPLIT_EXPERTS = {"mixtral": ("w1", "w2", "w3"), "qwen2_moe": ("gate_proj", "up_proj", "down_proj")}
"""Names that single experts had before the library joined them, by the family whose rules a model type follows."""


def list_names_of_experts(model_type: str) -> tuple[str, ...]:
    """Return names of layers that PEFT takes for those of experts in models of this type, even if they are not."""
    from transformers import conversion_mapping

    patterns: dict[str, str] = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    return _SPLIT_EXPERTS.get(patterns.get(model_type, ""), ())


SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files of a folder that belong to the model and do not change in training."""
CHAT_TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates besides the usual one, such as that of conversations with tools."""


def list_side_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer, of generation and of preprocessing that this folder has."""
    templates = sorted((folder / CHAT_TEMPLATES).glob("*.jinja"))
    return [path for path in (*(folder / name for name in SIDE_FILES), *templates) if path.is_file()]


def fill_activation_buffers(model: nn.Module) -> None:
    """Give the constants of xIELU activations (Apertus) on the meta device their values, which no reset writes.

    The library makes them from the number format alone.
    """
    for module in model.modules():
        if type(module).__name__ != "XIELUActivation" or not any(buffer.is_meta for buffer in module.buffers()):
            continue
        with torch.device("cpu"):
            fresh = type(module)(dtype=next(module.buffers()).dtype)
        for name, buffer in fresh.named_buffers(recurse=False):
            setattr(module, name, buffer)
