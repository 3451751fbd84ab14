"""Do these tensors make that model? Asked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from omegaconf.errors import OmegaConfBaseException

from hpc_train.checkpoint.holdings import Tensor
from hpc_train.config.compose import from_container
from hpc_train.config.model import CustomModelConfig, ModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.config.run_file import load_run_file
from hpc_train.errors import UserError
from hpc_train.models.registry import build


def run_config(file: Path) -> RunConfig:
    """The run that a config.yaml describes. Raises UserError if it is none."""
    try:
        return from_container(load_run_file(file))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); give the config.yaml of a run") from error
    except (OmegaConfBaseException, AssertionError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: is not the config.yaml of a run ({type(error).__name__})") from error


def check_fit(tensors: Iterable[Tensor], config: ModelConfig, where: str) -> None:
    """Raise UserError for the first weight that the model lacks, that it needs, or that has another shape.

    Of a custom model only the run itself can tell.
    """
    if isinstance(config, CustomModelConfig):
        return
    here, there = {it.name: it.shape for it in tensors}, _shapes(config)
    unknown, missing = [it for it in here if it not in there], [it for it in there if it not in here]
    if unknown:
        raise UserError(f"{where}: the tensor {unknown[0]!r} is not one of model={config.name}; name another model")
    if missing:
        raise UserError(f"{where}: model={config.name} needs the tensor {missing[0]!r}, which is not there")
    for name, shape in here.items():
        if shape != there[name]:
            raise UserError(
                f"{where}: the tensor {name!r} is of shape {shape}, in model={config.name} of {there[name]}"
            )


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    try:
        with torch.device("meta"):
            model = build(config)
    except (RuntimeError, ArithmeticError, TypeError, ValueError, AssertionError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(
            f"model={config.name}: cannot be built with these sizes ({type(error).__name__}: {text})"
        ) from None
    return {name: tuple(it.shape) for name, it in model.state_dict().items()}
