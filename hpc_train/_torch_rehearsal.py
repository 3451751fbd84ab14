"""The private torch APIs of `plan rehearse`, each with its reason; see _torch.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only


class MemorylessMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Inside of it new tensors have shape, dtype and device, but no memory; small ones of integers stay real.

    Meshes, schedules and counts of tokens are integers, so they are computed as ever. Whoever asks for a value of a
    tensor without memory is told 1, or True. Private because torch has the mode for its compiler; it knows the shape
    of every operator's result, which is what a rehearsal runs on.
    """

    def __init__(self, seen: Callable[[Any, Sequence[Tensor]], None]) -> None:
        """seen: called with the result of every operator that is really part of the work, and what it was given."""
        super().__init__(allow_non_fake_inputs=True)
        self._seen = seen
        self._again = 0
        """How often it was entered while it was on: DTensor does so to learn the shape of a whole result, and an
        operator without a rule of its own to be taken apart, which a kernel does without these steps' memory."""

    def __enter__(self) -> MemorylessMode:
        super().__enter__()
        self._again += not self.enter_stack[-1][0]
        return self

    def __exit__(self, *error: Any) -> None:
        self._again -= not self.enter_stack[-1][0]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """See torch."""
        kwargs = kwargs or {}
        if func.namespace == _OWN:
            with self:
                return _operator_function(func)(*args, **kwargs)
        given = list(tensors_in((*args, *kwargs.values())))
        fake = any(isinstance(tensor, FakeTensor) for tensor in given)
        if func in _ASKING and (fake or any(tensor.is_meta for tensor in given)):
            return _value(given[0].dtype) if func is torch.ops.aten._local_scalar_dense.default else True
        if not fake and _makes_large(given):
            (args, kwargs), fake = self._forget_values((args, kwargs)), True
            given = list(tensors_in((*args, *kwargs.values())))
        if fake or _needs_memory(given, args, kwargs):
            out = self._shaped(func, types, args, kwargs)
        else:
            out = self._without_memory(func(*args, **kwargs), given)
        if not self._again:
            self._seen(out, given)
        return out

    def _without_memory(self, out: Any, given: Sequence[Tensor]) -> Any:
        """A real result, unless it is new and no integers, as a table of cosines of positions is."""
        if not isinstance(out, Tensor) or isinstance(out, DTensor) or not out.is_floating_point() or out.is_meta:
            return out
        return out if any(out is tensor for tensor in given) else self.from_tensor(out)

    def _forget_values(self, arguments: Any) -> Any:
        """Return an operator's arguments with tensors without memory in place of real ones."""
        return tree_map_only(Tensor, self.from_tensor, arguments)

    def _shaped(self, func: Any, types: Sequence[type], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        self._again += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._again -= 1


_OWN = "hpc_train"
"""Namespace of our own operators. They are Python: the operators that they call take memory, and are counted."""


def _operator_function(func: Any) -> Callable[..., object]:
    """Return the Python function of one of our operators, which torch.library.custom_op shows to nobody."""
    function: Callable[..., object] = OPDEFS[func.name()]._init_fn
    return function


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Of an operator's arguments or results: a tensor, or one or more levels of lists and tuples with some."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)


UNKNOWN_SHAPE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What Pretending raises where the shape of a result depends on values, as of torch.nonzero."""
_ASKING = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.allclose.default,
    torch.ops.aten.equal.default,
)
_MOST = 1 << 22
"""Elements of a new tensor of integers that stays real."""


def _makes_large(given: Sequence[Tensor]) -> bool:
    """Whether an operator on small tensors with values, such as hashes of positions, makes one too large to compute."""
    if len(given) < 2 or any(isinstance(tensor, DTensor) or tensor.is_meta for tensor in given):
        return False
    try:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))  # type: ignore[no-untyped-call]
        return bool(math.prod(shape) > _MOST)
    except RuntimeError:  # no operator of equal elements, such as a product of matrices
        return False


def _value(dtype: torch.dtype) -> bool | int | float:
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


def _needs_memory(given: Sequence[Tensor], args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether an operator on real tensors, or on none, makes one that is to have no memory."""
    device = kwargs.get("device")
    on_meta = device is not None and torch.device(str(device)).type == "meta"
    if given:  # from the meta device to another one is where a model would get its memory
        return device is not None and not on_meta and any(tensor.is_meta for tensor in given)
    if on_meta:
        return False
    size, dtype = args[0] if args else 0, kwargs.get("dtype")
    if not isinstance(size, (list, tuple)):
        return False  # a range, or one number
    return not isinstance(dtype, torch.dtype) or dtype.is_floating_point or math.prod(size) > _MOST


def storage_address(storage: torch.UntypedStorage) -> int:
    """What tells the memory of two tensors apart while both are alive. Private: without memory the public one is 0."""
    return int(storage._cdata)


def preload_torch() -> None:
    """Import what torch would import in the first step of a run, which takes seconds: before processes are forked."""
    import torch._dynamo
    import torch.distributed.pipelining  # noqa: F401


def is_in_backward() -> bool:
    """Whether a backward is running in this thread. Private because torch has no public way to ask."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def watch_storage_sizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside of it `resized` is called with every memory that changes its size, which fully_shard does to free it.

    A private way because a mode sees operators, and this is none.
    """
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


@contextmanager
def assume_known_shapes() -> Iterator[None]:
    """Inside of it a pipeline stage that is told its shapes believes that all others are, too.

    Private because torch's stages ask each other by messages, which never come on a group that only pretends. torch
    before 2.13 does not ask.
    """
    from torch.distributed.pipelining import PipelineStage

    asked = PipelineStage.__dict__.get("_warmup_backward_result")
    if asked is not None:
        PipelineStage._warmup_backward_result = lambda *_, **__: torch.ones(1, dtype=torch.int32)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if asked is not None:
            PipelineStage._warmup_backward_result = asked  # type: ignore[method-assign]


def gathered_parameters(module: FSDPModule) -> Iterator[Tensor]:
    """The memory of whole parameters that a module's own fully_shard groups gather into; empty while they are sharded.

    Private because fully_shard shows shards only once it has freed them.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for fsdp_param in group.fsdp_params:
            yield from getattr(fsdp_param, "all_gather_outputs", ())
            yield from getattr(fsdp_param, "_unsharded_inner_tensors", ())


def unreduced_gradients(module: FSDPModule) -> Iterator[Tensor]:
    """Gradients that a module's own fully_shard groups have not reduced yet, which torch does not show."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for fsdp_param in group.fsdp_params:
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            for gradient in (getattr(fsdp_param, "unsharded_accumulated_grad", None), getattr(unsharded, "grad", None)):
                if gradient is not None:
                    yield gradient._local_tensor if isinstance(gradient, DTensor) else gradient
