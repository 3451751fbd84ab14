"""Find the tokenizer with which the data of a run were tokenized."""

from __future__ import annotations

from hpc_train.config.model import DataConfig, TokenDataConfig
from hpc_train.data.corpus.build import locate_store
from hpc_train.data.token_files import open_tokens
from hpc_train.data.token_store import TokenStore
from hpc_train.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from hpc_train.data.tokenizers.tokenizer_folder import load_tokenizer_folder


def open_data_tokenizer(config: DataConfig) -> Tokenizer | None:
    """Return the tokenizer of a run's data; None if it is unknown, as for a token file of another program.

    Raises UserError for a tokenizer or a store that no longer exists.
    """
    if not isinstance(config, TokenDataConfig):
        return None
    if config.path is None and config.tokenizer == "byte":
        return ByteTokenizer()
    if config.path is None and config.tokenizer != "bpe":
        return load_tokenizer_folder(config.tokenizer, config.end_of_document)
    store = open_tokens(config) if config.path is not None else TokenStore.open(locate_store(config))
    return load_tokenizer(store) if isinstance(store, TokenStore) else None
