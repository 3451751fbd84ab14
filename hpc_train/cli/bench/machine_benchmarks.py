"""Arguments of the benchmarks of a machine and its cluster: collectives, gemm, gpu, placement, submit."""

from __future__ import annotations

import argparse

from hpc_train.cli.arguments import CommandGroup, add_examples, add_json, add_overrides
from hpc_train.cli.bench.benchmark_options import PLOT_HELP, add_benchmark, add_number


def add_collectives(kinds: CommandGroup) -> None:
    """Add `bench collectives`."""
    from hpc_train.bench.collectives.definitions import ALGORITHMS
    from hpc_train.bench.collectives.options import BACKENDS, CollectivesOptions

    collectives = add_benchmark(
        kinds,
        "collectives",
        "measure collectives on every mesh axis, and the network's latency and bandwidth",
        _collectives,
    )
    defaults, add = CollectivesOptions(), collectives.add_argument
    add_overrides(collectives, config_dir=False)
    add(
        "--min", default=defaults.smallest, metavar="SIZE", help=f"smallest size in bytes (default {defaults.smallest})"
    )
    add("--max", default=defaults.largest, metavar="SIZE", help=f"largest size (default {defaults.largest})")
    add_number(collectives, "--factor", defaults.factor, "ratio of each size to the one before")
    add_number(collectives, "--rounds", defaults.rounds, "rounds, in each of which every case runs")
    add_number(collectives, "--iterations", defaults.iterations, "maximum calls of a case in a round")
    add("--operation", action="append", choices=defaults.operations, help="measure only this operation; repeatable")
    add(
        "--algorithm",
        action="append",
        choices=ALGORITHMS,
        help="measure only this algorithm of all_reduce; repeatable (library: the backend's own)",
    )
    add("--backend", action="append", choices=BACKENDS, help="measure only this backend; repeatable (default: all)")
    add("--out", metavar="FILE", help="write a calibration file, for cluster.calibration=FILE")
    add("--plot", metavar="FILE", help=PLOT_HELP)
    output = collectives.add_mutually_exclusive_group()
    output.add_argument("--plain", action="store_true", help="print lines like those of nccl-tests")
    output.add_argument("--json", action="store_true", help="print JSON")
    add_examples(
        collectives,
        "hpc-train bench collectives --max 1M --rounds 2",
        "hpc-train bench collectives --operation all_reduce --algorithm library --plain",
        "srun -N4 --ntasks-per-node=4 hpc-train bench collectives cluster=slurm --out calibration.json",
    )


def _collectives(args: argparse.Namespace) -> int:
    from hpc_train.bench.collectives.collectives import run_collectives_command
    from hpc_train.bench.collectives.options import CollectivesOptions

    defaults = CollectivesOptions()
    options = CollectivesOptions(
        smallest=args.min,
        largest=args.max,
        factor=args.factor,
        rounds=args.rounds,
        iterations=args.iterations,
        operations=tuple(dict.fromkeys(args.operation or defaults.operations)),
        algorithms=tuple(dict.fromkeys(args.algorithm or defaults.algorithms)),
        backends=tuple(dict.fromkeys(args.backend or ())),
        output="json" if args.json else "plain" if args.plain else "table",
        plot=args.plot,
        out=args.out,
    )
    return run_collectives_command(args.overrides, options)


def add_gemm(kinds: CommandGroup) -> None:
    """Add `bench gemm`."""
    from hpc_train.bench.gemm import PRECISIONS, GemmOptions

    gemm = add_benchmark(kinds, "gemm", "measure matrix products and a copy, for `hpc-train plan calibrate`", _gemm)
    defaults = GemmOptions()
    gemm.add_argument(
        "--precision",
        action="append",
        choices=PRECISIONS,
        help=f"format of the matrices; repeatable (default {' and '.join(defaults.precisions)})",
    )
    add_number(gemm, "--min", defaults.smallest, "smallest matrix width")
    add_number(gemm, "--max", defaults.largest, "largest matrix width")
    add_number(gemm, "--rounds", defaults.rounds, "rounds, of which the median counts")
    gemm.add_argument("--out", metavar="FILE", help="write the result, for `hpc-train plan calibrate --gemm FILE`")
    gemm.add_argument("--plot", metavar="FILE", help=PLOT_HELP)
    add_json(gemm)
    add_examples(
        gemm, "hpc-train bench gemm --out gemm.json", "hpc-train bench gemm --precision bf16 --max 8192 --plot gemm.png"
    )


def _gemm(args: argparse.Namespace) -> int:
    from hpc_train.bench.gemm import GemmOptions, run_gemm_command

    options = GemmOptions(
        precisions=tuple(dict.fromkeys(args.precision or GemmOptions().precisions)),
        smallest=args.min,
        largest=args.max,
        rounds=args.rounds,
        json=args.json,
        plot=args.plot,
        out=args.out,
    )
    return run_gemm_command(options)


def add_gpu(kinds: CommandGroup) -> None:
    """Add `bench gpu`."""
    from hpc_train.bench.gpu.gpu import PARTS, GpuBenchOptions

    summary = "measure one GPU: speed against a hand-written loop, parity, memory, copies, waits"
    gpu, defaults = add_benchmark(kinds, "gpu", summary, _gpu), GpuBenchOptions()
    add = gpu.add_argument
    add("--part", action="append", choices=PARTS, help="measure only this part; repeatable (default: all)")
    add("--minutes", type=float, default=defaults.minutes, metavar="N", help="time for all parts (default 10)")
    add("--out", default=defaults.out, metavar="NAME", help=f"write NAME.md and NAME.json (default {defaults.out})")
    add("--device", choices=("cuda", "cpu"), default=defaults.device, help="cpu: only with --quick (default cuda)")
    add("--quick", action="store_true", help="tiny shapes, to see whether the parts run")
    add("--inside", action="store_true", help=argparse.SUPPRESS)  # a part's own process
    add_json(gpu)
    add_examples(
        gpu,
        "srun --gpus=1 hpc-train bench gpu",
        "hpc-train bench gpu --part blocks_8b --part offload --out h200",
        "hpc-train bench gpu --device cpu --quick",
    )


def _gpu(args: argparse.Namespace) -> int:
    from hpc_train.bench.gpu.gpu import PARTS, GpuBenchOptions, run_gpu_command

    parts = tuple(name for name in PARTS if name in (args.part or PARTS))
    options = GpuBenchOptions(
        parts=parts,
        device=args.device,
        quick=args.quick,
        minutes=args.minutes,
        out=args.out,
        json=args.json,
        inside=args.inside,
    )
    return run_gpu_command(options)


def add_placement(kinds: CommandGroup) -> None:
    """Add `bench placement`."""
    placement = add_benchmark(
        kinds, "placement", "time good, bad and random orders of the nodes of a Slurm allocation", _placement
    )
    add_overrides(placement, config_dir=False)
    add_number(placement, "--rounds", 3, "rounds, in each of which every order runs once")
    add_number(placement, "--steps", 8, "steps of a training run, the first 2 of which warm up")
    add_number(placement, "--seed", 1, "seed of the random order")
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


def _placement(args: argparse.Namespace) -> int:
    from hpc_train.bench.placement import PlacementBenchOptions, run_placement_command

    options = PlacementBenchOptions(
        rounds=args.rounds,
        steps=args.steps,
        seed=args.seed,
        largest=args.largest,
        directory=args.directory,
        json=args.json,
    )
    return run_placement_command(args.overrides, options)


def add_submit(kinds: CommandGroup) -> None:
    """Add `bench submit`."""
    submit = add_benchmark(
        kinds, "submit", "measure how long Slurm takes to accept a large sweep (nothing runs)", _submit
    )
    add_number(submit, "--points", 1000, "points of the sweep")
    add_number(submit, "--rounds", 3, "rounds, in each of which every side submits once")
    submit.add_argument("--peers", action="store_true", help="compare with hydra-submitit-launcher, if installed")
    add_json(submit)
    add_examples(submit, "hpc-train bench submit --points 100 --rounds 1", "hpc-train bench submit --peers --json")


def _submit(args: argparse.Namespace) -> int:
    from hpc_train.bench.sweep_submission import run_submission_command

    return run_submission_command(args.points, args.rounds, args.peers, args.json)
