"""`bench gemm`: real products on the device at hand, their file, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.bench.gemm import GemmResult, MatrixProduct, list_product_shapes, read_gemm_result
from hpc_train.cli.main import main
from hpc_train.errors import UserError


def test_products_are_measured_drawn_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "gemm.json", tmp_path / "gemm.svg"
    words = ["--min", "16", "--max", "32", "--rounds", "1", "--precision", "fp32", "--precision", "bf16"]
    assert main(["bench", "gemm", *words, "--out", str(file), "--plot", str(picture)]) == 0
    assert "best" in capsys.readouterr().out
    assert "<svg" in picture.read_text()
    found = read_gemm_result(file)
    assert {it.precision for it in found.products} == {"fp32", "bf16"}
    assert len(found.products) == 2 * len(list_product_shapes(16, 32))
    assert found.copy_gb_s > 0.1
    assert all(1e-7 < it.tflops < 1e4 for it in found.products)
    assert found.best()["fp32"].tflops == max(it.tflops for it in found.products if it.precision == "fp32")


def test_the_json_is_that_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--min", "16", "--max", "16", "--rounds", "1", "--precision", "fp64", "--json"]
    assert main(["bench", "gemm", *words]) == 0
    text = capsys.readouterr().out
    (tmp_path / "same.json").write_text(text)
    assert json.loads(read_gemm_result(tmp_path / "same.json").to_json()) == json.loads(text)


def test_speed_of_a_product() -> None:
    product = MatrixProduct("fp32", 1000, 1000, 1000, 2e-3)
    assert product.tflops == pytest.approx(1.0)
    assert GemmResult("cpu", "", 1, 1.0, (product, MatrixProduct("fp32", 10, 10, 10, 1.0))).best() == {"fp32": product}


def test_shapes_are_cubes_and_those_of_layers() -> None:
    found = list_product_shapes(256, 1024)
    assert (256, 256, 256) in found
    assert {(2048, 4096, 1024), (2048, 1024, 4096), (2048, 1024, 1024)} <= set(found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--min", "64", "--max", "32"], "sizes go from 16"),
        (["--rounds", "0"], "must be at least 1"),
        (["--out", "no/such/folder.json"], "a folder that exists"),
        (["--plot", "x.txt"], "must end in .png or .svg"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], what: str) -> None:
    assert main(["bench", "gemm", *words]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("content", ["", "{}", '{"version": 0}', '{"version": 1, "products": []}'])
def test_other_files_are_no_result(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        read_gemm_result(path)
    assert str(path) in str(error.value)
