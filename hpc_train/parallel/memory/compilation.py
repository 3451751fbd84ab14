"""torch.compile each block by itself: blocks share one code, so it is compiled once.

A graph break would silently run uncompiled, so each new one is reported as a warning. With parallel.cuda_graphs torch
records the kernels of each block and replays them (its CUDA graph trees); the model says where a forward begins, so
that torch knows when it may use the memory of the last one again.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from functools import partial
from typing import Any

import torch
from torch import nn

from hpc_train._torch.observation import graph_breaks
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.mesh_axes import get_axis_degree
from hpc_train.parallel.user_model import Forward, get_blocks, replace_forward

log = logging.getLogger(__name__)


def compile_blocks(part: nn.Module, config: RunConfig, world: World) -> str:
    """Compile the forward of each block. Collectives that hooks start, such as fully_shard's, stay outside."""
    blocks = get_blocks(part, "parallel.compile=true")
    check_compiler(world.device)
    check_precision(config, world.device)
    graphs = config.parallel.cuda_graphs
    if graphs:
        check_graph_device(world.device)
        part.register_forward_pre_hook(begin_replays)
    reported: set[str] = set()
    split = get_axis_degree(world, "tp") > 1
    if split:
        from hpc_train.parallel.tensor.local_parameters import read_parameters_first
    # From the inside to the outside: the graph, the watch for its breaks, and the reads of parameters, which the graph
    # must not contain.
    for block in blocks:
        replace_forward(block, partial(_compile, graphs=graphs))
        replace_forward(block, partial(report_fallbacks, type(block).__name__, reported=reported))
        if split:
            replace_forward(block, partial(read_parameters_first, block))
    return f"compile: {len(blocks)} blocks{', replayed as CUDA graphs' if graphs else ''}"


def _compile(forward: Forward, graphs: bool) -> Forward:
    compiled: Forward = torch.compile(forward, mode="reduce-overhead" if graphs else None)
    return compiled


def begin_replays(*_: Any) -> None:
    """Tell torch that a forward of the whole model begins: results of replays before it are no longer needed."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def check_graph_device(device: torch.device) -> None:
    """Raise UserError on a device for which torch records no graphs; torch would skip that silently."""
    if device.type != "cuda" or torch.version.hip is not None:
        name = "an AMD GPU" if device.type == "cuda" else "a CPU"
        raise UserError(f"parallel.cuda_graphs=true: this rank computes on {name}; leave it out")


def report_fallbacks(block: str, forward: Forward, reported: set[str]) -> Forward:
    """Wrap `forward` to warn, once per reason, when torch runs a part of it uncompiled.

    block: name of the module in the warning. reported: reasons already reported, shared by all blocks of a model.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        before = graph_breaks()
        out = forward(*args, **kwargs)
        after = graph_breaks()
        if after != before:
            for reason in after.keys() - before.keys() - reported:
                reported.add(reason)
                log.warning("parallel.compile=true: a part of %s runs uncompiled: %s", block, _shorten(reason))
        return out

    return call


def _shorten(reason: str) -> str:
    """Shorten torch's message about a graph break to one line: its kind and the explanation."""
    kind, *details = reason.strip().splitlines()
    explained = [line.strip().removeprefix("Explanation: ") for line in details if "Explanation: " in line]
    return ": ".join([kind, *explained[:1]])


def check_precision(config: RunConfig, device: torch.device) -> None:
    """Raise UserError where the code that torch generates is known to be wrong."""
    if (
        config.precision.name == "fp64"
        and device.type == "cpu"
        and torch.__version__ < torch.torch_version.TorchVersion("2.13")
    ):
        raise UserError(
            f"parallel.compile=true: torch {torch.__version__} compiles attention in float64 wrongly on CPUs; use "
            "torch 2.13, another precision, or parallel.compile=false"
        )


def check_compiler(device: torch.device) -> None:
    """Raise UserError where torch would fail to compile in the first step, with a long message."""
    compiler = os.environ.get("CXX", "g++")  # torch's own rule
    if shutil.which(compiler) is None:
        raise UserError(
            f"parallel.compile=true: there is no C++ compiler {compiler} here; load a module that has one, set CXX, or "
            "use parallel.compile=false"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError("parallel.compile=true: Triton is not installed; install it, or use parallel.compile=false")
