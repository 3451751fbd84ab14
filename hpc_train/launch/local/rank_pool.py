"""The local pool: start the ranks of a run on this machine through submitit's local executor, and follow them.

The ranks are held by a process of their own (controller.py). This process shows the progress that they write,
passes the first Ctrl-C or stop signal on, and kills them at the second Ctrl-C.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from submitit.local.local import LocalExecutor, LocalJob

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.command_output import CommandOutput
from hpc_train.launch.local.node_sharing import SHARE_VARIABLE, list_visible_gpus
from hpc_train.launch.rank_entrypoint import ATTEMPT_VARIABLE
from hpc_train.launch.rank_entrypoint import main as run_task
from hpc_train.launch.state.attempts import open_if_regular, write_attempt_marker
from hpc_train.regular_files import parse_json_object
from hpc_train.runtime.rendezvous import RENDEZVOUS_VARIABLE
from hpc_train.runtime.stop_request import StopRequest, block_stop_signals
from hpc_train.terminal import one_line
from hpc_train.training.records.progress_display import Progress, make_progress
from hpc_train.training.records.warning_files import NewWarnings, describe_record
from hpc_train.training.run_directory import RunDirectory, make_files_private, make_submitit_directory


class RankPoolExecutor(LocalExecutor):
    """submitit's local executor with our controller and our task entry."""

    def __init__(
        self,
        folder: RunDirectory,
        attempt: int,
        ranks: int,
        threads: int,
        env: Mapping[str, str],
        wrap: Sequence[str],
    ) -> None:
        super().__init__(folder.submitit)
        self._wrap = wrap
        self._run, self._attempt, self._ranks, self._threads = folder, attempt, ranks, threads
        self._env = env
        self.update_parameters(tasks_per_node=ranks)

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join(
            [*self._wrap, sys.executable, "-u", "-m", "hpc_train.launch.rank_entrypoint", str(self._run.path)]
        )

    def _submit_command(self, command: str) -> LocalJob[Any]:
        logs = self._run.logs(self._attempt)
        arguments = [str(self._run.submitit), str(logs), str(os.getpid())]
        with block_stop_signals():
            process = subprocess.Popen(
                [sys.executable, "-m", "hpc_train.launch.local.controller", *arguments],
                env=self._environment(command, logs),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the launcher, which turns it into a stop that saves
            )
        write_attempt_marker(logs, "local", process.pid)
        return LocalJob(self.folder, str(process.pid), tasks=list(range(self._ranks)), process=process)

    def _environment(self, command: str, logs: Path) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name != SHARE_VARIABLE},
            **self._env,
            # What submitit's Controller and LocalJobEnvironment read. Time limit 0: the controller ends no rank by it.
            "SUBMITIT_LOCAL_NTASKS": str(self._ranks),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": "0",
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_EXECUTOR": "local",
            "OMP_NUM_THREADS": str(self._threads),
            ATTEMPT_VARIABLE: str(self._attempt),
            RENDEZVOUS_VARIABLE: str(logs),
        }


def check_wrap(words: Sequence[str]) -> None:
    """Raise UserError if there is no such program on this machine."""
    if words and shutil.which(words[0]) is None:
        raise UserError(f"launch.wrap={list(words)}: there is no program {words[0]} here")


def start_ranks(
    folder: RunDirectory,
    attempt: int,
    ranks: int,
    threads: int,
    env: Mapping[str, str] | None = None,
    wrap: Sequence[str] = (),
) -> LocalJob[int]:
    """Start the ranks of the job whose spec is in `folder`; returns at once.

    env: more variables for them. wrap: words that start their Python. Raises UserError if there is no such program.
    """
    check_wrap(wrap)
    executor = RankPoolExecutor(folder, attempt, ranks, threads, env or {}, wrap)
    with make_files_private():
        make_submitit_directory(folder)
        return cast("LocalJob[int]", executor.submit(run_task, str(folder.path)))


def count_local_ranks(config: RunConfig) -> int:
    """Return launch.ranks, else the number of GPUs here, else 2."""
    if config.launch.ranks is not None:
        return config.launch.ranks
    return len(list_visible_gpus()) or 2


def count_threads_per_rank(config: RunConfig, ranks: int) -> int:
    """Return launch.threads, else this process's CPUs shared out evenly."""
    return config.launch.threads or max(1, len(os.sched_getaffinity(0)) // ranks)


EXIT_KILLED = 128 + signal.SIGINT
"""Exit code after a second Ctrl-C."""
_POLL_SECONDS = 0.1
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 8.0, 20.0
"""Seconds until a progress line first names the bottleneck, and between two updates of it. An update takes about 10 ms.
"""


class JsonTail:
    """New whole lines of a growing file, as JSON."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield what was appended since the last call."""
        file = open_if_regular(self._path)
        if file is None:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if record := parse_json_object(line):
                    yield record


class WarningPrinter(logging.Handler):
    """Prints warnings, each text once: those of the ranks, and those of this process itself."""

    def __init__(self, output: CommandOutput) -> None:
        super().__init__(logging.WARNING)
        self._output = output
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning of this process."""
        self.print_once("error" if record.levelno >= logging.ERROR else "warning", describe_record(record))

    def print_once(self, level: str, text: str) -> None:
        """Print one line, unless the same text was printed before."""
        if text not in self._shown:
            self._shown.add(text)
            self._output.report(f"{level}: {one_line(text)}")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Print warnings that hpc_train logs in this process, inside the context."""
        logger = logging.getLogger("hpc_train")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)


class ProgressFollower:
    """Shows one attempt of a run as its files grow: rank 0's output, all ranks' warnings, and the progress."""

    def __init__(
        self,
        folder: RunDirectory,
        attempt: int,
        log_every: int,
        output: CommandOutput,
        printer: WarningPrinter | None = None,
    ) -> None:
        self._attempt, self._every, self._output = attempt, log_every, output
        self._warnings, self._printer = NewWarnings(folder.logs(attempt)), printer or WarningPrinter(output)
        self._events, self._metrics = JsonTail(folder.events), JsonTail(folder.metrics)
        self._bar: Progress | None = None
        self._first_step = 0
        self._run, self._pace, self._next_look = folder.path, "", time.monotonic() + _FIRST_LOOK_SECONDS

    def show(self) -> None:
        """Show everything that is new since the last call."""
        for event in self._events.records():
            if event["attempt"] == self._attempt:
                self._show_event(event)
        for warning in self._warnings.read():
            self._printer.print_once(warning.level, warning.text)
        self._show_steps()

    def close(self) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show_steps(self) -> None:
        for record in self._metrics.records() if self._bar is not None else ():
            if record["step"] > self._first_step and self._bar is not None:
                self._bar.show({**record, "pace": self._pace})
        if self._bar is not None and time.monotonic() > self._next_look:
            self._pace = self._output.describe_pace(self._run)
            self._next_look = time.monotonic() + _LOOK_SECONDS

    def _show_event(self, event: dict[str, Any]) -> None:
        self._show_steps()  # those before the event; the last word of a run would otherwise hide its last step
        if event["event"] == "note":
            if event.get("last"):
                self.close()
            self._output.print_result(event["text"])
        elif event["event"] in ("start", "resume"):
            # Only now are the lines of steps that are done again gone from metrics.jsonl.
            self._first_step = event["step"]
            self._bar = make_progress(event["steps"], self._every)


def follow_ranks(
    job: LocalJob[int],
    folder: RunDirectory,
    attempt: int,
    log_every: int,
    stop: StopRequest,
    output: CommandOutput,
    printer: WarningPrinter | None = None,
) -> int:
    """Show the progress of a local job until it ends, and return its exit code.

    The first Ctrl-C and the first stop signal are passed on to the ranks. A second Ctrl-C kills them.
    """
    process, follower = job._process, ProgressFollower(folder, attempt, log_every, output, printer)
    assert process is not None
    try:
        _follow_until_end(process, follower, stop, output)
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)  # the controller began a session of its own
        process.wait()
        return EXIT_KILLED
    finally:
        follower.close()
    code = process.wait()
    return 128 - code if code < 0 else code


def _follow_until_end(
    process: subprocess.Popen[bytes], follower: ProgressFollower, stop: StopRequest, output: CommandOutput
) -> None:
    forwarded = False
    while process.poll() is None:
        follower.show()
        if stop.requested and not forwarded:
            forwarded = True
            output.print_message(f"{stop.signal_name}: asking the ranks to save and stop")
            # SIGUSR2 to the controller, which asks its ranks to stop at the same step.
            process.send_signal(signal.SIGUSR2)
        time.sleep(_POLL_SECONDS)
    follower.show()
