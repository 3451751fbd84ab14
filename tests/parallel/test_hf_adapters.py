"""LoRA, DoRA and QLoRA over models of transformers, in every layout, against transformers with PEFT in one process."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from drawn import draw
from hf_models import (
    EXACT,
    EXTRA,
    MAX_NORM,
    RATES,
    STEPS,
    TEXT,
    Case,
    auto_class,
    fresh,
    global_batch,
    run_steps,
    save_model,
)
from outcome import Array, Arrays, Outcome, assert_close, whole
from test_hf_models import LAYOUTS, allows
from torch import nn

from hpc_train.checkpoint import load_step, save_step
from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.models.adapters.adapted_linear import list_nf4_layers
from hpc_train.models.adapters.nf4 import expand, import_bitsandbytes, quantize
from hpc_train.models.hf.adapter import find_block_names
from hpc_train.models.hf.build import build_hf_model
from hpc_train.models.initial_values import Normal, draw_values
from hpc_train.parallel.adapters import find_target_layers
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

ADAPTERS = {
    "lora": ("adapter=lora", "adapter.rank=3", "adapter.alpha=7"),
    "dora": ("adapter=dora", "adapter.rank=2"),
    "qlora": ("adapter=qlora", "adapter.rank=3", "adapter.alpha=7"),
    "qdora": ("adapter=qlora", "adapter.kind=dora", "adapter.rank=2"),
}
KINDS = (
    "gpt2", "llama", "qwen2", "gemma2", "gemma3", "phi", "olmo2", "gpt_neox", "mixtral", "bert", "t5", "vit",
    "qwen2_moe", "bloom", "falcon", "phi3", "glm4", "gpt_oss", "bart", "falcon-one-key",
)  # fmt: skip
WIDE = {**TEXT, "hidden_size": 128, "intermediate_size": 256}
"""Sizes that NF4 can keep in blocks of 64 numbers, also in two parts."""
PLACES = ("one", "fsdp-2", "tp-2", "pp-2")
OF_LINEARS = [
    f"{kind} {place} {how}" for kind in KINDS for place in PLACES if allows(kind, place) for how in ("lora", "dora")
]
OF_NF4 = [
    f"{kind} {place} {how}"
    for kind in ("llama", "bert")  # all of BERT's code computes in float64
    for place in (*PLACES, "ddp-2", "hsdp-2x2", "recompute", "fsdp-2-tp-2", "cp-2")
    if allows(kind, place)
    for how in ("qlora", "qdora")
]
DRAWN = (
    "gemma2 fsdp-2 lora",
    "phi tp-2 dora",
    "gpt_neox pp-2 lora",
    "llama tp-2 qlora",
)


WIDE_BERT = {key: value for key, value in WIDE.items() if key != "num_key_value_heads"}


def save_wide(kind: str, folder: Path) -> Path:
    """A model whose layers NF4 can keep."""
    config = transformers.LlamaConfig(**WIDE)
    if kind == "bert":
        config = transformers.BertConfig(**WIDE_BERT, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        auto_class(kind).from_config(config).save_pretrained(folder)
    return folder


class Folders:
    """The folder of each kind, made once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory, self._made = factory, dict[tuple[str, bool], Path]()

    def get(self, kind: str, wide: bool) -> Path:
        if (kind, wide) not in self._made:
            place = self._factory.mktemp(kind)
            self._made[kind, wide] = save_wide(kind, place) if wide else save_model(kind, place)
        return self._made[kind, wide]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


def name_targets(case: Case) -> list[str]:
    """The layers that our run adapts."""
    config = case.config()
    with torch.device("meta"):
        model = build_hf_model(config.model)  # type: ignore[arg-type]
    return list(find_target_layers(model, config.adapter.targets))


def make_peft_model(case: Case) -> nn.Module:
    """The library's model in PEFT's hands, with our initial A; weights that we keep in NF4 are rounded to it."""
    config = case.config()
    how = {"experts_implementation": "eager"} if case.kind in EXTRA else {}
    model = auto_class(case.kind).from_pretrained(case.folder, dtype=torch.float64, **how).train()
    names = name_targets(case)
    if config.adapter.base == "nf4":
        import_bitsandbytes()
        for layer in list_nf4_layers(model, find_block_names(model)).values():
            layer.weight.data.copy_(expand(*quantize(layer.weight.data), torch.float64))
    settings = peft.LoraConfig(
        r=config.adapter.rank,
        lora_alpha=config.adapter.alpha,  # type: ignore[arg-type]
        target_modules=names,
        use_dora=config.adapter.kind == "dora",
    )
    theirs = peft.get_peft_model(model, settings)
    for name in names:
        layer = theirs.base_model.model.get_submodule(name)
        a = layer.lora_A.default.weight
        rule = Normal(0.0, 1 / math.sqrt(3 * a.shape[1]))
        ours = a.t() if type(layer.base_layer).__name__ == "Conv1D" else a
        shape = tuple(ours.shape)
        ours.data.copy_(draw_values(rule, config.train.seed, f"{name}.lora_a", shape, (0, 0), shape))
    return theirs


def list_trained(theirs: nn.Module) -> dict[str, nn.Parameter]:
    """PEFT's trained parameters by our names."""
    ours = {"lora_A.default.weight": "lora_a", "lora_B.default.weight": "lora_b"}
    ours["lora_magnitude_vector.default.weight"] = "lora_magnitude"
    found = {}
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            end = next(end for end in ours if name.endswith(f".{end}"))
            found[name.removeprefix("base_model.model.").removesuffix(end) + ours[end]] = parameter
    return found


def list_transposed(theirs: nn.Module) -> set[str]:
    """Our names of A and B whose layer has its weight as (inputs, outputs)."""
    layers = [name for name, module in theirs.named_modules() if type(module).__name__ == "Conv1D"]
    ours = [name.removeprefix("base_model.model.").removesuffix(".base_layer") for name in layers]
    return {f"{layer}.{leaf}" for layer in ours for leaf in ("lora_a", "lora_b")}


def train_with_peft(case: Case) -> tuple[list[float], list[float], list[Arrays], Arrays]:
    """Losses, norms, gradients and adapters after the steps, by PEFT and plain autograd."""
    theirs = make_peft_model(case)
    trained, transposed = list_trained(theirs), list_transposed(theirs)

    def to_arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
        return {name: to_array(one.t() if name in transposed else one) for name, one in tensors.items()}

    starts = {name: p.detach().clone() for name, p in trained.items() if name.endswith("magnitude")}
    optimizer = make_optimizer(theirs, case.config().optim)
    losses, norms, gradients = [], [], []
    for step in STEPS:
        batch = global_batch(case.kind, step)
        inputs = batch.inputs
        out = theirs(**inputs) if isinstance(inputs, dict) else theirs(inputs)
        loss = nn.functional.cross_entropy(
            out.logits.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORED_TARGET
        )
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append(to_arrays({name: p.grad for name, p in trained.items() if p.grad is not None}))
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)))
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
    return losses, norms, gradients, to_arrays({name: p - starts.get(name, 0.0) for name, p in trained.items()})


def to_array(tensor: torch.Tensor) -> Array:
    return tensor.detach().cpu().numpy().copy()


def train_and_save(world: World, case: Case, own: Path) -> Outcome:
    engine = fresh(case, world)
    outcome = run_steps(engine, case, world, STEPS)
    save_step(own, len(STEPS), engine.shards(), {}, world).wait()
    return outcome


def resume(world: World, case: Case, saved: Path) -> Outcome:
    """The state that another layout has saved, and a step from there."""
    engine = fresh(case, world)
    load_step(saved, len(STEPS), engine.shards(), world)
    return run_steps(engine, case, world, (len(STEPS),))


@pytest.mark.parametrize("name", draw([*OF_LINEARS, *OF_NF4], DRAWN))
def test_adapters_on_transformers(name: str, tmp_path: Path, folders: Folders) -> None:
    kind, place, how = name.split()
    ranks, layout = LAYOUTS[place]
    case = Case(kind, folders.get(kind, how.startswith("q")), ranks, (*layout, *ADAPTERS[how]))
    losses, norms, gradients, after = train_with_peft(case)
    outcomes = run_ranks(train_and_save, ranks, case, tmp_path, parallel=case.config().parallel)
    allowed = 1e-10 if kind in EXACT else 1e-4  # AdamW's first steps enlarge what float32 rounds of small gradients
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.losses, losses, rtol=allowed)
        np.testing.assert_allclose(outcome.norms, norms, rtol=allowed)
    for step, wanted in enumerate(gradients):
        assert_close(whole([outcome.gradients[step] for outcome in outcomes]), wanted, allowed)
    state = whole([outcome.state for outcome in outcomes])
    assert_close({key: state[key] for key in after}, after, allowed)
    if how.startswith("q"):  # of the base, nothing is saved
        assert not [key for key in state if not key.startswith("optim.") and key not in after]


def test_nf4_goes_on_in_another_layout(tmp_path: Path, folders: Folders) -> None:
    folder = folders.get("llama", True)
    one, fsdp = (Case("llama", folder, *LAYOUTS[place]) for place in ("one", "fsdp-2"))
    one, fsdp = (Case("llama", folder, c.ranks, (*c.overrides, *ADAPTERS["qlora"])) for c in (one, fsdp))
    run_ranks(train_and_save, 2, fsdp, tmp_path, parallel=fsdp.config().parallel)
    (wanted,) = run_ranks(resume, 1, one, tmp_path)
    got = run_ranks(resume, 2, fsdp, tmp_path, parallel=fsdp.config().parallel)
    np.testing.assert_allclose(got[0].losses, wanted.losses, rtol=1e-5)
    assert_close(whole([outcome.state for outcome in got]), whole([wanted.state]), 1e-5)


def refuse(*words: str, ranks: int = 1) -> str:
    with pytest.raises(UserError) as raised:
        check_support(compose([*words, "adapter=qlora"]), ranks)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_nf4_refuses(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, small = folders.get("llama", True), save_model("llama", tmp_path / "scratch", weights=False)
    hf = ("model=hf", f"model.path={folder}", "train.sequence_length=16")
    assert "model=llama_tiny has none; use model=hf" in refuse("model=llama_tiny")
    assert "is trained from scratch here" in refuse("model=hf", f"model.path={small}", "train.sequence_length=16")
    assert "is trained from scratch here" in refuse(*hf, "model.weights=draw")
    assert "parallel.offload.parameters" in refuse(*hf, "parallel=fsdp", "parallel.offload.parameters=cpu", ranks=2)
    assert "parallel.compile" in refuse(*hf, "parallel.compile=true")
    assert "adapter.path starts LoRA only" in refuse(*hf, "adapter.kind=dora", "adapter.path=x")
    narrow = tmp_path / "narrow"
    config = transformers.LlamaConfig(**{**TEXT, "hidden_size": 64})
    transformers.LlamaForCausalLM(config).save_pretrained(narrow)
    words = ("model=hf", f"model.path={narrow}", "train.sequence_length=16", "parallel.tp=2")
    assert "parallel.tp=2 would split blocks of 64 numbers in hidden_size=64" in refuse(*words, ranks=2)
    monkeypatch.setattr("hpc_train.parallel.rules.adapter.find_spec", lambda name: None)
    assert "pip install 'hpc_train[qlora]'" in refuse(*hf)
