"""The parts of conf/parallel that belong to one technique each. A default means off, or the plain way."""

from __future__ import annotations

from hpc_train.config.schema import schema, setting

SCHEDULES = (
    "naive",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)


@schema
class TensorConfig:
    """Tensor parallelism, where tp > 1 (Shoeybi et al. 2019, arXiv:1909.08053)."""

    sequence: bool = True
    """Split the positions too between the layers that are split (Korthikanti et al. 2022, arXiv:2205.05198)."""
    vocabulary: bool = True
    """Split the embedding, the output layer and the loss by vocabulary, so that no rank ever has all logits."""
    asynchronous: bool = False
    """Overlap the gather and the scatter of activations with the matrix products, a chunk at a time."""


@schema
class PipelineConfig:
    """Pipeline parallelism, where pp > 1."""

    schedule: str = "1f1b"
    """naive, gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv, dualpipev, or a file .csv,
    of which the run keeps a copy."""
    virtual_stages: int | None = setting(default=None, ge=1)
    """Stages a rank; None: 1, or 2 for the schedules that need more."""
    costs: list[float] | None = None
    """Relative time of each block, in order, with that of the embedding before and of the head after them; None:
    their FLOPs. A run that resumes uses what it measured before if `resplit` is on."""
    resplit: bool = False
    """Measure the blocks in the first steps (stage_times.json in the run directory), and split by that at a resume."""
    timeline: bool = False
    """Record when each rank did what in the first steps, in timeline/ of the run directory, for chrome://tracing."""


@schema
class ContextConfig:
    """Context parallelism, where cp > 1."""

    method: str = setting(default="ring", choices=("ring", "ulysses"))
    """ring: keys and values go round (Liu et al. 2023, arXiv:2310.01889). ulysses: heads are exchanged for positions
    (Jacobs et al. 2023, arXiv:2309.14509)."""
    balanced: bool = True
    """ring: give each rank a part of the beginning and of the end of the sequence, so that causal work is even."""


@schema
class RecomputeConfig:
    """Activation recomputation and offload."""

    mode: str = setting(default="none", choices=("none", "selective", "full"))
    """full: keep only the inputs of a block. selective: keep also the results of `keep`."""
    every: int = setting(default=1, ge=1)
    """Recompute every k-th block only, from the first one of each stage."""
    keep: list[str] = setting(default=["mm", "attention"])
    """selective: operators whose results are kept; mm, attention, or the name of an ATen operator."""
    offload: bool = False
    """GPUs: move what blocks keep for backward to CPU memory meanwhile; with mode none or full."""


@schema
class OffloadConfig:
    """Where the sharded state of the zero strategies lives between its uses."""

    optimizer: str = setting(default="none", choices=("none", "cpu", "file"))
    """cpu: optimizer state and its update in CPU memory. file: in a file, read and written a part at a time."""
    parameters: str = setting(default="none", choices=("none", "cpu", "file"))
    """cpu, file: the sharded parameters live there and are fetched to be gathered. The CPU updates them then, and the
    optimizer's state is in CPU memory too, unless `optimizer` says file."""
    dir: str | None = None
    """Folder of the files, on a disk of the node; None: the temporary directory."""


@schema
class CompressionConfig:
    """Gradient compression of ddp."""

    method: str = setting(default="none", choices=("none", "fp16", "bf16", "powersgd", "topk"))
    """powersgd (Vogels et al. 2019, arXiv:1905.13727), topk (Stich et al. 2018, arXiv:1809.07599): see feedback."""
    rank: int = setting(default=4, ge=1)
    """powersgd: rank of the approximation."""
    ratio: float = setting(default=0.01, gt=0, le=1)
    """topk: share of the entries that is sent."""
    warmup_steps: int = setting(default=0, ge=0)
    """powersgd, topk: steps at the beginning, and after each resume, that are reduced in full."""
    feedback: bool = True
    """powersgd, topk: add to a step's gradients what earlier ones did not send; off, they converge worse."""


@schema
class ServerConfig:
    """Parameter servers in place of a reduction (Li et al. 2014), over MPI one-sided communication."""

    mode: str = setting(default="none", choices=("none", "synchronous", "asynchronous", "peer"))
    """peer: no servers; each rank averages its parameters with its neighbours' (Lian et al. 2017, arXiv:1705.09056)."""
    servers: int = setting(default=1, ge=1)
    """Ranks, spread over the nodes, that hold the parameters, each a share of them, besides working."""
    replicas: int = setting(default=1, ge=1)
    """Copies of each share, on different ranks; workers read from the nearest."""
    staleness: int = setting(default=4, ge=0)
    """asynchronous: updates by which the slowest worker may be behind the fastest (Ho et al. 2013)."""
    hybrid: bool = False
    """Workers of a node reduce among themselves first, and one of them talks to the servers."""
