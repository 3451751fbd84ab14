"""Make small labelled images, folders of them and tars."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def encode(seed: int, width: int = 24, height: int = 20, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Return an encoded image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels, "RGBA").convert(mode).save(out, kind)
    return out.getvalue()


def make_folder(root: Path, each: int = 4, width: int = 24, height: int = 20) -> Path:
    """Make a folder for each class, with PNG, JPEG and grey images."""
    for number, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for index in range(each):
            kind, mode = (("PNG", "RGB"), ("JPEG", "RGB"), ("PNG", "L"), ("WEBP", "RGB"))[index % 4]
            data = encode(100 * number + index, width, height, kind, mode)
            (root / name / f"{index:03}.{kind.lower()}").write_bytes(data)
    return root


def add_member(archive: tarfile.TarFile, name: str, data: bytes, **fields: object) -> None:
    """Append a member. fields: fields of its header."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(data))


def make_tar(path: Path, samples: list[dict[str, bytes]]) -> Path:
    """Make a tar whose samples have the files `<number>.<ending>`."""
    with tarfile.open(path, "w") as archive:
        for number, files in enumerate(samples):
            for ending, data in files.items():
                add_member(archive, f"{number:05}.{ending}", data)
    return path
