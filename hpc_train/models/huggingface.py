"""Convert weights between our names and shapes and those of the transformers library, both ways.

Pure functions of state dicts, also of a state dict of gradients. Linear weights are (out, in) on both sides, except for
GPT-2, whose Conv1D stores (in, out) and joins q, k and v in one matrix. Files have one matrix per expert; we stack them
as (experts, in, out).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from hpc_train.config.model import ModelConfig, TransformerConfig
from hpc_train.errors import UserError
from hpc_train.models.huggingface_family import find_model_family

State = dict[str, Tensor]

_LLAMA = {
    "model.embed_tokens": "embed",
    "model.layers.#.input_layernorm": "layers.#.attention_norm",
    "model.layers.#.self_attn.q_proj": "layers.#.attention.q",
    "model.layers.#.self_attn.k_proj": "layers.#.attention.k",
    "model.layers.#.self_attn.v_proj": "layers.#.attention.v",
    "model.layers.#.self_attn.o_proj": "layers.#.attention.o",
    "model.layers.#.post_attention_layernorm": "layers.#.feed_forward_norm",
    "model.layers.#.mlp.gate_proj": "layers.#.feed_forward.gate",
    "model.layers.#.mlp.up_proj": "layers.#.feed_forward.up",
    "model.layers.#.mlp.down_proj": "layers.#.feed_forward.down",
    "model.norm": "norm",
    "lm_head": "head",
}
_GEMMA3 = {
    **_LLAMA,
    "model.layers.#.self_attn.q_norm": "layers.#.attention.q_norm",
    "model.layers.#.self_attn.k_norm": "layers.#.attention.k_norm",
    "model.layers.#.post_attention_layernorm": "layers.#.attention_output_norm",
    "model.layers.#.pre_feedforward_layernorm": "layers.#.feed_forward_norm",
    "model.layers.#.post_feedforward_layernorm": "layers.#.feed_forward_output_norm",
}
_OLMO = {
    theirs: ours
    for theirs, ours in _GEMMA3.items()
    if not theirs.endswith(("input_layernorm", "pre_feedforward_layernorm"))
}
_GPT2 = {
    "transformer.wte": "embed",
    "transformer.wpe": "positions",
    "transformer.h.#.ln_1": "layers.#.attention_norm",
    "transformer.h.#.attn.c_attn": "layers.#.attention.qkv",
    "transformer.h.#.attn.c_proj": "layers.#.attention.o",
    "transformer.h.#.ln_2": "layers.#.feed_forward_norm",
    "transformer.h.#.mlp.c_fc": "layers.#.feed_forward.up",
    "transformer.h.#.mlp.c_proj": "layers.#.feed_forward.down",
    "transformer.ln_f": "norm",
    "lm_head": "head",
}
_VIT = {
    "vit.embeddings.cls_token": "class_token",
    "vit.embeddings.position_embeddings": "positions",
    "vit.embeddings.patch_embeddings.projection": "patches",
    "vit.encoder.layer.#.layernorm_before": "layers.#.attention_norm",
    "vit.encoder.layer.#.attention.attention.query": "layers.#.attention.q",
    "vit.encoder.layer.#.attention.attention.key": "layers.#.attention.k",
    "vit.encoder.layer.#.attention.attention.value": "layers.#.attention.v",
    "vit.encoder.layer.#.attention.output.dense": "layers.#.attention.o",
    "vit.encoder.layer.#.layernorm_after": "layers.#.feed_forward_norm",
    "vit.encoder.layer.#.intermediate.dense": "layers.#.feed_forward.up",
    "vit.encoder.layer.#.output.dense": "layers.#.feed_forward.down",
    "vit.layernorm": "norm",
    "classifier": "head",
}
_MIXTRAL = {
    **{theirs: ours for theirs, ours in _LLAMA.items() if ".mlp." not in theirs},
    "model.layers.#.block_sparse_moe.gate": "layers.#.feed_forward.router.gate",
}
_QWEN3_MOE = {
    **_LLAMA,
    "model.layers.#.self_attn.q_norm": "layers.#.attention.q_norm",
    "model.layers.#.self_attn.k_norm": "layers.#.attention.k_norm",
    "model.layers.#.mlp.gate": "layers.#.feed_forward.router.gate",
}
_DEEPSEEK_V3 = {
    **{theirs: ours for theirs, ours in _LLAMA.items() if not theirs.endswith(("k_proj", "v_proj"))},
    "model.layers.#.self_attn.q_a_proj": "layers.#.attention.q_a",
    "model.layers.#.self_attn.q_a_layernorm": "layers.#.attention.q_a_norm",
    "model.layers.#.self_attn.q_b_proj": "layers.#.attention.q_b",
    "model.layers.#.self_attn.kv_a_proj_with_mqa": "layers.#.attention.kv_a",
    "model.layers.#.self_attn.kv_a_layernorm": "layers.#.attention.kv_a_norm",
    "model.layers.#.self_attn.kv_b_proj": "layers.#.attention.kv_b",
    "model.layers.#.mlp.gate": "layers.#.feed_forward.router.gate",
    "model.layers.#.mlp.gate.e_score_correction_bias": "layers.#.feed_forward.router.bias",
    "model.layers.#.mlp.shared_experts.gate_proj": "layers.#.feed_forward.shared.gate",
    "model.layers.#.mlp.shared_experts.up_proj": "layers.#.feed_forward.shared.up",
    "model.layers.#.mlp.shared_experts.down_proj": "layers.#.feed_forward.shared.down",
}
_TABLES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "gemma2": {theirs: ours for theirs, ours in _GEMMA3.items() if not theirs.endswith(("q_norm", "k_norm"))},
    "gemma3_text": _GEMMA3,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "gpt2": _GPT2,
    "vit": _VIT,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "olmoe": _QWEN3_MOE,
    "deepseek_v3": _DEEPSEEK_V3,
}
_EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")
_PREFIXES = dict.fromkeys(_TABLES, "model.") | {"gpt2": "transformer.", "vit": "vit."}
"""Prefix of the names in files of a model with a head; files of the bare model, such as the first GPT-2's, lack it."""
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
"""Constants that old files hold."""


def from_huggingface(state: Mapping[str, Tensor], config: ModelConfig) -> State:
    """Make our state dict from the library's, by the names in its files. Tensors may share memory with `state`.

    A copy of a tied embedding under the name of the head is dropped. UserError for a name that the family lacks.
    """
    kind, out = find_model_family(config), State()
    experts = _Stacks()
    for name, tensor in state.items():
        if _BUFFERS.search(name) or experts.take(name, tensor, kind):
            continue
        module, leaf = _split_name(_complete_name(name, kind))
        module_name = _rename_module(module, _TABLES[kind])
        if module_name is None:
            raise UserError(f"{name}: no such weight in a {kind} model; is this a checkpoint of {config.name}?")
        tensor = tensor.t() if _is_conv1d(module_name, leaf, kind) else tensor
        if module_name.endswith(".qkv"):
            parts = zip("qkv", tensor.chunk(3), strict=True)
            out.update({f"{module_name[:-3]}{which}{leaf}": part for which, part in parts})
        elif not (module_name == "head" and _is_tied(config)):
            out[module_name + leaf] = tensor
    return out | experts.stack(config)


_EXPERT = re.compile(r"(?:model\.)?layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_MATRICES = {"mixtral": {"w1": "gate", "w3": "up", "w2": "down"}}
_QWEN_MATRICES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


class _Stacks:
    """The matrices of single experts, as files have them, on their way to one tensor for all experts of a layer."""

    def __init__(self) -> None:
        self._matrices: dict[str, dict[int, Tensor]] = {}

    def take(self, name: str, tensor: Tensor, kind: str) -> bool:
        """Take the matrix of one expert; False for any other weight."""
        match = _EXPERT.fullmatch(name)
        which = _MATRICES.get(kind, _QWEN_MATRICES).get(match[3]) if match else None
        if match is None or which is None or kind not in _EXPERT_FAMILIES:
            return False
        self._matrices.setdefault(f"layers.{match[1]}.feed_forward.experts.{which}", {})[int(match[2])] = tensor
        return True

    def stack(self, config: ModelConfig) -> State:
        """Stack the matrices, (experts, in, out). Raises UserError where some are missing, or shapes differ."""
        out = State()
        for name, matrices in self._matrices.items():
            assert isinstance(config, TransformerConfig)
            if sorted(matrices) != list(range(config.experts.count)) or len({m.shape for m in matrices.values()}) > 1:
                raise UserError(
                    f"{name}: needs matrices of one shape of {config.experts.count} experts, and has "
                    f"{len(matrices)}; is this a checkpoint of {config.name}?"
                )
            out[name] = torch.stack([matrices[index].t() for index in range(len(matrices))])
        return out


def _unstack_experts(state: Mapping[str, Tensor], kind: str) -> tuple[State, State]:
    """Return (the weights of single experts under the library's names, all other weights under ours)."""
    names = {hpc_name: hf_name for hf_name, hpc_name in _MATRICES.get(kind, _QWEN_MATRICES).items()}
    single, others = State(), State()
    for name, tensor in state.items():
        match = re.fullmatch(r"layers\.(\d+)\.feed_forward\.experts\.(\w+)", name)
        if match is None:
            others[name] = tensor
            continue
        layer = "block_sparse_moe" if kind == "mixtral" else "mlp"
        for index, matrix in enumerate(tensor.unbind()):
            single[f"model.layers.{match[1]}.{layer}.experts.{index}.{names[match[2]]}.weight"] = (
                matrix.t().contiguous()
            )
    return single, others


def to_huggingface(state: Mapping[str, Tensor], config: ModelConfig) -> State:
    """Make the library's state dict, as in its files, from ours: a tied head is not in it."""
    kind = find_model_family(config)
    table = {hpc_name: hf_name for hf_name, hpc_name in _TABLES[kind].items()}
    out, others = _unstack_experts(state, kind)
    for name, tensor in _fuse_qkv(others).items() if kind == "gpt2" else others.items():
        module, leaf = (name, "") if _rename_module(name, table) else _split_name(name)
        hf_name = _rename_module(module, table)
        assert hf_name is not None, f"{name}: not of this family"
        out[hf_name + leaf] = tensor.t().contiguous() if _is_conv1d(module, leaf, kind) else tensor
    return out


def name_huggingface_module(module: str, config: ModelConfig) -> str:
    """Return the library's name of one of our modules; GPT-2's q, k and v are all in one module there."""
    kind = find_model_family(config)
    fused = re.sub(r"\.attention\.[qkv]$", ".attention.qkv", module) if kind == "gpt2" else module
    hf_name = _rename_module(fused, {hpc_name: hf_name for hf_name, hpc_name in _TABLES[kind].items()})
    if hf_name is None:
        raise UserError(f"{module}: no such module in a {kind} model of transformers")
    return hf_name


def _complete_name(name: str, kind: str) -> str:
    """Add the prefix that files of a model without a head leave out."""
    heads = ("lm_head", "classifier", _PREFIXES[kind])
    return name if name.startswith(heads) else _PREFIXES[kind] + name


def _split_name(name: str) -> tuple[str, str]:
    """Return (module, .weight or .bias), or (name, nothing) for a parameter that no module of its own holds."""
    module, _, last = name.rpartition(".")
    return (module, f".{last}") if last in ("weight", "bias") else (name, "")


def _rename_module(module: str, table: Mapping[str, str]) -> str | None:
    numbers = re.findall(r"\.(\d+)(?=\.)", module)
    name = table.get(re.sub(r"\.\d+(?=\.)", ".#", module))
    return name.replace("#", numbers[0]) if name and numbers else name


def _is_conv1d(module_name: str, leaf: str, kind: str) -> bool:
    return kind == "gpt2" and leaf == ".weight" and re.search(r"\.(attention|feed_forward)\.", module_name) is not None


def _is_tied(config: ModelConfig) -> bool:
    return isinstance(config, TransformerConfig) and config.tied_embeddings


def _fuse_qkv(state: Mapping[str, Tensor]) -> State:
    """Return the state with each q, k and v put into one qkv, in that order."""
    out = State()
    for name, tensor in state.items():
        match = re.fullmatch(r"(.*\.attention\.)([qkv])(\.\w+)", name)
        if match is None:
            out[name] = tensor
        elif match[2] == "q":
            out[f"{match[1]}qkv{match[3]}"] = torch.cat([state[f"{match[1]}{which}{match[3]}"] for which in "qkv"])
    return out
