"""A node whose shared memory is full: nobody sees its ranks, which go on and say so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BEAT = """
import sys
from pathlib import Path
from hpc_train.resilience import heartbeat
heartbeat._MEMORY = Path(sys.argv[1])
beat = heartbeat.Heartbeat(Path("/nowhere/logs/0"), 3)
beat.enter(heartbeat.Phase.STEP, 7)
print(beat.phase.name, beat.failure)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="root can fill a file system of its own"
)
def test_a_rank_goes_on_where_the_memory_for_heartbeats_is_full(tmp_path: Path) -> None:
    """Memory that is mapped, and has no page left behind it, would end the rank by SIGBUS."""
    fill = f"mount -t tmpfs -o size=16k none {tmp_path} && ! head -c 1M /dev/zero >{tmp_path}/fill 2>/dev/null"
    words = ["unshare", "--mount", "sh", "-c", f'{fill}; exec "$@"', "sh", sys.executable, "-c", BEAT, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert done.stdout.startswith("STEP ")
    assert done.stdout.rstrip().endswith("No space left on device")
