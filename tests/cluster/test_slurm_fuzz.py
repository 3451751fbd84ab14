"""No input makes a traceback: mutated and cut texts, and noise, give a cluster or one line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm_specs import trees
from slurm_texts import shown_blocks, shown_tree, topograph_model, topology_conf, tree_yaml

from hpc_train.cluster.readers import formats
from hpc_train.cluster.spec import cluster_to_json
from hpc_train.cluster.switch_tree import find_paths as paths
from hpc_train.errors import UserError

OWN = {
    "slurm_show_topology",
    "slurm_topology_conf",
    "slurm_topology_yaml",
    "topograph",
    "slurm_environment",
    "hostlist",
    "hostfile",
}
BLOCKS = shown_blocks({"b0": ["n1", "n2"], "b1": ["n3"]}, [("b0", "b1")], 2)
ENVIRONMENT = (
    "SLURM_JOB_NODELIST=n[1-3]\nSLURM_NNODES=3\nSLURM_TASKS_PER_NODE=2(x3)\n"
    "SLURM_TOPOLOGY_ADDR=a.b.n1\nSLURM_TOPOLOGY_ADDR_PATTERN=switch.switch.node\nSLURMD_NODENAME=n1\n"
)
TORUS = "- topology: t\n  torus3d:\n    toruses:\n    - name: p\n      dims: {x: 2, y: 1, z: 1}\n      nodes: n[1-2]\n"
TEXTS = st.one_of(
    trees().map(topology_conf),
    trees().map(shown_tree),
    trees().map(lambda spec: tree_yaml("t", spec, default=True)),
    trees().map(topograph_model),
    st.sampled_from(
        [BLOCKS, ENVIRONMENT, TORUS, "n[1-3,07],m\n", "n1 slots=4\nn2\n", "RingName=r Nodes=n[1-2] RingSize=2\n"]
    ),
)
NOISE = st.sampled_from(
    [*"[]{}=,-.:\"'#\\ \t\n\r\x00\x0b&*!é", "Nodes=", "Level=9", "Switches=", "SLURM_", "- ", "[1-9999999]"]
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = draw(TEXTS)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.one_of(st.just(start), st.integers(start, len(text)), st.just(len(text))))
        text = text[:start] + draw(st.one_of(st.just(""), NOISE)) + text[end:]
    return text


def refusal(format: formats.TopologyFormat, text: str) -> str:
    """What is wrong with it; FILE for a text that is read."""
    try:
        cluster = format.read(text, "FILE")
    except UserError as error:
        return str(error)
    paths(cluster)
    cluster_to_json(cluster)
    return "FILE"


def reads_or_refuses(text: str) -> None:
    for format in formats.list_formats():
        if format.name not in OWN:
            continue
        format.matches(text)
        said = refusal(format, text)
        assert said.startswith("FILE")
        assert len(said.splitlines()) == 1


@settings(max_examples=400)
@given(mutated())
def test_mutated(text: str) -> None:
    reads_or_refuses(text)


@given(st.one_of(st.text(), st.binary().map(lambda it: it.decode("utf-8", "replace"))))
def test_noise(text: str) -> None:
    reads_or_refuses(text)


@given(TEXTS)
def test_no_two_formats_claim_one_text(text: str) -> None:
    assert sum(it.matches(text) for it in formats.list_formats()) <= 1


@given(trees(), st.integers(0, 30))
def test_a_tree_cut_after_a_line_is_refused_or_part_of_the_tree(spec: object, kept: int) -> None:
    for render in (topology_conf, shown_tree):
        text = render(spec).replace("Nodes=\n", "\n")  # type: ignore[arg-type]
        part = "".join(text.splitlines(keepends=True)[:kept])
        whole = formats.read_topology_text(text, "FILE")
        try:
            found = paths(formats.read_topology_text(part, "FILE"))
        except UserError:
            continue
        assert all(set(path) <= set(paths(whole)[node]) for node, path in found.items())


@pytest.mark.parametrize(
    "text", ["", "\n", "hello there world\n", '{"a": 1}', "0,1;2,3", "\x00\x01", "host1:4,host2:4"]
)
def test_other_texts_are_none_of_these(text: str) -> None:
    assert [it.name for it in formats.list_formats() if it.name in OWN and it.matches(text)] == []
