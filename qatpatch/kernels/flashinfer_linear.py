"""The native linear kernel of flashinfer (0.6.8, 0.7): ``mm_fp4`` behind our own quantizer.

    y = round((Xc * Xs) (Wc * Ws)^T * alpha) [+ bias]        alpha = x_scale * weight_scale

flashinfer chooses among its CUTLASS, cuDNN and b12x kernels (``backend="auto"``). Operands are ours (`triton_tiled`),
since flashinfer's own quantizer is not stable to the bit: approximate reciprocals by default, other codes in version
0.6.8, and there uninitialised memory on GPUs before sm_100. What it is given: codes uint8 (M, K/2) and, transposed
view of a contiguous (N, K/2), (K/2, N); block scales in 128x4 tiles, the weight's transposed in the same way; alpha as
one float32 on the device.

**Roundings.** ``mm_fp4`` applies alpha to its FP32 accumulator and rounds once, to bfloat16 or float16: that is all
where the layer has no bias. It takes no bias, so a bias costs a second rounding (the sum is formed in FP32): up to
1.41 times the error of one where the bias is small. float32 output is refused, since it would hold 8 significant bits.
`triton_scaled` rounds once in each of these cases, so layers with a bias get it unless this kernel is asked for by name
(`Kernel.rounds_before_bias`). alpha is one FP32 number, so scales whose product leaves FP32's range are not served
right; no model's are near it.

**What has been seen.** The call fits the signatures of flashinfer 0.6.8 and 0.7.4 (the tests check the latter), and was
run with a stand-in for ``mm_fp4`` on the CPU that reads every argument by flashinfer's documented contract. On a GPU it
has never run: none with FP4 units was at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qatpatch.kernels.layouts import aligned, gemm_alpha
from qatpatch.nvfp4 import padded_length

# The strictest of the kernels that flashinfer may choose: CUTLASS checks both on sm_100, b12x K.
MULTIPLE = 32
OUT_DTYPES = (torch.bfloat16, torch.float16)


def alignment_reason(in_features: int, out_features: int) -> str | None:
    """Why a layer of this size cannot be served; None where it can."""
    wrong = []
    if padded_length(in_features) % MULTIPLE:
        wrong.append(f"in_features={in_features}")
    if out_features % MULTIPLE:
        wrong.append(f"out_features={out_features}")
    if not wrong:
        return None
    return f"needs multiples of {MULTIPLE}, and this layer has {' and '.join(wrong)}"


def quantize(x: Tensor, *, global_scale: Tensor | None, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, *linear* E4M3 scale bytes (both uint8) and the global scale of x (..., K): what a layer stores."""
    from qatpatch.kernels import triton_linear

    return triton_linear.quantize(x, global_scale=global_scale, rule=rule)


def quantize_activation(x: Tensor, *, global_scale: Tensor | None, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """`triton_tiled.quantize_activation`: packed codes, 128x4 tiled scales and the global scale of x (M, K)."""
    from qatpatch.kernels import triton_tiled

    return triton_tiled.quantize_activation(x, global_scale=global_scale, rule=rule)


def scaled_matmul(
    x: Tensor,
    x_block_scale: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_block_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """``(x weight^T) * x_scale * weight_scale``, rounded; ``+ bias``, rounded again. As `triton_scaled.scaled_matmul`.

    Raises:
        ValueError: for float32 output.
        ImportError: flashinfer is not installed, or does not import.
    """
    if out_dtype not in OUT_DTYPES:
        raise ValueError(
            f"flashinfer's FP4 GEMM writes bfloat16 or float16, and {out_dtype} was asked for; use the kernel "
            "triton_nvfp4, which writes float32 too, or run under autocast"
        )
    if not x.shape[0]:
        return x.new_empty((0, weight.shape[0]), dtype=out_dtype)
    from flashinfer import mm_fp4

    y = mm_fp4(
        aligned(x),
        aligned(weight).t(),
        x_block_scale,
        aligned(weight_block_scale).t(),
        alpha=gemm_alpha(x_scale, weight_scale),
        out_dtype=out_dtype,
        block_size=16,
        use_8x4_sf_layout=False,
        backend="auto",
        use_nvfp4=True,
    )
    return y if bias is None else y.add_(bias)
