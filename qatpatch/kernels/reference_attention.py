"""The QAT attention in plain torch, forward and backward: what every other attention kernel is compared with.

Forward, with ``Xq`` an operand after NVFP4 rounding, ``S_q x S_k`` matrices per batch and head::

    S = scale * Qq Kq^T + bias          P = exp(S - m)         l = sum P         O = (Pq Vq) / l

========  ======================================  ==========================================  =========================
scheme    Q, K                                    P                                           V
========  ======================================  ==========================================  =========================
sage3     NVFP4, global scale 1, 16 along         FP4 per 16 keys: ``e2m1(p / (amax/6)) *     NVFP4, global scale 1, 16
          head_dim                                e4m3(amax/6)``                              *tokens* per channel
fa4       as above                                as is                                       as is
========  ======================================  ==========================================  =========================

Keys come in tiles of 64 aligned at key 0, **last tile first**; ``m`` is the running row maximum, updated once a tile,
so what a tile's P is rounded against depends on that order. Kernels carry an accumulator and rescale it; here each tile
is multiplied by ``exp(m_tile - m_final)``, which is the same number. Backward, straight through the rounding, with
``P_n = exp(S - m_final) / l`` and ``Pq_n = quantize(exp(S - m_final)) / l`` (never ``quantize(P_n)``: at long sequences
its groups fall under the smallest E4M3 scale and dV vanishes)::

    dP = dO Vq^T          dS = P_n * (dP - rowsum(O_hp * dO))
    dV = Pq_n^T dO        dQ = scale * dS Kq        dK = scale * dS^T Qq

where ``O_hp = P_n Vq`` is kept by the forward. All arithmetic is FP32 (torch's FP32 matmul precision must be left at
``highest``); each result is rounded once to its dtype.

Masks: an invalid key (False, or a bias <= -1000) gets no weight and no gradient. A key that no query may see is taken
out of the group maxima of V, and its memory is never used: it may hold NaN. A row without a valid key gives 0.

What is determined to the bit: Qq, Kq and Vq; the order of keys; `None`, an all-True mask and an all-zero bias give the
same bits; `train` does not change `out`; invalid memory changes nothing. What is not: the order of sums in the matmuls
and in `l`, and the last bit of ``exp``, so that an element of P next to a rounding boundary may land on either side.

Deliberately not here: autograd and input validation (`qatpatch.attention`), dropout, grouped queries, smoothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qatpatch import nvfp4
from qatpatch.errors import nearest
from qatpatch.kernels import ATTENTION_SCHEMES

TILE = 64
INVALID_BIAS = -1000.0
# Elements of one temporary S_q x S_k block, 4 MiB in FP32: about ten are alive at a time.
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _KeyBlock:
    """One batch's heads ``heads``, with their keys and values rounded, zero where invalid and padded to whole tiles.

    ``rows`` are the query ranges to work through, ``mask`` is (1|h, 1|S_q, 1|S_k) or None,
    ``k`` is (h, S_pad, D) and ``v_t`` (h, D, S_pad), both float32.
    """

    batch: int
    heads: slice
    rows: list[slice]
    k: torch.Tensor
    v_t: torch.Tensor
    mask: torch.Tensor | None
    key_length: int


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scheme: str,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    train: bool,
    tile: int = TILE,
    last_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Attention output and softmax statistics.

    Args:
        q: (B, S_q, H, D) float32, bfloat16 or float16, any strides.
        k, v: (B, S_k, H, D) of the same dtype, any strides.
        scheme: ``"sage3"`` or ``"fa4"``.
        scale: softmax scale, applied in FP32 to ``Qq Kq^T``.
        attn_mask: boolean (True = attend) or additive, (S_q, S_k) or 4-D, broadcast from (B, H, S_q, S_k).
        train: also return ``out_hp``, which the backward needs.
        tile, last_first: the walk over the keys, for comparison only; every kernel uses the defaults.

    Returns:
        ``out`` (B, S_q, H, D) in q's dtype, contiguous; ``out_hp``, the same from the unrounded P (``out`` itself for
        fa4), None unless `train`; ``row_max`` and ``row_sum``, float32 (B, H, S_q): the final running maximum ``m`` and
        ``l = sum exp(S - m)`` of the unrounded P, with ``LSE = row_max + log(row_sum)``; -inf and 0 for a row without a
        valid key.
    """
    _check(scheme, tile)
    batch, query_length, heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    out_hp = (out if scheme == "fa4" else torch.zeros_like(out)) if train else None
    row_max = torch.full((batch, heads, query_length), -torch.inf, dtype=torch.float32, device=q.device)
    row_sum = torch.zeros_like(row_max)
    # Autocast stays active inside a custom op and would turn the matmuls into 16-bit ones.
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for block in _key_blocks(q, k, v, attn_mask, scheme, tile):
            for rows in block.rows:
                at = (block.batch, rows, block.heads)
                q_rows = _round(q[at].transpose(0, 1))
                scores = _scores(q_rows, block, rows, scale).unflatten(-1, (-1, tile))
                running, final = _running_max(scores, last_first)
                p = scores.sub_(_finite(running).unsqueeze(-1)).exp_()
                rescale = (running - _finite(final).unsqueeze(-1)).exp()
                total = (p.sum(-1) * rescale).sum(-1)
                stats = (block.batch, block.heads, rows)
                row_max[stats], row_sum[stats] = final, total
                if scheme == "sage3":
                    out[at] = _weighted_values(_round_p(p, rescale), block, total)
                    if not train:
                        continue
                p = p.mul_(rescale.unsqueeze(-1)).flatten(-2)
                (out if out_hp is None else out_hp)[at] = _weighted_values(p, block, total)
    return out, out_hp, row_max, row_sum


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_hp: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    *,
    scheme: str,
    scale: float,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `forward`'s ``out``, straight through the rounding.

    Args:
        d_out: (B, S_q, H, D), any strides.
        q, k, v, scheme, scale, attn_mask: as given to `forward`.
        out_hp, row_max, row_sum: as returned by ``forward(..., train=True)``.

    Returns:
        ``dq, dk, dv``, contiguous, in the shapes and dtypes of q, k and v; exactly 0 for a query without a valid key
        and for a key that no query may see.
    """
    _check(scheme, TILE)
    d_q, d_k, d_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for block in _key_blocks(q, k, v, attn_mask, scheme, TILE):
            sum_k, sum_v = torch.zeros_like(block.k), torch.zeros_like(block.k)
            for rows in block.rows:
                at, stats = (block.batch, rows, block.heads), (block.batch, block.heads, rows)
                maximum, total = row_max[stats], _nonzero(row_sum[stats]).unsqueeze(-1)
                # A row without a valid key takes no part, whatever its memory holds.
                dead = (row_sum[stats] == 0).unsqueeze(-1)
                q_rows = _round(q[at].transpose(0, 1)).masked_fill_(dead, 0.0)
                d_rows = d_out[at].transpose(0, 1).float().masked_fill(dead, 0.0)
                delta = (out_hp[at].transpose(0, 1).float() * d_rows).sum(-1, keepdim=True)
                p = _scores(q_rows, block, rows, scale).sub_(_finite(maximum).unsqueeze(-1)).exp_()
                if scheme == "sage3":
                    weights = _round_p(p, 1.0 / total)
                    p.div_(total)
                else:
                    weights = p.div_(total)
                sum_v.baddbmm_(weights.mT, d_rows)
                d_s = (d_rows @ block.v_t).sub_(delta).mul_(p)
                sum_k.baddbmm_(d_s.mT, q_rows)
                d_q[at] = (d_s @ block.k).mul_(scale).masked_fill_(dead, 0.0).transpose(0, 1)
            d_k[block.batch, :, block.heads] = sum_k[:, : block.key_length].mul_(scale).transpose(0, 1)
            d_v[block.batch, :, block.heads] = sum_v[:, : block.key_length].transpose(0, 1)
    return d_q, d_k, d_v


def mask_4d(attn_mask: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """`attn_mask` as a 4-D view that broadcasts from ``shape`` = (B, H, S_q, S_k), not expanded.

    Raises:
        TypeError: the mask is neither boolean nor floating point.
        ValueError: it is neither 2-D nor 4-D, or does not broadcast.
    """
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(
            f"attn_mask must be boolean (True = attend) or an additive floating-point bias, got {attn_mask.dtype}; "
            "a 0/1 mask becomes boolean with mask.bool()"
        )
    mask = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask
    if mask.dim() != 4 or any(found not in (1, wanted) for found, wanted in zip(mask.shape, shape, strict=True)):
        raise ValueError(
            f"attn_mask of shape {tuple(attn_mask.shape)} does not broadcast from (B, H, S_q, S_k) = {tuple(shape)}; "
            "give a 4-D mask, or a 2-D (S_q, S_k) one; a mask over the keys of each sample is mask[:, None, None, :]"
        )
    return mask


def _key_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None, scheme: str, multiple: int
) -> Iterator[_KeyBlock]:
    """Work split so that a temporary holds about `_CHUNK_ELEMENTS`; nothing for empty input. Only shapes decide."""
    batch, query_length, heads, dim = q.shape
    key_length = k.shape[1]
    if not q.numel() or not k.numel():
        return
    mask = None if attn_mask is None else mask_4d(attn_mask, (batch, heads, query_length, key_length))
    valid = None if mask is None else _valid_for_any_query(mask, key_length)
    padded = -(-key_length // multiple) * multiple
    row_step = min(query_length, max(1, _CHUNK_ELEMENTS // padded))
    head_step = max(1, _CHUNK_ELEMENTS // (padded * max(query_length, dim)))
    rows = [slice(start, min(start + row_step, query_length)) for start in range(0, query_length, row_step)]
    for b in range(batch):
        for start in range(0, heads, head_step):
            h = slice(start, min(start + head_step, heads))
            k_block, v_block = k[b, :, h].transpose(0, 1), v[b, :, h].transpose(0, 1)
            if valid is not None:
                alive = _of(valid, b, h).unsqueeze(-1)
                k_block, v_block = k_block.where(alive, 0.0), v_block.where(alive, 0.0)
            v_t = _round(v_block.mT) if scheme == "sage3" else v_block.mT.float()
            yield _KeyBlock(
                batch=b,
                heads=h,
                rows=rows,
                k=torch.nn.functional.pad(_round(k_block), (0, 0, 0, padded - key_length)),
                v_t=torch.nn.functional.pad(v_t, (0, padded - key_length)),
                mask=None if mask is None else _of(mask, b, h),
                key_length=key_length,
            )


def _valid_for_any_query(mask: torch.Tensor, key_length: int) -> torch.Tensor:
    """Boolean (1|B, 1|H, S_k) of a 4-D mask."""
    valid = mask.any(2) if mask.dtype == torch.bool else ~(mask.amax(2) <= INVALID_BIAS)
    return valid.expand(-1, -1, key_length)


def _of(x: torch.Tensor, batch: int, heads: slice) -> torch.Tensor:
    """Batch and heads of a tensor whose first two axes may be broadcast."""
    x = x[batch if x.shape[0] > 1 else 0]
    return x[heads] if x.shape[0] > 1 else x


def _scores(q_rows: torch.Tensor, block: _KeyBlock, rows: slice, scale: float) -> torch.Tensor:
    """``scale * Qq Kq^T + bias`` as float32 (h, rows, S_pad), -inf at invalid keys and in the padding."""
    scores = (q_rows @ block.k.mT).mul_(scale)
    scores[..., block.key_length :] = -torch.inf
    if block.mask is not None:
        mask = block.mask[:, rows] if block.mask.shape[1] > 1 else block.mask
        real = scores[..., : block.key_length]
        if mask.dtype == torch.bool:
            real.masked_fill_(~mask, -torch.inf)
        else:
            real.add_(mask.float()).masked_fill_(mask <= INVALID_BIAS, -torch.inf)
    return scores


def _running_max(scores: torch.Tensor, last_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Row maximum of ``scores`` (h, rows, tiles, tile) as the walk has it at each tile, and after the whole walk."""
    tiles = scores.amax(-1)
    if last_first:
        running = tiles.flip(-1).cummax(-1).values.flip(-1)
        return running, running[..., 0]
    running = tiles.cummax(-1).values
    return running, running[..., -1]


def _round_p(p: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``quantize(p) * factor``: P rounded to FP4 in groups of 16 keys, each element divided by the unrounded amax / 6.

    ``p`` is (..., keys) with the keys in whole groups; `factor` broadcasts from the shape of its groups' maxima without
    keepdim, (h, rows, tiles) for tiled p or (h, rows, 1). The result is flattened to (h, rows, S_pad).
    """
    groups = p.unflatten(-1, (-1, nvfp4.BLOCK_SIZE))
    sixth = groups.amax(-1, keepdim=True).div_(nvfp4.E2M1_MAX)
    scale = nvfp4.round_e4m3(sixth).float()
    # A scale of 0 makes its group 0; dividing that by 1 keeps 0 / 0 out, while NaN stays visible.
    codes = nvfp4.round_e2m1(groups / torch.where(scale == 0, 1.0, sixth))
    factor = factor.reshape(*factor.shape, *[1] * (scale.dim() - factor.dim()))
    return codes.mul_(scale).mul_(factor).flatten(2)


def _weighted_values(weights: torch.Tensor, block: _KeyBlock, total: torch.Tensor) -> torch.Tensor:
    """``weights Vq / total`` as (rows, h, D), 0 where total is 0."""
    sums = (weights @ block.v_t.mT).div_(_nonzero(total).unsqueeze(-1))
    return sums.masked_fill_((total == 0).unsqueeze(-1), 0.0).transpose(0, 1)


def _round(x: torch.Tensor) -> torch.Tensor:
    """NVFP4 there and back with global scale 1, in groups of 16 along the last axis, as float32."""
    return nvfp4.round_to_nvfp4(x, torch.ones((), dtype=torch.float32, device=x.device), dtype=torch.float32)


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """0 in place of -inf, so that ``exp(-inf - maximum)`` is 0 where no key has been valid yet."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def _nonzero(total: torch.Tensor) -> torch.Tensor:
    return torch.where(total == 0, 1.0, total)


def _check(scheme: str, tile: int) -> None:
    if scheme not in ATTENTION_SCHEMES:
        raise ValueError(f"scheme={scheme!r} is not computed here{nearest(scheme, ATTENTION_SCHEMES)}")
    if tile <= 0 or tile % nvfp4.BLOCK_SIZE:
        raise ValueError(f"tile={tile} must be a positive multiple of {nvfp4.BLOCK_SIZE}, the group size of P")
