"""Check the files that a run names: its data, a checkpoint to resume from, and those that describe the cluster."""

from __future__ import annotations

from pathlib import Path

from hpc_train.cluster.calibration import read_calibration
from hpc_train.config.model import (
    ImageFilesDataConfig,
    MixtureDataConfig,
    ModelConfig,
    TokenDataConfig,
    VisionTransformerConfig,
)
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.checks.model_and_data import check_model_covers
from hpc_train.placement.node_locations import read_switch_file
from hpc_train.training.run_directory import RunDirectory

_STDLIB = "stdlib"
"""The word in data.sources that stands for the files of Python's standard library."""


def check_files(config: RunConfig, folder: RunDirectory) -> None:
    """Raise UserError for data or a checkpoint to resume from that is not there, and for a topology that is none.

    Data is not looked for where the batch script has set-up lines: they may be what brings it to the node.
    """
    if isinstance(config.data, TokenDataConfig) and not config.launch.setup:
        _check_text(config.data, config.model)
    if isinstance(config.data, MixtureDataConfig) and not config.launch.setup:
        from hpc_train.data.samples.mixture_order import check_mixture

        for source in check_mixture(config.data, config.train.sequence_length):
            _check_text(source, config.model)
    if isinstance(config.data, ImageFilesDataConfig) and not config.launch.setup:
        _check_images(config.data, config.model)
    check_cluster_files(config)
    offload = config.parallel.offload.dir
    if config.launch.kind == "local" and offload is not None and not Path(offload).is_dir():
        raise UserError(f"parallel.offload.dir={offload}: no such folder on this node; make it, or leave it out")
    resume = config.checkpoint.resume
    if resume.isdigit() and int(resume) not in folder.steps():
        existing = f"there are {', '.join(map(str, folder.steps()))}" if folder.steps() else "there is none"
        raise UserError(f"checkpoint.resume={resume}: not a step in {folder.checkpoints}; {existing}")
    if "/" in resume and not Path(resume).expanduser().exists():
        raise UserError(f"checkpoint.resume={resume}: does not exist; give a step-<n>, a run directory, or a step")


def check_cluster_files(config: RunConfig) -> None:
    """Raise UserError if cluster.topology has no switches or cluster.calibration is not a calibration file."""
    if config.cluster.topology is not None:
        read_switch_file(Path(config.cluster.topology))
    if config.cluster.calibration is not None:
        read_calibration(Path(config.cluster.calibration).expanduser())


def _check_text(data: TokenDataConfig, model: ModelConfig) -> None:
    """Raise UserError for text or a token store that a rank could not read, or whose tokens the model lacks."""
    if data.path is not None:
        if not Path(data.path).expanduser().is_file():
            if Path(f"{data.path}.bin").expanduser().is_file():  # Megatron's programs take the name without its ending
                raise UserError(f"data.path={data.path}: no such file; give {data.path}.bin")
            raise UserError(
                f"data.path={data.path}: no such file; make it with `hpc-train data build {data.path} TEXT`"
            )
        from hpc_train.data.token_files import open_tokens  # h5py, which only runs with a file of their own need here

        check_model_covers(model, open_tokens(data).vocab_size, f"data.path={data.path}")
        return
    if not data.sources:
        raise UserError(
            f"data={data.name}: has no text; give data.path=<token store> or data.sources=[<file or folder>]"
        )
    if data.tokenizer not in ("byte", "bpe"):
        _check_tokenizer(data, model)
    for source in data.sources:
        if source != _STDLIB and not Path(source).expanduser().exists():
            raise UserError(f"data.sources: {source} does not exist; give text files, folders, or the word {_STDLIB}")


def _check_images(data: ImageFilesDataConfig, model: ModelConfig) -> None:
    """Raise UserError for images that a rank could not read, or of more classes than the model has."""
    from hpc_train.data.images.build_images import locate_image_store
    from hpc_train.data.images.image_store import ImageStore

    if data.path is None:
        locate_image_store(data)  # finds the sources
    stores = [ImageStore.open(path) for path in (data.path, data.validation_path) if path is not None]
    if data.path is not None and isinstance(model, VisionTransformerConfig) and model.classes < len(stores[0].classes):
        classes = len(stores[0].classes)
        raise UserError(
            f"model.classes={model.classes}: fewer than the {classes} of {data.path}; set model.classes={classes}"
        )
    if data.validation_path is not None and data.validation_fraction == 0:
        raise UserError("data.validation_path: no effect with data.validation_fraction=0; leave one of them out")


def _check_tokenizer(data: TokenDataConfig, model: ModelConfig) -> None:
    """Raise UserError for a tokenizer that cannot be read, or whose vocabulary the model does not cover."""
    from hpc_train.data.tokenizers.tokenizer_folder import load_tokenizer_folder

    tokens = load_tokenizer_folder(data.tokenizer, data.end_of_document).vocab_size
    check_model_covers(model, tokens, f"data.tokenizer={data.tokenizer}")
