"""Schedule-free AdamW evaluates and exports the average that the package's evaluation mode gives, and trains on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import draw
from matrix import RATES, STEPS, Case, fresh, global_batch, model, share, steps
from outcome import Arrays, held
from safetensors.torch import load_file
from schedulefree import AdamWScheduleFree
from torch import nn

from hpc_train.checkpoint import load_step, save_step
from hpc_train.cli.main import main
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.parallel.optimizers.schedule_free import ScheduleFreeAdamW
from hpc_train.testing import run_ranks

FREE = ("optim=schedule_free",)
LAST = len(STEPS)
CASES = {
    "ddp": Case(2, ("parallel=ddp", *FREE)),
    "zero1-tp-2": Case(4, ("parallel.strategy=zero1", "parallel.tp=2", *FREE)),
    "zero3": Case(2, ("parallel=fsdp", *FREE), micro=5),
    "zero3-4": Case(4, ("parallel=fsdp", *FREE), micro=2),
    "pp-2-zero2-tied": Case(4, ("parallel.strategy=zero2", "parallel.pp=2", *FREE), "tied"),
}


def _train_package(kind: str) -> tuple[Arrays, float]:
    """By the package alone, and not by its foreach functions: weights in evaluation mode, and their loss."""
    module, config = model(kind), Case(1, FREE, kind).config()
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": config.optim.weight_decay},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamWScheduleFree(
        groups, betas=(config.optim.betas[0], config.optim.betas[1]), eps=config.optim.eps, foreach=False
    )
    optimizer.train()
    for step in (*STEPS, LAST):
        _compute_loss(module, kind, step).backward()
        nn.utils.clip_grad_norm_(module.parameters(), config.optim.max_norm or 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()
    return {name: p.detach().numpy() for name, p in module.named_parameters()}, _compute_loss(module, kind, 9).item()


def _compute_loss(module: nn.Module, kind: str, step: int) -> torch.Tensor:
    batch = global_batch(kind, step)
    logits = module(batch.inputs).flatten(0, -2)
    return nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED_TARGET)


def _train(world: World, case: Case, folder: Path) -> float:
    """Two steps, an evaluation, a save, a third step, and the loss; resumed to the bit without the evaluation."""
    engine = fresh(case, world)
    steps(engine, case, world, STEPS)
    save_step(folder, LAST, engine.shards(), {}, world).wait()
    before = held(engine.shards())
    engine.evaluate(share(global_batch(case.kind, 9), world, case.micro))
    for one, other in zip(before, held(engine.shards()), strict=True):
        assert np.array_equal(one.local, other.local), f"{one.name}: an evaluation puts everything back"
    on = steps(engine, case, world, (LAST,))
    resumed = fresh(case, world)
    load_step(folder, LAST, resumed.shards(), world)
    for one, other in zip(on.state, steps(resumed, case, world, (LAST,)).state, strict=True):
        assert np.array_equal(one.local, other.local), f"{one.name}: resumed to the bit"
    save_step(folder, LAST + 1, resumed.shards(), {}, world).wait()
    sums = resumed.evaluate(share(global_batch(case.kind, 9), world, case.micro))
    return float(sums.loss) / sums.tokens


@pytest.mark.parametrize("name", draw(CASES, ("zero3",)))
def test_evaluations_and_exports_use_the_average(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    average, loss = _train_package(case.kind)
    found = run_ranks(_train, case.ranks, case, tmp_path / "steps", parallel=case.config().parallel, timeout=200)
    np.testing.assert_allclose(found, loss, rtol=1e-10)
    words = ["checkpoint", "export", str(tmp_path / "steps"), str(tmp_path / "out"), "--format", "safetensors"]
    assert main([*words, "--weights"]) == 0
    files = (tmp_path / "out").glob("*.safetensors")
    exported = {key: value for file in files for key, value in load_file(file).items()}
    assert average.keys() <= exported.keys()
    for key, value in average.items():
        np.testing.assert_allclose(exported[key].numpy(), value, rtol=1e-8, atol=1e-10)


def test_weights_loaded_after_the_state_begin_the_average() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = ScheduleFreeAdamW([{"params": [weight], "weight_decay": 0.0}], lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    optimizer.state[weight]["z"] = torch.zeros(3)
    optimizer.state[weight]["exp_avg_sq"] = torch.zeros(3)
    with torch.no_grad():
        weight.fill_(5.0)
    with optimizer.replace_weights():
        assert weight.tolist() == [5.0] * 3
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[weight]["z"].tolist() == pytest.approx([4.9] * 3)
    assert optimizer.param_groups[0]["k"] == 0, "counted in the state alone"
    assert optimizer.state[weight]["step"].item() == 1
