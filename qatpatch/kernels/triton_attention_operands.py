"""Triton: the operands of an attention call, rounded once in a pass of their own.

K and V go from BSHD with any strides to (B * H, S_pad, D), contiguous and padded to whole tiles, which is what the
attention kernels read through tensor descriptors. V's groups of 16 run along the keys, per channel. Keys that a mask
hides from every query are zeroed before anything is computed from them, so that their memory may hold NaN; the mask of
a call whose mask depends on the key alone becomes an FP32 bias in units of the unscaled scores, once per key.

Rows past the last key repeat the last key in K and are 0 in V. Their scores then repeat a valid score, which leaves
every group maximum as it is, and the backward, which throws their rows of dK and dV away, needs no mask for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qatpatch.kernels.triton_attention_rounding import nvfp4_columns, nvfp4_rows


@triton.jit(do_not_specialize=["key_length", "padded_length", "heads"])
def quantize_key_value_kernel(
    key_ptr,
    value_ptr,
    mask_ptr,
    key_out_ptr,
    value_out_ptr,
    bias_ptr,
    key_length,
    padded_length,
    heads,
    inverse_scale,
    hidden,
    key_batch,
    key_row,
    key_head,
    value_batch,
    value_row,
    value_head,
    mask_batch,
    mask_head,
    mask_column,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    ADDITIVE: tl.constexpr,
    WRITE_BIAS: tl.constexpr,
    QUANTIZE_V: tl.constexpr,
):
    """One tile of keys of one batch and head. See the module's docstring for the layout."""
    tiles = padded_length // TILE
    batch_head = tl.program_id(0) // tiles
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    rows = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, HEAD_DIM)
    real = rows < key_length
    out = (batch_head.to(tl.int64) * padded_length + rows)[:, None] * HEAD_DIM + columns[None, :]

    alive = real
    nearest = tl.minimum(rows, key_length - 1).to(tl.int64)
    if MASKED:
        mask = tl.load(mask_ptr + batch * mask_batch + head * mask_head + nearest * mask_column)
        if ADDITIVE:
            bias = mask.to(tl.float32)
            alive = real & ~(bias <= -1000.0)
            bias = tl.where(alive, bias * inverse_scale, hidden)
        else:
            alive = real & (mask != 0)
            bias = tl.where(alive, tl.zeros([TILE], tl.float32), hidden)
        if WRITE_BIAS:
            tl.store(bias_ptr + batch_head.to(tl.int64) * padded_length + rows, bias)

    key_at = key_ptr + batch * key_batch + head * key_head + nearest[:, None] * key_row + columns[None, :]
    value_at = value_ptr + batch * value_batch + head * value_head + nearest[:, None] * value_row + columns[None, :]
    key = tl.load(key_at).to(tl.float32)
    if MASKED:
        key = tl.where(alive[:, None], key, 0.0)
    tl.store(key_out_ptr + out, nvfp4_rows(key, TILE, HEAD_DIM).to(key_out_ptr.dtype.element_ty))
    value = tl.where(alive[:, None], tl.load(value_at).to(tl.float32), 0.0)
    if QUANTIZE_V:
        value = nvfp4_columns(value, TILE, HEAD_DIM)
    tl.store(value_out_ptr + out, value.to(value_out_ptr.dtype.element_ty))


@triton.jit
def quantize_rows(
    in_ptr, out_ptr, program, length, heads, in_batch, in_row, in_head, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr
):
    """ROWS tokens of one batch and head of a BSHD tensor, to contiguous BSHD."""
    blocks = tl.cdiv(length, ROWS)
    batch = (program // blocks // heads).to(tl.int64)
    head = (program // blocks % heads).to(tl.int64)
    rows = ((program % blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, HEAD_DIM)
    real = (rows < length)[:, None]
    at = in_ptr + batch * in_batch + head * in_head + rows[:, None] * in_row + columns[None, :]
    values = nvfp4_rows(tl.load(at, mask=real, other=0.0).to(tl.float32), ROWS, HEAD_DIM)
    out_at = out_ptr + (batch * length + rows[:, None]) * (heads * HEAD_DIM) + head * HEAD_DIM + columns[None, :]
    tl.store(out_at, values.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["query_programs", "query_length", "key_length", "heads"])
def quantize_query_key_kernel(
    query_ptr,
    key_ptr,
    query_out_ptr,
    key_out_ptr,
    query_programs,
    query_length,
    key_length,
    heads,
    query_batch,
    query_row,
    query_head,
    key_batch,
    key_row,
    key_head,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Q and K to NVFP4 and back along the head axis, for a dense attention: one launch for the two.

    The first ``query_programs`` programs do Q, the others K.
    """
    program = tl.program_id(0)
    if program < query_programs:
        quantize_rows(
            query_ptr, query_out_ptr, program, query_length, heads, query_batch, query_row, query_head, HEAD_DIM, ROWS
        )
    else:
        program -= query_programs
        quantize_rows(key_ptr, key_out_ptr, program, key_length, heads, key_batch, key_row, key_head, HEAD_DIM, ROWS)
