"""Make the optimizer, and compute each step's learning rate and random seeds.

Learning rate and seeds are pure functions of the step, so there is nothing to save, and they are the same after any
resume.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_train import components
from hpc_train.components import OPTIMIZERS
from hpc_train.config.optim import OPTIMIZERS as BUILT_IN
from hpc_train.config.optim import SCHEDULES, OptimConfig, ScheduleConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.optimizers.parameter_groups import (
    TrainedParameter,
    agree_on,
    check_globs,
    list_trained,
    make_groups,
    select_for_muon,
)
from hpc_train.shard_rectangles import find_fused_parts
from hpc_train.traffic.moment_blocks import LEAST_ELEMENTS


def make_optimizer(model: nn.Module, config: OptimConfig, world: World | None = None) -> torch.optim.Optimizer:
    """Make the optimizer of a model or of a rank's stages, after they have been split.

    Weight decay is on matrices only, unless optim.groups says otherwise. world: needed where ranks share the work of an
    update (Muon); with it every rank of the job makes its optimizer at the same time. Raises UserError if nothing is
    trained, and for globs that match nothing.
    """
    trained = list_trained(model)
    if config.name not in BUILT_IN:
        return _make_user_optimizer([parameter.value for parameter in trained], config)
    if config.groups:
        check_globs([group.match for group in config.groups], "optim.groups", trained, world)
    if config.name == "muon":
        return _make_muon(model, trained, config, world)
    if config.name == "sgd":
        return _make_sgd(trained, config)
    if config.name == "adafactor":
        return _make_adafactor(trained, config)
    if config.name == "schedule_free":
        from hpc_train.parallel.optimizers.schedule_free import ScheduleFreeAdamW

        betas = (config.betas[0], config.betas[1])
        return ScheduleFreeAdamW(make_groups(trained, config, by_mesh=True), lr=config.lr, betas=betas, eps=config.eps)
    if config.state == "8bit":
        return _make_quantized_adamw(trained, config, world)
    return _make_adamw(model, trained, config)


def _make_adamw(model: nn.Module, trained: Sequence[TrainedParameter], config: OptimConfig) -> torch.optim.Optimizer:
    if config.state == "bf16":
        from hpc_train.parallel.optimizers.rounded_adamw import RoundedAdamW

        return RoundedAdamW(
            make_groups(trained, config),
            {parameter.value: parameter.name for parameter in trained},
            find_fused_parts(model),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
        )
    optimizer_class: type[torch.optim.AdamW] = torch.optim.AdamW
    if _has_shards(trained):
        from hpc_train.parallel.optimizers.sharded import ShardedAdamW

        optimizer_class = ShardedAdamW
    return optimizer_class(
        make_groups(trained, config),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        **_choose_implementation(config.implementation, trained[0].value.device),
    )


def _make_quantized_adamw(
    trained: Sequence[TrainedParameter], config: OptimConfig, world: World | None
) -> torch.optim.Optimizer:
    from hpc_train.parallel.optimizers.quantized_adamw import QuantizedAdamW

    optimizer = QuantizedAdamW(
        make_groups(trained, config),
        {parameter.value: parameter.name for parameter in trained},
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        block_size=config.block_size,
    )
    if not agree_on([optimizer.quantizes], world)[0]:
        widest = max((parameter.value.shape[-1] for parameter in trained if parameter.value.ndim > 1), default=0)
        raise UserError(
            f"optim.state=8bit: would have no effect: no matrix has {LEAST_ELEMENTS} elements in rows that are "
            f"multiples of optim.block_size={config.block_size} (the widest has {widest}); use a smaller block_size, "
            "or optim.state=full"
        )
    return optimizer


def _make_muon(
    model: nn.Module, trained: Sequence[TrainedParameter], config: OptimConfig, world: World | None
) -> torch.optim.Optimizer:
    """Make Muon for hidden matrices, and AdamW for everything else."""
    from hpc_train.parallel.optimizers.muon import JointOptimizer, Muon

    assert world is not None, "Muon's ranks share its work"
    muon_parameters = select_for_muon(trained, config, world)
    groups = make_groups([parameter for parameter in trained if parameter.value in muon_parameters], config)
    for group in groups:
        group["lr_factor"] *= config.muon.lr_scale
    muon = Muon(groups or [{"params": []}], config.lr, config.weight_decay, config.muon, world)
    adamw_parameters = [parameter for parameter in trained if parameter.value not in muon_parameters]
    return JointOptimizer([muon, _make_adamw(model, adamw_parameters, config)] if adamw_parameters else [muon])


def _make_sgd(trained: Sequence[TrainedParameter], config: OptimConfig) -> torch.optim.Optimizer:
    optimizer_class: type[torch.optim.SGD] = torch.optim.SGD
    if _has_shards(trained):
        from hpc_train.parallel.optimizers.sharded import ShardedSGD

        optimizer_class = ShardedSGD
    return optimizer_class(
        make_groups(trained, config),
        lr=config.lr,
        momentum=config.sgd.momentum,
        nesterov=config.sgd.nesterov,
        **_choose_implementation(config.implementation, trained[0].value.device),
    )


def _make_adafactor(trained: Sequence[TrainedParameter], config: OptimConfig) -> torch.optim.Optimizer:
    if _has_shards(trained):
        from hpc_train.parallel.optimizers.adafactor import ShardedAdafactor

        return ShardedAdafactor(make_groups(trained, config), config.lr, config.adafactor)
    return torch.optim.Adafactor(
        make_groups(trained, config),
        lr=config.lr,
        beta2_decay=config.adafactor.beta2_decay,
        d=config.adafactor.clip_threshold,
        foreach=False,
    )


def _make_user_optimizer(trained: list[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """Call the registered optimizer with the parameters of this rank, the peak rate and the user's arguments."""
    factory = OPTIMIZERS.find(config.name, config.module, BUILT_IN)
    optimizer = OPTIMIZERS.call(config.name, factory, config.args, trained, lr=config.lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optim.name={config.name}: returned a {type(optimizer).__name__}; return a torch.optim.Optimizer"
        )
    return optimizer


def _has_shards(trained: Sequence[TrainedParameter]) -> bool:
    return any(isinstance(parameter.value, DTensor) for parameter in trained)


def _choose_implementation(name: str, device: torch.device) -> dict[str, bool]:
    if name == "auto":
        name = "fused" if device.type in ("cpu", "cuda") else "foreach"
    return {"fused": name == "fused", "foreach": name == "foreach"}


def scale_peak_rate(config: OptimConfig, global_batch: int) -> float:
    """Scale optim.lr from the batch it was tuned at to this one.

    linear: Goyal et al. 2017 (arXiv:1706.02677); sqrt: Krizhevsky 2014 (arXiv:1404.5997).
    """
    if config.lr_scaling == "none":
        return config.lr
    assert config.base_batch is not None
    ratio = global_batch / config.base_batch
    return config.lr * (ratio if config.lr_scaling == "linear" else math.sqrt(ratio))


def find_learning_rate_problem(config: RunConfig) -> str | None:
    """Return a warning if trained weights are about to be trained further at the default for random ones."""
    if config.optim.lr != OptimConfig().lr:
        return None
    suggestion = (
        "1e-5 to 5e-5 (optim.lr=2e-5)" if config.adapter.kind == "none" else "2e-4 with adapters (optim.lr=2e-4)"
    )
    return (
        f"warning: optim.lr={config.optim.lr:g} is the default for random weights and tends to destroy trained ones; "
        f"fine-tuning usually takes {suggestion}"
    )


def compute_learning_rate(config: ScheduleConfig, peak: float, step: int, steps: int) -> float:
    """Return the learning rate of update `step` (0-based) of `steps`: linear warm-up, then the named decay.

    The first update already has peak / warmup_steps, the last one min_ratio * peak (constant: peak).
    """
    warmup = min(config.warmup_steps, steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (config.min_ratio + (1 - config.min_ratio) * _compute_decay(config, step, warmup, steps))


def _compute_decay(config: ScheduleConfig, step: int, warmup: int, steps: int) -> float:
    """Return the decay factor: 1 at the end of the warm-up, 0 at the last update."""
    if config.name == "constant":
        return 1.0
    start = warmup
    if config.name == "wsd":
        start = max(warmup, steps - round(steps * config.decay_fraction))
        if step < start:
            return 1.0
    done = (step - start + 1) / max(steps - start, 1)
    return 0.5 * (1 + math.cos(math.pi * done)) if config.name == "cosine" else 1 - done


def make_schedule(config: OptimConfig, peak: float, steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the update (0-based): a built-in schedule, or the user's own.

    A registered schedule is called as function(step, steps, **args) and returns a factor of the peak. It is a function
    of the step alone, so that a resumed run needs no state of it. Raises UserError for a factor that is not a number.
    """
    schedule = config.schedule
    if schedule.name in SCHEDULES:
        return lambda step: compute_learning_rate(schedule, peak, step, steps)
    user_schedule = components.SCHEDULES.find(schedule.name, config.module, SCHEDULES)

    def compute_rate(step: int) -> float:
        factor = components.SCHEDULES.call(schedule.name, user_schedule, schedule.args, step, steps)
        if not isinstance(factor, (int, float)) or not math.isfinite(factor) or factor < 0:
            raise UserError(
                f"optim.schedule.name={schedule.name}: returned {factor!r} for step {step}; return a factor of "
                "optim.lr, 0 or more"
            )
        return peak * factor

    compute_rate(0)  # mistakes show before the first step
    return compute_rate


def seed_step(seed: int, step: int, index: int) -> None:
    """Seed every generator that a model may draw from (dropout, say) for one step of one share of the batch."""
    words = np.random.SeedSequence([seed, step, index]).generate_state(2, np.uint64)
    # Not torch.manual_seed: it reaches for every GPU, and where there is none keeps a stack trace of each call.
    torch.random.default_generator.manual_seed(int(words[0]))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(int(words[0]))
    np.random.seed(int(words[1]) & 0xFFFFFFFF)  # users' modules may draw from the legacy generator
    random.seed(int(words[1]))


def require_determinism() -> None:
    """Make torch refuse operations that are not reproducible bit by bit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses every matrix product on a GPU
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
