"""Whether a job asks Slurm for close nodes: what it would save beside what it would wait, on recorded answers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from hpc_train.config.compose import compose
from hpc_train.launch.slurm.compact_nodes import ask_for_compact_nodes
from hpc_train.launch.slurm.node_availability import parse_usable_nodes, parse_used_share, read_availability
from hpc_train.launch.slurm.request import make_request
from hpc_train.launch.slurm.slurm_cli import Answer
from hpc_train.launch.submit import default_to_slurm
from hpc_train.training.run_directory import RunDirectory

NODES = [f"node{n}" for n in range(1, 9)]
TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1-4]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=node[5-8]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=node[1-8] Switches=leaf[1-2]
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=node[1-4] BlockSize=4
BlockName=b2 BlockIndex=1 Nodes=node[5-8] BlockSize=4
"""
HISTORY = "1800|60\n900|60\n1200|60\n0|60\n50|\n"
TAPERED = ("cluster.node.nics=1", "cluster.node.nic_gbit_s=1", "cluster.fabric.oversubscription=4")


def make_ask(
    running: dict[str, tuple[int, int]], topology: str = TREE, history: str = HISTORY
) -> Callable[[Sequence[str]], Answer]:
    """Answer as Slurm's clients do. running: node -> (minutes since its job began, minutes to its limit)."""
    jobs = "\n".join(f"{begun}:00|{left}:00|{node}" for node, (begun, left) in running.items())
    states = "\n".join(f"{node}|{'allocated' if node in running else 'idle'}|batch*|(null)" for node in NODES)
    answers = {
        ("scontrol", "topology"): topology,
        ("scontrol", "config"): "SchedulerParameters     = bf_interval=1,max_switch_wait=1200\n",
        ("sinfo", ""): states,
        ("squeue", ""): jobs,
        ("sacct", ""): history,
    }
    return lambda command: Answer(0, answers[command[0], command[2] if command[0] == "scontrol" else ""])


def decide(ask: Callable[[Sequence[str]], Answer], *overrides: str) -> tuple[dict[str, object], list[str]]:
    """Return (the options about nodes, the remarks)."""
    run = ("parallel=fsdp", "cluster.node.ranks=1", "cluster.nodes=4", "train.global_batch=32")
    config = compose(default_to_slurm([*run, *overrides]))
    request = make_request(config, RunDirectory(Path("/data/run"), Path("/data/run/checkpoints")))
    said: list[str] = []
    extra = ask_for_compact_nodes(config, request, said.append, ask).parameters["additional_parameters"]
    return {name: extra[name] for name in ("switches", "segment", "contiguous") if name in extra}, said


SCATTERED = dict.fromkeys(("node2", "node4", "node6", "node8"), (5, 5))
"""Two nodes of each leaf are busy, for at most five minutes more."""


def test_a_short_wait_for_one_leaf_is_worth_it() -> None:
    asked, said = decide(make_ask(SCATTERED), *TAPERED)
    # Communication takes half the time: of an hour half is saved if nothing else takes time, and nothing if computation
    # hides it all, which is not known of this machine. The job waits for the middle of both at most.
    found = re.search(r"asks Slurm for 1 leaf switch \(--switches=(1@00:(\d\d):(\d\d))\)", said[0])
    assert found
    assert asked == {"switches": found[1]}
    most = re.search(r"saves 0 to (1,[67]\d\d) s of the job's 3,600 s", said[0])
    assert most
    assert 60 * int(found[2]) + int(found[3]) == pytest.approx(int(most[1].replace(",", "")) / 2, abs=2)
    assert "recent jobs used 33% of their limits" in said[0]


def test_a_long_wait_is_said_and_not_asked_for() -> None:
    asked, said = decide(make_ask(dict.fromkeys(SCATTERED, (5, 6000))), *TAPERED)
    assert not asked
    assert re.search("--switches=1@00:1.:.. is not asked for", said[0])


@pytest.mark.parametrize(
    ("running", "overrides"),
    [
        ({}, TAPERED),  # what Slurm would choose is on one leaf already
        (SCATTERED, (*TAPERED, "launch.compact_nodes=off")),
        (SCATTERED, (*TAPERED[:2], "cluster.fabric.oversubscription=1", "cluster.fabric.nodes_per_leaf=4")),
        (SCATTERED, (*TAPERED, "cluster.nodes=8")),
    ],
)
def test_nothing_is_asked_where_nothing_is_gained(
    running: dict[str, tuple[int, int]], overrides: Sequence[str]
) -> None:
    assert decide(make_ask(running), *overrides) == ({}, [])


def test_auto_does_not_wait_for_a_taper_that_nobody_knows() -> None:
    assert decide(make_ask({**SCATTERED}), *TAPERED[:2]) == ({}, [])
    asked, said = decide(make_ask(SCATTERED), *TAPERED[:2], "launch.compact_nodes=ask")
    assert list(asked) == ["switches"]
    assert "saves 0 to" in said[0]


def test_the_users_own_option_stays() -> None:
    assert decide(make_ask(SCATTERED), *TAPERED, "+launch.extra.switches=2@10") == ({"switches": "2@10"}, [])


def test_ask_always_asks_where_slurm_has_switches() -> None:
    assert decide(make_ask({}), *TAPERED, "launch.compact_nodes=ask")[0] == {"switches": "1"}
    asked, said = decide(make_ask({}, topology=""), *TAPERED, "launch.compact_nodes=ask")
    assert not asked
    assert "Slurm shows no switches" in said[0]
    # What a model of the user's own exchanges is not known; the request is.
    own = ("model=custom", "model.module=/x.py", "launch.compact_nodes=ask")
    asked, said = decide(make_ask(SCATTERED), *own, "model.name=mine")
    assert asked == {"switches": "1"}
    assert "only the model itself knows" in said[0]


@pytest.mark.parametrize(
    ("running", "topology", "commands"),
    [
        ({}, TREE.splitlines()[0].replace("[1-4]", "[1-8]") + "\n", ["scontrol show topology"]),
        ({}, TREE, ["scontrol show topology", "sinfo"]),
        (SCATTERED, TREE, ["scontrol show topology", "sinfo", "squeue", "sacct", "scontrol show config"]),
        (dict.fromkeys(NODES[4:], (5, 5)), TREE, ["scontrol show topology", "sinfo", "squeue", "sacct"]),
    ],
    ids=["one leaf", "all free", "scattered", "one leaf is free"],
)
def test_slurm_is_asked_no_more_than_the_answer_needs(
    running: dict[str, tuple[int, int]], topology: str, commands: list[str]
) -> None:
    answer, asked = make_ask(running, topology), []

    def ask(command: Sequence[str]) -> Answer:
        asked.append(" ".join(command[:3]) if command[0] == "scontrol" else command[0])
        return answer(command)

    decide(ask, *TAPERED)
    assert asked == commands


def test_blocks_are_asked_for_by_segments() -> None:
    assert decide(make_ask(SCATTERED, BLOCKS), *TAPERED)[0] == {"segment": "4"}
    # No limit bounds the wait for a segment, so a job that may never end keeps auto from asking.
    endless = make_ask(SCATTERED, BLOCKS)
    answer = endless(["squeue"]).out
    nodes = "\n".join(f"{line.split('|')[0]}|UNLIMITED|{line.split('|')[2]}" for line in answer.splitlines())
    assert not decide(lambda command: Answer(0, nodes) if command[0] == "squeue" else endless(command), *TAPERED)[0]


def test_nodes_in_a_row_where_only_a_file_knows_the_switches(tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text(
        "SwitchName=leaf1 Nodes=node[1-4]\nSwitchName=leaf2 Nodes=node[5-8]\nSwitchName=spine Switches=leaf[1-2]\n"
    )
    assert decide(make_ask(SCATTERED, ""), *TAPERED, f"cluster.topology={file}")[0] == {"contiguous": True}


def test_switches_and_waits_are_those_of_brute_force() -> None:
    """The wait for one leaf is that of the best of all sets of nodes on one leaf."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        left = rng.integers(0, 60, len(NODES))
        running = {node: (0, int(minutes)) for node, minutes in zip(NODES, left, strict=True) if minutes > 20}
        found = read_availability(None, None, make_ask(running, history=""))
        assert found is not None
        sets = [list(chosen) for leaf in (range(4), range(4, 8)) for chosen in itertools.combinations(leaf, 3)]
        best = min(found.latest[chosen].max() for chosen in sets)
        any_nodes = min(found.latest[list(chosen)].max() for chosen in itertools.combinations(range(8), 3))
        asked, said = decide(make_ask(running, history=""), *TAPERED, "cluster.nodes=3", "launch.compact_nodes=ask")
        assert list(asked) == ["switches"]
        minutes = (best - any_nodes) / 60
        words = said[0].split("they are free ")[1].split(" (")[0]
        number = [float(part.replace(",", "")) for part in words.split() if part[0].isdigit()]
        assert (max(number, default=0.0) / 60) == pytest.approx(minutes, abs=0.1)


def test_lines_of_sinfo_and_sacct() -> None:
    text = "a|idle|batch*|gpu,big\nb|idle*|batch*|gpu\nc|drained|batch*|gpu\nd|mixed|batch*|big\n"
    text += "a|idle|other|gpu\ne|idle~|x|gpu\n"
    assert parse_usable_nodes(text, True) == {"a": True, "d": False}
    assert parse_usable_nodes(text, False, "gpu") == {"a": True, "e": True}
    assert parse_usable_nodes(text, True, "gpu|big") == {"a": True, "d": False}
    assert parse_used_share(HISTORY) == pytest.approx(1 / 3)
    assert parse_used_share("x|y\n") is None
