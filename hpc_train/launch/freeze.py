"""Check a run and freeze it: from here on nothing of conf/ is read again.

freeze_run decides parallel=auto, checks that model, data, degrees and files go together, builds the token store
if the data needs one, and writes the run directory with its job spec. Everything that can fail does so before a
rank starts.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.cluster.calibration import read_calibration
from hpc_train.config.model import (
    CustomModelConfig,
    DataConfig,
    HfModelConfig,
    ImageDataConfig,
    ImageFilesDataConfig,
    MixtureDataConfig,
    ModelConfig,
    TokenDataConfig,
    TransformerConfig,
    VisionTransformerConfig,
)
from hpc_train.config.parallel import Degrees
from hpc_train.config.profile import check_ranks
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.launch.command_output import Report
from hpc_train.launch.job_spec import JobSpec, make_spec
from hpc_train.models.hf.config_file import find_task, read_config_file
from hpc_train.parallel.rules.check import check_support
from hpc_train.placement.node_locations import read_switch_file
from hpc_train.regular_files import MAX_TEXT_BYTES, read_regular, write_private_file
from hpc_train.traffic.stages import is_schedule_file
from hpc_train.training.loggers.interface import check_loggers
from hpc_train.training.records.run_records import read_metrics
from hpc_train.training.run_directory import (
    RunDirectory,
    locate_run_directory,
    prepare_run_directory,
)

if TYPE_CHECKING:
    from hpc_train.launch.snapshot.code_snapshot import Snapshot


def freeze_run(
    config: RunConfig,
    ranks: int,
    report: Report,
    folder: RunDirectory | None = None,
    why: str | None = None,
    code: Snapshot | None = None,
) -> JobSpec:
    """Check the run and write its directory with its job spec: from here on, nothing of conf/ is read again.

    report: gets the decision of parallel=auto. why: the explanation from decide_auto_layout, if it was called before.
    code: the snapshot that the job runs.
    """
    config, plan_text = decide_auto_layout(config, ranks, report)
    why = why or plan_text
    degrees = check_run(config, ranks)
    folder = folder or locate_run_directory(config)
    check_files(config, folder)
    spec = make_spec(config, folder, ranks, asdict(degrees), find_token_store(config), code)
    schedule = read_schedule_file(config)
    prepare_run_directory(folder, spec.run_config())
    if schedule is not None:
        write_private_file(folder.schedule, schedule)
    if why is not None:
        write_private_file(folder.plan, why)
    spec.write(folder.job)
    return spec


def check_run(config: RunConfig, ranks: int) -> Degrees:
    """Check all that can be checked before any rank starts, and return the degrees. Raises UserError."""
    from hpc_train.models.shape import check_shape

    degrees = check_support(config, ranks)
    if config.profile.steps is not None:
        check_ranks(config.profile.ranks, ranks)
    check_shape(config.model)
    check_model_and_data(config)
    check_attention_kernel(config)
    if isinstance(config.model, HfModelConfig):
        check_pretrained_model(config.model)
    if config.container.kind == "none":  # else nobody knows what is installed where it runs
        check_loggers(config.loggers.use)
    return degrees


def decide_auto_layout(config: RunConfig, ranks: int | None, report: Report) -> tuple[RunConfig, str | None]:
    """Decide parallel=auto: return the run with its degrees, and why these, at length.

    Any other run is returned as it is.

    ranks: of the job; None where the planner may choose the number of nodes. report: gets the decision in one line.
    """
    if not config.parallel.auto:
        return config, None
    from hpc_train.planner.auto import choose_parallel

    decision = choose_parallel(config, ranks)
    report(decision.line)
    return decision.config, decision.text


def read_schedule_file(config: RunConfig) -> str | None:
    """Return the pipeline order that the run reads from a file, and of which it gets a copy; None if it reads none."""
    pipeline = config.parallel.pipeline
    return _read_schedule_text(Path(pipeline.schedule).expanduser()) if is_schedule_file(pipeline) else None


def _read_schedule_text(path: Path) -> str:
    try:
        return read_regular(path, MAX_TEXT_BYTES, follow=True).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"parallel.pipeline.schedule={path}: {why}; give a file with a pipeline's order") from error


def find_token_store(config: RunConfig, build: bool = True) -> Path | None:
    """Return the token store that the run reads, built now if necessary: the text may change later.

    None where the batch script has set-up lines: they may be what brings the text to the node, so the ranks build it.
    build: False only returns where the store will be.
    """
    if not isinstance(config.data, TokenDataConfig) or config.launch.setup:
        return None
    from hpc_train.data.corpus.build import ensure_store, locate_store

    return ensure_store(config.data) if build else locate_store(config.data)


def describe_finished_run(config: RunConfig, folder: RunDirectory) -> str | None:
    """Return a line that says that the run in this folder has made all its steps; None if steps are left.

    Only for a number of steps: how many an epoch has is known once the data is open. The ranks notice a last checkpoint
    that is damaged or has NaN in it.
    """
    total, saved = config.train.wanted_steps, folder.steps()
    if config.checkpoint.resume != "auto" or total is None or not saved or saved[-1] < total:
        return None
    from hpc_train.checkpoint import list_committed_steps, verify_step

    newest = list_committed_steps(folder.checkpoints)[-1]  # after a rollback this is not the highest
    # verify_step returns the problems that it finds.
    if newest < total or verify_step(folder.checkpoints, newest) or not _is_last_step_sound(folder, newest):
        return None
    return f"already done: {folder.path} has its {total} steps; more of them with train.steps, or use a new run_dir"


def _is_last_step_sound(folder: RunDirectory, step: int) -> bool:
    """Whether the last step is sound, and its evaluation was not skipped by a stop or has been made up for."""
    from hpc_train.checkpoint.format.manifest import read_manifest
    from hpc_train.checkpoint.storage.step_directory import explain_bad_step, locate_step

    path = locate_step(folder.checkpoints, step)
    manifest = read_manifest(path, step)
    if explain_bad_step(path, manifest) is not None:
        return False
    if not manifest.extra.get("owes_validation", False):
        return True
    rows = read_metrics(folder.metrics)
    return bool(rows) and rows[-1]["step"] == step and "validation_loss" in rows[-1]


_BYTE_VOCAB = 256
"""Tokens of the byte tokenizer: a byte has so many values."""
_STDLIB = "stdlib"


def check_model_and_data(config: RunConfig) -> None:
    """Raise UserError if this model cannot read this data, as far as the settings alone tell."""
    model, data = config.model, config.data
    if isinstance(model, TransformerConfig) and isinstance(data, ImageDataConfig):
        raise UserError(f"data={data.name}: images, but model={model.name} reads tokens; use model=vit_tiny")
    if isinstance(data, ImageFilesDataConfig) and not config.launch.setup:
        _require_image_stores(data)
    if isinstance(model, VisionTransformerConfig) and isinstance(data, ImageFilesDataConfig):
        _check_image_shape(model, data)
    if isinstance(model, VisionTransformerConfig) and isinstance(data, (TokenDataConfig, MixtureDataConfig)):
        raise UserError(f"data={data.name}: tokens, but model={model.name} reads images; use data=digits")
    if isinstance(model, HfModelConfig):
        check_task_and_data(model, data)
    if config.parallel.sync_batchnorm and not isinstance(model, (CustomModelConfig, HfModelConfig)):
        raise UserError(f"parallel.sync_batchnorm=true: model={model.name} has no BatchNorm; leave it out")
    if isinstance(data, (TokenDataConfig, MixtureDataConfig)) and data.samples == "packed":
        _check_packing(config)
    if isinstance(data, TokenDataConfig) and data.path is None:
        _check_vocabulary(model, data)


def _require_image_stores(data: ImageFilesDataConfig) -> None:
    """Raise UserError for a missing store before its images are checked."""
    for key, path in (("path", data.path), ("validation_path", data.validation_path)):
        if path is not None and not Path(path).expanduser().is_file():
            raise UserError(f"data.{key}={path}: no such file; make it with `hpc-train data build {path} FOLDER`")


def _check_image_shape(model: VisionTransformerConfig, data: ImageFilesDataConfig) -> None:
    if (model.channels, model.image_size) != (data.channels, data.image_size):
        raise UserError(
            f"data.image_size={data.image_size} data.channels={data.channels}: model={model.name} takes images of "
            f"{model.image_size} and {model.channels}; set those, or model.image_size and model.channels"
        )


def check_attention_kernel(config: RunConfig) -> None:
    """Raise UserError for a kernel of attention that this machine does not have, if the ranks will run here."""
    kernel = getattr(config.model, "attention", "auto")
    if not isinstance(config.model, TransformerConfig) or kernel == "auto" or config.launch.kind != "local":
        return
    import torch

    from hpc_train.parallel.rules.attention import explain_missing_kernel

    why = explain_missing_kernel(kernel, not torch.cuda.is_available())
    if why is not None:
        raise UserError(f"model.attention={kernel}: {why}")


def get_vocabulary(model: ModelConfig) -> int | None:
    """Return the size of the model's vocabulary; None where it has none, or only its own code knows."""
    if isinstance(model, HfModelConfig):
        return read_config_file(model).vocab_size
    return model.vocab_size if isinstance(model, TransformerConfig) else None


def check_pretrained_model(model: HfModelConfig) -> None:
    """Build the model without memory and compare it with the headers of its weights. Raises UserError."""
    import torch

    from hpc_train.checkpoint.convert.pretrained_weights import check_weights
    from hpc_train.models.hf.build import build_hf_model

    with torch.device("meta"):
        check_weights(model, build_hf_model(model))


def check_task_and_data(model: HfModelConfig, data: DataConfig) -> None:
    """Raise UserError for a task that needs other data."""
    task = find_task(model, read_config_file(model))
    reads_images = task == "image_classification"
    if isinstance(data, (TokenDataConfig, MixtureDataConfig) if reads_images else ImageDataConfig):
        raise UserError(
            f"data={data.name}: {'tokens' if reads_images else 'images'}, but model.path={model.path} reads "
            f"{'images' if reads_images else 'tokens'} (task {task})"
        )


def _check_packing(config: RunConfig) -> None:
    """Raise UserError for packed documents together with a setting that cannot keep documents apart."""
    model, instead = config.model, "use data.samples=padded, or stream"
    if isinstance(model, VisionTransformerConfig):
        raise UserError(f"data.samples=packed: model={model.name} does not take packed documents; {instead}")
    if isinstance(model, HfModelConfig):
        _check_packed_library_model(model, config.train.micro_batch, instead)
    if isinstance(model, TransformerConfig) and model.dropout > 0:
        raise UserError(f"data.samples=packed: not with model.dropout={model.dropout}; set it to 0, or {instead}")
    for axis, degree in (("cp", config.parallel.cp), ("pp", config.parallel.pp)):
        if degree != 1:
            raise UserError(f"data.samples=packed: not with parallel.{axis}={degree}; set it to 1, or {instead}")


def _check_packed_library_model(model: HfModelConfig, micro_batch: int, instead: str) -> None:
    """Raise UserError for packed documents that a model of transformers may not keep apart."""
    family = read_config_file(model).family
    if not family.packs:
        raise UserError(f"data.samples=packed: {family.name} of transformers does not keep documents apart; {instead}")
    if not family.tested or family.task != "causal_lm":
        raise UserError(
            f"data.samples=packed: nobody has compared its numbers for {family.name} of transformers; {instead}"
        )
    if model.attention == "flash_attention_2" and micro_batch > 1:
        raise UserError(
            "data.samples=packed: model.attention=flash_attention_2 keeps documents apart in single sequences only; "
            f"use train.micro_batch=1, another model.attention, or {instead.removeprefix('use ')}"
        )


def _check_vocabulary(model: ModelConfig, data: TokenDataConfig) -> None:
    if data.tokenizer == "byte" and data.vocab_size != _BYTE_VOCAB:
        raise UserError(
            f"data.vocab_size={data.vocab_size}: the byte tokenizer has {_BYTE_VOCAB}; use data.tokenizer=bpe"
        )
    if data.tokenizer in ("byte", "bpe"):
        _check_model_covers(model, data.vocab_size, f"data={data.name}")


def _check_model_covers(model: ModelConfig, tokens: int, where: str) -> None:
    """Raise UserError if the model's vocabulary is smaller than the `tokens` of the data. where: the data's setting."""
    of_model = get_vocabulary(model)
    if of_model is None or of_model >= tokens:
        return
    if isinstance(model, HfModelConfig):
        hint = "use the tokenizer of that folder for the data, or a model with more tokens"
        if where == f"data.tokenizer={model.path}":  # tokens were added to the tokenizer alone
            hint = f"save the model with as many in transformers: model.resize_token_embeddings({tokens})"
        raise UserError(
            f"model.path={model.path}: its vocabulary of {of_model} is smaller than the {tokens} of {where}; {hint}"
        )
    raise UserError(f"model.vocab_size={of_model}: smaller than the {tokens} of {where}; use model.vocab_size={tokens}")


def check_files(config: RunConfig, folder: RunDirectory) -> None:
    """Raise UserError for data or a checkpoint to resume from that is not there, and for a topology that is none.

    Data is not looked for where the batch script has set-up lines: they may be what brings it to the node.
    """
    if isinstance(config.data, TokenDataConfig) and not config.launch.setup:
        _check_text(config.data, config.model)
    if isinstance(config.data, MixtureDataConfig) and not config.launch.setup:
        from hpc_train.data.samples.mixture_order import check_mixture

        for source in check_mixture(config.data, config.train.sequence_length):
            _check_text(source, config.model)
    if isinstance(config.data, ImageFilesDataConfig) and not config.launch.setup:
        _check_images(config.data, config.model)
    check_cluster_files(config)
    offload = config.parallel.offload.dir
    if config.launch.kind == "local" and offload is not None and not Path(offload).is_dir():
        raise UserError(f"parallel.offload.dir={offload}: no such folder on this node; make it, or leave it out")
    resume = config.checkpoint.resume
    if resume.isdigit() and int(resume) not in folder.steps():
        existing = f"there are {', '.join(map(str, folder.steps()))}" if folder.steps() else "there is none"
        raise UserError(f"checkpoint.resume={resume}: not a step in {folder.checkpoints}; {existing}")
    if "/" in resume and not Path(resume).expanduser().exists():
        raise UserError(f"checkpoint.resume={resume}: does not exist; give a step-<n>, a run directory, or a step")


def check_cluster_files(config: RunConfig) -> None:
    """Raise UserError if cluster.topology has no switches or cluster.calibration is not a calibration file."""
    if config.cluster.topology is not None:
        read_switch_file(Path(config.cluster.topology))
    if config.cluster.calibration is not None:
        read_calibration(Path(config.cluster.calibration).expanduser())


def _check_text(data: TokenDataConfig, model: ModelConfig) -> None:
    """Raise UserError for text or a token store that a rank could not read, or whose tokens the model lacks."""
    if data.path is not None:
        if not Path(data.path).expanduser().is_file():
            if Path(f"{data.path}.bin").expanduser().is_file():  # Megatron's programs take the name without its ending
                raise UserError(f"data.path={data.path}: no such file; give {data.path}.bin")
            raise UserError(
                f"data.path={data.path}: no such file; make it with `hpc-train data build {data.path} TEXT`"
            )
        from hpc_train.data.token_files import open_tokens  # h5py, which only runs with a file of their own need here

        _check_model_covers(model, open_tokens(data).vocab_size, f"data.path={data.path}")
        return
    if not data.sources:
        raise UserError(
            f"data={data.name}: has no text; give data.path=<token store> or data.sources=[<file or folder>]"
        )
    if data.tokenizer not in ("byte", "bpe"):
        _check_tokenizer(data, model)
    for source in data.sources:
        if source != _STDLIB and not Path(source).expanduser().exists():
            raise UserError(f"data.sources: {source} does not exist; give text files, folders, or the word {_STDLIB}")


def _check_images(data: ImageFilesDataConfig, model: ModelConfig) -> None:
    """Raise UserError for images that a rank could not read, or of more classes than the model has."""
    from hpc_train.data.images.build_images import locate_image_store
    from hpc_train.data.images.image_store import ImageStore

    if data.path is None:
        locate_image_store(data)  # finds the sources
    stores = [ImageStore.open(path) for path in (data.path, data.validation_path) if path is not None]
    if data.path is not None and isinstance(model, VisionTransformerConfig) and model.classes < len(stores[0].classes):
        classes = len(stores[0].classes)
        raise UserError(
            f"model.classes={model.classes}: fewer than the {classes} of {data.path}; set model.classes={classes}"
        )
    if data.validation_path is not None and data.validation_fraction == 0:
        raise UserError("data.validation_path: no effect with data.validation_fraction=0; leave one of them out")


def _check_tokenizer(data: TokenDataConfig, model: ModelConfig) -> None:
    """Raise UserError for a tokenizer that cannot be read, or whose vocabulary the model does not cover."""
    from hpc_train.data.tokenizers.tokenizer_folder import load_tokenizer_folder

    tokens = load_tokenizer_folder(data.tokenizer, data.end_of_document).vocab_size
    _check_model_covers(model, tokens, f"data.tokenizer={data.tokenizer}")
