"""The daemons on the host: munged, MariaDB, slurmdbd, slurmctld."""

from __future__ import annotations

import os
import subprocess

from .processes import ClusterError, run, succeeds, wait_for
from .state import State


def start_munge(state: State) -> None:
    root, log = state.root, state.log("munged")
    key, socket = root / "etc/munge.key", root / "run/munge.sock"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    command = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={socket}",
        f"--pid-file={root}/run/munged.pid",
        f"--seed-file={root}/run/munged.seed",
        f"--log-file={log}",
        "--num-threads=4",
    ]
    process = state.launch("munged", command)
    wait_for("munged", lambda: succeeds("munge", "-n", "-S", socket), 15, log, process)


def start_accounting(state: State) -> None:
    start_mariadb(state)
    # Slurm hands libmariadb no socket path; the library then takes this variable.
    environment = {"SLURM_CONF": str(state.slurm_conf), "MYSQL_UNIX_PORT": f"{state.root}/run/mariadb.sock"}
    log = state.log("slurmdbd")
    process = state.launch("slurmdbd", ["slurmdbd", "-D"], environment)
    client = state.client_environment()
    wait_for("slurmdbd", lambda: succeeds("sacctmgr", "-n", "list", "cluster", env=client), 60, log, process)
    add_accounting("cluster", "dev", state=state)
    add_accounting("account", "dev", state=state)
    add_accounting("user", "root", "account=dev", "defaultaccount=dev", state=state)


def start_mariadb(state: State) -> None:
    data, socket, log = state.root / "mysql", state.root / "run/mariadb.sock", state.log("mariadbd")
    run(
        "mariadb-install-db",
        "--no-defaults",
        f"--datadir={data}",
        "--user=root",
        "--skip-test-db",
        "--auth-root-authentication-method=socket",
    )
    command = [
        "mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={data}",
        f"--socket={socket}",
        "--skip-networking",
        f"--pid-file={state.root}/run/mariadbd.pid",
        "--innodb-buffer-pool-size=32M",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-lock-wait-timeout=900",
        "--performance-schema=off",
        "--skip-log-bin",
    ]
    process = state.launch("mariadbd", command)
    ping = ("mariadb-admin", "--no-defaults", f"--socket={socket}", "ping")
    wait_for("mariadbd", lambda: succeeds(*ping), 60, log, process)


def add_accounting(*what: str, state: State) -> None:
    """Run `sacctmgr add`. It is no error if slurmctld or slurmdbd has already added the entity."""
    command = ["sacctmgr", "-i", "-Q", "add", *what]
    done = subprocess.run(command, capture_output=True, text=True, env=state.client_environment(), check=False)
    said = done.stdout + done.stderr
    if done.returncode and "already exist" not in said and "Nothing new" not in said:
        raise ClusterError(f"`{' '.join(command)}` exited {done.returncode}: {said.strip()}")


def start_slurmctld(state: State) -> None:
    log = state.log("slurmctld")
    process = state.launch("slurmctld", ["slurmctld", "-D", "-i"], {"SLURM_CONF": str(state.slurm_conf)})
    client = state.client_environment()
    wait_for("slurmctld", lambda: succeeds("scontrol", "ping", env=client), 30, log, process)
