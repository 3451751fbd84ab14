"""Layouts by policy, as arguments, and as bytes of the attribute that the kernel takes."""

from __future__ import annotations

import os
import shlex
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.checkpoint.storage.lustre import pack_lov, set_lov_attribute
from hpc_train.checkpoint.storage.stripe_layout import (
    ALL_OSTS,
    MAX_STRIPES,
    MIB,
    StripeComponent,
    choose_shard_layout,
    count_stripe_round_bytes,
    describe_stripes,
    format_setstripe_arguments,
    list_step_layouts,
)
from hpc_train.config.compose import compose
from hpc_train.config.train import LustreConfig
from hpc_train.errors import UserError

GIB = 1 << 30
AUTO = LustreConfig()


@pytest.mark.parametrize(
    ("largest", "files", "osts", "count"),
    [
        (8 * GIB, 1024, 96, 1),  # more files than OSTs: each on one
        (8 * GIB, 96, 96, 1),
        (8 * GIB, 16, 96, 6),  # shared out
        (8 * GIB, 1, 96, MAX_STRIPES),
        (8 * GIB, 1, 4, 4),
        (64 * MIB, 1, 96, 1),  # too small to be worth it
        (256 * MIB, 1, 96, 4),
        (8 * GIB, 1, None, 1),  # nobody could count them
        (200 * GIB, 1024, 96, 4),  # more than one OST should be given of one file
        (200 * GIB, 1024, 2, 2),
        (0, 4, 96, 1),
    ],
)
def test_stripes_of_a_shard(largest: int, files: int, osts: int | None, count: int) -> None:
    assert choose_shard_layout(largest, files, osts, AUTO) == (StripeComponent(count=count, size=16 * MIB),)


@given(st.integers(0, 1 << 45), st.integers(0, 20000), st.none() | st.integers(1, 2000), st.integers(1, 4095))
def test_no_layout_is_one_that_lustre_refuses(largest: int, files: int, osts: int | None, size_mib: int) -> None:
    (it,) = choose_shard_layout(largest, files, osts, LustreConfig(stripe_size_mib=size_mib))
    assert 1 <= it.count <= (osts or 2000)
    assert it.size is not None
    assert it.size % (64 << 10) == 0
    assert it.size < 1 << 32


def test_what_the_user_wants_comes_first() -> None:
    wishes = LustreConfig(stripe_count=-1, stripe_size_mib=4, pool="flash")
    assert choose_shard_layout(MIB, 10_000, 96, wishes) == (
        StripeComponent(count=ALL_OSTS, size=4 * MIB, pool="flash"),
    )
    assert {it.pool for layout in list_step_layouts(wishes) for it in layout if not it.on_mdt} == {"flash"}


def test_the_directory_of_a_step_has_something_for_every_server() -> None:
    best, without_dom, plain = list_step_layouts(AUTO)
    assert best[0] == StripeComponent(end=MIB, count=0, on_mdt=True)
    assert without_dom == best[1:]
    assert len(plain) == 1
    assert list_step_layouts(LustreConfig(progressive=False)) == [plain]
    for layout in (best, without_dom):
        ends = [it.end for it in layout]
        assert ends[-1] is None
        assert all(end % (it.size or MIB) == 0 for it, end in zip(layout, ends, strict=True) if end is not None)


def test_arguments() -> None:
    words = format_setstripe_arguments(list_step_layouts(AUTO)[0])
    assert words == shlex.split("-E 1M -L mdt -E 256M -c 1 -S 1M -E -1 -c 4 -S 1M")
    assert format_setstripe_arguments((StripeComponent(count=2, size=64 << 10, pool="scratch.flash"),)) == shlex.split(
        "-c 2 -S 64K -p scratch.flash"
    )
    assert format_setstripe_arguments((StripeComponent(count=ALL_OSTS),)) == ["-c", "-1"]


def test_words() -> None:
    assert describe_stripes((StripeComponent(count=4, size=16 * MIB),)) == "4 x 16 MiB"
    assert (
        describe_stripes((StripeComponent(count=ALL_OSTS, size=64 << 10, pool="flash"),))
        == "all OSTs x 64 KiB of pool flash"
    )
    assert (
        describe_stripes(list_step_layouts(AUTO)[0]) == "to 1 MiB: on the MDT, to 256 MiB: 1 x 1 MiB, then: 4 x 1 MiB"
    )


def test_bytes_of_a_round() -> None:
    assert count_stripe_round_bytes((StripeComponent(count=4, size=16 * MIB),), 96) == 64 * MIB
    assert count_stripe_round_bytes((StripeComponent(count=ALL_OSTS, size=MIB),), 96) == 96 * MIB
    assert count_stripe_round_bytes((StripeComponent(count=ALL_OSTS, size=MIB),), None) == MIB


# The attribute, against bytes written out by hand.


def test_the_attribute_of_a_plain_layout() -> None:
    expected = bytes.fromhex("d00bd10b 01000000" + "00" * 16 + "00000001 0400 ffff")
    assert pack_lov((StripeComponent(count=4, size=16 * MIB),)) == expected
    assert len(expected) == 32


def test_the_attribute_with_a_pool() -> None:
    expected = bytes.fromhex("d00bd30b 01000000" + "00" * 16 + "00001000 ffff ffff") + b"flash" + bytes(11)
    assert pack_lov((StripeComponent(count=ALL_OSTS, size=MIB, pool="scratch.flash"),)) == expected
    assert len(expected) == 48


def unpack_lov(data: bytes) -> StripeComponent:
    """Decode the attribute of a plain layout, from Lustre's description of lov_user_md."""
    magic, pattern, _, size, count, first = struct.unpack_from("<II16sIHH", data)
    pool = data[32:].rstrip(b"\0").decode() or None
    assert (magic, pattern, first) == (0x0BD30BD0 if pool else 0x0BD10BD0, 1, 0xFFFF)
    return StripeComponent(count=ALL_OSTS if count == 0xFFFF else count, size=size, pool=pool)


@given(
    st.integers(1, 2000) | st.just(ALL_OSTS),
    st.integers(1, 65535),
    st.none() | st.from_regex(r"[a-z0-9_-]{1,15}", fullmatch=True),
)
def test_what_is_packed_is_unpacked(count: int, units: int, pool: str | None) -> None:
    component = StripeComponent(count=count, size=units << 16, pool=pool)
    assert unpack_lov(pack_lov((component,))) == component


def test_what_the_attribute_cannot_say() -> None:
    with pytest.raises(ValueError, match="several components"):
        pack_lov(list_step_layouts(AUTO)[0])
    with pytest.raises(ValueError, match="longer than 15 bytes"):
        pack_lov((StripeComponent(pool="a_very_long_name_"),))


def test_the_attribute_goes_through_the_kernel(tmp_path: Path) -> None:
    """Under another name, since no kernel takes this one but on Lustre; there it says so."""
    layout = (StripeComponent(count=4, size=16 * MIB, pool="flash"),)
    set_lov_attribute(tmp_path, layout, "user.lov")
    assert (unpack_lov(os.getxattr(tmp_path, "user.lov")),) == layout
    assert os.listxattr(tmp_path) == ["user.lov"]
    with pytest.raises(OSError, match="not supported"):
        set_lov_attribute(tmp_path, layout)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("stripe=yes", "must be one of auto, none"),
        ("stripe_count=0", "must be -1 .all OSTs. or at least 1"),
        ("stripe_count=-2", "must be >= -1"),
        ("stripe_size_mib=0", "must be >= 1"),
        ("stripe_size_mib=4096", "must be < 4096"),
        ("pool=-x", "is not the name of a pool"),
        ("pool='a b'", "is not the name of a pool"),
    ],
)
def test_settings_out_of_range(words: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"checkpoint\.lustre\.{words.partition('=')[0]}=.*{why}") as error:
        compose([f"checkpoint.lustre.{words}"])
    assert "\n" not in str(error.value)


def test_settings_within_range() -> None:
    words = ["stripe=none", "stripe_count=-1", "stripe_size_mib=4095", "pool=scratch.flash-1", "progressive=false"]
    lustre = compose([f"checkpoint.lustre.{it}" for it in words]).checkpoint.lustre
    assert lustre == LustreConfig("none", -1, 4095, "scratch.flash-1", False)
