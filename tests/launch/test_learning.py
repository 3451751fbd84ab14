"""The road as a user walks it: a vision transformer learns real images, with plain lines and TensorBoard."""

from __future__ import annotations

import math

from jobs import Workshop, numbers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_train.training.records.run_records import read_metrics

STEPS = 60


def test_digits_are_learnt_and_the_curve_is_in_tensorboard(workshop: Workshop) -> None:
    ended = workshop.train(
        "run",
        "model=vit_tiny",
        "data=digits",
        f"train.steps={STEPS}",
        "train.global_batch=64",
        "train.micro_batch=32",
        "launch.ranks=1",
        "train.eval_every=30",
        "train.eval_batches=4",
        "train.log_every=20",
        "train.tensorboard=true",
        "train.noise_scale.every=5",
    )
    assert ended.code == 0, ended
    run = workshop.folder / "run"
    losses = [line[1] for line in numbers(run)]
    assert sum(losses[:3]) / 3 > 0.9 * math.log(10)
    assert sum(losses[-10:]) / 10 < 1.2

    lines = [line for line in ended.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == [f"{step}/{STEPS}" for step in (1, 20, 30, 40, 60)]
    assert all("tokens/s" in line and "left 0:" in line for line in lines)
    assert f"done: {STEPS} steps; loss {losses[-1]:.4f}" in ended.out

    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert [(event.step, round(event.value, 4)) for event in board.Scalars("loss")] == [
        (step, round(loss, 4)) for step, loss in enumerate(losses, 1)
    ]
    assert [event.step for event in board.Scalars("validation_loss")] == [30, 60]
    assert any(record.get("noise_scale") for record in read_metrics(run / "metrics.jsonl"))
