"""conf/resilience: how a run is watched, and what is done when a rank dies, hangs, or its numbers go wrong."""

from __future__ import annotations

from hpc_train.config.schema import config_dataclass, config_field


@config_dataclass
class HangConfig:
    """How long a rank may be silent in each phase before it counts as hung."""

    factor: float = config_field(default=5.0, ge=1)
    """Deadline of a phase once it is known how long it takes: this many times its 99th percentile, and no less than
    the seconds below."""
    step_seconds: float = config_field(default=10.0, ge=1)
    """Least deadline of a step, and of a batch of an evaluation."""
    first_step_seconds: float = config_field(default=900.0, ge=1)
    """Deadline of the first steps of a process, which compile and warm up."""
    start_seconds: float = config_field(default=900.0, ge=1)
    """Deadline of imports, of the rendezvous and of building the model, each."""
    load_seconds: float = config_field(default=1800.0, ge=1)
    """Deadline of reading a checkpoint."""
    save_seconds: float = config_field(default=900.0, ge=1)
    """Deadline of waiting for a save."""


@config_dataclass
class NumbersConfig:
    """What happens where the loss or the gradient goes wrong."""

    skip_nonfinite: bool = True
    """Make no update, on any rank, where the loss or the gradient norm is NaN or infinite. With resilience.act=false
    this is only said. precision=fp16 skips such updates in any case, and lowers its loss scale."""
    replay: bool = True
    """Compute such a step again, and one whose loss is a spike, before anything else is done about it. If its numbers
    are good then, a device was at fault for a moment, and the run goes on with them. Not with precision=fp16."""
    rollback_after: int = config_field(default=3, ge=0, le=1000)
    """After so many skipped updates in a row, for NaN or infinity, the run goes back to its newest good checkpoint and
    leaves out the samples of those steps; 0: never."""
    give_up_after: int = config_field(default=100, ge=0)
    """After so many of them in a row a run that cannot go back, for want of a good checkpoint, ends; 0: never."""
    good_after: int = config_field(default=20, ge=1, le=100000)
    """A checkpoint is good when so many steps in a row after it had finite numbers."""
    compare_every: int = config_field(default=100, ge=0)
    """Compare the parameters of ranks that hold copies of the same ones every so many steps, by the sum of their bits;
    where they differ the run goes back to a checkpoint from before; 0: never. Not with parameter servers."""
    spike_sigmas: float = config_field(default=6.0, ge=0)
    """A loss that many standard deviations above the mean of the latest steps is a spike; 0: none is."""
    spike_window: int = config_field(default=128, ge=2, le=10000)
    """Steps that the mean and the standard deviation are of."""
    spikes: str = config_field(default="warn", choices=("warn", "skip"))
    """warn: a spike is an event and a warning. skip: its update is skipped too."""
    skip_list: str | None = None
    """A skipped.json of another run: skip the updates of the samples in it, so that the two runs can be compared."""


@config_dataclass
class NoticeConfig:
    """How a machine says that it is about to be taken away, as spot machines of a cloud do. Then all ranks save."""

    file: str | None = None
    """A notice is there when this file of a node is there and not empty."""
    command: list[str] = config_field(default=[])
    """A notice is there when this command, run on every node without a shell, ends with 0 and prints something."""
    every_seconds: float = config_field(default=5.0, ge=0.1)
    """Between two runs of the command."""
    timeout_seconds: float = config_field(default=10.0, ge=0.1)
    """A run of the command that takes longer is killed; that is no notice."""


@config_dataclass
class ElasticConfig:
    """Go on with fewer nodes after a loss, and so with fewer data-parallel replicas, at the same global batch."""

    min_nodes: int = config_field(default=0, ge=0)
    """slurm: where a node is lost, no spare is left and Slurm has no other, the ranks start again on the largest number
    of nodes that they can share train.global_batch on, and no fewer than this; 0: never."""
    queue_seconds: float = config_field(default=300.0, ge=0)
    """The job is requeued for its full number of nodes instead if Slurm expects them within so many seconds."""
    grow_seconds: float = config_field(default=300.0, ge=0)
    """How often a job with fewer nodes asks Slurm for the missing ones. When they are free all ranks save, and the job
    is requeued for its full number; 0: never."""


@config_dataclass
class ResilienceConfig:
    """Watch the ranks, say what is wrong with them, and go on without a person. Every part has a switch."""

    watch: bool = True
    """Ranks write where they are into memory of their node, and a process beside them notices those that die or hang.
    The numbers of a run are the same with and without."""
    act: bool = True
    """Start ranks again in the same allocation after a fault that may not come again; false: only say what would be
    done."""
    grace_seconds: float | None = config_field(default=None, gt=0)
    """Seconds that a machine has left after a notice that it is about to be taken away (AWS 120, Google Cloud 30). A
    save that took longer the last time, and so would not fit in what is left, is not begun. None: not known."""
    restarts: int = config_field(default=3, ge=0, le=1000)
    """Starts in the same allocation in a row without a newer checkpoint; after that the run fails."""
    node_silent_seconds: float = config_field(default=10.0, ge=2)
    """slurm: a node of which nothing is heard for so long is lost, and the ranks are ended."""
    hang: HangConfig = config_field(default=HangConfig)
    numbers: NumbersConfig = config_field(default=NumbersConfig)
    notice: NoticeConfig = config_field(default=NoticeConfig)
    elastic: ElasticConfig = config_field(default=ElasticConfig)
    chaos: bool = False
    """Let `hpc-train chaos` break this run on purpose, for drills. Ranks then look for orders once a step."""
    preflight: str = config_field(default="off", choices=("off", "quick", "full"))
    """Before the first step, compare how fast the nodes of the job compute and exchange data, and name slow ones.
    quick: about a second; full: more repetitions, and memory too."""
