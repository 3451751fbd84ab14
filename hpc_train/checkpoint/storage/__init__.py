"""Where checkpoints are kept: which file system it is, what it does best, and how much of it is free.

kind        what a directory is on           policy      how to write there
striping    layouts for Lustre               striper     setting them before a step is written
lfs, lov    by command, or by attribute      getstripe   reading them
space       is there room for the next one   staging     a disk of the node in between
place       what a run has found out about its directory
"""

from hpc_train.checkpoint.storage.kind import FileSystem, file_system
from hpc_train.checkpoint.storage.place import Place
from hpc_train.checkpoint.storage.policy import Behaviour
from hpc_train.checkpoint.storage.staging import LocalStage
from hpc_train.checkpoint.storage.striper import Striper

__all__ = ["Behaviour", "FileSystem", "LocalStage", "Place", "Striper", "file_system"]
