"""`calibrate`: record activation maxima over the user's own forwards, for ``input_scale="static"``.

    static scale = global scale (decode) of the largest finite input magnitude seen, by the patch's rule

The scales live in the patch's settings, not in the state dict, so that they add no buffer to a model in training.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from qatpatch import nvfp4
from qatpatch.errors import PlanError
from qatpatch.linear import QATLinear
from qatpatch.patch import patch_record
from qatpatch.units import unwrap


class _Maximum:
    """The largest magnitude seen, kept on the device."""

    def __init__(self) -> None:
        self.amax: torch.Tensor | None = None

    def __call__(self, amax: torch.Tensor) -> None:
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)


@contextlib.contextmanager
def calibrate(model: nn.Module) -> Iterator[None]:
    """Record the input maxima of every patched linear; on a clean exit they become its static input scale.

    Inside, activations are quantized dynamically. Layers that no forward reached keep what they had.

    Raises:
        PlanError: the model is not patched, is deployed, or was not patched with ``input_scale="static"``; or, at
            the end,
            no forward ran inside.
    """
    model = unwrap(model)
    record = patch_record(model)
    layers = [model.get_submodule(paths[0]) for paths in record.linears.values()]
    layers = [layer for layer in layers if isinstance(layer, QATLinear)]
    if record.deployed or not layers:
        raise PlanError("calibrate works on a patched model before deploy: the scales are part of what is trained")
    if any(layer.quantization.settings.input_scale != "static" for layer in layers):
        raise PlanError(
            "this model was patched with another input_scale; call qatpatch.apply(model, input_scale='static') "
            "to use calibrated "
            "scales"
        )
    maxima = [_Maximum() for _ in layers]
    for layer, maximum in zip(layers, maxima, strict=True):
        layer.quantization.calibration = maximum
    try:
        yield
    finally:
        for layer in layers:
            layer.quantization.calibration = None
    if all(maximum.amax is None for maximum in maxima):
        raise PlanError("no forward reached a patched linear inside calibrate, so there is nothing to calibrate from")
    for layer, maximum in zip(layers, maxima, strict=True):
        if maximum.amax is not None:
            state = layer.quantization
            scale = nvfp4.global_scale_of_amax(maximum.amax, state.settings.global_scale)
            state.settings = dataclasses.replace(state.settings, static_scale=float(scale))
