"""Describe decoders of transformers by the shape of our own transformer, for the planner; no torch.

What is counted is what the library builds: the number of parameters is exact. Families, or settings of them, that our
own model has no words for are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpc_train.config.model import ExpertsConfig, HfModelConfig
from hpc_train.errors import UserError
from hpc_train.models.hf.config_file import ConfigFile, find_task, read_config_file
from hpc_train.models.shape import CountedTransformer

_YOURSELF = "choose the degrees yourself, such as parallel=fsdp"


@dataclass(frozen=True)
class Decoder:
    """Parts of the layers of a family. A text names the key of config.json that decides, False where it is missing."""

    query_bias: bool | str = False
    """Biases of queries, keys and values."""
    output_bias: bool | str = False
    feed_forward_bias: bool | str = False
    head_bias: bool = False
    gated: bool = True
    norms: int = 2
    """Norms of hidden states in a layer."""
    layernorm: bool = False
    """Norms also have a bias."""
    query_key_norm: str = "none"
    tied: bool = False
    """Whether embedding and head are one where the file does not say."""
    parallel_block: bool | str = False
    head_dim: int | None = None
    """Width of a head where the file does not say; None: hidden / heads."""
    window: int | None = None
    """Sliding window where the file does not say."""
    pattern: int = 1
    """Every so-many-th layer has no window where the file does not list them; 1: all have one."""
    softcaps: tuple[float | None, float | None] = (None, None)
    """Soft-caps of attention scores and of logits where the file does not say."""
    eager: bool = False
    """transformers computes attention by plain operations unless it is told otherwise."""
    refused: tuple[str, ...] = ()
    """Keys that must not be set: nothing here counts what they add."""


_GPT_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}
_GPT = Decoder(True, True, True, gated=False, layernorm=True)
_GEMMA = Decoder("attention_bias", "attention_bias", tied=True, head_dim=256)
_GEMMA_2 = replace(_GEMMA, norms=4, window=4096, refused=("use_bidirectional_attention",))
_QWEN2, _QWEN3 = Decoder(query_bias=True), Decoder("attention_bias", "attention_bias", query_key_norm="head")
_OLMO2 = Decoder("attention_bias", "attention_bias", query_key_norm="full")
_DECODERS = {
    "llama": Decoder("attention_bias", "attention_bias", "mlp_bias"),
    "mistral": Decoder(window=4096),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA_2, pattern=2, softcaps=(50.0, 30.0), eager=True),
    "gemma3_text": replace(_GEMMA_2, query_key_norm="head", pattern=6),
    "phi": replace(_GPT, head_bias=True, norms=1, parallel_block=True, refused=("qk_layernorm",)),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, window=4096, pattern=4),
    "gpt2": replace(_GPT, tied=True, refused=("add_cross_attention",)),
    "gpt_neox": Decoder(
        "attention_bias", "attention_bias", True, gated=False, layernorm=True, parallel_block="use_parallel_residual"
    ),
    "mixtral": Decoder(),
    "qwen2_moe": _QWEN2,
    "qwen3_moe": _QWEN3,
}
"""By model_type. GPT-NeoX is the only one whose two keys are true where the file does not have them."""


def describe_decoder(model: HfModelConfig) -> CountedTransformer:
    """Return the shape of a decoder. Raises UserError, one line, for what the planner has no model of."""
    file = read_config_file(model)
    decoder = _DECODERS.get(file.model_type)
    if decoder is None or find_task(model, file) != "causal_lm":
        raise UserError(
            f"model.path={model.path}: the planner has no model of {file.family.name} of transformers for "
            f"{find_task(model, file)}, only of {', '.join(_DECODERS)}; {_YOURSELF}"
        )
    for key in (*decoder.refused, "mlp_only_layers"):
        if file.body.get(key):
            raise _refuse(file, key, file.body[key])
    if file.body.get("decoder_sparse_step", 1) != 1:
        raise _refuse(file, "decoder_sparse_step", file.body["decoder_sparse_step"])
    return _Reader(file, decoder, model.attention).describe(model.name)


def _refuse(file: ConfigFile, key: str, value: object) -> UserError:
    return UserError(f"{file.folder / 'config.json'}: {key}={value}: the planner has no model of it; {_YOURSELF}")


@dataclass(frozen=True)
class _Reader:
    """The configuration of one decoder."""

    file: ConfigFile
    decoder: Decoder
    attention: str
    """model.attention: what transformers computes attention with."""

    def describe(self, name: str) -> CountedTransformer:
        """Return the shape with its number of parameters."""
        hidden, heads, layers = self.get("hidden_size"), self.get("num_attention_heads"), self.get("num_hidden_layers")
        body, decoder, experts = self.file.body, self.decoder, self.read_experts()
        cap_scores, cap_logits = self.read_softcaps()
        window, global_every = self.read_windows(layers)
        stores_scores = self.attention == "eager" or (self.attention == "auto" and decoder.eager)
        return CountedTransformer(
            name=name,
            model_type=self.file.model_type,
            vocab_size=self.get("vocab_size"),
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=self.get("num_key_value_heads", heads),
            head_dim=self.read_head_dim(hidden, heads),
            feed_forward=self.get("intermediate_size", 4 * hidden),
            activation="swiglu" if decoder.gated else "gelu",
            norm="layernorm" if decoder.layernorm else "rmsnorm",
            positions="learned" if self.file.model_type == "gpt2" else "rotary",
            max_positions=self.file.max_positions or 2048,
            tied_embeddings=bool(body.get("tie_word_embeddings", decoder.tied)),
            query_key_norm=decoder.query_key_norm,
            post_norms=decoder.norms == 4,
            sliding_window=window,
            global_every=global_every,
            masks_windows=self.attention in ("auto", "sdpa") and not stores_scores,
            attention_softcap=cap_scores,
            logit_softcap=cap_logits,
            stores_scores=stores_scores,
            dropout=0.0 if self.file.find_dropout() is None else 0.1,
            experts=experts,
            parallel_block=self.flag(decoder.parallel_block),
            fused_attention_input=self.file.model_type in ("gpt2", "gpt_neox"),
            parameters=self.count(experts),
            shared_feed_forward=self.read_shared_width() if experts.count else 0,
        )

    def get(self, key: str, default: int | None = None) -> int:
        """Return a number of config.json. Raises UserError if it is not there and has no default."""
        keys = (key, _GPT_KEYS[key]) if key in _GPT_KEYS else (key,)
        value = self.file.get_number(*keys)
        value = default if value is None else value
        if value is None or value <= 0:
            raise UserError(
                f"{self.file.folder / 'config.json'}: has no number {key}, which the planner needs; save it again "
                "with transformers"
            )
        return value

    def flag(self, named: bool | str) -> bool:
        """Return whether a decoder has a part; of a text, the key of this name."""
        if isinstance(named, bool):
            return named
        return bool(self.file.body.get(named, self.file.model_type == "gpt_neox"))

    def read_head_dim(self, hidden: int, heads: int) -> int:
        """Return the width of a head."""
        return self.get("head_dim", self.decoder.head_dim or hidden // heads)

    def read_windows(self, layers: int) -> tuple[int | None, int]:
        """Return (window, after how many layers one has none; 0: all have it).

        Raises UserError for other patterns.
        """
        body = self.file.body
        window = self.file.get_number("sliding_window") if "sliding_window" in body else self.decoder.window
        has_window = self._list_windows(layers)
        if window is None or body.get("use_sliding_window") is False or not any(has_window):
            return None, 0
        period = 0 if all(has_window) else has_window.index(False) + 1
        if has_window != [not period or (layer + 1) % period > 0 for layer in range(layers)]:
            raise _refuse(self.file, "layer_types", "windows in another order than all but every n-th layer")
        return window, period

    def _list_windows(self, layers: int) -> list[bool]:
        """Return which layers have a window: those that the file lists, else as the family has them."""
        kinds = self.file.body.get("layer_types")
        if isinstance(kinds, list):
            return [kind == "sliding_attention" for kind in kinds]
        if self.file.body.get("use_sliding_window"):  # Qwen
            first = self.file.get_number("max_window_layers")
            return [layer >= (28 if first is None else first) for layer in range(layers)]
        pattern = self.file.get_number("sliding_window_pattern") or self.decoder.pattern
        return [pattern == 1 or (layer + 1) % pattern > 0 for layer in range(layers)]

    def read_softcaps(self) -> tuple[float | None, float | None]:
        """Return the soft-caps of attention scores and of logits."""
        keys = ("attn_logit_softcapping", "final_logit_softcapping")
        values = (self.file.body.get(key, default) for key, default in zip(keys, self.decoder.softcaps, strict=True))
        scores, logits = (float(value) if isinstance(value, (int, float)) else None for value in values)
        return scores, logits

    def read_experts(self) -> ExpertsConfig:
        """Return the mixture of a layer; shared experts are counted in units of the routed experts' width."""
        count = self.file.get_number("num_experts", "num_local_experts")
        if self.file.model_type not in ("mixtral", "qwen2_moe", "qwen3_moe") or count is None:
            return ExpertsConfig()
        width = self.get("moe_intermediate_size", self.get("intermediate_size"))
        shared = -(-self.read_shared_width() // width)
        return ExpertsConfig(count=count, top_k=self.get("num_experts_per_tok"), feed_forward=width, shared=shared)

    def read_shared_width(self) -> int:
        """Return the width of the shared expert; 0: there is none."""
        if self.file.model_type != "qwen2_moe":
            return 0
        return self.file.get_number("shared_expert_intermediate_size") or 0

    def count(self, experts: ExpertsConfig) -> int:
        """Count the parameters; a tied table once."""
        hidden, heads, vocab = self.get("hidden_size"), self.get("num_attention_heads"), self.get("vocab_size")
        norm = hidden * (2 if self.decoder.layernorm else 1)
        layer = self._count_attention(hidden, heads) + self._count_feed_forward(hidden, experts)
        total = self.get("num_hidden_layers") * (layer + self.decoder.norms * norm) + norm + vocab * hidden
        if self.file.model_type == "gpt2":
            total += (self.file.max_positions or 0) * hidden
        if not self.file.body.get("tie_word_embeddings", self.decoder.tied):
            total += vocab * hidden
        return total + (vocab if self.decoder.head_bias else 0)

    def _count_attention(self, hidden: int, heads: int) -> int:
        keys, width = self.get("num_key_value_heads", heads), self.read_head_dim(hidden, heads)
        projected = (heads + 2 * keys) * width
        numbers = hidden * projected + heads * width * hidden
        numbers += projected if self.flag(self.decoder.query_bias) else 0
        numbers += hidden if self.flag(self.decoder.output_bias) else 0
        return numbers + {"none": 0, "head": 2, "full": heads + keys}[self.decoder.query_key_norm] * width

    def _count_feed_forward(self, hidden: int, experts: ExpertsConfig) -> int:
        branches, width = (3 if self.decoder.gated else 2), self.get("intermediate_size", 4 * hidden)
        if experts.count:
            numbers = hidden * experts.count * (1 + 3 * (experts.feed_forward or width))
            shared = self.file.get_number("shared_expert_intermediate_size") or 0
            return numbers + (hidden * (3 * shared + 1) if self.file.model_type == "qwen2_moe" else 0)
        bias = width * (branches - 1) + hidden if self.flag(self.decoder.feed_forward_bias) else 0
        return branches * hidden * width + bias


def list_unsplit(model: HfModelConfig) -> dict[str, tuple[float, ...]]:
    """Return the columns of a search that the family fixes: axes that it cannot be split over, by name."""
    family = read_config_file(model).family
    splits = {"tp": family.tensor, "pp": family.pipeline, "cp": family.context}
    fixed: dict[str, tuple[float, ...]] = {axis: (1.0,) for axis, why in splits.items() if why is not None}
    # The library's layers have no products in a ring, and keep all experts on each rank.
    return fixed | {"overlap_tensor": (0.0,), "ep": (1.0,)}
