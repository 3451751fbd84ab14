"""Define the result of a check, merge results of several hosts, and format them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from hpc_train.units import join_first

Status = Literal["ok", "warn", "bad"]
_MARKS: dict[Status, str] = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    """Name of the check: torch, nvlinks, memlock, ..."""
    status: Status
    """ok; warn: it will run, but slower or not everywhere; bad: something is broken."""
    text: str
    """Result in one line."""
    advice: str = ""
    """What the user should do; empty if nothing."""
    where: str = ""
    """Hosts or ranks concerned; empty: all."""


def pass_check(name: str, text: str) -> Finding:
    """Report that a check passed."""
    return Finding(name, "ok", text)


def warn_check(name: str, text: str, advice: str) -> Finding:
    """Report something that slows a run down or does not work everywhere."""
    return Finding(name, "warn", text, advice)


def fail_check(name: str, text: str, advice: str) -> Finding:
    """Report something broken."""
    return Finding(name, "bad", text, advice)


def choose_exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if something is broken, else 0."""
    return int(any(finding.status == "bad" for finding in findings))


def merge_findings(by_host: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Merge equal findings of several hosts, and passed checks whatever their text (that of the first host is kept).

    `where` names the hosts of a finding, unless all hosts have it.
    """
    hosts: dict[tuple[str, ...], list[str]] = {}
    first: dict[tuple[str, ...], Finding] = {}
    for host, findings in by_host:
        for finding in findings:
            key = (finding.name, finding.status, "" if finding.status == "ok" else finding.text)
            hosts.setdefault(key, []).append(host)
            first.setdefault(key, finding)
    order = list(dict.fromkeys(key[0] for key in first))
    merged = [
        replace(finding, where="" if len(hosts[key]) >= len(by_host) else join_first(hosts[key]))
        for key, finding in first.items()
    ]
    return sorted(merged, key=lambda finding: order.index(finding.name))


def findings_to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as `doctor --json` prints them."""
    counts = {status: sum(finding.status == status for finding in findings) for status in _MARKS}
    return {
        "ok": choose_exit_code(findings) == 0,
        "counts": counts,
        "findings": [asdict(finding) for finding in findings],
    }


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """Format the findings as lines of text, with advice below those that need it."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        where = f" [{finding.where}]" if finding.where else ""
        lines.append(f"{_MARKS[finding.status]}  {finding.name:<{width}}  {finding.text}{where}")
        if finding.advice and finding.status != "ok":
            lines.append(f"{'':<{width + 8}}{finding.advice}")
    broken, odd = (sum(finding.status == status for finding in findings) for status in ("bad", "warn"))
    return [*lines, f"{broken} broken, {odd} to look at, {len(findings) - broken - odd} in order"]
