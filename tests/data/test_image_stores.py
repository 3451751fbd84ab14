"""Image stores from folders and tars: what is in them, and what is refused in one line with nothing left behind."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from labelled_images import CLASSES, add_member, encode, make_folder, make_tar
from PIL import Image, ImageOps, PngImagePlugin

from hpc_train.cli.main import main
from hpc_train.data.images import build_images, decoding
from hpc_train.data.images.build_images import build_image_store
from hpc_train.data.images.image_store import ImageStore
from hpc_train.data.store_file import IMAGE_STORE, is_store
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR, UserError


def test_a_folder_becomes_a_store_of_the_same_bytes_with_any_number_of_workers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos")
    (folder / "README.md").write_text("about")
    (folder / "ant" / ".hidden.png").write_bytes(b"no image")
    one = build_image_store([str(folder)], tmp_path / "a.h5", workers=1)
    build_image_store([str(folder)], tmp_path / "b.h5", workers=3)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    files = sorted(path for path in folder.glob("*/*") if not path.name.startswith("."))
    assert [one.read(index) for index in range(len(one))] == [path.read_bytes() for path in files]
    assert [one.classes[label] for label in one.labels] == [path.parent.name for path in files]
    assert one.classes == CLASSES


@pytest.mark.parametrize("kind", ["cls", "json", "names"])
def test_a_tar_gives_its_images_and_labels(tmp_path: Path, kind: str) -> None:
    labels = [2, 0, 3, 0]
    samples = []
    for number, label in enumerate(labels):
        label_file = {
            "cls": {"cls": f"{label}\n".encode()},
            "json": {"json": json.dumps({"label": label, "id": "x"}).encode()},
            "names": {"cls": b"zebra" if label else b"ape"},
        }[kind]
        samples.append({"txt": b"a caption", "jpg": encode(number, kind="JPEG"), **label_file})
    store = build_image_store([str(make_tar(tmp_path / "part-000.tar", samples))], tmp_path / "a.h5")
    assert [store.read(index) for index in range(4)] == [sample["jpg"] for sample in samples]
    if kind == "names":
        assert (store.classes, store.labels.tolist()) == (("ape", "zebra"), [1, 0, 1, 0])
    else:
        assert (store.classes, store.labels.tolist()) == (("0", "1", "2", "3"), labels)


def test_a_number_without_an_image_is_a_class_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = [{"png": encode(label), "cls": str(label).encode()} for label in (1, 3)]
    store = build_image_store([str(make_tar(tmp_path / "a.tar", samples))], tmp_path / "a.h5")
    assert len(store.classes) == 4
    assert "has the label 3: of 4 classes 2 have no image" in caplog.text


def test_a_folder_of_a_class_without_a_readable_image_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos", each=1)
    (folder / "dog").mkdir()
    (folder / "dog" / "a.tiff").write_bytes(b"II*\0")
    (folder / "__MACOSX").mkdir()
    with pytest.raises(UserError, match=r"photos: no image \(JPEG, .*\) in dog: each folder is a class"):
        build_image_store([str(folder)], tmp_path / "a.h5")


def test_images_of_other_kinds_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_folder(tmp_path / "photos", each=1)
    (folder / "ant" / "a.TIFF").write_bytes(b"II*\0")
    assert len(build_image_store([str(folder)], tmp_path / "a.h5")) == 3
    assert "1 images, such as a.TIFF, are left out" in caplog.text


@pytest.mark.parametrize(("each", "are_images"), [(4, True), (2, False)])
def test_a_few_notes_do_not_turn_images_into_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, each: int, are_images: bool
) -> None:
    folder, out = make_folder(tmp_path / "photos", each=each), tmp_path / "a.h5"
    (folder / "ant" / "boxes.txt").write_text("0 0 1 1")
    assert main(["data", "build", str(out), str(folder), "--workers", "1"]) == EXIT_DONE
    assert is_store(out, IMAGE_STORE) is are_images
    assert "boxes.txt" in caplog.text


def test_a_killed_build_decodes_only_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "photos", tmp_path / "a.h5"
    for number in range(300):
        place = folder / f"{number % 3}-class" / f"{number:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encode(number))
    decoded: list[bytes] = []

    def check(data: bytes) -> None:
        decoded.append(data)
        if len(decoded) == 280:
            raise KeyboardInterrupt

    monkeypatch.setattr(build_images, "check_image", check)
    with pytest.raises(KeyboardInterrupt):
        build_image_store([str(folder)], out)
    (folder / "0-class" / "000.png").write_bytes(encode(1000))
    build_image_store([str(folder)], out)
    assert len(decoded) - 280 == 300 - 256 + 1  # and the one that has changed
    assert encode(1000) in decoded[280:]
    build_image_store([str(folder)], tmp_path / "b.h5")
    assert out.read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "b.h5", "photos"]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright_as_their_exif_says(orientation: int) -> None:
    """Against Pillow's own exif_transpose, in a crop that is not in the middle."""
    pixels = np.random.default_rng(0).integers(0, 255, (6, 10, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(written.getvalue())))
    crop = decoding.Crop(0.1, 0.2, 0.5, 0.6)
    width, height = upright.size

    def choose_crop(*size: int) -> decoding.Crop:
        assert size == upright.size
        return crop

    box = (crop.left * width, crop.top * height, (crop.left + crop.width) * width, (crop.top + crop.height) * height)
    wanted = upright.resize((4, 4), Image.Resampling.BICUBIC, box)
    assert np.array_equal(decoding.decode_image(written.getvalue(), 3, 4, choose_crop), np.asarray(wanted))


def save_image(image: Image.Image, kind: str, **options: object) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def make_unusual_images() -> dict[str, bytes]:
    """Return sound images of modes and sizes that are rare."""
    pixels = np.random.default_rng(0).integers(0, 255, (12, 20, 3), np.uint8)
    image = Image.fromarray(pixels)
    return {
        "palette with transparency": save_image(image.convert("P"), "PNG", transparency=bytes(range(256))),
        "grey with transparency": save_image(image.convert("LA"), "PNG"),
        "black and white": save_image(image.convert("1"), "PNG"),
        "cmyk": save_image(image.convert("CMYK"), "JPEG"),
        "gif": save_image(image.convert("P"), "GIF"),
        "one pixel": save_image(image.crop((0, 0, 1, 1)), "PNG"),
        "one row": save_image(image.resize((500, 1)), "BMP"),
        "torn exif": save_image(image, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x02\0\x12\x01"),
    }


@pytest.mark.parametrize("name", make_unusual_images())
def test_unusual_images_are_what_pillow_makes_of_them(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """And nothing is printed of what is odd in them."""
    data = make_unusual_images()[name]
    recwarn.clear()
    decoding.check_image(data)
    for width, height in ((8, 8), (16, 3)):
        crop = decoding.draw_crop(1, 2, width, height, 0.1)
        assert decoding.decode_image(data, 3, 8, lambda *_, crop=crop: crop).shape == (8, 8, 3)
    whole = decoding.decode_image(data, 3, 8, lambda *_: decoding.Crop(0, 0, 1, 1))
    assert [str(warning.message) for warning in recwarn] == []
    opened = Image.open(io.BytesIO(data))
    opened.draft(None, (8, 8))
    assert np.array_equal(whole, np.asarray(opened.convert("RGB").resize((8, 8), Image.Resampling.BICUBIC)))


def test_the_pixels_of_a_sample_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow decodes a PNG when it is asked for its EXIF, which may come after the pixels."""
    decoded = []
    load_end = PngImagePlugin.PngImageFile.load_end
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load_end", lambda image: decoded.append(1) or load_end(image))
    decoding.decode_image(encode(1, kind="PNG"), 3, 8, lambda *size: decoding.centre_crop(*size, 1.0))
    assert decoded == [1]


def test_commands_recognise_images_by_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = make_folder(tmp_path / "photos"), tmp_path / "a.h5"
    assert main(["data", "build", str(out), str(folder), "--json"]) == EXIT_DONE
    facts = json.loads(capsys.readouterr().out)
    assert (facts["images"], facts["classes"], facts["images_per_class"]) == (12, 3, [4, 4])
    assert main(["data", "inspect", str(out), "--verify"]) == EXIT_DONE
    assert "'ant', 'bee', 'cat'" in capsys.readouterr().out
    content = bytearray(out.read_bytes())
    place = content.index(b"\x89PNG") + 30
    content[place] ^= 1
    out.write_bytes(content)
    assert main(["data", "inspect", str(out), "--verify"]) == 1
    capsys.readouterr()
    for option in (["--chat"], ["--tokenizer", "bpe"]):
        assert main(["data", "build", str(tmp_path / "b.h5"), str(folder), *option]) == EXIT_USER_ERROR
        assert f"{option[0]}: no effect on images" in capsys.readouterr().err


def _png_bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(64))) + chunk(b"IEND", b"")
    )


def _wide_png() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20)).save(out, "PNG")
    return out.getvalue()


BAD_IMAGES: dict[str, tuple[bytes, str]] = {
    "bomb": (_png_bomb(60_000, 60_000), "is a damaged image (Image size (3600000000 pixels) exceeds"),
    "larger-than-pillow-allows": (_png_bomb(9_000, 9_500), "9,000 x 9,500 pixels; at most"),
    "cut-jpeg": (encode(0, 64, 64, "JPEG")[:-400], "cut short"),
    "cut-png": (encode(0, 64, 64)[:-900], "cut short"),
    "text": (b"hello, I am no image", "is not an image in a known format"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "is not an image in a known format"),
    "empty": (b"", "is not an image in a known format"),
    "wide": (_wide_png(), "more than 8 bits a channel"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_a_bad_image_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    data, said = BAD_IMAGES[name]
    folder = make_folder(tmp_path / "photos", each=1)
    (folder / "bee" / "bad.png").write_bytes(data)
    assert main(["data", "build", str(tmp_path / "a.h5"), str(folder)]) == EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert (captured.err.count("\n"), said in captured.err, captured.out) == (1, True, ""), captured.err
    assert "1 of 4 images cannot be used" in captured.err
    assert "bee/bad.png" in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]


GOOD = encode(0)


def _write_members(*members: tuple[str, bytes, dict[str, object]]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with tarfile.open(path, "w") as archive:
            for name, data, fields in members:
                add_member(archive, name, data, **fields)

    return write


def _cut(count: int) -> Callable[[Path], None]:
    """A tar of two samples, of which this many bytes are left."""

    def write(path: Path) -> None:
        make_tar(path, [{"png": GOOD, "cls": b"0"}, {"png": GOOD, "cls": b"1"}])
        path.write_bytes(path.read_bytes()[:count])

    return write


def _damage(offset: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        make_tar(path, [{"cls": b"0", "png": GOOD}, {"png": GOOD, "cls": b"1"}])
        content = bytearray(path.read_bytes())
        content[offset : offset + 8] = b"\xff" * 8
        path.write_bytes(content)

    return write


def _claim_header(path: Path) -> None:
    """An extended header that claims 8 GiB."""
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.XHDTYPE, 8 << 30
    path.write_bytes(member.tobuf() + bytes(4096))


def _claim_image(path: Path) -> None:
    """An image that claims a tebibyte."""
    member = tarfile.TarInfo("a.png")
    member.size = 1 << 40
    path.write_bytes(member.tobuf() + bytes(4096))


def _compress(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        add_member(archive, "a.png", GOOD)


LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
DEVICE = {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}
BAD_TARS: dict[str, tuple[Callable[[Path], None], str]] = {
    "escape": (_write_members(("../../a.png", GOOD, {}), ("../../a.cls", b"0", {})), "leads out of the folder"),
    "absolute": (_write_members(("/a.png", GOOD, {}), ("/a.cls", b"0", {})), "leads out of the folder"),
    "link": (_write_members(("a.png", b"", LINK), ("a.cls", b"0", {})), "is a symbolic link"),
    "hard-link": (_write_members(("a.png", b"", LINK | {"type": tarfile.LNKTYPE})), "is a hard link"),
    "device": (_write_members(("a.png", b"", DEVICE)), "is a device"),
    "pipe": (_write_members(("a.png", b"", {"type": tarfile.FIFOTYPE})), "is a named pipe"),
    "huge": (_claim_image, "ends behind the end of the file"),
    "huge-header": (_claim_header, "damaged tar"),
    "cut-in-an-image": (_cut(900), "cut short"),
    "cut-between-members": (_cut(512 + (len(GOOD) + 511) // 512 * 512 + 1024), "no end mark"),
    "damaged-header": (_damage(1024 + 150), "no end mark"),
    "first-header": (_damage(150), "damaged tar"),
    "compressed": (_compress, "is a compressed tar"),
    "no-label": (_write_members(("a.png", GOOD, {})), "has no label"),
    "bad-label": (_write_members(("a.png", GOOD, {}), ("a.cls", b"\x1b[31m", {})), "its label is"),
    "unlabelled": (_write_members(("a.png", GOOD, {}), ("a.cls", b"-1\n", {})), "its label is -1; classes are whole"),
    "label-with-a-point": (_write_members(("a.png", GOOD, {}), ("a.cls", b"1.0", {})), "its label is 1.0; classes"),
    "sentinel": (
        _write_members(
            *((f"{n}.{e}", d, {}) for n, t in ((1, b"1"), (2, b"999999")) for e, d in (("png", GOOD), ("cls", t)))
        ),
        "2 has the label 999,999, but only 2 classes have an image",
    ),
    "no-key": (_write_members(("a.png", GOOD, {}), ("a.json", b'{"lable": 1}', {})), "did you mean 'lable'"),
    "two-images": (_write_members(("a.png", GOOD, {}), ("a.jpg", GOOD, {}), ("a.cls", b"1", {})), "has 2 images"),
    "both-kinds": (
        _write_members(
            *((f"{n}.{e}", d, {}) for n, t in ((1, b"1"), (2, b"x")) for e, d in (("png", GOOD), ("cls", t)))
        ),
        "labels are numbers and names",
    ),
    "text": (_write_members(("a.txt", b"hello", {})), "holds no images"),
}


@pytest.mark.parametrize("name", BAD_TARS)
def test_a_hostile_or_damaged_tar_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    write, said = BAD_TARS[name]
    write(tmp_path / "bad.tar")
    assert main(["data", "build", str(tmp_path / "a.h5"), str(tmp_path / "bad.tar")]) == EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert (captured.err.count("\n"), said in captured.err, captured.out) == (1, True, ""), captured.err
    assert captured.err.rstrip("\n").isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar"]


def test_a_folder_without_classes_and_one_with_splits_say_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.png").write_bytes(GOOD)
    make_folder(tmp_path / "set" / "train", each=1)
    for source, said in (("flat", "is in no folder of a class"), ("set", "build a store of each, such as")):
        assert main(["data", "build", str(tmp_path / "a.h5"), str(tmp_path / source)]) == EXIT_USER_ERROR
        error = capsys.readouterr().err
        assert (error.count("\n"), said in error) == (1, True), error


def test_a_folder_of_text_with_pictures_stays_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "docs", each=1)
    (tmp_path / "docs" / "page.md").write_text("text " * 100)
    assert main(["data", "build", str(tmp_path / "a.h5"), str(tmp_path / "docs"), "--json"]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)["tokens"] > 400


def test_stores_of_two_kinds_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = build_image_store([str(make_folder(tmp_path / "photos", each=1))], tmp_path / "images.h5")
    (tmp_path / "a.txt").write_text("text " * 100)
    main(["data", "build", str(tmp_path / "text.h5"), str(tmp_path / "a.txt")])
    run = [f"run_dir={tmp_path}/run", "train.steps=1"]
    assert main(["train", f"data.path={store.path}", "data=text", *run]) == EXIT_USER_ERROR
    assert "is an image store: use data=images" in capsys.readouterr().err
    images = ["data=images", "model=vit_tiny", "data.image_size=8", "data.channels=1"]
    assert main(["train", *images, f"data.path={tmp_path}/text.h5", *run]) == EXIT_USER_ERROR
    assert "is a token store: use data=text" in capsys.readouterr().err
    assert main(["train", *images[:2], f"data.path={store.path}", *run]) == EXIT_USER_ERROR
    assert "model=vit_tiny takes images of 8 and 1" in capsys.readouterr().err


def test_decoding_in_parts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crop of the whole image is what Pillow makes of it, and a JPEG is read at a fraction of its size."""
    data = encode(3, 64, 48, "PNG")
    whole = decoding.decode_image(data, 3, 16, lambda *_: decoding.Crop(0, 0, 1, 1))
    wanted = Image.open(io.BytesIO(data)).convert("RGB").resize((16, 16), Image.Resampling.BICUBIC)
    assert np.array_equal(whole, np.asarray(wanted))
    flipped = decoding.decode_image(data, 3, 16, lambda *_: decoding.Crop(0, 0, 1, 1, flipped=True))
    assert np.array_equal(flipped[:, ::-1], whole)
    grey = decoding.decode_image(encode(3, 64, 48, "PNG", "LA"), 1, 16, lambda *_: decoding.Crop(0, 0, 1, 1))
    assert grey.shape == (16, 16, 1)


def test_a_store_cut_short_is_refused(tmp_path: Path) -> None:
    store = build_image_store([str(make_folder(tmp_path / "photos", each=1))], tmp_path / "a.h5")
    content = store.path.read_bytes()
    store.path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="is a damaged or truncated image store"):
        ImageStore.open(store.path)
