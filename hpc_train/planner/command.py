"""Build the command that runs a candidate, from the planner's arguments and its choice."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hpc_train.planner.candidate import Candidate
from hpc_train.planner.settings import overrides_of

_PLANNERS = ("parallel.auto", "parallel.fixed")
"""Keys that only ask the planner to choose."""


def words_of(overrides: Sequence[str], config_dir: str | None, candidate: Candidate) -> list[str]:
    """Return the command's words, unquoted: the whole run, so composing it gives the candidate's configuration.

    overrides: those given to `hpc-train plan`. The candidate's settings replace those given for the same key; keys that
    ask the planner to choose are left out.
    """
    own = overrides_of(candidate.settings)
    keys = {_key(word) for word in own} | set(_PLANNERS)
    given = [word for word in overrides if _key(word) not in keys and word != "parallel=auto"]
    folder = ["--config-dir", config_dir] if config_dir else []
    return ["hpc-train", _program(overrides, candidate), *folder, *given, *own]


def command_of(overrides: Sequence[str], config_dir: str | None, candidate: Candidate) -> str:
    """Return one shell line."""
    return shlex.join(words_of(overrides, config_dir, candidate))


def _program(overrides: Sequence[str], candidate: Candidate) -> str:
    """Return submit for a cluster, which selects launch=slurm by itself; train for this machine."""
    local = candidate.config.cluster.name == "local" or "launch" in {_key(word) for word in overrides}
    return "train" if local and candidate.config.launch.kind == "local" else "submit"


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]
