"""Start the ranks in a container image. What they read is bound read-only, and only what is named is bound.

Apptainer: https://apptainer.org/docs/user/latest/bind_paths_and_mounts.html (`source:destination:options`, with commas
between several and no way to quote). Pyxis: https://github.com/NVIDIA/pyxis (--container-mounts is split likewise).
Charliecloud: https://hpc.github.io/charliecloud/ch-run.html (it cannot bind read-only, and binds /tmp and /dev itself).
Podman: https://docs.podman.io/en/latest/markdown/podman-run.1.html; podman.sh starts it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.config.model import ImageFilesDataConfig, MixtureDataConfig, TokenDataConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_NO_REQUEUE, UserError
from hpc_train.training.run_directory import RunDirectory

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OVERRIDING_PREFIXES = "NCCL|RCCL|GLOO|UCX|FI|MPICH|OMP|MKL|KMP|TORCH|TORCHINDUCTOR|TRITON|PYTORCH|HPC_TRAIN"
"""Prefixes of variables whose value outside wins over the image's."""
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)")
_SCHEMES = {
    "apptainer": ("docker", "oras", "library", "shub"),
    "charliecloud": (),
    "podman": (),
    "pyxis": ("docker", "dockerd", "podman"),
}
_MAKE_FOLDER = {"charliecloud": "ch-convert", "podman": "podman export"}
"""Kinds whose images are folders, and the command that makes one of an image."""
_GPU_OPTIONS = {"nvidia": ["--nv"], "amd": ["--rocm"], "none": []}


@dataclass(frozen=True)
class Bind:
    """A path outside, and where it is inside."""

    source: str
    destination: str
    writable: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.destination}:{'rw' if self.writable else 'ro'}"


@dataclass(frozen=True)
class Container:
    """The words around the ranks' command."""

    before: tuple[str, ...] = ()
    """Shell lines of the batch script."""
    srun: tuple[str, ...] = ()
    """Options of srun, quoted."""
    words: tuple[str, ...] = ()
    """Words before Python, quoted."""


def make_container(config: RunConfig, folder: RunDirectory, code: Path | None) -> Container:
    """Return the words that put this run's ranks into its image. code: snapshot of the code.

    Raises UserError for an image that is not there, and for a path that cannot be bound.
    """
    settings = config.container
    if settings.kind == "none":
        return Container()
    image = _locate_image(settings.kind, settings.image)
    binds = make_binds(config, folder, code)
    for name in settings.env:
        if not _VARIABLE_NAME.fullmatch(name):
            raise UserError(f"container.env: {name!r} is not the name of a variable; give names, not values")
    make = {
        "apptainer": _make_apptainer_container,
        "charliecloud": _make_charliecloud_container,
        "podman": _make_podman_container,
        "pyxis": _make_pyxis_container,
    }
    return make[settings.kind](config, image, binds)


def make_binds(config: RunConfig, folder: RunDirectory, code: Path | None) -> list[Bind]:
    """Return the paths that the ranks need, outer ones first; of two with the same destination the last one counts."""
    binds = [_bind_to_same_path(path) for path in _readable_paths(config, code)]
    binds += [_parse_bind("container.read", text, False) for text in config.container.read]
    # The run directory comes from the script, where each element of an array has its own.
    binds += [_bind_to_same_path(path, True) for path in _writable_paths(config, folder)]
    binds += [_parse_bind("container.write", text, True) for text in config.container.write]
    chosen = {bind.destination: bind for bind in binds}
    return sorted(chosen.values(), key=lambda bind: len(Path(bind.destination).parts))


def _readable_paths(config: RunConfig, code: Path | None) -> list[Path]:
    cwd, data = Path.cwd(), config.data
    paths = [] if Path.home().is_relative_to(cwd) else [cwd]
    paths += [code] if code else []
    paths += [Path(name) for name in (config.cluster.topology, config.cluster.calibration) if name]
    if isinstance(data, MixtureDataConfig):
        from hpc_train.data.token_files import list_token_files

        paths += [file for path in data.paths for file in list_token_files(Path(path))]
    if isinstance(data, ImageFilesDataConfig):
        paths += [Path(path) for path in (data.path or data.cache, data.validation_path) if path]
    if isinstance(data, TokenDataConfig):
        from hpc_train.data.token_files import list_token_files  # h5py, which no other script needs here

        paths += list_token_files(Path(data.path)) if data.path else [Path(data.cache)]
        if config.launch.setup and data.path is None:
            paths += [Path(name) for name in data.sources if name != "stdlib"]
            paths += [Path(data.tokenizer)] if data.tokenizer not in ("byte", "bpe") else []
    return paths


def _writable_paths(config: RunConfig, folder: RunDirectory) -> list[Path]:
    paths = [folder.path]
    if not folder.checkpoints.is_relative_to(folder.path):
        paths.append(folder.checkpoints)
    if isinstance(config.data, TokenDataConfig) and config.data.path is None and config.launch.setup:
        paths.append(Path(config.data.cache))  # the ranks build it
    return paths + [Path(name) for name in (config.checkpoint.stage_dir,) if name]


def _bind_to_same_path(path: Path, writable: bool = False) -> Bind:
    place = str(path.expanduser().absolute())
    return _check_path("container", Bind(place, place, writable))


def _parse_bind(setting: str, text: str, writable: bool) -> Bind:
    parts = text.split(":")
    if len(parts) > 2 or not all(part.startswith(("/", "~")) for part in parts):
        raise UserError(f"{setting}: {text!r} is not an absolute path, or two with a colon between them")
    source = str(Path(parts[0]).expanduser())
    return _check_path(setting, Bind(source, parts[1] if len(parts) > 1 else source, writable))


def _check_path(setting: str, bind: Bind) -> Bind:
    for path in (bind.source, bind.destination):
        if set(",:") & set(path) or not path.isprintable():
            raise UserError(f"{setting}: {path!r} cannot be bound: no comma, colon or control character can be in it")
    return bind


def _locate_image(kind: str, image: str | None) -> str:
    """Return the image as the runtime `kind` takes it. Raises UserError for one that it cannot start."""
    maker = _MAKE_FOLDER.get(kind)
    if image is None:
        raise UserError(
            f"container.image: is not set; container={kind} needs "
            + (f"the folder of an image ({maker})" if maker else "a file, or an address such as docker://...")
        )
    if not image.isprintable() or image.startswith("-"):
        raise UserError(f"container.image={image!r}: is neither a file nor the address of an image")
    if address := _ADDRESS.fullmatch(image):
        if address[1] not in _SCHEMES[kind]:
            schemes = ", ".join(f"{name}://" for name in _SCHEMES[kind])
            others = f"a file, or {schemes}" if schemes else f"a folder, such as {maker} makes of an image"
            raise UserError(f"container.image={image}: {kind} does not take {address[1]}://; use {others}")
        return _format_enroot_address(address[1], address[2]) if kind == "pyxis" else image
    path = Path(image).expanduser().absolute()
    if not path.exists():
        others = "a folder that the nodes see" if maker else "a file that the nodes see, or docker://..."
        raise UserError(f"container.image={path}: No such file; give {others}")
    if not os.access(path, os.R_OK):
        raise UserError(f"container.image={path}: you may not read it")
    if maker and not (path / "usr").is_dir():
        raise UserError(f"container.image={path}: not the folder of an image, which has a folder usr; make it: {maker}")
    return str(path)


def _format_enroot_address(scheme: str, name: str) -> str:
    """Write the address of an image for Enroot, which separates a registry from the name by # in place of a slash."""
    host, slash, rest = name.partition("/")
    if scheme == "docker" and slash and "#" not in name and (set(".:") & set(host) or host == "localhost"):
        return f"{scheme}://{host}#{rest}"
    return f"{scheme}://{name}"


def _format_mount(bind: Bind) -> str:
    """Write a bind for Pyxis, which hands it to Enroot as a line of an fstab."""
    if set(" \\") & set(bind.source + bind.destination):
        raise UserError(
            f"container: {bind.source!r} cannot be bound: Pyxis has no way to write its spaces or backslashes"
        )
    return f"{bind.source}:{bind.destination}" + ("" if bind.writable else ":ro")


def _overriding_variables_command(config: RunConfig) -> str:
    """Return a shell command that lists the variables whose value outside of the image overrides the one inside."""
    names = "".join(f"|{name}" for name in ("PYTHONPATH", "PYTHONUNBUFFERED", *config.container.env))
    return f"compgen -e | grep -E '^(({_OVERRIDING_PREFIXES})_.*{names})$'"


def _make_apptainer_container(config: RunConfig, image: str, binds: Sequence[Bind]) -> Container:
    command = config.container.command
    words = [command, "exec", "--no-home", "--no-mount", "cwd", *_GPU_OPTIONS[_find_gpu_vendor(config)]]
    words += [word for bind in binds for word in ("--bind", str(bind))]
    words += ["--pwd", _choose_workdir(binds), image]
    why = f"container: {command} is not on the PATH of"
    before = [
        f'command -v {command} >/dev/null || {{ why="{why} $(hostname)"; echo "$why"; exit {EXIT_NO_REQUEUE}; }}',
        f"for name in $({_overriding_variables_command(config)}); do",
        '  export "APPTAINERENV_$name=${!name}" "SINGULARITYENV_$name=${!name}"',
        "done",
    ]
    return Container(tuple(before), (), (shlex.join(words),))


def _make_charliecloud_container(config: RunConfig, image: str, binds: Sequence[Bind]) -> Container:
    if config.container.gpu not in ("auto", "none"):
        raise UserError(
            f"container.gpu={config.container.gpu}: Charliecloud adds no GPU libraries when it starts; put them into "
            "the image with ch-fromhost, and leave container.gpu out"
        )
    words = [
        "ch-run",
        *(f"--bind={bind.source}:{bind.destination}" for bind in binds),
        f"--cd={_choose_workdir(binds)}",
    ]
    words += [f"--unset-env={name}" for name in _list_foreign_variables(config)]
    # Charliecloud binds the node's own names and addresses by itself, where the image has the files.
    before = ["find_charliecloud", _bind_places_command(image, binds, "/etc/hosts", "/etc/resolv.conf")]
    return Container(tuple(before), (), (shlex.join([*words, image, "--"]),))


def _make_podman_container(config: RunConfig, image: str, binds: Sequence[Bind]) -> Container:
    settings = config.container
    # As outside of a container: process ids, which the watchers of ranks read, shared memory, network, devices, limits.
    words = ["--rm", "--read-only", "--pid=host", "--ipc=host", "--network=host", "--userns=keep-id", "--ulimit=host"]
    words += ["--security-opt=label=disable", "--security-opt=seccomp=unconfined", "--log-driver=none"]
    words += ["--group-add=keep-groups"] if settings.runtime == "crun" else []  # runc cannot
    words += ["--env-host", "--env=XDG_RUNTIME_DIR=", "--volume=/dev:/dev", "--volume=/tmp:/tmp"]
    words += ["--device=nvidia.com/gpu=all"] if _find_gpu_vendor(config) == "nvidia" else []
    words += [f"--volume={bind.source}:{bind.destination}:{'rw' if bind.writable else 'ro'}" for bind in binds]
    words += [f"--workdir={_choose_workdir(binds)}", "--rootfs", image]
    before = [
        Path(__file__).with_name("podman.sh").read_text().rstrip("\n"),
        _bind_places_command(image, binds, *_PODMAN_FOLDERS, *_PODMAN_FILES),
        f"podman=({shlex.join([settings.runtime, *_list_foreign_variables(config), '--', *words])})",
        shlex.join(["find_podman", settings.python]),
    ]
    return Container(tuple(before), (), ('bash -c "$podman_task" bash "${podman[@]}"',))


_PODMAN_FOLDERS = ("/dev", "/proc", "/sys", "/run", "/tmp", "/var/tmp")
_PODMAN_FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab")
"""Paths that Podman mounts by itself, or would make in the folder of the image."""


def _list_foreign_variables(config: RunConfig) -> list[str]:
    """Return the names of variables that no rank gets: libraries of modules outside are of another system."""
    return [name for name in ("LD_LIBRARY_PATH", "LD_PRELOAD") if name not in config.container.env]


def _bind_places_command(image: str, binds: Sequence[Bind], *paths: str) -> str:
    """Return the shell command that makes the places to bind to in the folder of an image."""
    places = [word for path in paths for word in (path, path)]
    places += [word for bind in binds for word in (bind.source, bind.destination)]
    return shlex.join(["make_bind_places", image, *places])


def _make_pyxis_container(config: RunConfig, image: str, binds: Sequence[Bind]) -> Container:
    options = [
        f"--container-image={image}",
        f"--container-mounts={','.join(map(_format_mount, binds))}",
        f"--container-workdir={_choose_workdir(binds)}",
        "--no-container-mount-home",
    ]
    env = f'--container-env="$({_overriding_variables_command(config)} | paste -sd, -)"'
    return Container((), (*(shlex.quote(option) for option in options), env), ())


def _choose_workdir(binds: Sequence[Bind]) -> str:
    """Return the current folder if it is bound; else the run directory, which always is."""
    cwd = str(Path.cwd())
    if any(bind.source == bind.destination and Path(cwd).is_relative_to(bind.source) for bind in binds):
        return cwd
    return next(bind.destination for bind in binds if bind.writable)


def _find_gpu_vendor(config: RunConfig) -> str:
    settings, name = config.container, config.cluster.gpu.name or ""
    if settings.gpu != "auto":
        return settings.gpu
    if re.search(r"nvidia|tesla|geforce", name, re.IGNORECASE):
        return "nvidia"
    if re.search(r"\bamd\b|instinct|\bmi\d{2,3}", name, re.IGNORECASE):
        return "amd"
    if config.cluster.node.gpus:
        raise UserError(f"container.gpu=auto: cluster.gpu.name={name or None} has no known vendor; set nvidia or amd")
    return "none"
