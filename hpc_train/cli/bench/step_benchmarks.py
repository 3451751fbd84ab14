"""Arguments of the benchmarks of a training step and its parts: step, overlap, sync, bubble, loss, scaling."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpc_train.cli.arguments import CommandGroup, add_examples, add_json, add_overrides
from hpc_train.cli.bench.benchmark_options import PLOT_HELP, add_benchmark, add_number


def add_step(kinds: CommandGroup) -> None:
    """Add `bench step`."""
    step = add_benchmark(kinds, "step", "compare a training step with the shortest hand-written loop", _step)
    add_overrides(step, config_dir=False)
    add_number(step, "--rounds", 11, "rounds, in each of which every side runs once")
    add_number(step, "--steps", 5, "steps of a side in a round")
    step.add_argument(
        "--peers", action="store_true", help="compare every strategy with torch's, and with DeepSpeed's if installed"
    )
    add_json(step)
    add_examples(
        step,
        "hpc-train bench step",
        "hpc-train bench step model=gpt2_tiny parallel=fsdp launch.ranks=2 --rounds 5",
        "hpc-train bench step --peers --json",
    )


def _step(args: argparse.Namespace) -> int:
    from hpc_train.bench.step.step import run_step_command

    return run_step_command(args.overrides, args.rounds, args.steps, args.json, args.peers)


def add_overlap(kinds: CommandGroup) -> None:
    """Add `bench overlap`."""
    overlap = add_benchmark(
        kinds, "overlap", "measure how much communication asynchronous tensor parallelism hides (needs root)", _overlap
    )
    add_number(overlap, "--rounds", 11, "rounds, in each of which every side runs once")
    add_number(overlap, "--steps", 1, "steps of a side in a round")
    add_number(overlap, "--tokens", 1024, "positions of the batch")
    add_number(overlap, "--hidden", 1024, "features of a position")
    overlap.add_argument(
        "--ratio", type=float, default=0.5, help="ratio of communication time to compute time (default 0.5)"
    )
    overlap.add_argument("--rate", type=float, metavar="MBIT", help="link rate in Mbit/s, instead of --ratio")
    add_json(overlap)
    add_examples(overlap, "hpc-train bench overlap", "hpc-train bench overlap --rate 500 --rounds 5 --json")


def _overlap(args: argparse.Namespace) -> int:
    from hpc_train.bench.thin_link.overlap import OverlapOptions, run_overlap_command

    options = OverlapOptions(
        rounds=args.rounds, steps=args.steps, tokens=args.tokens, hidden=args.hidden, ratio=args.ratio, rate=args.rate
    )
    return run_overlap_command(options, args.json)


def add_sync(kinds: CommandGroup) -> None:
    """Add `bench sync`."""
    sync = add_benchmark(
        kinds, "sync", "compare loosely synchronised copies with ddp over a thin link (needs root)", _sync
    )
    add_overrides(sync, config_dir=False)
    add_number(sync, "--rounds", 3, "rounds, in each of which both sides run once")
    add_number(sync, "--steps", 2, "steps of ddp in a round")
    add_number(sync, "--every", 50, "steps from one exchange to the next, and of the loose copies in a round")
    sync.add_argument("--rate", type=float, default=100.0, metavar="MBIT", help="link rate in Mbit/s (default 100)")
    add_json(sync)
    add_examples(
        sync,
        "hpc-train bench sync",
        "hpc-train bench sync model.hidden=512 parallel.sync.compression=int8 --rate 50 --every 20 --json",
    )


def _sync(args: argparse.Namespace) -> int:
    from hpc_train.bench.thin_link.sync import SyncOptions, run_sync_command

    return run_sync_command(SyncOptions(args.overrides, args.rounds, args.steps, args.every, args.rate), args.json)


def add_bubble(kinds: CommandGroup) -> None:
    """Add `bench bubble`."""
    bubble = add_benchmark(kinds, "bubble", "compare the bubble of each pipeline schedule with its simulation", _bubble)
    add_number(bubble, "--ranks", 4, "ranks, as processes on this machine")
    add_number(bubble, "--micro-batches", 8, "micro-batches of a step")
    add_number(bubble, "--rounds", 3, "rounds, in each of which every schedule runs once")
    bubble.add_argument(
        "--milliseconds",
        type=float,
        default=200.0,
        metavar="MS",
        help="time that a rank's stages sleep in forward, and in each half of backward (default 200)",
    )
    bubble.add_argument(
        "--schedule", action="append", metavar="NAME", help="measure only this schedule, or a .csv file; repeatable"
    )
    bubble.add_argument(
        "--costs",
        action="append",
        default=[],
        metavar="NAME=TIMES",
        help="relative times of the stages of a schedule, as in 1f1b=5,5,5,6 (default: all alike); repeatable",
    )
    add_json(bubble)
    add_examples(
        bubble, "hpc-train bench bubble", "hpc-train bench bubble --schedule 1f1b --schedule zbv --milliseconds 50"
    )


def _bubble(args: argparse.Namespace) -> int:
    from hpc_train.bench.bubble import BubbleOptions, parse_costs, run_bubble_command
    from hpc_train.config.parallel import SCHEDULES

    schedules = tuple(dict.fromkeys(args.schedule or SCHEDULES))
    options = BubbleOptions(
        schedules=schedules,
        costs=parse_costs(args.costs, schedules),
        ranks=args.ranks,
        micro_batches=args.micro_batches,
        rounds=args.rounds,
        milliseconds=args.milliseconds,
    )
    return run_bubble_command(options, args.json)


def add_loss(kinds: CommandGroup) -> None:
    """Add `bench loss`."""
    loss = add_benchmark(kinds, "loss", "compare the loss in chunks of tokens with the loss of all at once", _loss)
    add_number(loss, "--tokens", 2048, "tokens of a micro-batch")
    add_number(loss, "--hidden", 512, "width of a hidden state")
    add_number(loss, "--vocabulary", 32768, "size of the vocabulary")
    add_number(loss, "--chunk", 256, "tokens of a chunk")
    add_number(loss, "--rounds", 7, "rounds, in each of which both sides run once")
    loss.add_argument("--precision", choices=("fp64", "fp32", "bf16"), default="fp32", help="format (default fp32)")
    loss.add_argument("--count", action="store_true", help="only count memory, of shapes of any size")
    add_json(loss)
    add_examples(
        loss,
        "hpc-train bench loss",
        "hpc-train bench loss --tokens 8192 --hidden 4096 --vocabulary 128256 --chunk 1024 --precision bf16 --count",
    )


def _loss(args: argparse.Namespace) -> int:
    from hpc_train.bench.loss import LossBenchOptions, run_loss_command

    options = LossBenchOptions(
        tokens=args.tokens,
        hidden=args.hidden,
        vocabulary=args.vocabulary,
        chunk=args.chunk,
        precision=args.precision,
        rounds=args.rounds,
        count=args.count,
    )
    return run_loss_command(options, args.json)


def add_scaling(kinds: CommandGroup) -> None:
    """Add `bench scaling`."""
    scaling = add_benchmark(
        kinds, "scaling", "measure strong and weak scaling, and where more ranks no longer pay", _scaling
    )
    scaling.add_argument("sizes", metavar="SIZES", help="ranks=1,2,4 here, or nodes=1,2,4 with launch=slurm")
    add_overrides(scaling, config_dir=False)
    add_number(scaling, "--steps", 24, "steps of a run")
    scaling.add_argument("--folder", type=Path, default=Path("scaling"), metavar="DIR", help="folder of the runs")
    scaling.add_argument("--plot", metavar="FILE", help=PLOT_HELP)
    add_json(scaling)
    add_examples(
        scaling,
        "hpc-train bench scaling ranks=1,2,4 model=llama_tiny",
        "hpc-train bench scaling nodes=1,2,4,8 launch=slurm cluster=perlmutter model=llama_1b --plot scaling.svg",
    )


def _scaling(args: argparse.Namespace) -> int:
    from hpc_train.bench.scaling import run_scaling_command

    return run_scaling_command(args.overrides, args.sizes, args.steps, args.folder, args.json, args.plot)
