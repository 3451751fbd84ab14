"""In the job, before the ranks: a point's run directory gets what a single run has in it at submission.

`python -m hpc_train.launch.sweep.begin SWEEP POINT...`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.launch.sweep.frozen import FrozenPoint, SweepFolder, read_some
from hpc_train.training.folder import prepare, write_private


def begin(folder: SweepFolder, ids: Sequence[str]) -> list[FrozenPoint]:
    """Make the run directories of these points, or see to it that they are as they should be; returns the points.

    Raises UserError for a list of points that is damaged, or that somebody else could have written.
    """
    points = read_some(folder, ids)
    for point in points:
        enter(folder, point)
    return points


def enter(folder: SweepFolder, point: FrozenPoint) -> None:
    """Make the run directory of one point. A second attempt finds the same."""
    run = folder.run(point.id)
    if not (run / "job.json").exists():
        config = point.spec.run_config()
        prepare(point.spec.folder(), config)
        for name, text in point.files.items():
            write_private(run / name, text)
        point.spec.write(run / "job.json")  # last: then all is there


def main(words: Sequence[str]) -> int:
    try:
        begin(SweepFolder(Path(words[0])), words[1:])
    except UserError as error:
        print(f"hpc-train: {error}", flush=True)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
