"""Every private torch API that this project uses, each with its reason.

Private APIs may change with any release of torch, so the newest release that the tests have passed on is named here.
The ones of `plan rehearse` are in _torch_rehearsal.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # no public way to see operators
from torch.utils._pytree import tree_leaves as tree_leaves  # what DDP and fully_shard see of a model's output
from torch.utils._pytree import tree_map_only as tree_map_only  # no public way to map over their arguments

from hpc_train.step_clock import DeviceClock, StepClock

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

OLDEST_TESTED: Final = (2, 12)
"""The lower bound in pyproject.toml; the quick tests pass on it."""
NEWEST_TESTED: Final = (2, 13)
"""The newest torch that all tests have passed on; docs/testing.md says what newer releases pass.

Newer ones are not refused, because a site's own torch may be the only one that drives its GPUs. But a private API below
may have changed, so `describe_untested_torch` warns."""


def describe_untested_torch(version: str) -> str | None:
    """Return one line of warning for a torch newer than the newest tested one; None for a tested version."""
    if release_numbers(version) <= NEWEST_TESTED:
        return None
    newest = ".".join(map(str, NEWEST_TESTED))
    return (
        f"torch {version} is newer than {newest}, the newest that hpc_train is tested with, and hpc_train uses private "
        f"APIs of torch; if something fails, try pip install 'torch=={newest}.*'"
    )


def release_numbers(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version, such as (2, 13) of 2.13.0+cpu or of 2.13.0a0+git1234."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


PipelineLoss = Callable[[Tensor, Tensor], Tensor]
"""(output of the last stage, target) -> what its backward starts from."""


def abort_process_groups() -> None:
    """End all process groups and their threads without waiting for peers, as the end of a process would.

    The public destroy_process_group waits for collectives that peers may never join.
    """
    dist.distributed_c10d._abort_process_group()


def watch_waits(clock: StepClock, device: torch.device, compiled: bool) -> Callable[[], None]:
    """Tell the clock of every wait for a collective in Python; returns what undoes it.

    torch has no hook that sees waits of all backends, and its flight recorder sees NCCL alone. Pipelines and this
    project wait by Work.wait, DTensor by wait_tensor, and fully_shard by Work.wait on CPUs and by Stream.wait_event on
    GPUs. device: of this rank. compiled: leave wait_tensor alone, because torch.compile traces into it; waits inside
    compiled blocks are then counted as computation.
    """
    undo = [_time_calls(dist.Work, "wait", clock)]
    if not compiled:
        undo.append(_time_calls(dist._functional_collectives, "wait_tensor", clock))
    if device.type == "cuda":
        undo.append(_time_calls(torch.cuda.Stream, "wait_event", clock, caller="torch.distributed.fsdp."))

    def undo_all() -> None:
        for restore in undo:
            restore()

    return undo_all


def _time_calls(owner: Any, name: str, clock: StepClock, caller: str = "") -> Callable[[], None]:
    """Have the clock time every call of a function that waits for a collective; returns what undoes it.

    caller: count only calls from modules whose names begin so. Streams also wait for copies.
    """
    wait = getattr(owner, name)

    def timed_wait(*arguments: Any, **named: Any) -> Any:
        if caller and not sys._getframe(1).f_globals.get("__name__", "").startswith(caller):
            return wait(*arguments, **named)
        begun = clock.begin_wait()
        try:
            return wait(*arguments, **named)
        finally:
            clock.end_wait(begun)

    setattr(owner, name, timed_wait)
    return lambda: setattr(owner, name, wait)


def make_device_clock() -> DeviceClock:
    """Make the clock of a rank whose computation goes to the current stream of its GPU."""
    computation, own_thread = torch.cuda.current_stream(), get_ident()

    def is_own_work() -> bool:
        # Backward runs in a thread of autograd, in the stream of the forward. The threads of saves wait for collectives
        # of their own. Private because torch has no public way to ask whether a thread runs a backward.
        thread = get_ident() == own_thread or torch._C._current_graph_task_id() != -1
        own = thread and torch.cuda.current_stream() == computation
        return own and not torch.cuda.is_current_stream_capturing()

    return DeviceClock(partial(torch.cuda.Event, enable_timing=True), is_own_work)


def record_memory_history(active: bool) -> None:
    """Begin or end recording what the allocator of this process's GPU does. torch has no public way."""
    torch.cuda.memory._record_memory_history("all" if active else None)


def write_memory_snapshot(path: Path) -> None:
    """Write what was recorded, in the format of https://pytorch.org/memory_viz. torch has no public way."""
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def shard_offset(tensor: DTensor) -> tuple[int, ...]:
    """Return the offset of this rank's rectangle in a DTensor."""
    at = tensor.device_mesh.get_coordinate()
    assert at is not None, "this rank is not on the tensor's mesh"
    size, offset = shard_rectangle(tensor, tuple(at))
    assert size == tensor.to_local().shape, f"{tensor.placements} of {tuple(tensor.shape)}"
    return offset


def shard_rectangle(tensor: DTensor, at: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset) of what the rank at this coordinate of its mesh holds of a DTensor.

    torch has no public way to ask a DTensor which part of the whole its local tensor is. Its private one is wrong where
    fully_shard has cut shards of unequal size that lie on another axis already: that is a _StridedShard, private too,
    and means that this axis was cut after those to its right.
    """
    offset, size, mesh = [0] * tensor.ndim, list(tensor.shape), tensor.device_mesh
    cuts = [(axis, how) for axis, how in enumerate(tensor.placements) if isinstance(how, (Shard, _StridedShard))]
    for axis, how in sorted(cuts, key=lambda cut: isinstance(cut[1], _StridedShard)):
        chunk = -(-size[how.dim] // mesh.size(axis))
        begin = min(chunk * at[axis], size[how.dim])
        offset[how.dim] += begin
        size[how.dim] = min(chunk, size[how.dim] - begin)
    return tuple(size), tuple(offset)


def cut_dimension(how: Placement) -> int | None:
    """Return the dimension of a DTensor that a mesh axis cuts; None if it cuts none.

    Private because a _StridedShard is.
    """
    return how.dim if isinstance(how, (Shard, _StridedShard)) else None


def pretend_group(rank: int, ranks: int) -> None:
    """Make a default process group of any size in this process alone; its collectives return at once and move nothing.

    Private because torch has it for its own tests.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())


def all_gather(output: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `output` (ranks, n, ...) with every rank's `mine` (n, ...), both contiguous. torch 2.13 has renamed it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output.flatten(0, 1), mine, group=group)


def reduce_scatter(mine: Tensor, parts: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `mine` (n, ...) with the sum over ranks of their part (ranks, n, ...) for this one, both contiguous.

    torch 2.13 has renamed it.
    """
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(mine, parts.flatten(0, 1), group=group)


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


def check_on_device(condition: Tensor, message: str) -> None:
    """Fail with RuntimeError where `condition`, a scalar, is false, without waiting for the device to know.

    Private because the public assert waits.
    """
    torch._assert_async(condition, message)


def graph_breaks() -> dict[str, int]:
    """Return why torch.compile left code of this process uncompiled, with counts since the process began.

    Code that hit the recompilation limit counts too. Private because torch only logs this, and logs graph breaks only
    if TORCH_LOGS asks for them.
    """
    from torch._dynamo.utils import counters  # takes most of a second, and only compiled runs need it

    others = counters["unimplemented"].items()
    limits = {reason: count for reason, count in others if reason.startswith("Dynamo recompile limit")}
    return {**counters["graph_break"], **limits}


def compile_for_each_shape(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a function anew for each shape of its arguments, however many shapes there are.

    Private because torch otherwise gives up after eight, and has no public way to say so for one function.
    """
    from torch._dynamo.utils import disable_cache_limit

    compiled = torch.compile(function, fullgraph=True, dynamic=False)

    def call(*arguments: Any) -> None:
        with disable_cache_limit():
            compiled(*arguments)

    return call


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


def multiply_tensors(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply every tensor by `factor`, a number or a tensor of one, in place.

    Private because torch has no public way to do it to many tensors with one kernel.
    """
    torch._foreach_mul_(tensors, factor)


def interpolate_tensors(targets: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move every target, in place, towards its end by a share `weight` of the way.

    Private because torch has no public way to do it to many tensors with one kernel.
    """
    torch._foreach_lerp_(targets, ends, weight)


def copy_tensor_lists(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy every source into its target, of the same shape. Lets other threads run meanwhile.

    Private because torch has no public way to copy many tensors by one call.
    """
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """Return the matrix with singular values near 1, in bfloat16, by Newton-Schulz iterations; may change the matrix.

    Private because torch offers it only inside torch.optim.Muon, which needs the whole matrix on each rank.
    """
    from torch.optim import _muon  # few runs need it

    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    return _muon._zeropower_via_newtonschulz(matrix, coefficients, steps, _muon.EPS)


def tensor_version(tensor: Tensor) -> int:
    """Return how many times a tensor was changed in place.

    Private because torch has no public way to tell whether it still holds the values it held when it was seen before.
    """
    return tensor._version


def find_sdpa_backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> SDPBackend:
    """Return the backend that scaled_dot_product_attention would take for these tensors.

    Private because torch has public checks of single backends on CUDA only, and none that tells its own choice.
    """
    grouped = q.shape[1] != k.shape[1]
    return SDPBackend(torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped))


def has_flash_attention(q: Tensor) -> bool:
    """Whether torch has a fused attention for these queries (B, heads, T, head_dim) that gives the log-sum-exp too."""
    if q.device.type == "cpu":
        return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cuda" and fits and torch.backends.cuda.is_flash_attention_available()


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return (attention, log-sum-exp of the scores (B, heads, T)); k and v may have fewer heads.

    Private because the public function keeps the log-sum-exp to itself, without which blocks cannot be merged.
    """
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of flash_attention. Private as that is; out and lse may be those over more keys than k."""
    if q.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(grad, q, k, v, out, lse, 0.0, causal)
        return dq, dk, dv
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # state of dropout's generator
    lengths = (None, None, q.shape[2], k.shape[2])
    dq, dk, dv = backward(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, unused, unused)
    return dq, dk, dv


def run_pipeline_order(
    stages: list[PipelineStage], ranks: tuple[int, ...], order: list[list[str]], micro_batches: int, loss: PipelineLoss
) -> PipelineScheduleMulti:
    """torch's pipeline runtime over any order of actions, such as "2F0"; `ranks`: the pp rank of each stage.

    An order that has no backward is for `eval` alone. Private because torch's public schedules have only their own
    orders, and their `eval` fails where two neighbouring stages are on one rank.
    """
    from torch.distributed.pipelining import schedules  # takes most of a second, and few runs need it

    runtime = schedules._PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss, scale_grads=False)  # type: ignore[no-untyped-call]
    actions = {rank: [schedules._Action.from_str(text) for text in row] for rank, row in enumerate(order)}
    if any("B" in text or "W" in text for row in order for text in row):
        runtime._prepare_schedule_with_comms(actions)
        return runtime
    runtime.stage_index_to_group_rank = dict(enumerate(ranks))
    for stage in stages:
        stage.stage_index_to_group_rank = runtime.stage_index_to_group_rank
    gathered = {rank: schedules._add_unshard_reshard(row) for rank, row in actions.items()}
    sending = schedules._add_send_recv(gathered, ranks.__getitem__, len(ranks))
    if hasattr(schedules, "_add_wait_send"):  # from torch 2.15 on each send has an action that waits for it
        sending = schedules._add_wait_send(sending)
    runtime.pipeline_order_with_comms = sending
    return runtime


def take_over_gathering(schedule: PipelineScheduleMulti, gather_ahead: bool) -> None:
    """Let fully_shard's own hooks decide when the parameters of stages are gathered and freed.

    torch's runtime would gather a whole stage before its first use, and free it if more than two others come first.
    gather_ahead: still gather a stage before its first use, overlapped with computation; it stays gathered.
    """
    from torch.distributed.pipelining.schedules import RESHARD, UNSHARD

    def unshard(action: Any, context: Any) -> None:
        runtime, index = context.schedule_ref, action.stage_index
        runtime.unsharded_stages.add(index)
        (stage,) = (stage for stage in runtime._stages if stage.stage_index == index)
        modules = [module for module in stage.submod.modules() if isinstance(module, FSDPModule)]
        if gather_ahead and modules:
            runtime.unshard_ops[index] += [module.unshard(async_op=True) for module in modules]

    def reshard(action: Any, context: Any) -> None:
        context.schedule_ref.unsharded_stages.discard(action.stage_index)

    runtime: Any = schedule
    runtime.register_custom_function(UNSHARD, unshard)
    runtime.register_custom_function(RESHARD, reshard)


@contextmanager
def defer_receive_memory(stage: PipelineStage) -> Iterator[None]:
    """Inside this context a stage describes what it will receive, but allocates no memory for it.

    Private, as are the next two, because torch's stages keep receive buffers for every micro-batch of a step, although
    only a few are in flight at once.
    """
    device, stage.device = stage.device, torch.device("meta")
    try:
        yield
    finally:
        stage.device = device


def allocate_received(received: Sequence[Any], device: torch.device) -> None:
    """Allocate the receive buffers of one micro-batch. received: torch's descriptions of them."""
    for info in received:
        if info.buffer is not None and info.buffer.is_meta:
            info.buffer = torch.empty_like(info.buffer, device=device)


def release_received(received: Sequence[Any]) -> None:
    """Release the receive buffers; whoever uses the tensors keeps them alive."""
    for info in received:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, device="meta", requires_grad=False)


def drop_last_output(stage: PipelineStage, micro_batch: int) -> None:
    """Let the last stage forget the output of a micro-batch, whose loss alone its backward starts from.

    Private because torch's stages keep the logits of every micro-batch until its backward. torch 2.15 keeps them in
    another attribute.
    """
    if hasattr(stage, "fwd_cache"):
        _, inputs = stage.fwd_cache.pop(micro_batch)
        if stage.has_backward:
            stage.fwd_cache[micro_batch] = (), inputs
        return
    newer: Any = stage
    states: dict[int, Any] = newer._forward_chunk_states
    state = states.pop(micro_batch)
    if stage.has_backward:
        states[micro_batch] = replace(state, output_grad_edges=(), live_outputs=[], releasable=(), send_pending=[])


def backward_of_stage(outputs: Any, gradients: Any, inputs: Any) -> tuple[Tensor | None, ...]:
    """Accumulate the gradients of a stage's parameters; returns its input gradients, which are not kept.

    Private, as are the next two, because torch's stages decide themselves when fully_shard reduces and frees.
    """
    from torch.distributed.pipelining._backward import stage_backward

    return stage_backward(outputs, gradients, inputs)


PendingWeights = list[dict[str, Any]]
"""Inputs of the weight gradients: nodes of the graph, and the gradients of their results."""


def backward_of_inputs(
    outputs: Any, gradients: Any, inputs: Any, module: FSDPModule
) -> tuple[tuple[Tensor | None, ...], PendingWeights]:
    """Return the input gradients of a stage, and what its weight gradients can be computed from later.

    The weights of the graph are the gathered ones, whose memory may have been freed since.
    """
    from torch.distributed.pipelining._backward import stage_backward_input

    weights = [weight for group in _groups_of(module) for weight in _gathered_weights(group)]
    return stage_backward_input(outputs, gradients, inputs, iter(weights))


def backward_of_weights(module: FSDPModule, pending: PendingWeights, ahead: int) -> None:
    """Compute a stage's weight gradients, one fully_shard group after another, starting with the last.

    Each group is gathered if needed, then reduced and freed as after any other backward. ahead: number of groups
    gathered before the one that computes. Private because fully_shard's hooks run only where input gradients are
    computed.
    """
    from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc, stage_backward_weight

    groups = list(reversed(_groups_of(module)))
    owner = {_get_grad_fn_or_grad_acc(w): at for at, group in enumerate(groups) for w in _gathered_weights(group)}
    left: list[tuple[set[int], dict[str, Any]]] = [
        ({owner[node] for node in entry["params"]}, entry) for entry in pending
    ]
    for at, group in enumerate(groups):
        roots = [entry for used, entry in left if at in used]
        used = {at}.union(*(used for used, _ in left if at in used))
        left = [entry for entry in left if at not in entry[0]]
        for index in [*sorted(used), *range(at + 1, min(at + 1 + ahead, len(groups)))]:
            _gather(groups[index], wait=index in used)
        weights = [weight for index in used for weight in _gathered_weights(groups[index])]
        stage_backward_weight(iter(weights), roots)
        group.post_backward()
    module._get_fsdp_state()._root_post_backward_final_callback()


def finish_backward(module: FSDPModule) -> None:
    """Reduce and free the groups of a stage that autograd has not reached: those of the inputs of the first stage.

    Private because from torch 2.15 on a pipeline leaves such groups gathered until the end of the step.
    """
    for group in reversed(_groups_of(module)):
        if getattr(group, "_post_backward_pending", False) and group.reduce_grads:
            state = group._training_state
            group.post_backward()
            group._training_state = state


def _groups_of(module: FSDPModule) -> list[Any]:
    """Return fully_shard's groups of a stage; the group of what is in no block comes first."""
    states = module._get_fsdp_state()._state_ctx.all_states
    return [group for state in states for group in state._fsdp_param_groups]


def _gathered_weights(group: Any) -> list[nn.Parameter]:
    """Return the weights a group's modules compute with, whether or not they are gathered right now."""
    return [
        fsdp_param._unsharded_param for fsdp_param in group.fsdp_params if fsdp_param._unsharded_param.requires_grad
    ]


def _gather(group: Any, wait: bool) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    group._training_state = TrainingState.PRE_BACKWARD
    group.unshard(group.unshard_async_op)
    if wait:
        group.wait_for_unshard()


def set_local(tensor: DTensor, local: Tensor) -> None:
    """Let a DTensor hold `local`, of the same shape and dtype, in place of what it holds of the whole now.

    Private because DTensor.from_local would copy a tensor in CPU memory to the device of the mesh.
    """
    tensor._local_tensor = local


def move_shards(module: FSDPModule, move: Callable[[Tensor], Tensor]) -> None:
    """Give the shards of a module's own fully_shard groups another memory.

    move: from a flat shard, filled up to the same length on every rank, to a copy of it, contiguous. Private because
    fully_shard allocates its shards itself, and would copy an uneven one that it is given into such a filled-up one.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for fsdp_param in group.fsdp_params:
            flat, shard = move(fsdp_param._sharded_param_data), fsdp_param.sharded_param
            assert isinstance(shard, DTensor)
            fsdp_param._sharded_param_data = flat
            set_local(shard, flat.as_strided(fsdp_param.sharded_size, fsdp_param.contiguous_sharded_stride))


def memory_number(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's memory as long as it exists; works on the meta device too.

    Private because the public pointer is 0 if there is no memory.
    """
    return int(tensor.untyped_storage()._cdata)


def is_memoryless(tensor: Tensor) -> bool:
    """Whether a tensor, or what a DTensor holds here, has no memory as in a rehearsal (_torch_rehearsal.py)."""
    return isinstance(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, FakeTensor)
