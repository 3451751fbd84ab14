"""`rocm-smi --showtopo`: whole, in sections, as JSON, and broken."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_outcome import check, outcome
from render_rocm_smi import SECTIONS, Spec, render_json, render_text

from hpc_train.cluster.readers.node import nvidia_smi, rocm_smi
from hpc_train.cluster.spec import Cluster, Gpu, Link, Node
from hpc_train.errors import UserError

HIVES = Spec(
    tuple(range(8)),
    tuple("XGMI" if a // 4 == b // 4 else "PCIE" for a, b in itertools.combinations(range(8), 2)),
    (3, 3, 1, 1, 0, 0, 2, 2),
)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    gpus = tuple(sorted(draw(st.sets(st.integers(0, 15), min_size=1, max_size=6))))
    pairs = len(gpus) * (len(gpus) - 1) // 2
    kinds = draw(st.lists(st.sampled_from(["XGMI", "PCIE"]), min_size=pairs, max_size=pairs))
    numa = draw(st.lists(st.integers(-1, 7), min_size=len(gpus), max_size=len(gpus)))
    return Spec(gpus, tuple(kinds), tuple(numa))


def expected(spec: Spec, sections: tuple[str, ...] = SECTIONS) -> Cluster:
    nodes = [it if it >= 0 and "numa" in sections else None for it in spec.numa]
    gpus = tuple(Gpu(f"GPU{gpu}", numa=node) for gpu, node in zip(spec.gpus, nodes, strict=True))
    pairs = itertools.combinations(spec.gpus, 2) if "type" in sections else ()
    links = tuple(Link("localhost", f"GPU{a}", f"GPU{b}", spec.kind(a, b)) for a, b in pairs)
    return Cluster("rocm_smi", (Node("localhost", gpus),), links)


@settings(max_examples=150)
@given(specs(), st.sets(st.sampled_from(SECTIONS), min_size=1), st.booleans(), st.booleans())
def test_any_sections_are_read_back(spec: Spec, sections: set[str], brackets: bool, stripped: bool) -> None:
    chosen = tuple(it for it in SECTIONS if it in sections or (it == "type" and len(sections) == 3))
    text = "$ rocm-smi --showtopo\n" + render_text(spec, chosen, brackets, stripped)
    assert rocm_smi.matches_rocm_smi(text)
    assert not nvidia_smi.matches_nvidia_smi(text)
    found = rocm_smi.read_rocm_smi(text, "topo.txt")
    assert replace(found, notes=()) == expected(spec, chosen)
    assert bool(found.notes) == (len(spec.gpus) > 1 and not found.links)


@settings(max_examples=100)
@given(specs(), st.sampled_from(["", "WARNING: no permission\n"]))
def test_json_is_read_back(spec: Spec, before: str) -> None:
    text = render_json(spec, before)
    assert rocm_smi.matches_rocm_smi(text)
    assert rocm_smi.read_rocm_smi(text, "topo.txt") == expected(spec)


def test_what_is_wrong_is_refused_with_its_line() -> None:
    text = render_text(HIVES, ("type",))
    lines = text.split("\n")
    cases = {
        text.replace("XGMI", "PCIE", 1): r"topo.txt:\d+: GPU1-GPU0 is XGMI, but GPU0-GPU1 is PCIE",
        "\n".join(lines[:6]): r"topo.txt:6: cut off: the line 'End of ROCm SMI Log' is missing",
        "\n".join([*lines[:6], *lines[-2:]]): r"topo.txt:3: a section that is not whole",
        "\n".join([*lines[:5], lines[5][:30], *lines[6:]]): r"topo.txt:6: row GPU1 has 2 cells of 8",
        text.replace("XGMI", "XLINK"): r"topo.txt:5: link type of GPU0-GPU1 is 'XLINK'",
        render_json(HIVES)[:-9]: r"topo.txt:1: not whole JSON",
        text + render_text(Spec((0, 1), ("XGMI",), (0, 0)), ("hops",)): r"GPUs other than in the section before",
    }
    for broken, message in cases.items():
        assert rocm_smi.matches_rocm_smi(broken)
        with pytest.raises(UserError, match=message):
            rocm_smi.read_rocm_smi(broken, "topo.txt")


@settings(max_examples=200)
@given(specs(), st.booleans(), st.data())
def test_mutated_outputs_are_refused_or_consistent(spec: Spec, as_json: bool, data: st.DataObject) -> None:
    text = render_json(spec) if as_json else render_text(spec)
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.booleans())
    text = text[:at] if cut else text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    rocm_smi.matches_rocm_smi(text)
    read = check(outcome(rocm_smi.read_rocm_smi, text))
    if read is not None and cut:
        assert set(read.links) <= set(expected(spec).links)


@settings(max_examples=100)
@given(st.text() | st.text(alphabet='GPU012 {}":[]=XMI(Topology) Numa Node'))
def test_any_text_is_refused_in_one_line(text: str) -> None:
    rocm_smi.matches_rocm_smi(text)
    check(outcome(rocm_smi.read_rocm_smi, text))
    check(outcome(rocm_smi.read_rocm_smi, "Link Type between two GPUs\n" + text))
