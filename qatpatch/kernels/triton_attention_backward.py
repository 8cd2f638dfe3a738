"""Triton: the attention backward, straight through the rounding, in two kernels without atomics.

With ``P = exp(S - row_max)``, not normalised, and everything that a row's 1 / l touches moved into the operands::

    dO' = dO / l        delta' = rowsum(O_hp * dO')
    dV  = quantize(P)^T dO'       dS = P * (dO' Vq^T - delta')
    dQ  = scale * dS Kq           dK = scale * dS^T Qq

`query_gradient_kernel` runs first, a block of queries a program: it rounds its Q, forms dO', delta' and ``shift`` =
-row_max in powers of two (less log2 6 for `sage3`, as the other kernel wants it), leaves all four behind for that
kernel ((B * H, padded queries)), and walks the keys for dQ. `key_value_gradient_kernel` takes a block of keys a program
and walks the queries. Each recomputes S; a sum over both in one kernel would need atomics, whose order changes from run
to run.

Operands are BF16 for every input type: its range holds dO / l and dS, and the rounded Q, K, V and P are exact in it.

In the second kernel scores are transposed, (keys, queries), so that P^T and dS^T leave the accumulator as the left
operand of the next product. Groups of 16 keys are then rows, which an accumulator spreads over eight threads, two each:
scores are seen as (groups, 2, 8, queries).

A query without a valid key has row_sum 0: its q and d_out are not used, and its shift is so low that P is 0. So is one
past the last query.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qatpatch.kernels.triton_attention_forward import FULL_MASK, KEY_MASK, masked_by_pair, rows_of, whole_tiles
from qatpatch.kernels.triton_attention_rounding import HIDDEN_LOG2, LOG2_6, nvfp4_rows, p_scale, quantized_p_bf16

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["query_length", "query_padded", "key_length", "padded_length", "heads"])
def query_gradient_kernel(
    query_ptr,
    d_out_ptr,
    out_hp_ptr,
    key_rows,
    value_rows,
    bias_ptr,
    mask_ptr,
    row_max_ptr,
    row_sum_ptr,
    d_query_ptr,
    query_out_ptr,
    d_out_scaled_ptr,
    shift_ptr,
    delta_ptr,
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
    d_out_batch,
    d_out_row,
    d_out_head,
    mask_batch,
    mask_head,
    mask_row,
    mask_column,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,
    ADDITIVE: tl.constexpr,
    TAIL: tl.constexpr,
    QUANTIZE_P: tl.constexpr,
    RELOAD: tl.constexpr,
    TMA: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """dQ of ``ROWS`` queries, and the operands of `key_value_gradient_kernel` for them.

    ``key_rows`` and ``value_rows`` are (B * H * padded_length, HEAD_DIM) in blocks of KEYS rows (see `rows_of`);
    ``out_hp`` and ``d_query`` are contiguous BSHD; ``row_max`` and ``row_sum`` (B * H, query_length).
    """
    padded_length = whole_tiles(padded_length)
    blocks = query_padded // ROWS
    batch_head = tl.program_id(0) // blocks
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    rows = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_DIM)
    real = rows < query_length

    stats_at = batch_head.to(tl.int64) * query_length + rows
    row_sum = tl.load(row_sum_ptr + stats_at, mask=real, other=0.0)
    alive = row_sum != 0.0
    inverse = 1.0 / tl.where(alive, row_sum, 1.0)
    row_max = tl.load(row_max_ptr + stats_at, mask=real, other=0.0)
    shift = tl.where(alive, -row_max * LOG2_E, 2.0 * HIDDEN_LOG2)

    query_at = query_ptr + batch * query_batch + head * query_head
    query_at = query_at + rows[:, None].to(tl.int64) * query_row + columns[None, :]
    query = tl.load(query_at, mask=alive[:, None], other=0.0).to(tl.float32)
    query = nvfp4_rows(query, ROWS, HEAD_DIM).to(OPERAND)
    d_out_at = d_out_ptr + batch * d_out_batch + head * d_out_head
    d_out_at = d_out_at + rows[:, None].to(tl.int64) * d_out_row + columns[None, :]
    d_out = tl.load(d_out_at, mask=alive[:, None], other=0.0).to(tl.float32)
    d_out = (d_out * inverse[:, None]).to(OPERAND)
    out_at = (batch * query_length + rows[:, None]) * (heads * HEAD_DIM) + head * HEAD_DIM + columns[None, :]
    out_hp = tl.load(out_hp_ptr + out_at, mask=alive[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(out_hp * d_out.to(tl.float32), axis=1)

    padded_at = batch_head.to(tl.int64) * query_padded + rows
    operand_at = padded_at[:, None] * HEAD_DIM + columns[None, :]
    tl.store(query_out_ptr + operand_at, query)
    tl.store(d_out_scaled_ptr + operand_at, d_out)
    if RELOAD:
        tl.debug_barrier()
        query = tl.load(query_out_ptr + operand_at)
        d_out = tl.load(d_out_scaled_ptr + operand_at)
    tl.store(shift_ptr + padded_at, shift - LOG2_6 if QUANTIZE_P else shift)
    tl.store(delta_ptr + padded_at, delta)

    sums = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    # Never 0, and the compiler must see it: a path around the loop would take the accumulator from the tensor cores.
    steps = tl.maximum(tl.cdiv(key_length, KEYS), 1)
    for index in tl.range(0, steps):
        start = index * KEYS
        at = batch_head * padded_length + start
        key = rows_of(key_rows, at, KEYS, HEAD_DIM, TMA)
        value = rows_of(value_rows, at, KEYS, HEAD_DIM, TMA)
        scores = tl.dot(query, tl.trans(key))
        d_p = tl.dot(d_out, tl.trans(value))
        if MASK == KEY_MASK:
            bias = tl.load(bias_ptr + batch_head.to(tl.int64) * padded_length + start + tl.arange(0, KEYS))
            scores = scores + bias[None, :]
        elif MASK == FULL_MASK:
            keys = start + tl.arange(0, KEYS)
            mask_at = mask_ptr + batch * mask_batch + head * mask_head
            mask_at = mask_at + rows[:, None].to(tl.int64) * mask_row + keys[None, :].to(tl.int64) * mask_column
            exists = real[:, None] & (keys < key_length)[None, :]
            scores = masked_by_pair(scores, mask_at, exists, inverse_scale, hidden, ADDITIVE)
        elif TAIL:
            if start + KEYS > key_length:
                scores = tl.where((start + tl.arange(0, KEYS) < key_length)[None, :], scores, hidden)
        p = tl.exp2(tl.fma(scores, step, shift[:, None]))
        d_scores = p * (d_p - delta[:, None])
        sums = tl.dot(d_scores.to(OPERAND), key, sums)
    tl.store(d_query_ptr + out_at, (sums * scale).to(d_query_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["query_length", "query_padded", "key_length", "padded_length", "heads"])
def key_value_gradient_kernel(
    d_key_ptr,
    d_value_ptr,
    query_rows,
    d_out_rows,
    key_rows,
    value_rows,
    bias_ptr,
    mask_ptr,
    shift_ptr,
    delta_ptr,
    query_length,
    query_padded,
    key_length,
    padded_length,
    heads,
    scale,
    inverse_scale,
    step,
    hidden,
    mask_batch,
    mask_head,
    mask_row,
    mask_column,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,
    ADDITIVE: tl.constexpr,
    QUANTIZE_P: tl.constexpr,
    PACKED: tl.constexpr,
    EARLY: tl.constexpr,
    TMA: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """dK and dV of ``KEYS`` keys, contiguous BSHD.

    ``query_rows`` and ``d_out_rows`` are (B * H * query_padded, HEAD_DIM) in blocks of ROWS rows, ``key_rows`` and
    ``value_rows`` (B * H * padded_length, HEAD_DIM) in blocks of KEYS rows. Needs no mask for the rows past the last
    key, which repeat it (see `triton_attention_operands`).
    """
    padded_length = whole_tiles(padded_length)
    blocks = tl.cdiv(key_length, KEYS)
    batch_head = tl.program_id(0) // blocks
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    first = (tl.program_id(0) % blocks) * KEYS
    keys = first + tl.arange(0, KEYS)
    columns = tl.arange(0, HEAD_DIM)
    key = rows_of(key_rows, batch_head * padded_length + first, KEYS, HEAD_DIM, TMA)
    value = rows_of(value_rows, batch_head * padded_length + first, KEYS, HEAD_DIM, TMA)
    if MASK == KEY_MASK:
        bias = tl.load(bias_ptr + batch_head.to(tl.int64) * padded_length + keys)

    # Never 0, as above.
    steps = tl.maximum(tl.cdiv(query_length, ROWS), 1)
    sums_key = tl.zeros([KEYS, HEAD_DIM], tl.float32)
    sums_value = tl.zeros([KEYS, HEAD_DIM], tl.float32)
    stats_at = batch_head.to(tl.int64) * query_padded + tl.arange(0, ROWS)
    for index in tl.range(0, steps):
        start = index * ROWS
        at = batch_head * query_padded + start
        query = rows_of(query_rows, at, ROWS, HEAD_DIM, TMA)
        d_out = rows_of(d_out_rows, at, ROWS, HEAD_DIM, TMA)
        shift = tl.load(shift_ptr + stats_at + start)
        delta = tl.load(delta_ptr + stats_at + start)
        if EARLY:
            d_p = tl.dot(value, tl.trans(d_out))
        scores = tl.dot(key, tl.trans(query))
        if MASK == KEY_MASK:
            scores = scores + bias[:, None]
        elif MASK == FULL_MASK:
            rows = start + tl.arange(0, ROWS)
            mask_at = mask_ptr + batch * mask_batch + head * mask_head
            mask_at = mask_at + rows[None, :].to(tl.int64) * mask_row + keys[:, None].to(tl.int64) * mask_column
            exists = (keys < key_length)[:, None] & (rows < query_length)[None, :]
            scores = masked_by_pair(scores, mask_at, exists, inverse_scale, hidden, ADDITIVE)
        if QUANTIZE_P:
            groups = tl.reshape(scores, [KEYS // 16, 2, 8, ROWS])
            amax = tl.max(tl.max(groups, axis=1), axis=1)
            x = tl.exp2(tl.fma(groups, step, tl.expand_dims(tl.expand_dims(tl.fma(amax, -step, LOG2_6), 1), 1)))
            sixth = tl.exp2(tl.fma(amax, step, shift[None, :]))
            p_scales = tl.expand_dims(tl.expand_dims(p_scale(sixth), 1), 1)
            weights = quantized_p_bf16(x, p_scales, PACKED, OPERAND)
            weights = tl.reshape(weights, [KEYS, ROWS])
            p = tl.reshape(x * tl.expand_dims(tl.expand_dims(sixth, 1), 1), [KEYS, ROWS])
        else:
            p = tl.exp2(tl.fma(scores, step, shift[None, :]))
            weights = p.to(OPERAND)
        sums_value = tl.dot(weights, d_out, sums_value)
        if not EARLY:
            d_p = tl.dot(value, tl.trans(d_out))
        d_scores = p * (d_p - delta[None, :])
        sums_key = tl.dot(d_scores.to(OPERAND), query, sums_key)

    real = (keys < key_length)[:, None]
    out_at = (batch * key_length + keys[:, None]) * (heads * HEAD_DIM) + head * HEAD_DIM + columns[None, :]
    tl.store(d_key_ptr + out_at, (sums_key * scale).to(d_key_ptr.dtype.element_ty), mask=real)
    tl.store(d_value_ptr + out_at, sums_value.to(d_value_ptr.dtype.element_ty), mask=real)
