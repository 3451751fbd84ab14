"""Set the variables of communication libraries on one rank, and remember what was set, kept and refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from hpc_train.cluster.sysfs import read_numa_nodes
from hpc_train.interfaces import Task
from hpc_train.placement.communication_environment import VariableSetting, apply_settings, combine_with_site
from hpc_train.placement.node.nic_variables import choose_rank_nic_settings, pick_nic_of_processors
from hpc_train.runtime.binding import NodeSurvey, survey_node
from hpc_train.runtime.host_info import ProcessInfo


@dataclass
class RankEnvironment:
    """The variables of one rank. Values of the user stay; those of the site (cluster.environment) come before ours."""

    env: MutableMapping[str, str]
    site: Mapping[str, str | None]
    applied: list[VariableSetting] = field(default_factory=list)
    """Set here, in order."""
    unchanged: list[str] = field(default_factory=list)
    """Names that the user had set otherwise."""
    refused: list[str] = field(default_factory=list)
    """Names that the site does not want set."""
    per_rank: dict[str, str] = field(default_factory=dict)
    """Applied variables whose values differ between ranks: name -> value on this rank."""

    def set(self, shared: Sequence[VariableSetting], per_rank: Sequence[VariableSetting] = ()) -> None:
        """Set variables. shared: the same on all ranks; per_rank: of this rank."""
        self._apply(shared, per_rank, self.site)

    def set_before_mpi(self, per_rank: Sequence[VariableSetting]) -> None:
        """Set the variables that MPI's transports read when MPI starts: this rank's own, and the site's."""
        self._apply(
            [], per_rank, {name: value for name, value in self.site.items() if name.startswith(("UCX_", "FI_"))}
        )

    def _apply(
        self, shared: Sequence[VariableSetting], per_rank: Sequence[VariableSetting], site: Mapping[str, str | None]
    ) -> None:
        combined, refused = combine_with_site([*shared, *per_rank], site)
        applied, unchanged = apply_settings(combined, self.env)
        self.applied += applied
        self.unchanged += [name for name in unchanged if name not in self.unchanged]
        self.refused += [name for name in refused if name not in self.refused]
        self.per_rank |= {setting.name: setting.value for setting in applied if setting in per_rank}

    @property
    def shared(self) -> list[VariableSetting]:
        """Return the applied settings that are the same on all ranks."""
        return [setting for setting in self.applied if setting.name not in self.per_rank]

    def describe(self, quiet: Sequence[VariableSetting] = ()) -> list[str]:
        """Return a line for each variable that was set, kept or refused. quiet: settings not worth a line."""
        lines = [f"set {setting}" for setting in self.applied if setting not in quiet]
        lines += [f"kept your {name}" for name in self.unchanged]
        return lines + [f"did not set {name}, as cluster.environment asks" for name in self.refused]


def choose_gpu_nic_settings(members: Sequence[ProcessInfo], gpu: str | None, nodes: int) -> list[VariableSetting]:
    """Choose the NIC of a rank with a GPU, for UCX. members: the processes of its node, by local rank.

    gpu: PCI address. No NIC is chosen on one node, nor where there are more NICs than ranks: UCX then uses several.
    """
    head = members[0]
    if nodes == 1 or gpu is None or len(head.nics) > len(members):
        return []
    variables = head.nic_variables.get(head.nic_of.get(gpu, ""), {})
    return choose_rank_nic_settings(variables, "this rank's GPU", with_nccl=True)


def choose_mpi_nic_settings(
    task: Task, gpu: str | None, survey: Callable[[], NodeSurvey] = survey_node
) -> list[VariableSetting]:
    """Choose the NIC of a rank whose data MPI moves, before MPI starts and reads these variables.

    gpu: PCI address of the GPU that the launcher gave it; None: its processors tell which NIC is near.
    """
    if task.nodes == 1:
        return []
    survey_result = survey()
    if len(survey_result.fit_nics) > task.processes // task.nodes:
        return []
    if gpu is not None:
        variables = survey_result.nic_variables.get(survey_result.nic_of.get(gpu, ""), {})
        return choose_rank_nic_settings(variables, "the GPU that the launcher gave this rank", with_nccl=True)
    nic = pick_nic_of_processors(
        survey_result.fit_nics, frozenset(os.sched_getaffinity(0)), read_numa_nodes(), task.local
    )
    variables = survey_result.nic_variables.get(nic.device or "", {}) if nic else {}
    return choose_rank_nic_settings(variables, "this rank's processors", with_nccl=False)
