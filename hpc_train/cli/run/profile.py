"""`hpc-train profile`: trace some steps operator by operator, of a new run or of one that is running."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cli.arguments import add_examples, add_json, add_overrides, rank_ranges, whole_number
from hpc_train.errors import EXIT_DONE, UserError

if TYPE_CHECKING:
    from hpc_train.launch.state.run_lookup import RunPoint
    from hpc_train.report.profile_tables import Profile
    from hpc_train.training.records.profile_files import TraceFile

_NEW_STEPS = "6:10"
"""Steps of a new run that are traced: after those that warm up."""
_STEPS_TIMED = 20
"""Newest steps, of which the quickest says how far ahead a trace of a running run has to be asked for."""
_STEPS_OF_RUNNING = 5
_MAX_RANKS = 64
"""Ranks that can be traced at once; each writes a file of its own."""
_POLL_SECONDS = 0.5
_WITHOUT = {"checkpoint.every": "0", "train.eval_every": "0"}
"""Settings of a new run that are not given: it is made for its trace alone."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `profile`."""
    add_overrides(command, "a run that is running or was traced, or settings of a new run here, as for `train`")
    command.add_argument(
        "--steps",
        metavar="FIRST:LAST",
        help=f"steps to trace (default: {_NEW_STEPS} of a new run, the next {_STEPS_OF_RUNNING} of a running one)",
    )
    command.add_argument(
        "--ranks", type=rank_ranges, metavar="R", help="ranks that write a trace, as 0,8-15 (default: 0)"
    )
    command.add_argument(
        "--stacks",
        type=whole_number(1),
        metavar="N",
        help="instead of a trace: sample N times which line of Python each rank of a running job executes",
    )
    command.add_argument(
        "--rows", type=whole_number(1), default=12, metavar="N", help="rows of each table (default 12)"
    )
    add_json(command, "print the whole tables as JSON")
    add_examples(
        command,
        "hpc-train profile model=llama_tiny parallel=fsdp --steps 10:14 --ranks 0,1",
        "hpc-train profile runs/first",
        "hpc-train profile 4711 --ranks 0,64 --steps 1200:1204",
        "hpc-train profile 4711 --stacks 20",
    )
    command.set_defaults(run=_profile)


def _profile(args: argparse.Namespace) -> int:
    ranks = [rank for rank_range in args.ranks or () for rank in rank_range]
    if len(ranks) > _MAX_RANKS:
        raise UserError(f"--ranks: are {len(ranks)} ranks; choose at most {_MAX_RANKS}")
    words = args.overrides
    if words and "=" not in words[0] and not words[0].startswith("~"):
        if len(words) > 1:
            raise UserError(f"{words[1]}: a run that exists is traced as it is; leave it out")
        if args.stacks:
            if args.steps or args.ranks:
                raise UserError("--stacks: looks at all ranks, now; leave out --steps and --ranks")
            return sample_run(words[0], args.stacks, args.json)
        return profile_run(words[0], args.steps, ranks or None, args.rows, args.json)
    if args.stacks:
        raise UserError("--stacks: looks at a job that is running; give its run directory or job id")
    steps = args.steps or _NEW_STEPS
    return profile_new_run(words, args.config_dir, steps, ranks or [0], args.rows, args.json)


def profile_new_run(
    words: Sequence[str], config_dir: str | None, steps: str, ranks: list[int], rows: int, as_json: bool
) -> int:
    """Train on this machine up to the last of these steps, and print what they went into; returns the exit code."""
    from hpc_train.runtime import stop_request

    request = stop_request.install_stop_handlers()  # before the slow imports: see `train`
    from hpc_train.cli.output import TERMINAL
    from hpc_train.config.compose import compose
    from hpc_train.config.profile import parse_steps
    from hpc_train.launch.train import train_local_ranks
    from hpc_train.runtime.identity import identify_process
    from hpc_train.training.records.profile_files import list_traces

    settings = [f"profile.steps={steps}", f"profile.ranks={json.dumps(ranks).replace(' ', '')}"]
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    defaults = dict(_WITHOUT)
    if "train.epochs" not in keys:
        defaults["train.steps"] = str(parse_steps(steps, "--steps")[1])
    added = [f"{key}={value}" for key, value in defaults.items() if key not in keys]
    config = compose([*words, *settings, *added], config_dir)
    if config.launch.kind != "local" or identify_process(os.environ) is not None:
        raise UserError(
            f"profile: starts runs of this machine only; use hpc-train submit, or train, with {' '.join(settings)}"
        )
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        ended = train_local_ranks(config, request, TERMINAL)
    return print_profiles(list_traces(ended.folder.path), rows, as_json) if ended.code == EXIT_DONE else ended.code


def profile_run(target: str, steps: str | None, ranks: list[int] | None, rows: int, as_json: bool) -> int:
    """Trace a running run and print its tables; for an ended run, print the tables of its existing traces.

    Raises UserError for a run without traces that has ended or has not started yet.
    """
    from hpc_train.launch.slurm.slurm_cli import run_client
    from hpc_train.launch.state.run_lookup import find_points, require_single
    from hpc_train.training.records.profile_files import list_traces

    point = require_single(find_points(target, run_client), target)
    state = read_state(point)
    if state == "RUNNING":
        return print_profiles(trace_running(point, target, steps, ranks), rows, as_json)
    traces = [trace for trace in list_traces(point.run) if ranks is None or trace.rank in ranks]
    if traces and steps is None:
        return print_profiles(traces, rows, as_json)
    if state == "PENDING":
        raise UserError(f"{target}: waits for its nodes; ask again when it runs, or submit it with profile.steps=10:14")
    raise UserError(f"{target}: is {state} and has no such trace; start one with hpc-train profile or profile.steps=")


def sample_run(target: str, samples: int, as_json: bool) -> int:
    """Print in which lines of Python the ranks of a running job are found; returns the exit code.

    Raises UserError for a run that is not running.
    """
    from hpc_train.cli.output import print_line, print_table
    from hpc_train.launch.slurm.slurm_cli import run_client
    from hpc_train.launch.stack_samples import sample_stacks
    from hpc_train.launch.state.run_facts import gather_facts
    from hpc_train.launch.state.run_lookup import find_points, require_single
    from hpc_train.units import format_percent

    point = require_single(find_points(target, run_client), target)
    if (state := read_state(point)) != "RUNNING":
        raise UserError(f"{target}: is {state}; only ranks that run can be looked at")
    stacks = sample_stacks(gather_facts([point], run_client)[0], samples, run_client)
    if as_json:
        print(json.dumps([asdict(place) for place in stacks.places]))
        return EXIT_DONE
    rows = [
        (place.name, format_percent(place.count / max(stacks.answers, 1)), ", ".join(place.ranks[:8]))
        for place in stacks.places
    ]
    print_table(("line of Python", "share", "ranks"), rows, ("share",))
    print_line(f"{stacks.answers} answers of {samples} looks; the whole stacks are in {stacks.logs}/task-*.log")
    return EXIT_DONE


def read_state(point: RunPoint) -> str:
    """Return the state of a run."""
    from hpc_train.launch.slurm.slurm_cli import run_client
    from hpc_train.launch.state.job_state import decide_state
    from hpc_train.launch.state.run_facts import gather_facts

    return str(decide_state(gather_facts([point], run_client)[0]).state)


def trace_running(point: RunPoint, target: str, steps: str | None, ranks: list[int] | None) -> list[TraceFile]:
    """Ask the ranks of a running job for a trace, and wait for the files. Raises UserError if they cannot come."""
    from hpc_train.cli.output import print_message
    from hpc_train.config.profile import check_ranks, parse_steps
    from hpc_train.launch.state.attempts import read_rank_entries
    from hpc_train.launch.state.progress import read_steps
    from hpc_train.report.run_summary import read_config
    from hpc_train.training.records.profile_files import list_traces, write_request

    config, note = read_config(point.run)
    if config is None:
        raise UserError(f"{target}: {note}")
    if not config.profile.poll_seconds:
        raise UserError(f"{target}: was started with profile.poll_seconds=0, so that its ranks take no request")
    traced_ranks = ranks or [0]
    check_ranks(traced_ranks, len(read_rank_entries(point.run)) or None, "--ranks")
    recorded_steps = read_steps(point.run / "metrics.jsonl")
    newest = int(recorded_steps[-1]["step"]) if recorded_steps else 0
    # The shortest of the newest steps: a rank that sees the request too late would trace other steps than the others.
    seconds = min((float(step["step_seconds"]) for step in recorded_steps[-_STEPS_TIMED:]), default=1.0)
    if steps is not None:
        first, last = parse_steps(steps, "--steps")
        if first <= newest + 1:
            raise UserError(f"--steps {steps}: the run has made step {newest} already; ask for later ones, or for none")
    else:
        first = newest + 2 + math.ceil(config.profile.poll_seconds / max(seconds, 1e-4))
        last = first + _STEPS_OF_RUNNING - 1
    total = config.train.wanted_steps
    if total is not None and last > total:
        raise UserError(f"{target}: step {newest} of {total} is made; its ranks would not see the request in time")
    before = {trace.path for trace in list_traces(point.run)}
    try:
        write_request(point.run, first, last, traced_ranks)
    except OSError as error:
        raise UserError(f"{point.run}: {error.strerror}; only who may write there can ask for a trace") from error
    print_message(f"asked for steps {first} to {last} of rank {', '.join(map(str, traced_ranks))}; waiting")
    return _wait_for_traces(point, before, traced_ranks)


def _wait_for_traces(point: RunPoint, before: set[Path], ranks: Sequence[int]) -> list[TraceFile]:
    from hpc_train.cli.output import print_message
    from hpc_train.training.records.profile_files import list_traces

    next_state = time.monotonic() + 10
    while True:
        new_traces = [trace for trace in list_traces(point.run) if trace.path not in before]
        missing = set(ranks) - {trace.rank for trace in new_traces}
        if not missing:
            return new_traces
        if time.monotonic() > next_state:
            state, next_state = read_state(point), time.monotonic() + 10
            if state != "RUNNING":
                names = ", ".join(map(str, sorted(missing)))
                if not new_traces:
                    raise UserError(f"{point.run}: is {state}, and rank {names} left no trace")
                print_message(f"the run is {state}; no trace of rank {names}")
                return new_traces
        time.sleep(_POLL_SECONDS)


def print_profiles(traces: Sequence[TraceFile], rows: int, as_json: bool) -> int:
    """Print what each trace went into; returns the exit code. Raises UserError for a trace that cannot be read."""
    from hpc_train.cli.output import print_line
    from hpc_train.report.profile_tables import read_profile

    if not traces:
        raise UserError("no trace was written; the log of the rank says why")
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "rank": trace.rank,
                        "attempt": trace.attempt,
                        "first": trace.first,
                        "last": trace.last,
                        "file": str(trace.path),
                        **read_profile(trace).as_json(),
                    }
                    for trace in traces
                ]
            )
        )
        return EXIT_DONE
    for trace in traces:
        print_line(f"rank {trace.rank}, steps {trace.first} to {trace.last}")
        print_profile(read_profile(trace), rows)
        print_line("")
    for trace in traces:
        print_line(f"trace  {trace.path}")
    print_line("open a trace in https://ui.perfetto.dev: docs/profiling.md says how to read it")
    return EXIT_DONE


def print_profile(profile: Profile, rows: int) -> None:
    """Print phases, operators and modules. rows: of each table."""
    from hpc_train.cli.output import print_line, print_table
    from hpc_train.units import format_percent, format_seconds

    def share(seconds: float) -> str:
        return format_percent(seconds / profile.seconds if profile.seconds else 0.0)

    in_operators = sum(row.device if profile.on_device else row.host for row in profile.operators)
    operations = "kernels" if profile.on_device else "operators"
    print_line(
        f"{format_seconds(profile.seconds)} per step while traced; {format_seconds(in_operators)} of it in "
        f"{operations}, of all threads"
    )
    phases = [(name, format_seconds(value), share(value)) for name, value in profile.phases.items()]
    print_table(("phase", "a step", "share"), phases, ("a step", "share"))
    print_line("")
    columns = ("operator", "calls", "own time", "share", *(("on the GPU",) if profile.on_device else ()))
    table = [
        (
            row.name,
            f"{row.calls:.0f}",
            format_seconds(row.host),
            share(row.device if profile.on_device else row.host),
            *((format_seconds(row.device),) if profile.on_device else ()),
        )
        for row in profile.operators[:rows]
    ]
    print_table(columns, table, columns[1:])
    if profile.modules:
        print_line("")
        columns = ("module", "forward", "backward", "share")
        table = [
            (row.name, format_seconds(row.forward), format_seconds(row.backward), share(row.forward + row.backward))
            for row in profile.modules[:rows]
        ]
        print_table(columns, table, columns[1:])
