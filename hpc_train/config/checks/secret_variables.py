"""Tell which environment variables look like secrets, and keep them out of configurations and of logs.

A configuration is printed, written to config.yaml and job.json, and copied into checkpoints' metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

_SECRET = re.compile(
    r"TOKEN(?!I[SZ])|SECRET|PASSW|PASSPHRASE|PASS$|_PWD$|CREDENTIAL|API_?KEY|ACCESS_?KEY|_KEY$|^KEY$|PRIVATE|COOKIE",
    re.IGNORECASE,
)
"""Names that look like secrets; a tokenizer does not."""
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/@]+@")
"""User and password in an address."""
_SHORTEST_MASKED = 6
"""Shorter values are words such as `true`, which say nothing."""
_MASK = "***"
_ANY: Any = object()


class SecretVariableError(ValueError):
    """Raised when a configuration reads a variable that looks like a secret."""


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name looks like it holds a secret."""
    return _SECRET.search(name) is not None


def mask_secrets(text: str, variables: Mapping[str, str]) -> str:
    """Replace what looks like a secret: values of such variables, and user and password in addresses."""
    lines = [line.strip() for name, value in variables.items() if is_secret_name(name) for line in value.splitlines()]
    for line in sorted(filter(lambda line: len(line) >= _SHORTEST_MASKED, lines), key=len, reverse=True):
        text = text.replace(line, _MASK)
    return _IN_ADDRESS.sub(f"{_MASK}@", text)


@contextmanager
def refuse_secret_variables() -> Iterator[None]:
    """Inside this context, `${oc.env:NAME}` raises SecretVariableError if NAME looks like a secret, set or not.

    This holds for nested references, references with a default, and names that are put together. Do not nest this
    context.
    """
    OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _read_variable(name: str, default: Any = _ANY) -> Any:
    """Read a variable like OmegaConf's own `oc.env`."""
    if is_secret_name(str(name)):
        raise SecretVariableError(
            f"${{oc.env:{name}}} looks like a secret, and what a configuration says is printed and written to files; "
            "leave it out, read the variable in your own code, and name it in launch.export for jobs of Slurm"
        )
    return oc.env(name) if default is _ANY else oc.env(name, default)
