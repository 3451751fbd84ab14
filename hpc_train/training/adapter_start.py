"""Start a run's adapters from files of PEFT (adapter.path)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.checkpoint.convert.formats.peft_files import LayerAdapter, read_peft
from hpc_train.checkpoint.storage.step_directory import select_weights
from hpc_train.config.adapter import AdapterConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, TensorShard, World
from hpc_train.messages import all_gather_values
from hpc_train.models.adapters.names import ADAPTER_A, ADAPTER_B, ADAPTER_MAGNITUDE, is_adapter_parameter, is_transposed


def load_adapter(config: RunConfig, engine: Engine, world: World) -> str:
    """Give this rank's parts of the adapters the values in adapter.path; returns a line about it. A collective.

    A smaller rank in the files fills the first rows of A and columns of B, and B is scaled to this run's alpha / rank,
    so that the model computes the same. Raises UserError, on every rank, for an adapter that does not fit.
    """
    assert config.adapter.path is not None
    folder, shards = Path(config.adapter.path).expanduser(), list(engine.shards())
    layers = _gather_layers(shards)
    adapters = read_peft(
        folder, config.model, {name: (linear.outputs, linear.inputs) for name, linear in layers.items()}
    )
    _check_kind(folder, adapters, config.adapter)
    if config.adapter.kind == "dora":
        _check_weights(folder, adapters, layers)
    lengths = _measure_weights(shards, adapters, layers, world) if config.adapter.kind == "dora" else {}
    for shard in shards:
        layer, _, leaf = shard.name.rpartition(".")
        if layer in adapters and leaf in (ADAPTER_A, ADAPTER_B, ADAPTER_MAGNITUDE):
            value = _convert(adapters[layer], leaf, config.adapter, lengths.get(layer))
            _copy_overlap(shard, value.t() if layers[layer].transposed and value.ndim == 2 else value)
    remainder = f"; {len(layers) - len(adapters)} others begin at zero" if len(adapters) < len(layers) else ""
    return f"adapter: {len(adapters)} layers start from {folder}{remainder}"


class LayerShape(NamedTuple):
    """Sizes of a layer with an adapter."""

    outputs: int
    inputs: int
    transposed: bool
    """Whether its weight is (inputs, outputs), as in Conv1D of transformers."""
    has_weight: bool
    """Whether a checkpoint has the weight under this layer's name: not one that is tied to another, or in 4 bits."""

    @classmethod
    def of(cls, a: Sequence[int], b: Sequence[int], weight: Sequence[int] | None) -> LayerShape:
        """Find the sizes from the shapes of A, B and the weight, which is None if the checkpoint has none so named."""
        transposed = weight is not None and is_transposed(weight, a, b)
        outputs, inputs = (b[1], a[0]) if transposed else (b[0], a[1])
        return cls(outputs, inputs, transposed, weight is not None)


def _gather_layers(shards: Iterable[TensorShard]) -> dict[str, LayerShape]:
    """Return the sizes of every layer with an adapter, of all ranks: a pipeline stage has only its own."""
    weights = list(select_weights(shards))
    adapted = {shard.name.rpartition(".")[0] for shard in weights if is_adapter_parameter(shard.name)}
    shapes = {shard.name: list(shard.shape) for shard in weights if shard.name.rpartition(".")[0] in adapted}
    shapes = {name: shape for rank_shapes in all_gather_values(shapes) for name, shape in rank_shapes.items()}
    layers = [name.rpartition(".")[0] for name in shapes if name.endswith(f".{ADAPTER_A}")]
    layers = [layer for layer in layers if f"{layer}.{ADAPTER_B}" in shapes]
    return {
        layer: LayerShape.of(
            shapes[f"{layer}.{ADAPTER_A}"], shapes[f"{layer}.{ADAPTER_B}"], shapes.get(f"{layer}.weight")
        )
        for layer in sorted(layers)
    }


def _check_kind(folder: Path, adapters: dict[str, LayerAdapter], config: AdapterConfig) -> None:
    kinds = {"lora" if adapter.magnitude is None else "dora" for adapter in adapters.values()}
    if kinds != {config.kind}:
        raise UserError(f"adapter.path={folder}: has {' and '.join(sorted(kinds)) or 'no adapter'}, not {config.kind}")
    rank = max(len(adapter.a) for adapter in adapters.values())
    if rank > config.rank:
        raise UserError(f"adapter.path={folder}: has rank {rank}; give adapter.rank={rank} (now {config.rank})")


def _check_weights(folder: Path, adapters: Iterable[str], layers: dict[str, LayerShape]) -> None:
    """Raise UserError for a layer whose weight has another name: DoRA starts from the lengths of its rows."""
    for layer in adapters:
        if not layers[layer].has_weight:
            raise UserError(
                f"adapter.path={folder}: starts DoRA of {layer}, whose weight is tied to another layer's; use LoRA"
            )


def _measure_weights(
    shards: Iterable[TensorShard],
    adapters: dict[str, LayerAdapter],
    layers: dict[str, LayerShape],
    world: World,
) -> dict[str, Tensor]:
    """Return the length of each output's adapted weights, (outputs,), whose parts lie on several ranks."""
    squares = {layer: torch.zeros(layers[layer].outputs, dtype=torch.float64) for layer in sorted(adapters)}
    for shard in shards:
        layer, _, leaf = shard.name.rpartition(".")
        if layer in squares and leaf == "weight" and shard.replica == 0:
            dim = int(layers[layer].transposed)  # that of the outputs
            outputs = slice(shard.offset[dim], shard.offset[dim] + shard.local.shape[dim])
            squares[layer][outputs] += shard.local.detach().double().square().sum(1 - dim).cpu()
    joined = torch.cat(list(squares.values()))
    if world.size > 1:
        total = joined.to(world.device)
        dist.all_reduce(total)
        joined = total.cpu()
    parts = torch.split(joined.sqrt(), [len(layer_squares) for layer_squares in squares.values()])
    return dict(zip(squares, parts, strict=True))


def _convert(adapter: LayerAdapter, leaf: str, config: AdapterConfig, lengths: Tensor | None) -> Tensor:
    """Return one of our parameters, from the first element on, in float64."""
    if leaf == ADAPTER_A:
        return adapter.a.double()
    if leaf == ADAPTER_B:
        return adapter.b.double() * (adapter.scale / (config.alpha / config.rank))
    assert adapter.magnitude is not None
    assert lengths is not None
    return adapter.magnitude.double() - lengths


@torch.no_grad()
def _copy_overlap(shard: TensorShard, value: Tensor) -> None:
    """Copy what a shard has of a tensor that begins at the origin, and may be smaller than the shard's."""
    source, target = [], []
    for offset, length, size in zip(shard.offset, shard.local.shape, value.shape, strict=True):
        end = max(min(offset + length, size), offset)
        source.append(slice(offset, end))
        target.append(slice(0, end - offset))
    shard.local[tuple(target)].copy_(value[tuple(source)])
