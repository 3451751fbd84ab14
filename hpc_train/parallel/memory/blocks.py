"""Find the blocks of a part of a model, for the passes that work block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hpc_train.errors import UserError

Forward = Callable[..., Any]


def named_blocks(part: nn.Module) -> dict[str, nn.Module]:
    """Return what the model's method `blocks` returns; empty if it has none. Uses nothing else of api.Model.

    An attribute of that name that is not a method, such as a list of layers, does not count. Raises UserError for
    anything but a dict of names to modules of the model, none of them inside another.
    """
    method = getattr(part, "blocks", None)
    if method is None or isinstance(method, nn.Module) or not callable(method):
        return {}
    found = method()
    title = f"{type(part).__name__}.blocks()"
    wanted = "return a dict of module names to modules, in their order"
    if not isinstance(found, Mapping):
        raise UserError(f"{title}: returned a {type(found).__name__}; {wanted}")
    for name, block in found.items():
        if not isinstance(name, str) or not isinstance(block, nn.Module):
            raise UserError(f"{title}: holds {name!r}, a {type(block).__name__}; {wanted}")
    _check_places(title, part, found)
    return dict(found)


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


def blocks_of(part: nn.Module, option: str) -> list[nn.Module]:
    """Return the blocks in order, each once. Raises UserError, naming the `option`, if the model has none."""
    blocks = list(dict.fromkeys(named_blocks(part).values()))
    if not blocks:
        raise UserError(
            f"{option}: {type(part).__name__} does not say what its blocks are; leave it out, or give it a method "
            "blocks() that returns a dict of module names to modules"
        )
    return blocks


def replace_forward(block: nn.Module, change: Callable[[Forward], Forward]) -> None:
    """Put change(block.forward) in its place.

    No module is added, so every parameter keeps its name; hooks, those of fully_shard among them, run outside of it.
    """
    block.forward = change(block.forward)
