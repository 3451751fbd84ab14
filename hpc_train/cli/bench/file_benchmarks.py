"""Arguments of the benchmarks of data and checkpoints: data, loader, checkpoint, loop-checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpc_train.cli.arguments import CommandGroup, add_examples, add_json, whole_number
from hpc_train.cli.bench.benchmark_options import add_benchmark, add_number


def add_data(kinds: CommandGroup) -> None:
    """Add `bench data`."""
    data = add_benchmark(kinds, "data", "compare `data build` with its tokenizer's library alone", _data)
    data.add_argument("source", nargs="+", metavar="SOURCE", help="files or folders, as for `data build`")
    data.add_argument("--tokenizer", required=True, metavar="PATH", help="tokenizer.json, or a folder with one")
    data.add_argument("--column", default="text", metavar="NAME", help="column of records to read (default text)")
    data.add_argument("--workers", type=whole_number(1), metavar="N", help="processes (default: the processors here)")
    add_number(data, "--rounds", 3, "rounds, of which the median counts")
    data.add_argument("--datasets", action="store_true", help="measure the map of Hugging Face `datasets`, too")
    add_json(data)
    add_examples(data, "hpc-train bench data web.jsonl --tokenizer models/tiny/")


def _data(args: argparse.Namespace) -> int:
    from hpc_train.bench.tokenization import DataBenchOptions, run_data_command

    return run_data_command(
        DataBenchOptions(
            sources=tuple(args.source),
            tokenizer=args.tokenizer,
            column=args.column,
            workers=args.workers,
            rounds=args.rounds,
            datasets=args.datasets,
            json=args.json,
        )
    )


def add_loader(kinds: CommandGroup) -> None:
    """Add `bench loader`."""
    summary = "compare the speed of training's data loader with two ways to use `datasets`"
    loader = add_benchmark(kinds, "loader", summary, _loader)
    loader.add_argument("source", nargs="+", metavar="SOURCE", help="files or folders, as for `data build`")
    loader.add_argument("--tokenizer", required=True, metavar="PATH", help="tokenizer.json, or a folder with one")
    loader.add_argument("--column", default="text", metavar="NAME", help="column of records to read (default text)")
    add_number(loader, "--sequence-length", 512, "tokens in a sequence")
    add_number(loader, "--batch", 8, "sequences in a batch")
    add_number(loader, "--batches", 100, "batches of each side in a round")
    add_number(loader, "--rounds", 3, "rounds, of which the median counts")
    add_json(loader)
    add_examples(loader, "hpc-train bench loader web.jsonl --tokenizer models/tiny/")


def _loader(args: argparse.Namespace) -> int:
    from hpc_train.bench.loading import LoaderBenchOptions, run_loader_command

    sizes = (args.sequence_length, args.batch, args.batches, args.rounds)
    return run_loader_command(LoaderBenchOptions(tuple(args.source), args.tokenizer, args.column, *sizes, args.json))


def add_checkpoint(kinds: CommandGroup) -> None:
    """Add `bench checkpoint`."""
    checkpoint = add_benchmark(
        kinds, "checkpoint", "compare save and load with raw I/O, torch.save, DCP and safetensors", _checkpoint
    )
    add = checkpoint.add_argument
    add("--gib", type=float, default=2.0, help="GiB of state over all ranks (default 2)")
    add("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of ranks to measure (default 1 2)")
    add("--tensors", type=int, metavar="N", help="save N equal tensors (default: a transformer with AdamW state)")
    add("--directory", nargs="+", default=["."], metavar="DIR", help="where to write (default: here)")
    add_number(checkpoint, "--rounds", 5, "rounds, in each of which every side runs once")
    add("--operations", nargs="+", metavar="NAME", help="measure only these: save, stall, load_cold, ...")
    add("--sides", nargs="+", metavar="NAME", help="measure only these: hpc_train, raw_direct, dcp, ...")
    add_json(checkpoint)
    add("--plot", metavar="FILE", help="also plot the result, as .png, .svg or .pdf")
    add_examples(
        checkpoint,
        "hpc-train bench checkpoint --gib 0.5 --ranks 1 --rounds 3",
        "hpc-train bench checkpoint --operations save load_cold --sides hpc_train dcp --directory /scratch",
    )


def _checkpoint(args: argparse.Namespace) -> int:
    from hpc_train.bench.checkpoint.checkpoint import OPERATIONS, SIDES, CheckpointBenchOptions, run_checkpoint_command

    selection = tuple(args.operations or OPERATIONS), tuple(args.sides or SIDES)
    options = CheckpointBenchOptions(
        args.gib, tuple(args.ranks), args.tensors, tuple(args.directory), args.rounds, *selection
    )
    return run_checkpoint_command(options, args.json, Path(args.plot) if args.plot else None)


def add_loop_checkpoint(kinds: CommandGroup) -> None:
    """Add `bench loop-checkpoint`."""
    summary = "compare Checkpointer with torch.distributed.checkpoint in one FSDP2 loop"
    bench = add_benchmark(kinds, "loop-checkpoint", summary, _loop_checkpoint)
    add_number(bench, "--ranks", 2, "ranks, as processes on this machine")
    add_number(bench, "--mib", 256, "MiB of parameters and optimizer state, over all ranks")
    add_number(bench, "--rounds", 5, "rounds, in each of which every side saves and loads once")
    bench.add_argument(
        "--dir", default=None, metavar="DIR", help="a directory of the file system (default: the temporary directory)"
    )
    add_json(bench)
    add_examples(bench, "hpc-train bench loop-checkpoint", "hpc-train bench loop-checkpoint --mib 2048 --dir /scratch")


def _loop_checkpoint(args: argparse.Namespace) -> int:
    from hpc_train.bench.checkpoint.loop_checkpoint import LoopCheckpointOptions, run_loop_checkpoint_command

    return run_loop_checkpoint_command(LoopCheckpointOptions(args.ranks, args.mib, args.rounds, args.dir), args.json)
