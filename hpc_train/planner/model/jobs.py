"""Jobs: what the planner is asked about, a column a property, so that millions of jobs are estimated at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.parallel import SCHEDULES as BUILT
from hpc_train.models.shape import transformer_flops_per_token

Column = NDArray[np.float64]
"""[n] numbers, or [] where all jobs share one: columns broadcast against each other. Counts are whole floats: they are
mostly multiplied and divided, which is faster than with integers."""

SCHEDULES = (*BUILT, "zb_2p")
"""Code of a schedule: its place here. Those that hpc_train runs, and zb_2p (ZB-H2: Qi et al. 2024, arXiv:2401.10241),
which only published runs have."""
RECOMPUTE = ("none", "selective", "full")
"""Code of a mode of recomputation. selective: what attention makes, scores and softmax, is made again."""
OFFLOAD = ("none", "optimizer", "parameters")
"""Code of what lives in host memory between uses: the optimizer's state and its update; parameters too."""
PCIE = 2.5e10
"""Bytes/s between a GPU and its host where nobody says: about those of PCIe 4.0 x16."""
STACKS = ("megatron", "deepspeed", "fsdp", "hpc_train")
"""Code of whose software runs the job: index into the constants that differ by software."""


@dataclass(frozen=True)
class Jobs:
    """Jobs in columns, one a row. Build them with jobs_from_config, from a run table, or with replace_columns."""

    # Model: a decoder-only transformer.
    layers: Column
    hidden: Column
    feed_forward: Column
    """Width of the feed-forward layer, of each of its two branches where gated."""
    heads: Column
    kv_heads: Column
    head_dim: Column
    vocab: Column
    gated: Column
    """1: two branches widen (SwiGLU)."""
    parallel_block: Column
    """1: attention and feed-forward layer work on the same input, so tp sums once in place of twice (Wang and
    Komatsuzaki 2021, GPT-J)."""
    tied: Column
    """1: embedding and head are one table."""
    learned_positions: Column
    """Vectors of a learned table of positions, which hpc_train's tp leaves whole; 0: none, or of a published run."""
    dropout: Column
    """1: hpc_train's own layers drop activations and attention weights, with masks of their own; 0 for published runs,
    whose layers' masks are counted anyway."""
    sequence: Column
    """Tokens of a sequence."""
    # Batch, in sequences.
    global_batch: Column
    micro_batch: Column
    # Degrees; their product is the world size.
    dp_replicate: Column
    dp_shard: Column
    cp: Column
    tp: Column
    pp: Column
    virtual_stages: Column
    """Stages a rank of pp has."""
    # Technique.
    sequence_parallel: Column
    """1: tp splits positions between its layers."""
    ulysses: Column
    """1: cp exchanges heads for positions around attention, in place of keys and values round a ring."""
    zero: Column
    """What dp_shard shards: 0 nothing, 1 optimizer, 2 gradients too, 3 parameters too."""
    reshard: Column
    """zero 3: 1 if parameters are freed after forward and gathered again."""
    schedule: Column
    """Index into SCHEDULES."""
    recompute: Column
    """Index into RECOMPUTE."""
    recompute_share: Column
    """Share of the layers that are recomputed, 0 to 1; no meaning for none."""
    offload: Column
    """Index into OFFLOAD."""
    offload_activations: Column
    """1: what layers keep for backward waits in host memory until then."""
    # Formats, bytes.
    activation_bytes: Column
    """Of an element of an activation, and of a gathered or computed-with parameter."""
    weight_bytes: Column
    """Kept of a parameter between steps beside the optimizer's own, sharded by zero 3."""
    gradient_bytes: Column
    """Kept of a gradient, sharded by zero 2 and 3."""
    reduce_bytes: Column
    """Of a gradient on its way over the data-parallel axes."""
    optimizer_bytes: Column
    """Of a parameter in the optimizer: 12 for AdamW with fp32 copies of 16-bit parameters, 8 without; sharded by
    zero 1 to 3."""
    logit_bytes: Column
    """Of a logit at the peak of the loss: 16-bit, fp32 and gradient, or less where the loss is fused."""
    # Software.
    stack: Column
    """Index into STACKS."""
    fused_attention: Column
    """1: scores are never in memory (Dao et al. 2022, arXiv:2205.14135)."""
    fused_elementwise: Column
    """1: chains of elementwise operations are one kernel each (torch.compile, hand-fused layers)."""
    overlap_data: Column
    """1: gradients are reduced, and parameters gathered, while others compute."""
    overlap_tensor: Column
    """1: collectives of tp run beside products (asynchronous)."""
    launch_blocking: Column
    """1: the host waits for each kernel (CUDA_LAUNCH_BLOCKING), so ranks meet late in every collective."""
    # Machine.
    gpus_per_node: Column
    nvlink_domain: Column
    """Ranks that reach each other over NVLink: of a node, or of more."""
    peak_flops: Column
    """FLOP/s of the linear layers' format, dense."""
    peak_flops_attention: Column
    """FLOP/s of the format that attention computes in (16 bits where linear layers have 8 or 4)."""
    gemm_ceiling: Column
    """Share of the peak that the best of all matrix products has been measured to reach."""
    attention_ceiling: Column
    """The same of fused attention, of peak_flops_attention."""
    multiprocessors: Column
    """Of a GPU, for wave quantisation; 0: unknown."""
    memory_bytes: Column
    memory_bandwidth: Column
    """Bytes/s."""
    link_bandwidth: Column
    """Bytes/s of one GPU to its NVLink domain, one direction."""
    nic_bandwidth: Column
    """Bytes/s out of a node, one direction, by the GPUs of the node: its NICs' rates added up, over gpus_per_node."""
    host_bandwidth: Column
    """Bytes/s between a GPU and its host, one direction; 0: unknown."""
    leaf_gpus: Column
    """GPUs under one leaf switch (a scalable unit); infinite where unknown or non-blocking."""
    leaf_oversubscription: Column
    group_gpus: Column
    """GPUs in one pod or dragonfly group; infinite where unknown."""
    group_oversubscription: Column
    # Checkpoints.
    checkpoint_every: Column
    """Steps; infinite: never."""
    checkpoint_bandwidth: Column
    """Bytes/s at which a rank's state leaves it while training waits."""

    @property
    def n(self) -> int:
        """Rows after broadcasting."""
        return int(np.prod(np.broadcast_shapes(*(getattr(self, field.name).shape for field in fields(self)))))

    @property
    def data_parallel(self) -> Column:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> Column:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def micro_batches(self) -> Column:
        """Return the micro-batches of a step on each data-parallel rank; the last may be short."""
        return np.ceil(self.global_batch / (self.data_parallel * self.micro_batch))

    @property
    def parameters(self) -> Column:
        """Weights of the matrices of the whole model, a tied table once."""
        return self.layers * self.layer_parameters + (2 - self.tied) * self.vocab * self.hidden

    @property
    def layer_parameters(self) -> Column:
        """Weights of the matrices of one layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + (2 + self.gated) * self.hidden * self.feed_forward

    @property
    def rank_layer_parameters(self) -> Column:
        """Return the weights of one layer on a rank of tp; hpc_train splits keys and values if tp divides them."""
        keys = 2 * self.hidden * self.head_dim * self.kv_heads
        copies_keys = (self.stack == STACKS.index("hpc_train")) & (self.kv_heads % self.tp != 0)
        return (self.layer_parameters - keys) / self.tp + keys / np.where(copies_keys, 1.0, self.tp)

    @property
    def rank_key_heads(self) -> Column:
        """Return the heads of keys and values that a rank of tp computes."""
        share = self.kv_heads / self.tp
        return np.where(self.stack == STACKS.index("hpc_train"), np.ceil(share), share)

    @property
    def tokens(self) -> Column:
        """Return the tokens of a step."""
        return self.global_batch * self.sequence

    @property
    def model_flops(self) -> Column:
        """FLOPs of a step of the whole job that MFU is computed from."""
        weights = self.layers * self.layer_parameters + self.vocab * self.hidden
        attention_width = self.layers * self.heads * self.head_dim
        flops: Column = self.tokens * transformer_flops_per_token(weights, attention_width, self.sequence)
        return flops


def as_column(value: object) -> Column:
    """A number or a row of numbers as a column."""
    return np.asarray(value, np.float64)


def replace_columns(jobs: Jobs, **columns: object) -> Jobs:
    """Return the jobs with other columns, in any shape that broadcasts."""
    return replace(jobs, **{name: as_column(value) for name, value in columns.items()})


def recomputed_share(layers: float, stages: int, every: int) -> float:
    """Return the recomputed share of a stage's layers: of n layers the first and every so-many-th, ceil(n / every)."""
    per_stage = math.ceil(layers / stages)
    return math.ceil(per_stage / every) / per_stage


def job_columns(jobs: Jobs) -> dict[str, Column]:
    """Name -> column."""
    return {field.name: getattr(jobs, field.name) for field in fields(jobs)}
