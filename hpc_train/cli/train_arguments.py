"""`hpc-train train` and `hpc-train submit`: the same overrides, here or as a job of Slurm."""

from __future__ import annotations

import argparse

from hpc_train.cli.arguments import add_examples, add_json, add_overrides


def add_config_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments that train and submit share: overrides, --cfg and -m."""
    add_overrides(command)
    command.add_argument("--cfg", action="store_true", help="print the composed configuration and exit")
    command.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="run a sweep: an override may list values, as in optim.lr=1e-3,1e-4 or train.seed=range(3)",
    )


def print_config(args: argparse.Namespace) -> int:
    """Print the composed configuration of one run (--cfg)."""
    from hpc_train.config.compose import compose
    from hpc_train.config.plain_config import config_to_yaml
    from hpc_train.errors import UserError

    if args.multirun:
        raise UserError("--cfg: shows one run; leave out -m, or give one value of each override")
    print(config_to_yaml(compose(args.overrides, args.config_dir)), end="")
    return 0


def add_train(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`."""
    add_config_options(command)
    add_examples(
        command,
        "hpc-train train",
        "hpc-train train model=gpt2_tiny train.steps=50 run_dir=runs/first",
        "hpc-train train -m optim.lr=1e-3,3e-4 train.seed='range(3)' run_dir=sweeps/lr",
        "hpc-train train parallel=fsdp launch.ranks=4 --cfg",
    )
    command.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from hpc_train.runtime import stop_request

    # Before the slow imports, so that a SIGTERM that arrives during them is not lost.
    request = stop_request.install_stop_handlers()
    from hpc_train.cli.output import TERMINAL
    from hpc_train.launch.train import train_here

    if args.cfg:
        return print_config(args)
    if args.multirun:
        from hpc_train.launch.sweep.local_sweep import train_sweep

        return train_sweep(args.overrides, args.config_dir, request, TERMINAL)
    return train_here(args.overrides, args.config_dir, request, TERMINAL)


def add_submit(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `submit`."""
    add_config_options(command)
    command.add_argument("--dry-run", action="store_true", help="print the batch script; submit nothing")
    add_json(command)
    command.add_argument(
        "--after", action="append", default=[], metavar="RUN", help="start only when this run is done; repeatable"
    )
    add_examples(
        command,
        "hpc-train submit cluster=perlmutter cluster.nodes=4 launch.account=m1234 model=llama_1b parallel=fsdp",
        "hpc-train submit cluster.nodes=2 launch.partition=debug launch.time_minutes=30 --dry-run",
        "hpc-train submit -m optim.lr=1e-3,3e-4 run_dir=sweeps/lr",
        "hpc-train submit --after runs/first run_dir=runs/second",
    )
    command.set_defaults(run=_submit)


def _submit(args: argparse.Namespace) -> int:
    from hpc_train.cli.submit import submit_command, submit_sweep_command
    from hpc_train.launch.submit import default_to_slurm

    args.overrides = default_to_slurm(args.overrides)
    if args.cfg:
        return print_config(args)
    submit = submit_sweep_command if args.multirun else submit_command
    return submit(args.overrides, args.config_dir, args.dry_run, args.json, args.after)
