"""Triton device code of the NVFP4 kernels; `triton_nvfp4_launch` launches it.

**Work unit.** A *tile* is ``BLOCKS`` consecutive blocks of 16 elements, one tile a program. A tensor whose rows are
whole blocks and contiguous is one long run of blocks (``FLAT``); any other matrix counts ``ceil(K / 16)`` blocks a row
and masks the last one. A block never leaves its row.

**Bits.** Every result equals `qatpatch.nvfp4` bit for bit, on all architectures, because nothing here depends on a
hardware conversion: E4M3 is rounded by integer arithmetic (sm_80 has no such type, some compilers round twice), E2M1 by
adding and subtracting ``1.5 * 2^22 * e`` with ``e`` the power of two at or below the value, division is ``tl.div_rn``
(IEEE; ``/`` is not). Kernels are launched with ``enable_fp_fusion=False``; `tl.fma` appears where its product is exact
or its addend a zero, so that one rounding and two give the same bits, and in one Newton step explained there.

**One pass instead of two.** The ``pow2`` global scale needs the amax of the whole tensor before the first element can
be quantized, a read of everything. But for a power-of-two scale the dequantized values do not depend on its exponent,
as long as no block scale is subnormal in E4M3 (below 2^-6): rounding to four significant bits commutes with powers of
two, and amax / 2688 <= global_scale excludes saturation. So `operand_kernel_pow2` quantizes with block scales of
unbounded exponent, and notes for each tile the largest finite magnitude and the smallest nonzero block amax;
`repair_kernel_pow2` finds the global scale from the former and does again, by the general formula, the tiles that the
latter shows to hold a subnormal block scale: in ordinary tensors none. Of a bf16 element that moves 4 bytes, not 6.
The ``pair`` kernels do that for two tensors, the operands of one GEMM, in one grid: half the launches.

Deliberately not here: hardware FP4 and FP8 conversions, foreign scale layouts, gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ONE_SIXTH = tl.constexpr(0.16666667163372040)
_INF = tl.constexpr(float("inf"))  # NaN cannot be such a constant: Triton compares them with their old values
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_MIN_NORMAL = tl.constexpr(2.0**-126)
_EXPONENT_BITS = tl.constexpr(0x7F800000)
_SIGN_BIT = tl.constexpr(-0x80000000)
_ONE_BITS = tl.constexpr(0x3F800000)
# E2M1 rounding: added to |x| < 2 it leaves multiples of 0.5.
_MAGIC = tl.constexpr(1.5 * 2.0**22)
_MAGIC_BITS = tl.constexpr(0x4AC00000)
# Below this block amax the one-pass kernel's FP32 intermediates could leave the normal range.
_SAFE_FLOOR = tl.constexpr(2.0**-100)

RAW, POW2, AMAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _nan_maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _peak_and_floor(peak, floor, other_peak, other_floor):
    return _nan_maximum(peak, other_peak), tl.minimum(floor, other_floor)


@triton.jit
def _place(x, out, tile, blocks, per_row, columns, row_stride, FLAT: tl.constexpr, BLOCKS: tl.constexpr):
    """Pointers (BLOCKS, 16) into x (rows ``row_stride`` apart) and into a contiguous out, and their mask."""
    start = tile.to(tl.int64) * BLOCKS
    left = tl.minimum(blocks - start, BLOCKS).to(tl.int32)
    index = tl.arange(0, BLOCKS)
    lane = tl.arange(0, 16)[None, :]
    if FLAT:
        offset = index[:, None] * 16 + lane
        return x + start * 16 + offset, out + start * 16 + offset, (index < left)[:, None]
    else:
        row = start // per_row
        position = (start - row * per_row).to(tl.int32) + index
        step = position // per_row
        column = (position - step * per_row).to(tl.int64)[:, None] * 16 + lane
        step = step.to(tl.int64)[:, None]
        pointers = x + row * row_stride + (step * row_stride + column)
        targets = out + row * columns + (step * columns + column)
        return pointers, targets, (index < left)[:, None] & (column < columns)


@triton.jit
def _global_scale(amax, RULE: tl.constexpr):
    """`nvfp4.global_scale_of_amax`; for RAW, amax itself."""
    if RULE == RAW:
        scale = amax
    elif RULE == AMAX:
        scale = tl.where(amax == 0.0, 1.0, tl.maximum(tl.div_rn(amax, 2688.0), _MIN_NORMAL))
    else:
        # A mantissa above that of 2688 = 1.3125 * 2^11 carries into the exponent; the scale's exponent is 11 lower.
        exponent = ((_bits(amax) + (0x7FFFFF - 0x280000)) >> 23) - 11
        scale = tl.where(amax == 0.0, 1.0, _float(tl.minimum(tl.maximum(exponent, 1), 254) << 23))
    return scale


@triton.jit
def _round_e2m1(x):
    """Magnitude of the E2M1 value nearest to x (ties to even), for |x| < 7."""
    e = _float(tl.maximum(_bits(x) & _EXPONENT_BITS, _ONE_BITS))
    return tl.fma(e, -_MAGIC, tl.fma(e, _MAGIC, tl.abs(x)))


@triton.jit
def _block_scale(amax, encode):
    """Of block amaxes: the block scale's value (NaN for a non-finite block) and its E4M3 byte."""
    wanted = tl.where(amax < _INF, amax, float("nan")) * (encode * _ONE_SIXTH)
    wanted = tl.where(wanted > 448.0, 448.0, wanted)
    bits = _bits(wanted)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    # Subnormal E4M3 numbers are the multiples of 2^-9, the spacing of FP32 numbers at 2^14.
    shifted = wanted + 16384.0
    normal = bits >= 0x3C800000
    known = wanted >= 0.0
    value = tl.where(normal, _float(rounded << 20), shifted - 16384.0)
    byte = tl.where(normal, rounded - 960, _bits(shifted) - 0x46800000)
    return tl.where(known, value, float("nan")), tl.where(known, byte, 0x7F)


@triton.jit
def _scale_to_codes(x, block_scale, encode):
    """x in units of its block scale; +0 in a block whose scale is 0, anything in a block whose scale is NaN."""
    inverse = tl.minimum(tl.div_rn(1.0, block_scale * tl.div_rn(1.0, encode)), _FLT_MAX)
    alive = block_scale > 0.0
    # x * inverse + (-0) is x * inverse, and x * 0 + (+0) is +0: the select costs nothing an element.
    addend = _float(tl.where(alive, _SIGN_BIT, 0))
    inverse = tl.where(alive, inverse, 0.0)
    return tl.fma(x, inverse[:, None], addend[:, None])


@triton.jit
def _round_tile(x, scale):
    """NVFP4 there and back of a tile (BLOCKS, 16) float32, without the global scale ``scale``."""
    encode = tl.minimum(tl.div_rn(1.0, scale), _FLT_MAX)
    block_scale, _ = _block_scale(tl.reduce(tl.abs(x), 1, _nan_maximum), encode)
    scaled = _scale_to_codes(x, block_scale, encode)
    values = _round_e2m1(tl.minimum(tl.abs(scaled), 6.0)) * block_scale[:, None]
    return _float(_bits(values) | (_bits(scaled) & _SIGN_BIT))


@triton.jit(do_not_specialize=["blocks", "per_row"])
def peaks_kernel(x, peaks, blocks, per_row, columns, row_stride, FLAT: tl.constexpr, BLOCKS: tl.constexpr):
    """peaks[tile] = largest finite magnitude of the tile."""
    tile = tl.program_id(0)
    pointers, _, mask = _place(x, x, tile, blocks, per_row, columns, row_stride, FLAT, BLOCKS)
    bits = _bits(tl.load(pointers, mask=mask, other=0.0).to(tl.float32)) & 0x7FFFFFFF
    # The addend wraps NaN and inf to negative integers, which lose every comparison.
    largest = tl.max(tl.max(bits + 0x800000, 1), 0)
    tl.store(peaks + tile, _float(tl.maximum(largest - 0x800000, 0)))


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["scale"])
def global_scale_kernel(peaks, scale, tiles, RULE: tl.constexpr, CHUNK: tl.constexpr):
    """One program: the global scale (RAW: the amax) of a tensor from its tiles' peaks."""
    tl.store(scale, _global_scale(_largest(peaks, tiles, CHUNK), RULE))


@triton.jit
def _largest(peaks, tiles, CHUNK: tl.constexpr):
    largest = tl.zeros([CHUNK], tl.float32)
    for start in range(0, tiles, CHUNK):
        index = start + tl.arange(0, CHUNK)
        largest = tl.maximum(largest, tl.load(peaks + index, mask=index < tiles, other=0.0))
    return tl.max(largest, 0)


@triton.jit(do_not_specialize=["blocks", "per_row"], do_not_specialize_on_alignment=["scale"])
def operand_kernel(
    x, out, scale, blocks, per_row, columns, row_stride, APPLY: tl.constexpr, FLAT: tl.constexpr, BLOCKS: tl.constexpr
):
    """out = NVFP4 there and back of x under a given global scale, which APPLY multiplies in."""
    pointers, targets, mask = _place(x, out, tl.program_id(0), blocks, per_row, columns, row_stride, FLAT, BLOCKS)
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    global_scale = tl.load(scale)
    values = _round_tile(values, global_scale)
    if APPLY:
        values = values * global_scale
    tl.store(targets, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _unscaled_operand(
    x, out, stats, entry, entries, tile, blocks, per_row, columns, row_stride, FLAT: tl.constexpr, BLOCKS: tl.constexpr
):
    """The work of `operand_kernel_pow2` on one tile, whose peak and floor are number ``entry`` of ``stats``."""
    pointers, targets, mask = _place(x, out, tile, blocks, per_row, columns, row_stride, FLAT, BLOCKS)
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    amax = tl.reduce(tl.abs(values), 1, _nan_maximum)
    bits = _bits(amax * _ONE_SIXTH)
    block_scale = _float((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0x7FF00000)
    block_scale = tl.where(amax < _INF, block_scale, float("nan"))
    block_scale = tl.where(amax == 0.0, 1.0, block_scale)
    # As in _scale_to_codes: a zero block becomes +0 throughout. Nothing here reaches 7: the scale is within 1/17.
    addend = _float(tl.where(amax == 0.0, 0, _SIGN_BIT))
    # The approximate reciprocal (within 2 ulp) and one Newton step: the correctly rounded one for each of the eight
    # significands that a block scale can have, in half the instructions of an IEEE division.
    inverse = 1.0 / block_scale
    inverse = tl.fma(inverse, tl.fma(-block_scale, inverse, 1.0), inverse)
    scaled = tl.fma(values, inverse[:, None], addend[:, None])
    rounded = _round_e2m1(scaled) * block_scale[:, None]
    rounded = _float(_bits(rounded) | (_bits(scaled) & _SIGN_BIT))
    tl.store(targets, rounded.to(out.dtype.element_ty), mask=mask)

    peak, floor = tl.reduce((amax, tl.where(amax > 0.0, amax, _INF)), 0, _peak_and_floor)
    if not (peak < _INF):
        magnitude = tl.abs(values)
        peak = tl.max(tl.max(tl.where(magnitude < _INF, magnitude, 0.0), 1), 0)
    tl.store(stats + entry, peak)
    tl.store(stats + entries + entry, floor)


@triton.jit(do_not_specialize=["entries", "blocks", "per_row"])
def operand_kernel_pow2(
    x, out, stats, entries, blocks, per_row, columns, row_stride, FLAT: tl.constexpr, BLOCKS: tl.constexpr
):
    """out as by `operand_kernel` under the tensor's own pow2 scale, but for tiles with subnormal block scales.

    stats (2, entries): the tiles' peaks, then their floors (the smallest nonzero block amaxes).
    """
    tile = tl.program_id(0)
    _unscaled_operand(x, out, stats, tile, entries, tile, blocks, per_row, columns, row_stride, FLAT, BLOCKS)


@triton.jit(do_not_specialize=["entries", "x_tiles", "x_blocks", "w_blocks"])
def operand_pair_kernel_pow2(
    x, w, x_out, w_out, stats, entries, x_tiles, x_blocks, w_blocks, FLAT: tl.constexpr, BLOCKS: tl.constexpr
):
    """`operand_kernel_pow2` of two flat tensors: the tiles of x, then those of w."""
    entry = tl.program_id(0)
    second = entry >= x_tiles
    source, out = tl.where(second, w, x), tl.where(second, w_out, x_out)
    tile, blocks = tl.where(second, entry - x_tiles, entry), tl.where(second, w_blocks, x_blocks)
    _unscaled_operand(source, out, stats, entry, entries, tile, blocks, 1, 16, 16, FLAT, BLOCKS)


@triton.jit
def _has_subnormal(floor, global_scale):
    """Whether a block amax of ``floor`` gives a block scale below 2^-6 (or is too small for the one-pass kernel)."""
    return (floor * _ONE_SIXTH < global_scale * 0.015625) | (floor < _SAFE_FLOOR)


@triton.jit
def _fingerprint(word):
    """Two 32-bit sums over words (n) that also depend on where a word stands."""
    place = (tl.arange(0, word.shape[0]) + 1).to(tl.uint32)
    first = (word ^ (place * 0x9E3779B1)) * 0x85EBCA6B
    first = (first ^ (first >> 15)) * 0xC2B2AE35
    first = first ^ (first >> 13)
    second = (first ^ (word + place)) * 0x27D4EB2F
    second = (second ^ (second >> 16)) * 0x165667B1
    second = second ^ (second >> 14)
    return tl.sum(first.to(tl.int32, bitcast=True), 0), tl.sum(second.to(tl.int32, bitcast=True), 0)


@triton.jit(do_not_specialize=["tiles", "blocks"], do_not_specialize_on_alignment=["scale"])
def kept_operand_kernel_pow2(x, words, out, stats, prints, scale, tiles, blocks, BLOCKS: tl.constexpr):
    """`operand_kernel_pow2` of a flat x (words: the same memory as int32) whose last outputs are at hand.

    A tile is left alone if its fingerprint, ``prints`` (tiles, 2), is what it was, and if the last `repair_kernel_pow2`
    left it alone too: what that one wrote depends on the global scale of its time, still in ``scale``.
    """
    tile = tl.program_id(0)
    start = tile.to(tl.int64) * (BLOCKS * 8)
    index = tl.arange(0, BLOCKS * 8)
    live = index < tl.minimum(blocks.to(tl.int64) * 8 - start, BLOCKS * 8).to(tl.int32)
    word = tl.load(words + start + index, mask=live, other=0).to(tl.uint32, bitcast=True)
    first, second = _fingerprint(word)
    known = (tl.load(prints + 2 * tile) == first) & (tl.load(prints + 2 * tile + 1) == second)
    if not (known & (not _has_subnormal(tl.load(stats + tiles + tile), tl.load(scale)))):
        _unscaled_operand(x, out, stats, tile, tiles, tile, blocks, 1, 16, 16, True, BLOCKS)
        tl.store(prints + 2 * tile, first)
        tl.store(prints + 2 * tile + 1, second)


@triton.jit
def _repair(
    x, out, peaks, floors, scale, tiles, program, programs, blocks, per_row, columns, row_stride,
    FLAT: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The work of `repair_kernel_pow2` in one of the ``programs`` that share a tensor's tiles."""
    lowest = tl.full([LANES], _INF, tl.float32)
    for start in range(program, tiles, programs * LANES):
        tile = start + tl.arange(0, LANES) * programs
        lowest = tl.minimum(lowest, tl.load(floors + tile, mask=tile < tiles, other=_INF))
    global_scale = _global_scale(_largest(peaks, tiles, CHUNK), POW2)
    if program == 0:
        tl.store(scale, global_scale)
    if _has_subnormal(tl.min(lowest, 0), global_scale):
        for step in range(0, tl.cdiv(tiles - program, programs)):
            tile = program + step * programs
            if _has_subnormal(tl.load(floors + tile), global_scale):
                pointers, targets, mask = _place(x, out, tile, blocks, per_row, columns, row_stride, FLAT, BLOCKS)
                values = _round_tile(tl.load(pointers, mask=mask, other=0.0).to(tl.float32), global_scale)
                tl.store(targets, (values * global_scale).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["entries", "blocks", "per_row"], do_not_specialize_on_alignment=["scale"])
def repair_kernel_pow2(
    x,
    out,
    stats,
    scale,
    entries,
    blocks,
    per_row,
    columns,
    row_stride,
    FLAT: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """The global scale of what `operand_kernel_pow2` saw, and the tiles that it could not finish without it."""
    _repair(
        x, out, stats, stats + entries, scale, entries, tl.program_id(0), tl.num_programs(0),
        blocks, per_row, columns, row_stride, FLAT, BLOCKS, CHUNK, LANES,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["entries", "x_tiles", "x_programs", "x_blocks", "w_blocks"],
    do_not_specialize_on_alignment=["x_scale", "w_scale"],
)
def repair_pair_kernel_pow2(
    x,
    w,
    x_out,
    w_out,
    stats,
    x_scale,
    w_scale,
    entries,
    x_tiles,
    x_programs,
    x_blocks,
    w_blocks,
    FLAT: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """`repair_kernel_pow2` after `operand_pair_kernel_pow2`: ``x_programs`` programs for x, the others for w."""
    program = tl.program_id(0)
    second = program >= x_programs
    source, out = tl.where(second, w, x), tl.where(second, w_out, x_out)
    scale, blocks = tl.where(second, w_scale, x_scale), tl.where(second, w_blocks, x_blocks)
    peaks = stats + tl.where(second, x_tiles, 0)
    tiles = tl.where(second, entries - x_tiles, x_tiles)
    programs = tl.where(second, tl.num_programs(0) - x_programs, x_programs)
    program = tl.where(second, program - x_programs, program)
    _repair(
        source, out, peaks, peaks + entries, scale, tiles, program, programs,
        blocks, 1, 16, 16, FLAT, BLOCKS, CHUNK, LANES,
    )  # fmt: skip


@triton.jit
def _quantize_tile(x, scale, BLOCKS: tl.constexpr):
    """Of a tile (BLOCKS, 16) float32: words (BLOCKS, 2), eight codes each, and E4M3 scale bytes (BLOCKS), all int32."""
    encode = tl.minimum(tl.div_rn(1.0, scale), _FLT_MAX)
    block_scale, byte = _block_scale(tl.reduce(tl.abs(x), 1, _nan_maximum), encode)
    scaled = _scale_to_codes(x, block_scale, encode)
    scaled = tl.where((block_scale > 0.0)[:, None], scaled, 0.0)
    magnitude = tl.minimum(tl.abs(scaled), 6.0)
    # The sum's low bits count multiples of e / 2; each power of two that e is above 1 moves the code up by two.
    magic = _float(tl.maximum(_bits(magnitude) & _EXPONENT_BITS, _ONE_BITS)) * _MAGIC
    code = (_bits(magnitude + magic) - _bits(magic)) + ((_bits(magic) - _MAGIC_BITS) >> 22)
    code = code | ((_bits(scaled) >> 28) & 8)
    shift = tl.arange(0, 8)[None, None, :] * 4
    word = tl.sum(tl.reshape(code, [BLOCKS, 2, 8]) << shift, 2)
    return word, byte


@triton.jit(do_not_specialize=["blocks", "per_row"], do_not_specialize_on_alignment=["scale", "scales"])
def quantize_kernel(
    x, words, scales, scale, blocks, per_row, columns, row_stride, FLAT: tl.constexpr, BLOCKS: tl.constexpr
):
    """words: int32, eight codes each, two a block; bytes: E4M3, one a block."""
    tile = tl.program_id(0)
    pointers, _, mask = _place(x, x, tile, blocks, per_row, columns, row_stride, FLAT, BLOCKS)
    values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    word, byte = _quantize_tile(values, tl.load(scale), BLOCKS)

    start = tile.to(tl.int64) * BLOCKS
    index = tl.arange(0, BLOCKS)
    live = index < tl.minimum(blocks - start, BLOCKS).to(tl.int32)
    tl.store(words + start * 2 + (index[:, None] * 2 + tl.arange(0, 2)[None, :]), word, mask=live[:, None])
    tl.store(scales + start + index, byte.to(tl.uint8), mask=live)


@triton.jit(do_not_specialize=["blocks", "per_row"], do_not_specialize_on_alignment=["scale", "scales"])
def dequantize_kernel(
    words,
    scales,
    scale,
    out,
    blocks,
    per_row,
    columns,
    APPLY: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """out = code * block_scale, times the global scale with APPLY."""
    WORDS: tl.constexpr = 2 * BLOCKS
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    left = (2 * tl.minimum(blocks - start, BLOCKS)).to(tl.int32)
    index = tl.arange(0, WORDS)
    lane = tl.arange(0, 8)[None, :]
    live = index < left
    word = tl.load(words + start * 2 + index, mask=live, other=0)
    byte = tl.load(scales + start + index // 2, mask=live, other=0).to(tl.int32)
    field = byte & 0x7F
    block_scale = tl.where(field < 8, field.to(tl.float32) * 0.001953125, _float((field + 960) << 20))
    block_scale = tl.where(field == 0x7F, float("nan"), block_scale)
    block_scale = _float(_bits(block_scale) | ((byte & 0x80) << 24))
    # A code's sign, exponent and mantissa at an FP32 number's are its value times 2^-126, 0.5 (subnormal) included.
    bits = ((word[:, None] << (28 - 4 * lane)) >> 6) & -0x7E400000
    values = _float(bits) * 8.507059173023462e37 * block_scale[:, None]
    if APPLY:
        values = values * tl.load(scale)
    values = values.to(out.dtype.element_ty)
    if FLAT:
        tl.store(out + start * 16 + (index[:, None] * 8 + lane), values, mask=live[:, None])
    else:
        row = start // per_row
        position = (start - row * per_row).to(tl.int32) + index // 2
        step = position // per_row
        column = (position - step * per_row).to(tl.int64) * 16 + (index % 2) * 8
        mask = live[:, None] & (column[:, None] + lane < columns)
        tl.store(out + row * columns + ((step.to(tl.int64) * columns + column)[:, None] + lane), values, mask=mask)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["bias", "alpha_a", "alpha_b"])
def matmul_kernel(
    a,
    b,
    bias,
    alpha_a,
    alpha_b,
    out,
    M,
    N,
    K,
    a_stride,
    b_stride,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """out (M, N) = (a (M, K) @ b (N, K)^T) * alpha_a * alpha_b + bias, rounded once. Accumulates in FP32."""
    # Programs walk GROUP_M row tiles together, so that the column tiles they share stay in L2.
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * cols)
    height = tl.minimum(rows - group * GROUP_M, GROUP_M)
    inside = tl.program_id(0) % (GROUP_M * cols)
    row0 = (group * GROUP_M + inside % height) * BLOCK_M
    col0 = (inside // height) * BLOCK_N

    row, col, k = row0 + tl.arange(0, BLOCK_M), col0 + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Rows beyond the edge read the last row again and are not stored: no mask in the loop.
    a_tile = a + tl.minimum(row, M - 1).to(tl.int64)[:, None] * a_stride + k[None, :]
    b_tile = b + tl.minimum(col, N - 1).to(tl.int64)[None, :] * b_stride + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a_part, b_part = tl.load(a_tile), tl.load(b_tile)
        else:
            a_part = tl.load(a_tile, mask=(start + k < K)[None, :], other=0.0)
            b_part = tl.load(b_tile, mask=(start + k < K)[:, None], other=0.0)
        total = tl.dot(a_part, b_part, total)
        a_tile += BLOCK_K
        b_tile += BLOCK_K

    # The smaller factor first: their product could leave FP32's range where the result does not.
    first, second = tl.load(alpha_a), tl.load(alpha_b)
    total = total * tl.minimum(first, second) * tl.maximum(first, second)
    if HAS_BIAS:
        total += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    mask = (row < M)[:, None] & (col < N)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * N + col[None, :], total.to(out.dtype.element_ty), mask=mask)
