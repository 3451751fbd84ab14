"""Files of records: every format gives the same store as the same documents as text, and bad ones are one line."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from token_stores import build_store

from hpc_train.cli.main import main
from hpc_train.data.corpus import documents
from hpc_train.data.corpus.build import StoreRecipe, build_from_recipe
from hpc_train.data.corpus.sources import find_source_files
from hpc_train.data.corpus.text_files import recognise_files
from hpc_train.data.readers import json_array, json_lines, records
from hpc_train.data.readers.records import MAX_RECORD_BYTES, Span
from hpc_train.data.token_store import TokenStore
from hpc_train.errors import EXIT_USER_ERROR, UserError

DOCUMENTS = [
    "It was the best of times,\nit was the worst of times.",
    'a, "quoted" | field; with\ttabs',
    "日本語 é 🙂",
    "",
    "x" * 3000,
    *(f"document {number} " * (number % 7 + 1) for number in range(300)),
]
EXPECTED = b"".join(text.encode() + b"\0" for text in DOCUMENTS if text)


def rows() -> list[dict[str, object]]:
    return [{"id": number, "text": text} for number, text in enumerate(DOCUMENTS)]


def lines() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows()).encode()


def write_json_lines(path: Path) -> None:
    path.write_bytes(b"\n" + lines().rstrip())  # a blank line, and no end of the last


def write_gzip(path: Path) -> None:
    half = len(lines()) // 2
    path.write_bytes(gzip.compress(lines()[:half]) + gzip.compress(lines()[half:]))  # as parallel compressors write


def write_zstd(path: Path) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(lines())


def write_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["id", "text"])
        writer.writerows([row["id"], row["text"]] for row in rows())


def write_parquet(path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(rows()), path, row_group_size=40)


def write_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(rows())
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=50)


def write_arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(rows())
    with pa.ipc.new_stream(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=50)


FORMATS: list[tuple[str, Callable[[Path], object]]] = [
    ("a.jsonl", write_json_lines),
    ("a.txt", write_json_lines),
    ("a.jsonl.gz", write_gzip),
    ("a.dat", write_gzip),
    ("a.jsonl.zst", write_zstd),
    ("a.json", write_json_lines),
    ("a.json", lambda path: path.write_text(json.dumps(rows(), indent=2))),
    ("a.json", lambda path: path.write_bytes(b"\xef\xbb\xbf" + json.dumps(rows()).encode())),
    ("a.csv", write_csv),
    ("a.tsv", lambda path: write_csv(path, "\t")),
    ("a.csv", lambda path: write_csv(path, ";")),
    ("a.parquet", write_parquet),
    ("table", write_parquet),
    ("a.arrow", write_arrow_file),
    ("a.arrow", write_arrow_stream),
]


@pytest.mark.parametrize(("name", "write"), FORMATS, ids=range(len(FORMATS)))
@pytest.mark.parametrize("part_bytes", [300, records.PART_BYTES])
def test_every_format_gives_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Callable[[Path], object], part_bytes: int
) -> None:
    """In parts of a few records as well as in one."""
    for module in (records, json_lines, documents):
        monkeypatch.setattr(module, "PART_BYTES", part_bytes)
    monkeypatch.setattr(json_array, "_CHUNK", part_bytes // 100)
    write(tmp_path / name)
    store = build_store([str(tmp_path / name)], [], "byte", 256, tmp_path / "out.h5")
    assert bytes(store.tokens.astype(np.uint8)) == EXPECTED
    assert len(store.documents) == len(DOCUMENTS) - 1
    assert json.loads(store.source)["empty_documents"] == 1
    assert json.loads(store.source)["column"] == "text"


def test_a_folder_saved_by_datasets(tmp_path: Path) -> None:
    """Written as save_to_disk writes one: streams in several files, named in their order in state.json."""
    table = pa.Table.from_pylist(rows())
    files = []
    for index in range(3):
        name = f"data-{index:05d}-of-00003.arrow"
        files.append({"filename": name})
        part = table.slice(index * 102, 102)
        with pa.ipc.new_stream(str(tmp_path / name), table.schema) as file:
            file.write_table(part)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (tmp_path / "dataset_info.json").write_text("{}")
    store = build_store([str(tmp_path)], [".txt"], "byte", 256, tmp_path / "out.h5")
    assert bytes(store.tokens.astype(np.uint8)) == EXPECTED


def test_a_folder_of_several_splits_names_them(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=f"give one of them, {tmp_path}/train, {tmp_path}/test"):
        build_store([str(tmp_path)], [".txt"], "byte", 256, tmp_path / "out.h5")


@pytest.mark.parametrize("files", [[], [{"filename": "../secret.arrow"}], [3], "x", None])
def test_a_damaged_list_of_files_leads_nowhere_else(tmp_path: Path, files: object) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    with pytest.raises(UserError, match="names no files of this folder"):
        build_store([str(tmp_path)], [".txt"], "byte", 256, tmp_path / "out.h5")


def test_a_saved_dataset_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    with pytest.raises(UserError, match=r"data-0.arrow is missing, which .*state.json names"):
        find_source_files([str(tmp_path)], [".txt"])
    state = {"_data_files": [{"filename": "d.arrow"}], "_indices_data_files": [{"filename": "indices.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="keeps the order of its rows apart"):
        find_source_files([str(tmp_path)], [".txt"])


def test_a_folder_without_text_gives_its_records(tmp_path: Path) -> None:
    (tmp_path / "z.json").write_text('[{"text": "a"}]')
    assert [file.path.name for file in find_source_files([str(tmp_path)], [".txt"])] == ["z.json"]
    write_json_lines(tmp_path / "a.jsonl")
    write_parquet(tmp_path / "b.parquet")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    assert [file.path.name for file in find_source_files([str(tmp_path)], [".txt"])] == ["a.jsonl", "b.parquet"]


def test_records_beside_text_are_not_left_out_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_parquet(tmp_path / "train.parquet")
    (tmp_path / "README.md").write_text("# A data set\n")
    assert [file.path.name for file in find_source_files([str(tmp_path)], [".md"])] == ["README.md"]
    assert "1 files of records, such as train.parquet, are left out" in caplog.text
    assert [file.path.name for file in find_source_files([str(tmp_path)], [".parquet"])] == ["train.parquet"]


def test_a_long_text_is_the_same_as_a_file_and_as_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 1000)
    text = "日本語é🙂x word " * 999
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    stores = [
        build_store([str(tmp_path / name)], [], "bpe", 300, tmp_path / f"{name}.h5") for name in ("a.txt", "a.jsonl")
    ]
    assert stores[0].tokens.tolist() == stores[1].tokens.tolist()


@pytest.mark.parametrize("part_bytes", [1, 7, 100, 1000])
def test_a_text_file_in_parts_loses_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(documents, "PART_BYTES", part_bytes)
    data = "日本語é🙂x".encode() * 30 + bytes([0x80]) * 9 + "é".encode()
    (tmp_path / "a.py").write_bytes(data)
    parts = documents.plan_parts(recognise_files(find_source_files([str(tmp_path / "a.py")], [])))
    pieces = [piece for part in parts for piece in documents.read_pieces(part, "text")]
    assert b"".join(piece.text for piece in pieces) == data
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def damage(path: Path, write: Callable[[Path], None], keep: float = 0.5) -> None:
    write(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


BAD: list[tuple[str, Callable[[Path], object], str]] = [
    ("a.parquet", lambda path: damage(path, write_parquet), "is a damaged Parquet file, or cut short"),
    ("a.arrow", lambda path: damage(path, write_arrow_file), "is a damaged Arrow file, or cut short"),
    ("a.arrow", lambda path: damage(path, write_arrow_stream), "is a damaged Arrow file, or cut short"),
    ("a.jsonl.gz", lambda path: damage(path, write_gzip, 0.9), "is damaged or cut short"),
    ("a.jsonl.zst", lambda path: damage(path, write_zstd, 0.9), "is damaged or cut short"),
    ("a.jsonl", lambda path: path.write_text('{"text": "a"}\n{"text": "b"}\n\n{"text": \n'), "a.jsonl:4: not JSON"),
    ("a.jsonl", lambda path: path.write_text('{"text": "a"}\n' * 4 + "[1]\n"), "a.jsonl:5: not an object"),
    (
        "a.jsonl",
        lambda path: path.write_text('{"text": "a"}\n' * 4 + '{"txt": 1}\n'),
        "a.jsonl:5: no column 'text'; did",
    ),
    ("a.jsonl", lambda path: path.write_text('{"text": 3}\n'), "a.jsonl:1: column 'text' is a number, expected text"),
    ("a.jsonl", lambda path: path.write_text('{"text": [{}]}\n'), "a.jsonl:1: column 'text' is a list"),
    ("a.jsonl", lambda path: path.write_text('{"text": ""}\n'), "no text: every document is empty"),
    ("a.jsonl", lambda path: path.write_text('{"text": "a\\u0000b"}\n'), "a text with a zero byte in it"),
    ("a.jsonl", lambda path: path.write_text('{"text": ' + "[" * 100_000), "a.jsonl:1: not JSON"),
    ("a.jsonl", lambda path: path.write_text('{"text": "a"}\n{"text": "b", "text": "c"}\n'), "a.jsonl:2: has several"),
    ("a.csv", lambda path: path.write_text("text,b\na,b\na,b,c\n"), "a.csv:3: 3 columns but the header has 2"),
    ("a.csv", lambda path: path.write_text('text,b\n"a,b\n'), "a.csv:2: unexpected end of data; close each quote"),
    ("a.csv", lambda path: path.write_text('b,text\n1,"a\n2,b\n3,c\n'), "a.csv:4: unexpected end of data; close"),
    (
        "a.csv",
        lambda path: path.write_text('b,text\n1,"a"b\n'),
        "a.csv:2: ',' expected after '\"'; close each quote that",
    ),
]


@pytest.mark.parametrize(("name", "write", "said"), BAD, ids=range(len(BAD)))
def test_bad_records_are_one_line_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, write: Callable[[Path], object], said: str
) -> None:
    write(tmp_path / name)
    assert main(["data", "build", str(tmp_path / "out.h5"), str(tmp_path / name)]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert (error.count("\n"), said in error) == (1, True), error
    assert [path.name for path in tmp_path.iterdir()] == [name]


BOUNDED = """
import resource, sys
from hpc_train.cli.main import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = main(["data", "build", sys.argv[1], sys.argv[2]])
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("name", "start", "says"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "', "a.jsonl:2: a line of more than 64 MiB"),
        ("a.gz", b'{"text": "a"}\n{"text": "', "a.gz:2: a line of more than 64 MiB"),
        ("a.json", b'[{"text": "a"}, {"text": "', "a.json:1: not JSON (Invalid control character at"),
    ],
)
def test_a_line_of_ten_gigabytes_is_refused_and_not_read(tmp_path: Path, name: str, start: bytes, says: str) -> None:
    """A sparse file, and 4 GB of zeros in a gzip file of 4 MB that begins as JSON Lines."""
    path = tmp_path / name
    if name == "a.gz":
        block = gzip.compress(b"a" * (64 << 20), 1)
        path.write_bytes(gzip.compress(start) + block * 64)
    else:
        path.write_bytes(start)
        os.truncate(path, 10 << 30)
    command = [sys.executable, "-c", BOUNDED, str(tmp_path / "out.h5"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    code, kilobytes = map(int, done.stdout.split())
    assert code == EXIT_USER_ERROR
    assert says in done.stderr
    assert kilobytes < (8 * MAX_RECORD_BYTES) >> 10


def test_an_array_of_many_objects_is_read_in_the_memory_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one line; an object that does not end is refused when as much of it was read as a record may have."""
    monkeypatch.setattr(json_array, "_CHUNK", 1000)
    monkeypatch.setattr(json_array, "MAX_RECORD_BYTES", 8000)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a\u00e9" * 300}] * 3000, ensure_ascii=False))
    whole = path.read_text()
    longest = 0

    class Watched(json_array._ArrayParser):
        def _read_more(self) -> None:
            nonlocal longest
            super()._read_more()
            longest = max(longest, len(self._text))

    monkeypatch.setattr(json_array, "_ArrayParser", Watched)
    span = Span(0, path.stat().st_size)
    assert sum(len(record.value) for record in json_array.read_json_array(path, span, "text")) == 600 * 3000
    assert longest < 8000
    path.write_text(whole[:-3] + 900_000 * "b")
    with pytest.raises(UserError, match=r"a\.json:1: no object ends within"):
        list(json_array.read_json_array(path, span, "text"))
    assert longest < 40_000


def test_lines_are_read_once_whatever_the_spans(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_json_lines(path)
    size = path.stat().st_size
    for width in (1, 2, 3, 1000, size):
        spans = [Span(begin, min(begin + width, size)) for begin in range(0, size if width > 3 else 400, width)]
        found = [record.value for span in spans for record in json_lines.read_json_lines(path, span, "text")]
        assert found == DOCUMENTS[: len(found)]
        assert len(found) == len(DOCUMENTS) or width <= 3


def test_any_number_of_workers_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (records, json_lines, documents):
        monkeypatch.setattr(module, "PART_BYTES", 4000)
    write_json_lines(tmp_path / "a.jsonl")
    write_parquet(tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("A text.\n" * 2000)
    recipe = StoreRecipe(tuple(str(tmp_path / name) for name in ("a.jsonl", "b.parquet", "c.txt")), (), "bpe", 400)
    for workers in (1, 2, 3):
        build_from_recipe(recipe, tmp_path / f"{workers}.h5", workers=workers)
    stores = [(tmp_path / f"{workers}.h5").read_bytes() for workers in (1, 2, 3)]
    assert stores[0] == stores[1] == stores[2]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".h5", ".h5", ".h5", ".jsonl", ".parquet", ".txt"]


KILLED = """
import os, signal, sys
from hpc_train.data.corpus import documents, part_files
from hpc_train.data.corpus.build import StoreRecipe, build_from_recipe
documents.PART_BYTES = 1000
write, number = part_files.PartFile.write, 0
def count(self, how):
    global number
    number += 1
    if number > int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, how)
part_files.PartFile.write = count
build_from_recipe(StoreRecipe((sys.argv[1],), (), "bpe", 300), sys.argv[2])
print(number)
"""


def test_a_killed_build_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"sentence {number}. " for number in range(1500)))
    arguments = [str(tmp_path / "a.txt"), str(tmp_path / "out.h5")]
    command = [sys.executable, "-c", KILLED, *arguments]
    parts = -(-(tmp_path / "a.txt").stat().st_size // 1000)
    assert subprocess.run([*command, "12"], capture_output=True).returncode == -9
    assert not (tmp_path / "out.h5").exists()
    done = subprocess.run([*command, "1000"], capture_output=True, check=True)
    assert int(done.stdout) == parts - 12
    build_store([arguments[0]], [], "bpe", 300, tmp_path / "whole.h5")
    # Not the same bytes: whole.h5 was cut into other parts, so that words at the cuts differ.
    ours, whole = TokenStore.open(arguments[1]), TokenStore.open(tmp_path / "whole.h5")
    assert len(whole.tokens) <= len(ours.tokens) <= len(whole.tokens) + parts * 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out.h5", "whole.h5"]


def test_two_builds_of_one_store_do_not_mix(tmp_path: Path) -> None:
    from hpc_train.data.corpus.part_files import open_parts_folder

    with open_parts_folder(tmp_path / "out.h5") as folder:
        assert folder.is_dir()
        with pytest.raises(UserError, match=r"another build of .* is running"), open_parts_folder(tmp_path / "out.h5"):
            pass
    assert not folder.exists()


def write_nested(path: Path) -> None:
    """Texts as text and as bytes inside of a column."""
    rows = [{"doc": {"text": "one", "more": {"raw": b"a"}}}, {"doc": None}, {"doc": {"text": "two", "more": None}}]
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    else:
        rows = [{"doc": {"text": "one", "more": {"raw": "a"}}}, {"doc": None}, {"doc": {"text": "two", "more": None}}]
        path.write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_field_inside_of_a_column(tmp_path: Path, name: str) -> None:
    write_nested(tmp_path / name)
    for column, text in (("doc.text", b"one\0two\0"), ("doc.more.raw", b"a\0")):
        recipe = StoreRecipe((str(tmp_path / name),), (), column=column)
        store = build_from_recipe(recipe, tmp_path / f"{column}.h5")
        assert bytes(store.tokens.astype(np.uint8)) == text
    with pytest.raises(
        UserError, match=r"no column 'doc.txt'; did you mean 'doc.text'\? its columns are doc.text, doc.more"
    ):
        build_from_recipe(StoreRecipe((str(tmp_path / name),), (), column="doc.txt"), tmp_path / "bad.h5")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": [b"\xff\xfe"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="row 1: column 'text' is bytes that are not UTF-8"):
        build_from_recipe(StoreRecipe((str(tmp_path / "a.parquet"),), ()), tmp_path / "a.h5")


def write_raw_texts(path: Path, ends: list[int], content: bytes) -> None:
    """Write texts as they lie in memory, unchecked. ends: where in `content` each one ends."""
    offsets = np.array([0, *ends], np.int32)
    texts = pa.Array.from_buffers(pa.string(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(content)])
    table = pa.table({"text": texts})
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_text_of_a_table_that_is_not_utf8_is_one_line(tmp_path: Path, name: str) -> None:
    write_raw_texts(tmp_path / name, [3, 6], b"abc\xff\xfed")
    with pytest.raises(UserError, match=rf"{name}: column 'text' has text that is not UTF-8: convert it first"):
        build_from_recipe(StoreRecipe((str(tmp_path / name),), ()), tmp_path / "out.h5")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_places_outside_of_an_arrow_file_are_not_read(tmp_path: Path) -> None:
    write_raw_texts(tmp_path / "a.arrow", [2_000_000_000, 6], b"abcdef")
    words = ["data", "build", str(tmp_path / "out.h5"), str(tmp_path / "a.arrow")]
    done = subprocess.run([sys.executable, "-m", "hpc_train", *words], capture_output=True, text=True)
    assert done.returncode == EXIT_USER_ERROR, done.stderr
    assert "a.arrow is a damaged Arrow file, or cut short (Offset invariant failure" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_half_of_a_character_is_one_line(tmp_path: Path, name: str) -> None:
    """In the column that is read: no encoding has it. Two halves in a row are a character."""
    good = '{"text": "\\ud83d\\ude42 \\\\ud800", "other": "\\ud800"}\n'
    write = gzip.compress if name.endswith("gz") else bytes
    (tmp_path / name).write_bytes(write((good * 2).encode()))
    store = build_from_recipe(StoreRecipe((str(tmp_path / name),), ()), tmp_path / "out.h5")
    assert bytes(store.tokens.astype(np.uint8)).decode() == "🙂 \\ud800\0" * 2
    (tmp_path / name).write_bytes(write((good + '{"text": "a\\uDE42b"}\n').encode()))
    with pytest.raises(
        UserError, match=rf"{name}:2: has half of a character in it \(\\ud800 to \\udfff alone\); write"
    ):
        build_from_recipe(StoreRecipe((str(tmp_path / name),), ()), tmp_path / "bad.h5")
