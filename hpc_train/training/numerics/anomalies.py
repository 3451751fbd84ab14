"""Decide whether a step's update is made, and record the steps whose update was skipped.

A loss or gradient norm with NaN or infinity makes no update: parameters and optimizer state stay as they are. Loss and
norm are already reduced over all ranks, so every rank comes to the same decision without another collective. The list
of skipped steps makes a run repeatable: another run that is given the list skips the same updates.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.config.resilience import NumbersConfig
from hpc_train.errors import UserError
from hpc_train.regular_files import read_json, write_private_file


@dataclass(frozen=True)
class SkippedSteps:
    """Steps in a row whose updates were skipped, and the samples that they saw."""

    first_step: int
    last_step: int
    first_sample: int
    """Position in the run's order of samples."""
    samples: int
    reason: str
    """Why the first of them was skipped."""

    def covers(self, sample: int) -> bool:
        """Return whether the sample at this position is one of them."""
        return self.first_sample <= sample < self.first_sample + self.samples


@dataclass
class SkipList:
    """The skipped steps of a run, in order."""

    entries: list[SkippedSteps] = field(default_factory=list)

    def add(self, step: int, first_sample: int, samples: int, reason: str) -> None:
        """Add one step. It joins the entry of the step before, so that a long row of them stays one entry."""
        last = self.entries[-1] if self.entries else None
        if last is not None and last.last_step == step - 1:
            samples += last.samples
            self.entries[-1] = SkippedSteps(last.first_step, step, last.first_sample, samples, last.reason)
        else:
            self.entries.append(SkippedSteps(step, step, first_sample, samples, reason))

    def covers(self, sample: int) -> bool:
        """Return whether the sample at this position of the run is in the list."""
        return any(entry.covers(sample) for entry in self.entries)

    def state(self) -> list[dict[str, Any]]:
        """Return the list as JSON values."""
        return [asdict(entry) for entry in self.entries]

    def restore(self, state: Iterable[dict[str, Any]]) -> None:
        """Continue from what `state` returned."""
        self.entries = [SkippedSteps(**entry) for entry in state]

    def write(self, path: Path) -> None:
        """Write the list to a file, in one rename."""
        write_private_file(path, json.dumps(self.state(), indent=1) + "\n")


def read_skip_list(path: Path) -> SkipList:
    """Read a skipped.json. Raises UserError if it is not one."""
    option = f"resilience.numbers.skip_list={path}"
    try:
        entries = [SkippedSteps(**entry) for entry in read_json(path)]
    except OSError as error:
        raise UserError(f"{option}: {error.strerror}; give the skipped.json of a run directory") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{option}: not a list of skipped steps; give the skipped.json of a run directory") from error
    for entry in entries:
        if not all(isinstance(value, int) and value >= 0 for value in (entry.first_sample, entry.samples)):
            raise UserError(f"{option}: first_sample and samples of step {entry.first_step} must be integers from 0")
    return SkipList(entries)


@dataclass
class LossWindow:
    """The latest losses, against which the next one is compared."""

    size: int
    sigmas: float
    """0: nothing is a spike."""
    losses: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.losses = deque(maxlen=self.size)

    def find_limit(self) -> float | None:
        """Return the loss above which a step is a spike: mean + sigmas x standard deviation; None until it is full."""
        if self.sigmas == 0 or len(self.losses) < self.size:
            return None
        mean = statistics.fmean(self.losses)
        return mean + self.sigmas * math.sqrt(statistics.fmean((loss - mean) ** 2 for loss in self.losses))


class UpdateGuard:
    """Decides, step by step, whether the update is made."""

    def __init__(self, config: NumbersConfig, act: bool, can_skip: bool) -> None:
        """act: skip updates, not only report. can_skip: whether all ranks decide the same, so that they may skip."""
        self._config, self._act, self._can_skip = config, act, can_skip
        self.window = LossWindow(config.spike_window, config.spike_sigmas)
        self.skipped = SkipList()
        self._listed = read_skip_list(Path(config.skip_list)) if config.skip_list is not None else SkipList()
        self.nonfinite_in_a_row = 0
        """Latest steps without finite numbers whose updates were skipped."""

    def skip_samples(self, entries: Iterable[SkippedSteps]) -> None:
        """Also skip the updates of the samples of these steps."""
        self._listed.entries.extend(entries)

    def wants_replay(self, loss: float, norm: float, first_sample: int) -> bool:
        """Return whether a step is to be computed again before it is judged; the same on all ranks."""
        may_replay = self._config.replay and self._act and self._can_skip
        return may_replay and self.find_anomaly(loss, norm, first_sample)[0] in ("nonfinite", "spike")

    def judge(self, loss: float, norm: float, first_sample: int) -> tuple[str | None, str | None, bool]:
        """Judge one step by its mean loss and gradient norm, the same on all ranks.

        Returns the kind of anomaly (None: none), the reason as text, and whether to skip the update.
        """
        kind, reason = self.find_anomaly(loss, norm, first_sample)
        should_skip = kind == "listed" or (kind == "nonfinite" and self._config.skip_nonfinite)
        should_skip |= kind == "spike" and self._config.spikes == "skip"
        skip = should_skip and self._can_skip and (self._act or kind == "listed")
        # A skipped spike would raise the limit for the next one.
        if math.isfinite(loss) and not skip:
            self.window.losses.append(loss)
        self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if kind == "nonfinite" and skip else 0
        return kind, reason, skip

    def find_anomaly(self, loss: float, norm: float, first_sample: int) -> tuple[str | None, str | None]:
        """Return the kind of anomaly of a step and the reason as text; (None, None) if it has none."""
        if self._listed.covers(first_sample):
            return "listed", "its samples are in resilience.numbers.skip_list"
        if not math.isfinite(loss):
            return "nonfinite", f"the loss is {loss}"
        if not math.isfinite(norm):
            return "nonfinite", f"the gradient norm is {norm}"
        limit = self.window.find_limit()
        if limit is not None and loss > limit:
            return "spike", f"the loss is {loss:.6g}, above {limit:.6g} (the latest {self.window.size} steps)"
        return None, None

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds."""
        return {"skipped": self.skipped.state(), "losses": list(self.window.losses)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.skipped.restore(state["skipped"])
        self.window.losses.extend(state["losses"])
