"""Check a user's own model before and in its first micro-batch; each mistake is one line with its place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy

from hpc_train.api import IGNORED_TARGET
from hpc_train.compat import is_pretended
from hpc_train.errors import UserError
from hpc_train.user_frames import LOST_PEER, definition, describe, place, root_cause, user_frames

_MACHINE = (OSError, MemoryError, torch.OutOfMemoryError, dist.DistError)
"""Errors that can occur in a user's code without being their mistake."""
_DEVICE_WORDS = ("CUDA", "NCCL", "cuDNN", "cuBLAS", "HIP", "out of memory")


def name_of(model: nn.Module) -> str:
    """Return the class's own name, which fully_shard changes."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule)).__name__


def check_interface(model: nn.Module) -> None:
    """Raise UserError for a model that cannot be called with the inputs of a micro-batch alone, as every model is."""
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise UserError(f"model: {name_of(model)} has no method forward; give it one that takes the inputs")
    _check_call(model, "forward", ("the inputs",), "put what else it needs into one tensor, or into the model")
    if callable(getattr(model, "loss_sum", None)):
        _check_call(model, "loss_sum", ("what forward returned", "the targets"), "define loss_sum(self, out, target)")


def check_sizes(model: nn.Module) -> None:
    """Raise UserError for a parameter that has no shape until the first call: it is split before that."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise UserError(f"model: {name} of {owner} has no shape before the first call; give it its sizes")


def _check_call(model: nn.Module, method: str, given: tuple[str, ...], instead: str) -> None:
    function = getattr(model, method)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in code has no signature
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        call = f"{name_of(model)}.{method}{signature}"
        raise UserError(f"{_at(function)}{call} is called with {' and '.join(given)}: {error}; {instead}") from None


def _at(function: Any) -> str:
    where = definition(function)
    return f"{where}: " if where else ""


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Turn an exception from the first call of the user's code into one line with the place in their file.

    A lost peer, a device error and lack of memory are not the user's mistakes; neither is an error without a user
    frame.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause, frames = root_cause(error), user_frames(error)
        if isinstance(cause, UserError):
            raise cause from error
        if not frames or isinstance(cause, _MACHINE) or LOST_PEER.search(str(cause)) or _of_the_device(cause):
            raise
        raise UserError(f"{place(frames[0])}: {describe(cause)} ({what})") from error


def _of_the_device(error: BaseException) -> bool:
    return any(word in str(error) for word in _DEVICE_WORDS)


def check_output(model: nn.Module, out: object, target: Tensor) -> None:
    """Raise UserError if a model without its own loss did not return logits (..., classes) of the targets."""
    title = f"{_at(model.forward)}{name_of(model)}.forward returned"
    wanted = f"logits {(*target.shape, 'classes')}".replace("'", "")
    if not isinstance(out, Tensor):
        raise UserError(f"{title} {_named(out)}; {_instead(out, wanted)}")
    if not out.is_floating_point() or out.ndim != target.ndim + 1 or out.shape[:-1] != target.shape:
        raise UserError(
            f"{title} {_named(out)} for targets {tuple(target.shape)}; return {wanted}, or give {name_of(model)} a "
            "method loss_sum(out, target)"
        )
    known = target.numel() > 0 and not is_pretended(target)
    largest = int(target.max()) if known else IGNORED_TARGET
    if largest >= out.shape[-1]:
        raise UserError(
            f"{title} logits over {out.shape[-1]} classes, and a target of the data is {largest}; give the model at "
            f"least {largest + 1} classes"
        )


def _named(out: object) -> str:
    if isinstance(out, Tensor):
        return f"a tensor {tuple(out.shape)} of {str(out.dtype).removeprefix('torch.')}"
    keys = f" ({', '.join(map(str, list(out)[:5]))})" if isinstance(out, dict) else ""
    return f"a {type(out).__name__}{keys}"


def _instead(out: object, wanted: str) -> str:
    if isinstance(getattr(out, "logits", None), Tensor) or (isinstance(out, dict) and "logits" in out):
        return f"return its logits, a tensor: wrap the model in a module whose forward returns {wanted}"
    return f"return {wanted}, or give the model a method loss_sum(out, target) that takes what it returns"


def check_loss(model: nn.Module, loss: object) -> None:
    """Raise UserError if a model's own loss_sum did not return a scalar that can be differentiated."""
    title = f"{_at(model.loss_sum)}{name_of(model)}.loss_sum returned"
    if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
        raise UserError(f"{title} {_named(loss)}; return the sum of the loss over all targets, a scalar tensor")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(f"{title} a number that depends on no parameter that is trained; do not detach it")
