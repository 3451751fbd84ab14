"""Faults to seed into hpc_train, one at a time, in order to see which test notices; run_mutations.py does so.

They were written down before the tests were looked at: signs, offsets, forgotten reductions, checks left out. `tests`
are those that run first; if they pass, all tests of the room follow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One line of hpc_train that is wrong."""

    name: str
    """What it breaks, in a few words; no two faults have the same."""
    file: str
    """Below hpc_train/; its first part is the room."""
    old: str
    """Text that occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """Below tests/."""

    @property
    def room(self) -> str:
        return self.file.partition("/")[0]


FAULTS = (
    # checkpoints
    Fault(
        "runs of a resharded tensor are put where they were in the file",
        "checkpoint/load/read_schedule.py",
        "run, shard, at + sum(t for _, t in turn), skip)",
        "run, shard, at + sum(s for s, _ in turn), skip)",
        ("checkpoint/test_layouts.py",),
    ),
    Fault(
        "a strided run is read one run too far",
        "checkpoint/load/read_schedule.py",
        'return strips["begin"] + (strips["count"] - 1) * strips["stride"] + strips["run"]',
        'return strips["begin"] + strips["count"] * strips["stride"] + strips["run"]',
        ("checkpoint/test_layouts.py",),
    ),
    Fault(
        "the directory of a step is not synchronised before its commit",
        "checkpoint/save/commit_step.py",
        "    sync_directory(temporary)\n    if lock",
        "    if lock",
        ("checkpoint/test_power_loss.py",),
    ),
    Fault(
        "the lock is not looked at before a commit",
        "checkpoint/save/commit_step.py",
        "        lock.check()  # as late",
        "        pass  # as late",
        ("checkpoint/test_two_writers.py",),
    ),
    Fault(
        "a failed commit is not undone",
        "checkpoint/save/commit_step.py",
        "            path.rename(temporary)",
        "            pass",
        ("checkpoint/test_faults.py",),
    ),
    Fault(
        "a temporary directory of a live process counts as abandoned",
        "checkpoint/storage/retention.py",
        "not is_process_id_used(int(process))",
        "is_process_id_used(int(process))",
        ("checkpoint/test_retention.py",),
    ),
    Fault(
        "one checkpoint fewer is left",
        "checkpoint/storage/retention.py",
        "for manifest in good[-keep:]}",
        "for manifest in good[-keep + 1 :]}",
        ("checkpoint/test_retention.py",),
    ),
    Fault(
        "the best step is the worst",
        "checkpoint/storage/retention.py",
        "sorted(scores)[:count]",
        "sorted(scores)[-count:]",
        ("checkpoint/test_retention_rules.py",),
    ),
    Fault(
        "the checksum of a manifest is not compared",
        "checkpoint/format/manifest.py",
        'if end < 0 or data[end:] != f\',"checksum":"{checksum_bytes(data[:end] + b"}")}"}}\\n\'.encode():',
        "if end < 0:",
        ("checkpoint/test_sequence.py",),
    ),
    Fault(
        "the table of digests is not compared with the manifest",
        "checkpoint/load/verified_reader.py",
        "if checksum_bytes(data) != file.digests:",
        "if not checksum_bytes(data):",
        ("checkpoint/test_damage.py",),
    ),
    Fault(
        "bytes that nobody delivers are not missed",
        "checkpoint/load/load_step.py",
        "if outside.any() or (coming != targets.sizes).any():",
        "if outside.any():",
        ("checkpoint/test_hostile_manifests.py",),
    ),
    Fault(
        "a dataset may lie before the place that the manifest names",
        "checkpoint/format/shard_consistency.py",
        "if dataset.place != row.place:",
        "if dataset.place > row.place:",
        ("checkpoint/test_hostile_manifests.py",),
    ),
    Fault(
        "parts of a compressed file may overlap",
        "checkpoint/format/compressed_chunks.py",
        'wrong[1:] |= ends[:-1] > parts["begin"][1:]',
        'wrong[1:] |= ends[:-1] < parts["begin"][1:] - (1 << 62)',
        ("checkpoint/test_hostile_manifests.py",),
    ),
    Fault(
        "a pickle may name anything",
        "checkpoint/convert/formats/pickle_reader.py",
        "if (module, name) not in self._allowed:",
        "if not module and not name:",
        ("checkpoint/test_hostile_pickles.py",),
    ),
    Fault(
        "pipes and devices are opened as files",
        "regular_files.py",
        "if not stat.S_ISREG(status.st_mode):",
        "if stat.S_ISDIR(status.st_mode):",
        ("launch/test_pipes_in_place_of_files.py",),
    ),
    # parallelism
    Fault(
        "the loss of split logits is not summed over ranks",
        "parallel/loss.py",
        "    dist.all_reduce(sums, group=group)\n",
        "",
        ("parallel/test_tensor.py",),
    ),
    Fault(
        "the first class of a rank is nobody's",
        "parallel/loss.py",
        "is_local = (target >= first) & ",
        "is_local = (target > first) & ",
        ("parallel/test_tensor.py",),
    ),
    Fault(
        "gradients are averaged where they are to be summed",
        "parallel/engines/plain_engine.py",
        "self._updates.loss_scale * count_averaged_ranks(self._world) / max(step_totals.tokens, 1)",
        "self._updates.loss_scale / max(step_totals.tokens, 1)",
        ("parallel/test_parity.py",),
    ),
    Fault(
        "a rank's norm counts as that of the model",
        "parallel/optimizer_step.py",
        "        dist.all_reduce(square, group=self._world.group)\n",
        "",
        ("parallel/test_parity.py",),
    ),
    Fault(
        "tied embeddings count twice in the norm",
        "parallel/optimizer_step.py",
        "(p not in borrowed and find_replica(p, world)[0] == 0)",
        "(find_replica(p, world)[0] == 0)",
        ("parallel/test_pipeline.py",),
    ),
    Fault(
        "small gradients are scaled up to the limit of clipping",
        "parallel/optimizer_step.py",
        "torch.clamp(max_norm / (norm + 1e-6), max=1.0)",
        "max_norm / (norm + 1e-6)",
        ("parallel/test_clipping.py",),
    ),
    Fault(
        "gradients are not cleared after an update",
        "parallel/optimizer_step.py",
        "        self._optimizer.step()\n        self.clear_gradients()\n",
        "        self._optimizer.step()\n",
        ("parallel/test_parity.py",),
    ),
    Fault(
        "positions of ranks are joined in the wrong order",
        "parallel/tensor/layers.py",
        "return parts.transpose(0, 1).flatten(1, 2)",
        "return parts.flip(0).transpose(0, 1).flatten(1, 2)",
        ("parallel/test_tensor.py",),
    ),
    Fault(
        "weight gradients in MXFP8 are rounded along features, not along tokens",
        "parallel/precision/mxfp8.py",
        "return by_x, round_blocks(gradient.t()) @ round_blocks(x.t()).t(), None",
        "return by_x, round_blocks(gradient).t() @ round_blocks(x), None",
        ("parallel/test_float8.py",),
    ),
    Fault(
        "experts in 8 bits are computed in the format of their rows",
        "models/experts.py",
        "if self.product is not None:",
        "if self.product is not None and self.training is None:",
        ("parallel/test_float8.py",),
    ),
    Fault(
        "the lengths of rows of shared experts are not summed over tp",
        "parallel/tensor/expert_layers.py",
        "        shared.down.sum_squares = axis.sum",
        "        pass",
        ("parallel/test_adapters.py",),
    ),
    Fault(
        "a row-parallel layer in 8 bits is computed in the format of its input",
        "parallel/tensor/layers.py",
        'if isinstance(layer, Nf4Weight) or hasattr(layer, "product"):',
        "if isinstance(layer, Nf4Weight):",
        ("parallel/test_float8.py",),
    ),
    Fault(
        "row-parallel layers are not summed without sequence parallelism",
        "parallel/tensor/layers.py",
        "        dist.all_reduce(out, group=self.group)\n",
        "",
        ("parallel/test_tensor.py",),
    ),
    Fault(
        "keys of the ring are taken for those of another rank",
        "parallel/context/ring_schedule.py",
        "yield (self.rank - step) % self.size, current",
        "yield (self.rank + step) % self.size, current",
        ("parallel/test_context.py",),
    ),
    Fault(
        "balanced ring attention sees the wrong half",
        "parallel/context/ring_schedule.py",
        "return VisibleBlock(slice(half, length), everything, False)",
        "return VisibleBlock(slice(0, half), everything, False)",
        ("parallel/test_context.py",),
    ),
    Fault(
        "heads are put back in another order",
        "parallel/context/ulysses.py",
        "parts = x.reshape(batch, heads, group.size(), length // group.size(), width).movedim(2, 0)",
        "parts = x.reshape(batch, heads, group.size(), length // group.size(), width).movedim(2, 0).flip(0)",
        ("parallel/test_context.py",),
    ),
    Fault(
        "gradients of keys with dropout under cp are not summed",
        "parallel/context/context_parallel.py",
        "        reduce_parts(local_gradient, parts, ctx.group, by_all_to_all=ctx.by_all_to_all)\n",
        "        local_gradient = parts[ctx.group.rank()]\n",
        ("parallel/test_dropout.py",),
    ),
    Fault(
        "statistics of synchronised BatchNorm are each rank's own",
        "parallel/data_parallel/batch_norm.py",
        "        dist.all_reduce(sums)\n",
        "",
        ("parallel/test_batch_norm.py",),
    ),
    Fault(
        "all layers drop the same numbers",
        "models/dropout.py",
        "return mix_bits(rows ^ site.layer)",
        "return mix_bits(rows)",
        ("parallel/test_dropout.py",),
    ),
    Fault(
        "rotary embeddings turn the other way",
        "models/attention/rotary.py",
        "first * cosine - second * sine, second * cosine + first * sine",
        "first * cosine + second * sine, second * cosine - first * sine",
        ("parallel/test_against_transformers.py",),
    ),
    # schedules and traffic
    Fault(
        "1f1b begins with one forward too many",
        "schedules/generate.py",
        "return _alternate(forwards, backwards, ranks - 1 - rank)",
        "return _alternate(forwards, backwards, ranks - rank)",
        ("schedules",),
    ),
    Fault(
        "a rank puts off one gradient of weights fewer",
        "schedules/generate.py",
        "done > rank",
        "done >= rank",
        ("schedules",),
    ),
    Fault(
        "an action twice is a good schedule",
        "schedules/validate.py",
        "            if given in first:",
        "            if given in first and action.micro_batch < 0:",
        ("schedules",),
    ),
    Fault(
        "a bucket that is just full stays open",
        "traffic/axes.py",
        "if filled >= limits[",
        "if filled > limits[",
        ("traffic",),
    ),
    Fault(
        "the last group of blocks is not counted",
        "traffic/axes.py",
        "return -(-blocks // each)",
        "return blocks // each",
        ("traffic",),
    ),
    Fault(
        "asynchronous servers send no parameters",
        "traffic/axes.py",
        "(1 + _ADAM_TENSORS) * share",
        "_ADAM_TENSORS * share",
        ("traffic",),
    ),
    # planner
    Fault(
        "an all-reduce takes as long as an all-gather",
        "planner/model/network.py",
        "return 2 * steps / at.ranks * size * at.seconds_per_byte",
        "return steps / at.ranks * size * at.seconds_per_byte",
        ("planner/test_step_model.py",),
    ),
    Fault(
        "tied embeddings take the memory of two tables",
        "planner/model/stage_layers.py",
        "np.where(jobs.pp == 1, 2.0 - jobs.tied, has_first + has_last)",
        "np.where(jobs.pp == 1, 2.0, has_first + has_last)",
        ("planner/test_memory_model.py", "planner/test_counted_memory.py"),
    ),
    Fault(
        "tensor parallelism is paid for once a step",
        "planner/model/step_time.py",
        "        m * slow * layer.tensor,",
        "        slow * layer.tensor,",
        ("planner/test_step_model.py",),
    ),
    Fault(
        "the share of recomputed layers is rounded down",
        "planner/model/jobs.py",
        "return math.ceil(per_stage / every) / per_stage",
        "return math.floor(per_stage / every) / per_stage",
        ("planner/test_memory_model.py", "planner/test_step_model.py"),
    ),
    Fault(
        "what is offloaded may exceed the host's memory",
        "planner/search/search.py",
        "<= HOST_SHARE * rest.host_bytes",
        ">= 0 * rest.host_bytes",
        ("planner/test_search.py",),
    ),
    Fault(
        "a candidate that may fit is dropped where nothing surely fits",
        "planner/search/search.py",
        "possible = (fits >= (MAYBE if self._none_fits else YES)) & (step <= self._slowest) & fits_host",
        "possible = (fits > MAYBE) & (step <= self._slowest) & fits_host",
        ("planner/test_search.py",),
    ),
    Fault(
        "percentiles of a falling function are the wrong way round",
        "planner/reliability/failure_rate.py",
        "return Percentiles(min(low, high), middle, max(low, high))",
        "return Percentiles(low, middle, high)",
        ("planner/test_reliability.py",),
    ),
    # placement and cluster
    Fault(
        "the cost of an order leaves out what crosses switches",
        "placement/cost/cost_model.py",
        "            crossed += term.moved * measured[term.pattern].crossings\n",
        "",
        ("placement",),
    ),
    Fault(
        "a link counts its emptier direction",
        "placement/cost/cost_model.py",
        "both.max(axis=0)",
        "both.min(axis=0)",
        ("placement",),
    ),
    Fault(
        "shares of processors overlap",
        "placement/node/cpu_binding.py",
        "(index + 1) * len(cores) // parts]",
        "(index + 1) * len(cores) // parts + 1]",
        ("placement",),
    ),
    Fault(
        "the last bracket of a host list runs slowest",
        "cluster/hostlist.py",
        "for chosen in product(*reversed(outer)):",
        "for chosen in product(*outer):",
        ("cluster/test_hostlist.py",),
    ),
    Fault(
        "a GPU with as many links as there are has a switch",
        "cluster/readers/node/nvidia_smi.py",
        "if sum(counts) > MAX_NVLINKS:",
        "if sum(counts) >= MAX_NVLINKS:",
        ("cluster/test_nvidia_smi.py",),
    ),
    Fault(
        "a second row of a GPU replaces the first",
        "cluster/readers/node/nvidia_smi.py",
        "if row.label in rows:",
        "if row.label in rows and not rows:",
        ("cluster/test_nvidia_smi.py",),
    ),
    # runtime and resilience
    Fault(
        "a changed message of the store is believed",
        "runtime/store/protocol.py",
        "if not hmac.compare_digest(code, self._code(_hash_if_large(data))):",
        "if not self._code(_hash_if_large(data)):",
        ("runtime",),
    ),
    Fault(
        "a message of the store can be played again",
        "runtime/store/protocol.py",
        "        self.frames += 1\n",
        "",
        ("runtime",),
    ),
    Fault(
        "ranks of a node in another place have the ranks of the first",
        "runtime/rank_assignment.py",
        "return self.find_node_position(node) * self.ranks_per_node + local if self.nodes else process",
        "return node * self.ranks_per_node + local if self.nodes else process",
        ("runtime",),
    ),
    Fault(
        "a user's error is taken for a lost rank's",
        "runtime/consensus.py",
        "            return RemoteFailure(str(error), by_user=True)",
        "            return RemoteFailure(str(error))",
        ("runtime",),
    ),
    Fault(
        "a slow rank is a hang as soon as it is late alone",
        "resilience/watch.py",
        "if len(overdue) < len(alive) and not stopped and not left_behind:",
        "if len(overdue) < 1 and not stopped and not left_behind:",
        ("resilience",),
    ),
    Fault(
        "deadlines do not grow with what steps take",
        "resilience/deadlines.py",
        "return max(floor, self.limits.factor * typical)",
        "return max(floor, typical)",
        ("resilience",),
    ),
    Fault(
        "two strikes are not enough to leave a node out",
        "resilience/exclusion.py",
        "if sum_of_weights >= SCORE_TO_EXCLUDE]",
        "if sum_of_weights > SCORE_TO_EXCLUDE]",
        ("resilience",),
    ),
    Fault(
        "strikes never expire",
        "resilience/exclusion.py",
        "if abs(now - strike.time) < LIFE_SECONDS]",
        "if strike.time]",
        ("resilience",),
    ),
    Fault(
        "a fault may come once more before the run gives up",
        "resilience/restart.py",
        "if same >= SAME_FAULTS:",
        "if same > SAME_FAULTS:",
        ("resilience",),
    ),
    Fault(
        "the same checkpoint counts as progress",
        "resilience/restart.py",
        "self.saved is None or saved > self.saved",
        "self.saved is None or saved >= self.saved",
        ("resilience",),
    ),
    # launch
    Fault(
        "a rank that a signal ended has a code of no shell",
        "launch/local/controller.py",
        "return 128 - code if code < 0 else code",
        "return 128 + code if code < 0 else code",
        ("launch/test_failing_ranks.py",),
    ),
    Fault(
        "others may look into a run directory",
        "training/run_directory.py",
        "        directory.path.chmod(0o700)",
        "        directory.path.chmod(0o755)",
        ("launch/test_rights.py",),
    ),
    Fault(
        "a job that waits again is pending",
        "launch/state/job_state.py",
        "state=State.REQUEUED if again else State.PENDING",
        "state=State.PENDING",
        ("launch/test_state_of_a_run.py",),
    ),
    Fault(
        "points side by side share their first GPU only",
        "launch/local/node_sharing.py",
        "first = slot % (len(gpus) // count) * count",
        "first = slot % (len(gpus) // count)",
        ("launch/test_sweep_arrays.py",),
    ),
    Fault(
        "a damaged entry of the ledger ends a sweep",
        "launch/sweep/sweep_directory.py",
        '        if {"event", "time"} <= event.keys():\n',
        "        if True:\n",
        ("launch/test_sweep_ledger.py",),
    ),
    # data, training, configuration, commands
    Fault(
        "a sample past the end is left where it is",
        "data/sample_order.py",
        "outside = np.flatnonzero(out >= n)",
        "outside = np.flatnonzero(out > n)",
        ("data",),
    ),
    Fault(
        "every rank reads the samples of the first",
        "data/loader.py",
        "first = start + self.offset",
        "first = start",
        ("data",),
    ),
    Fault(
        "the first update has no learning rate",
        "training/optimizer.py",
        "return peak * (step + 1) / warmup",
        "return peak * step / warmup",
        ("training/test_schedule.py",),
    ),
    Fault(
        "a spike is what is above the mean",
        "training/numerics/anomalies.py",
        "return mean + self.sigmas * math.sqrt(",
        "return mean + 0 * math.sqrt(",
        ("training/test_skipped_steps.py", "training/test_wrong_numbers.py"),
    ),
    Fault(
        "a checkpoint is good as soon as it is saved",
        "training/numerics/rollback.py",
        "if saved <= step - self.good_after]",
        "if saved <= step]",
        ("training/test_rollback.py",),
    ),
    Fault(
        "a resume does a step twice in metrics.jsonl",
        "training/records/run_records.py",
        'if record["step"] <= resumed_at]',
        'if record["step"] <= resumed_at + 1]',
        ("training/test_records.py",),
    ),
    Fault(
        "degrees that leave ranks over are taken",
        "config/parallel.py",
        "    elif world % fixed:",
        "    elif world < fixed:",
        ("config",),
    ),
    Fault(
        "control characters are let into values",
        "config/checks/check.py",
        'if any(unicodedata.category(character) == "Cc" for character in text):',
        'if any(unicodedata.category(character) == "Co" for character in text):',
        ("config",),
    ),
    Fault(
        "API keys may be read into a configuration",
        "config/checks/secret_variables.py",
        "CREDENTIAL|API_?KEY|",
        "CREDENTIAL|",
        ("config",),
    ),
    Fault(
        "a mistake of the user ends with 1",
        "cli/main.py",
        '        print(f"hpc-train: {one_line(str(error))}", file=sys.stderr)\n        return EXIT_USER_ERROR',
        '        print(f"hpc-train: {one_line(str(error))}", file=sys.stderr)\n        return 1',
        ("cli",),
    ),
)
