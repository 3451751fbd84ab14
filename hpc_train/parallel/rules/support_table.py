"""The table of techniques: what implements each, and whether its numbers equal those of one device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

EXACT = "equal to one device"
"""Design law 1: 1e-10 of the norm in float64, for loss, gradients, clipped norm, parameters and optimizer state."""
INEXACT = "not equal: "
"""Prefix of `numbers` for every other technique."""


@dataclass(frozen=True)
class Technique:
    """One line of the table in docs/parallelism.md."""

    name: str
    option: str
    """Overrides that turn it on."""
    backend: str
    """The library or code that does the work."""
    numbers: str
    """EXACT, or INEXACT and why."""
    needs: str
    """Other settings that it requires or excludes; empty: none."""
    proof: str
    """The test that proves it."""


def format_support_table() -> str:
    """Format the table as Markdown, for docs/parallelism.md."""
    lines = [_format_row(("technique", "options", "done by", "numbers", "needs", "proof")), _format_row(["---"] * 6)]
    for row in SUPPORT_TABLE:
        proof = f"[{row.proof.rpartition('/')[2]}](../{row.proof})"
        lines.append(_format_row((row.name, f"`{row.option}`", row.backend, row.numbers, row.needs, proof)))
    return "\n".join(lines) + "\n"


def _format_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


SUPPORT_TABLE: tuple[Technique, ...] = (
    Technique(
        "data parallel",
        "parallel=ddp",
        "DistributedDataParallel; fully_shard where tp or pp > 1",
        EXACT,
        "",
        "tests/parallel/test_parity.py",
    ),
    Technique(
        "ZeRO-1: sharded optimizer state",
        "parallel=zero1",
        "fully_shard, gathered and reduced once per step",
        EXACT,
        "",
        "tests/parallel/test_zero.py",
    ),
    Technique(
        "ZeRO-2: sharded gradients too",
        "parallel=zero2",
        "fully_shard, reduced in every micro-batch",
        EXACT,
        "",
        "tests/parallel/test_zero.py",
    ),
    Technique(
        "ZeRO-3: sharded parameters too (FSDP2)",
        "parallel=fsdp",
        "fully_shard, block by block",
        EXACT,
        "",
        "tests/parallel/test_zero.py",
    ),
    Technique(
        "hybrid sharding (HSDP)",
        "parallel=hsdp",
        "fully_shard on dp_replicate x dp_shard",
        EXACT,
        "",
        "tests/parallel/test_parity.py",
    ),
    Technique(
        "tensor parallel, norms, embedding, head and loss too",
        "parallel=tp",
        "DTensor parameters, our own autograd functions",
        EXACT,
        "tp divides heads, feed_forward and the positions",
        "tests/parallel/test_tensor.py",
    ),
    Technique(
        "asynchronous tensor parallel",
        "parallel=tp parallel.tensor.asynchronous=true",
        "our own ring of products and messages",
        EXACT,
        "tensor.sequence; a whole backward; no ViT",
        "tests/parallel/test_async_tensor.py",
    ),
    Technique(
        "context parallel: ring attention",
        "parallel=cp",
        "our own ring over fused attention, balanced causal order",
        EXACT,
        "2 cp divides the positions; no ViT; with dropout keys and values are gathered",
        "tests/parallel/test_context.py",
    ),
    Technique(
        "context parallel: Ulysses",
        "parallel=cp parallel.context.method=ulysses",
        "our own all-to-all of heads and positions",
        EXACT,
        "cp divides heads / tp and the positions; no ViT",
        "tests/parallel/test_context.py",
    ),
    Technique(
        "pipeline: gpipe, 1f1b, looped_bfs, interleaved_1f1b",
        "parallel=pp parallel.pipeline.schedule=gpipe",
        "torch.distributed.pipelining",
        EXACT,
        "a model with stages; micro-batches for the schedule",
        "tests/parallel/test_pipeline.py",
    ),
    Technique(
        "pipeline, split backward: interleaved_zero_bubble, zbv, dualpipev",
        "parallel=pp parallel.pipeline.schedule=zbv",
        "torch.distributed.pipelining",
        EXACT,
        "the same; recompute.mode none or full; no compilation",
        "tests/parallel/test_pipeline.py",
    ),
    Technique(
        "pipeline: naive, or an order from a file",
        "parallel=pp parallel.pipeline.schedule=naive",
        "torch's pipeline runtime over an order that is proved first",
        EXACT,
        "the same; a file is for one number of micro-batches",
        "tests/parallel/test_pipeline.py",
    ),
    Technique(
        "mixture of experts, auxiliary loss, bias or capacity",
        "model=llama_moe_tiny",
        "our own layer; torch's grouped products on GPUs in bfloat16",
        EXACT,
        "no compilation; a whole backward; no parameter servers",
        "tests/parallel/test_matrix.py",
    ),
    Technique(
        "multi-head latent attention (DeepSeek-V3)",
        "model=deepseek_tiny",
        "our own layer; tp and cp as any attention, tp gathers latents",
        EXACT,
        "rotary positions; no dropout; values no wider than keys",
        "tests/parallel/test_matrix.py",
    ),
    Technique(
        "sliding windows, in all layers or with global ones between",
        "model.sliding_window=64 model.global_every=2",
        "our own blocks of a sequence; FlexAttention on GPUs; a shorter ring",
        EXACT,
        "not latent attention",
        "tests/parallel/test_windows.py",
    ),
    Technique(
        "soft-caps of attention scores and logits",
        "model.attention_softcap=50 model.logit_softcap=30",
        "our own operator; FlexAttention on GPUs",
        EXACT,
        "not latent attention",
        "tests/parallel/test_windows.py",
    ),
    Technique(
        "Gemma 2 and 3: four norms per block, gated GELU, two rotary bases",
        "model=gemma_tiny",
        "our own layers",
        EXACT,
        "not latent attention",
        "tests/parallel/test_matrix.py",
    ),
    Technique(
        "OLMo 2 and 3: norms of results only, queries and keys normalised over all heads",
        "model.pre_norms=false model.post_norms=true model.query_key_norm=full",
        "our own layers",
        EXACT,
        "not latent attention",
        "tests/parallel/test_matrix.py",
    ),
    Technique(
        "choice of the attention kernel",
        "model.attention=flash",
        "torch's scaled_dot_product_attention, FlexAttention",
        EXACT,
        "a kernel of the device; not the ring, whose blocks are its own",
        "tests/parallel/test_attention_choice.py",
    ),
    Technique(
        "expert parallel, shared experts overlapped",
        "parallel=fsdp parallel.ep=2 model=llama_moe_tiny",
        "our own all-to-all of tokens; fully_shard on a second mesh",
        EXACT,
        "zero strategies; ep divides dp_shard x cp and experts; no selective recompute",
        "tests/parallel/test_matrix.py",
    ),
    Technique(
        "3D: pipeline x data x tensor",
        "parallel=3d",
        "all of the above",
        EXACT,
        "",
        "tests/parallel/test_matrix.py",
    ),
    Technique(
        "4D: pipeline x data x context x tensor",
        "parallel=3d parallel.cp=2",
        "all of the above",
        EXACT,
        "",
        "tests/parallel/test_matrix.py",
    ),
    Technique(
        "fine-tuning with adapters: LoRA, DoRA",
        "adapter=lora",
        "our own layers, PEFT's file format",
        EXACT,
        "no asynchronous tensor parallelism, ep, servers; dropout: tp=1",
        "tests/parallel/test_adapters.py",
    ),
    Technique(
        "adapters over a base in 4 bits (NF4): QLoRA, QDoRA",
        "model=hf adapter=qlora",
        "bitsandbytes rounds and expands; our own layers",
        INEXACT + "weights rounded to 4 bits; the same in every layout",
        "model.path with weights; no compilation, no offloaded parameters",
        "tests/parallel/test_hf_adapters.py",
    ),
    Technique(
        "recomputation of whole blocks, all or every k-th",
        "parallel.recompute.mode=full",
        "torch.utils.checkpoint",
        EXACT,
        "a model with blocks; a whole backward",
        "tests/parallel/test_recompute.py",
    ),
    Technique(
        "recomputation by operator",
        "parallel.recompute.mode=selective",
        "torch's selective checkpoint contexts",
        EXACT,
        "the same; every operator in keep must run",
        "tests/parallel/test_recompute.py",
    ),
    Technique(
        "offload of activations",
        "parallel.recompute.offload=true",
        "our own saved-tensor hooks, pinned memory",
        EXACT,
        "GPUs; recompute.mode none or full",
        "tests/parallel/test_recompute.py",
    ),
    Technique(
        "offload of optimizer state (cpu, file)",
        "parallel=fsdp parallel.offload.optimizer=cpu",
        "our own, a part of the parameters at a time",
        EXACT,
        "a zero strategy; for a file a disk of the node",
        "tests/parallel/test_offload.py",
    ),
    Technique(
        "offload of parameters (cpu, file)",
        "parallel=fsdp parallel.offload.parameters=cpu",
        "CPUOffloadPolicy, over shards in a mapped file",
        EXACT,
        "a zero strategy; for a file a disk of the node",
        "tests/parallel/test_offload.py",
    ),
    Technique(
        "loss in chunks of tokens",
        "train.loss_chunk=1024",
        "our own: output layer, loss and gradients of a chunk together",
        EXACT,
        "our transformers; no loss of your own, no accuracy",
        "tests/parallel/test_chunked_loss.py",
    ),
    Technique(
        "compilation",
        "parallel.compile=true",
        "torch.compile of each block",
        EXACT,
        "a C++ compiler, on GPUs Triton; a model with blocks",
        "tests/parallel/test_compile.py",
    ),
    Technique(
        "Muon: hidden matrices made orthogonal",
        "optim=muon",
        "torch's iterations; our own exchange of parts between ranks",
        EXACT,
        "no parameter servers, no offload",
        "tests/parallel/test_optimizers.py",
    ),
    Technique(
        "SGD",
        "optim=sgd",
        "torch.optim.SGD",
        EXACT,
        "",
        "tests/parallel/test_optimizers.py",
    ),
    Technique(
        "Adafactor",
        "optim=adafactor",
        "torch.optim.Adafactor; over shards our own sums",
        EXACT,
        "no loose synchronisation, no offload",
        "tests/parallel/test_optimizers.py",
    ),
    Technique(
        "AdamW's moments in 16 bits",
        "optim.state=bf16",
        "our own, rounded stochastically",
        "not equal: moments are rounded; the same in every layout",
        "no parameter servers, no offload",
        "tests/parallel/test_optimizers.py",
    ),
    Technique(
        "AdamW's moments in 8 bits",
        "optim.state=8bit",
        "torchao's update and tables; blocks of whole rows",
        "not equal: moments are rounded; the same in every layout",
        "no precision=fp64, no parameter servers, no offload; tp leaves blocks whole",
        "tests/parallel/test_adamw_8bit.py",
    ),
    Technique(
        "schedule-free AdamW",
        "optim=schedule_free",
        "the package schedulefree",
        EXACT,
        "a constant rate; no parameter servers, no loose synchronisation, no offload",
        "tests/parallel/test_optimizers.py",
    ),
    Technique(
        "moving average of the weights",
        "optim.ema.decay=0.999",
        "our own, in place on shards",
        EXACT,
        "no parameter servers, no offload",
        "tests/parallel/test_weight_average.py",
    ),
    Technique(
        "mixed precision: bfloat16",
        "precision=bf16",
        "autocast; fully_shard's mixed precision",
        INEXACT + "computed in bfloat16",
        "on GPUs, one that has it",
        "tests/parallel/test_precision.py",
    ),
    Technique(
        "mixed precision: float16, dynamic loss scale",
        "precision=fp16",
        "the same, and our own scale over all axes",
        INEXACT + "computed in float16; a step that overflows is skipped",
        "no parameter servers",
        "tests/parallel/test_fp16.py",
    ),
    Technique(
        "products in 8 bits",
        "precision=fp8",
        "torchao's Float8Linear; emulated on CPUs",
        INEXACT + "rounded to 8 bits; rowwise_with_gw_hp: the same in every layout",
        "not tp, adapters, fp16, parameter servers; torchao",
        "tests/parallel/test_float8.py",
    ),
    Technique(
        "dropout",
        "model.dropout=0.1",
        "our own masks, by sample, layer, position and channel",
        EXACT,
        "models.dropout; torch's own layers: other masks elsewhere, not over tp or cp",
        "tests/parallel/test_dropout.py",
    ),
    Technique(
        "synchronised BatchNorm",
        "parallel.sync_batchnorm=true",
        "our own layer on CPUs, torch's on GPUs",
        EXACT,
        "statistics are of one micro-batch of all ranks; pp = cp = tp = 1",
        "tests/parallel/test_batch_norm.py",
    ),
    Technique(
        "static graph",
        "parallel.static_graph=true",
        "DistributedDataParallel",
        EXACT,
        "ddp",
        "tests/parallel/test_ddp_options.py",
    ),
    Technique(
        "parameters that take no part",
        "parallel.unused_parameters=true",
        "DistributedDataParallel",
        EXACT,
        "ddp",
        "tests/parallel/test_ddp_options.py",
    ),
    Technique(
        "reduction through MPI",
        "parallel.reduce_with=mpi",
        "mpi4py, in the buckets of DistributedDataParallel",
        EXACT,
        "ddp on CPUs; ranks that MPI starts",
        "tests/parallel/test_mpi_hook.py",
    ),
    Technique(
        "gradients in half the bytes (bf16, fp16)",
        "parallel.compression.method=bf16",
        "our own hook of DistributedDataParallel",
        INEXACT + "gradients are rounded",
        "ddp; not precision=fp64",
        "tests/parallel/test_compression.py",
    ),
    Technique(
        "compressed gradients (powersgd, topk)",
        "parallel.compression.method=powersgd",
        "our own hook of DistributedDataParallel",
        INEXACT + "part of a gradient comes in later steps",
        "ddp; not precision=fp16",
        "tests/parallel/test_compression.py",
    ),
    Technique(
        "loose synchronisation: local SGD, DiLoCo, streaming",
        "parallel.sync.every=50 parallel.dp_replicate=2",
        "our own exchange; torch's SGD for the outer step",
        INEXACT + "copies train apart; exact against a loop over copies",
        "dense models; ddp or a zero strategy, tp, cp and pp in a copy",
        "tests/parallel/test_loose_sync.py",
    ),
    Technique(
        "loose synchronisation, compressed (int8, int4)",
        "parallel.sync.every=50 parallel.sync.compression=int8",
        "our own; rounded to levels of a block",
        INEXACT + "outer gradients are rounded",
        "the same; another layout of a copy has other blocks",
        "tests/parallel/test_loose_sync.py",
    ),
    Technique(
        "loose synchronisation that outlives copies",
        "parallel.sync.every=50 parallel.sync.lost_after_seconds=300",
        "our own, over gloo groups that are made anew",
        INEXACT + "a lost copy's samples are not trained; exact against a loop",
        "not without rank 0's copy; no overlap, no streams, not launch=slurm",
        "tests/parallel/test_lost_copies.py",
    ),
    Technique(
        "parameter servers, synchronous",
        "parallel=server",
        "our own, over MPI windows",
        EXACT,
        "ddp on CPUs; ranks that MPI starts",
        "tests/parallel/test_server.py",
    ),
    Technique(
        "parameter servers, asynchronous",
        "parallel=server parallel.server.mode=asynchronous",
        "our own, over MPI windows",
        INEXACT + "a gradient may be server.staleness updates old",
        "ddp on CPUs; ranks that MPI starts",
        "tests/parallel/test_server.py",
    ),
    Technique(
        "peers: averaging with neighbours",
        "parallel=server parallel.server.mode=peer",
        "our own, over MPI windows",
        INEXACT + "the ranks' parameters differ",
        "ddp on CPUs; ranks that MPI starts",
        "tests/parallel/test_server.py",
    ),
)
"""Every technique that exists."""
