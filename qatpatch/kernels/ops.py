"""`torch.library` operators over the linear kernels: a compiler sees one node each and never their insides.

Every operator takes the name of its kernel row. The fakes give exact shapes, dtypes and strides (all contiguous), so
meta tensors work without computing. None of them is differentiable: `linear` says what the gradients are. Autocast is
off inside; the callers choose every dtype. They are defined on a plain `torch.library.Library`, whose calls cost a
third of those of ``torch.library.custom_op``; a model makes thousands a step. For the same reason plain eager calls
leave the dispatcher out altogether: `calls` says where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from qatpatch import nvfp4
from qatpatch.autocast import without_autocast
from qatpatch.kernels import kernel_named

_LIBRARY = torch.library.Library("qatpatch", "FRAGMENT")


def _define(schema: str, implementation: Callable, fake: Callable) -> Callable:
    name = schema.split("(", 1)[0]
    try:
        _LIBRARY.define(schema)
    except RuntimeError as error:
        if "multiple times" not in str(error):
            raise
        # The package was imported anew after its modules were dropped: the operators of the first import live on.
        return getattr(torch.ops.qatpatch, name).default
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qatpatch::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.qatpatch, name).default


def _operand(
    x: torch.Tensor, global_scale: torch.Tensor | None, rule: str, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return kernel_named(kernel).load().operand(x, global_scale=global_scale, rule=rule)


def _operand_fake(x, global_scale, rule, kernel):
    dtype = kernel_named(kernel).operand_dtype(x.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((), dtype=torch.float32)


def operands(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor | None, rule: str, kernel: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both operands of a GEMM, x (..., K) and weight (N, K), each followed by its global scale ()."""
    return kernel_named(kernel).load().operands(x, weight, x_scale=x_scale, rule=rule)


def _packed_operand(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    columns: int,
    dtype: torch.dtype,
    rule: str,
    kernel: str,
) -> torch.Tensor:
    module = kernel_named(kernel).load()
    return module.packed_operand(packed, block_scale, global_scale, columns=columns, dtype=dtype, rule=rule)


def _packed_operand_fake(packed, block_scale, global_scale, columns, dtype, rule, kernel):
    return packed.new_empty((*packed.shape[:-1], columns), dtype=kernel_named(kernel).operand_dtype(dtype))


def _quantize(
    x: torch.Tensor, global_scale: torch.Tensor | None, rule: str, kernel: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return kernel_named(kernel).load().quantize(x, global_scale=global_scale, rule=rule)


def _quantize_fake(x, global_scale, rule, kernel):
    columns = nvfp4.padded_length(x.shape[-1])
    return (
        x.new_empty((*x.shape[:-1], columns // 2), dtype=torch.uint8),
        x.new_empty((*x.shape[:-1], columns // nvfp4.BLOCK_SIZE), dtype=torch.uint8),
        x.new_empty((), dtype=torch.float32),
    )


def _matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    rule: str,
    kernel: str,
) -> torch.Tensor:
    module = kernel_named(kernel).load()
    with without_autocast(x.device):
        return module.matmul(x, x_scale, weight, weight_scale, bias, out_dtype=out_dtype, rule=rule)


def _matmul_fake(x, x_scale, weight, weight_scale, bias, out_dtype, rule, kernel):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    activations: bool,
    out_dtype: torch.dtype,
    rule: str,
    kernel: str,
) -> torch.Tensor:
    if activations:
        xq, x_scale, w, w_scale = operands(x, weight, x_scale, rule, kernel)
    else:
        xq, x_scale, (w, w_scale) = x, None, _operand(weight, None, rule, kernel)
    return _matmul(xq, x_scale, w, w_scale, bias, out_dtype, rule, kernel)


def _linear_fake(x, weight, bias, x_scale, activations, out_dtype, rule, kernel):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


def _packed_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    activations: bool,
    out_dtype: torch.dtype,
    rule: str,
    kernel: str,
) -> torch.Tensor:
    w = _packed_operand(packed, block_scale, global_scale, x.shape[-1], x.dtype, rule, kernel)
    x, x_scale = _operand(x, x_scale, rule, kernel) if activations else (x, None)
    return _matmul(x, x_scale, w, global_scale, bias, out_dtype, rule, kernel)


def _packed_linear_fake(x, packed, block_scale, global_scale, bias, x_scale, activations, out_dtype, rule, kernel):
    return x.new_empty((*x.shape[:-1], packed.shape[0]), dtype=out_dtype)


# x (..., K), quantized and dense again: a contiguous GEMM operand and the global scale ().
operand = _define(
    "operand(Tensor x, Tensor? global_scale, str rule, str kernel) -> (Tensor, Tensor)", _operand, _operand_fake
)

# A whole forward, so that a compiled graph has one node and one call a layer: x (..., K) with weight (N, K), quantized
# here (x where ``activations`` says so), bias (N).
linear = _define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? x_scale, bool activations, ScalarType out_dtype, str rule, "
    "str kernel) -> Tensor",
    _linear,
    _linear_fake,
)

# The same of a packed weight: codes, E4M3 bytes, global scale.
packed_linear = _define(
    "packed_linear(Tensor x, Tensor packed, Tensor block_scale, Tensor global_scale, Tensor? bias, Tensor? x_scale, "
    "bool activations, ScalarType out_dtype, str rule, str kernel) -> Tensor",
    _packed_linear,
    _packed_linear_fake,
)

# The operand (..., columns) of packed storage: uint8 codes, uint8 E4M3 bytes, float32 global scale ().
packed_operand = _define(
    "packed_operand(Tensor packed, Tensor block_scale, Tensor global_scale, SymInt columns, ScalarType dtype, "
    "str rule, "
    "str kernel) -> Tensor",
    _packed_operand,
    _packed_operand_fake,
)

# Packed codes (..., ceil16(K)/2), E4M3 scale bytes (..., ceil(K/16)), both uint8, and the global scale ().
quantize = _define(
    "quantize(Tensor x, Tensor? global_scale, str rule, str kernel) -> (Tensor, Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)

# (x weight^T) * scales + bias of operands (..., K) and (N, K): FP32 accumulation, rounded once to out_dtype. Without
# x_scale x is taken as it is.
matmul = _define(
    "matmul(Tensor x, Tensor? x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype, "
    "str rule, "
    "str kernel) -> Tensor",
    _matmul,
    _matmul_fake,
)


class Calls(NamedTuple):
    """The functions above as a caller finds them, with the operators' signatures.

    ``direct``: they are what is behind the operators.
    """

    linear: Callable
    packed_linear: Callable
    operand: Callable
    packed_operand: Callable
    quantize: Callable
    matmul: Callable
    direct: bool


_OPERATORS = Calls(linear, packed_linear, operand, packed_operand, quantize, matmul, False)
_DIRECT = Calls(_linear, _packed_linear, _operand, _packed_operand, _quantize, _matmul, True)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether nobody could tell operators from what is behind them.

    That is, plain tensors with memory; no compiler, dispatch mode or functorch transform.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and not (x.is_meta or weight.is_meta)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def calls(x: torch.Tensor, weight: torch.Tensor) -> Calls:
    """What to call for these operands where gradients are off: the operators, or, if plain, what is behind them."""
    return _DIRECT if is_plain(x, weight) else _OPERATORS
