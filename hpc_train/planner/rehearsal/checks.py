"""Check a rehearsal: the ranks together hold the whole model, in as many bytes as expected.

check_coverage proves that the ranks' tensor shards cover every tensor exactly once. compute_closed_form_bytes and
compute_server_bytes compute sizes from the model's shape alone; plan_memory_by_rank is the estimate of `plan`.
check_memory_fit compares the counted memory with the plan and with the device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.shape import count_kv_heads
from hpc_train.parallel.parameter_server.shared_parameters import assign_parameters
from hpc_train.planner.constants import cluster_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.memory import estimate_memory
from hpc_train.planner.rehearsal.result import CoverageResult, HeldShard, MemoryFit, RehearsedRank
from hpc_train.planner.rehearsal.tiling import Tiling, make_whole_tiling
from hpc_train.traffic.sharding import uses_fully_shard
from hpc_train.traffic.stages import StagePart, compute_step_work, list_stage_parts
from hpc_train.traffic.weights import Splitting, Weight, Weights, count_rank_elements_of, list_weights
from hpc_train.units import GIB, MIB, choose_memory_unit

_OPTIMIZER = "optim."
_SCALER = "scaler."
"""Prefix of the loss scale's state, which every rank of the job has."""


def check_coverage(
    model: Mapping[str, tuple[int, ...]], ranks: Sequence[RehearsedRank], degrees: Degrees
) -> CoverageResult:
    """Prove that the ranks hold every element of the model exactly once, not counting copies.

    model: shape of every parameter and persistent buffer, by name. ranks: the ranks that were built. A parameter that
    none of them has counts as missing only if a rank of every stage was built.

    Checked: every tensor belongs to one stage, and the ranks of the stage cover it exactly once (Tiling.problem); one
    copy of each rectangle is written to checkpoints; each rank that was built has the rectangles that its tilings say;
    and replica numbers agree between the ranks of a stage.
    """
    problems: list[str] = []
    owners: dict[str, tuple[int, Tiling]] = {}
    holders: dict[tuple[int, str, bool], int] = {}
    for built in ranks:
        counts = Counter(piece.name for piece in built.pieces)
        for piece in built.pieces:
            problems += _check_piece(built, piece, counts[piece.name], degrees, holders)
        problems += _claim(built, model, owners, degrees)
    if list_unbuilt_stages(ranks, degrees) == []:
        problems += [f"{name} is on no rank" for name in model if name not in owners]
    for name, (_, tiling) in owners.items():
        if wrong := tiling.find_problem():
            problems.append(f"{name}: {wrong}")
    elements = sum(math.prod(shape) for shape in model.values())
    return CoverageResult(len(model), elements, _count_written(ranks, owners), tuple(dict.fromkeys(problems)))


def find_tiling(built: RehearsedRank, piece: HeldShard) -> Tiling:
    """Return the tiling of a piece. Optimizer state with the parameter's dimensions is split as the parameter is."""
    tiling = built.tilings.get(_name_parameter(piece.name))
    if tiling is None or len(tiling.shape) != len(piece.shape):
        return make_whole_tiling(piece.shape)
    return tiling if tiling.shape == piece.shape else tiling.shrink(piece.shape)


def _name_parameter(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith(_OPTIMIZER) else name


def _check_piece(
    built: RehearsedRank, piece: HeldShard, pieces: int, degrees: Degrees, holders: dict[tuple[int, str, bool], int]
) -> Iterator[str]:
    """Yield what is wrong with a piece: its rectangle, its replica number, or who writes it.

    pieces: how many the rank has of this tensor. holders: the writer of each tensor, as far as ranks have said;
    extended here.
    """
    where = f"rank {built.rank}: {piece.name}"
    if piece.name.startswith(_SCALER):
        if piece.replica != built.rank:
            yield f"{where} is copy {piece.replica} of those of all ranks"
        return
    tiling = find_tiling(built, piece)
    wanted = tiling.find_rectangles(built.at, degrees)
    if (piece.offset, piece.size) not in wanted:
        (offset, size), *_ = wanted
        yield f"{where} begins at {piece.offset} and is {piece.size}; it should begin at {offset} and be {size}"
    if pieces % len(wanted):  # two stages of a rank may have a tied parameter each
        yield f"{where} is in {pieces} pieces, and should be in {len(wanted)}"
    count, copy_index = tiling.count_copies(degrees), tiling.number_copy(built.at, degrees)
    if not 0 <= piece.replica < 2 * count:
        yield f"{where} is copy {piece.replica} of {count}"
    # Replica numbers count from the writer, so the position of replica 0 is the same for all copies. Numbers from
    # `count` on belong to tied parameters that another stage owns; they have holders of their own.
    key = (built.at["pp"], piece.name, piece.replica >= count)
    writer = (copy_index - piece.replica) % count
    if holders.setdefault(key, writer) != writer:
        yield f"{where}: two ranks take different ones for its writer"


def _claim(
    built: RehearsedRank, model: Mapping[str, tuple[int, ...]], owners: dict[str, tuple[int, Tiling]], degrees: Degrees
) -> Iterator[str]:
    """Record which stage owns each tensor of this rank, and yield what contradicts the model or other ranks.

    Tied parameters that another stage owns are skipped.
    """
    for piece in built.pieces:
        if piece.name.startswith((_OPTIMIZER, _SCALER)):
            continue
        tiling = find_tiling(built, piece)
        if piece.name not in model:
            yield f"rank {built.rank}: {piece.name} is not in the model"
        elif piece.shape != model[piece.name]:
            yield f"rank {built.rank}: {piece.name} is {piece.shape}, in the model {model[piece.name]}"
        if piece.replica >= tiling.count_copies(degrees):
            continue
        stage, other = owners.setdefault(piece.name, (built.at["pp"], tiling))
        if stage != built.at["pp"]:
            yield f"{piece.name} belongs to pipeline ranks {stage} and {built.at['pp']}"
        if other != tiling:
            yield f"rank {built.rank}: {piece.name} is cut as {tiling.cuts}, elsewhere as {other.cuts}"


def list_unbuilt_stages(ranks: Sequence[RehearsedRank], degrees: Degrees) -> list[int]:
    """List the pipeline ranks of which no rank was built, so that nothing is known of their stages."""
    built_stages = {built.at["pp"] for built in ranks}
    return [pp for pp in range(degrees.pp) if pp not in built_stages]


def _count_written(ranks: Sequence[RehearsedRank], owners: Mapping[str, tuple[int, Tiling]]) -> int:
    """Count the rectangles that a checkpoint consists of, optimizer state included."""
    first = {built.at["pp"]: built for built in reversed(ranks)}
    seen: dict[str, int] = {}
    for stage, built in first.items():
        for piece in built.pieces:
            owner = owners.get(_name_parameter(piece.name))
            if owner is None or owner[0] == stage:
                seen[piece.name] = find_tiling(built, piece).rectangles
    return sum(seen.values())


_STEP_BYTES = 4
"""Bytes of AdamW's step count, one float32 for each parameter."""
_MOMENTS = 2


def compute_closed_form_bytes(config: RunConfig, degrees: Degrees, pp_rank: int) -> dict[str, int]:
    """Compute the bytes of parameters, gradients and optimizer state of one rank from the model's shape alone.

    The rank is the first one, over all axes but pp, of pipeline rank `pp_rank`: it has the larger part of whatever does
    not divide. Each rank keeps ceil(rows / shards) rows of its tp part of every parameter (shards: dp_shard x cp), and
    as many of gradients and of each of AdamW's moments, all in fp32 (fp64: in fp64). Other optimizers are left out.
    Empty for a custom model, whose shapes are unknown.
    """
    weights = list_weights(config.model)
    if weights is None:
        return {}
    assert isinstance(config.model, (TransformerConfig, VisionTransformerConfig))
    heads = count_kv_heads(config.model) if isinstance(config.model, TransformerConfig) else config.model.heads
    shards = degrees.dp_shard * degrees.cp if uses_fully_shard(config, degrees) else 1
    vocabulary = config.parallel.tensor.vocabulary and isinstance(config.model, TransformerConfig)
    how = Splitting(degrees.tp, heads, vocabulary, shards)
    number_bytes = compute_step_work(config, degrees).stored
    stages = [
        list(_list_stage_weights(weights, stage))
        for stage in list_stage_parts(config, degrees.pp, weights.blocks)[pp_rank]
    ]
    ep = config.parallel.ep if weights.experts else 1
    numbers = sum(
        _count_expert_elements(weight, how, ep, config.model.hidden)
        if ep > 1 and any(weight is stack for stack in weights.experts)
        else count_rank_elements_of(weight, how) // shards
        for stage in stages
        for weight in stage
    )
    tensors = sum(len(stage) for stage in stages)
    sizes = {"parameters": numbers * number_bytes, "gradients": numbers * number_bytes}
    optim = config.optim
    if optim.name == "adamw" and optim.state == "full" and optim.ema.decay is None:
        sizes["optimizer"] = compute_optimizer_state_bytes(numbers, tensors, number_bytes)
    return sizes


def _count_expert_elements(stack: Weight, how: Splitting, ep: int, hidden: int) -> int:
    """Count a rank's elements of a stack of experts, which ep splits first.

    fully_shard cuts what is left between experts where that divides, else the hidden dimension (parallel.expert).
    """
    local, shards = stack.shape[0] // ep, how.shards // ep
    one = math.prod(stack.shape[1:]) // how.tp
    return -(-local // shards) * one if local % shards == 0 or hidden % shards else local * one // shards


def compute_optimizer_state_bytes(numbers: int, tensors: int, number_bytes: int) -> int:
    """Return the bytes of AdamW's state for a number of elements, of `number_bytes` each, in a number of parameters."""
    return _MOMENTS * numbers * number_bytes + _STEP_BYTES * tensors


def _list_stage_weights(weights: Weights, stage: StagePart) -> Iterable[Weight]:
    if stage.first:
        yield from weights.before
    yield from weights.dense_block * stage.dense
    yield from (*weights.block, *weights.experts) * stage.mixed
    if stage.last:
        yield from weights.after
    if weights.tied and stage.last and not stage.first:
        yield weights.tied


def compute_server_bytes(config: RunConfig, model: nn.Module) -> tuple[int, ...]:
    """Return the bytes of parameters and optimizer state on each parameter server; empty without servers."""
    server = config.parallel.server
    if server.mode not in ("synchronous", "asynchronous"):
        return ()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    number_bytes = 8 if config.precision.name == "fp64" else 4
    dealt = assign_parameters(trained, server.servers)
    return tuple(
        number_bytes * _count_numbers(share)
        + compute_optimizer_state_bytes(_count_numbers(share), len(share), number_bytes)
        for share in dealt
    )


def _count_numbers(share: list[tuple[str, nn.Parameter]]) -> int:
    return sum(parameter.numel() for _, parameter in share)


_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
"""Parts of the plan's memory that are compared: all but the allocator's and the driver's, which are not counted."""


def plan_memory_by_rank(config: RunConfig, degrees: Degrees, ranks: Mapping[int, int]) -> dict[int, dict[str, float]]:
    """Return the planned bytes of each rank by part; empty for a model that cannot be planned.

    Empty also for windows and soft-caps of attention: this machine computes them in another way than a GPU, for which
    the plan is. ranks: pipeline rank by rank.
    """
    model = config.model
    if isinstance(model, TransformerConfig) and (model.sliding_window or model.attention_softcap):
        return {}
    try:
        parts = estimate_memory(jobs_from_config(config, degrees.world), cluster_constants(config.cluster))
    except UserError:
        return {}
    planned = {}
    for rank, pp in ranks.items():
        stage = 0 if pp == 0 else 2 if pp == degrees.pp - 1 else 1
        planned[rank] = {part: float(getattr(parts, part)[stage].max()) for part in _PARTS}
    return planned


TOLERANCE = 0.05
"""Share of the plan by which a counted peak may exceed it."""
SEGMENT = 16 * MIB
"""Bytes by which a peak may always exceed the plan: less than one segment of 20 MiB of torch's CUDA allocator."""
_COUNTED_AS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("forward", "backward", "other"),
    "gathered parameters": ("gathered",),
}
"""Part, as named in messages -> the memory_ledger.MEMORY_KINDS it is counted under."""
_PLANNED_AS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "logits"),
    "gathered parameters": ("buffers",),
}
"""Part, as named in messages -> parts of the plan."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a rank's device."""

    bytes: float
    fragmentation: float
    """Memory that the allocator holds in addition, as a share of what is allocated."""
    context: float
    """Bytes taken by the driver, libraries and communicators."""

    def bytes_needed(self, peak: float) -> float:
        """Return the device bytes that a peak of counted memory takes."""
        return peak * (1 + self.fragmentation) + self.context


def read_device(config: RunConfig) -> DeviceMemory | None:
    """Return the device; None if cluster.gpu.memory_gib is not given."""
    if not config.cluster.gpu.memory_gib:
        return None
    constants = cluster_constants(config.cluster)
    return DeviceMemory(config.cluster.gpu.memory_gib * GIB, constants.fragmentation, constants.context)


def check_memory_fit(
    ranks: Sequence[RehearsedRank],
    planned: Mapping[int, Mapping[str, float]],
    device: DeviceMemory | None,
    real_less_stand_in: Mapping[int, float] | None = None,
) -> MemoryFit:
    """Compare the counted peaks with the plan and with the device.

    planned: bytes by part, by rank, of what was rehearsed. real_less_stand_in: by rank, bytes that the real run needs
    more than its rehearsed stand-in, according to the plan.
    """
    stepped = [built for built in ranks if built.counted.peak is not None]
    if not stepped:
        return MemoryFit(True, None, ("fits: not known, as no step was trained",))
    changed = real_less_stand_in or {}
    wrong = [line for built in stepped for line in _compare_with_plan(built, planned.get(built.rank, {}))]
    within_plan = not wrong
    needs = {built.rank: (built.counted.peak or 0) + changed.get(built.rank, 0.0) for built in stepped}
    over = [built for built in stepped if device is not None and device.bytes_needed(needs[built.rank]) > device.bytes]
    for built in over:
        assert device is not None
        wrong.append(_describe_excess(built, needs[built.rank], device))
    fullest = max(stepped, key=lambda built: needs[built.rank])
    if wrong:
        return MemoryFit(within_plan, None if device is None else not over, tuple(wrong))
    plan = sum(planned.get(fullest.rank, {}).values())
    real_plan = plan + changed.get(fullest.rank, 0.0) if plan else None
    return MemoryFit(
        True, None if device is None else True, (_describe_fit(fullest, needs[fullest.rank], real_plan, device),)
    )


def _compare_with_plan(built: RehearsedRank, plan: Mapping[str, float]) -> list[str]:
    """Return one line if the rank's peak exceeds its plan."""
    total, peak = sum(plan.values()), built.counted.peak or 0
    if not plan or peak <= max(total * (1 + TOLERANCE), total + SEGMENT):
        return []
    counted = {part: _sum_parts(built.counted.at_peak, kinds) for part, kinds in _COUNTED_AS.items()}
    expected = {part: _sum_parts(plan, names) for part, names in _PLANNED_AS.items()}
    part = max(counted, key=lambda name: counted[name] - expected[name])
    return [
        f"{_name_rank(built)} needs {_format_size(peak, peak)}, {_format_excess(peak / total)} the "
        f"{_format_size(total, peak)} of the plan (allowed: {TOLERANCE:.0%} more); most of it {part}: "
        f"{_format_size(counted[part], peak)} counted, {_format_size(expected[part], peak)} planned"
    ]


def _format_excess(ratio: float) -> str:
    """Format a ratio over 1 to stand before what it is compared with."""
    if ratio >= 2:
        return f"{ratio:.1f} times"
    return f"{ratio - 1:.1%} more than" if ratio < 1.1 else f"{ratio - 1:.0%} more than"


def _describe_excess(built: RehearsedRank, needed: float, device: DeviceMemory) -> str:
    required = device.bytes_needed(needed)
    beyond = _format_size(required - device.bytes, device.bytes)
    largest = max(_COUNTED_AS, key=lambda part: _sum_parts(built.counted.at_peak, _COUNTED_AS[part]))
    return (
        f"{_name_rank(built)} does not fit: {_format_size(needed, needed)}, with allocator and driver "
        f"{_format_size(required, device.bytes)}, are {beyond} more than the "
        f"{_format_size(device.bytes, device.bytes)} of the device; most of it {largest}: "
        f"{_format_size(_sum_parts(built.counted.at_peak, _COUNTED_AS[largest]), needed)}"
    )


def _describe_fit(fullest: RehearsedRank, needed: float, plan: float | None, device: DeviceMemory | None) -> str:
    """Return the line of a run that is all well. needed, plan: bytes of the real run, not of its stand-in."""
    against = f", the plan says {_format_size(plan, needed)}" if plan else ""
    if device is None:
        rest = "; cluster.gpu.memory_gib is not known, so whether it fits is not"
        return f"keeps to the plan: {_name_rank(fullest)} needs most, {_format_size(needed, needed)}{against}{rest}"
    taken_size = _format_size(device.bytes_needed(needed), device.bytes)
    return (
        f"fits: {_name_rank(fullest)} needs most, {_format_size(needed, needed)}{against}; with allocator and driver "
        f"{taken_size} of {_format_size(device.bytes, device.bytes)}"
    )


def _name_rank(built: RehearsedRank) -> str:
    return f"rank {built.rank} (pipeline rank {built.at['pp']})" if built.at.get("pp") else f"rank {built.rank}"


def _sum_parts(parts: Mapping[str, float], names: Sequence[str]) -> float:
    return float(sum(parts.get(name, 0) for name in names))


def _format_size(size: float, compared_with: float) -> str:
    """Format a size in the unit that suits the size it is compared with."""
    unit, name = choose_memory_unit(compared_with)
    return f"{size / unit:,.1f} {name}"
