"""conf/parallel: how a model is spread over ranks. Mesh axes, outermost first: pp, dp_replicate, dp_shard, cp, tp."""

from __future__ import annotations

from hpc_train.config.schema import schema, setting

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@schema
class ParallelConfig:
    """Degrees of the mesh axes and the data-parallel strategy. A degree of -1 means what is left of the world."""

    strategy: str = setting(default="ddp", choices=STRATEGIES)
    """ddp replicates everything; zero3 shards parameters, gradients and optimizer state (FSDP2)."""
    pp: int = setting(default=1, ge=-1)
    """Pipeline stages."""
    dp_replicate: int | None = setting(default=None, ge=-1)
    """Copies of the model. None: -1 for ddp unless another degree is -1, else 1."""
    dp_shard: int | None = setting(default=None, ge=-1)
    """Ranks that share one copy. None: -1 for the zero strategies unless another degree is -1, else 1."""
    cp: int = setting(default=1, ge=-1)
    """Ranks that share the positions of a sequence (context parallelism)."""
    tp: int = setting(default=1, ge=-1)
    """Ranks that share the matrices of a layer (tensor parallelism)."""
    bucket_mib: float | None = setting(default=None, gt=0)
    """Size of ddp's gradient buckets; None: torch's, a first one of 1 MiB, to start early, then 25."""
    reshard_after_forward: bool = True
    """zero3: free the gathered parameters after forward (less memory), or keep them (less communication)."""
