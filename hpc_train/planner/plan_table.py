"""An answer for a person: the best candidate in full, then the others a line each."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hpc_train.planner.advice.result import lines
from hpc_train.planner.answer import Answer
from hpc_train.planner.candidate import GIB, STAGES, TIME_PARTS, Candidate
from hpc_train.planner.outlook import Market, Outlook
from hpc_train.planner.settings import overrides_of
from hpc_train.planner.words import amount, ends, layout, seconds, share, techniques

_BAR = 24
_FITS = {"yes": "green", "maybe": "yellow", "no": "red", "unknown": "yellow"}


def parts(answer: Answer) -> Iterator[RenderableType]:
    """What to print, from top to bottom."""
    best = answer.best
    if best is None:
        yield from _nothing(answer)
    else:
        yield from _best(answer, best)
        if len(answer.candidates) > 1:
            yield _candidates(answer.candidates)
        if len(answer.front) > 1:
            yield _front(answer.front)
    yield Text(_searched(answer), style="dim")
    for line in lines(answer.advice):
        yield Text(line, style="cyan")
    for note in answer.notes:
        yield Text(f"note: {note}", style="yellow")


def _nothing(answer: Answer) -> Iterator[RenderableType]:
    """Why there is no candidate."""
    if answer.outside:
        yield Text("Nothing is within the limits of the plan.", style="bold red")
        return
    yield Text("Nothing fits: no candidate's memory is within that of the device.", style="bold red")
    yield Text("Use more nodes (cluster.nodes, plan.nodes), or free what is fixed.")


def _searched(answer: Answer) -> str:
    if answer.question.whole:
        return "the run as it is given; leave out parallel=<option> to search for a better one"
    return (
        f"{answer.searched:,} candidates in {answer.seconds:.1f} s, {answer.estimated:,} of them estimated, the others "
        "ruled out by bounds"
    )


def _best(answer: Answer, best: Candidate) -> Iterator[RenderableType]:
    config = best.config
    where = f"{config.cluster.name}, {best.nodes} node{'s' * (best.nodes != 1)}, {best.ranks} ranks"
    yield Text(f"{config.model.name} on {where}: {layout(best)}", style="bold")
    more = techniques(best)
    yield Text(
        f"micro-batch {config.train.micro_batch}, global batch {best.global_batch} x {config.train.sequence_length} "
        f"tokens, {config.precision.name}{', ' + more if more else ''}"
    )
    if best.settings:
        yield Text(f"hpc-train train ... {' '.join(overrides_of(best.settings))}", style="cyan", overflow="fold")
    yield _memory(best)
    if best.step is None:
        yield Text("step time: not known, as the accelerator's figures are not (cluster.gpu)", style="yellow")
        return
    yield _time(best)
    yield _rates(answer, best)
    if best.outlook:
        yield _outlook(best.outlook)


def _memory(best: Candidate) -> Table:
    """Of each stage, against the device."""
    one = len({best.stages}) == 1 and best.stages[0] == best.stages[1] == best.stages[2]
    shown = range(1) if one else range(len(STAGES))
    title = f"memory of a rank, GiB: fits {best.fits}"
    table = Table(title=title, title_style=_FITS[best.fits], title_justify="left")
    table.add_column("part")
    for number in shown:
        table.add_column("every stage" if one else f"{STAGES[number]} stage", justify="right")
    for name, part in best.memory.items():
        table.add_row(name, *(f"{part[number] / GIB:.2f}" for number in shown))
    table.add_section()
    table.add_row("total", *(f"{best.stages[number] / GIB:.2f}" for number in shown), style="bold")
    if best.capacity:
        table.add_row("device", *(f"{best.capacity / GIB:.2f}" for _ in shown))
    return table


def _time(best: Candidate) -> Table:
    assert best.step is not None
    assert best.parts is not None
    title = f"step: {seconds(best.step.p50)} (p10 - p90: {seconds(best.step.p10)} - {seconds(best.step.p90)})"
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for name in TIME_PARTS:
        value = best.parts[name]
        if value > 0:
            table.add_row(
                _TIME_WORDS.get(name, name),
                seconds(value),
                share(value / best.step.p50),
                "#" * round(_BAR * value / best.step.p50),
            )
    return table


_TIME_WORDS = {
    "tensor": "tp, exposed",
    "context": "cp, exposed",
    "data": "dp, exposed",
    "pipeline": "pp, exposed",
    "launch": "kernel launches",
    "checkpoint": "checkpoint stalls",
    "offload": "activations to host",
}


def _rates(answer: Answer, best: Candidate) -> Table:
    assert best.tokens_per_second is not None
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("MFU, HFU", f"{share(best.mfu)}, {share(best.hfu)}")
    whole = best.tokens_per_second * best.ranks
    table.add_row("tokens/s", f"{amount(best.tokens_per_second)} a GPU, {amount(whole)} in all")
    if best.nodes > 1:
        told = share(answer.efficiency) if answer.efficiency else "not known: the model does not fit on one node"
        table.add_row("scaling efficiency against one node", told)
    return table


def _outlook(outlook: Outlook) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, market in (("", outlook.demand), ("spot: ", outlook.spot)):
        if market is not None:
            for key, value in _market(market):
                table.add_row(f"{name}{key}", value)
    between = outlook.interruption_seconds.through(lambda it: it / 3600)
    table.add_row("hours between failures (p10 - p90)", ends(between))
    if outlook.late:
        table.add_row("plan.deadline_days", "missed", style="red")
    if outlook.over_budget:
        table.add_row("plan.budget", "exceeded", style="red")
    for line in outlook.unknown:
        table.add_row("not known", line, style="dim")
    return table


def _market(market: Market) -> Iterator[tuple[str, str]]:
    yield "goodput with failures and saves", f"{share(market.effective.p50)} ({ends(market.effective, '.1%')})"
    if market.days is not None:
        yield "days (p10 - p90)", f"{market.days.p50:.3g} ({ends(market.days)})"
    if market.gpu_hours is not None:
        yield "GPU-hours", amount(market.gpu_hours)
    if market.money is not None:
        ends_ = f"{amount(market.money.p10)} - {amount(market.money.p90)}"
        yield "money (p10 - p90)", f"{amount(market.money.p50)} ({ends_})"
    if market.best_every is not None:
        yield "checkpoint.every that wastes least", str(market.best_every)


def _row(it: Candidate) -> tuple[str, ...]:
    step = f"{it.step.p50:.4g} ({ends(it.step)})" if it.step else "-"
    speed = amount(it.tokens_per_second) if it.tokens_per_second else "-"
    return (
        layout(it),
        str(it.config.train.micro_batch),
        techniques(it) or "-",
        f"{it.total / GIB:.1f}",
        it.fits,
        step,
        share(it.mfu),
        speed,
    )


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("layout", "micro", "techniques"):
        table.add_column(name, overflow="fold")
    for name in ("GiB", "fits", "step s (p10 - p90)", "MFU", "tokens/s/GPU"):
        table.add_column(name, justify="right")
    return table


def _candidates(candidates: list[Candidate]) -> Table:
    table = _table("candidates, the best first")
    several = len({(it.ranks, it.global_batch) for it in candidates}) > 1
    if several:
        table.add_column("nodes", justify="right")
        table.add_column("batch", justify="right")
    for it in candidates:
        more = (str(it.nodes), str(it.global_batch)) if several else ()
        table.add_row(*_row(it), *more, style=None if it.fits == "yes" else "yellow")
    return table


def _front(front: list[Candidate]) -> Table:
    table = _table("less memory for more time (Pareto front)")
    for it in sorted(front, key=lambda it: it.total, reverse=True):
        table.add_row(*_row(it))
    return table
