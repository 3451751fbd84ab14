"""Check that the ranks of a job are alike and see the same job, from a report of each rank."""

from __future__ import annotations

import hashlib
import ipaddress
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

from hpc_train import __version__
from hpc_train.cluster.spec import Node
from hpc_train.config.plain_config import config_to_yaml
from hpc_train.config.run import RunConfig
from hpc_train.doctor.findings import Finding, fail_check, merge_findings, pass_check, warn_check
from hpc_train.interfaces import Task
from hpc_train.runtime.host_info import compare_with_mpi, compare_with_slurm, read_mpi_rank_and_size
from hpc_train.units import join_first


@dataclass(frozen=True)
class RankReport:
    """Facts about one rank."""

    rank: int
    host: str
    versions: dict[str, str]
    """Versions of Python, torch and hpc_train."""
    config: str
    """Hash of the rank's configuration."""
    interface: str
    """Network interface on which it opens sockets; empty: none."""
    address: str
    gpus: int
    """GPUs that torch sees."""
    slurm: str | None = None
    """How Slurm disagrees with the launcher about the ranks; empty if it does not."""
    mpi: str | None = None
    """How MPI disagrees with the launcher about the ranks; empty if it does not."""
    findings: list[Finding] = field(default_factory=list)
    """Findings about its node, from the first rank there."""
    nvlinks: list[int] = field(default_factory=list)
    """NVLinks of each GPU of its node, from the first rank there."""
    rates: list[float] = field(default_factory=list)
    """Gbit/s of each port of its node that is up, from the first rank there."""


@dataclass(frozen=True)
class RankSpeed:
    """Speed of a rank, measured while all others did the same."""

    product: float
    """Seconds of a matrix product."""
    copy: float
    """Seconds of a copy in the device's memory."""
    device: str
    """cpu or cuda."""


def make_report(
    task: Task,
    config: RunConfig,
    env: Mapping[str, str],
    network: tuple[str, str],
    findings: list[Finding],
    node: Node | None,
) -> RankReport:
    """Make this rank's report. network: (address, interface). findings, node: only on the first rank of a node."""
    import torch

    return RankReport(
        rank=task.process,
        host=task.host,
        versions={"Python": platform.python_version(), "torch": torch.__version__, "hpc_train": __version__},
        # A hash is enough to compare, and configurations are long.
        config=hashlib.sha256(config_to_yaml(config).encode()).hexdigest()[:12],
        address=network[0],
        interface=network[1],
        gpus=torch.cuda.device_count(),
        slurm=compare_with_slurm(task, env),
        mpi=describe_mpi_view(task, env, timedelta(seconds=config.launch.timeout_seconds)),
        findings=findings,
        nvlinks=[gpu.nvlinks or 0 for gpu in node.gpus] if node else [],
        rates=[nic.gbit_s for nic in node.nics if nic.active and nic.gbit_s] if node else [],
    )


def describe_mpi_view(task: Task, env: Mapping[str, str], timeout: timedelta) -> str | None:
    """Say how MPI sees this process if it differs from the launcher's view; None if both agree. A collective.

    MPI is asked only if the environment has its variables: without them each process would be a world of its own, and
    some libraries abort.
    """
    # Importing MPI without a launcher may abort the process in Open MPI, so the environment is asked first.
    has_mpi_variables = any(name.startswith(("PMIX_", "PMI_", "OMPI_COMM_WORLD_")) for name in env)
    if has_mpi_variables and (task.launcher == "mpi" or "SLURM_STEP_ID" in env):
        view = read_mpi_rank_and_size(task, timeout)
        return None if view is None else compare_with_mpi(task, view)
    if "SLURM_STEP_ID" in env and task.processes > 1:
        return (
            "srun told MPI nothing (--mpi=none): to MPI every rank is rank 0 of 1; if you use MPI, use srun --mpi=pmix"
        )
    return None


def check_agreement(reports: Sequence[RankReport], launcher: str, needs_mpi: bool) -> Iterator[Finding]:
    """Run all checks on the reports, which are in rank order."""
    hosts = list(dict.fromkeys(report.host for report in reports))
    yield pass_check("job", f"{len(reports)} ranks on {len(hosts)} nodes, started by {launcher}")
    yield check_contiguous([report.host for report in reports])
    yield check_slurm_view(reports)
    yield check_mpi_view(reports, needs_mpi)
    yield check_versions(reports)
    yield check_same("config", {str(report.rank): report.config for report in reports})
    yield check_network(reports)
    yield from check_devices(reports)
    yield from merge_findings([(report.host, report.findings) for report in reports if report.findings])


def check_contiguous(hosts: Sequence[str]) -> Finding:
    """Check that ranks of a node are consecutive and all nodes have equally many. hosts: node of each rank."""
    counts = Counter(hosts)
    # As many runs of equal hosts as hosts: then each host is one block of ranks.
    runs = 1 + sum(before != after for before, after in pairwise(hosts))
    if runs > len(counts):
        advice = "neighbouring ranks should share a node: srun -m block, mpirun --map-by slot (or core), no host twice"
        return warn_check("order", f"ranks jump between nodes {runs - 1} times, over {len(counts)} nodes", advice)
    if len(set(counts.values())) > 1:
        few, many = min(counts.values()), max(counts.values())
        text = (
            f"some nodes have {few} ranks, others {many}: "
            f"{join_first([host for host in counts if counts[host] == few])}"
        )
        return warn_check(
            "order", text, "axes then straddle nodes unevenly: ask for equal tasks with --ntasks-per-node"
        )
    return pass_check("order", f"the {next(iter(counts.values()))} ranks of each node follow one another")


def check_slurm_view(reports: Sequence[RankReport]) -> Finding:
    """Check that Slurm numbers the ranks as the launcher does."""
    lines = [report.slurm for report in reports if report.slurm]
    if lines:
        return fail_check("slurm view", lines[0], "two launchers inside one another: keep one")
    return pass_check("slurm view", "as the launcher's, or no Slurm step")


def check_mpi_view(reports: Sequence[RankReport], needed: bool) -> Finding:
    """Check that MPI numbers the ranks as the launcher does. needed: the configuration uses MPI."""
    lines = [report.mpi for report in reports if report.mpi]
    if not lines:
        return pass_check("mpi view", "as the launcher's, or MPI does not start here")
    advice = "parallel=server and parallel.reduce_with=mpi need it; nothing else does"
    return fail_check("mpi view", lines[0], advice) if needed else warn_check("mpi view", lines[0], advice)


def check_versions(reports: Sequence[RankReport]) -> Finding:
    """Check that all ranks have the same Python, torch and hpc_train."""
    for name in reports[0].versions:
        finding = check_same(name, {f"{report.host}:{report.rank}": report.versions[name] for report in reports})
        if finding.status != "ok":
            return finding
    return pass_check("versions", ", ".join(f"{name} {version}" for name, version in reports[0].versions.items()))


def check_same(name: str, values: Mapping[str, str]) -> Finding:
    """Check that a value is the same on all ranks."""
    counts = Counter(values.values())
    usual = counts.most_common(1)[0][0]
    odd = [f"{rank} has {value}" for rank, value in values.items() if value != usual]
    if not odd:
        return pass_check(name, f"{usual} on all ranks")
    advice = "start every rank from the same environment and with the same overrides; a stale module or PATH on a node?"
    return fail_check(name, f"{usual} on {counts[usual]} of {len(values)} ranks, but {join_first(odd)}", advice)


def check_network(reports: Sequence[RankReport]) -> Finding:
    """Check that all nodes use the same interface, and one that others can reach."""
    hosts = {report.host: report for report in reports}
    lost = [host for host, host_facts in hosts.items() if not host_facts.address or _is_loopback(host_facts.address)]
    names = Counter(host_facts.interface for host_facts in hosts.values())
    text = ", ".join(f"{name or 'none'} on {count} nodes" for name, count in names.most_common(4))
    advice = "name the network of the job with cluster.fabric.interface, such as ib0 or hsn0"
    if len(hosts) > 1 and lost:
        return fail_check("network", f"{text}; others cannot reach {join_first(lost)}", advice)
    if len(names) > 1:
        return warn_check("network", text, f"fine if they are one network; else {advice}")
    return pass_check("network", text)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def check_devices(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Check that all nodes have equally many GPUs and NVLinks, and equally fast ports."""
    yield _check_like_most(
        "gpus of ranks", {report.host: str(report.gpus) for report in reports}, "GPUs that torch sees"
    )
    # Only the first rank of a node has looked at its devices.
    firsts = [report for report in reports if report.findings]
    links = {report.host: ",".join(map(str, sorted(report.nvlinks))) for report in firsts}
    if any(links.values()):
        yield _check_like_most("nvlinks of nodes", links, "NVLinks of each GPU")
    rates = {report.host: ",".join(f"{rate:g}" for rate in sorted(report.rates)) for report in firsts}
    if any(rates.values()):
        yield _check_like_most("nics of nodes", rates, "Gbit/s of each port that is up")


def _check_like_most(name: str, values: Mapping[str, str], what: str) -> Finding:
    counts = Counter(values.values())
    usual = counts.most_common(1)[0][0]
    odd = [f"{host} has {value or 'none'}" for host, value in values.items() if value != usual]
    if odd:
        text = f"{what}: {usual or 'none'} on most nodes, but {join_first(odd)}"
        return fail_check(
            name, text, "the slowest node sets the pace: leave it out (launch.exclude) and have it looked at"
        )
    return pass_check(name, f"{what}: {usual or 'none'} on each of {len(values)} nodes")
