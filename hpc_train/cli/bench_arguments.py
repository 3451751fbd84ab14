"""What the commands of `hpc-train bench` take. A help text imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

_OVERRIDES = "key=value as in conf/, such as model=llama_1b optim.lr=1e-3 train.steps=1000"
_SubCommands = Any


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add a sub-command a benchmark; each sets `run`, a function of the parsed arguments."""
    kinds = command.add_subparsers(dest="bench", required=True, metavar="kind")
    _add_step(kinds)
    _add_overlap(kinds)
    _add_bubble(kinds)
    _add_collectives(kinds)
    _add_gemm(kinds)
    _add_placement(kinds)
    _add_checkpoint(kinds)
    _add_submit(kinds)


def _add_step(kinds: _SubCommands) -> None:
    step = kinds.add_parser("step", help="tokens/s of the training step against the shortest hand-written loop")
    step.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    step.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    step.add_argument("--steps", type=int, default=5, help="steps a round and side (default 5)")
    step.add_argument("--json", action="store_true", help="print the result as JSON")
    step.add_argument(
        "--peers", action="store_true", help="every strategy against torch's and, if installed, DeepSpeed"
    )
    step.set_defaults(run=_step)


def _add_submit(kinds: _SubCommands) -> None:
    summary = "handing a large sweep to Slurm: seconds and files; nothing of it runs"
    submit = kinds.add_parser("submit", help=summary, description=summary)
    submit.add_argument("--points", type=int, default=1000, help="of the sweep (default 1000)")
    submit.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    submit.add_argument("--peers", action="store_true", help="beside hydra-submitit-launcher, which must be installed")
    submit.add_argument("--json", action="store_true", help="print the result as JSON")
    submit.set_defaults(run=_submit)


def _add_overlap(kinds: _SubCommands) -> None:
    summary = "what asynchronous tensor parallelism hides, over a rate-limited link of two network namespaces"
    overlap = kinds.add_parser("overlap", help=summary, description=summary)
    overlap.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    overlap.add_argument("--steps", type=int, default=1, help="steps a round and side (default 1)")
    overlap.add_argument("--tokens", type=int, default=1024, help="positions of the batch (default 1024)")
    overlap.add_argument("--hidden", type=int, default=1024, help="features of a position (default 1024)")
    overlap.add_argument("--ratio", type=float, default=0.5, help="communication over compute (default 0.5)")
    overlap.add_argument("--rate", type=float, help="Mbit/s of the link, in place of the one that --ratio gives")
    overlap.add_argument("--json", action="store_true", help="print the result as JSON")
    overlap.set_defaults(run=_overlap)


def _add_bubble(kinds: _SubCommands) -> None:
    summary = "what each pipeline schedule loses, with stages that sleep, beside what its order says"
    bubble = kinds.add_parser("bubble", help=summary, description=summary)
    bubble.add_argument("--ranks", type=int, default=4, help="processes of this machine (default 4)")
    bubble.add_argument("--micro-batches", type=int, default=8, help="of a step (default 8)")
    bubble.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    bubble.add_argument(
        "--milliseconds", type=float, default=200.0, help="of each of F, I and W of a rank's stages (default 200)"
    )
    bubble.add_argument("--schedule", action="append", metavar="NAME", help="only this one, or a file .csv; repeatable")
    bubble.add_argument("--json", action="store_true", help="print the result as JSON")
    bubble.set_defaults(run=_bubble)


def _add_collectives(kinds: _SubCommands) -> None:
    from hpc_train.bench.collectives.options import add_collectives_arguments

    summary = "collectives of every mesh axis, by nccl-tests' definitions; latency and bandwidth of the fabric's levels"
    collectives = kinds.add_parser("collectives", help=summary, description=summary)
    collectives.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    add_collectives_arguments(collectives)
    collectives.set_defaults(run=_collectives)


def _add_gemm(kinds: _SubCommands) -> None:
    from hpc_train.bench.gemm import add_gemm_arguments

    summary = "matrix products of many shapes, and a copy, on the device at hand, for `hpc-train plan calibrate`"
    gemm = kinds.add_parser("gemm", help=summary, description=summary)
    add_gemm_arguments(gemm)
    gemm.set_defaults(run=_gemm)


def _add_placement(kinds: _SubCommands) -> None:
    summary = "in a Slurm allocation: step times of good, bad, random and placed orders of its nodes, and predictions"
    placement = kinds.add_parser("placement", help=summary, description=summary)
    placement.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    placement.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    placement.add_argument("--steps", type=int, default=8, help="of each training, 2 of them to warm up (default 8)")
    placement.add_argument("--seed", type=int, default=1, help="of the random order (default 1)")
    placement.add_argument(
        "--largest", metavar="SIZE", default="16M", help="message of the calibration (default 16M; less on slow links)"
    )
    placement.add_argument("--directory", metavar="DIR", help="shared folder for the runs, removed (default: here)")
    placement.add_argument("--json", action="store_true", help="print the result as JSON")
    placement.set_defaults(run=_placement)


def _add_checkpoint(kinds: _SubCommands) -> None:
    summary = "save, stall, load and verify against the disk itself, torch.save, DCP and safetensors"
    bench = kinds.add_parser("checkpoint", help=summary, description=summary)
    bench.add_argument("--gib", type=float, default=2.0, help="of state over all ranks (default 2)")
    bench.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes of this machine (default 1 2)")
    bench.add_argument("--tensors", type=int, help="so many equal ones, in place of a transformer and its AdamW state")
    bench.add_argument("--directory", nargs="+", default=["."], metavar="DIR", help="where (default: here)")
    bench.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    bench.add_argument("--operations", nargs="+", metavar="NAME", help="only these: save, stall, load_cold, ...")
    bench.add_argument("--sides", nargs="+", metavar="NAME", help="only these: hpc_train, raw_direct, dcp, ...")
    bench.add_argument("--json", action="store_true", help="print the result as JSON")
    bench.add_argument("--plot", metavar="FILE", help="draw it too, as .png, .svg or .pdf")
    bench.set_defaults(run=_checkpoint)


def _step(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.step import step_command

    return step_command(arguments.overrides, arguments.rounds, arguments.steps, arguments.json, arguments.peers)


def _submit(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.sweep_submission import submission_command

    a = arguments
    return submission_command(a.points, a.rounds, a.peers, a.json)


def _overlap(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.overlap import OverlapOptions, overlap_command

    sizes = ("rounds", "steps", "tokens", "hidden", "ratio", "rate")
    return overlap_command(OverlapOptions(**{name: getattr(arguments, name) for name in sizes}), arguments.json)


def _collectives(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.collectives.benchmark import collectives_command
    from hpc_train.bench.collectives.options import collectives_options

    return collectives_command(arguments.overrides, collectives_options(arguments))


def _gemm(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.gemm import gemm_command, gemm_options

    return gemm_command(gemm_options(arguments))


def _placement(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.placement import PlacementBenchOptions, placement_command

    names = ("rounds", "steps", "seed", "largest", "directory", "json")
    options = PlacementBenchOptions(*(getattr(arguments, name) for name in names))
    return placement_command(arguments.overrides, options)


def _bubble(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.bubble import BubbleOptions, bubble_command
    from hpc_train.config.parallel import SCHEDULES

    sizes = ("ranks", "micro_batches", "rounds", "milliseconds")
    schedules = tuple(dict.fromkeys(arguments.schedule or SCHEDULES))
    return bubble_command(
        BubbleOptions(schedules, **{name: getattr(arguments, name) for name in sizes}), arguments.json
    )


def _checkpoint(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from hpc_train.bench.checkpoint.benchmark import OPERATIONS, SIDES, CheckpointBenchOptions, checkpoint_command

    a = arguments
    chosen = tuple(a.operations or OPERATIONS), tuple(a.sides or SIDES)
    options = CheckpointBenchOptions(a.gib, tuple(a.ranks), a.tensors, tuple(a.directory), a.rounds, *chosen)
    return checkpoint_command(options, a.json, Path(a.plot) if a.plot else None)
