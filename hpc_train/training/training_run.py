"""The state of one run on one rank: its parts, its position, and the facts that decide whether it ended well."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hpc_train.checkpoint import Saver, SaveResult
from hpc_train.config.run import RunConfig
from hpc_train.data.loader import BatchLoader
from hpc_train.interfaces import Engine, World
from hpc_train.resilience.chaos import FaultInjector
from hpc_train.resilience.heartbeat import Heartbeat, Phase
from hpc_train.resilience.ledger import LedgerFile
from hpc_train.runtime.processes import StopRequest
from hpc_train.training.numerics.anomalies import UpdateGuard
from hpc_train.training.numerics.noise_scale import NoiseScale
from hpc_train.training.numerics.replica_check import ReplicaCheck
from hpc_train.training.numerics.rollback import RollbackState
from hpc_train.training.optimizer import make_schedule, scale_peak_rate
from hpc_train.training.records.mfu import find_peak_flops, find_token_flops
from hpc_train.training.records.recorder import StepRecorder
from hpc_train.training.records.reporter import Reporter
from hpc_train.training.run_directory import RunDirectory
from hpc_train.training.saving import SaveFailure, make_savers

if TYPE_CHECKING:
    from hpc_train.parallel.data_parallel.copy_group import CopyGroup
    from hpc_train.training.records.node_metrics import NodeMetrics
    from hpc_train.training.records.profiler import StepProfiler


log = logging.getLogger(__name__)


def make_update_guard(config: RunConfig) -> UpdateGuard:
    """Make the object that decides which updates to skip.

    fp16's loss scaling skips on its own. With parameter servers each worker has a loss and a norm of its own, so that
    ranks would disagree.
    """
    can_skip = config.precision.name != "fp16" and config.parallel.server.mode == "none"
    return UpdateGuard(config.resilience.numbers, config.resilience.act, can_skip)


@dataclass
class TrainingRun:
    """State of one run on one rank: its parts, its position, and what its end is judged by."""

    config: RunConfig
    world: World
    directory: RunDirectory
    engine: Engine
    loader: BatchLoader
    validation: BatchLoader | None
    steps: int
    reporter: Reporter
    stop: StopRequest
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Says where this rank is, to those who watch it."""
    injector: FaultInjector | None = None
    """Breaks this rank when ordered to (resilience.chaos)."""
    recorder: StepRecorder | None = None
    """Records what each step of this rank goes into."""
    profiler: StepProfiler | None = None
    """Traces single steps of this rank when asked to."""
    ledger: LedgerFile | None = None
    """On rank 0: records what the time of the run went into."""
    node_metrics: NodeMetrics | None = None
    """On the first rank of each node: writes the file of metrics for Prometheus."""
    step: int = 0
    """Updates done so far."""
    steps_here: int = 0
    """Updates done by this process."""
    noise: NoiseScale = field(init=False)
    guard: UpdateGuard = field(init=False)
    rollback: RollbackState = field(init=False)
    schedule: Callable[[int], float] = field(init=False)
    """Learning rate of each update."""
    peak_flops: float | None = field(init=False)
    """FLOP/s of this rank's device, where they are known."""
    token_flops: float | None = field(init=False)
    """FLOPs of the model for one target, where they are known."""
    saver: Saver = field(init=False)
    weights_saver: Saver = field(init=False)
    """Saves weights alone (checkpoint.weights_every); separate from `saver`, so that neither waits for the other."""
    saved_at: int | None = None
    """Step of the newest whole checkpoint of this run; None before the first."""
    resumed_from: int | None = None
    """Step of this run's own checkpoint that it was resumed from; retention never removes it."""
    finite: bool = True
    """No update since the last save was made from a loss or a gradient with NaN or infinity."""
    lost_since: int | None = None
    """First of the latest steps that all had NaN or infinity in loss or gradient; None if the last step had none."""
    save_seconds: float | None = None
    """Seconds that the last whole checkpoint of this process took, from its beginning to its commit."""
    unsaved: str = ""
    """Why a stop does not save, if so; the same on all ranks."""
    base_digest: str | None = None
    """Digest of the files that the base in 4 bits was read from; its weights are not saved."""
    save_failures: dict[bool, SaveFailure] = field(default_factory=dict)
    """Last save, if it failed; keyed by whether it is of the weights alone."""
    validated_at: int | None = None
    """Step of the latest evaluation, whose loss is last_validation."""
    owes_validation: bool = False
    """A request to stop skipped the evaluation that was due after this step."""
    last_loss: float | None = None
    replicas: ReplicaCheck | None = None
    copy_group: CopyGroup | None = None
    """The copies of the model, if some of them may be lost (training.lost_copies)."""
    equal_at: int = 0
    """The latest step after which copies of parameters were compared and equal; at first where the run began."""
    equal_checkpoint: int | None = None
    """The newest checkpoint up to there; retention keeps it."""
    last_norm: float = 0.0
    """Gradient norm of the latest step that is the same on all ranks; 0 if none is."""
    last_validation: float | None = None

    def __post_init__(self) -> None:
        self.noise = NoiseScale(self.config.train.noise_scale.decay)
        self.guard = make_update_guard(self.config)
        self.rollback = RollbackState(self.config.resilience.numbers.good_after)
        peak = scale_peak_rate(self.config.optim, self.config.train.global_batch)
        self.schedule = make_schedule(self.config.optim, peak, self.steps)
        self.saver, self.weights_saver = make_savers(self)
        device = self.world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self.peak_flops = find_peak_flops(self.config, name)
        self.token_flops = find_token_flops(self.config.model, self.config.train.sequence_length)

    def change_world(self, world: World) -> None:
        """Go on with the ranks of `world`, since others are lost."""
        self.world = world
        for saver in (self.saver, self.weights_saver):
            saver.change_world(world)
        if self.replicas is not None:
            self.replicas.world = world

    def take_ended_saves(self) -> list[SaveResult]:
        """Return the saves, of checkpoints and of weights, that have ended since the last call."""
        return self.saver.take_finished() + self.weights_saver.take_finished()

    def wait_for_saves(self) -> list[SaveResult]:
        """Wait for pending saves; return those that have ended since the last call."""
        self.heartbeat.enter(Phase.SAVE, self.step)
        return self.saver.wait() + self.weights_saver.wait()

    def wait_until_copied(self) -> float:
        """Block until pending saves have copied parameters and optimizer state; returns the seconds it took."""
        phase = self.heartbeat.phase
        self.heartbeat.enter(Phase.SAVE, self.step)
        seconds = self.saver.wait_for_copy() + self.weights_saver.wait_for_copy()
        self.heartbeat.enter(phase, self.step)
        return seconds

    def write_skip_list(self) -> None:
        """Write skipped.json from rank 0."""
        if self.world.rank == 0:
            try:
                self.guard.skipped.write(self.directory.skipped)
            except OSError as error:  # every checkpoint holds the list, too
                log.warning("%s: %s; it lacks the latest skipped steps", self.directory.skipped, error.strerror)

    def close(self) -> None:
        """Close the loaders and the files of metrics and events."""
        if self.profiler is not None:
            self.profiler.close(self.step)
        if self.recorder is not None:
            self.recorder.close()
        self.loader.close()
        if self.validation is not None:
            self.validation.close()
        self.reporter.close()
        if self.node_metrics is not None:
            self.node_metrics.close()

    @property
    def consumed_samples(self) -> int:
        """Position in the stream of samples: the only state of the data."""
        return self.step * self.config.train.global_batch
