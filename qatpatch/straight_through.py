"""`fake_quantize`: NVFP4 there and back, with the straight-through gradient.

Forward ``dequantize(quantize(x))`` in x's dtype, backward the identity, with no clip mask: values that saturate or
flush to zero keep their gradient, so that they can move back into range.
"""

from __future__ import annotations

from typing import Any

import torch

from qatpatch import nvfp4


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, global_scale: torch.Tensor | float | None) -> torch.Tensor:
        return nvfp4.dequantize(nvfp4.quantize(x, global_scale=global_scale), dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def fake_quantize(x: torch.Tensor, *, global_scale: torch.Tensor | float | None = None) -> torch.Tensor:
    """``x`` rounded to NVFP4 and back, with a straight-through gradient.

    Args:
        x: floating point ``(..., K)``; blocks of 16 run along the last axis.
        global_scale: decode scale; by default the power-of-two rule over the whole of ``x``.

    Returns:
        A tensor of x's shape and dtype. With the default scale it is exact in bfloat16.

    Raises:
        TypeError, ValueError: as `qatpatch.nvfp4.quantize`.
    """
    return _StraightThrough.apply(x, global_scale)
