"""The attention row `fa4_fp4`: the FP4 fork of FlashAttention-4 for sm_100 and sm_103, scheme `fa4`.

Q and K go in as NVFP4 with global scale 1, quantized by our own kernels; V, P and the output are bfloat16. The fork's
``flash_attn.cute.interface.flash_attn_func(q, k, v, softmax_scale, ..., mSFQ, mSFK)`` takes

==========  ========================================================================================================
q, k        float4_e2m1fn_x2 (B, S, H, D / 2): storage of whole tiles of 128 tokens, cut to S, which the kernel masks
mSFQ, mSFK  uint8 (32, 4, tiles, 4, D / 64, H, B), the strided view that `layouts.attention_scales` gives
v, out      bfloat16 (B, S, H, D)
==========  ========================================================================================================

The packed operands come from a contiguous copy, whatever the strides of q and k. float16 and float32 values of V are
rounded to bfloat16: the scheme's type.
"""

from __future__ import annotations

import torch

from qatpatch.kernels import layouts, ops, reference_nvfp4
from qatpatch.kernels import native_attention as native

_TILE = layouts.TILE_ROWS


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
    native.refuse("fa4_fp4", "fa4", scheme, attn_mask, train)
    if not q.numel() or not k.numel():
        return native.result(torch.zeros(q.shape, dtype=q.dtype, device=q.device))
    (q_packed, q_scale), (k_packed, k_scale) = fa4_operand(q), fa4_operand(k)
    out = fa4_attention(q_packed, k_packed, v, q_scale, k_scale, q.shape[1], scale)
    return native.result(out.to(q.dtype))


def _fa4_operand(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    one = torch.ones((), dtype=torch.float32, device=x.device)
    packed, scales, _ = _quantizer(x.device).quantize(x.contiguous(), global_scale=one, rule="pow2")
    padding = -x.shape[1] % _TILE
    if padding:
        packed = torch.nn.functional.pad(packed, (0, 0, 0, 0, 0, padding))
    return packed, layouts.attention_scales(scales)


def _fa4_operand_fake(x):
    batch, length, heads, dim = x.shape
    tiles = -(-length // _TILE)
    scales = x.new_empty((batch, heads, tiles, dim // 64, 32, 4, 4), dtype=torch.uint8).permute(4, 5, 2, 6, 3, 1, 0)
    return x.new_empty((batch, tiles * _TILE, heads, dim // 2), dtype=torch.uint8), scales


def _quantizer(device: torch.device):
    """The row whose quantizer serves the device; both give the same bytes."""
    if device.type == "cpu":
        return reference_nvfp4
    from qatpatch.kernels import triton_linear

    return triton_linear


def _fa4_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    queries: int,
    scale: float,
) -> torch.Tensor:
    from flash_attn.cute.interface import flash_attn_func

    # In this order: the FP4 type cannot be sliced.
    q, k = (x[:, :length].view(torch.float4_e2m1fn_x2) for x, length in ((q, queries), (k, v.shape[1])))
    with native.launching(v.device):
        out = flash_attn_func(
            q,
            k,
            v.to(torch.bfloat16).contiguous(),
            softmax_scale=scale,
            causal=False,
            mSFQ=q_scale,
            mSFK=k_scale,
        )
    return (out[0] if isinstance(out, tuple) else out).contiguous()


def _fa4_attention_fake(q, k, v, q_scale, k_scale, queries, scale):
    return v.new_empty((q.shape[0], queries, q.shape[2], v.shape[3]), dtype=torch.bfloat16)


# x (B, S, H, D) as the fork takes Q and K: packed codes (B, S padded to 128, H, D / 2), contiguous, and the strided
# view of their block scales.
fa4_operand = ops._define("fa4_operand(Tensor x) -> (Tensor, Tensor)", _fa4_operand, _fa4_operand_fake)

# Two such operands and v (B, S_k, H, D): the first `queries` rows of the output, bfloat16, contiguous.
fa4_attention = ops._define(
    "fa4_attention(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, SymInt queries, float scale) "
    "-> Tensor",
    _fa4_attention,
    _fa4_attention_fake,
)
