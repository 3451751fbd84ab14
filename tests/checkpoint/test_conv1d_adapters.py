"""Adapters on Conv1D, whose weight is transposed: to PEFT, from PEFT into shards, and merged, with equal logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapted_runs import compute_logits, save_adapted_run, start_from
from checkpoint_commands import Terminal
from drawn import draw

from hpc_train.checkpoint.convert.formats.safetensors_files import read_safetensors
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.adapters import attach_adapters
from hpc_train.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPT-2 of random weights in float64; one of its layers is square."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = transformers.GPT2Config(vocab_size=61, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    transformers.GPT2LMHeadModel(config).double().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def configure(folder: Path, *overrides: str) -> RunConfig:
    words = ["model=hf", f"model.path={folder}", "precision=fp64", "train.sequence_length=12", "adapter.rank=3"]
    words.append("adapter.targets=[c_attn,c_proj,c_fc]")
    return compose([*words, *overrides])


def load_base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.mark.parametrize("kind", draw(["lora", "dora"], ["dora"]))
def test_conv1d_has_the_logits_of_peft_both_ways(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    terminal, config = Terminal(capsys), configure(folder, f"adapter={kind}")
    ours = compute_logits(save_adapted_run(tmp_path / "run", load_base(folder), config))
    terminal.ok("export", tmp_path / "run", tmp_path / "adapter", "--adapter")
    theirs = peft.PeftModel.from_pretrained(load_base(folder), tmp_path / "adapter").double().eval()
    torch.testing.assert_close(compute_logits(theirs), ours, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(compute_logits(load_base(folder)), ours, atol=1e-2)
    names = read_safetensors(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len([name for name in names if name.endswith("lora_A.weight")]) == 8
    terminal.ok("export", tmp_path / "run", tmp_path / "merged", "--merged", "--format", "hf")
    torch.testing.assert_close(compute_logits(load_base(tmp_path / "merged")), ours, rtol=1e-10, atol=1e-10)
    theirs.save_pretrained(str(tmp_path / "again"))
    again = configure(folder, f"adapter={kind}", "parallel=fsdp", f"adapter.path={tmp_path}/again")
    for logits in run_ranks(start_from, 2, again, parallel=again.parallel):
        torch.testing.assert_close(torch.from_numpy(logits), ours, rtol=1e-10, atol=1e-10)


def test_a_rank_as_large_as_a_square_layer_is_refused(folder: Path) -> None:
    config = configure(folder, "adapter=lora", "adapter.rank=32")
    with pytest.raises(
        UserError, match=r"^adapter\.rank=32: transformer\.h\.0\.attn\.c_proj is no larger than that; use"
    ):
        attach_adapters(load_base(folder), config.adapter)
