"""AdamW: what is decayed, that its implementations agree, and a model with nothing to train."""

import copy

import pytest
import torch
from torch import nn

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4)).double()


def test_matrices_decay_and_vectors_do_not() -> None:
    model = _model()
    decay = {
        id(parameter): group["weight_decay"]
        for group in make_optimizer(model, compose(["optim.weight_decay=0.3"]).optim).param_groups
        for parameter in group["params"]
    }
    assert {name: decay[id(parameter)] for name, parameter in model.named_parameters()} == {
        "0.weight": 0.3,
        "1.weight": 0.3,
        "1.bias": 0.0,
        "2.weight": 0.0,
        "2.bias": 0.0,
        "3.weight": 0.3,
        "3.bias": 0.0,
    }


def test_a_frozen_parameter_is_left_out() -> None:
    model = _model()
    model[0].requires_grad_(False)  # type: ignore[index]
    groups = make_optimizer(model, compose().optim).param_groups
    assert sum(len(group["params"]) for group in groups) == 6


def _after_three_steps(model: nn.Module, implementation: str) -> list[torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model, compose([f"optim.implementation={implementation}"]).optim)
    for step in range(3):
        optimizer.zero_grad()
        tokens = torch.arange(step, step + 4)
        model(tokens).square().sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach"])
def test_every_implementation_computes_the_same(implementation: str) -> None:
    for fast, plain in zip(
        _after_three_steps(_model(), implementation), _after_three_steps(_model(), "for_loop"), strict=True
    ):
        assert (fast - plain).norm() <= 1e-12 * plain.norm()


def test_auto_is_fused_on_a_cpu() -> None:
    assert make_optimizer(_model(), compose().optim).defaults["fused"] is True


def test_nothing_to_train_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^model: no parameter requires a gradient; .*$"):
        make_optimizer(_model().requires_grad_(False), compose().optim)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_nothing_to_train_is_the_same_line_on_several_ranks(parallel: str) -> None:
    config = compose([f"parallel={parallel}", "precision=fp64"])

    def attempt(world: World) -> str:
        with pytest.raises(UserError) as caught:
            build(_model().requires_grad_(False), lambda model: make_optimizer(model, config.optim), config, world)
        return str(caught.value)

    lines = run_ranks(attempt, 2, parallel=config.parallel)
    assert lines == ["model: no parameter requires a gradient; there is nothing to train"] * 2


def test_a_scalar_parameter_under_zero3_is_one_line() -> None:
    config = compose(["parallel=fsdp", "precision=fp64"])

    def attempt(world: World) -> str:
        model = _model()
        model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
        with pytest.raises(UserError) as caught:
            build(model, lambda split: make_optimizer(split, config.optim), config, world)
        return str(caught.value)

    (line,) = run_ranks(attempt, 1, parallel=config.parallel)
    assert line.startswith("model: temperature is a scalar")
