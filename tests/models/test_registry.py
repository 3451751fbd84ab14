"""Users' own models, from a real module on disk and from a real entry point."""

import sys
from pathlib import Path

import pytest
import torch
from model_shapes import GPT2, VIT

from hpc_train.config.model import CustomModelConfig, ModelConfig
from hpc_train.errors import UserError
from hpc_train.models import build_model, register
from hpc_train.models.transformer import Transformer
from hpc_train.models.vision_transformer import VisionTransformer

SOURCE = """
from torch import nn
from hpc_train.models import register

@register("{name}")
class Perceptron(nn.Sequential):
    def __init__(self, width: int = 8, depth: int = 1) -> None:
        super().__init__(*[nn.Linear(width, width) for _ in range(depth)])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which a console script does not have on its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return tmp_path


def write(folder: Path, module: str, name: str) -> None:
    (folder / f"{module}.py").write_text(SOURCE.format(name=name))


def line(config: ModelConfig) -> str:
    """The one line that building this raises."""
    with pytest.raises(UserError) as error:
        build_model(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_kinds_that_come_with_the_package() -> None:
    assert isinstance(build_model(GPT2), Transformer)
    assert isinstance(build_model(VIT), VisionTransformer)


def test_a_model_in_a_module_of_the_current_folder(folder: Path) -> None:
    write(folder, "my_models", "perceptron")
    model = build_model(CustomModelConfig(name="perceptron", module="my_models", args={"width": 3, "depth": 2}))
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(3, 3), (3,), (3, 3), (3,)]


def test_a_custom_model_is_drawn_from_the_seed_and_leaves_the_generator_alone(folder: Path) -> None:
    write(folder, "seeded_models", "seeded")
    config = CustomModelConfig(name="seeded", module="seeded_models")
    before = torch.random.get_rng_state()
    first, again, other = (next(build_model(config, seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_model_of_an_installed_package(folder: Path) -> None:
    (folder / "their_package.py").write_text(
        "from torch import nn\n\ndef make(width=2):\n    return nn.Linear(width, 1)\n"
    )
    info = folder / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their_package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hpc_train.models]\ntheirs = their_package:make\nbroken = their_package:no\n"
    )
    sys.path.append(str(folder))
    model = build_model(CustomModelConfig(name="theirs", args={"width": 5}))
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(1, 5), (1,)]
    assert line(CustomModelConfig(name="broken")).startswith(
        "model.name=broken: its entry point their_package:no cannot"
    )
    assert line(CustomModelConfig(name="theris")).startswith(
        "model.name=theris: not a registered model; did you mean 'theirs'? Or set model.module"
    )


def test_wrong_input_is_one_line(folder: Path) -> None:
    write(folder, "some_models", "transducer")
    (folder / "broken_models.py").write_text("import torch\nraise ValueError('no\\nluck')\n")
    (folder / "unparsable_models.py").write_text("def (:\n")
    some = "some_models"
    assert line(CustomModelConfig(name="transduser", module=some)) == (
        "model.name=transduser: not a registered model; did you mean 'transducer'?"
    )
    assert line(CustomModelConfig(name="transducer", module=some, args={"widht": 3})) == (
        "model.args (widht): do not fit transducer(width: int = 8, depth: int = 1) -> None: "
        "got an unexpected keyword argument 'widht'"
    )
    assert line(CustomModelConfig(name="a", module="no_such_models")).startswith(
        "model.module=no_such_models: cannot be imported (ModuleNotFoundError: No module named 'no_such_models')"
    )
    place = "(broken_models.py:2, in <module>: ValueError: no luck)"
    assert place in line(CustomModelConfig(name="a", module="broken_models"))
    assert "(SyntaxError: " in line(CustomModelConfig(name="a", module="unparsable_models"))
    assert line(ModelConfig(kind="transfomer", name="a")) == (
        "model.kind=transfomer: no such kind; did you mean 'transformer'?"
    )


def test_what_is_not_a_module_is_refused() -> None:
    register("a_number")(lambda: 3)  # type: ignore[arg-type, return-value]
    assert line(CustomModelConfig(name="a_number")).startswith("model.name=a_number: returned a int; it must return")


def test_a_name_is_taken_once_but_may_be_imported_again() -> None:
    def mine() -> torch.nn.Module:
        return torch.nn.Identity()

    def other() -> torch.nn.Module:
        return torch.nn.Identity()

    register("taken")(mine)
    register("taken")(mine)
    with pytest.raises(UserError, match=r"register\('taken'\): used twice, by .*mine and .*other; rename one"):
        register("taken")(other)
