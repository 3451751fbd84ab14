"""Define the arguments of `hpc-train bench` and its benchmarks; what they do is imported when they run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from hpc_train.cli.arguments import CommandGroup, add_command, add_examples, add_json, add_overrides, whole_number

_PLOT = "also plot the result, as .png or .svg"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add one sub-command for each benchmark."""
    kinds = command.add_subparsers(dest="bench", required=True, metavar="kind")
    _add_step(kinds)
    _add_overlap(kinds)
    _add_sync(kinds)
    _add_bubble(kinds)
    _add_collectives(kinds)
    _add_gemm(kinds)
    _add_gpu(kinds)
    _add_loss(kinds)
    _add_data(kinds)
    _add_loader(kinds)
    _add_placement(kinds)
    _add_checkpoint(kinds)
    _add_loop_checkpoint(kinds)
    _add_submit(kinds)
    _add_scaling(kinds)


def _add_benchmark(
    kinds: CommandGroup, name: str, summary: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    benchmark = add_command(kinds, name, summary)
    benchmark.set_defaults(run=run)
    return benchmark


def _add_number(benchmark: argparse.ArgumentParser, option: str, default: int, text: str) -> None:
    benchmark.add_argument(option, type=int, default=default, metavar="N", help=f"{text} (default {default})")


def _add_step(kinds: CommandGroup) -> None:
    step = _add_benchmark(kinds, "step", "compare a training step with the shortest hand-written loop", _step)
    add_overrides(step, config_dir=False)
    _add_number(step, "--rounds", 11, "rounds, in each of which every side runs once")
    _add_number(step, "--steps", 5, "steps of a side in a round")
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


def _step(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.step.step import run_step_command

    return run_step_command(arguments.overrides, arguments.rounds, arguments.steps, arguments.json, arguments.peers)


def _add_overlap(kinds: CommandGroup) -> None:
    overlap = _add_benchmark(
        kinds, "overlap", "measure how much communication asynchronous tensor parallelism hides (root)", _overlap
    )
    _add_number(overlap, "--rounds", 11, "rounds, in each of which every side runs once")
    _add_number(overlap, "--steps", 1, "steps of a side in a round")
    _add_number(overlap, "--tokens", 1024, "positions of the batch")
    _add_number(overlap, "--hidden", 1024, "features of a position")
    overlap.add_argument(
        "--ratio", type=float, default=0.5, help="ratio of communication time to compute time (default 0.5)"
    )
    overlap.add_argument("--rate", type=float, metavar="MBIT", help="link rate in Mbit/s, instead of --ratio")
    add_json(overlap)
    add_examples(overlap, "hpc-train bench overlap", "hpc-train bench overlap --rate 500 --rounds 5 --json")


def _overlap(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.thin_link.overlap import OverlapOptions, run_overlap_command

    a = arguments
    options = OverlapOptions(
        rounds=a.rounds, steps=a.steps, tokens=a.tokens, hidden=a.hidden, ratio=a.ratio, rate=a.rate
    )
    return run_overlap_command(options, a.json)


def _add_sync(kinds: CommandGroup) -> None:
    sync = _add_benchmark(kinds, "sync", "compare loosely synchronised copies with ddp over a thin link (root)", _sync)
    add_overrides(sync, config_dir=False)
    _add_number(sync, "--rounds", 3, "rounds, in each of which both sides run once")
    _add_number(sync, "--steps", 2, "steps of ddp in a round")
    _add_number(sync, "--every", 50, "steps from one exchange to the next, and of the loose copies in a round")
    sync.add_argument("--rate", type=float, default=100.0, metavar="MBIT", help="link rate in Mbit/s (default 100)")
    add_json(sync)
    add_examples(
        sync,
        "hpc-train bench sync",
        "hpc-train bench sync model.hidden=512 parallel.sync.compression=int8 --rate 50 --every 20 --json",
    )


def _sync(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.thin_link.sync import SyncOptions, run_sync_command

    a = arguments
    return run_sync_command(SyncOptions(a.overrides, a.rounds, a.steps, a.every, a.rate), a.json)


def _add_bubble(kinds: CommandGroup) -> None:
    bubble = _add_benchmark(
        kinds, "bubble", "compare the bubble of each pipeline schedule with its simulation", _bubble
    )
    _add_number(bubble, "--ranks", 4, "ranks, as processes on this machine")
    _add_number(bubble, "--micro-batches", 8, "micro-batches of a step")
    _add_number(bubble, "--rounds", 3, "rounds, in each of which every schedule runs once")
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


def _bubble(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.bubble import BubbleOptions, parse_costs, run_bubble_command
    from hpc_train.config.parallel import SCHEDULES

    a = arguments
    schedules = tuple(dict.fromkeys(a.schedule or SCHEDULES))
    options = BubbleOptions(
        schedules=schedules,
        costs=parse_costs(a.costs, schedules),
        ranks=a.ranks,
        micro_batches=a.micro_batches,
        rounds=a.rounds,
        milliseconds=a.milliseconds,
    )
    return run_bubble_command(options, a.json)


def _add_collectives(kinds: CommandGroup) -> None:
    from hpc_train.bench.collectives.definitions import ALGORITHMS
    from hpc_train.bench.collectives.options import BACKENDS, CollectivesOptions

    collectives = _add_benchmark(
        kinds,
        "collectives",
        "measure collectives on every mesh axis, and the network's latency and bandwidth",
        _collectives,
    )
    usual, add = CollectivesOptions(), collectives.add_argument
    add_overrides(collectives, config_dir=False)
    add("--min", default=usual.smallest, metavar="SIZE", help=f"smallest size in bytes (default {usual.smallest})")
    add("--max", default=usual.largest, metavar="SIZE", help=f"largest size (default {usual.largest})")
    _add_number(collectives, "--factor", usual.factor, "ratio of each size to the one before")
    _add_number(collectives, "--rounds", usual.rounds, "rounds, in each of which every case runs")
    _add_number(collectives, "--iterations", usual.iterations, "maximum calls of a case in a round")
    add("--operation", action="append", choices=usual.operations, help="measure only this operation; repeatable")
    add(
        "--algorithm",
        action="append",
        choices=ALGORITHMS,
        help="measure only this algorithm of all_reduce; repeatable (library: the backend's own)",
    )
    add("--backend", action="append", choices=BACKENDS, help="measure only this backend; repeatable (default: all)")
    add("--out", metavar="FILE", help="write a calibration file, for cluster.calibration=FILE")
    add("--plot", metavar="FILE", help=_PLOT)
    output = collectives.add_mutually_exclusive_group()
    output.add_argument("--plain", action="store_true", help="print lines like those of nccl-tests")
    output.add_argument("--json", action="store_true", help="print JSON")
    add_examples(
        collectives,
        "hpc-train bench collectives --max 1M --rounds 2",
        "hpc-train bench collectives --operation all_reduce --algorithm library --plain",
        "srun -N4 --ntasks-per-node=4 hpc-train bench collectives cluster=slurm --out calibration.json",
    )


def _collectives(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.collectives.collectives import run_collectives_command
    from hpc_train.bench.collectives.options import CollectivesOptions

    a, usual = arguments, CollectivesOptions()
    options = CollectivesOptions(
        smallest=a.min,
        largest=a.max,
        factor=a.factor,
        rounds=a.rounds,
        iterations=a.iterations,
        operations=tuple(dict.fromkeys(a.operation or usual.operations)),
        algorithms=tuple(dict.fromkeys(a.algorithm or usual.algorithms)),
        backends=tuple(dict.fromkeys(a.backend or ())),
        output="json" if a.json else "plain" if a.plain else "table",
        plot=a.plot,
        out=a.out,
    )
    return run_collectives_command(a.overrides, options)


def _add_gemm(kinds: CommandGroup) -> None:
    from hpc_train.bench.gemm import PRECISIONS, GemmOptions

    gemm = _add_benchmark(kinds, "gemm", "measure matrix products and a copy, for `hpc-train plan calibrate`", _gemm)
    usual = GemmOptions()
    gemm.add_argument(
        "--precision",
        action="append",
        choices=PRECISIONS,
        help=f"format of the matrices; repeatable (default {' and '.join(usual.precisions)})",
    )
    _add_number(gemm, "--min", usual.smallest, "smallest matrix width")
    _add_number(gemm, "--max", usual.largest, "largest matrix width")
    _add_number(gemm, "--rounds", usual.rounds, "rounds, of which the median counts")
    gemm.add_argument("--out", metavar="FILE", help="write the result, for `hpc-train plan calibrate --gemm FILE`")
    gemm.add_argument("--plot", metavar="FILE", help=_PLOT)
    add_json(gemm)
    add_examples(
        gemm, "hpc-train bench gemm --out gemm.json", "hpc-train bench gemm --precision bf16 --max 8192 --plot gemm.png"
    )


def _gemm(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.gemm import GemmOptions, run_gemm_command

    a = arguments
    options = GemmOptions(
        precisions=tuple(dict.fromkeys(a.precision or GemmOptions().precisions)),
        smallest=a.min,
        largest=a.max,
        rounds=a.rounds,
        json=a.json,
        plot=a.plot,
        out=a.out,
    )
    return run_gemm_command(options)


def _add_gpu(kinds: CommandGroup) -> None:
    from hpc_train.bench.gpu.gpu import PARTS, GpuBenchOptions

    what = "measure one GPU: speed against a hand-written loop, parity, memory, copies, waits"
    gpu, usual = _add_benchmark(kinds, "gpu", what, _gpu), GpuBenchOptions()
    add = gpu.add_argument
    add("--part", action="append", choices=PARTS, help="measure only this part; repeatable (default: all)")
    add("--minutes", type=float, default=usual.minutes, metavar="N", help="time for all parts (default 10)")
    add("--out", default=usual.out, metavar="NAME", help=f"write NAME.md and NAME.json (default {usual.out})")
    add("--device", choices=("cuda", "cpu"), default=usual.device, help="cpu: only with --quick (default cuda)")
    add("--quick", action="store_true", help="tiny shapes, to try whether the parts run")
    add("--inside", action="store_true", help=argparse.SUPPRESS)  # a part's own process
    add_json(gpu)
    add_examples(
        gpu,
        "srun --gpus=1 hpc-train bench gpu",
        "hpc-train bench gpu --part blocks_8b --part offload --out h200",
        "hpc-train bench gpu --device cpu --quick",
    )


def _gpu(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.gpu.gpu import PARTS, GpuBenchOptions, run_gpu_command

    a = arguments
    parts = tuple(name for name in PARTS if name in (a.part or PARTS))
    options = GpuBenchOptions(parts, a.device, a.quick, a.minutes, a.out, a.json, a.inside)
    return run_gpu_command(options)


def _add_loss(kinds: CommandGroup) -> None:
    loss = _add_benchmark(kinds, "loss", "compare the loss in chunks of tokens with the loss of all at once", _loss)
    _add_number(loss, "--tokens", 2048, "tokens of a micro-batch")
    _add_number(loss, "--hidden", 512, "width of a hidden state")
    _add_number(loss, "--vocabulary", 32768, "size of the vocabulary")
    _add_number(loss, "--chunk", 256, "tokens of a chunk")
    _add_number(loss, "--rounds", 7, "rounds, in each of which both sides run once")
    loss.add_argument("--precision", choices=("fp64", "fp32", "bf16"), default="fp32", help="format (default fp32)")
    loss.add_argument("--count", action="store_true", help="only count memory, of shapes of any size")
    add_json(loss)
    add_examples(
        loss,
        "hpc-train bench loss",
        "hpc-train bench loss --tokens 8192 --hidden 4096 --vocabulary 128256 --chunk 1024 --precision bf16 --count",
    )


def _loss(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.loss import LossBenchOptions, run_loss_command

    a = arguments
    options = LossBenchOptions(a.tokens, a.hidden, a.vocabulary, a.chunk, a.precision, a.rounds, a.count)
    return run_loss_command(options, a.json)


def _add_data(kinds: CommandGroup) -> None:
    data = _add_benchmark(kinds, "data", "compare `data build` with its tokenizer's library alone", _data)
    data.add_argument("source", nargs="+", metavar="SOURCE", help="files or folders, as for `data build`")
    data.add_argument("--tokenizer", required=True, metavar="PATH", help="tokenizer.json, or a folder with one")
    data.add_argument("--column", default="text", metavar="NAME", help="column of records to read (default text)")
    data.add_argument("--workers", type=whole_number(1), metavar="N", help="processes (default: the processors here)")
    _add_number(data, "--rounds", 3, "rounds, of which the median counts")
    data.add_argument("--datasets", action="store_true", help="measure the map of Hugging Face `datasets`, too")
    add_json(data)
    add_examples(data, "hpc-train bench data web.jsonl --tokenizer models/tiny/")


def _data(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.tokenization import DataBenchOptions, run_data_command

    a = arguments
    return run_data_command(
        DataBenchOptions(tuple(a.source), a.tokenizer, a.column, a.workers, a.rounds, a.datasets, a.json)
    )


def _add_loader(kinds: CommandGroup) -> None:
    what = "compare the speed of the loader of training with two ways to do it with `datasets`"
    loader = _add_benchmark(kinds, "loader", what, _loader)
    loader.add_argument("source", nargs="+", metavar="SOURCE", help="files or folders, as for `data build`")
    loader.add_argument("--tokenizer", required=True, metavar="PATH", help="tokenizer.json, or a folder with one")
    loader.add_argument("--column", default="text", metavar="NAME", help="column of records to read (default text)")
    _add_number(loader, "--sequence-length", 512, "tokens in a sequence")
    _add_number(loader, "--batch", 8, "sequences in a batch")
    _add_number(loader, "--batches", 100, "batches of each side in a round")
    _add_number(loader, "--rounds", 3, "rounds, of which the median counts")
    add_json(loader)
    add_examples(loader, "hpc-train bench loader web.jsonl --tokenizer models/tiny/")


def _loader(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.loading import LoaderBenchOptions, run_loader_command

    a = arguments
    sizes = (a.sequence_length, a.batch, a.batches, a.rounds)
    return run_loader_command(LoaderBenchOptions(tuple(a.source), a.tokenizer, a.column, *sizes, a.json))


def _add_placement(kinds: CommandGroup) -> None:
    placement = _add_benchmark(
        kinds, "placement", "time good, bad and random orders of the nodes of a Slurm allocation", _placement
    )
    add_overrides(placement, config_dir=False)
    _add_number(placement, "--rounds", 3, "rounds, in each of which every order runs once")
    _add_number(placement, "--steps", 8, "steps of a training run, the first 2 of which warm up")
    _add_number(placement, "--seed", 1, "seed of the random order")
    placement.add_argument(
        "--largest",
        metavar="SIZE",
        default="16M",
        help="largest message of the calibration; less on slow links (default 16M)",
    )
    placement.add_argument("--directory", metavar="DIR", help="shared folder for temporary runs (default: here)")
    add_json(placement)
    add_examples(
        placement,
        "salloc -N4 hpc-train bench placement cluster=slurm model=llama_1b parallel=fsdp",
        "hpc-train bench placement cluster=slurm --rounds 1 --largest 1M --json",
    )


def _placement(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.placement import PlacementBenchOptions, run_placement_command

    a = arguments
    options = PlacementBenchOptions(
        rounds=a.rounds, steps=a.steps, seed=a.seed, largest=a.largest, directory=a.directory, json=a.json
    )
    return run_placement_command(a.overrides, options)


def _add_checkpoint(kinds: CommandGroup) -> None:
    checkpoint = _add_benchmark(
        kinds, "checkpoint", "compare save and load with raw I/O, torch.save, DCP and safetensors", _checkpoint
    )
    add = checkpoint.add_argument
    add("--gib", type=float, default=2.0, help="GiB of state over all ranks (default 2)")
    add("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of ranks to measure (default 1 2)")
    add("--tensors", type=int, metavar="N", help="save N equal tensors (default: a transformer with AdamW state)")
    add("--directory", nargs="+", default=["."], metavar="DIR", help="where to write (default: here)")
    _add_number(checkpoint, "--rounds", 5, "rounds, in each of which every side runs once")
    add("--operations", nargs="+", metavar="NAME", help="measure only these: save, stall, load_cold, ...")
    add("--sides", nargs="+", metavar="NAME", help="measure only these: hpc_train, raw_direct, dcp, ...")
    add_json(checkpoint)
    add("--plot", metavar="FILE", help="also plot the result, as .png, .svg or .pdf")
    add_examples(
        checkpoint,
        "hpc-train bench checkpoint --gib 0.5 --ranks 1 --rounds 3",
        "hpc-train bench checkpoint --operations save load_cold --sides hpc_train dcp --directory /scratch",
    )


def _checkpoint(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.checkpoint.checkpoint import OPERATIONS, SIDES, CheckpointBenchOptions, run_checkpoint_command

    a = arguments
    chosen = tuple(a.operations or OPERATIONS), tuple(a.sides or SIDES)
    options = CheckpointBenchOptions(a.gib, tuple(a.ranks), a.tensors, tuple(a.directory), a.rounds, *chosen)
    return run_checkpoint_command(options, a.json, Path(a.plot) if a.plot else None)


def _add_submit(kinds: CommandGroup) -> None:
    submit = _add_benchmark(
        kinds, "submit", "measure how long Slurm takes to accept a large sweep (nothing runs)", _submit
    )
    _add_number(submit, "--points", 1000, "points of the sweep")
    _add_number(submit, "--rounds", 3, "rounds, in each of which every side submits once")
    submit.add_argument("--peers", action="store_true", help="compare with hydra-submitit-launcher, if installed")
    add_json(submit)
    add_examples(submit, "hpc-train bench submit --points 100 --rounds 1", "hpc-train bench submit --peers --json")


def _submit(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.sweep_submission import run_submission_command

    a = arguments
    return run_submission_command(a.points, a.rounds, a.peers, a.json)


def _add_scaling(kinds: CommandGroup) -> None:
    scaling = _add_benchmark(kinds, "scaling", "measure strong and weak scaling, and where more stops paying", _scaling)
    scaling.add_argument("sizes", metavar="SIZES", help="ranks=1,2,4 here, or nodes=1,2,4 with launch=slurm")
    add_overrides(scaling, config_dir=False)
    _add_number(scaling, "--steps", 24, "steps of a run")
    scaling.add_argument("--folder", type=Path, default=Path("scaling"), metavar="DIR", help="folder of the runs")
    scaling.add_argument("--plot", metavar="FILE", help=_PLOT)
    add_json(scaling)
    add_examples(
        scaling,
        "hpc-train bench scaling ranks=1,2,4 model=llama_tiny",
        "hpc-train bench scaling nodes=1,2,4,8 launch=slurm cluster=perlmutter model=llama_1b --plot scaling.svg",
    )


def _scaling(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.scaling import run_scaling_command

    a = arguments
    return run_scaling_command(a.overrides, a.sizes, a.steps, a.folder, a.json, a.plot)


def _add_loop_checkpoint(kinds: CommandGroup) -> None:
    summary = "compare Checkpointer with torch.distributed.checkpoint in one FSDP2 loop"
    bench = _add_benchmark(kinds, "loop-checkpoint", summary, _loop_checkpoint)
    _add_number(bench, "--ranks", 2, "ranks, as processes on this machine")
    _add_number(bench, "--mib", 256, "MiB of parameters and optimizer state, over all ranks")
    _add_number(bench, "--rounds", 5, "rounds, in each of which every side saves and loads once")
    bench.add_argument(
        "--dir", default=None, metavar="DIR", help="a directory of the file system (default: the temporary directory)"
    )
    add_json(bench)
    add_examples(bench, "hpc-train bench loop-checkpoint", "hpc-train bench loop-checkpoint --mib 2048 --dir /scratch")


def _loop_checkpoint(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.checkpoint.loop_checkpoint import LoopCheckpointOptions, run_loop_checkpoint_command

    a = arguments
    return run_loop_checkpoint_command(LoopCheckpointOptions(a.ranks, a.mib, a.rounds, a.dir), a.json)
