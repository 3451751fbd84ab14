"""The transformer and the vision transformer as the engines see them: stages, plan, loss, positions, precision."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F
from model_shapes import GPT2, LLAMA, VIT, drawn, load, tokens
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpc_train.config.model import ModelConfig, TransformerConfig
from hpc_train.config.parallel import ParallelConfig
from hpc_train.interfaces import IGNORED_TARGET, Model, World
from hpc_train.models.attention.rotary import apply_rotary, make_rotary_table
from hpc_train.models.transformer import TENSOR_PLAN, Transformer
from hpc_train.models.vision_transformer import TENSOR_PLAN as VIT_PLAN
from hpc_train.testing import run_ranks

TIED = replace(LLAMA, tied_embeddings=True)
MODELS = [LLAMA, TIED, GPT2, VIT]
CUTS = [
    [["layers.0", "layers.1", "layers.2"]],
    [["layers.0"], ["layers.1", "layers.2"]],
    [[f"layers.{i}"] for i in range(3)],
]


def sample(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Inputs and targets for a model."""
    if isinstance(config, TransformerConfig):
        return tokens(config), tokens(config).roll(-1)
    images = torch.randn(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return images, torch.tensor([3, 7])


@pytest.mark.parametrize("config", MODELS, ids=str)
def test_models_keep_the_protocol(config: ModelConfig) -> None:
    model = drawn(config)
    assert isinstance(model, Model)
    assert [model.get_submodule(name) for name in model.blocks()] == list(model.blocks().values())
    assert list(model.blocks()) == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("config", MODELS, ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=len)
def test_stages_in_a_row_are_the_whole_model(config: ModelConfig, cut: list[list[str]]) -> None:
    whole, (x, target) = drawn(config), sample(config)
    stages = [whole.stage(names) for names in cut]
    for stage in stages:
        assert all(parameter.is_meta and parameter.dtype == torch.float64 for parameter in stage.parameters())
        stage.to_empty(device="cpu").load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    held = set().union(*(dict(stage.named_parameters()) for stage in stages))
    assert held == set(dict(whole.named_parameters()))

    expected = whole.loss_sum(whole(x), target)
    expected.backward()
    for stage in stages:
        x = stage(x)
    loss = stages[-1].loss_sum(x, target)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    for name, parameter in whole.named_parameters():
        parts = [
            dict(stage.named_parameters())[name].grad for stage in stages if name in dict(stage.named_parameters())
        ]
        torch.testing.assert_close(sum(parts), parameter.grad, rtol=1e-12, atol=1e-12)


def test_only_a_tied_embedding_is_held_twice() -> None:
    for config in MODELS:
        whole = drawn(config)
        first, last = (dict(whole.stage([name]).named_parameters()) for name in ("layers.0", "layers.2"))
        assert set(first) & set(last) == ({"embed.weight"} if config in (TIED, GPT2) else set())


@pytest.mark.parametrize("names", [[], ["layers.3"], ["layers.1", "layers.0"], ["norm"]])
def test_a_stage_of_unknown_blocks_is_refused(names: list[str]) -> None:
    with pytest.raises(AssertionError):
        drawn(LLAMA).stage(names)


@pytest.mark.parametrize("config", MODELS, ids=str)
def test_every_line_of_a_plan_matches_and_every_linear_layer_of_a_block_is_split(config: ModelConfig) -> None:
    model = drawn(config)
    modules = dict(model.named_modules())
    for glob in model.plan:
        assert any(fnmatchcase(name, glob) for name in modules), glob
    assert set(model.plan) <= set(VIT_PLAN if config is VIT else TENSOR_PLAN)
    for name, module in modules.items():
        if isinstance(module, nn.Linear) and name.startswith("layers."):
            assert sum(fnmatchcase(name, glob) for glob in model.plan) == 1, name
    assert "embed" not in model.stage(["layers.1"]).plan


def _split_attention(world: World) -> tuple[float, int]:
    """A block's tensor parallel loss on this rank, and the heads that its attention saw."""
    model, (x, target) = drawn(LLAMA), sample(LLAMA)
    seen: list[int] = []
    styles = {"col": ColwiseParallel, "row": RowwiseParallel}
    table = {glob: styles[how]() for glob, how in model.plan.items() if how in styles}
    parallelize_module(model, world.mesh["tp"], table)
    assert isinstance(model.get_parameter("layers.0.attention.q.weight"), DTensor)
    core = model.get_submodule("layers.0.attention.core")
    core.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    return model.loss_sum(model(x), target).item(), seen[0]


def test_the_plan_alone_splits_heads_over_ranks() -> None:
    model, (x, target) = drawn(LLAMA), sample(LLAMA)
    expected = model.loss_sum(model(x), target).item()
    for loss, heads in run_ranks(_split_attention, 2, parallel=ParallelConfig(tp=2)):
        assert loss == pytest.approx(expected, rel=1e-13)
        assert heads == 3


def test_loss_is_summed_over_the_targets_that_count() -> None:
    model, (x, target) = drawn(LLAMA), sample(LLAMA)
    target[:, ::3] = IGNORED_TARGET
    logits = model(x)
    counted = target != IGNORED_TARGET
    each = F.cross_entropy(logits[counted], target[counted], reduction="none")
    assert model.loss_sum(logits, target).item() == pytest.approx(each.sum().item(), rel=1e-14)
    assert model.loss_sum(logits, torch.full_like(target, IGNORED_TARGET)).item() == 0.0


def test_loss_is_at_least_float32() -> None:
    model, (x, target) = drawn(LLAMA, torch.bfloat16), sample(LLAMA)
    assert model.loss_sum(model(x), target).dtype == torch.float32
    assert drawn(LLAMA).loss_sum(drawn(LLAMA)(x), target).dtype == torch.float64


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda config: config.name)
def test_a_token_does_not_see_those_after_it(config: TransformerConfig) -> None:
    model, (x, _) = drawn(config), sample(config)
    changed = x.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % config.vocab_size
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=1e-13, atol=1e-13)
    assert (before[:, 20:] - after[:, 20:]).abs().max() > 1e-6


def test_given_positions_are_used() -> None:
    for config in (LLAMA, GPT2):
        model, (x, _) = drawn(replace(config, init_std=0.3)), sample(config)
        count = torch.arange(x.shape[1])
        assert torch.equal(model(x, count), model(x))
        assert (model(x, count.flip(0)) - model(x)).abs().max() > 1e-3


def test_rotary_attention_depends_on_distance_only() -> None:
    model, (x, _) = drawn(replace(LLAMA, init_std=0.3)), sample(LLAMA)
    count = torch.arange(x.shape[1])
    torch.testing.assert_close(model(x, count + 1000), model(x), rtol=1e-9, atol=1e-9)


def test_rotary_tables_are_as_wide_as_the_model_and_never_narrower_than_float32() -> None:
    positions = torch.arange(5)
    for dtype, wide in {
        torch.bfloat16: torch.float32,
        torch.float32: torch.float32,
        torch.float64: torch.float64,
    }.items():
        assert make_rotary_table(LLAMA, 8, positions, dtype)[0].dtype == wide
    assert apply_rotary(
        torch.ones(1, 5, 2, 8, dtype=torch.bfloat16), make_rotary_table(LLAMA, 8, positions, torch.bfloat16)
    ).dtype == (torch.bfloat16)


def test_float64_gradients_are_exact() -> None:
    small = replace(LLAMA, layers=1, hidden=8, heads=2, kv_heads=1, feed_forward=6, vocab_size=5, init_std=0.5)
    model, target = drawn(small).stage(["layers.0"]).to_empty(device="cpu"), torch.tensor([[1, 4, 2]])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.tensor([[0, 3, 1]])
    names = [name for name, _ in model.named_parameters()]

    def loss(*values: Tensor) -> Tensor:
        out = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))
        return model.loss_sum(out, target)

    assert torch.autograd.gradcheck(loss, tuple(p.detach().requires_grad_() for p in model.parameters()))


def test_dropout_acts_in_training_only() -> None:
    for config in (replace(LLAMA, dropout=0.3), replace(VIT, dropout=0.3)):
        model, (x, _) = drawn(config), sample(config)
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))


def test_the_default_model_learns_a_repeated_text() -> None:
    config = load("llama_tiny")
    assert isinstance(config, TransformerConfig)
    model = Transformer(config)
    from hpc_train.models.initial_values import initialise_parameters

    initialise_parameters(model, 0)
    x = tokens(config, batch=2, length=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = model.loss_sum(model(x[:, :-1]), x[:, 1:]) / x[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.55, abs=0.15)  # ln 256: the initial guess is uniform
    assert losses[-1] < 0.5 * losses[0]
