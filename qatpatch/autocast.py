"""What autocast asks for, on devices that have none too (meta)."""

from __future__ import annotations

import contextlib

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the autocast that is on for ``device``; None where it is off."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast is off for ``device``."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
