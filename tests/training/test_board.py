from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_train.training.loggers.tensorboard_writer import TensorBoardWriter


def write(folder: Path, resumed_at: int, losses: dict[int, float]) -> None:
    board = TensorBoardWriter(folder, resumed_at)
    for step, loss in losses.items():
        board.add({"step": step, "loss": loss, "mfu": None})
    board.close()


def test_tensorboard_reads_each_step_once_also_after_a_resume(tmp_path: Path) -> None:
    write(tmp_path, 0, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0})
    write(tmp_path, 3, {4: 40.0})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]  # what is not known is not there
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1), (2, 2), (3, 3), (4, 40)]
