"""Orders to break a rank: who obeys them, when, and what a plan may say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_train.cli.chaos import read_plan
from hpc_train.cli.main import main
from hpc_train.errors import UserError
from hpc_train.resilience.chaos import KINDS, FaultInjector, Order, give_order


def test_an_order_is_obeyed_once_by_its_rank_at_its_step(tmp_path: Path) -> None:
    give_order(tmp_path, Order("exception", 1, step=3))
    others, ours = FaultInjector(tmp_path, 0), FaultInjector(tmp_path, 1)
    for step in range(6):
        others.before_step(step, [])
    for step in range(3):
        ours.before_step(step, [])
    with pytest.raises(RuntimeError, match="ordered by hpc-train chaos"):
        ours.before_step(3, [])
    FaultInjector(tmp_path, 1).before_step(3, [])  # as after a restart


def take_step(model: nn.Module, injector: FaultInjector, step: int) -> torch.Tensor:
    """The gradient of a step."""
    injector.before_step(step, [model])
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    injector.after_backward([model])
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return gradient.clone()


@pytest.mark.parametrize("kind", ["nan", "flip_gradient"])
def test_a_gradient_is_spoilt_in_one_step(tmp_path: Path, kind: str) -> None:
    model, injector = nn.Linear(3, 2), FaultInjector(tmp_path, 0)
    good = take_step(model, injector, 0)
    give_order(tmp_path, Order(kind, 0))
    spoilt = [take_step(model, injector, step) != good for step in (1, 2, 3)]
    assert [int(wrong.sum()) for wrong in spoilt] == [6 if kind == "nan" else 1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bit_of_one_weight_flips(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    before = model.weight.detach().clone()
    give_order(tmp_path, Order("flip_weight", 0))
    FaultInjector(tmp_path, 0).before_step(0, [model])
    changed = (model.weight.detach() != before).nonzero().tolist()
    assert changed == [[0, 0]]
    ratio = abs(model.weight[0, 0].item() / before[0, 0].item())
    assert abs(math.log2(ratio)) >= 64


def test_a_plan_is_read(tmp_path: Path) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text("minutes: 2\nmttf_seconds: 30\nkinds: {kill: 2}\nfaults: [{kind: slow, rank: 1, seconds: 3}]\n")
    plan = read_plan(file, 2)
    assert (plan.minutes, plan.mttf_seconds, plan.kinds) == (2.0, 30.0, {"kill": 2.0})
    assert plan.faults == (Order("slow", 1, 0, 3.0),)
    file.write_text("mttf_seconds: 30\n")
    assert set(read_plan(file, 2).kinds) == set(KINDS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be a mapping with the keys minutes"),
        ("{}", "neither faults nor mttf_seconds"),
        ("[", "cannot be read"),
        ("minute: 3", "no key 'minute'"),
        ("mttf_seconds: soon", "mttf_seconds: 'soon' must be a number above 0"),
        ("mttf_seconds: .nan", "must be a number above 0"),
        ("mttf_seconds: 1\nkinds: {explode: 1}", "kinds: no key 'explode'"),
        ("mttf_seconds: 1\nkinds: [kill]", "kinds: must be a mapping"),
        ("faults: kill", "faults must be a list"),
        ("faults: [kill]", r"faults\[0\]: must be a mapping"),
        ("faults: [{rank: 0}]", "kind None is none of kill"),
        ("faults: [{kind: kill, rank: 2}]", "rank 2 is none of the 2 ranks of the run, 0 to 1"),
        ("faults: [{kind: kill, rank: yes}]", "rank True is none of"),
        ("faults: [{kind: kill, step: -1}]", "step -1 must be an integer from 0"),
    ],
)
def test_a_wrong_plan_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "faults.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=said) as refused:
        read_plan(file, 2)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "faults.yaml").write_text("faults: [{kind: kill}]")
    assert main(["chaos", str(tmp_path / "run"), "--plan", str(tmp_path / "faults.yaml")]) == 2
    assert "no run directory" in capsys.readouterr().err


def test_orders_are_json_of_their_own(tmp_path: Path) -> None:
    paths = [give_order(tmp_path, Order("kill", rank)) for rank in (0, 1, 0)]
    assert len(set(paths)) == 3
    assert [json.loads(path.read_text())["rank"] for path in paths] == [0, 1, 0]
