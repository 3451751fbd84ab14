"""What would have no effect, or cannot work, between techniques: refused in one line before any rank is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.checks.run_checks import check_run

TOPK = "parallel.compression.method=topk"
SERVERS, LATE = "parallel.server.mode=synchronous", "parallel.server.mode=asynchronous"
APART, LOST = "parallel.sync.every=10", "parallel.sync.lost_after_seconds=60"
EXPERTS, ZERO, EP = ("model=llama_moe_tiny",), ("parallel=fsdp",), "parallel.ep=2"
IMAGES = ("model=vit_tiny", "data=digits")
REFUSED: list[tuple[int, tuple[str, ...], str]] = [
    # nobody to exchange with
    (1, ("parallel.bucket_mib=1",), "parallel.bucket_mib=1: has no effect on one data-parallel rank"),
    (2, ("parallel.tp=2", "parallel.bucket_mib=1"), "parallel.bucket_mib=1: has no effect on one data-parallel rank"),
    (1, ("parallel=fsdp", "parallel.prefetch=2"), "parallel.prefetch=2: has no effect with dp_shard 1"),
    (2, ("parallel=fsdp", "parallel.pp=2", "parallel.prefetch=0"), "parallel.prefetch=0: has no effect with dp_sh"),
    (1, ("parallel=fsdp", "parallel.reshard_after_forward=false"), "=false: has no effect with dp_shard 1"),
    (
        2,
        ("parallel=hsdp", "parallel.dp_shard=1"),
        "parallel.strategy=zero3: has no effect with parallel.dp_shard=1, where each of 2 copies is whole; raise",
    ),
    (4, ("parallel=zero1", "parallel.dp_shard=1", "parallel.dp_replicate=2", "parallel.tp=2"), "strategy=zero1: has"),
    (1, (SERVERS,), f"{SERVERS}: has no effect on one rank"),
    # what another choice makes idle
    (2, (SERVERS, "parallel.bucket_mib=1"), f"parallel.bucket_mib=1: has no effect with {SERVERS}"),
    (2, (LATE, "parallel.sync_batchnorm=true"), "parallel.sync_batchnorm=true: makes ranks wait for one another"),
    (2, ("parallel.server.hybrid=true",), "parallel.server.hybrid=true: has no effect with parallel.server.mode=none"),
    (2, ("parallel.sync_batchnorm=true",), "parallel.sync_batchnorm=true: model=llama_tiny has no BatchNorm"),
    (2, (*IMAGES, "parallel.sync_batchnorm=true"), "parallel.sync_batchnorm=true: model=vit_tiny has no BatchNorm"),
    (2, (*IMAGES, "parallel.tp=2", "parallel.tensor.sequence=false"), "sequence=false: has no effect on a vision"),
    (2, (*IMAGES, "parallel.tp=2", "parallel.tensor.vocabulary=false"), "vocabulary=false: has no effect on a vi"),
    (2, ("parallel.pipeline.schedule=zbv",), "parallel.pipeline.schedule=zbv: has no effect with parallel.pp=1"),
    (2, ("parallel.pipeline.costs=[1,2]",), "parallel.pipeline.costs=[1.0,2.0]: has no effect with parallel.pp=1"),
    # copies that train on their own
    (2, ("parallel.sync.outer_lr=1",), "parallel.sync.outer_lr=1.0: has no effect without parallel.sync.every"),
    (2, (APART, "parallel=fsdp"), f"{APART}: there is a single copy of the model, because parallel.dp_replicate"),
    (4, (APART, "parallel=pp", "parallel.dp_replicate=2", "parallel.pipeline.resplit=true"), "resplit=true writes one"),
    (2, (APART, "train.global_batch=9"), "train.global_batch=9: does not divide over 2"),
    (2, (APART, SERVERS), f"{APART}: not with {SERVERS}"),
    (2, (APART, TOPK), f"{APART}: no gradients are sent between copies; leave out parallel.compression"),
    (
        2,
        (APART, "optim=muon"),
        f"{APART}: optim.name=muon is not made for copies that train apart; use optim=adamw or sgd",
    ),
    (
        2,
        (APART, "optim.ema.decay=0.9"),
        f"{APART}: each copy would have its own average of the weights",
    ),
    (2, (APART, "precision=fp16"), f"{APART}: each copy would have a loss scale of its own; use precision=bf16"),
    (2, (APART, "parallel.sync.overlap=10"), f"parallel.sync.overlap=10: must be less than {APART}"),
    (2, (APART, "parallel.sync.fragments=11"), "parallel.sync.fragments=11: one fragment is exchanged in a step"),
    (2, (APART, "parallel.sync.merge=0.1"), "parallel.sync.merge=0.1: has no effect without parallel.sync.overlap"),
    (2, (APART, "parallel.sync.block=16"), "parallel.sync.block=16: has no effect without parallel.sync.compression"),
    (
        2,
        ("parallel.sync.lost_after_seconds=60",),
        "parallel.sync.lost_after_seconds=60.0: has no effect without parallel.sync.every",
    ),
    (1, (APART, LOST, "parallel.dp_replicate=1"), f"{LOST}: there is a single copy of the model; give parallel.dp_re"),
    (2, (APART, LOST, "parallel.sync.overlap=1"), f"{LOST}: an exchange that fails is made again at once"),
    (2, (APART, LOST, "launch=slurm", "resilience=off"), f"{LOST}: a job that loses nodes has to be watched; use"),
    (2, (APART, LOST, "launch=slurm", "launch.points_per_job=2"), f"{LOST}: nobody watches points that share a job"),
    (2, (APART, LOST, "checkpoint.incremental=true"), f"{LOST}: not with checkpoint.incremental=true, which needs"),
    (2, (APART, "train.steps=25"), "train.steps=25: the last 5 steps would come after the last exchange"),
    # experts
    (2, (*ZERO, EP), f"{EP}: model=llama_tiny has no experts; leave it out"),
    (2, (*EXPERTS, EP), f"{EP}: ddp keeps all experts on each rank; use parallel.strategy=zero1, 2 or 3"),
    (4, (*EXPERTS, *ZERO, "parallel.ep=3"), "ep=3: is a view of dp_shard 4 x cp 1 = 4 ranks, which do not divide by"),
    (8, (*EXPERTS, *ZERO, "parallel.ep=8", "model.experts.count=4"), "=8: does not divide model.experts.count=4; ep c"),
    (2, (*EXPERTS, "model.experts.top_k=9"), "model.experts.top_k=9: a token cannot use more than model.experts.coun"),
    (2, (*EXPERTS, "parallel.tp=2", "model.experts.feed_forward=7"), "tp=2: does not divide the width 7 of an expert;"),
    (
        2,
        (*EXPERTS, "parallel=pp", "parallel.pipeline.schedule=zbv"),
        "schedule=zbv: splits the backward, which experts",
    ),
    (2, (*EXPERTS, "parallel=pp", "train.global_batch=8", "train.micro_batch=3"), "micro_batch=3: a pipeline pads the"),
    (2, (*EXPERTS, "parallel.compile=true"), "parallel.compile=true: model=llama_moe_tiny has experts, whose numbers"),
    (2, (*EXPERTS, *ZERO, EP, "parallel.recompute.mode=selective"), "mode=selective: cannot keep results while expert"),
    (2, (*EXPERTS, *ZERO, EP, "parallel.offload.parameters=cpu"), "parallel.offload.parameters=cpu: not with parallel"),
    (2, (*EXPERTS, LATE), f"{LATE}: the loads of experts are summed over all ranks in every step"),
    # runs that end before it begins
    (
        2,
        (TOPK, "parallel.compression.warmup_steps=5", "train.steps=5"),
        "parallel.compression.warmup_steps=5: nothing would be compressed in train.steps=5; use fewer, or",
    ),
    (2, ("parallel=pp", "parallel.pipeline.timeline=true", "train.steps=7"), "timeline=true: has no effect before s"),
    (2, ("parallel=pp", "parallel.pipeline.resplit=true", "train.steps=3"), "resplit=true: has no effect before st"),
    (2, ("parallel=pp", "parallel.pipeline.resplit=true", "checkpoint=none"), "resplit=true: only has an effect"),
]


@pytest.mark.parametrize(("ranks", "overrides", "words"), REFUSED)
def test_what_has_no_effect_is_one_line(ranks: int, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as caught:
        check_run(compose(overrides), ranks)
    said = str(caught.value)
    assert words in said
    assert "; " in said, "what would work"
    assert "\n" not in said


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ("parallel.tp=2", "parallel=fsdp")),
        (2, ("parallel=hsdp",)),
        (2, ("parallel=zero1", "parallel.cp=2", "parallel.prefetch=2")),
        (2, ("parallel.cp=2", "parallel.bucket_mib=1")),
        (2, (TOPK, "parallel.compression.warmup_steps=4", "train.steps=5")),
        (2, (TOPK, "parallel.compression.warmup_steps=5", "train.epochs=1")),
        (2, ("parallel=pp", "parallel.pipeline.timeline=true", "train.steps=8")),
        (2, ("parallel=pp", "parallel.pipeline.resplit=true", "train.steps=4")),
    ],
)
def test_what_has_an_effect_is_not_refused(ranks: int, overrides: tuple[str, ...]) -> None:
    check_run(compose(overrides), ranks)


@pytest.mark.parametrize("command", ["train launch.ranks=2", "submit --dry-run cluster.nodes=2"])
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("parallel.pipeline.timeline=true", "parallel.pipeline.timeline=true: has no effect with parallel.pp=1"),
        ("parallel.tensor.asynchronous=true", "parallel.tensor.asynchronous=true: has no effect with parallel.tp=1"),
        (
            "parallel=pp parallel.pipeline.schedule=own.csv",
            "parallel.pipeline.schedule=own.csv: No such file or directory; give",
        ),
        ("parallel=tp model.heads=3 model.hidden=96", "parallel.tp=2: does not divide model.heads=3; tp can be 1"),
        (f"{TOPK} parallel=fsdp", f"{TOPK}: belongs to ddp, not to zero3"),
    ],
)
def test_the_commands_say_it_and_leave_nothing(
    command: str,
    overrides: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main([*command.split(), *overrides.split()])
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("hpc-train: ")
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
