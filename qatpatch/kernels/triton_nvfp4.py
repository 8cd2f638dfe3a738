"""NVFP4 on CUDA GPUs from sm_80 on, in Triton: amax, quantize, GEMM operand, dequantize, scaled matmul.

What the linear layers run where the tensor cores have no FP4, or where the GEMM is a plain bf16 one:

==================  =============================================================================  =================
function            result                                                                         launches
==================  =============================================================================  =================
`amax`              largest finite magnitude                                                       2
`quantize`          packed codes, E4M3 block scale bytes, global scale                             1 + 2 for the scale
`operand`           quantized and dequantized again, dense, for a bf16 or fp16 GEMM                2 (``pow2``), else 3
`dequantize`        dense, from packed                                                             1
`scaled_matmul`     ``(x @ w.T) * alpha_x * alpha_w + bias``, alphas on the FP32 accumulator       1
==================  =============================================================================  =================

Codes, scales and operands equal `qatpatch.nvfp4` bit for bit on every architecture (how: `triton_nvfp4_kernels`).
With a ``pow2`` global scale `operand` folds it in exactly, so that ``F.linear`` of two operands is the NVFP4 GEMM.
Any other scale goes onto the FP32 accumulator: ``operand(..., apply_global_scale=False)`` and `scaled_matmul`.

All take CUDA tensors of float32, bfloat16 or float16 on any device, run on that device's current stream, never
synchronise with the host, and can be captured in a CUDA graph once compiled (that is, after one call of the kind).
Rows with a stride are read where they lie; other layouts are copied first. Each is a `torch.library` operator in the
namespace ``qatpatch``, opaque to `torch.compile`.

Deliberately not here: gradients, hardware FP4, autotuning (tiles are data below: same call, same kernel, same bits).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..nvfp4 import BLOCK_SIZE, GLOBAL_SCALE_RULES, padded_length

try:
    import triton  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "qatpatch.kernels.triton_nvfp4 needs Triton, which is not installed: pip install triton"
    ) from error

from . import triton_nvfp4_launch as launch
from .triton_nvfp4_kernels import AMAX, POW2, RAW

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_RULES = {"pow2": POW2.value, "amax": AMAX.value}


def amax(x: Tensor) -> Tensor:
    """Largest magnitude among the finite elements of x: float32 ``()``, 0 for none. Any shape."""
    _check_input(x)
    return torch.ops.qatpatch.triton_amax(x)


def quantize(x: Tensor, *, global_scale: Tensor | None = None, rule: str = "pow2") -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x to NVFP4 in blocks of 16 along its last axis, as `nvfp4.quantize` does.

    Args:
        x: float32, bfloat16 or float16 ``(..., K)`` on a CUDA device.
        global_scale: decode scale, float32 ``()`` on x's device; None chooses it by ``rule`` over the whole of x.
        rule: ``"pow2"`` or ``"amax"`` (`nvfp4.global_scale_of_amax`).

    Returns:
        packed uint8 ``(..., ceil16(K) / 2)``, E4M3 bytes uint8 ``(..., ceil(K / 16))``, global scale float32 ``()``.

    Raises:
        TypeError, ValueError: an input of another type, rank or device, an unknown rule.
    """
    _check_blocks(x)
    global_scale = _scale_for(x, global_scale, rule)
    packed, block_scale = torch.ops.qatpatch.triton_quantize(x, global_scale)
    return packed, block_scale, global_scale


def operand(
    x: Tensor,
    *,
    global_scale: Tensor | None = None,
    rule: str = "pow2",
    dtype: torch.dtype | None = None,
    apply_global_scale: bool = True,
) -> tuple[Tensor, Tensor]:
    """x quantized to NVFP4 and dequantized again: `nvfp4.round_to_nvfp4`, the dense operand of a GEMM.

    Args:
        x: float32, bfloat16 or float16 ``(..., K)`` on a CUDA device.
        global_scale: decode scale, float32 ``()`` on x's device; None chooses it by ``rule`` over the whole of x.
        rule: ``"pow2"`` or ``"amax"``.
        dtype: of the operand; x's by default. 16-bit types hold it exactly with a power-of-two scale or without one.
        apply_global_scale: False leaves the global scale out.

    Returns:
        The operand, contiguous, of x's shape; and the global scale, float32 ``()``.

    Raises:
        TypeError, ValueError: an input of another type, rank or device, an unknown rule.
    """
    _check_blocks(x)
    dtype = _check_output(x.dtype if dtype is None else dtype)
    if global_scale is None and rule == "pow2" and apply_global_scale:
        return torch.ops.qatpatch.triton_operand_pow2(x, dtype)
    global_scale = _scale_for(x, global_scale, rule)
    return torch.ops.qatpatch.triton_operand(x, global_scale, dtype, apply_global_scale), global_scale


def dequantize(
    packed: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    columns: int,
    *,
    dtype: torch.dtype,
    apply_global_scale: bool = True,
) -> Tensor:
    """``code * block_scale * global_scale``, rounded once to ``dtype``: `nvfp4.dequantize`.

    Args:
        packed: uint8 ``(..., ceil16(columns) / 2)``, element ``2j`` in the low nibble of byte ``j``.
        block_scale: E4M3 ``(..., ceil(columns / 16))``, as uint8 bytes or float8_e4m3fn.
        global_scale: float32 ``()``, decode direction.
        columns: logical length of the last axis.
        dtype: float32, bfloat16 or float16.
        apply_global_scale: False leaves the global scale out.

    Returns:
        ``(..., columns)``, contiguous.

    Raises:
        TypeError, ValueError: types, shapes or devices that do not fit together.
    """
    _check_cuda(packed)
    _check_output(dtype)
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed NVFP4 codes are uint8, got {packed.dtype}")
    if block_scale.dtype == torch.float8_e4m3fn:
        block_scale = block_scale.view(torch.uint8)
    if block_scale.dtype != torch.uint8:
        raise TypeError(f"block scales are E4M3 bytes (uint8) or float8_e4m3fn, got {block_scale.dtype}")
    leading, blocks = packed.shape[:-1], padded_length(columns) // BLOCK_SIZE
    if packed.shape[-1] != 8 * blocks or block_scale.shape != (*leading, blocks):
        raise ValueError(
            f"{columns} columns need packed codes (..., {8 * blocks}) and block scales (..., {blocks}) over the same "
            f"leading axes, got {tuple(packed.shape)} and {tuple(block_scale.shape)}"
        )
    _check_scale(global_scale, packed)
    return torch.ops.qatpatch.triton_dequantize(packed, block_scale, global_scale, columns, dtype, apply_global_scale)


def scaled_matmul(
    x: Tensor, weight: Tensor, alpha_x: Tensor, alpha_weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``(x @ weight.T) * alpha_x * alpha_weight + bias``: FP32 up to one rounding to ``out_dtype``.

    Args:
        x: bfloat16 or float16 ``(..., K)``, on a CUDA device; an `operand` without its global scale.
        weight: ``(N, K)``, of x's dtype.
        alpha_x, alpha_weight: the global scales, float32 ``()``, on the same device.
        bias: ``(N,)`` of any of the three dtypes, or None.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        ``(..., N)``, contiguous.

    Raises:
        TypeError, ValueError: types, shapes or devices that do not fit together.
    """
    _check_cuda(x)
    _check_output(out_dtype)
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        raise TypeError(f"scaled_matmul takes two bfloat16 or two float16 operands, got {x.dtype} and {weight.dtype}")
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected x (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in _INPUT_DTYPES):
        raise ValueError(f"expected a bias ({weight.shape[0]},), got {tuple(bias.shape)} of {bias.dtype}")
    _check_scale(alpha_x, x)
    _check_scale(alpha_weight, x)
    return torch.ops.qatpatch.triton_scaled_matmul(x, weight, alpha_x, alpha_weight, bias, out_dtype)


# Operators. The fakes give what the launches allocate: contiguous, of these shapes and dtypes.


def _operator(name: str, schema: str):
    return torch.library.custom_op(f"qatpatch::{name}", mutates_args=(), device_types="cuda", schema=schema)


@_operator("triton_amax", "(Tensor x) -> Tensor")
def _amax_op(x):
    return launch.global_scale(x, RAW.value)


@_amax_op.register_fake
def _(x):
    return x.new_empty((), dtype=torch.float32)


@_operator("triton_global_scale", "(Tensor x, str rule) -> Tensor")
def _global_scale_op(x, rule):
    return launch.global_scale(x, _RULES[rule])


@_global_scale_op.register_fake
def _(x, rule):
    return x.new_empty((), dtype=torch.float32)


@_operator("triton_quantize", "(Tensor x, Tensor global_scale) -> (Tensor, Tensor)")
def _quantize_op(x, global_scale):
    return launch.quantize(x, global_scale)


@_quantize_op.register_fake
def _(x, global_scale):
    return launch.empty_quantized(x)


@_operator("triton_operand", "(Tensor x, Tensor global_scale, ScalarType dtype, bool apply_global_scale) -> Tensor")
def _operand_op(x, global_scale, dtype, apply_global_scale):
    return launch.operand(x, global_scale, dtype, apply_global_scale)


@_operand_op.register_fake
def _(x, global_scale, dtype, apply_global_scale):
    return x.new_empty(x.shape, dtype=dtype)


@_operator("triton_operand_pow2", "(Tensor x, ScalarType dtype) -> (Tensor, Tensor)")
def _operand_pow2_op(x, dtype):
    return launch.operand_pow2(x, dtype)


@_operand_pow2_op.register_fake
def _(x, dtype):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((), dtype=torch.float32)


@_operator(
    "triton_dequantize",
    "(Tensor packed, Tensor block_scale, Tensor global_scale, SymInt columns, ScalarType dtype, "
    "bool apply_global_scale) -> Tensor",
)
def _dequantize_op(packed, block_scale, global_scale, columns, dtype, apply_global_scale):
    return launch.dequantize(packed, block_scale, global_scale, columns, dtype, apply_global_scale)


@_dequantize_op.register_fake
def _(packed, block_scale, global_scale, columns, dtype, apply_global_scale):
    return packed.new_empty((*packed.shape[:-1], columns), dtype=dtype)


@_operator(
    "triton_scaled_matmul",
    "(Tensor x, Tensor weight, Tensor alpha_x, Tensor alpha_weight, Tensor? bias, ScalarType out_dtype) -> Tensor",
)
def _scaled_matmul_op(x, weight, alpha_x, alpha_weight, bias, out_dtype):
    return launch.scaled_matmul(x, weight, alpha_x, alpha_weight, bias, out_dtype)


@_scaled_matmul_op.register_fake
def _(x, weight, alpha_x, alpha_weight, bias, out_dtype):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


def _check_cuda(x: Tensor) -> None:
    if not x.is_cuda:
        raise ValueError(f"the Triton kernels take CUDA tensors, got one on {x.device}; use qatpatch.nvfp4 there")


def _check_input(x: Tensor) -> None:
    _check_cuda(x)
    if x.dtype not in _INPUT_DTYPES:
        raise TypeError(f"expected float32, bfloat16 or float16, got {x.dtype}; convert it first")


def _check_blocks(x: Tensor) -> None:
    _check_input(x)
    if x.dim() == 0:
        raise ValueError("NVFP4 needs an axis to take blocks of 16 along, got a 0-dimensional tensor; use x.reshape(1)")


def _check_output(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _INPUT_DTYPES:
        raise TypeError(f"results are float32, bfloat16 or float16, got dtype={dtype}")
    return dtype


def _check_scale(scale: Tensor, x: Tensor) -> None:
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != x.device:
        raise ValueError(
            f"expected one float32 number on {x.device} as global scale, got {tuple(scale.shape)} of {scale.dtype} on "
            f"{scale.device}"
        )


def _scale_for(x: Tensor, global_scale: Tensor | None, rule: str) -> Tensor:
    if rule not in GLOBAL_SCALE_RULES:
        raise ValueError(f"rule={rule!r} is not a rule; choose one of {', '.join(GLOBAL_SCALE_RULES)}")
    if global_scale is None:
        return torch.ops.qatpatch.triton_global_scale(x, rule)
    _check_scale(global_scale, x)
    return global_scale.reshape(())
