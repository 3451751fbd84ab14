"""Build a model's module from its config: the kinds in this package, and users' own models by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_train.config.model import (
    CustomModelConfig,
    HfModelConfig,
    ModelConfig,
    TransformerConfig,
    VisionTransformerConfig,
)
from hpc_train.errors import UserError

if TYPE_CHECKING:
    from torch import nn

ENTRY_POINTS = "hpc_train.models"
"""Group of the entry points by which an installed package offers its models."""

F = TypeVar("F", bound="Callable[..., nn.Module]")
_registered: dict[str, Callable[..., nn.Module]] = {}  # a decorator has nowhere else to put what it sees


def register(name: str) -> Callable[[F], F]:
    """Decorate a function that returns an nn.Module, or a subclass of it: `model=custom model.name=<name>` finds it.

    Raises UserError if another function already has the name.
    """

    def remember(factory: F) -> F:
        earlier = _registered.get(name)
        if earlier is not None and _name_factory(earlier) != _name_factory(factory):
            raise UserError(
                f"register({name!r}): used twice, by {_name_factory(earlier)} and {_name_factory(factory)}; rename one"
            )
        _registered[name] = factory
        return factory

    return remember


def build_model(config: ModelConfig, seed: int = 0) -> nn.Module:
    """The module that `config` describes, on torch's default device (build under torch.device("meta") to defer memory).

    A transformer and a vision transformer get their values from `init.initialise` later. A custom module and a model of
    transformers draw their own in the constructor, under torch's generators seeded with `seed`, so that all ranks draw
    the same.
    Raises UserError for an unknown kind or name, a shape that does not fit, or wrong arguments of a custom model.
    """
    if isinstance(config, TransformerConfig):
        from hpc_train.models.transformer import Transformer

        return Transformer(config)
    if isinstance(config, VisionTransformerConfig):
        from hpc_train.models.vision_transformer import VisionTransformer

        return VisionTransformer(config)
    if isinstance(config, CustomModelConfig):
        return _build_custom(config, seed)
    if isinstance(config, HfModelConfig):
        from hpc_train.models.hf.build import build_hf_model

        return build_hf_model(config, seed)
    raise UserError(
        f"model.kind={config.kind}: no such kind; {_suggest(config.kind, ('transformer', 'vit', 'hf', 'custom'))}"
    )


def _build_custom(config: CustomModelConfig, seed: int) -> nn.Module:
    import torch
    from torch import nn

    if config.module is not None:
        _import_module(config.module)
    factory = _find_factory(config)
    _check_arguments(factory, config)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        module = _call_factory(factory, config)
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model.name={config.name}: returned a {type(module).__name__}; it must return a torch.nn.Module"
        )
    return module


def _call_factory(factory: Callable[..., Any], config: CustomModelConfig) -> Any:
    """Call the user's function; if it raises, raise UserError with the place in their file."""
    from hpc_train.user_frames import describe_error, format_frame, user_frames

    try:
        return factory(**config.args)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        frames = user_frames(error)
        where = f"{format_frame(frames[0])}: " if frames else ""
        raise UserError(f"{where}{describe_error(error)} (model.name={config.name} cannot be built)") from error


def _import_module(name: str) -> None:
    """Import the user's module, which may lie in the current folder: a console script does not look there by itself.

    Nor do batch jobs (python -P): they have a copy of that folder.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path and not sys.flags.safe_path:
        sys.path.append(here)
    try:
        importlib.import_module(name)
    except UserError:
        raise
    except Exception as error:
        from hpc_train.user_frames import format_frame, user_frames

        frames = user_frames(error)
        where = f"{format_frame(frames[0])}: " if frames else ""
        reason = where + " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"model.module={name}: cannot be imported ({reason}); it must be on PYTHONPATH or in {here}"
        ) from error


def _find_factory(config: CustomModelConfig) -> Callable[..., nn.Module]:
    if config.name in _registered:
        return _registered[config.name]
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if config.name in installed:
        return _load_entry_point(installed[config.name])
    names = sorted({*_registered, *installed})
    where = "" if config.module else "; set model.module to the Python module that registers it"
    raise UserError(f"model.name={config.name}: not a registered model; {_suggest(config.name, names)}{where}")


def _load_entry_point(point: EntryPoint) -> Callable[..., nn.Module]:
    try:
        factory: Callable[..., nn.Module] = point.load()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"model.name={point.name}: its entry point {point.value} cannot be loaded ({reason})"
        ) from error
    return factory


def _check_arguments(factory: Callable[..., Any], config: CustomModelConfig) -> None:
    try:
        inspect.signature(factory).bind(**config.args)
    except TypeError as error:
        given = ", ".join(config.args) or "none"
        raise UserError(
            f"model.args ({given}): do not fit {config.name}{inspect.signature(factory)}: {error}"
        ) from error


def _name_factory(factory: Callable[..., Any]) -> str:
    return f"{factory.__module__}.{factory.__qualname__}"


def _suggest(word: str, names: Iterable[str]) -> str:
    names = list(names)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    return f"there are {', '.join(names)}" if names else "none is registered"
