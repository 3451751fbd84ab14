"""The versions of torch that hpc_train is tested with, and the warning about a newer one."""

from __future__ import annotations

from typing import Final

OLDEST_TESTED: Final = (2, 12)
"""The lower bound in pyproject.toml; the quick tests pass on it."""
NEWEST_TESTED: Final = (2, 13)
"""The newest torch that all tests have passed on; docs/testing.md says what newer releases pass.

Newer ones are not refused, because a site's own torch may be the only one that drives its GPUs. But a private API below
may have changed, so `describe_untested_torch` warns."""


def describe_untested_torch(version: str) -> str | None:
    """Return one line of warning for a torch newer than the newest tested one; None for a tested version."""
    if release_numbers(version) <= NEWEST_TESTED:
        return None
    newest = ".".join(map(str, NEWEST_TESTED))
    return (
        f"torch {version} is newer than {newest}, the newest that hpc_train is tested with, and hpc_train uses private "
        f"APIs of torch; if something fails, try pip install 'torch=={newest}.*'"
    )


def release_numbers(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version, such as (2, 13) of 2.13.0+cpu or of 2.13.0a0+git1234."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)
