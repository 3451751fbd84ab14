"""Files that are not text are refused by name, with what to do, before anything is made."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from token_stores import build_store

from hpc_train.cli.main import main
from hpc_train.config.model import TokenDataConfig
from hpc_train.data.corpus.build import ensure_store
from hpc_train.data.corpus.sources import SourceFile
from hpc_train.data.corpus.text_files import recognise_files
from hpc_train.data.token_store import TokenStore
from hpc_train.errors import EXIT_USER_ERROR, UserError

RANDOM = np.random.default_rng(0)
PROSE = "It was the best of times, it was the worst of times.\n" * 50
CSV = "name,age,town\n" + "".join(f"Ann {n},{n},Oslo\n" for n in range(20))
LINES = "".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(20))


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", PROSE)


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as file:
        data = PROSE.encode()
        info = tarfile.TarInfo("a.txt")
        info.size = len(data)
        file.addfile(info, io.BytesIO(data))


def _sqlite(path: Path) -> None:
    with sqlite3.connect(path) as base:
        base.execute("create table t (a text)")


def _hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["a"] = np.arange(10)


def written(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


BAD: list[tuple[str, Callable[[Path], object], str]] = [
    ("a.txt", written(gzip.compress(PROSE.encode())), "gzip"),
    ("a.txt", written(bz2.compress(PROSE.encode())), "bzip2"),
    ("a.txt", written(lzma.compress(PROSE.encode())), "xz"),
    ("a.txt", written(b"\x28\xb5\x2f\xfd" + RANDOM.bytes(500)), "zstd"),
    ("a.jsonl.gz", written(gzip.compress(PROSE.encode())), "packed"),
    ("a.txt", _zip, "zip"),
    ("a.txt", _tar, "tar"),
    ("a.txt", _sqlite, "SQLite"),
    ("a.txt", _hdf5, "data.path="),
    ("a.txt", lambda path: np.save(path.open("wb"), np.arange(9)), "data.path="),
    ("a.txt", written(pickle.dumps({"a": 1}, protocol=2)), "pickle"),
    ("a.txt", written(pickle.dumps({"a": 1}, protocol=5)), "pickle"),
    ("a.txt", written(b"PAR1" + RANDOM.bytes(500) + b"PAR1"), "Parquet"),
    ("a.txt", written(b"%PDF-1.7\n" + RANDOM.bytes(500)), "PDF"),
    ("a.txt", written(b"\x7fELF" + RANDOM.bytes(500)), "program"),
    ("a.txt", written(b"\x89PNG\r\n" + RANDOM.bytes(500)), "PNG"),
    ("a.txt", written(RANDOM.bytes(5000)), "binary"),
    ("a.txt", written(RANDOM.bytes(50).replace(b"\0", b"x")), "not in UTF-8"),
    ("a.txt", written(PROSE.encode() * 40 + b"\0" + PROSE.encode()), "zero bytes"),
    ("a.txt", written(PROSE.encode() * 100 + RANDOM.bytes(200_000)), "zero bytes"),
    ("a.txt", written(PROSE.encode("utf-16")), "iconv -f UTF-16 -t UTF-8"),
    ("a.txt", written(PROSE.encode("utf-16-be")), "iconv -f UTF-16 -t UTF-8"),
    ("a.txt", written(PROSE.encode("utf-16-le")), "iconv -f UTF-16 -t UTF-8"),
    ("a.txt", written(codecs.BOM_UTF32_LE + PROSE.encode("utf-32-le")), "UTF-32"),
    ("a.txt", written(("\u5929\u5730\u7384\u9ec4" * 300).encode("gb18030")), "not in UTF-8"),
    (
        "a.txt",
        written(
            ("\u0432\u0441\u0435 \u0441\u0447\u0430\u0441\u0442\u043b\u0438\u0432\u044b\u0435 " * 99).encode("koi8-r")
        ),
        "iconv",
    ),
    ("a.csv", written(CSV.encode()), "is a table: no column 'text'; its columns are name, age, town"),
    ("A.TSV", written(b"a\tb\n1\t2\n"), "its columns are a, b"),
    ("a.csv", written(b""), "is empty: leave it out"),
    ("a.jsonl", written(b""), "is empty: leave it out"),
    ("a.csv", written("text,id\nhello,1\n".encode("utf-16")), "iconv -f UTF-16 -t UTF-8"),
    ("a.jsonl", written(LINES.encode("utf-16-le")), "iconv -f UTF-16 -t UTF-8"),
    ("a.csv", written("text,id\nhello,1\nd\u00e9j\u00e0 vu,2\n".encode("latin-1")), "a.csv:3: not in UTF-8"),
    ("a.csv", written(b"text,text\na,b\nc,d\n"), "has several columns 'text'"),
    ("a.json", written(b'{\n "text": "a"\n}\n'), "is a JSON object over several lines: records are read from an array"),
    ("a.json", written(b'\xef\xbb\xbf{ "text": "a",\n"b": 1}'), "is a JSON object over several lines"),
    ("a.json", written(b"[\n1, 2]"), "is a JSON array of other values"),
    ("a.json", written(b" [ ]\n"), "is an empty JSON array: leave it out"),
    ("a.json", written(b'[{"text": "a"},\n {"text": "b'), "a.json:2: not JSON (Unterminated string"),
    ("a.json", written(b'[{"text": "a"},\n {"text": "b"}'), "a.json:2: the file ends within the array"),
    ("a.json", written(b'[{"text": "a"},\n {"text": '), "a.json:2: the file ends within an object"),
    ("a.json", written(b'[{"text": "a"},\n {"text": "b",}]'), "a.json:2: not JSON"),
    ("a.json", written(b'[{"text": "a"}\n {"text": "b"}]'), "a.json:2: expected ']'; expected one JSON array"),
    ("a.json", written(b'[{"text": "a"},\n 7]'), "a.json:2: expected an object"),
    ("a.json", written(b'[{"text": "a"}]\n[]'), "a.json:2: more text after the end of the array"),
    ("a.json", written(b'[{"text": ' + b"[" * 200_000), "cannot be read"),
    ("a.json", written(b'[{"text": "\xff"}]'), "a.json: not in UTF-8"),
    ("a.json", written('[{"text": "a"}]'.encode("utf-16-le")), "iconv -f UTF-16 -t UTF-8"),
    ("a.json", written(b'[{"text": "a"}, {"test": "b"}]'), "a.json object 2: no column 'text'; did you mean 'test'?"),
    ("a.json", written(b'[{"text": "a", "text": "b"}]'), "a.json object 1: has several columns 'text'"),
    ("a.json", written(b'[{"text": "\\ud800"}]'), "a.json object 1: has half of a character"),
    ("a.json", written(b'{"text": ["a", "b"]}'), "a.json:1: column 'text' is a list"),
    ("a.jsonl", written(LINES.replace("text", "test").encode()), "did you mean 'test'?"),
    ("a.jsonl", written(PROSE.encode()), "not JSON objects"),
    ("a.parquet", written(b"PAR1"), "damaged Parquet file, or cut short"),
    ("a.parquet", written(PROSE.encode()), "does not begin as one"),
    ("a.txt", written(CSV.encode()), "its columns are name, age, town"),
    ("a.txt", written(b"label,name\n" + b'1,"good, very"\n0,bad\n' * 9), "its columns are label, name"),
    ("a.txt", written(b"hello\tbonjour\n" * 9), "its columns are hello, bonjour"),
    ("a", written(CSV.replace(",", "\t").encode()), "its columns are name, age, town"),
    ("a.txt", written(LINES.replace("text", "test").encode()), "did you mean 'test'?"),
    ("a.pkl", written(b"I1\n."), "pickle"),
    ("a.safetensors", written(b"x"), "checkpoint"),
]


@pytest.mark.parametrize(("name", "write", "said"), BAD, ids=range(len(BAD)))
def test_what_is_no_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, write: Callable[[Path], object], said: str
) -> None:
    write(tmp_path / name)
    assert main(["data", "build", str(tmp_path / "out.h5"), str(tmp_path / name)]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert (error.count("\n"), said in error, name in error) == (1, True, True), error
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        "\u5929\u5730\u7384\u9ec4\uff0c\u5b87\u5b99\u6d2a\u8352\u3002" * 9000,
        "\U0001f600\U0001f680 emoji " * 9000,
        "x",
        "Roses are red, violets are blue\n" * 9,
        "one, two, three\nfour, five, six\n",
        "def f(a, b):\n    return a, b, f\n" * 9,
        "GIF8 and RIFF, BZh, ID3, ORC and PAR1 are letters\n",
        "\x1b[31mcoloured\x1b[0m log\r\n" * 50,
        "{not json}\n{nor this}\n",
    ],
)
def test_text_is_taken_as_it_is(tmp_path: Path, text: str) -> None:
    """Text is accepted even if a sample cuts a character in two."""
    (tmp_path / "a.txt").write_bytes(text.encode())
    store = build_store([str(tmp_path / "a.txt")], [".txt"], "byte", 256, tmp_path / "out.h5")
    assert bytes(store.tokens.astype(np.uint8)) == text.encode() + b"\0"


def test_a_mark_of_utf8_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"hello")
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF8)
    store = build_store([str(tmp_path)], [".txt"], "byte", 256, tmp_path / "out.h5")
    assert bytes(store.tokens.astype(np.uint8)) == b"hello\0"


def test_a_few_lines_in_an_older_encoding_are_let_through(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(PROSE.encode() + "# d\u00e9j\u00e0 vu\n".encode("latin-1"))
    (known,) = recognise_files([SourceFile(tmp_path / "a.py", 0, 0)])
    assert known.format is None


def test_a_folder_of_mixed_files_names_the_first_and_counts_the_rest(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for index in range(9):
        (corpus / f"{index}.txt").write_bytes(PROSE.encode() if index % 3 == 0 else RANDOM.bytes(999))
    config = TokenDataConfig(name="mine", sources=[str(corpus)], suffixes=[".txt"], cache=str(tmp_path / "cache"))
    for attempt in (
        lambda: build_store([str(corpus)], [".txt"], "bpe", 300, tmp_path / "out.h5"),
        lambda: ensure_store(config),
    ):
        with pytest.raises(UserError) as raised:
            attempt()
        said = str(raised.value)
        assert said.startswith(f"6 of 9 files are not readable text: {corpus}/1.txt ")
        assert "; and 2 more (known: text, JSON Lines" in said
        assert said.count("\n") == 0
    assert not (tmp_path / "out.h5").exists()
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True


def test_the_standard_library_is_taken_as_it_is(tmp_path: Path) -> None:
    """A folder of the standard library with files in other encodings, for its own tests."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / "encodings"
    TokenStore.open(build_store([str(folder)], [".py"], "byte", 256, tmp_path / "out.h5").path)
