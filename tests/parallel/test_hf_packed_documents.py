"""Packed documents are exactly the documents alone for the decoders of transformers, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from drawn import draw
from hf_models import CONFIGS, EXTRA, TEXT, VOCABULARY, auto_class, save_model
from test_hf_models import FAMILY_OF, tolerance
from test_packed_documents import list_pieces, open_packed
from torch import nn

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.checks.model_and_data import check_model_and_data
from hpc_train.models.hf.adapter import HfModel, adapt_model
from hpc_train.models.hf.families import find_family

FAMILIES = {kind: find_family(FAMILY_OF.get(kind, kind)) for kind in CONFIGS}
DECODERS = [kind for kind, family in FAMILIES.items() if family.task == "causal_lm" and family.packs]
SAMPLES = range(8)


def load(kind: str, folder: Path) -> HfModel:
    how = {"experts_implementation": "eager"} if kind in EXTRA else {}
    module: nn.Module = auto_class(kind).from_pretrained(folder, dtype=torch.float64, **how).train()
    return adapt_model(module, FAMILIES[kind], "causal_lm")


@pytest.mark.parametrize("kind", draw(DECODERS, ("mistral-window", "gemma3", "gpt2")))
def test_loss_and_gradients_are_those_of_the_documents_alone(kind: str, tmp_path: Path) -> None:
    data = open_packed()
    assert data.vocab_size <= VOCABULARY
    folder = save_model(kind, tmp_path)
    packed, alone = load(kind, folder), load(kind, folder)
    inputs, targets = data.get(np.array(SAMPLES))
    loss = packed.loss_sum(packed(**inputs), targets)
    loss.backward()
    total = 0.0
    for piece in list_pieces(data, SAMPLES):
        tokens = torch.from_numpy(piece.astype(np.int64))[None]
        own = alone.loss_sum(alone(tokens[:, :-1]), tokens[:, 1:])
        own.backward()
        total += own.item()
    assert loss.item() == pytest.approx(total, rel=tolerance(kind))
    norm = max(float(p.grad.norm()) for p in alone.parameters() if p.grad is not None)
    for (name, got), wanted in zip(packed.named_parameters(), alone.parameters(), strict=True):
        if wanted.grad is not None:
            assert got.grad is not None
            assert float((got.grad - wanted.grad).norm()) < tolerance(kind) * norm, name
    with torch.no_grad():
        assert abs(float(packed.loss_sum(packed(inputs["x"]), targets)) - total) > 1e-3, "without the boundaries"


def test_what_may_not_keep_documents_apart_is_refused(tmp_path: Path) -> None:
    base = ("model=hf", "data=tokens", "data.path=some.npy", "data.samples=packed")

    def refuse(*words: str) -> str:
        with pytest.raises(UserError, match=r"^data\.samples=packed: ") as raised:
            check_model_and_data(compose([*base, f"model.path={tmp_path}", *words]))
        return str(raised.value)

    save_model("llama", tmp_path, weights=False)
    check_model_and_data(compose([*base, f"model.path={tmp_path}"]))
    flash = ("model.attention=flash_attention_2", "train.micro_batch=2")
    assert "keeps documents apart in single sequences only; use train.micro_batch=1" in refuse(*flash)
    assert "not with parallel.pp=2" in refuse("parallel.pp=2")
    save_model("opt", tmp_path, weights=False)
    assert "OPT of transformers does not keep documents apart; use data.samples=padded" in refuse()
    config = transformers.DiffLlamaConfig(**TEXT)
    config.architectures = ["DiffLlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    assert "nobody has compared its numbers for diffllama of transformers; use data.samples=padded" in refuse()
