"""Every file of conf/: it composes, passes all checks, and survives being written and read again."""

from __future__ import annotations

from functools import cache

import pytest
from drawn import draw
from omegaconf import OmegaConf

from hpc_train.config.compose import compose
from hpc_train.config.keys.groups import GROUPS, SCHEMAS, find_option_files, find_option_type, read_default_options
from hpc_train.config.plain_config import config_from_dict, config_to_dict, config_to_yaml
from hpc_train.config.run import RunConfig
from hpc_train.models.counts import count_parameters
from hpc_train.models.shape import check_shape

FILES = [(group, option) for group in GROUPS for option in find_option_files(group)]
FIRST = {file[0]: file for file in reversed(FILES)}.values()
"""One file of each group."""
NEEDS = {
    ("model", "custom"): ["model.name=mine"],
    ("model", "hf"): ["model.path=models/mine"],
    ("data", "custom"): ["data.name=mine"],
    ("optim", "custom"): ["optim.name=mine", "optim.module=mine"],
}
"""What an option asks its user to fill in."""
OF_THE_USER = ("custom", "hf")
"""Models whose name and shape are the user's."""


@cache
def chosen(group: str, option: str) -> RunConfig:
    return compose([f"{group}={option}", *NEEDS.get((group, option), [])])


@pytest.mark.parametrize(("group", "option"), FILES)
def test_the_option_composes(group: str, option: str) -> None:
    chosen(group, option)


@pytest.mark.parametrize("file", draw(FILES, {*FILES[::4], *FIRST}))
def test_the_option_survives_yaml(file: tuple[str, str]) -> None:
    config = chosen(*file)
    again = config_from_dict(OmegaConf.to_container(OmegaConf.create(config_to_yaml(config))))  # type: ignore[arg-type]
    assert again == config
    assert type(again.model) is type(config.model)
    assert type(again.data) is type(config.data)


@pytest.mark.parametrize("option", find_option_files("model"))
def test_a_model_file_says_its_own_name_and_a_shape_that_fits_together(option: str) -> None:
    model = chosen("model", option).model
    if option in OF_THE_USER:
        return
    assert model.name == option
    check_shape(model)
    assert (count_parameters(model) or 0) > 10_000


@pytest.mark.parametrize(
    ("option", "billions"),
    [
        ("llama_1b", 1.24),
        ("llama_7b", 6.74),
        ("llama_8b", 8.03),
        ("llama_13b", 13.0),
        ("llama_70b", 70.6),
        ("llama_405b", 405.9),
        ("gpt3_175b", 175),
        ("gpt3_530b", 530),
        ("gpt3_1t", 1008),
        ("vit_large", 0.304),
    ],
)
def test_a_model_has_the_size_that_it_is_known_by(option: str, billions: float) -> None:
    assert (count_parameters(chosen("model", option).model) or 0) / 1e9 == pytest.approx(billions, rel=0.02)


def test_every_group_but_experiment_has_a_default_among_its_files() -> None:
    defaults = read_default_options()
    assert set(defaults) == set(GROUPS) - {"experiment"}
    assert all(option in find_option_files(group) for group, option in defaults.items())


@pytest.mark.parametrize(("group", "option"), [(group, option) for group, option in FILES if group in SCHEMAS])
def test_the_type_of_an_option_is_known_without_composing(group: str, option: str) -> None:
    assert find_option_type(group, option) is type(getattr(chosen(group, option), group))


def test_model_custom_asks_for_a_name_and_takes_arguments() -> None:
    config = compose(["model=custom", "model.name=mine", "+model.args.width=3", "+model.args.act=relu"])
    assert config_to_dict(config)["model"]["args"] == {"width": 3, "act": "relu"}
