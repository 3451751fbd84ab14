"""`hpc-train bench`: one sub-command for each benchmark; what they do is imported when they run."""

from __future__ import annotations

import argparse

from hpc_train.cli.bench import file_benchmarks, machine_benchmarks, step_benchmarks


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add one sub-command for each benchmark."""
    kinds = command.add_subparsers(dest="bench", required=True, metavar="kind")
    step_benchmarks.add_step(kinds)
    step_benchmarks.add_overlap(kinds)
    step_benchmarks.add_sync(kinds)
    step_benchmarks.add_bubble(kinds)
    machine_benchmarks.add_collectives(kinds)
    machine_benchmarks.add_gemm(kinds)
    machine_benchmarks.add_gpu(kinds)
    step_benchmarks.add_loss(kinds)
    file_benchmarks.add_data(kinds)
    file_benchmarks.add_loader(kinds)
    machine_benchmarks.add_placement(kinds)
    file_benchmarks.add_checkpoint(kinds)
    file_benchmarks.add_loop_checkpoint(kinds)
    machine_benchmarks.add_submit(kinds)
    step_benchmarks.add_scaling(kinds)
