"""Log to Weights & Biases. An attempt that resumes a run continues under the same run id."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hpc_train.training.loggers.interface import LoggedRun, make_run_id, read_run_id, write_run_id


class WandbLogger:
    """A run of Weights & Biases, offline or online."""

    def __init__(self, run: LoggedRun) -> None:
        """Start the run, or continue it. Raises what the library raises, such as for a missing API key."""
        if run.settings["mode"] == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which would use the network
        import wandb

        run_id = read_run_id(run.folder)
        if run_id is None:
            run_id = make_run_id()
            write_run_id(run.folder, run_id)
        # Neither the console, which is in logs/, nor the code, which may hold what is not to leave the machine.
        settings = wandb.Settings(
            console="off", save_code=False, disable_git=True, x_stats_pid=run.process, show_info=False
        )
        self._run = wandb.init(
            project=run.settings["project"],
            entity=run.settings["entity"],
            mode=run.settings["mode"],
            dir=run.folder,
            id=run_id,
            resume="allow",
            name=run.name,
            group=run.group,
            tags=run.tags,
            config=run.config,
            settings=settings,
        )
        # Not W&B's own step: it drops whatever is not larger than the last one, as steps after a resume may be.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._attempt = run.attempt

    def add(self, record: Mapping[str, Any]) -> None:
        """Log one step."""
        values = {name: value for name, value in record.items() if value is not None}
        self._run.log({**values, "attempt": self._attempt})

    def close(self, failed: bool = False) -> None:
        """Upload what is left, if online, and end the run."""
        self._run.finish(exit_code=int(failed))
