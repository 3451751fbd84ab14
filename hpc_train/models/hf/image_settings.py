"""Read how a transformers model expects its images: size from config.json, scale from the preprocessor's file."""

from __future__ import annotations

import json
from typing import Any

from hpc_train.config.model import ImageFilesDataConfig
from hpc_train.errors import UserError
from hpc_train.models.hf.config_file import ConfigFile
from hpc_train.regular_files import read_regular

_MAX_BYTES = 1 << 20


def describe_images(file: ConfigFile) -> ImageFilesDataConfig:
    """Return data settings of this model's image size, channels, mean and standard deviation, as far as files say them.

    Raises UserError for a preprocessor_config.json that is none.
    """
    channels, size = file.image_shape
    defaults = ImageFilesDataConfig()
    preprocessor = _read_preprocessor(file)
    return ImageFilesDataConfig(
        channels=channels or defaults.channels,
        image_size=size or defaults.image_size,
        mean=_get_numbers(preprocessor, "image_mean"),
        std=_get_numbers(preprocessor, "image_std"),
    )


def _read_preprocessor(file: ConfigFile) -> dict[str, Any]:
    path = file.folder / "preprocessor_config.json"
    try:
        body = json.loads(read_regular(path, _MAX_BYTES, follow=True))
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
