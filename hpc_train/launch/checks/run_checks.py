"""Check a run as far as that is possible before any rank starts."""

from __future__ import annotations

from hpc_train.config.model import HfModelConfig, TransformerConfig
from hpc_train.config.parallel import Degrees
from hpc_train.config.profile import check_ranks
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.checks.model_and_data import check_model_and_data
from hpc_train.parallel.rules.check import check_support
from hpc_train.training.loggers.interface import check_loggers


def check_run(config: RunConfig, ranks: int) -> Degrees:
    """Check all that can be checked before any rank starts, and return the degrees. Raises UserError."""
    from hpc_train.models.shape import check_shape

    degrees = check_support(config, ranks)
    if config.profile.steps is not None:
        check_ranks(config.profile.ranks, ranks)
    check_shape(config.model)
    check_model_and_data(config)
    check_attention_kernel(config)
    if isinstance(config.model, HfModelConfig):
        check_pretrained_model(config.model)
    if config.container.kind == "none":  # else nobody knows what is installed where it runs
        check_loggers(config.loggers.use)
    return degrees


def check_attention_kernel(config: RunConfig) -> None:
    """Raise UserError for a kernel of attention that this machine does not have, if the ranks will run here."""
    kernel = getattr(config.model, "attention", "auto")
    if not isinstance(config.model, TransformerConfig) or kernel == "auto" or config.launch.kind != "local":
        return
    import torch

    from hpc_train.parallel.rules.attention import explain_missing_kernel

    why = explain_missing_kernel(kernel, not torch.cuda.is_available())
    if why is not None:
        raise UserError(f"model.attention={kernel}: {why}")


def check_pretrained_model(model: HfModelConfig) -> None:
    """Build the model without memory and compare it with the headers of its weights. Raises UserError."""
    import torch

    from hpc_train.checkpoint.convert.pretrained_weights import check_weights
    from hpc_train.models.hf.build import build_hf_model

    with torch.device("meta"):
        check_weights(model, build_hf_model(model))
