"""Make the folder of an image, of Debian's packages, this environment, and the wheel of hpc_train."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = "/opt/env/bin/python"
"""Inside of the image."""


def build_image(folder: Path) -> Path:
    """Make it in `folder`/debian: Debian's Python, this environment in /opt/env, and hpc_train from its wheel.

    That takes over a minute, most of it for Debian's packages.
    """
    assert shutil.which("mmdebstrap"), "mmdebstrap is not installed: apt-get install mmdebstrap"
    made = folder / "debian"
    unpack = ["mmdebstrap", "--quiet", "--mode=root", "--variant=essential"]
    unpack += ["--include=python3,libstdc++6,libgomp1", "bookworm", str(made)]
    subprocess.run(unpack, check=True, timeout=600)
    (made / "etc/image-name").write_text("an image of the tests\n")
    if (base := Path(sys.base_prefix)) != Path("/usr"):
        link_tree(base, made / base.relative_to("/"))
    link_tree(Path(sys.prefix), made / "opt/env")
    packages = find_packages(made)
    for editable in packages.glob("__editable__*hpc_train*"):
        editable.unlink()
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "tests"))
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    # Nothing writes into an image, so that each rank would compile it anew.
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(packages / "hpc_train")], check=True)
    return made


def find_packages(image: Path) -> Path:
    """Return the folder of the packages of an image, seen from outside."""
    (packages,) = (image / "opt/env/lib").glob("python3*/site-packages")
    return packages


def make_outside_environment(image: Path, folder: Path) -> Path:
    """Make a virtual environment with the packages of an image, of a Python that every user may start; returns it.

    That of the tests may lie in a folder that only root may enter.
    """
    base = Path(sys.base_prefix)
    python = Path("/usr/bin/python3")
    if base != Path("/usr"):
        inside = image / base.relative_to("/")
        python = inside / "bin/python3"
        for above in inside.parents:
            if above.is_relative_to(image):
                above.chmod(0o755)
    subprocess.run([str(python), "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    (packages / "image.pth").write_text(f"{find_packages(image)}\n")
    return folder / "bin/python"


def link_tree(source: Path, destination: Path) -> None:
    """Copy a folder, as hard links where it is on the same file system: nothing writes to an image."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["cp", "-al", source, destination], capture_output=True, check=False).returncode:
        shutil.rmtree(destination, ignore_errors=True)
        subprocess.run(["cp", "-a", source, destination], check=True)
