"""Make the components of a run from its configuration: data, model, engine and loaders.

A model that is split over ranks is built on the meta device; its values are drawn or read on request, so that no rank
holds more than its share.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from hpc_train.config.model import CustomModelConfig, HfModelConfig
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import Dataset, check_model_fits_data, open_samples
from hpc_train.data.loader import BatchLoader, Loader
from hpc_train.data.own_dataset import OwnStream, StreamPart
from hpc_train.data.stream_loader import StreamLoader
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, Report, World
from hpc_train.models.deferred import DeferredValues, build_deferred
from hpc_train.models.initial_values import Initialised, initialise_parameters
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build, splits_parameters
from hpc_train.parallel.materialise import detach_values, is_on_meta, remake_buffers
from hpc_train.parallel.user_model import check_sizes
from hpc_train.runtime.consensus import Consensus
from hpc_train.training.optimizer import make_optimizer

log = logging.getLogger(__name__)


# Any other error stays on its own rank, and is the first that the run reports, with its traceback.
_USER_ERRORS = Consensus(shared=())


def open_data(config: RunConfig, world: World) -> Dataset | OwnStream:
    """Open the training samples. Rank 0 first builds the token store if it is not there yet."""
    data = _USER_ERRORS.run_on_rank_0_first(
        world, lambda: open_samples(config.data, config.train.sequence_length, "train", get_stream_part(world))
    )
    if isinstance(data, OwnStream):
        return data
    check_model_fits_data(config.model, data)
    return make_task_samples(config, data)


def make_task_samples(config: RunConfig, data: Dataset) -> Dataset:
    """Return the data as the task of a model of transformers wants it; any other model takes it as it is."""
    if not isinstance(config.model, HfModelConfig):
        return data
    from hpc_train.data.samples.task_samples import ContinuationDataset, MaskedDataset
    from hpc_train.models.hf.config_file import find_mask_token, find_start_token, find_task, read_config_file

    file = read_config_file(config.model)
    task = find_task(config.model, file)
    if task == "masked_lm":
        return MaskedDataset(data, config.train.seed, find_mask_token(config.model, file))
    return ContinuationDataset(data, find_start_token(file)) if task == "seq2seq_lm" else data


def get_stream_part(world: World) -> StreamPart:
    """Return which samples of a stream this rank reads."""
    return StreamPart(world.dp_index, world.dp_size)


def make_loader(config: RunConfig, data: Dataset | OwnStream, world: World, augment: bool = False) -> BatchLoader:
    """Make the loader of this rank. augment: draw a crop of each image, as for training."""
    train_config = config.train
    if isinstance(data, OwnStream):
        return StreamLoader(data, train_config.global_batch, train_config.micro_batch, world.dp_index, world.dp_size)
    seed, sizes = train_config.seed, (train_config.global_batch, train_config.micro_batch)
    return Loader(data, seed, *sizes, world.dp_index, world.dp_size, augment)


def make_validation_loader(config: RunConfig, world: World) -> BatchLoader | None:
    """Make the loader of the validation part; None if the run does not evaluate, or the data has no such part."""
    if not config.train.eval_every or not config.data.validation_fraction:
        return None
    part = get_stream_part(world)
    validation = open_samples(config.data, config.train.sequence_length, "validation", part)
    if not isinstance(validation, OwnStream):
        validation = make_task_samples(config, validation)
    return make_loader(config, validation, world)


def count_samples(data: Dataset | OwnStream) -> int | None:
    """Return the number of samples; None for a stream, whose length is unknown."""
    return None if isinstance(data, OwnStream) else len(data)


def count_total_steps(config: RunConfig, samples: int | None) -> int:
    """Return the number of updates of the whole run; epochs are rounded up to whole steps. samples: None if unknown."""
    if config.train.wanted_steps is not None:
        return config.train.wanted_steps
    assert config.train.epochs is not None
    if samples is None:
        raise UserError(f"train.epochs={config.train.epochs:g}: an iterable data set has no length; set train.steps")
    return max(1, math.ceil(config.train.epochs * samples / config.train.global_batch))


def make_model(config: RunConfig) -> nn.Module:
    """Make the model: on the meta device if it can be initialised in parts, else with the same values on every rank."""
    if isinstance(config.model, HfModelConfig):
        return build_model(config.model, config.train.seed)
    if not isinstance(config.model, CustomModelConfig):
        with torch.device("meta"):
            return build_model(config.model, config.train.seed)
    model = build_model(config.model, config.train.seed)
    check_sizes(model)
    if isinstance(model, Initialised) and not is_on_meta(model):
        initialise_parameters(model, config.train.seed)
    return model


def make_deferred_model(config: RunConfig, world: World) -> tuple[nn.Module, DeferredValues | None]:
    """Make the model and, if it is the user's own and split over ranks, its values, each made on request.

    So no rank holds the whole model in memory. If its constructor cannot be recorded, every rank builds all of it.
    """
    if isinstance(config.model, HfModelConfig):
        return make_pretrained_model(config.model, config.train.seed, log.warning if world.rank == 0 else log.debug)
    if isinstance(config.model, CustomModelConfig) and splits_parameters(
        config, resolve_degrees(config.parallel, world.size)
    ):
        deferred = build_deferred(partial(build_model, config.model, config.train.seed))
        if deferred is not None and not isinstance(deferred[0], Initialised):
            check_sizes(deferred[0])
            return deferred
    return make_model(config), None


def make_pretrained_model(
    config: HfModelConfig, seed: int, say: Callable[[str], None] = log.warning
) -> tuple[nn.Module, DeferredValues]:
    """Make a model of transformers without memory, and its values: read from its folder, or drawn, each on request.

    say: gets a line for what the weights lack or have in excess. Raises UserError for a folder that cannot be trained.
    """
    from hpc_train.checkpoint.convert.pretrained_weights import find_weights

    make = partial(build_model, config, seed)
    weights = find_weights(config)
    if weights is not None:
        with torch.device("meta"):
            model = make()
        plan = weights.plan(model)
        for line in plan.describe():
            say(f"model.path={config.path}: {line}")
        if not plan.missing:
            remake_buffers(model, seed)
            values = DeferredValues({})
            plan.fill(model, values)
            return model, values
    deferred = build_deferred(make)
    if deferred is None:
        model = make()  # a constructor that cannot be recorded
        deferred = model, DeferredValues({name: parameter.detach() for name, parameter in model.named_parameters()})
    model, values = deferred
    if weights is not None:
        weights.plan(model).fill(model, values)
        detach_values(model)  # small parameters have values by now, and their memory
    return model, values


def make_engine(
    config: RunConfig, world: World, model: nn.Module, say: Report = log.info, values: DeferredValues | None = None
) -> Engine:
    """Build the engine that the config asks for, with its optimizer. say, values: see parallel.apply.build."""
    return build(model, lambda split: make_optimizer(split, config.optim, world), config, world, say, values)
