"""Every hazard of `nvidia-smi topo -m`: what is rendered from a spec is read back as it, or refused in one line."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_outcome import check, outcome
from render_nvidia_smi import Spec, Style, render

from hpc_train.cluster.readers.node import nvidia_smi
from hpc_train.cluster.readers.node.nvidia_smi import infer_nvlinks
from hpc_train.cluster.spec import Cluster, Gpu, Link, Nic, Node
from hpc_train.errors import UserError

CUBE = "NV1 NV1 NV2 NV2 SYS SYS SYS NV2 NV1 SYS NV2 SYS SYS NV2 SYS SYS NV1 SYS SYS SYS SYS NV1 NV1 NV1 NV2 NV2 NV1 NV2"
DEVICES = ("mlx5_0", "mlx5_1", "mlx5_bond_0", "rdmap16s27", "roceP2p1s0f0", "hfi1_0", "ibp26s0", "bnxt_re3", "mlx4_0")
LISTS = ("0-23,48-71", "0,2,4,6", "56", "0-251", "16-17")
NUMA = (0, 1, 7, None, "0,3-9,11-17", "0-1")


def gpu_kinds(draw: st.DrawFn) -> tuple[int, list[str], tuple[int | None, ...] | None]:
    """GPUs, kinds of their pairs, and the NVLinks that these tell."""
    name = draw(st.sampled_from(["switch", "mesh", "cube", "bridges", "pcie", "slice"]))
    count = {"mesh": 4, "cube": 8, "bridges": 4, "slice": 3}.get(name) or draw(st.integers(1, 5))
    pairs = list(itertools.combinations(range(count), 2))
    if name == "switch":
        return count, ["NV18"] * len(pairs), (18 if count > 1 else None,) * count
    if name == "mesh":
        return count, ["NV4"] * 6, (12,) * 4
    if name == "cube":
        return count, CUBE.split(), (6,) * 8
    if name == "bridges":
        return count, ["NV12" if pair in ((0, 1), (2, 3)) else "SYS" for pair in pairs], (12,) * 4
    if name == "slice":
        return count, ["NV6"] * 3, (None,) * 3
    return count, [draw(st.sampled_from(["PIX", "PXB", "PHB", "NODE", "SYS"])) for _ in pairs], (None,) * count


@st.composite
def specs(draw: st.DrawFn, blank: bool = True, most_nics: int = 4) -> Spec:
    count, kinds, nvlinks = gpu_kinds(draw)
    nics = draw(st.lists(st.sampled_from(DEVICES), unique=True, max_size=most_nics))
    between = iter(kinds)
    every = [
        next(between) if b < count else draw(st.sampled_from(["PIX", "PXB", "PHB", "NODE", "SYS"]))
        for a, b in itertools.combinations(range(count + len(nics)), 2)
    ]
    cpus = st.sampled_from((*LISTS, None) if blank else LISTS)
    affinity = draw(st.lists(st.tuples(cpus, st.sampled_from(NUMA)), min_size=count, max_size=count))
    return Spec(tuple(every), tuple(affinity), tuple(nics), nvlinks)


styles = st.builds(
    Style,
    era=st.sampled_from(["old", "middle", "new"]),
    layout=st.sampled_from(["tabs", "expanded", "aligned", "collapsed", "mixed"]),
    escapes=st.sampled_from(["none", "inside", "before", "bare"]),
    prefix=st.sampled_from(["", "node7: ", "> ", "2024-05-01 12:00:01,123 | INFO | ", "[gpu01] "]),
    around=st.sampled_from(
        [
            ("", ""),
            ("$ nvidia-smi topo -m\n", "[root@gpu7 ~]# \n"),
            ("```text\n", "```\nGPU0 and GPU1 share a bridge.\n"),
            ("GPUs: GPU0 and GPU1, see\n\n- topology: \tGPU0\tGPU1\tCPU Affinity\n", "\n\n"),
        ]
    ),
    nic_rows=st.sampled_from([99, 0, 1]),
    trailing=st.booleans(),
    stripped=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n"]),
)


def expected(spec: Spec, style: Style) -> Cluster:
    """What the text tells of the spec."""
    numbered = style.era == "new"
    gpus = [
        Gpu(f"GPU{at}", *affinity(spec, style, at), nvlinks=(spec.nvlinks or (None,) * 99)[at])
        for at in range(spec.gpus)
    ]
    nics = [Nic(f"NIC{at}", device) for at, device in enumerate(spec.nics)]
    ids = [it.id for it in (*gpus, *nics)]
    printed = spec.gpus + style.nic_rows
    links = [
        Link("localhost", ids[a], ids[b], spec.kind(a, b))
        for a, b in itertools.combinations(range(len(ids)), 2)
        if min(a, b) < printed
    ]
    assert numbered or style.era in ("old", "middle")
    return Cluster("nvidia_smi", (Node("localhost", tuple(gpus), tuple(nics)),), tuple(links))


def affinity(spec: Spec, style: Style, gpu: int) -> tuple[int | str | None, str | None]:
    """Where blanks left no trace a list alone may be processors or NUMA nodes: neither is told."""
    cpus, numa = spec.affinity[gpu]
    if style.era == "old":
        return None, cpus
    traced = style.layout in ("tabs", "aligned")
    if cpus is None and isinstance(numa, str) and not traced:
        return None, None
    return numa, cpus


@settings(max_examples=300)
@given(specs(), styles)
def test_every_form_is_read_back(spec: Spec, style: Style) -> None:
    text = render(spec, style)
    assert nvidia_smi.matches_nvidia_smi(text)
    assert nvidia_smi.read_nvidia_smi(text, "topo.txt") == expected(spec, style)


@settings(max_examples=150)
@given(specs(blank=False, most_nics=9), st.integers(41, 132), st.booleans(), st.sampled_from(["old", "middle", "new"]))
def test_wrapped_lines_are_joined_or_refused(spec: Spec, width: int, stripped: bool, era: str) -> None:
    style = Style(era=era, width=width, stripped=stripped)
    read = outcome(nvidia_smi.read_nvidia_smi, render(spec, style))
    if isinstance(read, str):
        assert "several ways" in read
        return
    assert read.links == expected(spec, style).links
    for gpu, told in zip(read.nodes[0].gpus, expected(spec, style).nodes[0].gpus, strict=True):
        assert gpu in (told, replace(told, cpus=None, numa=None))


@pytest.mark.parametrize("width", [80, 100, 128, 200])
@pytest.mark.parametrize("stripped", [False, True])
def test_a_wrapped_machine_of_26_nics_is_whole(width: int, stripped: bool) -> None:
    spec = machine(26)
    style = Style(width=width, stripped=stripped)
    assert nvidia_smi.read_nvidia_smi(render(spec, style), "topo.txt") == expected(spec, style)


def test_lost_separators_beyond_30_nics() -> None:
    spec = machine(36)
    for style in (Style(glued_from=37), Style(glued_from=37, layout="expanded")):
        assert nvidia_smi.read_nvidia_smi(render(spec, style), "topo.txt") == expected(spec, style)


@pytest.mark.parametrize("numa", [0, "0,3-9"])
def test_a_numa_cell_below_a_header_that_a_long_name_moved_is_no_list_of_processors(numa: int | str) -> None:
    spec = Spec(("SYS", "PIX", "SYS"), (("0-23,48-71", 0), (None, numa)), ("mlx5_bond_0",), (None, None))
    read = nvidia_smi.read_nvidia_smi(render(spec, Style(era="middle", layout="expanded")), "topo.txt")
    assert [(it.cpus, it.numa) for it in read.nodes[0].gpus] == [("0-23,48-71", 0), (None, numa if numa == 0 else None)]


def machine(nics: int) -> Spec:
    """Eight GPUs behind NVSwitches; the first NICs are near the GPUs, the others far."""
    pairs = itertools.combinations(range(8 + nics), 2)
    kinds = ["NV18" if b < 8 else "PIX" if b - 8 == a else "NODE" if a < 8 else "SYS" for a, b in pairs]
    affinity = (("0-47,96-143", 0),) * 4 + (("48-95,144-191", 1),) * 4
    return Spec(tuple(kinds), affinity, tuple(f"mlx5_{at}" for at in range(nics)), (18,) * 8)


@settings(max_examples=100)
@given(specs(), st.sampled_from(["old", "middle", "new"]), st.data())
def test_contradicting_triangles_are_refused_naming_both(spec: Spec, era: str, data: st.DataObject) -> None:
    if spec.gpus < 2:
        return
    lines = render(spec, Style(era=era)).split("\n")
    at = data.draw(st.integers(1, spec.gpus - 1))
    cells = lines[1 + at].split("\t")
    cells[1] = "PXB" if cells[1] != "PXB" else "PIX"
    lines[1 + at] = "\t".join(cells)
    with pytest.raises(UserError, match=r"^topo.txt:\d+: GPU\d-GPU\d is \w+, but GPU\d-GPU\d in line \d+ is \w+"):
        nvidia_smi.read_nvidia_smi("\n".join(lines), "topo.txt")


def test_what_is_missing_is_refused_with_its_line() -> None:
    lines = render(machine(2), Style()).split("\n")
    cases = {
        "\n".join(lines[:5] + lines[6:]): r"topo.txt:1: GPU4 has no row below",
        "\n".join([*lines[:3], lines[3].replace("NODE", "P2P"), *lines[4:]]): r"topo.txt:4: row GPU2: unexpected",
        "\n".join([*lines[:3], lines[3][:9]]): r"topo.txt:1: GPU3 has no row|topo.txt:4: row GPU2 has 1 of 10",
        "\n".join([*lines, *render(machine(3), Style()).split("\n")]): r"a second, different matrix",
        "\n".join([*lines[:9], lines[1]]): r"topo.txt:10: a second row GPU0",
        lines[0]: r"topo.txt:1: no rows of GPUs",
    }
    for text, message in cases.items():
        assert nvidia_smi.matches_nvidia_smi(text)
        with pytest.raises(UserError, match=message):
            nvidia_smi.read_nvidia_smi(text, "topo.txt")


def test_peer_capabilities_are_no_topology() -> None:
    text = " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
    assert not nvidia_smi.matches_nvidia_smi(text)
    with pytest.raises(UserError, match=r"^topo.txt:1: `nvidia-smi topo -p2p`; expected .*topo -m"):
        nvidia_smi.read_nvidia_smi(text, "topo.txt")
    both = render(machine(1), Style()) + text
    assert nvidia_smi.read_nvidia_smi(both, "topo.txt") == expected(machine(1), Style())


def test_the_same_matrix_twice_is_one_node() -> None:
    text = render(machine(2), Style())
    assert nvidia_smi.read_nvidia_smi(text + "\n" + text, "topo.txt") == expected(machine(2), Style())


def test_nvlinks_only_where_the_cells_tell_them() -> None:
    assert infer_nvlinks([18] * 7, 7) == 18
    assert infer_nvlinks([16, 18, 18], 3) == 18
    assert infer_nvlinks([16] * 3, 3) == 16
    assert infer_nvlinks([4] * 3, 3) == 12
    assert infer_nvlinks([1, 1, 2, 2], 7) == 6
    assert infer_nvlinks([12], 1) == 12
    assert infer_nvlinks([], 3) == 0
    assert infer_nvlinks([6] * 3, 3) is None
    assert infer_nvlinks([8, 8], 2) is None


def facts(
    nics: int, near: dict[tuple[int, int], str], affinity: list[tuple[str, int | str]], kind: str = "NV18"
) -> Spec:
    """A node of which only some GPU-NIC cells are told; the others are SYS."""
    gpus = len(affinity)
    pairs = itertools.combinations(range(gpus + nics), 2)
    kinds = [kind if b < gpus else near.get((a, b - gpus), "SYS") for a, b in pairs]
    return Spec(tuple(kinds), tuple(affinity), tuple(f"mlx5_{at}" for at in range(nics)))


HALVES = [("0-47", 0)] * 4 + [("48-95", 1)] * 4
MACHINES = {
    "interleaved": facts(9, dict.fromkeys(enumerate([2, 4, 6, 8, 1, 3, 5, 7]), "PIX"), HALVES, "NV8"),
    "numa_lists": facts(6, {}, [("0-71", "0,3-9,11-17")] * 2 + [("72-143", "1,19-25,27-33")] * 2),
    "two_near": facts(26, {(0, 18): "PIX", (1, 21): "PIX", (1, 20): "PHB", (2, 20): "PIX", (2, 21): "PHB"}, HALVES),
    "four_near": facts(18, {(g, g // 2 * 6 + n): "PXB" for g in range(4) for n in range(4)}, HALVES),
    "sub_numa": facts(9, {}, [("0-23,96-119", 0)] * 3 + [("24-47,120-143", 1)] + [("48-71,144-167", 2)] * 4),
    "all_far": facts(2, {(6, 0): "PHB", (6, 1): "PHB"}, HALVES, "SYS"),
}


@pytest.mark.parametrize("name", list(MACHINES))
@pytest.mark.parametrize("layout", ["tabs", "expanded", "aligned", "collapsed", "mixed"])
def test_machines_of_the_field(name: str, layout: str) -> None:
    spec = MACHINES[name]
    style = Style(layout=layout, gpu_numa=tuple(str(2 + 8 * at) for at in range(spec.gpus)) if "lists" in name else ())
    read = nvidia_smi.read_nvidia_smi(render(spec, style), "topo.txt")
    told = expected(spec, style)
    assert read.links == told.links
    assert read.nodes[0].nics == told.nodes[0].nics
    assert [(it.numa, it.cpus) for it in read.nodes[0].gpus] == [(it.numa, it.cpus) for it in told.nodes[0].gpus]


@settings(max_examples=300)
@given(specs(), styles, st.data())
def test_mutated_texts_are_refused_in_one_line_or_consistent(spec: Spec, style: Style, data: st.DataObject) -> None:
    text = render(spec, style)
    how = data.draw(st.sampled_from(["cut", "shuffle", "drop", "change"]))
    at = data.draw(st.integers(0, len(text)))
    if how == "cut":
        text = text[:at]
    elif how == "change":
        text = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    else:
        lines = text.split("\n")
        text = "\n".join(data.draw(st.permutations(lines)) if how == "shuffle" else lines[::2])
    check_one_line_or_consistent(text, expected(spec, style) if how in ("cut", "shuffle", "drop") else None)


def check_one_line_or_consistent(text: str, whole: Cluster | None) -> None:
    nvidia_smi.matches_nvidia_smi(text)
    read = check(outcome(nvidia_smi.read_nvidia_smi, text))
    if read is not None and whole is not None:
        kinds = {(link.a, link.b): link.kind for link in whole.links}
        assert all(kinds[link.a, link.b] == link.kind for link in read.links)
        assert len(read.nodes[0].gpus) == len(whole.nodes[0].gpus)


@settings(max_examples=200)
@given(st.text() | st.text(alphabet="GPUNIC0123 X\tSYV\n,-/Aa"))
def test_any_text_is_refused_in_one_line(text: str) -> None:
    check_one_line_or_consistent(text, None)
