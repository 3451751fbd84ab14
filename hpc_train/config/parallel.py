"""conf/parallel: how a model is spread over ranks. Mesh axes, outermost first: pp, dp_replicate, dp_shard, cp, tp."""

from __future__ import annotations

from hpc_train.config.schema import schema, setting
from hpc_train.config.techniques import (
    CompressionConfig,
    ContextConfig,
    OffloadConfig,
    PipelineConfig,
    RecomputeConfig,
    ServerConfig,
    TensorConfig,
)

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@schema
class ParallelConfig:
    """Degrees of the mesh axes and the data-parallel strategy. A degree of -1 means what is left of the world."""

    auto: bool = False
    """The planner chooses all of `parallel`, and train.micro_batch, but what `fixed` names, before any rank starts."""
    fixed: list[str] | None = None
    """auto: keys that stay as they are, such as parallel.tp; None: those that overrides or files set."""
    strategy: str = setting(default="ddp", choices=STRATEGIES)
    """ddp replicates everything. zero1 shards optimizer state, zero2 also gradients, zero3 also parameters (FSDP2)."""
    pp: int = setting(default=1, ge=-1)
    """Pipeline stages."""
    dp_replicate: int | None = setting(default=None, ge=-1)
    """Copies of the model. None: -1 for ddp unless another degree is -1, else 1."""
    dp_shard: int | None = setting(default=None, ge=-1)
    """Ranks that share one copy. None: -1 for the zero strategies unless another degree is -1, else 1; with
    dp_replicate=-1 those of an NVLink domain of the cluster, or of a node where there is none, divided by tp x cp."""
    cp: int = setting(default=1, ge=-1)
    """Ranks that share the positions of a sequence (context parallelism)."""
    tp: int = setting(default=1, ge=-1)
    """Ranks that share the matrices of a layer (tensor parallelism)."""
    bucket_mib: float | None = setting(default=None, gt=0)
    """Size of ddp's gradient buckets; None: torch's, a first one of 1 MiB, to start early, then 25. zero1, zero2: of
    the groups of blocks that are gathered and reduced together; None: 25."""
    static_graph: bool = False
    """ddp: every step uses the same parameters in the same order; torch then plans the reduction once."""
    unused_parameters: bool = False
    """ddp: some parameters take no part in some steps; costs a walk over the graph each time."""
    reduce_with: str = setting(default="torch", choices=("torch", "mpi"))
    """ddp: what reduces gradients; mpi: the MPI library, for ranks of mpirun or srun --mpi on CPUs."""
    sync_batchnorm: bool = False
    """Statistics of BatchNorm over all data-parallel ranks, which makes it equal to one device."""
    reshard_after_forward: bool = True
    """zero3: free the gathered parameters after forward (less memory), or keep them (less communication): until
    backward, and where pp > 1, as several micro-batches are in flight, until the end of the step."""
    prefetch: int = setting(default=1, ge=0)
    """zero strategies: blocks whose parameters are gathered ahead of the one that computes; 1 is fully_shard's own."""
    compile: bool = False
    """torch.compile each block."""
    tensor: TensorConfig = setting(default=TensorConfig)
    pipeline: PipelineConfig = setting(default=PipelineConfig)
    context: ContextConfig = setting(default=ContextConfig)
    recompute: RecomputeConfig = setting(default=RecomputeConfig)
    offload: OffloadConfig = setting(default=OffloadConfig)
    compression: CompressionConfig = setting(default=CompressionConfig)
    server: ServerConfig = setting(default=ServerConfig)
