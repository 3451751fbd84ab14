"""An adapter on a head that is tied to the embedding: to PEFT, from PEFT, merged and loaded, with equal logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import tokenizers
import torch
import transformers
from adapted_runs import compute_logits, save_adapted_run, start_from
from checkpoint_commands import Terminal

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.inference.load_model import load_model
from hpc_train.testing import RankFailure, run_ranks

SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS: dict[str, Any] = {
    "causal_lm": (transformers.LlamaConfig, transformers.AutoModelForCausalLM, "lm_head"),
    "masked_lm": (transformers.BertConfig, transformers.AutoModelForMaskedLM, "cls.predictions.decoder"),
}


def save_base(folder: Path, kind: str) -> Path:
    """A tied model of random weights in float64, with a tokenizer."""
    config, auto, _ = KINDS[kind]
    torch.manual_seed(2)
    auto.from_config(config(**SIZES, tie_word_embeddings=True)).double().save_pretrained(folder)
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="b").save_pretrained(folder)
    return folder


def configure(folder: Path, kind: str, *overrides: str) -> RunConfig:
    words = ["model=hf", f"model.path={folder}", "precision=fp64", "train.sequence_length=12", "data=text"]
    words += ["adapter.rank=3", f"adapter.targets=[{KINDS[kind][2]}]", f"data.tokenizer={folder}"]
    return compose([*words, *overrides])


def load(folder: Path, kind: str) -> Any:
    return KINDS[kind][1].from_pretrained(folder, dtype=torch.float64).eval()


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("how", ["lora", "dora"])
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_an_adapter_on_a_tied_head_changes_the_head_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    folder, terminal, kind = save_base(tmp_path / "base", "causal_lm"), Terminal(capsys), "causal_lm"
    config = configure(folder, kind, f"adapter={how}")
    ours = compute_logits(save_adapted_run(tmp_path / "run", load(folder, kind), config))
    assert not torch.allclose(compute_logits(load(folder, kind)), ours, atol=1e-2)
    terminal.ok("export", tmp_path / "run", tmp_path / "adapter", "--adapter")
    theirs = peft.PeftModel.from_pretrained(load(folder, kind), tmp_path / "adapter").double().eval()
    assert_close(compute_logits(theirs), ours)
    terminal.ok("export", tmp_path / "run", tmp_path / "merged", "--merged", "--format", "hf")
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False
    assert_close(compute_logits(load(tmp_path / "merged", kind)), ours)
    assert_close(compute_logits(load_model(str(tmp_path / "run"), None, torch.device("cpu")).model), ours)
    again = configure(folder, kind, f"adapter={how}", "parallel=fsdp", f"adapter.path={tmp_path}/adapter")
    if how == "dora":
        with pytest.raises(RankFailure, match=r"starts DoRA of lm_head, whose weight is tied to another layer's; use"):
            run_ranks(start_from, 2, again, parallel=again.parallel)
        return
    for logits in run_ranks(start_from, 2, again, parallel=again.parallel):
        assert_close(torch.from_numpy(logits), ours)


def test_a_merged_model_that_may_compute_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, terminal, kind = save_base(tmp_path / "base", "masked_lm"), Terminal(capsys), "masked_lm"
    config = configure(folder, kind, "adapter=lora", "model.mask_token=1")
    save_adapted_run(tmp_path / "run", load(folder, kind), config)
    words = ("export", tmp_path / "run", tmp_path / "merged", "--merged", "--format", "hf")
    assert "is shared with the embeddings, and a masked_lm" in terminal.refused(*words)
    assert not (tmp_path / "merged").exists()
    terminal.ok("export", tmp_path / "run", tmp_path / "adapter", "--adapter")
