"""conf/parallel: how a model is spread over ranks. Mesh axes, outermost first: pp, dp_replicate, dp_shard, cp, tp.

One dataclass for each technique (a default means off, or the plain way), ParallelConfig of all of them, and the degrees
of every axis for a given world size: the one place where -1 is filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from hpc_train.config.schema import config_dataclass, config_field
from hpc_train.errors import UserError

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


@config_dataclass
class TensorConfig:
    """Tensor parallelism, where tp > 1 (Shoeybi et al. 2019, arXiv:1909.08053)."""

    sequence: bool = True
    """Sequence parallelism: also split positions between the split layers (Korthikanti et al. 2022,
    arXiv:2205.05198)."""
    vocabulary: bool = True
    """Split the embedding, the output layer and the loss by vocabulary, so that no rank ever has all logits."""
    asynchronous: bool = False
    """Overlap the gather and the scatter of activations with the matrix products, a chunk at a time."""
    symmetric: bool = False
    """asynchronous: by torch's products over symmetric memory, on GPUs of one NVLink domain, in place of messages."""


@config_dataclass
class PipelineConfig:
    """Pipeline parallelism, where pp > 1."""

    schedule: str = "1f1b"
    """Pipeline schedule: naive, gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv, dualpipev, or
    a .csv file, of which the run keeps a copy."""
    virtual_stages: int | None = config_field(default=None, ge=1)
    """Stages per rank; None: 1, or 2 for schedules that need more."""
    costs: list[float] | None = None
    """Relative times by which blocks are split into stages: embedding, each block in order, head. None: their FLOPs. A
    resumed run uses measured times if `resplit` is on."""
    blocks: list[int] | None = None
    """Number of blocks of each stage, in the order of stages, as `hpc-train plan schedule` finds them; None: by
    `costs`."""
    resplit: bool = False
    """Measure the blocks in the first steps (stage_times.json in the run directory), and split by that after a
    resume."""
    timeline: bool = False
    """Record when each rank did what in the first steps, in timeline/ of the run directory, for chrome://tracing."""


@config_dataclass
class ContextConfig:
    """Context parallelism, where cp > 1."""

    method: str = config_field(default="ring", choices=("ring", "ulysses"))
    """ring: keys and values go round a ring of ranks (Liu et al. 2023, arXiv:2310.01889). ulysses: all-to-all of heads
    for positions (Jacobs et al. 2023, arXiv:2309.14509)."""
    balanced: bool = True
    """ring: give each rank one part of the beginning and one of the end of the sequence, so that causal attention is
    equally much work on all."""


@config_dataclass
class RecomputeConfig:
    """Activation recomputation and offload."""

    mode: str = config_field(default="none", choices=("none", "selective", "full"))
    """none: keep all activations. full: keep only the inputs of a block. selective: also keep the results of `keep`."""
    every: int = config_field(default=1, ge=1)
    """Recompute only every k-th block, starting with the first of each stage."""
    keep: list[str] = config_field(default=["mm", "attention"])
    """selective: operators whose results are kept; mm, attention, or the name of an ATen operator."""
    offload: bool = False
    """On GPUs, move what blocks keep for backward to CPU memory until then; with mode none or full."""


@config_dataclass
class OffloadConfig:
    """Offload of the sharded state of the zero strategies between its uses."""

    optimizer: str = config_field(default="none", choices=("none", "cpu", "file"))
    """cpu: keep optimizer state in CPU memory and update there. file: keep it in a file, read and written in parts."""
    parameters: str = config_field(default="none", choices=("none", "cpu", "file"))
    """cpu, file: keep the sharded parameters there and fetch them to be gathered. The CPU then updates them, and
    optimizer state is in CPU memory, too, unless `optimizer` is file."""
    dir: str | None = None
    """Folder of the files, on a disk of the node; None: the temporary directory."""


@config_dataclass
class CompressionConfig:
    """Gradient compression of ddp."""

    method: str = config_field(default="none", choices=("none", "fp16", "bf16", "powersgd", "topk"))
    """Compression of gradients. fp16, bf16: send two bytes per element. powersgd: low-rank factors (Vogels et al. 2019,
    arXiv:1905.13727). topk: the largest elements (Stich et al. 2018, arXiv:1809.07599)."""
    rank: int = config_field(default=4, ge=1)
    """powersgd: rank of the approximation."""
    ratio: float = config_field(default=0.01, gt=0, le=1)
    """topk: share of the elements that is sent."""
    warmup_steps: int = config_field(default=0, ge=0)
    """powersgd, topk: steps without compression at the beginning and after each resume."""
    feedback: bool = True
    """powersgd, topk: error feedback, which adds to a step's gradients what earlier steps did not send. Without it they
    converge worse."""


@config_dataclass
class ServerConfig:
    """Parameter servers in place of a reduction (Li et al. 2014), over MPI one-sided communication."""

    mode: str = config_field(default="none", choices=("none", "synchronous", "asynchronous", "peer"))
    """synchronous: one update per step, by the servers. asynchronous: workers update without waiting for one another.
    peer: no servers; each rank averages its parameters with its neighbours' (Lian et al. 2017, arXiv:1705.09056)."""
    servers: int = config_field(default=1, ge=1)
    """Ranks that are servers as well as workers: each holds a share of the parameters. They are spread over the
    nodes."""
    replicas: int = config_field(default=1, ge=1)
    """Copies of each share, on different ranks; workers read from the nearest."""
    staleness: int = config_field(default=4, ge=0)
    """asynchronous: maximum number of updates by which the slowest worker may be behind the fastest (Ho et al.
    2013)."""
    hybrid: bool = False
    """Workers of a node first reduce among themselves, and one of them communicates with the servers."""


@config_dataclass
class SyncConfig:
    """Loose synchronisation: the copies of the model (dp_replicate) train on their own and exchange what they learned
    every few steps. Local SGD (Stich 2018, arXiv:1805.09767), DiLoCo (Douillard et al. 2023, arXiv:2311.08105)."""

    every: int | None = config_field(default=None, ge=1)
    """Steps between two exchanges of a parameter; None: gradients are averaged in every step. The outer gradient is the
    mean over the copies of the parameters after the last exchange minus those of now."""
    outer_lr: float = config_field(default=0.7, gt=0)
    """Learning rate of the outer SGD; 1 without momentum averages the copies."""
    outer_momentum: float = config_field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the outer SGD; 0: none."""
    fragments: int = config_field(default=1, ge=1)
    """Parts of about equal size that are exchanged in different steps (Douillard et al. 2025, arXiv:2501.18512)."""
    overlap: int = config_field(default=0, ge=0)
    """Steps that go on while an exchange is under way, before its result is used; less than `every`."""
    merge: float = config_field(default=0.5, ge=0, lt=1)
    """overlap: share of a copy's own parameters when the result is merged into them; 0: they are replaced."""
    compression: str = config_field(default="none", choices=("none", "int8", "int4"))
    """Integers that outer gradients are rounded to before they are sent, with a scale for each block of elements."""
    block: int = config_field(default=256, ge=2, le=1 << 20)
    """int8, int4: elements that share a scale."""
    lost_after_seconds: float | None = config_field(default=None, ge=10)
    """The other copies go on without a copy whose ranks have ended, or that does not answer for so long; not without
    that of rank 0. None: the loss of a rank ends the ranks of all copies."""


STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@config_dataclass
class ParallelConfig:
    """Degrees of the mesh axes and the data-parallel strategy. A degree of -1 means what is left of the world."""

    auto: bool = False
    """Let the planner choose all of `parallel`, and train.micro_batch, except what `fixed` names, before any rank
    starts."""
    fixed: list[str] | None = None
    """auto: keys that the planner must not change, such as parallel.tp; None: those that overrides or files set."""
    strategy: str = config_field(default="ddp", choices=STRATEGIES)
    """ddp replicates everything. zero1 shards optimizer state, zero2 also gradients, zero3 also parameters (FSDP2)."""
    pp: int = config_field(default=1, ge=-1)
    """Pipeline stages."""
    dp_replicate: int | None = config_field(default=None, ge=-1)
    """Copies of the model. None: -1 for ddp unless another degree is -1, else 1."""
    dp_shard: int | None = config_field(default=None, ge=-1)
    """Ranks that share one copy of the model. None: -1 for the zero strategies unless another degree is -1, else 1;
    with dp_replicate=-1, the ranks of an NVLink domain (or of a node without NVLink) divided by tp x cp."""
    cp: int = config_field(default=1, ge=-1)
    """Ranks that share the positions of a sequence (context parallelism)."""
    tp: int = config_field(default=1, ge=-1)
    """Ranks that share the matrices of a layer (tensor parallelism)."""
    ep: int = config_field(default=1, ge=1)
    """Ranks that share the experts of a layer (expert parallelism); they are ranks of dp_shard x cp, not more ranks."""
    bucket_mib: float | None = config_field(default=None, gt=0)
    """ddp: size of gradient buckets, MiB; None: torch's, a first one of 1 to start early, then 25. zero1, zero2: size
    of the groups of blocks that are gathered and reduced together; None: 25."""
    static_graph: bool = False
    """ddp: every step uses the same parameters in the same order; torch then plans the reduction once."""
    unused_parameters: bool = False
    """ddp: allow parameters that take no part in some steps. Costs a walk over the graph in every step."""
    reduce_with: str = config_field(default="torch", choices=("torch", "mpi"))
    """ddp: library that reduces gradients; mpi: for ranks on CPUs that mpirun or srun --mpi has started."""
    sync_batchnorm: bool = False
    """Compute BatchNorm's statistics over all data-parallel ranks, so that results equal those of one device."""
    reshard_after_forward: bool = True
    """zero3: free the gathered parameters after forward (less memory). false: keep them (less communication) until
    backward, or with pp > 1, where several micro-batches are in flight, until the end of the step."""
    prefetch: int = config_field(default=1, ge=0)
    """zero strategies: number of blocks whose parameters are gathered ahead; 1 is fully_shard's default."""
    compile: bool = False
    """torch.compile each block."""
    cuda_graphs: bool = False
    """With `compile`, on an NVIDIA GPU: record the kernels of compiled blocks once and replay them, which spares small
    models the launches. For ddp with one micro-batch a step."""
    tensor: TensorConfig = config_field(default=TensorConfig)
    pipeline: PipelineConfig = config_field(default=PipelineConfig)
    context: ContextConfig = config_field(default=ContextConfig)
    recompute: RecomputeConfig = config_field(default=RecomputeConfig)
    offload: OffloadConfig = config_field(default=OffloadConfig)
    compression: CompressionConfig = config_field(default=CompressionConfig)
    server: ServerConfig = config_field(default=ServerConfig)
    sync: SyncConfig = config_field(default=SyncConfig)


AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first."""


@dataclass(frozen=True)
class Degrees:
    """Resolved degrees; their product is the world size."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def sizes(self) -> tuple[int, ...]:
        """One size an axis, in the order of AXES."""
        return tuple(asdict(self).values())

    def find_coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank on every axis; the last axis varies fastest."""
        coordinates = {}
        for axis, size in reversed(list(zip(AXES, self.sizes, strict=True))):
            rank, coordinates[axis] = divmod(rank, size)
        return coordinates

    def find_rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank with these coordinates; axes that are left out count as 0."""
        rank = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in asdict(self).items())


def list_requested_degrees(config: ParallelConfig) -> dict[str, int]:
    """Return the degrees as asked for, with the strategy's defaults filled in; at most one is -1.

    Raises UserError for a degree of 0 and for more than one -1.
    """
    sharded = config.strategy != "ddp"
    default = {"dp_replicate": 1 if sharded else -1, "dp_shard": -1 if sharded else 1}
    given = {axis: getattr(config, axis) for axis in AXES}
    if -1 in given.values():  # what is left of the world is already asked for
        default = {"dp_replicate": 1, "dp_shard": 1}
    degrees = {axis: default[axis] if value is None else value for axis, value in given.items()}
    for axis, value in degrees.items():
        if value == 0:
            raise UserError(f"parallel.{axis}=0: a degree is at least 1, or -1 for what the others leave of the world")
    open_axes = [f"parallel.{axis}=-1" for axis, value in degrees.items() if value == -1]
    if len(open_axes) > 1:
        raise UserError(f"{' and '.join(open_axes)}: only one degree can be -1, what the others leave of the world")
    return degrees


def resolve_degrees(config: ParallelConfig, world: int) -> Degrees:
    """Fill in -1 so that the degrees multiply to `world`.

    Raises UserError with the equation when they cannot, and for parallel=auto, which plan, train and submit decide.
    """
    if config.auto:
        raise UserError(
            "parallel=auto: is decided by `hpc-train plan`, `train` and `submit`; here give the degrees `plan` prints"
        )
    degrees = list_requested_degrees(config)
    fixed = math.prod(value for value in degrees.values() if value != -1)
    equation = " x ".join(f"{axis} {'?' if value == -1 else value}" for axis, value in degrees.items())
    if -1 not in degrees.values():
        if fixed != world:
            raise UserError(
                f"parallel: {equation} = {fixed}, but the world has {world} ranks; "
                f"set one of them to -1 to take what is left"
            )
    elif world % fixed:
        raise UserError(f"parallel: {equation} = {world} has no solution: {world} ranks do not divide by {fixed}")
    return Degrees(**{axis: world // fixed if value == -1 else value for axis, value in degrees.items()})


def reduce_replicas(config: ParallelConfig, ranks: int, world: int) -> ParallelConfig:
    """Return the configuration of a run of `ranks` ranks for a smaller world: fewer data-parallel shares, else equal.

    Copies of the model (dp_replicate) go first; a run that has only one copy is sharded over fewer ranks. Raises
    UserError where the world is not a multiple of what has to stay.
    """
    full = resolve_degrees(config, ranks)
    axis = "dp_replicate" if full.dp_replicate > 1 else "dp_shard"
    degrees = asdict(full)
    stay = math.prod(size for name, size in degrees.items() if name != axis)
    if world % stay:
        raise UserError(
            f"parallel: {world} ranks are not a multiple of {stay}, the product of all degrees but {axis} in {full}"
        )
    return replace(config, **{**degrees, axis: world // stay})


def compute_smallest_world(config: ParallelConfig) -> int:
    """Return the fewest ranks that the degrees as asked for can run on."""
    return math.prod(value for value in list_requested_degrees(config).values() if value != -1)
