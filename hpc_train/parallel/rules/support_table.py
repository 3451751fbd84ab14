"""The table of techniques in docs/parallelism.md: one row answers what a user asks before turning a technique on.

    option    How do I turn it on?
    done_by   Which library or code does the work?
    numbers   Are the results those of one device?
    needs     Which other settings does it require or exclude?
    proof     Which test shows that?

A new technique is a new row in a file of support_rows/. tests/parallel/test_support_table.py composes every option, and
test_compile.py trains it.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpc_train.parallel.rules.support_rows.layouts import (
    DATA_PARALLEL,
    EXPERT_PARALLEL_AND_COMBINATIONS,
    PIPELINE,
    TENSOR_AND_CONTEXT_PARALLEL,
)
from hpc_train.parallel.rules.support_rows.model_kinds import ADAPTERS, MODELS
from hpc_train.parallel.rules.support_rows.step_techniques import (
    MEMORY_AND_COMPILATION,
    OPTIMIZERS,
    PRECISION,
    RANDOMNESS_AND_STATISTICS,
)
from hpc_train.parallel.rules.support_rows.synchronisation import DDP_OPTIONS, LOOSE_SYNCHRONISATION, PARAMETER_SERVERS
from hpc_train.parallel.rules.support_rows.technique import Technique

SUPPORT_TABLE: tuple[Technique, ...] = (
    *DATA_PARALLEL,
    *TENSOR_AND_CONTEXT_PARALLEL,
    *PIPELINE,
    *MODELS,
    *EXPERT_PARALLEL_AND_COMBINATIONS,
    *ADAPTERS,
    *MEMORY_AND_COMPILATION,
    *OPTIMIZERS,
    *PRECISION,
    *RANDOMNESS_AND_STATISTICS,
    *DDP_OPTIONS,
    *LOOSE_SYNCHRONISATION,
    *PARAMETER_SERVERS,
)
"""Every technique that exists, in the order of the page."""


def format_support_table() -> str:
    """Format the table as Markdown, for docs/parallelism.md."""
    lines = [_format_row(("technique", "options", "done by", "numbers", "needs", "proof")), _format_row(["---"] * 6)]
    for row in SUPPORT_TABLE:
        proof = f"[{row.proof.rpartition('/')[2]}](../{row.proof})"
        lines.append(_format_row((row.name, f"`{row.option}`", row.done_by, row.numbers, row.needs, proof)))
    return "\n".join(lines) + "\n"


def _format_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
