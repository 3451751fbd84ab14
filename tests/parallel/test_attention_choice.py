"""model.attention: what a kernel cannot do is refused in one line before a rank starts; the log says what is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matrix import MODELS, SEQUENCES, Case, fresh

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.interfaces import World
from hpc_train.models.layers import ScaledDotProduct
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

BAD = [
    (["model.attention=flex"], "model.attention=flex: torch has no backward of FlexAttention on CPUs"),
    (
        ["model.attention=cudnn"],
        "model.attention=cudnn: is a kernel of GPUs, and this is a CPU",
    ),
    (["model.attention=flash", "model.attention_softcap=5"], "has no soft-caps, and model.attention_softcap=5"),
    (["model.attention=flash", "model.dropout=0.1"], "which model.dropout=0.1 needs; use auto"),
    (["model.attention=math", "parallel.cp=2"], "has no effect with parallel.cp=2"),
    (["model.global_every=2"], "model.global_every=2: has no effect, as no layer has a window"),
    (["model.global_every=1", "model.sliding_window=4"], "leaves no layer with a window"),
    (
        ["model=deepseek_tiny", "model.sliding_window=4", "parallel=fsdp"],
        "model.sliding_window=4: model.latent",
    ),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine's own kernels differ")
@pytest.mark.parametrize(("words", "said"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_computed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["train", f"run_dir={tmp_path}/run", "launch.ranks=2", "train.steps=1", *words]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert (error.count("\n"), said in error) == (1, True), error
    assert not (tmp_path / "run").exists()


def test_a_kernel_of_16_bits_is_refused_for_a_gpu_in_float32() -> None:
    config = compose(("model=llama_tiny", "model.attention=flash", "cluster.gpu.name=H100"))
    with pytest.raises(UserError, match="computes in 16 bits on GPUs"):
        check_support(config, 2)


LINES = {
    "llama": "attention: flash in 4 layers (model.attention=auto)",
    "windows": "attention: flash, window 5 in 2 layers, flash in 2 layers (model.attention=auto)",
    "capped": "attention: plain operations, window 6, soft-cap 1.5 in 4 layers (model.attention=auto)",
}


def _log(world: World, kind: str, overrides: tuple[str, ...] = ()) -> list[str]:
    config = Case(1, overrides, kind).config()
    said: list[str] = []
    with torch.device("meta"):
        whole = build_model(config.model)
    build(whole, lambda split: make_optimizer(split, config.optim, world), config, world, said.append)
    return [line for line in said if line.startswith("attention")]


def _logs(world: World) -> dict[str, list[str]]:
    return {kind: _log(world, kind) for kind in LINES}


def test_the_log_says_what_is_used() -> None:
    (found,) = run_ranks(_logs, 1)
    assert found == {kind: [line] for kind, line in LINES.items()}


def _kernels(world: World) -> dict[str, list[float]]:
    """Losses of two steps by each kernel, and which ones torch's profiler saw."""
    from dataclasses import replace

    from matrix import STEPS, steps

    found = {}
    for kernel in ("auto", "flash", "math"):
        case = Case(1, (), "windows", micro=SEQUENCES)
        config = case.config()
        changed = replace(config.model, attention=kernel)  # type: ignore[call-arg]
        object.__setattr__(config, "model", changed)
        try:
            engine = fresh(case, world)
            with torch.profiler.profile() as profile:  # of one step: making sense of its events takes seconds
                first = steps(engine, case, world, STEPS[:1])
            rest = steps(engine, case, world, STEPS[1:])
        finally:
            object.__setattr__(config, "model", MODELS["windows"])
        names = {event.key for event in profile.key_averages()}
        seen = any("flash_attention_for_cpu" in name for name in names)
        assert seen == (kernel != "math"), kernel
        cores = [module for part in engine.parts for module in part.modules() if isinstance(module, ScaledDotProduct)]
        assert {core.backend for core in cores} == {kernel}
        found[kernel] = first.losses + rest.losses
    return found


def test_each_kernel_is_the_one_that_runs_and_trains_the_same() -> None:
    (found,) = run_ranks(_kernels, 1)
    assert found["flash"] == pytest.approx(found["auto"], rel=1e-12)
    assert found["math"] == pytest.approx(found["auto"], rel=1e-12)
