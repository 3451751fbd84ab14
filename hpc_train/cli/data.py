"""`hpc-train data build|inspect`: the arguments and what they print."""

from __future__ import annotations

import argparse
import json as json_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.data.token_store import TokenStore

_SUFFIXES = (".py", ".txt", ".md", ".rst")
_BPE_VOCAB = 4096
_SAMPLE_TOKENS = 200
_SAMPLE_CHARACTERS = 72


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the sub-commands build and inspect; each sets `run`, a function of the parsed arguments."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_build(commands.add_parser("build", help="make a token store from text files or folders"))
    _add_inspect(commands.add_parser("inspect", help="print what a token store holds"))


def build_command(args: argparse.Namespace) -> int:
    """Build the store `args.out` and print what it holds."""
    from hpc_train.data.build import build_store

    vocab_size = args.vocab_size or (_BPE_VOCAB if args.tokenizer == "bpe" else 256)
    suffixes = args.suffix or _SUFFIXES
    store = build_store(args.source, suffixes, args.tokenizer, vocab_size, args.out, overwrite=args.overwrite)
    _print_fields(_describe_store(store), args.json)
    return 0


def inspect_command(path: str, json: bool, verify: bool = False) -> int:
    """Print what the store at `path` holds; with `verify`, read all of it and return 1 if its checksum is wrong."""
    from hpc_train.data.token_store import TokenStore
    from hpc_train.data.token_store import verify_store as intact

    store = TokenStore.open(path)
    facts = _describe_store(store)
    if verify:
        facts["verified"] = intact(store)
    _print_fields(facts, json)
    return 0 if facts.get("verified", True) else 1


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="the store to write, such as text.h5")
    parser.add_argument("source", metavar="SOURCE", nargs="+", help="a text file, a folder, or the word stdlib")
    parser.add_argument("--tokenizer", choices=("byte", "bpe"), default="byte")
    parser.add_argument("--vocab-size", metavar="N", type=int, help=f"of the bpe tokenizer (default {_BPE_VOCAB})")
    suffixes = " ".join(_SUFFIXES)
    parser.add_argument(
        "--suffix", nargs="+", action="extend", help=f"files taken from a folder (default {suffixes}); put it last"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the store OUT")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=build_command)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a token store")
    parser.add_argument("--verify", action="store_true", help="read it all and compare its checksum")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda args: inspect_command(args.file, args.json, args.verify))


def _describe_store(store: TokenStore) -> dict[str, Any]:
    return {
        "path": str(store.path),
        "tokens": len(store.tokens),
        "documents": len(store.documents),
        "vocab_size": store.vocab_size,
        "tokenizer": store.tokenizer,
        "dtype": store.tokens.dtype.name,
        "bytes": store.path.stat().st_size,
        "unigram_entropy": store.unigram_entropy,
        "xxh3_128": store.digest,
        "source": json_module.loads(store.source),
        "sample": _sample(store),
    }


def _sample(store: TokenStore) -> str | None:
    """The first characters; None where the tokenizer's package is not installed."""
    from hpc_train.data.tokenizer import load_tokenizer
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
        return "(needs the package tokenizers)" if value is None else ascii(value)  # no control character of a file
    if name == "unigram_entropy":
        return f"{value:.4f} nats per token"
    return f"{value:,}" if type(value) is int else str(value)
