"""compose: a user's own folder of options, read-only results, and nothing left behind between two calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path

import hydra
import pytest

from hpc_train.config import compose as composing
from hpc_train.config.compose import compose, list_options
from hpc_train.config.model import TransformerConfig
from hpc_train.config.plain_config import config_from_dict, config_to_dict, config_to_yaml
from hpc_train.errors import UserError

Write = Callable[[str, str], str]
MODEL = "defaults: [transformer_schema, _self_]\nname: mine\n"


@pytest.fixture(autouse=True)
def _hydra_composes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is composed from the beginning, not from a base of the session."""
    monkeypatch.setattr(composing, "hydra_compose", hydra.compose)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write one file of a folder laid out as conf/; returns the folder, to be given as --config-dir."""

    def write(name: str, text: str) -> str:
        path = tmp_path / "my conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
        return str(tmp_path / "my conf")

    return write


def refusal(overrides: list[str], config_dir: str) -> str:
    with pytest.raises(UserError) as caught:
        compose(overrides, config_dir)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_users_option_stands_beside_the_shipped_ones(write: Write) -> None:
    folder = write("model/mine.yaml", f"{MODEL}layers: 3\n")
    model = compose(["model=mine", "optim=adamw"], folder).model
    assert isinstance(model, TransformerConfig)
    assert (model.name, model.layers, model.hidden) == ("mine", 3, 128)
    assert {"mine", "llama_tiny"} <= set(list_options("model", folder))
    assert "mine" not in list_options("model")


def test_a_group_of_the_user_is_chosen_where_their_file_puts_it(write: Write) -> None:
    write("encoder/small.yaml", "width: 16\n")
    write("encoder/big.yaml", "width: 64\n")
    folder = write(
        "model/net.yaml", "defaults: [custom, /encoder@args.encoder: small, _self_]\nname: net\nmodule: my_models\n"
    )
    assert vars(compose(["model=net"], folder).model)["args"] == {"encoder": {"width": 16}}
    chosen = ["model=net", "encoder@model.args.encoder=big"]
    assert vars(compose(chosen, folder).model)["args"] == {"encoder": {"width": 64}}
    for wrong in ("encoder=big", "encoder@model.args.encodr=big"):
        assert refusal(["model=net", wrong], folder) == f"{wrong}: write encoder@model.args.encoder=big"
    assert "no such encoder; did you mean 'big'?" in refusal(["model=net", "encoder@model.args.encoder=bgi"], folder)
    assert refusal(["encoder=big"], folder) == "encoder=big: no defaults list of a chosen file names this group"
    assert refusal([*chosen, "optim.lrr=1"], folder) == "optim.lrr=1: no key 'lrr'; did you mean 'lr'?"


def test_an_override_wins_over_a_users_file(write: Write) -> None:
    folder = write("optim/fast.yaml", "lr: 0.25\n")
    assert compose(["optim=fast"], folder).optim.lr == 0.25
    assert compose(["optim=fast", "optim.lr=0.5"], folder).optim.lr == 0.5


def test_an_experiment_changes_several_groups_at_once(write: Write) -> None:
    text = "# @package _global_\ndefaults:\n  - override /model: gpt2_tiny\ntrain:\n  steps: 7\n"
    folder = write("experiment/study.yaml", text)
    config = compose(["experiment=study", "train.seed=5"], folder)
    assert (config.model.name, config.train.steps, config.train.seed) == ("gpt2_tiny", 7, 5)


WRONG_FILES = [
    ("model/x.yaml", "name: [x\nlayers: 2\n", "line 2: is not YAML: expected ',' or ']', but got ':'"),
    ("model/x.yaml", "a: 1\na: 2\n", "line 2: is not YAML: found duplicate key a"),
    ("model/x.yaml", "name: \xff\xfe\n", "x.yaml: is not a text file (UTF-8); write it again"),
    ("model/x.yaml", f"{MODEL}layrs: 2\n", "model/x.yaml: model.layrs: no key 'layrs'; did you mean 'layers'?"),
    ("model/x.yaml", f"{MODEL}layers: many\n", "model/x.yaml: model.layers: must be a whole number"),
    ("model/x.yaml", f"{MODEL}layers: 0\n", "model.layers=0: must be >= 1"),
    (
        "model/x.yaml",
        "name: x\nlayers: 2\n",
        "model/x.yaml: model.layers: no key 'layers'; begin the file with defaults:",
    ),
    (
        "model/x.yaml",
        "defaults: [transfomer_schema]\n",
        "its defaults name model/transfomer_schema, which does not exist",
    ),
    ("model/x.yaml", "- a\n", "model/x.yaml: settings (key: value) belong here"),
    ("optim/x.yaml", "lr: fast\n", "optim/x.yaml: optim.lr: must be a number"),
    (
        "optim/x.yaml",
        "schedule: {nme: linear}\n",
        "optim/x.yaml: optim.schedule.nme: no key 'nme'; did you mean 'name'?",
    ),
    ("optim/x.yaml", "schedule: 4\n", "optim/x.yaml: settings (key: value) belong here"),
    ("optim/x.yaml", 'lr: "${nope.lr}"\n', "optim=x: optim.lr: Interpolation key 'nope.lr' not found"),
    ("optim/x.yaml", "_target_: os.system\n", "optim/x.yaml: optim._target_: no key '_target_'; did you mean 'args'?"),
    (
        "launch/x.yaml",
        'kind: local\nname: "a\\nb"\n',
        "launch.name='a\\nb': control characters (newlines too) are refused",
    ),
    ("experiment/x.yaml", "train: {steps: 4}\n", "experiment/x.yaml: must begin with the line '# @package _global_'"),
    (
        "experiment/x.yaml",
        "# @package _global_\ndefaults: [{override /model: lama_tiny}]\n",
        "experiment=x: its defaults name model/lama_tiny, which does not exist; did you mean 'llama_tiny'?",
    ),
    (
        "experiment/x.yaml",
        "# @package _global_\ntrain: {stepss: 4}\n",
        "experiment/x.yaml: train.stepss: no key 'stepss'; did you mean 'steps'?",
    ),
]


@pytest.mark.parametrize(("name", "text", "answer"), WRONG_FILES)
def test_a_wrong_file_is_named_with_what_is_wrong_in_it(write: Write, name: str, text: str, answer: str) -> None:
    folder = write(name, text)
    assert answer in refusal([f"{name.split('/')[0]}=x"], folder)


def test_a_right_file_is_not_blamed_for_a_wrong_override(write: Write) -> None:
    folder = write("model/mine.yaml", MODEL)
    assert refusal(["model=mine", "model.layers=x"], folder) == "model.layers=x: must be a whole number"
    assert refusal(["model=mime"], folder) == "model=mime: no such model; did you mean 'mine'?"


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert refusal([], str(tmp_path / "none")) == f"--config-dir {tmp_path / 'none'}: no such folder"


def test_a_composed_config_is_read_only_at_every_depth() -> None:
    config = compose()
    with pytest.raises(FrozenInstanceError, match=r"RunConfig\.run_dir is read-only"):
        config.run_dir = "elsewhere"
    with pytest.raises(FrozenInstanceError, match=r"ScheduleConfig\.name is read-only"):
        config.optim.schedule.name = "linear"
    with pytest.raises(FrozenInstanceError, match=r"GpuConfig\.name is read-only"):
        config.cluster.gpu.name = "X"


def test_two_calls_do_not_know_of_each_other() -> None:
    first = compose(["model=vit_tiny", "data=digits", "optim.lr=0.5"])
    assert compose() != first
    assert compose(["model=vit_tiny", "data=digits", "optim.lr=0.5"]) == first


def test_the_cache_of_stores_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAIN_CACHE", "/scratch/stores")
    assert "cache: /scratch/stores" in config_to_yaml(compose())
    monkeypatch.delenv("HPC_TRAIN_CACHE")
    assert "cache: ~/.cache/hpc_train" in config_to_yaml(compose())


def test_arguments_of_own_parts_are_what_yaml_has() -> None:
    """Numbers, text, and lists and groups of them, as plain Python values that a file gives back."""
    own = ["model=custom", "model.name=mine", "optim=custom", "optim.module=mine", "optim.name=mine"]
    given = [
        "+model.args.widths=[8,16]",
        "+model.args.names={a: x}",
        "+optim.args.betas=[0.9,0.95]",
        "+optim.args.lr=1e-3",
    ]
    config = compose([*own, *given])
    assert config.model.args == {"widths": [8, 16], "names": {"a": "x"}}  # type: ignore[attr-defined]
    assert config.optim.args == {"betas": [0.9, 0.95], "lr": 0.001}
    assert type(config.optim.args["betas"]) is list
    again = config_from_dict(config_to_dict(config))
    assert (again.model, again.optim) == (config.model, config.optim)
