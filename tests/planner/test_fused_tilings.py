"""The tiling of a fused matrix, whose parts are each split over tp."""

from __future__ import annotations

from hpc_train.config.parallel import Degrees
from hpc_train.planner.rehearsal.tiling import Tiling
from hpc_train.shard_rectangles import FusedParts


def test_a_rank_has_a_rectangle_of_each_part() -> None:
    tiling = Tiling(
        (16, 5), (("tp",), ()), (((0, 8), (8, 8)), ((0, 5),)), fused=FusedParts(dim=0, sizes=(8, 4, 4), ranks=2)
    )
    degrees = Degrees(1, 1, 1, 1, 2)
    assert tiling.find_rectangles({"tp": 1}, degrees) == [((4, 0), (4, 5)), ((10, 0), (2, 5)), ((14, 0), (2, 5))]
    assert tiling.rectangles == 6
    assert tiling.find_problem() is None
    sums_of_rows, sums_of_columns = tiling.shrink((16, 1)), tiling.shrink((1, 5))
    assert sums_of_rows.rectangles == 6
    assert sums_of_columns.find_rectangles({"tp": 1}, degrees) == [((0, 0), (1, 5))]
