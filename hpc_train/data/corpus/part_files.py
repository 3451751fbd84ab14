"""Tokenize the parts of a corpus in parallel, each into its own file, so that a killed build can continue.

A part's files are named by a hash of all that determines their content. The file with the counts is written last, by
one rename: a part without it is tokenized again.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from hpc_train.data.corpus.documents import Part
from hpc_train.data.corpus.tokenize import LeftOut, Tokenization, tokenize_part
from hpc_train.data.token_store import VERSION, TokenBlock, choose_token_dtype
from hpc_train.data.tokenizers.tokenizer import restore_tokenizer
from hpc_train.errors import UserError
from hpc_train.processes import signal_at_parent_end
from hpc_train.regular_files import sync_file


class Progress(Protocol):
    """Shows how far a build is."""

    def start(self, total: int, done: int) -> None:
        """Begin; both in bytes of the sources."""

    def advance(self, size: int) -> None:
        """Count another part of this many bytes as done."""


@dataclass(frozen=True)
class TokenizationRecipe:
    """A Tokenization in a form that another process makes it again from."""

    tokenizer: str
    tokenizer_json: str
    settings_json: str
    column: str
    chat: bool

    @classmethod
    def of(cls, how: Tokenization) -> TokenizationRecipe:
        """Describe a tokenization."""
        tokenizer = how.tokenizer
        return cls(tokenizer.name, tokenizer.to_json(), tokenizer.settings_json(), how.column, how.chat)

    def make(self) -> Tokenization:
        """Make the tokenization."""
        tokenizer = restore_tokenizer(self.tokenizer, self.tokenizer_json, self.settings_json)
        return Tokenization(tokenizer, self.column, self.chat)


@dataclass(frozen=True)
class PartFile:
    """The tokens of one part, in files of a folder."""

    folder: Path
    key: str
    """Hash of the part's sources and of the tokenization; the files' names begin with it."""
    part: Part

    @property
    def tokens(self) -> Path:
        """The token ids, one after another."""
        return self.folder / f"{self.key}.tokens"

    @property
    def starts(self) -> Path:
        """Index of the first token of each document, int64."""
        return self.folder / f"{self.key}.starts"

    @property
    def counted(self) -> Path:
        """Whether each token counts in the loss; only conversations have this file."""
        return self.folder / f"{self.key}.counted"

    @property
    def commit(self) -> Path:
        """The file that is written last: the sizes of the others, and what was left out."""
        return self.folder / f"{self.key}.json"

    @property
    def size(self) -> int:
        """Bytes of the sources."""
        return sum(piece.size for piece in self.part)

    def is_complete(self) -> bool:
        """Return whether the part was written to its end."""
        return self.commit.exists()

    def write(self, how: Tokenization) -> None:
        """Tokenize the part into its files. Raises UserError for bad sources, OSError if a file cannot be written."""
        temporaries = {path: path.with_suffix(f"{path.suffix}.{os.getpid()}") for path in self._list_contents(how.chat)}
        left_out, length, starts = LeftOut(), 0, [np.zeros(0, np.int64)]
        dtype = choose_token_dtype(how.tokenizer.vocab_size)
        try:
            with (
                temporaries[self.tokens].open("wb") as tokens,
                temporaries.get(self.counted, Path(os.devnull)).open("wb") as counted,
            ):
                for block in tokenize_part(self.part, how, left_out):
                    tokens.write(np.ascontiguousarray(block.tokens, dtype).data)
                    if block.counted is not None:
                        counted.write(block.counted.tobytes())
                    starts.append(block.starts + length)
                    length += len(block.tokens)
            temporaries[self.starts].write_bytes(np.concatenate(starts).tobytes())
            temporaries[self.commit].write_text(json.dumps({"tokens": length, **asdict(left_out)}))
            for path, temporary in temporaries.items():  # the commit is the last one
                with suppress(OSError):
                    sync_file(temporary)
                temporary.replace(path)
        finally:
            for temporary in temporaries.values():
                temporary.unlink(missing_ok=True)

    def read(self, how: Tokenization, left_out: LeftOut, slice_tokens: int = 1 << 22) -> Iterator[TokenBlock]:
        """Yield what `write` wrote, in slices of bounded size, and add to `left_out` what it left out."""
        sizes = json.loads(self.commit.read_text())
        left_out.add(LeftOut(sizes["empty"], sizes["unanswered"]))
        length = sizes["tokens"]
        if not length:  # an empty file cannot be mapped
            return
        tokens = np.memmap(self.tokens, choose_token_dtype(how.tokenizer.vocab_size), mode="r", shape=(length,))
        counted = np.memmap(self.counted, np.bool_, mode="r", shape=(length,)) if how.chat else None
        starts = np.fromfile(self.starts, np.int64)
        for begin in range(0, len(tokens), slice_tokens):
            end = min(begin + slice_tokens, len(tokens))
            # Documents that start in this slice; `starts` is ascending.
            first, last = np.searchsorted(starts, [begin, end])
            yield TokenBlock(
                tokens[begin:end], starts[first:last] - begin, None if counted is None else counted[begin:end]
            )

    def _list_contents(self, chat: bool) -> list[Path]:
        return [self.tokens, self.starts, *([self.counted] if chat else []), self.commit]


def list_part_files(folder: Path, parts: Sequence[Part], recipe: TokenizationRecipe) -> list[PartFile]:
    """Name the files of each part by a hash of its sources and of the tokenization."""
    common = xxhash.xxh3_128_hexdigest(json.dumps([VERSION, asdict(recipe)]).encode())
    part_files = []
    for part in parts:
        content = [(str(document.path.absolute()), document.format, document.span, document.stamp) for document in part]
        part_files.append(PartFile(folder, xxhash.xxh3_128_hexdigest(json.dumps([common, content]).encode()), part))
    return part_files


def write_part_files(files: Sequence[PartFile], how: Tokenization, workers: int, progress: Progress | None) -> None:
    """Tokenize the parts that are not complete yet. Raises UserError, after which complete parts stay."""
    missing = [file for file in files if not file.is_complete()]
    if progress is not None:
        progress.start(sum(file.size for file in files), sum(file.size for file in files if file not in missing))
    if workers == 1 or len(missing) <= 1:
        for file in missing:
            file.write(how)
            if progress is not None:
                progress.advance(file.size)
        return
    _write_in_processes(missing, TokenizationRecipe.of(how), min(workers, len(missing)), progress)


def _write_in_processes(
    missing: Sequence[PartFile], recipe: TokenizationRecipe, workers: int, progress: Progress | None
) -> None:
    """Tokenize parts in `workers` processes. Raises UserError for bad sources, or if a process was killed."""
    # spawn, not fork: this process has threads (of tokenizers, of pyarrow) whose locks a fork would copy.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (recipe,))
    try:
        futures: dict[Future[None], PartFile] = {pool.submit(_write_part, file): file for file in missing}
        for future in as_completed(futures):
            future.result()
            if progress is not None:
                progress.advance(futures[future].size)
    except BrokenProcessPool as error:
        raise UserError(
            "a worker was killed, perhaps for its memory: run the same command again with fewer --workers; the parts "
            "that are done stay"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: list[Tokenization] = []
"""The tokenization of this worker process; set once, when it starts."""


def _start_worker(recipe: TokenizationRecipe) -> None:
    signal_at_parent_end(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which then ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker[:] = [recipe.make()]


def _write_part(file: PartFile) -> None:
    file.write(_worker[0])


@contextmanager
def open_parts_folder(out: Path) -> Iterator[Path]:
    """Make the folder of a store's part files, and remove it once the store is complete.

    Raises UserError if another build of the same store is running (where the file system knows locks). After an error
    the folder stays if there is work in it, which the next build takes.
    """
    folder = out.with_name(f".{out.name}.parts")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another build of {out} is running: wait for it, or give another name") from None
        except OSError:
            pass  # a file system without locks
        try:
            yield folder
        except BaseException:
            work = [*folder.glob("*.tokens"), *folder.glob("*.checked")]
            if not any(path.stat().st_size for path in work):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
