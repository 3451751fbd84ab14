"""Models of transformers train in every layout as in a plain loop over transformers alone, and resume in any other."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from drawn import draw
from hf_models import (
    BART,
    CONFIGS,
    EXACT,
    GPT,
    IMAGES,
    STRANGERS,
    TEXT,
    Case,
    resume,
    save_model,
    train_and_save,
    truth,
)
from outcome import Outcome, assert_close, whole

from hpc_train.config.model import HfModelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.models.hf.build import build_hf_model
from hpc_train.models.hf.families import FAMILIES, find_family, format_family_table
from hpc_train.models.hf.translated_plan import make_tensor_plan
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks

PP = ("parallel=ddp", "parallel.pp=2", "parallel.pipeline.schedule=1f1b")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "ddp-2": (2, ("parallel=ddp",)),
    "fsdp-2": (2, ("parallel=fsdp",)),
    "zero1-2": (2, ("parallel=zero1",)),
    "hsdp-2x2": (4, ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2")),
    "recompute": (2, ("parallel=fsdp", "parallel.recompute.mode=full")),
    "tp-2": (2, ("parallel.tp=2",)),
    "tp-2-whole-vocabulary": (2, ("parallel.tp=2", "parallel.tensor.vocabulary=false")),
    "fsdp-2-tp-2": (4, ("parallel=fsdp", "parallel.tp=2")),
    "pp-2": (2, PP),
    "pp-2-tp-2": (4, (*PP, "parallel.tp=2")),
    "cp-2": (2, ("parallel.cp=2",)),
    "cp-2-ulysses": (2, ("parallel.cp=2", "parallel.context.method=ulysses")),
    "fsdp-2-cp-2": (4, ("parallel=fsdp", "parallel.cp=2")),
}
FAMILY_OF = {
    "mistral-window": "mistral",
    "gemma3": "gemma3_text",
    "falcon-alibi": "falcon",
    "falcon-one-key": "falcon",
    "gpt_bigcode-heads": "gpt_bigcode",
    "phi-norms": "phi",
    "cohere-norms": "cohere",
    "glm4_moe-norms": "glm4_moe",
}
"""Kinds of the tests whose name is not the model type."""


def allows(kind: str, layout: str) -> bool:
    """Whether the table says that this family can be split so."""
    family = find_family(FAMILY_OF.get(kind, kind))
    reasons = {"tp": family.tensor, "pp": family.pipeline, "cp": family.context}
    if kind == "mistral-window" and "cp" in layout:
        return False
    return all(why is None for axis, why in reasons.items() if axis in layout)


CASES = [f"{kind} {layout}" for kind in CONFIGS for layout in LAYOUTS if allows(kind, layout)]
DRAWN = ("gpt2 tp-2", "qwen3 pp-2", "gemma3 cp-2", "olmo2 recompute", "vit ddp-2", "t5 tp-2", "deepseek_v2 tp-2")


class Models:
    """The folder of each kind, what transformers alone makes of it, and what one process saves; each made once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._folders: dict[str, Path] = {}
        self._known: dict[str, tuple[Outcome, Outcome]] = {}
        self._saved: dict[str, Path] = {}

    def folder(self, kind: str) -> Path:
        if kind not in self._folders:
            self._folders[kind] = save_model(kind, self._factory.mktemp(kind))
        return self._folders[kind]

    def known(self, kind: str) -> tuple[Outcome, Outcome]:
        if kind not in self._known:
            self._known[kind] = truth(kind, self.folder(kind))
        return self._known[kind]

    def saved(self, kind: str) -> Path:
        """Step 2 of a layout that no case has."""
        if kind not in self._saved:
            case = Case(kind, self.folder(kind), 2, ("parallel.strategy=zero2",))
            path = self._factory.mktemp(f"{kind}-saved")
            run_ranks(train_and_save, 2, case, path, parallel=case.config().parallel)
            self._saved[kind] = path
        return self._saved[kind]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory)


def tolerance(kind: str) -> float:
    """Layouts sum in another order; where the code casts to float32, that may round a number the other way."""
    return 1e-10 if kind in EXACT else 1e-5


def train_and_resume(world: World, case: Case, own: Path, other: Path) -> tuple[Outcome, Outcome]:
    """Train the two steps and save them; then the step after the second, from another layout's checkpoint."""
    return train_and_save(world, case, own), resume(world, case, other)


@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_layout(name: str, tmp_path: Path, models: Models) -> None:
    kind, layout = name.split()
    ranks, overrides = LAYOUTS[layout]
    case = Case(kind, models.folder(kind), ranks, overrides)
    steps, after = models.known(kind)
    outcomes = run_ranks(train_and_resume, ranks, case, tmp_path, models.saved(kind), parallel=case.config().parallel)
    _compare([trained for trained, _ in outcomes], steps, tolerance(kind))
    _compare([resumed for _, resumed in outcomes], after, tolerance(kind))


@pytest.mark.parametrize("kind", draw(STRANGERS, ("albert", "mamba2")))
def test_a_family_that_nobody_listed(kind: str, tmp_path: Path, models: Models) -> None:
    steps, _ = models.known(kind)
    case = Case(kind, models.folder(kind), 2, ("parallel=fsdp",))
    check_support(case.config(), 2)
    _compare(run_ranks(train_and_save, 2, case, tmp_path, parallel=case.config().parallel), steps, tolerance(kind))
    with pytest.raises(UserError, match=r"parallel\.tp=2: not for .*; use parallel=fsdp"):
        check_support(Case(kind, models.folder(kind), 2, ("parallel.tp=2",)).config(), 2)


def test_a_family_whose_code_cannot_compute_in_float64_is_refused(tmp_path: Path) -> None:
    config = transformers.XGLMConfig(vocab_size=48, d_model=32, ffn_dim=40, num_layers=2, attention_heads=4, dropout=0)
    config.architectures = ["XGLMForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="precision=fp64: the code of xglm in transformers cannot compute in float64"):
        check_support(Case("xglm", tmp_path, 2).config(), 2)
    check_support(Case("xglm", tmp_path, 2, ("precision=fp32",)).config(), 2)


def _compare(outcomes: list[Outcome], wanted: Outcome, allowed: float) -> None:
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.losses, wanted.losses, rtol=allowed)
        np.testing.assert_allclose(outcome.norms, wanted.norms, rtol=allowed)
    for step in range(len(wanted.gradients)):
        got = whole([outcome.gradients[step] for outcome in outcomes])
        assert_close(got, whole([wanted.gradients[step]]), allowed)
    assert_close(whole([outcome.state for outcome in outcomes]), whole([wanted.state]), allowed)


REFUSED = {
    "experts": (
        transformers.MixtralConfig(**TEXT, num_local_experts=3),
        r"^parallel\.tp=2: does not divide num_experts=3 of ",
    ),
    "one key head for all": (
        transformers.Phi3Config(**{**TEXT, "num_key_value_heads": 1}, pad_token_id=0),
        r"^parallel\.tp=2: does not divide num_key_value_heads=1 of ",
    ),
    "layers of an encoder": (
        transformers.BartConfig(**{**BART, "encoder_ffn_dim": 41}),
        r"^parallel\.tp=2: does not divide encoder_ffn_dim=41 of ",
    ),
    "groups of heads": (
        transformers.CodeGenConfig(**{**GPT, "n_head": 6, "n_embd": 36}),
        r"^parallel\.tp=3: not for CodeGen of transformers, which has its heads in 4 groups; use a divisor of 4, or ",
    ),
    "norms of single heads": (
        transformers.StableLmConfig(**TEXT, qk_layernorm=True),
        r"^parallel\.tp=2: not for StableLM of transformers with qk_layernorm=True in its config\.json; use parallel=",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_tp_cannot_split_are_one_line_before_any_rank(name: str, tmp_path: Path) -> None:
    config, line = REFUSED[name]
    config.save_pretrained(tmp_path)
    task = "seq2seq_lm" if config.is_encoder_decoder else "causal_lm"
    ranks = 3 if "tp=3" in line else 2
    with pytest.raises(UserError, match=line):
        check_support(Case("refused", tmp_path, ranks, (f"parallel.tp={ranks}", f"model.task={task}")).config(), ranks)


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        (transformers.PhiConfig(**TEXT, qk_layernorm=True), {"q_layernorm": "heads", "k_layernorm": "heads"}),
        (transformers.CohereConfig(**TEXT, use_qk_norm=True), {"q_norm": "heads", "k_norm": "heads"}),
        (transformers.OlmoeConfig(**TEXT), {"q_norm": "all_heads", "k_norm": "all_heads"}),
        (transformers.PhiConfig(**TEXT), {}),
    ],
    ids=["phi", "cohere", "olmoe", "phi-plain"],
)
def test_norms_of_queries_and_keys_are_in_the_tensor_plan(
    config: transformers.PreTrainedConfig, lines: dict[str, str]
) -> None:
    """Where a plan left them out, each rank would have its own heads' part of their gradient."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    family = find_family(config.model_type)
    without_norms = tuple(line for line in family.projections if "norm" not in line[0])
    plan = make_tensor_plan(model, dataclasses.replace(family, projections=without_norms))
    found = {glob.rpartition(".")[2]: how for glob, how in plan.items() if "norm" in glob}
    assert found == lines


@pytest.mark.parametrize("kind", ["bloom", "gpt2", "opt"])
def test_stages_of_a_pipeline_plan_of_ours_are_the_whole_model(kind: str, models: Models) -> None:
    """Embeddings of positions, norms of embeddings and layers that return tuples are skipped in the other stages."""
    model = build_hf_model(HfModelConfig(path=str(models.folder(kind))))
    tokens = torch.arange(12).view(2, 6)
    hidden = tokens
    for names in (model.block_names[:1], model.block_names[1:]):
        part = model.stage(names).to_empty(device="cpu")
        for name, parameter in part.named_parameters():
            parameter.data.copy_(model.get_parameter(name).data)
        hidden = part(hidden)
    torch.testing.assert_close(hidden, model(tokens))


def test_constants_of_activations_have_their_values_on_the_meta_device(tmp_path: Path) -> None:
    config = transformers.ApertusConfig(**TEXT)
    config.architectures = ["ApertusForCausalLM"]
    config.save_pretrained(tmp_path)
    built = build_hf_model(HfModelConfig(path=str(tmp_path)))
    with torch.device("meta"):
        empty = build_hf_model(HfModelConfig(path=str(tmp_path)))
    constants = {name: buffer for name, buffer in empty.named_buffers() if ".act_fn." in name}
    assert len(constants) == 8
    for name, buffer in built.named_buffers():
        assert name not in constants or constants[name].equal(buffer)


def test_the_page_has_the_table_of_families() -> None:
    page = (Path(__file__).parents[2] / "docs/transformers_models.md").read_text()
    assert "".join(re.findall(r"^\|.*\n", page, re.MULTILINE)) == format_family_table()


def test_every_family_of_the_table_is_in_the_matrix() -> None:
    tested = {FAMILY_OF.get(kind, kind) for kind in CONFIGS}
    assert {family.model_type for family in FAMILIES} == tested
    assert {kind for kind in CONFIGS if kind in IMAGES} == {
        family.model_type for family in FAMILIES if family.task == "image_classification"
    }


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in CONFIGS for layout in ("tp-2", "pp-2", "cp-2") if not allows(kind, layout)],
)
def test_what_the_table_says_no_to_is_one_line_before_any_rank(kind: str, layout: str, models: Models) -> None:
    ranks, overrides = LAYOUTS[layout]
    with pytest.raises(UserError) as raised:
        check_support(Case(kind, models.folder(kind), ranks, overrides).config(), ranks)
    text = str(raised.value)
    assert text.startswith(f"parallel.{layout[:2]}=2: ")
    assert text.endswith("use parallel=fsdp, hsdp, zero1, zero2 or ddp, which take every model")
    assert "\n" not in text
