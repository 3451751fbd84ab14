"""Import once what torch would otherwise load in every forked rank at its first optimizer step, which takes seconds."""

import torch._dynamo  # noqa: F401
