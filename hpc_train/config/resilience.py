"""conf/resilience: how a run is watched, and what is done when a rank dies, hangs, or its numbers go wrong."""

from __future__ import annotations

from hpc_train.config.schema import config_dataclass, config_field


@config_dataclass
class HangConfig:
    """How long a rank may be silent in each phase before it counts as hung."""

    factor: float = config_field(default=5.0, ge=1)
    """Deadline of a phase whose usual duration is known: this many times its 99th percentile, but at least the seconds
    below."""
    step_seconds: float = config_field(default=10.0, ge=1)
    """Minimum deadline of a step, and of a batch of an evaluation."""
    first_step_seconds: float = config_field(default=900.0, ge=1)
    """Deadline of the first steps of a process, which compile and warm up."""
    start_seconds: float = config_field(default=900.0, ge=1)
    """Deadline of each of: imports, the rendezvous, building the model."""
    load_seconds: float = config_field(default=1800.0, ge=1)
    """Deadline of reading a checkpoint."""
    save_seconds: float = config_field(default=900.0, ge=1)
    """Deadline of waiting for a save, and of any phase in which a rank waits for a file system that does not answer."""


@config_dataclass
class NumbersConfig:
    """Reaction to wrong numbers: a loss or a gradient that is not finite, spikes, or differs between ranks."""

    skip_nonfinite: bool = True
    """Skip the update, on all ranks, if the loss or the gradient norm is NaN or infinite. With resilience.act=false
    this is only reported. precision=fp16 always skips such updates, and lowers its loss scale."""
    replay: bool = True
    """First compute such a step again, and also a step whose loss is a spike. If its numbers are good then, the error
    was a transient one of a device, and the run continues with them. Not with precision=fp16."""
    rollback_after: int = config_field(default=3, ge=0, le=1000)
    """After this many skipped updates in a row, for NaN or infinity, go back to the newest good checkpoint and leave
    out the samples of those steps; 0: never."""
    give_up_after: int = config_field(default=100, ge=0)
    """After this many of them in a row, end a run that has no good checkpoint to go back to; 0: never."""
    good_after: int = config_field(default=20, ge=1, le=100000)
    """A checkpoint is good once this many steps in a row after it had finite numbers."""
    compare_every: int = config_field(default=100, ge=0)
    """Steps between comparisons of parameters that several ranks hold copies of, by a checksum. If they differ, the run
    goes back to an earlier checkpoint; 0: never. Not with parameter servers."""
    spike_sigmas: float = config_field(default=6.0, ge=0)
    """A loss this many standard deviations above the mean of the latest steps is a spike; 0: no spikes."""
    spike_window: int = config_field(default=128, ge=2, le=10000)
    """Number of latest steps for that mean and standard deviation."""
    spikes: str = config_field(default="warn", choices=("warn", "skip"))
    """warn: a spike is an event and a warning. skip: its update is skipped too."""
    skip_list: str | None = None
    """A skipped.json of another run: skip the updates of the samples in it, so that the two runs can be compared."""


@config_dataclass
class NoticeConfig:
    """How a machine says that it is about to be taken away, as spot machines of a cloud do. Then all ranks save."""

    file: str | None = None
    """File on a node that is not empty once there is a notice."""
    command: list[str] = config_field(default=[])
    """Command, run on every node without a shell, that prints something and ends with 0 once there is a notice."""
    every_seconds: float = config_field(default=5.0, ge=0.1)
    """Seconds between two runs of the command."""
    timeout_seconds: float = config_field(default=10.0, ge=0.1)
    """Seconds after which a run of the command is killed, which counts as no notice."""


@config_dataclass
class ElasticConfig:
    """Go on with fewer nodes after a loss, and so with fewer data-parallel replicas, at the same global batch."""

    min_nodes: int = config_field(default=0, ge=0)
    """slurm: minimum number of nodes to continue on. If a node is lost, no spare is left and Slurm has no other, the
    ranks start again on the largest number of nodes that divides train.global_batch; 0: never."""
    queue_seconds: float = config_field(default=300.0, ge=0)
    """Requeue the job for its full number of nodes instead if Slurm expects them within this many seconds."""
    grow_seconds: float = config_field(default=300.0, ge=0)
    """Seconds between questions of a job with fewer nodes to Slurm whether the missing ones are free. If they are, all
    ranks save and the job is requeued for its full number; 0: never."""


@config_dataclass
class ResilienceConfig:
    """Watch the ranks, say what is wrong with them, and go on without a person. Every part has a switch."""

    watch: bool = True
    """Detect ranks that die or hang: they write their progress to shared memory, and a process on each node reads it.
    The numbers of a run are the same with and without this."""
    act: bool = True
    """After a fault that may not come again, start the ranks again in the same allocation; false: only report what
    would be done."""
    grace_seconds: float | None = config_field(default=None, gt=0)
    """Seconds from a notice until the machine is taken away (AWS 120, Google Cloud 30). A save that would not fit in
    the time left, judged by the last one, is not started. None: unknown."""
    restarts: int = config_field(default=3, ge=0, le=1000)
    """Maximum restarts in a row in the same allocation without a newer checkpoint; then the run fails."""
    node_silent_seconds: float = config_field(default=10.0, ge=2)
    """slurm: seconds of silence after which a node counts as lost and the ranks are ended."""
    hang: HangConfig = config_field(default=HangConfig)
    numbers: NumbersConfig = config_field(default=NumbersConfig)
    notice: NoticeConfig = config_field(default=NoticeConfig)
    elastic: ElasticConfig = config_field(default=ElasticConfig)
    chaos: bool = False
    """Let `hpc-train chaos` inject faults into this run, for drills. Ranks then look for orders once per step."""
    preflight: str = config_field(default="off", choices=("off", "quick", "full"))
    """Before the first step, measure how fast each node computes and communicates, and name slow nodes. quick: about a
    second; full: more repetitions, and memory bandwidth, too."""
