"""A run whose model has a known shape, with what its traffic is computed from: weights, stages, sizes of a micro-batch.

data_flows.py and model_flows.py ask it for the weights that a rank holds and for the passes of its stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.models.shape import count_kv_heads
from hpc_train.traffic.axes import Flow
from hpc_train.traffic.stages import StagePart, StepWork, compute_step_work, list_stage_parts
from hpc_train.traffic.weights import Splitting, Weight, Weights, count_rank_elements, list_weights

RankStages = tuple[StagePart, ...]
"""The pipeline stages of one pp rank."""


def describe_run(config: RunConfig, degrees: Degrees) -> ShapedRun | None:
    """Return the run with the shape of its model; None for a custom model, whose shape is unknown."""
    weights = list_weights(config.model)
    if weights is None:
        return None
    assert isinstance(config.model, (TransformerConfig, VisionTransformerConfig))
    return ShapedRun(config, config.model, degrees, compute_step_work(config, degrees), weights)


@dataclass(frozen=True)
class ShapedRun:
    """A run of a transformer or a vision transformer."""

    config: RunConfig
    model: TransformerConfig | VisionTransformerConfig
    degrees: Degrees
    work: StepWork
    weights: Weights

    @property
    def splits_positions(self) -> bool:
        """Whether tp splits positions between layers, as sequence parallelism; a vision transformer never does."""
        return self.config.parallel.tensor.sequence and isinstance(self.model, TransformerConfig)

    @property
    def splits_vocabulary(self) -> bool:
        """Whether tp splits embedding and head."""
        return self.config.parallel.tensor.vocabulary and isinstance(self.model, TransformerConfig)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one cp rank."""
        return self.work.sequences * self.work.positions

    @property
    def hidden_elements(self) -> float:
        """Elements of a micro-batch's hidden states on one cp rank, before tp splits positions."""
        return self.tokens * self.model.hidden

    @property
    def kv_heads(self) -> int:
        """Key and value heads of the whole model."""
        return count_kv_heads(self.model) if isinstance(self.model, TransformerConfig) else self.model.heads

    @property
    def ep(self) -> int:
        return self.config.parallel.ep

    @property
    def shards(self) -> int:
        """Ranks of dp_shard x cp, over which fully_shard shards parameters."""
        return self.degrees.dp_shard * self.degrees.cp

    def choose_busiest_rank(self, list_flows: Callable[[RankStages], list[Flow]]) -> list[Flow]:
        """Return the flows of the pp rank that moves most bytes. list_flows: lists those of one rank's stages."""
        ranks = list_stage_parts(self.config, self.degrees.pp, self.weights.blocks, self.work.micro_batches)
        flows_of_ranks = (list_flows(stages) for stages in dict.fromkeys(ranks))  # equal ranks count once
        return max(flows_of_ranks, key=lambda flows: sum(flow.bytes * flow.calls for flow in flows))

    def count_recomputed(self, stages: RankStages) -> int:
        """Count the blocks of these stages whose forward runs twice."""
        options = self.config.parallel.recompute
        return sum(-(-part.blocks // options.every) for part in stages) if options.mode != "none" else 0

    def count_recomputed_mixed(self, stages: RankStages) -> int:
        """Count the blocks of experts of these stages whose forward runs twice."""
        options = self.config.parallel.recompute
        if options.mode == "none":
            return 0
        # Every k-th block of a stage is recomputed, from its first one; dense blocks come before those of experts.
        first = [-(-part.dense // options.every) * options.every for part in stages]
        return sum(len(range(begin, part.blocks, options.every)) for begin, part in zip(first, stages, strict=True))

    def list_block_weights(self, part: StagePart) -> list[Weight]:
        """List the weights of a stage's blocks that fully_shard keeps with the block: with ep, experts are apart."""
        experts = self.weights.experts if self.ep == 1 else ()
        return [*self.weights.dense_block * part.dense, *(*self.weights.block, *experts) * part.mixed]

    def list_end_weights(self, part: StagePart) -> list[Weight]:
        """List the weights of a stage outside blocks: embedding, last norm, head."""
        weights = [*(self.weights.before if part.first else ()), *(self.weights.after if part.last else ())]
        return [*weights, self.weights.tied] if self.weights.tied and part.last and not part.first else weights

    def list_all_block_weights(self) -> list[Weight]:
        """List the weights of all blocks of the model."""
        return self.list_block_weights(self._whole_model)

    @property
    def _whole_model(self) -> StagePart:
        return StagePart(self.weights.blocks, dense=self.weights.dense_blocks)

    def count_elements(self, weights: Iterable[Weight], shards: int | None = None) -> int:
        """Count the elements of one tp rank. shards: ranks to whose multiple rows are padded; None: self.shards."""
        padding = self.shards if shards is None else shards
        return count_rank_elements(weights, Splitting(self.degrees.tp, self.kv_heads, self.splits_vocabulary, padding))

    def count_held_elements(self) -> int:
        """Count the elements of all parameters on one tp rank, all its shards together."""
        return self.count_elements([*self.list_all_block_weights(), *self.list_end_weights(self._whole_model)])


def list_axes_in_use(degrees: Degrees, axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes that have more than one rank."""
    return tuple(axis for axis in axes if getattr(degrees, axis) > 1)
