"""The token store: what is written is what the memory map reads, and nothing half-written has a name."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.config.compose import compose
from hpc_train.data.corpus.build import ensure_store
from hpc_train.data.store_file import TOKEN_STORE, is_store
from hpc_train.data.token_store import (
    SLICE_TOKENS,
    StoreHeader,
    TokenBlock,
    TokenStore,
    choose_token_dtype,
    compute_unigram_entropy,
    verify_store,
    write_store,
)
from hpc_train.errors import UserError


def header(vocab_size: int = 256) -> StoreHeader:
    return StoreHeader(vocab_size, "byte", "", '{"sources": []}')


def blocks_of(tokens: np.ndarray, size: int) -> list[TokenBlock]:
    parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    return [TokenBlock(part, np.zeros(1, np.int64)) for part in parts]


def written(path: Path, tokens: np.ndarray, vocab_size: int = 256, size: int = 1000) -> TokenStore:
    write_store(path, blocks_of(tokens, size), header(vocab_size))
    return TokenStore.open(path)


def random_tokens(count: int, vocab_size: int = 256) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, count, dtype=np.uint32)


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "<u2"), (65536, "<u2"), (65537, "<u4"), (200_000, "<u4")])
def test_memory_map_equals_what_was_written_and_what_h5py_reads(tmp_path, vocab_size, dtype):
    tokens = random_tokens(12_345, vocab_size)
    store = written(tmp_path / "a.h5", tokens, vocab_size)
    assert store.tokens.dtype == np.dtype(dtype) == choose_token_dtype(vocab_size)
    assert np.array_equal(store.tokens, tokens)
    with h5py.File(store.path) as file:
        assert file["tokens"].chunks is None
        assert np.array_equal(file["tokens"][:], tokens)
        assert np.array_equal(file["documents"][:], store.documents)


def test_a_store_of_several_slices_comes_back_whole(tmp_path):
    tokens = random_tokens(SLICE_TOKENS + 1234)
    store = written(tmp_path / "a.h5", tokens, size=SLICE_TOKENS // 3)
    assert np.array_equal(store.tokens, tokens)
    assert verify_store(store)


def test_documents_say_where_each_begins_across_blocks(tmp_path):
    parts = [
        TokenBlock(np.array([1, 2, 0, 3], np.uint16), np.array([0, 3])),
        TokenBlock(np.array([4, 5, 0], np.uint16), np.array([], np.int64)),
        TokenBlock(np.array([6, 0], np.uint16), np.array([0])),
    ]
    write_store(tmp_path / "a.h5", parts, header())
    assert TokenStore.open(tmp_path / "a.h5").documents.tolist() == [0, 3, 7]


def test_the_map_is_read_only(tmp_path):
    store = written(tmp_path / "a.h5", random_tokens(10))
    with pytest.raises(ValueError, match="read-only"):
        store.tokens[0] = 1


def test_the_same_tokens_give_the_same_file_however_they_are_cut(tmp_path):
    tokens = random_tokens(5000)
    starts = np.zeros(1, np.int64)
    none = np.zeros(0, np.int64)
    write_store(tmp_path / "a.h5", [TokenBlock(tokens, starts)], header())
    write_store(tmp_path / "b.h5", [TokenBlock(tokens[:77], starts), TokenBlock(tokens[77:], none)], header())
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_a_changed_token_fails_verification(tmp_path):
    store = written(tmp_path / "a.h5", random_tokens(1000))
    with h5py.File(store.path, "r+") as file:
        file["tokens"][500] ^= 1
    assert not verify_store(TokenStore.open(store.path))


@pytest.mark.parametrize("keep", [0.0, 0.0005, 0.5, 0.9999])
def test_a_truncated_store_is_refused(tmp_path, keep):
    store = written(tmp_path / "a.h5", random_tokens(100_000))
    os.truncate(store.path, int(store.path.stat().st_size * keep))
    with pytest.raises(UserError) as error:
        TokenStore.open(store.path)
    assert str(store.path) in one_line(error)


def test_a_header_that_promises_more_than_the_file_holds_is_refused(tmp_path):
    store = written(tmp_path / "a.h5", random_tokens(100_000))
    with h5py.File(store.path) as file:
        end = file["tokens"].id.get_offset() + file["tokens"].nbytes
    os.truncate(store.path, end - 1)
    with pytest.raises(UserError, match=r"truncated|cut short"):
        TokenStore.open(store.path)


def test_a_missing_file_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(UserError, match="hpc-train data build") as error:
        TokenStore.open(tmp_path / "none.h5")
    one_line(error)


def test_a_folder_is_no_store(tmp_path):
    with pytest.raises(UserError, match="no token store"):
        TokenStore.open(tmp_path)


def test_a_text_file_is_no_store(tmp_path):
    (tmp_path / "a.h5").write_text("some text\n" * 1000)
    with pytest.raises(UserError, match="cannot be read as a token store") as error:
        TokenStore.open(tmp_path / "a.h5")
    one_line(error)


def test_an_hdf5_file_of_something_else_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["tokens"] = np.arange(10)
    with pytest.raises(UserError, match="is no token store"):
        TokenStore.open(tmp_path / "a.h5")


def test_a_store_of_a_later_format_is_refused(tmp_path):
    store = written(tmp_path / "a.h5", random_tokens(10))
    with h5py.File(store.path, "r+") as file:
        file.attrs["version"] = 99
    with pytest.raises(UserError, match="format 99 of token stores, newer than 2"):
        TokenStore.open(store.path)


def test_a_store_without_a_field_is_refused_in_one_line(tmp_path):
    store = written(tmp_path / "a.h5", random_tokens(10))
    with h5py.File(store.path, "r+") as file:
        del file.attrs["vocab_size"]
    with pytest.raises(UserError, match="damaged") as error:
        TokenStore.open(store.path)
    one_line(error)


def test_a_store_whose_tokens_became_something_else_is_refused_in_one_line(tmp_path):
    store = written(tmp_path / "a.h5", random_tokens(10))
    with h5py.File(store.path, "r+") as file:
        del file["tokens"]
        file["tokens"] = np.dtype("<u2")  # a named type where the data set was
    with pytest.raises(UserError, match="damaged") as error:
        TokenStore.open(store.path)
    one_line(error)


def test_a_store_repacked_into_chunks_is_refused(tmp_path):
    store = written(tmp_path / "a.h5", random_tokens(1000))
    with h5py.File(store.path, "r+") as file:
        tokens = file["tokens"][:]
        del file["tokens"]
        file.create_dataset("tokens", data=tokens, chunks=(100,))
    with pytest.raises(UserError, match="not contiguous"):
        TokenStore.open(store.path)


def test_no_tokens_are_refused_and_leave_nothing(tmp_path):
    with pytest.raises(UserError, match="no text"):
        write_store(tmp_path / "a.h5", [], header())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write token store") as error:
        write_store(tmp_path / "file" / "a.h5", blocks_of(random_tokens(10), 10), header())
    one_line(error)


def test_a_writer_that_fails_leaves_the_folder_as_it_was(tmp_path):
    old = written(tmp_path / "a.h5", random_tokens(10)).path.read_bytes()

    def failing():
        yield TokenBlock(random_tokens(1000), np.zeros(1, np.int64))
        raise RuntimeError("source went away")

    with pytest.raises(RuntimeError, match="went away"):
        write_store(tmp_path / "a.h5", failing(), header())
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]
    assert (tmp_path / "a.h5").read_bytes() == old


KILLED = """
import sys
from pathlib import Path
import numpy as np
from hpc_train.data.token_store import TokenBlock as Block, StoreHeader as Header, write_store

def blocks(then_wait):
    for _ in range(64):
        yield Block(np.full(1 << 19, 7, np.uint16), np.zeros(1, np.int64))
    print("spooled", flush=True)
    if then_wait:
        sys.stdin.read()

write_store(Path(sys.argv[1]), blocks(sys.argv[2] == "wait"), Header(256, "byte", "", "{}"))
"""


def writer_process(path: Path, mode: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", KILLED, str(path), mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_writer_killed_among_its_blocks_leaves_no_file(tmp_path):
    with writer_process(tmp_path / "a.h5", "wait") as process:
        assert process.stdout.readline() == b"spooled\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_killed_as_it_writes_leaves_a_whole_store_or_none(tmp_path):
    path = tmp_path / "a.h5"
    with writer_process(path, "go on") as process:
        assert process.stdout.readline() == b"spooled\n"
        while not list(tmp_path.iterdir()) and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not path.exists() or verify_store(TokenStore.open(path))
    write_store(path, blocks_of(random_tokens(10), 10), header())  # what the killed one left is in nobody's way
    assert len(TokenStore.open(path).tokens) == 10


@settings(max_examples=50)
@given(st.lists(st.integers(0, 299), min_size=1, max_size=500), st.integers(0, 500))
def test_unigram_entropy_of_any_part_is_that_of_its_frequencies(tmp_path_factory, values, stop):
    store = written(tmp_path_factory.mktemp("store") / "a.h5", np.array(values, np.uint32), 300, size=37)
    part = np.array(values[: min(stop, len(values))], np.int64)
    frequency = np.unique(part, return_counts=True)[1] / max(len(part), 1)
    expected = -(frequency * np.log(frequency)).sum()
    assert compute_unigram_entropy(store, min(stop, len(values))) == pytest.approx(expected, abs=1e-12)


def test_the_store_knows_the_entropy_of_all_its_tokens(tmp_path):
    store = written(tmp_path / "a.h5", np.repeat(np.arange(8), 100))
    assert store.unigram_entropy == pytest.approx(np.log(8))
    assert compute_unigram_entropy(store) == pytest.approx(np.log(8))


def test_a_pipe_is_no_store_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.h5")
    assert not is_store(tmp_path / "pipe.h5", TOKEN_STORE)
    with pytest.raises(UserError, match="no token store at"):
        TokenStore.open(tmp_path / "pipe.h5")


def test_a_store_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    """As where the memory of a process is limited."""
    store = written(tmp_path / "a.h5", random_tokens(100)).path

    def fail(*_args, **_options):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(np, "memmap", fail)
    with pytest.raises(UserError, match="the token store cannot be read: Cannot allocate memory"):
        TokenStore.open(store)


def test_a_cache_that_cannot_be_made_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "text.txt").write_text("some text")
    config = compose([f"data.sources=[{tmp_path}/text.txt]", f"data.cache={tmp_path}/file/cache"]).data
    with pytest.raises(UserError, match=r"data.cache=.*: Not a directory; set data.cache or HPC_TRAIN_CACHE"):
        ensure_store(config)
