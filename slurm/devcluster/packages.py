"""Debian packages the cluster is made of."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from .options import Options
from .processes import ClusterError, run

# libpmix-dev: Slurm's PMIx plugin opens libpmix.so, a name that only the development package has.
ALWAYS = ("slurmctld", "slurmd", "slurm-client", "munge", "libpmix-dev", "iproute2", "util-linux", "tini", "nftables")
ACCOUNTING = ("slurmdbd", "mariadb-server")


def needed(options: Options) -> tuple[str, ...]:
    return (*ALWAYS, *(ACCOUNTING if options.accounting else ()))


def install(wanted: Sequence[str], allowed: bool = True) -> None:
    """Install the packages that are missing. Raises ClusterError that lists them if installing is not `allowed`."""
    absent = missing(wanted)
    if not absent:
        return
    if not allowed:
        raise ClusterError(f"missing Debian packages: apt-get install {' '.join(absent)}")
    if shutil.which("apt-get") is None:
        raise ClusterError(f"this is no Debian (no apt-get): install {' '.join(absent)} by your system's means")
    print(f"installing {' '.join(absent)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt_get = ("apt-get", "-y", "-q", "-o", "DPkg::Lock::Timeout=300")
    with daemons_held_back():
        run(*apt_get, "update", check=False, env=environment)  # a dead third-party source is no obstacle
        run(*apt_get, "install", "--no-install-recommends", *absent, env=environment)


def missing(wanted: Sequence[str]) -> list[str]:
    if shutil.which("dpkg-query") is None:
        raise ClusterError("this is no Debian (no dpkg-query): the dev cluster is built from Debian's Slurm packages")
    listed = run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted, check=False)
    present = {line.split()[0] for line in listed.splitlines() if line.endswith(" installed")}
    return [name for name in wanted if name not in present]


@contextlib.contextmanager
def daemons_held_back() -> Iterator[None]:
    """Keep maintainer scripts from starting the packages' own daemons (see invoke-rc.d's policy layer)."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()
