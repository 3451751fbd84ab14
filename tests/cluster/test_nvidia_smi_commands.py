"""`nvidia-smi topo -p2p` and `nvidia-smi nvlink -s`: what they tell, what they do not, and output that is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_outcome import check, outcome
from render_nvidia_smi import Style, render
from test_nvidia_smi import machine

from hpc_train.cluster.readers.formats import list_formats
from hpc_train.cluster.readers.node.nvidia_smi_nvlinks import matches_nvidia_smi_nvlinks, read_nvidia_smi_nvlinks
from hpc_train.cluster.readers.node.nvidia_smi_peers import matches_nvidia_smi_peers, read_nvidia_smi_peers
from hpc_train.cluster.spec import Cluster

LEGEND = "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n  U    = Unknown\n"


def peers(gpus: int, without: dict[tuple[int, int], str], legend: str = LEGEND) -> str:
    """As the driver prints it: cells and lines end in a tab."""
    rows = [" \t" + "".join(f"GPU{n}\t" for n in range(gpus))]
    for a in range(gpus):
        cells = ("X" if a == b else without.get((min(a, b), max(a, b)), "OK") for b in range(gpus))
        rows.append(f" GPU{a}\t" + "".join(f"{cell}\t" for cell in cells))
    return "\n".join(rows) + "\n" + legend


def status(links: dict[int, list[float | None]], name: str = "NVIDIA H100 80GB HBM3") -> str:
    lines = []
    for gpu, speeds in links.items():
        lines.append(f"GPU {gpu}: {name} (UUID: GPU-abcd-{gpu})")
        lines += [f"\t Link {n}: " + ("<inactive>" if it is None else f"{it} GB/s") for n, it in enumerate(speeds)]
    return "\n".join(lines) + "\n"


def claimed_by(text: str) -> list[str]:
    return [format.name for format in list_formats() if format.matches(text)]


def read_peers(text: str) -> Cluster:
    assert claimed_by(text) == ["nvidia_smi_peers"]
    cluster = check(outcome(read_nvidia_smi_peers, text))
    assert cluster is not None
    return cluster


def read_links(text: str) -> Cluster:
    assert claimed_by(text) == ["nvidia_smi_nvlinks"]
    cluster = check(outcome(read_nvidia_smi_nvlinks, text))
    assert cluster is not None
    return cluster


@pytest.mark.parametrize("legend", ["", LEGEND])
@pytest.mark.parametrize("prefix", ["", "> "])
def test_pairs_that_reach_each_other(legend: str, prefix: str) -> None:
    without = {(0, 2): "CNS", (1, 2): "CNS", (0, 3): "TNS"}
    text = "".join(prefix + line for line in peers(4, without, legend).splitlines(keepends=True))
    cluster = read_peers(text)
    pairs = [pair for pair in itertools.combinations(range(4), 2) if pair not in without]
    assert [(it.a, it.b, it.kind) for it in cluster.links] == [(f"GPU{a}", f"GPU{b}", "P2P") for a, b in pairs]
    assert cluster.notes[1:] == (
        "no direct access between GPU0-GPU2, GPU1-GPU2: CNS, the chipset does not support it",
        "no direct access between GPU0-GPU3: TNS, the topology does not support it",
    )


def test_the_matrix_of_links_wins_over_that_of_peers() -> None:
    assert claimed_by(render(machine(1), Style()) + peers(2, {})) == ["nvidia_smi"]


def test_every_cut_of_the_matrix_is_refused() -> None:
    text = peers(8, {(2, 5): "NS"}, "")
    for end in range(text.index("GPU7\tOK") + 8, len(text.rstrip()) - 1):
        result = outcome(read_nvidia_smi_peers, text[:end])
        assert isinstance(result, str), end
        check(result)


def test_changed_cells_of_peers_are_refused() -> None:
    text = peers(3, {}, "")
    for old, new, message in [
        ("GPU1\tOK\tX", "GPU1\tX\tOK", "not the row of GPU1"),
        ("GPU2\tOK", "GPU1\tOK", "not the row of GPU2"),
        ("GPU0\tX\tOK", "GPU0\tX\tNV2", "not the row of GPU0"),
    ]:
        result = outcome(read_nvidia_smi_peers, text.replace(old, new))
        assert isinstance(result, str)
        assert message in result


def test_links_that_are_up() -> None:
    cluster = read_links(status({0: [26.562] * 6, 1: [26.562] * 6, 3: [26.562] * 4 + [None] * 2}))
    assert [(gpu.id, gpu.nvlinks) for gpu in cluster.nodes[0].gpus] == [("GPU0", 6), ("GPU1", 6), ("GPU3", 4)]
    assert cluster.notes[1:] == ("GPU3 has 4 active NVLinks where others have 6; link 4, 5 down",)


def test_links_that_are_slow_or_dead() -> None:
    cluster = read_links(status({0: [53.125] * 3, 1: [53.125, 26.562, 0.0]}))
    assert [gpu.nvlinks for gpu in cluster.nodes[0].gpus] == [3, 2]
    assert cluster.notes[2] == "links slower than the usual 53.125 GB/s: GPU1: 26.562"


def test_gpus_without_links() -> None:
    text = (
        "GPU 0: NVIDIA L40S (UUID: GPU-1)\nNVML: Unable to retrieve NVLink information as all links are inActive\n"
        "GPU 1: NVIDIA RTX A4000 (UUID: GPU-2) Device does not have or support Nvlink\n"
    )
    cluster = read_links(text)
    assert [(gpu.name, gpu.nvlinks) for gpu in cluster.nodes[0].gpus] == [("NVIDIA L40S", 0), ("NVIDIA RTX A4000", 0)]
    assert "all are down" in cluster.notes[1]
    assert cluster.notes[2] == "GPU1 has no NVLinks"


def test_every_cut_of_the_links_is_refused() -> None:
    text = status({0: [26.562] * 4, 1: [26.562, None, None, 26.562]})
    for end in range(text.index("GPU 1"), len(text.rstrip())):
        if text[text.index("GPU 1") : end].strip():
            result = outcome(read_nvidia_smi_nvlinks, text[:end])
            assert isinstance(result, str), text[:end]
            check(result)


@pytest.mark.parametrize("old", ["\t Link 2: 26.562 GB/s\n", "Link 1: 26.562", "Link 0: 26.562 GB/s"])
def test_abridged_links_are_refused(old: str) -> None:
    text = status({0: [26.562] * 4, 1: [26.562] * 4})
    for new in ("\t[...]\n", ""):
        assert isinstance(outcome(read_nvidia_smi_nvlinks, text.replace(old, new, 1)), str)


@settings(max_examples=200)
@given(st.data())
def test_no_mutation_makes_a_traceback(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([peers(4, {(0, 1): "GNS"}), status({0: [25.0, None], 1: [25.0, 25.0]})]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.text(max_size=4)) + text[at + data.draw(st.integers(0, 10)) :]
    assert len(claimed_by(text)) <= 1
    for read in (read_nvidia_smi_peers, read_nvidia_smi_nvlinks):
        check(outcome(read, text))
    matches_nvidia_smi_peers(text)
    matches_nvidia_smi_nvlinks(text)
