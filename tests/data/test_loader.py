"""The loader: the shares of all ranks are the step, read ahead without a trace."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_train.config.model import TokenDataConfig
from hpc_train.data.datasets import Dataset, open_dataset
from hpc_train.data.loader import Loader, compute_share
from hpc_train.data.sample_order import order_samples
from hpc_train.data.token_store import StoreHeader, TokenBlock, write_store
from hpc_train.errors import UserError

LENGTH = 16


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    path: Path = tmp_path_factory.mktemp("store") / "a.h5"
    tokens = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint16)
    write_store(path, [TokenBlock(tokens, np.zeros(1, np.int64))], StoreHeader(256, "byte", "", "{}"))
    return open_dataset(TokenDataConfig(name="test", path=str(path)), LENGTH, "train")


def rows(loader: Loader, start: int) -> torch.Tensor:
    return torch.cat([micro.inputs for micro in loader.batch(start).micro])


def test_batches_equal_direct_indexing_over_several_epochs(dataset):
    steps = 3 * len(dataset) // 12 + 1
    with Loader(dataset, seed=3, global_batch=12, micro_batch=4, dp_index=1, dp_size=2) as loader:
        for step in range(steps):
            micro = loader.batch(step * 12).micro
            indices = order_samples(3, len(dataset), step * 12 + 6, 6)
            inputs, targets = dataset.get(indices)
            assert [len(one.inputs) for one in micro] == [4, 2]
            assert torch.equal(torch.cat([one.inputs for one in micro]), inputs)
            assert torch.equal(torch.cat([one.targets for one in micro]), targets)


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("micro_batch", [1, 5, 100])
def test_the_shares_of_all_ranks_are_the_step_at_any_degree(dataset, dp_size, micro_batch):
    whole = dataset.get(order_samples(0, len(dataset), 24, 12))[0]
    parts = []
    for rank in range(dp_size):
        with Loader(dataset, 0, 12, micro_batch, rank, dp_size) as loader:
            parts.append(rows(loader, 24))
    assert torch.equal(torch.cat(parts), whole)


def test_a_run_resumed_at_another_degree_and_batch_sees_the_samples_left(dataset):
    """One epoch: 40 samples at degree 2, then 9 a step at degree 3, and every sample once."""
    n = len(dataset)
    seen = []
    consumed = 0
    for global_batch, dp_size, until in ((8, 2, 40), (9, 3, n)):
        loaders = [Loader(dataset, 5, global_batch, 2, rank, dp_size) for rank in range(dp_size)]
        while consumed < until:
            seen += [rows(loader, consumed) for loader in loaders]
            consumed += global_batch
        for loader in loaders:
            loader.close()
    expected = dataset.get(np.arange(n))[0]
    got = torch.cat(seen)[:n]
    assert sorted(got.tolist()) == sorted(expected.tolist())


def test_any_step_may_be_asked_for_at_any_time(dataset):
    with Loader(dataset, 0, 8, 8, 0, 1) as loader:
        for start in (0, 8, 80, 16, 16, 0, 8):
            assert torch.equal(rows(loader, start), dataset.get(order_samples(0, len(dataset), start, 8))[0])


def test_micro_batches_are_contiguous(dataset):
    with Loader(dataset, 0, 8, 3, 0, 1) as loader:
        assert all(one.inputs.is_contiguous() and one.targets.is_contiguous() for one in loader.batch(0).micro)


@pytest.mark.parametrize(
    ("global_batch", "dp_size", "legal"), [(16, 3, "15 or 18"), (2, 8, "set it to 8"), (100, 7, "98 or 105")]
)
def test_a_batch_with_a_remainder_names_the_nearest_that_fit(dataset, global_batch, dp_size, legal):
    with pytest.raises(UserError, match=legal) as error:
        Loader(dataset, 0, global_batch, 8, 0, dp_size)
    assert "\n" not in str(error.value)
    assert f"train.global_batch={global_batch}" in str(error.value)


def test_a_share_is_exact():
    assert compute_share(48, 16) == 3


class Failing:
    """A data set whose disk goes away after some reads."""

    def __init__(self, inner: Dataset, reads: int) -> None:
        self.inner = inner
        self.reads = reads

    def __len__(self) -> int:
        return len(self.inner)

    def get(self, indices):
        self.reads -= 1
        if self.reads < 0:
            raise OSError("disk went away")
        return self.inner.get(indices)


def test_what_fails_in_the_background_is_raised_when_its_step_is_asked_for(dataset):
    with Loader(Failing(dataset, 1), 0, 8, 8, 0, 1) as loader:
        loader.batch(0)
        with pytest.raises(OSError, match="disk went away"):
            loader.batch(8)


def test_the_next_step_is_read_before_it_is_asked_for(dataset):
    second = threading.Event()

    class Watched(Failing):
        def get(self, indices):
            if self.reads == 1:
                second.set()
            return super().get(indices)

    with Loader(Watched(dataset, 2), 0, 8, 8, 0, 1) as loader:
        loader.batch(0)
        assert second.wait(60)


def test_close_ends_the_thread(dataset):
    before = threading.active_count()
    loaders = [Loader(dataset, 0, 8, 8, 0, 1) for _ in range(3)]
    for loader in loaders:
        loader.batch(0)
    assert threading.active_count() == before + 3
    for loader in loaders:
        loader.close()
    assert threading.active_count() == before


def test_the_thread_receives_no_signal_and_the_caller_all_of_them(dataset):
    blocked = {}

    class Asking(Failing):
        def get(self, indices):
            blocked["thread"] = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            return super().get(indices)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with Loader(Asking(dataset, 9), 0, 8, 8, 0, 1) as loader:
        loader.batch(0)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    catchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    assert {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT} <= blocked["thread"]
    assert {one for one in catchable if one < 32} <= blocked["thread"]


def test_a_process_that_forgets_to_close_still_ends(dataset):
    program = (
        "import sys; from hpc_train.config.model import TokenDataConfig\n"
        "from hpc_train.data.datasets import open_dataset; from hpc_train.data.loader import Loader\n"
        "data = open_dataset(TokenDataConfig(name='t', path=sys.argv[1]), 16, 'train')\n"
        "loader = Loader(data, 0, 8, 8, 0, 1); loader.batch(0); print('done')\n"
    )
    command = [sys.executable, "-c", program, str(dataset.store.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "done\n"
