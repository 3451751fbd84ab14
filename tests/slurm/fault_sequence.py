"""Break one run in every way, one fault after the other, and look each time what is noticed and who is named."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fault_checks import (
    ALARMS,
    FAULTY,
    NOTICES,
    Cell,
    assert_culprit,
    assert_noticed,
    describe_faulty_run,
    list_leftovers,
)
from fault_kinds import KINDS, Kind, Scene, host_of_task_1
from slurm_client import SlurmCluster
from training_client import assert_same_result, hpc_train, lines, steps_done, submit
from training_client import wait_until as wait_with_pauses

from hpc_train.resilience.chaos import give_order

STEPS = 600
"""More than the sequence takes, at STEP_SECONDS each; those that are left are made without a pause."""
STEP_SECONDS = "0.6"
SEQUENCE = (
    ("raise", "train"),
    ("abort", "train"),
    ("nan", "train"),
    ("gil", "save"),
    ("slow disk", "train"),
    ("loop", "train"),
    ("full disk", "save"),
    ("ranks' srun", "save"),
    ("both killed", "train"),
    ("memory", "train"),
    ("weight", "train"),
    ("moment", "train"),
    ("gradient", "train"),
    ("supervisor stopped", "train"),
    ("agents' srun", "train"),
    ("decision", "train"),
    ("controller", "train"),
    ("hang and kill", "train"),
    ("network", "train"),
    ("kill and node", "train"),
    ("slow", "data"),
    ("slow link", "train"),
    ("busy core", "train"),
    ("stopped for a while", "train"),
    ("batch script", "train"),
)
"""Kinds of faults, and what rank 1 does when it meets them. Slow steps come late: they make a watcher patient."""
IN_THE_START_AFTER = {"abort": "rendezvous"}
"""Kinds that the next start meets, by the kind that the ranks start again for."""
ELSEWHERE = {
    "kill": "test_a_killed_rank_starts_again_in_the_same_job",
    "stop": "test_a_stopped_rank_is_named_with_its_node_and_the_job_goes_on",
    "segfault": "test_faults_of_other_kinds_one_after_another",
    "exit": "test_faults_of_other_kinds_one_after_another",
    "disk": "test_faults_of_other_kinds_one_after_another",
    "hold": "test_a_rank_that_hangs_without_its_slurmstepd_is_ended",
    "slurmstepd": "test_a_rank_that_hangs_without_its_slurmstepd_is_ended",
    "supervisor": "test_a_watcher_that_dies_ends_nothing_and_is_started_again",
    "agent": "test_a_watcher_that_dies_ends_nothing_and_is_started_again",
    "node": "test_a_spare_node_takes_over_in_the_same_job",
}
"""Kinds that another test of `make test` meets, in test_faults_of_jobs.py."""
LOST_LAST = "kill and node"
RENDEZVOUS_SECONDS = 25
"""How long a rank waits for one that does not come; on a busy machine that may come so much later."""
START_SECONDS = 300
"""How long a start of the ranks, and the steps up to a save, may take: no more than patience with a slow machine."""
SLACK = 6.0
"""Seconds by which a fault may be noticed later, as other tests keep all cores busy meanwhile."""
wait_until = partial(wait_with_pauses, pause=0.3)
"""Each look reads what the run has written, which takes milliseconds, for as long as the sequence lasts."""
_PHASES = {"data": "data", "train": "step", "eval": "evaluation", "save": "save"}
SECONDS_OF_A_DISTURBANCE = 4.0
"""How long a slow link, or processes on a rank's CPUs, last."""


@dataclass
class FaultSequence:
    """A run, and the cluster that it is broken on."""

    cluster: SlurmCluster
    run: Path
    store: Path
    job: str = ""
    _repairs: ExitStack = field(default_factory=ExitStack)
    """Gives the cluster the node back in the end that was lost last: the job has a spare for it."""

    def submit(self) -> None:
        """Submit the run, on two nodes and two spare ones."""
        self.run.parent.mkdir(parents=True)
        self.job = submit(self.run, *self._settings(), "launch.spares=2", **self._variables(STEP_SECONDS))

    def _settings(self) -> list[str]:
        exported = "launch.export=[FAULT_FOLDER,STEP_SECONDS]"
        lengths = [f"train.steps={STEPS}", "checkpoint.every=3", "train.eval_every=6", "launch.time_minutes=60"]
        patience = f"launch.rendezvous_seconds={RENDEZVOUS_SECONDS}"
        return [*describe_faulty_run(self.store, 180), *lengths, exported, patience, "checkpoint.keep=3"]

    def _variables(self, step_seconds: str) -> dict[str, str]:
        python = os.pathsep.join(filter(None, [str(FAULTY), os.environ.get("PYTHONPATH", "")]))
        return {"FAULT_FOLDER": str(self.run.parent), "STEP_SECONDS": step_seconds, "PYTHONPATH": python}

    def meet(self, fault: str, moment: str) -> Cell:
        """Have rank 1 meet a fault once the attempt has trained and saved, and check what is made of it."""
        wait_until(f"a save before {fault}", self._has_saved, START_SECONDS)
        kind = KINDS[fault]
        scene = Scene(self.cluster, self.run, self.job, host_of_task_1(self.run))
        step, at_start = steps_done(self.run), IN_THE_START_AFTER.get(fault)
        order = KINDS[at_start].order if at_start else None
        mark = give_order(self.run, order) if order else None
        began = self._begin(fault, kind, moment)
        outside = kind.outside(scene) if kind.outside else nullcontext()
        if kind.silent:
            with outside:
                time.sleep(SECONDS_OF_A_DISTURBANCE)
            outcome = self._follow_disturbance(fault, _PHASES[moment], began, step)
        else:
            with ExitStack() as repairs:
                (self._repairs if fault == LOST_LAST else repairs).enter_context(outside)
                outcome = self._follow(fault, _PHASES[moment], began)
            assert_noticed(kind, outcome, SLACK)
            if not (kind.goes_on or kind.ends_the_job):
                assert_culprit(fault, scene, began)
        if at_start and mark is not None:
            print(self._meet_in_start(at_start, mark, scene), flush=True)
        (self.run.parent / "go").unlink(missing_ok=True)
        return outcome

    def _meet_in_start(self, fault: str, mark: Path, scene: Scene) -> Cell:
        """Check what is made of a fault of the start that has just been met. mark: the file that ordered it."""
        began = mark.with_suffix(".obeyed").stat().st_ctime
        outcome = self._follow(fault, "start", began)
        assert_noticed(KINDS[fault], outcome, RENDEZVOUS_SECONDS)
        restart = next(event for event in self._events_since(began) if event["event"] == "restart")
        assert (restart["cause"], restart["host"]) == ("a hang", scene.host)
        # The rank that has waited says so, long before it would count as hung.
        failure = next(event for event in self._events_since(began) if event["event"] == "failure")
        assert f"missing: task 1 on {scene.host}" in str(failure["why"])
        return outcome

    def _begin(self, fault: str, kind: Kind, moment: str) -> float:
        """Order the fault, and return when rank 1 has met it."""
        if kind.order is None:
            path = self.run.parent / f"1.{moment}"
            path.with_suffix(".new").write_text(kind.action)
            path.with_suffix(".new").replace(path)
        else:
            path = give_order(self.run, replace(kind.order, seconds=SECONDS_OF_A_DISTURBANCE))
        wait_until(f"{fault} in rank 1", lambda: not path.exists(), START_SECONDS)
        return time.time()

    def _events_since(self, began: float) -> list[dict[str, object]]:
        return [event for event in lines(self.run / "events.jsonl") if float(event["time"]) > began]

    def _has_saved(self) -> bool:
        """Whether the attempt has trained, and saved a checkpoint."""
        kinds = [event["event"] for event in lines(self.run / "events.jsonl")]
        begins = ("start", "resume", "restart", "requeue")
        started = max((at for at, kind in enumerate(kinds) if kind in begins), default=len(kinds))
        return kinds[started : started + 1] in (["start"], ["resume"]) and "checkpoint" in kinds[started:]

    def _follow_disturbance(self, fault: str, phase: str, began: float, step: int) -> Cell:
        """Wait until the ranks go on after what was no fault, and check that nobody took it for one."""
        wait_until(f"steps after {fault}", lambda: steps_done(self.run) > step + 8, 60)
        assert [event for event in self._events_since(began) if event["event"] in ALARMS] == []
        return Cell(fault, phase, None, None, "nothing to notice")

    def _follow(self, fault: str, phase: str, began: float) -> Cell:
        """Wait until a fault was noticed, and until the ranks train again where they were ended."""
        kind = KINDS[fault]
        wanted = (*NOTICES, "signal") if kind.ends_the_job and fault != "full disk" else NOTICES

        def find_first(events: tuple[str, ...], after: float) -> float | None:
            times = [float(str(event["time"])) for event in self._events_since(after) if event["event"] in events]
            return min(times, default=None)

        wait_until(f"{fault} is noticed", lambda: find_first(wanted, began) is not None, 90)
        noticed = find_first(wanted, began)
        assert noticed is not None
        if kind.goes_on or kind.ends_the_job:
            return Cell(fault, phase, noticed - began, None, "training goes on")
        wait_until(
            f"the ranks train again after {fault}", lambda: find_first(("resume",), noticed) is not None, START_SECONDS
        )
        return Cell(fault, phase, noticed - began, (find_first(("resume",), noticed) or 0.0) - began, "restarted")

    def repair(self) -> None:
        """Give the cluster the nodes back that were lost."""
        self._repairs.close()

    def _has_started(self, job: str) -> bool:
        """Whether a job runs. It needs all nodes but one, so those come back that Slurm has drained after a fault."""
        self.cluster.resume_drained_nodes()
        return self.cluster.job_state(job) != "PENDING"

    def finish(self) -> None:
        """Resume the run, whose batch script was killed last, to its end, and compare it with one without faults."""
        # A slurmstepd that hangs is given up after 180 s (UnkillableStepTimeout).
        self.cluster.wait_for_state(self.job, "FAILED", timeout=240)
        self.repair()
        (self.run.parent / "fast").touch()
        resumed = hpc_train("resume", "--json", str(self.run), **self._variables("0"))
        assert resumed.returncode == 0, resumed.stderr
        (job,) = (str(job) for job in json.loads(resumed.stdout)["jobs"])
        wait_until("the start of the resumed job", lambda: self._has_started(job), 180)
        self.cluster.wait_for_state(job, "COMPLETED", timeout=180)
        reference = self.run.parent / "reference"
        job = submit(reference, *self._settings(), f"checkpoint.every={STEPS}", **self._variables("0"))
        self.cluster.wait_for_state(job, "COMPLETED", timeout=180)
        assert_same_result(self.run, reference, STEPS)
        scene = Scene(self.cluster, self.run, self.job, "")
        wait_until("the end of what is left", lambda: list_leftovers(scene) == [], 60)
