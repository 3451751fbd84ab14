"""Targets of chats are those of TRL's collator, padded and packed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import MARKED_TOOLS, save_tokenizer

from hpc_train.config.model import TokenDataConfig
from hpc_train.data.corpus.build import StoreRecipe, build_from_recipe
from hpc_train.data.datasets import open_dataset
from hpc_train.interfaces import DOCUMENT_STARTS, IGNORED_TARGET

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # read once, when the library is imported
import transformers
import trl

CHATS = [
    [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": "Paris is. " * number}]
    + [{"role": "user", "content": "user"}, {"role": "assistant", "content": "a joke 日本語 🙂"}] * (number % 3)
    for number in range(1, 7)
]
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "Paris"}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Tell the time"}}
RECORDS = [{"messages": chat, "tools": None} for chat in CHATS] + [
    {
        "messages": [
            {"role": "user", "content": "the time?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "noon"},
            {"role": "assistant", "content": "Noon."},
        ],
        "tools": [CLOCK],
    }
]
LENGTH = 256


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A store of chats, and each chat as TRL prepares it."""
    folder = tmp_path_factory.mktemp("trl")
    save_tokenizer(folder / "model", MARKED_TOOLS, eos_token="<|im_end|>")
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    recipe = StoreRecipe((str(folder / "a.jsonl"),), (), str(folder / "model"), column="messages", chat=True)
    build_from_recipe(recipe, folder / "a.h5")
    return folder / "a.h5", prepare_by_trl(folder)


def prepare_by_trl(folder: Path) -> list[dict[str, Any]]:
    """Return input_ids and labels of each chat as SFTTrainer prepares them, for the loss on the assistant's turns."""
    import datasets

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "model")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=len(tokenizer)))
    settings = trl.SFTConfig(
        str(folder / "out"), assistant_only_loss=True, max_length=None, report_to=[], use_cpu=True, bf16=False
    )
    table = datasets.Dataset.from_list(RECORDS)
    made = trl.SFTTrainer(model, settings, train_dataset=table, processing_class=tokenizer)
    return [{key: list(row[key]) for key in ("input_ids", "labels")} for row in made.train_dataset]


def open_samples(path: Path, samples: str) -> Any:
    config = TokenDataConfig(name="c", path=str(path), validation_fraction=0.0, samples=samples)
    return open_dataset(config, LENGTH, "train")


def test_a_padded_chat_has_the_targets_of_trl(made: tuple[Path, list[dict[str, Any]]]) -> None:
    path, rows = made
    inputs, targets = open_samples(path, "padded").get(np.arange(len(rows)))
    batch = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0)(rows)
    labels = batch["labels"][:, 1:]
    width = labels.shape[1]
    assert targets[:, :width].equal(labels)
    assert targets[:, width:].eq(IGNORED_TARGET).all()
    for row, tokens in zip(inputs, rows, strict=True):
        assert row[: len(tokens["input_ids"]) - 1].tolist() == tokens["input_ids"][:-1]
    assert labels.ne(IGNORED_TARGET).any(1).all()


def test_a_packed_chat_has_the_positions_and_targets_of_trl(made: tuple[Path, list[dict[str, Any]]]) -> None:
    """TRL keeps a document's last token as an input that has no target; ours is a target alone."""
    path, rows = made
    data = open_samples(path, "packed")
    inputs, targets = data.get(np.arange(len(data)))
    batch = trl.trainer.sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    labels, places = batch["labels"][0], batch["position_ids"][0]
    lasts = places[1:] == 0  # where the next place begins a document
    wanted = [
        (int(place), int(label)) for place, label, last in zip(places[:-1], labels[1:], lasts, strict=True) if not last
    ]
    found = []
    for starts, aims in zip(inputs[DOCUMENT_STARTS], targets, strict=True):
        used = int(starts[-1]) if aims[-1] == IGNORED_TARGET else LENGTH  # behind it is padding
        found += [(place - int(starts[place]), int(aims[place])) for place in range(used)]
    assert found == wanted
