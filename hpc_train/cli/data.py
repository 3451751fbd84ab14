"""`hpc-train data build|inspect`: make a token store from text or records, and show what one contains."""

from __future__ import annotations

import argparse
import json as json_module
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.cli.arguments import add_command, add_examples, add_json, whole_number

if TYPE_CHECKING:
    from hpc_train.data.corpus.part_files import Progress
    from hpc_train.data.images.image_store import ImageStore
    from hpc_train.data.token_store import TokenStore

_SUFFIXES = (".py", ".txt", ".md", ".rst")
_BPE_VOCAB = 4096
_SAMPLE_TOKENS = 200
_SAMPLE_CHARACTERS = 72
_SHOWN_CLASSES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands build and inspect."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    build, inspect = "make a store from files or folders of text, records or images", "show what a store contains"
    _add_build(add_command(commands, "build", build))
    _add_inspect(add_command(commands, "inspect", inspect))


def build_command(args: argparse.Namespace) -> int:
    """Build the store `args.out` and describe it."""
    from hpc_train.data.corpus.build import StoreRecipe, build_from_recipe, choose_default_column
    from hpc_train.data.images.image_entries import are_images

    if not args.suffix and are_images(args.source, _SUFFIXES):
        return _build_images(args)
    vocab_size = args.vocab_size or (_BPE_VOCAB if args.tokenizer == "bpe" else 256)
    recipe = StoreRecipe(
        sources=tuple(args.source),
        suffixes=tuple(args.suffix or _SUFFIXES),
        tokenizer=args.tokenizer,
        vocab_size=vocab_size,
        column=args.column or choose_default_column(args.chat),
        chat=args.chat,
        end_of_document=args.end_of_document,
    )
    workers = args.workers or len(os.sched_getaffinity(0))
    with _show_progress() as progress:
        store = build_from_recipe(recipe, args.out, overwrite=args.overwrite, workers=workers, progress=progress)
    _print_fields(_describe_store(store), args.json)
    return 0


def _build_images(args: argparse.Namespace) -> int:
    """Build the image store `args.out` and describe it. Raises UserError for options of text."""
    from hpc_train.data.images.build_images import LABEL_KEY, build_image_store
    from hpc_train.errors import UserError

    of_text = {
        "--tokenizer": args.tokenizer != "byte",
        "--chat": args.chat,
        "--end-of-document": args.end_of_document,
        "--vocab-size": args.vocab_size,
    }
    if ignored := [option for option, value in of_text.items() if value]:
        raise UserError(f"{ignored[0]}: no effect on images, which {args.source[0]} holds; leave it out")
    workers = args.workers or len(os.sched_getaffinity(0))
    with _show_progress("images") as progress:
        store = build_image_store(
            args.source,
            args.out,
            label_key=args.column or LABEL_KEY,
            overwrite=args.overwrite,
            workers=workers,
            progress=progress,
        )
    _print_fields(_describe_images(store), args.json)
    return 0


@contextmanager
def _show_progress(what: str = "tokenizing") -> Iterator[Progress | None]:
    """Show a bar on standard error while the context lasts, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from hpc_train.cli.data_progress import BuildBar

    with BuildBar(what) as bar:
        yield bar


def inspect_command(path: str, json: bool, verify: bool = False) -> int:
    """Describe the store at `path`. verify: read all of it, and return 1 if its checksum is wrong."""
    from hpc_train.data.images.image_store import ImageStore, verify_image_store
    from hpc_train.data.store_file import IMAGE_STORE, is_store
    from hpc_train.data.token_store import TokenStore, verify_store

    facts: dict[str, Any]
    if is_store(Path(path).expanduser(), IMAGE_STORE):
        images = ImageStore.open(path)
        facts = _describe_images(images) | ({"verified": verify_image_store(images)} if verify else {})
    else:
        store = TokenStore.open(path)
        facts = _describe_store(store) | ({"verified": verify_store(store)} if verify else {})
    _print_fields(facts, json)
    return 0 if facts.get("verified", True) else 1


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="store to write, such as text.h5")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="+",
        help="file or folder of text, JSON Lines (also .gz, .zst), a JSON array of objects, CSV, Parquet or "
        "Arrow, a folder saved by `datasets`, or the word stdlib for Python's own sources; or folders whose "
        "sub-folders are classes of images, or tars of WebDataset; recognised by content",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="byte|bpe|PATH",
        default="byte",
        help="one token per byte (default), a BPE trained on the text, or a tokenizer.json or a folder with one",
    )
    parser.add_argument(
        "--column",
        metavar="NAME",
        help="column of records to read (default text; with --chat messages; the label in .json files of tars: label)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="records are conversations: apply the tokenizer's chat template, and count only the assistant's turns",
    )
    parser.add_argument(
        "--end-of-document", metavar="TOKEN", help="token after every document (default: the tokenizer's own)"
    )
    parser.add_argument(
        "--workers", metavar="N", type=whole_number(1), help="processes that tokenize (default: the processors here)"
    )
    parser.add_argument(
        "--vocab-size",
        metavar="N",
        type=whole_number(1),
        help=f"vocabulary of the bpe tokenizer (default {_BPE_VOCAB})",
    )
    suffixes = " ".join(_SUFFIXES)
    parser.add_argument(
        "--suffix",
        nargs="+",
        action="extend",
        help=f"take files of a folder with these suffixes (default {suffixes}); put it last",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    add_json(parser)
    add_examples(
        parser,
        "hpc-train data build text.h5 stdlib",
        "hpc-train data build web.h5 web.jsonl.zst --column content --tokenizer models/tiny/",
        "hpc-train data build birds.h5 birds/train/",
        "hpc-train data build chats.h5 chats.jsonl --chat --tokenizer models/tiny/",
    )
    parser.set_defaults(run=build_command)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="store to read")
    parser.add_argument("--verify", action="store_true", help="read all of it and compare its checksum")
    add_json(parser)
    add_examples(parser, "hpc-train data inspect text.h5 --verify")
    parser.set_defaults(run=lambda args: inspect_command(args.file, args.json, args.verify))


def _describe_store(store: TokenStore) -> dict[str, Any]:
    return {
        "path": str(store.path),
        "tokens": len(store.tokens),
        "documents": len(store.documents),
        "vocab_size": store.vocab_size,
        "tokenizer": store.tokenizer,
        **({"tokenizer_digest": store.tokenizer_digest} if store.tokenizer_json else {}),
        **({"counted_tokens": int(store.counted.sum())} if store.counted is not None else {}),
        "dtype": store.tokens.dtype.name,
        "bytes": store.path.stat().st_size,
        "unigram_entropy": store.unigram_entropy,
        "xxh3_128": store.digest,
        "source": json_module.loads(store.source),
        "sample": _decode_sample(store),
    }


def _describe_images(store: ImageStore) -> dict[str, Any]:
    import numpy as np

    counts = np.bincount(store.labels, minlength=len(store.classes))
    return {
        "path": str(store.path),
        "images": len(store),
        "classes": len(store.classes),
        "images_per_class": [int(counts.min()), int(counts.max())],
        "bytes": store.path.stat().st_size,
        "xxh3_128": store.digest,
        "source": json_module.loads(store.source),
        "names": list(store.classes),
    }


def _decode_sample(store: TokenStore) -> str | None:
    """Decode the first characters; None without the tokenizer's package."""
    from hpc_train.data.tokenizers.tokenizer import load_tokenizer
    from hpc_train.errors import UserError

    try:
        tokenizer = load_tokenizer(store)
    except UserError:
        return None
    return tokenizer.decode(store.tokens[:_SAMPLE_TOKENS])[:_SAMPLE_CHARACTERS]


def _print_fields(facts: dict[str, Any], json: bool) -> None:
    if json:
        print(json_module.dumps(facts))
        return
    for name, value in facts.items():
        print(f"{name:<16} {_format_value(name, value)}")


def _format_value(name: str, value: Any) -> str:
    if name == "sample":
        # ascii, because the text may contain control characters.
        return "(needs the package tokenizers)" if value is None else ascii(value)
    if name == "unigram_entropy":
        return f"{value:.4f} nats per token"
    if name == "names":
        # As the sample: names of folders and labels may hold anything.
        return ", ".join(map(ascii, value[:_SHOWN_CLASSES])) + (", ..." if len(value) > _SHOWN_CLASSES else "")
    return f"{value:,}" if type(value) is int else str(value)
