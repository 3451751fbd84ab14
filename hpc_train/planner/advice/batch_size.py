"""Lints of the global batch and the learning rate.

A lint is a function from RunFacts to one Advice or None; lints.LINTS lists them all, in the order of printing.
"""

from __future__ import annotations

from hpc_train.config.model import TransformerConfig
from hpc_train.planner.advice.facts import Advice, RunFacts
from hpc_train.planner.batch_laws import (
    CRITICAL_BATCH_FACTOR,
    critical_batch,
    loss_factor,
    scaling_rule,
    step_law_rate,
)

_LAW_TOKENS = 1e9
"""Tokens of the smallest runs that the scaling laws were fitted on. Below, the laws do not apply."""
_LAW_PARAMETERS = 5e7
"""Parameters of the smallest models that the scaling laws were fitted on."""
_RATE_FACTOR = 5.0
"""A learning rate this many times larger or smaller than the law's is reported."""
_LEAST_WARMUP = 0.001
"""Smallest share of the steps spent in warm-up when the learning rate was scaled. GPT-3 warmed up for 0.125 % of its
tokens (Brown et al. 2020, arXiv:2005.14165, appendix B), Goyal et al. for 5.6 % of their epochs (arXiv:1706.02677)."""


def check_critical_batch(facts: RunFacts) -> Advice | None:
    """Report a global batch larger than the critical batch size."""
    batch, tokens, plan = facts.tokens_per_step, facts.tokens, facts.config.plan
    if batch is None or (plan.critical_batch_tokens is None and (tokens is None or tokens < _LAW_TOKENS)):
        return None
    critical = plan.critical_batch_tokens or critical_batch(tokens or 0.0)
    if batch <= CRITICAL_BATCH_FACTOR * critical:
        return None
    measured = "measured" if plan.critical_batch_tokens else f"0.58 D^0.571 at {tokens:.3g} tokens"
    why = (
        f"{batch:.3g} tokens per step are {batch / critical:.1f} times the critical batch ({critical:.3g}, "
        f"{measured}): the same loss takes {loss_factor(batch, critical) / 2:.1f} times as many tokens as at the "
        f"critical batch"
    )
    sequences = max(1, int(CRITICAL_BATCH_FACTOR * critical / facts.config.train.sequence_length))
    fix = f"train.global_batch={sequences} or less; train.noise_scale.every measures it; fewer GPUs, or more tp and pp"
    return Advice("train.global_batch", why, fix, "warning")


def check_scaling_warmup(facts: RunFacts) -> Advice | None:
    """Report a learning rate that is scaled up for the batch but has almost no warm-up."""
    optim, train = facts.config.optim, facts.config.train
    steps = _count_planned_steps(facts)
    if optim.lr_scaling == "none" or optim.base_batch is None or train.global_batch <= optim.base_batch:
        return None
    warm, least = optim.schedule.warmup_steps, max(1, round(_LEAST_WARMUP * (steps or 0)))
    if warm >= least:
        return None
    why = (
        f"optim.lr is scaled ({optim.lr_scaling}) for {train.global_batch / optim.base_batch:g} times the batch, with "
        f"{warm} steps of warm-up: scaling rules hold only after a warm-up (Goyal et al. 2017, arXiv:1706.02677, 2.2)"
    )
    return Advice("optim.schedule.warmup_steps", why, f"optim.schedule.warmup_steps={max(100, least)}", "warning")


def check_scaling_rule(facts: RunFacts) -> Advice | None:
    """Report a scaling rule that does not fit the optimizer, such as the linear rule with Adam."""
    optim = facts.config.optim
    rule = scaling_rule(optim.name)
    if optim.lr_scaling in ("none", rule):
        return None
    why = (
        f"{optim.lr_scaling} scaling is for SGD; for {optim.name} it is {rule} (Malladi et al. 2022, arXiv:2205.10287)"
    )
    return Advice("optim.lr_scaling", why, f"optim.lr_scaling={rule}", "warning")


def check_warmup(facts: RunFacts) -> Advice | None:
    """Report a run without warm-up: Adam's second moments are inaccurate in the first steps."""
    optim = facts.config.optim
    if optim.schedule.warmup_steps or optim.lr_scaling != "none":
        return None
    why = (
        f"{optim.name} without warm-up: noise decides how large its first updates are (Ma and Yarats 2019, "
        "arXiv:1910.04209)"
    )
    return Advice("optim.schedule.warmup_steps", why, "optim.schedule.warmup_steps=100 or more", "hint")


def check_learning_rate(facts: RunFacts) -> Advice | None:
    """Report a peak learning rate far from what the Step Law recommends."""
    job, tokens, optim = facts.figures.job, facts.tokens, facts.config.optim
    model = facts.transformer
    if job is None or tokens is None or tokens < _LAW_TOKENS or model is None:
        return None
    parameters = job.parameters - _count_embedding_parameters(model)
    if parameters < _LAW_PARAMETERS or tokens < parameters:
        return None
    law = step_law_rate(parameters, tokens)
    ratio = optim.lr / law
    if 1 / _RATE_FACTOR <= ratio <= _RATE_FACTOR:
        return None
    why = f"optim.lr={optim.lr:.2g} is {ratio:.2g} times the Step Law's {law:.2g} for {parameters:.3g} parameters"
    fix = f"try optim.lr={law:.1g} on a small run first (Li et al. 2025, arXiv:2503.04715)"
    return Advice("optim.lr", why, fix, "hint")


def _count_embedding_parameters(model: TransformerConfig) -> float:
    """Count the parameters of embedding and head, which the Step Law leaves out."""
    return model.vocab_size * model.hidden * (1 if model.tied_embeddings else 2)


def _count_planned_steps(facts: RunFacts) -> float | None:
    if facts.config.plan.tokens is not None and facts.tokens_per_step:
        return facts.config.plan.tokens / facts.tokens_per_step
    return facts.config.train.steps
