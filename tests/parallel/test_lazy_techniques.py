"""A step imports the techniques it uses and no others."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import hpc_train.parallel

ALWAYS = {
    "apply",
    "attention_backend",  # says which kernels the layers use
    "dropout",  # looks for dropout layers in every model
    "engines.plain_engine",
    "engines.updating_engine",
    "loss",
    "materialise",
    "mesh_axes",
    "metrics",  # what evaluations add up
    "optimizer_step",
    "optimizers.parameter_groups",  # what is decayed
    "precision.number_formats",
    "user_model",
}
BATCH_NORM = "data_parallel.batch_norm"
"""On several data-parallel ranks it warns of layers whose statistics depend on the layout."""
USED = {
    ("ddp-2", ()): {"data_parallel.ddp", BATCH_NORM},
    ("zero3-2", ()): {"data_parallel.fully_shard", "reduce_scatter", "optimizers.sharded", BATCH_NORM},
    ("zero3-2", ("parallel.recompute.mode=full", "parallel.offload.optimizer=cpu")): {
        "data_parallel.fully_shard",
        "reduce_scatter",
        "memory.copy_stream",
        "memory.recompute",
        "memory.parameter_offload",
        "optimizers.sharded",
        BATCH_NORM,
    },
    ("ddp-2", ("parallel.dp_replicate=1", "parallel.cp=2", "parallel.context.method=ulysses")): {
        "data_parallel.ddp",
        "context.context_parallel",
        "context.block_attention",
        "context.ulysses",
        "reduce_scatter",
    },
}

PROGRAM = """
import json, sys
import torch
import torch._dynamo  # imports nothing of ours, and each rank would import it by itself
from plain_setup import LAYOUTS, engine_of, global_batch, share
from hpc_train.testing import run_ranks

def train_step(world, config):
    engine = engine_of("untied", config, world)
    batch = global_batch("untied", 0)
    engine.forward_backward(share(type(batch)(*(tensor[:, :6] for tensor in batch)), world, "two"))
    engine.clip(1.0)
    engine.update(1e-2)
    list(engine.shards())
    return sorted(sys.modules)

torch.set_num_threads(1)
found = []
for layout, overrides in json.loads(sys.argv[1]):
    config = LAYOUTS[layout].config(*overrides)
    found.append(run_ranks(train_step, 2, config, parallel=config.parallel))
print(json.dumps(found))
"""


def _list_techniques() -> set[str]:
    """Every module of hpc_train.parallel but the rules, which need no torch and are asked about every config."""
    (folder,) = map(Path, hpc_train.parallel.__path__)
    paths = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py") if path.stem != "__init__"]
    return {".".join(path.parts) for path in paths if path.parts[0] != "rules"}


@cache
def _find_imports() -> list[list[list[str]]]:
    """What each rank of each case has imported after a step; one process, which imports none of it, forks them all."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(USED))]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr
    found: list[list[list[str]]] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(("layout", "overrides"), list(USED), ids=["ddp", "zero3", "recompute-offload", "ulysses"])
def test_a_step_imports_only_the_techniques_that_are_on(layout: str, overrides: tuple[str, ...]) -> None:
    techniques = _list_techniques()
    for modules in _find_imports()[list(USED).index((layout, overrides))]:
        imported = {name.removeprefix("hpc_train.parallel.") for name in modules} & techniques
        assert imported == ALWAYS | USED[layout, overrides]


def test_mpi_is_not_even_imported_unless_asked_for() -> None:
    assert not any("mpi4py" in modules for ranks in _find_imports() for modules in ranks)
