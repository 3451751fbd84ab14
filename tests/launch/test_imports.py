"""What a rank trains with is imported without garbage collection, which goes on afterwards and leaves it alone.

Processes that ranks wait for import little: those that watch them, and those that decide after a fault.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.config.plain_config import config_to_dict
from hpc_train.launch.submit import default_to_slurm

PROGRAM = """
import gc, sys
from hpc_train.launch.rank_entrypoint import import_training

collections = []
gc.callbacks.append(lambda phase, _: collections.append(phase))
before = set(sys.modules)
collections.clear()
import_training()
while_importing = len(collections)
made = [[] for _ in range(10_000)]
new = set(sys.modules) - before
print({"torch._dynamo", "hpc_train.training.rank"} <= new, while_importing, len(collections) > 0)
print(gc.get_freeze_count() > 100_000, gc.isenabled())
"""


def test_imports_are_not_collected_and_what_follows_is() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["True", "0", "True", "True", "True"], done.stderr


READS_A_RUN = """
import json, sys
from hpc_train.config.plain_config import config_from_dict
config_from_dict(json.load(open(sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("module", "code", "without"),
    [
        ("hpc_train.launch.slurm.supervisor.supervise", "", {"hydra", "omegaconf", "torch", "numpy"}),
        ("hpc_train.resilience.agent", "", {"hydra", "omegaconf", "torch", "numpy"}),
        ("hpc_train.launch.recovery.restarting", READS_A_RUN, {"hydra", "torch", "numpy"}),
    ],
)
def test_what_ranks_wait_for_imports_little(tmp_path: Path, module: str, code: str, without: set[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(compose(default_to_slurm([])))))
    program = f"import {module}\n{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "config.json"], capture_output=True, text=True, check=True
    )
    assert without & set(done.stdout.split()) == set()
