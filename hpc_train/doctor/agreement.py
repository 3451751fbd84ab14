"""Whether the ranks of a job are alike and see the same job: functions over their reports."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from hpc_train.doctor.finding import Finding, bad, merged, ok, short, warn
from hpc_train.doctor.report import Report


def agreement(reports: Sequence[Report], launcher: str, needs_mpi: bool) -> Iterator[Finding]:
    """Every check of this file. reports: by rank."""
    hosts = list(dict.fromkeys(report.host for report in reports))
    yield ok("job", f"{len(reports)} ranks on {len(hosts)} nodes, started by {launcher}")
    yield contiguous([report.host for report in reports])
    yield slurm(reports)
    yield mpi(reports, needs_mpi)
    yield versions(reports)
    yield same("config", {str(report.rank): report.config for report in reports})
    yield network(reports)
    yield from devices(reports)
    yield from merged([(report.host, report.findings) for report in reports if report.findings])


def contiguous(hosts: Sequence[str]) -> Finding:
    """The ranks of a node follow one another, and all nodes have equally many. hosts: of each rank."""
    counts = Counter(hosts)
    runs = 1 + sum(before != after for before, after in pairwise(hosts))
    if runs > len(counts):
        advice = "neighbouring ranks should share a node: srun -m block, mpirun --map-by slot (or core), no host twice"
        return warn("order", f"ranks jump between nodes {runs - 1} times, over {len(counts)} nodes", advice)
    if len(set(counts.values())) > 1:
        few, many = min(counts.values()), max(counts.values())
        text = f"some nodes have {few} ranks, others {many}: {short([host for host in counts if counts[host] == few])}"
        return warn("order", text, "axes then straddle nodes unevenly: ask for equal tasks with --ntasks-per-node")
    return ok("order", f"the {next(iter(counts.values()))} ranks of each node follow one another")


def slurm(reports: Sequence[Report]) -> Finding:
    """Slurm counts the same ranks."""
    lines = [report.slurm for report in reports if report.slurm]
    if lines:
        return bad("slurm view", lines[0], "two launchers inside one another: keep one")
    return ok("slurm view", "as the launcher's, or no Slurm step")


def mpi(reports: Sequence[Report], needed: bool) -> Finding:
    """MPI sees the same ranks. needed: the run's configuration uses MPI."""
    lines = [report.mpi for report in reports if report.mpi]
    if not lines:
        return ok("mpi view", "as the launcher's, or MPI does not start here")
    advice = "parallel=server and parallel.reduce_with=mpi need it; nothing else does"
    return bad("mpi view", lines[0], advice) if needed else warn("mpi view", lines[0], advice)


def versions(reports: Sequence[Report]) -> Finding:
    """The same Python, torch and hpc_train everywhere."""
    for name in reports[0].versions:
        found = same(name, {f"{report.host}:{report.rank}": report.versions[name] for report in reports})
        if found.status != "ok":
            return found
    return ok("versions", ", ".join(f"{name} {version}" for name, version in reports[0].versions.items()))


def same(name: str, values: Mapping[str, str]) -> Finding:
    """One value on all ranks."""
    counts = Counter(values.values())
    usual = counts.most_common(1)[0][0]
    odd = [f"{rank} has {value}" for rank, value in values.items() if value != usual]
    if not odd:
        return ok(name, f"{usual} on all ranks")
    advice = "start every rank from the same environment and with the same overrides; a stale module or PATH on a node?"
    return bad(name, f"{usual} on {counts[usual]} of {len(values)} ranks, but {short(odd)}", advice)


def network(reports: Sequence[Report]) -> Finding:
    """Every node is on an interface that others can reach, and on the same one."""
    hosts = {report.host: report for report in reports}
    lost = [host for host, it in hosts.items() if not it.address or _is_loopback(it.address)]
    names = Counter(it.interface for it in hosts.values())
    text = ", ".join(f"{name or 'none'} on {count} nodes" for name, count in names.most_common(4))
    advice = "name the network of the job with cluster.fabric.interface, such as ib0 or hsn0"
    if len(hosts) > 1 and lost:
        return bad("network", f"{text}; others cannot reach {short(lost)}", advice)
    if len(names) > 1:
        return warn("network", text, f"fine if they are one network; else {advice}")
    return ok("network", text)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def devices(reports: Sequence[Report]) -> Iterator[Finding]:
    """All nodes show torch equally many GPUs, and have as many NVLinks and as fast ports as the others."""
    yield _like_most("gpus of ranks", {report.host: str(report.gpus) for report in reports}, "GPUs that torch sees")
    firsts = [report for report in reports if report.findings]
    links = {report.host: ",".join(map(str, sorted(report.nvlinks))) for report in firsts}
    if any(links.values()):
        yield _like_most("nvlinks of nodes", links, "NVLinks of each GPU")
    rates = {report.host: ",".join(f"{rate:g}" for rate in sorted(report.rates)) for report in firsts}
    if any(rates.values()):
        yield _like_most("nics of nodes", rates, "Gbit/s of each port that is up")


def _like_most(name: str, values: Mapping[str, str], what: str) -> Finding:
    counts = Counter(values.values())
    usual = counts.most_common(1)[0][0]
    odd = [f"{host} has {value or 'none'}" for host, value in values.items() if value != usual]
    if odd:
        text = f"{what}: {usual or 'none'} on most nodes, but {short(odd)}"
        return bad(name, text, "the slowest node sets the pace: leave it out (launch.exclude) and have it looked at")
    return ok(name, f"{what}: {usual or 'none'} on each of {len(values)} nodes")
