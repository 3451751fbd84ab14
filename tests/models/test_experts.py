"""Mixtures of experts: transformers' own models as the reference, and the layer against brute force.

transformers computes softmax of the router in float32 whatever the model's dtype; all else here is float64, so that
what is left of the difference is the rounding of those scores.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_shapes import LLAMA, drawn, tokens
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hpc_train.checkpoint.convert.model_config import encode_hf_config, parse_hf_config
from hpc_train.config.model import ExpertsConfig, LatentConfig, TransformerConfig
from hpc_train.errors import UserError
from hpc_train.models.experts import Experts, MixtureOfExperts, Router, find_overflow, list_mixtures, sum_balance_loss
from hpc_train.models.huggingface import from_huggingface, to_huggingface
from hpc_train.models.shape import check_shape

ROUNDING = 2e-6
"""Of scores in float32."""
EXPERTS = ExpertsConfig(count=6, top_k=2)
MODELS: dict[str, TransformerConfig] = {
    "mixtral": replace(LLAMA, experts=EXPERTS),
    "qwen3_moe": replace(
        LLAMA, query_key_norm="head", head_dim=16, experts=ExpertsConfig(count=8, top_k=3, feed_forward=24)
    ),
    "olmoe": replace(LLAMA, query_key_norm="full", experts=ExpertsConfig(count=8, top_k=4, normalise=False)),
}
DEEPSEEK = replace(
    LLAMA,
    kv_heads=None,
    norm_eps=1e-5,  # not that of the latents' norms
    latent=LatentConfig(kv_rank=20, q_rank=28, nope_head_dim=12, rope_head_dim=8, value_head_dim=10),
    experts=ExpertsConfig(
        count=8,
        top_k=3,
        feed_forward=24,
        shared=2,
        first_dense=1,
        gate="sigmoid",
        scale=2.5,
        groups=4,
        top_groups=2,
        balance_bias=0.001,
    ),
)
MODELS |= {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3 of whole queries": replace(
        DEEPSEEK,
        latent=replace(DEEPSEEK.latent, q_rank=None, interleaved=False, value_head_dim=20),
        experts=replace(DEEPSEEK.experts, normalise=False, groups=1, top_groups=1, first_dense=0),
    ),
}
FAMILIES = {
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "deepseek_v3 of whole queries": (DeepseekV3Config, DeepseekV3ForCausalLM),
}


def reference(family: str) -> PreTrainedModel:
    """Their model in float64, with values that no initialisation gives."""
    make_config, make = FAMILIES[family]
    body = {**encode_hf_config(MODELS[family], "float64"), "pad_token_id": None, "initializer_range": 0.2}
    torch.manual_seed(0)
    config = make_config(**body)
    config._experts_implementation = "eager"  # grouped products take no float64
    theirs = make(config).double().train()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    return theirs


def write_weights(theirs: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The state dict as their checkpoint file has it: a matrix for each expert."""
    theirs.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_experts_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    config, theirs = MODELS[family], reference(family)
    ours = drawn(config)
    ours.load_state_dict(from_huggingface(write_weights(theirs, tmp_path / "weights"), config))
    inputs = tokens(config)
    out, expected = ours(inputs), theirs(inputs).logits
    assert (out - expected).abs().max() < ROUNDING * expected.abs().max()
    F.cross_entropy(expected.flatten(0, -2), inputs.roll(-1).flatten(), reduction="sum").backward()
    ours.loss_sum(out, inputs.roll(-1)).backward()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    gradients = from_huggingface(write_weights(theirs, tmp_path / "gradients"), config)
    gradients = {name: gradient for name, gradient in gradients.items() if not name.endswith("router.bias")}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        error = (parameter.grad - gradients[name]).abs().max() / gradients[name].abs().max()
        assert error < 10 * ROUNDING, f"{name}: {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_config_come_back_as_they_were(family: str, tmp_path: Path) -> None:
    config, theirs = MODELS[family], reference(family)
    file = write_weights(theirs, tmp_path)
    back = to_huggingface(from_huggingface(file, config), config)
    assert back.keys() == file.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in file.items())
    body = theirs.config.to_dict()
    again = parse_hf_config(body, config.name)
    assert isinstance(again, TransformerConfig)
    width = again.experts.feed_forward or again.feed_forward
    assert width == (config.experts.feed_forward or config.feed_forward)
    same = replace(again.experts, feed_forward=config.experts.feed_forward)
    wide = replace(again, experts=same, head_dim=config.head_dim, max_positions=config.max_positions)
    assert wide == replace(config, init_std=wide.init_std)


def test_an_expert_that_is_missing_is_named() -> None:
    config = MODELS["mixtral"]
    state = to_huggingface(drawn(config).state_dict(), config)
    del state["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    with pytest.raises(
        UserError, match=r"layers.1.feed_forward.experts.down: needs matrices .* of 6 experts, and has 5"
    ):
        from_huggingface(state, config)


VARIANTS = {
    "softmax": EXPERTS,
    "not normalised": replace(EXPERTS, normalise=False, scale=0.5),
    "one": replace(EXPERTS, top_k=1),
    "shared": replace(EXPERTS, shared=2, feed_forward=24),
    "sigmoid": replace(EXPERTS, gate="sigmoid", scale=2.5, balance_bias=0.1),
    "groups": replace(EXPERTS, count=8, gate="sigmoid", groups=4, top_groups=2, top_k=3),
    "capacity": replace(EXPERTS, capacity_factor=0.75),
}


def _route_token(x: Tensor, router: Router, capacity: list[int]) -> list[tuple[int, float | Tensor]]:
    """Experts of one token and their weights, in the words of the papers; takes from the capacity that is left."""
    config = router.config
    logits = [x @ row for row in router.gate.weight]
    total = sum(logit.exp() for logit in logits)
    scores = [logit.exp() / total if config.gate == "softmax" else 1 / (1 + (-logit).exp()) for logit in logits]
    biased = [score.item() + (float(router.bias[i]) if config.balance_bias else 0) for i, score in enumerate(scores)]
    size = config.count // config.groups
    sums = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(config.groups)]
    groups = sorted(range(config.groups), key=lambda g: -sums[g])[: config.top_groups]
    legal = [i for i in range(config.count) if config.groups == 1 or i // size in groups]
    chosen = sorted(legal, key=lambda i: -biased[i])[: config.top_k]
    norm = sum(scores[i] for i in chosen) if config.normalise else 1.0
    found = []
    for index in chosen:
        capacity[index] -= 1
        if capacity[index] >= 0:
            found.append((index, config.scale * scores[index] / norm))
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_the_layer_is_the_sum_over_the_experts_of_each_token(name: str) -> None:
    config = replace(LLAMA, experts=VARIANTS[name])
    layer = drawn(config).get_submodule("layers.1.feed_forward")
    assert isinstance(layer, MixtureOfExperts)
    experts = layer.config
    torch.manual_seed(0)
    if experts.balance_bias:
        layer.router.bias.uniform_(-0.3, 0.3)
    x = torch.randn(2, 7, config.hidden, dtype=torch.float64)
    whole = (
        math.ceil((experts.capacity_factor or math.inf) * 7 * experts.top_k / experts.count)
        if (experts.capacity_factor)
        else 1000
    )
    wanted = torch.zeros_like(x)
    for row in range(2):
        capacity = [whole] * experts.count
        for place in range(7):
            token = x[row, place]
            for index, weight in _route_token(token, layer.router, capacity):
                gate, up, down = (getattr(layer.experts, key)[index] for key in ("gate", "up", "down"))
                wanted[row, place] += weight * ((F.silu(token @ gate) * (token @ up)) @ down)
            if layer.shared is not None:
                wanted[row, place] += layer.shared(token)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-12, atol=1e-12)


def test_equal_scores_go_to_the_lower_index() -> None:
    router = Router(replace(EXPERTS, count=8, top_k=3), 4).double()
    torch.nn.init.zeros_(router.gate.weight)
    chosen, weights = router(torch.randn(2, 50, 4, dtype=torch.float64))
    assert torch.equal(chosen, torch.tensor([0, 1, 2]).expand(2, 50, 3))
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


def test_the_balance_loss_is_the_formula_and_reaches_the_router() -> None:
    config = replace(EXPERTS, balance_loss=0.5)
    router = Router(config, 4).double()
    x = torch.randn(3, 9, 4, dtype=torch.float64)
    chosen, weights = router(x)
    _, plain = router.eval()(x)
    shares = (x @ router.gate.weight.T).softmax(-1)
    loads = F.one_hot(chosen, config.count).sum((1, 2)).double()
    loss = (loads * config.count / (config.top_k * 9) * shares.mean(1)).sum() * 9
    (wanted,) = torch.autograd.grad(0.5 * 7.0 * loss + plain.sum(), router.gate.weight, retain_graph=True)
    router.balance.loss_scale = lambda: 7.0
    weights.sum().backward()
    torch.testing.assert_close(router.gate.weight.grad, wanted, rtol=1e-12, atol=1e-12)
    assert router.balance.loss is not None
    assert router.balance.loads is not None
    torch.testing.assert_close(router.balance.loss, loss.detach())
    assert router.balance.loads.tolist() == [*loads.sum(0).tolist(), 0.0]
    even = torch.arange(6).view(1, 3, 2)
    assert float(sum_balance_loss(torch.full((1, 3, 6), 1 / 6), even, config)) == pytest.approx(3.0)


def test_loads_are_counted_once_where_activations_are_recomputed() -> None:
    model = drawn(replace(LLAMA, experts=EXPERTS))
    (_, layer), *_ = list_mixtures(model).items()
    x = torch.randn(2, 5, LLAMA.hidden, dtype=torch.float64, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.router.balance.loads is not None
    assert int(layer.router.balance.loads.sum()) == 2 * 5 * 2
    layer.router.balance.reset()
    layer.eval()(x).sum().backward()
    assert layer.router.balance.loads is None


def test_a_bias_moves_towards_equal_loads() -> None:
    router = Router(replace(EXPERTS, count=3, balance_bias=0.1), 4)
    router.move_bias(torch.tensor([9, 3, 0]))
    assert router.bias.tolist() == pytest.approx([-0.1, 0.1, 0.1])


def test_capacity_keeps_the_first_tokens_of_each_sequence() -> None:
    chosen = torch.tensor([[[0], [0], [1], [0]], [[1], [1], [1], [1]]])
    config = replace(EXPERTS, count=2, top_k=1, capacity_factor=1.0)
    assert find_overflow(chosen, config).squeeze(-1).tolist() == [
        [False, False, False, True],
        [False, False, True, True],
    ]


def test_experts_without_rows_have_gradients() -> None:
    experts = Experts(3, 4, 5)
    for parameter in experts.parameters():
        torch.nn.init.ones_(parameter)
    x = torch.randn(0, 4, requires_grad=True)
    experts(x, torch.zeros(3, dtype=torch.int64)).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())


def test_grouped_products_equal_the_loop() -> None:
    from hpc_train.models.experts import _multiply_each, _multiply_grouped

    torch.manual_seed(0)
    x, gate, up = torch.randn(12, 16), torch.randn(3, 16, 32) / 4, torch.randn(3, 16, 32) / 4
    down, counts = torch.randn(3, 32, 16) / 6, torch.tensor([5, 0, 7])
    narrow = [tensor.bfloat16() for tensor in (x, gate, up, down)]
    grouped, loop = _multiply_grouped(*narrow, counts), _multiply_each(*narrow, counts.tolist())
    torch.testing.assert_close(grouped, loop, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 7}, r"model.experts.top_k=7: a token cannot use more than model.experts.count=6"),
        ({"first_dense": 3}, r"first_dense=3: leaves no layer of model.layers=3 with experts"),
        ({"groups": 4}, r"groups=4: does not divide model.experts.count=6"),
        ({"groups": 2, "top_groups": 3}, r"top_groups=3: there are 2 groups"),
        ({"groups": 3, "top_k": 3}, r"top_k=3: top_groups=1 groups have 2 experts"),
        ({"groups": 6, "top_groups": 6}, r"groups=6: a group's score is that of its two best"),
        ({"count": 0, "balance_loss": 0.1}, r"model.experts.count=0 makes no experts"),
    ],
)
def test_experts_that_do_not_fit_together(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_shape(replace(LLAMA, experts=replace(EXPERTS, **changes)))  # type: ignore[arg-type]


def test_gelu_experts_are_refused() -> None:
    with pytest.raises(UserError, match="activation=swiglu"):
        check_shape(replace(LLAMA, activation="gelu", experts=EXPERTS))


@pytest.mark.parametrize("changes", [{"shared": 1}, {"capacity_factor": 1.0}, {"gate": "sigmoid"}])
def test_what_the_library_has_no_names_for(changes: dict[str, float]) -> None:
    config = replace(LLAMA, experts=replace(EXPERTS, **changes))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"model.experts.{next(iter(changes))}="):
        encode_hf_config(config, "float32")
