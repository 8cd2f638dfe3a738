"""Patched modules for the benchmarks: what a user's model holds after `qatpatch.apply`."""

from __future__ import annotations

from torch import nn

import qatpatch

EVERY_LINEAR = qatpatch.Profile(name="every linear", rules=(qatpatch.Rule(match=("*",), action="linear"),))


def qat_linear(linear: nn.Linear) -> nn.Module:
    """``linear`` as a patched layer in training."""
    qatpatch.apply(nn.ModuleDict({"linear": linear}), EVERY_LINEAR)
    return linear
