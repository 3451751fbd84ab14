"""What `lfs getstripe` prints, in every dialect of the study, is read as what it means."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from getstripe_forms import Form, render
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.checkpoint.storage.lustre import FileStriping, PlacedComponent, parse_getstripe
from hpc_train.checkpoint.storage.stripe_layout import MIB, StripeComponent

FORMS = {
    "new": Form(),
    "old": Form(old=True),
    "yaml": Form(yaml=True),
    "old yaml": Form(yaml=True, old=True),
    "directory": Form(directory=True),
    "old directory": Form(directory=True, old=True),
}
COMPOSITE = ("new", "yaml", "directory")
UNIT = 64 << 10


@st.composite
def components(draw: st.DrawFn, form: Form, most: int = 4) -> list[dict[str, Any]]:
    """A plain layout, or several components one after the other; the first may be on the MDT."""
    number = draw(st.integers(1, most))
    ends = sorted(draw(st.sets(st.integers(1, 1 << 20), min_size=number - 1, max_size=number - 1)))
    bounds = [0, *(end * UNIT for end in ends), -1]
    return [draw(component(start, end, form, first=start == 0 and number > 1)) for start, end in pairwise(bounds)]


@st.composite
def component(draw: st.DrawFn, start: int, end: int, form: Form, first: bool) -> dict[str, Any]:
    on_mdt = first and draw(st.booleans())
    osts = [] if on_mdt or form.directory else draw(st.lists(st.integers(0, 2000), max_size=4, unique=True))
    kinds = ["raid0", "raid0,overstriped"] if not form.old else ["raid0"]
    return {
        "start": start,
        "end": end,
        "count": 0 if on_mdt else draw(st.sampled_from([-1, 1, 2, 48, 2000])),
        "size": draw(st.integers(1, 65535)) * UNIT,
        "pool": draw(st.sampled_from(["", "flash", "p-1_x"])) if not on_mdt else "",
        "pattern": "mdt" if on_mdt else draw(st.sampled_from(kinds)),
        "osts": osts,
    }


def meant(it: dict[str, Any], form: Form) -> PlacedComponent:
    on_mdt = it["pattern"] == "mdt"
    composite_flags = ("init",) if it["end"] != -1 or it["start"] else ()
    stripes = StripeComponent(
        end=None if it["end"] == -1 else it["end"],
        count=it["count"],
        size=None if on_mdt else it["size"],
        pool=it["pool"] or None,
        on_mdt=on_mdt,
    )
    return PlacedComponent(
        stripes,
        tuple(it["osts"]),
        it["osts"][0] if it["osts"] else None,
        flags=composite_flags if it["osts"] or on_mdt else (),
    )


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data())
def test_every_form_is_read(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    made = data.draw(components(form, 4 if name in COMPOSITE else 1))
    text = render("/mnt/lustre/a file", made, form)
    found = parse_getstripe(text, "/mnt/lustre/a file")
    assert found == FileStriping(tuple(meant(it, form) for it in made)), text


def test_the_mark_of_an_ost_that_was_asked_for() -> None:
    it = {"start": 0, "end": -1, "count": 2, "size": MIB, "pool": "pooltest", "pattern": "raid0", "osts": [7, 12]}
    text = render("/f", [it], Form(marked=12))
    assert text.splitlines()[-2].endswith(" *")
    assert "\nlmm_pool:           pooltest\n" in text
    assert parse_getstripe(text, "/f").parts[0].osts == (7, 12)


def test_a_default_as_very_old_releases_print_it() -> None:
    it = {"start": 0, "end": -1, "count": 1, "size": MIB, "pool": "", "pattern": "raid0", "osts": []}
    text = render("/mnt/lustre", [it], Form(directory=True, ancient=True))
    assert text == "/mnt/lustre\n(Default) stripe_count: 1 stripe_size: 1M stripe_offset: -1\n"
    assert parse_getstripe(text, "/mnt/lustre").parts == (PlacedComponent(StripeComponent(count=1, size=MIB)),)


def test_a_count_of_all_osts_in_sixteen_bits_and_a_released_file() -> None:
    text = (
        "lmm_stripe_count:  65535\nlmm_stripe_size:   65536\nlmm_pattern:       raid0,released\nlmm_stripe_offset: -1\n"
    )
    (placed,) = parse_getstripe(text).parts
    assert (placed.component.count, placed.osts) == (-1, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "/mnt/lustre/f\n",
        "/f has no stripe info\n",
        "lmm_stripe_count: many\n",
        "lcme_id: 1\nlcme_flags: init\n",
        "�\x00",
    ],
)
def test_what_is_no_layout(text: str) -> None:
    with pytest.raises(ValueError, match=r"no layout|is not a number"):
        parse_getstripe(text, "/mnt/lustre/f")


@given(st.text())
def test_any_text_is_a_layout_or_a_value_error(text: str) -> None:
    for candidate in (text, f"stripe_count: {text}", f"lmm_stripe_count: 1\nlcme_extent.e_end: {text}"):
        with suppress(ValueError):
            assert parse_getstripe(candidate).parts
