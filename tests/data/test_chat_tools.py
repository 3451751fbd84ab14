"""Chats whose assistant calls tools: the tokens and the mask of transformers, from JSON Lines and from tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from chat_models import CHATML, MARKED_TOOLS, TEXT_TOOLS, TOOLS, save_tokenizer
from pyarrow import parquet
from transformers import AutoTokenizer

from hpc_train.data.corpus.build import StoreRecipe, build_from_recipe
from hpc_train.data.token_store import TokenStore
from hpc_train.data.tokenizers.chat import make_chat_encoder
from hpc_train.data.tokenizers.tokenizer_folder import load_tokenizer_folder, write_tokenizer_folder
from hpc_train.errors import UserError

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


RECORDS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "weather and time in Paris?"},
            {"role": "assistant", "content": None, "tool_calls": [call("weather", city="Paris"), call("clock")]},
            {"role": "tool", "content": "21 degrees"},
            {"role": "tool", "content": "noon"},
            {"role": "assistant", "content": "It is noon, 21 degrees."},
            {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "日本語?"}]},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call("weather", city="Tokyo")]},
        ],
        "tools": [WEATHER, CLOCK],
    },
    {"messages": [{"role": "user", "content": "a joke"}, {"role": "assistant", "content": "no"}], "tools": []},
    {"messages": [{"role": "user", "content": "user"}, {"role": "assistant", "content": "yes"}]},
    {"messages": [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": "go"}], "tools": [CLOCK]},
]


def mark_by_prefixes(reference: Any, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """Tokens, and the mask from where the texts of growing prefixes end, through transformers alone."""
    messages, tools = record["messages"], record.get("tools") or None
    text = reference.apply_chat_template(messages, tools, tokenize=False)
    encoded = reference(text, add_special_tokens=False, return_offsets_mapping=True)
    counts = [False] * len(encoded["input_ids"])
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = reference.apply_chat_template(
                messages[:index] or [{"role": "user", "content": ""}], tools, tokenize=False
            )
            if not index:  # what stands before the first turn, whoever has it
                before = before[: before.rindex("<|im_start|>user")]
            first = len(before + "<|im_start|>assistant\n")
            last = len(reference.apply_chat_template(messages[: index + 1], tools, tokenize=False))
            for place, (begin, end) in enumerate(encoded["offset_mapping"]):
                counts[place] |= first <= begin < last and begin < end
    return encoded["input_ids"], counts


def encode_by_transformers(folder: Path, record: dict[str, Any], marked: bool) -> tuple[list[int], list[bool]]:
    reference = AutoTokenizer.from_pretrained(str(folder))
    if not marked:
        return mark_by_prefixes(reference, record)
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    encoded = reference.apply_chat_template(record["messages"], record.get("tools") or None, **options)
    return encoded["input_ids"], [bool(value) for value in encoded["assistant_masks"]]


def write_jsonl(folder: Path, records: list[dict[str, Any]]) -> Path:
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder / "a.jsonl"


def write_parquet(folder: Path, records: list[dict[str, Any]]) -> Path:
    """Write a table, which has each key in each message, and tools as text, as many datasets have."""
    rows = [{**one, "tools": json.dumps(one["tools"]) if "tools" in one else None} for one in records]
    for row in rows:
        row["messages"] = [{**one, "content": join(one["content"])} for one in row["messages"]]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    return folder / "a.parquet"


def join(content: Any) -> Any:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


@pytest.mark.parametrize("template", [TOOLS, MARKED_TOOLS, TEXT_TOOLS], ids=["plain", "marked", "text_only"])
def test_tools_and_calls_have_the_tokens_and_the_mask_of_transformers(tmp_path: Path, template: str) -> None:
    folder = save_tokenizer(tmp_path / "model", template, eos_token="<|im_end|>")
    expected = [
        encode_by_transformers(folder, shown, template == MARKED_TOOLS)
        for shown in ([join_all(one) for one in RECORDS] if template == TEXT_TOOLS else RECORDS)
    ]
    writers = [write_jsonl, write_parquet] if template == MARKED_TOOLS else [write_jsonl]
    for writer in writers:
        recipe = StoreRecipe((str(writer(tmp_path, RECORDS)),), (), str(folder), column="messages", chat=True)
        store = build_from_recipe(recipe, tmp_path / f"{writer.__name__}.h5")
        check_store(store, expected)


def join_all(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "messages": [{**one, "content": join(one["content"])} for one in record["messages"]]}


def check_store(store: TokenStore, expected: list[tuple[list[int], list[bool]]]) -> None:
    assert store.tokens.tolist() == [token for tokens, _ in expected for token in tokens]
    assert store.counted is not None
    assert store.counted.tolist() == [count for _, counts in expected for count in counts]


def test_a_template_for_tools_alone_is_taken_with_them_and_written_again(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model", None, eos_token="<|im_end|>")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": MARKED_TOOLS}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    (tmp_path / "again").mkdir()
    write_tokenizer_folder(load_tokenizer_folder(folder), tmp_path / "again")
    for where in (folder, tmp_path / "again"):
        encoder = make_chat_encoder(load_tokenizer_folder(where))
        for record, marked in ((RECORDS[0], True), (RECORDS[2], False)):
            tokens, counts = encoder.encode(record["messages"], lambda: "here", record.get("tools"))
            assert (tokens.tolist(), counts.tolist()) == encode_by_transformers(where, record, marked)


BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHATML, {**RECORDS[2], "tools": [CLOCK]}, "a.jsonl:1: the chat template does not write its tools: take the"),
    (CHATML, {"messages": RECORDS[0]["messages"]}, "the chat template does not write the tool_calls of message 2"),
    (TOOLS, {**RECORDS[2], "tools": "{]"}, "a.jsonl:1: tools is text that is not JSON (Expecting"),
    (TOOLS, {**RECORDS[2], "tools": {"name": "clock"}}, "a.jsonl:1: tools is not a list of functions; expected"),
    (TOOLS, {**RECORDS[2], "tools": ["clock"]}, "a.jsonl:1: tools is not a list of functions; expected"),
    (
        TOOLS,
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": "f()"}]},
        "tool_calls is not a list of objec",
    ),
    (TOOLS, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "the chat template refuses it ('dict object'"),
    (TOOLS, {"messages": [{"role": "tool", "content": None}]}, "message 1 (tool) has no text as its content"),
]


@pytest.mark.parametrize(("template", "record", "said"), BAD, ids=range(len(BAD)))
def test_bad_tools_are_one_line(tmp_path: Path, template: str, record: dict[str, Any], said: str) -> None:
    folder = save_tokenizer(tmp_path / "model", template, eos_token="<|im_end|>")
    recipe = StoreRecipe((str(write_jsonl(tmp_path, [record])),), (), str(folder), column="messages", chat=True)
    with pytest.raises(UserError) as caught:
        build_from_recipe(recipe, tmp_path / "out.h5")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "model"]
