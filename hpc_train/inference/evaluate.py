"""Measure a checkpoint on data, in one process, with the model, loss and metrics of training.

The numbers are those that the run itself would write: the engine, its evaluation and the data sets are the same. Only
the layout differs, which changes only rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_train.checkpoint.convert.averaged_weights import AveragedTensors, choose_weights
from hpc_train.checkpoint.convert.model_config import load_model_config, load_run_config
from hpc_train.checkpoint.convert.quantized_base import check_base
from hpc_train.checkpoint.convert.tensor_sources import SavedStepTensors, read_cast
from hpc_train.checkpoint.storage.step_directory import select_weights
from hpc_train.checkpoint.storage.step_selection import OpenStep, open_one_step
from hpc_train.config.compose import compose
from hpc_train.config.model import (
    CustomDataConfig,
    CustomModelConfig,
    DataConfig,
    HfModelConfig,
    ImageDataConfig,
    ImageFilesDataConfig,
    TokenDataConfig,
    VisionTransformerConfig,
)
from hpc_train.config.parallel import ParallelConfig, resolve_degrees
from hpc_train.config.plain_config import config_from_dict, config_to_dict
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import Dataset, Split, check_model_fits_data, open_dataset, require_indexed
from hpc_train.data.images.image_entries import are_images
from hpc_train.data.loader import BatchLoader, Loader, SequentialLoader
from hpc_train.data.store_file import IMAGE_STORE, is_store
from hpc_train.data.token_files import is_token_file, open_tokens
from hpc_train.data.token_store import TokenStore
from hpc_train.errors import UserError
from hpc_train.inference.load_model import (
    find_run_config,
    refuse_base_of_folder,
    refuse_partial_folder,
    refuse_weights_of_folder,
)
from hpc_train.interfaces import Engine, World
from hpc_train.launch.checks.model_and_data import check_model_and_data
from hpc_train.models.hf.config_file import describe_images, read_config_file
from hpc_train.parallel.apply import build
from hpc_train.parallel.metrics import PERPLEXITY
from hpc_train.runtime.start import leave_process_group, make_world
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.training.evaluation import Evaluation, evaluate_batches
from hpc_train.training.factory import make_deferred_model, make_task_samples

_ACCURACY = "accuracy"


@dataclass(frozen=True)
class EvaluationRequest:
    """A checkpoint to measure, and the data to measure it on."""

    where: str
    """A run, one of its steps, or a folder that save_pretrained or `checkpoint export` made."""
    data: str | None = None
    """A store or file of tokens, text, conversations or images; None: the data of the run."""
    split: str | None = None
    """validation, train or all; None: all of `data`, or the validation part of the run's own."""
    batches: int | None = None
    """Number of global batches, in the order of the run's own evaluations; None: every sample once."""
    micro_batch: int | None = None
    """Sequences in one forward; None: as in the run."""
    sequence_length: int | None = None
    """Tokens in a sequence; None: as in the run."""
    tokenizer: str | None = None
    """For text and conversations: byte, or a folder; None: that of the run or the model's folder."""
    chat: bool = False
    """`data` has conversations, of which the assistant's turns count."""
    column: str | None = None
    """Column of records in `data`, or key of the label in a tar's .json files; None: as in the run."""
    precision: str | None = None
    """fp64, fp32, bf16 or fp16; None: as in the run, fp32 for a folder."""
    base: str | None = None
    """Where the folder of a run's model of transformers is now; None: where the run found it."""
    weights: str | None = None
    """average or trained; None: those of the run's own evaluations."""


@dataclass(frozen=True)
class CheckpointScore:
    """Loss and metrics of a checkpoint on some data."""

    step: int | None
    """None for a folder."""
    averaged: bool
    """Whether the weights are a moving average."""
    data: str
    split: str
    samples: int
    unit: str
    """Word for the samples: sequences, images or samples."""
    result: Evaluation


def evaluate_checkpoint(request: EvaluationRequest, device: torch.device) -> CheckpointScore:
    """Load the model at `request.where` and measure it on data.

    Raises UserError for data that the model cannot take, and CheckpointError for a damaged step.
    """
    step, config = _open_model(request.where, request.base)
    averaged = False
    if step is None:
        refuse_weights_of_folder(request.where, request.weights)
    config = _adjust_config(request, config)
    split = request.split or ("all" if request.data is not None else "validation")
    data = _open_data(config, split)
    if request.data is not None:
        _check_tokenizer(request, data)
    with _single_process(config, device) as world:
        if step is not None and isinstance(config.model, HfModelConfig):
            check_base(config.model, step.manifest.extra, step.where)
        engine = _build_engine(config, world)
        if step is not None:
            averaged = _load_step(step, engine, config, request.weights)
        loader, batches = _make_loader(request, config, data)
        try:
            result = evaluate_batches(engine, loader, batches, config.train.metrics, StopRequest())
        finally:
            loader.close()
    assert result is not None  # nobody asks this process to stop
    if not result.targets:
        raise UserError(f"{data.name}: has no target that counts, so there is no loss; give other data")
    samples = len(data) if request.batches is None else batches * loader.global_batch
    at = None if step is None else step.manifest.step
    return CheckpointScore(
        step=at,
        averaged=averaged,
        data=data.name,
        split=split,
        samples=samples,
        unit=_name_unit(config.data),
        result=result,
    )


def _name_unit(data: DataConfig) -> str:
    if isinstance(data, ImageDataConfig):
        return "images"
    return "samples" if isinstance(data, CustomDataConfig) else "sequences"


def _open_model(where: str, base: str | None) -> tuple[OpenStep | None, RunConfig]:
    """Return the step of a run and its configuration; of a folder of transformers, a configuration that reads it."""
    if _is_model_folder(where):
        refuse_base_of_folder(where, base)
        longest = read_config_file(HfModelConfig(path=where)).max_positions
        plain = config_to_dict(compose(["model=hf", "model.path=.", "data=text"]))  # --data takes the place of text
        plain["model"] |= {"path": str(Path(where).expanduser()), "weights": "read"}
        if longest is not None:  # the default is for models that are trained, and this one may be shorter
            plain["train"]["sequence_length"] = min(plain["train"]["sequence_length"], longest)
        return None, config_from_dict(plain)
    refuse_partial_folder(where)
    step = open_one_step(where)
    return step, load_model_config(find_run_config(step), base)


def _is_model_folder(where: str) -> bool:
    return (Path(where).expanduser() / "config.json").is_file()


def _adjust_config(request: EvaluationRequest, config: RunConfig) -> RunConfig:
    """Return the configuration of this one process, which measures what is asked for."""
    if request.data is None and _is_model_folder(request.where):
        raise UserError(f"{request.where}: is a folder of transformers, and has no data of its own; give --data")
    plain, train = config_to_dict(config), config.train
    plain["parallel"] = asdict(ParallelConfig())
    plain["adapter"]["path"] = None  # the step has the adapters' values
    of_run = isinstance(config.model, HfModelConfig) and not _is_model_folder(request.where)
    if of_run and config.adapter.base == "full":
        plain["model"]["weights"] = "draw"  # replaced by those of the step
    if request.precision is not None:
        plain["precision"] |= {"name": request.precision, "reduce": "fp64" if request.precision == "fp64" else "fp32"}
    data = config.data if request.data is None else _choose_data(request, config)
    plain["data"] = asdict(data)
    built_in = () if isinstance(config.model, CustomModelConfig) else (_ACCURACY,)
    of_tokens = (PERPLEXITY,) if data.kind in ("tokens", "mixture") and train.loss is None else ()
    plain["train"] |= {
        "micro_batch": request.micro_batch or train.micro_batch,
        "sequence_length": request.sequence_length or train.sequence_length,
        "metrics": list(dict.fromkeys([*of_tokens, *built_in, *train.metrics])),
    }
    return config_from_dict(plain)


def _choose_data(request: EvaluationRequest, config: RunConfig) -> TokenDataConfig | ImageFilesDataConfig:
    """Return the configuration of --data: tokens or images as they are, or a store that is built once, in the cache."""
    assert request.data is not None
    path = Path(request.data).expanduser()
    if not request.data or not path.exists():
        raise UserError(
            f"--data {request.data or repr('')}: is not there; give a store, or files of text, conversations or images"
        )
    if is_store(path, IMAGE_STORE) or are_images([str(path)], TokenDataConfig(name="text").suffixes):
        return _choose_images(request, config, path)
    run_data = config.data if isinstance(config.data, TokenDataConfig) else TokenDataConfig(name="text")
    column, chat = request.column or run_data.column, request.chat or run_data.chat
    base = replace(run_data, name=path.name, path=None, sources=[], validation_fraction=config.data.validation_fraction)
    if path.is_file() and is_token_file(path, run_data.dtype):
        _refuse_options(request, "tokens", ("chat", "column", "tokenizer"))
        return replace(base, path=str(path))
    tokenizer = request.tokenizer or _find_tokenizer(request, config)
    return replace(base, sources=[str(path)], column=column, chat=chat, tokenizer=tokenizer, vocab_size=256)


def _refuse_options(request: EvaluationRequest, what: str, names: Sequence[str]) -> None:
    """Raise UserError for an option that data of this kind do not need."""
    for name in names:
        if getattr(request, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option}: no effect on {what}, which {request.data} holds; leave it out")


def _choose_images(request: EvaluationRequest, config: RunConfig, path: Path) -> ImageFilesDataConfig:
    """Return the configuration of a store, a folder or a tar of images, prepared as the run's or the folder's own."""
    is_built = is_store(path, IMAGE_STORE)
    _refuse_options(request, "images", ("chat", "tokenizer", "sequence_length", *(["column"] if is_built else [])))
    if isinstance(config.data, ImageFilesDataConfig):
        run_images = config.data
    elif isinstance(config.model, HfModelConfig):
        run_images = describe_images(read_config_file(config.model))
    elif isinstance(config.model, VisionTransformerConfig):
        run_images = ImageFilesDataConfig(image_size=config.model.image_size, channels=config.model.channels)
    else:
        run_images = ImageFilesDataConfig()
    fraction = config.data.validation_fraction
    chosen = replace(
        run_images, name=path.name, path=None, sources=[], validation_path=None, validation_fraction=fraction
    )
    if is_built:
        return replace(chosen, path=str(path))
    return replace(chosen, sources=[str(path)], label_key=request.column or run_images.label_key)


def _find_tokenizer(request: EvaluationRequest, config: RunConfig) -> str:
    """Return the tokenizer that the run was trained with, else that of the model's folder, as data.tokenizer has it."""
    run_data, model = config.data, config.model
    if isinstance(run_data, TokenDataConfig) and not _is_model_folder(request.where):
        if run_data.path is None and run_data.tokenizer != "bpe":
            return run_data.tokenizer
        if (
            run_data.path is not None
            and Path(run_data.path).is_file()
            and is_token_file(Path(run_data.path), run_data.dtype)
        ):
            tokens = open_tokens(run_data)
            if isinstance(tokens, TokenStore) and tokens.tokenizer == "byte":
                return "byte"
    if isinstance(model, HfModelConfig) and (Path(model.path).expanduser() / "tokenizer.json").is_file():
        return model.path
    raise UserError(
        f"{request.data}: is text, and its tokenizer is not known here; give --tokenizer FOLDER, or build a store of "
        "it with `hpc-train data build`"
    )


def _open_data(config: RunConfig, split: str) -> Dataset:
    """Open a part of the data as the model's task wants it; `all` holds nothing out."""
    check_model_and_data(config)
    data = replace(config.data, validation_fraction=0.0) if split == "all" else config.data
    chosen: Split = "validation" if split == "validation" else "train"
    samples = require_indexed(open_dataset(data, config.train.sequence_length, chosen))
    check_model_fits_data(config.model, samples)
    return make_task_samples(config, samples)


def _check_tokenizer(request: EvaluationRequest, data: Dataset) -> None:
    """Raise UserError if the data were made by another tokenizer than the run's, as far as both are known."""
    store = getattr(data, "store", None)
    if _is_model_folder(request.where) or not isinstance(store, TokenStore):
        return
    run_data = load_run_config(find_run_config(open_one_step(request.where))).data
    if not isinstance(run_data, TokenDataConfig) or run_data.path is None or not Path(run_data.path).is_file():
        return
    trained_on = open_tokens(run_data)
    if isinstance(trained_on, TokenStore) and trained_on.tokenizer_digest != store.tokenizer_digest:
        raise UserError(
            f"{store.path}: was built with another tokenizer than {run_data.path}, on which the run was trained; "
            "build it with the same one"
        )


@contextmanager
def _single_process(config: RunConfig, device: torch.device) -> Iterator[World]:
    """Make this process the only rank of a job."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield make_world(0, 1, 0, device, resolve_degrees(config.parallel, 1))
    finally:
        leave_process_group()


def _build_engine(config: RunConfig, world: World) -> Engine:
    """Build the engine of training, with an optimizer of no parameters: it needs neither gradients nor state."""
    model, values = make_deferred_model(config, world)
    return build(model, lambda _: torch.optim.SGD([{"params": []}], lr=0.0), config, world, values=values)


def _load_step(step: OpenStep, engine: Engine, config: RunConfig, weights: str | None) -> bool:
    """Load the weights of a step; returns whether they are the average."""
    with SavedStepTensors(step.path, step.manifest, step.where) as opened:
        source = choose_weights(opened, weights, config.optim.ema, step.where)
        read_cast(source, list(select_weights(engine.shards())))
    return isinstance(source, AveragedTensors)


def _make_loader(request: EvaluationRequest, config: RunConfig, data: Dataset) -> tuple[BatchLoader, int]:
    """Return the loader, and how many batches to take from it."""
    train = config.train
    if request.batches is None:
        loader = SequentialLoader(data, train.micro_batch, train.micro_batch)
        return loader, len(loader)
    return Loader(data, train.seed, train.global_batch, train.micro_batch, 0, 1), request.batches
