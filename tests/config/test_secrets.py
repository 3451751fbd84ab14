"""No environment variable that looks like a secret gets into a configuration, however it is referenced."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hpc_train.cli.main import main
from hpc_train.config.checks.secret_variables import is_secret_name, mask_secrets
from hpc_train.config.compose import compose
from hpc_train.config.plain_config import config_from_dict, config_to_dict, config_to_yaml
from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.launch.sweep.compose_sweep import Composer

VALUE = "hunter2hunter2"
SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_APIKEY",
    "API_KEY_FILE",
    "STORE_ACCESSKEY_ID",
    "MYSQL_PWD",
    "GH_PASSWORD",
    "SSH_PRIVATE_KEY",
    "some_password",
)
HARMLESS = ("HOME", "TOKENIZERS_PARALLELISM", "TOKENIZER_DIR", "OLDPWD", "PWD", "SCRATCH", "KEYBOARD", "MONKEY")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *HARMLESS):
        monkeypatch.setenv(name, VALUE)
    monkeypatch.setenv("WHICH", "HF_TOKEN")


def ways(name: str) -> list[str]:
    return [
        f"run_dir=${{oc.env:{name}}}",
        f"run_dir=/tmp/${{oc.env:{name}}}/run",
        f"run_dir='${{oc.env:{name},none}}'",
        f"run_dir='${{oc.decode:${{oc.env:{name}}}}}'",
        f"run_dir='${{oc.env:\"{name}\",null}}'",
        f"parallel.pipeline.schedule=${{oc.env:{name}}}",
        f"launch.setup=['echo ${{oc.env:{name}}}']",
        f"data.cache='${{oc.env:NOT_SET_AT_ALL,${{oc.env:{name}}}}}'",
    ]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == EXIT_USER_ERROR
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1, said.err
    assert VALUE not in said.err
    return said.err


@pytest.mark.parametrize("override", [way for name in SECRETS[:2] for way in ways(name)])
def test_every_way_of_asking_is_refused_in_one_line(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "looks like a secret" in refused(capsys, "train", "--cfg", override)


@pytest.mark.parametrize("override", ["run_dir='${oc.env:${oc.env:WHICH}}'", "run_dir='${oc.env:AWS_${oc.env:REST}}'"])
def test_a_name_that_is_put_together_is_looked_at_whole(
    override: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REST", "SECRET_ACCESS_KEY")
    assert "looks like a secret" in refused(capsys, "train", "--cfg", override)


@pytest.mark.parametrize(
    "command",
    [
        ("train",),
        ("train", "-m", "train.seed=1,2"),
        ("submit", "--dry-run"),
        ("submit", "-m", "--dry-run", "train.seed=1,2"),
        ("submit", "--cfg"),
        ("plan",),
        ("plan", "rehearse"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_every_command_refuses(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "looks like a secret" in refused(capsys, *command, "data.cache=${oc.env:HF_TOKEN}")
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_config_dir_are_no_way_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntrain:\n  steps: 3\ndata:\n  cache: ${oc.env:HF_TOKEN}\n"
    (tmp_path / "experiment/mine.yaml").write_text(text)
    words = ("train", "--cfg", "--config-dir", str(tmp_path), "experiment=mine")
    assert "data.cache: ${oc.env:HF_TOKEN} looks like a secret" in refused(capsys, *words)


def test_a_value_elsewhere_that_is_read_by_its_key_is_no_way_in(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", "--cfg", "data.cache=${oc.env:HF_TOKEN}", "run_dir=${data.cache}")
    assert "looks like a secret" in refused(capsys, *words)


def test_a_config_of_another_run_is_no_way_in() -> None:
    container = config_to_dict(compose())
    container["data"]["cache"] = "${oc.env:HF_TOKEN}"
    with pytest.raises(UserError, match="looks like a secret"):
        config_from_dict(container)


def test_a_sweep_composes_no_secret() -> None:
    composer = Composer(frozenset({"data.cache"}))
    assert composer.compose(("data.cache=/tmp/a",)).data.cache == "/tmp/a"
    with pytest.raises(UserError, match="looks like a secret"):
        composer.compose(("data.cache=${oc.env:HF_TOKEN}",))


@pytest.mark.parametrize("name", HARMLESS)
def test_other_variables_are_read(name: str) -> None:
    assert not is_secret_name(name)
    assert VALUE in config_to_yaml(compose([f"run_dir=/tmp/${{oc.env:{name}}}"]))
    assert compose(["run_dir='${oc.env:NOT_SET_AT_ALL,/tmp/x}'"]).run_dir == "/tmp/x"


def test_an_application_of_its_own_reads_what_it_wants_before_and_after() -> None:
    for _ in range(2):
        assert OmegaConf.create({"a": "${oc.env:HF_TOKEN}"}).a == VALUE
        with pytest.raises(UserError):
            compose(["run_dir=${oc.env:HF_TOKEN}"])


@pytest.mark.parametrize(
    "word",
    [
        f"+loggers.args.api_key={VALUE}",
        f"+loggers.args.server={{PASSWORD:{VALUE}}}",
        f"+loggers.args.servers=[{{auth_token:{VALUE}}}]",
        f"loggers.mlflow.tracking_uri=https://me:{VALUE}@mlflow.example.org",
        f"loggers.mlflow.tracking_uri=https://{VALUE}@mlflow.example.org/store",
    ],
)
def test_a_secret_in_the_settings_of_a_logger_is_refused_and_not_repeated(
    capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert "a configuration is written to files" in refused(capsys, "train", "--cfg", word)


def test_an_address_without_a_password_is_accepted() -> None:
    uri = "https://mlflow.example.org/@team"
    assert compose([f"loggers.mlflow.tracking_uri={uri}"]).loggers.mlflow.tracking_uri == uri


def test_secrets_are_masked_in_text() -> None:
    variables = {"WANDB_API_KEY": "abcdef", "LONG_TOKEN": "abcdefgh", "A_KEY": "short", "HOME": "/home/me"}
    variables["SSH_PRIVATE_KEY"] = "BEGIN OF IT\nline two\n"
    text = "abcdefgh abcdef short /home/me: http://me:pw@host/a@b git+ssh://you@there x://y BEGIN OF IT line two"
    masked = "*** *** short /home/me: http://***@host/a@b git+ssh://***@there x://y *** ***"
    assert mask_secrets(text, variables) == masked
