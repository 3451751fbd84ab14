"""Rows of how gradients or copies are brought together: options of ddp, loose synchronisation, parameter servers."""

from __future__ import annotations

from hpc_train.parallel.rules.support_rows.technique import INEXACT, Technique

DDP_OPTIONS = (
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

LOOSE_SYNCHRONISATION = (
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

PARAMETER_SERVERS = (
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
