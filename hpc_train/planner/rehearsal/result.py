"""What a rehearsal has found out."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_train.config.degrees import Degrees
from hpc_train.planner.rehearsal.order import Proof
from hpc_train.planner.rehearsal.tiling import Tiling


@dataclass(frozen=True)
class Held:
    """An api.Piece without its memory."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """Of the rectangle."""
    replica: int
    bytes: int


@dataclass(frozen=True)
class Counted:
    """Bytes on one rank, counted."""

    parameters: int
    """With buffers, and what fully_shard fills shards up with."""
    optimizer: int
    gradients: int | None = None
    """Held when a step's backward has ended; None: no step was trained."""
    whole_gradients: int | None = None
    """Of gradients, when they are most: those that are not reduced yet are whole."""
    activations: int | None = None
    """What forwards have made and hold when that is most: of all micro-batches in flight, logits too."""
    gathered: int | None = None
    """Whole parameters that fully_shard has put together, when that is most."""
    peak: int | None = None
    """Peak bytes on the device."""
    at_peak: dict[str, int] = field(default_factory=dict)
    """By ledger.KINDS."""
    host: int | None = None
    """Peak bytes that are offloaded; not part of `peak`."""
    offloaded: tuple[str, ...] = ()
    """Parts of the state that are offloaded."""


@dataclass(frozen=True)
class Fit:
    """Verdict on all ranks that trained a step."""

    within_plan: bool
    """Whether no rank's counted peak is more than fit.TOLERANCE above the plan."""
    fits: bool | None
    """Whether all ranks fit on the device; None: its memory is unknown, or no step was trained."""
    lines: tuple[str, ...]
    """Report lines: one for each rank that is wrong, or one that says all is well."""

    @property
    def ok(self) -> bool:
        return self.within_plan and self.fits is not False


@dataclass(frozen=True)
class Built:
    """One rank."""

    rank: int
    at: dict[str, int]
    """Its coordinates."""
    said: tuple[str, ...]
    """By the passes, in order."""
    pieces: tuple[Held, ...]
    tilings: dict[str, Tiling]
    """Of each parameter and buffer of its stages."""
    counted: Counted
    seconds: float
    rss: int
    """Most bytes that the process has had in memory so far."""
    unknown: str | None = None
    """Why no step could be trained."""


@dataclass(frozen=True)
class Coverage:
    """Of the whole model by all ranks together."""

    tensors: int
    elements: int
    """Of the model."""
    pieces: int
    """Rectangles that are written, each by one rank: parameters, buffers, optimizer state."""
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Rehearsal:
    """All of it."""

    degrees: Degrees
    ranks: tuple[Built, ...]
    coverage: Coverage
    proof: Proof | None
    """Of the pipeline's order; None: no pipeline."""
    micro_batches: int
    """Of a rehearsed step."""
    closed_form: dict[int, dict[str, int]]
    """By rank that was stepped: parameters, gradients, optimizer in bytes, from the model's shape alone."""
    planned: dict[int, dict[str, float]]
    """Bytes by part that `plan` gives for what was rehearsed, by rank that was stepped; empty if it gives none."""
    fit: Fit
    """Whether the ranks keep to the plan and fit on their device."""
    servers: tuple[int, ...]
    """Bytes of each parameter server's share, with its optimizer state."""
    not_rehearsed: tuple[str, ...]
    seconds: float
    processes: int

    @property
    def rss(self) -> int:
        """Most bytes that one of the processes had in memory."""
        return max(built.rss for built in self.ranks)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with the layout or with what it needs."""
        return not self.problems and self.fit.ok

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with the layout, or with a count that has to agree; empty: nothing."""
        return (*self.coverage.problems, *self._miscounted())

    def _miscounted(self) -> list[str]:
        found = []
        for built in self.ranks:
            for part, wanted in self.closed_form.get(built.rank, {}).items():
                counted = getattr(built.counted, part)
                if counted is not None and counted != wanted:
                    said = f"{counted:,} bytes of {part}, where the model's shape says {wanted:,}"
                    found.append(f"rank {built.rank}: {said}")
        return found
