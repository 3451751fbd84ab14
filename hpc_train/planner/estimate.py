"""estimate: memory and step time of jobs, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.planner.constants import Constants
from hpc_train.planner.jobs import Column, Jobs
from hpc_train.planner.memory import FITS, MAYBE, NO, YES, Memory, memory
from hpc_train.planner.step_time import Time, time

__all__ = ["FITS", "MAYBE", "NO", "YES", "Estimate", "Memory", "Time", "estimate", "memory", "time"]


@dataclass(frozen=True)
class Estimate:
    """Of some jobs."""

    memory: Memory
    time: Time
    model_flops: Column
    """[n] of a step of the whole job, recomputation not counted."""
    mfu: Column
    hfu: Column
    tokens_per_second: Column
    """Of one GPU."""


def estimate(jobs: Jobs, constants: Constants) -> Estimate:
    """All of it. `memory` and `time` are there by themselves: a search asks for memory first."""
    spent = time(jobs, constants)
    rate = 1 / (spent.step * jobs.world)
    flops = jobs.model_flops
    mfu, hfu = flops * rate / jobs.peak_flops, spent.hardware_flops * rate / jobs.peak_flops
    return Estimate(memory(jobs, constants), spent, flops, mfu, hfu, jobs.tokens * rate)
