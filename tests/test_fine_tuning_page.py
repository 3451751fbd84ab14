"""docs/fine_tuning.md: its commands, run as they stand from an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "fine_tuning.md"


@pytest.mark.long
def test_the_six_commands(tmp_path: Path) -> None:
    text = PAGE.read_text()
    make, load = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (commands,) = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "make_base.py").write_text(make)
    (tmp_path / "load.py").write_text(load)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["HPC_TRAIN_CACHE"] = str(tmp_path / "cache")
    lines = commands.replace("\\\n", "").splitlines()
    assert len(lines) == 6
    printed = []
    for line in lines:
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    base, trained, after, loaded = printed[1], printed[2], printed[3], printed[5]
    assert "32,768 of 151,872 parameters are trained" in trained
    assert after == loaded != base
