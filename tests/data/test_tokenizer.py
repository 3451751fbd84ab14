"""Tokenizers: every text comes back, and the separator comes from nobody but us."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data.tokenizers.tokenizer import SEPARATOR, ByteTokenizer, train_bpe
from hpc_train.errors import UserError

TEXT = [b"def area(radius):\n    return 3.14159 * radius ** 2\n" * 20, "naïve façade, 日本語\n".encode() * 20]
BPE = train_bpe([TEXT], 400)


@given(st.binary(max_size=200))
def test_bytes_come_back(data):
    tokens = ByteTokenizer().encode([data])[0]
    assert tokens.tolist() == list(data)
    assert ByteTokenizer().decode(tokens) == data.decode(errors="replace")


@given(st.text(max_size=200))
def test_any_text_comes_back_through_bpe(text):
    tokens = BPE.encode([text.encode()])[0]
    assert SEPARATOR not in tokens
    assert (tokens < BPE.vocab_size).all()
    assert BPE.decode(tokens) == text


def test_a_bpe_shortens_the_text_it_was_trained_on():
    assert 256 < BPE.vocab_size <= 400
    assert len(BPE.encode(TEXT)[0]) < len(TEXT[0]) / 3


def test_text_that_spells_the_separator_is_text():
    tokens = BPE.encode([b"<|endoftext|>"])[0]
    assert SEPARATOR not in tokens
    assert BPE.decode(tokens) == "<|endoftext|>"


def test_invalid_utf8_is_replaced():
    assert BPE.decode(BPE.encode([b"a\xff\xfeb"])[0]) == "a��b"


def test_the_same_text_trains_the_same_bpe_in_another_process():
    program = (
        "import sys; from hpc_train.data.tokenizers.tokenizer import train_bpe;"
        f"sys.stdout.write(train_bpe([{TEXT!r}], 400).to_json())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert other == BPE.to_json()


def test_a_vocabulary_without_room_for_bytes_and_separator_is_refused():
    with pytest.raises(UserError, match="at least 257"):
        train_bpe([TEXT], 256)
    assert train_bpe([TEXT], 257).vocab_size == 257


def test_without_the_package_one_line_says_how_to_get_it():
    program = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from hpc_train.data.tokenizers.tokenizer import train_bpe\n"
        "from hpc_train.errors import UserError\n"
        "try: train_bpe([], 300)\n"
        "except UserError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert "pip install 'hpc_train[bpe]'" in out
    assert len(out.splitlines()) == 1


def test_tokens_have_the_format_of_the_store():
    assert BPE.encode([b"text"])[0].dtype == np.dtype("<u2")
