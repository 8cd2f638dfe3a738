"""`calibrate`: record activation magnitudes over the user's own forwards, for ``input_scale="static"``.

    static scale = global scale (decode), by the patch's rule, of the magnitude that ``percentile`` names

The percentile is one of single elements over everything that a layer saw: the smallest magnitude that at least so many
percent of its inputs' elements do not exceed. It is read from a histogram with one bin for each of the 32768 bfloat16
magnitudes (others are rounded up to one), so it is exact for bfloat16 inputs, at most 2^-7 above the true one for
others, and histograms of several forwards and ranks add up exactly. 100 is the maximum and needs no histogram.
NVFP4 has a scale of its own for every 16 elements, so outliers cost only their own block: the maximum is the default,
and a percentile below clips what lies above it to the format's largest number.

The scales live in the patch's settings, not in the state dict, so that they add no buffer to a model in training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from qatpatch import nvfp4
from qatpatch.errors import PlanError
from qatpatch.linear import QATLinear
from qatpatch.linear_state import LinearState
from qatpatch.patch import patch_record
from qatpatch.receipts import Receipt, Table, counted, grouped, warning_tables
from qatpatch.units import kind_of, layer_at, unwrap

logger = logging.getLogger("qatpatch")

_BINS = 1 << 15
# Elements that are sorted into bins at once: 16 bytes each while that lasts.
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What one layer saw, and the scale it got.

    Attributes:
        calls: forwards of this rank (and recomputations by gradient checkpointing).
        amax: the largest input magnitude.
        magnitude: that of the percentile, which the scale is made of.
        scale: the static global scale, decode direction.
    """

    calls: int
    amax: float
    magnitude: float
    scale: float


@dataclass(kw_only=True, repr=False)
class CalibrationReport(Receipt):
    """The receipt of a `calibrate` block; filled when the block ends.

    Attributes:
        percentile: that was asked for.
        layers: name -> `Calibrated`.
        unreached: layers that no forward reached; they keep what they had.
        uncalibrated: those of them that still have no scale, so that their next forward raises.
        ranks: processes whose activations were counted together.
    """

    percentile: float
    layers: dict[str, Calibrated] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    uncalibrated: tuple[str, ...] = ()
    ranks: int = 1

    def _tables(self) -> list[Table]:
        title = f"calibrated {counted(len(self.layers), 'linear')} at percentile {self.percentile:g}"
        title += f", over {self.ranks} ranks" if self.ranks > 1 else ""
        header = ("modules", "count", "amax", "clipped at", "scale", "calls")
        rows = []
        for pattern, count, first in grouped(self.layers, key=lambda name: (str(self.layers[name].scale),)):
            layer = self.layers[first]
            numbers = (f"{layer.amax:.4g}", f"{layer.magnitude:.4g}", f"{layer.scale:.6g}", str(layer.calls))
            rows.append((pattern, str(count), *numbers))
        warnings = [f"{name}: no forward reached it, so it keeps what it had" for name in self.unreached]
        return [(title, [header, *rows]), *warning_tables(warnings)]


class _Observer:
    """What one layer sees, kept on its device: no host synchronisation while forwards run."""

    def __init__(self, histogram: bool) -> None:
        self.calls = 0
        self.amax: torch.Tensor | None = None
        self.broken: torch.Tensor | None = None
        self.counts: torch.Tensor | None = None
        self.histogram = histogram

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> None:
        if self.amax is None:
            self.amax = torch.zeros((), dtype=torch.float32, device=x.device)
            self.broken = torch.zeros((), dtype=torch.bool, device=x.device)
        self.calls += 1
        self.amax = torch.maximum(self.amax, nvfp4.finite_amax(x).to(self.amax.device))
        self.broken |= (~torch.isfinite(x)).any().to(self.broken.device)
        if self.histogram:
            if self.counts is None:
                self.counts = torch.zeros(_BINS, dtype=torch.int64, device=x.device)
            count_magnitudes(x, self.counts)

    def state(self, device: torch.device) -> torch.Tensor:
        """[amax, broken] in float64; amax is -1 where no forward came."""
        if self.amax is None:
            return torch.tensor([-1.0, 0.0], dtype=torch.float64, device=device)
        return torch.stack([self.amax.double(), self.broken.double()]).to(device)


def count_magnitudes(x: torch.Tensor, counts: torch.Tensor) -> None:
    """Add the elements of ``x`` to ``counts`` (32768, int64): bin b holds magnitudes up to the bfloat16 with bits b."""
    for chunk in x.detach().reshape(-1).split(_CHUNK):
        bits = chunk.float().abs().view(torch.int32).to(counts.device)
        bins = ((bits.long() + 0xFFFF) >> 16).clamp_(max=_BINS - 1)
        counts.scatter_add_(0, bins, torch.ones((), dtype=torch.int64, device=counts.device).expand_as(bins))


def magnitude_at(counts: torch.Tensor, percentile: float) -> float:
    """The smallest bfloat16 magnitude that at least ``percentile`` % of the counted elements do not exceed."""
    below = counts.cumsum(0).cpu()
    wanted = math.ceil(int(below[-1]) * percentile / 100)
    index = int(torch.searchsorted(below, max(1, wanted)))
    return float(torch.tensor(index, dtype=torch.int16).view(torch.bfloat16))


@contextlib.contextmanager
def calibrate(model: nn.Module, *, percentile: float = 100.0, across_ranks: bool = True) -> Iterator[CalibrationReport]:
    """Record the inputs of every patched linear; on a clean exit they become its static input scale.

    Inside, activations are quantized dynamically, and ``torch.compile``d code of this process runs eagerly, since a
    compiled forward cannot be observed. After an exception every scale is as it was.

    Args:
        model: a model patched with ``input_scale="static"``, or a wrapper of one.
        percentile: in percent, above 1, up to 100 (the maximum), of the magnitudes of single elements; see the
            module's docstring.
        across_ranks: where ``torch.distributed`` is initialised, take all ranks' activations together, so that all get
            the same scales; then every rank must enter and leave the block. False: this rank's own.

    Yields:
        A `CalibrationReport`, filled when the block ends: layers that no forward reached are listed (and logged), and
        keep what they had.

    Raises:
        ValueError: a percentile out of range.
        PlanError: the model is not patched, is deployed, is being calibrated, or was not patched with
            ``input_scale="static"``; or, at the end, no forward ran inside, or an input held NaN or infinity, or
            nothing but zeros up to the percentile. Then every scale stays as it was.
    """
    if not isinstance(percentile, int | float) or not 0 < percentile <= 100:
        raise ValueError(f"percentile is above 0 and at most 100 (the maximum), got {percentile!r}")
    if percentile <= 1:
        raise ValueError(
            f"percentile is in percent, and {percentile:g} would clip nearly everything; a share of {percentile:g} is "
            f"percentile={100 * percentile:g}"
        )
    model = unwrap(model)
    layers = _calibratable(model)
    observers = {name: _Observer(histogram=percentile < 100) for name in layers}
    report = CalibrationReport(percentile=percentile)
    with contextlib.ExitStack() as closing:
        for _ in range(2):  # an interrupt in the first may leave layers that observe for ever
            closing.callback(_stop_observing, layers)
        for name, layer in layers.items():
            layer.quantization.calibration = observers[name]
        with torch.compiler.set_stance("force_eager"):
            yield report
    together = across_ranks and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    amax, magnitudes = _seen(layers, observers, percentile, together)
    for name, magnitude in magnitudes.items():
        rule = layers[name].quantization.settings.global_scale
        scale = float(nvfp4.global_scale_of_amax(torch.tensor(magnitude, dtype=torch.float32), rule))
        calls = observers[name].calls
        report.layers[name] = Calibrated(calls=calls, amax=amax[name], magnitude=magnitude, scale=scale)
    _set_scales({layers[name].quantization: layer.scale for name, layer in report.layers.items()})
    report.ranks = dist.get_world_size() if together else 1
    report.unreached = tuple(name for name in layers if name not in magnitudes)
    report.uncalibrated = tuple(n for n in report.unreached if layers[n].quantization.settings.static_scale is None)
    logger.info("calibrate: %d linears, percentile=%g ranks=%d", len(magnitudes), percentile, report.ranks)
    for name in report.unreached:
        logger.warning("calibrate: no forward reached %s, so it keeps what it had", name)


def _stop_observing(layers: dict[str, QATLinear]) -> None:
    for layer in layers.values():
        layer.quantization.calibration = None


def _set_scales(scales: dict[LinearState, float]) -> None:
    """Give every state its scale, or none of them a new one."""
    before = {state: state.settings for state in scales}
    try:
        for state, scale in scales.items():
            state.settings = dataclasses.replace(state.settings, static_scale=scale)
    except BaseException:
        for state, settings in before.items():
            state.settings = settings
        raise


def _calibratable(model: nn.Module) -> dict[str, QATLinear]:
    """The layers to observe, or an error."""
    record = patch_record(model)
    layers = {name: layer_at(model, paths[0]) for name, paths in record.linears.items()}
    layers = {name: layer for name, layer in layers.items() if kind_of(layer) == "QATLinear"}
    if record.deployed or not layers:
        raise PlanError("calibrate works on a patched model before deploy: the scales are part of what is trained")
    if any(layer.quantization.settings.input_scale != "static" for layer in layers.values()):
        raise PlanError(
            "this model was patched with another input_scale; remove the patch and call "
            "qatpatch.apply(model, input_scale='static')"
        )
    if any(layer.quantization.calibration is not None for layer in layers.values()):
        raise PlanError("this model is being calibrated already; calibrate blocks do not nest")
    return layers


def _seen(
    layers: dict[str, QATLinear], observers: dict[str, _Observer], percentile: float, together: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """name -> largest magnitude, and name -> magnitude of the percentile, of the layers that were reached."""
    device = next(iter(layers.values())).weight.device
    states = torch.stack([observer.state(device) for observer in observers.values()])
    if together:
        dist.all_reduce(states, dist.ReduceOp.MAX)
    amax = {name: float(row[0]) for name, row in zip(layers, states.cpu(), strict=True) if row[0] >= 0}
    if not amax:
        raise PlanError("no forward reached a patched linear inside calibrate, so there is nothing to calibrate from")
    broken = [name for name, row in zip(layers, states.cpu(), strict=True) if row[1]]
    if broken:
        raise PlanError(
            f"the inputs of {len(broken)} layers ({broken[0]}, ...) held NaN or infinity inside calibrate, so these "
            "forwards were broken before quantization; every scale stays as it was"
        )
    magnitudes = dict(amax)
    if percentile < 100:
        for name in amax:
            counts = observers[name].counts
            if counts is None:
                counts = torch.zeros(_BINS, dtype=torch.int64, device=device)
            if together:
                dist.all_reduce(counts)
            # Bins round up; nothing was larger than amax.
            magnitudes[name] = min(magnitude_at(counts, percentile), amax[name])
    dead = [name for name, magnitude in magnitudes.items() if magnitude == 0.0]
    if dead:
        seen = "only zeros" if amax[dead[0]] == 0.0 else f"zeros up to percentile {percentile:g}; choose a higher one"
        raise PlanError(f"the input of {dead[0]} held {seen}; every scale stays as it was")
    return amax, magnitudes
