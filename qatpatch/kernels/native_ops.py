"""`torch.library` operators over the native linear kernels, as `ops` has them over the emulated ones.

A native row's module exposes

- ``quantize``: what a layer stores, as the emulated rows do (linear block scales);
- ``quantize_activation``: the operand of a GEMM, with block scales in 128x4 tiles, shared by layers with one input;
- ``scaled_matmul``: the GEMM, with the global scales and the bias;
- ``alignment_reason``: why a layer's shape cannot be served, or None.

A weight's tiled scales are `layouts.tile_scales` of the stored ones. The fakes give exact shapes, dtypes and strides
(all contiguous); what is behind an operator, the look-up of a compiled kernel too, a compiler never sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from qatpatch import nvfp4
from qatpatch.autocast import without_autocast
from qatpatch.kernels import kernel_named, layouts, ops


def _quantize_activation(
    x: torch.Tensor, global_scale: torch.Tensor | None, rule: str, kernel: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return kernel_named(kernel).load().quantize_activation(x, global_scale=global_scale, rule=rule)


def _quantize_activation_fake(x, global_scale, rule, kernel):
    rows, columns = x.shape[0], nvfp4.padded_length(x.shape[1])
    return (
        x.new_empty((rows, columns // 2), dtype=torch.uint8),
        x.new_empty(layouts.tiled_shape(rows, columns // nvfp4.BLOCK_SIZE), dtype=torch.uint8),
        x.new_empty((), dtype=torch.float32),
    )


def _scaled_matmul(
    x: torch.Tensor,
    x_block_scale: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_block_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    kernel: str,
) -> torch.Tensor:
    module = kernel_named(kernel).load()
    with without_autocast(x.device):
        return module.scaled_matmul(
            x, x_block_scale, x_scale, weight, weight_block_scale, weight_scale, bias, out_dtype=out_dtype
        )


def _scaled_matmul_fake(x, x_block_scale, x_scale, weight, weight_block_scale, weight_scale, bias, out_dtype, kernel):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


# x (M, K), quantized: packed codes (M, ceil16(K)/2), E4M3 bytes in 128x4 tiles (M padded to 128, ceil(K/16) padded to
# 4), both uint8, and the global scale ().
quantize_activation = ops._define(
    "quantize_activation(Tensor x, Tensor? global_scale, str rule, str kernel) -> (Tensor, Tensor, Tensor)",
    _quantize_activation,
    _quantize_activation_fake,
)

# (x weight^T) * x_scale * weight_scale + bias, (M, N), of two such triples: FP32 accumulation, rounded to out_dtype.
scaled_matmul = ops._define(
    "scaled_matmul(Tensor x, Tensor x_block_scale, Tensor x_scale, Tensor weight, Tensor weight_block_scale, "
    "Tensor weight_scale, Tensor? bias, ScalarType out_dtype, str kernel) -> Tensor",
    _scaled_matmul,
    _scaled_matmul_fake,
)


class Calls(NamedTuple):
    """The functions above as a caller finds them, with the operators' signatures.

    ``direct``: they are what is behind the operators.
    """

    quantize_activation: Callable
    scaled_matmul: Callable
    direct: bool


_OPERATORS = Calls(quantize_activation, scaled_matmul, False)
_DIRECT = Calls(_quantize_activation, _scaled_matmul, True)


def calls(x: torch.Tensor, weight: torch.Tensor) -> Calls:
    """What to call for these operands: the operators, or what is behind them where `ops.is_plain` says so."""
    return _DIRECT if ops.is_plain(x, weight) else _OPERATORS
