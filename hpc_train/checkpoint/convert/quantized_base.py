"""Read the frozen weights of a run with adapter.base=nf4 from model.path, because its checkpoints hold only adapters.

Weights are rounded to NF4 and expanded again, so that they have the values that the adapters were trained on. Each step
stores a digest of the weight files; if the files have changed since, reading fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from hpc_train.checkpoint.convert.formats.safetensors_files import list_weight_files
from hpc_train.checkpoint.convert.formats.torch_files import open_foreign_file
from hpc_train.checkpoint.convert.pretrained_weights import PretrainedWeights, WeightsPlan
from hpc_train.checkpoint.convert.tensor_sources import TensorSource
from hpc_train.checkpoint.format.manifest import Manifest
from hpc_train.checkpoint.format.rectangle import make_slices
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.checkpoint.storage.step_directory import BASE_DIGEST
from hpc_train.config.model import HfModelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard
from hpc_train.models.adapters.adapted_linear import list_nf4_layers
from hpc_train.models.adapters.nf4 import expand, import_bitsandbytes, quantize
from hpc_train.models.hf.build import build_hf_model

_HEAD_BYTES, _PIECE_BYTES, _PIECES = 1 << 20, 1 << 16, 64
"""Bytes of the head of a file, bytes of a sample and number of samples that digest_base reads."""


def digest_base(config: HfModelConfig) -> str:
    """Digest the weight files of model.path: their names, sizes, first MiB, and 64 samples of 64 KiB of each.

    Reading a large model completely at each start would take minutes. Samples are enough, because further training of
    the base would change all of its tensors.
    """
    digest = xxhash.xxh3_128()
    for path in list_weight_files(Path(config.path).expanduser()):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with open_foreign_file(path) as file:
            digest.update(file.read(_HEAD_BYTES))
            for piece in range(_PIECES):
                file.seek(size * piece // _PIECES)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def check_base(config: HfModelConfig, manifest_extra: Mapping[str, object], where: str) -> None:
    """Raise UserError if the files of model.path are not those that the adapters of a step were trained on."""
    if (wanted := manifest_extra.get(BASE_DIGEST)) is not None and wanted != digest_base(config):
        raise UserError(
            f"{where}: its adapters were trained on other weights than those in model.path={config.path}; give the "
            "folder with the files as they were"
        )


@dataclass(frozen=True)
class StepOnBase:
    """The tensors of a step that has adapters only, and those of its base, rounded as in training (a TensorSource)."""

    source: TensorSource
    config: HfModelConfig

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """The tensors of the step, then those of the base, in the type of the adapters."""
        saved = list(self.source.tensors)
        dtype = saved[0].dtype
        names = {tensor.name for tensor in saved}
        base = [SavedTensor(name, dtype, shape) for name, shape in self._shapes.items() if name not in names]
        return [*saved, *base]

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Read the shards; of the base, one whole tensor is in memory at a time."""
        self.source.fill([shard for shard in shards if shard.name not in self._plan.parameters])
        for shard in shards:
            if shard.name in self._plan.parameters:
                where = make_slices(shard.offset, shard.local.shape)
                shard.local.copy_(self._read(shard.name, shard.dtype)[where])

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        value = self._plan.parameters[name]()
        if name not in self._rounded:
            return value
        import_bitsandbytes()
        return expand(*quantize(value), dtype)

    @cached_property
    def _model(self) -> torch.nn.Module:
        with torch.device("meta"):
            return build_hf_model(self.config)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}

    @cached_property
    def _rounded(self) -> frozenset[str]:
        layers = list_nf4_layers(self._model, list(self._model.blocks()))  # type: ignore[operator]
        return frozenset(f"{name}.weight" for name in layers)

    @cached_property
    def _plan(self) -> WeightsPlan:
        return PretrainedWeights(self.config).plan(self._model)


def add_base(source: TensorSource, manifest: Manifest, config: HfModelConfig, where: str) -> StepOnBase:
    """Combine a step's tensors with those of its base. Raises UserError if the files of the base have changed."""
    check_base(config, manifest.extra, where)
    return StepOnBase(source, config)


def needs_base(manifest: Manifest) -> bool:
    """Return whether a step holds only adapters, so that its base must be read from model.path."""
    return manifest.extra.get(BASE_DIGEST) is not None
