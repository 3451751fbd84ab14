"""Make the run directories of points, in their job before the ranks start: with the files of a single submission.

`python -m hpc_train.launch.sweep.point_entrypoint SWEEP POINT...`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.launch.sweep.sweep_directory import FrozenPoint, SweepDirectory, read_chosen_points
from hpc_train.regular_files import write_private_file
from hpc_train.training.run_directory import prepare_run_directory


def make_run_directories(folder: SweepDirectory, ids: Sequence[str]) -> list[FrozenPoint]:
    """Make the run directories of these points, unless they are there, and return the points.

    Raises UserError for a list of points that is damaged, or that somebody else could have written.
    """
    points = read_chosen_points(folder, ids)
    for point in points:
        make_run_directory(folder, point)
    return points


def make_run_directory(folder: SweepDirectory, point: FrozenPoint) -> None:
    """Make the run directory of one point. A second attempt finds the same."""
    run = folder.run(point.id)
    if not (run / "job.json").exists():
        config = point.spec.run_config()
        prepare_run_directory(point.spec.folder(), config)
        for name, text in point.files.items():
            write_private_file(run / name, text)
        point.spec.write(run / "job.json")  # last: then all is there


def main(words: Sequence[str]) -> int:
    """Make the run directories of a sweep's points, in the job of that sweep; returns the exit code."""
    try:
        make_run_directories(SweepDirectory(Path(words[0])), words[1:])
    except UserError as error:
        print(f"hpc-train: {error}", flush=True)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
