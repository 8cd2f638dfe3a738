"""The named errors. Each message says what was asked, what was found and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PlanError(ValueError):
    """A patch or a swap that was asked for does not fit the model; the model is untouched."""


class KernelUnavailable(RuntimeError):
    """No kernel can serve the request on this device; the message holds every candidate's reason."""


class CheckpointError(ValueError):
    """A file cannot be written or read as what it was asked to be."""


def problem_lines(problems: Iterable[tuple[str, str]]) -> list[str]:
    """``(name, problem)`` pairs as lines, one for all names that have the same problem."""
    names: dict[str, list[str]] = {}
    for name, problem in problems:
        names.setdefault(problem, []).append(name)
    return [
        f"{', '.join(found[:2])}{f' and {len(found) - 2} more' if len(found) > 2 else ''}: {problem}"
        for problem, found in names.items()
    ]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint ``; did you mean 'x'?`` for a misspelt name, or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
