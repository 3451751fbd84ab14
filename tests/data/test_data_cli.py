"""`hpc-train data build|inspect` as its parser and its output are."""

import argparse
import json
import subprocess
import sys

import h5py
import pytest

from hpc_train.cli.data import add_arguments


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(words)
    return args.run(args)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.py").write_text("\x1b[31mred = 1\n" * 100)
    (folder / "b.txt").write_text("text\n" * 100)
    return folder


def test_build_prints_what_inspect_prints(tmp_path, corpus, capsys):
    out = str(tmp_path / "out.h5")
    assert run("build", out, str(corpus), "--json") == 0
    built = json.loads(capsys.readouterr().out)
    assert run("inspect", out, "--json") == 0
    assert json.loads(capsys.readouterr().out) == built
    assert (built["tokens"], built["documents"], built["vocab_size"]) == (1302 + 500, 2, 256)
    assert built["tokenizer"] == "byte"
    assert built["bytes"] == (tmp_path / "out.h5").stat().st_size
    assert 0 < built["unigram_entropy"] < 5.6
    assert built["sample"].startswith("\x1b[31mred = 1")


def test_build_takes_suffixes_tokenizer_and_vocabulary(tmp_path, corpus, capsys):
    words = ["--tokenizer", "bpe", "--vocab-size", "280", "--json", "--suffix", ".txt", ".md"]
    assert run("build", str(tmp_path / "out.h5"), str(corpus), *words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["documents"], facts["tokenizer"]) == (1, "bpe")
    assert 257 < facts["vocab_size"] <= 280
    assert facts["sample"].startswith("text\ntext\n")


def test_plain_output_lets_no_control_character_of_the_text_through(tmp_path, corpus, capsys):
    assert run("build", str(tmp_path / "out.h5"), str(corpus)) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"\x1b[31mred" in out
    assert "1,802" in out


def test_inspect_verifies_the_checksum(tmp_path, corpus, capsys):
    out = str(tmp_path / "out.h5")
    run("build", out, str(corpus))
    assert run("inspect", out, "--verify") == 0
    with h5py.File(out, "r+") as file:
        file["tokens"][7] ^= 1
    capsys.readouterr()
    assert run("inspect", out, "--verify", "--json") == 1
    assert json.loads(capsys.readouterr().out)["verified"] is False


def test_the_arguments_import_neither_torch_nor_h5py():
    program = (
        "import argparse, sys; from hpc_train.cli.data import add_arguments\n"
        "add_arguments(argparse.ArgumentParser())\n"
        "print(sorted({'torch', 'h5py', 'numpy', 'omegaconf'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[]\n"


def test_building_and_inspecting_import_no_torch(tmp_path, corpus):
    program = (
        "import argparse, sys; from hpc_train.cli.data import add_arguments\n"
        "parser = argparse.ArgumentParser(); add_arguments(parser)\n"
        "args = parser.parse_args(sys.argv[1:]); args.run(args)\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, "build", str(tmp_path / "out.h5"), str(corpus)]
    assert subprocess.run(command, capture_output=True, check=True).stdout.endswith(b"False\n")
