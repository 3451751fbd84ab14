"""`hpc-train bench data`: compare the speed of `data build` with the tokenizer's library alone and `datasets`.

The library gets all texts in one list in memory and keeps no result, which is the least work that any builder of token
files does. Rounds alternate between the sides, so that other load on the machine slows all of them alike.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.data.corpus.build import StoreRecipe, build_from_recipe
from hpc_train.data.corpus.documents import plan_parts, read_pieces
from hpc_train.data.corpus.sources import find_source_files
from hpc_train.data.corpus.text_files import recognise_files
from hpc_train.data.tokenizers.tokenizer_folder import FolderTokenizer, load_tokenizer_folder
from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.units import format_bytes

SUFFIXES = (".py", ".txt", ".md", ".rst")


@dataclass(frozen=True)
class DataBenchOptions:
    """Options of `bench data`."""

    sources: tuple[str, ...]
    tokenizer: str
    column: str = "text"
    workers: int | None = None
    """None: the processors here."""
    rounds: int = 3
    datasets: bool = False
    """Whether to measure `datasets` too."""
    json: bool = False


def run_data_command(options: DataBenchOptions) -> int:
    """Measure all sides, and print medians over the rounds. Raises UserError for sources that cannot be built."""
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: must be at least 1")
    tokenizer = load_tokenizer_folder(options.tokenizer)
    texts = read_texts(options.sources, options.column)
    size = sum(len(text.encode()) for text in texts)
    workers = options.workers or len(os.sched_getaffinity(0))
    sides: dict[str, Callable[[], object]] = {
        "library": lambda: _encode(tokenizer, texts),
        "data build": lambda: _build(options, workers),
    }
    if options.datasets:
        sides["datasets map"] = _make_datasets_side(tokenizer, texts, workers)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name in seconds:
            started = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    _print_result(medians, len(texts), size, workers, options.json)
    return EXIT_DONE


def _print_result(medians: dict[str, float], documents: int, size: int, workers: int, as_json: bool) -> None:
    ratios = {name: medians["library"] / value for name, value in medians.items()}
    if as_json:
        facts = {"documents": documents, "bytes": size, "workers": workers, "seconds": medians, "of_library": ratios}
        print(json.dumps(facts))
        return
    print(f"{documents:,} documents, {format_bytes(size)}, {workers} workers")
    for name, value in medians.items():
        print(f"{name:<13} {value:8.2f} s  {format_bytes(size / value)}/s  {ratios[name]:.2f} of the library's speed")


def read_texts(sources: Sequence[str], column: str) -> list[str]:
    """Read all texts of some sources into memory. Raises UserError as `data build`."""
    parts = plan_parts(recognise_files(find_source_files(sources, SUFFIXES)))
    pieces = (piece for part in parts for piece in read_pieces(part, column))
    return [piece.text.decode(errors="replace") for piece in pieces if piece.text]


def _encode(tokenizer: FolderTokenizer, texts: list[str]) -> None:
    tokenizer.model.encode_batch(texts, add_special_tokens=False)


def _build(options: DataBenchOptions, workers: int) -> None:
    recipe = StoreRecipe(options.sources, SUFFIXES, options.tokenizer, column=options.column)
    with tempfile.TemporaryDirectory() as folder:
        build_from_recipe(recipe, Path(folder, "out.h5"), workers=workers)


def _make_datasets_side(tokenizer: FolderTokenizer, texts: list[str], workers: int) -> Callable[[], None]:
    """Return a function that tokenizes with `datasets`, in batches as its pages say. Raises UserError without it."""
    try:
        import datasets
    except ImportError as error:
        raise UserError("--datasets: needs the package datasets; pip install datasets") from error
    table = datasets.Dataset.from_dict({"text": texts})
    model = tokenizer.model

    def tokenize(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "tokens": [encoding.ids for encoding in model.encode_batch_fast(batch["text"], add_special_tokens=False)]
        }

    def side() -> None:
        datasets.disable_progress_bars()
        table.map(tokenize, batched=True, remove_columns=["text"], num_proc=workers, load_from_cache_file=False)

    return side
