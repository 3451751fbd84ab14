"""Slurm's command-line clients: run them, parse what they print, and ask about many jobs at once.

Commands are argument lists with a time limit; a missing or silent command gives an Answer, too, with a reason. One call
of squeue lists every job that slurmctld remembers. scontrol and sacct are asked only about the remaining jobs, and less
and less often while nothing changes. Nothing here needs accounting.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.errors import UserError
from hpc_train.launch.state.state_names import State, from_slurm_state

TIMEOUT_SECONDS = 30.0
"""Seconds for one answer; a controller under load may need some."""
_CLIENT_VARIABLES = re.compile(r"(SLURM|SBATCH|SALLOC|SRUN|SQUEUE|SACCT|SINFO|SCANCEL|SCONTROL|PMI|PMIX)_|PMI")
_CLUSTER_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS"})


@dataclass(frozen=True)
class Answer:
    """The answer of a command."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def reason(self) -> str:
        """Return its fatal error, else the first line that it printed, without the program's name."""
        # Warnings come first where a configuration has any; the line that ended the command is the one marked fatal.
        lines = [line.strip() for line in self.err.splitlines() if line.strip()] or [f"exit code {self.code}"]
        line = next((line for line in lines if re.match(r"(\w+: )?fatal: ", line)), lines[0])
        return re.sub(r"^(\w+:? )?(error|fatal): ", "", line)


RunClient = Callable[[Sequence[str]], Answer]


def client_environment(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `env` without the variables of a surrounding job, or of a user's settings, that would change the output.

    The variables that say where the cluster is stay.
    """
    return {
        name: value for name, value in env.items() if name in _CLUSTER_VARIABLES or not _CLIENT_VARIABLES.match(name)
    }


def run_client(command: Sequence[str]) -> Answer:
    """Run one of Slurm's commands. If a command is missing or does not answer in time, the Answer says so."""
    try:
        done = subprocess.run(
            command,
            env=client_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        return Answer(127, err=f"{command[0]} is not on the PATH")
    except subprocess.TimeoutExpired:
        return Answer(124, err=f"{command[0]} gave no answer within {TIMEOUT_SECONDS:g} s")
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handle_signals(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Let `handler` handle these signals inside the context.

    Outside the main thread, Python allows no handlers: no effect.

    A handler that was not set by Python cannot be put back, and stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    earlier = {number: signal.getsignal(number) for number in numbers if in_main_thread}
    # getsignal returns None for a handler that some C library has set.
    replaceable = {number: previous for number, previous in earlier.items() if previous is not None}
    try:
        for number in replaceable:
            signal.signal(number, handler)
        yield
    finally:
        for number, previous in replaceable.items():
            signal.signal(number, previous)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay signals that would end this process, so that no job is submitted without being recorded.

    A terminal's Ctrl-C also ends sbatch itself, which then has submitted nothing.
    """
    received: list[int] = []
    try:
        with handle_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda number, _: received.append(number)):
            yield
    finally:
        # Once: a second Ctrl-C while sbatch ran means the same as the first.
        for number in received[:1]:
            signal.raise_signal(number)


def current_job_id(env: Mapping[str, str]) -> str | None:
    """Return the id of the job that `env` belongs to: `12`, or `12_3` for an array element; None outside of Slurm."""
    if array := env.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{env.get('SLURM_ARRAY_TASK_ID', '0')}"
    return env.get("SLURM_JOB_ID")


_EMPTY_WORDS = ("", "None", "(null)", "N/A", "None assigned")
UNKNOWN_JOB = "Invalid job id specified"
"""slurmctld's answer for a job that it has forgotten, or has never known."""


@dataclass(frozen=True)
class JobRecord:
    """One job, or one element of an array."""

    job_id: str
    """`12`, or `12_3` of an array."""
    raw_id: str
    """The number that Slurm itself gave it; srun knows array elements by this one only."""
    state: str
    """Slurm's word."""
    source: str
    nodes: tuple[str, ...] = ()
    reason: str = ""
    exit_code: int | None = None


def parse_exit_code(text: str) -> int | None:
    """Convert Slurm's `code:signal` to a shell's exit code (128 + n for signal n); None for other texts."""
    match = re.fullmatch(r"(\d{1,5}):(\d{1,3})", text.strip())
    if match is None:
        return None
    code, number = int(match[1]), int(match[2])
    return 128 + number if number else code


def parse_nodes(text: str) -> tuple[str, ...]:
    """Expand a host list into node names; () for Slurm's words for none."""
    if text in _EMPTY_WORDS:
        return ()
    try:
        return tuple(expand_hostlist(text))
    except UserError:
        return (text,)


def parse_word(text: str) -> str:
    """Return the text, or "" for Slurm's words for none."""
    return "" if text in _EMPTY_WORDS else text


_SQUEUE_FORMAT = "%i|%A|%T|%N|%r"


def squeue_command(job_ids: Iterable[str]) -> list[str]:
    """Return the squeue command for all these jobs; it prints a line for each element of an array."""
    ids = ",".join(job_ids)
    return [
        "squeue",
        "--noheader",
        "--array",
        "--all",
        # Also jobs that have ended, as long as slurmctld remembers them (MinJobAge, 300 s by default).
        "--states=all",
        f"--jobs={ids}",
        f"--format={_SQUEUE_FORMAT}",
    ]


def parse_squeue(text: str) -> list[JobRecord]:
    """Parse what squeue printed; lines of another form are skipped."""
    records = []
    for line in text.splitlines():
        # 12_[3-9] stands for elements of an array that have no record of their own yet.
        # At most five fields: the reason comes last and may itself hold a bar.
        fields = [field.strip() for field in line.split("|", 4)]
        if len(fields) == 5 and fields[0] and "[" not in fields[0]:
            job_id, raw, state, where, reason = fields
            records.append(JobRecord(job_id, raw, state, "squeue", parse_nodes(where), parse_word(reason)))
    return records


_SCONTROL_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:]*)=")


def scontrol_command(job_id: str) -> list[str]:
    """Return the scontrol command for one job or for a whole array; scontrol takes one id a call."""
    return ["scontrol", "-o", "show", "job", job_id]


def parse_scontrol(text: str) -> list[JobRecord]:
    """Parse what `scontrol -o show job` printed, a line for each job."""
    shown = (parse_scontrol_fields(line) for line in text.splitlines() if line.startswith("JobId="))
    return [_scontrol_record(values) for values in shown if "[" not in values.get("ArrayTaskId", "")]


def parse_scontrol_fields(line: str) -> dict[str, str]:
    """Split one line of scontrol into keys and values. Values may contain blanks; of equal keys the first counts."""
    fields: dict[str, str] = {}
    keys = list(_SCONTROL_KEY.finditer(line))
    for key, following in zip(keys, [*keys[1:], None], strict=True):
        fields.setdefault(key[1], line[key.end() : following.start() if following else None].strip())
    return fields


def _scontrol_record(values: Mapping[str, str]) -> JobRecord:
    raw, task = values["JobId"], values.get("ArrayTaskId")
    job_id = f"{values['ArrayJobId']}_{task}" if task and task.isdecimal() and "ArrayJobId" in values else raw
    return JobRecord(
        job_id=job_id,
        raw_id=raw,
        state=values.get("JobState", ""),
        source="scontrol",
        nodes=parse_nodes(values.get("NodeList", "")),
        reason=parse_word(values.get("Reason", "")),
        exit_code=parse_exit_code(values.get("ExitCode", "")),
    )


_SACCT_FIELDS = "JobID,JobIDRaw,State,ExitCode,NodeList"


def sacct_command(job_ids: Iterable[str]) -> list[str]:
    """Return the sacct command for all these jobs: no steps, and only the newest run of a requeued job."""
    return [
        "sacct",
        "--allocations",
        "--noheader",
        "--parsable2",
        f"--jobs={','.join(job_ids)}",
        f"--format={_SACCT_FIELDS}",
    ]


def parse_sacct(text: str) -> list[JobRecord]:
    """Parse what sacct printed. Array elements that never started share one line, which is skipped."""
    records = []
    for line in text.splitlines():
        values = line.split("|")
        if len(values) == 5 and "[" not in values[0]:
            job_id, raw, state, code, where = values
            records.append(
                JobRecord(
                    job_id=job_id,
                    raw_id=raw,
                    state=state,
                    source="sacct",
                    nodes=parse_nodes(where),
                    reason="",
                    exit_code=parse_exit_code(code),
                )
            )
    return records


_MAX_SCONTROL_CALLS = 16
"""Calls of scontrol in one poll: it takes one job (or array) a call."""


@dataclass(frozen=True)
class PollResult:
    """Slurm's answers about many jobs."""

    records: dict[str, JobRecord] = field(default_factory=dict)
    """Job id, as the user knows it, to its record."""
    slurm_error: str | None = None
    """Why slurmctld could not be asked; None: it answered, and what is not in `records` it does not know."""


def poll_jobs(job_ids: Iterable[str], ask: RunClient) -> PollResult:
    """Ask Slurm about these jobs, with as few calls as possible; no call if there are none."""
    ids = list(dict.fromkeys(job_ids))
    if not ids:
        return PollResult()
    answer = ask(squeue_command(_whole_arrays(ids)))
    # That it knows none of these jobs is an answer; that it cannot be reached is not.
    answered = answer.code == 0 or UNKNOWN_JOB in answer.err
    records = {record.job_id: record for record in parse_squeue(answer.out)}
    if answered:
        records |= _complete_records(ids, records, ask)
    missing = [job for job in ids if job not in records or _lacks_exit_code(records[job])]
    # slurmctld forgets a job MinJobAge (300 s by default) after its end; the accounting keeps it, where there is one.
    if missing:
        for record in parse_sacct(ask(sacct_command(_whole_arrays(missing))).out):
            if record.job_id not in records or _lacks_exit_code(records[record.job_id]):
                records[record.job_id] = record
    return PollResult({job: records[job] for job in ids if job in records}, None if answered else _no_answer(answer))


def _no_answer(answer: Answer) -> str:
    return f"Slurm does not answer: {answer.reason}"


def _whole_arrays(job_ids: Sequence[str]) -> list[str]:
    """Replace array elements by their array: Slurm then gets one id instead of a thousand."""
    return list(dict.fromkeys(job.partition("_")[0] for job in job_ids))


def _lacks_exit_code(record: JobRecord) -> bool:
    """Whether a record says that a job failed, but not with which exit code."""
    return (
        record.exit_code is None
        and from_slurm_state(record.state).ended
        and from_slurm_state(record.state) is not State.DONE
    )


def _complete_records(ids: Sequence[str], records: dict[str, JobRecord], ask: RunClient) -> dict[str, JobRecord]:
    """Return the records of failed jobs that lack an exit code, with that code."""
    bare = [job for job in ids if job in records and _lacks_exit_code(records[job])]
    completed: dict[str, JobRecord] = {}
    for base in _whole_arrays(bare)[:_MAX_SCONTROL_CALLS]:
        completed |= {record.job_id: record for record in parse_scontrol(ask(scontrol_command(base)).out)}
    return {job: completed[job] for job in bare if job in completed}


_MIN_SECONDS, _MAX_SECONDS = 2.0, 60.0
"""Seconds between two polls."""


@dataclass
class Backoff:
    """Seconds between polls: doubled from `least` to `most`, and `least` again when something has changed."""

    least: float = _MIN_SECONDS
    most: float = _MAX_SECONDS
    _next: float = 0.0

    def seconds(self, changed: bool) -> float:
        """Return how long to wait before the next poll. changed: whether the last poll showed a change."""
        self._next = self.least if changed or not self._next else min(self.most, 2 * self._next)
        return self._next


DEFAULT_ARRAY_SIZE = 1001
"""Slurm's own MaxArraySize, for a controller that does not say."""
_SHOW_CONFIG = ("scontrol", "show", "config")
_ARRAY_LIMITS = (re.compile(r"^MaxArraySize\s*=\s*(\d+)", re.MULTILINE), re.compile(r"\bmax_array_tasks=(\d+)"))


def max_array_size(ask: RunClient) -> int:
    """Return how many elements an array may have on this cluster."""
    answer = ask(_SHOW_CONFIG)
    # max_array_tasks, of SchedulerParameters, may be lower than MaxArraySize, and Slurm applies both.
    limits = [int(match[1]) for limit in _ARRAY_LIMITS if (match := limit.search(answer.out))]
    return min(limits) if answer.code == 0 and limits else DEFAULT_ARRAY_SIZE


def split_evenly(count: int, max_size: int) -> list[range]:
    """Split range(count) into as few ranges of at most `max_size` as possible, of sizes as equal as possible."""
    assert count >= 0
    assert max_size >= 1
    parts = -(-count // max_size)
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]
