"""Triton: the attention forward, schemes `sage3` and `fa4`, training and inference.

One program computes ``ROWS`` queries of one batch and head; the maths is in `reference_attention`, the rounding of P in
`triton_attention_rounding`. Its Q is rounded here (no other program needs it), K and V come rounded from
`triton_attention_operands`. Keys are walked last tile first, 64 at a time, and the running maximum is updated once a
tile: ``ROWS``, warps and stages are free to choose, that is not.

Scores stay as the dot product left them, ``s``; ``step`` = softmax scale * log2(e) turns them into powers of two inside
the one fused multiply-add that an exponential needs. A mask's bias is divided by the softmax scale where it is read, so
that adding 0 changes no bit.

Layouts matter more than anything else here. A tile of scores is seen as (ROWS, 4 groups, 2, 4, 2), because a
tensor-core accumulator keeps the axes of 2 in one thread and the last axis of 4 in four neighbouring ones: group maxima
then take three in-thread steps and two shuffles, and the row sum ``l`` is kept as four partial sums, (ROWS, 1, 4), that
meet only once, at the end.

The rounded Q goes out to scratch memory and comes back (`RELOAD`): only what is loaded can stay in shared memory as the
left operand of a Hopper product; otherwise it is copied to registers again in every step.

Training adds the product of V with the unrounded P (``out_hp``), which the backward's ``delta`` is made of.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qatpatch.kernels.triton_attention_rounding import (
    HIDDEN_LOG2,
    LOG2_6,
    nvfp4_rows,
    p_scale,
    quantized_and_plain_p,
    quantized_p,
)

TILE = tl.constexpr(64)
# Values of MASK.
NO_MASK = tl.constexpr(0)
KEY_MASK = tl.constexpr(1)  # bias_ptr: FP32 per key, from quantize_key_value_kernel
FULL_MASK = tl.constexpr(2)  # mask_ptr: as the caller gave it


@triton.jit
def whole_tiles(length):
    """A padded length, written so that the compiler sees a multiple of 64 without compiling anew for each length."""
    return length // TILE * TILE


@triton.jit
def masked_by_pair(scores, mask_at, real, inverse_scale, hidden, ADDITIVE: tl.constexpr):
    """Scores with a mask that depends on query and key applied; ``real`` says which pairs exist."""
    if ADDITIVE:
        bias = tl.load(mask_at, mask=real, other=float("-inf")).to(tl.float32)
    else:
        bias = tl.load(mask_at, mask=real, other=0).to(tl.float32) * 10000.0 - 10000.0
    return tl.where(bias <= -1000.0, hidden, scores + bias * inverse_scale)


@triton.jit
def rows_of(operand, first, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, TMA: tl.constexpr):
    """``ROWS`` rows of a contiguous operand (rows, HEAD_DIM) whose rows are padded to whole blocks.

    ``operand`` is a tensor descriptor for TMA (sm_90 and newer), else a pointer; the loads need no bounds check.
    """
    if TMA:
        block = operand.load([first, 0])
    else:
        at = tl.arange(0, ROWS)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        block = tl.load(operand + first.to(tl.int64) * HEAD_DIM + at)
    return block


@triton.jit
def spread(x):
    """(rows, groups) as (rows, groups, 1, 1, 1)."""
    return tl.expand_dims(tl.expand_dims(tl.expand_dims(x, 2), 2), 4)


@triton.jit(do_not_specialize=["query_length", "query_padded", "key_length", "padded_length", "heads"])
def forward_kernel(
    query_ptr,
    key_rows,
    value_rows,
    bias_ptr,
    mask_ptr,
    out_ptr,
    out_hp_ptr,
    row_max_ptr,
    row_sum_ptr,
    query_out_ptr,
    query_length,
    query_padded,
    key_length,
    padded_length,
    heads,
    scale,
    inverse_scale,
    step,
    hidden,
    query_batch,
    query_row,
    query_head,
    mask_batch,
    mask_head,
    mask_row,
    mask_column,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MASK: tl.constexpr,
    ADDITIVE: tl.constexpr,
    TAIL: tl.constexpr,
    QUANTIZE_P: tl.constexpr,
    TRAIN: tl.constexpr,
    PACKED: tl.constexpr,
    RELOAD: tl.constexpr,
    TMA: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """See the module's docstring.

    ``key_rows`` and ``value_rows`` are (B * H * padded_length, HEAD_DIM) of type OPERAND, as `rows_of` wants them; as
    descriptors, in blocks of 64 rows. ``TAIL`` says that the last tile is not full (and no mask says so).
    """
    padded_length = whole_tiles(padded_length)
    blocks = tl.cdiv(query_length, ROWS)
    batch_head = tl.program_id(0) // blocks
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_DIM)
    real = rows < query_length
    query_at = query_ptr + batch * query_batch + head * query_head
    query_at = query_at + rows[:, None].to(tl.int64) * query_row + columns[None, :]
    query = tl.load(query_at, mask=real[:, None], other=0.0).to(tl.float32)
    query = nvfp4_rows(query, ROWS, HEAD_DIM).to(OPERAND)
    if RELOAD:
        scratch_at = query_out_ptr + (batch_head.to(tl.int64) * query_padded + rows[:, None]) * HEAD_DIM
        scratch_at = scratch_at + columns[None, :]
        tl.store(scratch_at, query)
        tl.debug_barrier()
        query = tl.load(scratch_at)

    peak = tl.full([ROWS], 1.0, tl.float32) * hidden
    total = tl.zeros([ROWS, 1, 4], tl.float32)
    sums = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    sums_hp = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    # Never 0, and the compiler must see it: a path around the loop would take the accumulators from the tensor cores.
    tiles = tl.maximum(padded_length // TILE, 1)
    for index in tl.range(0, tiles):
        start = (tiles - 1 - index) * TILE
        at = batch_head * padded_length + start
        scores = tl.dot(query, tl.trans(rows_of(key_rows, at, TILE, HEAD_DIM, TMA)))
        if MASK == KEY_MASK:
            bias = tl.load(bias_ptr + batch_head.to(tl.int64) * padded_length + start + tl.arange(0, TILE))
            scores = scores + bias[None, :]
        elif MASK == FULL_MASK:
            keys = start + tl.arange(0, TILE)
            mask_at = mask_ptr + batch * mask_batch + head * mask_head
            mask_at = mask_at + rows[:, None].to(tl.int64) * mask_row + keys[None, :].to(tl.int64) * mask_column
            exists = real[:, None] & (keys < key_length)[None, :]
            scores = masked_by_pair(scores, mask_at, exists, inverse_scale, hidden, ADDITIVE)
        elif TAIL:
            if start + TILE > key_length:
                scores = tl.where((start + tl.arange(0, TILE) < key_length)[None, :], scores, hidden)

        groups = tl.reshape(scores, [ROWS, 4, 2, 4, 2])
        amax = tl.max(tl.max(tl.max(groups, axis=4), axis=2), axis=2)
        new_peak = tl.maximum(peak, tl.max(amax, axis=1))
        rescale = tl.exp2((peak - new_peak) * step)
        peak = new_peak
        value = rows_of(value_rows, at, TILE, HEAD_DIM, TMA)
        if QUANTIZE_P:
            x = tl.exp2(tl.fma(groups, step, spread(tl.fma(amax, -step, LOG2_6))))
            sixth = tl.exp2(tl.fma(amax, step, tl.expand_dims(-(peak * step) - LOG2_6, 1)))
            p_sums = tl.sum(tl.sum(x, axis=4), axis=2) * tl.expand_dims(sixth, 2)
            if TRAIN:
                p, p_hp = quantized_and_plain_p(x, spread(p_scale(sixth)), spread(sixth), PACKED, OPERAND)
            else:
                p = quantized_p(x, spread(p_scale(sixth)), PACKED, OPERAND)
        else:
            x = tl.exp2(tl.fma(groups, step, spread(tl.zeros_like(amax) - tl.expand_dims(peak * step, 1))))
            p_sums = tl.sum(tl.sum(x, axis=4), axis=2)
            p = x.to(OPERAND)
        total = total * rescale[:, None, None] + tl.sum(p_sums, axis=1, keep_dims=True)
        sums = sums * rescale[:, None]
        sums = tl.dot(tl.reshape(p, [ROWS, TILE]), value, sums)
        if QUANTIZE_P and TRAIN:
            sums_hp = sums_hp * rescale[:, None]
            sums_hp = tl.dot(tl.reshape(p_hp, [ROWS, TILE]), value, sums_hp)

    row_sum = tl.sum(tl.sum(total, axis=2), axis=1)
    row_max = peak * scale
    if MASK != NO_MASK:
        # A row whose keys are all hidden has counted them at full weight.
        dead = peak * step <= 0.5 * HIDDEN_LOG2
        row_sum = tl.where(dead, 0.0, row_sum)
        row_max = tl.where(dead, float("-inf"), row_max)
    inverse = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    out = sums * inverse[:, None]
    if MASK != NO_MASK:
        out = tl.where(dead[:, None], 0.0, out)
    out_at = (batch * query_length + rows[:, None]) * (heads * HEAD_DIM) + head * HEAD_DIM + columns[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=real[:, None])
    if QUANTIZE_P and TRAIN:
        out_hp = sums_hp * inverse[:, None]
        if MASK != NO_MASK:
            out_hp = tl.where(dead[:, None], 0.0, out_hp)
        tl.store(out_hp_ptr + out_at, out_hp.to(out_hp_ptr.dtype.element_ty), mask=real[:, None])
    stats_at = batch_head.to(tl.int64) * query_length + rows
    tl.store(row_max_ptr + stats_at, row_max, mask=real)
    tl.store(row_sum_ptr + stats_at, row_sum, mask=real)
