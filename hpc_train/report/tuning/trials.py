"""A trial of a search for faster settings: a short run, its step time, and the noise of that."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hpc_train.config.compose import compose
from hpc_train.report.run_summary import judge_newest_steps
from hpc_train.training.records.run_records import LineFile, read_metrics

LEAST_GAIN = 0.02
"""A change is kept only if it also shortens a step by this share."""
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
"""Settings of every trial: they turn off work that does not belong to a step."""


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


def _prepare_trial(
    base: Sequence[str], folder: Path, steps: int, settings: Mapping[str, str]
) -> tuple[Path, list[str]]:
    """Return (the run directory of the next trial, the overrides to run it with)."""
    run = folder / f"trial-{sum(1 for _ in folder.glob('trial-*')):03d}"
    words = [*base, *(f"{key}={value}" for key, value in settings.items()), *_UNTIMED]
    return run, [*words, f"train.steps={steps}", f"run_dir={run}"]


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
