"""The interfaces between packages (a leaf): what a model, an engine or a checkpoint writer must at least offer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from hpc_train.step_clock import SilentClock, StepClock

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

    ModelInputs: TypeAlias = Tensor | dict[str, Tensor]

IGNORED_TARGET = -100
"""A target of this value counts neither in the loss nor in the number of tokens."""

DOCUMENT_STARTS = "document_starts"
"""Name of the input, (B, T) int64, that says where in its sequence the document of each place begins."""


Report: TypeAlias = Callable[[str], None]
"""Takes a line for people about something that was done."""


@runtime_checkable
class Model(Protocol):
    """A model that every technique can be applied to. It knows no mesh. A bare nn.Module gets data parallelism only.

    It is called as model(inputs), or model(**inputs) if the inputs of a micro-batch are a dictionary. It returns a
    tensor or a mapping (a dict, a transformers ModelOutput). Its loss is, in this order: its own `loss_sum`; the entry
    `loss`, the mean over the targets that count; the cross entropy of the entry `logits`, or of the tensor.
    """

    plan: dict[str, str]
    """Glob over module names -> how tensor parallelism splits it: col, row, seq, vocab, heads, enter, expert, ...

    All words are in parallel/tensor/tensor_plan.py."""

    def blocks(self) -> dict[str, nn.Module]:
        """Return the blocks by module name, in order: the units of sharding, recomputation and pipeline stages."""

    def stage(self, names: list[str]) -> nn.Module:
        """Build the part of the model with the blocks `names`, on the meta device, under the same parameter names."""

    def loss_sum(self, out: Any, target: Tensor) -> Tensor:
        """Sum (do not average) the loss over all targets that are not IGNORED_TARGET, in at least float32."""


class MicroBatch(NamedTuple):
    """Inputs and targets of one forward; the first dimension of each tensor is the micro-batch."""

    inputs: ModelInputs
    """One tensor, or several by the names of the model's arguments: map_inputs treats both alike."""
    targets: Tensor
    """Each that is not IGNORED_TARGET counts: the loss of a step is the mean over them."""

    def map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Apply `change` to each tensor: to move, pin or cut a micro-batch."""
        return MicroBatch(map_inputs(self.inputs, change), change(self.targets))


def map_inputs(inputs: ModelInputs, change: Callable[[Tensor], Tensor]) -> ModelInputs:
    """Apply `change` to the inputs: to the one tensor, or to each entry of the dictionary."""
    if isinstance(inputs, dict):
        return {name: change(tensor) for name, tensor in inputs.items()}
    return change(inputs)


@dataclass
class StepBatch:
    """This rank's share of one step's global batch."""

    micro: list[MicroBatch]
    stop: bool = False
    """This rank was asked to stop after this step; carried along by a reduction that is needed anyhow."""
    step: int = 0
    """Number of updates made so far; with the seed and a sample's index it decides what dropout drops."""
    first: int | None = None
    """Index of the first of these samples in the global batch; None: equal shares, in the order of dp_index."""
    measure: bool = False
    """Measure a gradient of part of the batch too, where the engine can see one."""
    norm: float = 0.0
    """Gradient norm of the previous step on this rank; 0 where ranks may differ. It is also carried along."""


@dataclass(frozen=True)
class GradientSample:
    """A gradient of less than the global batch, for the gradient noise scale."""

    norm_square: Tensor
    """Squared norm of the mean gradient over `sequences`, averaged over the parts that were seen."""
    sequences: int


@dataclass(frozen=True)
class ExpertLoads:
    """How the routers of a model spread a step's tokens over experts, over all ranks."""

    tokens: Tensor
    """Tokens computed by each expert, (expert layers, experts)."""
    dropped: Tensor
    """Places of tokens beyond the capacity of an expert, a scalar."""
    loss: Tensor
    """Sum of the auxiliary loss over tokens and layers, without its coefficient, a scalar."""

    @property
    def imbalance(self) -> Tensor:
        """Load of the busiest expert of any layer as a multiple of its layer's mean, a scalar; 1 is balanced."""
        mean = self.tokens.mean(1, keepdim=True).clamp(min=1e-9)
        return (self.tokens / mean).max()


@dataclass
class Sums:
    """Sums over the global batch: reduced over all ranks and valid on each of them."""

    loss: Tensor
    """Sum of the loss over all tokens, a scalar; on a GPU, reading it waits for the device."""
    tokens: int
    """Targets that count."""
    stop: bool = False
    """At least one rank was asked to stop."""
    agree: bool = True
    """All ranks had the same StepBatch.norm."""
    rank_loss: Tensor | None = None
    """This rank's part of `loss`, a scalar; None if the engine does not say."""
    metrics: Tensor | None = None
    """Sum and weight of each of train.metrics that an evaluation adds up, (metrics, 2)."""
    sample: GradientSample | None = None
    """Set if StepBatch.measure asked for a sample and the engine can see one."""
    experts: ExpertLoads | None = None
    """Set in training by a model with mixtures of experts."""


@dataclass(frozen=True)
class TensorShard:
    """A rectangle of a logical tensor: one rank's part of a parameter, buffer or optimizer state."""

    name: str
    """`<parameter>` or `optim.<state>.<parameter>`."""
    shape: tuple[int, ...]
    """Shape of the whole logical tensor."""
    dtype: torch.dtype
    offset: tuple[int, ...]
    """Index in the logical tensor at which `local` begins."""
    local: Tensor
    """This rank's data, contiguous; loading writes into it."""
    replica: int = 0
    """0 on the one rank that writes this rectangle, 1, 2, ... on those that hold a copy of it."""
    still: bool = False
    """Only the engine's `update` changes it, so that a save may copy it during the next forward and backward."""


class Engine(Protocol):
    """Owns accumulation, scaling, clipping and the optimizer. The training loop knows nothing else."""

    parts: list[nn.Module]
    """Local stages of the model."""

    def forward_backward(self, batch: StepBatch) -> Sums:
        """Accumulate the gradient of the mean loss over all tokens of the global batch."""

    def evaluate(self, batch: StepBatch) -> Sums:
        """Compute the same sums without a gradient."""

    def clip(self, max_norm: float | None) -> Tensor:
        """Clip the gradient and return its global norm before that, a scalar on the device (no synchronisation)."""

    def update(self, lr: float) -> bool:
        """Step the optimizer and clear the gradients. Returns False if the step was skipped (overflow, spike)."""

    def skip_update(self) -> None:
        """Clear the gradients and leave parameters and optimizer state as they are."""

    def shards(self) -> Iterator[TensorShard]:
        """List everything to save: parameters, buffers and optimizer state, in the same order on every call."""


@dataclass(frozen=True)
class Task:
    """A process of a job, before its process group exists."""

    process: int
    """Global index as the launcher counts it."""
    processes: int
    local: int
    """Index within its node."""
    node: int
    nodes: int
    launcher: str
    """The launcher that the other fields were read from: slurm, submitit, torchrun, mpi or single."""
    host: str
    store: Store | None = field(default=None, compare=False)
    """Key-value store that all processes of the job share; None in a job of one process."""


@dataclass(frozen=True)
class RankMap:
    """Which process takes which rank: process_to_rank[p] is the rank of launcher process p."""

    process_to_rank: tuple[int, ...]
    reason: str = "launcher order"
    warning: str | None = None
    """Why it is the launcher's order, where it should not be."""
    lines: tuple[str, ...] = ()
    """Lines about the placement, the binding and the environment, for rank 0 to print."""
    shared: dict[str, Any] = field(default_factory=dict, compare=False)
    """Further contents of rankmap.json: hash, costs before and after, straddling groups, environment."""
    per_rank: dict[str, Any] = field(default_factory=dict, compare=False)
    """This process's entry in rankmap.json: processors, memory, threads, GPU, NIC."""
    gpu: int | None = None
    """Index of this process's GPU among the visible ones; None: its local rank."""


@dataclass
class World:
    """A started job as one rank sees it."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    """Axes pp, dp_replicate, dp_shard, cp, tp, each present even at degree 1 and in a job of one rank."""
    dp_index: int
    """Which share of the global batch this rank takes, of dp_size."""
    dp_size: int
    store: Store | None = field(default=None, compare=False)
    node: int = 0
    """Index of this rank's among the nodes of the job."""
    expert_mesh: DeviceMesh | None = None
    """Axes expert_shard and ep, a view of dp_shard x cp; None without expert parallelism."""
    clock: StepClock = field(default_factory=SilentClock, compare=False)
    """Measures the parts of a step of this rank."""
    group: ProcessGroup | None = field(default=None, compare=False)
    """Process group of these ranks; None: of all processes. With loose synchronisation a copy has its own, and so have
    the ranks that are left once a copy is lost."""
