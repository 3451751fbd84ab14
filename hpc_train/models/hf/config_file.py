"""Read the config.json of a folder of transformers: bounded, checked, and without the library.

What comes from it is data. A model that brings its own code (`auto_map`) is refused. How a model expects its images is
also in the file of its preprocessor.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_train.config.model import HfModelConfig, ImageFilesDataConfig
from hpc_train.errors import UserError
from hpc_train.models.hf.families import Family, Task, find_family
from hpc_train.regular_files import read_regular
from hpc_train.terminal import one_line

_MAX_BYTES = 16 << 20
_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_PREPROCESSOR_BYTES = 1 << 20
_TASKS: dict[str, Task] = {
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
    "ForMaskedLM": "masked_lm",
    "ForConditionalGeneration": "seq2seq_lm",
    "MTModel": "seq2seq_lm",
    "ForImageClassification": "image_classification",
}
"""Endings of the names of classes, and the task of each."""
_DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "dropout",
    "dropout_rate",
    "attention_probs_dropout_prob",
    "drop_path_rate",
    "embedding_dropout",
    "residual_dropout",
    "activation_dropout",
    "encoder_layerdrop",
    "decoder_layerdrop",
)
_GPT2_DROPOUTS = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
_BERT_DROPOUTS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_WINDOW: dict[str, float] = {"sliding_window": 4096}
_LIBRARY_DEFAULTS: dict[str, dict[str, float]] = {
    "gpt2": _GPT2_DROPOUTS,
    "gpt_bigcode": {**_GPT2_DROPOUTS, "multi_query": True},
    **{key: {"dropout": 0.1} for key in ("bart", "mbart", "pegasus")},
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), _BERT_DROPOUTS),
    "distilbert": {"dropout": 0.1, "attention_dropout": 0.1},
    "opt": {"dropout": 0.1},
    "t5": {"dropout_rate": 0.1},
    "falcon": {"multi_query": True},
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1},
    **dict.fromkeys(("mistral", "gemma2", "gemma3_text", "olmo3", "cohere2", "exaone4", "ministral", "dots1"), _WINDOW),
    "cwm": {"sliding_window": 8192},
    "gpt_oss": {"sliding_window": 128},
}
"""Dropouts and windows that transformers takes for a model type whose config.json does not give them."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True)
class ConfigFile:
    """The content of a config.json, and what the rules want to know of it."""

    folder: Path
    body: dict[str, Any]
    is_mxfp4: bool = False
    """Its weights are in 4 bits (gpt-oss), and are expanded when they are read; `body` no longer says so."""

    @property
    def model_type(self) -> str:
        """The type of the model, such as llama."""
        return str(self.body["model_type"])

    @cached_property
    def family(self) -> Family:
        """The techniques that this type of model can have."""
        return find_family(self.model_type)

    def get_number(self, *keys: str, part: str = "text_config") -> int | None:
        """Return the first of these keys that is a number, also in the configuration of this part; or None."""
        inner = self.body.get(part)
        for body in (self.body, inner if isinstance(inner, dict) else {}):
            for key in keys:
                if isinstance(value := body.get(key), int) and not isinstance(value, bool):
                    return value
        return None

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding; None where the file leaves them to the library's default."""
        return self.get_number("vocab_size")

    @property
    def key_heads(self) -> int | None:
        """Heads of keys and values; None where the file leaves them to the library's default."""
        settings = {**_LIBRARY_DEFAULTS.get(self.model_type, {}), **self.body}
        if settings.get("multi_query") and not settings.get("new_decoder_architecture"):
            return 1
        return self.get_number("num_key_value_heads", "num_kv_heads")

    @property
    def classes(self) -> int:
        """Classes of a classification head; 2 where the file leaves them to the library's default."""
        labels = self.body.get("id2label")
        return len(labels) if isinstance(labels, dict) and labels else 2

    @property
    def image_shape(self) -> tuple[int | None, int | None]:
        """Channels, and height and width in pixels; None for what the file leaves to the library's default."""
        vision = self.body.get("vision_config")
        body = vision if isinstance(vision, dict) else self.body
        channels, size = body.get("num_channels"), body.get("image_size")
        return (channels if isinstance(channels, int) else None, size if isinstance(size, int) else None)

    @property
    def max_positions(self) -> int | None:
        """Longest sequence."""
        return self.get_number(*_POSITION_KEYS)

    @property
    def window(self) -> int | None:
        """Keys that a token's attention sees at most, in the layers that have a window."""
        if "sliding_window" in self.body:
            return self.get_number("sliding_window") or None  # 0 in models without one (Qwen2-MoE)
        default = _LIBRARY_DEFAULTS.get(self.model_type, {}).get("sliding_window")
        return None if default is None else int(default)

    def find_dropout(self) -> str | None:
        """Return the first setting, as key=value, that drops activations or attention weights; given or by default."""
        vision, defaults = self.body.get("vision_config"), _LIBRARY_DEFAULTS.get(self.model_type, {})
        attention = self.body.get("attn_config")
        parts = [part for part in (vision, attention) if isinstance(part, dict)]
        for body in ({**defaults, **self.body}, *parts):
            for key in _DROPOUTS:
                if isinstance(value := body.get(key), (int, float)) and value > 0:
                    return f"{key}={value:g}"
        return None


_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "n_layer")
"""Keys that say how many layers are built."""
_MAX_LAYERS = 10_000
"""Each layer of a model is an object of Python, also on the meta device: of millions, building would not end."""


def read_config_file(config: HfModelConfig) -> ConfigFile:
    """Read model.path/config.json. Raises UserError, in one line, for a folder that cannot be trained."""
    folder = Path(config.path).expanduser()
    file = folder / "config.json"
    if not folder.is_dir():
        hub = f"; one of the Hugging Face Hub is downloaded first: hf download {config.path} --local-dir FOLDER"
        raise UserError(
            f"model.path={config.path}: no such folder; give one that save_pretrained of transformers made, or "
            f"of a run whose folder has moved, where it is now{hub if _HUB_NAME.fullmatch(config.path) else ''}"
        )
    try:
        body = json.loads(read_regular(file, _MAX_BYTES, follow=True))
    except FileNotFoundError:
        raise UserError(f"model.path={config.path}: {_explain_missing(folder)}") from None
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise UserError(f"{file}: is not a configuration of transformers ({why})") from None
    is_mxfp4 = _is_mxfp4(body)
    if is_mxfp4:
        del body["quantization_config"]
    _check_body(body, file)
    return ConfigFile(folder, body, is_mxfp4)


def _is_mxfp4(body: Any) -> bool:
    settings = body.get("quantization_config") if isinstance(body, dict) else None
    is_one = isinstance(settings, dict) and settings.get("quant_method") == "mxfp4"
    return is_one and body.get("model_type") == "gpt_oss"


def _explain_missing(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return "is an adapter of PEFT; give the folder of its base model, and the adapter with adapter.path=FOLDER"
    if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
        return "is a run; write a folder of transformers with `hpc-train checkpoint export RUN FOLDER --format hf`"
    return "has no config.json; give a folder that save_pretrained of transformers made"


def _check_body(body: Any, file: Path) -> None:
    model_type = body.get("model_type") if isinstance(body, dict) else None
    if not isinstance(model_type, str) or not model_type.isprintable():
        raise UserError(f"{file}: has no model_type, so it is not a configuration of a model of transformers")
    if "auto_map" in body:
        raise UserError(
            f"{file}: this model brings its own Python code (auto_map), which is never run; use a model whose class "
            "is in transformers, or register the class yourself with model=custom"
        )
    if body.get("quantization_config") is not None:
        raise UserError(
            f"{file}: its weights are quantized (quantization_config), and only floating-point ones are trained; "
            "dequantize them with transformers and save them again"
        )
    for key in _LAYERS:
        if isinstance(layers := body.get(key), int) and layers > _MAX_LAYERS:
            raise UserError(
                f"{file}: {key}={layers}: a model of at most {_MAX_LAYERS:,} layers is built; is it damaged?"
            )
    if body.get("output_router_logits"):
        raise UserError(
            f"{file}: output_router_logits=true adds a loss of the router, which is not computed here; set it to false"
        )


def find_task(config: HfModelConfig, file: ConfigFile) -> Task:
    """Return the task that is asked for, or that the class in config.json is for. Raises UserError if that is open."""
    if config.task != "auto":
        task: Task = config.task  # type: ignore[assignment]  # checked by its choices
        return task
    named = file.body.get("architectures")
    for name in named if isinstance(named, list) else []:
        for ending, task in _TASKS.items():
            if isinstance(name, str) and name.endswith(ending):
                _check_encoder(file, name, task)
                return task
    if file.family.tested:
        return file.family.task
    raise UserError(
        f"model.task=auto: {file.folder / 'config.json'} names no class with a task (architectures); give "
        f"model.task={'|'.join(dict.fromkeys(_TASKS.values()))}"
    )


def _check_encoder(file: ConfigFile, name: str, task: Task) -> None:
    """Raise UserError for a class that is named as an encoder-decoder, and is a decoder of text with other inputs."""
    has_encoder = file.family.task == "seq2seq_lm" or file.body.get("is_encoder_decoder")
    if task == "seq2seq_lm" and not has_encoder:
        raise UserError(
            one_line(
                f"{file.folder / 'config.json'}: {name} reads images or sound beside text, which is not trained here; "
                "give the folder of a model of text, or register one of your own with model=custom"
            )
        )


def find_mask_token(config: HfModelConfig, file: ConfigFile) -> int:
    """Return the token that hides others: model.mask_token, or the tokenizer's. Raises UserError if there is none."""
    if config.mask_token is not None:
        return config.mask_token
    try:
        settings = json.loads(read_regular(file.folder / "tokenizer_config.json", _MAX_BYTES, follow=True))
        tokenizer = json.loads(read_regular(file.folder / "tokenizer.json", _MAX_TOKENIZER_BYTES, follow=True))
        mask = settings["mask_token"]
        word = mask["content"] if isinstance(mask, dict) else mask
        return next(int(token["id"]) for token in tokenizer["added_tokens"] if token["content"] == word)
    except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
        raise UserError(
            f"model.mask_token: the tokenizer in {file.folder} has none; give the number of a token that hides "
            "others, or save a tokenizer with a mask_token there"
        ) from None


def find_start_token(file: ConfigFile) -> int:
    """Return the token that a decoder begins with. Raises UserError if config.json has none."""
    token = file.get_number("decoder_start_token_id", "bos_token_id", "pad_token_id")
    if token is None:
        raise UserError(f"{file.folder / 'config.json'}: has no decoder_start_token_id; add it")
    return token


def describe_images(file: ConfigFile) -> ImageFilesDataConfig:
    """Return data settings of this model's image size, channels, mean and standard deviation, as far as files say them.

    Raises UserError for a file of the preprocessor that cannot be read.
    """
    own_channels, size = file.image_shape
    defaults = ImageFilesDataConfig()
    channels, preprocessor = own_channels or defaults.channels, _read_preprocessor(file)
    scale = _get_scale(preprocessor)
    mean, std = _get_numbers(preprocessor, "image_mean"), _get_numbers(preprocessor, "image_std")
    if preprocessor.get("do_normalize") is False:
        mean, std = [0.0] * channels, [1.0] * channels
    return ImageFilesDataConfig(
        channels=channels,
        image_size=size or defaults.image_size,
        mean=[value / scale for value in mean],
        std=[value / scale for value in std],
    )


def _get_scale(preprocessor: dict[str, Any]) -> float:
    """Return what the preprocessor multiplies pixels from 0 to 1 with, before it subtracts the mean."""
    factor = preprocessor.get("rescale_factor", 1 / 255)
    if preprocessor.get("do_rescale") is False:
        factor = 1
    return 255.0 * factor if isinstance(factor, (int, float)) and factor > 0 else 1.0


def _read_preprocessor(file: ConfigFile) -> dict[str, Any]:
    """Return the settings of the image processor: part of a processor of several kinds of input, or alone."""
    part = _read_object(file, "processor_config.json").get("image_processor")
    return part if isinstance(part, dict) else _read_object(file, "preprocessor_config.json")


def _read_object(file: ConfigFile, name: str) -> dict[str, Any]:
    path = file.folder / name
    try:
        body = json.loads(read_regular(path, _MAX_PREPROCESSOR_BYTES, follow=True))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        why = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise UserError(f"{path}: cannot be read ({why}); save the preprocessor of the model there again") from None
    return body if isinstance(body, dict) else {}


def _get_numbers(body: dict[str, Any], key: str) -> list[float]:
    values = body.get(key)
    if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
        return []
    return [float(value) for value in values]
