"""Define the lints' input, RunFacts (a configuration and the planner's estimate of it), and their output, Advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from hpc_train.config.model import TransformerConfig
from hpc_train.config.parallel import Degrees, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.placement.described_cluster import count_nodes, count_ranks_per_node
from hpc_train.planner.candidate import make_projected_job
from hpc_train.planner.constants import Constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.inputs import OFFLOAD, RECOMPUTE
from hpc_train.planner.model.jobs import Jobs, replace_columns, take_single
from hpc_train.planner.model.machine_columns import list_assumptions
from hpc_train.planner.model.memory import estimate_memory
from hpc_train.planner.model.step_time import estimate_jobs
from hpc_train.planner.reliability.projection import AssumedFailureRate, ProjectedJob, Projection, project_run
from hpc_train.traffic.stages import count_micro_batches, place_stages

Severity = Literal["error", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "hint")


@dataclass(frozen=True)
class Advice:
    """One finding: what to change in the configuration, and why."""

    about: str
    """Configuration key, such as model.vocab_size."""
    why: str
    """What is wrong, with numbers, in one line."""
    fix: str
    """What to set or do instead, in one line."""
    severity: Severity
    """error: the run would fail or miss a goal; warning: it costs or risks much; hint: another value may be better."""
    overrides: tuple[tuple[str, ...], ...] = ()
    """The settings that `fix` names, each alternative as overrides. All were checked to be valid for this run."""


def format_advice(advice: Sequence[Advice]) -> list[str]:
    """Format advice for a terminal, two lines each."""
    lines = []
    for item in advice:
        lines += [f"{item.severity:<7}  {item.about}: {item.why}", f"{'':<9}{item.fix}"]
    return lines


def advice_to_json(advice: Sequence[Advice]) -> list[dict[str, Any]]:
    """Return advice as `plan --json` prints it."""
    return [asdict(item) for item in advice]


@dataclass(frozen=True)
class RunEstimate:
    """The planner's estimate of a run. A lint is skipped if a figure it needs is None."""

    job: ProjectedJob | None = None
    rate: AssumedFailureRate | None = None
    """Failure rate of nodes; None: choose_failure_rate decides."""
    bubble: float | None = None
    """Share of a step that the pipeline idles; None: the schedule's closed form is used, if it has one."""
    memory_without_recompute: float | None = None
    """Bytes on the rank that needs most, with parallel.recompute.mode=none; None: it is none already."""
    memory_without_offload: float | None = None
    """Bytes on the rank that needs most, without offload; None if nothing is offloaded anyway."""
    memory_margin: float = 0.1
    """Expected relative error of the two memory figures."""


@dataclass(frozen=True)
class RunFacts:
    """One configuration and its estimate."""

    config: RunConfig
    degrees: Degrees
    figures: RunEstimate

    @property
    def transformer(self) -> TransformerConfig | None:
        """The model configuration if it is a transformer, else None."""
        return self.config.model if isinstance(self.config.model, TransformerConfig) else None

    @property
    def tensor_cores(self) -> bool:
        """Whether matrix products run in 16 bits on a GPU of known speed."""
        return bool(self.config.cluster.gpu.peak_tflops) and self.config.precision.name in ("bf16", "fp16")

    @property
    def rows(self) -> float:
        """Sequences that a data-parallel rank reads in a step."""
        return self.config.train.global_batch / self.degrees.data_parallel

    @property
    def micro_batches(self) -> int:
        return count_micro_batches(self.config, self.degrees)

    @property
    def virtual_stages(self) -> int:
        """Pipeline stages on each rank."""
        return len(place_stages(self.config.parallel.pipeline, self.degrees.pp)) // self.degrees.pp

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
        """Return the tokens of the whole run; None if neither plan.tokens nor train.steps is set."""
        steps = self.config.train.steps
        if self.config.plan.tokens is not None or self.tokens_per_step is None:
            return self.config.plan.tokens
        return None if steps is None else steps * self.tokens_per_step

    @cached_property
    def outlook(self) -> Projection | None:
        return None if self.figures.job is None else project_run(self.config, self.figures.job, self.figures.rate)


def collect_facts(config: RunConfig, figures: RunEstimate | None, world: int | None = None) -> RunFacts:
    """Collect what lints need of a run. world: number of ranks; None: the configuration's.

    Raises UserError for degrees that do not multiply to the world.
    """
    world = world or count_nodes(config) * count_ranks_per_node(config)
    return RunFacts(config, resolve_degrees(config.parallel, world), figures or RunEstimate())


def estimate_for_advice(
    config: RunConfig, world: int, constants: Constants, rate: AssumedFailureRate | None = None
) -> RunEstimate:
    """Estimate a run on `world` ranks, as far as the machine's figures are known; the rest is None.

    rate: failure rate of nodes, if chosen already. Raises UserError as jobs_from_config does.
    """
    jobs, missing = jobs_from_config(config, world), list_assumptions(config.cluster, config.precision.name)
    figures = RunEstimate(rate=rate)
    if not any("memory_gib" in line for line in missing):
        figures = replace(
            figures,
            memory_without_recompute=_estimate_memory_without(jobs, constants, "recompute", RECOMPUTE.index("none")),
            memory_without_offload=_estimate_memory_without(jobs, constants, "offload", OFFLOAD.index("none")),
            memory_margin=take_single(estimate_memory(jobs, constants).margin),
        )
    if missing:
        return figures
    estimate = estimate_jobs(jobs, constants)
    job = make_projected_job(config, jobs, estimate.time)
    return replace(figures, job=job, bubble=take_single(estimate.time.bubble / estimate.time.step))


def _estimate_memory_without(jobs: Jobs, constants: Constants, name: str, off: int) -> float | None:
    """Return the bytes on the rank that needs most with a technique switched off; None if it is off already."""
    if take_single(getattr(jobs, name)) == off:
        return None
    return take_single(estimate_memory(replace_columns(jobs, **{name: off}), constants).total)
