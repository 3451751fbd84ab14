"""The `train`, `optim`, `precision` and `checkpoint` parts of a run."""

from __future__ import annotations

from hpc_train.config.schema import config_dataclass, config_field

_DEFAULT_STEPS = 200


@config_dataclass
class NoiseScaleConfig:
    """Gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162)."""

    every: int = config_field(default=10, ge=0)
    """Steps between two measurements; 0: off."""
    decay: float = config_field(default=0.9, ge=0, lt=1)
    """Weight of the past in the running means of both of its parts."""


@config_dataclass
class TrainConfig:
    """The training loop."""

    steps: int | None = config_field(default=None, ge=1, le=10**12)
    """Optimizer updates of the whole run; None: as many as `epochs` take, or 200 where neither is given."""
    epochs: float | None = config_field(default=None, gt=0, le=1e6)
    """Passes over the training data, parts of one too, rounded up to whole steps; None where `steps` is given."""
    seed: int = config_field(default=0, ge=0, lt=1 << 63)
    """Of the initial weights, the order of samples and dropout."""
    global_batch: int = config_field(default=16, ge=1, le=1 << 30)
    """Sequences a step, over all ranks."""
    micro_batch: int = config_field(default=8, ge=1, le=1 << 24)
    """Sequences a rank in one forward and backward."""
    sequence_length: int = config_field(default=256, ge=1, le=1 << 30)
    """Tokens in a sequence; no meaning for images, of which each is one sequence."""
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
    noise_scale: NoiseScaleConfig = config_field(default=NoiseScaleConfig)

    @property
    def wanted_steps(self) -> int | None:
        """Updates of the whole run; None where `epochs` decides, which depends on the data."""
        return self.steps if self.epochs is not None else self.steps or _DEFAULT_STEPS


@config_dataclass
class PrecisionConfig:
    """Number formats of a run."""

    name: str = config_field(default="fp32", choices=("fp64", "fp32", "bf16", "fp16"))
    """Format of the computation. Parameters and optimizer state are fp32 (fp64 for fp64)."""
    reduce: str = config_field(default="fp32", choices=("fp64", "fp32", "bf16", "fp16"))
    """Format in which gradients are reduced over ranks."""


@config_dataclass
class LustreConfig:
    """Striping of checkpoints where they are on Lustre; elsewhere without effect."""

    stripe: str = config_field(default="auto", choices=("auto", "none"))
    """auto: set for the directory of every step, before there are files in it; none: as the parent directory has it."""
    stripe_count: int | None = config_field(default=None, ge=-1, le=2000)
    """OSTs a shard file is spread over, -1: all; None: from its size, the number of files and that of OSTs."""
    stripe_size_mib: int = config_field(default=16, ge=1, lt=4096)
    """MiB of a stripe of a shard file."""
    pool: str | None = None
    """Of OSTs, by name; None: any OST."""
    progressive: bool = True
    """Small files of a step on the metadata server, larger ones in a progressive layout, where servers have these."""


@config_dataclass
class CheckpointConfig:
    """Saving and resuming."""

    every: int = config_field(default=100, ge=0)
    """Steps between checkpoints; 0: never, not even at a stop."""
    dir: str | None = None
    """None: checkpoints/ in the run directory."""
    resume: str = "auto"
    """auto: from the newest whole checkpoint if there is one; never; a step; or the path of a checkpoint."""
    keep: int = config_field(default=2, ge=1)
    """Newest checkpoints kept; those with NaN or infinity, or marked bad, do not count."""
    keep_every: int = config_field(default=0, ge=0)
    """Checkpoints whose step is a multiple of it are kept for good; 0: none."""
    keep_best: int = config_field(default=0, ge=0, le=1000)
    """So many with the lowest validation loss are kept beside the newest; they need train.eval_every to meet every."""
    weights_every: int = config_field(default=0, ge=0)
    """Steps between saves of the weights alone, into weights/ beside the checkpoints, where they stay; 0: never."""
    background: bool = True
    """Train on as soon as the state is copied in memory, and write it meanwhile; it takes as much memory again."""
    overlap: str = config_field(default="auto", choices=("auto", "always", "never"))
    """Copy parameters and optimizer state beside the next forward and backward, which do not change them, where saves
    are in the background. auto: on GPUs, whose copies take no processor from the training."""
    incremental: bool = False
    """Write only what has changed since the save before, and share the files of the rest with it, by hard links: for
    frozen weights, adapters and embeddings. Under AdamW all that is trained changes at every step. A save that shares
    does not go by way of stage_dir."""
    whole_every: int = config_field(default=0, ge=0)
    """With incremental, of so many saves one shares nothing with the one before, so that what never changes is on the
    disk more than once; 0: the first save after a start only."""
    compression: str = config_field(default="none", choices=("none", "deflate"))
    """Of what is saved. deflate: HDF5's shuffle and deflate filters, which every HDF5 tool undoes; what that costs and
    gains is in docs/benchmarks.md."""
    compression_level: int = config_field(default=1, ge=1, le=9)
    """1: the bytes of each tensor that have little in them, mostly the exponents, are coded by themselves; 2 to 9:
    zlib's levels, which cost several times as much and save no more of trained numbers."""
    io: str = config_field(default="auto", choices=("auto", "direct", "buffered"))
    """Writing past the page cache or through it; auto: past it where the file system can."""
    stage_dir: str | None = None
    """A directory on a disk of each node: a save goes there first, needs no memory any more, and is copied to the
    shared one. Environment variables in it are those of the node, as in $SLURM_TMPDIR. None: straight from memory."""
    ranks_per_file: int = config_field(default=1, ge=0)
    """Ranks of one node that write a file together, each its own part of it, so that there are fewer files to make; 0:
    all of a node."""
    writers_per_node: int = config_field(default=0, ge=0)
    """Ranks of a node that write at a time, the others after them, for nodes whose link or disk is slower with many
    streams; 0: all at once."""
    parallel_hdf5: bool = False
    """All ranks write one file through HDF5's MPI-IO driver, which takes an h5py that is built with MPI and ranks that
    MPI has started. ranks_per_file shares files without it."""
    lustre: LustreConfig = config_field(default=LustreConfig)


@config_dataclass
class ScheduleConfig:
    """The learning rate as a function of the step."""

    name: str = config_field(default="cosine", choices=("cosine", "linear", "wsd", "constant"))
    """wsd is warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)."""
    warmup_steps: int = config_field(default=20, ge=0)
    """Linear from 0; capped at the number of steps of the run."""
    decay_fraction: float = config_field(default=0.1, ge=0, le=1)
    """Part of the run, at its end, over which wsd decays."""
    min_ratio: float = config_field(default=0.1, ge=0, le=1)
    """Final learning rate over the peak."""


@config_dataclass
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    name: str = config_field(default="adamw", choices=("adamw",))
    """The optimizer."""
    lr: float = config_field(default=3e-3, gt=0)
    """Peak learning rate, at a global batch of `base_batch` sequences."""
    betas: list[float] = config_field(default=[0.9, 0.95])
    """Decay rates of AdamW's running means of the gradient and of its square."""
    eps: float = config_field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = config_field(default=0.1, ge=0)
    """Applied to matrices; vectors (norms, biases) are not decayed."""
    max_norm: float | None = config_field(default=1.0, gt=0)
    """Clip the gradient's global norm to this; None: only report it."""
    lr_scaling: str = config_field(default="none", choices=("none", "linear", "sqrt"))
    """How the peak grows with train.global_batch / base_batch: linear (Goyal et al. 2017, arXiv:1706.02677) or root."""
    base_batch: int | None = config_field(default=None, ge=1)
    """Sequences in the global batch that `lr` was tuned at; needed by linear and sqrt."""
    implementation: str = config_field(default="auto", choices=("auto", "fused", "foreach", "for_loop"))
    """auto: fused where torch has it for the device."""
    schedule: ScheduleConfig = config_field(default=ScheduleConfig)
