"""Parts of the library in a program of one's own: init, sample order, preemption, placement and parallelize."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hpc_train
from hpc_train.errors import UserError
from hpc_train.interfaces import MicroBatch, StepBatch, World
from hpc_train.testing import run_ranks

JOIN = """
import os, torch, torch.distributed as dist, hpc_train
world = hpc_train.init(tp=2)
total = torch.tensor([world.rank + 1.0])
dist.all_reduce(total)
numbers = world.rank, world.size, world.mesh.size(2), world.mesh.size(4), total.item()
os.write(1, (" ".join(map(str, numbers)) + "\\n").encode())  # at once, as both ranks write into one pipe
dist.destroy_process_group()
"""


def test_init_joins_what_torchrun_started(tmp_path: Path) -> None:
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert sorted(done.stdout.splitlines()) == ["0 2 1 2 3.0", "1 2 1 2 3.0"], done.stderr


def test_init_uses_the_process_group_that_is_there() -> None:
    def join(_: World) -> tuple[int, int, int]:
        world = hpc_train.init(dp_replicate=2)
        return world.rank, world.dp_index, world.mesh.size(1)

    assert run_ranks(join, 2) == [(0, 0, 2), (1, 1, 2)]
    with pytest.raises(AssertionError, match="= 3, but the world has 2 ranks"):
        run_ranks(lambda _: hpc_train.init(dp_shard=3), 2)


def test_every_epoch_has_every_sample_once_and_ranks_share_a_batch() -> None:
    order = hpc_train.SampleOrder(12, seed=3)
    epochs = [order.indices(12 * epoch, 12).tolist() for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]
    shares = [order.batch(8, 4, rank, 2).tolist() for rank in range(2)]
    assert shares[0] + shares[1] == order.indices(8, 4).tolist() == epochs[0][8:]
    assert hpc_train.SampleOrder(12, seed=4).indices(0, 12).tolist() != epochs[0]


def test_a_sampler_goes_on_at_another_number_of_ranks() -> None:
    data = TensorDataset(torch.arange(20))
    order = hpc_train.SampleOrder(20, seed=1)

    def load(consumed: int, ranks: int) -> list[list[int]]:
        """The global batches that `ranks` ranks see, from a position on."""
        worlds = [World(r, ranks, r, torch.device("cpu"), None, r, ranks) for r in range(ranks)]  # type: ignore[arg-type]
        samplers = [order.sampler(4, consumed=consumed, until=32, world=world) for world in worlds]
        loaders = [DataLoader(data, batch_size=4 // ranks, sampler=sampler) for sampler in samplers]
        assert {len(loader) for loader in loaders} == {(32 - consumed) // 4}
        rows = [[batch.tolist() for (batch,) in loader] for loader in loaders]
        return [list(chain(*parts)) for parts in zip(*rows, strict=True)]

    whole = load(0, 1)
    assert list(chain(*whole)) == order.indices(0, 32).tolist()
    assert load(0, 2) == whole
    assert load(12, 4) == whole[3:]
    endless = order.sampler(4)
    assert [index for index, _ in zip(endless, range(50), strict=False)] == order.indices(0, 50).tolist()
    with pytest.raises(TypeError, match="never ends"):
        len(endless)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: hpc_train.SampleOrder(0), "samples=0"),
        (lambda: hpc_train.SampleOrder(5).batch(0, 4, 0, 3), "4 does not divide over 3"),
        (lambda: hpc_train.SampleOrder(5).indices(-1, 4), "neither may be negative"),
        (lambda: hpc_train.SampleOrder(5).sampler(4, until=6), "until=6 is not a multiple"),
        (lambda: hpc_train.Preemption(env={"SLURM_JOB_END_TIME": "soon"}), "'soon' is not a time"),
    ],
)
def test_wrong_orders_are_one_line(call: object, why: str) -> None:
    assert callable(call)
    with pytest.raises(UserError, match=why):
        call()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(number: signal.Signals) -> None:
    def loop(world: World) -> tuple[int, str | None]:
        before = signal.getsignal(number)
        with hpc_train.Preemption() as preemption:
            for step in range(50):
                if world.rank == 1 and step == 3:
                    os.kill(os.getpid(), number)
                if preemption.should_stop():
                    break
        assert signal.getsignal(number) == before
        return step, preemption.reason

    assert run_ranks(loop, 2) == [(3, None), (3, number.name)]


def test_the_time_limit_stops_and_requeue_ends_with_75(tmp_path: Path) -> None:
    soon = {"SLURM_JOB_END_TIME": str(int(time.time()) + 60)}
    with hpc_train.Preemption(env=soon, seconds_before_limit=5) as preemption:
        assert not preemption.should_stop()
    with hpc_train.Preemption(env=soon) as preemption:
        assert preemption.should_stop()
        assert preemption.reason == "time limit"
        with pytest.raises(SystemExit) as ended:
            preemption.requeue(tmp_path / "requeue")
    assert ended.value.code == 75
    assert (tmp_path / "requeue").exists()


def test_preemption_is_for_the_main_thread() -> None:
    errors: list[str] = []

    def enter() -> None:
        try:
            hpc_train.Preemption().__enter__()
        except UserError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_place_finds_the_order_of_the_command() -> None:
    names = [f"node000{number}" for number in (1, 3, 2, 4)]
    words = ["cluster=dgx_a100", "model=llama_1b", "parallel.dp_replicate=-1", "parallel.tp=8"]
    found = hpc_train.place(names, hpc_train.compose(words))
    assert sorted(found.nodes) == [0, 1, 2, 3]
    with pytest.raises(UserError, match="32 ranks"):
        hpc_train.place("node[0001-0004]", hpc_train.compose(["cluster=dgx_a100", "parallel.tp=3"]))


class Linears(nn.Module):
    """A model of one's own with blocks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def blocks(self) -> dict[str, nn.Module]:
        """The units of sharding."""
        return {f"layers.{at}": layer for at, layer in enumerate(self.layers)}

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) -> (N, 8)."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_parallelize_and_checkpointer_go_together(tmp_path: Path) -> None:
    config = hpc_train.compose(["parallel.strategy=zero3", "precision=fp64"])

    def train(world: World) -> list[float]:
        torch.manual_seed(0)
        world = hpc_train.init()
        model = Linears()
        engine = hpc_train.parallelize(model, config, world)
        assert hasattr(next(model.parameters()), "placements")
        rows = torch.arange(32.0, dtype=torch.float64).reshape(4, 8)[world.rank :: world.size] / 32
        batch = StepBatch([MicroBatch(rows, torch.tensor([1, 3, 5, 7])[world.rank :: world.size])])
        losses = []
        for _ in range(3):
            sums = engine.forward_backward(batch)
            losses.append(sums.loss.item() / sums.tokens)
            engine.clip(None)
            engine.update(0.01)
        with hpc_train.Checkpointer(tmp_path / str(world.size)) as checkpointer:
            checkpointer.save(3, model=model)
        dist.barrier()
        return losses

    alone, together = run_ranks(train, 1)[0], run_ranks(train, 2)[0]
    assert together == pytest.approx(alone, rel=1e-12)
    assert together[2] < together[0]
    a, b = Linears().double(), Linears().double()
    for model, ranks in ((a, 1), (b, 2)):
        assert hpc_train.Checkpointer(tmp_path / str(ranks)).load_latest(model=model) is not None
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
