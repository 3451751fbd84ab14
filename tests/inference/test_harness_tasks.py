"""`hpc-train eval --tasks`: numbers of lm-evaluation-harness's own class for transformers, on tasks from local files.

Long, because the package brings 200 MB of others: only `make test-long` installs it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from test_eval_command import SIZES, save_chat_tokenizer

from hpc_train.cli.main import main

pytestmark = pytest.mark.long
TASKS = {
    "sums": 'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n',
    "texts": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list:\n'
    "  - metric: word_perplexity\n  - metric: bits_per_byte\n",
    "writes": 'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{choices[0]}}"\n'
    "generation_kwargs:\n  until: [a]\n  max_gen_toks: 12\nmetric_list:\n  - metric: exact_match\n",
}


def _set_by_libraries(folder: Path) -> dict[str, str]:
    """Variables that keep libraries off the network; the last is one that lm_eval sets itself."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    return offline | {"HF_XET_HIGH_PERFORMANCE": "1"}


def write_tasks(folder: Path) -> None:
    folder.mkdir()
    questions = [
        {"q": f"{a} plus {a} is", "choices": [str(2 * a), "no"], "answer": 0, "text": f"{a} and {a} is {2 * a} " * 30}
        for a in range(12)
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    files = f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {folder}/questions.jsonl}}\ntest_split: test\n"
    for name, rest in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{files}{rest}")


def test_tasks_have_the_numbers_of_the_harness_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in _set_by_libraries(tmp_path).items():
        monkeypatch.setenv(name, value)
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder, tasks = tmp_path / "model", tmp_path / "tasks"
    torch.manual_seed(0)
    sizes = SIZES | {"n_positions": 128}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=0.3)).save_pretrained(folder)
    tokenizer = save_chat_tokenizer(folder)
    write_tasks(tasks)
    capsys.readouterr()
    words = ["--include-path", str(tasks), "--json", "--batch", "5"]
    assert main(["eval", str(folder), "--tasks", ",".join(TASKS), *words]) == 0
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]

    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    assert theirs is not None
    assert ours.keys() == TASKS.keys()
    for task, metrics in ours.items():
        assert metrics
        for name, value in metrics.items():
            assert value == pytest.approx(theirs["results"][task][f"{name},none"], rel=1e-5), (task, name)
    assert main(["eval", str(folder), "--tasks", "sums,nothing", *words]) == 2
    assert "nothing is not a task" in capsys.readouterr().err
