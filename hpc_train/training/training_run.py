"""The state of one run on one rank, which training.loop advances step by step.

TrainingRun has the parts (engine, loaders, reporter) and the position. What belongs to one concern is grouped:
`observers` watch the run, `numbers` say whether its numbers can be trusted, `evaluation` is the latest one, and `saves`
(training.saving) are the checkpoints, under way and written. Functions of training/ take the run and change it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from hpc_train.checkpoint import SaveResult
from hpc_train.config.run import RunConfig
from hpc_train.data.loader import BatchLoader
from hpc_train.interfaces import Engine, World
from hpc_train.resilience.chaos import FaultInjector
from hpc_train.resilience.heartbeat import Heartbeat, Phase
from hpc_train.resilience.ledger import LedgerFile
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.training.numerics.anomalies import UpdateGuard
from hpc_train.training.numerics.noise_scale import NoiseScale
from hpc_train.training.numerics.replica_check import ReplicaCheck
from hpc_train.training.numerics.rollback import RollbackState
from hpc_train.training.optimizer import make_schedule, scale_peak_rate
from hpc_train.training.records.mfu import find_peak_flops, find_token_flops
from hpc_train.training.records.recorder import StepRecorder
from hpc_train.training.records.reporter import Reporter
from hpc_train.training.run_directory import RunDirectory
from hpc_train.training.saving import SaveState, make_save_state

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
class Observers:
    """Optional parts that watch the run on this rank, and the one that breaks it when ordered to."""

    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Tells the agent of the node where this rank is."""
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


@dataclass
class NumberState:
    """State of the checks of the run's numbers: which updates are skipped, and how far back they can be trusted."""

    noise: NoiseScale
    guard: UpdateGuard
    rollback: RollbackState
    finite_since_save: bool = True
    """No update since the last save was made from a loss or a gradient with NaN or infinity."""
    lost_since: int | None = None
    """First of the latest steps that all had NaN or infinity in loss or gradient; None if the last step had none."""
    last_norm: float = 0.0
    """Gradient norm of the latest step that is the same on all ranks; 0 if none is."""
    replicas: ReplicaCheck | None = None
    """Compares copies of parameters between ranks; None before the first time, and where devices round differently."""
    equal_at: int = 0
    """The latest step after which copies of parameters were compared and equal; at first where the run began."""
    equal_checkpoint: int | None = None
    """The newest checkpoint up to there; retention keeps it."""

    @classmethod
    def from_config(cls, config: RunConfig) -> NumberState:
        """Return the state before the first step."""
        return cls(
            NoiseScale(config.train.noise_scale.decay),
            make_update_guard(config),
            RollbackState(config.resilience.numbers.good_after),
        )


@dataclass
class EvaluationState:
    """The latest evaluation on the validation split, and whether one was skipped."""

    step: int | None = None
    """None before the first."""
    loss: float | None = None
    """Nats per target."""
    is_owed: bool = False
    """A request to stop skipped the evaluation that was due after this step."""


@dataclass
class TrainingRun:
    """A run on one rank: its parts, its position, and the state that its steps, saves and evaluations keep."""

    config: RunConfig
    world: World
    directory: RunDirectory
    engine: Engine
    loader: BatchLoader
    validation: BatchLoader | None
    steps: int
    """Updates of the whole run."""
    reporter: Reporter
    stop: StopRequest
    step: int = 0
    """Updates done so far."""
    steps_here: int = 0
    """Updates done by this process."""
    last_loss: float | None = None
    """Mean loss of the latest step over the global batch; None before the first."""
    copy_group: CopyGroup | None = None
    """The copies of the model, if some of them may be lost (training.lost_copies)."""
    observers: Observers = field(default_factory=Observers)
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    numbers: NumberState = field(init=False)
    saves: SaveState = field(init=False)
    schedule: Callable[[int], float] = field(init=False)
    """Learning rate of each update."""
    peak_flops: float | None = field(init=False)
    """FLOP/s of this rank's device, where they are known."""
    token_flops: float | None = field(init=False)
    """FLOPs of the model for one target, where they are known."""

    def __post_init__(self) -> None:
        self.numbers = NumberState.from_config(self.config)
        self.saves = make_save_state(self)
        peak = scale_peak_rate(self.config.optim, self.config.train.global_batch)
        self.schedule = make_schedule(self.config.optim, peak, self.steps)
        device = self.world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        self.peak_flops = find_peak_flops(self.config, name)
        frozen = self.config.adapter.kind != "none"
        self.token_flops = find_token_flops(self.config.model, self.config.train.sequence_length, frozen)

    def change_world(self, world: World) -> None:
        """Go on with the ranks of `world`, since others are lost."""
        self.world = world
        self.saves.change_world(world)
        if self.numbers.replicas is not None:
            self.numbers.replicas.world = world

    def wait_for_saves(self) -> list[SaveResult]:
        """Wait for pending saves; return those that have ended since the last call."""
        self.observers.heartbeat.enter(Phase.SAVE, self.step)
        return self.saves.wait()

    def wait_until_copied(self) -> float:
        """Block until pending saves have copied parameters and optimizer state; returns the seconds it took."""
        heartbeat = self.observers.heartbeat
        phase = heartbeat.phase
        heartbeat.enter(Phase.SAVE, self.step)
        seconds = self.saves.wait_until_copied()
        heartbeat.enter(phase, self.step)
        return seconds

    def write_skip_list(self) -> None:
        """Write skipped.json from rank 0."""
        if self.world.rank == 0:
            try:
                self.numbers.guard.skipped.write(self.directory.skipped)
            except OSError as error:  # every checkpoint holds the list, too
                log.warning("%s: %s; it lacks the latest skipped steps", self.directory.skipped, error.strerror)

    def close(self) -> None:
        """Close the loaders and the files of metrics and events."""
        if self.observers.profiler is not None:
            self.observers.profiler.close(self.step)
        if self.observers.recorder is not None:
            self.observers.recorder.close()
        self.loader.close()
        if self.validation is not None:
            self.validation.close()
        self.reporter.close()
        if self.observers.node_metrics is not None:
            self.observers.node_metrics.close()

    @property
    def consumed_samples(self) -> int:
        """Position in the stream of samples: the only state of the data."""
        return self.step * self.config.train.global_batch
