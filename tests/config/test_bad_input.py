"""Bad input, and the one line that answers it: exit code 2, no traceback, nothing written.

Takes up to a minute where the machine is busy: Hydra composes most of the 270 lines, and some of them twice.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.training.run_directory import locate_run_directory, prepare_run_directory

# A line of the user, and the answer after "hpc-train: ". Three dots stand for any text.
KEYS = [
    ("train trian.lr=1", "trian.lr=1: no key 'trian'; did you mean 'train'?"),
    ("train modle=llama_tiny", "modle=llama_tiny: no key 'modle'; did you mean 'model'?"),
    ("train optim.lrr=1", "optim.lrr=1: no key 'lrr'; did you mean 'lr'?"),
    ("train optim.schedule.warmup=1", "optim.schedule.warmup=1: no key 'warmup'; did you mean 'warmup_steps'?"),
    ("train cluster.gpu.memory=1", "cluster.gpu.memory=1: no key 'memory'; did you mean 'memory_gib'?"),
    ("train model.hiden=64", "model.hiden=64: no key 'hiden'; did you mean 'hidden'?"),
    ("train lr=0.1", "lr=0.1: no key 'lr'; did you mean 'optim.lr'?"),
    ("train train.lr=0.1", "train.lr=0.1: no key 'lr'; did you mean 'optim.lr'?"),
    ("train epochs=3", "epochs=3: no key 'epochs'; did you mean 'train.epochs'?"),
    ("train train.qqq=1", "train.qqq=1: no key 'qqq'; there are deterministic, epochs, eval_batches, ..."),
    ("train optim.lr.x=1", "optim.lr.x=1: 'optim.lr' is a value and has no 'x'"),
    ("train optim.betas.5=0.9", "optim.betas.5=0.9: the list has no such index"),
    ("train 'optim.betas=[{a: 1},0.9]'", "optim.betas.0={'a': 1}: must be one value, such as text or a number"),
    ("train data=text 'data.sources=[[a],b]'", "data.sources.0=['a']: must be one value, such as text or a number"),
    ("train data=text data.sources=[null]", "data.sources=[null]: cannot be null"),
    ("train +foo=1", "+foo: nothing reads this key; there are adapter, checkpoint, cluster, container, data, ..."),
    ("train +train.step=1", "+train.step: nothing reads this key; did you mean 'steps'?"),
    ("train launch.extra.nice=5", "launch.extra.nice=5: no key 'nice' yet; write +launch.extra.nice=5 to add it"),
    ("train launch.extra={nice:5}", "launch.extra={nice:5}: no key 'nice' yet; write +launch.extra.nice=<value> ..."),
    ("train 'train={stepss:4}'", "train={stepss:4}: no key 'stepss'; did you mean 'steps'?"),
    ("train ~train.seed", "~train.seed: ...does not support deletion"),
]
CHOICES = [
    ("train model=lama_tiny", "model=lama_tiny: no such model; did you mean 'llama_tiny'?"),
    ("train model=lama", "model=lama: no such model; did you mean 'llama_1b', 'llama_7b' or 'llama_8b'?"),
    ("train precision=bf61", "precision=bf61: no such precision; did you mean 'bf16'?"),
    ("train optim=null", "optim=null: no such optim; there are adafactor, adamw, ..."),
    ("train model=", "model=: no such model; there are custom, ..., gpt2_tiny, ..."),
    ("train experiment=nothing_like_it", "experiment=nothing_like_it: no such experiment; there ..."),
    ("train model=llama_tiny,llama_1b", "model=llama_tiny,llama_1b: several values for one run; give one value, ..."),
    ("train model=custom", "model=custom: model.name: has no value; give it one"),
    ("train ~model", "~model: a group cannot be left out; choose one of its options, model=<option>"),
    ("train +model=llama_1b", "+model=llama_1b: the group is always there; write model=llama_1b"),
    ("train model@x=llama_1b", "model@x=llama_1b: '@x' has no effect here; write model=<option>"),
    ("train hydra.run.dir=x", "hydra.run.dir=x: settings of Hydra itself have no effect here"),
    ("train hydra/launcher=basic", "hydra/launcher=basic: settings of Hydra itself have no effect here"),
    (
        "train optim.schedule.name=cosin",
        "optim.schedule.name=cosin: not a registered schedule; did you mean 'cosine'? Or set optim.module ...",
    ),
    ("train parallel.strategy=fsdp", "parallel.strategy=fsdp: must be one of ddp, zero1, zero2, zero3"),
]
FORMS = [
    ("train foo", "foo: is not an override; write key=value"),
    ("train =1", "=1: has no key; write key=value"),
    ("train +=1", "+=1: has no key; write key=value"),
    ("train ''", "'': an empty override; write key=value"),
    ("train ' '", "' ': an empty override; write key=value"),
    ('train "run_dir=\'x"', "run_dir='x: cannot be read; close its quotes and brackets, ..."),
    ("train optim.betas=[0.9", "optim.betas=[0.9: cannot be read; close its quotes and brackets, ..."),
    ("train 'launch.name=a\nb'", "'launch.name=a\\nb': control characters (newlines too) are refused; ..."),
    ("train 'launch.name=\"a\nb\"'", "launch.name='a\\nb': control characters (newlines too) are refused; ..."),
    ("train 'run_dir=a\x1b[2Jb'", "'run_dir=a\\x1b[2Jb': control characters (newlines too) are refused; ..."),
    ("train '\x1b[31m'", "'\\x1b[31m': control characters (newlines too) are refused; ..."),
    (
        "train optim.lr=0.1,0.2",
        "optim.lr=0.1,0.2: several values for one run; give one value, or quote it if it is ...",
    ),
    ("train 'optim.lr=choice(1,2)'", "optim.lr=choice(1,2): several values for one run; ..."),
    ("train 'model.name=${nope}'", "model.name=${nope}: Interpolation key 'nope' not found"),
]
TYPES = [
    ("train optim.lr=abc", "optim.lr=abc: must be a number"),
    ("train optim.lr=", "optim.lr=: must be a number"),
    ("train optim.lr=null", "optim.lr=null: cannot be null"),
    ("train train.steps=1.5", "train.steps=1.5: must be a whole number"),
    ("train train.steps=ten", "train.steps=ten: must be a whole number"),
    ("train train.deterministic=maybe", "train.deterministic=maybe: must be true or false"),
    ("train optim.betas=0.9", "optim.betas=0.9: must be a list, such as [a,b]"),
    ("train optim.betas=[0.9,x]", "optim.betas=[0.9,x]: must be a number"),
    ("train optim.betas=[0.9]", "optim.betas=[0.9]: must be two numbers in [0, 1)"),
    ("train launch.setup=ls", "launch.setup=ls: must be a list, such as [a,b]"),
    ("train +launch.extra.nice=[1]", "+launch.extra.nice=[1]: must be text"),
    ("train train=5", "train=5: settings (key: value) belong here"),
    (f"train run_dir={5000 * 'x'}", "run_dir=xxx...: is 5,000 characters long; a path may have 3,072 bytes, and ..."),
    (f"train checkpoint.dir=/{300 * 'x'}", "checkpoint.dir=/xxx...: is 301 characters long; ... each name in it 255"),
    (f"status {5000 * 'x'}", "...: File name too long"),
    ("train run_dir=", "run_dir=: is empty; leave it out, or write run_dir=null for none"),
]
VALUES = [
    ("train optim.lr=nan", "optim.lr=nan: must be a finite number"),
    ("train optim.lr=inf", "optim.lr=inf: must be a finite number"),
    ("train optim.lr=-1", "optim.lr=-1.0: must be > 0"),
    ("train optim.lr=0", "optim.lr=0.0: must be > 0"),
    ("train train.steps=0", "train.steps=0: must be >= 1"),
    ("train train.seed=99999999999999999999", "train.seed=99999999999999999999: must be < 9223372036854775808"),
    ("train data.validation_fraction=1", "data.validation_fraction=1.0: must be < 1"),
    ("train launch.ranks=0", "launch.ranks=0: must be >= 1"),
    ("train train.epochs=1 train.steps=5", "train.steps=5 and train.epochs=1: give one of them"),
    ("train train.micro_batch=32", "train.micro_batch=32: larger than train.global_batch=16; ..."),
    ("train optim.lr_scaling=sqrt", "optim.lr_scaling=sqrt: needs optim.base_batch, ..."),
    ("train checkpoint.resume=foo", "checkpoint.resume=foo: must be auto, never, a step, or the path of a checkpoint"),
    (
        "train checkpoint.resume=a_run",
        "checkpoint.resume=a_run: must be ...; for the folder a_run write checkpoint.resume=./a_run",
    ),
    ("train checkpoint.ranks_per_file=-1", "checkpoint.ranks_per_file=-1: must be >= 0"),
    (
        "train checkpoint.ranks_per_file=2 checkpoint.incremental=true",
        "checkpoint.ranks_per_file=2: with checkpoint.incremental=true every rank has files of its own, ...",
    ),
    (
        "train checkpoint.whole_every=5",
        "checkpoint.whole_every=5: without checkpoint.incremental=true every save is whole; ...",
    ),
    ("train checkpoint.compression=zstd", "checkpoint.compression=zstd: must be one of none, deflate"),
    (
        "train checkpoint.compression=deflate checkpoint.compression_level=0",
        "checkpoint.compression_level=0: must be >= 1",
    ),
    (
        "train checkpoint.compression_level=3",
        "checkpoint.compression_level=3: no effect with checkpoint.compression=none; ...",
    ),
    (
        "train checkpoint.compression=deflate checkpoint.ranks_per_file=0",
        "checkpoint.compression=deflate: not with checkpoint.ranks_per_file=0, because ranks that share ...",
    ),
    (
        "train checkpoint.compression=deflate checkpoint.parallel_hdf5=true",
        "checkpoint.compression=deflate: not with checkpoint.parallel_hdf5=True, because ranks that share ...",
    ),
    (
        "train checkpoint.compression=deflate checkpoint.stage_dir=/tmp",
        "checkpoint.compression=deflate: not with checkpoint.stage_dir=/tmp, which frees the memory at once, ...",
    ),
    (
        "train checkpoint.parallel_hdf5=true checkpoint.ranks_per_file=0",
        "checkpoint.ranks_per_file=0: no effect with checkpoint.parallel_hdf5=true, ...",
    ),
    (
        "train checkpoint.parallel_hdf5=true checkpoint.stage_dir=/tmp",
        "checkpoint.stage_dir=/tmp: no effect with checkpoint.parallel_hdf5=true, ...",
    ),
    (
        "train checkpoint.parallel_hdf5=true parallel=server",
        "checkpoint.parallel_hdf5=true: the training uses MPI too, ...; set checkpoint.ranks_per_file=0, ...",
    ),
    ("train train.sequence_length=4096", "train.sequence_length=4096: longer than model.max_positions=2048 ..."),
    ("train model.heads=3", "model.heads=3: does not divide model.hidden=128; set model.head_dim ..."),
    ("train model.kv_heads=3", "model.kv_heads=3: does not divide model.heads=4; ..."),
]
DEGREES = [
    (
        "train parallel.dp_replicate=3 launch.ranks=2",
        "parallel: pp 1 x dp_replicate 3 x dp_shard 1 x cp 1 x tp 1 = 3, but the world has 2 ranks; set ...",
    ),
    (
        "train parallel=hsdp parallel.dp_shard=8 launch.ranks=2",
        "parallel: pp 1 x dp_replicate ? x dp_shard 8 x cp 1 x tp 1 = 2 has no solution: 2 ranks do not divide by 8",
    ),
    (
        "train parallel.tp=-1 parallel.pp=-1",
        "parallel.pp=-1 and parallel.tp=-1: only one degree can be -1, what the others leave of the world",
    ),
    ("train parallel.tp=0", "parallel.tp=0: a degree is at least 1, or -1 for what the others leave of the world"),
    ("train parallel.tp=-2", "parallel.tp=-2: must be >= -1"),
    (
        "train parallel.dp_shard=2 launch.ranks=2",
        "parallel.dp_shard=2: ddp shards nothing; use parallel.strategy=zero3",
    ),
    (
        "train train.global_batch=15 launch.ranks=2",
        "train.global_batch=15: does not divide over 2 data-parallel ranks (...); use 14 or 16",
    ),
    ("train precision.reduce=bf16", "precision.reduce=bf16: ddp reduces gradients in fp32 at precision=fp32; use ..."),
    (
        "train precision=fp64 parallel=fsdp precision.reduce=fp32",
        "precision.reduce=fp32: would throw away what precision=fp64 computes; use fp64",
    ),
]
DATA = [
    ("train data=digits", "data=digits: images, but model=llama_tiny reads tokens; use model=vit_tiny"),
    ("train model=vit_tiny", "data=stdlib: tokens, but model=vit_tiny reads images; use data=digits"),
    ("train data=stdlib_bpe", "model.vocab_size=256: smaller than the 4096 of data=stdlib_bpe; use ..."),
    ("train data.vocab_size=300", "data.vocab_size=300: the byte tokenizer has 256; use data.tokenizer=bpe"),
    ("train data=text", "data=text: has no text; give data.path=<token store> or ..."),
    ("train data=text data.path=no.h5", "data.path=no.h5: no such file; make it with ..."),
    ("train data=text data.sources=[no]", "data.sources: no does not exist; give text files, ..."),
    ("train model=vit_tiny data=digits data.name=mnist", "data.name=mnist: must be one of digits"),
]
PLACES = [
    ("train run_dir=/proc/x", "run_dir=/proc/x: ...; choose a directory that can be written"),
    ("train run_dir=a_file", "run_dir=.../a_file: File exists; choose a directory that can be written"),
    ("train run_dir=a_file/run", "run_dir=.../a_file/run: Not a directory; choose a directory that can be written"),
    ("train run_dir=notes", "run_dir=.../notes: holds notes.txt and no run; choose a new or an ..."),
    ("train run_dir=a_sweep", "run_dir=.../a_sweep: holds a sweep; choose a new directory, or that of ..."),
    (
        "train run_dir=a_run optim.lr=0.5",
        "run_dir=.../a_run: holds another run: optim.lr is 0.5 and was 0.003; use a new run_dir, or the old values",
    ),
    (
        "train run_dir=a_run checkpoint.resume=7",
        "checkpoint.resume=7: not a step in .../a_run/checkpoints; there are 1",
    ),
    ("train checkpoint.resume=7", "checkpoint.resume=7: not a step in ...; there is none"),
    ("train checkpoint.resume=./no", "checkpoint.resume=./no: does not exist; give a step-<n>, ..."),
    ("train checkpoint.dir=/proc/x", "checkpoint.dir=/proc/x: ...; choose a directory that can be written"),
    ("train --config-dir no", "--config-dir no: no such folder"),
]
COMMANDS = [
    ("", "the following arguments are required: command; see `hpc-train --help`"),
    ("trane", "...invalid choice: 'trane' ...; did you mean 'train'?; see `hpc-train --help`"),
    ("train --cfgg", "unknown option --cfgg; did you mean '--cfg'?; see `hpc-train train --help`"),
    (
        "checkpoint verify x --jsn",
        "unknown option --jsn; did you mean '--json'?; see `hpc-train checkpoint verify --help`",
    ),
    ("train --config-dir", "argument --config-dir: expected one argument; see `hpc-train train --help`"),
    ("train launch=slurm", "launch=slurm: `hpc-train train` runs here; use `hpc-train submit` for Slurm"),
    ("submit launch=local", "launch=local: `hpc-train submit` sends to Slurm; use `hpc-train train` ..."),
    ("submit --dry-run cluster=frontier cluster.nodes=100000", "cluster.nodes=100000: frontier has 9856; ..."),
    ("submit --dry-run cluster=leonardo launch.time_minutes=99999", "launch.time_minutes=99999: leonardo allows ..."),
    ("submit --dry-run launch.signal_seconds=4000", "launch.signal_seconds=4000: not before the end of ..."),
    ("data", "the following arguments are required: ...; see `hpc-train data --help`"),
    ("data build new.h5", "the following arguments are required: SOURCE; see `hpc-train data build --help`"),
    ("data build new.h5 no", "source no does not exist: give text files, folders, or the word stdlib"),
    ("data build a_file notes", "a_file exists: give another name, or --overwrite"),
    ("data build new.h5 notes --vocab-size x", "argument --vocab-size: 'x' is not a number of 1 or more; see ..."),
    (
        "data build new.h5 notes --tokenizer x",
        "tokenizer x does not exist: give byte, bpe, a tokenizer.json, or a folder with one",
    ),
    ("data inspect no.h5", "no token store at no.h5: build one with ..."),
    ("data inspect a_file", "a_file cannot be read as a token store: make one with ..."),
    ("bench step --rounds x", "argument --rounds: invalid int value: 'x'; see `hpc-train bench step --help`"),
    ("generate a_run --prompt x --top-k 3", "--top-k: has no effect without sampling: ...; add --temperature 1, ..."),
    ("generate a_run --prompt x --top-p 0.9", "--top-p: has no effect without sampling: ...; add --temperature 1, ..."),
    ("completion ksh", "argument shell: invalid choice: 'ksh' ...; see `hpc-train completion --help`"),
]
TABLE = [*KEYS, *CHOICES, *FORMS, *TYPES, *VALUES, *DEGREES, *DATA, *PLACES, *COMMANDS]


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has a checkpoint."""
    folder = tmp_path_factory.mktemp("place") / "a_run"
    config = compose([f"run_dir={folder}"])
    prepare_run_directory(locate_run_directory(config), config)
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    return folder


@pytest.fixture(autouse=True)
def place(a_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, with a file, a folder of notes, and a run that has a checkpoint."""
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(variable, raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    (tmp_path / "a_file").write_text("not a token store\n")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("a few words\n")
    (tmp_path / "a_sweep" / "logs").mkdir(parents=True)
    (tmp_path / "a_sweep" / "points.jsonl").touch()
    shutil.copytree(a_run, tmp_path / "a_run")
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Mode and time of change of everything below."""
    return {str(path): (path.stat().st_mode, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def run(line: str) -> int:
    try:
        return main(shlex.split(line))
    except SystemExit as stopped:  # argparse leaves so
        return stopped.code if isinstance(stopped.code, int) else 1


def check_answer(errors: str, answer: str) -> None:
    pattern = ".*".join(re.escape(part) for part in answer.split("..."))
    assert re.fullmatch(f"hpc-train: {pattern}\n", errors), errors
    assert errors[:-1].isprintable()


@pytest.mark.parametrize(("line", "answer"), TABLE)
def test_one_line_answers_and_nothing_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], line: str, answer: str
) -> None:
    before = tree(place)
    code = run(line)
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    check_answer(printed.err, answer)
    assert tree(place) == before


# What only the ranks can know, because they import torch and read the data.
TINY = (
    "launch.ranks=1 train.steps=1 model.layers=1 model.hidden=8 model.heads=2 model.kv_heads=1 train.tensorboard=false"
)
IN_RANKS = [
    (f"train {TINY} data=text data.path=a_file", "...a_file cannot be read as a token store: ..."),
    (f"train {TINY} data=text data.sources=[notes]", "...13 tokens for train do not make one sequence of ..."),
    ("train launch.ranks=1 model=custom model.name=mine model.module=no_such", "model.module=no_such: cannot be ..."),
]


@pytest.mark.parametrize(("line", "answer"), IN_RANKS)
def test_one_line_answers_what_only_the_ranks_find(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, answer: str
) -> None:
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    assert run(line) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    check_answer(printed.err, answer)


@pytest.mark.parametrize(
    ("line", "answer"), [KEYS[0], CHOICES[0], FORMS[3], TYPES[0], DEGREES[0], DATA[0], PLACES[3], COMMANDS[1]]
)
def test_the_installed_command_answers_the_same(place: Path, line: str, answer: str) -> None:
    command = Path(sys.executable).with_name("hpc-train")
    before = tree(place)
    ended = subprocess.run([command, *shlex.split(line)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    check_answer(ended.stderr, answer)
    assert tree(place) == before


@pytest.mark.parametrize(
    "line", ["train --debug optim.lr=abc", "--debug train optim.lr=abc", "train optim.lr=abc --debug"]
)
def test_debug_shows_where_the_error_comes_from(capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert run(line) == 2
    *traceback, last = capsys.readouterr().err.splitlines()
    assert traceback[0].startswith("Traceback")
    assert any("compose.py" in above for above in traceback)
    assert last == "hpc-train: optim.lr=abc: must be a number"


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = Path(sys.executable).with_name("hpc-train")
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([command, "train", "--cfg"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")
