"""The linear kernel row for CUDA GPUs from sm_80 on: Triton quantizers around a 16-bit tensor-core GEMM.

With power-of-two scales bfloat16 operands (of float32 layers too) hold their global scale exactly, so the GEMM is
cuBLAS with its own bias epilogue. Other scales, and float16 (whose range is too small to fold them in), go onto the
FP32 accumulator of a Triton GEMM. A weight-only layer in float32 runs a float32 GEMM over the dequantized weight.
"""

from __future__ import annotations

import torch

from qatpatch.kernels import kernel_named
from qatpatch.kernels import triton_nvfp4_launch as launch

_ROW = "triton_linear"
_WORTH_KEEPING = 1 << 20  # elements


def operand(x: torch.Tensor, *, global_scale: torch.Tensor | None, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., K) quantized and dense again, 16-bit, and its scale (), folded in where `Kernel.folded` says so."""
    row = kernel_named(_ROW)
    folded, dtype = row.folded(rule, x.dtype), row.operand_dtype(x.dtype)
    if global_scale is None:
        if folded:
            return launch.operand_pow2(x, dtype)
        scale = launch.global_scale(x, launch.rule_number(rule))
    else:
        scale = global_scale.clone()
    return launch.operand(x, scale, dtype, folded), scale


def operands(
    x: torch.Tensor, weight: torch.Tensor, *, x_scale: torch.Tensor | None, rule: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`operand` of both sides of a GEMM, in shared launches where that can be."""
    row = kernel_named(_ROW)
    if x_scale is None and row.folded(rule, x.dtype):
        return launch.operand_pair_pow2(x, weight, row.operand_dtype(x.dtype))
    return *operand(x, global_scale=x_scale, rule=rule), *operand(weight, global_scale=None, rule=rule)


class KeptOperand:
    """The operand of a weight (N, K), and fingerprints of the weight that it was made of. See `qatpatch.reuse`."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self._buffers = launch.kept_buffers(weight, dtype)
        self.nbytes = sum(t.numel() * t.element_size() for t in self._buffers)

    def operand(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`operand` of ``weight``; only tiles that changed are quantized and written."""
        if not launch.is_keepable(weight):  # it became a view of something else
            return launch.operand_pow2(weight, self._buffers.operand.dtype)
        return launch.kept_operand_pow2(weight, self._buffers)


def keep(weight: torch.Tensor, rule: str) -> KeptOperand | None:
    """The operand of ``weight`` (N, K) for as long as it does not change; None where that would save nothing.

    That is where the operand does not hold its global scale, and for small weights, whose quantization takes no longer
    than its launches.
    """
    row = kernel_named(_ROW)
    if not row.folded(rule, weight.dtype) or weight.numel() < _WORTH_KEEPING or not launch.is_keepable(weight):
        return None
    return KeptOperand(weight, row.operand_dtype(weight.dtype))


def packed_operand(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    columns: int,
    dtype: torch.dtype,
    rule: str,
) -> torch.Tensor:
    """The same operand from packed storage."""
    row = kernel_named(_ROW)
    folded = row.folded(rule, dtype)
    return launch.dequantize(packed, block_scale, global_scale, columns, row.operand_dtype(dtype), folded)


def quantize(
    x: torch.Tensor, *, global_scale: torch.Tensor | None, rule: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes, E4M3 scale bytes (both uint8) and the global scale of x (..., K)."""
    scale = launch.global_scale(x, launch.rule_number(rule)) if global_scale is None else global_scale.clone()
    packed, block_scale = launch.quantize(x, scale)
    return packed, block_scale, scale


def matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out_dtype: torch.dtype,
    rule: str,
) -> torch.Tensor:
    """``(x weight^T) * scales + bias`` of operands (..., K) and (N, K), rounded once to ``out_dtype``.

    ``x_scale`` is None for a weight-only layer's input.
    """
    folded = kernel_named(_ROW).folded(rule, x.dtype)
    if x.dtype is torch.float32:
        dense = weight.float() if folded else weight.float() * weight_scale
        return torch.nn.functional.linear(x, dense, bias).to(out_dtype)
    if folded and out_dtype is x.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    if folded or x_scale is None:
        x_scale = torch.ones((), dtype=torch.float32, device=x.device)
    return launch.scaled_matmul(x, weight, x_scale, x_scale if folded else weight_scale, bias, out_dtype)
