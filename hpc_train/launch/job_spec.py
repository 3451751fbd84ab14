"""The job spec: frozen JSON on disk that every rank reads.

What was submitted is what runs; nothing in it is executable.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf.errors import OmegaConfBaseException

from hpc_train import __version__
from hpc_train.config.plain_config import config_from_dict, config_to_dict
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.regular_files import MAX_TEXT_BYTES, check_private_file, open_regular, write_private_file
from hpc_train.traffic.stages import is_schedule_file
from hpc_train.training.run_directory import RunDirectory, locate_run_directory

if TYPE_CHECKING:
    from hpc_train.launch.snapshot.code_snapshot import Snapshot

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
    """Root, commit, dirty and number of files of each tree that the snapshot was made from."""
    hpc_train: str = __version__
    spec_version: int = SPEC_VERSION

    def write(self, path: Path) -> None:
        """Write the spec into a file that its owner alone can read and write."""
        write_private_file(path, json.dumps(asdict(self), indent=1) + "\n")

    def run_config(self) -> RunConfig:
        """Return the typed configuration, read-only, without reading conf/ again. Raises UserError if it is damaged."""
        return self._typed_config

    @cached_property
    def _typed_config(self) -> RunConfig:
        """The configuration with types; made once, because checking all keys takes a tenth of a second."""
        try:
            return config_from_dict(self.config)
        except (KeyError, TypeError, AttributeError, OmegaConfBaseException) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self.run_dir}/job.json: its config is damaged ({reason}); submit the run again"
            ) from None

    def folder(self) -> RunDirectory:
        """Return the run directory, where it is now. Raises UserError if the configuration is damaged."""
        return locate_run_directory(self.run_config())


def make_spec(
    config: RunConfig,
    folder: RunDirectory,
    ranks: int,
    degrees: dict[str, int],
    store: Path | None = None,
    code: Snapshot | None = None,
    plain: dict[str, Any] | None = None,
) -> JobSpec:
    """Build the spec of a run in this folder.

    store: the token store that it reads; code: the snapshot that it imports. plain: the config as config_to_dict
    returns it, where the caller has it; it becomes the spec's.
    """
    container = (config_to_dict(config) if plain is None else plain) | {"run_dir": str(folder.path)}
    _make_folders_absolute(container)
    if store is not None:
        container["data"]["path"] = str(store.absolute())
    if is_schedule_file(config.parallel.pipeline):
        container["parallel"]["pipeline"]["schedule"] = str(folder.schedule)
    frozen = (str(code.path), list(code.sources)) if code else ("", [])
    return JobSpec(str(folder.path), ranks, degrees, container, *frozen)


def _make_folders_absolute(container: dict[str, Any]) -> None:
    """Let `generate`, `eval` and a resume find the folders of the model and the tokenizer from anywhere, in place."""
    model, data = container["model"], container["data"]
    if model["kind"] == "hf":
        model["path"] = str(Path(model["path"]).expanduser().absolute())
    tokenizer = data.get("tokenizer")
    if tokenizer and tokenizer not in ("byte", "bpe") and Path(tokenizer).expanduser().is_dir():
        data["tokenizer"] = str(Path(tokenizer).expanduser().absolute())


def read_spec(path: Path) -> JobSpec:
    """Read a spec that this user wrote.

    Raises UserError if it is missing, damaged, of another version, or if anybody else could have written it.
    """
    return parse_spec(read_own_file(path), path)


def read_own_file(path: Path) -> str:
    """Read a file that this user wrote; "" if it is not text.

    Raises UserError if it is missing, or if anybody else could have written it.
    """
    try:
        with os.fdopen(open_regular(path, MAX_TEXT_BYTES, follow=True)) as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; is the run directory on a file system that this node shares?"
        ) from None
    except ValueError:
        text = ""
    check_private_file(path, status)
    return text


def parse_spec(text: str, path: Path) -> JobSpec:
    """Parse a spec that was read from `path`. Raises UserError if it is damaged, or of another version."""
    try:
        spec = JobSpec(**json.loads(text))
    except (ValueError, TypeError):
        raise UserError(f"{path}: is not a job spec; submit the run again") from None
    if spec.spec_version != SPEC_VERSION:
        raise UserError(
            f"{path}: version {spec.spec_version}, this hpc_train reads {SPEC_VERSION}; submit the run again"
        )
    return spec
