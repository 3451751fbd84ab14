"""Shared by all tests: one thread a process, so that forked ranks neither deadlock nor fight over two cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
