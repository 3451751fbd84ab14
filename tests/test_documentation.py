"""The pages: short README, links that lead somewhere, commands that parse, reference pages that agree with the code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.cli.main import join_plan_command, make_parser
from hpc_train.config.compose import compose
from hpc_train.config.keys.reference import describe_key, list_keys, list_related_keys
from hpc_train.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "modules/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
GENERATED = ("configuration.md", "commands.md")
PLACEHOLDERS = ("...", "RUN", "DIR", "FILE", "RUNS.csv", "$", "[", "|", "OUT")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_architecture_names_every_folder_and_the_guides_name_only_what_is_there() -> None:
    architecture, guide = (ROOT / name for name in ("docs/architecture.md", "CONTRIBUTING.md"))
    paths = [
        path.relative_to(ROOT) for top in ("hpc_train", "tests", "conf", "slurm") for path in (ROOT / top).rglob("*")
    ]
    folders = {file.parent for file in paths if file.suffix == ".py" and file.parts[0] == "hpc_train"}
    named = architecture.read_text()
    assert [
        str(folder) for folder in sorted(folders) if len(folder.parts) > 1 and f"`{folder.name}/`" not in named
    ] == []
    files = re.findall(r"`([\w/]+\.py)`", named + guide.read_text())
    assert [file for file in files if not any(f"/{path}".endswith(f"/{file}") for path in paths)] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_readme_is_short_and_starts_with_a_picture_and_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    start = "\n".join(text.splitlines()[:30])
    assert all(wanted in start for wanted in ("![", "make train", "make test"))


@pytest.mark.parametrize("name", GENERATED)
def test_reference_pages_are_what_the_code_says(name: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs/generate.py"), str(tmp_path)], check=True)
    written = (ROOT / "docs/reference" / name).read_text()
    assert written == (tmp_path / name).read_text(), "run `python docs/generate.py`"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "cache")]
    built = subprocess.run([*build, str(ROOT / "docs"), str(tmp_path / "html")], capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    assert (tmp_path / "html/reference/configuration.html").is_file()


def commands() -> Iterator[tuple[str, str]]:
    """(page, command line) of every hpc-train command in a bash block, continuation lines joined."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("hpc-train "):
                    yield page_id(page), line


@pytest.mark.parametrize(("page", "line"), list(dict.fromkeys(commands())), ids=str)
def test_commands_on_the_pages_parse_and_their_settings_compose(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    words = [word for word in words if word != "..."]
    if "--help" in words:
        return
    words = words[: words.index("--")] if "--" in words else words
    given = [word for word in words if re.match(r"\+?[a-z_]+(?:[./][a-z_]+)*=", word)]
    arguments, unknown = make_parser().parse_known_args(
        join_plan_command([word for word in words if word not in given])
    )
    assert not [word for word in unknown if word.startswith("-")], unknown
    if "--config-dir" in words:
        return  # a folder of the reader's own
    if arguments.command in ("train", "submit", "plan") and "-m" not in words:
        settings = [word for word in given if not any(mark in word for mark in PLACEHOLDERS if mark != "[")]
        compose(settings)


def test_every_key_has_a_meaning_and_composes_with_its_default() -> None:
    keys = list_keys()
    assert len(keys) > 200
    assert [item.key for item in keys if not item.meaning] == []
    assert all((ROOT / item.file).is_file() for item in keys)
    settings = []
    for item in keys:
        if item.default and "${" not in item.default and not item.variant and item.default != "null":
            settings += [f"{item.key}={item.default}"] if item.key.startswith(("train.", "optim.")) else []
    compose(settings)


def test_a_key_is_found_by_its_name_and_a_typo_gets_a_suggestion() -> None:
    (steps,) = describe_key("train.steps=5")
    assert (steps.type, steps.default, steps.range) == ("int | null", "null", ">= 1, <= 1,000,000,000,000")
    assert "train.epochs" in list_related_keys(steps)
    assert {item.variant for item in describe_key("model.layers")} == {"transformer", "vit"}
    assert len(describe_key("optim.schedule")) == 5
    for typo, meant in (("train.stesp", "train.steps"), ("lr", "optim.lr")):
        with pytest.raises(UserError, match=meant):
            describe_key(typo)
