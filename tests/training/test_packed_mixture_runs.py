"""A run on a mixture of packed documents, resumed on another number of ranks, is the run of one process."""

from pathlib import Path

import numpy as np
import pytest
from training_runs import metrics, run, small

from hpc_train.errors import EXIT_DONE, EXIT_REQUEUE


def test_a_packed_mixture_resumes_on_fewer_ranks_within_its_curriculum(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        documents = [[*generator.integers(1, 256, length), 0] for length in generator.integers(1, 60, 120)]
        np.save(tmp_path / f"{name}.npy", np.concatenate(documents).astype("<u2"))
    mixture = (
        "data=mixture",
        f"data.paths=[{tmp_path}/a.npy,{tmp_path}/b.npy]",
        "data.samples=packed",
        "data.separator=0",
        f"data.later_tokens=[{4 * 8 * 32}]",
        "data.weights=[0.75,0.25]",
        "data.later_weights=[0.25,0.75]",
        "precision=fp64",
        "parallel=fsdp",
    )
    straight, resumed = (small(None, tmp_path / name, *mixture) for name in ("one", "two"))
    assert [rank.code for rank in run(straight, ranks=1)] == [EXIT_DONE]
    assert {rank.code for rank in run(resumed, ranks=2, asked={0: 3})} == {EXIT_REQUEUE}
    assert [(rank.code, rank.step) for rank in run(resumed, ranks=1)] == [(EXIT_DONE, 6)]
    for got, wanted in zip(metrics(resumed, "loss", "grad_norm"), metrics(straight, "loss", "grad_norm"), strict=True):
        assert got == pytest.approx(wanted, rel=1e-10)
