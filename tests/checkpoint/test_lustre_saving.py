"""Saves to a directory that says it is on Lustre: what is striped and when, and that nothing of it can fail a save."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import alone, blank, same_pieces, sharded, state, whole
from stand_in_servers import Servers, on_lustre, put_on_path

from hpc_train.checkpoint import Saver, find_newest_verified, load_step, verify_step
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory, LustreStriper
from hpc_train.checkpoint.storage.lustre import get_stripe_layout
from hpc_train.checkpoint.storage.stripe_layout import MIB, StripeComponent, list_step_layouts
from hpc_train.config.train import LustreConfig
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks

AUTO = LustreConfig()


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    return put_on_path(tmp_path / "servers", monkeypatch)


def lustre(wishes: LustreConfig = AUTO, seconds: float = 20) -> CheckpointDirectory:
    return CheckpointDirectory(striper=LustreStriper(wishes, seconds), magic=on_lustre)


def save_steps(directory: Path, place: CheckpointDirectory, steps: int = 1) -> None:
    saver = Saver(directory, alone(), background=False, storage=place)
    for step in range(1, steps + 1):
        saver.save(step, whole(state(step)), {})
    assert [it.error for it in saver.wait()] == [None] * steps
    assert find_newest_verified(directory) == steps


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]


def test_a_step_and_its_shards_are_striped_before_they_have_files(servers: Servers, tmp_path: Path) -> None:
    save_steps(tmp_path / "c", lustre())
    step = tmp_path / "c" / "step-1"
    assert get_stripe_layout(step / "manifest.json").layout == list_step_layouts(AUTO)[0]
    shards = (StripeComponent(count=1, size=16 * MIB),)
    for path in (step / "shards", step / "shards" / "000", step / "shards" / "000" / "000000.h5"):
        assert get_stripe_layout(path).layout == shards
    assert get_stripe_layout(tmp_path / "c").layout == (StripeComponent(count=1, size=MIB),), (
        "the user's directory is left as it is"
    )


def test_two_calls_a_save_and_one_to_count_the_osts(servers: Servers, tmp_path: Path) -> None:
    save_steps(tmp_path / "c", lustre(), steps=3)
    assert [call[0] for call in servers.calls] == ["df", *["setstripe"] * 6]
    assert all(".tmp-" in call[-1] for call in servers.calls)


def test_older_servers_get_what_they_can_and_are_asked_once(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers.are(progressive=False, dom=False)
    save_steps(tmp_path / "c", lustre(), steps=2)
    of_steps = [call for call in servers.calls if call[0] == "setstripe" and not call[-1].endswith("shards")]
    assert ["-E" in call for call in of_steps] == [True, True, False, False], "two in vain, one that works, then that"
    assert warnings(caplog) == []
    servers.are(dom=False)
    save_steps(tmp_path / "d", lustre())
    assert get_stripe_layout(tmp_path / "d" / "step-1").layout == list_step_layouts(AUTO)[1]


def test_few_large_files_are_spread_and_written_in_whole_rounds(servers: Servers, tmp_path: Path) -> None:
    servers.are(osts=6)
    wishes = LustreConfig(stripe_size_mib=1)
    saver = Saver(tmp_path, alone(), background=False, storage=lustre(wishes))
    large = torch.zeros(20 * MIB, dtype=torch.uint8)
    saver.save(1, [TensorShard("w", tuple(large.shape), large.dtype, (0,), large)], {})
    (saved,) = saver.wait()
    saved.wait()
    assert get_stripe_layout(tmp_path / "step-1" / "shards").layout == (StripeComponent(count=5, size=MIB),)
    assert verify_step(tmp_path, 1) == []
    behaviour = saver.storage._policy
    assert behaviour is not None
    assert behaviour.write_bytes == 20 * MIB, "the least multiple of a round of 5 MiB that is at least 16 MiB"


def test_the_wishes_of_the_user(servers: Servers, tmp_path: Path) -> None:
    servers.are(pools={"flash": [2, 3]})
    save_steps(tmp_path / "c", lustre(LustreConfig(stripe_count=2, stripe_size_mib=4, pool="flash", progressive=False)))
    (shard,) = get_stripe_layout(tmp_path / "c" / "step-1" / "shards" / "000" / "000000.h5").parts
    assert shard.component == StripeComponent(count=2, size=4 * MIB, pool="flash")
    assert shard.osts == (2, 3)
    assert get_stripe_layout(tmp_path / "c" / "step-1").layout == (StripeComponent(count=1, size=MIB, pool="flash"),)


def test_none_means_that_lfs_is_never_called(servers: Servers, tmp_path: Path) -> None:
    save_steps(tmp_path / "c", lustre(LustreConfig(stripe="none")))
    assert servers.calls == []


def test_elsewhere_lfs_is_never_called_and_who_wants_it_is_told(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path / "c", CheckpointDirectory())
    assert warnings(caplog) == []
    save_steps(tmp_path / "d", CheckpointDirectory(striper=LustreStriper(LustreConfig(stripe_count=4))), steps=2)
    (warning,) = warnings(caplog)
    assert f"checkpoint.lustre has no effect: {tmp_path / 'd'} is not on Lustre" in warning
    assert servers.calls == []


@pytest.mark.parametrize(
    ("facts", "wishes", "why"),
    [
        ({"mode": "denied"}, AUTO, "Permission denied"),
        ({"mode": "not-lustre"}, AUTO, "Inappropriate ioctl for device"),
        ({"mode": "restricted"}, AUTO, "restricted by your administrator"),
        ({"mode": "garbage-error"}, AUTO, "exit 3"),
        ({}, LustreConfig(pool="gone"), "pool 'gone' does not exist"),
        ({"mode": "hang"}, AUTO, "no answer in 0.5 s"),
        ({"mode": "hang-with-child"}, AUTO, "no answer in 0.5 s"),
    ],
)
def test_lfs_that_fails_costs_one_warning_and_is_not_asked_again(
    servers: Servers,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    facts: dict[str, Any],
    wishes: LustreConfig,
    why: str,
) -> None:
    servers.are(**facts)
    place = lustre(wishes, seconds=0.5 if "hang" in why or "answer" in why else 20)
    save_steps(tmp_path / "c", place)
    asked = len(servers.calls)
    save_steps(tmp_path / "d", place, steps=2)
    assert len(servers.calls) == asked
    (warning,) = warnings(caplog)
    assert why in warning
    assert "\n" not in warning
    assert "checkpoint.lustre.stripe=none" in warning


def test_without_lfs_the_attribute_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    save_steps(tmp_path / "c", lustre(), steps=2)
    (warning,) = warnings(caplog)
    assert "lfs is not on PATH, and the attribute lustre.lov cannot be set" in warning
    assert "not supported" in warning


def test_without_lfs_the_attribute_is_what_a_plain_layout_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel here refuses the attribute of Lustre: it is given another name on its way."""
    monkeypatch.setenv("PATH", str(tmp_path))
    set_of_kernel = os.setxattr
    monkeypatch.setattr(os, "setxattr", lambda path, name, value: set_of_kernel(path, f"user.{name}", value))
    save_steps(tmp_path / "c", lustre())
    step = tmp_path / "c" / "step-1"
    assert os.getxattr(step / "shards", "user.lustre.lov").hex() == "d00bd10b01000000" + "00" * 16 + "000000010100ffff"
    assert os.getxattr(step, "user.lustre.lov").hex() == "d00bd10b01000000" + "00" * 16 + "000010000100ffff"
    assert warnings(caplog) == []


@dataclass
class Spy:
    """Metadata operations on paths below a directory."""

    below: Path
    made: list[str]

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in (
            "mkdir",
            "stat",
            "lstat",
            "access",
            "listdir",
            "scandir",
            "statvfs",
            "rename",
            "unlink",
            "rmdir",
            "open",
        ):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Any) -> Any:
        def call(path: Any, *args: Any, **named: Any) -> Any:
            if isinstance(path, (str, Path)) and str(path).startswith(str(self.below)):
                self.made.append(name)
            return real(path, *args, **named)

        return call


def operations(world: World, directory: Path, tensors: int) -> list[str]:
    """What a rank asks of the directory in its second save, Lustre and all."""
    parts = {f"w{n}": state(n)["blocks.0.weight"] for n in range(tensors)}
    saver = Saver(directory, world, background=False, storage=lustre())
    saver.save(1, sharded(parts, 0, world.rank, world.size), {})
    spy = Spy(directory, [])
    with pytest.MonkeyPatch.context() as patch:
        spy.watch(patch)
        saver.save(2, sharded(parts, 0, world.rank, world.size), {})
    assert [it.error for it in saver.wait()] == [None, None]
    return spy.made


def test_the_servers_of_metadata_are_spared(servers: Servers, tmp_path: Path) -> None:
    """Rank 0 decides and makes; the others make their two files. Nobody asks for anything by tensor."""
    first, *others = run_ranks(operations, 3, tmp_path / "few", 2)
    assert others == [["open", "open"]] * 2
    assert {"mkdir", "rename"} < set(first)
    many = run_ranks(operations, 3, tmp_path / "many", 60)
    assert many == [first, *others]
    assert len(first) < 60


def test_what_was_saved_so_is_loaded(servers: Servers, tmp_path: Path) -> None:
    def save(world: World) -> int:
        saver = Saver(tmp_path / "c", world, storage=lustre())
        saver.save(1, sharded(state(1), 0, world.rank, world.size), {})
        return sum(it.error is None for it in saver.wait())

    assert run_ranks(save, 2) == [1, 1]
    found = blank(whole(state(1)))
    load_step(tmp_path / "c", 1, found, alone())
    assert same_pieces(found, whole(state(1)))
