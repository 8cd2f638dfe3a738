"""What autocast asks for, on devices that have none too (meta)."""

from __future__ import annotations

import contextlib

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the autocast that is on for ``device``; None where it is off."""
    # torch.amp.is_autocast_available says this for every device, but torch 2.11's compiler cannot trace it.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast is off for ``device``."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
