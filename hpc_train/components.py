"""Find a user's own models, losses, metrics, optimizers, learning-rate schedules and data sets by name.

A decorator of this module gives a function or class its name; the Python module that holds it is named in the
configuration, or an installed package offers it by an entry point. An exception in it becomes one line that begins with
the place in the user's file. Imports no torch.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from hpc_train.errors import UserError
from hpc_train.near_names import suggest_components
from hpc_train.user_frames import LOST_PEER, describe_error, find_root_cause, format_frame, list_user_frames

F = TypeVar("F", bound="Callable[..., Any]")
_USER_OS_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors of the operating system that are mistakes in paths; others are faults of the machine."""


@dataclass(frozen=True, eq=False)  # each is one of a kind
class ComponentKind:
    """A kind of component that users can register, and the setting that names one."""

    noun: str
    setting: str
    """Key of the configuration that has the name."""
    module_setting: str
    """Key that has the Python module to import first."""
    entry_points: str
    """Group of the entry points by which an installed package offers its own."""
    registered: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """A decorator has nowhere else to put what it sees."""

    def register(self, name: str) -> Callable[[F], F]:
        """Decorate a function or a class with its name. Raises UserError if another one already has the name."""

        def remember(factory: F) -> F:
            earlier = self.registered.get(name)
            if earlier is not None and _name_factory(earlier) != _name_factory(factory):
                raise UserError(
                    f"register({name!r}): used twice, by {_name_factory(earlier)} and {_name_factory(factory)}; "
                    "rename one"
                )
            self.registered[name] = factory
            return factory

        return remember

    def find(self, name: str, module: str | None = None, built_in: Iterable[str] = ()) -> Callable[..., Any]:
        """Return the component of a name. module: Python module to import first. Raises UserError if none has it."""
        if module is not None:
            import_user_module(module, self.module_setting)
        if name in self.registered:
            return self.registered[name]
        installed = {point.name: point for point in entry_points(group=self.entry_points)}
        if name in installed:
            return _load_entry_point(installed[name], self.setting)
        names = {*self.registered, *installed, *built_in}
        hint = suggest_components(name, names, None if module else self.module_setting)
        raise UserError(f"{self.setting}={name}: not a registered {self.noun}; {hint}")

    def call(self, name: str, factory: Callable[..., Any], args: Mapping[str, Any], *given: Any, **more: Any) -> Any:
        """Call a component with what the project gives and the user's `args`; UserError names the place of an error."""
        try:
            inspect.signature(factory).bind(*given, **more, **args)
        except TypeError as error:
            accepted = ", ".join(args) or "none"
            setting = self.setting.replace(".name", ".args")
            raise UserError(
                f"{setting} ({accepted}): do not fit {name}{inspect.signature(factory)}: {error}"
            ) from error
        except ValueError:  # built-in code has no signature
            pass
        with explain_user_code(f"{self.setting}={name} cannot be built"):
            return factory(*given, **more, **args)


MODELS = ComponentKind("model", "model.name", "model.module", "hpc_train.models")
DATASETS = ComponentKind("data set", "data.name", "data.module", "hpc_train.datasets")
OPTIMIZERS = ComponentKind("optimizer", "optim.name", "optim.module", "hpc_train.optimizers")
SCHEDULES = ComponentKind("schedule", "optim.schedule.name", "optim.module", "hpc_train.schedules")
LOSSES = ComponentKind("loss", "train.loss", "train.module", "hpc_train.losses")
METRICS = ComponentKind("metric", "train.metrics", "train.module", "hpc_train.metrics")
KINDS = (MODELS, DATASETS, OPTIMIZERS, SCHEDULES, LOSSES, METRICS)


def register_dataset(name: str) -> Callable[[F], F]:
    """Decorate a function or class that makes a data set: `data=custom data.name=<name>` finds it."""
    return DATASETS.register(name)


def register_optimizer(name: str) -> Callable[[F], F]:
    """Decorate a torch optimizer, or a function (parameters, lr, ...) that makes one: `optim=custom` finds it."""
    return OPTIMIZERS.register(name)


def register_schedule(name: str) -> Callable[[F], F]:
    """Decorate a function (step, steps, ...) that returns a factor of optim.lr: `optim.schedule.name` finds it."""
    return SCHEDULES.register(name)


def register_loss(name: str) -> Callable[[F], F]:
    """Decorate a function (out, target) that sums the loss over the targets that count: `train.loss` finds it."""
    return LOSSES.register(name)


def register_metric(name: str) -> Callable[[F], F]:
    """Decorate a function (out, target) that sums a metric over the targets that count: `train.metrics` finds it."""
    return METRICS.register(name)


def import_user_module(name: str, setting: str) -> None:
    """Import the user's module, which may be in the current folder, where a console script does not search by default.

    Batch jobs (python -P) do not search there either: they have a copy of that folder. setting: the key that has the
    name.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path and not sys.flags.safe_path:
        sys.path.append(here)
    try:
        importlib.import_module(name)
    except UserError:
        raise
    except Exception as error:
        frames = list_user_frames(error)
        where = f"{format_frame(frames[0])}: " if frames else ""
        reason = where + " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{setting}={name}: cannot be imported ({reason}); it must be on PYTHONPATH or in {here}"
        ) from error


@contextmanager
def explain_user_code(what: str) -> Iterator[None]:
    """Turn an exception from the user's code into one line that begins with the place in their file.

    A UserError, lack of memory, a fault of the machine and an error without a frame of user code pass unchanged.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        cause, frames = find_root_cause(error), list_user_frames(error)
        if isinstance(cause, UserError):
            raise cause from error
        machine = isinstance(cause, OSError) and not isinstance(cause, _USER_OS_ERRORS)
        if not frames or machine or LOST_PEER.search(str(cause)):
            raise
        raise UserError(f"{format_frame(frames[0])}: {describe_error(cause)} ({what})") from error


def accepts_argument(factory: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name; one that takes any (**options) need not know it."""
    try:
        return name in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


def _load_entry_point(point: EntryPoint, setting: str) -> Callable[..., Any]:
    try:
        factory: Callable[..., Any] = point.load()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{setting}={point.name}: its entry point {point.value} cannot be loaded ({reason})") from error
    return factory


def _name_factory(factory: Callable[..., Any]) -> str:
    return f"{factory.__module__}.{factory.__qualname__}"
