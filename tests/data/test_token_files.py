"""Token files of other programs: written as those write them, mapped without a copy, checked in one line."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_train.cli.main import main
from hpc_train.config.model import TokenDataConfig
from hpc_train.data import token_files
from hpc_train.data.datasets import open_dataset
from hpc_train.data.token_files import TokenFile, open_tokens
from hpc_train.errors import EXIT_USER_ERROR, UserError

DOCUMENTS = [np.random.default_rng(length).integers(1, 1000, length) for length in (5, 90, 1, 300, 17)]
TOKENS = np.concatenate([[*document, 0] for document in DOCUMENTS])
STARTS = np.cumsum([0, *(len(document) + 1 for document in DOCUMENTS)])[:-1]


def write_raw(path: Path, dtype: str = "<u2") -> Path:
    TOKENS.astype(dtype).tofile(path)
    return path


def write_numpy(path: Path, dtype: str = "<u2") -> Path:
    with path.open("wb") as file:
        np.save(file, TOKENS.astype(dtype))
    return path


def write_llm_c(path: Path) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(TOKENS)
    path.write_bytes(header.tobytes() + TOKENS.astype("<u2").tobytes())
    return path


def write_megatron(path: Path, code: int = 8, dtype: str = "<u2") -> Path:
    """As Megatron's IndexedDatasetBuilder: two sequences in the second document, one in the others."""
    path.with_suffix(".bin").write_bytes(TOKENS.astype(dtype).tobytes())
    lengths = [6, 40, 51, 2, 301, 18]
    places = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    bounds = [0, 1, 3, 4, 5, 6]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    arrays = np.array(lengths, "<i4").tobytes() + places.astype("<i8").tobytes() + np.array(bounds, "<i8").tobytes()
    path.with_suffix(".idx").write_bytes(header + arrays)
    return path


def config(path: Path, **changes: Any) -> TokenDataConfig:
    return TokenDataConfig(name="t", path=str(path), validation_fraction=0.0, **changes)


KINDS: list[tuple[str, Callable[[Path], Path], dict[str, Any]]] = [
    ("a.bin", write_raw, {"dtype": "uint16"}),
    ("a.npy", lambda path: write_raw(path, "<u4"), {"dtype": "uint32"}),
    ("a.npy", write_numpy, {}),
    ("a", lambda path: write_numpy(path, "<i8"), {}),
    ("a.bin", write_llm_c, {}),
    ("a.bin", write_megatron, {}),
    ("a.idx", lambda path: write_megatron(path, 4, "<i4"), {}),
]


@pytest.mark.parametrize(("name", "write", "settings"), KINDS, ids=range(len(KINDS)))
def test_every_kind_gives_the_tokens_from_the_map(
    tmp_path: Path, name: str, write: Callable[[Path], Path], settings: dict[str, Any]
) -> None:
    opened = open_tokens(config(write(tmp_path / name), **settings))
    assert isinstance(opened, TokenFile)
    assert opened.tokens.tolist() == TOKENS.tolist()
    assert isinstance(opened.tokens.base, np.memmap)
    assert not opened.tokens.flags.writeable
    assert opened.vocab_size == TOKENS.max() + 1
    inputs, targets = open_dataset(config(tmp_path / name, **settings), 9, "train").get(np.array([3, 0]))
    assert (inputs[0].tolist(), targets[0].tolist()) == (TOKENS[27:36].tolist(), TOKENS[28:37].tolist())


def test_megatron_knows_its_documents(tmp_path: Path) -> None:
    assert open_tokens(config(write_megatron(tmp_path / "a.bin"))).documents.tolist() == STARTS.tolist()


def test_a_separator_says_where_documents_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "SLICE_TOKENS", 50)
    path = write_numpy(tmp_path / "a.npy")
    assert open_tokens(config(path, separator=0)).documents.tolist() == STARTS.tolist()
    with pytest.raises(UserError, match=r"does not say where its documents end: set data.separator"):
        open_dataset(config(path, samples="padded"), 9, "train")
    assert len(open_dataset(config(path, samples="padded", separator=0), 9, "train")) == sum(
        -(-len(document) // 9) for document in DOCUMENTS
    )


@pytest.mark.parametrize("slices", [False, True])
def test_tokens_outside_the_vocabulary_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slices: bool) -> None:
    """In all of a short file, and in the last slice of a long one."""
    if slices:
        monkeypatch.setattr(token_files, "SLICE_TOKENS", 5)
        monkeypatch.setattr(token_files, "FULL_SCAN_TOKENS", 100)
    path = tmp_path / "a.npy"
    np.save(path, np.append(TOKENS, 5000).astype("<u2"))
    with pytest.raises(UserError, match=rf"token 5000 at index {len(TOKENS)} is outside \[0, 1,000\)"):
        open_tokens(config(path, vocab_size=1000))
    assert open_tokens(config(path, vocab_size=5001)).vocab_size == 5001
    if slices:
        with pytest.raises(UserError, match=r"too many to search for the largest: set data.vocab_size"):
            open_tokens(config(path))


def cut(path: Path, count: int) -> Path:
    path.write_bytes(path.read_bytes()[:-count])
    return path


def change(path: Path, offset: int, data: bytes) -> Path:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)
    return path


def rewrite(path: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    return path


BAD: list[tuple[Callable[[Path], Path], dict[str, Any], str]] = [
    (lambda folder: write_raw(folder / "a.bin"), {}, "tokens without a header; set data.dtype=uint16"),
    (lambda folder: cut(write_raw(folder / "a.bin"), 1), {"dtype": "uint16"}, "not a whole number of uint16 tokens"),
    (
        lambda folder: write_raw(folder / "a.bin"),
        {"dtype": "uint32", "vocab_size": 1000},
        "is data.dtype right (here uint32)",
    ),
    (lambda folder: cut(write_numpy(folder / "a.npy"), 2), {}, "is cut short"),
    (lambda folder: cut(write_numpy(folder / "a.npy"), 900), {}, "damaged NumPy file"),
    (lambda folder: write_numpy(folder / "a.npy", "<f4"), {}, "tokens are one row of integers"),
    (lambda folder: rewrite(write_numpy(folder / "a.npy"), b"'shape': (", b"'shape': (-"), {}, "damaged NumPy file"),
    (lambda folder: rewrite(write_numpy(folder / "a.npy"), b"NUMPY\1", b"NUMPY\x09"), {}, "damaged NumPy file"),
    (lambda folder: cut(write_llm_c(folder / "a.bin"), 2), {}, "is cut short"),
    (lambda folder: change(write_llm_c(folder / "a.bin"), 11, b"\xff"), {}, "its header says -"),
    (lambda folder: cut(write_megatron(folder / "a.bin"), 2), {}, "is cut short"),
    (lambda folder: cut(write_megatron(folder / "a.idx"), 2), {}, "is cut short"),
    (lambda folder: change(write_megatron(folder / "a.idx"), 17, b"\x07"), {}, "type 7; expected"),
    (lambda folder: change(write_megatron(folder / "a.idx"), 34, b"\xff\xff\xff\xff"), {}, "do not follow each other"),
    (lambda folder: change(write_megatron(folder / "a.idx"), -8, b"\xff"), {}, "not consecutive sequences"),
    (lambda folder: change(write_megatron(folder / "a.bin"), 1 << 20, b"\0\0"), {}, "are not of one data set"),
    (lambda folder: write_megatron(folder / "a.bin").with_suffix(""), {}, "a: no such file; give"),
]


@pytest.mark.parametrize(("write", "settings", "said"), BAD, ids=range(len(BAD)))
def test_a_bad_file_is_one_line_before_any_rank(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], Path],
    settings: dict[str, Any],
    said: str,
) -> None:
    words = [f"data.path={write(tmp_path)}", *(f"data.{name}={value}" for name, value in settings.items())]
    assert main(["train", "data=tokens", *words, f"run_dir={tmp_path}/run", "train.steps=1"]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert (error.count("\n"), said in error) == (1, True), error
    assert not (tmp_path / "run").exists()
