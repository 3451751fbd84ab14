"""Facts that lints look at, and the Advice that they return: a configuration and the planner's own estimate of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from hpc_train.config.model import TransformerConfig
from hpc_train.config.parallel import Degrees, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.models.shape import count_parameters
from hpc_train.placement.fabric_from_config import count_nodes, count_ranks_per_node
from hpc_train.planner.constants import Constants
from hpc_train.planner.model.from_config import jobs_from_config, list_assumptions
from hpc_train.planner.model.jobs import OFFLOAD, RECOMPUTE, Column, Jobs, replace_columns
from hpc_train.planner.model.memory import estimate_memory
from hpc_train.planner.model.step_time import StepTime, estimate_jobs
from hpc_train.planner.reliability.failure_rate import Percentiles
from hpc_train.planner.reliability.projection import AssumedFailureRate, ProjectedJob, Projection, project_run
from hpc_train.traffic.stages import count_micro_batches, stage_placement

Severity = Literal["error", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "hint")


@dataclass(frozen=True)
class Advice:
    """One thing to change, and why."""

    about: str
    """Key of the configuration, such as model.vocab_size."""
    why: str
    """What is wrong with it, with its numbers, in one line."""
    fix: str
    """What to write instead, or to do, in one line."""
    severity: Severity
    """error: it cannot run so, or misses a goal; warning: it costs or risks much; hint: it may be better."""
    overrides: tuple[tuple[str, ...], ...] = ()
    """The settings in `fix`, each alternative as overrides of the run; all of them have been checked for it."""


def format_advice(advice: Sequence[Advice]) -> list[str]:
    """For a person: two lines each."""
    found = []
    for it in advice:
        found += [f"{it.severity:<7}  {it.about}: {it.why}", f"{'':<9}{it.fix}"]
    return found


def advice_to_json(advice: Sequence[Advice]) -> list[dict[str, Any]]:
    """Return advice as `plan --json` prints it."""
    return [asdict(it) for it in advice]


@dataclass(frozen=True)
class RunEstimate:
    """The planner's estimate of a run; a lint that needs a figure which is None says nothing."""

    job: ProjectedJob | None = None
    rate: AssumedFailureRate | None = None
    """None: of outlook.rate_of."""
    bubble: float | None = None
    """Share of a step that the pipeline idles; None: by the closed form of the schedule, where it has one."""
    memory_without_recompute: float | None = None
    """Bytes of the rank that needs most, with parallel.recompute.mode=none."""
    memory_without_offload: float | None = None
    """The same with nothing offloaded."""
    memory_margin: float = 0.1
    """Error of those to expect, a fraction."""


@dataclass(frozen=True)
class RunFacts:
    """One configuration and its estimate."""

    config: RunConfig
    degrees: Degrees
    figures: RunEstimate

    @property
    def transformer(self) -> TransformerConfig | None:
        """The model, where its shape is one of these."""
        return self.config.model if isinstance(self.config.model, TransformerConfig) else None

    @property
    def tensor_cores(self) -> bool:
        """Whether products run in 16 bits on a GPU that conf/cluster describes."""
        return bool(self.config.cluster.gpu.peak_tflops) and self.config.precision.name in ("bf16", "fp16")

    @property
    def rows(self) -> float:
        """Sequences of a rank in a step."""
        return self.config.train.global_batch / self.degrees.data_parallel

    @property
    def micro_batches(self) -> int:
        return count_micro_batches(self.config, self.degrees)

    @property
    def virtual_stages(self) -> int:
        """Stages that a rank has."""
        return len(stage_placement(self.config.parallel.pipeline, self.degrees.pp)) // self.degrees.pp

    @property
    def nodes(self) -> int:
        return -(-self.degrees.world // count_ranks_per_node(self.config))

    @property
    def tokens_per_step(self) -> float | None:
        """Return the tokens of a step; None if the model reads no tokens."""
        train = self.config.train
        return float(train.global_batch * train.sequence_length) if self.transformer else None

    @property
    def tokens(self) -> float | None:
        """Of the whole run, where somebody said so: steps by default are none that a law is asked about."""
        steps = self.config.train.steps
        if self.config.plan.tokens is not None or self.tokens_per_step is None:
            return self.config.plan.tokens
        return None if steps is None else steps * self.tokens_per_step

    @cached_property
    def outlook(self) -> Projection | None:
        return None if self.figures.job is None else project_run(self.config, self.figures.job, self.figures.rate)


def collect_facts(config: RunConfig, figures: RunEstimate | None = None, world: int | None = None) -> RunFacts:
    """world: ranks; None: those of the configuration. Raises UserError for degrees that do not fit them."""
    world = world or count_nodes(config) * count_ranks_per_node(config)
    return RunFacts(config, resolve_degrees(config.parallel, world), figures or RunEstimate())


def estimate_for_advice(
    config: RunConfig, world: int, constants: Constants, rate: AssumedFailureRate | None = None
) -> RunEstimate:
    """Of a run on so many ranks; rate: of outlook.rate_of, where it is there already.

    What rests on a figure of the machine that is not known is left out. Raises UserError as `jobs_of` does.
    """
    jobs, missing = jobs_from_config(config, world), list_assumptions(config.cluster, config.precision.name)
    figures = RunEstimate(rate=rate)
    if not any("memory_gib" in line for line in missing):
        figures = replace(
            figures,
            memory_without_recompute=_memory_without(jobs, constants, "recompute", RECOMPUTE.index("none")),
            memory_without_offload=_memory_without(jobs, constants, "offload", OFFLOAD.index("none")),
            memory_margin=_single(estimate_memory(jobs, constants).margin),
        )
    if missing:
        return figures
    found = estimate_jobs(jobs, constants)
    nodes = max(1, -(-world // round(_single(jobs.gpus_per_node))))
    parameters = count_parameters(config.model) or _single(jobs.parameters)
    job = ProjectedJob(world, nodes, _step_without_saves(found.time), _single(jobs.tokens), parameters)
    return replace(figures, job=job, bubble=_single(found.time.bubble / found.time.step))


def _memory_without(jobs: Jobs, constants: Constants, name: str, off: int) -> float | None:
    """Bytes of the rank that needs most with a technique off; None where it is off already."""
    if _single(getattr(jobs, name)) == off:
        return None
    return _single(estimate_memory(replace_columns(jobs, **{name: off}), constants).total)


def _step_without_saves(time: StepTime) -> Percentiles:
    """Return the step time without saving, which the projection adds itself."""
    share = _single(1 - time.checkpoint / time.step)
    return Percentiles(*(_single(time.quantile(p)) * share for p in (0.1, 0.5, 0.9)))


def _single(value: Column | float) -> float:
    return float(np.asarray(value, np.float64).reshape(-1)[0])
