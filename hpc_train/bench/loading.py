"""`hpc-train bench loader`: measure how fast token batches reach a loop, compared with two uses of `datasets`.

Every side reads the same texts and gives batches of the same shape, each in its own order. Ours and "datasets blocks"
read tokens that were written beforehand. "tokenized while read" does what loaders such as torchtitan's do: it tokenizes
each text when it is read and cuts sequences out of a buffer of tokens. Rounds alternate between the sides, so that
other load on the machine slows all of them alike.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hpc_train.bench.tokenization import SUFFIXES, read_texts
from hpc_train.config.model import TokenDataConfig
from hpc_train.data.corpus.build import StoreRecipe, build_from_recipe
from hpc_train.data.datasets import open_dataset
from hpc_train.data.loader import Loader
from hpc_train.data.token_store import TokenStore
from hpc_train.data.tokenizers.tokenizer_folder import FolderTokenizer, load_tokenizer_folder
from hpc_train.errors import EXIT_DONE, UserError

Batches = Iterator[Any]
OURS = "hpc_train"


@dataclass(frozen=True)
class LoaderBenchOptions:
    """Options of `bench loader`."""

    sources: tuple[str, ...]
    tokenizer: str
    column: str = "text"
    sequence_length: int = 512
    batch: int = 8
    batches: int = 100
    rounds: int = 3
    json: bool = False


def run_loader_command(options: LoaderBenchOptions) -> int:
    """Measure all sides, and print medians over the rounds. Raises UserError for sources that are too short."""
    datasets = _import_datasets()
    tokenizer = load_tokenizer_folder(options.tokenizer)
    texts = read_texts(options.sources, options.column)
    with tempfile.TemporaryDirectory() as folder:
        recipe = StoreRecipe(options.sources, SUFFIXES, options.tokenizer, column=options.column)
        store = build_from_recipe(recipe, Path(folder, "tokens.h5"))
        sides: dict[str, Callable[[], Batches]] = {
            OURS: lambda: _iterate_ours(store, options),
            "datasets blocks": _make_blocks_side(datasets, store, options),
            "tokenized while read": _make_reading_side(datasets, tokenizer, texts, options),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, side in sides.items():
                seconds[name].append(_time_batches(side(), options))
    _print_result({name: statistics.median(values) for name, values in seconds.items()}, options)
    return EXIT_DONE


def _time_batches(batches: Batches, options: LoaderBenchOptions) -> float:
    """Return the seconds for the batches after the first one, which starts threads and opens files."""
    next(batches)
    started = time.perf_counter()
    for inputs in islice(batches, options.batches):
        assert inputs.shape == (options.batch, options.sequence_length)
    return time.perf_counter() - started


def _iterate_ours(store: TokenStore, options: LoaderBenchOptions) -> Batches:
    config = TokenDataConfig(name=OURS, path=str(store.path), validation_fraction=0.0, samples="stream")
    data = open_dataset(config, options.sequence_length, "train")
    with Loader(data, 0, options.batch, options.batch, 0, 1) as loader:
        for step in range(options.batches + 1):
            yield loader.batch(step * options.batch).micro[0].inputs


def _make_blocks_side(datasets: Any, store: TokenStore, options: LoaderBenchOptions) -> Callable[[], Batches]:
    """Return a side that reads blocks of tokens from an Arrow file of `datasets`, shuffled, through a DataLoader."""
    width = options.sequence_length + 1
    count = len(store.tokens) // width
    if count < options.batch:
        raise UserError(
            f"the sources have {len(store.tokens):,} tokens, less than one batch of {options.batch} x "
            f"{options.sequence_length}: give more text, or smaller --batch and --sequence-length"
        )
    blocks = np.asarray(store.tokens[: count * width]).reshape(count, width)
    saved = str(store.path.with_name("blocks"))
    with _without_progress(datasets):
        datasets.Dataset.from_dict({"tokens": blocks.astype(np.int64)}).save_to_disk(saved)

    def side() -> Batches:
        table = datasets.load_from_disk(saved).with_format("torch")
        while True:
            loader: Any = DataLoader(table, batch_size=options.batch, shuffle=True, drop_last=True)
            for batch in loader:
                yield batch["tokens"][:, :-1]

    return side


def _make_reading_side(
    datasets: Any, tokenizer: FolderTokenizer, texts: list[str], options: LoaderBenchOptions
) -> Callable[[], Batches]:
    """Return a side that tokenizes each text when it is read, and cuts sequences out of a buffer."""
    table = datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()
    width = options.sequence_length + 1

    def iterate_sequences() -> Iterator[Tensor]:
        buffer: list[int] = []
        while True:
            for sample in table:
                buffer.extend(tokenizer.model.encode(sample["text"]).ids)
                while len(buffer) >= width:
                    yield torch.tensor(buffer[:width])[:-1]
                    del buffer[:width]

    def side() -> Batches:
        sequences = iterate_sequences()
        while rows := list(islice(sequences, options.batch)):
            yield torch.stack(rows)

    return side


def _print_result(medians: dict[str, float], options: LoaderBenchOptions) -> None:
    tokens = options.batches * options.batch * options.sequence_length
    speeds = {name: tokens / value for name, value in medians.items()}
    if options.json:
        ratios = {name: speeds[OURS] / value for name, value in speeds.items()}
        print(json.dumps({"tokens": tokens, "tokens_per_second": speeds, "ours_by_this": ratios}))
        return
    print(f"{options.batches} batches of {options.batch} x {options.sequence_length} tokens, {options.rounds} rounds")
    for name, value in speeds.items():
        ratio = "" if name == OURS else f"  {OURS} is {speeds[OURS] / value:.1f} times as fast"
        print(f"{name:<21} {value:14,.0f} tokens/s{ratio}")


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError("bench loader compares with the package datasets: pip install datasets") from error
    return datasets


@contextmanager
def _without_progress(datasets: Any) -> Iterator[None]:
    """Inside this context, `datasets` draws no bars."""
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
