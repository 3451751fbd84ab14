"""The summed loss of any model: its own `loss_sum`, or cross entropy for a bare module and for split logits."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.models.loss import cross_entropy_sum
from hpc_train.models.transformer import Transformer
from hpc_train.models.vit import VisionTransformer
from hpc_train.parallel.tensor.vocab_loss import split_cross_entropy_sum
from hpc_train.parallel.user_model import check_loss, check_output


def loss_sum(model: nn.Module, out: Tensor, target: Tensor) -> Tensor:
    """Sum of the loss over the targets that count. A bare module's output is taken as logits (..., classes).

    A DTensor is taken as logits that are split over their last dimension.
    """
    if isinstance(out, DTensor):
        return split_cross_entropy_sum(out, target)
    own = getattr(model, "loss_sum", cross_entropy_sum)
    result: Tensor = own(out, target)
    return result


def first_loss_sum(model: nn.Module, out: Tensor, target: Tensor) -> Tensor:
    """Compute the loss sum of the first call and check what the model returns. Raises UserError, in one line."""
    if isinstance(out, DTensor) or isinstance(model, (Transformer, VisionTransformer)):
        return loss_sum(model, out, target)
    own = callable(getattr(model, "loss_sum", None))
    if not own:
        check_output(model, out, target)
    loss = loss_sum(model, out, target)
    if own:
        check_loss(model, loss)
    return loss
