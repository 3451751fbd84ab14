"""Which variables of the environment look like secrets, and how a configuration is kept from reading them.

A configuration is printed, written to config.yaml and job.json, and copied into checkpoints' metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

_SECRET = re.compile(
    r"TOKEN(?!I[SZ])|SECRET|PASSW|PASSPHRASE|PASS$|_PWD$|CREDENTIAL|API_?KEY|ACCESS_?KEY|_KEY$|^KEY$|PRIVATE|COOKIE",
    re.IGNORECASE,
)
"""A tokenizer is none."""
_ANY: Any = object()


class SecretVariableError(ValueError):
    """A configuration names a variable that looks like a secret."""


def is_secret(name: str) -> bool:
    """Whether a variable of this name looks as if its value were secret."""
    return _SECRET.search(name) is not None


@contextmanager
def refusing_secrets() -> Iterator[None]:
    """Within, `${oc.env:NAME}` raises SecretVariableError where NAME looks like a secret, set or not.

    However it is written: nested in others, with a default, or with a name that is put together. Not to be nested.
    """
    OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _read_variable(name: str, default: Any = _ANY) -> Any:
    """As OmegaConf's own `oc.env`."""
    if is_secret(str(name)):
        raise SecretVariableError(
            f"${{oc.env:{name}}} looks like a secret, and what a configuration says is printed and written to files; "
            "leave it out, read the variable in your own code, and name it in launch.export for jobs of Slurm"
        )
    return oc.env(name) if default is _ANY else oc.env(name, default)
