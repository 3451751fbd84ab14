"""Tokenizers from folders, and chats: the same tokens and the same mask as transformers, and bad ones in one line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_models import CHATML, FORGETFUL, MARKED, save_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from hpc_train.cli.main import main
from hpc_train.config.model import TokenDataConfig
from hpc_train.data.corpus.build import ensure_store
from hpc_train.data.datasets import open_dataset
from hpc_train.data.token_store import TokenStore, verify_store
from hpc_train.data.tokenizers.chat import has_marks, make_chat_encoder
from hpc_train.data.tokenizers.tokenizer import load_tokenizer
from hpc_train.data.tokenizers.tokenizer_folder import FolderTokenizer, load_tokenizer_folder, write_tokenizer_folder
from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.interfaces import IGNORED_TARGET

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris is."}],
    [
        {"role": "system", "content": "You speak 日本語 é 🙂"},
        {"role": "user", "content": "a joke"},
        {"role": "assistant", "content": " with spaces \n"},
        {"role": "user", "content": "What is <|im_end|> user?"},
        {"role": "assistant", "content": "assistant user system " * 30},
    ],
    [{"role": "user", "content": "nobody answers"}],
    [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": "You may."}],
]
OPENING = "<|im_start|>assistant\n"
ANSWERED = [chat for chat in CHATS if any(message["role"] == "assistant" for message in chat)]


def write_chats(path: Path, chats: list[Any] = CHATS, column: str = "messages") -> Path:
    path.write_text("".join(json.dumps({"id": 1, column: chat}) + "\n" for chat in chats))
    return path


def encode_by_prefixes(folder: Path, chat: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """The mask from the tokens of growing prefixes, through transformers alone."""
    reference = AutoTokenizer.from_pretrained(str(folder))
    whole = reference.apply_chat_template(chat, return_dict=True)["input_ids"]
    mask = [False] * len(whole)
    for index, message in enumerate(chat):
        if message["role"] == "assistant":
            through = reference.apply_chat_template(chat[: index + 1], return_dict=True)["input_ids"]
            prompt = {"add_generation_prompt": True, "return_dict": True}
            begun = reference.apply_chat_template(chat[:index], **prompt) if index else reference(OPENING)
            before = begun["input_ids"]
            assert whole[: len(through)] == through
            mask[len(before) : len(through)] = [True] * (len(through) - len(before))
    return whole, mask


@pytest.mark.parametrize("chat", ANSWERED, ids=range(len(ANSWERED)))
def test_a_template_without_marks_counts_what_a_turn_adds(tmp_path: Path, chat: list[dict[str, Any]]) -> None:
    tokenizer = load_tokenizer_folder(save_tokenizer(tmp_path, eos_token="<|im_end|>"))
    encoder = make_chat_encoder(tokenizer)
    assert not has_marks(encoder.template)
    tokens, counts = encoder.encode(chat, lambda: "here")
    assert (tokens.tolist(), counts.tolist()) == encode_by_prefixes(tmp_path, chat)


@pytest.mark.parametrize("chat", ANSWERED, ids=range(len(ANSWERED)))
def test_a_template_with_marks_counts_what_they_enclose(tmp_path: Path, chat: list[dict[str, Any]]) -> None:
    tokenizer = load_tokenizer_folder(save_tokenizer(tmp_path, MARKED, eos_token="<|im_end|>"))
    encoder = make_chat_encoder(tokenizer)
    assert has_marks(encoder.template)
    tokens, counts = encoder.encode(chat, lambda: "here")
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    expected = reference.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert tokens.tolist() == expected["input_ids"]
    assert counts.tolist() == [bool(value) for value in expected["assistant_masks"]]
    said = tokenizer.decode(tokens[counts])
    assert said == "".join(f"{one['content']}<|im_end|>" for one in chat if one["role"] == "assistant")


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    folder = save_tokenizer(tmp_path / "model", MARKED, eos_token="<|im_end|>")
    words = [str(tmp_path / "out.h5"), str(write_chats(tmp_path / "a.jsonl")), "--chat", "--tokenizer", str(folder)]
    assert main(["data", "build", *words]) == 0
    return TokenStore.open(tmp_path / "out.h5")


def test_a_store_of_chats_has_every_answered_one(store: TokenStore) -> None:
    tokenizer = load_tokenizer(store)
    assert isinstance(tokenizer, FolderTokenizer)
    assert len(store.documents) == len(ANSWERED)
    assert json.loads(store.source)["conversations_without_answer"] == 1
    assert json.loads(store.source)["assistant_part"] == "marked by the chat template"
    assert store.counted is not None
    assert verify_store(store)
    encoder = make_chat_encoder(tokenizer)
    encoded = [encoder.encode(chat, lambda: "here") for chat in ANSWERED]
    assert store.tokens.tolist() == [token for one in encoded for token in one.tokens.tolist()]
    assert store.counted.tolist() == [count for one in encoded for count in one.counts.tolist()]


@pytest.mark.parametrize("length", [7, 50, 500])
def test_padded_samples_are_the_conversations(store: TokenStore, length: int) -> None:
    config = TokenDataConfig(name="c", path=str(store.path), validation_fraction=0.0)
    data = open_dataset(config, length, "train")
    inputs, targets = data.get(np.arange(len(data)))
    assert store.counted is not None
    bounds = [*store.documents.tolist(), len(store.tokens)]
    row = 0
    for begin, end in itertools.pairwise(bounds):
        for start in range(begin, end - 1, length):
            stop = min(start + length, end - 1)
            size = stop - start
            assert inputs[row, :size].tolist() == store.tokens[start:stop].tolist()
            expected = np.where(
                store.counted[start + 1 : stop + 1], store.tokens[start + 1 : stop + 1].astype(int), -100
            )
            assert targets[row, :size].tolist() == expected.tolist()
            assert targets[row, size:].eq(IGNORED_TARGET).all()
            row += 1
    assert row == len(data)
    assert (targets != IGNORED_TARGET).sum() == store.counted.sum() - store.counted[store.documents].sum()


def test_a_stream_of_chats_counts_the_same_targets(store: TokenStore) -> None:
    config = TokenDataConfig(name="c", path=str(store.path), validation_fraction=0.0, samples="stream")
    inputs, targets = open_dataset(config, 16, "train").get(np.arange(4))
    assert store.counted is not None
    assert inputs.flatten().tolist() == store.tokens[:64].tolist()
    expected = torch.from_numpy(np.where(store.counted[1:65], store.tokens[1:65].astype(np.int64), IGNORED_TARGET))
    assert targets.flatten().equal(expected)


def test_validation_has_other_conversations(store: TokenStore) -> None:
    config = TokenDataConfig(name="c", path=str(store.path), validation_fraction=0.34)
    assert [len(open_dataset(config, 500, split)) for split in ("train", "validation")] == [2, 1]


BAD = [
    ([[{"content": "Hi"}]], "a.jsonl:1: message 1 has no role (its keys: content); one of system, "),
    ([CHATS[0], [{"from": "human", "value": "x"}]], "a.jsonl:2: message 1 has no role (its keys: from, value)"),
    ([[{"role": "human", "content": "x"}]], "a.jsonl:1: message 1 has the role 'human'; known are system, developer"),
    ([[{"role": "user", "content": [{"type": "image"}]}]], "message 1 (user) has a part of type 'image' in its"),
    ([[{"role": "user", "content": 3}]], "message 1 (user) has no text as its content"),
    ([[{"role": "user", "content": []}]], "message 1 (user) has no text as its content"),
    (["hello"], "a.jsonl:1: not a conversation; expected a list"),
    ([CHATS[2]], "none of 1 conversations has a turn of the assistant to learn from"),
    ([[{"role": "user", "content": "\ud800"}, CHATS[0][-1]]], "a.jsonl:1: has half of a character in it"),
]


@pytest.mark.parametrize(("chats", "said"), BAD, ids=range(len(BAD)))
def test_what_is_no_chat_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chats: list[Any], said: str
) -> None:
    folder = save_tokenizer(tmp_path / "model", eos_token="<|im_end|>")
    words = [str(tmp_path / "out.h5"), str(write_chats(tmp_path / "a.jsonl", chats)), "--chat", "--tokenizer"]
    assert main(["data", "build", *words, str(folder)]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert (error.count("\n"), said in error) == (1, True), error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "model"]


TEMPLATES = [
    (None, "has no chat template"),
    (FORGETFUL, "a.jsonl:1: the chat template writes message 3 differently once others follow"),
    ("{{ raise_exception('only one user') }}", "a.jsonl:1: the chat template refuses it (only one user)"),
    ("{{ ''.__class__.__mro__ }}", "the chat template refuses it (access to attribute"),
    ("{% for %}", "the chat template refuses it"),
    ("{% generation %}{% endgeneration %}{{ messages[0]['content'] }}", "marks nothing of the assistant's turns"),
]


@pytest.mark.parametrize(("template", "said"), TEMPLATES, ids=range(len(TEMPLATES)))
def test_a_template_that_does_not_do_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None, said: str
) -> None:
    folder = save_tokenizer(tmp_path / "model", template, eos_token="</s>")
    words = [str(tmp_path / "out.h5"), str(write_chats(tmp_path / "a.jsonl", [CHATS[1]])), "--chat", "--tokenizer"]
    assert main(["data", "build", *words, str(folder)]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert (error.strip().count("\n"), said in error) == (0, True), error


def test_text_gets_the_tokens_that_transformers_gives_it(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model", eos_token="</s>")
    texts = ["What is the capital?", "日本語 é 🙂 joke", "x\n" * 40]
    write_chats(tmp_path / "a.jsonl", texts, "text")
    config = TokenDataConfig(
        name="t", sources=[str(tmp_path / "a.jsonl")], tokenizer=str(folder), cache=str(tmp_path / "cache")
    )
    store = TokenStore.open(ensure_store(config))
    reference = AutoTokenizer.from_pretrained(str(folder))
    expected = [token for text in texts for token in [*reference.encode(text), reference.eos_token_id]]
    assert store.tokens.tolist() == expected
    assert store.vocab_size == len(reference)
    other = TokenDataConfig(**{**vars(config), "end_of_document": "<s>"})
    assert ensure_store(other) != store.path
    assert TokenStore.open(ensure_store(other)).tokens[-1] == reference.convert_tokens_to_ids("<s>")


def test_a_document_is_framed_as_the_tokenizer_does(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model", eos_token="</s>")
    tokenizer = load_tokenizer_folder(folder)
    ids = {name: tokenizer.model.token_to_id(name) for name in ("<s>", "</s>", "<|im_end|>")}
    assert (tokenizer.begin, tokenizer.end) == ((), (ids["</s>"],))
    for template, end in (("<s> $A", "</s>"), ("<s> $A <|im_end|>", "<|im_end|>")):
        names = [("<s>", ids["<s>"]), ("<|im_end|>", ids["<|im_end|>"])]
        model = tokenizer.model
        model.post_processor = processors.TemplateProcessing(single=template, special_tokens=names)
        model.enable_truncation(5)
        model.enable_padding(length=7)
        model.save(str(folder / "tokenizer.json"))
        framed = load_tokenizer_folder(folder)
        assert (framed.begin, framed.end) == ((ids["<s>"],), (ids[end],))
        encoded = framed.encode([b"a long text that is neither cut nor padded", b"x"])
        assert framed.decode(encoded[0]) == "a long text that is neither cut nor padded"
        assert len(encoded[1]) == 1


def save_words(folder: Path, words: list[str], template: str | None = None) -> Path:
    """Save a tokenizer whose tokens are whole words. template: puts [CLS] before a text, say."""
    table = {word: number for number, word in enumerate(words)}
    model = Tokenizer(models.WordLevel(table))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    if template is not None:
        special = [(word, table[word]) for word in template.split() if word in table]
        model.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
        model.add_special_tokens([word for word, _ in special])
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": words[-1]}))
    return folder


def test_a_tokenizer_without_the_letter_a_frames_its_documents(tmp_path: Path) -> None:
    """As those of proteins do: they have capital letters only, and no token for what they do not know."""
    folder = save_words(tmp_path / "proteins", ["[CLS]", "M", "K", "V", "[SEP]"], "[CLS] $A [SEP]")
    tokenizer = load_tokenizer_folder(folder)
    assert (tokenizer.begin, tokenizer.end) == ((0,), (4,))
    assert tokenizer.special_tokens == {0, 4}


def test_text_without_a_token_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_words(tmp_path / "words", ["[CLS]", "M", "K", "[SEP]"])
    (tmp_path / "a.txt").write_text("M K M X K")
    words = [str(tmp_path / "out.h5"), str(tmp_path / "a.txt"), "--tokenizer", str(folder)]
    assert main(["data", "build", *words]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert f"{tmp_path}/a.txt: the tokenizer has no token for some of the text (WordLevel error: Missing" in error
    assert error.endswith("give it an unknown token, or take another tokenizer\n")
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "words"]


def test_text_that_spells_a_special_token_stays_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer_folder(save_tokenizer(tmp_path, eos_token="</s>"))
    (tokens,) = tokenizer.encode([b"an </s> in a text"])
    assert tokenizer.end[0] not in tokens.tolist()
    assert tokenizer.decode(tokens) == "an </s> in a text"


def test_a_store_gives_its_tokenizer_back_to_transformers(store: TokenStore, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(store)
    assert isinstance(tokenizer, FolderTokenizer)
    (tmp_path / "again").mkdir()
    write_tokenizer_folder(tokenizer, tmp_path / "again")
    first, again = (AutoTokenizer.from_pretrained(str(tmp_path / name)) for name in ("model", "again"))
    rendered = [one.apply_chat_template(CHATS[1], return_dict=True)["input_ids"] for one in (first, again)]
    assert rendered[0] == rendered[1]
    assert first.eos_token_id == again.eos_token_id


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer.json: give a folder"):
        load_tokenizer_folder(tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"x")
    with pytest.raises(UserError, match=r"has spiece.model but no tokenizer.json: write it with transformers"):
        load_tokenizer_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match=r"tokenizer.json is not a tokenizer of the package tokenizers"):
        load_tokenizer_folder(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"does not say which token ends a document"):
        load_tokenizer_folder(tmp_path)
    with pytest.raises(UserError, match=r"the token '<none>' that ends a document is not in the vocabulary"):
        load_tokenizer_folder(tmp_path, "<none>")
    file = tmp_path / "tokenizer.json"
    body = json.loads(file.read_text())
    body["model"]["vocab"][next(iter(body["model"]["vocab"]))] = 1 << 31
    file.write_text(json.dumps(body))
    with pytest.raises(UserError, match=r"has the id 2,147,483,648, more than the maximum of 16,777,216"):
        load_tokenizer_folder(tmp_path, "<none>")


def test_a_vocabulary_that_does_not_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tokenizer(tmp_path / "model", CHATML, eos_token="</s>")
    (tmp_path / "a.txt").write_text("text " * 500)
    words = [f"data.sources=[{tmp_path}/a.txt]", f"data.tokenizer={folder}", f"run_dir={tmp_path}/run"]
    assert main(["train", "data=text", *words, "train.steps=1"]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    size = load_tokenizer_folder(folder).vocab_size
    assert error.endswith(f"use model.vocab_size={size}\n")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
