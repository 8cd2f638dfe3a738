"""Stand-ins on the CPU for what only FP4 tensor cores run, with the contracts, shapes and strides of production.

This module is one native linear kernel row's (`NATIVE_ROW`). `mm_fp4` takes the place of flashinfer's and refuses what
breaks that function's documented contract. Products are formed in float64 from the format's value tables.
"""

from __future__ import annotations

import numpy as np
import nvfp4_oracle as oracle
import torch

from qatpatch.kernels import Kernel, layouts, reference_nvfp4

quantize = reference_nvfp4.quantize

NATIVE_ROW = Kernel(
    name="native_standin",
    op="linear",
    stages=("deploy",),
    schemes=("nvfp4",),
    module="native_standin",
    native=True,
    device_types=("cpu",),
    weight_only=False,
)
FLASHINFER_ROW = Kernel(
    name="flashinfer_standin",
    op="linear",
    stages=("deploy",),
    schemes=("nvfp4",),
    module="qatpatch.kernels.flashinfer_linear",
    native=True,
    device_types=("cpu",),
    multiples=(32, 32),
    weight_only=False,
    out_dtypes=(torch.bfloat16, torch.float16),
    rounds_before_bias=True,
)


def alignment_reason(in_features: int, out_features: int) -> str | None:
    return None


def quantize_activation(x, *, global_scale, rule):
    packed, block_scale, scale = quantize(x, global_scale=global_scale, rule=rule)
    return packed, layouts.tile_scales(block_scale), scale


def scaled_matmul(x, x_block_scale, x_scale, weight, weight_block_scale, weight_scale, bias, *, out_dtype):
    y = product(x, x_block_scale, weight, weight_block_scale) * float(x_scale) * float(weight_scale)
    if bias is not None:
        y = y + bias.double()
    return y.float().to(out_dtype)


def product(x, x_tiled, weight, weight_tiled) -> torch.Tensor:
    """float64 (M, N) of codes and 128x4 tiled scale bytes, global scales left out."""
    return torch.from_numpy(decode(x, x_tiled) @ decode(weight, weight_tiled).T)


def decode(packed: torch.Tensor, tiled: torch.Tensor) -> np.ndarray:
    """float64 code * block scale of codes (R, K / 2), low nibble first, and their scales in tiles."""
    packed, tiled = packed.numpy(), tiled.numpy()
    rows, columns = packed.shape[0], packed.shape[1] * 2
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(rows, columns)
    r, c = np.meshgrid(np.arange(rows), np.arange(columns // 16), indexing="ij")
    per_row = tiled.shape[1] // 4
    scales = tiled.reshape(-1)[(r // 128 * per_row + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]
    values = np.concatenate([oracle.E2M1, -oracle.E2M1])[codes]
    return values * np.repeat(np.append(oracle.E4M3, np.nan)[scales], 16, axis=1)


def mm_fp4(
    a, b, a_descale, b_descale, alpha=None, out_dtype=torch.bfloat16, out=None, block_size=16,
    use_8x4_sf_layout=False, backend="auto", use_nvfp4=True, enable_pdl=True,
):  # fmt: skip
    """flashinfer 0.6.8's: a (M, K/2), b a contiguous (N, K/2) transposed, scales likewise, in 128x4 tiles."""
    rows, columns, depth = a.shape[0], b.shape[1], 2 * a.shape[1]
    checks = {
        "operands": (a.dtype, b.dtype) == (torch.uint8, torch.uint8) and a.shape[1] == b.shape[0],
        "a is contiguous": a.is_contiguous(),
        "b is a transposed view": b.t().is_contiguous(),
        "scales of a": a_descale.shape == layouts.tiled_shape(rows, depth // 16) and a_descale.is_contiguous(),
        "scales of b": b_descale.t().shape == layouts.tiled_shape(columns, depth // 16),
        "scales of b transposed": b_descale.t().is_contiguous(),
        "bytes": (a_descale.dtype, b_descale.dtype) == (torch.uint8, torch.uint8),
        "alpha": alpha is not None and alpha.shape == (1,) and alpha.dtype is torch.float32,
        "alignment": depth % 32 == 0 and columns % 32 == 0,
        "addresses": not any(t.data_ptr() % 16 for t in (a, b, a_descale, b_descale)),
        "format": block_size == 16 and use_nvfp4 and not use_8x4_sf_layout and backend == "auto" and out is None,
        "output": out_dtype in (torch.bfloat16, torch.float16),
    }
    broken = [name for name, holds in checks.items() if not holds]
    if broken:
        raise ValueError(f"mm_fp4's contract is broken: {broken}")
    return (product(a, a_descale, b.t(), b_descale.t()) * float(alpha)).float().to(out_dtype)
