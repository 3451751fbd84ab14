"""The command `hpc-train`: parse, call one function, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from hpc_train import __version__
from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.planner.cli import joined

EXIT_INTERRUPTED = 130
_OVERRIDES = "key=value as in conf/, such as model=llama_1b optim.lr=1e-3 train.steps=1000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A UserError becomes one line on stderr and exit code 2."""
    arguments = _parse(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except UserError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"hpc-train: {_plain(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `hpc-train ... | head`
        sys.stderr.close()
        return 141


class _Parser(argparse.ArgumentParser):
    """A parser, and by add_subparsers its sub-commands, whose errors are one line and which all take --debug."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        # Without a default, so that a sub-command does not undo what was given before it.
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"hpc-train: {_plain(message)}; see `{self.prog} --help`\n")


def _plain(text: str) -> str:
    """One line that cannot steer a terminal, whatever names of the user are in it."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before and after options; argparse takes the first row of them only."""
    parser = make_parser()
    words, command_there = _split(joined(sys.argv[1:] if argv is None else argv))
    arguments, rest = parser.parse_known_args(words)
    if command_there:
        arguments.words = command_there
    unknown = [word for word in rest if word.startswith("-")] if hasattr(arguments, "overrides") else rest
    if unknown:
        command = f"`hpc-train {arguments.command} --help`"
        parser.exit(EXIT_USER_ERROR, f"hpc-train: unknown option {_plain(' '.join(unknown))}; see {command}\n")
    if rest:
        arguments.overrides += rest
    return arguments


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before `--` and, of attach, those after it: options between RUN and `--` confuse argparse."""
    if "--" not in words or "attach" not in words[: words.index("--")]:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser: argparse.ArgumentParser = _Parser(
        prog="hpc-train", description="Describe, submit, train, checkpoint and resume PyTorch runs on Slurm clusters."
    )
    parser.set_defaults(debug=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_train(commands)
    _add_submit(commands)
    _add_runs(commands)
    _add_plan(commands)
    _add_data(commands)
    _add_checkpoint(commands)
    _add_topology(commands)
    _add_bench(commands)
    _add_doctor(commands)
    _add_completion(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, description=summary)


def _add_config_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    command.add_argument("--config-dir", metavar="DIR", help="a folder laid out as conf/, whose options are added")
    command.add_argument("--cfg", action="store_true", help="print the composed configuration and stop")


def _add_multirun(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="a sweep: each override may have several values, as in optim.lr=1e-3,1e-4 train.seed=range(3)",
    )


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(commands, "train", "train here; inside srun, torchrun or mpirun, join as a rank")
    _add_config_options(command)
    _add_multirun(command)
    command.set_defaults(run=_train)


def _add_submit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(commands, "submit", "submit the run to Slurm and return at once")
    _add_config_options(command)
    _add_multirun(command)
    command.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
    command.add_argument("--json", action="store_true", help="print the answer as JSON")
    command.add_argument(
        "--after", action="append", default=[], metavar="RUN", help="start when this run is done; repeatable"
    )
    command.set_defaults(run=_submit)


def _add_runs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.launch.arguments import add_arguments

    add_arguments(commands)


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.planner.cli import add_commands

    add_commands(commands)


def _add_data(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.data.cli import add_arguments

    command = _command(commands, "data", "build and inspect token stores")
    add_arguments(command)


def _add_checkpoint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.checkpoint_arguments import add_arguments

    command = _command(commands, "checkpoint", "list, inspect, verify, convert and remove checkpoints")
    add_arguments(command)


def _add_topology(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.topology.cli import add_arguments

    command = _command(commands, "topology", "what a machine is made of, and where ranks go on it")
    add_arguments(command)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(commands, "bench", "measure this machine")
    kinds = command.add_subparsers(dest="bench", required=True, metavar="kind")
    step = kinds.add_parser("step", help="tokens/s of the training step against the shortest hand-written loop")
    step.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    step.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    step.add_argument("--steps", type=int, default=5, help="steps a round and side (default 5)")
    step.add_argument("--json", action="store_true", help="print the result as JSON")
    step.add_argument(
        "--peers", action="store_true", help="every strategy against torch's and, if installed, DeepSpeed"
    )
    step.set_defaults(run=_bench_step)
    _add_bench_overlap(kinds)
    _add_bench_bubble(kinds)
    _add_bench_collectives(kinds)
    _add_bench_gemm(kinds)
    _add_bench_placement(kinds)
    _add_bench_checkpoint(kinds)
    _add_bench_submit(kinds)


def _add_bench_submit(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "handing a large sweep to Slurm: seconds and files; nothing of it runs"
    submit = kinds.add_parser("submit", help=summary, description=summary)
    submit.add_argument("--points", type=int, default=1000, help="of the sweep (default 1000)")
    submit.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    submit.add_argument("--peers", action="store_true", help="beside hydra-submitit-launcher, which must be installed")
    submit.add_argument("--json", action="store_true", help="print the result as JSON")
    submit.set_defaults(run=_bench_submit)


def _add_bench_overlap(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "what asynchronous tensor parallelism hides, over a rate-limited link of two network namespaces"
    overlap = kinds.add_parser("overlap", help=summary, description=summary)
    overlap.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    overlap.add_argument("--steps", type=int, default=1, help="steps a round and side (default 1)")
    overlap.add_argument("--tokens", type=int, default=1024, help="positions of the batch (default 1024)")
    overlap.add_argument("--hidden", type=int, default=1024, help="features of a position (default 1024)")
    overlap.add_argument("--ratio", type=float, default=0.5, help="communication over compute (default 0.5)")
    overlap.add_argument("--rate", type=float, help="Mbit/s of the link, in place of the one that --ratio gives")
    overlap.add_argument("--json", action="store_true", help="print the result as JSON")
    overlap.set_defaults(run=_bench_overlap)


def _add_bench_bubble(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    bubble.set_defaults(run=_bench_bubble)


def _add_bench_collectives(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.bench.collectives.options import add_arguments

    summary = "collectives of every mesh axis, by nccl-tests' definitions; latency and bandwidth of the fabric's levels"
    collectives = kinds.add_parser("collectives", help=summary, description=summary)
    collectives.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    add_arguments(collectives)
    collectives.set_defaults(run=_bench_collectives)


def _add_bench_gemm(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from hpc_train.bench.gemm.command import add_arguments

    summary = "matrix products of many shapes, and a copy, on the device at hand, for `hpc-train plan calibrate`"
    gemm = kinds.add_parser("gemm", help=summary, description=summary)
    add_arguments(gemm)
    gemm.set_defaults(run=_bench_gemm)


def _add_bench_placement(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "in a Slurm allocation: step times of good, bad, random and placed orders of its nodes, and predictions"
    placement = kinds.add_parser("placement", help=summary, description=summary)
    placement.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    placement.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    placement.add_argument("--steps", type=int, default=8, help="of each training, 2 of them to warm up (default 8)")
    placement.add_argument("--seed", type=int, default=1, help="of the random order (default 1)")
    placement.add_argument("--directory", metavar="DIR", help="shared folder for the runs, removed (default: here)")
    placement.add_argument("--json", action="store_true", help="print the result as JSON")
    placement.set_defaults(run=_bench_placement)


def _add_bench_checkpoint(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "save, stall, load and verify against the disk itself, torch.save, DCP and safetensors"
    bench = kinds.add_parser("checkpoint", help=summary, description=summary)
    bench.add_argument("--gib", type=float, default=2.0, help="of state over all ranks (default 2)")
    bench.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes of this machine (default 1 2)")
    bench.add_argument("--tensors", type=int, help="so many equal ones, in place of a transformer and its AdamW state")
    bench.add_argument("--directory", nargs="+", default=["."], metavar="DIR", help="where (default: here)")
    bench.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    bench.add_argument("--json", action="store_true", help="print the result as JSON")
    bench.add_argument("--plot", metavar="FILE", help="draw it too, as .png, .svg or .pdf")
    bench.set_defaults(run=_bench_checkpoint)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(commands, "doctor", "what works here or in this job, what does not, and what to do")
    command.add_argument("overrides", nargs="*", metavar="override", help=_OVERRIDES)
    command.add_argument("--config-dir", metavar="DIR", help="a folder laid out as conf/, whose options are added")
    command.add_argument("--json", action="store_true", help="print what was found as JSON")
    command.set_defaults(run=_doctor)


def _add_completion(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = _command(commands, "completion", 'tab completion: eval "$(hpc-train completion bash)"')
    command.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "query"),
        help="print its script; query: print the completions of a line",
    )
    command.add_argument("words", nargs="*", help="query: `--` and the words of the line after hpc-train")
    command.set_defaults(run=_completion)


def _train(arguments: argparse.Namespace) -> int:
    from hpc_train.runtime import stop

    request = stop.install()  # before anything slow is imported: a signal from now on is kept
    from hpc_train.launch.train import train_here

    if arguments.cfg:
        return _print_config(arguments)
    if arguments.multirun:
        from hpc_train.launch.sweep.local import train_sweep

        return train_sweep(arguments.overrides, arguments.config_dir, request)
    return train_here(arguments.overrides, arguments.config_dir, request)


def _submit(arguments: argparse.Namespace) -> int:
    from hpc_train.launch.submit import submit_command, with_slurm

    arguments.overrides = with_slurm(arguments.overrides)
    if arguments.cfg:
        return _print_config(arguments)
    a = arguments
    if a.multirun:
        from hpc_train.launch.sweep.submit import submit_sweep

        return submit_sweep(a.overrides, a.config_dir, a.dry_run, a.json, a.after)
    return submit_command(a.overrides, a.config_dir, a.dry_run, a.json, a.after)


def _bench_step(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.step import bench_command

    return bench_command(arguments.overrides, arguments.rounds, arguments.steps, arguments.json, arguments.peers)


def _bench_submit(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.submission import submission_command

    a = arguments
    return submission_command(a.points, a.rounds, a.peers, a.json)


def _bench_overlap(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.overlap import Options, overlap_command

    sizes = ("rounds", "steps", "tokens", "hidden", "ratio", "rate")
    return overlap_command(Options(**{name: getattr(arguments, name) for name in sizes}), arguments.json)


def _bench_collectives(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.collectives.command import collectives_command
    from hpc_train.bench.collectives.options import from_arguments

    return collectives_command(arguments.overrides, from_arguments(arguments))


def _bench_gemm(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.gemm.command import from_arguments, gemm_command

    return gemm_command(from_arguments(arguments))


def _bench_placement(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.placement.command import Options, placement_command

    options = Options(*(getattr(arguments, name) for name in ("rounds", "steps", "seed", "directory", "json")))
    return placement_command(arguments.overrides, options)


def _bench_bubble(arguments: argparse.Namespace) -> int:
    from hpc_train.bench.pipeline import Options, bubble_command
    from hpc_train.config.techniques import SCHEDULES

    sizes = ("ranks", "micro_batches", "rounds", "milliseconds")
    schedules = tuple(dict.fromkeys(arguments.schedule or SCHEDULES))
    return bubble_command(Options(schedules, **{name: getattr(arguments, name) for name in sizes}), arguments.json)


def _bench_checkpoint(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from hpc_train.bench.checkpoint.command import checkpoint_command
    from hpc_train.bench.checkpoint.result import Options

    a = arguments
    options = Options(a.gib, tuple(a.ranks), a.tensors, tuple(a.directory), a.rounds)
    return checkpoint_command(options, a.json, Path(a.plot) if a.plot else None)


def _doctor(arguments: argparse.Namespace) -> int:
    from hpc_train.doctor.command import doctor_command

    return doctor_command(arguments.overrides, arguments.config_dir, not arguments.json)


def _completion(arguments: argparse.Namespace) -> int:
    from hpc_train.completion import completions, script

    if arguments.shell != "query":
        print(script(arguments.shell), end="")
        return 0
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    for candidate in completions(make_parser(), joined(words)):
        print(candidate)
    return 0


def _print_config(arguments: argparse.Namespace) -> int:
    from hpc_train.config.compose import compose, to_yaml

    if getattr(arguments, "multirun", False):
        raise UserError("--cfg: shows one run; leave out -m, or give one value of each override")
    print(to_yaml(compose(arguments.overrides, arguments.config_dir)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
