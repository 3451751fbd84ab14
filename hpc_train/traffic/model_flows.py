"""Compute the flows of a run's activations over tp, cp, ep and pp.

model_axes.py has the formulas, which take sizes and counts only; here these come from a run. With a pipeline, each
technique counts the rank with most traffic.
"""

from __future__ import annotations

import math

from hpc_train.config.model import TransformerConfig
from hpc_train.models.shape import compute_head_dim, count_kv_heads, find_window, has_latent_attention
from hpc_train.traffic import model_axes
from hpc_train.traffic.axes import Flow
from hpc_train.traffic.model_axes import TensorCalls, assign_kv_heads
from hpc_train.traffic.ring_blocks import RingLayout, count_messages
from hpc_train.traffic.shaped_run import RankStages, ShapedRun
from hpc_train.traffic.sharding import ZERO_STAGE, keeps_gradients
from hpc_train.traffic.stages import place_stages
from hpc_train.traffic.weights import list_partial_gradient_sizes

# Tensor parallelism.


def list_tensor_flows(run: ShapedRun) -> list[Flow]:
    """Return the flows of activations over tp, and of gradients that its ranks add up."""
    return run.choose_busiest_rank(lambda stages: _list_tensor_flows(run, stages)) if run.degrees.tp > 1 else []


def _list_tensor_flows(run: ShapedRun, stages: RankStages) -> list[Flow]:
    layers, others = _count_tensor_calls(run, stages)
    flows: list[Flow] = []
    if widths := _list_latent_widths(run):
        blocks = sum(part.blocks for part in stages)
        entries = model_axes.count_entry_calls(run.splits_positions, blocks, run.count_recomputed(stages))
        layers += entries.times(-1)  # they move latents instead of hidden states
        flows = _list_latent_flows(run, entries, widths)
    hidden = run.hidden_elements * run.work.compute
    if run.config.parallel.tensor.asynchronous:
        flows += model_axes.list_ring_tensor_flows(layers, hidden, run.work.micro_batches, run.degrees.tp)
    else:
        others += layers
    flows += model_axes.list_tensor_flows(others, hidden, run.work.micro_batches)
    if run.splits_vocabulary and any(part.last for part in stages):
        flows += model_axes.list_loss_flows(run.tokens, max(4, run.work.compute), run.work.micro_batches)
    return flows + _list_norm_flows(run, stages) + _list_whole_gradient_flows(run, stages)


def _list_norm_flows(run: ShapedRun, stages: RankStages) -> list[Flow]:
    """Return the sums of norms over all heads."""
    if not isinstance(run.model, TransformerConfig) or run.model.query_key_norm != "full":
        return []
    passes = 2 * sum(part.blocks for part in stages) + run.count_recomputed(stages)
    return model_axes.list_norm_flows(run.tokens, max(4, run.work.compute), passes * run.work.micro_batches)


def _count_tensor_calls(run: ShapedRun, stages: RankStages) -> tuple[TensorCalls, TensorCalls]:
    """Count the collectives of a micro-batch: (of layers, which asynchronous tensor parallelism overlaps; all others).

    The others are those of mixtures of experts, of the embedding and of the head.
    """
    sequence, asynchronous = run.splits_positions, run.config.parallel.tensor.asynchronous
    mixed = sum(part.mixed for part in stages) if run.weights.experts else 0
    mixed_again = run.count_recomputed_mixed(stages) if run.weights.experts else 0
    dense, dense_again = sum(part.blocks for part in stages) - mixed, run.count_recomputed(stages) - mixed_again
    layers = model_axes.count_block_calls(sequence).times(dense)
    output_norms = isinstance(run.model, TransformerConfig) and run.model.post_norms
    layers += model_axes.count_recompute_calls(sequence, asynchronous, output_norms).times(dense_again)
    # Attention makes half of a block's calls and the mixture of experts the other half.
    half = model_axes.count_half_block_calls(sequence).times(mixed)
    layers += half + model_axes.count_half_recompute_calls(sequence).times(mixed_again)
    # tp does not split the ends of a vision transformer.
    ends = sum(part.first + part.last for part in stages) if isinstance(run.model, TransformerConfig) else 0
    others = model_axes.count_end_calls(sequence, run.splits_vocabulary).times(ends) + half
    return layers, others + model_axes.count_last_recompute_calls(sequence, output_norms).times(mixed_again)


def _list_latent_widths(run: ShapedRun) -> tuple[int, ...]:
    """Return the widths of what enters the heads of latent attention: queries, keys and values, shared key."""
    if not isinstance(run.model, TransformerConfig) or not has_latent_attention(run.model):
        return ()
    latent = run.model.latent
    return latent.q_rank or run.model.hidden, latent.kv_rank, latent.rope_head_dim


def _list_latent_flows(run: ShapedRun, entries: TensorCalls, widths: tuple[int, ...]) -> list[Flow]:
    """Return the flows of what enters the heads; no product follows the shared key, so it goes in one piece."""
    *expanded, shared = (run.tokens * run.work.compute * width for width in widths)
    flows = model_axes.list_tensor_flows(entries, shared, run.work.micro_batches)
    for size in expanded:
        if run.config.parallel.tensor.asynchronous:
            flows += model_axes.list_ring_tensor_flows(entries, size, run.work.micro_batches, run.degrees.tp)
        else:
            flows += model_axes.list_tensor_flows(entries, size, run.work.micro_batches)
    return flows


def _list_whole_gradient_flows(run: ShapedRun, stages: RankStages) -> list[Flow]:
    """Return the sums over tp of gradients of parameters that tp does not split."""
    weights = [weight for part in stages for weight in run.list_end_weights(part)]
    weights += [weight for part in stages for weight in run.list_block_weights(part)]
    sizes = list_partial_gradient_sizes(weights, run.degrees.tp, run.kv_heads, run.splits_positions)
    work = run.work
    every_micro_batch = not keeps_gradients(ZERO_STAGE[run.config.parallel.strategy])
    # fully_shard converts gradients to the format of the reduction when it accumulates them over micro-batches.
    accumulated = not every_micro_batch and work.micro_batches > 1
    return model_axes.list_gradient_flows(
        sizes, work.reduce if accumulated else work.compute, work.micro_batches if every_micro_batch else 1
    )


# Context parallelism.


def list_context_flows(run: ShapedRun) -> list[Flow]:
    """Return the flows of keys and values, or of heads, over cp."""
    return run.choose_busiest_rank(lambda stages: _list_context_flows(run, stages)) if run.degrees.cp > 1 else []


def _list_context_flows(run: ShapedRun, stages: RankStages) -> list[Flow]:
    model = run.model
    assert isinstance(model, TransformerConfig)
    head = run.tokens * compute_head_dim(model)
    key_heads = _count_kv_heads_of_rank(model.heads, count_kv_heads(model), run.degrees.tp)
    if run.config.parallel.context.method == "ring":
        return _list_ring_flows(run, stages, head * key_heads)
    # Fewer heads than cp ranks: each head is repeated until the number of heads divides by cp.
    sent = key_heads * (run.degrees.cp // math.gcd(key_heads, run.degrees.cp))
    backwards = sum(part.blocks for part in stages) * run.work.micro_batches
    forwards = backwards + run.count_recomputed(stages) * run.work.micro_batches
    queries = head * model.heads / run.degrees.tp
    return model_axes.list_ulysses_flows(queries, head * sent, run.work.compute, forwards + backwards)


def _count_kv_heads_of_rank(heads: int, kv_heads: int, tp: int) -> int:
    """Return how many key and value heads a tp rank computes; the most of any rank."""
    if kv_heads % tp == 0:
        return kv_heads // tp
    return max(len(assign_kv_heads(heads, kv_heads, rank, tp)) for rank in range(tp))


def _list_ring_flows(run: ShapedRun, stages: RankStages, keys: float) -> list[Flow]:
    """Return the flows of ring attention, of layers with a window and of those without one.

    keys: elements of the keys of a rank's positions.
    """
    model, work = run.model, run.work
    assert isinstance(model, TransformerConfig)
    layout = RingLayout(run.degrees.cp, int(work.positions), run.config.parallel.context.balanced)
    flows: list[Flow] = []
    for window in dict.fromkeys((None, model.sliding_window)):
        # With dropout all keys are gathered, which as many bytes of messages stand for.
        messages = count_messages(layout, None if model.dropout else window)
        layers, again = _count_window_layers(run, model, stages, window)
        if layers:
            forwards, backwards = (layers + again) * work.micro_batches, layers * work.micro_batches
            flows += model_axes.list_ring_attention_flows(messages, keys, work.compute, forwards, backwards)
    return flows


def _count_window_layers(
    run: ShapedRun, model: TransformerConfig, stages: RankStages, window: int | None
) -> tuple[int, int]:
    """Count the layers of these stages that have this window, and those of them whose forward runs twice."""
    options = run.config.parallel.recompute
    layers = [
        index for part in stages for index in range(part.blocks) if find_window(model, part.begin + index) == window
    ]
    again = sum(index % options.every == 0 for index in layers) if options.mode != "none" else 0
    return len(layers), again


# Expert parallelism.


def list_expert_flows(run: ShapedRun) -> list[Flow]:
    """Return the flows of tokens over ep."""
    return run.choose_busiest_rank(lambda stages: _list_expert_flows(run, stages)) if run.ep > 1 else []


def _list_expert_flows(run: ShapedRun, stages: RankStages) -> list[Flow]:
    assert isinstance(run.model, TransformerConfig)
    work, experts = run.work, run.model.experts
    backwards = sum(part.mixed for part in stages) * work.micro_batches
    forwards = backwards + run.count_recomputed_mixed(stages) * work.micro_batches
    rows = run.tokens * experts.top_k
    return model_axes.list_expert_flows(rows, run.model.hidden, work.compute, experts.count, forwards, backwards)


# Pipeline parallelism.


def list_pipeline_flows(run: ShapedRun) -> list[Flow]:
    """Return the flows of activations over pp."""
    if run.degrees.pp == 1:
        return []
    # With split positions each tp rank sends only its own part to the same tp rank of the next stage.
    pieces = run.degrees.tp if run.splits_positions else 1
    placement = place_stages(run.config.parallel.pipeline, run.degrees.pp)
    hidden = run.hidden_elements * run.work.compute / pieces
    flows = model_axes.list_stage_flows(placement, hidden, run.work.micro_batches)
    if run.weights.tied and placement[0] != placement[-1]:
        table = run.count_elements([run.weights.tied]) * run.work.stored / run.shards
        flows += model_axes.list_tied_embedding_flows(table)
    return flows
