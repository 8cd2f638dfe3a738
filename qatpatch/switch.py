"""`Switch`: which blocks are open on a model, and so what its patched layers compute now.

Every patched layer of a model refers to the same switch, so that a swap is one assignment and cannot be half done.
There
are four axes: ``linear``, ``attention``, ``stage`` and ``weights``. Each takes the value of the innermost block still
open that sets it, and None (the original state) when there is none; blocks may close in any order. Copies and pickles
start with no block open.

The switch also says who shares the model's sequences (``context``), which every layer must know too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qatpatch.reuse import KeptWeights, SharedInput

AXES = ("linear", "attention", "stage", "weights")


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """What attention runs inside a block: the mode, and for ``"infer"`` the scheme and kernel (None: first usable)."""

    mode: str
    scheme: str | None = None
    kernel: str | None = None


@dataclass
class MaskCount:
    """Model calls whose masks were looked at (`masks`), and those of them that masked something."""

    calls: int = 0
    masked: int = 0


class Switch:
    """The open blocks of one model.

    Attributes:
        linear: ``"dense"`` or None.
        attention: an `AttentionChoice` or None.
        stage: ``"base"``, ``"refine"`` or None.
        unmasked: the masks of the model call that is running mask nothing; set by `masks.MaskEntry`.
        masks: how many calls that was decided for.
        weights: the scope's `KeptWeights` or None.
        input: the quantized input that projections of one attention share.
        context: gives the process group whose ranks each hold a shard of the model's tokens, None where nobody does;
            itself None where the layers are no part of a whole patched model.
    """

    def __init__(self) -> None:
        self.linear: str | None = None
        self.attention: AttentionChoice | None = None
        self.stage: str | None = None
        self.unmasked = False
        self.masks = MaskCount()
        self.weights: KeptWeights | None = None
        self.input = SharedInput()
        self.context: Callable[[], Any] | None = None
        self._open: list[tuple[object, dict[str, Any]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        memo[id(self)] = copied = Switch()
        copied.context = copy.deepcopy(self.context, memo)
        return copied

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Switch, ()

    def open(self, key: object, **axes: Any) -> None:
        """Open a block that sets ``axes``; ``key`` closes it."""
        self._open.append((key, axes))
        self._settle()

    def close(self, key: object) -> None:
        """Close the block with ``key``, wherever it lies among the open ones."""
        self._open = [block for block in self._open if block[0] is not key]
        self._settle()

    def _settle(self) -> None:
        for axis in AXES:
            setattr(self, axis, next((axes[axis] for _, axes in reversed(self._open) if axis in axes), None))
