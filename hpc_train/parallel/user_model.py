"""Check a user's own model against what the techniques need, with one-line errors.

First come checks before and in the first micro-batch: interface, output, loss, and exceptions from the user's code.
Then the blocks, which several passes wrap one by one. Last the tensors that share memory: a pass that splits or moves
parameters would silently separate them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy

from hpc_train._torch.tensors import is_memoryless, tree_leaves
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET
from hpc_train.models.deferred import iterate_plain_tensors
from hpc_train.user_frames import (
    LOST_PEER,
    describe_error,
    find_definition,
    find_root_cause,
    format_frame,
    list_user_frames,
)

if TYPE_CHECKING:
    from hpc_train.interfaces import ModelInputs

_MACHINE = (OSError, MemoryError, torch.OutOfMemoryError, dist.DistError)
"""Errors in a user's code that are faults of the machine."""
_DEVICE_WORDS = ("CUDA", "NCCL", "cuDNN", "cuBLAS", "HIP", "out of memory")


def name_model(model: nn.Module) -> str:
    """Return the name of the model's class without the prefix that fully_shard adds."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule)).__name__


def check_interface(model: nn.Module) -> None:
    """Raise UserError for a model without forward, or with a loss_sum that cannot be called."""
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise UserError(f"model: {name_model(model)} has no method forward; give it one that takes the inputs")
    if callable(getattr(model, "loss_sum", None)):
        _check_call(model, "loss_sum", ("what forward returned", "the targets"), "define loss_sum(self, out, target)")


def check_inputs(model: nn.Module, inputs: ModelInputs) -> None:
    """Raise UserError for a model whose forward does not take the inputs of a micro-batch."""
    if not isinstance(inputs, dict):
        instead = "put what else it needs into one tensor, into the model, or into data whose inputs are a dictionary"
        _check_call(model, "forward", ("the inputs",), instead)
        return
    forward = model.forward
    try:
        inspect.signature(forward).bind(**inputs)
    except (TypeError, ValueError) as error:
        if isinstance(error, ValueError):  # built-in code has no signature
            return
        raise UserError(
            f"{_format_place(forward)}{name_model(model)}.forward is called with the data's inputs by name "
            f"({', '.join(inputs)}): {error}; name the entries of a sample as the arguments of forward"
        ) from None


def require_one_input(inputs: ModelInputs, option: str, reason: str) -> Tensor:
    """Return the only tensor of a micro-batch's inputs. Raises UserError for a dictionary, naming `option`."""
    if isinstance(inputs, Tensor):
        return inputs
    raise UserError(
        f"{option}: the data give the inputs {', '.join(inputs)} by name, and {reason}; give one tensor, or "
        "spread over dp_replicate and dp_shard"
    )


def check_sizes(model: nn.Module) -> None:
    """Raise UserError for a lazy parameter, without a shape until the first call: parameters are split before that."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            class_name = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise UserError(f"model: {name} of {class_name} has no shape before the first call; give it its sizes")


def _check_call(model: nn.Module, method: str, arguments: tuple[str, ...], instead: str) -> None:
    function = getattr(model, method)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in code has no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        call = f"{name_model(model)}.{method}{signature}"
        raise UserError(
            f"{_format_place(function)}{call} is called with {' and '.join(arguments)}: {error}; {instead}"
        ) from None


def _format_place(function: Any) -> str:
    definition = find_definition(function)
    return f"{definition}: " if definition else ""


@contextmanager
def explain_first_call(what: str) -> Iterator[None]:
    """Turn an exception from the first call of the user's code into one line that names the place in their file.

    A lost peer, a device error, lack of memory, and an error without a frame of user code pass unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause, frames = find_root_cause(error), list_user_frames(error)
        if isinstance(cause, UserError):
            raise cause from error
        if not frames or isinstance(cause, _MACHINE) or LOST_PEER.search(str(cause)) or _is_device_error(cause):
            raise
        raise UserError(f"{format_frame(frames[0])}: {describe_error(cause)} ({what})") from error


def _is_device_error(error: BaseException) -> bool:
    return any(word in str(error) for word in _DEVICE_WORDS)


def check_output(model: nn.Module, out: object, target: Tensor) -> None:
    """Raise UserError if a model without its own loss returned neither its mean loss nor logits.

    Logits are (*target.shape, classes).
    """
    title = f"{_format_place(model.forward)}{name_model(model)}.forward returned"
    wanted = f"logits {(*target.shape, 'classes')}".replace("'", "")
    if isinstance(out, Mapping) and out.get("loss") is not None:
        _check_scalar(f"{title} {_describe_output(out)} whose loss is", out["loss"], "its mean over the targets")
        return
    if isinstance(out, Mapping) and isinstance(out.get("logits"), Tensor):
        out = out["logits"]
    if not isinstance(out, Tensor):
        raise UserError(
            f"{title} {_describe_output(out)}; return {wanted}, alone or as the entry logits of a dict, or the mean "
            "loss as its entry loss, or give the model a method loss_sum(out, target) that takes what it returns"
        )
    if not out.is_floating_point() or out.ndim != target.ndim + 1 or out.shape[:-1] != target.shape:
        raise UserError(
            f"{title} {_describe_output(out)} for targets {tuple(target.shape)}; return {wanted}, or give "
            f"{name_model(model)} a method loss_sum(out, target)"
        )
    has_values = target.numel() > 0 and not is_memoryless(target)
    largest = int(target.max()) if has_values else IGNORED_TARGET
    if largest >= out.shape[-1]:
        raise UserError(
            f"{title} logits over {out.shape[-1]} classes, and a target of the data is {largest}; give the model at "
            f"least {largest + 1} classes"
        )


def _describe_output(out: object) -> str:
    if isinstance(out, Tensor):
        return f"a tensor {tuple(out.shape)} of {str(out.dtype).removeprefix('torch.')}"
    keys = f" ({', '.join(map(str, list(out)[:5]))})" if isinstance(out, Mapping) else ""
    return f"a {type(out).__name__}{keys}"


def check_output_is_seen(model: nn.Module, out: object) -> None:
    """Raise UserError if torch sees no tensor in what a model returned: hooks on them let fully_shard run backward."""
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
        raise UserError(
            f"{_format_place(model.forward)}{name_model(model)}.forward returned a {type(out).__name__}, in which "
            "fully_shard sees no tensor; return a tensor, a tuple or a dict, or use parallel=ddp"
        )


def check_loss(model: nn.Module, loss: object) -> None:
    """Raise UserError if a model's own loss_sum did not return a scalar that can be differentiated."""
    title = f"{_format_place(model.loss_sum)}{name_model(model)}.loss_sum returned"
    _check_scalar(title, loss, "the sum of the loss over all targets")


def _check_scalar(title: str, loss: object, expected: str) -> None:
    if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
        raise UserError(f"{title} {_describe_output(loss)}; return {expected}, a scalar tensor")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(f"{title} a number that depends on no trained parameter; do not detach it")


Forward = Callable[..., Any]


def get_named_blocks(part: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that the model's method `blocks` names; empty if it has no such method.

    An attribute `blocks` that is no method, such as a list of layers, does not count. Raises UserError for anything but
    a dict of names to modules of the model, none inside another.
    """
    method = getattr(part, "blocks", None)
    if method is None or isinstance(method, nn.Module) or not callable(method):
        return {}
    blocks = method()
    title = f"{type(part).__name__}.blocks()"
    expected = "return a dict of module names to modules, in their order"
    if not isinstance(blocks, Mapping):
        raise UserError(f"{title}: returned a {type(blocks).__name__}; {expected}")
    for name, block in blocks.items():
        if not isinstance(name, str) or not isinstance(block, nn.Module):
            raise UserError(f"{title}: holds {name!r}, a {type(block).__name__}; {expected}")
    _check_places(title, part, blocks)
    return dict(blocks)


def _check_places(title: str, part: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    inside = {id(module) for module in part.modules()}
    within: dict[int, str] = {}
    for name, block in blocks.items():
        if id(block) not in inside or block is part:
            raise UserError(f"{title}: {name} is not a module of the model; return modules that it holds")
        within.update({id(module): name for module in block.modules() if module is not block})
    for name, block in blocks.items():
        if id(block) in within and within[id(block)] != name:
            raise UserError(f"{title}: {name} is inside of {within[id(block)]}; name one of them")


def get_blocks(part: nn.Module, option: str) -> list[nn.Module]:
    """Return the blocks in order, each once. Raises UserError, naming the `option`, if the model has none."""
    blocks = list(dict.fromkeys(get_named_blocks(part).values()))
    if not blocks:
        raise UserError(
            f"{option}: {type(part).__name__} does not say what its blocks are; leave it out, or give it a method "
            "blocks() that returns a dict of module names to modules"
        )
    return blocks


def replace_forward(block: nn.Module, change: Callable[[Forward], Forward]) -> None:
    """Replace block.forward by change(block.forward).

    No module is added, so parameters keep their names. Hooks, such as those of fully_shard, run outside of the new
    forward.
    """
    block.forward = change(block.forward)


def check_aliases(model: nn.Module, splits: bool, device: torch.device) -> None:
    """Raise UserError for a tensor that shares a parameter's memory and would silently stop following it.

    splits: parameters will be cut over ranks. If not, and on the CPU, no tensor moves and sharing is safe. A parameter
    of several modules is one tensor, not an alias.
    """
    if not splits and device.type == "cpu":
        return
    owners: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        other = owners.setdefault(_find_storage(parameter), (name, parameter)) if _has_storage(parameter) else None
        if other is not None and other[1] is not parameter:
            raise UserError(
                f"model: {name} and {other[0]} are two parameters in the same memory, which are not the same once they "
                "are split or moved; assign one nn.Parameter to both"
            )
    for kind, name, tensor in _list_other_tensors(model, splits):
        if _has_storage(tensor) and (alias := owners.get(_find_storage(tensor))) is not None:
            raise UserError(
                f"model: {name}, {kind}, shares the memory of the parameter {alias[0]}, and would no longer follow it "
                "once that is split or moved; compute it in forward, or use the parameter's own attribute there"
            )


def _has_storage(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > 0


def _find_storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _list_other_tensors(model: nn.Module, splits: bool) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (kind, name, tensor) for buffers and, if parameters are split, for other tensors of modules."""
    for name, buffer in model.named_buffers():
        yield "a buffer", name, buffer
    for path, module in model.named_modules() if splits else ():
        if isinstance(module, nn.RNNBase):
            continue  # its other tensors are its own list of parameters, which it updates
        for name, tensor in iterate_plain_tensors(module):
            if f"{name}_orig" not in dict(module.named_parameters(recurse=False)):  # spectral_norm recomputes it
                yield "a tensor held beside the parameters", f"{path}.{name}" if path else name, tensor
