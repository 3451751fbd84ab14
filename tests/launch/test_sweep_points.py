"""From the words of `-m` to frozen points: the grammar, composing many at once, ids, and what is refused in a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from sweeps import make

from hpc_train.cli.main import main
from hpc_train.config.compose import compose, list_options
from hpc_train.config.plain_config import config_to_dict
from hpc_train.errors import EXIT_USER_ERROR, UserError
from hpc_train.launch.job_spec import read_spec
from hpc_train.launch.sweep.compose_sweep import Composer
from hpc_train.launch.sweep.point_entrypoint import make_run_directories
from hpc_train.launch.sweep.points import digest_config, make_point_id, read_grid
from hpc_train.launch.sweep.sweep_directory import read_points

SLURM = ("cluster=slurm", "launch=slurm")


@pytest.mark.parametrize(
    ("words", "points"),
    [
        (["optim.lr=1,2"], ["optim.lr=1", "optim.lr=2"]),
        (["a=1,2", "b=x", "c=3,4"], ["a=1 c=3", "a=1 c=4", "a=2 c=3", "a=2 c=4"]),
        (["train.seed=range(1,6,2)"], ["train.seed=1", "train.seed=3", "train.seed=5"]),
        (["optim.lr=choice(1e-3, 1e-2)"], ["optim.lr=0.001", "optim.lr=0.01"]),
        (["train.seed=sort(3,1,2)"], ["train.seed=1", "train.seed=2", "train.seed=3"]),
        (["optim.betas=[0.9,0.95],[0.8,0.9]"], ["optim.betas=[0.9,0.95]", "optim.betas=[0.8,0.9]"]),
        (["data.name='a b','c,d'"], ["data.name='a b'", "data.name='c,d'"]),
        (["+launch.extra.x=1,2"], ["+launch.extra.x=1", "+launch.extra.x=2"]),
        (["train.seed=1,2", "train.seed=3,4"], ["train.seed=3", "train.seed=4"]),
        (["data.name='a,b'"], [""]),
    ],
)
def test_hydras_grammar(words: Sequence[str], points: Sequence[str]) -> None:
    grid = read_grid(words)
    assert [" ".join(combination.swept) for combination in grid] == points
    assert len(grid) == len(points)


def test_glob_finds_the_options_that_a_user_can_choose(tmp_path: Path) -> None:
    shipped = [name for name in list_options("model") if name.startswith("llama_")]
    found = [combination.swept for combination in read_grid(["model=glob(llama_*)"])]
    assert found == [(f"model={name}",) for name in shipped]
    assert len(found) > 3
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/adamw_mine.yaml").write_text("lr: 1\n")
    found = [combination.swept for combination in read_grid(["optim=glob(*)"], str(tmp_path))]
    options = sorted([*list_options("optim"), "adamw_mine"])
    assert found == [(f"optim={name}",) for name in options]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.lr=interval(0,1)", "an interval has no points of its own; use range"),
        ("optim.lr=glob(a*)", "glob finds options of a group"),
        ("model=glob(zz*)", "model=glob(zz*): matches none of custom, "),
        ("train.seed=range(3,0)", "train.seed=range(3,0): has no values"),
        ("train.seed=range(1,5,0)", "must not be zero"),
        ("train.seed=range(0,1000000000)", "a sweep has at most 100,000"),
        ("run_dir=a,b", "run_dir=a,b: cannot be swept: it is the directory of the sweep"),
        ("launch.points_per_job=1,2", "cannot be swept: it is a setting of the whole sweep"),
        ("hydra.verbose=true,false", "settings of Hydra itself have no effect here"),
        ("~optim.lr=1,2", "has no values to sweep over"),
        ("optim.lr", "optim.lr: is not an override; write key=value"),
        ("optim.lr=1,\n2", "control characters (newlines too) are refused"),
        ("optim.lr=(1,2", "cannot be read"),
    ],
)
def test_what_is_no_sweep_is_one_line(word: str, message: str) -> None:
    with pytest.raises(UserError) as wrong:
        read_grid([word])
    assert message in str(wrong.value)
    assert len(str(wrong.value).splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("optim.lr=1,0.5", "train.seed=0,7", "optim.betas=[0.1,0.2],[0.3,0.4]"),
        ("model=llama_tiny,gpt2_tiny", "parallel=ddp,zero3", "optim.lr=1,2"),
        ("+launch.extra={a:b}", "+launch.extra.c=1,2", "launch.time_minutes=30,40"),
        ("cluster.nodes=1,2", "parallel.dp_replicate=1,2", "parallel=zero3", "cluster.node.ranks=4"),
        ("cluster=dgx_h100", "parallel=zero3", "parallel.dp_replicate=-1,1", "parallel.tp=1,2"),
        ("parallel=auto", "parallel.tp=1,2"),
        ("train.steps=${train.seed},5", "train.seed=3,4"),
        ("data.cache='${oc.env:HOME}',/tmp", "train.seed=1,2"),
        ("launch.setup=[a,b],[c]", "launch.exclude=null,node1"),
    ],
    ids=" ".join,
)
def test_many_are_composed_as_each_of_them_would_be(words: Sequence[str]) -> None:
    grid = read_grid([*SLURM[1:], *words])
    composer = Composer(frozenset(grid.keys))
    for combination in grid:
        alone = compose(combination.words)
        many = composer.compose(combination.words)
        assert many == alone, combination.name
        assert json.dumps(config_to_dict(many)) == json.dumps(config_to_dict(alone))


def test_a_point_that_cannot_be_is_refused_as_a_single_run_and_the_next_one_is_right() -> None:
    composer = Composer(frozenset({"optim.lr"}))
    assert composer.compose(("optim.lr=1", "train.steps=3")).optim.lr == 1
    for value in ("nonsense", "-1", "[1]", "{a: 1}"):
        with pytest.raises(UserError) as many:
            composer.compose((f"optim.lr={value}", "train.steps=3"))
        with pytest.raises(UserError) as alone:
            compose((f"optim.lr={value}", "train.steps=3"))
        assert str(many.value) == str(alone.value)
    assert composer.compose(("optim.lr=2", "train.steps=3")).optim.lr == 2


def test_an_id_is_that_of_the_run_and_not_of_the_place() -> None:
    def container(*words: str) -> dict[str, object]:
        return config_to_dict(compose([*SLURM, *words]))

    plain = digest_config(container())
    same = ("run_dir=/x", "data.cache=/y", "launch.parallel_points=3", "launch.points_per_job=2")
    assert [digest_config(container(word)) for word in same] == [plain] * len(same)
    others = ("train.steps=7", "cluster.nodes=2", "parallel.tp=2", "launch.time_minutes=9", "checkpoint.every=3")
    found = {digest_config(container(word)) for word in (*others, "data.path=/a/x.h5", "data.path=/b/x.h5")}
    assert len({plain, *found}) == 8
    swept = ["optim.lr=1e-3", "model=llama_tiny", "launch.setup=['a b; $(c)']"]
    assert make_point_id(swept, "0123456789abcdef") == "lr-1e-3_model-llama-tiny_setup-a-b-c-0123456789ab"
    assert make_point_id([], "0123456789abcdef") == "point-0123456789ab"
    assert len(make_point_id(["a=" + "x" * 500], "0123456789abcdef")) < 60


def test_points_that_are_one_run_are_run_once_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "-m", "--dry-run", "--json", f"run_dir={tmp_path}/s", "cluster.node.ranks=2"]
    assert main([*words, "data=digits", "model=vit_tiny", "train.seed=1,2,1"]) == 0
    output = capsys.readouterr()
    (array,) = json.loads(output.out)["arrays"]
    assert len(array["points"]) == 2
    assert output.err == f"hpc-train: train.seed=1 is the same run as {array['points'][0]}: each is run once\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lr=1,-1"], "point optim.lr=-1: optim.lr=-1.0: must be > 0"),
        (["parallel.tp=1,3", "cluster.nodes=1"], "point parallel.tp=3: parallel: "),
        (["checkpoint.dir=/x", "train.seed=1,2"], "would both save there; leave it out"),
        (["launch.chain=2", "train.seed=1,2"], "a chain is of single runs"),
        (["launch=local", "train.seed=1,2"], "use `hpc-train train -m` to run here"),
        (["launch.points_per_job=4", "launch.parallel_points=2", "train.seed=1,2"], "fewer than launch.points_per_job"),
        (["launch.points_per_job=5", "cluster=dgx_h100", "train.seed=1,2"], "use launch.points_per_job=4"),
        (["checkpoint.resume=3", "train.seed=1,2"], "point train.seed=1: checkpoint.resume=3: not a step"),
        (["model=llama_tiny,lama"], "point model=lama: model=lama: no such model; did you mean"),
    ],
)
def test_one_bad_point_and_nothing_is_submitted(
    words: Sequence[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "-m", f"run_dir={tmp_path}/s", "cluster.node.ranks=2", *words]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "letter").write_text("dear")
    assert main(["submit", "-m", f"run_dir={tmp_path}", "train.seed=1,2"]) == EXIT_USER_ERROR
    assert "is not empty; a sweep needs a new directory" in capsys.readouterr().err
    (tmp_path / "points.jsonl").write_text("")
    assert main(["submit", "-m", f"run_dir={tmp_path}", "train.seed=1,2"]) == EXIT_USER_ERROR
    assert f"holds a sweep; `hpc-train resume {tmp_path}` runs what it lacks" in capsys.readouterr().err


def test_a_point_begins_with_what_was_frozen_and_from_a_list_of_its_owner(tmp_path: Path) -> None:
    frozen_sweep, _ = make(tmp_path / "sweep", "train.seed=0,1")
    first, second = read_points(frozen_sweep)
    make_run_directories(frozen_sweep, [second.id])
    run = frozen_sweep.run(second.id)
    assert read_spec(run / "job.json") == second.spec
    assert second.spec.run_dir == str(run)
    assert second.spec.run_config().train.seed == 1
    assert (run.stat().st_mode & 0o777, (run / "job.json").stat().st_mode & 0o777) == (0o700, 0o600)
    assert not frozen_sweep.run(first.id).exists()
    with pytest.raises(UserError, match="has no point x"):
        make_run_directories(frozen_sweep, ["x"])
    frozen_sweep.points.chmod(0o602)
    with pytest.raises(UserError, match=r"points.jsonl: is not yours alone"):
        make_run_directories(frozen_sweep, [first.id])
    frozen_sweep.points.chmod(0o600)
    frozen_sweep.points.write_text(frozen_sweep.points.read_text().replace('"spec"', '"spek"'))
    with pytest.raises(UserError, match=r"points.jsonl: is damaged; submit the sweep again"):
        make_run_directories(frozen_sweep, [first.id])
