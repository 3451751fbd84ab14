"""Frozen weights in bfloat16: adapters train to the same bits as over weights in float32, and resume between both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import draw
from matrix import STEPS, Case, fresh, steps, train_and_save
from matrix import resume as resume_case
from outcome import Arrays, Outcome, whole
from test_adapters import CASES as ADAPTER_CASES
from test_adapters import LORA, train_here
from torch import nn

from hpc_train.checkpoint.load.load_step import resume_from_checkpoint
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.adapters import store_base_in_bf16
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import RankFailure, run_ranks

CASES = {
    # Without fully_shard DoRA's norms are those of the weights as they are stored, which differ.
    **{name: case for name, case in ADAPTER_CASES.items() if name != "ddp-2-dora"},
    "zero2-2": Case(2, ("parallel.strategy=zero2", *LORA)),
    "fsdp-2-optimizer-offload": Case(2, ("parallel=fsdp", "parallel.offload.optimizer=cpu", *LORA)),
    "fsdp-2-chunks": Case(2, ("parallel=fsdp", "train.loss_chunk=8", *LORA)),
    "fsdp-2-experts": Case(2, ("parallel=fsdp", *LORA), "experts"),
    "ddp-2-latent": Case(2, ("parallel=ddp", *LORA), "latent"),
    "tp-2-latent": Case(2, ("parallel.tp=2", *LORA), "latent-dense"),
    "one-rank-compiled": Case(1, ("parallel.compile=true", *LORA)),
}
DRAWN = ("ddp-2", "tp-2-fsdp-2")


def over(case: Case, base: str) -> Case:
    return Case(case.ranks, (*case.overrides, "precision=bf16", f"adapter.base={base}"), case.kind)


def train(case: Case) -> list[Outcome]:
    return run_ranks(train_here, case.ranks, case, parallel=case.config().parallel, timeout=280)


def pick_trained(state: Arrays) -> Arrays:
    return {name: array for name, array in state.items() if "lora_" in name}


def is_bf16(array: np.ndarray) -> bool:
    """Whether each number has at most the 16 bits of bfloat16."""
    return not np.any(array.astype(np.float32).view(np.uint32) & 0xFFFF)


@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_training_has_the_bits_of_a_base_in_float32(name: str) -> None:
    full, low = train(over(CASES[name], "full")), train(over(CASES[name], "bf16"))
    assert low[0].losses == full[0].losses
    wanted, got = (whole([rank.state for rank in ranks]) for ranks in (full, low))
    trained = pick_trained(got)
    assert len(trained) > 10
    for key, array in pick_trained(wanted).items():
        np.testing.assert_array_equal(trained[key], array)
    frozen = {key: array for key, array in got.items() if "lora_" not in key and key.startswith("layers.")}
    matrices = [array for array in frozen.values() if array.ndim > 1]
    assert matrices
    assert all(map(is_bf16, matrices))
    assert not all(is_bf16(wanted[key]) for key in frozen), "the same check of weights in float32"


def test_resume_in_another_layout_and_not_over_another_base(tmp_path: Path) -> None:
    fsdp, alone = over(Case(2, ("parallel=fsdp", *LORA)), "bf16"), over(Case(1, LORA), "bf16")
    run_ranks(train_and_save, 2, fsdp, tmp_path, parallel=fsdp.config().parallel)
    resumed = run_ranks(resume_case, 2, fsdp, tmp_path, parallel=fsdp.config().parallel)
    (other,) = run_ranks(resume_case, 1, alone, tmp_path)
    np.testing.assert_allclose(other.losses, resumed[0].losses, rtol=1e-2)
    with pytest.raises(RankFailure, match=r"is bfloat16 of shape .*, this run wants float32 of shape"):
        run_ranks(resume_case, 1, over(Case(1, LORA), "full"), tmp_path)


def start_from_weights(world: World, case: Case, folder: Path) -> Outcome:
    engine = fresh(case, world)
    resumed = resume_from_checkpoint(folder, str(len(STEPS)), engine.shards(), world)
    assert resumed is not None
    assert resumed.lacks_adapters
    return steps(engine, case, world, STEPS)


def test_weights_of_a_run_without_adapters_become_the_base(tmp_path: Path) -> None:
    """They are in float32, and rounded as they are read."""
    whole_model = Case(1, ("precision=bf16",))
    run_ranks(train_and_save, 1, whole_model, tmp_path)
    losses = []
    for base in ("full", "bf16"):
        case = over(Case(2, ("parallel=fsdp", *LORA)), base)
        losses.append(run_ranks(start_from_weights, 2, case, tmp_path, parallel=case.config().parallel)[0].losses)
    assert losses[0] == losses[1]


class Shared(nn.Module):
    """Two blocks with one weight, which the head has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.second.weight = self.head.weight = self.first.weight
        self.requires_grad_(False)

    def blocks(self) -> dict[str, nn.Module]:
        return {"first": self.first, "second": self.second}


def test_modules_that_share_a_weight_still_do() -> None:
    model = Shared()
    store_base_in_bf16(model)
    assert model.first.weight.dtype == torch.bfloat16
    assert model.first.weight is model.second.weight is model.head.weight


def test_another_precision_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"adapter.base=bf16: products would still be computed in fp32; use precision=bf16"
    ):
        check_support(Case(1, (*LORA, "adapter.base=bf16", "precision=fp32")).config(), 1)
