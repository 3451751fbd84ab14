"""Find faster settings for a training by short runs: one change at a time, kept only if it is faster beyond the noise.

The search begins with the settings as given. The report's first finding decides what is changed first: the micro-batch
if operations are too small, the layout if ranks wait for collectives or pipeline stages are idle. A change is kept if
the step becomes shorter by more than the noise of both measurements and by at least 2 %, and the search continues from
there. What lost by far is not tried again with the same micro-batch, and no smaller micro-batch after one that was too
small. The search ends when no change is left, or when the budget is spent. It never touches anything that affects the
training result: the global batch, the data, the seed, the precision and the optimizer stay.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from hpc_train.errors import UserError
from hpc_train.report.tuning.changes import MICRO_BATCH, Change, list_changes
from hpc_train.report.tuning.trials import LEAST_GAIN, Trial, is_faster, pool_trials

_LOST_BY_FAR = 1.25
"""Step time, in those of the best, from which a change is not tried again after another option has changed."""


@dataclass(frozen=True)
class _Loss:
    """A change that was not kept."""

    change: Change
    best: Trial
    """The best trial at that time, from which it was made."""
    trial: Trial

    def rules_out(self, change: Change, best: Trial) -> bool:
        """Whether a change of the best trial so far need not be tried, as this one lost."""
        size, smaller = dict(self.change).get(MICRO_BATCH), dict(change).get(MICRO_BATCH)
        if size and smaller and len(self.change) == len(change) == 1:
            # Step time has one minimum over the micro-batch: if less was slower, even less is slower still.
            lost = self.trial.seconds > self.best.seconds and best.settings == self.best.settings
            return lost and int(smaller) < int(size) < int(best.settings.get(MICRO_BATCH, size))
        # What a layout costs depends on the micro-batch, and hardly on other options.
        same = change == self.change and best.settings.get(MICRO_BATCH) == self.best.settings.get(MICRO_BATCH)
        return same and self.trial.seconds > _LOST_BY_FAR * self.best.seconds


@dataclass
class Tuning:
    """A search and what it has tried."""

    base: Sequence[str]
    """The overrides that were given."""
    measure: Callable[[Mapping[str, str]], Trial]
    report: Callable[[Trial, Trial | None], None]
    """Called after each trial, with the best one before."""
    minutes: float
    """Budget: wall time times ranks, in minutes, of all trials together."""
    ranks: int
    trials: list[Trial] = field(default_factory=list)
    _losses: list[_Loss] = field(default_factory=list)

    @property
    def spent(self) -> float:
        """Minutes of all ranks so far."""
        return sum(trial.minutes for trial in self.trials) * self.ranks

    def run(self) -> Trial:
        """Try one change after another; returns the best trial. Raises UserError if the settings given do not run."""
        best = self._try({}, None)
        if best.failure:
            raise UserError(f"the settings as given do not run: {best.failure}")
        while (change := self._choose_next_change(best)) is not None:
            trial = self._try({**best.settings, **dict(change)}, best)
            if not trial.kept:
                self._losses.append(_Loss(change, best, trial))
            best = trial if trial.kept else best
        return best

    def _choose_next_change(self, best: Trial) -> Change | None:
        """Return the first change that may help, has not been tried from here, and fits into the budget."""
        longest = max(trial.minutes for trial in self.trials) * self.ranks
        if self.spent + longest > self.minutes:
            return None
        tried = [dict(trial.settings) for trial in self.trials]
        for change in list_changes(self.base, best, self.ranks):
            if {**best.settings, **dict(change)} in tried or any(loss.rules_out(change, best) for loss in self._losses):
                continue
            return change
        return None

    def _try(self, settings: Mapping[str, str], best: Trial | None) -> Trial:
        trial = self.measure(settings)
        if best is not None and trial.seconds < (1 - LEAST_GAIN) * best.seconds and not is_faster(trial, best):
            trial = pool_trials(trial, self.measure(settings))  # it may be faster: look again
        if best is not None and is_faster(trial, best):
            trial = Trial(**{**asdict(trial), "kept": True})
        self.trials.append(trial)
        self.report(trial, best)
        return trial


def format_command(base: Sequence[str], settings: Mapping[str, str], on_slurm: bool) -> str:
    """Return the command that trains with these settings, in place of those that were given.

    on_slurm: whether it is a job of Slurm, or a run on this machine.
    """
    kept_overrides = [word for word in base if word.lstrip("+").partition("=")[0] not in settings]
    words = [*kept_overrides, *(f"{key}={value}" for key, value in settings.items())]
    return " ".join(["hpc-train submit" if on_slurm else "hpc-train train", *map(shlex.quote, words)])
