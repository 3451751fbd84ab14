"""Limits that a model's shape and its batch set on the degrees of tp, cp and ep.

These are the conditions of parallel.rules as numbers, so that a search lists only degrees that the trainer can run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.models.adapters.nf4_sizes import NF4_BLOCK
from hpc_train.models.linear_shapes import list_linear_layers, takes_four_bits
from hpc_train.models.shape import CountedTransformer, compute_expert_width
from hpc_train.traffic.moment_blocks import is_quantized, list_split_rows


@dataclass(frozen=True)
class DegreeLimits:
    """Sizes of a transformer and its batch that limit the degrees."""

    layers: int
    heads: int
    feed_forward: int
    vocab: int
    sequence: int
    global_batch: int
    images: bool = False
    """The model is a vision transformer, whose positions cannot be split."""
    ulysses: bool = False
    """parallel.context.method=ulysses is fixed."""
    balanced: bool = True
    """parallel.context.balanced."""
    vocabulary: bool = True
    """parallel.tensor.vocabulary."""
    ddp_reduces: bool = True
    """Whether DistributedDataParallel can reduce in precision.reduce."""
    device: bool = True
    """Whether ranks have device memory separate from the host's."""
    split_backward: bool = True
    """Whether schedules that split backward are allowed: not with compilation, and not with experts."""
    experts: int = 0
    """Experts of a layer; 0: none."""
    tensor: bool = True
    """Whether tp is allowed: not with gathers in 8 bits, or dropout of adapters."""
    blocks: int = 0
    """Number that tp must also divide: blocks of 8-bit moments, or of weights in 4 bits, in a row that tp splits; 0: no
    such limit."""
    positions: bool = True
    """Whether tp may split positions between layers: not in models of transformers, whose hidden states are whole."""
    adapter: bool = False
    """Only adapters are trained, which excludes asynchronous tp and ep."""
    four_bits: bool = False
    """The base is in 4 bits, which excludes offload of parameters."""
    float8: bool = False
    """Products in 8 bits, which excludes asynchronous tp."""
    float8_gather: bool = False
    """Weights are gathered in 8 bits, which needs a zero strategy and parameters on the device."""


def find_degree_limits(config: RunConfig, global_batch: int | None = None) -> DegreeLimits:
    """Collect the limits of a run whose model shape is known. global_batch: replaces train.global_batch."""
    model, parallel = config.model, config.parallel
    assert isinstance(model, (TransformerConfig, VisionTransformerConfig))
    images = isinstance(model, VisionTransformerConfig)
    native = "fp64" if config.precision.name == "fp64" else "fp32"
    experts = model.experts.count if isinstance(model, TransformerConfig) else 0
    # tp divides the widths of the dense layers, if there are any, and of the experts.
    widths = [compute_expert_width(model)] if isinstance(model, TransformerConfig) and experts else []
    dense = not widths or (isinstance(model, TransformerConfig) and model.experts.first_dense > 0)
    return DegreeLimits(
        layers=model.layers,
        heads=model.heads,
        feed_forward=math.gcd(*widths, *([model.feed_forward] if dense else [])),
        vocab=model.vocab_size if isinstance(model, TransformerConfig) else model.classes,
        sequence=config.train.sequence_length,
        global_batch=global_batch or config.train.global_batch,
        images=images,
        ulysses=parallel.context.method == "ulysses",
        balanced=parallel.context.balanced,
        vocabulary=parallel.tensor.vocabulary,
        device=config.cluster.node.gpus > 0,
        ddp_reduces=config.precision.reduce == native,
        split_backward=not parallel.compile and not experts,
        experts=experts,
        tensor=not config.precision.float8_gather and config.adapter.dropout == 0,
        blocks=_count_split_blocks(config),
        positions=not isinstance(model, CountedTransformer),
        adapter=config.adapter.kind != "none",
        four_bits=config.adapter.base == "nf4",
        float8=config.precision.float8 != "none",
        float8_gather=config.precision.float8_gather,
    )


def _count_split_blocks(config: RunConfig) -> int:
    """Return the number of blocks that tp has to divide (parallel.rules.optimizer, adapter); 0: there is no limit."""
    counts: list[int] = []
    if config.optim.state == "8bit":
        size, shapes = config.optim.block_size, list_split_rows(config.model).values()
        counts += [shape[-1] // size for shape in shapes if is_quantized(shape, size)]
    if config.adapter.base == "nf4" and isinstance(config.model, TransformerConfig):
        layers = list_linear_layers(config.model).values()
        counts += [layer.inputs // NF4_BLOCK for layer in layers if layer.split == "rows" and takes_four_bits(layer)]
    return math.gcd(*counts)


def list_divisors(number: int, others: Iterable[float] | None = None) -> list[int]:
    """List all divisors, ascending, together with those of `others` that are not larger than the number."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    not_larger = [int(other) for other in others or () if 1 <= other <= number]
    return sorted({*small, *(number // n for n in small), *not_larger})


def list_tensor_degrees(shape: DegreeLimits, world: int) -> list[int]:
    """List the degrees of tp that divide the matrices (parallel.rules.tensor) and the world."""
    if not shape.tensor:
        return [1]
    sizes = (shape.heads, shape.feed_forward, shape.blocks)
    degrees = [n for n in list_divisors(world) if not any(size % n for size in sizes)]
    if shape.images:
        return degrees
    if not shape.vocabulary:
        return degrees[1:]  # with tp=1 the setting has no effect, which the trainer refuses
    return [tp for tp in degrees if -(-shape.vocab // tp) * (tp - 1) < shape.vocab]


def list_context_degrees(shape: DegreeLimits, world: int, tp: int) -> list[tuple[int, int]]:
    """List (cp, ulysses): degrees dividing the positions (parallel.rules.attention) and the world; ulysses is 0 or 1.

    cp=1 is listed unless the run sets an option that needs more than one rank.
    """
    changed = shape.ulysses or not shape.balanced
    degrees = [] if changed else [(1, 0)]
    if shape.images:
        return degrees
    for cp in list_divisors(world)[1:]:
        if not shape.ulysses and shape.sequence % (2 * cp if shape.balanced else cp) == 0:
            degrees.append((cp, 0))
        if shape.balanced and shape.sequence % cp == 0 and shape.heads // tp % cp == 0:
            degrees.append((cp, 1))
    return degrees
