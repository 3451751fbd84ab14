"""Rows of what a step does with a layout's numbers: memory, compilation, optimizers, precision, randomness."""

from __future__ import annotations

from hpc_train.parallel.rules.support_rows.technique import INEXACT, Technique

MEMORY_AND_COMPILATION = (
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

OPTIMIZERS = (
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

PRECISION = (
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
        name="experts in 8 bits",
        option="model=qwen3_30b_a3b parallel=fsdp parallel.ep=2 precision=mxfp8 precision.float8_experts=true",
        done_by="torchao's grouped products of blocks; emulated on CPUs",
        numbers=INEXACT + "rounded to 8 bits; mxfp8_with_gw_hp: the same in every layout",
        needs="mxfp8 recipes, our own mixtures, widths that are multiples of 32 tp; torchao",
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

RANDOMNESS_AND_STATISTICS = (
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
