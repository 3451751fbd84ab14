"""Read the weights of a folder of transformers into a model, one tensor at a time.

Headers come first: names, shapes and types are compared with the model's before any rank starts, without reading any
tensor. Then each parameter is read when a rank asks for it, as a view of the mapped file, so that a rank touches only
the pages that its shard covers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.checkpoint.convert.formats.mxfp4 import BLOCKS, SCALES, expand_mxfp4, find_expanded_shape
from hpc_train.checkpoint.convert.formats.safetensors_files import import_safetensors, list_weight_files
from hpc_train.checkpoint.convert.formats.torch_files import open_foreign_file
from hpc_train.config.model import HfModelConfig
from hpc_train.errors import UserError
from hpc_train.models.deferred import DeferredValues
from hpc_train.models.hf.config_file import ConfigFile, read_config_file
from hpc_train.models.hf.library import Conversion, list_ignored_tensors, list_unsaved_tensors, plan_conversion
from hpc_train.units import join_first

_TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types of weights that are read, as safetensors names them."""
_COUNTERS = re.compile(r"\.num_batches_tracked$")
"""Buffers of batch norms that count, in int64."""
_OLD_CONSTANTS = re.compile(r"rotary_emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$|\.(position_ids|embed_scale)$")
"""Buffers that older releases of the library saved, and newer ones make themselves."""
_SHOWN = 3
"""Names in a message."""


@dataclass(frozen=True)
class TensorHeader:
    """A tensor as the header of its file describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    mxfp4: tuple[Path, Path] | None = None
    """Files of the blocks and of the scales that it is expanded from, see formats/mxfp4.py."""


class PretrainedWeights:
    """The weights of a folder, and how a model's parameters are made of them."""

    def __init__(self, config: HfModelConfig) -> None:
        """Read the headers. Raises UserError for files that are no safetensors files, or hold no plain weights."""
        self._folder = Path(config.path).expanduser()
        self._stored = _read_headers(self._folder)
        if read_config_file(config).is_mxfp4:
            self._stored = _join_mxfp4(self._stored)
        _check_dtypes(self._stored, config, self._folder)

    def plan(self, model: nn.Module) -> WeightsPlan:
        """Find what each parameter and saved buffer of `model` is read from. Raises UserError where they do not fit.

        The tensors of the head may be missing where a classifier is trained: they keep the values they were drawn with.
        """
        targets = model.state_dict(keep_vars=True)
        sources = plan_conversion(model, self._stored, targets)
        plan = WeightsPlan({}, {}, [], [name for name in sources if name not in targets], set())
        buffers = dict(model.named_buffers(remove_duplicate=False))
        aliases: dict[int, list[str]] = {}
        for name, tensor in targets.items():
            aliases.setdefault(id(tensor), []).append(name)
        wrong = []
        # A tied tensor has several names, and the folder may have any of them.
        for names in aliases.values():
            source = next((sources[name] for name in names if name in sources), None)
            target = names[0]
            if source is None:
                plan.missing.extend([] if target in buffers else [target])
                continue
            name = next(name for name in names if name in sources)
            wanted = tuple(targets[target].shape)
            shape = self._find_shape(source, name)
            if shape != wanted:
                wrong.append(f"{name} is {shape}, not {wanted}")
            read = partial(self.read, source, name)
            (plan.buffers if target in buffers else plan.parameters)[target] = read
        self._check_fit(plan, wrong, model)
        return plan

    def read(self, source: Conversion, name: str) -> Tensor:
        """Return a tensor of the model: a view of the file where it is in the file as it is."""
        return source.convert(self._read_stored)[name]

    def _read_stored(self, name: str) -> Tensor:
        header = self._stored[name]
        with ExitStack() as stack:
            if header.mxfp4 is not None:
                of_blocks, of_scales = (_open(path, stack) for path in header.mxfp4)
                return expand_mxfp4(of_blocks.get_tensor(f"{name}{BLOCKS}"), of_scales.get_tensor(f"{name}{SCALES}"))
            tensor: Tensor = _open(header.file, stack).get_tensor(name)
        return tensor

    def _find_shape(self, source: Conversion, name: str) -> tuple[int, ...]:
        """Return the shape that the tensor will have, by converting tensors without memory."""

        def empty(stored: str) -> Tensor:
            entry = self._stored[stored]
            return torch.empty(entry.shape, dtype=_TYPES.get(entry.dtype, torch.int64), device="meta")

        try:
            return tuple(source.convert(empty)[name].shape)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            parts = ", ".join(stored for _, stored in source.sources[:_SHOWN])
            raise UserError(
                f"{self._folder}: {name} cannot be made of the tensors there ({parts}): {' '.join(str(error).split())}"
            ) from error

    def _check_fit(self, plan: WeightsPlan, wrong: list[str], model: nn.Module) -> None:
        """Raise UserError unless the files have what the model needs, and nothing that it should have read."""
        kind = type(model).__name__
        if wrong:
            raise UserError(
                f"{self._folder}: {_join(wrong)}: the weights are of another shape than config.json says; give the "
                "folder with the config.json that belongs to them"
            )
        body = f"{getattr(model, 'base_model_prefix', '')}."
        is_classifier = getattr(model, "task", None) == "image_classification"
        made_anew = [re.compile(pattern) for pattern in list_unsaved_tensors(model)]
        plan.computed.update(name for name in plan.missing if any(pattern.search(name) for pattern in made_anew))
        missing = [name for name in plan.missing if name not in plan.computed]
        needed = [name for name in missing if not is_classifier or name.startswith(body)]
        if needed:
            raise UserError(
                f"{self._folder}: {_join(needed)}: missing in its weights, and {kind} needs them; use "
                "model.weights=draw to begin from scratch, or the folder of this model"
            )
        ignored = [re.compile(pattern) for pattern in list_ignored_tensors(model)]
        plan.unused[:] = [name for name in plan.unused if not any(pattern.search(name) for pattern in ignored)]
        if misfits := list_misfits(model, plan.unused):
            raise UserError(
                f"{self._folder}: its weights have {_join(misfits)}, for which its config.json has no place; give the "
                "files and config.json of one model, or model.weights=draw to begin from scratch"
            )


@dataclass(frozen=True)
class WeightsPlan:
    """Where the values of a model come from, by name."""

    parameters: dict[str, Callable[[], Tensor]]
    buffers: dict[str, Callable[[], Tensor]]
    missing: list[str]
    """Parameters of a new head: drawn."""
    unused: list[str]
    """Tensors of the files that the model has no place for."""
    computed: set[str]
    """Names in `missing` of parameters that the model's own code computes and no file has: Marian's positions."""

    def fill(self, model: nn.Module, values: DeferredValues) -> None:
        """Let `values` read the parameters when they are asked for, and read the buffers now."""
        for name, read in self.parameters.items():
            values.defer(name, read)
        with torch.no_grad():
            for name, read in self.buffers.items():
                model.get_buffer(name).copy_(read())

    def describe(self) -> list[str]:
        """Return a line each for what a user should know."""
        lines = []
        if drawn := [name for name in self.missing if name not in self.computed]:
            lines.append(f"the weights have no {_join(drawn)}: drawn anew, as for a new task")
        if self.unused:
            lines.append(f"the weights have {_join(self.unused)}, for which this model has no place: left out")
        return lines


def list_misfits(model: nn.Module, unused: Iterable[str]) -> list[str]:
    """Return those of the tensors without a place that are of the model's own layers or modules.

    Without them it would compute something else than the model that they are of. Others are of another head or tower.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    lists = tuple(f"{name}." for name, module in modules.items() if isinstance(module, nn.ModuleList))
    return [
        name
        for name in unused
        if not _OLD_CONSTANTS.search(name) and (name.startswith(lists) or name.rpartition(".")[0] in modules)
    ]


def _join(names: list[str]) -> str:
    return join_first(names, _SHOWN, "; ")


def has_weights(file: ConfigFile) -> bool:
    """Return whether the folder has weights in any format that transformers writes, or an index that names some."""
    return any(
        any(file.folder.glob(glob)) for glob in ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
    )


def find_weights(config: HfModelConfig) -> PretrainedWeights | None:
    """Return the weights that the run begins with; None to begin from scratch. Raises UserError for unreadable ones."""
    if config.weights == "draw":
        return None
    file = read_config_file(config)
    if config.weights == "auto" and not has_weights(file):
        return None
    return PretrainedWeights(config)


def check_weights(config: HfModelConfig, model: nn.Module) -> None:
    """Raise UserError if the run's weights do not fit the model, which may be on the meta device."""
    if (weights := find_weights(config)) is not None:
        weights.plan(model)


def _read_headers(folder: Path) -> dict[str, TensorHeader]:
    stored: dict[str, TensorHeader] = {}
    for path in list_weight_files(folder):
        with ExitStack() as stack:
            file = _open(path, stack)
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                if name in stored:
                    raise UserError(f"{path}: has the tensor {name}, which {stored[name].file.name} has too")
                stored[name] = TensorHeader(path, tuple(part.get_shape()), str(part.get_dtype()))
    return stored


def _join_mxfp4(stored: dict[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the headers with one for each weight in MXFP4, in the place of those of its blocks and its scales.

    Raises UserError for blocks without scales, and for shapes that do not fit.
    """
    joined = dict(stored)
    for name in [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]:
        blocks, scales = joined.pop(f"{name}{BLOCKS}"), joined.pop(f"{name}{SCALES}", None)
        if scales is None or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            raise UserError(f"{blocks.file}: {name}{BLOCKS} has no {name}{SCALES}, or they are not uint8 (MXFP4)")
        shape = find_expanded_shape(name, blocks.shape, scales.shape)
        joined[name] = TensorHeader(blocks.file, shape, "BF16", (blocks.file, scales.file))
    return joined


def _open(path: Path, stack: ExitStack) -> Any:
    """Open a safetensors file whose header has been checked by its library, which reads at most 100 MB of it."""
    library = import_safetensors()
    try:
        with open_foreign_file(path):
            pass
        return stack.enter_context(library.safe_open(path, framework="pt"))
    except (library.SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({' '.join(str(error).split())})") from error


def _check_dtypes(stored: dict[str, TensorHeader], config: HfModelConfig, folder: Path) -> None:
    first: dict[str, str] = {}
    for name, tensor in stored.items():
        if tensor.dtype != "I64" or not _COUNTERS.search(name):
            first.setdefault(tensor.dtype, name)
    strange = [f"{name} is {dtype}" for dtype, name in first.items() if dtype not in _TYPES]
    if strange:
        raise UserError(
            f"{folder}: {_join(strange)}: only floating-point weights of 16, 32 or 64 bits are trained; "
            "dequantize them with transformers and save them again"
        )
    if len(first) > 1 and not config.mixed_dtypes:
        kinds = ", ".join(f"{dtype} ({name})" for dtype, name in first.items())
        raise UserError(
            f"{folder}: its weights have several types: {kinds}; set model.mixed_dtypes=true to cast each to what the "
            "precision stores"
        )
