"""Suggest the nearest of some names for one that does not exist, in the same words wherever a name is chosen.

A leaf: every place that looks up a name of the user's (a key, an option, a registered component, a column, a command)
asks this module what was meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MAX_SUGGESTIONS = 3
"""Maximum suggestions in one line."""
_LISTED = 40
"""Maximum names that are listed where none is near."""
SIMILAR, TYPO = 0.5, 0.7
"""Minimum similarity of a name that is suggested, as difflib measures it (0 to 1): a lower one for names that are not
shown, a higher one where the line lists them all."""


def suggest_names(word: str, names: Iterable[str], otherwise: str | None = None) -> str:
    """Suggest the nearest names (did you mean X?). otherwise: what to say where none is near (None: list them)."""
    names = sorted(set(names))
    if near := find_near_names(word, names):
        return did_you_mean(near)
    if otherwise is not None:
        return otherwise
    if not names:
        return "there is none"
    return f"there are {', '.join(names[:_LISTED])}" + (", ..." if len(names) > _LISTED else "")


def find_near_names(word: str, names: Iterable[str], cutoff: float = SIMILAR) -> list[str]:
    """Return the names that are nearest to a word, several if they are equally near, at most three; case is ignored."""
    word, ratios = word.casefold(), {}
    matcher = difflib.SequenceMatcher()
    matcher.set_seq2(word)
    for name in dict.fromkeys(names):
        matcher.set_seq1(name.casefold())
        if matcher.real_quick_ratio() >= cutoff and matcher.quick_ratio() >= cutoff:
            ratios[name] = matcher.ratio()
    best = max(ratios.values(), default=0.0)
    return sorted(name for name, ratio in ratios.items() if ratio == best)[:MAX_SUGGESTIONS] if best >= cutoff else []


def did_you_mean(names: Sequence[str]) -> str:
    """Return the question "did you mean 'a', 'b' or 'c'?"."""
    *first, last = (f"'{name}'" for name in names)
    return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"


def suggest_components(word: str, names: Iterable[str], module_setting: str | None) -> str:
    """Suggest the nearest registered names. module_setting: the key, not yet set, of the module that has the user's."""
    hint = suggest_names(word, names)
    if module_setting is None:
        return hint
    return f"{hint}{' Or' if hint.endswith('?') else ';'} set {module_setting} to the Python module that registers it"
