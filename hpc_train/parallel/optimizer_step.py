"""Everything after backward, shared by the engines: gradient norm, clipping, the optimizer, and the list of shards.

The gradient norm covers all axes and counts only one of several copies of a shard. The rank's part of the model and of
the optimizer is listed as rectangles of logical tensors (TensorShard), which is all that a checkpoint sees. The order
of the list is the same on every call and on every rank that holds the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from heapq import heapreplace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train._torch.tensors import multiply_tensors
from hpc_train.components import explain_user_code
from hpc_train.config.optim import EmaConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard, World
from hpc_train.models.adapters.nf4 import Nf4Weight
from hpc_train.parallel.materialise import is_rehearsal
from hpc_train.parallel.mesh_axes import find_replica, find_split_axes, get_axis_degree
from hpc_train.parallel.precision.number_formats import LossScale
from hpc_train.shard_rectangles import FusedParts, find_fused_parts, list_rectangles

if TYPE_CHECKING:
    from hpc_train.parallel.optimizers.weight_average import WeightAverage

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
"""Makes an optimizer over the parameters that a rank keeps of a model after it has been split."""


class Stages(nn.ModuleList):
    """The pipeline stages of a rank, for an OptimizerFactory; parameters have the same names as in the model."""


class TotalNorm:
    """Computes the norm of the whole model's gradient. Which shards this rank counts never changes: found once."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, borrowed: frozenset[nn.Parameter]) -> None:
        """parameters: those of this rank. borrowed: those among them that another stage counts (tied embeddings).

        Of several copies of a shard only the first counts.
        """
        self._world = world
        is_whole = not any(find_split_axes(p) for p in parameters) and get_axis_degree(world, "pp") == 1
        self._is_local = is_whole or world.size == 1
        self._counted = [p for p in parameters if is_whole or (p not in borrowed and find_replica(p, world)[0] == 0)]

    @torch.no_grad()
    def compute(self) -> Tensor:
        """Return the norm, a scalar on the device, the same on every rank; a collective where ranks have parts."""
        gradients = [get_local(p.grad) for p in self._counted if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients).to(self._world.device)
        if self._is_local:
            return norm
        square = norm.double().square()
        dist.all_reduce(square, group=self._world.group)
        return square.sqrt()


def get_local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients so that a total norm of `norm` becomes at most max_norm.

    As torch.nn.utils.clip_grads_with_norm_, but by what this rank holds: over DTensors torch plans the product of the
    whole list at the first step, which takes a second for 26 tensors on three axes.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients_by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in (get_local(p.grad) for p in parameters if p.grad is not None):
        gradients_by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), gradients in gradients_by_kind.items():
        multiply_tensors(gradients, factor.to(device))


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor`, in place."""
    gradients = [get_local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        multiply_tensors(gradients, factor)


class GradientUpdate(Protocol):
    """The steps an engine makes after backward, in this order: clip, update."""

    @property
    def loss_scale(self) -> float:
        """Factor on the loss before its backward (fp16); 1 elsewhere."""

    def norm(self) -> Tensor:
        """Return the norm of the gradient of the global batch, a scalar, without the loss scale; usually a collective.

        An asynchronous worker has a gradient of its own, and so a norm of its own.
        """

    def clip(self, max_norm: float | None) -> Tensor:
        """Clip the gradient to `max_norm` (None: not at all); returns its norm before that."""

    def update(self, lr: float) -> bool:
        """Step the optimizer and clear the gradients; returns False if the step was skipped, as fp16 may do."""

    def clear_gradients(self) -> None:
        """Forget the gradients without a step."""

    def shards(self) -> Iterator[TensorShard]:
        """List what this rank saves and loads: parameters, buffers, optimizer state."""


@runtime_checkable
class ReplacesWeights(Protocol):
    """Something with weights that evaluations use instead of the trained ones."""

    def replace_weights(self) -> AbstractContextManager[None]:
        """Let them take the place of the trained ones in a block of code."""


class OptimizerUpdates:
    """Applies gradients to the parameters of all stages of this rank."""

    def __init__(
        self,
        parts: list[nn.Module],
        optimizer: torch.optim.Optimizer,
        world: World,
        borrowed: frozenset[nn.Parameter] = frozenset(),
        scaling: LossScale | None = None,
        ema: EmaConfig | None = None,
    ) -> None:
        """borrowed: parameters of this rank that another stage owns (tied embeddings). scaling: for fp16.

        ema: of the average of the weights; None, or without a decay: none is kept.
        """
        self._parts, self._optimizer, self._world, self._borrowed = parts, optimizer, world, borrowed
        self._trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._scaling = scaling
        self._total_norm = TotalNorm(self._trained, world, borrowed)
        self._norm: Tensor | None = None
        """Norm of the gradient after unscaling."""
        initialise_optimizer_state(optimizer)
        self._average: WeightAverage | None = None
        if ema is not None and ema.decay is not None:
            from hpc_train.parallel.optimizers.weight_average import WeightAverage

            self._average = WeightAverage(optimizer, ema)

    @property
    def loss_scale(self) -> float:
        """The factor to multiply the loss by before backward; 1 except for fp16."""
        return 1.0 if self._scaling is None else self._scaling.factor

    def norm(self) -> Tensor:
        """Compute the norm of the current gradient over all axes, without the loss scale."""
        norm = self._total_norm.compute()
        return norm if self._scaling is None else norm / self.loss_scale

    def clip(self, max_norm: float | None) -> Tensor:
        """See interfaces.Engine."""
        norm = self.norm()
        if self._scaling is not None:
            scale_gradients(self._trained, 1.0 / self.loss_scale)
            self._norm = norm
        if max_norm is not None:
            clip_gradients(self._trained, max_norm, norm)
        return norm

    def update(self, lr: float) -> bool:
        """See interfaces.Engine. With a loss scale it waits for the device, to know whether the gradient is finite."""
        if self._scaling is not None and not self._check_finite():
            self.clear_gradients()
            return False
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        with explain_user_code("in the optimizer's step"):
            self._optimizer.step()
        self.clear_gradients()
        if self._average is not None:
            self._average.update()
        return True

    def _check_finite(self) -> bool:
        """Whether the scaled gradient is finite, the same on every rank; adjusts the loss scale."""
        assert self._scaling is not None
        norm = self.clip(None) if self._norm is None else self._norm
        self._norm = None
        finite = bool(norm.isfinite())
        self._scaling.adjust(finite)
        return finite

    def use_evaluation_weights(self) -> AbstractContextManager[None]:
        """Let the average of the weights, if one is kept for that, take their place in a block of code."""
        source = self._find_evaluation_weights()
        return nullcontext() if source is None else source.replace_weights()

    def _find_evaluation_weights(self) -> ReplacesWeights | None:
        if self._average is not None and self._average.evaluates:
            return self._average
        return self._optimizer if isinstance(self._optimizer, ReplacesWeights) else None

    def clear_gradients(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def shards(self) -> Iterator[TensorShard]:
        """See interfaces.Engine."""
        exchanged = self._find_evaluation_weights() is not None
        for shard in list_tensor_shards(self._parts, self._optimizer, self._world, self._borrowed):
            yield replace(shard, still=False) if exchanged else shard  # an evaluation exchanges weights and average
        if self._scaling is not None:
            yield from self._scaling.shards(self._world)


def initialise_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state, which torch makes at the first step only, so that it can be saved and loaded.

    A step with a learning rate and a gradient of 0 leaves every parameter as it is. Raises UserError for an optimizer
    of the user's own that changes parameters then, or whose state cannot be saved.
    """
    before = None if _is_torch_adamw(optimizer) or is_rehearsal() else _describe_start(optimizer)
    changed = ("lr", "weight_decay")
    saved_settings: list[dict[str, Any]] = [
        {key: g[key] for key in changed if key in g} for g in optimizer.param_groups
    ]
    for group, settings in zip(optimizer.param_groups, saved_settings, strict=True):
        group.update(dict.fromkeys(settings, 0.0))  # SGD's decay would go into its momentum
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with explain_user_code("in the optimizer's first step, with gradients and a learning rate of 0"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, settings in zip(optimizer.param_groups, saved_settings, strict=True):
        group.update(settings)
        for parameter in group["params"]:
            step = optimizer.state[parameter].get("step")
            if isinstance(step, Tensor):
                step.zero_()
    if before is not None:
        _check_user_state(optimizer, before)


def _is_torch_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's AdamW, of which it is known what a step with a gradient of 0 changes."""
    if not isinstance(optimizer, torch.optim.AdamW) or type(optimizer) is torch.optim.AdamW:
        return type(optimizer) is torch.optim.AdamW
    from hpc_train.parallel.optimizers.sharded import ShardedAdamW  # most runs have no DTensors

    return type(optimizer) is ShardedAdamW


def _describe_start(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what a step with a gradient of 0 must not change: sums of parameters, and settings of their groups."""
    sums = [get_local(p).detach().double().sum() for group in optimizer.param_groups for p in group["params"]]
    settings = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
    return [torch.stack(sums).tolist() if sums else [], settings]


def _check_user_state(optimizer: torch.optim.Optimizer, before: list[Any]) -> None:
    """Raise UserError for an optimizer that could not be resumed as it was: all its state must be tensors."""
    name = type(optimizer).__name__
    sums, settings = _describe_start(optimizer)
    if sums != before[0]:
        raise UserError(
            f"optim: {name} changes parameters in a step whose gradient and learning rate are 0, which makes its state"
        )
    for group, earlier in zip(settings, before[1], strict=True):
        changed = [key for key in group if repr(group[key]) != repr(earlier.get(key))]
        if changed:
            raise UserError(
                f"optim: {name} keeps {changed[0]} in its parameter groups and changes it, so it would not be saved; "
                "keep it as a tensor in state[parameter]"
            )
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            _check_state_value(name, key, value, parameter)


def _check_state_value(name: str, key: object, value: object, parameter: Tensor) -> None:
    if not isinstance(key, str) or not isinstance(value, Tensor):
        raise UserError(
            f"optim: {name} has the state {key}, a {type(value).__name__}, which cannot be saved; make it a tensor"
        )
    kind = type(get_local(value))
    if kind not in (Tensor, nn.Parameter):
        raise UserError(
            f"optim: {name} has the state {key} as a {kind.__name__}, whose numbers are packed, so it "
            "would fit no other layout; use an optimizer with plain tensors"
        )
    is_rectangle = value.ndim == 0 or value.shape == parameter.shape  # else only a DTensor says what a rank has of it
    if isinstance(value, DTensor):
        is_rectangle = not any(part.is_partial() for part in value.placements)
    if isinstance(parameter, DTensor) and not is_rectangle:
        raise UserError(
            f"optim: {name} has the state {key} of shape {tuple(value.shape)} for a parameter {tuple(parameter.shape)} "
            "that is split over ranks, so it would not fit another layout; use parallel=ddp"
        )


def list_tensor_shards(
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    world: World,
    borrowed: frozenset[nn.Parameter],
) -> Iterator[TensorShard]:
    """List parameters, persistent buffers and optimizer state of this rank's stages.

    In the same order on every call, and on every rank that holds the same stages. What belongs to a `borrowed`
    parameter is loaded here and written by the stage that owns it. What is trained, and its optimizer state, is still:
    a forward may write buffers, and parameters that are not trained.
    """
    writers = _WriterChoice()
    for part in parts:
        fused = find_fused_parts(part)
        for parameter, name, tensor in _list_tensors(part, optimizer):
            still = parameter is not None and parameter.requires_grad
            parts_of_it = fused[parameter].fit(tuple(tensor.shape)) if parameter in fused else None
            shards = _make_tensor_shards(name, tensor.detach(), writers, world, parameter in borrowed, parts_of_it)
            yield from (replace(shard, still=still) for shard in shards)


def _list_tensors(part: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter | None, str, Tensor]]:
    named = [(p, name) for name, p in part.named_parameters() if p.requires_grad]
    frozen = [(p, name) for name, p in part.named_parameters() if not p.requires_grad]
    if any(isinstance(module, Nf4Weight) for module in part.modules()):
        frozen = []  # read again from model.path: a checkpoint has the adapters only
    persistent = set(part.state_dict(keep_vars=True))
    entries: list[tuple[nn.Parameter | None, str, Tensor]] = [(p, name, p) for p, name in [*named, *frozen]]
    entries += [(None, name, buffer) for name, buffer in part.named_buffers() if name in persistent]
    for p, name in named:
        entries += [(p, f"optim.{key}.{name}", value) for key, value in optimizer.state[p].items()]
    return entries


class _WriterChoice:
    """Chooses which rank writes a shard with copies: the one with least to write so far; the same on all ranks."""

    def __init__(self) -> None:
        self._loads: dict[int, list[tuple[int, int]]] = {}

    def next(self, copies: int, elements: int) -> int:
        loads = self._loads.setdefault(copies, [(0, holder) for holder in range(copies)])
        load, holder = loads[0]
        heapreplace(loads, (load + elements, holder))
        return holder


def _make_tensor_shards(
    name: str, tensor: Tensor, writers: _WriterChoice, world: World, borrowed: bool, fused: FusedParts | None
) -> Iterator[TensorShard]:
    copy_index, count = find_replica(tensor, world)
    # Counted from the copy that was chosen to write, which becomes replica 0. A borrowed parameter is written by the
    # stage that owns it, so none of its copies here is 0.
    replica = (copy_index - writers.next(count, tensor.numel())) % count + (count if borrowed else 0)
    for offset, local in list_rectangles(tensor, fused):
        yield TensorShard(name, tuple(tensor.shape), tensor.dtype, offset, local, replica)
