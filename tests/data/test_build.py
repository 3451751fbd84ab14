"""From files to a token store: which files, in which order, how they are cut, and the store's name in the cache."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from token_stores import build_store

from hpc_train.config.model import TokenDataConfig
from hpc_train.data.corpus.build import ensure_store, locate_store
from hpc_train.data.corpus.documents import BATCH_BYTES, PIECE_BYTES, iterate_batches, plan_parts, read_pieces
from hpc_train.data.corpus.sources import find_source_files
from hpc_train.data.corpus.text_files import recognise_files
from hpc_train.data.token_store import TokenStore, verify_store
from hpc_train.data.tokenizers.tokenizer import load_tokenizer
from hpc_train.errors import UserError


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "corpus"
    files = {"b.py": "b = 2\n", "a.py": "a = 1\n", "deep/er/c.txt": "see\n", "d.md": "# d\n", "empty.py": ""}
    ignored = {".git/x.py": "x", "__pycache__/y.py": "y", ".hidden.py": "h", "image.png": "png"}
    for name, text in (files | ignored).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def config(corpus: Path, tmp_path: Path, **changes) -> TokenDataConfig:
    facts = {"name": "test", "sources": [str(corpus)], "cache": str(tmp_path / "cache")}
    return TokenDataConfig(**(facts | changes))


def test_a_byte_store_is_the_files_in_sorted_order_each_ended_by_a_zero(tmp_path, corpus):
    store = build_store([str(corpus)], [".py", ".txt"], "byte", 256, tmp_path / "out.h5")
    assert bytes(store.tokens.astype(np.uint8)) == b"a = 1\n\0b = 2\n\0see\n\0"
    assert store.documents.tolist() == [0, 7, 14]
    assert store.vocab_size == 256
    assert json.loads(store.source)["files"] == 4


def test_sources_keep_their_order_and_a_file_counts_once(corpus):
    files = find_source_files([str(corpus / "d.md"), str(corpus / "b.py"), str(corpus)], [".py"])
    assert [file.path.name for file in files] == ["d.md", "b.py", "a.py", "empty.py"]


def test_a_file_named_itself_is_taken_whatever_its_suffix(corpus):
    assert [file.path.name for file in find_source_files([str(corpus / "image.png")], [".py"])] == ["image.png"]


def test_the_standard_library_is_real_text_without_what_was_installed():
    files = find_source_files(["stdlib"], [".py"])
    root = Path(sysconfig.get_paths()["stdlib"])
    names = {file.path.relative_to(root).as_posix() for file in files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    assert sum(file.size for file in files) > 5_000_000


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_a_build_is_deterministic_over_processes(tmp_path, corpus, tokenizer):
    vocab_size = {"byte": 256, "bpe": 270}[tokenizer]
    program = (
        "import sys; from hpc_train.data.corpus.build import StoreRecipe, build_from_recipe; "
        "*how, out = eval(sys.argv[2]); build_from_recipe(StoreRecipe((sys.argv[1],), ('.py',), *how), out)"
    )
    for out in ("one.h5", "two.h5"):
        arguments = repr((tokenizer, vocab_size, str(tmp_path / out)))
        subprocess.run([sys.executable, "-c", program, str(corpus), arguments], check=True)
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "two.h5").read_bytes()


def test_a_bpe_store_is_read_back_by_what_it_holds_itself(tmp_path, corpus):
    text = "The quick brown fox jumps over the lazy dog. " * 50
    (corpus / "e.py").write_text(text)
    store = build_store([str(corpus / "e.py")], [], "bpe", 300, tmp_path / "out.h5")
    tokenizer = load_tokenizer(TokenStore.open(store.path))
    assert store.vocab_size == tokenizer.vocab_size <= 300
    assert tokenizer.decode(store.tokens[:-1]) == text
    assert store.tokens[-1] == 0


def test_a_bpe_store_holds_documents_that_are_not_utf8(tmp_path, corpus):
    (corpus / "latin.py").write_bytes("# é\n".encode("latin-1"))
    store = build_store([str(corpus / "latin.py")], [], "bpe", 300, tmp_path / "out.h5")
    assert load_tokenizer(store).decode(store.tokens[:-1]) == "# �\n"


def test_a_long_file_is_cut_between_characters_and_held_in_parts(tmp_path):
    text = "日本語é🙂x" * (2 * BATCH_BYTES // 16)
    (tmp_path / "long.txt").write_text(text)
    parts = plan_parts(recognise_files(find_source_files([str(tmp_path / "long.txt")], [])))
    found = list(iterate_batches(piece for part in parts for piece in read_pieces(part, "text")))
    pieces = [piece for batch in found for piece in batch]
    assert len(found) > 1
    assert max(len(piece.text) for piece in pieces) <= PIECE_BYTES
    assert "".join(piece.text.decode() for piece in pieces) == text
    assert [piece.first for piece in pieces].count(True) == [piece.last for piece in pieces].count(True) == 1


def test_a_long_binary_file_loses_no_byte(tmp_path):
    data = bytes([0x80]) * (PIECE_BYTES + 77)
    (tmp_path / "long.bin").write_bytes(data)
    store = build_store([str(tmp_path / "long.bin")], [], "byte", 256, tmp_path / "out.h5")
    assert bytes(store.tokens.astype(np.uint8)) == data + b"\0"
    assert store.documents.tolist() == [0]


@pytest.mark.parametrize(
    ("sources", "suffixes", "tokenizer", "vocab_size", "message"),
    [
        ([], [".py"], "byte", 256, "no sources"),
        (["/no/such/folder"], [".py"], "byte", 256, "/no/such/folder does not exist"),
        (["/dev/null"], [".py"], "byte", 256, "neither a regular file nor a folder"),
        (["CORPUS"], [".rs"], "byte", 256, "no file under .* ends in .rs"),
        (["CORPUS"], [], "byte", 256, "no suffix given"),
        (["CORPUS/empty.py"], [".py"], "byte", 256, "no text"),
        (["CORPUS"], [".py"], "byte", 4096, "vocab_size 4096 has no effect on the byte tokenizer"),
        (["CORPUS"], [".py"], "bpe", 256, "at least 257"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_file(tmp_path, corpus, sources, suffixes, tokenizer, vocab_size, message):
    sources = [source.replace("CORPUS", str(corpus)) for source in sources]
    with pytest.raises(UserError, match=message) as error:
        build_store(sources, suffixes, tokenizer, vocab_size, tmp_path / "out.h5")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


UNREADABLE = """
import os, sys
from hpc_train.data.corpus.build import StoreRecipe, build_from_recipe
from hpc_train.errors import UserError
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
try: build_from_recipe(StoreRecipe((sys.argv[1],), (".py",)), sys.argv[2])
except UserError as error: print(error)
"""


@pytest.mark.parametrize(("locked", "what"), [("deep", "folder "), ("a.py", "")])
def test_what_cannot_be_read_is_one_line(corpus, locked, what):
    """In a folder of its own, because pytest's is closed to the user that root becomes for this."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        copy = Path(shutil.copytree(corpus, Path(folder, "corpus")))
        (copy / locked).chmod(0)
        command = [sys.executable, "-c", UNREADABLE, str(copy), str(Path(folder, "out.h5"))]
        done = subprocess.run(command, capture_output=True, text=True)
        (copy / locked).chmod(0o700)
    assert done.stdout.splitlines() == [f"cannot read {what}{copy / locked}: Permission denied"]


def test_a_file_in_the_way_is_not_overwritten(tmp_path, corpus):
    out = tmp_path / "out.h5"
    build_store([str(corpus)], [".py"], "byte", 256, out)
    before = out.read_bytes()
    with pytest.raises(UserError, match="exists"):
        build_store([str(corpus)], [".md"], "byte", 256, out)
    assert out.read_bytes() == before
    assert len(build_store([str(corpus)], [".md"], "byte", 256, out, overwrite=True).documents) == 1


def test_not_even_overwrite_replaces_a_source(tmp_path, corpus):
    with pytest.raises(UserError, match="is not a token store, so --overwrite does not replace it"):
        build_store([str(corpus)], [".py"], "byte", 256, corpus / "a.py", overwrite=True)
    assert (corpus / "a.py").read_text() == "a = 1\n"


@pytest.mark.parametrize("name", ["", "a\n.h5", "\x1b[2J"])
def test_a_store_needs_a_name_that_can_be_printed(tmp_path, corpus, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is no name for a store"):
        build_store([str(corpus)], [".py"], "byte", 256, name)
    assert [path.name for path in tmp_path.iterdir()] == [corpus.name]


@pytest.mark.parametrize("count", [257, 1 << 40])
def test_an_empty_source_is_not_the_current_folder_and_a_huge_vocabulary_is_refused(tmp_path, corpus, count):
    with pytest.raises(UserError, match="a source is empty" if count == 257 else "too large to train the bpe"):
        build_store(["" if count == 257 else str(corpus)], [".py"], "bpe", count, tmp_path / "out.h5")


def test_readers_of_a_replaced_store_keep_the_old_one(tmp_path, corpus):
    old = build_store([str(corpus)], [".py"], "byte", 256, tmp_path / "out.h5")
    before = old.tokens.tolist()
    build_store([str(corpus)], [".md"], "byte", 256, tmp_path / "out.h5", overwrite=True)
    assert old.tokens.tolist() == before


def test_a_given_path_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ensure_store(TokenDataConfig(name="test", path="~/a.h5")) == tmp_path / "a.h5"


def test_the_cache_is_built_once_and_found_again(tmp_path, corpus):
    path = ensure_store(config(corpus, tmp_path))
    inode = path.stat().st_ino
    assert ensure_store(config(corpus, tmp_path)) == path
    assert path.stat().st_ino == inode
    assert len(TokenStore.open(path).documents) == 4


def test_the_cache_knows_all_that_changes_the_content(tmp_path, corpus):
    names = [ensure_store(config(corpus, tmp_path))]
    names.append(ensure_store(config(corpus, tmp_path, suffixes=[".md"])))
    names.append(ensure_store(config(corpus, tmp_path, tokenizer="bpe", vocab_size=260)))
    names.append(ensure_store(config(corpus, tmp_path, tokenizer="bpe", vocab_size=261)))
    facts = (corpus / "a.py").stat()
    (corpus / "a.py").write_text("a = 3\n")
    os.utime(corpus / "a.py", ns=(facts.st_atime_ns, facts.st_mtime_ns + 1_000_000))
    names.append(ensure_store(config(corpus, tmp_path)))
    (corpus / "z.py").write_text("z = 26\n")
    names.append(ensure_store(config(corpus, tmp_path)))
    assert len(set(names)) == 6
    assert all(verify_store(TokenStore.open(name)) for name in names)


def test_the_cache_may_start_with_a_tilde(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ensure_store(config(corpus, tmp_path, cache="~/kept")).parent == tmp_path / "kept"


def test_processes_that_build_at_once_agree(tmp_path, corpus):
    (corpus / "big.py").write_text("x = 1\n" * 500_000)
    program = (
        "import sys; from hpc_train.config.model import TokenDataConfig\n"
        "from hpc_train.data.corpus.build import ensure_store as ensure\n"
        "sys.stdin.read()\n"
        "print(ensure(TokenDataConfig(name='test', sources=[sys.argv[1]], cache=sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, str(corpus), str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(4)]
    for process in processes:
        process.stdin.close()
    paths = {process.stdout.read().strip() for process in processes}
    assert [process.wait() for process in processes] == [0] * 4
    assert len(paths) == 1
    assert [str(path) for path in (tmp_path / "cache").iterdir()] == list(paths)
    assert verify_store(TokenStore.open(paths.pop()))


def test_a_store_in_the_cache_is_found_after_its_tokenizer_has_moved(tmp_path: Path) -> None:
    words = {f"w{index}": index for index in range(4)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    (tmp_path / "old").mkdir()
    model.save(str(tmp_path / "old" / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w1")

    def locate(folder: str) -> Path:
        settings = {"sources": [str(tmp_path / "a.txt")], "tokenizer": str(tmp_path / folder)}
        return locate_store(TokenDataConfig(name="t", end_of_document="w0", **settings))

    before = locate("old")
    (tmp_path / "old").rename(tmp_path / "new")
    assert locate("new") == before
    model.add_tokens(["more"])
    model.save(str(tmp_path / "new" / "tokenizer.json"))
    assert locate("new") != before
