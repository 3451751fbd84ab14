"""The table of techniques in docs/parallelism.md: one row answers what a user asks before turning a technique on.

    option    How do I turn it on?
    done_by   Which library or code does the work?
    numbers   Are the results those of one device?
    needs     Which other settings does it require or exclude?
    proof     Which test shows that?

A new technique is a new row; tests/parallel/test_support_table.py composes every option, and test_compile.py trains it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

EXACT = "equal to one device"
"""1e-10 of the norm in float64, for loss, gradients, clipped norm, parameters and optimizer state."""
INEXACT = "not equal: "
"""Prefix of `numbers` for every other technique; the reason follows."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One row; no cell is longer than 80 characters, or has a |."""

    name: str
    option: str
    """Overrides that turn it on, as on a command line."""
    done_by: str
    numbers: str = EXACT
    """EXACT, or INEXACT and why."""
    needs: str = ""
    """Empty: none."""
    proof: str
    """Test file, from the root of the repository."""


def format_support_table() -> str:
    """Format the table as Markdown, for docs/parallelism.md."""
    lines = [_format_row(("technique", "options", "done by", "numbers", "needs", "proof")), _format_row(["---"] * 6)]
    for row in SUPPORT_TABLE:
        proof = f"[{row.proof.rpartition('/')[2]}](../{row.proof})"
        lines.append(_format_row((row.name, f"`{row.option}`", row.done_by, row.numbers, row.needs, proof)))
    return "\n".join(lines) + "\n"


def _format_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


_DATA_PARALLEL = (
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

_TENSOR_AND_CONTEXT_PARALLEL = (
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

_PIPELINE = (
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

_MODELS = (
    Technique(
        name="mixture of experts, auxiliary loss, bias or capacity",
        option="model=llama_moe_tiny",
        done_by="our own layer; torch's grouped products on GPUs in bfloat16",
        needs="no compilation; a whole backward; no parameter servers",
        proof="tests/parallel/test_matrix.py",
    ),
    Technique(
        name="multi-head latent attention (DeepSeek-V3)",
        option="model=deepseek_tiny",
        done_by="our own layer; tp and cp as any attention, tp gathers latents",
        needs="rotary positions; no dropout; values no wider than keys",
        proof="tests/parallel/test_matrix.py",
    ),
    Technique(
        name="sliding windows, in all layers or with global ones between",
        option="model.sliding_window=64 model.global_every=2",
        done_by="our own blocks of a sequence; FlexAttention on GPUs; a shorter ring",
        needs="not latent attention",
        proof="tests/parallel/test_windows.py",
    ),
    Technique(
        name="soft-caps of attention scores and logits",
        option="model.attention_softcap=50 model.logit_softcap=30",
        done_by="our own operator; FlexAttention on GPUs",
        needs="not latent attention",
        proof="tests/parallel/test_windows.py",
    ),
    Technique(
        name="Gemma 2 and 3: four norms per block, gated GELU, two rotary bases",
        option="model=gemma_tiny",
        done_by="our own layers",
        needs="not latent attention",
        proof="tests/parallel/test_matrix.py",
    ),
    Technique(
        name="OLMo 2 and 3: norms of results only, queries and keys normalised over all heads",
        option="model.pre_norms=false model.post_norms=true model.query_key_norm=full",
        done_by="our own layers; tp adds up the squares of its heads",
        needs="not latent attention",
        proof="tests/parallel/test_matrix.py",
    ),
    Technique(
        name="choice of the attention kernel",
        option="model.attention=flash",
        done_by="torch's scaled_dot_product_attention, FlexAttention",
        needs="a kernel of the device; not the ring, whose blocks are its own",
        proof="tests/parallel/test_attention_choice.py",
    ),
)

_EXPERT_PARALLEL_AND_COMBINATIONS = (
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

_ADAPTERS = (
    Technique(
        name="fine-tuning with adapters: LoRA, DoRA",
        option="adapter=lora",
        done_by="our own layers, PEFT's file format",
        needs="no asynchronous tensor parallelism, ep, servers; dropout: tp=1",
        proof="tests/parallel/test_adapters.py",
    ),
    Technique(
        name="adapters over a base in bfloat16",
        option="adapter=lora adapter.base=bf16 precision=bf16",
        done_by="our own layers",
        numbers=INEXACT + "computed in bfloat16; the bits of LoRA over a base in float32",
        needs="precision=bf16",
        proof="tests/parallel/test_adapter_base.py",
    ),
    Technique(
        name="adapters over a base in 4 bits (NF4): QLoRA, QDoRA",
        option="model=hf adapter=qlora",
        done_by="bitsandbytes rounds and expands; our own layers",
        numbers=INEXACT + "weights rounded to 4 bits; the same in every layout",
        needs="model.path with weights; no compilation, no offloaded parameters",
        proof="tests/parallel/test_hf_adapters.py",
    ),
)

_MEMORY_AND_COMPILATION = (
    Technique(
        name="recomputation of whole blocks, all or every k-th",
        option="parallel.recompute.mode=full",
        done_by="torch.utils.checkpoint",
        needs="a model with blocks; a whole backward",
        proof="tests/parallel/test_recompute.py",
    ),
    Technique(
        name="recomputation by operator",
        option="parallel.recompute.mode=selective",
        done_by="torch's selective checkpoint contexts",
        needs="the same; every operator in keep must run",
        proof="tests/parallel/test_recompute.py",
    ),
    Technique(
        name="offload of activations",
        option="parallel.recompute.offload=true",
        done_by="our own saved-tensor hooks, pinned memory",
        needs="GPUs; recompute.mode none or full",
        proof="tests/parallel/test_recompute.py",
    ),
    Technique(
        name="offload of optimizer state (cpu, file)",
        option="parallel=fsdp parallel.offload.optimizer=cpu",
        done_by="our own, a part of the parameters at a time",
        needs="a zero strategy; for a file a disk of the node",
        proof="tests/parallel/test_offload.py",
    ),
    Technique(
        name="offload of parameters (cpu, file)",
        option="parallel=fsdp parallel.offload.parameters=cpu",
        done_by="CPUOffloadPolicy, over shards in a mapped file",
        needs="a zero strategy; for a file a disk of the node",
        proof="tests/parallel/test_offload.py",
    ),
    Technique(
        name="loss in chunks of tokens",
        option="train.loss_chunk=1024",
        done_by="our own: output layer, loss and gradients of a chunk together",
        needs="our transformers; no loss of your own, no accuracy",
        proof="tests/parallel/test_chunked_loss.py",
    ),
    Technique(
        name="compilation",
        option="parallel.compile=true",
        done_by="torch.compile of each block",
        needs="a C++ compiler, on GPUs Triton; a model with blocks",
        proof="tests/parallel/test_compile.py",
    ),
)

_OPTIMIZERS = (
    Technique(
        name="Muon: hidden matrices made orthogonal",
        option="optim=muon",
        done_by="torch's iterations; our own exchange of parts between ranks",
        needs="no parameter servers, no offload",
        proof="tests/parallel/test_optimizers.py",
    ),
    Technique(
        name="SGD",
        option="optim=sgd",
        done_by="torch.optim.SGD",
        proof="tests/parallel/test_optimizers.py",
    ),
    Technique(
        name="Adafactor",
        option="optim=adafactor",
        done_by="torch.optim.Adafactor; over shards our own sums",
        needs="no loose synchronisation, no offload",
        proof="tests/parallel/test_optimizers.py",
    ),
    Technique(
        name="AdamW's moments in 16 bits",
        option="optim.state=bf16",
        done_by="our own, rounded stochastically",
        numbers=INEXACT + "moments are rounded; the same in every layout",
        needs="no parameter servers, no offload",
        proof="tests/parallel/test_optimizers.py",
    ),
    Technique(
        name="AdamW's moments in 8 bits",
        option="optim.state=8bit",
        done_by="torchao's update and tables; blocks of whole rows",
        numbers=INEXACT + "moments are rounded; the same in every layout",
        needs="no precision=fp64, no parameter servers, no offload; tp leaves blocks whole",
        proof="tests/parallel/test_adamw_8bit.py",
    ),
    Technique(
        name="schedule-free AdamW",
        option="optim=schedule_free",
        done_by="the package schedulefree",
        needs="a constant rate; no parameter servers, no loose synchronisation, no offload",
        proof="tests/parallel/test_optimizers.py",
    ),
    Technique(
        name="moving average of the weights",
        option="optim.ema.decay=0.999",
        done_by="our own, in place on shards",
        needs="no parameter servers, no offload",
        proof="tests/parallel/test_weight_average.py",
    ),
)

_PRECISION = (
    Technique(
        name="mixed precision: bfloat16",
        option="precision=bf16",
        done_by="autocast; fully_shard's mixed precision",
        numbers=INEXACT + "computed in bfloat16",
        needs="on GPUs, one that has it",
        proof="tests/parallel/test_precision.py",
    ),
    Technique(
        name="mixed precision: float16, dynamic loss scale",
        option="precision=fp16",
        done_by="the same, and our own scale over all axes",
        numbers=INEXACT + "computed in float16; a step that overflows is skipped",
        needs="no parameter servers",
        proof="tests/parallel/test_fp16.py",
    ),
    Technique(
        name="products in 8 bits",
        option="precision=fp8",
        done_by="torchao's Float8Linear, and its products of blocks (mxfp8); emulated on CPUs",
        numbers=INEXACT + "rounded to 8 bits; recipes with_gw_hp: the same in every layout",
        needs="not asynchronous tp, adapters, fp16, parameter servers; torchao",
        proof="tests/parallel/test_float8.py",
    ),
    Technique(
        name="weights gathered in 8 bits",
        option="parallel=fsdp precision=fp8 precision.float8=tensorwise precision.float8_gather=true",
        done_by="torchao's cast of each shard in fully_shard's extension; our own scales",
        numbers=INEXACT + "8 bits; cp=1: the same in every layout of the same micro-batches",
        needs="a zero strategy; not rowwise, tp 1, no offload of parameters",
        proof="tests/parallel/test_float8_gather.py",
    ),
)

_RANDOMNESS_AND_STATISTICS = (
    Technique(
        name="dropout",
        option="model.dropout=0.1",
        done_by="our own masks, by sample, layer, position and channel",
        needs="models.dropout; torch's own layers: other masks elsewhere, not over tp or cp",
        proof="tests/parallel/test_dropout.py",
    ),
    Technique(
        name="synchronised BatchNorm",
        option="parallel.sync_batchnorm=true",
        done_by="our own layer on CPUs, torch's on GPUs",
        needs="statistics are of one micro-batch of all ranks; pp = cp = tp = 1",
        proof="tests/parallel/test_batch_norm.py",
    ),
)

_DDP_OPTIONS = (
    Technique(
        name="static graph",
        option="parallel.static_graph=true",
        done_by="DistributedDataParallel",
        needs="ddp",
        proof="tests/parallel/test_ddp_options.py",
    ),
    Technique(
        name="parameters that take no part",
        option="parallel.unused_parameters=true",
        done_by="DistributedDataParallel",
        needs="ddp",
        proof="tests/parallel/test_ddp_options.py",
    ),
    Technique(
        name="reduction through MPI",
        option="parallel.reduce_with=mpi",
        done_by="mpi4py, in the buckets of DistributedDataParallel",
        needs="ddp on CPUs; ranks that MPI starts",
        proof="tests/parallel/test_mpi_hook.py",
    ),
    Technique(
        name="gradients in half the bytes (bf16, fp16)",
        option="parallel.compression.method=bf16",
        done_by="our own hook of DistributedDataParallel",
        numbers=INEXACT + "gradients are rounded",
        needs="ddp; not precision=fp64",
        proof="tests/parallel/test_compression.py",
    ),
    Technique(
        name="compressed gradients (powersgd, topk)",
        option="parallel.compression.method=powersgd",
        done_by="our own hook of DistributedDataParallel",
        numbers=INEXACT + "part of a gradient comes in later steps",
        needs="ddp; not precision=fp16",
        proof="tests/parallel/test_compression.py",
    ),
)

_LOOSE_SYNCHRONISATION = (
    Technique(
        name="loose synchronisation: local SGD, DiLoCo, streaming",
        option="parallel.sync.every=50 parallel.dp_replicate=2",
        done_by="our own exchange; torch's SGD for the outer step",
        numbers=INEXACT + "copies train apart; exact against a loop over copies",
        needs="dense models; ddp or a zero strategy, tp, cp and pp in a copy",
        proof="tests/parallel/test_loose_sync.py",
    ),
    Technique(
        name="loose synchronisation, compressed (int8, int4)",
        option="parallel.sync.every=50 parallel.sync.compression=int8",
        done_by="our own; rounded to levels of a block",
        numbers=INEXACT + "outer gradients are rounded",
        needs="the same; another layout of a copy has other blocks",
        proof="tests/parallel/test_loose_sync.py",
    ),
    Technique(
        name="loose synchronisation that outlives copies",
        option="parallel.sync.every=50 parallel.sync.lost_after_seconds=300",
        done_by="our own, over gloo groups that are made anew",
        numbers=INEXACT + "a lost copy's samples are not trained; exact against a loop",
        needs="not without rank 0's copy; no overlap, no streams",
        proof="tests/parallel/test_lost_copies.py",
    ),
)

_PARAMETER_SERVERS = (
    Technique(
        name="parameter servers, synchronous",
        option="parallel=server",
        done_by="our own, over MPI windows",
        needs="ddp on CPUs; ranks that MPI starts",
        proof="tests/parallel/test_server.py",
    ),
    Technique(
        name="parameter servers, asynchronous",
        option="parallel=server parallel.server.mode=asynchronous",
        done_by="our own, over MPI windows",
        numbers=INEXACT + "a gradient may be server.staleness updates old",
        needs="ddp on CPUs; ranks that MPI starts",
        proof="tests/parallel/test_server.py",
    ),
    Technique(
        name="peers: averaging with neighbours",
        option="parallel=server parallel.server.mode=peer",
        done_by="our own, over MPI windows",
        numbers=INEXACT + "the ranks' parameters differ",
        needs="ddp on CPUs; ranks that MPI starts",
        proof="tests/parallel/test_server.py",
    ),
)

SUPPORT_TABLE: tuple[Technique, ...] = (
    *_DATA_PARALLEL,
    *_TENSOR_AND_CONTEXT_PARALLEL,
    *_PIPELINE,
    *_MODELS,
    *_EXPERT_PARALLEL_AND_COMBINATIONS,
    *_ADAPTERS,
    *_MEMORY_AND_COMPILATION,
    *_OPTIMIZERS,
    *_PRECISION,
    *_RANDOMNESS_AND_STATISTICS,
    *_DDP_OPTIONS,
    *_LOOSE_SYNCHRONISATION,
    *_PARAMETER_SERVERS,
)
"""Every technique that exists, in the order of the page."""
