"""What files hold: told, and made into manifest and index, only when it is new, as that takes longer than the save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.holdings import Held, Holdings, gather
from hpc_train.checkpoint.index import index_image
from hpc_train.checkpoint.listing import texts
from hpc_train.checkpoint.manifest import Manifest, ShardFile, incomplete

Files = tuple[tuple[ShardFile, Held], ...]
"""Of one rank, with what each holds."""
Told = tuple[tuple[ShardFile, Held | None], ...]
"""The same; None stands for what the only file of the last save held."""


@dataclass
class Described:
    """One rank's memory from save to save."""

    _mine: Held | None = None
    """What this rank's only file held in the last save that it knows to be committed."""
    _telling: Held | None = None
    """The same of this save."""
    _of_ranks: dict[int, Held] = field(default_factory=dict)
    """On rank 0, of every rank, in the last save that was committed; so it knows whatever a rank leaves out."""
    _hearing: dict[int, Held] = field(default_factory=dict)
    _held: Sequence[Held] = ()
    _holdings: Holdings | None = None
    _listed: tuple[Holdings, dict[str, bytes]] | None = None
    _index: tuple[Holdings, list[str], bytes] | None = None

    def tell(self, files: Told) -> Told:
        """What rank 0 must be told. Nothing counts as told until `settle`."""
        known, self._mine, self._telling = self._mine, None, None
        if len(files) != 1:
            return files
        (file, held), self._telling = files[0], files[0][1]
        return ((file, None if held is known else held),)

    def settle(self) -> None:
        """It is committed."""
        self._mine = self._telling

    def hear(self, ranks: Sequence[Told]) -> list[tuple[ShardFile, Held]]:
        """On rank 0, all files, from what it was told. What is new counts as known with `keep`."""
        found: list[Files] = [
            tuple((file, self._of_ranks[rank] if held is None else held) for file, held in files)
            for rank, files in enumerate(ranks)
        ]
        self._hearing = {rank: files[0][1] for rank, files in enumerate(found) if len(files) == 1}
        return [it for files in found for it in files]

    def keep(self) -> None:
        """They are committed."""
        self._of_ranks = self._hearing

    def holdings(self, held: Sequence[Held]) -> Holdings:
        """On rank 0. Raises CheckpointError if the files do not hold every tensor exactly once."""
        if self._holdings is None or list(self._held) != list(held):
            self._held, self._holdings = (), None
            holdings = gather(held)
            wrong = incomplete(holdings)
            if wrong:
                raise CheckpointError(f"tensor {wrong[0]!r}: {wrong[1]}")
            self._held, self._holdings = held, holdings
        return self._holdings

    def text(self, manifest: Manifest) -> bytes:
        """The content of manifest.json. Raises as Manifest.to_bytes does."""
        if self._listed is None or self._listed[0] is not manifest.holdings:
            self._listed = manifest.holdings, texts(manifest.holdings)
        return manifest.to_bytes(self._listed[1])

    def index(self, manifest: Manifest) -> bytes:
        """The content of index.h5. Raises as index_image does."""
        names = [file.name for file in manifest.files]
        if self._index is None or self._index[0] is not manifest.holdings or self._index[1] != names:
            self._index = manifest.holdings, names, index_image(manifest)
        return self._index[2]
