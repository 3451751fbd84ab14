"""parallel.reduce_with=mpi: gradients reduced by a real MPI, with the numbers of gloo."""

from __future__ import annotations

import pickle

import mpi_ranks
import numpy as np
import pytest
from mpi_start import run_mpi_ranks
from outcome import Outcome, assert_close, whole
from plain_setup import LAYOUTS, engine_of

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks

Found = dict[tuple[str, str], tuple[Outcome, int]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each rank saw."""
    folder, ranks = tmp_path_factory.mktemp("mpi"), request.param
    run_mpi_ranks(mpi_ranks.main, ranks, folder, ranks)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


@pytest.mark.parametrize("kind", mpi_ranks.KINDS)
def test_mpi_gives_the_numbers_of_gloo(trained: list[Found], kind: str) -> None:
    """Bit for bit with two ranks; more are added up in another order (design law 1: 1e-10)."""
    by = {how: [rank[how, kind][0] for rank in trained] for how in ("torch", "mpi")}
    wanted, got = (whole([outcome.state for outcome in by[how]]) for how in ("torch", "mpi"))
    if len(trained) == 2:
        for name, array in wanted.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)
    assert_close(got, wanted, 1e-10)
    for step in mpi_ranks.STEPS:
        gradients = (whole([outcome.gradients[step] for outcome in by[how]]) for how in ("mpi", "torch"))
        assert_close(*gradients, 1e-10)


@pytest.mark.parametrize("kind", mpi_ranks.KINDS)
def test_torch_reduces_no_gradient_meanwhile(trained: list[Found], kind: str) -> None:
    for rank in trained:
        assert rank["mpi", kind][1] == 0
        assert rank["torch", kind][1] > 0


def _build(world: World, config: RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        engine_of("bare", config, world)
    return str(caught.value)


def test_ranks_that_mpi_did_not_start_are_refused_in_a_line() -> None:
    config = LAYOUTS["ddp-2"].config("parallel.reduce_with=mpi")
    for said in run_ranks(_build, 2, config, parallel=config.parallel):
        assert said == (
            "parallel.reduce_with=mpi: MPI knows of 1 processes, the job has 2 ranks; "
            "start the ranks with mpirun, or srun --mpi=pmix"
        )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("parallel=fsdp",), "belongs to ddp, not to zero3"),
        (("parallel=ddp", "parallel.compression.method=topk"), "reduces with torch"),
        (("parallel=ddp", "cluster=dgx_a100"), "has GPUs"),
    ],
)
def test_where_it_has_no_place_is_said_in_a_line(overrides: tuple[str, ...], said: str) -> None:
    config = LAYOUTS["ddp-2"].config("parallel.reduce_with=mpi", *overrides)
    with pytest.raises(UserError, match=said) as caught:
        check_support(config, 2)
    assert "\n" not in str(caught.value)
