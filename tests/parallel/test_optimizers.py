"""Every optimizer in every layout equals the library's on one device, and resumes in another layout.

Muon's matrices are whole in the reference: torch.optim.Muon, on each expert's matrix for itself, beside AdamW.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from drawn import draw
from matrix import SEQUENCES, Case, resume, train_and_resume, train_and_save, truth
from outcome import Outcome
from schedulefree import AdamWScheduleFree
from test_matrix import HSDP, assert_outcome
from test_random_layouts import draw as draw_layout
from test_random_layouts import legal
from torch import nn

from hpc_train.config.run import RunConfig
from hpc_train.models.experts import Experts
from hpc_train.parallel.optimizers.rounded_adamw import RoundedAdamW, round_stochastically
from hpc_train.testing import run_ranks

MUON = ("optim=muon", "optim.weight_decay=0.3")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "muon": MUON,
    "muon-plain": (
        *MUON, "optim.muon.nesterov=false", "optim.muon.adjust_lr=original", "optim.muon.ns_steps=3",
        "optim.muon.momentum=0.7", "optim.muon.lr_scale=0.5",
    ),
    "sgd": ("optim=sgd", "optim.sgd.nesterov=true"),
    "sgd-plain": ("optim=sgd", "optim.sgd.momentum=0"),
    "adafactor": ("optim=adafactor", "optim.weight_decay=0.3"),
    "bf16": ("optim.state=bf16", "optim.weight_decay=0.3"),
    "schedule-free": ("optim=schedule_free", "optim.weight_decay=0.3"),
}  # fmt: skip

CASES: dict[str, tuple[str, Case]] = {
    "muon-alone": ("muon", Case(1, ())),
    "muon-ddp-3-of-4": ("muon", Case(4, ("parallel=ddp",), "gpt2", micro=3)),
    "muon-zero1": ("muon-plain", Case(2, ("parallel.strategy=zero1",))),
    "muon-zero2-4-tied": ("muon", Case(4, ("parallel.strategy=zero2",), "tied", micro=2)),
    "muon-zero3-4-uneven": ("muon-plain", Case(4, ("parallel=fsdp",), "grouped", micro=2)),
    "muon-vit": ("muon", Case(2, ("parallel=fsdp",), "vit")),
    "muon-hsdp": ("muon", Case(4, HSDP, micro=2)),
    "muon-tp-2": ("muon", Case(2, ("parallel.tp=2",), "gpt2")),
    "muon-tp-4-kv-2": ("muon-plain", Case(4, ("parallel.tp=4",), "tied")),
    "muon-tp-2-zero3-2": ("muon", Case(4, ("parallel=fsdp", "parallel.tp=2"), micro=5)),
    "muon-ep-2": ("muon", Case(2, ("parallel=fsdp", "parallel.ep=2"), "experts", micro=5)),
    "muon-hsdp-tp-2": ("muon-plain", Case(8, (*HSDP, "parallel.tp=2"), micro=2)),
    "muon-pp-2": ("muon", Case(2, ("parallel=ddp", "parallel.pp=2"), "tied")),
    "muon-pp-2-zbv-ddp-2": ("muon", Case(4, ("parallel=ddp", "parallel.pp=2", "parallel.pipeline.schedule=zbv"))),
    "muon-pp-2-zero3-2": ("muon", Case(4, ("parallel=fsdp", "parallel.pp=2"), micro=2)),
    "muon-pp-2-dp-2-tp-2": ("muon", Case(8, ("parallel=fsdp", "parallel.pp=2", "parallel.tp=2"), micro=2)),
    "muon-cp-2-ddp-2": ("muon", Case(4, ("parallel=ddp", "parallel.cp=2"))),
    "muon-cp-2-zero3": ("muon", Case(4, ("parallel=fsdp", "parallel.cp=2"))),
    "muon-experts-ddp": ("muon", Case(2, ("parallel=ddp",), "experts")),
    "muon-experts-zero3": ("muon-plain", Case(4, ("parallel=fsdp",), "shared-experts", micro=3)),
    "muon-ep-2-of-4": ("muon", Case(4, ("parallel=fsdp", "parallel.ep=2"), "experts", micro=3)),
    "muon-ep-2-tp-2": ("muon-plain", Case(4, ("parallel=fsdp", "parallel.ep=2", "parallel.tp=2"), "shared-experts")),
    "muon-ep-4-hsdp": ("muon", Case(8, (*HSDP, "parallel.dp_shard=4", "parallel.ep=4"), "experts", micro=2)),
    "muon-recompute": ("muon", Case(2, ("parallel=fsdp", "parallel.recompute.mode=full"))),
    "sgd-ddp": ("sgd", Case(2, ("parallel=ddp",))),
    "sgd-zero3-tp-2": ("sgd", Case(4, ("parallel=fsdp", "parallel.tp=2"), "gpt2")),
    "sgd-hsdp": ("sgd-plain", Case(4, HSDP, "tied", micro=2)),
    "sgd-pp-2-zero1": ("sgd", Case(4, ("parallel.strategy=zero1", "parallel.pp=2"))),
    "sgd-zero3": ("sgd", Case(2, ("parallel=fsdp",), "gpt2", micro=5)),
    "sgd-ep-2": ("sgd", Case(2, ("parallel=fsdp", "parallel.ep=2"), "experts")),
    "adafactor-ddp": ("adafactor", Case(2, ("parallel=ddp",))),
    "adafactor-ddp-4-tied": ("adafactor", Case(4, ("parallel=ddp",), "tied", micro=2)),
    "adafactor-cp-2": ("adafactor", Case(2, ("parallel=ddp", "parallel.cp=2"))),
    "adafactor-zero1": ("adafactor", Case(2, ("parallel.strategy=zero1",))),
    "adafactor-zero3-4-uneven": ("adafactor", Case(4, ("parallel=fsdp",), "grouped", micro=2)),
    # Not gpt2, whose key biases have gradients of nothing but rounding, which Adafactor scales up to steps.
    "adafactor-hsdp-tp-2": ("adafactor", Case(8, (*HSDP, "parallel.tp=2"), "tied", micro=2)),
    "adafactor-tp-2-zero3-2": ("adafactor", Case(4, ("parallel=fsdp", "parallel.tp=2"), "tied", micro=5)),
    "adafactor-pp-2": ("adafactor", Case(2, ("parallel=ddp", "parallel.pp=2"), "tied")),
    "adafactor-ep-2-tp-2": (
        "adafactor",
        Case(4, ("parallel=fsdp", "parallel.ep=2", "parallel.tp=2"), "shared-experts"),
    ),
    "bf16-zero3": ("bf16", Case(2, ("parallel=fsdp",), "tied", micro=5)),
    "bf16-ddp": ("bf16", Case(2, ("parallel=ddp",))),
    "bf16-tp-2-zero3-2": ("bf16", Case(4, ("parallel=fsdp", "parallel.tp=2"), "tied", micro=5)),
    "bf16-pp-2-zero3-2": ("bf16", Case(4, ("parallel=fsdp", "parallel.pp=2"), micro=2)),
    "free-zero3": ("schedule-free", Case(2, ("parallel=fsdp",), "grouped", micro=5)),
    "free-ddp": ("schedule-free", Case(2, ("parallel=ddp",))),
    "free-zero1": ("schedule-free", Case(2, ("parallel.strategy=zero1",))),
    "free-zero3-4-uneven": ("schedule-free", Case(4, ("parallel=fsdp",), "grouped", micro=2)),
    "free-hsdp-tp-2": ("schedule-free", Case(8, (*HSDP, "parallel.tp=2"), "gpt2", micro=2)),
    "free-cp-2-zero3": ("schedule-free", Case(4, ("parallel=fsdp", "parallel.cp=2"))),
    "free-pp-2-zero2": ("schedule-free", Case(4, ("parallel.strategy=zero2", "parallel.pp=2"), "tied")),
    "free-ep-2": ("schedule-free", Case(2, ("parallel=fsdp", "parallel.ep=2"), "experts")),
    "bf16-ep-2": ("bf16", Case(2, ("parallel=fsdp", "parallel.ep=2"), "experts")),
}
DRAWN = (
    "muon-tp-2-zero3-2", "muon-ep-2", "sgd-zero3", "adafactor-tp-2-zero3-2", "bf16-zero3",
    "free-zero3",
)  # fmt: skip


class WholeMuon(torch.optim.Optimizer):
    """torch's Muon on the matrices in blocks, with each expert's as the weight of a linear layer, and torch's AdamW."""

    def __init__(self, module: nn.Module, config: RunConfig) -> None:
        optim, muon = config.optim, config.optim.muon
        inside = [p for block in module.blocks().values() for p in block.parameters()]  # type: ignore[operator]
        self._stacks = [p for m in module.modules() if isinstance(m, Experts) for p in m.parameters()]
        stacked = set(self._stacks)
        self._matrices = [p for p in inside if p.ndim == 2]
        chosen = {*self._matrices, *stacked}
        rest = [p for p in module.parameters() if p not in chosen]
        self._slices = {p: [nn.Parameter(one.T.clone().contiguous()) for one in p.detach()] for p in self._stacks}
        settings: dict[str, Any] = {
            "momentum": muon.momentum,
            "nesterov": muon.nesterov,
            "ns_steps": muon.ns_steps,
            "adjust_lr_fn": muon.adjust_lr,
            "weight_decay": optim.weight_decay,
        }
        self._muon = torch.optim.Muon([*self._matrices, *(p for ps in self._slices.values() for p in ps)], **settings)
        self._adamw = torch.optim.AdamW(
            _split_by_dimensions(rest, optim.weight_decay),
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
        )
        self._muon.param_groups[0]["lr_factor"] = muon.lr_scale
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]
        self.state = defaultdict(dict)
        self._all = list(module.parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self._all:
            p.grad = None

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for stack, slices in self._slices.items():
            assert stack.grad is not None
            for one, gradient in zip(slices, stack.grad, strict=True):
                one.grad = gradient.T.contiguous()
        self._muon.step()
        self._adamw.step()
        for stack, slices in self._slices.items():
            stack.copy_(torch.stack([one.T for one in slices]))
            momenta = [self._muon.state[one]["momentum_buffer"].T for one in slices]
            self.state[stack] = {"momentum_buffer": torch.stack(momenta)}
        for p in self._matrices:
            self.state[p] = dict(self._muon.state[p])
        for group in self._adamw.param_groups:
            for p in group["params"]:
                self.state[p] = dict(self._adamw.state[p])


class WholeScheduleFree(AdamWScheduleFree):
    """The package's, with what it keeps in its groups listed as state."""

    def step(self, closure: object = None) -> None:
        super().step()
        for group in self.param_groups:
            counters = {"step": "k", "weight_sum": "weight_sum", "lr_max": "lr_max"}
            found = {key: torch.tensor(group[name], dtype=torch.float64) for key, name in counters.items()}
            for p in group["params"]:
                self.state[p].update(found, beta1=torch.tensor(group["betas"][0], dtype=torch.float64))


def _split_by_dimensions(parameters: Iterable[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    every = list(parameters)
    return [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]


def _make_reference(module: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    optim = config.optim
    groups = _split_by_dimensions(module.parameters(), optim.weight_decay)
    if optim.name == "muon":
        return WholeMuon(module, config)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=optim.sgd.momentum, nesterov=optim.sgd.nesterov)
    if optim.name == "adamw":
        names = {parameter: name for name, parameter in module.named_parameters()}
        return RoundedAdamW(groups, names, lr=1.0, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps)
    if optim.name == "schedule_free":
        free = WholeScheduleFree(groups, lr=1.0, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps)
        free.train()
        return free
    assert optim.name == "adafactor"
    return torch.optim.Adafactor(groups, lr=1.0)


@cache
def _truth(kind: str, optimizer: str) -> tuple[Outcome, Outcome]:
    config = Case(1, OPTIMIZERS[optimizer], kind).config()
    return truth(kind, lambda module, _: _make_reference(module, config))


def _with_optimizer(case: Case, optimizer: str) -> Case:
    return replace(case, overrides=(*case.overrides, *OPTIMIZERS[optimizer]))


class Folders:
    """The second step's checkpoint of each model and optimizer from a layout that no case has."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory
        self._saved: dict[tuple[str, str], Path] = {}

    def saved(self, kind: str, optimizer: str) -> Path:
        """Trained at the first call."""
        if (kind, optimizer) not in self._saved:
            folder = self.factory.mktemp(f"elsewhere-{kind}")
            layout = ("parallel=fsdp", "parallel.reshard_after_forward=false")
            other = Case(2, layout, kind, micro=8)
            other = _with_optimizer(other, optimizer)
            run_ranks(train_and_save, other.ranks, other, folder, parallel=other.config().parallel)
            self._saved[kind, optimizer] = folder
        return self._saved[kind, optimizer]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_every_optimizer_equals_the_library_on_one_device(name: str, folders: Folders) -> None:
    optimizer, case = CASES[name]
    _check(_with_optimizer(case, optimizer), optimizer, folders)


@pytest.mark.parametrize("seed", draw(range(12), ()))
def test_muon_in_any_legal_layout(seed: int, folders: Folders) -> None:
    random = Random(seed)
    case = _with_optimizer(draw_layout(random), "muon")
    while not legal(case):
        case = _with_optimizer(draw_layout(random), "muon")
    print(case)  # which pytest shows of a failure
    _check(case, "muon", folders)


def _check(case: Case, optimizer: str, folders: Folders) -> None:
    """Two steps, the third from another layout's checkpoint, and the third in one process from this one's."""
    first, after = _truth(case.kind, optimizer)
    own, other = folders.factory.mktemp("own"), folders.saved(case.kind, optimizer)
    ranks = run_ranks(train_and_resume, case.ranks, case, other, own, parallel=case.config().parallel, timeout=200)
    assert_outcome([trained for trained, _ in ranks], first)
    assert_outcome([resumed for _, resumed in ranks], after)
    alone = _with_optimizer(Case(1, (), case.kind, micro=SEQUENCES), optimizer)
    assert_outcome(run_ranks(resume, 1, alone, own, parallel=alone.config().parallel), after)


def test_rounding_keeps_the_mean_and_is_to_a_neighbour() -> None:
    x = torch.tensor([1.0, 1.0 + 2**-9, -3.0 - 2**-7 * 0.75, 1e-30, torch.inf])
    bits = torch.arange(1 << 16).unsqueeze(1).expand(-1, len(x))
    rounded = round_stochastically(x.expand(len(bits), -1), bits).double()
    mean = rounded[:, :4].mean(0)
    assert torch.allclose(mean, x[:4].double(), rtol=1e-6, atol=0)
    assert all(len(column.unique()) <= 2 for column in rounded.T)
    assert rounded[:, 4].isinf().all()


def test_rounded_moments_follow_adamw() -> None:
    """Over 300 steps: parameters as close to torch's as two decimals, where rounding to the nearest stands still."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))]
    ours = RoundedAdamW([{"params": weights[:1]}], {weights[0]: "w"}, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    theirs = torch.optim.AdamW(weights[1:], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    for _ in range(300):
        for weight in weights:
            weight.grad = weight.detach() * 0.1 + 0.01
        ours.step()
        theirs.step()
    assert (weights[0] - weights[1]).abs().max() < 0.02 * (1 - weights[1]).abs().max()
