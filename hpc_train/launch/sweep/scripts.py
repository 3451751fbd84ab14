"""The batch script of an array: each element finds its point, or the points that share its nodes, in a frozen list."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpc_train.config.run import RunConfig
from hpc_train.launch import script
from hpc_train.launch.containers import container_of
from hpc_train.launch.request import Request
from hpc_train.launch.share import SHARE
from hpc_train.launch.state.attempts import BEGUN, RESULT
from hpc_train.training.folder import RunFolder

Elements = Sequence[Sequence[str]]
"""The points of each element of an array."""


def of_elements(base: Request, config: RunConfig, sweep: Path, elements: Elements) -> Request:
    """`base`, which is of one of the points as if it were alone, for an array with one point an element."""
    setup = base.parameters["setup"]
    assert setup[0].startswith("run=")
    lines = [*_points(sweep, elements), 'point="${points[$SLURM_ARRAY_TASK_ID]}"', *_ENTER, *setup[1:]]
    return _with(base, setup=[*lines, *_begin(config, '"$point"')])


def of_packs(base: Request, config: RunConfig, sweep: Path, elements: Elements, size: int) -> Request:
    """The same with up to `size` points an element, each a job step of its own beside the others.

    base: for all of them together. config: of one of them, with the CPUs that it has there.
    """
    folder = RunFolder(sweep, sweep / "checkpoints")
    container = container_of(config, folder, base.code.path if base.code else None)
    step = script.step(config, container, _share(base, config, size))
    setup = [
        *_points(sweep, elements),
        *script.FUNCTIONS,
        *_PACK_FUNCTIONS,
        *script.JOB,
        'doing="" why="" then="" state="" stopped=""',
        "runs=() open=() begun=() attempts=()",
        "for point in ${points[$SLURM_ARRAY_TASK_ID]}; do",
        *_indented([*_ENTER, 'runs+=("$run")', "over && continue", *script.ATTEMPT, script.MARK]),
        '  open+=("$point") begun+=("$run") attempts+=("$attempt")',
        "done",
        "trap 'code=$?; each result \"$code\"' EXIT",
        "# The ranks save and stop at these signals; this shell has to outlive them to requeue the job.",
        "trap : TERM USR2",
        "finish() {",
        *_indented(_end()),
        "}",
        '[ "${#open[@]}" -gt 0 ] || finish',
        *script.set_up(config, base.code.python_path if base.code else ()),
        *container.before,
        *_begin(config, '"${open[@]}"'),
        f"cpus=$((${{SLURM_CPUS_ON_NODE:-1}} / {size * config.cluster.ranks_per_node}))",
        '[ "$cpus" -gt 0 ] || cpus=1',
        f'{_CPUS}="$(sed -n "s/^Cpus_allowed_list:[[:space:]]*//p" /proc/self/status)"',
        "beside() (",
        *_indented(_beside(config, size, step)),
        ")",
    ]
    return _with(base, setup=setup, command=_LAUNCH, teardown=["finish"])


def _share(base: Request, config: RunConfig, size: int) -> list[str]:
    """srun's options for the part that one of `size` points has of the job: as many nodes, its ranks, CPUs and GPUs."""
    ranks, node = config.cluster.ranks_per_node, config.cluster.node
    options = ["--exact", f"--nodes={base.nodes}", f"--ntasks={base.nodes * ranks}", f"--ntasks-per-node={ranks}"]
    if not script.cpus_of(config):
        options.append('--cpus-per-task="$cpus"')
    if "gpus_per_node" in base.parameters:
        options.append(f"--gpus-per-node={node.gpus}")
    if "gres" in base.parameters:
        options.append(f"--gres=gpu:{node.gpus}")
    # A step that does not say asks for the memory of the whole job, and the next one then waits for it.
    options.append(f"${{SLURM_MEM_PER_NODE:+--mem=$((SLURM_MEM_PER_NODE / {size}))M}}")
    return [*options, '--job-name="$point"']


def _with(base: Request, command: str | None = None, **parameters: list[str]) -> Request:
    return Request(
        base.nodes,
        base.ranks_per_node,
        base.command if command is None else command,
        {**base.parameters, **parameters},
        base.chain,
        base.export,
        base.code,
    )


def _points(sweep: Path, elements: Elements) -> list[str]:
    """Ids are of letters, digits, dots and dashes."""
    return [
        f"sweep={shlex.quote(str(sweep))}",
        "points=(",
        *(f"  '{' '.join(points)}'" for points in elements),
        ")",
    ]


_ENTER = (
    'run="$sweep/points/$point"',
    '[ ! -d "$sweep/points" ] || { mkdir -p -m 700 "$run" && mkdir -p "$run/logs"; }',
)
"""Nothing is made where the sweep's directory cannot be seen, which the next lines tell."""


def _begin(config: RunConfig, points: str) -> list[str]:
    """Their job.json and config.yaml, from the frozen ones of the sweep."""
    begin = shlex.join(script.python_of(config, False, "-m", "hpc_train.launch.sweep.begin"))
    return ['doing="the reading of points.jsonl"', f'{begin} "$sweep" {points} || exit $?', 'doing=""']


_CPUS = "of_the_job"
_PACK_FUNCTIONS = (
    "# Whether this job has brought the point to its end before: it was requeued for its neighbours.",
    "over() {",
    '  local last; last="$(ls "$run/logs" | grep -Ex "[0-9]+" | sort -n | tail -n 1)"',
    f'  [ -n "$last" ] && grep -q "\\"job_id\\": \\"$job\\"" "$run/logs/$last/{BEGUN}" 2>/dev/null || return 1',
    f'  [ -e "$run/logs/$last/{RESULT}" ] && ! grep -q \'"then": "requeue"\' "$run/logs/$last/{RESULT}"',
    "}",
    "each() {",
    "  local index",
    '  for index in "${!begun[@]}"; do',
    '    run="${begun[index]}" attempt="${attempts[index]}"; logs="$run/logs/$attempt"; "$@"',
    "  done",
    "}",
    "newest() {",
    '  logs="$run/logs/$(ls "$run/logs" | grep -Ex "[0-9]+" | sort -n | tail -n 1)"',
    "}",
)
"""each COMMAND: with `run`, `attempt` and `logs` of every point that begins now, one after the other."""


def _beside(config: RunConfig, size: int, step: str) -> list[str]:
    """One point, in a shell of its own."""
    return [
        "trap : TERM USR2",
        'point="${open[$1]}" run="${begun[$1]}" attempt="${attempts[$1]}"; logs="$run/logs/$attempt"',
        "trap 'result $?' EXIT",
        *script.EXPORTS,
        f'export {SHARE}="$1/{size}/${_CPUS}"',
        step,
        *script.verdict(config),
        'exit "$code"',
    ]


_LAUNCH = 'for index in "${!open[@]}"; do beside "$index" & done; until wait; do [ $? -gt 128 ] || break; done'
"""A signal ends `wait`, not those it waits for."""


def _end() -> list[str]:
    """One requeue if any of them has to go on; the exit code of the first that did not end well."""
    return [
        'code=0 requeue=""',
        'for run in "${runs[@]}"; do',
        "  newest",
        f'  mine="$(sed -n \'s/.*"exit_code": \\([0-9]*\\).*/\\1/p\' "$logs/{RESULT}" 2>/dev/null)"',
        '  [ "$code" -ne 0 ] || code="${mine:-1}"',
        f'  ! grep -q \'"then": "requeue"\' "$logs/{RESULT}" 2>/dev/null || requeue=1',
        "done",
        '[ -z "$requeue" ] || scontrol requeue "$job"',
        'exit "$code"',
    ]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
