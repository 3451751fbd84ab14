"""Tensors without memory, and what else `plan rehearse` needs of torch."""

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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only


class MemorylessMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Mode in which new tensors have shape, dtype and device but no memory, except small integer tensors.

    Integers stay real because meshes, schedules and token counts are computed with them. A value read from a tensor
    without memory is 1 or True. Private because torch built FakeTensorMode for its compiler; it knows the shape of
    every operator's result, which is all that a rehearsal needs.
    """

    def __init__(self, record: Callable[[Any, Sequence[Tensor]], None]) -> None:
        """record: called with the result and the tensor arguments of every operator that a real run would execute."""
        super().__init__(allow_non_fake_inputs=True)
        self._record = record
        self._nesting = 0
        """Depth of nested use. DTensor re-enters the mode to learn the shape of a whole result, and torch to decompose
        an operator without a shape rule. Operators inside such calls use no memory in a real run and are not
        counted."""

    def __enter__(self) -> MemorylessMode:
        super().__enter__()
        self._nesting += not self.enter_stack[-1][0]
        return self

    def __exit__(self, *error: Any) -> None:
        self._nesting -= not self.enter_stack[-1][0]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Return an operator's result: without memory where a real one would be large, else computed."""
        kwargs = kwargs or {}
        if func.namespace == _OWN:
            with self:
                return _operator_function(func)(*args, **kwargs)
        tensors = list(tensors_in((*args, *kwargs.values())))
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if func in _READS_OF_VALUES and (fake or any(tensor.is_meta for tensor in tensors)):
            return _make_value(tensors[0].dtype) if func is torch.ops.aten._local_scalar_dense.default else True
        if not fake and _makes_large(tensors):
            (args, kwargs), fake = self._forget_values((args, kwargs)), True
            tensors = list(tensors_in((*args, *kwargs.values())))
        if fake or _needs_memory(tensors, args, kwargs):
            out = self._shaped(func, types, args, kwargs)
        else:
            out = self._without_memory(func(*args, **kwargs), tensors)
        if not self._nesting:
            self._record(out, tensors)
        return out

    def _without_memory(self, out: Any, tensors: Sequence[Tensor]) -> Any:
        """Return a result without its memory if it is new and floating-point, such as a table of cosines."""
        if not isinstance(out, Tensor) or isinstance(out, DTensor) or not out.is_floating_point() or out.is_meta:
            return out
        return out if any(out is tensor for tensor in tensors) else self.from_tensor(out)

    def _forget_values(self, arguments: Any) -> Any:
        """Return an operator's arguments with each real tensor replaced by one without memory."""
        return tree_map_only(Tensor, self.from_tensor, arguments)

    def _shaped(self, func: Any, types: Sequence[type], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Compute only the shape of an operator's result."""
        self._nesting += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._nesting -= 1


_OWN = "hpc_train"
"""Namespace of our own operators. They are written in Python, so the operators that they call are counted instead."""


def _operator_function(func: Any) -> Callable[..., object]:
    """Return the Python function of one of our operators, to which torch.library.custom_op gives no public access."""
    function: Callable[..., object] = OPDEFS[func.name()]._init_fn
    return function


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield all tensors among an operator's arguments or results, also in nested lists and tuples."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)


UNKNOWN_SHAPE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Raised in MemorylessMode if the shape of a result depends on values, as that of torch.nonzero does."""
# Operators that return a Python value, which a tensor without memory does not have.
_READS_OF_VALUES = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.allclose.default,
    torch.ops.aten.equal.default,
)
_LARGEST_REAL = 1 << 22
"""Integer tensors with at most this many elements stay real."""


def _makes_large(tensors: Sequence[Tensor]) -> bool:
    """Return whether an operator on small real tensors, such as a hash of positions, has a huge result."""
    if len(tensors) < 2 or any(isinstance(tensor, DTensor) or tensor.is_meta for tensor in tensors):
        return False
    try:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
        return bool(math.prod(shape) > _LARGEST_REAL)
    except RuntimeError:  # no operator of equal elements, such as a product of matrices
        return False


def _make_value(dtype: torch.dtype) -> bool | int | float:
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


def _needs_memory(tensors: Sequence[Tensor], args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether an operator on real tensors, or without tensors, must have a result without memory."""
    device = kwargs.get("device")
    on_meta = device is not None and torch.device(str(device)).type == "meta"
    if tensors:  # moving off the meta device is where a model would get its memory
        return device is not None and not on_meta and any(tensor.is_meta for tensor in tensors)
    if on_meta:
        return False
    size, dtype = args[0] if args else 0, kwargs.get("dtype")
    if not isinstance(size, (list, tuple)):
        return False  # a range, or one number
    return not isinstance(dtype, torch.dtype) or dtype.is_floating_point or math.prod(size) > _LARGEST_REAL


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage while it exists.

    Private because the public data_ptr() is 0 for every tensor without memory.
    """
    return int(storage._cdata)


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor only wraps others, which have its memory: a DTensor, or one in 8 bits with its scale.

    Private because torch has no public test for it.
    """
    return bool(is_traceable_wrapper_subclass(tensor))


def preload_torch() -> None:
    """Import what torch imports in the first step of a run, so that forked processes need not: it takes seconds."""
    import torch._dynamo
    import torch.distributed.pipelining  # noqa: F401


def is_in_backward() -> bool:
    """Return whether a backward is running in this thread. Private because torch has no public function for this."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def watch_storage_sizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` for every storage that changes its size within the block: fully_shard frees memory like that.

    Replaces a method of torch, because resizing a storage is no operator, so no mode sees it.
    """
    original_resize = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original_resize(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original_resize  # type: ignore[method-assign]


@contextmanager
def assume_known_shapes() -> Iterator[None]:
    """Let a pipeline stage that knows its shapes assume, within the block, that all other stages do.

    Private because torch's stages exchange messages about this, which never arrive in a simulated world. torch before
    2.13 does not exchange them.
    """
    from torch.distributed.pipelining import PipelineStage

    original = PipelineStage.__dict__.get("_warmup_backward_result")
    if original is not None:
        PipelineStage._warmup_backward_result = lambda *_, **__: torch.ones(1, dtype=torch.int32)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if original is not None:
            PipelineStage._warmup_backward_result = original  # type: ignore[method-assign]


def gathered_parameters(module: FSDPModule) -> Iterator[Tensor]:
    """Yield the buffers that a module's own fully_shard groups have gathered whole parameters into, if they have.

    Private because fully_shard gives public access to shards only.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for fsdp_param in group.fsdp_params:
            yield from getattr(fsdp_param, "all_gather_outputs", ())
            yield from getattr(fsdp_param, "_unsharded_inner_tensors", ())


def unreduced_gradients(module: FSDPModule) -> Iterator[Tensor]:
    """Yield the gradients that a module's own fully_shard groups have not reduced yet.

    Private because torch gives no access to them.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for fsdp_param in group.fsdp_params:
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            for gradient in (getattr(fsdp_param, "unsharded_accumulated_grad", None), getattr(unsharded, "grad", None)):
                if gradient is not None:
                    yield gradient._local_tensor if isinstance(gradient, DTensor) else gradient
