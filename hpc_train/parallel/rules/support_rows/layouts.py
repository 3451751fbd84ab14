"""Rows of the mesh axes: data, tensor, context, pipeline and expert parallelism, and their combinations."""

from __future__ import annotations

from hpc_train.parallel.rules.support_rows.technique import Technique

DATA_PARALLEL = (
    Technique(
        name="data parallel",
        option="parallel=ddp",
        done_by="DistributedDataParallel; fully_shard where tp or pp > 1",
        proof="tests/parallel/test_parity.py",
    ),
    Technique(
        name="ZeRO-1: sharded optimizer state",
        option="parallel=zero1",
        done_by="fully_shard, gathered and reduced once per step",
        proof="tests/parallel/test_zero.py",
    ),
    Technique(
        name="ZeRO-2: sharded gradients too",
        option="parallel=zero2",
        done_by="fully_shard, reduced in every micro-batch",
        proof="tests/parallel/test_zero.py",
    ),
    Technique(
        name="ZeRO-3: sharded parameters too (FSDP2)",
        option="parallel=fsdp",
        done_by="fully_shard, block by block",
        proof="tests/parallel/test_zero.py",
    ),
    Technique(
        name="hybrid sharding (HSDP)",
        option="parallel=hsdp",
        done_by="fully_shard on dp_replicate x dp_shard",
        proof="tests/parallel/test_parity.py",
    ),
)

TENSOR_AND_CONTEXT_PARALLEL = (
    Technique(
        name="tensor parallel, norms, embedding, head and loss too",
        option="parallel=tp",
        done_by="DTensor parameters, our own autograd functions",
        needs="tp divides heads, feed_forward and the positions",
        proof="tests/parallel/test_tensor.py",
    ),
    Technique(
        name="asynchronous tensor parallel",
        option="parallel=tp parallel.tensor.asynchronous=true",
        done_by="our own ring of products and messages",
        needs="tensor.sequence; a whole backward; no ViT",
        proof="tests/parallel/test_async_tensor.py",
    ),
    Technique(
        name="context parallel: ring attention",
        option="parallel=cp",
        done_by="our own ring over fused attention, balanced causal order",
        needs="2 cp divides the positions; no ViT; with dropout keys and values are gathered",
        proof="tests/parallel/test_context.py",
    ),
    Technique(
        name="context parallel: Ulysses",
        option="parallel=cp parallel.context.method=ulysses",
        done_by="our own all-to-all of heads and positions",
        needs="cp divides heads / tp and the positions; no ViT",
        proof="tests/parallel/test_context.py",
    ),
)

PIPELINE = (
    Technique(
        name="pipeline: gpipe, 1f1b, looped_bfs, interleaved_1f1b",
        option="parallel=pp parallel.pipeline.schedule=gpipe",
        done_by="torch.distributed.pipelining",
        needs="a model with stages; micro-batches for the schedule",
        proof="tests/parallel/test_pipeline.py",
    ),
    Technique(
        name="pipeline, split backward: interleaved_zero_bubble, zbv, dualpipev",
        option="parallel=pp parallel.pipeline.schedule=zbv",
        done_by="torch.distributed.pipelining",
        needs="the same; recompute.mode none or full; no compilation",
        proof="tests/parallel/test_pipeline.py",
    ),
    Technique(
        name="pipeline: naive, or an order from a file",
        option="parallel=pp parallel.pipeline.schedule=naive",
        done_by="torch's pipeline runtime over an order that is proved first",
        needs="the same; a file is for one number of micro-batches",
        proof="tests/parallel/test_pipeline.py",
    ),
)

EXPERT_PARALLEL_AND_COMBINATIONS = (
    Technique(
        name="expert parallel, shared experts overlapped",
        option="parallel=fsdp parallel.ep=2 model=llama_moe_tiny",
        done_by="our own all-to-all of tokens; fully_shard on a second mesh",
        needs="zero strategies; ep divides dp_shard x cp and experts; no selective recompute",
        proof="tests/parallel/test_matrix.py",
    ),
    Technique(
        name="3D: pipeline x data x tensor",
        option="parallel=3d",
        done_by="all of the above",
        proof="tests/parallel/test_matrix.py",
    ),
    Technique(
        name="4D: pipeline x data x context x tensor",
        option="parallel=3d parallel.cp=2",
        done_by="all of the above",
        proof="tests/parallel/test_matrix.py",
    ),
)
