"""Parameter servers: what each of them holds, dealt out as in a run."""

from __future__ import annotations

from torch import nn

from hpc_train.config.run import RunConfig
from hpc_train.parallel.server.layout import shares
from hpc_train.planner.rehearsal.closed_form import state_bytes


def server_bytes(config: RunConfig, model: nn.Module) -> tuple[int, ...]:
    """Bytes of each share: parameters and their optimizer state. Empty without servers."""
    server = config.parallel.server
    if server.mode not in ("synchronous", "asynchronous"):
        return ()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    kept = 8 if config.precision.name == "fp64" else 4
    dealt = shares(trained, server.servers)
    return tuple(kept * _numbers(share) + state_bytes(_numbers(share), len(share), kept) for share in dealt)


def _numbers(share: list[tuple[str, nn.Parameter]]) -> int:
    return sum(parameter.numel() for _, parameter in share)
