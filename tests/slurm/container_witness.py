"""A model that is built only in the image of container_images.py, and only if it does not see the home outside."""

import os
from pathlib import Path

from torch import nn

from hpc_train.models import register


@register("witness")
def build_witness() -> nn.Module:
    assert Path("/etc/image-name").read_text() == "an image of the tests\n"
    assert not Path(os.environ["WITNESS_SECRET"]).exists()
    return nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))


@register("outside")
def build_outside() -> nn.Module:
    """Return the same model for the run outside of any image."""
    assert not Path("/etc/image-name").exists()
    return nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))
