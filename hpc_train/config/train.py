"""The `train`, `precision` and `checkpoint` parts of a run."""

from __future__ import annotations

from hpc_train.config.schema import config_dataclass, config_field

_DEFAULT_STEPS = 200


@config_dataclass
class NoiseScaleConfig:
    """Gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162)."""

    every: int = config_field(default=10, ge=0)
    """Steps between two measurements; 0: off."""
    decay: float = config_field(default=0.9, ge=0, lt=1)
    """Decay of the two running means that it is computed from; nearer to 1 averages over more measurements."""


@config_dataclass
class TrainConfig:
    """The training loop."""

    steps: int | None = config_field(default=None, ge=1, le=10**12)
    """Optimizer updates of the whole run; None: as many as `epochs` take, or 200 if neither is given."""
    epochs: float | None = config_field(default=None, gt=0, le=1e6)
    """Passes over the training data (1.5 is allowed), rounded up to whole steps; None if `steps` is given."""
    seed: int = config_field(default=0, ge=0, lt=1 << 63)
    """Seed of the initial weights, the order of samples and dropout."""
    global_batch: int = config_field(default=16, ge=1, le=1 << 30)
    """Sequences per step, over all ranks."""
    micro_batch: int = config_field(default=8, ge=1, le=1 << 24)
    """Sequences that a rank processes in one forward and backward."""
    sequence_length: int = config_field(default=256, ge=1, le=1 << 30)
    """Tokens in a sequence; without meaning for images, each of which is one sequence."""
    eval_every: int = config_field(default=50, ge=0)
    """Steps between evaluations on the validation split; 0: never. The last step is always evaluated unless 0."""
    eval_batches: int = config_field(default=8, ge=1)
    """Global batches in one evaluation."""
    deterministic: bool = False
    """Refuse operations that are not reproducible bit by bit."""
    log_every: int = config_field(default=10, ge=1)
    """Steps between two plain progress lines; metrics.jsonl has every step."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard too, into the run directory."""
    gc_every: int = config_field(default=50, ge=0)
    """Steps between two collections of Python's garbage, at the same step on all ranks; 0: whenever Python wants to."""
    record_steps: bool = True
    """Record what each rank spends each step on, 200 bytes per step, for `hpc-train report`, `top` and `status`."""
    module: str | None = None
    """Python module to import first, where `loss` and `metrics` of your own are registered."""
    loss: str | None = None
    """Loss of your own, by the name given to hpc_train.components.register_loss; None: the model's own, else cross
    entropy."""
    loss_chunk: int = config_field(default=0, ge=0, le=1 << 30)
    """Tokens whose logits a rank has at a time: the output layer and the loss are computed in chunks, with the same
    result and far less memory for a large vocabulary; 0: all of a micro-batch at once. For our transformers."""
    metrics: list[str] = config_field(default=[])
    """Measures of an evaluation besides the loss: accuracy, perplexity, or names given to register_metric."""
    noise_scale: NoiseScaleConfig = config_field(default=NoiseScaleConfig)

    @property
    def wanted_steps(self) -> int | None:
        """Updates of the whole run; None where `epochs` decides, which depends on the data."""
        return self.steps if self.epochs is not None else self.steps or _DEFAULT_STEPS


FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp")


@config_dataclass
class PrecisionConfig:
    """Number formats of a run."""

    name: str = config_field(default="fp32", choices=("fp64", "fp32", "bf16", "fp16"))
    """Format of the computation. Parameters and optimizer state are fp32 (fp64 for fp64)."""
    reduce: str = config_field(default="fp32", choices=("fp64", "fp32", "bf16", "fp16"))
    """Format in which gradients are reduced over ranks."""
    matmul: str = config_field(default="highest", choices=("highest", "high", "medium"))
    """How products of float32 matrices are computed: highest: in float32; high: in TF32 on GPUs that have it; medium:
    in bfloat16 where that is faster. torch.set_float32_matmul_precision."""
    float8: str = config_field(default="none", choices=("none", *FLOAT8_RECIPES))
    """How linear layers of blocks compute in 8 bits: a scale for a tensor, for a row (rowwise), or for each 32
    neighbours of a row (mxfp8, on B200 and B300); with _with_gw_hp weight gradients are in the format of `name`. Needs
    torchao. A CPU emulates the rounding."""
    float8_gather: bool = False
    """Whether fully_shard gathers the weights of these layers in 8 bits. Needs float8=tensorwise and a zero
    strategy."""
    float8_experts: bool = False
    """Whether the routed experts of a mixture compute in 8 bits, too. Needs float8=mxfp8 or mxfp8_with_gw_hp."""


@config_dataclass
class LustreConfig:
    """Striping of checkpoints on Lustre; no effect on other file systems."""

    stripe: str = config_field(default="auto", choices=("auto", "none"))
    """auto: set the striping of every step's directory before files are written; none: inherit the parent
    directory's."""
    stripe_count: int | None = config_field(default=None, ge=-1, le=2000)
    """OSTs that a shard file is spread over; -1: all; None: chosen from its size and the numbers of files and OSTs."""
    stripe_size_mib: int = config_field(default=16, ge=1, lt=4096)
    """Stripe size of a shard file, MiB."""
    pool: str | None = None
    """Name of the pool of OSTs to use; None: any OST."""
    progressive: bool = True
    """Put small files of a step on the metadata server and larger ones in a progressive layout, if servers can."""


@config_dataclass
class CheckpointConfig:
    """Saving and resuming."""

    every: int = config_field(default=100, ge=0)
    """Steps between checkpoints; 0: never, not even at a stop."""
    dir: str | None = None
    """Directory of the checkpoints; None: checkpoints/ in the run directory."""
    resume: str = "auto"
    """auto: from the newest whole checkpoint if there is one; never; a step; or the path of a checkpoint."""
    keep: int = config_field(default=2, ge=1)
    """Number of newest checkpoints to keep; those with NaN or infinity, or marked bad, do not count."""
    keep_every: int = config_field(default=0, ge=0)
    """Keep checkpoints whose step is a multiple of this for good; 0: none."""
    keep_best: int = config_field(default=0, ge=0, le=1000)
    """Also keep this many with the lowest validation loss; only steps that are evaluated (train.eval_every) have
    one."""
    weights_every: int = config_field(default=0, ge=0)
    """Steps between saves of the weights alone, to weights/ beside the checkpoints, which are never removed; 0:
    never."""
    background: bool = True
    """Continue training as soon as the state is copied in memory, and write it meanwhile. Needs memory for the copy."""
    overlap: str = config_field(default="auto", choices=("auto", "always", "never"))
    """With background saves, copy parameters and optimizer state while the next forward and backward run, which do not
    change them. auto: on GPUs only, because copies on CPUs slow down the training."""
    incremental: bool = False
    """Write only what has changed since the previous save, and share files with it for the rest, by hard links. Useful
    with frozen weights, adapters and embeddings; AdamW changes every trained parameter in every step. A save that
    shares files does not use stage_dir."""
    whole_every: int = config_field(default=0, ge=0)
    """With incremental, write every so many-th save completely, so that unchanged data is on the disk more than once;
    0: only the first save after a start."""
    compression: str = config_field(default="none", choices=("none", "deflate"))
    """Compression of saved tensors. deflate: HDF5's shuffle and deflate filters, which every HDF5 tool can read;
    docs/benchmarks.md has costs and gains."""
    compression_level: int = config_field(default=1, ge=1, le=9)
    """1: compress only the bytes that compress well, mostly exponents, with a fast coder; 2 to 9: zlib's levels, which
    take several times as long and save no more on trained numbers."""
    io: str = config_field(default="auto", choices=("auto", "direct", "buffered"))
    """Write past the page cache (direct) or through it (buffered); auto: direct if the file system supports it."""
    stage_dir: str | None = None
    """Directory on a local disk of each node. A save is written there first, which frees its memory, and is then copied
    to the shared directory. Environment variables such as $SLURM_TMPDIR are expanded on the node. None: write straight
    from memory."""
    ranks_per_file: int = config_field(default=1, ge=0)
    """Ranks of one node that write one file together, each its own part, so that a step has fewer files; 0: all ranks
    of a node."""
    writers_per_node: int = config_field(default=0, ge=0)
    """Ranks of a node that write at the same time, for nodes whose link or disk is slower with many streams; 0: all."""
    parallel_hdf5: bool = False
    """All ranks write one file through HDF5's MPI-IO driver. Needs an h5py that is built with MPI, and ranks started by
    MPI; ranks_per_file shares files without MPI."""
    lustre: LustreConfig = config_field(default=LustreConfig)
