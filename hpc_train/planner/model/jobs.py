"""Jobs: what the planner's model is about, one column per property, so that millions of jobs are estimated at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpc_train.models.adapters.nf4_sizes import NF4_BYTES
from hpc_train.models.counts import FROZEN_WEIGHT_FLOPS, count_transformer_flops
from hpc_train.planner.model.inputs import HPC_TRAIN, Column, JobInputs


@dataclass(frozen=True)
class Jobs(JobInputs):
    """Jobs as columns, one job per row. Made by jobs_from_config, from a run table, or by replace_columns."""

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of all columns after broadcasting: [n], or [rows, techniques] in a search."""
        return np.broadcast_shapes(*(column.shape for column in job_columns(self).values() if column.ndim))

    @property
    def n(self) -> int:
        """Number of jobs, after broadcasting."""
        return math.prod(self.shape)

    @cached_property
    def condensed(self) -> Jobs:
        """Return these jobs with one entry in each column whose values are all equal.

        Jobs that are searched together share many values, and what depends on these alone is then computed once. A
        column keeps its axes, with length 1, so that the axis of stages stays in front of them.
        """
        columns = {name: column for name, column in job_columns(self).items() if column.size > 1}
        equal = {
            name: column[(slice(1),) * column.ndim]
            for name, column in columns.items()
            if (column == column.flat[0]).all()
        }
        return replace(self, **equal) if equal else self

    @cached_property
    def data_parallel(self) -> Column:
        """Number of ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def world(self) -> Column:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @cached_property
    def micro_batches(self) -> Column:
        """Return the micro-batches of a step on each data-parallel rank; the last may be short."""
        return np.ceil(self.global_batch / (self.data_parallel * self.micro_batch))

    @cached_property
    def has_experts(self) -> bool:
        """Whether any job has experts. Most searches have none, and skip what is about them."""
        return bool(np.any(self.experts))

    @cached_property
    def has_pipeline(self) -> bool:
        """Whether any job has a pipeline. Without one all ranks need the same memory."""
        return bool(np.any(self.pp > 1))

    @cached_property
    def has_scores(self) -> bool:
        """Whether any job has attention with masks, or with scores that are stored."""
        return bool(np.any(self.masked_share) or np.any(self.stored_scores))

    @cached_property
    def has_latent(self) -> bool:
        """Whether any job has latent attention."""
        return bool(np.any(self.key_rank))

    @cached_property
    def sparse_share(self) -> Column:
        """Share of the layers that are mixtures of experts."""
        share: Column = choose(self.experts > 0, 1 - self.dense_layers / self.layers, 0.0)
        return share

    @property
    def expert_parameters(self) -> Column:
        """Number of weights of one routed expert."""
        return 3 * self.hidden * self.expert_width

    @property
    def parameters(self) -> Column:
        """Number of weights in the matrices of the whole model; a tied table counts once."""
        return self.layers * self.all_layer_parameters + (2 - self.tied) * self.vocab * self.hidden

    @cached_property
    def attention_parameters(self) -> Column:
        """Number of weights in the linear layers of one attention."""
        weights = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        if not self.has_latent:
            return weights
        expanded = self.key_rank * self.heads * (self.head_dim - self.rotary_width + self.value_dim)
        queries = self.heads * self.head_dim * choose(self.query_rank > 0, self.query_rank, self.hidden)
        latent = self.narrow_parameters + queries + expanded + self.heads * self.value_dim * self.hidden
        return choose(self.key_rank > 0, latent, weights)

    @property
    def narrow_parameters(self) -> Column:
        """Number of weights that make latents, which tp does not split."""
        return self.hidden * (self.query_rank + self.key_rank + self.rotary_width)

    @cached_property
    def layer_parameters(self) -> Column:
        """Number of weights that compute a token in one layer, on average over the layers."""
        dense = self.attention_parameters + (2 + self.gated) * self.hidden * self.feed_forward
        return dense if not self.has_experts else dense + self._experts_instead(self.top_k)

    @cached_property
    def all_layer_parameters(self) -> Column:
        """Number of weights in the matrices of one layer, with all experts, on average over the layers."""
        dense = self.attention_parameters + (2 + self.gated) * self.hidden * self.feed_forward
        return dense if not self.has_experts else dense + self._experts_instead(self.experts)

    def _experts_instead(self, routed: Column) -> Column:
        """Return how many more weights a layer has on average than a dense one, with `routed` experts."""
        dense = (2 + self.gated) * self.hidden * self.feed_forward
        others = self.hidden * (self.experts + 3 * self.shared_width)
        return self.sparse_share * (others + routed * self.expert_parameters - dense)

    @cached_property
    def rank_layer_parameters(self) -> Column:
        """Return the weights of one layer on a rank of tp, without routed experts, on average over the layers.

        hpc_train splits keys and values if tp divides them; it splits neither routers nor what makes latents.
        """
        keys = 2 * self.hidden * self.head_dim * self.kv_heads
        copies_keys = (self.stack == HPC_TRAIN) & (self.kv_heads % self.tp != 0)
        weights = self.attention_parameters + (2 + self.gated) * self.hidden * self.feed_forward
        if not self.has_experts and not self.has_latent:
            return (weights - keys) / self.tp + keys / choose(copies_keys, 1.0, self.tp)
        weights = weights + self._experts_instead(np.zeros(()))
        keys = choose(self.key_rank > 0, 0.0, keys)
        unsplit = (
            choose(self.key_rank > 0, self.narrow_parameters, 0.0) + self.sparse_share * self.hidden * self.experts
        )
        return (weights - keys - unsplit) / self.tp + keys / choose(copies_keys, 1.0, self.tp) + unsplit

    @property
    def gathered_bytes(self) -> Column:
        """Mean bytes per element of a layer's weights, without routed experts and adapters, as they are gathered."""
        wide = choose(self.float8_gather > 0, 1.0, self.activation_bytes)
        if not self.has_four_bits:
            return wide
        routed = self.sparse_share * self.experts * self.expert_parameters
        return wide - self.four_bit_weights / (self.all_layer_parameters - routed) * (wide - NF4_BYTES)

    @property
    def expert_tp(self) -> Column:
        """Ranks that split the width of each expert: those of tp in hpc_train; Megatron has whole experts."""
        return choose(self.stack == HPC_TRAIN, self.tp, 1.0)

    @property
    def rank_expert_parameters(self) -> Column:
        """Return the weights of the routed experts of one layer that has any, on a rank of tp and ep."""
        return self.experts / self.ep * self.expert_parameters / self.expert_tp

    @cached_property
    def has_adapters(self) -> bool:
        """Whether any job trains adapters only."""
        return bool(np.any(self.adapter_weights))

    @cached_property
    def has_four_bits(self) -> bool:
        """Whether any job has weights in 4 bits."""
        return bool(np.any(self.four_bit_weights))

    @cached_property
    def rank_adapter_weights(self) -> Column:
        """Return the weights of a layer's adapters on a rank of tp."""
        return (self.adapter_weights - self.adapter_unsplit) / self.tp + self.adapter_unsplit

    @property
    def adapters_per_weight(self) -> Column:
        """Ratio of adapter weights to others in the layers of a rank of tp; 0 if all weights are trained."""
        layer = self.rank_layer_parameters
        if self.has_experts:
            layer = layer + self.sparse_share * choose(self.experts > 0, self.rank_expert_parameters, 0.0)
        return self.rank_adapter_weights / layer

    @cached_property
    def attention_dim(self) -> Column:
        """Mean width of a query and a value of one head: what attention's FLOPs are counted with."""
        if not self.has_latent:
            return self.head_dim
        return choose(self.key_rank > 0, (self.head_dim + self.value_dim) / 2, self.head_dim)

    @cached_property
    def rank_key_heads(self) -> Column:
        """Return the heads of keys and values that a rank of tp computes."""
        share = self.kv_heads / self.tp
        return choose(self.stack == HPC_TRAIN, np.ceil(share), share)

    @property
    def tokens(self) -> Column:
        """Return the tokens of a step."""
        return self.global_batch * self.sequence

    @property
    def model_flops(self) -> Column:
        """FLOPs of a step of the whole job, as MFU counts them: without recomputation."""
        weights = self.layers * self.layer_parameters + self.vocab * self.hidden
        attention_width = self.layers * self.heads * self.attention_dim
        seen = self.sequence * self.seen_share
        weight_flops = choose(self.adapter_weights > 0, FROZEN_WEIGHT_FLOPS, 6.0)
        flops: Column = self.tokens * count_transformer_flops(weights, attention_width, seen, weight_flops)
        return flops


def as_column(value: object) -> Column:
    """Convert a number or a list of numbers to a column."""
    return np.asarray(value, np.float64)


def choose(condition: NDArray[np.bool_], yes: Column | float, no: Column | float) -> Column:
    """Return np.where of the arguments, without copying them if one condition holds for all jobs."""
    if condition.size == 1:
        return as_column(yes if condition.item() else no)
    return np.where(condition, yes, no)


def take_single(column: Column | float) -> float:
    """Return the value of a column of one job."""
    values = np.asarray(column, np.float64)
    assert values.size == 1
    return float(values.reshape(-1)[0])


def replace_columns(jobs: Jobs, **columns: object) -> Jobs:
    """Return the jobs with other columns, in any shape that broadcasts."""
    return replace(jobs, **{name: as_column(value) for name, value in columns.items()})


def recomputed_share(layers: float, stages: int, every: int) -> float:
    """Return the share of a stage's layers that are recomputed: the first and every `every`-th one after it."""
    per_stage = math.ceil(layers / stages)
    return math.ceil(per_stage / every) / per_stage


def job_columns(jobs: Jobs) -> dict[str, Column]:
    """Return all columns by name."""
    return {field.name: getattr(jobs, field.name) for field in fields(jobs)}
