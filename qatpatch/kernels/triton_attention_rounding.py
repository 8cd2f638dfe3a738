"""Rounding inside the Triton attention kernels: NVFP4 of whole operands, FP4 of P in registers.

Two kinds, because they are read at different rates. Q, K and V are rounded once, in FP32, bit for bit as
`qatpatch.nvfp4` does it with global scale 1. P is rounded once per pair of a query and a key, which makes its
instructions the cost of the whole kernel; there the work is done on the softmax's exponent instead of on P::

    x     = 6 p / amax = exp2(s - amax_s + log2 6)      one exponential, no division: code = e2m1(x)
    sixth = amax / 6   = exp2(amax_s - m - log2 6)      once a group: scale = e4m3(sixth), p = x * sixth

with ``s`` the scores in powers of two, ``amax_s`` their maximum in the group and ``m`` the row maximum. On a GPU ``x``
is then handled two at a time in FP16 (`PACKED`): E2M1 keeps one of FP16's ten mantissa bits, so rounding twice moves
only an ``x`` within 2^-11 of a tie, and every ``code * scale`` is exact in FP16. Plain FP32 arithmetic, for Triton's
interpreter, which knows no inline assembly, gives the same numbers up to those ties. Which two elements share a
register does not matter: each brings its own scale.

Compile with ``enable_fp_fusion=False``: adding and subtracting a magic number must stay two roundings.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_6 = tl.constexpr(2.584962500721156)
# log2 of the weight of a hidden key: far below any score (|score| < 1e7 stays above it), and near enough to zero that
# the difference to a group maximum which is itself hidden keeps a few bits, so that nothing becomes inf or NaN.
HIDDEN_LOG2 = tl.constexpr(-16777216.0)


@triton.jit
def round_e2m1(x):
    """Nearest E2M1 value of FP32 numbers, ties to even, saturating at +-6; the sign of zero is lost."""
    x = tl.minimum(tl.maximum(x, -6.0), 6.0)
    # 1.5 * 2^22 * max(the power of two at or below |x|, 1), put together in its bits
    magic = tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000) + 0x0B400000, 0x4AC00000)
    magic = magic.to(tl.float32, bitcast=True)
    return (x + magic) - magic


@triton.jit
def round_e4m3(x):
    """Nearest E4M3 value of non-negative finite FP32 numbers, ties to even, at most 448, as FP32."""
    x = tl.minimum(x, 448.0)
    # 1.5 * 2^20 * max(the power of two at or below x, 2^-6), put together in its bits
    magic = tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000) + 0x0A400000, 0x46C00000)
    magic = magic.to(tl.float32, bitcast=True)
    return (x + magic) - magic


@triton.jit
def nvfp4(x, axis: tl.constexpr):
    """NVFP4 there and back with global scale 1; the 16 elements of a group are the whole of ``axis``.

    Exact in every 16-bit type. A group that holds NaN or inf becomes NaN.
    """
    # As integers, the magnitudes of floats keep their order, and inf and NaN come last.
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=axis, keep_dims=True)
    amax = tl.where(top < 0x7F800000, top, 0).to(tl.float32, bitcast=True)
    scale = round_e4m3(amax * 0.16666667163372040)  # 1/6 in FP32
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(scale > 0.0, scale, 1.0))
    return round_e2m1(x * inverse) * tl.where(top < 0x7F800000, scale, float("nan"))


@triton.jit
def nvfp4_rows(x, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """`nvfp4` of FP32 (ROWS, HEAD_DIM) in groups of 16 along the rows."""
    return tl.reshape(nvfp4(tl.reshape(x, [ROWS, HEAD_DIM // 16, 16]), 2), [ROWS, HEAD_DIM])


@triton.jit
def nvfp4_columns(x, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """`nvfp4` of FP32 (ROWS, HEAD_DIM) in groups of 16 rows, per column."""
    return tl.reshape(nvfp4(tl.reshape(x, [ROWS // 16, 16, HEAD_DIM]), 1), [ROWS, HEAD_DIM])


@triton.jit
def p_scale(sixth):
    """E4M3 of amax / 6 of a group of P, as FP32; sixth is at most 1/6.

    One step shorter than `round_e4m3`: the magic number takes its exponent from a whole float, so that the sum can
    cross a power of two for a sixth within 2^-20 of it, where the result may be half a spacing off.
    """
    floor = tl.maximum(sixth, 0.015625)
    return tl.fma(floor, -1048576.0, tl.fma(floor, 1048576.0, sixth))


@triton.jit
def quantized_p(x, scale, PACKED: tl.constexpr, OPERAND: tl.constexpr):
    """``e2m1(x) * scale`` as OPERAND, for x in [0, 6]; scale (FP32) broadcasts to x."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 h, e, y, one, magic, minus;
            mov.b32 one, 0x3C003C00;
            mov.b32 magic, 0x62006200;
            mov.b32 minus, 0xE200E200;
            cvt.rn.f16x2.f32 h, $2, $1;
            and.b32 e, h, 0x7C007C00;
            max.f16x2 e, e, one;
            fma.rn.f16x2 y, e, magic, h;
            fma.rn.f16x2 y, e, minus, y;
            mul.rn.f16x2 $0, y, $3;
            }
            """,
            "=r,r,r,r",
            [x, scale.to(tl.float16)],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return (round_e2m1(x) * scale).to(OPERAND)


@triton.jit
def quantized_and_plain_p(x, scale, sixth, PACKED: tl.constexpr, OPERAND: tl.constexpr):
    """`quantized_p`, and ``x * sixth`` (P itself) as OPERAND."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 h, e, y, one, magic, minus;
            mov.b32 one, 0x3C003C00;
            mov.b32 magic, 0x62006200;
            mov.b32 minus, 0xE200E200;
            cvt.rn.f16x2.f32 h, $3, $2;
            and.b32 e, h, 0x7C007C00;
            max.f16x2 e, e, one;
            fma.rn.f16x2 y, e, magic, h;
            fma.rn.f16x2 y, e, minus, y;
            mul.rn.f16x2 $0, y, $4;
            mul.rn.f16x2 $1, h, $5;
            }
            """,
            "=r,=r,r,r,r,r",
            [x, scale.to(tl.float16), sixth.to(tl.float16)],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return (round_e2m1(x) * scale).to(OPERAND), (x * sixth).to(OPERAND)


@triton.jit
def quantized_p_bf16(x, scale, PACKED: tl.constexpr, OPERAND: tl.constexpr):
    """`quantized_p` for an OPERAND of BF16.

    Packed, the exact FP16 product becomes BF16 by a shift (its lower mantissa bits are zero), which lowers its
    exponent by 112, and a multiplication by 2^112.
    """
    if PACKED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 h, e, y, one, magic, minus, bias, zero;
            mov.b32 one, 0x3C003C00;
            mov.b32 magic, 0x62006200;
            mov.b32 minus, 0xE200E200;
            mov.b32 bias, 0x77807780;
            mov.b32 zero, 0x80008000;
            cvt.rn.f16x2.f32 h, $2, $1;
            and.b32 e, h, 0x7C007C00;
            max.f16x2 e, e, one;
            fma.rn.f16x2 y, e, magic, h;
            fma.rn.f16x2 y, e, minus, y;
            mul.rn.f16x2 y, y, $3;
            shr.u32 y, y, 3;
            fma.rn.bf16x2 $0, y, bias, zero;
            }
            """,
            "=r,r,r,r",
            [x, scale.to(tl.float16)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return (round_e2m1(x) * scale).to(OPERAND)
