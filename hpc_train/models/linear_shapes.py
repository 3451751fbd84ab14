"""List the linear layers of a model, by name and shape, without torch: what adapters and 4-bit weights are about.

A test compares the list with the modules that are built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.models.adapters.names import choose_targets
from hpc_train.models.adapters.nf4_sizes import NF4_BLOCK
from hpc_train.models.shape import (
    CountedTransformer,
    compute_expert_width,
    compute_head_dim,
    count_branches,
    count_kv_heads,
    has_experts,
    has_latent_attention,
)


@dataclass(frozen=True)
class LinearShape:
    """One linear layer."""

    inputs: int
    outputs: int
    split: Literal["columns", "rows", "whole"] = "columns"
    """How tp splits the layer: by its outputs (columns), by its inputs (rows), or not at all."""
    reads: Literal["attention", "feed_forward", "widened", "other"] = "other"
    """The input: the norm's result before attention or before the feed-forward layer, or the widened one."""
    in_block: bool = True
    """Whether the layer is inside of a block; the head is not."""
    router: bool = False
    """Whether the layer is the router of a mixture of our own models, which gets an adapter only if it is named."""
    transposed: bool = False
    """Whether the layer is a Conv1D of transformers, whose weight is (inputs, outputs)."""
    shared: bool = False
    """Whether another module has the same weight."""

    @property
    def weights(self) -> int:
        """Number of weights, without a bias."""
        return self.inputs * self.outputs


_Layers = dict[str, LinearShape]


def list_adapted_layers(model: TransformerConfig | VisionTransformerConfig, globs: Sequence[str]) -> _Layers:
    """Return the layers that get an adapter (config.adapter.targets). Raises UserError for a glob without a layer."""
    layers = list_linear_layers(model)
    if not globs:
        return {name: layer for name, layer in layers.items() if layer.in_block and not layer.router}
    return {name: layers[name] for name in choose_targets(list(layers), globs)}


def count_adapter_weights(layers: Iterable[LinearShape], rank: float, dora: bool) -> float:
    """Count the trained weights of adapters: A and B of each layer, and the magnitude of DoRA for each output."""
    return sum(rank * (layer.inputs + layer.outputs) + dora * layer.outputs for layer in layers)


def takes_four_bits(layer: LinearShape) -> bool:
    """Return whether adapter.base=nf4 stores the weight in 4 bits (models.adapters.adapted_linear.list_nf4_layers)."""
    return layer.in_block and not layer.transposed and not layer.shared and layer.inputs % NF4_BLOCK == 0


def list_linear_layers(model: TransformerConfig | VisionTransformerConfig) -> _Layers:
    """List the linear layers of a model by module name, in the model's order."""
    if isinstance(model, CountedTransformer):
        return dict(_list_decoder(model))
    layers: _Layers = {}
    for index in range(model.layers):
        for part, made in (("attention", _list_attention(model)), ("feed_forward", _list_feed_forward(model, index))):
            layers.update({f"layers.{index}.{part}.{name}": shape for name, shape in made.items()})
    if isinstance(model, VisionTransformerConfig):
        return layers | {"head": LinearShape(model.hidden, model.classes, "whole", in_block=False)}
    return layers if model.tied_embeddings else layers | {"head": _make_head(model)}


def _make_head(model: TransformerConfig, shared: bool = False) -> LinearShape:
    return LinearShape(model.hidden, model.vocab_size, in_block=False, shared=shared)


def _list_attention(model: TransformerConfig | VisionTransformerConfig) -> _Layers:
    hidden = model.hidden
    if isinstance(model, VisionTransformerConfig):
        columns = LinearShape(hidden, hidden, reads="attention")
        return {"q": columns, "k": columns, "v": columns, "o": LinearShape(hidden, hidden, "rows")}
    if has_latent_attention(model):
        return _list_latent_attention(model)
    queries, keys = model.heads * compute_head_dim(model), count_kv_heads(model) * compute_head_dim(model)
    key = LinearShape(hidden, keys, reads="attention")
    made = {"q": LinearShape(hidden, queries, reads="attention"), "k": key, "v": key}
    return made | {"o": LinearShape(queries, hidden, "rows")}


def _list_latent_attention(model: TransformerConfig) -> _Layers:
    latent, hidden, queries = model.latent, model.hidden, model.heads * compute_head_dim(model)
    made = {"q": LinearShape(hidden, queries, reads="attention")}
    if latent.q_rank is not None:
        made = {
            "q_a": LinearShape(hidden, latent.q_rank, "whole", "attention"),
            "q_b": LinearShape(latent.q_rank, queries),
        }
    expanded = model.heads * (latent.nope_head_dim + latent.value_head_dim)
    made["kv_a"] = LinearShape(hidden, latent.kv_rank + latent.rope_head_dim, "whole", "attention")
    made["kv_b"] = LinearShape(latent.kv_rank, expanded)
    return made | {"o": LinearShape(model.heads * latent.value_head_dim, hidden, "rows")}


def _list_feed_forward(model: TransformerConfig | VisionTransformerConfig, index: int) -> _Layers:
    if isinstance(model, TransformerConfig) and has_experts(model, index):
        made = {"router.gate": LinearShape(model.hidden, model.experts.count, "whole", "feed_forward", router=True)}
        width = model.experts.shared * compute_expert_width(model)
        shared = _list_gated(model.hidden, width, 2) if width else {}
        return made | {f"shared.{name}": shape for name, shape in shared.items()}
    return _list_gated(
        model.hidden, model.feed_forward, count_branches(model) if isinstance(model, TransformerConfig) else 1
    )


def _list_gated(hidden: int, width: int, branches: int) -> _Layers:
    up, down = LinearShape(hidden, width, reads="feed_forward"), LinearShape(width, hidden, "rows", "widened")
    return {**({"gate": up} if branches == 2 else {}), "up": up, "down": down}


_LLAMA_NAMES = {
    **{key: f"self_attn.{key}_proj" for key in ("q", "k", "v", "o")},
    **{key: f"mlp.{key}_proj" for key in ("gate", "up", "down")},
}
_NAMES = {
    "phi": {**_LLAMA_NAMES, "o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
    "gpt2": {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
    "gpt_neox": {
        "qkv": "attention.query_key_value",
        "o": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
}
"""Names of layers inside of a block, by model_type; all other decoders have Llama's."""
_BLOCKS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}
"""Name of the list of blocks, by model_type; that of all other decoders is model.layers."""


def _list_decoder(model: CountedTransformer) -> Iterator[tuple[str, LinearShape]]:
    """Yield the layers of a decoder of transformers, under the library's names. Its experts are no linear layers."""
    names, blocks = _NAMES.get(model.model_type, _LLAMA_NAMES), _BLOCKS.get(model.model_type, "model.layers")
    made = _list_attention(model)
    if model.fused_attention_input:
        queries, keys = made.pop("q"), made.pop("k")
        del made["v"]
        outputs = queries.outputs + 2 * keys.outputs
        made = {"qkv": LinearShape(model.hidden, outputs, reads="attention"), **made}
    if not model.experts.count:
        made |= _list_gated(model.hidden, model.feed_forward, count_branches(model))
    in_block = {names[key]: replace(shape, transposed=model.model_type == "gpt2") for key, shape in made.items()}
    if model.shared_feed_forward:
        shared = _list_gated(model.hidden, model.shared_feed_forward, 2)
        in_block |= {f"mlp.shared_expert.{key}_proj": shape for key, shape in shared.items()}
        in_block["mlp.shared_expert_gate"] = LinearShape(model.hidden, 1, "whole", "feed_forward")
    for index in range(model.layers):
        for name, shape in in_block.items():
            yield f"{blocks}.{index}.{name}", shape
    yield "lm_head", _make_head(model, shared=model.tied_embeddings)
