"""Weights of transformers are read into each rank's shards: its memory peaks at them and about one tensor more."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
import transformers

from hpc_train.config.compose import compose
from hpc_train.interfaces import World
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.training.factory import make_deferred_model

MIB = 1 << 20
SLACK = 16 * MIB
"""For objects of Python, collectives, and pages of the mapped file."""
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 4}


def read_status(field: str) -> int:
    """A size in bytes from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def test_a_rank_needs_its_shards_and_one_tensor(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, vocab_size=2048, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    overrides = ["model=hf", f"model.path={tmp_path / 'model'}", "data=text", "parallel=fsdp"]
    run = compose([*overrides, "train.sequence_length=32", f"run_dir={tmp_path / 'run'}"])

    def measure(world: World) -> tuple[int, int, int, int]:
        model, values = make_deferred_model(run, world)
        whole, largest = (how(4 * one.numel() for one in model.parameters()) for how in (sum, max))
        ctypes.CDLL(None).malloc_trim(0)  # what this process has freed but not returned would be used again, unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        before = read_status("VmRSS")
        engine = build(model, lambda _: torch.optim.SGD([{"params": []}], lr=0.0), run, world, values=values)
        shards = sum(4 * shard.local.numel() for shard in engine.shards())
        return whole, largest, shards, read_status("VmHWM") - before

    for whole, largest, shards, peak in run_ranks(measure, 2, parallel=run.parallel):
        assert shards < 0.51 * whole
        assert shards - SLACK < peak < shards + largest + SLACK < 0.8 * whole
