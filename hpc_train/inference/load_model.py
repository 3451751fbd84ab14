"""Load a trained model as one of transformers, with its tokenizer: from a run's checkpoint, or a transformers folder.

A run of our own Llama and GPT-2 family becomes the library's model of the same function; adapters are merged into the
weights. Code from outside is never run.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_train.checkpoint.convert.averaged_weights import choose_weights
from hpc_train.checkpoint.convert.merge_adapters import MergedTensors
from hpc_train.checkpoint.convert.model_config import encode_hf_config, load_model_config
from hpc_train.checkpoint.convert.pretrained_weights import list_misfits
from hpc_train.checkpoint.convert.quantized_base import add_base, needs_base
from hpc_train.checkpoint.convert.tensor_sources import SavedStepTensors, read_whole_tensors
from hpc_train.checkpoint.convert.tied_weights import add_tied_weights, find_tied_names
from hpc_train.checkpoint.storage.step_directory import is_weight
from hpc_train.checkpoint.storage.step_selection import CheckpointTarget, OpenStep, open_one_step
from hpc_train.config.model import DataConfig, HfModelConfig, TransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.data.readers.records import first_line
from hpc_train.data.tokenizers.tokenizer import Tokenizer
from hpc_train.data.tokenizers.tokenizer_folder import FolderTokenizer, load_tokenizer_folder
from hpc_train.errors import UserError
from hpc_train.models.adapters.names import is_adapter_parameter
from hpc_train.models.hf.config_file import ConfigFile, find_start_token, read_config_file
from hpc_train.models.hf.library import get_class, make_library_config
from hpc_train.models.huggingface import to_huggingface
from hpc_train.quiet_imports import without_warnings
from hpc_train.regular_files import MAX_TEXT_BYTES, read_regular
from hpc_train.units import join_first

_DECODER, _ENCODER_DECODER = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model of transformers that generates text."""

    model: Any
    """transformers.PreTrainedModel, in evaluation mode."""
    tokenizer: Tokenizer
    ends_prompts: bool = False
    """An encoder reads prompts with the tokens that end a document, as transformers prepares them."""

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder reads the prompt, and a decoder begins a text of its own."""
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end a text: the tokenizer's own, and special ones that the model's settings name.

        A chat model often ends its turn with another token than a document. Settings that were never adapted to the
        tokenizer name tokens that are not special there.
        """
        ends = {*self.tokenizer.end[-1:]}
        if isinstance(self.tokenizer, FolderTokenizer):
            named = self.model.generation_config.eos_token_id
            ends |= self.tokenizer.special_tokens & {*(named if isinstance(named, list) else [named])}
        return sorted(ends)


def load_model(
    where: str, tokenizer: str | None, device: torch.device, base: str | None = None, weights: str | None = None
) -> LoadedModel:
    """Load the model at `where`: a run, one of its steps, or a folder that save_pretrained made.

    tokenizer: a folder to use in place of the run's own. base: where the folder of a run's model of transformers is.
    weights: average or trained; None: those of the run's own evaluations.
    Raises UserError for a model that generates no text, and one without a tokenizer.
    """
    path = Path(where).expanduser()
    if tokenizer is not None and (not tokenizer or not Path(tokenizer).expanduser().exists()):
        raise UserError(
            f"--tokenizer {tokenizer or repr('')}: is not there; give a folder with a tokenizer.json, or leave it "
            "out for the model's own"
        )
    if (path / "config.json").is_file():
        refuse_base_of_folder(where, base)
        refuse_weights_of_folder(where, weights)
        return _load_folder(path, tokenizer or where, device)
    refuse_partial_folder(where)
    step = open_one_step(where)
    config = load_model_config(find_run_config(step), base)
    model = _make_model(config)
    state = _read_step(step, config, weights)
    if state.keys() & find_tied_names(model).keys():  # an adapter is merged into one of two tied weights
        model = _make_model(config, tied=False)
    if isinstance(config.model, TransformerConfig) and config.model.experts.count:
        model = _load_experts(model, state, where)
    else:
        _load_weights(model, state, where)
    return LoadedModel(model.to(device).eval(), _open_tokenizer(config.data, tokenizer))


def refuse_base_of_folder(where: str, base: str | None) -> None:
    """Raise UserError for --base with a transformers folder, which contains its own model."""
    if base is not None:
        raise UserError(f"--base: {where} is a folder of transformers itself; leave it out")


def refuse_partial_folder(where: str) -> None:
    """Raise UserError for a folder with an adapter of PEFT and no model, or with weights and no config.json."""
    folder = Path(where).expanduser()
    if any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise UserError(f"{where}: has weights and no config.json; give a folder that save_pretrained made")
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{where}: is an adapter of PEFT without its model; give the run that it was exported from, or what "
            "`hpc-train checkpoint export RUN FOLDER --format hf --merged` wrote"
        )


def refuse_weights_of_folder(where: str, weights: str | None) -> None:
    """Raise UserError for --weights with a transformers folder, which has only one set of weights."""
    if weights is not None:
        raise UserError(f"--weights {weights}: {where} is a folder of transformers, which has no other; leave it out")


def find_run_config(step: OpenStep) -> Path:
    """Return the config.yaml of a step's run. Raises UserError if it is not there."""
    file = CheckpointTarget(step.directory).run / "config.yaml"
    if not file.is_file():
        raise UserError(f"{file}: is not there, and it says which model this is; give the directory of a run")
    return file


def _load_folder(path: Path, tokenizer: str, device: torch.device) -> LoadedModel:
    file = read_config_file(HfModelConfig(path=str(path)))
    opened = load_tokenizer_folder(tokenizer)
    kind = _ENCODER_DECODER if file.body.get("is_encoder_decoder") else _DECODER
    try:
        with without_warnings():
            model, report = get_class(kind).from_pretrained(
                path,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype="auto",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # of any kind, from code that expects sound files
        text = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be loaded as a model that generates text ({text})") from error
    _check_report(path, model, report)
    return LoadedModel(model.to(device).eval(), opened, ends_prompts=True)


def _check_report(path: Path, model: Any, report: dict[str, Any]) -> None:
    """Raise UserError where files and config.json differ: the library draws what it lacks, and leaves out the rest.

    As in training, tensors of another head are left out, with a warning.
    """
    left_out = sorted(report["unexpected_keys"])
    report = {**report, "unexpected_keys": list_misfits(model, left_out)}
    reasons = {
        "missing_keys": "its files do not have the weight",
        "mismatched_keys": "its files have in another shape the weight",
        "unexpected_keys": "its config.json has no place for the weight",
    }
    for key, reason in reasons.items():
        if names := sorted(name if isinstance(name, str) else name[0] for name in report[key]):
            raise UserError(
                f"{path}: {reason} {join_first(names, 1)} of {type(model).__name__}; give the files and config.json of "
                "one model"
            )
    if left_out:
        log.warning("%s: the weights have %s, for which this model has no place: left out", path, left_out[0])


def _make_model(config: RunConfig, tied: bool = True) -> Any:
    """Make the library's model of a run's, without its weights. tied: as its configuration says, False: never."""
    if isinstance(config.model, HfModelConfig):
        file = read_config_file(config.model)
        settings = make_library_config(file.body, file.model_type)
    elif isinstance(config.model, TransformerConfig):
        body = encode_hf_config(config.model, "float32")
        settings = make_library_config(body, body["model_type"])
    else:
        raise UserError(f"model={config.model.name}: generates no text; give a run of a language model")
    dtype = torch.float64 if config.precision.name == "fp64" else torch.float32
    if not tied:
        settings.tie_word_embeddings = False
    kind = _ENCODER_DECODER if settings.is_encoder_decoder else _DECODER
    try:
        with without_warnings():
            model = get_class(kind).from_config(settings, trust_remote_code=False, dtype=dtype)
    except ValueError as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"model={config.model.name}: generates no text in transformers ({text})") from error
    if isinstance(config.model, HfModelConfig):
        _set_generation_tokens(model, file)
    return model


def _set_generation_tokens(model: Any, file: ConfigFile) -> None:
    """Give a model the tokens that begin and end its texts, as the folder that it comes from names them."""
    if model.config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = find_start_token(file)
    settings = file.folder / "generation_config.json"
    if not settings.is_file():
        return
    try:
        ends = json.loads(read_regular(settings, MAX_TEXT_BYTES, follow=True)).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{settings}: cannot be read ({first_line(error)})") from error
    if ends is None:
        return
    ends = ends if isinstance(ends, list) else [ends]
    if not all(isinstance(token, int) for token in ends):
        raise UserError(f"{settings}: eos_token_id is not a token or a list of them; save the model's settings again")
    model.generation_config.eos_token_id = ends


def _read_step(step: OpenStep, config: RunConfig, weights: str | None) -> dict[str, Tensor]:
    """Read a step's weights, with adapters merged, under the library's names."""
    with SavedStepTensors(step.path, step.manifest, step.where) as opened:
        source = choose_weights(opened, weights, config.optim.ema, step.where)
        if needs_base(step.manifest):
            assert isinstance(config.model, HfModelConfig)
            source = add_base(source, step.manifest, config.model, step.where)
        if any(is_adapter_parameter(tensor.name) for tensor in source.tensors if is_weight(tensor.name)):
            source = MergedTensors(add_tied_weights(source, config.model), config.adapter)
        state = read_whole_tensors(source, [tensor for tensor in source.tensors if is_weight(tensor.name)])
    return state if isinstance(config.model, HfModelConfig) else to_huggingface(state, config.model)


def _load_weights(model: Any, state: dict[str, Tensor], where: str) -> None:
    """Copy the weights into the model. Raises UserError where some are missing; a tied one has another name."""
    try:
        report = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(f"{where}: the checkpoint does not fit the run's model ({text})") from error
    loaded = {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in state}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in report.missing_keys if name in parameters and id(parameters[name]) not in loaded]
    if missing or report.unexpected_keys:
        wrong = (missing or report.unexpected_keys)[0]
        raise UserError(f"{where}: the checkpoint and the run's model do not agree on {wrong}")


def _load_experts(model: Any, state: dict[str, Tensor], where: str) -> Any:
    """Return the model with these weights; the library itself stacks the matrices of single experts."""
    if model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # grouped products take no float64
    loaded, report = type(model).from_pretrained(
        None, config=model.config, state_dict=state, dtype=model.dtype, output_loading_info=True
    )
    wrong = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in report[kind]]
    if wrong:
        raise UserError(f"{where}: the checkpoint and the run's model do not agree on {wrong[0]}")
    return loaded


def _open_tokenizer(config: DataConfig, folder: str | None) -> Tokenizer:
    """Open the tokenizer of a run's data, or that in `folder`."""
    if folder is not None:
        return load_tokenizer_folder(folder)
    from hpc_train.data.tokenizers.data_tokenizer import open_data_tokenizer

    tokenizer = open_data_tokenizer(config)
    if tokenizer is None:
        raise UserError(f"data={config.name}: does not say which tokenizer; give --tokenizer FOLDER")
    return tokenizer
