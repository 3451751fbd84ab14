"""conf/data: what a model is trained on."""

from __future__ import annotations

from omegaconf import MISSING

from hpc_train.config.schema import schema, setting


@schema
class DataConfig:
    """What every data set has; the kinds below add their own fields."""

    kind: str = MISSING
    """tokens or images."""
    name: str = MISSING
    """What logs and the run's configuration call this data set."""
    validation_fraction: float = setting(default=0.02, ge=0, lt=1)
    """Part of the data kept for validation, taken from its end; 0: no validation."""


@schema
class TokenDataConfig(DataConfig):
    """Text as tokens: one HDF5 store, built once from files if it is not there yet."""

    kind: str = "tokens"
    """Always tokens."""
    path: str | None = None
    """A token store made by `hpc-train data build`; None: built from `sources` into `cache` at first use."""
    sources: list[str] = setting(default=[])
    """Text files or folders; the word `stdlib` stands for the source code of the running Python's standard library."""
    suffixes: list[str] = setting(default=[".py", ".txt", ".md", ".rst"])
    """Files taken from a folder."""
    tokenizer: str = setting(default="byte", choices=("byte", "bpe"))
    """byte: one token a byte; bpe: byte-pair encoding, trained on the text."""
    vocab_size: int = setting(default=256, ge=256, le=1 << 31)
    """Size of the vocabulary that is trained on the text (bpe); the byte tokenizer always has 256."""
    cache: str = "${oc.env:HPC_TRAIN_CACHE,'~/.cache/hpc_train'}"
    """Folder of the stores that are built; it must be visible from the compute nodes."""


@schema
class ImageDataConfig(DataConfig):
    """Labelled images that come with a package."""

    kind: str = "images"
    """Always images."""
    name: str = setting(default="digits", choices=("digits",))
    """digits: 1,797 8x8 grey images of handwritten digits that ship with scikit-learn."""
