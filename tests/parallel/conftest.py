"""Imported once here and not by every forked rank: torch loads it at the first optimizer step, which takes seconds."""

import torch._dynamo  # noqa: F401
