"""conf/optim: the optimizer and its learning-rate schedule."""

from __future__ import annotations

from hpc_train.config.schema import schema, setting


@schema
class ScheduleConfig:
    """The learning rate as a function of the step."""

    name: str = setting(default="cosine", choices=("cosine", "linear", "wsd", "constant"))
    """wsd is warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395)."""
    warmup_steps: int = setting(default=20, ge=0)
    """Linear from 0; capped at the number of steps of the run."""
    decay_fraction: float = setting(default=0.1, ge=0, le=1)
    """Part of the run, at its end, over which wsd decays."""
    min_ratio: float = setting(default=0.1, ge=0, le=1)
    """Final learning rate over the peak."""


@schema
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    name: str = setting(default="adamw", choices=("adamw",))
    """The optimizer."""
    lr: float = setting(default=3e-3, gt=0)
    """Peak learning rate, at a global batch of `base_batch` sequences."""
    betas: list[float] = setting(default=[0.9, 0.95])
    """Decay rates of AdamW's running means of the gradient and of its square."""
    eps: float = setting(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = setting(default=0.1, ge=0)
    """Applied to matrices; vectors (norms, biases) are not decayed."""
    max_norm: float | None = setting(default=1.0, gt=0)
    """Clip the gradient's global norm to this; None: only report it."""
    lr_scaling: str = setting(default="none", choices=("none", "linear", "sqrt"))
    """How the peak grows with train.global_batch / base_batch: linear (Goyal et al. 2017, arXiv:1706.02677) or root."""
    base_batch: int | None = setting(default=None, ge=1)
    """Sequences in the global batch that `lr` was tuned at; needed by linear and sqrt."""
    implementation: str = setting(default="auto", choices=("auto", "fused", "foreach", "for_loop"))
    """auto: fused where torch has it for the device."""
    schedule: ScheduleConfig = setting(default=ScheduleConfig)
