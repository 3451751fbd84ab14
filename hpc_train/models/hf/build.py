"""Build a model of transformers from the folder's config.json alone: no weights, and never code from the folder."""

from __future__ import annotations

from typing import Any

import torch

from hpc_train.config.model import HfModelConfig
from hpc_train.errors import UserError
from hpc_train.models.hf.adapter import HfModel, adapt_model
from hpc_train.models.hf.config_file import ConfigFile, find_task, read_config_file
from hpc_train.models.hf.families import Task
from hpc_train.models.hf.library import fill_activation_buffers, get_class, has_class, make_library_config
from hpc_train.quiet_imports import without_warnings

_AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "image_classification": "AutoModelForImageClassification",
}
"""Class of transformers that makes a model of a task (model.task)."""

_CAUSAL_ANYWAY = ("gpt_neox", "gpt_neox_japanese")
"""Decoders whose config.json says is_decoder=false, and whose code does not read it."""


def build_hf_model(config: HfModelConfig, seed: int = 0) -> HfModel:
    """Build the model on torch's default device, with the values that transformers draws under this seed.

    Raises UserError for a folder that is not a model's, a type that transformers does not know, and sizes that it
    refuses.
    """
    file = read_config_file(config)
    task = find_task(config, file)
    settings = _make_config(file)
    kind = get_class(_AUTO_CLASSES[task])
    _check_task(settings, task, config)
    options = {"attn_implementation": config.attention, "experts_implementation": config.experts}
    chosen = {name: option for name, option in options.items() if option != "auto"}
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        try:
            with without_warnings():  # it imports the model's module only now, and packages for other devices with it
                model = kind.from_config(settings, trust_remote_code=False, dtype=torch.float32, **chosen)
        except Exception as error:  # the library's own checks of what a config.json says
            raise UserError(f"model.path={config.path}: {_explain(error)} (model.task={task})") from error
    _check_causality(model, task, config)
    fill_activation_buffers(model)
    return adapt_model(model, file.family, task)


def _check_task(settings: Any, task: Task, config: HfModelConfig) -> None:
    """Raise UserError for a model that transformers has no class of this task for, such as one of sound."""
    if has_class(_AUTO_CLASSES[task], settings):
        return
    others = [f"model.task={name}" for name, auto in _AUTO_CLASSES.items() if has_class(auto, settings)]
    advice = f"it has one for {' and '.join(others)}" if others else "register a model of your own with model=custom"
    raise UserError(
        f"model.path={config.path}: transformers has no {task} model of type {settings.model_type}, and no other tasks "
        f"than {', '.join(_AUTO_CLASSES)} are trained here; {advice}"
    )


def _check_causality(model: Any, task: Task, config: HfModelConfig) -> None:
    """Raise UserError for an encoder that predicts next tokens while its attention sees them."""
    settings = model.config
    key = next((key for key in ("is_decoder", "causal") if getattr(settings, key, None) is False), None)
    if task == "causal_lm" and key is not None and settings.model_type not in _CAUSAL_ANYWAY:
        raise UserError(
            f"model.path={config.path}: {key}=false in its config.json, so each token sees the one that it should "
            f"predict; set {key} to true there, or use model.task=masked_lm"
        )


def _make_config(file: ConfigFile) -> Any:
    path = file.folder / "config.json"
    try:
        settings = make_library_config(file.body, file.model_type)
        settings.architectures = settings.architectures or []  # the library looks through them
        return settings
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # of any kind, from code that expects a sound file
        raise UserError(f"{path}: is not a configuration of a {file.model_type} model ({_explain(error)})") from error


def _explain(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
