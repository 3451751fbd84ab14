"""Make collective decisions in saves and loads: runtime.consensus with the message types and errors of checkpoints."""

from __future__ import annotations

from functools import cache

import torch

from hpc_train.checkpoint.errors import CheckpointError, RemoteCheckpointError, format_error
from hpc_train.messages import Codec
from hpc_train.runtime.consensus import Consensus, RemoteFailure


@cache
def make_codec() -> Codec:
    """Return the codec for all messages between ranks about checkpoints."""
    # imported here, because those modules use this one
    from hpc_train.checkpoint.errors import Problem
    from hpc_train.checkpoint.format import manifest, shard_layout
    from hpc_train.checkpoint.format.hdf5_layout import DatasetRow, dtype_name, parse_dtype
    from hpc_train.checkpoint.provenance import Origin, SaveTimes
    from hpc_train.checkpoint.save import save_step
    from hpc_train.checkpoint.save.shared_file import FileSection
    from hpc_train.checkpoint.storage.file_system import WritePolicy

    layouts = (
        shard_layout.FileLayout,
        shard_layout.EnclosingDataset,
        DatasetRow,
        shard_layout.StepLayout,
        shard_layout.TensorKind,
        shard_layout.SharedLayout,
        shard_layout.RowCut,
    )
    files = (manifest.Manifest, manifest.ShardFile, save_step.WrittenShard, Origin, SaveTimes, FileSection, WritePolicy)
    return Codec((RemoteFailure, Problem, *layouts, *files), {torch.dtype: (dtype_name, parse_dtype)})


CONSENSUS = Consensus(make_codec, (OSError, CheckpointError), (Exception,), format_error, RemoteCheckpointError)

# Bound here so that the modules of checkpoint/ import plain functions.
run_on_rank_0 = CONSENSUS.run_on_rank_0
gather_and_decide = CONSENSUS.gather_and_decide
gather_on_subset = CONSENSUS.gather_on_subset
send_object = CONSENSUS.send_object
receive_object = CONSENSUS.receive_object
capture_failure = CONSENSUS.capture_failure
raise_failure = CONSENSUS.raise_failure
