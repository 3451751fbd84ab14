"""Decode images with Pillow, within bounds, and cut the part out of each that a sample shows."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hpc_train.data.images.image_entries import KINDS
from hpc_train.data.readers.records import first_line
from hpc_train.errors import UserError

MAX_PIXELS = 1 << 26
"""Pixels of the largest image, 192 MiB in three colours: a small file may claim to be far larger."""
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
"""Pillow knows others, some of which start programs or have a history of faults."""
_WIDE_MODES = ("I", "F")
"""Beginnings of Pillow's names of pixels with more than 8 bits a channel."""
_ASPECT = math.log(4 / 3)
_ORIENTATION = 0x0112
"""Number of the EXIF entry that says how a camera was held."""
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Pillow's operation that turns an image of this orientation upright; 1 is upright."""
_LYING = (5, 6, 7, 8)
"""Orientations whose width and height are exchanged."""


class ImageError(Exception):
    """An image that cannot be decoded; the message is the end of a sentence."""


@dataclass(frozen=True)
class Crop:
    """A rectangle of an image, in shares of its width and height."""

    left: float
    top: float
    width: float
    height: float
    flipped: bool = False
    """Whether left and right are exchanged."""


def import_pillow() -> Any:
    """Import Pillow. Raises UserError if it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("images need the package pillow: pip install 'hpc_train[images]'") from error
    # Pillow warns on standard error of what is refused here (many pixels) or does not matter (EXIF that is not whole,
    # palettes with transparency).
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


def check_image(data: bytes) -> None:
    """Decode an image and drop it; of a JPEG, an eighth of the size. Raises ImageError."""
    image = _open(data)
    _load(image, _read_orientation(image), (1, 1))


def decode_image(
    data: bytes, channels: int, size: int, choose_crop: Callable[[int, int], Crop]
) -> npt.NDArray[np.uint8]:
    """Decode a crop of an upright image at size x size pixels, (size, size, channels). Raises ImageError.

    choose_crop: (width, height) of the upright image -> crop.
    """
    image_module = import_pillow()
    image = _open(data)
    orientation = _read_orientation(image)
    width, height = image.size
    crop = choose_crop(height, width) if orientation in _LYING else choose_crop(width, height)
    # A JPEG is decoded at a fraction of its size if the crop stays larger than the result.
    image = _load(image, orientation, (math.ceil(size / crop.width), math.ceil(size / crop.height)))
    width, height = image.size
    box = (
        crop.left * width,
        crop.top * height,
        min((crop.left + crop.width) * width, width),
        min((crop.top + crop.height) * height, height),
    )
    image = image.convert("RGB" if channels == 3 else "L").resize((size, size), image_module.Resampling.BICUBIC, box)
    if crop.flipped:
        image = image.transpose(image_module.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image).reshape(size, size, channels)


def centre_crop(width: int, height: int, share: float) -> Crop:
    """Return the square in the middle of an image whose side is this share of the image's shorter side."""
    side = share * min(width, height)
    across, down = side / width, side / height
    return Crop((1 - across) / 2, (1 - down) / 2, across, down)


def draw_crop(seed: int, position: int, width: int, height: int, least_area: float) -> Crop:
    """Draw a crop of an image, a pure function of the seed and the position in the run.

    Its area is a share of at least `least_area`, its aspect ratio lies between 3:4 and 4:3 (Szegedy et al. 2014,
    arXiv:1409.4842, as torchvision's RandomResizedCrop; a side longer than the image's becomes that, and is not drawn
    again), and half of all are flipped.
    """
    # The raw output of a counter-based generator: it stays the same in every release of NumPy.
    raw = np.random.Philox(key=seed % (1 << 64), counter=[0, 0, 0, position]).random_raw(5)
    area, aspect, across, down, flip = ((int(word) >> 11) * 2.0**-53 for word in raw)
    pixels = (least_area + (1 - least_area) * area) * width * height
    ratio = math.exp(_ASPECT * (2 * aspect - 1))
    share_across = min(1.0, math.sqrt(pixels * ratio) / width)
    share_down = min(1.0, math.sqrt(pixels / ratio) / height)
    return Crop(across * (1 - share_across), down * (1 - share_down), share_across, share_down, flip < 0.5)


def _open(data: bytes) -> Any:
    """Read the header of an image."""
    image_module = import_pillow()
    try:
        image = image_module.open(io.BytesIO(data), formats=_FORMATS)
    except image_module.UnidentifiedImageError:
        raise ImageError(f"is not an image in a known format ({KINDS})") from None
    except Exception as error:  # Pillow raises nearly every kind on hostile bytes
        raise ImageError(f"is a damaged image ({first_line(error)})") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ImageError(f"has {width:,} x {height:,} pixels; at most {MAX_PIXELS:,} are decoded")
    if image.mode.startswith(_WIDE_MODES):
        raise ImageError("has more than 8 bits a channel: convert it to 8")
    return image


def _read_orientation(image: Any) -> int:
    """Return how the image has to be turned, as EXIF numbers it; 1, upright, where nothing sound says so."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # Pillow raises nearly every kind on hostile bytes, and the pixels may be sound
        return 1
    return orientation if isinstance(orientation, int) else 1


def _load(image: Any, orientation: int, least: tuple[int, int]) -> Any:
    """Decode an image and turn it upright. least: width and height that a JPEG may be reduced to, by a power of two."""
    try:
        image.draft(None, least[::-1] if orientation in _LYING else least)
        image.load()
    except Exception as error:
        raise ImageError(f"is damaged or cut short ({first_line(error)})") from error
    if orientation not in _UPRIGHT:
        return image
    return image.transpose(import_pillow().Transpose[_UPRIGHT[orientation]])
