"""check_support: the rules of every technique, in the order in which a user would read them."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees, resolve
from hpc_train.config.run import RunConfig
from hpc_train.parallel.support import context, data, gradients, memory, offload, pipeline, server, tensor

RULES = (
    server.check,
    data.check,
    tensor.check,
    pipeline.check,
    context.check,
    gradients.check,
    memory.check,
    offload.check,
)


def check_support(config: RunConfig, world: int) -> Degrees:
    """The degrees of this run on `world` ranks. Raises UserError, saying what would work, if nothing here can do it.

    An option that would have no effect, such as parallel.tensor.asynchronous without tp, is refused too.
    """
    degrees = resolve(config.parallel, world)
    for rule in RULES:
        rule(config, degrees)
    return degrees
