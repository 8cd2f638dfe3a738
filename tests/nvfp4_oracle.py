"""NVFP4 written again in numpy from the format's definition, and the two outside quantizers it is compared with.

Shares no code with qatpatch. E2M1 and E4M3 are rounded by counting the midpoints of their value tables below a
number, the power-of-two global scale is found with fractions, and every other step is one IEEE float32 operation of
numpy, in the order that the format fixes.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np

FLT_MAX = np.finfo(np.float32).max
SCALE_NAN = 0x7F
# All non-negative values in the order of their codes, so that an index is a code and an even index an even mantissa.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.array([m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)])[
    :127
]


def nearest_index(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the table value nearest to each x >= 0, the even one on a tie, the last one beyond the table.

    The midpoints of neighbours are exact in float32, so that the comparisons decide without rounding.
    """
    index = np.zeros(x.shape, np.int64)
    for below, middle in enumerate(((table[:-1] + table[1:]) / 2).astype(np.float32)):
        index += x >= middle if below % 2 else x > middle
    return index


def pow2_scale(amax: float) -> np.float32:
    """The smallest power of two >= amax / 2688 within [2^-126, 2^127], in exact arithmetic; 1 for 0."""
    if amax == 0:
        return np.float32(1)
    exponent = max(-126, math.frexp(amax)[1] - 14)
    while exponent < 127 and Fraction(2) ** exponent * 2688 < Fraction(float(amax)):
        exponent += 1
    return np.float32(2.0**exponent)


def amax_scale(amax: float) -> np.float32:
    """amax / 2688 in float32, at least 2^-126; 1 for 0."""
    return np.float32(1) if amax == 0 else max(np.float32(amax) / np.float32(2688), np.float32(2.0**-126))


SCALE_OF_AMAX = {"pow2": pow2_scale, "amax": amax_scale}


@dataclass
class Quantized:
    """Codes (R, ceil16(K)) and scale bytes (R, ceil(K / 16)), both uint8, and the float32 decode scale."""

    codes: np.ndarray
    scales: np.ndarray
    global_scale: np.float32
    shape: tuple[int, ...]

    @property
    def packed(self) -> np.ndarray:
        """The bytes (R, ceil16(K) / 2): element 2j plus 16 times element 2j + 1."""
        return self.codes[:, 0::2] + 16 * self.codes[:, 1::2]

    @property
    def operand(self) -> np.ndarray:
        """code * block scale, float64 and exact, of the logical shape; NaN where a scale byte says so."""
        table = np.append(E4M3, np.nan)
        values = np.concatenate([E2M1, -E2M1])[self.codes] * np.repeat(table[self.scales], 16, axis=1)
        return values[:, : self.shape[-1]].reshape(self.shape)

    @property
    def values(self) -> np.ndarray:
        """code * block scale * global scale: float64, exact (at most 30 significant bits)."""
        return self.operand * np.float64(self.global_scale)


def quantize(x: np.ndarray, *, global_scale: float | None = None, rule: str = "pow2") -> Quantized:
    """NVFP4 of float32 ``x`` (..., K) by the given decode scale, or by the rule over the finite elements."""
    shape = x.shape
    x = x.astype(np.float32).reshape(int(np.prod(shape[:-1])), shape[-1])
    if global_scale is None:
        finite = np.abs(x[np.isfinite(x)])
        global_scale = SCALE_OF_AMAX[rule](finite.max() if finite.size else np.float32(0))
    scale = np.float32(global_scale)
    blocks = -(-shape[-1] // 16)
    padded = np.zeros((len(x), blocks * 16), np.float32)
    padded[:, : shape[-1]] = x
    padded = padded.reshape(len(x), blocks, 16)
    one = np.float32(1)
    with np.errstate(all="ignore"):
        encode = one / scale
        finite = np.isfinite(padded).all(-1)
        amax = np.where(finite, np.abs(padded).max(-1), np.float32(0))
        wanted = np.minimum(amax * (encode * np.float32(1 / 6)), np.float32(448))
        scales = nearest_index(wanted, E4M3)
        inverse = np.minimum(one / (E4M3[scales].astype(np.float32) * (one / encode)), FLT_MAX)
        scaled = padded * inverse[..., None]
    codes = nearest_index(np.abs(scaled), E2M1) + 8 * np.signbit(scaled)
    codes = np.where((finite & (scales > 0))[..., None], codes, 0)
    return Quantized(
        codes.reshape(len(x), blocks * 16).astype(np.uint8),
        np.where(finite, scales, SCALE_NAN).astype(np.uint8),
        scale,
        shape,
    )


@functools.cache
def outside_module(name: str) -> ModuleType:
    """An outside package's module, from ``<venv>/oracles`` where that is, else from site-packages.

    That directory is on ``sys.path`` only meanwhile, and the package leaves ``sys.modules`` again: diffusers,
    peft and transformers act on what can be imported.
    """
    directory, package = Path(sys.prefix) / "oracles", name.partition(".")[0]
    if not (directory / package).is_dir():
        return importlib.import_module(name)
    sys.path.insert(0, str(directory))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(directory))
        for module in [m for m in sys.modules if m.partition(".")[0] == package]:
            del sys.modules[module]
