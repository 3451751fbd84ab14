"""AdamW whose two moments are stored in 8 bits (Dettmers et al. 2021, arXiv:2110.02861): a quarter of AdamW's state.

The arithmetic is torchao's: its packed tensor, its table of 256 values and its update. What is stored here is plain,
so that a checkpoint has it as rectangles like any other: for each moment the codes, shaped as the parameter, and a
scale for each block of a row.

torchao cuts the local shard into blocks, wherever that begins. Here blocks are parts of rows of the whole parameter, so
that the same elements share a scale in every layout, and a state fits any other. Matrices whose rows are no multiple of
a block, small ones and vectors keep full moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train._torch.tensors import compile_for_each_shape
from hpc_train.errors import UserError
from hpc_train.parallel.optimizer_step import get_local
from hpc_train.quiet_imports import without_warnings
from hpc_train.traffic.moment_blocks import explain_cut_blocks, is_quantized

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, and whether their table has negative values."""


class QuantizedAdamW(torch.optim.Optimizer):
    """torchao.optim.AdamW8bit with blocks that do not depend on the layout."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        block_size: int,
    ) -> None:
        """names: of the parameters in the model. block_size: elements of a row with one scale.

        Raises UserError without torchao, and if a shard has parts of blocks.
        """
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._adam, self._packed = _import_torchao()
        self._block = block_size
        self._tables: dict[tuple[bool, torch.device], Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._make_state(parameter, names[parameter])

    @property
    def quantizes(self) -> bool:
        """Whether any parameter of this rank has moments in 8 bits."""
        return any(_name_codes("exp_avg") in state for state in self.state.values())

    def _make_state(self, parameter: nn.Parameter, name: str) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.float32)}
        if not is_quantized(parameter.shape, self._block):
            return {**state, **{moment: torch.zeros_like(parameter) for moment in _SIGNED}}
        width = get_local(parameter).shape[-1]
        if width % self._block:
            raise UserError(explain_cut_blocks(name, width, self._block))
        for moment in _SIGNED:
            state[_name_codes(moment)] = _make_zeros(parameter, 1, torch.uint8)
            state[_name_scales(moment)] = _make_zeros(parameter, self._block, torch.float32)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            rate = torch.tensor(group["lr"], dtype=torch.float32)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, rate, group)

    def _update(self, parameter: nn.Parameter, rate: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        values, gradient = get_local(parameter.detach()), get_local(parameter.grad)  # type: ignore[arg-type]
        if values.numel() == 0:  # fewer rows than shards
            return
        moments = [self._pack(state, moment) for moment in _SIGNED]
        # torchao compiles its forty small operations. On a CPU that would need a compiler of C++ on each node.
        update = compile_for_each_shape(self._adam) if values.device.type == "cuda" else self._adam
        beta1, beta2 = group["betas"]
        settings = (beta1, beta2, group["weight_decay"], group["eps"])
        # None: no amsgrad. True: the decay is AdamW's. False: parameters in bfloat16 are rounded to the nearest.
        update(values, gradient.contiguous(), state["step"], *moments, None, rate, *settings, True, False)

    def _pack(self, state: Mapping[str, Tensor], moment: str) -> Tensor:
        """Return a moment as torchao's update takes it; what that writes is written into `state`."""
        if moment in state:
            return get_local(state[moment])
        codes, scales = get_local(state[_name_codes(moment)]), get_local(state[_name_scales(moment)])
        signed = _SIGNED[moment]
        packed: Tensor = self._packed(codes, scales.view(-1), self._find_table(signed, codes.device), signed)
        return packed

    def _find_table(self, signed: bool, device: torch.device) -> Tensor:
        """Return the values that the 256 codes stand for."""
        if (signed, device) not in self._tables:
            self._tables[signed, device] = self._packed.zeros((1, 1), signed, 1, device).qmap
        return self._tables[signed, device]


def _name_codes(moment: str) -> str:
    return f"{moment}_codes"


def _name_scales(moment: str) -> str:
    return f"{moment}_scales"


def _make_zeros(parameter: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return zeros with one entry for each `width` elements of a row, split over ranks as the parameter is."""

    def shrink(size: Sequence[int]) -> list[int]:
        return [*size[:-1], size[-1] // width]

    local = get_local(parameter)
    zeros = torch.zeros(shrink(local.shape), dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    shape = torch.Size(shrink(parameter.shape))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _import_torchao() -> tuple[Callable[..., None], Any]:
    """Return torchao's update of one parameter, and its class of a moment in 8 bits."""
    try:
        with without_warnings():  # of compiled parts for GPUs that are not here
            from torchao.optim.adam import single_param_adam
            from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError:
        raise UserError("optim.state=8bit needs the package torchao: pip install 'hpc_train[float8]'") from None
    return single_param_adam, OptimState8bit
