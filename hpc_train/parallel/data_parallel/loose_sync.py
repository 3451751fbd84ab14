"""Loose synchronisation: copies of the model train independently and periodically exchange what they have learned.

In addition to its own parameters, every copy has the *anchor*: the parameters after the last exchange, equal on all
copies. An exchange of a fragment of the parameters averages the outer gradients (anchor - own) over the copies. SGD
with Nesterov momentum updates the anchor by this average, and the copy continues from the anchor. With momentum 0 and a
learning rate of 1 this is local SGD, with momentum DiLoCo (Douillard et al. 2023, arXiv:2311.08105), with fragments and
overlap its streaming form (arXiv:2501.18512), where a copy merges the anchor into what it has trained meanwhile.

In order of time, for a fragment that is due after step s:

    s             every copy starts to send its outer gradients: an all-reduce or, compressed, an all-gather
    s + overlap   their mean has arrived: SGD steps the anchor, and the copy continues from it (overlap 0), or from a
                  mean of the anchor and of what it has trained meanwhile, weighted by parallel.sync.merge

When a fragment is exchanged is a function of the step alone, so a resumed run goes on as one that never stopped.
Ranks at the same place of their copies exchange: each sends only the shards, of the stages, that it holds.
Fragments are parts of the whole model, so that they are the same in every layout of a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.parallel import SyncConfig
from hpc_train.errors import UserError
from hpc_train.parallel.data_parallel.copy_group import CopyGroup
from hpc_train.parallel.optimizer_step import get_local
from hpc_train.traffic.outer_exchange import list_exchange_steps

Named = tuple[str, nn.Parameter]


@dataclass
class OuterParameter:
    """A trained parameter of this rank (its shard), and its anchor."""

    name: str
    local: Tensor
    anchor: Tensor
    momentum: Tensor | None
    """None with parallel.sync.outer_momentum=0."""
    delta: Tensor | None = None
    """overlap: the mean outer gradient from the end of an exchange until it is used; 0 otherwise."""


@dataclass
class Fragment:
    """Parameters that are exchanged together."""

    parameters: list[OuterParameter]
    step: int
    """Exchanged after every step that equals this modulo parallel.sync.every."""
    pending: PendingMean | None = None


@dataclass
class PendingMean:
    """A mean over copies that is under way."""

    result: Tensor
    """Outer gradients of a fragment, one after the other, (elements,)."""
    message: Tensor | None
    """Compressed outer gradients of all copies, (copies, bytes)."""
    work: dist.Work | None


class OuterOptimizer:
    """Exchanges outer gradients and steps the anchor; see the module."""

    def __init__(
        self,
        trained: Sequence[Named],
        fragment_of: Mapping[str, int],
        sync: SyncConfig,
        group: dist.ProcessGroup,
        copy_group: CopyGroup | None = None,
    ) -> None:
        """trained: of this rank, the same names in the same order on every copy; those of tied parameters may be twice.

        fragment_of: the number of the fragment of every parameter of the model, by name; see number_fragments.
        group: the ranks that hold copies of these shards. copy_group: used in its place if copies may be lost.
        """
        assert sync.every is not None
        self._sync, self._steps_between, self._group, self._copy_group = sync, sync.every, group, copy_group
        self._copies = dist.get_world_size(group)
        self.parameters = [_make_outer_parameter(name, parameter, sync) for name, parameter in trained]
        parameters_of_fragment: dict[int, list[OuterParameter]] = {}
        for exchanged in self.parameters:
            parameters_of_fragment.setdefault(fragment_of[exchanged.name], []).append(exchanged)
        steps = list_exchange_steps(sync.every, sync.fragments)
        self._fragments = [
            Fragment(parameters_of_fragment[index], step)
            for index, step in enumerate(steps)
            if index in parameters_of_fragment
        ]
        self._sgd = _make_sgd(self.parameters, sync)

    def end_step(self, step: int) -> None:
        """Begin and end the exchanges that are due after `step` updates. A collective if any is."""
        for fragment in self._fragments:
            if self._is_due(fragment, step):
                fragment.pending = self._begin_mean(fragment)
            if self._is_due(fragment, step - self._sync.overlap):
                self._end_exchange(fragment)

    def finish_communication(self) -> None:
        """Wait for the exchanges under way; their results are then in OuterParameter.delta."""
        for fragment in self._fragments:
            self._finish_mean(fragment)

    @contextmanager
    def use_anchors(self) -> Iterator[None]:
        """Let the model compute with the anchors inside; the copy's own parameters are back afterwards."""
        self._swap_anchors()
        try:
            yield
        finally:
            self._swap_anchors()

    @torch.no_grad()
    def start_from_anchors(self) -> None:
        """Give the copy the anchors as its own parameters, as after weights have been loaded into them."""
        for parameter in self.parameters:
            parameter.local.copy_(parameter.anchor)

    def _is_due(self, fragment: Fragment, step: int) -> bool:
        return step > 0 and (step - fragment.step) % self._steps_between == 0

    @torch.no_grad()
    def _begin_mean(self, fragment: Fragment) -> PendingMean:
        delta = torch.cat([(parameter.anchor - parameter.local).flatten() for parameter in fragment.parameters])
        if self._copy_group is not None:
            return self._exchange_at_once(delta, self._copy_group)
        if self._copies == 1 and self._sync.compression == "none":
            return PendingMean(delta, None, None)
        if self._sync.compression == "none":
            return PendingMean(delta, None, dist.all_reduce(delta, group=self._group, async_op=True))
        from hpc_train.parallel.data_parallel.outer_compression import compress_vector

        message = compress_vector(delta, self._sync.compression, self._sync.block)
        all_messages = message.new_empty(self._copies * len(message))
        work = dist.all_gather_into_tensor(all_messages, message, group=self._group, async_op=True)
        return PendingMean(delta, all_messages.view(self._copies, -1), work)

    def _exchange_at_once(self, delta: Tensor, copy_group: CopyGroup) -> PendingMean:
        """Exchange outer gradients, which are given again if a copy is lost meanwhile."""
        if self._sync.compression == "none":
            return PendingMean(copy_group.sum(delta), None, None)
        from hpc_train.parallel.data_parallel.outer_compression import compress_vector

        message = compress_vector(delta, self._sync.compression, self._sync.block)
        return PendingMean(delta, copy_group.gather(message), None)

    @torch.no_grad()
    def _finish_mean(self, fragment: Fragment) -> list[Tensor] | None:
        """Wait for a mean and return it cut into the fragment's parameters; None if none is under way."""
        pending, fragment.pending = fragment.pending, None
        if pending is None:
            return None
        if pending.work is not None:
            pending.work.wait()
        total = pending.result if pending.message is None else self._sum_messages(pending)
        total.div_(self._copies if self._copy_group is None else self._copy_group.counted)
        pieces = torch.split(total, [parameter.local.numel() for parameter in fragment.parameters])
        means = [piece.view_as(parameter.local) for piece, parameter in zip(pieces, fragment.parameters, strict=True)]
        for parameter, mean in zip(fragment.parameters, means, strict=True):
            if parameter.delta is not None:
                parameter.delta.copy_(mean)
        return means

    def _sum_messages(self, pending: PendingMean) -> Tensor:
        """Add up the messages of all copies in the order of copies, which makes the sum bitwise equal on each."""
        from hpc_train.parallel.data_parallel.outer_compression import decompress_vector

        assert pending.message is not None
        total, sync = torch.zeros_like(pending.result), self._sync
        for message in pending.message:
            total += decompress_vector(message, len(total), sync.compression, sync.block)
        return total

    @torch.no_grad()
    def _end_exchange(self, fragment: Fragment) -> None:
        """Step the anchors of a fragment and hand them to the copy."""
        means = self._finish_mean(fragment)
        if means is None:  # finished for a save, or loaded from one
            means = [parameter.delta for parameter in fragment.parameters if parameter.delta is not None]
        for parameter, mean in zip(fragment.parameters, means, strict=True):
            parameter.anchor.grad = mean
        self._sgd.step()
        keep = self._sync.merge if self._sync.overlap else 0.0
        for parameter in fragment.parameters:
            parameter.anchor.grad = None  # the other fragments' steps leave these anchors as they are
            if keep:
                parameter.local.mul_(keep).add_(parameter.anchor, alpha=1 - keep)
            else:
                parameter.local.copy_(parameter.anchor)
            if parameter.delta is not None:
                parameter.delta.zero_()

    @torch.no_grad()
    def _swap_anchors(self) -> None:
        for parameter in self.parameters:
            trained = parameter.local.clone()
            parameter.local.copy_(parameter.anchor)
            parameter.anchor.copy_(trained)


def number_fragments(trained: Iterable[Named], count: int) -> dict[str, int]:
    """Number the fragment of each parameter of the whole model, from 0. Raises UserError as cut_fragments."""
    sizes = {name: parameter.numel() for name, parameter in trained}
    names, cuts = list(sizes), cut_fragments(list(sizes.values()), count)
    return {name: index for index, part in enumerate(cuts) for name in names[part]}


def cut_fragments(sizes: Sequence[int], count: int) -> list[slice]:
    """Cut a list of parameters into `count` parts of about equal size, each of one parameter at least.

    sizes: elements of each. Raises UserError for more parts than parameters.
    """
    if count > len(sizes):
        raise UserError(
            f"parallel.sync.fragments={count}: the model trains {len(sizes)} tensors; use {len(sizes)} at most"
        )
    total, begin, elements_before, cuts = sum(sizes), 0, 0, []
    for index in range(count):
        end, goal = begin + 1, total * (index + 1) / count
        elements_before += sizes[begin]
        while end < len(sizes) - (count - index - 1) and (
            index == count - 1 or elements_before + sizes[end] / 2 <= goal
        ):
            elements_before += sizes[end]
            end += 1
        cuts.append(slice(begin, end))
        begin = end
    return cuts


def _make_outer_parameter(name: str, parameter: nn.Parameter, sync: SyncConfig) -> OuterParameter:
    local = get_local(parameter).detach()
    momentum = torch.zeros_like(local) if sync.outer_momentum else None
    return OuterParameter(name, local, local.clone(), momentum, torch.zeros_like(local) if sync.overlap else None)


def _make_sgd(parameters: Sequence[OuterParameter], sync: SyncConfig) -> torch.optim.SGD:
    """Make torch's SGD over the anchors. Its momentum exists from the beginning, as 0, so that it can be saved."""
    momentum = sync.outer_momentum
    sgd = torch.optim.SGD(
        [parameter.anchor for parameter in parameters], lr=sync.outer_lr, momentum=momentum, nesterov=momentum > 0
    )
    for parameter in parameters:
        if parameter.momentum is not None:
            sgd.state[parameter.anchor]["momentum_buffer"] = parameter.momentum
    return sgd
