"""Orders to break a rank: who obeys them, when, and what a plan may say."""

from __future__ import annotations

import json
import math
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from timeit import timeit

import pytest
import torch
from torch import nn

from hpc_train.cli.chaos import read_plan
from hpc_train.cli.main import main
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard
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


HOLDING = """
import faulthandler, os, signal, threading, time
from hpc_train.resilience.chaos import hold_interpreter_lock

def say(line):
    os.write(1, line)  # at once: print writes the end of a line later, and another thread may come between

def beat():
    while True:
        say(b"beat\\n")
        time.sleep(0.01)

faulthandler.register(signal.SIGUSR1)
threading.Thread(target=beat, daemon=True).start()
time.sleep(0.1)
say(b"holds\\n")
hold_interpreter_lock()
say(b"goes on\\n")
"""


def test_a_rank_that_holds_the_interpreter_shows_its_stacks_and_holds_on(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    with stacks.open("w") as file:
        rank = subprocess.Popen([sys.executable, "-c", HOLDING], stdout=subprocess.PIPE, stderr=file, text=True)
    assert rank.stdout is not None
    while (line := rank.stdout.readline()) != "holds\n":
        assert line == "beat\n"

    def shows_itself_twice() -> bool:
        rank.send_signal(signal.SIGUSR1)  # the first may come before it holds the lock
        return stacks.read_text().count("in hold_interpreter_lock") >= 2

    wait_until(shows_itself_twice)
    assert rank.poll() is None
    rank.kill()
    out, _ = rank.communicate()
    assert out in ("", "beat\n")  # one that was under way


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


def test_one_bit_of_the_state_of_the_optimizer_flips(tmp_path: Path) -> None:
    moment = torch.tensor([0.25, -0.5, 0.125])
    shards = [
        TensorShard("weight", (3,), torch.float32, (0,), torch.ones(3)),
        TensorShard("optim.step.weight", (), torch.float32, (), torch.tensor(7.0)),
        TensorShard("optim.exp_avg.weight", (3,), torch.float32, (0,), moment),
    ]
    give_order(tmp_path, Order("flip_moment", 0))
    FaultInjector(tmp_path, 0).before_step(0, [], lambda: shards)
    assert moment[[0, 2]].tolist() == [0.25, 0.125]
    assert abs(moment[1].item()) > 1e30
    assert [shard.local.sum().item() for shard in shards[:2]] == [3.0, 7.0]


def test_a_disk_is_slow_for_one_checkpoint_and_full_for_a_while(tmp_path: Path) -> None:
    give_order(tmp_path, Order("slow_disk", 0, seconds=0.3))
    injector = FaultInjector(tmp_path, 0)
    injector.before_step(0, [])
    seconds = [timeit(injector.before_write, number=1) for _ in range(2)]
    assert seconds[0] >= 0.3 > seconds[1]
    give_order(tmp_path, Order("full_disk", 0, seconds=0.3))
    injector.before_step(1, [])
    with pytest.raises(OSError, match="File too large"):
        (tmp_path / "file").write_text("x")
    wait_until(lambda: resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0)
    (tmp_path / "file").write_text("x")


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_rank_is_stuck_before_it_meets_the_others_and_not_in_a_step(tmp_path: Path) -> None:
    order = give_order(tmp_path, Order("rendezvous", 1))
    FaultInjector(tmp_path, 1).before_step(5, [])
    FaultInjector(tmp_path, 0).before_meeting()
    assert order.exists()
    code = "import sys; from pathlib import Path; from hpc_train.resilience.chaos import FaultInjector\n"
    code += "FaultInjector(Path(sys.argv[1]), 1).before_meeting()"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as stuck:
        wait_until(lambda: not order.exists())
        assert stuck.poll() is None
        stuck.kill()
    FaultInjector(tmp_path, 1).before_meeting()  # as after a restart


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
        ("faults: [{kind: rendezvous, step: 3}]", "step 3: rendezvous happens before the first step of a start"),
        ("faults: [{kind: kill, seconds: 3}]", "seconds: only slow, busy, slow_disk, full_disk last for a time"),
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
