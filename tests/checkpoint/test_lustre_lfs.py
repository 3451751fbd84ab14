"""The command `lfs`, by a stand-in that behaves as it does: what is asked of it, and all that it may answer."""

from __future__ import annotations

import errno
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from drawn import draw
from stand_in_servers import Servers, put_on_path

from hpc_train.checkpoint.storage.lustre import (
    LfsError,
    PlacedComponent,
    count_osts,
    get_stripe_layout,
    run_lfs,
    set_stripe_layout,
)
from hpc_train.checkpoint.storage.stripe_layout import ALL_OSTS, MIB, StripeComponent

WIDE = (StripeComponent(count=4, size=16 * MIB),)
PROGRESSIVE = (
    StripeComponent(end=MIB, count=0, on_mdt=True),
    StripeComponent(end=256 * MIB, count=1, size=MIB),
    StripeComponent(count=4, size=MIB),
)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    return put_on_path(tmp_path / "servers", monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a folder"
    path.mkdir()
    return path


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["lfs", *map(str, words)], capture_output=True, text=True)


LAYOUTS = {
    "plain": WIDE,
    "progressive": PROGRESSIVE,
    "all": (StripeComponent(count=ALL_OSTS, size=64 << 10),),
    "pool": (StripeComponent(count=2, size=MIB, pool="flash"),),
}
DIALECTS = {f"{name}, {dialect}": (name, dialect) for name in LAYOUTS for dialect in ("new", "old")}


@pytest.mark.parametrize("case", draw(DIALECTS, ["plain, old", "progressive, new", "progressive, old", "pool, new"]))
def test_what_is_set_is_what_is_read_of_the_folder_and_of_files_and_folders_in_it(
    servers: Servers, folder: Path, case: str
) -> None:
    layout, dialect = LAYOUTS[DIALECTS[case][0]], DIALECTS[case][1]
    servers.are(pools={"flash": [5, 6, 7]}, dialect=dialect)
    assert set_stripe_layout(folder, layout) == ""
    (folder / "sub").mkdir()
    (folder / "sub" / "file").touch()
    assert get_stripe_layout(folder).layout == layout
    assert get_stripe_layout(folder / "sub").layout == layout
    assert get_stripe_layout(folder / "sub" / "file").layout == layout
    moved = folder.rename(folder.with_name("moved"))
    assert get_stripe_layout(moved).layout == layout


def test_what_lfs_is_told(servers: Servers, folder: Path) -> None:
    set_stripe_layout(folder, WIDE)
    set_stripe_layout(folder, PROGRESSIVE)
    assert servers.calls == [
        ["setstripe", "-c", "4", "-S", "16M", str(folder)],
        ["setstripe", *shlex.split("-E 1M -L mdt -E 256M -c 1 -S 1M -E -1 -c 4 -S 1M"), str(folder)],
    ]


def test_the_objects_of_a_file(servers: Servers, folder: Path) -> None:
    servers.are(osts=8, inactive=[1])
    set_stripe_layout(folder / "file", WIDE)
    assert get_stripe_layout(folder / "file").parts == (PlacedComponent(WIDE[0], osts=(0, 2, 3, 4), first=0),)


def test_a_file_that_exists_keeps_its_layout_be_it_empty(servers: Servers, folder: Path) -> None:
    (folder / "touched").touch()
    with pytest.raises(LfsError, match=f"exit 17: setstripe error for '{folder}/touched': stripe already set") as error:
        set_stripe_layout(folder / "touched", WIDE)
    assert error.value.code == errno.EEXIST
    set_stripe_layout(folder, WIDE)
    set_stripe_layout(folder, PROGRESSIVE)
    assert get_stripe_layout(folder).layout == PROGRESSIVE, "that of a directory is replaced"


@pytest.mark.parametrize(
    ("facts", "layout", "why"),
    [
        ({}, StripeComponent(pool="gone"), "exit 22: setstripe error for '{}': pool 'gone' does not exist"),
        ({"mode": "denied"}, WIDE[0], "exit 13: setstripe error for '{}': Permission denied"),
        ({"mode": "not-lustre"}, WIDE[0], "exit 25: setstripe error for '{}': Inappropriate ioctl for device"),
        ({"mode": "garbage-error"}, WIDE[0], "exit 3: .* \\[31mLBUG"),
    ],
)
def test_a_refusal_is_one_line(
    servers: Servers, folder: Path, facts: dict[str, str], layout: StripeComponent, why: str
) -> None:
    servers.are(**facts)
    with pytest.raises(LfsError, match="^lfs setstripe: " + why.format(folder / "new")) as error:
        set_stripe_layout(folder / "new", (layout,))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300
    assert (folder / "new").exists() == (facts.get("mode") == "not-lustre"), "it opens the file before it asks"


def test_a_warning_of_one_that_succeeds(servers: Servers, folder: Path) -> None:
    servers.are(mode="restricted")
    assert "restricted by your administrator" in set_stripe_layout(folder, WIDE)


@pytest.mark.parametrize("mode", ["hang", "hang-with-child"])
def test_one_that_hangs_is_left_behind(servers: Servers, folder: Path, mode: str) -> None:
    servers.are(mode=mode)
    with pytest.raises(LfsError, match=r"lfs setstripe: no answer in 0\.5 s") as error:
        set_stripe_layout(folder, WIDE, seconds=0.5)
    assert error.value.code is None


def test_no_lfs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(LfsError, match="lfs is not on PATH") as error:
        run_lfs(["df"])
    assert error.value.missing
    (folder / "lfs").write_bytes(b"\x7fELF nonsense")
    (folder / "lfs").chmod(0o755)
    with pytest.raises(LfsError, match="lfs cannot be run: Exec format error"):
        run_lfs(["df"])


def test_output_that_is_no_layout(servers: Servers, folder: Path) -> None:
    servers.are(mode="garbage")
    with pytest.raises(LfsError, match="it printed no layout"):
        get_stripe_layout(folder)
    assert count_osts(folder) is None


def test_a_path_that_reads_like_an_option_or_like_a_layout(servers: Servers, tmp_path: Path) -> None:
    folder = tmp_path / "lmm_stripe_count:  9 lcme_id:  7\n -d"
    folder.mkdir()
    set_stripe_layout(folder, PROGRESSIVE)
    assert get_stripe_layout(folder).layout == PROGRESSIVE
    (folder / "file").touch()
    assert get_stripe_layout(folder / "file").layout == PROGRESSIVE


def test_counting_osts(servers: Servers, folder: Path, tmp_path: Path) -> None:
    servers.are(osts=12, inactive=[3, 4], pools={"flash": [0, 1, 2]})
    assert count_osts(folder) == 10
    assert count_osts(folder, pool="flash") == 3
    assert count_osts(folder, pool="scratch.flash") == 3
    assert count_osts(folder, pool="gone") is None


def test_counting_osts_where_only_the_kernel_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name, count in (("home", 4), ("scratch", 96)):
        (tmp_path / f"{name}-clilov-ffff8a").mkdir()
        (tmp_path / f"{name}-clilov-ffff8a" / "numobd").write_text(f"{count}\n")
    monkeypatch.setattr("hpc_train.checkpoint.storage.lustre.LOV_ROOTS", (tmp_path / "none", tmp_path))
    assert count_osts(tmp_path, "10.0.0.1@tcp:10.0.0.2@tcp:/scratch") == 96
    assert count_osts(tmp_path, "10.0.0.1@tcp:/archive") is None


# The stand-in itself: it must fail where the real one does, in the real one's words.


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            "-S 65537",
            22,
            "lfs setstripe: error: bad stripe_size 65537, must be an even multiple of 65536 bytes:"
            " Invalid argument (22)",
        ),
        ("-S 4G", 22, "lfs setstripe: error: stripe size '4294967296' over 4GB limit: Invalid argument (22)"),
        ("-o 1,2", 121, "lfs setstripe: setstripe error for '{}': inactive OST among your specified 2 OST(s)"),
        ("-p gone", 22, "lfs setstripe: setstripe error for '{}': pool 'gone' does not exist"),
        ("-E 3M -S 2M -E -1", 22, "lfs setstripe: setstripe error for '{}': Invalid argument"),
    ],
)
def test_the_stand_in_refuses(servers: Servers, folder: Path, words: str, code: int, said: str) -> None:
    servers.are(inactive=[2])
    done = run("setstripe", *words.split(), folder)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said.format(folder) + "\n")


def test_the_stand_in_takes_units_and_hands_options_down(servers: Servers, folder: Path) -> None:
    assert (
        run(
            "setstripe", *shlex.split("-E 1024 -L mdt -E 64m -C 2 -S 512 -p flash -E 1G -c 8 -E eof -c -1"), folder
        ).returncode
        == 22
    )
    servers.are(pools={"flash": [1, 2]})
    assert (
        run(
            "setstripe", *shlex.split("-E 1024 -L mdt -E 64m -C 2 -S 512 -p flash -E 1G -c 8 -E eof -c -1"), folder
        ).returncode
        == 0
    )
    half = 512 << 10
    assert get_stripe_layout(folder).layout == (
        StripeComponent(end=MIB, count=0, on_mdt=True),
        StripeComponent(end=64 * MIB, count=2, size=half, pool="flash"),
        StripeComponent(end=1 << 30, count=8, size=half, pool="flash"),
        StripeComponent(count=ALL_OSTS, size=half, pool="flash"),
    )
    assert run("setstripe", "-d", folder).returncode == 0
    assert get_stripe_layout(folder).layout == (StripeComponent(count=1, size=MIB),)


def test_the_stand_in_prints_in_the_forms_of_the_real_one(servers: Servers, folder: Path) -> None:
    run("setstripe", "-c", "2", "-S", "1M", folder / "f")
    new = [
        re.escape(str(folder / "f")),
        r"lmm_stripe_count:  2",
        r"lmm_stripe_size:   1048576",
        r"lmm_pattern:       raid0",
        r"lmm_layout_gen:    0",
        r"lmm_stripe_offset: 0",
        r"\tobdidx\t\t objid\t\t objid\t\t group",
        r"\t     0\t             2\t          0x2\t             0",
        r"\t     1\t             3\t          0x3\t             0",
        r"",
    ]
    assert_lines(run("getstripe", folder / "f").stdout, new)
    servers.are(dialect="old")
    old = [
        re.escape(str(folder / "f")),
        r"lmm_stripe_count:   2",
        r"lmm_stripe_size:    1048576",
        r"lmm_pattern:        1",
    ]
    old += [r"lmm_layout_gen:     0", r"lmm_stripe_offset:  0", new[6]]
    old += [rf"\t     {n}\t     \d{{9}}\t    0x[0-9a-f]{{7}}\t   0x[0-9a-f]{{9}}" for n in (0, 1)]
    assert_lines(run("getstripe", folder / "f").stdout, [*old, ""])
    line = r"stripe_count:  1 stripe_size:   1048576 stripe_offset: -1"
    assert_lines(run("getstripe", "-d", folder).stdout, [re.escape(str(folder)), line])


def test_the_stand_in_prints_composite_layouts_in_the_forms_of_the_real_one(servers: Servers, folder: Path) -> None:
    run("setstripe", *shlex.split("-E 100M -c 1 -E -1 -c -1"), folder)
    (folder / "f").touch()
    head = [r"lcm_layout_gen:    2", r"lcm_mirror_count:  1", r"lcm_entry_count:   2"]
    first = [
        r"lcme_id:             1",
        r"lcme_mirror_id:      0",
        r"lcme_flags:          init",
        r"lcme_extent.e_start: 0",
    ]
    first += [r"lcme_extent.e_end:   104857600"]
    stripes = [
        r"lmm_stripe_count:  1",
        r"lmm_stripe_size:   1048576",
        r"lmm_pattern:       raid0",
        r"lmm_layout_gen:    0",
    ]
    stripes += [r"lmm_stripe_offset: 0", r"lmm_objects:"]
    text = run("getstripe", folder / "f").stdout.splitlines()
    expected = [
        *(f"  {line}" for line in head),
        *(f"    {line}" for line in first),
        *(f"      {line}" for line in stripes),
    ]
    assert_lines("\n".join(text[: len(expected) + 1]), [re.escape(str(folder / "f")), *expected])
    assert text[len(expected) + 1] == "      - 0: { l_ost_idx: 0, l_fid: [0x100000000:0x2:0x0] }"
    assert text[len(expected) + 2 : len(expected) + 4] == ["", "    lcme_id:             2"]
    assert "    lcme_extent.e_end:   EOF" in text
    yaml = run("getstripe", "-y", folder / "f").stdout.splitlines()
    assert yaml[:5] == [*head, "components:", "  - lcme_id:             1"]
    assert yaml[9] == "    sub_layout:"
    assert_lines("\n".join(yaml[10:16]), [f"      {line}" for line in stripes])
    assert yaml[16:18] == ["      - l_ost_idx: 0", "        l_fid:     0x100000000:0x2:0x0"]
    of_folder = run("getstripe", "-d", folder).stdout
    assert "    lcme_id:             N/A\n    lcme_mirror_id:      N/A\n" in of_folder
    assert "      stripe_count:  -1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1\n" in of_folder


def assert_lines(text: str, patterns: list[str]) -> None:
    lines = text.removesuffix("\n").split("\n")
    assert len(lines) == len(patterns), text
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
