"""slurm/health-check, with commands and a /sys of our own in place of a cluster's."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm/health-check"
LISTED = "--query-gpu=index"


class Node:
    """A node whose commands say what a test wants them to say."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.sys, self.log = folder / "bin", folder / "sys", folder / "scontrol.log"
        self.bin.mkdir()
        self.sys.mkdir()
        self.log.touch()
        self.state("IDLE")
        self.command("df", 'echo header; echo "none 100 10 90 ${USED:-10}% $2"')
        self.env = {"HEALTH_CONFIG": "/dev/null", "SLURMD_NODENAME": "n7", "HEALTH_SYS": str(self.sys)}

    def command(self, name: str, body: str) -> None:
        """A program of this name, found before the system's."""
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def state(self, state: str) -> None:
        """What Slurm says of the node."""
        self.command(
            "scontrol", f'echo "$*" >>{self.log}; [ "$2" != show ] || echo "NodeName=n7 State={state} CPUTot=8"'
        )

    def nvidia_smi(self, links: list[int], most: int = 4) -> None:
        """A GPU for each number, with so many NVLinks up."""
        lines = []
        for gpu, up in enumerate(links):
            lines.append(f"GPU {gpu}: Some GPU (UUID: GPU-{gpu})")
            lines += [f"\t Link {n}: {'26.562 GB/s' if n < up else '<inactive>'}" for n in range(most)]
        status, indices = "\n".join(lines), "\n".join(str(gpu) for gpu in range(len(links)))
        self.command("nvidia-smi", f"case $1 in nvlink) cat <<'E'\n{status}\nE\n;; *) cat <<'E'\n{indices}\nE\n;; esac")

    def port(self, device: str, state: str) -> None:
        """An InfiniBand port 1."""
        folder = self.sys / f"class/infiniband/{device}/ports/1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(state + "\n")

    def check(self, **settings: str) -> tuple[int, str]:
        """(exit code, the reason the node was drained with; empty: it was not)."""
        env = {**os.environ, **self.env, **settings, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        done = subprocess.run([str(SCRIPT)], env=env, capture_output=True, text=True, check=False)
        updates = [line for line in self.log.read_text().splitlines() if line.startswith("update")]
        assert len(updates) <= 1
        prefix = "update NodeName=n7 State=DRAIN Reason=health-check: "
        assert all(line.startswith(prefix) for line in updates)
        return done.returncode, updates[0].removeprefix(prefix) if updates else ""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Healthy: four GPUs with four NVLinks each, two ports up."""
    made = Node(tmp_path)
    made.nvidia_smi([4, 4, 4, 4])
    made.port("mlx5_0", "4: ACTIVE")
    made.port("mlx5_10", "4: ACTIVE")
    return made


ALL = {"HEALTH_GPUS": "4", "HEALTH_PORTS": "all", "HEALTH_MOUNTS": "/proc"}


def test_a_healthy_node_is_left_alone(node: Node) -> None:
    assert node.check(**ALL) == (0, "")
    assert node.check(**ALL, HEALTH_NVLINKS="4") == (0, "")
    assert node.log.read_text() == "", "Slurm is not even asked"


def test_a_node_without_gpus_and_fabric_is_healthy_by_default(node: Node) -> None:
    (node.bin / "nvidia-smi").unlink()
    assert node.check() == (0, "")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"HEALTH_GPUS": "8"}, "4 of 8 GPUs"),
        ({"HEALTH_NVLINKS": "12"}, "NVLinks, expected 12: GPU0=4 GPU1=4 GPU2=4 GPU3=4"),
        ({"HEALTH_PORTS": "mlx5_0:1 mlx5_1:1"}, "port mlx5_1:1 is not there"),
        ({"HEALTH_MOUNTS": "/proc /no/such"}, "/no/such is not mounted, or hangs"),
        ({"USED": "95"}, "/tmp is 95 % full; /dev/shm is 95 % full"),
        ({"USED": "80", "HEALTH_ROOM": "/scratch", "HEALTH_FULL": "80"}, "/scratch is 80 % full"),
    ],
)
def test_what_is_missing_drains_the_node(node: Node, settings: dict[str, str], reason: str) -> None:
    assert node.check(**settings) == (1, reason)


def test_one_gpu_with_fewer_links(node: Node) -> None:
    node.nvidia_smi([4, 4, 3, 4])
    assert node.check(HEALTH_GPUS="4") == (1, "uneven NVLinks: GPU0=4 GPU1=4 GPU2=3 GPU3=4")


def test_uneven_links_may_be_as_they_should_be(node: Node) -> None:
    node.nvidia_smi([4, 4, 3, 4])
    assert node.check(HEALTH_NVLINKS="off") == (0, "")


def test_a_port_that_is_down(node: Node) -> None:
    node.port("mlx5_2", "1: DOWN")
    assert node.check(HEALTH_PORTS="all") == (1, "port mlx5_2:1 is DOWN")
    assert node.check(HEALTH_PORTS="mlx5_0:1")[0] == 0


def test_a_driver_that_hangs(node: Node) -> None:
    node.command("nvidia-smi", "exec sleep 100")
    assert node.check(HEALTH_GPUS="4", HEALTH_SECONDS="0.3") == (1, "nvidia-smi fails or hangs")


def test_everything_that_is_wrong_is_in_the_reason(node: Node) -> None:
    node.port("mlx5_2", "2: INIT")
    assert node.check(HEALTH_GPUS="8", HEALTH_PORTS="all") == (1, "4 of 8 GPUs; port mlx5_2:1 is INIT")


@pytest.mark.parametrize("state", ["IDLE+DRAIN", "MIXED+DRAIN", "DOWN+DRAIN"])
def test_a_drained_node_keeps_its_reason(node: Node, state: str) -> None:
    node.state(state)
    assert node.check(HEALTH_GPUS="8") == (1, "")


def test_a_dry_run_drains_nothing(node: Node) -> None:
    assert node.check(HEALTH_GPUS="8", HEALTH_DRY_RUN="1") == (1, "")


def test_settings_from_a_file(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("HEALTH_GPUS=6\n")
    assert node.check(HEALTH_CONFIG=str(file)) == (1, "4 of 6 GPUs")


def test_the_script_is_clean() -> None:
    checker = shutil.which("shellcheck")
    assert checker is not None, "install shellcheck (apt-get install shellcheck)"
    done = subprocess.run([checker, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
