"""Lints of the batch and its learning rate."""

from __future__ import annotations

from hpc_train.config.model import TransformerConfig
from hpc_train.planner.advice.facts import Advice, RunFacts
from hpc_train.planner.model.batch_laws import (
    CRITICAL_BATCH_FACTOR,
    critical_batch,
    loss_factor,
    scaling_rule,
    step_law_rate,
)

_LAW_TOKENS = 1e9
"""Tokens of the smallest runs that the laws were fitted on, below which they say nothing."""
_LAW_PARAMETERS = 5e7
"""The same of parameters."""
_RATE_OFF = 5.0
"""Times the law's learning rate, or a part of it, that is worth a word."""
_WARM = 0.001
"""Share of the steps that a warm-up has at least where the rate was scaled; GPT-3 had 0.125 % of its tokens (Brown et
al. 2020, arXiv:2005.14165, appendix B), Goyal et al. 5.6 % of their epochs (arXiv:1706.02677)."""


def check_critical_batch(facts: RunFacts) -> Advice | None:
    """global_batch past the critical batch size."""
    batch, tokens, plan = facts.tokens_per_step, facts.tokens, facts.config.plan
    if batch is None or (plan.critical_batch_tokens is None and (tokens is None or tokens < _LAW_TOKENS)):
        return None
    critical = plan.critical_batch_tokens or critical_batch(tokens or 0.0)
    if batch <= CRITICAL_BATCH_FACTOR * critical:
        return None
    measured = "measured" if plan.critical_batch_tokens else f"0.58 D^0.571 at {tokens:.3g} tokens"
    why = (
        f"{batch:.3g} tokens a step are {batch / critical:.1f} times the critical batch ({critical:.3g}, {measured}): "
        f"the same loss takes {loss_factor(batch, critical) / 2:.1f} times the tokens that it takes there"
    )
    sequences = max(1, int(CRITICAL_BATCH_FACTOR * critical / facts.config.train.sequence_length))
    fix = f"train.global_batch={sequences} or less; train.noise_scale.every measures it; fewer GPUs, or more tp and pp"
    return Advice("train.global_batch", why, fix, "warning")


def check_scaling_warmup(facts: RunFacts) -> Advice | None:
    """A learning rate that was scaled up for the batch, with no warm-up to speak of."""
    optim, train = facts.config.optim, facts.config.train
    steps = _steps(facts)
    if optim.lr_scaling == "none" or optim.base_batch is None or train.global_batch <= optim.base_batch:
        return None
    warm, least = optim.schedule.warmup_steps, max(1, round(_WARM * (steps or 0)))
    if warm >= least:
        return None
    why = (
        f"the rate is scaled ({optim.lr_scaling}) for {train.global_batch / optim.base_batch:g} times the batch, with "
        f"{warm} steps of warm-up: the rules hold after one only (Goyal et al. 2017, arXiv:1706.02677, section 2.2)"
    )
    return Advice("optim.schedule.warmup_steps", why, f"optim.schedule.warmup_steps={max(100, least)}", "warning")


def check_scaling_rule(facts: RunFacts) -> Advice | None:
    """The linear rule with Adam."""
    optim = facts.config.optim
    rule = scaling_rule(optim.name)
    if optim.lr_scaling in ("none", rule):
        return None
    why = (
        f"{optim.lr_scaling} scaling is SGD's rule; {optim.name} goes by {rule} (Malladi et al. 2022, arXiv:2205.10287)"
    )
    return Advice("optim.lr_scaling", why, f"optim.lr_scaling={rule}", "warning")


def check_warmup(facts: RunFacts) -> Advice | None:
    """No warm-up at all: Adam's second moments are wrong at first."""
    optim = facts.config.optim
    if optim.schedule.warmup_steps or optim.lr_scaling != "none":
        return None
    why = (
        f"{optim.name} without warm-up: noise sets the length of its first steps (Ma and Yarats 2019, arXiv:1910.04209)"
    )
    return Advice("optim.schedule.warmup_steps", why, "optim.schedule.warmup_steps=100 or more", "hint")


def check_learning_rate(facts: RunFacts) -> Advice | None:
    """A peak learning rate far from the Step Law's."""
    job, tokens, optim = facts.figures.job, facts.tokens, facts.config.optim
    model = facts.transformer
    if job is None or tokens is None or tokens < _LAW_TOKENS or model is None:
        return None
    parameters = job.parameters - _tables(model)
    if parameters < _LAW_PARAMETERS or tokens < parameters:
        return None
    law = step_law_rate(parameters, tokens)
    ratio = optim.lr / law
    if 1 / _RATE_OFF <= ratio <= _RATE_OFF:
        return None
    why = f"a rate of {optim.lr:.2g} is {ratio:.2g} times the Step Law's {law:.2g} for {parameters:.3g} parameters"
    fix = f"try optim.lr={law:.1g} on a small run first (Li et al. 2025, arXiv:2503.04715)"
    return Advice("optim.lr", why, fix, "hint")


def _tables(model: TransformerConfig) -> float:
    return model.vocab_size * model.hidden * (1 if model.tied_embeddings else 2)


def _steps(facts: RunFacts) -> float | None:
    if facts.config.plan.tokens is not None and facts.tokens_per_step:
        return facts.config.plan.tokens / facts.tokens_per_step
    return facts.config.train.steps
