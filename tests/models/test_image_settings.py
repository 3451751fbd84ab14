"""How a model of transformers wants its images: the pixels of its own preprocessor, from the files that it saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from hpc_train.models.hf.config_file import ConfigFile, describe_images


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_normalize": False},
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 0.9, 1.1]},
        {"do_rescale": False, "image_mean": [120.0] * 3, "image_std": [50.0, 60.0, 70.0]},
    ],
    ids=range(4),
)
def test_pixels_have_the_scale_of_the_librarys_preprocessor(tmp_path: Path, settings: dict[str, Any]) -> None:
    kind = getattr(transformers, "ViTImageProcessorPil", transformers.ViTImageProcessor)
    processor = kind(do_resize=False, **settings)
    processor.save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    wanted = processor(Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0]
    data = describe_images(ConfigFile(tmp_path, {"model_type": "vit", "image_size": 8, "num_channels": 3}))
    mean, std = (np.array(numbers or [0.5] * 3) for numbers in (data.mean, data.std))
    ours = torch.from_numpy((pixels / 255 - mean) / std).permute(2, 0, 1)
    torch.testing.assert_close(ours, wanted.double(), rtol=1e-5, atol=1e-5)
