from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules

from hpc_train.config.parallel import SCHEDULES
from hpc_train.errors import UserError
from hpc_train.schedules.generate import generate_order
from hpc_train.schedules.order import Action, Kind, Overlap, format_rows, parse_action, read_order


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_is_read_again_by_us_and_by_torch(name: str, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    order = generate_order(name, 3, 6)
    path.write_text("".join(",".join(row) + "\n" for row in format_rows(order)))
    assert read_order(path) == order
    lines = [line.split(",") for line in path.read_text().splitlines()]
    assert [[str(schedules._Action.from_str(cell)) for cell in line] for line in lines] == format_rows(order)


def test_empty_cells_spaces_and_empty_lines_at_the_end_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("\ufeff0F0,, 0B0 ,\r\n,1F0,1I0,1W0\r\n\r\n,\n", encoding="utf-8")
    order = read_order(path)
    assert format_rows(order) == [["0F0", "0B0"], ["1F0", "1I0", "1W0"]]
    assert order.placement == (0, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0\n1F0,1X0\n", "line 2, column 2: '1X0' is not an action; write <stage><F, I, W or B><micro-batch>"),
        ("0F0,F0\n", "line 1, column 2: 'F0' is not an action"),
        ("0F0,0SEND_F0\n", "line 1, column 2: '0SEND_F0' is not a computation; leave communication"),
        ("0UNSHARD,0F0\n", "line 1, column 1: '0UNSHARD' is not a computation"),
        ("(0B0;1F0)OVERLAP_F_B\n", "is not an action"),
        ("(0F0;1W0)OVERLAP_F_B\n", "is not an action"),
        ("(0F0)OVERLAP_F_B\n", "is not an action"),
        ("\u0660F0\n", "is not an action"),
        ("0F0 0B0\n", "is not an action"),
        ("", "has no actions"),
        (",,\n\n", "has no actions"),
        ("0F0,0B0\n2F0,2B0\n", "has stage 2, but no action of stage 1"),
        ('"0F0\n', "unexpected end of data"),
    ],
)
def test_what_is_no_order_is_one_line_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_order(path)
    assert str(caught.value).startswith(str(path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_order(tmp_path / "none.csv")
    with pytest.raises(UserError, match="it is a directory"):
        read_order(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="can't decode"):
        read_order(tmp_path / "binary.csv")


def test_a_stage_belongs_to_the_first_rank_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("0F0,3F0\n1F0,2F0,3B0\n")
    assert read_order(path).placement == (0, 1, 1, 0)


def test_cells() -> None:
    assert parse_action("12I345") == Action(12, Kind.I, 345)
    assert parse_action("(0F1; 3B0)OVERLAP_F_B") == Overlap(Action(0, Kind.F, 1), Action(3, Kind.B, 0))
    assert parse_action("") is None
