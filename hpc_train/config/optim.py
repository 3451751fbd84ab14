"""Parts of `optim`: settings of each optimizer, groups of parameters, and the moving average of the weights."""

from __future__ import annotations

from hpc_train.config.schema import config_dataclass, config_field

OPTIMIZERS = ("adamw", "muon", "sgd", "adafactor", "schedule_free")
"""Optimizers that come with the package."""


@config_dataclass
class ParameterGroupConfig:
    """Settings of the parameters whose names match a glob; the first group that matches a parameter counts."""

    match: str = "*"
    """Glob over names of parameters, such as 'blocks.*.attention.*' or '*.bias'."""
    lr_scale: float = config_field(default=1.0, gt=0, le=1e6)
    """Factor on the learning rate."""
    weight_decay: float | None = config_field(default=None, ge=0)
    """Weight decay of these parameters, vectors too; None: as without the group."""


@config_dataclass
class MuonConfig:
    """Muon (Jordan 2024), as torch.optim.Muon, for matrices inside the model's blocks; AdamW updates the rest."""

    parameters: list[str] = config_field(default=[])
    """Globs over names of the parameters that Muon updates; empty: all matrices in the model's blocks."""
    momentum: float = config_field(default=0.95, ge=0, lt=1)
    """Decay rate of the running mean of the gradient."""
    nesterov: bool = True
    """Look one step ahead."""
    ns_steps: int = config_field(default=5, ge=1, lt=100)
    """Newton-Schulz iterations, which make the update nearly orthogonal."""
    lr_scale: float = config_field(default=1.0, gt=0, le=1e6)
    """Factor on the learning rate of Muon's parameters."""
    adjust_lr: str = config_field(default="match_rms_adamw", choices=("match_rms_adamw", "original"))
    """Factor on the rate by shape. match_rms_adamw: updates are as large as those of AdamW, whose rate and decay then
    fit (Liu et al. 2025, arXiv:2502.16982). original: sqrt(max(1, rows / columns))."""


@config_dataclass
class SgdConfig:
    """Stochastic gradient descent, torch.optim.SGD. Weight decay is added to the gradient."""

    momentum: float = config_field(default=0.9, ge=0, lt=1)
    """Decay rate of the sum of gradients; 0: none is kept."""
    nesterov: bool = False
    """Look one step ahead; needs momentum."""


@config_dataclass
class AdafactorConfig:
    """torch.optim.Adafactor (Shazeer and Stern 2018, arXiv:1804.04235): keeps a row and a column of each matrix."""

    beta2_decay: float = config_field(default=-0.8, ge=-10, le=0)
    """Exponent of the step in the decay rate of the second moment."""
    clip_threshold: float = config_field(default=1.0, ge=1, le=1e6)
    """Largest root mean square of an update."""


@config_dataclass
class EmaConfig:
    """Exponential moving average of the weights, of the parameters that are trained."""

    decay: float | None = config_field(default=None, gt=0, lt=1)
    """Share of the average that stays in each update; None: no average is kept."""
    start: int = config_field(default=1, ge=1, le=10**12)
    """Updates until which the average is a copy of the weights."""
    evaluate: bool = True
    """Evaluate with the average instead of the weights."""
