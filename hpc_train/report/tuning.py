"""Find faster settings for a training by short runs: one change at a time, kept only if it is faster beyond the noise.

The search begins with the settings as given. The report's first finding decides what is changed first: the micro-batch
if operations are too small, the layout if ranks wait for collectives or pipeline stages are idle. A change is kept if
the step becomes shorter by more than the noise of both measurements and by at least 2 %, and the search continues from
there. What lost by far is not tried again with the same micro-batch, and no smaller micro-batch after one that was too
small. The search ends when no change is left, or when the budget is spent. It never touches anything that affects the
training result: the global batch, the data, the seed, the precision and the optimizer stay.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path

import numpy as np

from hpc_train.config.compose import compose
from hpc_train.config.parallel import ParallelConfig, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.checks.run_checks import check_run
from hpc_train.report.run_summary import judge_newest_steps
from hpc_train.training.records.run_records import LineFile, read_metrics

LEAST_GAIN = 0.02
"""A change is kept only if it also shortens a step by this share."""
_LOST_BY_FAR = 1.25
"""Step time, in those of the best, from which a change is not tried again after another option has changed."""
_MICRO_BATCH = "train.micro_batch"
_WARM_UP_STEPS = 3
"""First steps of a trial that are not timed."""
_UNTIMED = (
    "train.epochs=null",
    "train.eval_every=0",
    "train.noise_scale.every=0",
    "train.tensorboard=false",
    "checkpoint.every=0",
    "checkpoint.weights_every=0",
    "checkpoint.resume=never",
)
"""What is not part of a step."""

_OPTIONS_OF_LAYOUTS = (
    "bucket_mib",
    "static_graph",
    "unused_parameters",
    "reshard_after_forward",
    "prefetch",
    "tensor.sequence",
    "tensor.vocabulary",
    "tensor.asynchronous",
    "pipeline.schedule",
    "pipeline.virtual_stages",
    "pipeline.timeline",
)
"""Settings of parallel that some layouts refuse: they would have no effect there. None changes what is learned."""

Change = tuple[tuple[str, str], ...]
"""Settings that change together, as (key, value)."""


@dataclass(frozen=True)
class Trial:
    """One short run."""

    settings: Mapping[str, str]
    """Settings beyond those the user gave."""
    seconds: float
    """Median step; infinity if the run failed."""
    noise: float
    """Standard error of it, in seconds."""
    verdict: str
    minutes: float
    """Wall time of the run."""
    failure: str = ""
    kept: bool = False

    @property
    def overrides(self) -> list[str]:
        """Return the settings as overrides."""
        return [f"{key}={value}" for key, value in self.settings.items()]


@dataclass(frozen=True)
class _Loss:
    """A change that was not kept."""

    change: Change
    best: Trial
    """The best trial at that time, from which it was made."""
    trial: Trial

    def rules_out(self, change: Change, best: Trial) -> bool:
        """Whether a change of the best trial so far need not be tried, as this one lost."""
        size, smaller = dict(self.change).get(_MICRO_BATCH), dict(change).get(_MICRO_BATCH)
        if size and smaller and len(self.change) == len(change) == 1:
            # Step time has one minimum over the micro-batch: if less was slower, even less is slower still.
            lost = self.trial.seconds > self.best.seconds and best.settings == self.best.settings
            return lost and int(smaller) < int(size) < int(best.settings.get(_MICRO_BATCH, size))
        # What a layout costs depends on the micro-batch, and hardly on other options.
        same = change == self.change and best.settings.get(_MICRO_BATCH) == self.best.settings.get(_MICRO_BATCH)
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


def is_faster(trial: Trial, best: Trial) -> bool:
    """Whether a trial is faster beyond the noise of both, and by enough to matter."""
    gain = best.seconds - trial.seconds
    return math.isfinite(trial.seconds) and gain > max(
        2 * math.hypot(trial.noise, best.noise), LEAST_GAIN * best.seconds
    )


def pool_trials(first: Trial, second: Trial) -> Trial:
    """Return two measurements of the same settings as one."""
    if not math.isfinite(first.seconds + second.seconds):
        return second
    seconds, noise = (first.seconds + second.seconds) / 2, math.hypot(first.noise, second.noise) / 2
    return Trial(first.settings, seconds, noise, second.verdict, first.minutes + second.minutes)


def list_changes(base: Sequence[str], best: Trial, ranks: int) -> Iterator[Change]:
    """List the changes of the best trial so far that can run, those first that meet what its report named."""
    config = compose([*base, *best.overrides])
    batches, layouts = list(_list_micro_batches(config, ranks)), list(_list_layouts(config, ranks))
    options = list(_list_options(config))
    first, second = (layouts, batches) if best.verdict in ("network", "bubble", "straggler") else (batches, layouts)
    for change in [*first[:1], *second[:1], *options, *first[1:], *second[1:]]:
        if (possible := _drop_refused_options([*base, *best.overrides], config, change, ranks)) is not None:
            yield possible


def _drop_refused_options(base: Sequence[str], config: RunConfig, change: Change, ranks: int) -> Change | None:
    """Return a change that can run: as it is, or with options at their defaults that its layout refuses; None if none.

    config: what `base` composes to.
    """

    def can_run(settings: Change) -> bool:
        return _can_run([*base, *(f"{key}={value}" for key, value in settings)], ranks)

    if can_run(change):
        return change
    resets = list(_list_resets(config.parallel)) if any(key == "parallel.strategy" for key, _ in change) else []
    possible = (*change, *resets)
    if not resets or not can_run(possible):
        return None
    for reset in resets:  # those that the layout takes stay as they are
        fewer = tuple(setting for setting in possible if setting != reset)
        possible = fewer if can_run(fewer) else possible
    return possible


def _list_resets(parallel: ParallelConfig) -> Iterator[tuple[str, str]]:
    """List settings that take the options of layouts back to their defaults, where they are not."""
    defaults = ParallelConfig()
    for name in _OPTIONS_OF_LAYOUTS:
        now, default = (attrgetter(name)(config) for config in (parallel, defaults))
        if now != default:
            yield f"parallel.{name}", default if isinstance(default, str) else json.dumps(default)


def _list_micro_batches(config: RunConfig, ranks: int) -> Iterator[Change]:
    """List larger micro-batches, the largest first, then smaller ones."""
    degrees = resolve_degrees(config.parallel, ranks)
    share = config.train.global_batch // degrees.data_parallel
    now = min(config.train.micro_batch, share)
    sizes = [size for size in range(1, share + 1) if share % size == 0 and (size & (size - 1) == 0 or size == share)]
    larger, smaller = [size for size in sizes if size > now], [size for size in sizes if size < now]
    for size in [*reversed(larger), *reversed(smaller)]:
        yield ((_MICRO_BATCH, str(size)),)


def _list_layouts(config: RunConfig, ranks: int) -> Iterator[Change]:
    """List layouts of these ranks, those first that communicate least where they fit."""
    layouts = []
    for pp in _list_divisors(ranks):
        for tp in _list_divisors(ranks // pp):
            data = ranks // pp // tp
            for strategy in ("ddp", "zero1", "zero2", "zero3"):
                # With one copy of the model there is nothing that ZeRO could shard.
                if strategy == "zero1" if data == 1 else strategy != "ddp" or pp == tp == 1:
                    layouts.append((pp * tp, pp, strategy, data, tp))
    for _, pp, strategy, data, tp in sorted(layouts):
        replicate, shard = (str(data), "1") if strategy == "ddp" else ("1", str(data))
        values = {
            "parallel.pp": str(pp),
            "parallel.tp": str(tp),
            "parallel.strategy": strategy,
            "parallel.dp_replicate": replicate,
            "parallel.dp_shard": shard,
        }
        share = config.train.global_batch // data
        if config.train.micro_batch > share > 0:  # which is what the layout would use; the result says so
            values[_MICRO_BATCH] = str(share)
        yield tuple(values.items())


def _list_options(config: RunConfig) -> Iterator[Change]:
    """List what only changes how the layout is carried out."""
    parallel = config.parallel
    if parallel.strategy == "ddp" and not parallel.static_graph:
        yield (("parallel.static_graph", "true"),)
    if parallel.strategy == "zero3":
        yield (("parallel.reshard_after_forward", "false"),)
        if parallel.prefetch < 2:
            yield (("parallel.prefetch", "2"),)
    if parallel.recompute.mode != "none":
        yield (("parallel.recompute.mode", "none"),)


def _list_divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def _can_run(overrides: Sequence[str], ranks: int) -> bool:
    try:
        check_run(compose(overrides), ranks)
    except UserError:
        return False
    return True


def _prepare_trial(
    base: Sequence[str], folder: Path, steps: int, settings: Mapping[str, str]
) -> tuple[Path, list[str]]:
    """Return (the run directory of the next trial, the overrides to run it with)."""
    run = folder / f"trial-{sum(1 for _ in folder.glob('trial-*')):03d}"
    words = [*base, *(f"{key}={value}" for key, value in settings.items()), *_UNTIMED]
    return run, [*words, f"train.steps={steps}", f"run_dir={run}"]


def measure_locally(base: Sequence[str], folder: Path, steps: int) -> Callable[[Mapping[str, str]], Trial]:
    """Return what runs a trial on this machine, in a process of its own, and measures it."""

    def measure(settings: Mapping[str, str]) -> Trial:
        run, words = _prepare_trial(base, folder, steps, settings)
        began = time.monotonic()
        process = subprocess.run([sys.executable, "-m", "hpc_train", "train", *words], capture_output=True, text=True)
        minutes = (time.monotonic() - began) / 60
        if process.returncode:
            line = (process.stderr.strip() or "no message").splitlines()[-1]
            return Trial(dict(settings), math.inf, 0.0, "failed", minutes, line)
        return Trial(dict(settings), *time_steps(run), judge_newest_steps(run)[0].name, minutes)

    return measure


def measure_on_slurm(base: Sequence[str], folder: Path, steps: int) -> Callable[[Mapping[str, str]], Trial]:
    """Return what runs a trial as a Slurm job, waits for its end, and measures it."""

    def measure(settings: Mapping[str, str]) -> Trial:
        from hpc_train.api import submit

        run, words = _prepare_trial(base, folder, steps, settings)
        submitted = submit(compose(words))
        status = submitted.wait()
        began = next((float(event["time"]) for event in submitted.events() if event["event"] == "start"), time.time())
        minutes = max(0.0, time.time() - began) / 60
        if status.state != "DONE":
            return Trial(dict(settings), math.inf, 0.0, "failed", minutes, status.reason or str(status.state))
        return Trial(dict(settings), *time_steps(run), judge_newest_steps(run)[0].name, minutes)

    return measure


def time_steps(run: Path) -> tuple[float, float]:
    """Return the median step of a run after its warm-up, and the standard error of the median, both in seconds."""
    steps = [float(record["step_seconds"]) for record in read_metrics(run / "metrics.jsonl")][_WARM_UP_STEPS:]
    if not steps:
        return math.inf, 0.0
    middle = float(np.median(steps))
    deviation = float(np.median(np.abs(np.asarray(steps) - middle)))
    # From the median absolute deviation, so that a few slow steps, as another user of the machine makes them, do not
    # count. For normally distributed steps the standard deviation is 1.4826 times that, and the standard error of their
    # median 1.2533 (the root of pi / 2) times that of their mean.
    return middle, 1.2533 * 1.4826 * deviation / math.sqrt(len(steps))


def write_trial(file: LineFile, trial: Trial) -> None:
    """Append a trial to tune.jsonl."""
    values = {**asdict(trial), "seconds": trial.seconds if math.isfinite(trial.seconds) else None}
    file.append(json.dumps(values) + "\n")


def format_command(base: Sequence[str], settings: Mapping[str, str], on_slurm: bool) -> str:
    """Return the command that trains with these settings, in place of those that were given.

    on_slurm: whether it is a job of Slurm, or a run on this machine.
    """
    kept_overrides = [word for word in base if word.lstrip("+").partition("=")[0] not in settings]
    words = [*kept_overrides, *(f"{key}={value}" for key, value in settings.items())]
    return " ".join(["hpc-train submit" if on_slurm else "hpc-train train", *map(shlex.quote, words)])
