"""What autocast asks for, on devices that have none too (meta)."""

from __future__ import annotations

import contextlib

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the autocast that is on for ``device``; None where it is off."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast is off for ``device``."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
