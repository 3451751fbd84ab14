"""Initial values depend on the seed and on names, and on nothing else."""

import math
from dataclasses import replace

import pytest
import torch
from model_shapes import GPT2, LLAMA, VIT, drawn
from torch import nn

from hpc_train.config.model import ModelConfig
from hpc_train.errors import UserError
from hpc_train.models import initial_values
from hpc_train.models.initial_values import ZEROS, Normal, Region, draw_values, initialise_parameters
from hpc_train.models.registry import build_model


@pytest.mark.parametrize("config", [LLAMA, GPT2, VIT], ids=lambda config: config.name)
def test_a_stage_draws_what_the_whole_model_draws(config: ModelConfig) -> None:
    whole = drawn(config)
    for names in (["layers.0"], ["layers.1"], ["layers.2"]):
        stage = whole.stage(names).to_empty(device="cpu")
        initialise_parameters(stage, 0)
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name))


@pytest.mark.parametrize("config", [LLAMA, GPT2, VIT], ids=lambda config: config.name)
def test_the_seed_and_the_name_decide(config: ModelConfig) -> None:
    first, again, other = drawn(config), drawn(config), drawn(config, seed=1)
    matrices = [name for name, parameter in first.named_parameters() if parameter.ndim > 1]
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert torch.equal(parameter, other.get_parameter(name)) == (name not in matrices)
    assert len({first.get_parameter(name).flatten()[0].item() for name in matrices}) == len(matrices)


def test_values_are_the_same_in_every_dtype() -> None:
    wide, narrow = drawn(LLAMA, torch.float64), drawn(LLAMA, torch.float32)
    for name, parameter in narrow.named_parameters():
        assert torch.equal(parameter.double(), wide.get_parameter(name))


def test_standard_deviations_are_those_of_gpt2() -> None:
    model = drawn(replace(GPT2, hidden=256, feed_forward=1024, init_std=0.02, layers=2))
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        if last == "bias":
            assert parameter.count_nonzero() == 0
        elif module.endswith("norm"):
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            expected = 0.01 if module.endswith(("attention.o", "feed_forward.down")) else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel())


@pytest.mark.parametrize("shape", [(10,), (10, 7), (3, 5, 4), (1, 9), ()])
def test_any_rectangle_is_cut_from_the_same_values(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_values, "CHUNK_ELEMENTS", 20)  # several chunks, not all of them full
    rule = Normal(0.0, 1.0)
    everything = draw_values(rule, 3, "w", shape, (0,) * len(shape), shape)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        corners = [sorted(torch.randint(size + 1, (2,), generator=generator).tolist()) for size in shape]
        offset, size = tuple(low for low, _ in corners), tuple(high - low for low, high in corners)
        expected = everything[tuple(slice(low, high) for low, high in corners)]
        assert torch.equal(draw_values(rule, 3, "w", shape, offset, size), expected)


def test_chunks_differ_from_one_another() -> None:
    rows = draw_values(Normal(0.0, 1.0), 0, "w", (5, initial_values.CHUNK_ELEMENTS), (0, 0), (5, 8))
    assert len({row[0].item() for row in rows}) == 5


def test_a_shard_is_filled_through_its_region() -> None:
    whole, shard = drawn(LLAMA), build_model(LLAMA).double()
    columns = {
        id(parameter): name for name, parameter in shard.named_parameters() if name.endswith("attention.o.weight")
    }

    def right_half(parameter: torch.Tensor) -> list[Region]:
        if id(parameter) not in columns:
            return initial_values.get_whole_region(parameter)
        half = parameter.shape[1] // 2
        return [Region(tuple(parameter.shape), (0, half), parameter.detach()[:, half:])]

    before = {name: shard.get_parameter(name).clone() for name in columns.values()}
    initialise_parameters(shard, 0, right_half)
    for name, parameter in shard.named_parameters():
        half = parameter.shape[-1] // 2
        expected = whole.get_parameter(name)
        if name in before:
            expected = torch.cat((before[name][:, :half], expected[:, half:]), dim=1)
        assert torch.equal(parameter, expected)


def test_constants_are_not_drawn() -> None:
    assert torch.equal(draw_values(ZEROS, 0, "b", (4,), (1,), (2,)), torch.zeros(2))


def test_a_module_without_a_rule_keeps_its_values() -> None:
    module = nn.Linear(3, 3)
    before = module.weight.clone()
    initialise_parameters(module, 0)
    assert torch.equal(module.weight, before)


def test_a_module_without_a_rule_on_meta_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"^Linear\.weight: on the meta device, .* init_rule\(name\)$"):
        initialise_parameters(nn.Linear(3, 3, device="meta"), 0)
