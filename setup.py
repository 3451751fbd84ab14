"""List the packages of the wheel: every folder with Python files. All else about it is in pyproject.toml.

conf/ stands beside hpc_train, where users edit it, and is installed as hpc_train.conf.
"""

from pathlib import Path

from setuptools import setup

_PACKAGES = {
    ".".join(file.parent.parts) for room in ("hpc_train", "hydra_plugins") for file in Path(room).rglob("*.py")
}

# Without hydra_plugins itself, which has no file of its own, Hydra finds no launcher of an editable installation.
setup(packages=sorted(_PACKAGES | {"hpc_train.conf", "hydra_plugins"}))
