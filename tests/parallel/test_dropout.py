"""Law 1 with dropout: a mask depends on sample, layer, position and channel, wherever they are computed."""

from __future__ import annotations

import math
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
import torch
from drawn import draw
from matrix import MODELS, Case, truth
from test_matrix import Elsewhere, check_case
from torch import Tensor, nn

from hpc_train.config.parallel import ParallelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.models.attention import plain_attention
from hpc_train.models.dropout import (
    Dropout,
    DropoutSite,
    SampleCounter,
    find_dropped_weights,
    hash_heads,
    list_positions,
    make_layer_key,
    make_step_key,
)
from hpc_train.models.registry import build_model
from hpc_train.parallel import dropout as parallel_dropout
from hpc_train.parallel.dropout import DropoutPositions
from hpc_train.parallel.mesh_axes import SequenceShare
from hpc_train.testing import run_ranks

FULL, MM = "parallel.recompute.mode=full", ("parallel.recompute.mode=selective", "parallel.recompute.keep=[mm]")
PP = ("parallel=ddp", "parallel.pp=2")
CASES = {
    "ddp-2-short": Case(2, ("parallel=ddp",), "tied-dropout", micro=3),
    "zero3-2-selective": Case(2, ("parallel=fsdp", "parallel.recompute.mode=selective"), "llama-dropout"),
    "zero3-2-selective-mm": Case(2, ("parallel=fsdp", *MM), "llama-dropout"),
    "tp-2": Case(2, ("parallel.tp=2",), "grouped-dropout", micro=6),
    "tp-2-no-sequence": Case(2, ("parallel.tp=2", "parallel.tensor.sequence=false"), "llama-dropout"),
    "tp-2-vit": Case(2, ("parallel.tp=2",), "vit-dropout"),
    "cp-2-ring": Case(2, ("parallel.cp=2",), "llama-dropout"),
    "cp-2-unbalanced": Case(2, ("parallel.cp=2", "parallel.context.balanced=false", FULL), "grouped-dropout"),
    "cp-2-tp-2-ulysses": Case(
        4, ("parallel.cp=2", "parallel.tp=2", "parallel.context.method=ulysses"), "llama-dropout"
    ),
    "pp-2-1f1b-recomputed-short": Case(2, (*PP, "parallel.pipeline.schedule=1f1b", FULL), "tied-dropout", micro=3),
    "pp-2-zbv": Case(2, (*PP, "parallel.pipeline.schedule=zbv"), "llama-dropout"),
    "pp-2-cp-2-tp-2": Case(
        8, (*PP, "parallel.cp=2", "parallel.tp=2", "parallel.pipeline.schedule=1f1b", FULL), "tied-dropout"
    ),
}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    return Elsewhere(tmp_path_factory)


DRAWN = ("zero3-2-selective", "cp-2-unbalanced", "tp-2", "pp-2-1f1b-recomputed-short")


@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_every_layout_drops_the_same(name: str, elsewhere: Elsewhere) -> None:
    check_case(CASES[name], elsewhere)


def test_dropout_changes_the_losses() -> None:
    assert not np.allclose(truth("llama-dropout")[0].losses, truth("llama")[0].losses, rtol=1e-3)


# The masks themselves.


def _site(seed: int = 0, step: int = 0, name: str = "layers.0", first: int = 0, rows: int = 8) -> DropoutSite:
    counter = SampleCounter()
    counter.begin(make_step_key(seed, step), first, rows, torch.device("cpu"))
    return DropoutSite(counter, torch.tensor(make_layer_key(name)), list_positions)


def _dropped(site: DropoutSite, p: float, *shape: int) -> Tensor:
    layer = Dropout(p)
    layer.site = site
    return layer(torch.ones(shape)) == 0


def _mix(x: int) -> int:
    """Compute SplitMix64's finalizer on Python integers."""
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
    return x ^ x >> 31


def _key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _bit(p: float, sample: int, position: int, channel: int) -> bool:
    row = _mix(_mix(sample ^ _key("7/3")) ^ _key("layers.1"))
    bits = _mix(row ^ position) >> 32 ^ _mix(channel ^ _key("channels")) >> 32
    bits = bits * 0x7FEB352D % 2**32
    bits ^= (bits - (bits >> 31) * 2**32 >> 15) % 2**32  # the shift keeps the sign
    return bits * 0x846CA68B % 2**32 % 2**31 < round(p * 2**31)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_each_bit_is_the_hash_that_is_written_down(p: float) -> None:
    """Compare with another implementation: runs must be able to continue with any release, on any device."""
    wanted = [[[_bit(p, sample, t, c) for c in range(9)] for t in range(5)] for sample in range(3, 7)]
    assert _dropped(_site(7, 3, "layers.1", 3, 4), p, 4, 5, 9).tolist() == wanted


@pytest.mark.long
def test_compiled_code_gives_the_same_bits() -> None:
    # In a process of its own: the compiler leaves threads and variables of the environment behind.
    assert run_ranks(_compiles_to_the_same_bits, 1) == [True]


def _compiles_to_the_same_bits(world: World) -> bool:
    layer = Dropout(0.5)
    layer.site = _site()
    x = torch.rand(8, 33, 70) + 1
    compiled = torch.compile(layer, fullgraph=True)
    return torch.equal(compiled(x), layer(x))


def _correlation(a: Tensor, b: Tensor) -> float:
    """Return the correlation in standard deviations of independent bits."""
    a, b = (x.double().flatten() - x.double().mean() for x in (a, b))
    return abs(float((a @ b) / (a.norm() * b.norm()))) * math.sqrt(a.numel())


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_look_random(p: float) -> None:
    """Check the share of zeros, and independence of neighbouring samples, positions, channels, layers, steps, seeds."""
    shape = (16, 128, 256)
    mask = _dropped(_site(rows=16), p, *shape)
    count, spread = mask.numel(), math.sqrt(p * (1 - p))
    assert abs(float(mask.double().mean()) - p) < 5 * spread / math.sqrt(count)
    for axis in range(3):  # the sums over the other axes vary like those of independent bits
        sums = mask.double().mean([other for other in range(3) if other != axis])
        expected = spread / math.sqrt(count / shape[axis])
        assert abs(float(sums.std()) / expected - 1) < 5 / math.sqrt(2 * shape[axis])
        for distance in (1, 2, 8):
            assert _correlation(mask, mask.roll(distance, axis)) < 5
    others = [_site(rows=16, name="layers.1"), _site(rows=16, step=1), _site(rows=16, seed=1), _site(rows=16, first=16)]
    for other in others:
        assert _correlation(mask, _dropped(other, p, *shape)) < 5


def test_weights_of_heads_and_queries_are_dropped_independently() -> None:
    places = torch.arange(64)
    mask = find_dropped_weights(hash_heads(_site(rows=4), 8), places, places, 0.3)
    assert mask.shape == (4, 8, 64, 64)
    assert abs(float(mask.double().mean()) - 0.3) < 5 * math.sqrt(0.21 / mask.numel())
    for axis in range(4):
        assert _correlation(mask, mask.roll(1, axis)) < 5
    above = torch.ones(64, 64, dtype=torch.bool).triu(1)
    assert _correlation(mask[..., above], mask.mT[..., above]) < 5


@pytest.mark.parametrize("balanced", [False, True])
def test_ranks_know_where_their_positions_stand(balanced: bool) -> None:
    tp, cp = 2, 4
    found = []
    for rank in range(cp):
        share = SequenceShare(rank, cp, balanced)
        mine = [DropoutPositions(share, part, tp)(4, torch.device("cpu")) for part in range(tp)]
        assert torch.equal(torch.cat(mine), share.positions(4 * tp * cp))
        found += torch.cat(mine).tolist()
    assert sorted(found) == list(range(4 * tp * cp))


def test_without_an_engine_the_masks_are_torchs() -> None:
    torch.manual_seed(0)
    layer, x = Dropout(0.5), torch.ones(3, 4, 5)
    out = layer(x)
    torch.manual_seed(0)
    assert torch.equal(out, nn.functional.dropout(x, 0.5))
    assert torch.equal(layer.eval()(x), x)


def test_the_mask_does_not_depend_on_how_samples_are_cut() -> None:
    whole, part = _dropped(_site(rows=8), 0.5, 8, 6, 5), _dropped(_site(first=5, rows=3), 0.5, 3, 6, 5)
    assert torch.equal(whole[5:], part)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores", [1 << 24, 1 << 8])
def test_attention_in_blocks_is_attention_with_its_mask(
    causal: bool, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare values and gradients with plain operations on the whole mask, for queries that are out of order."""
    monkeypatch.setattr(plain_attention, "MAX_SCORES", scores)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, n, 40, 6, generator=generator, dtype=torch.float64) for n in (4, 2, 2, 4))
    queries, keys, site = torch.arange(40).flip(0), torch.arange(40), _site(rows=2)
    found, wanted = [], []
    for out in (found, wanted):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        if out is found:
            rule = plain_attention.ScoreRule(causal)
            mixed = plain_attention.attend_plainly(*given, queries, keys, rule, site=site, p=0.3)
        else:
            wide = [given[0], *(x.repeat_interleave(2, dim=1) for x in given[1:])]
            bias = torch.zeros(40, 40).masked_fill(causal & (keys > queries.unsqueeze(1)), -torch.inf)
            weights = (wide[0] @ wide[1].mT / 6**0.5 + bias).softmax(-1)
            weights = weights * ~find_dropped_weights(hash_heads(site, 4), queries, keys, 0.3) / 0.7
            mixed = weights @ wide[2]
        mixed.backward(grad)
        out += [mixed.detach(), *(x.grad for x in given)]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Users' own dropout layers.


class _Own(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def _refused(world: World, layer: nn.Module, parallel: ParallelConfig) -> str | None:
    config = replace(Case(2, ()).config(), parallel=parallel)
    try:
        parallel_dropout.place_dropout(_Own(layer), config, world)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.MultiheadAttention(4, 2, dropout=0.1)], ids=["layer", "inside"])
def test_torchs_own_is_refused_where_its_masks_would_be_equal(axis: str, layer: nn.Module) -> None:
    parallel = ParallelConfig(**{axis: 2})
    for said in run_ranks(_refused, 2, layer, parallel, parallel=parallel):
        assert said is not None
        assert said.startswith(f"model: layer is torch's {type(layer).__name__} with dropout 0.1, which draws the same")
        assert "\n" not in said
    assert run_ranks(_refused, 1, layer, ParallelConfig(), parallel=ParallelConfig()) == [None]
    assert run_ranks(_refused, 2, nn.Dropout(0.0), parallel, parallel=parallel) == [None, None]


def test_layers_of_a_stage_are_called_as_in_the_whole_model() -> None:
    with torch.device("meta"):
        whole = build_model(MODELS["llama-dropout"])
    stage = whole.stage(["layers.2", "layers.3"])
    names = {name for name, layer in stage.named_modules() if isinstance(layer, Dropout)}
    assert names - {"dropout"} == {
        f"layers.{n}.{part}_dropout" for n in (2, 3) for part in ("attention", "feed_forward")
    }
