"""The `optim` part of a run: the optimizer and its settings, the learning rate's schedule, and the moving average."""

from __future__ import annotations

from typing import Any

from hpc_train.config.schema import config_dataclass, config_field

OPTIMIZERS = ("adamw", "muon", "sgd", "adafactor", "schedule_free")
"""Optimizers that come with the package."""
SCHEDULES = ("cosine", "linear", "wsd", "constant")
"""Learning-rate schedules that come with the package."""


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


@config_dataclass
class ScheduleConfig:
    """The learning rate as a function of the step."""

    name: str = "cosine"
    """cosine, linear, constant, wsd (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395), or a name given to
    hpc_train.components.register_schedule."""
    args: dict[str, Any] = config_field(default={})
    """Keyword arguments of a registered schedule, which decides alone: no other setting of this part has an effect."""
    warmup_steps: int = config_field(default=20, ge=0)
    """Steps of linear warm-up from 0; at most the steps of the run."""
    decay_fraction: float = config_field(default=0.1, ge=0, le=1)
    """Share of the run, at its end, over which wsd decays."""
    min_ratio: float = config_field(default=0.1, ge=0, le=1)
    """Final learning rate over the peak."""


@config_dataclass
class OptimConfig:
    """The optimizer: AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), another one, or one of your own."""

    name: str = "adamw"
    """adamw, muon, sgd, adafactor, schedule_free, or a name given to hpc_train.components.register_optimizer."""
    module: str | None = None
    """Python module to import first, where an optimizer or a schedule of your own is registered."""
    args: dict[str, Any] = config_field(default={})
    """Keyword arguments of a registered optimizer, which gets no other setting of this part but `lr`."""
    lr: float = config_field(default=3e-3, gt=0)
    """Peak learning rate, at a global batch of `base_batch` sequences."""
    betas: list[float] = config_field(default=[0.9, 0.95])
    """Decay rates of AdamW's running means of the gradient and of its square."""
    eps: float = config_field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = config_field(default=0.1, ge=0)
    """Applied to matrices; vectors (norms, biases) are not decayed."""
    max_norm: float | None = config_field(default=1.0, gt=0)
    """Clip the gradient's global norm to this; None: only report it."""
    lr_scaling: str = config_field(default="none", choices=("none", "linear", "sqrt"))
    """How the peak grows with train.global_batch / base_batch: linear (Goyal et al. 2017, arXiv:1706.02677) or root."""
    base_batch: int | None = config_field(default=None, ge=1)
    """Sequences in the global batch that `lr` was tuned at; needed by linear and sqrt."""
    implementation: str = config_field(default="auto", choices=("auto", "fused", "foreach", "for_loop"))
    """Implementation of torch's AdamW; auto: fused if torch has it for the device."""
    state: str = config_field(default="full", choices=("full", "bf16", "8bit"))
    """Format of AdamW's two moments, the same in every layout. full: that of the parameters; bf16: bfloat16, rounded
    stochastically; 8bit: 8 bits by torchao, for matrices whose rows are multiples of `block_size`."""
    block_size: int = config_field(default=128, ge=16, le=1 << 16)
    """Elements of a row that share a scale in optim.state=8bit."""
    groups: list[ParameterGroupConfig] = config_field(default=[])
    """Settings of parameters by glob: [{match: '*.bias', lr_scale: 0.5}, {match: head.*, weight_decay: 0}]."""
    muon: MuonConfig = config_field(default=MuonConfig)
    sgd: SgdConfig = config_field(default=SgdConfig)
    adafactor: AdafactorConfig = config_field(default=AdafactorConfig)
    ema: EmaConfig = config_field(default=EmaConfig)
    schedule: ScheduleConfig = config_field(default=ScheduleConfig)
