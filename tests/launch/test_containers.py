"""Ranks in an image: the very words that Apptainer and srun are given, by executables that write them down."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.recovery.failures import find_first_error
from hpc_train.launch.slurm import containers
from hpc_train.launch.slurm.request import make_request
from hpc_train.launch.slurm.sbatch import render_script
from hpc_train.launch.snapshot.code_snapshot import snapshot_code
from hpc_train.launch.submit import default_to_slurm
from hpc_train.training.run_directory import locate_run_directory

SRUN = """#!/bin/bash
case " $* " in *" --job-name=listener "*) exit 0 ;; esac  # of stop signals: no rank, and in no image
printf '%s\\0' "$@" >"$SAID/srun"
while [[ $1 == -* ]]; do shift; done
touch "$HPC_TRAIN_RENDEZVOUS/done"
echo $$ >"$SAID/rank"
case $1 in apptainer | singularity | bash) exec "$@" ;; esac
"""
APPTAINER = """#!/bin/bash
printf '%s\\0' "$@" >"$SAID/$(basename "$0")"
env -0 >"$SAID/env"
"""
PODMAN = """#!/bin/bash
for word in "$@"; do
  case $word in
    unshare) while [[ $1 != unshare ]]; do shift; done; shift; exec "$@" ;;
    --pidfile=*) pidfile=${word#*=} ;;
  esac
done
printf '%s\\0' "$@" >"$SAID/podman"
env -0 >"$SAID/env"
echo "$XDG_RUNTIME_DIR" >"$SAID/store"
[[ $* != *rank_entrypoint* ]] || eval "${RANK:-:}"
[[ -z $FAILS ]] || { echo "Error: $FAILS" >&2; exit 125; }
"""
"""Writes down how a container is started, and runs $RANK in the place of a rank."""
MOUNT = """#!/bin/sh
echo "$@" >>"$SAID/mounts"
"""
PODMAN_SH = Path(containers.__file__).with_name("podman.sh")
FORBIDDEN = '$(touch executed) "quoted" it\'s & more'


@dataclass(frozen=True)
class Place:
    """A working folder, an image, and a home that nothing may see."""

    folder: Path

    def words(self, name: str) -> list[str]:
        return (self.folder / "said" / name).read_text().split("\0")[:-1]

    def script(self, *overrides: str) -> str:
        config = compose(
            default_to_slurm([f"run_dir={self.folder}/project/runs/a", "data.path=/data/text.h5", *overrides])
        )
        folder = locate_run_directory(config)
        return render_script(folder, make_request(config, folder, snapshot_code(config, folder.path, print)))

    def run(self, *overrides: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The batch script, run by bash."""
        script = self.script(*overrides)
        (self.folder / "project/runs/a/logs").mkdir(parents=True)
        words = self.folder / "said"
        words.mkdir()
        for name in ("scontrol", "scancel", "squeue", "sinfo"):
            self.stub(name, "#!/bin/sh\n")
        self.stub("srun", SRUN)
        path = {"PATH": f"{self.folder}/stubs:/usr/bin:/bin", "SAID": str(words)}
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
        return subprocess.run(
            ["bash"], input=script, env=path | job | env, cwd=self.folder, capture_output=True, text=True, check=False
        )

    def stub(self, name: str, text: str) -> None:
        path = self.folder / "stubs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(stat.S_IRWXU)

    def assert_code(self, run: Path, code: int, why: str = "") -> None:
        result = json.loads((run / "logs/0/result.json").read_text())
        assert (result["exit_code"], result["why"].startswith(why)) == (code, True), result


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / "project").mkdir()
    (tmp_path / "image.sif").touch()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return Place(tmp_path)


def binds(words: list[str]) -> list[str]:
    return [words[index + 1] for index, word in enumerate(words) if word == "--bind"]


def test_apptainer_is_given_every_path_and_no_home(place: Place) -> None:
    place.stub("apptainer", APPTAINER)
    image, root = place.folder / "image.sif", place.folder
    chosen = ["container=apptainer", f"container.image={image}", f"checkpoint.dir={root}/ckpt", "container.python=/py"]
    done = place.run(*chosen, "container.read=['/etc/hosts:/hosts']", f"container.write=[{root}/scratch]")
    assert done.returncode == 0, done.stdout + done.stderr
    words = place.words("apptainer")
    code = next((root / "project/runs").glob(".hpc_train-code-*"), root / f"project/runs/.hpc_train-code-{os.getuid()}")
    code = Path(next(bind.split(":")[0] for bind in binds(words) if bind.startswith(str(code))))
    assert binds(words) == [
        "/etc/hosts:/hosts:ro",
        "/data/text.h5:/data/text.h5:ro",
        f"{root}/project:{root}/project:ro",
        f"{root}/ckpt:{root}/ckpt:rw",
        f"{root}/scratch:{root}/scratch:rw",
        f"{root}/project/runs/a:{root}/project/runs/a:rw",
        f"{code}:{code}:ro",
    ]
    plain = [word for index, word in enumerate(words) if "--bind" not in (word, words[index - 1])]
    run = f"{root}/project/runs/a"
    assert plain[:6] == ["exec", "--no-home", "--no-mount", "cwd", "--pwd", f"{root}/project"]
    assert plain[6:] == [str(image), "/py", "-P", "-u", "-m", "hpc_train.launch.rank_entrypoint", run]
    srun = place.words("srun")
    assert srun[srun.index("apptainer") :] == ["apptainer", *words]
    assert not any(word.startswith("--container") for word in srun)
    place.assert_code(Path(run), 0)


def test_variables_outside_win_over_those_of_an_apptainer_image(place: Place) -> None:
    place.stub("singularity", APPTAINER)
    words = ["container=apptainer", "container.command=singularity", f"container.image={place.folder}/image.sif"]
    env = {"NCCL_DEBUG": "INFO", "NCCL_ODD": 'a b,"c"\nd', "OTHER": "1", "MINE": "2", "LD_LIBRARY_PATH": "/host"}
    done = place.run(*words, "container.env=[MINE]", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(item.split("=", 1) for item in place.words("env"))
    assert found["APPTAINERENV_NCCL_ODD"] == found["SINGULARITYENV_NCCL_ODD"] == 'a b,"c"\nd'
    assert found["APPTAINERENV_PYTHONPATH"] == found["PYTHONPATH"]
    given = {name for name in found if name.startswith("APPTAINERENV_")}
    assert {"APPTAINERENV_NCCL_DEBUG", "APPTAINERENV_MINE", "APPTAINERENV_HPC_TRAIN_ATTEMPT"} <= given
    assert {"APPTAINERENV_OTHER", "APPTAINERENV_LD_LIBRARY_PATH", "APPTAINERENV_PATH"} & given == set()


@pytest.mark.parametrize(
    ("cluster", "gpu", "expected"),
    [
        ("dgx_h100", "auto", ["--nv"]),
        ("frontier", "auto", ["--rocm"]),
        ("lumi_g", "none", []),
        ("slurm", "auto", []),
        ("slurm", "amd", ["--rocm"]),
    ],
)
def test_the_vendor_of_the_gpus_decides(place: Place, cluster: str, gpu: str, expected: list[str]) -> None:
    chosen = ["container=apptainer", "container.image=docker://pytorch/pytorch:2.12", f"container.gpu={gpu}"]
    script = place.script(f"cluster={cluster}", "cluster.nodes=1", "parallel.dp_replicate=-1", *chosen)
    line = next(line for line in script.splitlines() if "apptainer exec" in line).split()
    assert [word for word in line if word in ("--nv", "--rocm")] == expected
    assert "docker://pytorch/pytorch:2.12" in line


def test_pyxis_is_given_the_same_in_its_words(place: Place) -> None:
    root, run = place.folder, f"{place.folder}/project/runs/a"
    chosen = ["container=pyxis", "container.image=docker://nvcr.io/nvidia/pytorch:25.06-py3", "container.env=[MINE]"]
    done = place.run(*chosen, NCCL_DEBUG="INFO", MINE="2", OTHER="3")
    assert done.returncode == 0, done.stdout + done.stderr
    words = place.words("srun")
    options = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
    assert options["--container-image"] == "docker://nvcr.io#nvidia/pytorch:25.06-py3"
    assert options["--container-workdir"] == f"{root}/project"
    assert "--no-container-mount-home" in options
    mounts = options["--container-mounts"].split(",")
    assert mounts[:3] == ["/data/text.h5:/data/text.h5:ro", f"{root}/project:{root}/project:ro", f"{run}:{run}"]
    assert mounts[3].endswith(":ro")
    assert "/.hpc_train-code-" in mounts[3]
    names = set(options["--container-env"].split(","))
    assert {"NCCL_DEBUG", "MINE", "PYTHONPATH", "HPC_TRAIN_ATTEMPT", "HPC_TRAIN_RENDEZVOUS", "OMP_NUM_THREADS"} <= names
    assert "OTHER" not in names
    assert words[words.index("python3") :] == ["python3", "-P", "-u", "-m", "hpc_train.launch.rank_entrypoint", run]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("docker://ubuntu:24.04", "docker://ubuntu:24.04"),
        ("docker://nvidia/cuda:13", "docker://nvidia/cuda:13"),
        ("docker://nvcr.io#nvidia/x", "docker://nvcr.io#nvidia/x"),
        ("docker://localhost:5000/x/y", "docker://localhost:5000#x/y"),
    ],
)
def test_enroot_has_its_own_way_to_name_a_registry(place: Place, image: str, expected: str) -> None:
    script = place.script("container=pyxis", f"container.image='{image}'")
    assert f"--container-image={expected}" in script.replace("'", "")


@pytest.fixture
def podman(place: Place) -> Place:
    """A folder of an image, Podman that writes down what it is asked, and a user who is not root."""
    (place.folder / "image/usr").mkdir(parents=True)
    place.stub("podman", PODMAN)
    place.stub("mount", MOUNT)
    place.stub("id", "#!/bin/sh\necho ${USER_ID:-1000}\n")
    return place


def run_podman(place: Place, *overrides: str, **env: str) -> subprocess.CompletedProcess[str]:
    image = f"container.image={place.folder}/image"
    return place.run("container=podman", image, "container.python=/py", *overrides, **env)


def test_podman_is_given_every_path_and_the_namespaces_of_the_node(podman: Place) -> None:
    root = podman.folder
    done = run_podman(podman, "container.read=['/etc/hosts:/hosts']", NCCL_DEBUG="INFO", LD_LIBRARY_PATH="/host")
    assert done.returncode == 0, done.stdout + done.stderr
    words = podman.words("podman")
    run = f"{root}/project/runs/a"
    begin = words.index("run")
    store = (root / "said/store").read_text().strip()
    assert words[:begin] == [
        "--log-level=error",
        "--cgroup-manager=cgroupfs",
        "--runtime=crun",
        f"--root={store}/root",
        f"--runroot={store}/run",
    ]
    options = words[begin + 1 : words.index("--rootfs")]
    assert [word for word in options if word.endswith(("=host", "=keep-id", "=keep-groups"))] == [
        "--pid=host",
        "--ipc=host",
        "--network=host",
        "--userns=keep-id",
        "--ulimit=host",
        "--group-add=keep-groups",
    ]
    volumes = [word.partition("=")[2] for word in options if word.startswith("--volume=")]
    assert volumes[:5] == [
        "/dev:/dev",
        "/tmp:/tmp",
        "/etc/hosts:/hosts:ro",
        "/data/text.h5:/data/text.h5:ro",
        f"{root}/project:{root}/project:ro",
    ]
    assert f"{run}:{run}:rw" in volumes
    assert words[words.index("--rootfs") :] == [
        "--rootfs",
        f"{root}/image",
        *("/py", "-P", "-u", "-m", "hpc_train.launch.rank_entrypoint", run),
    ]
    assert (root / f"image{run}").is_dir()
    found = dict(item.split("=", 1) for item in podman.words("env"))
    assert found["NCCL_DEBUG"] == "INFO"
    assert "LD_LIBRARY_PATH" not in found
    # Those of version 1, if this machine has any, are not to be changed from a container.
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    groups = [mount[1] for mount in mounts if mount[2] == "cgroup"]
    said = (root / "said/mounts").read_text() if groups else ""
    assert all(f"-o remount,bind,ro {group}\n" in said for group in groups)
    assert not Path(store).exists()
    podman.assert_code(Path(run), 0)


def test_podman_keeps_what_container_env_names_and_groups_only_with_crun(podman: Place) -> None:
    done = run_podman(podman, "container.env=[LD_PRELOAD]", "container.runtime=runc", LD_PRELOAD="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LD_PRELOAD" in dict(item.split("=", 1) for item in podman.words("env"))
    assert "--runtime=runc" in podman.words("podman")
    assert "--group-add=keep-groups" not in podman.words("podman")


def test_a_signal_for_the_rank_reaches_the_process_in_its_container_once(podman: Place) -> None:
    """And srun hears of a signal that has ended it."""
    said = podman.folder / "said"
    # The process in the container: told twice by a signal, and ended by another.
    rank = (
        f"trap 'echo usr2 >>{said}/got' USR2; echo $BASHPID >$pidfile; kill -USR2 $(cat {said}/rank);"
        f" for _ in {{1..400}}; do [ -e {said}/got ] || sleep 0.05; done;"
        f" trap - TERM; kill -TERM $(cat {said}/rank); sleep 9"
    )
    done = run_podman(podman, RANK=rank)
    assert (said / "got").read_text() == "usr2\n", done.stdout + done.stderr
    podman.assert_code(podman.folder / "project/runs/a", 143)


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"USER_ID": "0"}, "container: podman would start the ranks of root outside of the job"),
        ({"FAILS": 'crun: no "such" thing'}, "container: podman cannot start /py on "),
    ],
)
def test_a_node_whose_podman_does_not_work_ends_the_attempt(podman: Place, env: dict[str, str], why: str) -> None:
    assert run_podman(podman, **env).returncode == 93
    podman.assert_code(podman.folder / "project/runs/a", 93, why)
    assert not (podman.folder / "said/srun").exists()


def run_function(call: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Call a function of podman.sh on a node without Podman."""
    stubs = "hostname() { echo n7; }; refuse_container() { echo $1; exit 93; }; date() { echo 5; }; PATH=/nowhere"
    script = f". {PODMAN_SH}; {stubs}; {call}"
    return subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)


def test_a_first_node_without_podman_is_named() -> None:
    done = run_function("find_podman /py")
    assert (done.returncode, done.stdout) == (93, "podman is not on the PATH of n7\n")


def test_another_node_without_podman_is_the_failure_of_its_rank(tmp_path: Path) -> None:
    done = run_function("start_podman crun -- x", HPC_TRAIN_RENDEZVOUS=str(tmp_path), SLURM_PROCID="3")
    assert done.returncode == 93
    failure = find_first_error(tmp_path)
    assert failure is not None
    assert (failure.task, failure.line) == (3, "container: podman is not on the PATH of n7")


def test_home_is_not_bound_as_the_working_folder(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.folder / "home/project").mkdir(parents=True)
    monkeypatch.chdir(place.folder / "home")
    chosen = ["container=pyxis", "container.image=docker://x", f"run_dir={place.folder}/run"]
    script = place.script(*chosen)
    assert f"{place.folder}/home:" not in script
    assert f"--container-workdir={place.folder}/run" in script
    monkeypatch.chdir(place.folder / "home/project")
    assert f"{place.folder}/home/project:{place.folder}/home/project:ro" in place.script(*chosen)


def test_pyxis_writes_mounts_where_spaces_divide_words(place: Place) -> None:
    with pytest.raises(UserError, match=r"container: '/a b' cannot be bound: Pyxis has no way to write its spaces or"):
        place.script("container=pyxis", "container.image=docker://x", "container.read=['/a b']")


def test_an_image_in_a_hostile_place_is_one_word(place: Place) -> None:
    place.stub("apptainer", APPTAINER)
    image = place.folder / FORBIDDEN
    image.touch()
    escaped = str(image).replace("\\", "\\\\").replace('"', '\\"')
    done = place.run("container=apptainer", f'container.image="{escaped}"', f'container.write=["/w/{FORBIDDEN[:16]}"]')
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(image) in place.words("apptainer")
    assert f"/w/{FORBIDDEN[:16]}:/w/{FORBIDDEN[:16]}:rw" in place.words("apptainer")
    assert not list(place.folder.rglob("executed"))


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ((), "container.image: is not set; container=apptainer needs a file, or an address"),
        (("container.image=nowhere.sif",), "container.image=.*/project/nowhere.sif: No such file"),
        (("container.image=http://x/y",), "apptainer does not take http://; use a file, or docker://, oras://"),
        (("container.image=-x",), "is neither a file nor the address of an image"),
        (("container.image=docker://x", "container.read=['/a,b']"), "container.read: '/a,b' cannot be bound"),
        (("container.image=docker://x", "container.read=['/a:/b:rw']"), "container.read: .* is not an absolute path"),
        (("container.image=docker://x", "container.write=[data]"), "container.write: 'data' is not an absolute path"),
        (("container.image=docker://x", "run_dir='/runs/a,b'"), "container: '/runs/a,b' cannot be bound"),
        (("container.image=docker://x", "container.env=['A=b']"), "container.env: 'A=b' is not the name of a variable"),
        (("container.image=docker://x", "cluster.node.gpus=4"), "cluster.gpu.name=None has no known vendor"),
    ],
)
def test_what_cannot_be_is_said_before_submission(place: Place, overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=why) as refused:
        place.script("container=apptainer", *overrides)
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_that_may_not_be_read_is_said_before_submission(place: Place) -> None:
    """As an unprivileged user, if we are not one."""
    secret = place.folder / "secret.sif"
    secret.touch(0o000)
    program = "import os, sys; os.getuid() or os.setuid(65534); sys.exit(os.access(sys.argv[1], os.R_OK))"
    assert subprocess.run(["python3", "-c", program, str(secret)], check=False).returncode == 0
    if os.geteuid():
        with pytest.raises(UserError, match="you may not read it"):
            place.script("container=apptainer", f"container.image={secret}")


def test_a_node_without_apptainer_ends_the_attempt(place: Place) -> None:
    done = place.run("container=apptainer", f"container.image={place.folder}/image.sif")
    assert done.returncode == 93
    place.assert_code(place.folder / "project/runs/a", 93, "container: apptainer is not on the PATH of ")
    assert not (place.folder / "said/srun").exists()
