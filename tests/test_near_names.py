"""The nearest of some names is suggested for a name that does not exist, those of installed packages too."""

import sys
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.near_names import suggest_names
from hpc_train.training.loggers.interface import ENTRY_POINTS, check_loggers

NAMES = ("llama_tiny", "llama_1b", "llama_7b", "llama_8b", "vit_tiny")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("lama_tiny", "did you mean 'llama_tiny'?"),
        ("VIT_Tiny", "did you mean 'vit_tiny'?"),
        ("lama", "did you mean 'llama_1b', 'llama_7b' or 'llama_8b'?"),
        ("zzz", "there are llama_1b, llama_7b, llama_8b, llama_tiny, vit_tiny"),
    ],
)
def test_the_nearest_are_suggested(word: str, says: str) -> None:
    assert suggest_names(word, NAMES) == says


def test_many_names_are_not_all_listed() -> None:
    assert suggest_names("zzz", map(str, range(1000))).endswith(", ...")
    assert suggest_names("zzz", ()) == "there is none"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package that offers an optimizer, a schedule and a logger; none of them is ever imported."""
    info = tmp_path / "plugs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugs\nVersion: 1.0\n")
    groups = {"hpc_train.optimizers": "plug_lion", "hpc_train.schedules": "plug_decay", ENTRY_POINTS: "plug_board"}
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = no:no\n" for group, name in groups.items()))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.name=plug_lio", "optim.name=plug_lio: not a registered optimizer; did you mean 'plug_lion'? Or set"),
        ("optim.schedule.name=plug_deca", "not a registered schedule; did you mean 'plug_decay'? Or set optim.module"),
        ("optim.schedule.name=zzz", "there are constant, cosine, linear, plug_decay, wsd; set optim.module to the"),
    ],
)
def test_names_of_installed_packages_are_suggested(package: None, override: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        compose([override])
    assert says in str(caught.value)


def test_loggers_of_installed_packages_are_suggested(package: None) -> None:
    with pytest.raises(UserError, match="no such logger; did you mean 'plug_board'"):
        check_loggers(["plug_bord"])
