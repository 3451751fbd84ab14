"""Run a logger in a process of its own, so that nothing in its library can stop, slow or outlast the training.

Rank 0 writes lines of JSON to the process: a LoggedRun, the records, and the end. A write never blocks: what does not
fit into the pipe waits in memory, up to a limit. At the end the process gets `loggers.close_seconds`, or 2 s after an
error, and is then killed. If rank 0 dies, the process ends by itself, because its input ends.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, BinaryIO

from hpc_train.config.checks.secret_variables import mask_secrets
from hpc_train.terminal import one_line
from hpc_train.training.loggers.interface import LoggedRun, open_logger

_log = logging.getLogger(__name__)
_MAX_WAITING_BYTES = 8 << 20
"""Records that wait for room in the pipe, at most: about 25,000 steps."""
_STUCK_SECONDS = 600
"""A call of a logger that takes longer ends its process."""
_SECONDS_AFTER_AN_ERROR = 2.0
"""Whoever watches the ranks must learn of the error soon."""
_REASON_BYTES = 4096
"""The end of the process's output, in whose last line the reason of a failure is searched."""


class LoggerProcess:
    """A logger in another process. It warns once if it fails, and takes no records from then on."""

    def __init__(self, name: str, run: LoggedRun, output: Path, close_seconds: float) -> None:
        """Start the process. output: file for what it prints. A process that cannot be started is a warning."""
        self._name, self._output, self._close_seconds = name, output, close_seconds
        self._waiting = bytearray()
        self._dropped_steps = 0
        self._process: subprocess.Popen[bytes] | None = None
        command = [sys.executable, "-P", "-m", __name__, name, str(close_seconds)]
        try:
            with output.open("ab") as file:
                self._process = subprocess.Popen(
                    command,
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,  # Ctrl-C and the signals of a pool are for the ranks
                )
        except OSError as error:
            _log.warning("logger %s: %s; training goes on without it", name, error)
            return
        os.set_blocking(self._pipe.fileno(), False)
        self._send({**asdict(run), "folder": str(run.folder), "shared_folder": _encode_path(run.shared_folder)})

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin

    def add(self, record: Mapping[str, Any]) -> None:
        """Hand over one record without waiting. Beyond the limit records are lost, and the first loss is a warning."""
        if self._process is None:
            return
        if len(self._waiting) > _MAX_WAITING_BYTES:
            self._dropped_steps += 1
            if self._dropped_steps == 1:
                _log.warning("logger %s: does not keep up, or blocks; it misses steps from now on", self._name)
        else:
            self._send(dict(record))
        if self._process is not None and self._process.poll() is not None:
            self._give_up()

    def close(self, failed: bool = False) -> None:
        """Send the end and wait for the process, for at most its `close_seconds`. failed: whether the run did."""
        self.begin_close(failed)
        self.finish_close(time.monotonic(), failed)

    def begin_close(self, failed: bool) -> None:
        """Send the end without waiting, so that several loggers close at the same time."""
        if self._process is not None:
            self._send({"end": True, "failed": failed})

    def finish_close(self, began: float, failed: bool) -> None:
        """Wait for the process until its seconds since `began` (time.monotonic()) are over, and kill it then."""
        if self._process is None:
            return
        seconds = min(self._close_seconds, _SECONDS_AFTER_AN_ERROR) if failed else self._close_seconds
        deadline = began + seconds
        while self._waiting and self._process.poll() is None and (seconds_left := deadline - time.monotonic()) > 0:
            # Wait until the pipe has room again; the process may also end meanwhile.
            select.select([], [self._pipe], [], min(seconds_left, 0.1))
            if not self._write():
                return
        with suppress(OSError):
            self._pipe.close()
        try:
            code = self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            _log.warning(
                "logger %s: not done %g s after the end of the run (%s), and killed; it may lack the last steps",
                self._name,
                seconds,
                "which failed" if failed else "loggers.close_seconds",
            )
            self._kill()
            return
        self._process = None
        if code != 0:
            self._warn(code)
        elif self._dropped_steps:
            _log.warning("logger %s: misses %d steps", self._name, self._dropped_steps)

    def _send(self, value: Mapping[str, Any]) -> None:
        self._waiting += json.dumps(value).encode() + b"\n"
        self._write()

    def _write(self) -> bool:
        """Write what fits into the pipe; returns whether the process still takes input."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self._pipe.fileno(), self._waiting)]
        except BlockingIOError:
            pass  # the pipe is full
        except OSError:
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        """Take no more records, as the process has closed its input or ended; warn with its reason."""
        assert self._process is not None
        with suppress(OSError):
            self._pipe.close()
        try:
            code = self._process.wait(1.0)  # it has closed its input, so it is about to be gone
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
            self._kill()
        self._process = None
        self._waiting.clear()
        self._warn(code)

    def _warn(self, code: int) -> None:
        reason = f"ended with {code}"
        if code == -signal.SIGALRM:
            reason = f"one call took longer than {_STUCK_SECONDS} s"
        elif code > 0:
            reason = _read_last_line(self._output) or reason
        _log.warning("logger %s: %s; training goes on without it (%s)", self._name, reason, self._output)

    def _kill(self) -> None:
        assert self._process is not None
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None


def _encode_path(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _read_last_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _REASON_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        return ""
    return one_line(next((line for line in reversed(lines) if line), ""))


# What follows runs in the logger's process.


def main(name: str, close_seconds: float) -> int:
    """Open the logger and pass on what comes on stdin, until it ends; returns the exit code."""
    os.nice(10)  # the ranks need the processor more
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # rank 0 may have blocked some for a moment
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when the run ends
    with _mask_output():
        try:
            _serve(name, sys.stdin.buffer, close_seconds)
        except Exception as error:
            print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
            return 1
    return 0


def _serve(name: str, lines: BinaryIO, close_seconds: float) -> None:
    """Pass records to a logger until the end; each call of it has a time limit."""
    _end_after(_STUCK_SECONDS)
    logger = open_logger(name, _parse_run(lines.readline()))
    failed = True  # unless rank 0 says otherwise: it may have been killed
    while True:
        _end_after(0)
        line = lines.readline()
        record = json.loads(line) if line.endswith(b"\n") else {"end": True, "failed": True}
        if record.get("end"):
            failed = record["failed"]
            break
        _end_after(_STUCK_SECONDS)
        logger.add(record)
    _end_after(close_seconds + 1.0)  # rank 0 ends it earlier, unless that is gone
    logger.close(failed)


def _parse_run(line: bytes) -> LoggedRun:
    fields = json.loads(line)
    shared = fields["shared_folder"]
    return LoggedRun(
        **{**fields, "folder": Path(fields["folder"]), "shared_folder": None if shared is None else Path(shared)}
    )


def _end_after(seconds: float) -> None:
    """End this process after `seconds`; 0: never. The kernel does it, even if something holds the interpreter."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


@contextmanager
def _mask_output() -> Iterator[None]:
    """Inside this context, what this process and its children print goes to its log file with secrets masked.

    Libraries print the addresses that they cannot reach, with the password in them.
    """
    source, sink = os.pipe()
    log_file = os.dup(sys.stdout.fileno())
    _point_output_to(sink)
    os.close(sink)
    thread = threading.Thread(target=_copy_masked, args=(source, log_file), daemon=True)
    thread.start()
    try:
        yield
    finally:
        _point_output_to(log_file)
        thread.join(1.0)  # a child that still runs keeps the pipe open


def _point_output_to(descriptor: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())


def _copy_masked(source: int, log_file: int) -> None:
    variables = dict(os.environ)
    with open(source, errors="replace") as lines:
        for line in lines:
            with suppress(OSError):  # a full disk
                os.write(log_file, mask_secrets(line, variables).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
