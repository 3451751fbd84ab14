"""Tiny random models of transformers, a plain training loop for each, and the same steps in an engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from outcome import Outcome, gradients, held, state
from torch import Tensor, nn

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # read once, when the library is imported
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from hpc_train.checkpoint import load_step, save_step
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import IGNORED_TARGET, Engine, MicroBatch, StepBatch, World
from hpc_train.training.factory import make_engine, make_pretrained_model
from hpc_train.training.optimizer import make_optimizer

SEQUENCES, LENGTH, VOCABULARY = 8, 16, 48
STEPS = (0, 1)
RATES = (1e-2, 2e-2, 5e-3, 1e-2)
MAX_NORM = 0.05
COMMON = (
    "model=hf",
    "precision=fp64",
    f"train.global_batch={SEQUENCES}",
    f"train.sequence_length={LENGTH}",
    "train.micro_batch=2",
    f"optim.max_norm={MAX_NORM}",
    "optim.eps=1e-6",
)
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
EIGHT = {**TEXT, "head_dim": 8}
ENCODER = {
    **{key: value for key, value in TEXT.items() if key != "num_key_value_heads"},
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
}
ONE_KEY_EACH = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
    "resid_pdrop": 0,
    "embd_pdrop": 0,
    "attn_pdrop": 0,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    **{
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 40))
    },
    "max_position_embeddings": 64,
    "dropout": 0,
    "init_std": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MLA = {
    **{key: value for key, value in TEXT.items() if key != "num_key_value_heads"},
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
IMAGE = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
STRANGERS: dict[str, Callable[[], Any]] = {
    "albert": lambda: transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=16,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
    ),
    "convnext": lambda: transformers.ConvNextConfig(
        num_channels=1, patch_size=2, hidden_sizes=[8, 16], depths=[1, 2], num_stages=2, image_size=8, num_labels=10
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=8,
    ),
}
"""Families that the table does not list: with one layer for all, with layers in layers, and with an infinity in
config.json."""
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**TEXT, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**TEXT, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**TEXT, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**TEXT),
    "qwen3": lambda: transformers.Qwen3Config(**EIGHT),
    "gemma2": lambda: transformers.Gemma2Config(**EIGHT, sliding_window=5, query_pre_attn_scalar=24),
    "gemma3": lambda: transformers.Gemma3TextConfig(**EIGHT, sliding_window=32, query_pre_attn_scalar=24),
    "phi": lambda: transformers.PhiConfig(**TEXT),
    "olmo2": lambda: transformers.Olmo2Config(**TEXT),
    "olmo3": lambda: transformers.Olmo3Config(**TEXT, sliding_window=32),
    "olmo": lambda: transformers.OlmoConfig(**TEXT),
    "gemma": lambda: transformers.GemmaConfig(**EIGHT),
    "cohere": lambda: transformers.CohereConfig(**TEXT, logit_scale=0.3),
    "cohere2": lambda: transformers.Cohere2Config(**TEXT, sliding_window=32, logit_scale=0.3),
    "starcoder2": lambda: transformers.Starcoder2Config(
        **TEXT, embedding_dropout=0, residual_dropout=0, attention_dropout=0, sliding_window=None
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**TEXT, pad_token_id=0, no_rope_layer_interval=2),
    "exaone4": lambda: transformers.Exaone4Config(**EIGHT, sliding_window=32),
    "ministral": lambda: transformers.MinistralConfig(**EIGHT, sliding_window=32),
    "seed_oss": lambda: transformers.SeedOssConfig(**EIGHT, attention_dropout=0, residual_dropout=0),
    "arcee": lambda: transformers.ArceeConfig(**TEXT),
    "helium": lambda: transformers.HeliumConfig(**EIGHT),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**EIGHT),
    "granite": lambda: transformers.GraniteConfig(
        **TEXT, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.3
    ),
    "nemotron": lambda: transformers.NemotronConfig(**TEXT),
    "glm4": lambda: transformers.Glm4Config(**EIGHT, pad_token_id=0),
    "phi3": lambda: transformers.Phi3Config(**TEXT, pad_token_id=0),
    "gpt2": lambda: transformers.GPT2Config(**GPT),
    "glm": lambda: transformers.GlmConfig(**EIGHT, pad_token_id=0),
    "gpt_bigcode": lambda: transformers.GPTBigCodeConfig(**GPT),
    "gpt_bigcode-heads": lambda: transformers.GPTBigCodeConfig(**GPT, multi_query=False),
    "codegen": lambda: transformers.CodeGenConfig(**GPT, rotary_dim=4),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=4, max_seq_len=64, initializer_range=0.2
    ),
    "persimmon": lambda: transformers.PersimmonConfig(**ONE_KEY_EACH),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **EIGHT, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, rope_scaling=None
    ),
    "bart": lambda: transformers.BartConfig(**BART),
    "mbart": lambda: transformers.MBartConfig(**BART),
    "pegasus": lambda: transformers.PegasusConfig(**BART),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **{key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    ),
    "mixtral": lambda: transformers.MixtralConfig(**TEXT, num_local_experts=4),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **TEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **EIGHT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1]
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**MLA, topk_method="greedy", n_group=1, topk_group=1),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**MLA, n_group=2, topk_group=1),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **EIGHT, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1
    ),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
        **EIGHT, moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=1
    ),
    "dots1": lambda: transformers.Dots1Config(
        **EIGHT,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        sliding_window=32,
    ),
    "apertus": lambda: transformers.ApertusConfig(**TEXT),
    "ministral3": lambda: transformers.Ministral3Config(**EIGHT),
    "cwm": lambda: transformers.CwmConfig(**EIGHT, sliding_window=32),
    "gptj": lambda: transformers.GPTJConfig(**GPT, rotary_dim=4),
    "jais2": lambda: transformers.Jais2Config(**EIGHT),
    "phi-norms": lambda: transformers.PhiConfig(**TEXT, qk_layernorm=True),
    "hyperclovax": lambda: transformers.HyperCLOVAXConfig(**EIGHT),
    "granitemoe": lambda: transformers.GraniteMoeConfig(
        **TEXT, num_local_experts=4, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**TEXT, num_experts=4, num_experts_per_tok=2),
    "flex_olmo": lambda: transformers.FlexOlmoConfig(**TEXT, num_experts=4, num_experts_per_tok=2, pad_token_id=0),
    "granitemoeshared": lambda: transformers.GraniteMoeSharedConfig(
        **TEXT, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=24, logits_scaling=2.0
    ),
    "nanochat": lambda: transformers.NanoChatConfig(**TEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "stablelm": lambda: transformers.StableLmConfig(**TEXT),
    "roberta": lambda: transformers.RobertaConfig(**ENCODER),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**ENCODER),
    "modernbert": lambda: transformers.ModernBertConfig(
        **ONE_KEY_EACH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=8,
    ),
    "eurobert": lambda: transformers.EuroBertConfig(
        **TEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3
    ),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=32,
        hidden_dim=40,
        n_layers=3,
        n_heads=4,
        max_position_embeddings=64,
        dropout=0,
        attention_dropout=0,
        initializer_range=0.2,
    ),
    "cohere-norms": lambda: transformers.CohereConfig(**TEXT, use_qk_norm=True),
    "glm4_moe-norms": lambda: transformers.Glm4MoeConfig(
        **EIGHT,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        use_qk_norm=True,
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=4, n_head=4, initializer_range=0.2
    ),
    "falcon": lambda: transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-one-key": lambda: transformers.FalconConfig(**FALCON, bias=True),
    "falcon-alibi": lambda: transformers.FalconConfig(**FALCON, multi_query=False, alibi=True, bias=True),
    "bert": lambda: transformers.BertConfig(
        **{key: value for key, value in TEXT.items() if key != "num_key_value_heads"},
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0,
        init_std=0.2,
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=40,
        num_layers=3,
        num_heads=4,
        dropout_rate=0,
        decoder_start_token_id=0,
    ),
    "vit": lambda: transformers.ViTConfig(**IMAGE, num_labels=10),
    "dinov2": lambda: transformers.Dinov2Config(**IMAGE, num_labels=10),
    "clip": lambda: transformers.CLIPConfig(
        text_config={**TEXT, "num_hidden_layers": 1}, vision_config=IMAGE, num_labels=10, projection_dim=16
    ),
}
MIXTURES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "ernie4_5_moe",
    "dots1",
    "granitemoe",
    "olmoe",
    "gpt_oss",
    "flex_olmo",
    "granitemoeshared",
)
EXTRA = dict.fromkeys((*MIXTURES, "glm4_moe-norms"), ("model.experts=eager",))
"""transformers has no other products with experts in float64."""
IMAGES = ("vit", "dinov2", "clip", "convnext")
MASKED = ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "eurobert", "albert")
SEQ2SEQ = ("t5", "bart", "mbart", "pegasus")
EXACT = ("gpt2", "bart", "mbart", "pegasus", "bert", "roberta", "xlm-roberta", "opt", "distilbert", "albert", *IMAGES)
"""Families whose code computes in float64 throughout. The others cast norms or angles to float32."""


def auto_class(kind: str) -> Any:
    """Return the class of transformers that loads this kind."""
    masked = dict.fromkeys(MASKED, AutoModelForMaskedLM)
    other = {**masked, **dict.fromkeys(SEQ2SEQ, AutoModelForSeq2SeqLM)}
    return AutoModelForImageClassification if kind in IMAGES else other.get(kind, AutoModelForCausalLM)


def save_model(kind: str, folder: Path, weights: bool = True, **how: Any) -> Path:
    """Write the folder of a random model, as a user of transformers would."""
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        model = auto_class(kind).from_config({**CONFIGS, **STRANGERS}[kind]())
    if not weights:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
    else:
        model.save_pretrained(folder, **how)
    return folder


@dataclass(frozen=True)
class Case:
    """A kind of model, in its folder, in a layout."""

    kind: str
    folder: Path
    ranks: int
    overrides: tuple[str, ...] = ()

    def config(self) -> RunConfig:
        """Return the configuration: float64, with clipping at every step."""
        return compose((*COMMON, f"model.path={self.folder}", *EXTRA.get(self.kind, ()), *self.overrides))


@cache
def global_batch(kind: str, step: int) -> MicroBatch:
    """Return a step's whole batch, the same on every rank. Some targets are ignored, unevenly over the sequences."""
    generator = torch.Generator().manual_seed(step)
    if kind in IMAGES:
        images = torch.randn(SEQUENCES, 1, 8, 8, generator=generator, dtype=torch.float64)
        targets = torch.randint(10, (SEQUENCES,), generator=generator)
        targets[3::5] = IGNORED_TARGET
        return MicroBatch(images, targets)
    inputs, targets = torch.randint(VOCABULARY, (2, SEQUENCES, LENGTH), generator=generator)
    for row in range(SEQUENCES):
        targets[row, : LENGTH * row // SEQUENCES] = IGNORED_TARGET
    if kind in SEQ2SEQ:
        return MicroBatch({"input_ids": inputs[:, :9], "decoder_input_ids": inputs[:, 3:]}, targets[:, 3:])
    return MicroBatch(inputs, targets)


def share(kind: str, step: int, world: World, micro: int = 2) -> StepBatch:
    """Return this rank's part of a global batch, cut into micro-batches."""
    rows = SEQUENCES // world.dp_size
    batch = global_batch(kind, step)
    begin = world.dp_index * rows
    cuts = [slice(first, first + micro) for first in range(begin, begin + rows, micro)]
    return StepBatch([batch.map(lambda tensor, cut=cut: tensor[cut]) for cut in cuts], step=step)


def truth(kind: str, folder: Path) -> tuple[Outcome, Outcome]:
    """Train with transformers alone, in one process: from_pretrained, two steps of AdamW, and the one after them."""
    how = {"experts_implementation": "eager"} if kind.partition("-")[0] in MIXTURES else {}
    module = auto_class(kind).from_pretrained(folder, dtype=torch.float64, **how).train()
    if kind == "pegasus":  # its class freezes its positions, and from_pretrained forgets it
        for side in (module.model.encoder, module.model.decoder):
            side.embed_positions.requires_grad_(False)
    config = compose((*COMMON, "model.path=x"))
    optimizer = make_optimizer(module, config.optim)
    outcomes = []
    for steps in (STEPS, (len(STEPS),)):
        outcome = Outcome([], [], [], [])
        for step in steps:
            _plain_step(module, optimizer, kind, step, outcome)
        outcome.state = state_of(module, optimizer)
        outcomes.append(outcome)
    return outcomes[0], outcomes[1]


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters, each under one name, the buffers that are saved, and the optimizer state."""
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return [piece for piece in state(module, optimizer) if piece.name in names or piece.name.startswith("optim.")]


def _plain_step(module: nn.Module, optimizer: torch.optim.Optimizer, kind: str, step: int, outcome: Outcome) -> None:
    batch = global_batch(kind, step)
    inputs = batch.inputs
    logits: Tensor = (module(**inputs) if isinstance(inputs, dict) else module(inputs)).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORED_TARGET)
    optimizer.zero_grad()
    loss.backward()
    outcome.losses.append(loss.item())
    outcome.gradients.append(gradients(module))
    outcome.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
    for group in optimizer.param_groups:
        group["lr"] = RATES[step]
    optimizer.step()


def fresh(case: Case, world: World) -> Engine:
    """Return the engine of a case, with the folder's weights."""
    config = case.config()
    model, values = make_pretrained_model(config.model, config.train.seed)  # type: ignore[arg-type]
    return make_engine(config, world, model, values=values)


def run_steps(engine: Engine, case: Case, world: World, which: tuple[int, ...]) -> Outcome:
    """Train some steps and record everything observable."""
    outcome = Outcome([], [], [], [])
    for step in which:
        sums = engine.forward_backward(share(case.kind, step, world))
        outcome.losses.append(float(sums.loss) / sums.tokens)
        outcome.gradients.append([rectangle for part in engine.parts for rectangle in gradients(part)])
        outcome.norms.append(float(engine.clip(MAX_NORM)))
        assert engine.update(RATES[step])
    outcome.state = held(engine.shards())
    return outcome


def train_and_save(world: World, case: Case, own: Path) -> Outcome:
    """Train the two steps and save them into `own` for other layouts."""
    engine = fresh(case, world)
    trained = run_steps(engine, case, world, STEPS)
    save_step(own, len(STEPS), engine.shards(), {}, world).wait()
    return trained


def resume(world: World, case: Case, other: Path) -> Outcome:
    """Train the step after the second, from the checkpoint of another layout."""
    engine = fresh(case, world)
    load_step(other, len(STEPS), engine.shards(), world)
    return run_steps(engine, case, world, (len(STEPS),))
