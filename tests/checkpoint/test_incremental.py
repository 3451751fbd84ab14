"""checkpoint.incremental: only what has changed is written, and every step is as whole as any other."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import h5py
import pytest
import torch
from checkpoint_commands import Terminal
from checkpoint_helpers import State, alone, blank, holds, random_bits, same_pieces, save_alone, sharded, whole
from faults import at_all, fails
from incremental_helpers import SMALL, adapter, check, inodes, manifest, saved, saver, steps_of, trained

from hpc_train.checkpoint import (
    Saver,
    list_committed_steps,
    load_step,
    prune_steps,
    resume_from_checkpoint,
    verify_step,
)
from hpc_train.checkpoint.format.hdf5_index import INDEX_FILE
from hpc_train.checkpoint.save.incremental.incremental_writer import IncrementalWriter, SharingLimits
from hpc_train.checkpoint.save.local_stage import LocalStage
from hpc_train.checkpoint.save.shard_file import ShardStager
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks


def test_what_is_frozen_is_written_once(tmp_path: Path) -> None:
    of, tensors = saver(tmp_path), adapter()
    first = saved(of, 1, tensors)
    for step in (2, 3, 4):
        tensors = trained(tensors, step)
        it = saved(of, step, tensors)
        assert steps_of(tmp_path, step) == [1, None]
        assert (it.shared, it.warning) == (first.bytes, None)
        assert it.bytes - it.shared < first.bytes
    assert inodes(tmp_path, 4)[1] == inodes(tmp_path, 1)[None]
    with h5py.File(tmp_path / "step-4/shards/000/000000.h5") as file:
        assert set(file) == {"adapter.weight", "optim.exp_avg.adapter.weight", "optim.step.adapter.weight"}


def test_if_all_has_changed_the_file_is_that_of_a_plain_save(tmp_path: Path) -> None:
    of = saver(tmp_path / "incremental")
    for step in (1, 2):
        tensors = {"w": random_bits((64, 48), torch.float32, step), "n": torch.tensor(step)}
        assert saved(of, step, tensors).shared == 0
        save_alone(tmp_path / "plain", step, tensors)
        mine, plain = (tmp_path / name / f"step-{step}/shards" for name in ("incremental", "plain"))
        files = sorted(path.relative_to(plain) for path in plain.rglob("*.h5*"))
        assert files == sorted(path.relative_to(mine) for path in mine.rglob("*.h5*"))
        assert [(mine / it).read_bytes() for it in files] == [(plain / it).read_bytes() for it in files]


def test_if_nothing_has_changed_nothing_is_written(tmp_path: Path) -> None:
    of, tensors = saver(tmp_path), adapter()
    saved(of, 1, tensors)
    it = saved(of, 2, tensors)
    assert it.shared == it.bytes > 0
    assert steps_of(tmp_path, 2) == [1]
    shutil.rmtree(tmp_path / "step-1")
    check(tmp_path, 2, tensors)


def test_an_embedding_of_which_few_rows_change(tmp_path: Path) -> None:
    of, tensors = saver(tmp_path), {"embedding": random_bits((1000, 64), torch.float32)}
    saved(of, 1, tensors)
    for step, row in ((2, 17), (3, 500)):
        tensors = {"embedding": tensors["embedding"].clone()}
        tensors["embedding"][row] = step
        saved(of, step, tensors)
        own = manifest(tmp_path, step).files[-1]
        with h5py.File(tmp_path / f"step-{step}" / own.name) as file:
            assert [dataset.shape for dataset in file.values()] == [(4, 64)], "a run of 1 KiB"
    assert steps_of(tmp_path, 3) == [1, 2, None]


def test_a_step_moves_without_the_earlier_ones(tmp_path: Path) -> None:
    of = saver(tmp_path, SharingLimits(least=0, run=40))
    tensors = {"w": torch.arange(60.0).reshape(3, 4, 5), "half": torch.arange(40).bfloat16()}
    saved(of, 1, tensors)
    for step, at in ((2, (1, 2)), (3, (1, 3)), (4, (0, 0))):
        tensors["w"][at] += 100.0
        tensors["half"][step] = -1.0
        saved(of, step, tensors)
    moved = shutil.move(tmp_path / "step-4", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "step-1")
    Path(moved).rename(tmp_path / "moved-step-4")
    (tmp_path / "other").mkdir()
    (tmp_path / "moved-step-4").rename(tmp_path / "other/step-4")
    assert holds(tmp_path / "other", 4, tensors)


def test_many_saves_keep_to_few_files_and_to_twice_the_bytes(tmp_path: Path) -> None:
    of, generator = saver(tmp_path), torch.Generator().manual_seed(1)
    tensors = {"w": torch.randn(2048, 64, generator=generator)}
    data, header = tensors["w"].nbytes, 100_000
    most = 0
    for step in range(1, 21):
        of.save(step, whole(tensors), {})
        assert of.wait()[0].error is None
        if step % 5 == 0:
            check(tmp_path, step, tensors)
        files = manifest(tmp_path, step).files
        assert len([file for file in files if file.written_at is not None]) <= 4
        assert len(files) <= 6
        assert sum(file.bytes for file in files) <= 2 * data + len(files) * header
        most = max(most, len(files))
        tensors = {"w": tensors["w"].clone()}
        tensors["w"][torch.randint(0, 2048, (20,), generator=generator)] += 1.0
    assert most > 3
    assert prune_steps(tmp_path, keep=1) == list(range(1, 20))
    assert verify_step(tmp_path, 20) == []
    names = {(tmp_path / "step-20" / file.name).stat().st_nlink for file in manifest(tmp_path, 20).files}
    assert names == {1}, "the file system has given back the rest"


def test_a_file_that_is_mostly_stale_is_written_anew_and_let_go(tmp_path: Path) -> None:
    of = saver(tmp_path)
    tensors = {name: random_bits((64, 64), torch.float32, n) for n, name in enumerate("abcde")}
    saved(of, 1, tensors)
    for step, changed in ((2, "ab"), (3, "c"), (4, "")):
        tensors = {name: it + 1 if name in changed else it for name, it in tensors.items()}
        saved(of, step, tensors)
    assert steps_of(tmp_path, 2) == [1, None], "three of five are as they were"
    assert steps_of(tmp_path, 3) == [2, None, None], "two of five: they moved, apart from what changes"
    assert sorted(steps_of(tmp_path, 4)) == [2, 3, 3]  # type: ignore[type-var]
    with h5py.File(tmp_path / "step-3/shards/000/000000.unchanging.h5") as file:
        assert set(file) == {"d", "e"}


def test_only_so_many_files_are_shared(tmp_path: Path) -> None:
    of = saver(tmp_path, SharingLimits(files=1, least=0, run=1024))
    tensors = {name: random_bits((64, 64), torch.float32, n) for n, name in enumerate("abcdef")}
    for step, changed in enumerate(["", "a", "b", "c"], start=1):
        tensors = {name: it + 1 if name in changed else it for name, it in tensors.items()}
        saved(of, step, tensors)
        assert len([it for it in steps_of(tmp_path, step) if it is not None]) <= 1


def test_little_is_not_worth_a_name(tmp_path: Path) -> None:
    of, tensors = saver(tmp_path, SharingLimits()), adapter()
    saved(of, 1, tensors)
    assert saved(of, 2, trained(tensors, 2)).shared == 0, "less than 1 MiB"
    assert steps_of(tmp_path, 2) == [None]


def test_every_so_many_saves_one_is_whole(tmp_path: Path) -> None:
    """Of those that were committed, so that it is the same on every rank; and then the first copy is let go."""
    tensors = adapter()
    of = Saver(tmp_path, alone(), background=False, incremental=IncrementalWriter(SMALL, whole_every=3))
    for step in range(1, 8):
        if step == 4:
            with at_all(("rename",), fails(errno.EIO)):
                of.save(step, whole(tensors), {})
                assert of.wait()[0].error is not None
        saved(of, step, tensors)
        tensors = trained(tensors, step)
    found = [steps_of(tmp_path, step) for step in range(1, 8)]
    assert found == [[None], [1, None], [1, None], [None], [4, None], [4, None], [None]]
    assert prune_steps(tmp_path, keep=1) == [1, 2, 3, 4, 5, 6]
    assert verify_step(tmp_path, 7) == []


def test_what_will_be_written_is_known_before(tmp_path: Path) -> None:
    """Free space is asked for that, and not for what is shared."""
    it, tensors = IncrementalWriter(SMALL), adapter()
    of = Saver(tmp_path, alone(), background=False, incremental=it)
    saved(of, 1, tensors)
    tensors = trained(tensors, 2)
    changes = it.compare(ShardStager().stage(whole(tensors)), 2)
    own = saved(of, 2, tensors)
    assert changes is not None
    assert changes.size == own.bytes - own.shared > 0


def test_another_layout_and_other_tensors(tmp_path: Path) -> None:
    of, tensors = saver(tmp_path), adapter()
    saved(of, 1, tensors)
    more: State = {**tensors, "new": random_bits((5,), torch.float32, 9)}
    more.pop("experts")
    saved(of, 2, more)
    assert steps_of(tmp_path, 2) == [None, None], "less than half of the first is wanted"
    longer = {**more, "body.weight": torch.cat([more["body.weight"], torch.zeros(1, 48)])}
    saved(of, 3, longer)
    assert None in steps_of(tmp_path, 3)


def test_a_step_that_is_not_later_is_whole(tmp_path: Path) -> None:
    of, tensors = saver(tmp_path), adapter()
    for step in (1, 2, 2, 1):
        saved(of, step, tensors)
        assert (
            steps_of(tmp_path, step) == ([1] if step == 2 and len(list_committed_steps(tmp_path)) == 1 else [None])
            or step == 2
        )
    assert steps_of(tmp_path, 1) == [None]


@pytest.mark.parametrize("what", ["step is gone", "file is another", "table is another", "file is shorter"])
def test_a_source_that_is_not_what_it_was_is_not_shared(tmp_path: Path, what: str) -> None:
    of, tensors = saver(tmp_path), adapter()
    saved(of, 1, tensors)
    file = tmp_path / "step-1/shards/000/000000.h5"
    if what == "step is gone":
        shutil.rmtree(tmp_path / "step-1")
    elif what == "file is another":
        shutil.copy(file, tmp_path / "copy")
        (tmp_path / "copy").rename(file)
    elif what == "table is another":
        table = file.with_name(file.name + ".digests")
        table.write_bytes(table.read_bytes()[::-1])
    else:
        os.truncate(file, file.stat().st_size - 1)
    it = saved(of, 2, trained(tensors, 2))
    assert it.shared == 0
    assert "a file of step 1 cannot be shared" in str(it.warning)
    names = [path.name for path in (tmp_path / "step-2/shards/000").iterdir()]
    assert [name for name in names if ".step-1" in name] == [], "no name is left that nobody uses"
    tensors = trained(tensors, 3)
    assert saved(of, 3, tensors).shared > 0, "from then on it is"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_costs_one_warning(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    of, tensors = saver(tmp_path), adapter()
    saved(of, 1, tensors)
    with at_all(("link",), fails(number)) as made:
        for step in (2, 3, 4):
            tensors = trained(tensors, step)
            it = saved(of, step, tensors)
            assert (it.shared, steps_of(tmp_path, step)) == (0, [None])
            assert (it.warning is not None) == (step == 2)
    assert made == ["link"]
    assert caplog.text.count("cannot be shared") == 1
    assert os.strerror(number) in caplog.text


def test_a_file_with_all_the_names_it_can_have(tmp_path: Path) -> None:
    of, tensors = saver(tmp_path), adapter()
    saved(of, 1, tensors)
    with at_all(("link",), fails(errno.EMLINK)):
        assert saved(of, 2, tensors).shared == 0
    assert saved(of, 3, tensors).shared > 0, "the next has few"


def test_a_disk_of_the_node_takes_whole_saves_only(tmp_path: Path) -> None:
    disk = tmp_path / "node"
    disk.mkdir()
    of = Saver(
        tmp_path / "c", alone(), background=False, incremental=IncrementalWriter(SMALL), local_stage=LocalStage(disk)
    )
    tensors = adapter()
    for step in (1, 2, 3):
        saved(of, step, tensors)
        tensors = trained(tensors, step)
    assert steps_of(tmp_path / "c", 3) == [1, None]


def test_two_writers_share_apart(tmp_path: Path) -> None:
    """All of one rank's changes, nothing of the other's, then the other way round; read on one and on three."""
    states = [{"w": torch.randn(60, 40)}]
    for rows in (slice(0, 30), slice(30, 60), slice(0, 60)):
        states.append({"w": states[-1]["w"].clone()})
        states[-1]["w"][rows] += 1.0

    def save_all(world: World) -> list[int]:
        of = Saver(tmp_path, world, incremental=IncrementalWriter(SMALL))
        for step, tensors in enumerate(states, start=1):
            of.save(step, sharded(tensors, 0, world.rank, world.size), {})
            assert [it.error for it in of.wait()] == [None]
        return [manifest(tmp_path, step).shared for step in range(1, 5)]

    first, second = run_ranks(save_all, 2)
    assert first == second
    assert [it > 0 for it in first] == [False, True, True, False]
    for step, tensors in enumerate(states, start=1):
        check(tmp_path, step, tensors)

    def load_columns(world: World) -> bool:
        pieces = sharded(states[2], 1, world.rank, world.size)
        found = blank(pieces)
        load_step(tmp_path, 3, found, world)
        return same_pieces(found, pieces)

    assert run_ranks(load_columns, 3) == [True] * 3


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of, tensors = saver(tmp_path / "c", SharingLimits(least=0, run=200)), adapter()
    for step in (1, 2, 3):
        tensors = trained(tensors, step)
        tensors["body.weight"][7 * step] = float(step)
        saved(of, step, tensors)
    terminal, step_3 = Terminal(capsys), tmp_path / "c/step-3"
    shared = manifest(tmp_path / "c", 3).shared
    assert [it["shared"] for it in terminal.ok("ls", tmp_path / "c", "--json").json] == [
        0,
        manifest(tmp_path / "c", 2).shared,
        shared,
    ]
    assert "shared)" in terminal.ok("ls", tmp_path / "c").out
    facts = terminal.ok("inspect", step_3, "--json").json
    assert facts["shared"] == shared
    assert [it["written_at"] for it in facts["files"]] == steps_of(tmp_path / "c", 3)
    assert "of it, written with step 1\n" in terminal.ok("inspect", step_3).out
    assert terminal.ok("verify", tmp_path / "c", "--all", "--json").json[2]["ok"]
    (step_3 / INDEX_FILE).unlink()
    terminal.ok("inspect", step_3, "--index")
    check(tmp_path / "c", 3, tensors)
    terminal.ok("reshard", step_3, tmp_path / "resharded", "--ranks", "3")
    assert holds(tmp_path / "resharded", 3, tensors)
    assert manifest(tmp_path / "resharded", 3).shared == 0
    terminal.ok("export", step_3, tmp_path / "exported", "--format", "safetensors")
    assert terminal.ok("prune", tmp_path / "c", "--keep", "1", "--json").json["removed"] == [1, 2]
    check(tmp_path / "c", 3, tensors)


def test_damage_in_a_file_of_several_steps_is_in_all_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And ends there: whoever resumes passes all of them, and shares nothing with them."""
    before, tensors = adapter(7), adapter()
    save_alone(tmp_path, 1, before)
    of = saver(tmp_path)
    for step in (2, 3, 4):
        saved(of, step, tensors)
        tensors = trained(tensors, step)
    with (tmp_path / "step-2/shards/000/000000.h5").open("r+b") as file:
        with h5py.File(file.name) as h5:
            file.seek(h5["body.weight"].id.get_offset() + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    for step in (2, 3, 4):
        (problem,) = verify_step(tmp_path, step)
        assert problem.tensor == "body.weight"
    pieces = blank(whole(before))
    resumed = resume_from_checkpoint(tmp_path, "auto", pieces, alone())
    assert resumed is not None
    assert resumed.step == 1
    assert same_pieces(pieces, whole(before))
    assert caplog.text.count("it is skipped") == 3
    again = saver(tmp_path)
    assert saved(again, 5, tensors).shared == 0


def test_infinity_is_seen_wherever_it_was_written(tmp_path: Path) -> None:
    """In what has changed, and afterwards in what has not."""
    of, tensors = saver(tmp_path), adapter()
    for step, value in ((1, 0.0), (2, 0.0), (3, float("inf")), (4, float("inf")), (5, 0.0)):
        tensors = trained(tensors, step)
        tensors["experts"] = tensors["experts"].clone()
        tensors["experts"][1, 2, 3] = value
        saved(of, step, tensors)
    assert [manifest(tmp_path, step).finite for step in range(1, 6)] == [True, True, False, False, True]
    assert len(steps_of(tmp_path, 4)) > 1, "it is in a file of step 3 by then"
