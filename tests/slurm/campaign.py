"""Break a run again and again, at random moments and without anybody's help, and measure how much of its time counts.

    python tests/slurm/campaign.py --minutes 60 --mttf 120 --seed 1

Faults come as a Poisson process: 40 % SIGKILL and 20 % SIGSTOP of a rank, 10 % each of a rank that holds the
interpreter's lock, a node that loses its power (and comes back 25 s later), an exception and NaN. The run has as many
steps as take that long without faults. In the end it is compared, bit for bit, with a run without faults that skips the
same samples. Needs a development cluster with a node more than the run takes (make campaign).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # this is a program, too

from slurm_client import FINAL, SlurmCluster, slurm_conf
from token_stores import build_store
from training_client import assert_same_result, hpc_train, lines, steps_done, submit, tasks_of

from hpc_train.launch.state.run_ledger import account_run_directory

KINDS = {"kill": 0.4, "stop": 0.2, "gil": 0.1, "node": 0.1, "raise": 0.1, "nan": 0.1}
NOTICED = ("hang", "lost_node", "restart", "requeue", "failure", "skipped", "transient")
STEP_SECONDS = 0.1
OFF_SECONDS = 25.0
"""How long a node without power stays off."""


@dataclass
class Injected:
    """One fault, and what became of it."""

    kind: str
    at: float
    """time.time()."""
    step: int
    noticed: float | None = None
    """Seconds until the first event about it."""
    trained: float | None = None
    """Seconds until a step after it was made."""


@dataclass
class Campaign:
    """A run, and the faults that it has got."""

    cluster: SlurmCluster
    run: Path
    job: str
    draw: random.Random
    faults: list[Injected] = field(default_factory=list)
    off: dict[str, float] = field(default_factory=dict)
    """Nodes without power -> when they are switched on again."""

    def inject(self) -> None:
        """Inject a fault into a rank or a node that is there."""
        kind = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
        tasks = tasks_of(self.run)
        if not tasks or (kind in ("raise", "nan", "gil") and not self._may_order()):
            return
        task = self.draw.choice(sorted(tasks))
        fault = Injected(kind, time.time(), steps_done(self.run))
        if kind == "node":
            node = self._spare_the_batch_host()
            if node is None:
                return
            self.cluster.kill_node(node)
            self.off[node] = time.monotonic() + OFF_SECONDS
        elif kind in ("kill", "stop"):
            os.kill(tasks[task], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        else:
            (self.run.parent / "orders" / f"{task}.{kind}").touch()
        self.faults.append(fault)
        print(f"{time.strftime('%H:%M:%S')} step {fault.step}: {kind} (task {task})", flush=True)

    def _may_order(self) -> bool:
        """Whether what a rank is ordered to do now happens after a save of this attempt.

        An exception before it would end the run, and a NaN in the first forward would do nothing where that warms up
        DistributedDataParallel. While an earlier fault is not over, the order might wait for the ranks of the next
        attempt: a rank that is stopped keeps all others from the next forward until the hang is noticed.
        """
        return all(fault.trained is not None for fault in self.faults) and self._has_saved()

    def _has_saved(self) -> bool:
        """Whether the attempt has saved."""
        kinds = [event["event"] for event in lines(self.run / "events.jsonl")]
        begins = ("start", "resume", "hang", "lost_node", "restart", "requeue")
        started = max((at for at, kind in enumerate(kinds) if kind in begins), default=len(kinds))
        return "checkpoint" in kinds[started:]

    def _spare_the_batch_host(self) -> str | None:
        """Return a node of the job that does not run its batch script; None if it is to be spared now."""
        job = self.cluster.job(self.job)
        listed = self.cluster.scontrol("show", "hostnames", job.get("NodeList", "")).split()
        nodes = [name for name in listed if name != job.get("BatchHost")]
        return self.draw.choice(nodes) if nodes and not self.off else None

    def switch_on(self) -> None:
        """Give nodes their power back whose time has come."""
        for node in [name for name, until in self.off.items() if time.monotonic() > until]:
            self.cluster.boot_node(node)
            del self.off[node]

    def follow(self, mttf: float, end: float) -> str:
        """Inject faults until the job has ended, and look after each what is seen of it; returns its state."""
        due = time.monotonic() + self.draw.expovariate(1 / mttf)
        while (state := self.cluster.job_state(self.job)) not in FINAL and time.monotonic() < end:
            if time.monotonic() > due and state == "RUNNING" and steps_done(self.run):
                self.inject()
                due = time.monotonic() + self.draw.expovariate(1 / mttf)
            self.switch_on()
            self.look()
            time.sleep(0.5)
        for node in self.off:
            self.cluster.boot_node(node)
        return state

    def look(self) -> None:
        """Note what is new about the faults that are not over."""
        open_faults = [fault for fault in self.faults if fault.trained is None]
        if not open_faults:
            return
        events, step = lines(self.run / "events.jsonl"), steps_done(self.run)
        for fault in open_faults:
            after = [event["time"] for event in events if event["event"] in NOTICED and event["time"] > fault.at]
            if fault.noticed is None and after:
                fault.noticed = after[0] - fault.at
            starts = [event["time"] for event in events if event["event"] == "resume" and event["time"] > fault.at]
            went_on = step > fault.step + 3 and not starts and time.time() - fault.at > 20
            if starts or (fault.kind == "nan" and fault.noticed is not None) or went_on:
                fault.trained = (starts[0] if starts else time.time()) - fault.at


def describe(name: str, values: list[float]) -> str:
    """Return median and 95th percentile of seconds."""
    if not values:
        return f"{name}: none"
    high = sorted(values)[min(len(values) - 1, round(0.95 * len(values)))]
    return f"{name}: median {statistics.median(values):.1f} s, p95 {high:.1f} s (of {len(values)})"


def settings(store: Path, steps: int, nodes: int) -> list[str]:
    """Return the overrides of the campaign's run: so many nodes with one rank each."""
    model = ["model=custom", "model.module=campaign_model", "model.name=campaign", "train.sequence_length=16"]
    batch = [f"train.global_batch={2 * nodes}", "train.micro_batch=2", f"train.steps={steps}", "checkpoint.every=20"]
    rest = ["train.eval_every=0", "train.tensorboard=false", "train.noise_scale.every=0", "checkpoint.keep=5"]
    passed = "launch.export=[CAMPAIGN_FOLDER,STEP_SECONDS]"
    shape = [f"cluster.nodes={nodes}", "cluster.node.ranks=1"]
    return [*model, *batch, *rest, *shape, "data=text", f"data.path={store}", passed, "launch.time_minutes=180"]


def main(arguments: list[str]) -> int:
    """Run the campaign; 0 if the run came to its end by itself, with the numbers of a run without faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="how long the run takes without faults")
    parser.add_argument("--mttf", type=float, default=120, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=4, help="of the run; the cluster needs one more")
    parser.add_argument("--folder", type=Path, help="where the run and its reference are kept; default: a new one")
    given = parser.parse_args(arguments)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="campaign-", dir="/var/tmp"))
    (folder / "orders").mkdir(parents=True)
    text = folder / "text.txt"
    text.write_text("\n".join(str(number * number) for number in range(8000)))
    build_store([str(text)], [".txt"], "byte", 256, folder / "text.h5")
    conf = slurm_conf()
    os.environ["SLURM_CONF"] = str(conf)
    here = Path(__file__).resolve().parent
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH", "")]))
    steps = round(given.minutes * 60 / STEP_SECONDS)
    run = folder / "run"
    words = settings(folder / "text.h5", steps, given.nodes)
    began = time.time()
    env = {"CAMPAIGN_FOLDER": str(folder / "orders"), "STEP_SECONDS": str(STEP_SECONDS)}
    job = submit(run, *words, "launch.spares=1", **env)
    campaign = Campaign(SlurmCluster(conf), run, job, random.Random(given.seed))
    state = campaign.follow(given.mttf, time.monotonic() + 60 * (2 * given.minutes + 8))
    result = report(campaign, state, time.time() - began)
    if state != "COMPLETED":
        print(hpc_train("status", str(run)).stdout)
        return 1
    return compare(folder, run, words, steps) or result


def list_false_alarms(run: Path, faults: list[Injected]) -> list[str]:
    """Return the hangs and lost nodes that were noticed though no fault had been injected in the two minutes before.

    A fault in the first step after a start is noticed after a minute and more: that step may take as long.
    """
    alarms = [event for event in lines(run / "events.jsonl") if event["event"] in ("hang", "lost_node", "slow_node")]
    return [event["why"] for event in alarms if not any(0 < event["time"] - fault.at < 120 for fault in faults)]


def report(campaign: Campaign, state: str, seconds: float) -> int:
    """Print what was measured; 1 if there was a false alarm, or a fault of a rank was not noticed."""
    for kind in KINDS:
        of_kind = [fault for fault in campaign.faults if fault.kind == kind]
        noticed = [fault.noticed for fault in of_kind if fault.noticed is not None]
        trained = [fault.trained for fault in of_kind if fault.trained is not None]
        print(f"{kind} x {len(of_kind)}: {describe('noticed', noticed)}; {describe('training again', trained)}")
    unnoticed = [fault for fault in campaign.faults if fault.noticed is None]
    print(f"not noticed: {[(fault.kind, fault.step) for fault in unnoticed]}")
    everything: dict[str, Any] = account_run_directory(campaign.run).seconds
    total = sum(everything.values())
    shares = {name: round(100 * value / total, 1) for name, value in everything.items() if value}
    print(f"{state} after {seconds:.0f} s, {len(campaign.faults)} faults; node-seconds in per cent: {shares}")
    (campaign.run.parent / "faults.json").write_text(json.dumps([vars(fault) for fault in campaign.faults], indent=1))
    false_alarms = list_false_alarms(campaign.run, campaign.faults)
    print(f"false alarms: {false_alarms}")
    # The node may have been the spare one, and the last fault may have come just before the end.
    missed = [fault for fault in unnoticed if fault.kind != "node" and fault is not campaign.faults[-1]]
    return 1 if false_alarms or missed else 0


def compare(folder: Path, run: Path, words: list[str], steps: int) -> int:
    """Train without faults, skipping the same samples, and compare the bits; 0 if they are equal."""
    listed = [f"resilience.numbers.skip_list={run / 'skipped.json'}"] if (run / "skipped.json").exists() else []
    cluster = SlurmCluster(slurm_conf())
    job = submit(folder / "clean", *words, *listed, CAMPAIGN_FOLDER=str(folder / "orders"), STEP_SECONDS="0")
    cluster.wait_for_state(job, "COMPLETED", timeout=3600)
    assert_same_result(folder / "clean", run, steps)
    print("the parameters, the optimizer state and the losses are those of the run without faults, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
