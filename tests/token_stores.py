"""Build token stores for tests in one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_train.data.corpus.build import StoreRecipe, build_from_recipe
from hpc_train.data.token_store import TokenStore


def build_store(
    sources: Sequence[str],
    suffixes: Sequence[str],
    tokenizer: str,
    vocab_size: int,
    out: str | Path,
    *,
    overwrite: bool = False,
) -> TokenStore:
    """Build the token store `out` from text files and folders in this process, and open it."""
    recipe = StoreRecipe(tuple(sources), tuple(suffixes), tokenizer, vocab_size)
    return build_from_recipe(recipe, out, overwrite=overwrite)
