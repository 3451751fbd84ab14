"""Checkpointer in a loop of one's own: plain, DDP, FSDP2, HSDP and tensor parallel, saved in one and loaded in another.

The reference is the training that never stopped: three steps, a save, a load into fresh objects, two more steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from drawn import draw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import hpc_train
from hpc_train.checkpoint import Checkpointer, CheckpointError, list_committed_steps, verify_step
from hpc_train.checkpoint.storage.step_selection import open_step
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

Array = npt.NDArray[Any]


class Small(nn.Module):
    """Sizes that divide by no number of ranks, a buffer, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 5)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 6) -> (N, 5)."""
        out: Tensor = self.norm(self.second(torch.relu(self.first(x)))) * self.scale
        return out


def make_plain() -> nn.Module:
    """The same values on every rank."""
    torch.manual_seed(7)
    return Small().double()


def make_ddp() -> nn.Module:
    return DistributedDataParallel(make_plain())


def make_fsdp() -> nn.Module:
    model = make_plain()
    for part in (model.first, model.second):
        assert isinstance(part, nn.Module)
        fully_shard(part)
    fully_shard(model)
    return model


def make_hsdp() -> nn.Module:
    model = make_plain()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("copy", "shard")))
    return model


def make_tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(make_plain(), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def make_both() -> nn.Module:
    """Tensor parallel and sharded: the rows of `first` are cut twice."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "tp"))
    model = parallelize_module(make_plain(), mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    return model


LAYOUTS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (make_plain, 1),
    "ddp": (make_ddp, 2),
    "fsdp 2": (make_fsdp, 2),
    "fsdp 3": (make_fsdp, 3),
    "hsdp": (make_hsdp, 4),
    "tp": (make_tensor_parallel, 2),
    "both": (make_both, 4),
}


def make_adam(model: nn.Module) -> Optimizer:
    """Two groups, one without decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.05)


def make_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Steps on data that every rank has: so all layouts compute the same."""
    for step in steps:
        x = torch.linspace(-1, 1 + step, 8 * 6, dtype=torch.float64).reshape(8, 6)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Array]:
    """Whole tensors, on every rank."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    tensors = {name: t.detach() for name, t in inner.state_dict().items()}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).numpy().copy() for name, t in tensors.items()}


def in_process(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    return run_ranks(lambda world, *rest: function(*rest), ranks, *args)


def save_after_three(layout: str, directory: Path, make_optimizer: Callable[[nn.Module], Optimizer]) -> dict[str, Any]:
    model = LAYOUTS[layout][0]()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, range(3))
    scheduler.step()
    model.get_buffer("module.seen" if layout == "ddp" else "seen").fill_(3)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(3, model=model, optimizer=optimizer, extra={"scheduler": scheduler.state_dict()})
    saved = values(model)
    train(model, optimizer, range(3, 5))
    return {"saved": saved, "end": values(model)}


def load_and_go_on(layout: str, directory: Path, make_optimizer: Callable[[nn.Module], Optimizer]) -> dict[str, Any]:
    model = LAYOUTS[layout][0]()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 9.0)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loaded = Checkpointer(directory).load_latest(model=model, optimizer=optimizer)
    assert loaded is not None
    assert loaded.step == 3
    scheduler.load_state_dict(loaded.extra["scheduler"])
    assert scheduler.last_epoch == 1
    assert all(p.grad is None for p in model.parameters())
    got = values(model)
    train(model, optimizer, range(3, 5))
    return {"saved": got, "end": values(model)}


def same(a: dict[str, Array], b: dict[str, Array]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


LAYOUTS_AND_OPTIMIZERS = {
    f"{layout}, {name}": (layout, make) for layout in LAYOUTS for name, make in (("adam", make_adam), ("sgd", make_sgd))
}


@pytest.mark.parametrize("case", draw(LAYOUTS_AND_OPTIMIZERS, ["plain, adam", "fsdp 3, sgd", "both, adam"]))
def test_saved_in_one_layout_and_loaded_in_another(tmp_path: Path, case: str) -> None:
    layout, make_optimizer = LAYOUTS_AND_OPTIMIZERS[case]
    ring = list(LAYOUTS)
    before = in_process(save_after_three, LAYOUTS[layout][1], layout, tmp_path, make_optimizer)
    assert verify_step(tmp_path, 3) == []
    for other in (layout, ring[(ring.index(layout) + 2) % len(ring)]):
        for rank in in_process(load_and_go_on, LAYOUTS[other][1], other, tmp_path, make_optimizer):
            assert same(rank["saved"], before[0]["saved"]), other
            if other == layout:
                assert same(rank["end"], before[0]["end"])
            for name, tensor in rank["end"].items():
                np.testing.assert_allclose(tensor, before[0]["end"][name], rtol=1e-10, atol=1e-10)


class Holder(nn.Module):
    """A module with children of its own, one of which is called as DDP calls what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.module = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)


def save_wrapped_inside(directory: Path) -> None:
    model = Holder().double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 2.0)
    model.inner[0] = DistributedDataParallel(torch.compile(model.inner[0]))
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, model=model, optimizer=make_sgd(model))


def test_names_do_not_show_ddp_inside_of_a_module(tmp_path: Path) -> None:
    in_process(save_wrapped_inside, 2, tmp_path)
    names = {tensor.name for tensor in open_step(tmp_path, 1).manifest.step_layout.tensors}
    assert {name for name in names if "optim." not in name} == {name for name, _ in Holder().named_parameters()}
    plain = Holder().double()
    assert Checkpointer(tmp_path).load_latest(model=plain, optimizer=make_sgd(plain)) is not None
    assert all(parameter.eq(2).all() for parameter in plain.parameters())


def test_every_rank_writes_a_part_of_what_all_hold(tmp_path: Path) -> None:
    in_process(save_after_three, 2, "ddp", tmp_path, make_adam)
    sizes = [file.stat().st_size for file in sorted((tmp_path / "step-3/shards").rglob("*.h5"))]
    assert len(sizes) == 2
    assert min(sizes) > 0.25 * sum(sizes)


EXTRA = {
    "plain": [1, 2.5, None, True, "é"],
    "tuple": (1, (2, "x")),
    "tensor": torch.arange(6).reshape(2, 3),
    "array": np.arange(3, dtype=np.float32),
    "keys": {1: "a", (2, 3): "b"},
    "inf": [math.inf, -math.inf],
    "counter": Counter({4: 1}),
    "$tuple": 5,
    "marked": {"$tensor": {"index": 0}},
    "number": np.float64(0.1),
}


def test_extra_comes_back_with_its_types(tmp_path: Path) -> None:
    model = make_plain()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, model=model, extra=EXTRA)
        extra = checkpointer.load(0, model=model)
    assert torch.equal(extra.pop("tensor"), EXTRA["tensor"])  # type: ignore[arg-type]
    array = extra.pop("array")
    assert (array.dtype, array.tolist()) == (np.float32, [0.0, 1.0, 2.0])
    assert extra == {name: value for name, value in EXTRA.items() if name not in ("tensor", "array")}


def test_the_newest_sound_step_is_loaded_and_old_ones_are_deleted(tmp_path: Path) -> None:
    model = make_plain()
    assert Checkpointer(tmp_path).load_latest(model=model) is Checkpointer(tmp_path).latest_step() is None
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2, 3):
            future = checkpointer.save_async(step, model=model, extra={"at": step})
        assert future.result(timeout=60).step == 3
    assert list_committed_steps(tmp_path) == [2, 3]
    assert Checkpointer(tmp_path).latest_step() == 3
    shard = next((tmp_path / "step-3/shards").rglob("*.h5"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    loaded = Checkpointer(tmp_path).load_latest(model=model)
    assert loaded == (2, {"at": 2})


def test_numbers_in_the_state_and_parameters_without_state(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        """As optimizers outside of torch do it: the steps are an int."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p]["step"] = self.state[p].get("step", 0) + 1

    model = make_plain()
    model.get_parameter("scale").requires_grad_(False)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.5)
    train(model, optimizer, range(3))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, model=model, optimizer=optimizer)
        fresh = make_plain()
        other = Counting(fresh.parameters(), lr=0.7, momentum=0.5)
        checkpointer.load(3, model=fresh, optimizer=other)
        assert other.state[fresh.get_parameter("first.weight")]["step"] == 3
        assert fresh.get_parameter("scale") not in other.state
        assert other.param_groups[0]["lr"] == 0.1
        checkpointer.load(3, model=fresh, optimizer=other)  # into state that is there
        assert torch.equal(
            other.state[fresh.get_parameter("first.weight")]["momentum_buffer"],
            optimizer.state[model.get_parameter("first.weight")]["momentum_buffer"],
        )


def test_several_modules_and_a_compiled_one(tmp_path: Path) -> None:
    model, average = make_plain(), make_plain()
    nn.init.constant_(average.get_parameter("first.weight"), 2.0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model={"model": cast(nn.Module, torch.compile(model)), "average": average})
        a, b = make_plain(), make_plain()
        checkpointer.load(1, model={"average": a, "model": b})
    assert same(values(a), values(average))
    assert same(values(b), values(model))


def _fail_on_one_rank(world: World, directory: Path) -> str:
    model = make_plain()
    optimizer = make_sgd(model)
    checkpointer = Checkpointer(directory, world)
    if world.rank == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4))]})
    with pytest.raises(UserError) as refused:
        checkpointer.save(1, model=model, optimizer=optimizer)
    return str(refused.value)


def _fail_on_the_disk(world: World, directory: Path) -> str:
    with Checkpointer(directory, world) as checkpointer:
        checkpointer.save(1, model=make_plain())
        if world.rank == 0:
            (directory / "lock").unlink()  # as if another job had taken over
        dist.barrier()
        with pytest.raises(CheckpointError) as failed:
            checkpointer.save(2, model=make_plain())
    return str(failed.value)


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    words = run_ranks(_fail_on_one_rank, 2, tmp_path)
    assert words[0] == words[1]
    assert "has a parameter of shape (4,) that is not in model=" in words[0]
    assert not (tmp_path / "step-1").exists()
    words = run_ranks(_fail_on_the_disk, 2, tmp_path)
    assert words[0] == words[1]
    assert list_committed_steps(tmp_path) == [1]


def test_one_line_says_what_is_wrong(tmp_path: Path) -> None:
    model = make_plain()
    adam = make_adam(model)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(UserError, match=r"extra\['f'\] is a function"):
            checkpointer.save(1, model=model, extra={"f": make_plain})
        for wrong in (1.5, 2.0, "3", True):  # no load would look for step-2.0
            with pytest.raises(UserError, match=f"step {wrong!r} cannot be saved; steps are whole numbers"):
                checkpointer.save(wrong, model=model)  # type: ignore[arg-type]
        for none in (None, {"model": None}, [model, 3]):
            with pytest.raises(UserError, match=r"model= contains (NoneType|int); give modules"):
                checkpointer.save(1, model=none)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="step -1 cannot be saved"):
            checkpointer.save(-1, model=model)
        checkpointer.save(1, model=model)
        with pytest.raises(UserError, match="has no optimizer state; leave optimizer= out"):
            checkpointer.load(1, model=model, optimizer=adam)
        train(model, adam, range(1))
        checkpointer.save(2, model=model, optimizer=adam)
        with pytest.raises(UserError, match="saved with 2 parameter groups, this optimizer has 1"):
            checkpointer.load(2, model=model, optimizer=make_sgd(model))
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim < 2]
        swapped = torch.optim.AdamW([{"params": others}, {"params": matrices}])
        with pytest.raises(UserError, match="was saved in group 0 of the optimizer, here it is in group 1"):
            checkpointer.load(2, model=model, optimizer=swapped)
        sgd = torch.optim.SGD([{"params": matrices}, {"params": others}], lr=0.1)
        with pytest.raises(UserError, match="which SGD does not make"):
            checkpointer.load(2, model=model, optimizer=sgd)
        with pytest.raises(UserError, match="has no tensor"):
            checkpointer.load(2, model=nn.Linear(2, 2))
    with pytest.raises(UserError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)
    assert hpc_train.Checkpointer is Checkpointer
