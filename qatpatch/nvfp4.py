"""NVFP4, the format: quantize, dequantize, pack (torch only).

    x  ~  code * block_scale * global_scale

===============  ========================================================  =====================================
part             type                                                      rule
===============  ========================================================  =====================================
code             E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives      nearest, ties to even, saturates at 6
block_scale      E4M3, one per 16 consecutive elements of the last axis    nearest even, clamped to 448 *before*
                                                                           the cast
global_scale     FP32 scalar, the *decode* direction                       power of two (default) or amax / 2688
===============  ========================================================  =====================================

With ``encode = 1 / global_scale`` in FP32 and IEEE division throughout::

    block_scale = e4m3(block_amax * (encode * f32(1/6)))
    code        = e2m1(x * min(1 / (block_scale * (1 / encode)), FLT_MAX))

This is TransformerEngine's exact recipe (flashinfer ships the same as its CPU reference), except that in a block
whose scale rounds to zero the codes are 0 here and +-6 there; both decode to 0.

Layout in memory: element ``2j`` sits in the low nibble of byte ``j``, scales are linear (row-major). A row whose length
is not a multiple of 16 is padded with zeros; blocks never run from one row into the next.

Non-finite input stays visible: a block that holds NaN or inf gets the scale byte 0x7F (NaN), and decodes to NaN. The
global scale is chosen from the finite elements, so that the other blocks keep their values.

Deliberately not here: gradients (`straight_through`), foreign layouts (`kernels.layouts`: 128x4 tiles, high nibble
first, encode scales).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

BLOCK_SIZE = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
GLOBAL_SCALE_RULES = ("pow2", "amax")

_ONE_SIXTH = torch.tensor(1.0 / 6.0, dtype=torch.float32).item()
_FLT_MAX = torch.finfo(torch.float32).max
_MIN_NORMAL = 2.0**-126
# Elements handled at a time: temporaries stay at a few tens of MiB for a weight of any size.
_CHUNK_ELEMENTS = 1 << 20
# 2688 = 448 * 6 = 1.3125 * 2^11, so in the exponent-and-mantissa bits of an FP32 number "mantissa above 1.3125"
# carries into the exponent after this addend, and the exponent of the global scale is 11 lower.
_POW2_CARRY = 0x7FFFFF - 0x280000
_POW2_SHIFT = 11


@dataclass(frozen=True, eq=False, kw_only=True)
class NVFP4Tensor:
    """A quantized tensor.

    Attributes:
        packed: uint8 ``(..., ceil16(K) / 2)``, element ``2j`` in the low nibble of byte ``j``.
        block_scale: float8_e4m3fn ``(..., ceil(K / 16))``, linear.
        global_scale: float32 ``()``, decode direction.
        shape: the logical shape ``(..., K)``.
    """

    packed: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor
    shape: torch.Size


def padded_length(length: int) -> int:
    """``length`` rounded up to whole blocks of 16."""
    return -(-length // BLOCK_SIZE) * BLOCK_SIZE


def packed_nbytes(rows: int, columns: int) -> int:
    """Bytes of a packed ``rows x columns`` matrix: 0.5625 an element (columns rounded up to 16) and one FP32."""
    return rows * (padded_length(columns) // 2 + padded_length(columns) // BLOCK_SIZE) + 4


def padding_is_zero(packed: torch.Tensor, columns: int) -> bool:
    """Whether codes (..., ceil16(K)/2) hold nothing but zeros beyond ``columns``, as `quantize` leaves them."""
    rest = packed[..., columns // 2 :] & 0x77  # without signs
    if columns % 2 and rest.shape[-1]:
        rest[..., 0] &= 0x70
    return not bool(rest.any())


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value, ties to even, saturating at +-6; the sign of zero is kept.

    Args:
        x: float32, any shape; must not hold NaN.

    Returns:
        float32 of the same shape, every element one of the 15 E2M1 values.

    Adding and subtracting ``1.5 * 2^22 * e`` with ``e`` the power of two at or below ``max(|x|, 1)`` makes the FP32
    adder round to the E2M1 spacing at ``x`` (0.5, 1 or 2).
    """
    magnitude = x.abs().clamp_(max=8.0)
    exponent = (magnitude.view(torch.int32) & 0x7F800000).clamp_(min=0x3F800000)
    magic = exponent.view(torch.float32) * (1.5 * 2.0**22)
    magnitude.add_(magic).sub_(magic).clamp_(max=E2M1_MAX)
    return magnitude.copysign_(x)


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """E4M3 of a non-negative float32 tensor: nearest even, clamped to 448 before the cast; NaN stays NaN."""
    return x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def finite_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude among the finite elements of ``x``: float32 ``()``, 0 for none. No host synchronisation."""
    if x.is_meta:
        return torch.empty((), dtype=torch.float32, device="meta")
    largest = torch.zeros((), dtype=torch.float32, device=x.device)
    if not x.numel():
        return largest
    for chunk in _row_chunks(x.detach().reshape(-1, x.shape[-1]) if x.dim() else x.detach().reshape(1, 1)):
        magnitude = chunk.float().abs()
        largest = torch.maximum(largest, torch.where(magnitude < float("inf"), magnitude, 0.0).amax())
    return largest


def global_scale_of_amax(amax: torch.Tensor, rule: str = "pow2") -> torch.Tensor:
    """The global scale (decode direction) for a tensor whose largest magnitude is ``amax``.

    Args:
        amax: float32, any shape, non-negative and finite.
        rule: ``"pow2"``, the smallest power of two >= amax / 2688, within [2^-126, 2^127]; or ``"amax"``,
            ``max(amax / 2688, 2^-126)``. Both give 1 where amax is 0.

    Returns:
        float32 of amax's shape.

    Raises:
        ValueError: for an unknown rule.
    """
    if rule not in GLOBAL_SCALE_RULES:
        raise ValueError(f"global_scale={rule!r} is not a rule; choose one of {', '.join(GLOBAL_SCALE_RULES)}")
    if rule == "amax":
        scale = (amax / (E4M3_MAX * E2M1_MAX)).clamp(min=_MIN_NORMAL)
    else:
        exponent = ((amax.view(torch.int32) + _POW2_CARRY) >> 23) - _POW2_SHIFT
        scale = (exponent.clamp(1, 254) << 23).view(torch.float32)
    return torch.where(amax == 0, 1.0, scale)


def choose_global_scale(x: torch.Tensor, rule: str = "pow2") -> torch.Tensor:
    """The global scale (float32 ``()``, decode direction) of ``x`` over its whole logical shape."""
    return global_scale_of_amax(finite_amax(x), rule)


def quantize(x: torch.Tensor, *, global_scale: torch.Tensor | float | None = None) -> NVFP4Tensor:
    """Quantize ``x`` to NVFP4, in blocks of 16 along its last axis.

    Args:
        x: floating point ``(..., K)`` with at least one axis. Values are read as float32.
        global_scale: decode scale, one positive finite number; by default the ``pow2`` rule over the whole of ``x``.

    Returns:
        An `NVFP4Tensor` on x's device.

    Raises:
        TypeError: x is not floating point.
        ValueError: x has no axis, or the global scale is not one positive finite number.
    """
    _check_input(x)
    scale = choose_global_scale(x) if global_scale is None else _as_scale(global_scale, x.device)
    rows, columns = _matrix_shape(x)
    packed = torch.empty((rows, padded_length(columns) // 2), dtype=torch.uint8, device=x.device)
    block_scale = torch.empty((rows, padded_length(columns) // BLOCK_SIZE), dtype=torch.float8_e4m3fn, device=x.device)
    if not x.is_meta and x.numel():
        done = 0
        for chunk in _row_chunks(x.detach().reshape(rows, columns)):
            values, scales = _quantize_blocks(chunk, scale)
            block_scale[done : done + len(chunk)] = scales
            packed[done : done + len(chunk)] = pack_codes(encode_e2m1(values.flatten(1)))
            done += len(chunk)
    leading = x.shape[:-1]
    return NVFP4Tensor(
        packed=packed.view(*leading, packed.shape[-1]),
        block_scale=block_scale.view(*leading, block_scale.shape[-1]),
        global_scale=scale,
        shape=x.shape,
    )


def dequantize(q: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``code * block_scale * global_scale`` as ``dtype``, of the logical shape.

    The product is formed in float32 and rounded once; with a power-of-two global scale it is exact in bfloat16 too
    (6 significant bits).
    """
    return _decode(q, dtype, q.global_scale)


def dequantize_without_global_scale(q: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``code * block_scale`` as ``dtype``: exact in float32, bfloat16 and float16. The GEMM operand."""
    return _decode(q, dtype, None)


def round_to_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor, *, dtype: torch.dtype, apply_global_scale: bool = True
) -> torch.Tensor:
    """``dequantize(quantize(x))`` without packing in between.

    Args:
        x: floating point ``(..., K)``.
        global_scale: float32 ``()``, decode direction.
        dtype: of the result.
        apply_global_scale: False leaves the global scale out, so that the result is exact in every 16-bit type.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.is_meta or not x.numel():
        return out
    rows, columns = _matrix_shape(x)
    flat, done = out.view(rows, columns), 0
    for chunk in _row_chunks(x.detach().reshape(rows, columns)):
        values, scales = _quantize_blocks(chunk, global_scale)
        values = values * scales.float().unsqueeze(-1)
        if apply_global_scale:
            values = values * global_scale
        flat[done : done + len(chunk)] = values.flatten(1)[:, :columns]
        done += len(chunk)
    return out


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 (bit 3 is the sign) of float32 E2M1 values."""
    twice = values.abs().mul_(2.0).to(torch.uint8)  # 0 1 2 3 4 6 8 12, for the codes 0 to 7
    code = torch.where(twice <= 4, twice, ((twice >> 1) + 2).clamp_(max=7))
    return code | (values.signbit().to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 codes 0..15."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte along the last axis (even length), the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_codes`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _quantize_blocks(rows: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 values (R, blocks, 16) float32 and block scales (R, blocks) E4M3 of a (R, K) chunk, by the module's
    formula.
    """
    columns = rows.shape[-1]
    x = rows.float()
    if padded_length(columns) != columns:
        x = torch.nn.functional.pad(x, (0, padded_length(columns) - columns))
    x = x.unflatten(-1, (-1, BLOCK_SIZE))
    amax = x.abs().amax(-1)
    finite = amax < float("inf")  # False for NaN too
    # A foreign scale below 2^-128 has no finite reciprocal, and 0 * inf would make a zero block NaN.
    encode = (1.0 / global_scale).clamp(max=_FLT_MAX)
    scales = round_e4m3(torch.where(finite, amax, 0.0) * (encode * _ONE_SIXTH))
    decoded = scales.float()
    inverse = (1.0 / (decoded * (1.0 / encode))).clamp(max=_FLT_MAX)
    alive = finite & (decoded > 0)
    # Blocks that hold non-finite values get zero codes; their scale byte, NaN, is what keeps them visible.
    scaled = torch.where(alive.unsqueeze(-1), x * inverse.unsqueeze(-1), 0.0)
    scales = torch.where(finite, decoded, float("nan")).to(torch.float8_e4m3fn)
    return round_e2m1(scaled), scales


def _decode(q: NVFP4Tensor, dtype: torch.dtype, global_scale: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=dtype, device=q.packed.device)
    if out.is_meta or not out.numel():
        return out
    columns = q.shape[-1]
    flat = out.view(-1, columns)
    packed, block_scale = q.packed.reshape(len(flat), -1), q.block_scale.reshape(len(flat), -1)
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, len(flat), step):
        values = decode_e2m1(unpack_codes(packed[start : start + step])).unflatten(-1, (-1, BLOCK_SIZE))
        values = values * block_scale[start : start + step].float().unsqueeze(-1)
        if global_scale is not None:
            values = values * global_scale
        flat[start : start + step] = values.flatten(1)[:, :columns]
    return out


def _row_chunks(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    step = max(1, _CHUNK_ELEMENTS // max(1, matrix.shape[-1]))
    yield from matrix.split(step) if len(matrix) > step else (matrix,)


def _matrix_shape(x: torch.Tensor) -> tuple[int, int]:
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows, x.shape[-1]


def _check_input(x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        found = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"NVFP4 quantizes floating-point tensors, got {found}; convert it first")
    if x.dim() == 0:
        raise ValueError("NVFP4 needs an axis to take blocks of 16 along, got a 0-dimensional tensor; use x.reshape(1)")


def _as_scale(scale: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    if not isinstance(scale, torch.Tensor | int | float):
        raise TypeError(f"global_scale is a number or a tensor (decode direction), got {scale!r}")
    tensor = torch.as_tensor(scale, dtype=torch.float32, device=device)
    if tensor.numel() != 1:
        raise ValueError(f"global_scale is one number for the whole tensor, got shape {tuple(tensor.shape)}")
    # Values on an accelerator are not read: that would synchronise with the host.
    if tensor.device.type == "cpu" and not 0.0 < float(tensor) < float("inf"):
        raise ValueError(f"global_scale must be positive and finite (decode direction), got {float(tensor)}")
    return tensor.reshape(())
