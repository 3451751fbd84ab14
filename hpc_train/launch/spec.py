"""JobSpec: what was submitted is what runs. Frozen JSON on disk, read by every rank; nothing executable in it."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf.errors import OmegaConfBaseException

from hpc_train import __version__
from hpc_train.config.compose import from_container, to_container
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.support.pipeline import from_file
from hpc_train.regular_files import TEXT, open_regular
from hpc_train.training.folder import RunFolder, open_folder, write_private

if TYPE_CHECKING:
    from hpc_train.launch.code.snapshot import Snapshot

SPEC_VERSION = 1


@dataclass(frozen=True)
class JobSpec:
    """One job: the resolved configuration, and the degrees it was planned with."""

    run_dir: str
    ranks: int
    degrees: dict[str, int]
    config: dict[str, Any]
    code: str = ""
    """Folder of the snapshot that the job imports from, whose name is its hash; "": what is installed."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Of the snapshot: root, commit, dirty and number of files of each tree that it was made from."""
    hpc_train: str = __version__
    spec_version: int = SPEC_VERSION

    def write(self, path: Path) -> None:
        """Readable and writable by its owner alone."""
        write_private(path, json.dumps(asdict(self), indent=1) + "\n")

    def run_config(self) -> RunConfig:
        """The configuration with its types; conf/ is not read again. Raises UserError if it is damaged."""
        try:
            return from_container(self.config)
        except (KeyError, TypeError, AttributeError, OmegaConfBaseException) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self.run_dir}/job.json: its config is damaged ({reason}); submit the run again"
            ) from None

    def folder(self) -> RunFolder:
        return open_folder(self.run_config())


def make_spec(
    config: RunConfig,
    folder: RunFolder,
    ranks: int,
    degrees: dict[str, int],
    store: Path | None = None,
    code: Snapshot | None = None,
) -> JobSpec:
    """The spec of a run in this folder, which reads the token store `store`, and the schedule that lies there."""
    container = to_container(config) | {"run_dir": str(folder.path)}
    if store is not None:
        container["data"]["path"] = str(store.absolute())
    if from_file(config.parallel.pipeline):
        container["parallel"]["pipeline"]["schedule"] = str(folder.schedule)
    frozen = (str(code.path), list(code.sources)) if code else ("", [])
    return JobSpec(str(folder.path), ranks, degrees, container, *frozen)


def read_spec(path: Path) -> JobSpec:
    """Read a spec that this user wrote.

    Raises UserError if it is missing, damaged, of another version, or if anybody else could have written it.
    """
    return parse_spec(own_text(path), path)


def own_text(path: Path) -> str:
    """What this user wrote into a file; "" if it is no text.

    Raises UserError if it is missing, or if anybody else could have written it.
    """
    try:
        with os.fdopen(open_regular(path, TEXT, follow=True)) as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; is the run directory on a file system that this node shares?"
        ) from None
    except ValueError:
        text = ""
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise UserError(f"{path}: is not yours alone (owner {status.st_uid}, mode {status.st_mode & 0o777:o}); not run")
    return text


def parse_spec(text: str, path: Path) -> JobSpec:
    """The spec in a text, which was read from `path`. Raises UserError if it is damaged, or of another version."""
    try:
        spec = JobSpec(**json.loads(text))
    except (ValueError, TypeError):
        raise UserError(f"{path}: is not a job spec; submit the run again") from None
    if spec.spec_version != SPEC_VERSION:
        raise UserError(
            f"{path}: version {spec.spec_version}, this hpc_train reads {SPEC_VERSION}; submit the run again"
        )
    return spec
