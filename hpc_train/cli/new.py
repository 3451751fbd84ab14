"""`hpc-train new NAME`: write a small project with a model, data, settings and a test, ready to be changed."""

from __future__ import annotations

import argparse

from hpc_train.cli.arguments import add_examples


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `new`."""
    command.add_argument(
        "folder", metavar="NAME", help="folder to make; its name becomes the name of the Python package"
    )
    add_examples(command, "hpc-train new my_project")
    command.set_defaults(run=_new)


def _new(args: argparse.Namespace) -> int:
    from hpc_train.project_template.write_project import write_project

    project = write_project(args.folder)
    for path in project.files:
        print(path)
    print(f"\ncd {project.folder}\nhpc-train train {project.override} train.steps=20\npython -m pytest")
    return 0
