"""Shared by all tests: one thread a process, so that forked ranks neither deadlock nor fight over two cores."""

import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)


def pytest_sessionfinish() -> None:
    """What a failed test left running would keep pytest itself from ever ending."""
    for process in multiprocessing.active_children():
        process.kill()
