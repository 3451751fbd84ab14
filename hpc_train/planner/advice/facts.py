"""Facts: a configuration with its degrees, and what the planner has estimated of it, as lints look at it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hpc_train.config.degrees import Degrees, resolve
from hpc_train.config.model import TransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.parallel.support.pipeline import micro_batches, placement
from hpc_train.placement.from_config import node_count, ranks_per_node
from hpc_train.planner.outlook import Job, Outlook, Rate, outlook


@dataclass(frozen=True)
class Figures:
    """What has been estimated; None where it has not, and lints that need it say nothing."""

    job: Job | None = None
    rate: Rate | None = None
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
class Facts:
    """Of one configuration."""

    config: RunConfig
    degrees: Degrees
    figures: Figures

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
        return micro_batches(self.config, self.degrees)

    @property
    def virtual_stages(self) -> int:
        """Stages that a rank has."""
        return len(placement(self.config.parallel.pipeline, self.degrees.pp)) // self.degrees.pp

    @property
    def nodes(self) -> int:
        return -(-self.degrees.world // ranks_per_node(self.config))

    @property
    def tokens_per_step(self) -> float | None:
        """None where the model reads no tokens."""
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
    def outlook(self) -> Outlook | None:
        return None if self.figures.job is None else outlook(self.config, self.figures.job, self.figures.rate)


def facts_of(config: RunConfig, figures: Figures | None = None, world: int | None = None) -> Facts:
    """world: ranks; None: those of the configuration. Raises UserError for degrees that do not fit them."""
    world = world or node_count(config) * ranks_per_node(config)
    return Facts(config, resolve(config.parallel, world), figures or Figures())
