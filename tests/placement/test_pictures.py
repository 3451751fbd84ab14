"""Pictures: files that a viewer opens, with every node, GPU and link once, and no text over another."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from small_clusters import rails, two_leaves

from hpc_train.cli.main import main
from hpc_train.cluster.spec import Cluster, Node
from hpc_train.errors import UserError
from hpc_train.placement.diagram.canvas import (
    Canvas,
    choose_group_colour,
    choose_ink,
    choose_load_colour,
    choose_load_width,
    measure_text,
    shorten_text,
)
from hpc_train.placement.diagram.column_layout import COLUMN_LAYOUT
from hpc_train.placement.diagram.panel import Panel
from hpc_train.placement.diagram.picture import draw_cluster
from hpc_train.placement.diagram.row_layout import ROW_LAYOUT
from hpc_train.placement.fabric import build_levels

PLACE = (
    "topology",
    "place",
    "cluster=dgx_h100",
    "model=llama_8b",
    "parallel.tp=8",
    "cluster.fabric.oversubscription=4",
)


@pytest.fixture(autouse=True)
def _outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def ids(path: Path) -> Counter[str]:
    """Kind of element, such as before-gpu -> how many; every id once."""
    found = [it.get("id", "") for it in ElementTree.parse(path).iter()]
    ours = [name for name in found if re.match(r"(before|after|here)-", name)]
    assert len(set(ours)) == len(ours)
    return Counter(re.sub(r"(-\d+)+$", "", name) for name in ours)


def test_before_and_after_have_every_gpu_node_and_link(tmp_path: Path) -> None:
    path = tmp_path / "ranks.svg"
    words = (*PLACE, "cluster.nodes=8", "cluster.fabric.nodes_per_leaf=4", "--shuffle", "1", "--picture", str(path))
    assert main(words) == 0
    found = ids(path)
    for side in ("before", "after"):
        assert found[f"{side}-gpu"] == 64
        assert found[f"{side}-link-node"] == 8
        assert found[f"{side}-leaf"] == found[f"{side}-link-leaf"] == 2
        assert found[f"{side}-switch-network"] == 1


def test_one_panel_where_nothing_changes(tmp_path: Path) -> None:
    path = tmp_path / "ranks.svg"
    assert main([*PLACE, "cluster.nodes=4", "--picture", str(path), "--axis", "tp"]) == 0
    found = ids(path)
    assert found["before-gpu"] == 32
    assert not [name for name in found if name.startswith("after")]


def test_many_nodes_are_a_row_a_leaf(tmp_path: Path) -> None:
    path = tmp_path / "ranks.svg"
    assert main([*PLACE, "cluster.nodes=128", "--shuffle", "1", "--picture", str(path)]) == 0
    found = ids(path)
    for side in ("before", "after"):
        assert found[f"{side}-leaf"] == found[f"{side}-link-leaf"] == 4
        assert found[f"{side}-gpu"] == 0
        assert found[f"{side}-node"] >= 128


def test_leaves_beyond_count_become_rows_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "ranks.svg"
    words = ("topology", "place", "cluster=meta_roce_24k", "cluster.nodes=512", "model=llama_8b", "parallel.tp=8")
    assert main([*words, "--shuffle", "1", "--picture", str(path)]) == 0
    found = ids(path)
    assert found["before-group"] == 2
    assert found["before-leaf"] == 0
    assert found["before-nodes"] == 2


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_every_suffix_is_a_file_of_its_kind(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"cluster.{suffix}"
    draw_cluster(two_leaves(), path)
    start = path.read_bytes()[:1000]
    assert {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}[suffix] in start


def test_the_same_picture_twice_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw_cluster(two_leaves(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_cluster_without_a_run(tmp_path: Path) -> None:
    draw_cluster(two_leaves(), tmp_path / "here.svg")
    found = ids(tmp_path / "here.svg")
    assert (found["here-gpu"], found["here-leaf"], found["here-group"], found["here-link-leaf"]) == (32, 2, 1, 2)
    draw_cluster(rails(3, 4, 4), tmp_path / "rails.svg")
    found = ids(tmp_path / "rails.svg")
    assert (found["here-gpu"], found["here-leaf"], found["here-link-node"]) == (0, 3, 12)
    draw_cluster(Cluster("test", (Node("alone"),)), tmp_path / "alone.svg")
    assert ids(tmp_path / "alone.svg")["here-link-node"] == 1


def test_nothing_to_draw_and_nowhere_to_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no node to draw"):
        draw_cluster(Cluster("test"), tmp_path / "none.svg")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(UserError, match=r"folder\.svg: Is a directory"):
        draw_cluster(two_leaves(), tmp_path / "folder.svg")


def test_a_picture_is_not_blank_and_shows_the_load(tmp_path: Path) -> None:
    """The heaviest link is dark red, and none is in a picture without loads."""

    def dark_red(path: Path) -> int:
        pixels = np.round(imread(path)[..., :3] * 255).astype(int)
        return int((abs(pixels - (177, 0, 38)).sum(axis=-1) < 12).sum())

    words = (*PLACE, "cluster.nodes=8", "cluster.fabric.nodes_per_leaf=4", "--shuffle", "1")
    assert main([*words, "--picture", str(tmp_path / "ranks.png")]) == 0
    draw_cluster(two_leaves(), tmp_path / "here.png")
    assert dark_red(tmp_path / "ranks.png") > 500
    assert dark_red(tmp_path / "here.png") == 0


def loaded(nodes: int, leaves: int, gpus: int, name: str = "node") -> Panel:
    """Everything drawn: colours, places, ranks and loads, on a tree of three levels."""
    names = [f"{name}{number}" for number in range(nodes)]
    at = {node: number * leaves // nodes for number, node in enumerate(names)}
    levels = build_levels(names, {node: ("top", f"pod{leaf // 2}", f"{name}-leaf{leaf}") for node, leaf in at.items()})
    slots = np.arange(nodes * gpus).reshape(nodes, gpus)
    load = {level.name: np.linspace(0.0012, 1.2345, len(level.labels)) for level in levels}
    return Panel("before", "the launcher's order: 1.23 s", levels, gpus, slots % 5, slots // 5 % 99, slots[:, 0], load)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["n", "a-very-long-name-of-a-host.some-cluster.example.org-"])
@pytest.mark.parametrize(("nodes", "leaves"), [(1, 1), (4, 2), (8, 2), (64, 2), (64, 8), (30, 5), (128, 4), (512, 64)])
def test_texts_do_not_overlap_and_stay_on_the_sheet(nodes: int, leaves: int, gpus: int, name: str) -> None:
    panel = loaded(nodes, leaves, gpus, name)
    layout = COLUMN_LAYOUT if nodes <= 64 and leaves <= 8 else ROW_LAYOUT
    width, height = layout.measure(panel)
    canvas = Canvas(width, height)
    layout.draw(canvas, panel, 0.0, 0.0, panel.heaviest)
    boxes = np.array([extent(it) for it in canvas.texts if it[2]])
    assert len(boxes) > nodes * (layout is COLUMN_LAYOUT)
    assert boxes.min() >= -0.5
    assert boxes[:, 2].max() <= width + 0.5
    assert boxes[:, 3].max() <= height + 0.5
    assert overlaps(boxes) == 0


def extent(text: tuple[float, float, str, dict[str, object]]) -> tuple[float, float, float, float]:
    """(left, top, right, bottom), the height being that of capitals."""
    x, y, shown, style = text
    size = float(str(style["fontsize"]))
    width = measure_text(shown, size, style.get("fontweight") == "bold")
    left = x - width * {"left": 0.0, "center": 0.5, "right": 1.0}[str(style.get("ha", "left"))]
    return left, y - size * 0.37, left + width, y + size * 0.37


def overlaps(boxes: np.ndarray) -> int:
    a, b = boxes[:, None], boxes[None]
    across = (a[..., 0] < b[..., 2] - 0.3) & (b[..., 0] < a[..., 2] - 0.3)
    down = (a[..., 1] < b[..., 3] - 0.3) & (b[..., 1] < a[..., 3] - 0.3)
    return int((across & down).sum()) - len(boxes)


def test_a_text_is_cut_in_the_middle_to_fit() -> None:
    name = "a-very-long-name-of-a-host"
    for room in range(0, 200, 7):
        cut = shorten_text(name, 7.0, room)
        assert measure_text(cut, 7.0) <= room or cut == ""
        if 0 < len(cut) < len(name):
            head, tail = cut.split("…")
            assert name.startswith(head)
            assert name.endswith(tail)
    assert shorten_text(name, 7.0, 500) == name


def test_colours() -> None:
    for groups in (2, 12, 13, 64, 500):
        assert len({choose_group_colour(number, groups) for number in range(groups)}) >= min(groups, 200)
    assert (choose_ink("#ffffff"), choose_ink("#000000")) == ("#1f2328", "white")
    assert choose_load_colour(None, 1.0) == choose_load_colour(0.0, 1.0) != choose_load_colour(0.1, 1.0)
    widths = [choose_load_width(load, 1.0) for load in (None, 0.1, 0.5, 1.0)]
    assert widths == sorted(widths)
