"""Tab completion: the candidates, and a real bash that asks for them."""

from __future__ import annotations

import os
import pty
import select
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.cli.completion import complete_words, completion_script
from hpc_train.cli.main import make_parser

BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}


def candidates(*words: str) -> list[str]:
    return complete_words(make_parser(), words)


def test_commands_and_their_own_sub_commands() -> None:
    assert {"train", "submit", "data", "bench", "completion"} <= set(candidates(""))
    assert candidates("su") == ["submit"]
    assert candidates("data", "") == ["build", "inspect"]
    assert candidates("completion", "") == ["bash", "fish", "query", "zsh"]


def test_flags_of_the_command() -> None:
    assert candidates("train", "--c") == ["--cfg", "--config-dir"]
    assert candidates("submit", "optim.lr=1", "--dry") == ["--dry-run"]
    assert candidates("data", "build", "--tok") == ["--tokenizer"]
    assert candidates("data", "build", "--tokenizer", "") == []
    assert "hf" in candidates("checkpoint", "export", "--format", "")
    assert candidates("train", "--config-dir", "") == []


def test_groups_and_their_options() -> None:
    assert candidates("train", "mod") == ["model.", "model="]
    assert candidates("train", "model=llama_1") == ["model=llama_125m", "model=llama_13b", "model=llama_1b"]
    assert candidates("submit", "launch=") == ["launch=local", "launch=slurm"]
    assert not [name for name in candidates("train", "model=") if name.endswith("_schema")]


def test_keys_at_every_depth() -> None:
    assert candidates("train", "run") == ["run_dir="]
    assert candidates("train", "optim.s") == ["optim.schedule.", "optim.sgd.", "optim.state="]
    assert candidates("train", "optim.schedule.war") == ["optim.schedule.warmup_steps="]
    assert candidates("train", "launch.ext") == ["launch.extra."]
    assert candidates("train", "+optim.schedule.war") == ["+optim.schedule.warmup_steps="]


def test_keys_follow_the_model_chosen_on_the_line() -> None:
    assert candidates("train", "model.patch") == []
    assert candidates("train", "model=vit_tiny", "model.patch") == ["model.patch_size="]
    assert candidates("train", "model=custom", "model.mod") == ["model.module="]


def test_values_that_are_known() -> None:
    assert candidates("train", "parallel.strategy=ze") == [f"parallel.strategy=zero{stage}" for stage in (1, 2, 3)]
    assert candidates("train", "train.deterministic=") == ["train.deterministic=false", "train.deterministic=true"]
    assert candidates("train", "optim.lr=") == []


@pytest.mark.parametrize("word", ["nothing.like.it", "train.steps.x", "nothing=", "model=zzz", "a.b=", "=", "+", "."])
def test_there_is_no_candidate_for_what_does_not_exist(word: str) -> None:
    assert word == "+" or candidates("train", word) == []
    assert candidates("no_such_command", word) == []


def test_options_of_the_users_own_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [vit_schema, _self_]\nname: mine\n")
    (tmp_path / "model" / "mine_too.yaml").write_text("defaults: [\n")
    assert candidates("train", f"--config-dir={tmp_path}", "model=min") == ["model=mine", "model=mine_too"]
    assert candidates("train", "--config-dir", str(tmp_path), "model=mine", "model.pa") == ["model.patch_size="]
    assert candidates("train", "--config-dir", str(tmp_path), "model=mine_too", "model.patch") == []


def test_every_candidate_key_composes() -> None:
    from hpc_train.config.compose import compose
    from hpc_train.config.plain_config import config_to_dict

    def leaves(node: object, path: str = "") -> set[str]:
        if not isinstance(node, dict) or path in ("launch.extra", "cluster.gpu.peak_tflops"):
            return {path}
        return {leaf for name, child in node.items() for leaf in leaves(child, f"{path}.{name}".lstrip("."))}

    def offered(prefix: str = "") -> set[str]:
        found = set(candidates("train", prefix))
        deeper = {
            key for key in found if key.endswith(".") and key not in ("launch.extra.", "cluster.gpu.peak_tflops.")
        }
        keys = {key.rstrip(".=") for key in found - deeper}
        return keys.union(*(offered(key) for key in deeper))

    groups = {*("cluster", "model", "data", "parallel", "optim", "precision", "checkpoint", "launch", "container")}
    groups |= {"adapter", "resilience", "loggers", "experiment"}
    assert offered() - groups == leaves(config_to_dict(compose()))


def test_the_query_imports_neither_torch_nor_hydra() -> None:
    code = (
        "import sys; from hpc_train.cli.main import main; main(sys.argv[1:]);"
        "print(sorted({'torch', 'hydra', 'numpy'} & set(sys.modules)))"
    )
    words = ["completion", "query", "--", "train", "--cfg", "model=llama_t"]
    out = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["model=llama_tiny", "[]"]


def replies(line: str) -> list[str]:
    """COMPREPLY of a bash that evaluated the script, where readline splits words at `=`."""
    words = [part for word in shlex.split(line) for part in word.replace("=", "\0=\0").split("\0") if part]
    code = f"""
        eval "$(hpc-train completion bash)"
        COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}
        COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}
        _hpc_train hpc-train
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    ended = subprocess.run(["bash", "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("hpc-train subm", ["submit"]),
        ("hpc-train train model=llama_t", ["llama_tiny"]),
        ("hpc-train train model=", None),
        ("hpc-train train optim.lr=1 parallel.strategy=zero", ["zero1", "zero2", "zero3"]),
        ("hpc-train train optim.schedule.war", ["optim.schedule.warmup_steps="]),
        ("hpc-train train --con", ["--config-dir"]),
        ("hpc-train data ", ["build", "inspect"]),
        ("hpc-train train run_dir=/tm", []),
    ],
)
def test_bash_gets_the_part_of_a_word_that_it_replaces(line: str, reply: list[str] | None) -> None:
    from hpc_train.config.keys.groups import find_option_files

    assert replies(line) == (list(find_option_files("model")) if reply is None else reply)


def shown_until(terminal: int, text: str) -> str:
    """What a terminal shows from now on until `text` is among it, or nothing new comes for a minute."""
    shown = ""
    while text not in shown and select.select([terminal], [], [], 60)[0]:
        shown += os.read(terminal, 65536).decode()
    return shown


def test_a_tab_in_a_real_terminal() -> None:
    terminal, end = pty.openpty()
    command = ["bash", "--norc", "--noprofile", "-i"]
    environment = {**ENVIRONMENT, "TERM": "dumb", "PS1": "$ "}
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True) as bash:
        os.close(end)
        os.write(terminal, b'eval "$(hpc-train completion bash)"; echo lo""aded\n')
        assert "loaded\r\n" in shown_until(terminal, "loaded\r\n")
        os.write(terminal, b"hpc-train tra\tmodel=llama_t\toptim.schedule.war\t")
        line = "hpc-train train model=llama_tiny optim.schedule.warmup_steps="
        assert line in shown_until(terminal, line)
        bash.kill()
    os.close(terminal)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_asks_for_candidates(shell: str) -> None:
    assert "completion query -- " in completion_script(shell)
    command = [BIN / "hpc-train", "completion", shell]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == completion_script(shell)


def test_the_bash_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n"], input=completion_script("bash"), text=True, check=True)


def test_explain_completes_keys_of_every_model_and_its_parts() -> None:
    assert candidates("explain", "train.st") == ["train.steps"]
    assert "model." in candidates("explain", "mo")
    assert candidates("explain", "model.patch") == ["model.patch_size"]
    assert candidates("explain", "parallel.pip") == ["parallel.pipeline."]
