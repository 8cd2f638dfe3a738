"""The attention row `flashinfer_attention`: flashinfer's FP4 attention for sm_120 and sm_121, scheme `sage3_smoothed`.

``nvfp4_attention_sm120_quantize_qkv`` subtracts the mean over all keys from K and the mean of each 128 queries from Q,
always, and ``nvfp4_attention_sm120_fwd`` adds back what that changes in the scores. No training here simulates these
numbers, so the row is bound only where it is asked for by name, and the receipt says ``simulated=no``.

Operands are (B, H, S, D), contiguous. The kernel pads to 128 tokens: padded keys are masked by ``unpadded_k_len``, and
the output stays padded until it is cut here.
"""

from __future__ import annotations

import torch

from qatpatch.kernels import SMOOTHED_SCHEME, ops
from qatpatch.kernels import native_attention as native


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
    native.refuse("flashinfer_attention", SMOOTHED_SCHEME, scheme, attn_mask, train)
    if not q.numel() or not k.numel():
        return native.result(torch.zeros(q.shape, dtype=q.dtype, device=q.device))
    return native.result(flashinfer_attention(q, k, v, scale))


def _flashinfer_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    from flashinfer import nvfp4_attention_sm120_fwd, nvfp4_attention_sm120_quantize_qkv

    with native.launching(q.device):
        operands = nvfp4_attention_sm120_quantize_qkv(*(native.heads_first(x) for x in (q, k, v)), per_block_mean=True)
        out = nvfp4_attention_sm120_fwd(
            *operands,
            sm_scale=scale,
            causal=False,
            per_block_mean=True,
            out_dtype=native.half_dtype(q.dtype),
            unpadded_k_len=k.shape[1],
        )
    return native.heads_last(out[0] if isinstance(out, tuple) else out, q)


def _flashinfer_attention_fake(q, k, v, scale):
    return q.new_empty(q.shape)


# (B, S, H, D) each; the output contiguous, in q's dtype.
flashinfer_attention = ops._define(
    "flashinfer_attention(Tensor q, Tensor k, Tensor v, float scale) -> Tensor",
    _flashinfer_attention,
    _flashinfer_attention_fake,
)
