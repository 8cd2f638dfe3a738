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
from qatpatch.units import layer_at, unwrap


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
        PlanError: the model is not patched, is deployed, is being calibrated, or was not patched with
            ``input_scale="static"``; or, at the end, no forward ran inside, or one with no finite input.
    """
    model = unwrap(model)
    record = patch_record(model)
    layers = {name: layer_at(model, paths[0]) for name, paths in record.linears.items()}
    layers = {name: layer for name, layer in layers.items() if isinstance(layer, QATLinear)}
    if record.deployed or not layers:
        raise PlanError("calibrate works on a patched model before deploy: the scales are part of what is trained")
    if any(layer.quantization.settings.input_scale != "static" for layer in layers.values()):
        raise PlanError(
            "this model was patched with another input_scale; remove the patch and call "
            "qatpatch.apply(model, input_scale='static')"
        )
    if any(layer.quantization.calibration is not None for layer in layers.values()):
        raise PlanError("this model is being calibrated already; calibrate blocks do not nest")
    maxima = {name: _Maximum() for name in layers}
    for name, layer in layers.items():
        layer.quantization.calibration = maxima[name]
    try:
        yield
    finally:
        for layer in layers.values():
            layer.quantization.calibration = None
    if all(maximum.amax is None for maximum in maxima.values()):
        raise PlanError(
            "no forward reached a patched linear inside calibrate, so there is nothing to calibrate from (a compiled "
            "model? calibrate the eager one)"
        )
    seen = {name: float(maximum.amax) for name, maximum in maxima.items() if maximum.amax is not None}
    dead = [name for name, amax in seen.items() if amax == 0.0]
    if dead:
        raise PlanError(f"the input of {dead[0]} held no finite number other than 0; every scale stays as it was")
    for name, layer in layers.items():
        if name in seen:
            state, maximum = layer.quantization, maxima[name]
            scale = nvfp4.global_scale_of_amax(maximum.amax, state.settings.global_scale)
            state.settings = dataclasses.replace(state.settings, static_scale=float(scale))
