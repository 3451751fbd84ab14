"""What the tests compose from a base of the session is what Hydra composes from the beginning."""

from __future__ import annotations

import hydra
import pytest
from base_configs import compose_from_base
from omegaconf import OmegaConf

from hpc_train.config import compose as composing
from hpc_train.config.compose import compose, compose_unchecked
from hpc_train.errors import UserError

RIGHT = (
    (),
    ("run_dir=/tmp/x", "train.steps=5", "train.steps=6"),
    ("model=vit_tiny", "data=digits", "optim.lr=1e-3", "optim.betas=[0.8,0.9]"),
    ("optim.lr=0.1", "parallel=fsdp", "parallel.tp=2", "precision=fp64", "optim.schedule.name=linear"),
    ("model.layers=3", "parallel.recompute.mode=full", "+launch.extra.begin=now", "++train.seed=3"),
    ("cluster.nodes=2", "launch=slurm", "cluster=dgx_h100", "model.hidden=${model.heads}"),
)
WRONG = ("model.layer=3", "optim.lr=much", "+model.layers=2", "optim.betas.7=1", "model=nothing", "optim=x")


@pytest.mark.parametrize("words", RIGHT, ids=" ".join)
def test_a_config_is_hydras(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for function in (compose_from_base, hydra.compose, compose_from_base):
        monkeypatch.setattr(composing, "hydra_compose", function)
        plain = compose_unchecked(list(words), None)
        found.append((OmegaConf.to_yaml(plain), repr(plain), plain._metadata.flags, compose(words)))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("word", WRONG)
def test_an_error_is_hydras(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for function in (compose_from_base, hydra.compose):
        monkeypatch.setattr(composing, "hydra_compose", function)
        with pytest.raises(UserError) as raised:
            compose(["train.steps=5", word])
        said.append(str(raised.value))
    assert said[0] == said[1]
