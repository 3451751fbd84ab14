"""The Python API: what a notebook or another program calls. `import hpc_train` offers all of it lazily.

    import hpc_train

    config = hpc_train.compose(["model=llama_tiny", "train.steps=50"])
    run = hpc_train.train(config)
    run.status().state, run.metrics()[-1]["loss"]

Each function does what the command of its name does, raises UserError where the command prints one line and exits with
2, and returns a result in place of printing one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.config.compose import compose as compose
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE, EXIT_REQUEUE, RunFailed, UserError

if TYPE_CHECKING:
    from torch import nn

    from hpc_train.interfaces import Engine, World
    from hpc_train.launch.state.state_names import RunStatus
    from hpc_train.parallel.optimizer_step import OptimizerFactory
    from hpc_train.placement.placement_result import Placement
    from hpc_train.planner.plan import Plan

_POLL_SECONDS = 2.0


class Run:
    """One run, given by its directory or its Slurm job id.

    Nothing is cached: every call reads the run's files, and asks Slurm where a job is involved.
    """

    def __init__(self, path: str | Path) -> None:
        """Find a run by its directory or job id. Raises UserError if there is none, or if it is a whole sweep."""
        from hpc_train.launch.slurm.slurm_cli import run_client
        from hpc_train.launch.state.run_lookup import find_points, require_single

        self._point = require_single(find_points(str(path), run_client), str(path))

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._point.run

    @property
    def config(self) -> RunConfig:
        """The configuration that the run was frozen with, read-only."""
        from hpc_train.config.plain_config import config_from_dict
        from hpc_train.config.run_file import load_run_file

        return config_from_dict(load_run_file(self.path / "config.yaml"))

    def status(self) -> RunStatus:
        """State, reason, step, loss and nodes of the newest attempt, as `hpc-train status` shows them."""
        from hpc_train.launch.slurm.slurm_cli import run_client
        from hpc_train.launch.state.job_state import decide_state
        from hpc_train.launch.state.progress import add_progress
        from hpc_train.launch.state.run_facts import gather_facts

        (facts,) = gather_facts([self._point], run_client)
        return add_progress(decide_state(facts), facts)

    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary for each step: step, loss, grad_norm, lr, tokens_per_second, ... (docs/run_directory.md)."""
        from hpc_train.training.records.run_records import read_metrics

        try:
            return read_metrics(self.path / "metrics.jsonl")
        except OSError as error:
            raise UserError(f"{self.path / 'metrics.jsonl'}: cannot be read ({error.strerror})") from error

    def events(self) -> list[dict[str, Any]]:
        """Starts, resumes, checkpoints, signals and failures over all attempts, the oldest first."""
        from hpc_train.launch.state.run_facts import read_events

        return read_events(self.path)

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Return the status once the run has ended; raise TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (status := self.status()).state.ended:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.path}: still {status.state} after {timeout:g} s")
            time.sleep(_POLL_SECONDS)
        return status

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"


def train(config: RunConfig) -> Run:
    """Train on this machine until the run is done, with the configuration's number of local ranks.

    If the run directory already holds this run, training continues from its newest whole checkpoint. Progress is
    printed. Raises UserError for a mistake in the configuration, and RunFailed with the first error of the ranks. If
    the ranks refuse the run before its first step, a run directory that was made for it is removed again.
    """
    from hpc_train.cli.output import TERMINAL
    from hpc_train.launch.train import train_local_ranks
    from hpc_train.runtime.stop_request import StopRequest

    if config.launch.kind != "local":
        raise UserError(f"launch={config.launch.kind}: train() runs on this machine; use submit() for Slurm")
    outcome = train_local_ranks(config, StopRequest(), TERMINAL)
    run_dir = outcome.folder.path
    if outcome.code not in (EXIT_DONE, EXIT_REQUEUE):
        raise RunFailed(outcome.failure or f"the ranks ended with exit code {outcome.code}; see {run_dir / 'logs'}")
    return Run(run_dir)


def submit(config: RunConfig, *, after: Sequence[Run | str | Path] = ()) -> Run:
    """Freeze a run and its code, hand it to Slurm, and return at once.

    after: runs, run directories or job ids that must succeed before this one starts. Raises UserError if the
    run is invalid or Slurm refuses it; then nothing is left behind.
    """
    from hpc_train.cli.output import TERMINAL
    from hpc_train.launch.submit import submit_run

    names = [str(run.path if isinstance(run, Run) else run) for run in after]
    return Run(submit_run(config, TERMINAL.report, after=names).run_dir)


def plan(config: RunConfig) -> Plan:
    """Predict memory, step time and cost of a run, and search for the best layout.

    Settings below `parallel` that differ from their defaults are kept; the search varies the others and the
    micro-batch.
    `plan(config).best` is the recommended candidate; its `config` can be submitted. Raises UserError if nothing can be
    planned, such as for a cluster without GPU figures.
    """
    from hpc_train.planner.plan import make_plan
    from hpc_train.planner.request import make_request

    return make_plan(make_request(config, ()))


def place(nodes: str | Sequence[str], config: RunConfig) -> Placement:
    """Find the order of nodes in which the ranks of a run communicate fastest, as a job on these nodes would.

    nodes: names, or a Slurm host list; their order is the launcher's. The network is that of `config.cluster`. The
    result's `rank_to_slot` says which slot each rank takes, in the order of `nodes`; `identity` and `placed` are the
    costs before and after. Raises UserError for nodes that the topology does not have, and degrees that do not fit.
    """
    from hpc_train.cli.topology.place import make_checked_job
    from hpc_train.placement.allocation import find_allocation
    from hpc_train.placement.search import place_nodes

    names = nodes if isinstance(nodes, str) else ",".join(nodes)
    return place_nodes(make_checked_job(config, find_allocation(config, names, {})))


def parallelize(
    model: nn.Module, config: RunConfig, world: World, make_optimizer: OptimizerFactory | None = None
) -> Engine:
    """Apply the techniques of `config` to a user's model, in place, and return the engine that trains it.

    The engine owns gradient accumulation, clipping and the optimizer (interfaces.Engine): `forward_backward(batch)`,
    `clip(max_norm)`, `update(lr)`, `evaluate(batch)`; `parts` are the modules of this rank. make_optimizer: called with
    the model after it was split; default: the optimizer of `config.optim`. world: from `init`, with the same degrees.
    Raises UserError for techniques that cannot be combined, or if a technique finds nothing to apply to in the model.
    """
    from hpc_train.parallel.apply import build
    from hpc_train.training.optimizer import make_optimizer as make_configured

    return build(model, make_optimizer or (lambda split: make_configured(split, config.optim)), config, world)
