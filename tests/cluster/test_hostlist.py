"""Host lists: Slurm's grammar, refusals of one line, round trips. (tests/slurm holds it against Slurm itself.)"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.cluster.hostlist import MAX_HOSTS, compress_hostlist, expand_hostlist, name_switch_group
from hpc_train.errors import UserError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a[1-3]", "a1 a2 a3"),
        ("a[08-11]", "a08 a09 a10 a11"),
        ("a[9-011]", "a9 a10 a11"),
        ("nid[00001-3]", "nid00001 nid00002 nid00003"),
        ("isw1[0100,0102]", "isw10100 isw10102"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("a[1-2][3-4]", "a13 a14 a23 a24"),
        ("a[1-2]b[3-4]c[5-6]", "a1b3c5 a1b3c6 a2b3c5 a2b3c6 a1b4c5 a1b4c6 a2b4c5 a2b4c6"),
        ("a[1-2,1],a2", "a1 a2 a1 a2"),
        ("b,a,b", "b a b"),
        (",a,,b,", "a b"),
        ("a[1-2], b\n", "a1 a2 b"),
        ("[1-3]", "1 2 3"),
        ("10.0.0.[9-10]", "10.0.0.9 10.0.0.10"),
        ("n[1-2]-ib.x", "n1-ib.x n2-ib.x"),
        ("", ""),
    ],
)
def test_expands_in_slurms_order(text: str, names: str) -> None:
    assert expand_hostlist(text) == names.split()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a[3-1]", "runs backwards"),
        ("a[1-3", "bracket"),
        ("a1-3]", "bracket"),
        ("a[1-2]]", "bracket"),
        ("a[[1-2]]", "bracket"),
        ("a[]", "expected a number"),
        ("a[1,]", "expected a number"),
        ("a[1-]", "expected a number"),
        ("a[-1]", "expected a number"),
        ("a[1-2-3]", "expected a number"),
        ("a[1, 2]", "expected a number"),
        ("a[x]", "expected a number"),
        ("a[0x1]", "expected a number"),
        ("a[٣]", "cannot be in a name"),
        ("block{b1}", "slurmctld"),
        ("switch{s[1-2]}", "slurmctld"),
        ("a\x1b[31m", "cannot be in a name"),
        ("a=b", "cannot be in a name"),
        ("(null)", "cannot be in a name"),
        ("a[1-9999999999999999999]", f"more than {MAX_HOSTS}"),
        ("a[1-2000]b[1-2000]", f"more than {MAX_HOSTS}"),
        ("a[1-200000],b[1-200000]", f"more than {MAX_HOSTS}"),
        ("a" * 256, "characters"),
        ("a[" + "0" * 30 + "1-2]", "expected a number"),
    ],
)
def test_refuses_in_one_line(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        expand_hostlist(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("n1 n2 n3 n5", "n[1-3,5]"),
        ("n08 n09 n10", "n[08-10]"),
        ("n9 n10", "n[9-10]"),
        ("n09 n9", "n[09,9]"),
        ("n2 n1 n1", "n[2,1,1]"),
        ("a1 b1 a2", "a1,b1,a2"),
        ("login n1 n2", "login,n[1-2]"),
    ],
)
def test_compresses_neighbours(names: str, text: str) -> None:
    assert compress_hostlist(names.split()) == text


NAMES = st.builds("".join, st.lists(st.sampled_from(["n", "rack", "-", ".", "0", "1", "9", "10", "099"]), min_size=1))


@given(st.lists(st.one_of(NAMES, st.integers(0, 30).map("n{}".format), st.integers(0, 30).map("n{:03d}".format))))
def test_round_trip(names: list[str]) -> None:
    assert expand_hostlist(compress_hostlist(names)) == names


@given(st.lists(NAMES, min_size=1), st.randoms(use_true_random=False))
def test_a_group_has_one_name(names: list[str], random: object) -> None:
    shuffled = sorted(names, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert name_switch_group(shuffled) == name_switch_group(names)
    assert set(expand_hostlist(name_switch_group(names))) == set(names)


@given(st.text(st.sampled_from("ab019-,[] .{}=\x00é\n"), max_size=30))
def test_anything_else_is_a_user_error(text: str) -> None:
    try:
        names = expand_hostlist(text)
    except UserError as error:
        names = []
        said = str(error)
    else:
        said = ""
    assert "\n" not in said
    assert all(name and not set(name) & set("[]{}, \n") for name in names)
