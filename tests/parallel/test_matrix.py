"""Law 1 over the whole table: every layout and technique gives one process's numbers and resumes into any other."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from drawn import draw
from matrix import SEQUENCES, Case, resume, train_and_resume, train_and_save, truth
from outcome import Outcome, assert_close, whole

from hpc_train.testing import run_ranks

TOLERANCE = 1e-10
HSDP = ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2")


def _pp(schedule: str, *more: str) -> tuple[str, ...]:
    return ("parallel=ddp", "parallel.pp=2", f"parallel.pipeline.schedule={schedule}", *more)


CASES: dict[str, Case] = {
    # data
    "ddp-3-short": Case(4, ("parallel=ddp",), "gpt2", micro=3),
    "zero1-2": Case(2, ("parallel.strategy=zero1",)),
    "zero2-4-tied": Case(4, ("parallel.strategy=zero2",), "tied", micro=2),
    "zero3-2-vit": Case(2, ("parallel=fsdp",), "vit", micro=5),
    "hsdp-2x2": Case(4, HSDP, micro=2),
    # tensor
    "tp-2": Case(2, ("parallel.tp=2",), micro=6),
    "tp-4-kv-2-tied": Case(4, ("parallel.tp=4",), "tied", micro=10),
    "tp-2-whole-vocabulary-gpt2": Case(2, ("parallel.tp=2", "parallel.tensor.vocabulary=false"), "gpt2"),
    "tp-2-no-sequence": Case(2, ("parallel.tp=2", "parallel.tensor.sequence=false")),
    "tp-2-asynchronous": Case(2, ("parallel.tp=2", "parallel.tensor.asynchronous=true")),
    "tp-2-vit": Case(2, ("parallel.tp=2",), "vit"),
    "zero3-2-tp-2": Case(4, ("parallel=fsdp", "parallel.tp=2"), "gpt2", micro=5),
    # pipeline
    "pp-2-naive": Case(2, _pp("naive")),
    "pp-2-gpipe-short": Case(2, _pp("gpipe"), "gpt2", micro=6),
    "pp-2-1f1b-tied": Case(2, _pp("1f1b"), "tied"),
    "pp-4-1f1b": Case(4, ("parallel.pp=4", "parallel.pipeline.schedule=1f1b")),
    "pp-2-interleaved": Case(2, _pp("interleaved_1f1b"), "tied"),
    "pp-2-looped": Case(2, _pp("looped_bfs")),
    "pp-2-zero-bubble": Case(2, _pp("interleaved_zero_bubble"), "gpt2"),
    "pp-2-zbv": Case(2, _pp("zbv"), "tied"),
    "pp-2-dualpipev": Case(2, _pp("dualpipev")),
    "pp-2-vit": Case(2, _pp("1f1b"), "vit"),
    # context
    "cp-2-ring": Case(2, ("parallel.cp=2",)),
    "cp-4-ring-zero3": Case(4, ("parallel=fsdp", "parallel.cp=4"), "tied"),
    "cp-2-unbalanced": Case(2, ("parallel.cp=2", "parallel.context.balanced=false"), "gpt2"),
    "cp-2-ulysses": Case(2, ("parallel.cp=2", "parallel.context.method=ulysses"), "gpt2", micro=6),
    # memory
    "recompute-full": Case(2, ("parallel=fsdp", "parallel.recompute.mode=full")),
    "recompute-selective-2nd": Case(
        2, ("parallel=ddp", "parallel.recompute.mode=selective", "parallel.recompute.every=2")
    ),
    "offload-empty-shards": Case(2, ("parallel=fsdp", "parallel.offload.optimizer=file"), "vit"),
    # experts
    "ddp-2-experts": Case(2, ("parallel=ddp",), "experts", micro=3),
    "zero3-3-experts": Case(4, ("parallel=fsdp",), "shared-experts", micro=3),
    "tp-2-experts": Case(2, ("parallel.tp=2",), "shared-experts"),
    "tp-2-experts-no-sequence": Case(2, ("parallel.tp=2", "parallel.tensor.sequence=false"), "experts"),
    "cp-2-experts": Case(2, ("parallel.cp=2",), "shared-experts"),
    "recompute-selective-experts": Case(2, ("parallel=fsdp", "parallel.recompute.mode=selective"), "experts"),
    "pp-2-experts": Case(2, _pp("interleaved_1f1b"), "experts"),
    "tp-2-experts-asynchronous": Case(2, ("parallel.tp=2", "parallel.tensor.asynchronous=true"), "shared-experts"),
    "ep-2": Case(2, ("parallel=fsdp", "parallel.ep=2"), "experts", micro=5),
    "ep-2-zero1": Case(2, ("parallel.strategy=zero1", "parallel.ep=2"), "shared-experts"),
    "ep-2-of-4-zero2": Case(4, ("parallel.strategy=zero2", "parallel.ep=2"), "experts", micro=3),
    "ep-4-hsdp": Case(8, (*HSDP, "parallel.dp_shard=4", "parallel.ep=4"), "shared-experts", micro=2),
    "ep-2-recompute": Case(2, ("parallel=fsdp", "parallel.ep=2", "parallel.recompute.mode=full"), "shared-experts"),
    "ep-2-tp-2": Case(4, ("parallel=fsdp", "parallel.ep=2", "parallel.tp=2"), "shared-experts"),
    "ep-4-cp-2": Case(4, ("parallel=fsdp", "parallel.ep=4", "parallel.cp=2"), "shared-experts", micro=2),
    "ep-2-cp-2-unbalanced": Case(
        2,
        ("parallel=fsdp", "parallel.ep=2", "parallel.cp=2", "parallel.context.balanced=false"),
        "shared-experts",
        micro=10,
    ),
    "ep-2-pp-2": Case(4, ("parallel=fsdp", "parallel.ep=2", "parallel.pp=2"), "shared-experts"),
    "ep-2-offload": Case(2, ("parallel=fsdp", "parallel.ep=2", "parallel.offload.optimizer=file"), "experts"),
    "ep-2-pp-2-tp-2": Case(
        8, ("parallel=fsdp", "parallel.ep=2", "parallel.pp=2", "parallel.tp=2"), "shared-experts", micro=2
    ),
    "ep-2-pp-2-kept": Case(
        4, ("parallel=fsdp", "parallel.ep=2", "parallel.pp=2", "parallel.reshard_after_forward=false"), "shared-experts"
    ),
    "ep-2-pp-2-groups-recompute": Case(
        4,
        (
            "parallel.strategy=zero1",
            "parallel.ep=2",
            "parallel.pp=2",
            "parallel.bucket_mib=0.01",
            "parallel.pipeline.schedule=looped_bfs",
            "parallel.recompute.mode=full",
            "parallel.recompute.every=3",
        ),
        "experts",
        micro=2,
    ),
    "ep-2-hsdp-zero2": Case(4, ("parallel.strategy=zero2", *HSDP[1:], "parallel.ep=2"), "experts", micro=2),
    "ep-2-of-4-tp-2": Case(8, ("parallel=fsdp", "parallel.ep=2", "parallel.tp=2"), "experts", micro=2),
    # latent attention, with and without experts
    "ddp-2-latent": Case(2, ("parallel=ddp",), "latent", micro=3),
    "zero3-3-latent": Case(4, ("parallel=fsdp",), "latent-dense", micro=3),
    "tp-2-latent": Case(2, ("parallel.tp=2",), "latent"),
    "tp-4-latent-dense": Case(4, ("parallel.tp=4",), "latent-dense"),
    "tp-2-latent-no-sequence": Case(2, ("parallel.tp=2", "parallel.tensor.sequence=false"), "latent"),
    "tp-2-latent-asynchronous": Case(2, ("parallel.tp=2", "parallel.tensor.asynchronous=true"), "latent"),
    "cp-2-latent": Case(2, ("parallel.cp=2",), "latent", micro=10),
    "cp-2-latent-ulysses": Case(2, ("parallel.cp=2", "parallel.context.method=ulysses"), "latent-dense"),
    "pp-2-latent": Case(2, _pp("interleaved_1f1b"), "latent"),
    "pp-2-zbv-latent": Case(2, _pp("zbv"), "latent-dense"),
    "latent-recompute-selective": Case(2, ("parallel=fsdp", "parallel.recompute.mode=selective"), "latent-dense"),
    "ep-2-latent": Case(2, ("parallel=fsdp", "parallel.ep=2"), "latent", micro=5),
    "ep-2-tp-2-cp-2-latent": Case(
        8,
        ("parallel=fsdp", "parallel.ep=2", "parallel.tp=2", "parallel.cp=2", "parallel.dp_shard=2"),
        "latent",
        micro=2,
    ),
    "ep-2-pp-2-tp-2-latent": Case(
        8, ("parallel=fsdp", "parallel.ep=2", "parallel.pp=2", "parallel.tp=2"), "latent", micro=2
    ),
    # the loss in chunks of tokens
    "ddp-3-short-chunks": Case(4, ("parallel=ddp", "train.loss_chunk=7"), "gpt2", micro=3),
    "zero3-2-chunks": Case(2, ("parallel=fsdp", "train.loss_chunk=16"), "tied", micro=5),
    "zero1-2-experts-chunks": Case(2, ("parallel.strategy=zero1", "train.loss_chunk=9"), "experts"),
    "tp-2-chunks": Case(2, ("parallel.tp=2", "train.loss_chunk=11"), micro=6),
    "tp-4-no-sequence-chunks": Case(
        4, ("parallel.tp=4", "parallel.tensor.sequence=false", "train.loss_chunk=5"), "tied"
    ),
    "tp-2-whole-vocabulary-chunks": Case(
        2, ("parallel.tp=2", "parallel.tensor.vocabulary=false", "train.loss_chunk=10"), "gpt2"
    ),
    "cp-2-chunks": Case(2, ("parallel.cp=2", "train.loss_chunk=6")),
    "pp-2-gpipe-zero3-chunks": Case(
        4, ("parallel=fsdp", "parallel.pp=2", "parallel.pipeline.schedule=gpipe", "train.loss_chunk=12"), micro=2
    ),
    "pp-2-zbv-chunks": Case(2, _pp("zbv", "train.loss_chunk=13"), "tied"),
    "pp-2-cp-2-tp-2-chunks": Case(8, _pp("1f1b", "parallel.cp=2", "parallel.tp=2", "train.loss_chunk=3"), "tied"),
    # windows and soft-caps: Gemma 3 and Gemma 2 in small
    "zero3-2-windows": Case(2, ("parallel=fsdp",), "windows", micro=3),
    "tp-2-capped": Case(2, ("parallel.tp=2",), "capped"),
    "tp-2-capped-chunks": Case(2, ("parallel.tp=2", "train.loss_chunk=5"), "capped", micro=10),
    "pp-2-capped-chunks": Case(2, _pp("1f1b", "train.loss_chunk=5"), "capped"),
    "pp-2-windows": Case(2, _pp("interleaved_1f1b"), "windows"),
    "cp-2-windows": Case(2, ("parallel.cp=2",), "windows", micro=10),
    # a backward in two parts, of blocks that run again once
    "zbv-full": Case(2, _pp("zbv", "parallel.recompute.mode=full"), "llama-dropout"),
    "zero-bubble-full-tp": Case(
        4, _pp("interleaved_zero_bubble", "parallel.recompute.mode=full", "parallel.tp=2"), "deep"
    ),
    "zero3-2-olmo-chunks": Case(2, ("parallel=fsdp", "train.loss_chunk=5"), "olmo"),
    "pp-2-cp-2-olmo": Case(4, _pp("1f1b", "parallel.cp=2"), "olmo"),
    # a norm over all heads, which tp splits
    "tp-2-olmo": Case(2, ("parallel.tp=2",), "olmo", micro=6),
    "tp-4-kv-2-olmo": Case(4, ("parallel.tp=4",), "olmo"),
    "tp-2-olmo-grouped-no-sequence": Case(2, ("parallel.tp=2", "parallel.tensor.sequence=false"), "olmo-grouped"),
    "tp-2-olmo-asynchronous-recompute": Case(
        2, ("parallel.tp=2", "parallel.tensor.asynchronous=true", "parallel.recompute.mode=full"), "olmo"
    ),
    "tp-2-olmo-chunks-selective": Case(
        2, ("parallel.tp=2", "train.loss_chunk=5", "parallel.recompute.mode=selective"), "olmo", micro=10
    ),
    "zero3-2-tp-2-olmo": Case(4, ("parallel=fsdp", "parallel.tp=2"), "olmo", micro=5),
    "replicate-2-tp-4-olmo": Case(8, ("parallel.dp_replicate=2", "parallel.tp=4"), "olmo", micro=5),
    "pp-2-zbv-tp-2-olmo": Case(4, _pp("zbv", "parallel.tp=2"), "olmo"),
    "pp-2-zbv-tp-4-full-olmo": Case(8, _pp("zbv", "parallel.tp=4", "parallel.recompute.mode=full"), "olmo"),
    "cp-2-tp-2-olmo": Case(4, ("parallel.cp=2", "parallel.tp=2"), "olmo"),
    "ep-2-tp-2-olmo-experts": Case(4, ("parallel=fsdp", "parallel.ep=2", "parallel.tp=2"), "olmo-experts"),
    "cp-4-windows-unbalanced": Case(4, ("parallel.cp=4", "parallel.context.balanced=false"), "windows"),
    "cp-2-capped": Case(2, ("parallel.cp=2",), "capped"),
    "cp-2-ulysses-capped": Case(2, ("parallel.cp=2", "parallel.context.method=ulysses"), "capped"),
    "recompute-selective-capped": Case(2, ("parallel=fsdp", "parallel.recompute.mode=selective"), "capped"),
    "pp-2-cp-2-tp-2-windows": Case(8, _pp("1f1b", "parallel.cp=2", "parallel.tp=2"), "windows"),
    # 3D and 4D
    "pp-2-tp-2": Case(4, _pp("1f1b", "parallel.tp=2"), "tied"),
    "pp-2-zero3-2": Case(4, ("parallel=fsdp", "parallel.pp=2"), "gpt2", micro=2),
    "cp-2-tp-2": Case(4, ("parallel.cp=2", "parallel.tp=2")),
    "cp-2-pp-2": Case(4, _pp("1f1b", "parallel.cp=2"), "tied", micro=6),
    "pp-2-dp-2-tp-2": Case(
        8, ("parallel=fsdp", "parallel.pp=2", "parallel.tp=2", "parallel.pipeline.schedule=interleaved_1f1b"), micro=2
    ),
    "pp-2-cp-2-tp-2-recompute": Case(
        8, _pp("1f1b", "parallel.cp=2", "parallel.tp=2", "parallel.recompute.mode=full"), "tied"
    ),
    "hsdp-2x2-tp-2": Case(8, (*HSDP, "parallel.tp=2"), micro=2),
}


@cache
def _truth(kind: str) -> tuple[Outcome, Outcome]:
    return truth(kind)


class Elsewhere:
    """The second step's checkpoint of each model from a layout that no case has."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory
        self._folders: dict[str, Path] = {}

    def saved(self, kind: str) -> Path:
        """Trained at the first call."""
        if kind not in self._folders:
            folder = self.factory.mktemp(f"elsewhere-{kind}")
            other = Case(2, ("parallel=fsdp", "parallel.reshard_after_forward=false"), kind, micro=8)
            run_ranks(train_and_save, other.ranks, other, folder, parallel=other.config().parallel)
            self._folders[kind] = folder
        return self._folders[kind]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    return Elsewhere(tmp_path_factory)


DRAWN = (
    "hsdp-2x2", "offload-empty-shards", "cp-2-pp-2", "pp-2-experts",
    "ep-2-cp-2-unbalanced", "cp-2-latent", "zero3-2-chunks", "pp-2-zbv-chunks", "tp-2-capped-chunks", "cp-2-windows",
)  # fmt: skip
"""One or two of each kind. Each technique alone has a test file of its own beside this one."""


@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_every_layout(name: str, elsewhere: Elsewhere) -> None:
    check_case(CASES[name], elsewhere)


def check_case(case: Case, elsewhere: Elsewhere) -> None:
    """Two steps, then the third from another layout's checkpoint; and the third in one process from this one's."""
    first, after = _truth(case.kind)
    own, other = elsewhere.factory.mktemp("own"), elsewhere.saved(case.kind)
    parallel = case.config().parallel
    ranks = run_ranks(train_and_resume, case.ranks, case, other, own, parallel=parallel, timeout=200)
    assert_outcome([trained for trained, _ in ranks], first)
    assert_outcome([resumed for _, resumed in ranks], after)
    alone = Case(1, (), case.kind, micro=SEQUENCES)
    assert_outcome(run_ranks(resume, 1, alone, own, parallel=alone.config().parallel), after)


def assert_outcome(ranks: list[Outcome], wanted: Outcome) -> None:
    """Loss, norm before clipping, every gradient, and the state after the last step."""
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, wanted.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(rank.norms, wanted.norms, rtol=TOLERANCE)
    for step, expected in enumerate(wanted.gradients):
        assert_close(whole([rank.gradients[step] for rank in ranks]), whole([expected]), TOLERANCE)
    assert_close(whole([rank.state for rank in ranks]), whole([wanted.state]), TOLERANCE)
