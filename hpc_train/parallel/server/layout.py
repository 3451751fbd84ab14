"""Parameters and optimizer state of one share of a model, as views of one buffer that can be sent as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hpc_train.parallel.pieces import prime

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
_ALIGNMENT = 64


class Share:
    """The parameters that one server holds, their optimizer and its state.

    The parameters come first in the buffer, one after the other without gaps, so that a flat gradient fits them.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], make_optimizer: MakeOptimizer) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [nn.Parameter(p.detach().clone()) for _, p in parameters]
        self.optimizer = make_optimizer(nn.ParameterList(self.parameters))
        prime(self.optimizer)
        assert len({p.dtype for p in self.parameters}) <= 1, "parameters of one share have one dtype"
        self.parameter_bytes = sum(_bytes(p) for p in self.parameters)
        self.bytes = _up(self.parameter_bytes) + sum(_up(_bytes(value)) for _, _, value in self._state())

    def bind(self, buffer: Tensor, keep: bool) -> None:
        """Make every tensor a view of `buffer` (bytes), which keeps what it holds or takes their values."""
        offset = 0
        for parameter in self.parameters:
            parameter.data = _place(parameter.data, buffer, offset, keep)
            offset += _bytes(parameter)
        offset = _up(offset)
        for parameter, key, value in self._state():
            self.optimizer.state[parameter][key] = _place(value, buffer, offset, keep)
            offset += _up(_bytes(value))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Everything to save, by the names of api.Piece."""
        yield from zip(self.names, self.parameters, strict=True)
        names = dict(zip(self.parameters, self.names, strict=True))
        for parameter, key, value in self._state():
            yield f"optim.{key}.{names[parameter]}", value

    def step(self, gradient: Tensor, lr: float) -> None:
        """One update of the share; gradient: flat, of all parameters in turn."""
        parts = torch.split(gradient, [p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _state(self) -> list[tuple[nn.Parameter, str, Tensor]]:
        return [(p, key, value) for p in self.parameters for key, value in self.optimizer.state[p].items()]


def shares(parameters: Sequence[tuple[str, nn.Parameter]], count: int) -> list[list[tuple[str, nn.Parameter]]]:
    """Whole parameters dealt to `count` servers, the largest first, each to the one that has least."""
    dealt: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(count)]
    loads = [0] * count
    for name, parameter in sorted(parameters, key=lambda item: -item[1].numel()):
        least = loads.index(min(loads))
        dealt[least].append((name, parameter))
        loads[least] += parameter.numel()
    return dealt


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _place(tensor: Tensor, buffer: Tensor, offset: int, keep: bool) -> Tensor:
    view = buffer[offset : offset + _bytes(tensor)].view(tensor.dtype).view(tensor.shape)
    if not keep:
        view.copy_(tensor)
    return view
