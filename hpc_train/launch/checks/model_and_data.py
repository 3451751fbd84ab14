"""Check that a model can read the data, as far as the settings alone tell: kind, shape, vocabulary, packing."""

from __future__ import annotations

from pathlib import Path

from hpc_train.config.model import (
    CustomModelConfig,
    DataConfig,
    HfModelConfig,
    ImageDataConfig,
    ImageFilesDataConfig,
    MixtureDataConfig,
    ModelConfig,
    TokenDataConfig,
    TransformerConfig,
    VisionTransformerConfig,
)
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.hf.config_file import find_task, read_config_file

_BYTE_VOCAB = 256
"""Tokens of the byte tokenizer: a byte has so many values."""


def check_model_and_data(config: RunConfig) -> None:
    """Raise UserError if this model cannot read this data, as far as the settings alone tell."""
    model, data = config.model, config.data
    if isinstance(model, TransformerConfig) and isinstance(data, ImageDataConfig):
        raise UserError(f"data={data.name}: images, but model={model.name} reads tokens; use model=vit_tiny")
    if isinstance(data, ImageFilesDataConfig) and not config.launch.setup:
        _require_image_stores(data)
    if isinstance(model, VisionTransformerConfig) and isinstance(data, ImageFilesDataConfig):
        _check_image_shape(model, data)
    if isinstance(model, VisionTransformerConfig) and isinstance(data, (TokenDataConfig, MixtureDataConfig)):
        raise UserError(f"data={data.name}: tokens, but model={model.name} reads images; use data=digits")
    if isinstance(model, HfModelConfig):
        check_task_and_data(model, data)
    if config.parallel.sync_batchnorm and not isinstance(model, (CustomModelConfig, HfModelConfig)):
        raise UserError(f"parallel.sync_batchnorm=true: model={model.name} has no BatchNorm; leave it out")
    if isinstance(data, (TokenDataConfig, MixtureDataConfig)) and data.samples == "packed":
        _check_packing(config)
    if isinstance(data, TokenDataConfig) and data.path is None:
        _check_vocabulary(model, data)


def _require_image_stores(data: ImageFilesDataConfig) -> None:
    """Raise UserError for a missing store before its images are checked."""
    for key, path in (("path", data.path), ("validation_path", data.validation_path)):
        if path is not None and not Path(path).expanduser().is_file():
            raise UserError(f"data.{key}={path}: no such file; make it with `hpc-train data build {path} FOLDER`")


def _check_image_shape(model: VisionTransformerConfig, data: ImageFilesDataConfig) -> None:
    if (model.channels, model.image_size) != (data.channels, data.image_size):
        raise UserError(
            f"data.image_size={data.image_size} data.channels={data.channels}: model={model.name} takes images of "
            f"{model.image_size} and {model.channels}; set those, or model.image_size and model.channels"
        )


def check_task_and_data(model: HfModelConfig, data: DataConfig) -> None:
    """Raise UserError for a task that needs other data."""
    task = find_task(model, read_config_file(model))
    reads_images = task == "image_classification"
    if isinstance(data, (TokenDataConfig, MixtureDataConfig) if reads_images else ImageDataConfig):
        raise UserError(
            f"data={data.name}: {'tokens' if reads_images else 'images'}, but model.path={model.path} reads "
            f"{'images' if reads_images else 'tokens'} (task {task})"
        )


def _check_packing(config: RunConfig) -> None:
    """Raise UserError for packed documents together with a setting that cannot keep documents apart."""
    model, instead = config.model, "use data.samples=padded, or stream"
    if isinstance(model, VisionTransformerConfig):
        raise UserError(f"data.samples=packed: model={model.name} does not take packed documents; {instead}")
    if isinstance(model, HfModelConfig):
        _check_packed_library_model(model, config.train.micro_batch, instead)
    if isinstance(model, TransformerConfig) and model.dropout > 0:
        raise UserError(f"data.samples=packed: not with model.dropout={model.dropout}; set it to 0, or {instead}")
    for axis, degree in (("cp", config.parallel.cp), ("pp", config.parallel.pp)):
        if degree != 1:
            raise UserError(f"data.samples=packed: not with parallel.{axis}={degree}; set it to 1, or {instead}")


def _check_packed_library_model(model: HfModelConfig, micro_batch: int, instead: str) -> None:
    """Raise UserError for packed documents that a model of transformers may not keep apart."""
    family = read_config_file(model).family
    if not family.packs:
        raise UserError(f"data.samples=packed: {family.name} of transformers does not keep documents apart; {instead}")
    if not family.tested or family.task != "causal_lm":
        raise UserError(
            f"data.samples=packed: nobody has compared its numbers for {family.name} of transformers; {instead}"
        )
    if model.attention == "flash_attention_2" and micro_batch > 1:
        raise UserError(
            "data.samples=packed: model.attention=flash_attention_2 keeps documents apart in single sequences only; "
            f"use train.micro_batch=1, another model.attention, or {instead.removeprefix('use ')}"
        )


def _check_vocabulary(model: ModelConfig, data: TokenDataConfig) -> None:
    if data.tokenizer == "byte" and data.vocab_size != _BYTE_VOCAB:
        raise UserError(
            f"data.vocab_size={data.vocab_size}: the byte tokenizer has {_BYTE_VOCAB}; use data.tokenizer=bpe"
        )
    if data.tokenizer in ("byte", "bpe"):
        check_model_covers(model, data.vocab_size, f"data={data.name}")


def check_model_covers(model: ModelConfig, tokens: int, where: str) -> None:
    """Raise UserError if the model's vocabulary is smaller than the `tokens` of the data. where: the data's setting."""
    of_model = get_vocabulary(model)
    if of_model is None or of_model >= tokens:
        return
    if isinstance(model, HfModelConfig):
        hint = "use the tokenizer of that folder for the data, or a model with more tokens"
        if where == f"data.tokenizer={model.path}":  # tokens were added to the tokenizer alone
            hint = f"save the model with as many in transformers: model.resize_token_embeddings({tokens})"
        raise UserError(
            f"model.path={model.path}: its vocabulary of {of_model} is smaller than the {tokens} of {where}; {hint}"
        )
    raise UserError(f"model.vocab_size={of_model}: smaller than the {tokens} of {where}; use model.vocab_size={tokens}")


def get_vocabulary(model: ModelConfig) -> int | None:
    """Return the size of the model's vocabulary; None where it has none, or only its own code knows."""
    if isinstance(model, HfModelConfig):
        return read_config_file(model).vocab_size
    return model.vocab_size if isinstance(model, TransformerConfig) else None
