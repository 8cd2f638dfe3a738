"""NVFP4 linear in plain torch, any device: the definition of the numbers.

    y = (Xv Wv^T) * gx * gw + bias        Xv = code * block_scale, exact in FP32; FP32 accumulation; one rounding

Operands are float32 and leave the global scales out: those go onto the FP32 accumulator, so that any FP32 scale (a
foreign file's too) costs no second rounding of an operand. With power-of-two scales the order is irrelevant: exact.
"""

from __future__ import annotations

import torch

from qatpatch import nvfp4


def operand(x: torch.Tensor, *, global_scale: torch.Tensor | None, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``x`` (..., K) to a GEMM operand: float32 ``code * block_scale`` of x's shape, and the global
    scale ().
    """
    scale = nvfp4.choose_global_scale(x, rule) if global_scale is None else global_scale.clone()
    return nvfp4.round_to_nvfp4(x, scale, dtype=torch.float32, apply_global_scale=False), scale


def operands(
    x: torch.Tensor, weight: torch.Tensor, *, x_scale: torch.Tensor | None, rule: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`operand` of ``x`` (..., K) under ``x_scale`` and of ``weight`` (N, K): two operands, each with its scale."""
    return *operand(x, global_scale=x_scale, rule=rule), *operand(weight, global_scale=None, rule=rule)


class KeptOperand:
    """The operand of a weight (N, K), and the weight that it was made of. See `qatpatch.reuse`."""

    def __init__(self, weight: torch.Tensor, rule: str) -> None:
        self._rule = rule
        self._made = self._make(weight)

    def _make(self, weight: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        copy = weight.detach().clone()
        return copy, operand(copy, global_scale=None, rule=self._rule)

    @property
    def nbytes(self) -> int:
        copy, made = self._made
        return sum(t.numel() * t.element_size() for t in (copy, *made))

    def operand(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`operand` of ``weight``: what is kept, if every bit of the weight is as it was."""
        bits = torch.int16 if weight.element_size() == 2 else torch.int32
        made = self._made  # replaced as a whole: another thread sees the old pair or the new one
        if weight.shape != made[0].shape or not torch.equal(weight.view(bits), made[0].view(bits)):
            made = self._made = self._make(weight)
        return made[1]


def keep(weight: torch.Tensor, rule: str) -> KeptOperand:
    """The operand of ``weight`` (N, K) for as long as it does not change."""
    return KeptOperand(weight, rule)


def packed_operand(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    columns: int,
    dtype: torch.dtype,
    rule: str,
) -> torch.Tensor:
    """The same operand from packed storage (uint8 codes and uint8 E4M3 scale bytes).

    ``dtype`` and ``rule`` change nothing here.
    """
    q = nvfp4.NVFP4Tensor(
        packed=packed,
        block_scale=block_scale.view(torch.float8_e4m3fn),
        global_scale=global_scale,
        shape=torch.Size((*packed.shape[:-1], columns)),
    )
    return nvfp4.dequantize_without_global_scale(q)


def quantize(
    x: torch.Tensor, *, global_scale: torch.Tensor | None, rule: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes, E4M3 scale bytes (both uint8) and global scale of ``x`` (..., K)."""
    scale = nvfp4.choose_global_scale(x, rule) if global_scale is None else global_scale.clone()
    q = nvfp4.quantize(x, global_scale=scale)
    return q.packed, q.block_scale.view(torch.uint8), scale


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
    """``(x weight^T) * x_scale * weight_scale + bias`` from operands (..., K) and float32 (N, K), rounded once.

    ``x`` is float32, or a weight-only layer's input in its own dtype, with None for its scale.

    The scales are applied one after the other: their product alone could leave the range of FP32.
    """
    y = torch.nn.functional.linear(x.float(), weight)
    if x_scale is not None:
        y.mul_(x_scale)
    y.mul_(weight_scale)
    if bias is not None:
        y.add_(bias)
    return y.to(out_dtype)
