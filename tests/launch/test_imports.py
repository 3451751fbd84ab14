"""What a rank trains with is imported without garbage collection, which goes on afterwards and leaves it alone."""

from __future__ import annotations

import subprocess
import sys

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
