"""`torch.library` ops over the linear kernels, so that a compiler sees one node each and never their insides.

Every op takes the name of its kernel row. Fakes give the exact shape, dtype and stride, so meta tensors work without
computing. Autocast is off inside: the callers choose every dtype.
"""

from __future__ import annotations

import torch

from qatpatch import nvfp4
from qatpatch.autocast import without_autocast
from qatpatch.kernels import kernel_named


def _operand_dtype(kernel: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if kernel_named(kernel).name == "reference_linear" else dtype


@torch.library.custom_op("qatpatch::operand", mutates_args=())
def operand(
    x: torch.Tensor, global_scale: torch.Tensor | None, rule: str, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., K) quantized to a contiguous GEMM operand, and the global scale () that remains to be applied."""
    return kernel_named(kernel).load().operand(x, global_scale=global_scale, rule=rule)


@operand.register_fake
def _(x, global_scale, rule, kernel):
    return (
        torch.empty(x.shape, dtype=_operand_dtype(kernel, x.dtype), device=x.device),
        torch.empty((), dtype=torch.float32, device=x.device),
    )


@torch.library.custom_op("qatpatch::packed_operand", mutates_args=())
def packed_operand(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    columns: int,
    dtype: torch.dtype,
    kernel: str,
) -> torch.Tensor:
    """The operand (..., columns) of packed storage: uint8 codes, uint8 E4M3 bytes, float32 global scale ()."""
    return kernel_named(kernel).load().packed_operand(packed, block_scale, global_scale, columns=columns, dtype=dtype)


@packed_operand.register_fake
def _(packed, block_scale, global_scale, columns, dtype, kernel):
    return torch.empty((*packed.shape[:-1], columns), dtype=_operand_dtype(kernel, dtype), device=packed.device)


@torch.library.custom_op("qatpatch::quantize", mutates_args=())
def quantize(
    x: torch.Tensor, global_scale: torch.Tensor | None, rule: str, kernel: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes (..., ceil16(K)/2), E4M3 scale bytes (..., ceil(K/16)), both uint8, and the global scale ()."""
    return kernel_named(kernel).load().quantize(x, global_scale=global_scale, rule=rule)


@quantize.register_fake
def _(x, global_scale, rule, kernel):
    columns = nvfp4.padded_length(x.shape[-1])
    return (
        torch.empty((*x.shape[:-1], columns // 2), dtype=torch.uint8, device=x.device),
        torch.empty((*x.shape[:-1], columns // nvfp4.BLOCK_SIZE), dtype=torch.uint8, device=x.device),
        torch.empty((), dtype=torch.float32, device=x.device),
    )


@torch.library.custom_op("qatpatch::matmul", mutates_args=())
def matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    kernel: str,
) -> torch.Tensor:
    """``(x weight^T) * scales + bias`` of operands (..., K) and (N, K), FP32 accumulation, rounded once to
    out_dtype.
    """
    with without_autocast(x.device):
        return kernel_named(kernel).load().matmul(x, x_scale, weight, weight_scale, bias, out_dtype=out_dtype)


@matmul.register_fake
def _(x, x_scale, weight, weight_scale, bias, out_dtype, kernel):
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype, device=x.device)
