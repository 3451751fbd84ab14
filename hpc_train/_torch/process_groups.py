"""Process groups, meshes and collectives for which torch has no public function."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def abort_process_groups() -> None:
    """End all process groups and their threads without waiting for peers, as the end of a process would.

    The public destroy_process_group waits for collectives that peers may never join.
    """
    dist.distributed_c10d._abort_process_group()


def pretend_group(rank: int, ranks: int) -> None:
    """Make a default process group of any size in this process alone; its collectives return at once and move nothing.

    Private because torch has it for its own tests.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def make_named_group(ranks: Sequence[int], name: str, store: dist.Store, timeout: timedelta) -> dist.ProcessGroup:
    """Make a gloo group of some ranks, of which this is one. Only they call it, with the same name.

    Private because the public new_group, where not all ranks call it, takes a name from how many groups a rank is in,
    which may differ between ranks.
    """
    group, _ = dist.distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend("gloo"),
        store,
        name,  # type: ignore[arg-type]
        timeout=timeout,
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    assert isinstance(group, dist.ProcessGroup)
    return group


def find_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name (ProcessGroup.group_name).

    Private because torch has no public way back from a name, and an operator of a compiled graph takes no group.
    """
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join several axes of a mesh into one, which its root mesh then knows by `name` too. A collective.

    Private because torch has no public way to reduce over two axes at once. The same call twice is harmless.
    """
    return mesh._flatten(name)


def split_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Split one axis of a mesh into several, outermost first; every rank of the job calls it.

    Private because torch has no public way to cut an axis within the mesh whose other axes stay in use.
    """
    return mesh._unflatten(0, sizes, names)


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Join the axes of two meshes of the same job into one mesh.

    Private because torch deprecates the public way, to slice the root mesh, for axes that `flatten` made.
    """
    return DeviceMesh._concatenate([first, second])


def all_gather(output: Tensor, local: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `output` (ranks, n, ...) with every rank's `local` (n, ...), both contiguous. torch 2.13 has renamed it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output.flatten(0, 1), local, group=group)


def reduce_scatter(local: Tensor, parts: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `local` (n, ...) with the sum over ranks of their part (ranks, n, ...) for this one, both contiguous.

    torch 2.13 has renamed it.
    """
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(local, parts.flatten(0, 1), group=group)


def fused_gather_matmul(x: Tensor, matrices: list[Tensor], group: str) -> tuple[Tensor, list[Tensor]]:
    """All-gather x (B, T / size, K) over positions -> (B, T, K), and multiply that by every matrix (K, N_i).

    Private, as is the next one, because torch has its products over symmetric memory only as operators of its own
    compiler pass. group: its name. On a CPU torch's fallback, a collective and then the products.
    """
    from torch.distributed import _symmetric_memory  # few runs need it

    if x.device.type == "cuda":
        gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(x, matrices, 1, group)
    else:
        gathered, products = _symmetric_memory._fused_all_gather_matmul_fallback(x, matrices, 1, group)  # type: ignore[arg-type]
    return gathered, products


def fused_matmul_scatter(x: Tensor, matrix: Tensor, group: str) -> Tensor:
    """Multiply x (B, T, K) by a matrix (K, N), and reduce-scatter over positions -> (B, T / size, N)."""
    from torch.distributed import _symmetric_memory

    if x.device.type == "cuda":
        output: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 1, group)
        return output
    return _symmetric_memory._fused_matmul_reduce_scatter_fallback(x, matrix, "sum", 1, group)  # type: ignore[arg-type]
