"""What shows before any rank starts: whether model and data can go together, and whether the named files are there."""

from __future__ import annotations

from pathlib import Path

from hpc_train.cluster.calibration import read_calibration
from hpc_train.config.data import ImageDataConfig, TokenDataConfig
from hpc_train.config.model import CustomModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.locate import read_switches
from hpc_train.training.folder import RunFolder

_BYTE_VOCAB = 256
_STDLIB = "stdlib"


def check_agreement(config: RunConfig) -> None:
    """Raise UserError if this model cannot read this data, as far as the settings alone tell."""
    model, data = config.model, config.data
    if isinstance(model, TransformerConfig) and isinstance(data, ImageDataConfig):
        raise UserError(f"data={data.name}: images, but model={model.name} reads tokens; use model=vit_tiny")
    if isinstance(model, VisionTransformerConfig) and isinstance(data, TokenDataConfig):
        raise UserError(f"data={data.name}: tokens, but model={model.name} reads images; use data=digits")
    if config.parallel.sync_batchnorm and not isinstance(model, CustomModelConfig):
        raise UserError(f"parallel.sync_batchnorm=true: model={model.name} has no BatchNorm; leave it out")
    if isinstance(data, TokenDataConfig) and data.path is None:
        _check_vocabulary(model.vocab_size if isinstance(model, TransformerConfig) else None, data)


def _check_vocabulary(of_model: int | None, data: TokenDataConfig) -> None:
    if data.tokenizer == "byte" and data.vocab_size != _BYTE_VOCAB:
        raise UserError(
            f"data.vocab_size={data.vocab_size}: the byte tokenizer has {_BYTE_VOCAB}; use data.tokenizer=bpe"
        )
    if of_model is not None and of_model < data.vocab_size:
        raise UserError(
            f"model.vocab_size={of_model}: smaller than the {data.vocab_size} of data={data.name}; "
            f"use model.vocab_size={data.vocab_size}"
        )


def check_files(config: RunConfig, folder: RunFolder) -> None:
    """Raise UserError for data or a checkpoint to resume from that is not there, and for a topology that is none.

    Data is not looked for where the batch script has set-up lines: they may be what brings it to the node.
    """
    if isinstance(config.data, TokenDataConfig) and not config.launch.setup:
        _check_text(config.data)
    check_cluster_files(config)
    offload = config.parallel.offload.dir
    if config.launch.kind == "local" and offload is not None and not Path(offload).is_dir():
        raise UserError(f"parallel.offload.dir={offload}: no such folder on this node; make it, or leave it out")
    resume = config.checkpoint.resume
    if resume.isdigit() and int(resume) not in folder.steps():
        there = f"there are {', '.join(map(str, folder.steps()))}" if folder.steps() else "there is none"
        raise UserError(f"checkpoint.resume={resume}: not a step in {folder.checkpoints}; {there}")
    if "/" in resume and not Path(resume).expanduser().exists():
        raise UserError(f"checkpoint.resume={resume}: does not exist; give a step-<n>, a run directory, or a step")


def check_cluster_files(config: RunConfig) -> None:
    """Raise UserError if cluster.topology has no switches or cluster.calibration is not a calibration file."""
    if config.cluster.topology is not None:
        read_switches(Path(config.cluster.topology))
    if config.cluster.calibration is not None:
        read_calibration(Path(config.cluster.calibration).expanduser())


def _check_text(data: TokenDataConfig) -> None:
    if data.path is not None:
        if not Path(data.path).expanduser().is_file():
            raise UserError(
                f"data.path={data.path}: no such file; make it with `hpc-train data build {data.path} TEXT`"
            )
        return
    if not data.sources:
        raise UserError(
            f"data={data.name}: has no text; give data.path=<token store> or data.sources=[<file or folder>]"
        )
    for source in data.sources:
        if source != _STDLIB and not Path(source).expanduser().exists():
            raise UserError(f"data.sources: {source} does not exist; give text files, folders, or the word {_STDLIB}")
