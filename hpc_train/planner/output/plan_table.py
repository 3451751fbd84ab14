"""Print an answer: 40 lines of 100 columns that say what to run and why, or everything with --all."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.text import Text

from hpc_train.planner.advice.facts import format_advice
from hpc_train.planner.candidate import (
    PART_WORDS,
    STAGES,
    TIME_PARTS,
    Candidate,
    describe_layout,
    describe_techniques,
    format_range,
)
from hpc_train.planner.output.plan_json import command_words
from hpc_train.planner.plan import Plan
from hpc_train.planner.reliability.projection import Market, Projection
from hpc_train.planner.search.top_candidates import EQUAL_TIME_TOLERANCE
from hpc_train.units import GIB, format_amount, format_percent, format_seconds

MAX_LINES, MAX_COLUMNS = 40, 100
_BAR = 10
_FITS = {"yes": "green", "maybe": "yellow", "no": "red", "unknown": "yellow"}
_SMALL = 0.005
"""Share of a total below which a part is merged with others."""
_NUMBERS = 35
"""Columns taken by a candidate's numbers; its description stands beside them."""


@dataclass(frozen=True)
class Section:
    """A group of lines that belong together."""

    lines: list[str]
    style: str = ""
    first: str = ""
    """Style of the first line."""


def format_plan(answer: Plan, whole: bool = False) -> Iterator[Text]:
    """Return what to print, one line each, top to bottom; whole: without a limit on lines."""
    for section in _sections(answer, whole):
        for number, line in enumerate(section.lines):
            yield Text(line, style=section.first if section.first and not number else section.style, overflow="fold")


def _sections(answer: Plan, whole: bool) -> list[Section]:
    best = answer.best
    if best is None:
        familiar = [Section(["", _titled("").rstrip()]), _familiar(answer)] if answer.familiar else []
        return [*_nothing(answer), *familiar, *_remarks(answer, None if whole else MAX_LINES - 20)]
    top = [_heading(best), Section(["", *_command(answer, best)], style="cyan"), _budgets(best, whole)]
    if whole and best.outlook:
        top.append(Section(_outlook(best.outlook)))
    if whole:
        return [*top, *_tables(answer, len(answer.candidates), whole), *_remarks(answer, None)]
    left = MAX_LINES - sum(len(it.lines) for it in top)
    remarks = _remarks(answer, 7)
    rows = len(answer.candidates)
    tables = _tables(answer, rows, whole)
    while rows > 1 and _length(tables) + _length(remarks) > left:
        rows -= 1
        tables = _tables(answer, rows, whole)
    if _length(tables) + _length(remarks) > left:
        remarks = _remarks(answer, max(1, left - _length(tables)))
    return _cut([*top, *tables, *remarks])


def _cut(sections: list[Section]) -> list[Section]:
    """Cut to at most LINES lines, however long the user's overrides are."""
    over = _length(sections) - MAX_LINES
    for section in reversed(sections[3:]):
        gone = min(over, max(0, len(section.lines) - 1)) if over > 0 else 0
        if gone:
            del section.lines[-gone:]
            over -= gone
    return sections


def _length(sections: Sequence[Section]) -> int:
    return sum(len(it.lines) for it in sections)


def _nothing(answer: Plan) -> Iterator[Section]:
    """Why there is no candidate."""
    if answer.outside:
        yield Section(["Nothing is within the limits of the plan."], style="bold red")
        return
    yield Section(["Nothing fits: no candidate's memory is within that of the device."], style="bold red")
    yield Section(["Use more nodes (cluster.nodes, plan.nodes), or free what is fixed."])


def _remarks(answer: Plan, most: int | None) -> list[Section]:
    """Return what was searched, advice, and what is unknown: at most so many lines, and how many were left out."""
    told = [_wrapped(_searched(answer, most is None), "")]
    advice = format_advice(answer.advice)
    pairs = zip(advice[::2], advice[1::2], strict=True)
    told += [_wrapped(why, " " * 9) + _wrapped(fix.strip(), " " * 9, " " * 9) for why, fix in pairs]
    told += [_wrapped(f"note: {note}", " " * 6) for note in _notes(answer, most is None)]
    shown = list(told[:1])
    for at, block in enumerate(told[1:], 1):
        if most is not None and sum(map(len, shown)) + len(block) + (at + 1 < len(told)) > most:
            shown.append([f"({len(told) - at} more: --all)"])
            break
        shown.append(block)
    return [Section(block, style="dim" if not number else "") for number, block in enumerate(shown)]


def _notes(answer: Plan, whole: bool) -> list[str]:
    outlook = answer.best.outlook if answer.best else None
    unknown = [] if outlook is None else [f"not known: {line}" for line in outlook.unknown]
    return [*answer.notes, *unknown] if whole else answer.notes


def _wrapped(text: str, indent: str, first: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        MAX_COLUMNS,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _searched(answer: Plan, whole: bool) -> str:
    if answer.question.whole:
        return "the run as it is given; leave out parallel=<option> to search for a better one"
    bounds = (
        f"all but {answer.estimated:,} ruled out by bounds" if answer.estimated < answer.searched else "all estimated"
    )
    return f"{answer.searched:,} candidates in {answer.seconds:.1f} s, {bounds}{'' if whole else '; more: --all'}"


def _heading(best: Candidate) -> Section:
    config, more = best.config, describe_techniques(best)
    nodes = f"{best.nodes} node{'s' * (best.nodes != 1)}"
    where = f"{config.model.name} on {config.cluster.name}, {nodes}, {best.ranks:,} ranks: {describe_layout(best)}"
    batch = f"global batch {best.global_batch:,} x {config.train.sequence_length:,} tokens"
    what = f"micro-batch {config.train.micro_batch}, {batch}, {config.precision.name}{', ' + more if more else ''}"
    found = [*_wrapped(where, "  "), *_wrapped(what, "  "), _memory_line(best)]
    if best.step is None:
        found.append("step time: not known, as the accelerator's figures are not (cluster.gpu)")
        return Section(found, first="bold")
    assert best.tokens_per_second is not None
    rates = (
        f"{format_amount(best.tokens_per_second)} tokens/s a GPU, "
        f"{format_amount(best.tokens_per_second * best.ranks)} in all"
    )
    band = f"p10 - p90: {format_seconds(best.step.p10)} - {format_seconds(best.step.p90)}"
    found += _wrapped(
        f"step: {format_seconds(best.step.p50)} ({band}); MFU {format_percent(best.mfu)}, "
        f"HFU {format_percent(best.hfu)}; {rates}",
        "  ",
    )
    if best.outlook and best.outlook.demand.days is not None:
        found += _wrapped(_costs(best.outlook), "  ")
    return Section(found, first="bold")


def _memory_line(best: Candidate) -> str:
    if not best.capacity:
        return f"memory: {best.total / GIB:.1f} GiB on the rank that needs most; what the device has is not known"
    sure = {"yes": "yes", "maybe": "maybe, within the error of the estimate", "no": "no"}[best.fits]
    return f"fits: {sure}; {best.total / GIB:.1f} of {best.capacity / GIB:.0f} GiB on the rank that needs most"


def _costs(outlook: Projection) -> str:
    """Summarise the whole run in one line, if its length is known."""
    told = [f"goodput {format_percent(outlook.demand.effective.p50)}"]
    for name, market in (("", outlook.demand), ("spot: ", outlook.spot)):
        if market is None or market.days is None:
            continue
        told.append(f"{name}{market.days.p50:.3g} days (p10 - p90: {format_range(market.days)})")
        told += [f"{format_amount(market.gpu_hours)} GPU-hours"] if market.gpu_hours is not None else []
        if market.money is not None:
            told.append(
                f"money {format_amount(market.money.p50)} "
                f"({format_amount(market.money.p10)} - {format_amount(market.money.p90)})"
            )
    told += ["plan.deadline_days missed"] if outlook.late else []
    told += ["plan.budget exceeded"] if outlook.over_budget else []
    return f"whole run: {', '.join(told)}"


def _command(answer: Plan, best: Candidate) -> list[str]:
    """Format the command with line continuations for a shell."""
    words = [shlex.quote(word) for word in command_words(answer.overrides, answer.config_dir, best)]
    found, line = [], " ".join(words[:2])
    for word in words[2:]:
        if len(line) + len(word) + 3 > MAX_COLUMNS:
            found.append(f"{line} \\")
            line = f"    {word}"
        else:
            line = f"{line} {word}"
    return [*found, line]


def _budgets(best: Candidate, whole: bool) -> Section:
    """Show memory by part next to the time of a step by part."""
    left, right = _memory(best, whole), _time(best, whole)
    width = max(len(line) for line in left) + 4
    rows = [f"{one:<{width}}{other}".rstrip() for one, other in zip_longest(left, right, fillvalue="")]
    return Section(["", *rows])


def _memory(best: Candidate, whole: bool) -> list[str]:
    """Show the memory of each stage in GiB."""
    one = best.stages[0] == best.stages[1] == best.stages[2]
    shown = range(1) if one else range(len(STAGES))
    head = ["GiB"] if one else [f"{STAGES[number]}" for number in shown]
    found = [f"{'memory of a rank' if one else 'GiB by stage':<17}" + "".join(f"{it:>8}" for it in head)]
    for name, part in _shown_memory(best, whole).items():
        found.append(f"{name:<17}" + "".join(f"{part[number] / GIB:>8.2f}" for number in shown))
    total = f"{'total':<17}" + "".join(f"{best.stages[number] / GIB:>8.2f}" for number in shown)
    return [*found, total + (f" of {best.capacity / GIB:.0f}" if best.capacity else "")]


def _shown_memory(best: Candidate, whole: bool) -> dict[str, tuple[float, float, float]]:
    """Show parts by stage; the short form merges parts the user cannot change and drops negligible ones."""
    if whole:
        return best.memory
    around = ("fragmentation", "context")
    state = ("parameters", "gradients", "optimizer", "activations")
    rest = {name: it for name, it in best.memory.items() if name not in around}
    found = {name: it for name, it in rest.items() if name in state or max(it) >= _SMALL * best.total}
    first, middle, last = (sum(it) for it in zip(*(best.memory[name] for name in around), strict=True))
    return {**found, "allocator, driver": (first, middle, last)}


def _time(best: Candidate, whole: bool) -> list[str]:
    """Show the seconds of each part of a step."""
    if best.step is None or best.parts is None:
        return []
    found = [f"{'time of a step':<20}{'':>9} {'share':>6}"]
    rest = 0.0
    for name in TIME_PARTS:
        value = best.parts[name]
        if value <= 0 or (not whole and value < _SMALL * best.step.p50):
            rest += max(value, 0.0)
            continue
        part = value / best.step.p50
        bar = "#" * round(_BAR * part)
        found.append(
            f"{PART_WORDS.get(name, name):<20}{format_seconds(value):>9} {format_percent(part):>6} {bar}".rstrip()
        )
    if rest > 0:
        found.append(f"{'other':<20}{format_seconds(rest):>9} {format_percent(rest / best.step.p50):>6}")
    return found


def _outlook(outlook: Projection) -> list[str]:
    """Show everything known about the whole run."""
    found = [""]
    for name, market in (("", outlook.demand), ("spot: ", outlook.spot)):
        if market is not None:
            found += [f"{name}{key:<{36 - len(name)}} {value}" for key, value in _market(market)]
    between = outlook.interruption_seconds.through(lambda it: it / 3600)
    return [*found, f"{'hours between failures (p10 - p90)':<36} {format_range(between)}"]


def _market(market: Market) -> Iterator[tuple[str, str]]:
    yield (
        "goodput with failures and saves",
        f"{format_percent(market.effective.p50)} ({format_range(market.effective, '.1%')})",
    )
    if market.best_every is not None:
        yield "checkpoint.every that wastes least", str(market.best_every)


def _tables(answer: Plan, rows: int, whole: bool) -> list[Section]:
    """Show the candidates, the familiar layouts and, with --all, candidates that need less memory."""
    found = []
    several = len({(it.ranks, it.global_batch) for it in answer.candidates}) > 1
    if len(answer.candidates) > 1 or answer.familiar:
        found.append(_candidates(answer, answer.candidates[:rows], several))
    if answer.familiar:
        found.append(_familiar(answer))
    if whole and len(answer.front) > 1:
        title = "less memory for more time (Pareto front)"
        if len({(it.ranks, it.global_batch) for it in answer.front}) > 1:
            title = "time, memory or GPU-hours for one another (Pareto front)"
        found.append(Section(["", _titled(title), *_rows(answer, answer.front, several)]))
    return found


def _candidates(answer: Plan, shown: Sequence[Candidate], several: bool) -> Section:
    found = ["", _titled("candidates, the best first"), *_rows(answer, shown, several)]
    if answer.ties > 1:
        found.append(
            f"=  within {EQUAL_TIME_TOLERANCE:.0%} of the quickest: no estimate tells them apart, "
            "and the simplest is first"
        )
    return Section(found)


def _titled(title: str) -> str:
    return f"{'':>2}{'step':>9}{'':>7}{'GiB':>7}{'fits':>8}  {title}"


def _rows(answer: Plan, shown: Sequence[Candidate], several: bool) -> list[str]:
    found = []
    for it in shown:
        where = f"{it.nodes} nodes, batch {it.global_batch:,}: " if several else ""
        more = describe_techniques(it)
        what = f"{where}{describe_layout(it)}, micro-batch {it.config.train.micro_batch}{', ' + more if more else ''}"
        found += _row(answer, it, what)
    return found


def _row(answer: Plan, it: Candidate | None, what: str) -> list[str]:
    """Format a row: its numbers, and its description beside them over as many lines as needed."""
    text = textwrap.wrap(what, MAX_COLUMNS - _NUMBERS, break_on_hyphens=False) or [""]
    numbers = "" if it is None else _numbers(answer, it)
    return [f"{numbers:<{_NUMBERS}}{text[0]}", *(" " * _NUMBERS + line for line in text[1:])]


def _numbers(answer: Plan, it: Candidate) -> str:
    best = answer.best
    step, slower = "-", ""
    if it.step and it.fits != "no":
        step = format_seconds(it.step.p50)
        if best and best.step and it.settings != best.settings:
            slower = f"{(it.step.p50 / it.tokens) / (best.step.p50 / best.tokens) - 1:+.1%}"
    mark = "=" if answer.ties > 1 and answer.alike(it) else ""
    return f"{mark:<2}{step:>9}{slower:>7}{it.total / GIB:>7.1f}{it.fits:>8}"


def _familiar(answer: Plan) -> Section:
    """Show one row per familiar layout, with the reason why it is not the best."""
    found = [f"{'':<{_NUMBERS}}familiar layouts, each at its best"]
    for it in answer.familiar:
        if it.candidate is None:
            found += _row(answer, None, f"{it.name}: {it.why}")
            continue
        more = describe_techniques(it.candidate)
        mesh = describe_layout(it.candidate).partition(", ")[2] if "HSDP" in it.name or "TP" in it.name else ""
        what = ", ".join(word for word in (mesh, more) if word)
        found += _row(answer, it.candidate, f"{it.name}{f' ({what})' if what else ''}: {it.why}")
    return Section(found)
