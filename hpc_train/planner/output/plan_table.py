"""Format a plan as text: 40 lines of 100 columns that say what to run and why, or everything with --all."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.text import Text

from hpc_train.planner.advice.facts import format_advice
from hpc_train.planner.candidate import STAGES, TIME_PARTS, Candidate
from hpc_train.planner.candidate_text import (
    PART_LABELS,
    describe_candidate,
    describe_layout,
    describe_techniques,
    format_range,
)
from hpc_train.planner.output.plan_json import make_command_words
from hpc_train.planner.plan import Plan
from hpc_train.planner.reliability.projection import Market, Projection
from hpc_train.planner.search.top_candidates import EQUAL_TIME_TOLERANCE
from hpc_train.units import GIB, format_amount, format_percent, format_seconds

MAX_LINES, MAX_COLUMNS = 40, 100
_BAR = 10
"""Columns of the bar of a part that takes a whole step."""
_SMALL_SHARE = 0.005
"""Parts below this share of the total are merged with others."""
_NUMBERS = 35
"""Columns taken by a candidate's numbers; its description is to the right of them."""


@dataclass(frozen=True)
class Section:
    """A group of lines that belong together."""

    lines: list[str]
    style: str = ""
    first: str = ""
    """Style of the first line."""


def format_plan(plan: Plan, show_all: bool) -> Iterator[Text]:
    """Yield the lines to print. show_all: without a limit on their number."""
    for section in _choose_sections(plan, show_all):
        for number, line in enumerate(section.lines):
            yield Text(line, style=section.first if section.first and not number else section.style, overflow="fold")


def _choose_sections(plan: Plan, show_all: bool) -> list[Section]:
    """Return the sections of a plan, most important first; without show_all, as many as fit into MAX_LINES."""
    best = plan.best
    if best is None:
        baselines = (
            [Section(["", _format_title_line("").rstrip()]), _make_baseline_section(plan)] if plan.baselines else []
        )
        return [
            *_explain_no_candidate(plan),
            *baselines,
            *_make_remark_sections(plan, None if show_all else MAX_LINES - 20),
        ]
    top = [
        _make_heading_section(best),
        Section(["", *_format_command(plan, best)], style="cyan"),
        _make_budget_section(best, show_all),
    ]
    if show_all and best.projection:
        top.append(Section(_format_projection(best.projection)))
    if show_all:
        return [*top, *_make_table_sections(plan, len(plan.candidates), show_all), *_make_remark_sections(plan, None)]
    left = MAX_LINES - sum(len(section.lines) for section in top)
    remarks = _make_remark_sections(plan, 7)
    rows = len(plan.candidates)
    tables = _make_table_sections(plan, rows, show_all)
    while rows > 1 and _count_lines(tables) + _count_lines(remarks) > left:
        rows -= 1
        tables = _make_table_sections(plan, rows, show_all)
    if _count_lines(tables) + _count_lines(remarks) > left:
        remarks = _make_remark_sections(plan, max(1, left - _count_lines(tables)))
    return _limit_lines([*top, *tables, *remarks])


def _limit_lines(sections: list[Section]) -> list[Section]:
    """Drop lines from the end until at most MAX_LINES are left, however long the user's overrides are."""
    over = _count_lines(sections) - MAX_LINES
    for section in reversed(sections[3:]):
        dropped = min(over, max(0, len(section.lines) - 1)) if over > 0 else 0
        if dropped:
            del section.lines[-dropped:]
            over -= dropped
    return sections


def _count_lines(sections: Sequence[Section]) -> int:
    return sum(len(section.lines) for section in sections)


def _explain_no_candidate(plan: Plan) -> Iterator[Section]:
    """Explain why there is no candidate."""
    if plan.outside:
        yield Section(["No candidate meets the limits of the plan (deadline, budget, nodes)."], style="bold red")
        return
    yield Section(["Nothing fits: every candidate needs more memory than the device has."], style="bold red")
    yield Section(["Use more nodes (cluster.nodes, plan.nodes), or leave more settings for the plan to choose."])


def _make_remark_sections(plan: Plan, max_lines: int | None) -> list[Section]:
    """Say what was searched, then print advice and notes; with a limit, the last line counts what was left out."""
    blocks = [_wrap(_describe_search(plan, max_lines is None), "")]
    advice = format_advice(plan.advice)
    pairs = zip(advice[::2], advice[1::2], strict=True)
    blocks += [_wrap(why, " " * 9) + _wrap(fix.strip(), " " * 9, " " * 9) for why, fix in pairs]
    blocks += [_wrap(f"note: {note}", " " * 6) for note in _list_notes(plan, max_lines is None)]
    shown = list(blocks[:1])
    for index, block in enumerate(blocks[1:], 1):
        if max_lines is not None and sum(map(len, shown)) + len(block) + (index + 1 < len(blocks)) > max_lines:
            shown.append([f"({len(blocks) - index} more with --all)"])
            break
        shown.append(block)
    return [Section(block, style="dim" if not number else "") for number, block in enumerate(shown)]


def _list_notes(plan: Plan, show_all: bool) -> list[str]:
    projection = plan.best.projection if plan.best else None
    unknown = [] if projection is None else [f"unknown: {line}" for line in projection.unknown]
    return [*plan.notes, *unknown] if show_all else plan.notes


def _wrap(text: str, indent: str, first: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        MAX_COLUMNS,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _describe_search(plan: Plan, show_all: bool) -> str:
    if plan.request.complete:
        return "the layout given by the run; leave out parallel=<option> to search for a better one"
    estimated = (
        f"{plan.estimated:,} estimated, the rest ruled out" if plan.estimated < plan.searched else "all estimated"
    )
    return f"{plan.searched:,} candidates in {plan.seconds:.1f} s, {estimated}{'' if show_all else '; more with --all'}"


def _make_heading_section(best: Candidate) -> Section:
    config = best.config
    nodes = f"{best.nodes} node{'s' * (best.nodes != 1)}"
    where = f"{config.model.name} on {config.cluster.name}, {nodes}, {best.ranks:,} ranks: {describe_layout(best)}"
    batch = f"global batch {best.global_batch:,} x {config.train.sequence_length:,} tokens"
    precision = config.precision.name
    if config.precision.float8 != "none":
        precision += f" with products in 8 bits ({config.precision.float8})"
    words = [f"micro-batch {config.train.micro_batch}", batch, precision, describe_techniques(best)]
    what = ", ".join(filter(None, words))
    lines = [*_wrap(where, "  "), *_wrap(what, "  "), _format_memory_line(best)]
    if best.step is None:
        lines.append("step time: unknown, because the accelerator's speed is (cluster.gpu)")
        return Section(lines, first="bold")
    assert best.tokens_per_second is not None
    rates = (
        f"{format_amount(best.tokens_per_second)} tokens/s per GPU, "
        f"{format_amount(best.tokens_per_second * best.ranks)} total"
    )
    percentiles = f"p10 - p90: {format_seconds(best.step.p10)} - {format_seconds(best.step.p90)}"
    lines += _wrap(
        f"step: {format_seconds(best.step.p50)} ({percentiles}); MFU {format_percent(best.mfu)}, "
        f"HFU {format_percent(best.hfu)}; {rates}",
        "  ",
    )
    if best.projection and best.projection.demand.days is not None:
        lines += _wrap(_describe_costs(best.projection), "  ")
    return Section(lines, first="bold")


def _format_memory_line(best: Candidate) -> str:
    if not best.capacity:
        return f"memory: {best.total / GIB:.1f} GiB on the largest rank; the device's memory is unknown"
    verdict = {"yes": "yes", "maybe": "maybe, within the error of the estimate", "no": "no"}[best.fits]
    return f"fits: {verdict}; {best.total / GIB:.1f} of {best.capacity / GIB:.0f} GiB on the largest rank"


def _describe_costs(projection: Projection) -> str:
    """Summarise the whole run in one line, if its length is known."""
    facts = [f"goodput {format_percent(projection.demand.effective.p50)}"]
    for name, market in (("", projection.demand), ("spot: ", projection.spot)):
        if market is None or market.days is None:
            continue
        facts.append(f"{name}{market.days.p50:.3g} days (p10 - p90: {format_range(market.days)})")
        facts += [f"{format_amount(market.gpu_hours)} GPU-hours"] if market.gpu_hours is not None else []
        if market.money is not None:
            facts.append(
                f"cost {format_amount(market.money.p50)} "
                f"({format_amount(market.money.p10)} - {format_amount(market.money.p90)})"
            )
    facts += ["plan.deadline_days missed"] if projection.late else []
    facts += ["plan.budget exceeded"] if projection.over_budget else []
    return f"whole run: {', '.join(facts)}"


def _format_command(plan: Plan, best: Candidate) -> list[str]:
    """Format the command with line continuations for a shell."""
    words = [shlex.quote(word) for word in make_command_words(plan.overrides, plan.config_dir, best)]
    lines, line = [], " ".join(words[:2])
    for word in words[2:]:
        if len(line) + len(word) + 3 > MAX_COLUMNS:
            lines.append(f"{line} \\")
            line = f"    {word}"
        else:
            line = f"{line} {word}"
    return [*lines, line]


def _make_budget_section(best: Candidate, show_all: bool) -> Section:
    """Show memory by part next to the time of a step by part."""
    left, right = _format_memory(best, show_all), _format_time(best, show_all)
    width = max(len(line) for line in left) + 4
    rows = [f"{one:<{width}}{other}".rstrip() for one, other in zip_longest(left, right, fillvalue="")]
    return Section(["", *rows])


def _format_memory(best: Candidate, show_all: bool) -> list[str]:
    """Show the memory of each stage in GiB."""
    uniform = best.stages[0] == best.stages[1] == best.stages[2]
    shown = range(1) if uniform else range(len(STAGES))
    head = ["GiB"] if uniform else [f"{STAGES[number]}" for number in shown]
    lines = [f"{'memory of a rank' if uniform else 'GiB by stage':<17}" + "".join(f"{name:>8}" for name in head)]
    for name, part in _select_memory_parts(best, show_all).items():
        lines.append(f"{name:<17}" + "".join(f"{part[number] / GIB:>8.2f}" for number in shown))
    total = f"{'total':<17}" + "".join(f"{best.stages[number] / GIB:>8.2f}" for number in shown)
    return [*lines, total + (f" of {best.capacity / GIB:.0f}" if best.capacity else "")]


def _select_memory_parts(best: Candidate, show_all: bool) -> dict[str, tuple[float, float, float]]:
    """Return memory parts by stage; the short form merges parts a user cannot change and drops negligible ones."""
    if show_all:
        return best.memory
    overhead = ("fragmentation", "context")
    state = ("parameters", "gradients", "optimizer", "activations")
    parts = {name: sizes for name, sizes in best.memory.items() if name not in overhead}
    shown = {name: sizes for name, sizes in parts.items() if name in state or max(sizes) >= _SMALL_SHARE * best.total}
    first, middle, last = (sum(sizes) for sizes in zip(*(best.memory[name] for name in overhead), strict=True))
    return {**shown, "allocator, driver": (first, middle, last)}


def _format_time(best: Candidate, show_all: bool) -> list[str]:
    """Show the time of each part of a step and its share."""
    if best.step is None or best.parts is None:
        return []
    lines = [f"{'time of a step':<20}{'':>9} {'share':>6}"]
    other = 0.0
    for name in TIME_PARTS:
        value = best.parts[name]
        if value <= 0 or (not show_all and value < _SMALL_SHARE * best.step.p50):
            other += max(value, 0.0)
            continue
        share = value / best.step.p50
        bar = "#" * round(_BAR * share)
        lines.append(
            f"{PART_LABELS.get(name, name):<20}{format_seconds(value):>9} {format_percent(share):>6} {bar}".rstrip()
        )
    if other > 0:
        lines.append(f"{'other':<20}{format_seconds(other):>9} {format_percent(other / best.step.p50):>6}")
    return lines


def _format_projection(projection: Projection) -> list[str]:
    """Show goodput, checkpoint interval and failures of the whole run."""
    lines = [""]
    for name, market in (("", projection.demand), ("spot: ", projection.spot)):
        if market is not None:
            lines += [f"{name}{key:<{36 - len(name)}} {value}" for key, value in _format_market(market)]
    between = projection.interruption_seconds.through(lambda seconds: seconds / 3600)
    return [*lines, f"{'hours between failures (p10 - p90)':<36} {format_range(between)}"]


def _format_market(market: Market) -> Iterator[tuple[str, str]]:
    yield (
        "goodput with failures and saves",
        f"{format_percent(market.effective.p50)} ({format_range(market.effective, '.1%')})",
    )
    if market.best_every is not None:
        yield "optimal checkpoint.every", str(market.best_every)


def _make_table_sections(plan: Plan, rows: int, show_all: bool) -> list[Section]:
    """Show the candidates, the baselines and, with --all, the Pareto front."""
    sections = []
    several = len({(candidate.ranks, candidate.global_batch) for candidate in plan.candidates}) > 1
    if len(plan.candidates) > 1 or plan.baselines:
        sections.append(_make_candidate_section(plan, plan.candidates[:rows], several))
    if plan.baselines:
        sections.append(_make_baseline_section(plan))
    if show_all and len(plan.front) > 1:
        title = "less memory, longer steps (Pareto front)"
        if len({(candidate.ranks, candidate.global_batch) for candidate in plan.front}) > 1:
            title = "trade-offs of time, memory and GPU-hours (Pareto front)"
        sections.append(Section(["", _format_title_line(title), *_format_candidate_rows(plan, plan.front, several)]))
    return sections


def _make_candidate_section(plan: Plan, shown: Sequence[Candidate], several: bool) -> Section:
    lines = ["", _format_title_line("candidates, best first"), *_format_candidate_rows(plan, shown, several)]
    if plan.ties > 1:
        lines.append(
            f"=  within {EQUAL_TIME_TOLERANCE:.0%} of the fastest, closer than the estimate is accurate: "
            "the simplest comes first"
        )
    if any(candidate.unmeasured and not plan.equals_best(candidate) for candidate in shown):
        lines.append("?  has a technique that hardly any measured run had: preferred only if faster by the error")
    return Section(lines)


def _format_title_line(title: str) -> str:
    return f"{'':>2}{'step':>9}{'':>7}{'GiB':>7}{'fits':>8}  {title}"


def _format_candidate_rows(plan: Plan, shown: Sequence[Candidate], several: bool) -> list[str]:
    lines = []
    for candidate in shown:
        where = f"{candidate.nodes} nodes, batch {candidate.global_batch:,}: " if several else ""
        lines += _format_row(plan, candidate, where + describe_candidate(candidate))
    return lines


def _format_row(plan: Plan, candidate: Candidate | None, what: str) -> list[str]:
    """Format a row: its numbers, and beside them its description, wrapped."""
    text = textwrap.wrap(what, MAX_COLUMNS - _NUMBERS, break_on_hyphens=False) or [""]
    numbers = "" if candidate is None else _format_numbers(plan, candidate)
    return [f"{numbers:<{_NUMBERS}}{text[0]}", *(" " * _NUMBERS + line for line in text[1:])]


def _format_numbers(plan: Plan, candidate: Candidate) -> str:
    best = plan.best
    step, slower = "-", ""
    if candidate.step and candidate.fits != "no":
        step = format_seconds(candidate.step.p50)
        if best and best.step and candidate.settings != best.settings:
            slower = f"{(candidate.step.p50 / candidate.tokens) / (best.step.p50 / best.tokens) - 1:+.1%}"
    mark = "=" if plan.ties > 1 and plan.equals_best(candidate) else "?" if candidate.unmeasured else ""
    return f"{mark:<2}{step:>9}{slower:>7}{candidate.total / GIB:>7.1f}{candidate.fits:>8}"


def _make_baseline_section(plan: Plan) -> Section:
    """Show one row per baseline, with the reason why it is not the best."""
    lines = [f"{'':<{_NUMBERS}}baselines, each in its best variant"]
    for row in plan.baselines:
        if row.candidate is None:
            lines += _format_row(plan, None, f"{row.name}: {row.why}")
            continue
        techniques = describe_techniques(row.candidate)
        mesh = describe_layout(row.candidate).partition(", ")[2] if "HSDP" in row.name or "TP" in row.name else ""
        what = ", ".join(word for word in (mesh, techniques) if word)
        lines += _format_row(plan, row.candidate, f"{row.name}{f' ({what})' if what else ''}: {row.why}")
    return Section(lines)
