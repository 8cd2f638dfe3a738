"""The attention row `attn_qat_infer`: fastvideo-kernel's FP4 attention for sm_120, scheme `sage3`.

``attn_qat_infer.sageattn_blackwell(q, k, v, ..., single_level_p_quant, sm_scale)`` takes (B, H, S, D), quantizes and
pads for itself (to 128 tokens, which it masks), smooths neither Q nor K, and quantizes P once per 16 keys: what `sage3`
simulates, with tiles of 128 keys instead of 64. It ignores ``attn_mask`` without a word and sends head dimensions from
256 on to dense attention, so neither reaches it: the row serves 64 and 128, `native_attention.refuse` the rest.
"""

from __future__ import annotations

import torch

from qatpatch.kernels import native_attention as native
from qatpatch.kernels import ops


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scheme: str,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    train: bool,
) -> native.Result:
    """`reference_attention.forward` for inference without a mask; the statistics are NaN.

    Raises:
        ValueError, NotImplementedError: as `native_attention.refuse`.
    """
    native.refuse("attn_qat_infer", "sage3", scheme, attn_mask, train)
    if not q.numel() or not k.numel():
        return native.result(torch.zeros(q.shape, dtype=q.dtype, device=q.device))
    return native.result(fastvideo_attention(q, k, v, scale))


def _fastvideo_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    from attn_qat_infer import sageattn_blackwell

    with native.launching(q.device):
        operands = (native.heads_first(x) for x in (q, k, v))
        out = sageattn_blackwell(*operands, is_causal=False, single_level_p_quant=True, sm_scale=scale)
    return native.heads_last(out, q)


def _fastvideo_attention_fake(q, k, v, scale):
    return q.new_empty(q.shape)


# (B, S, H, D) each; the output contiguous, in q's dtype.
fastvideo_attention = ops._define(
    "fastvideo_attention(Tensor q, Tensor k, Tensor v, float scale) -> Tensor",
    _fastvideo_attention,
    _fastvideo_attention_fake,
)
