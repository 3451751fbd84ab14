"""The command that runs a candidate: what the planner was asked with, and what it has chosen."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hpc_train.planner.candidate import Candidate
from hpc_train.planner.settings import overrides_of

_PLANNERS = ("parallel.auto", "parallel.fixed")
"""Keys that only say that the planner is to choose."""


def words_of(overrides: Sequence[str], config_dir: str | None, candidate: Candidate) -> list[str]:
    """Words of the command, not quoted: the whole run, so that composing it gives the candidate's configuration.

    overrides: of `hpc-train plan`. What the candidate sets replaces what was given for the same key; what tells the
    planner to choose is left out.
    """
    own = overrides_of(candidate.settings)
    keys = {_key(word) for word in own} | set(_PLANNERS)
    given = [word for word in overrides if _key(word) not in keys and word != "parallel=auto"]
    folder = ["--config-dir", config_dir] if config_dir else []
    return ["hpc-train", _program(overrides, candidate), *folder, *given, *own]


def command_of(overrides: Sequence[str], config_dir: str | None, candidate: Candidate) -> str:
    """One line for a shell."""
    return shlex.join(words_of(overrides, config_dir, candidate))


def _program(overrides: Sequence[str], candidate: Candidate) -> str:
    """submit for a cluster, which chooses launch=slurm by itself; train for this machine."""
    local = candidate.config.cluster.name == "local" or "launch" in {_key(word) for word in overrides}
    return "train" if local and candidate.config.launch.kind == "local" else "submit"


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
