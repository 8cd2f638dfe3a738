"""`QATLinear`: a linear that trains for NVFP4. Its deployed form is `packed_linear.NVFP4Linear`.

    y = Xq Wq^T + bias        Xq, Wq: NVFP4, blocks of 16 along in_features; FP32 accumulation, one rounding

Forward GEMM     y  = Xq Wq^T + b
Input gradient   dX = dY W         unquantized operands (``backward="high_precision"``) or
Weight gradient  dW = dY^T X       the dequantized ones (``"quantized"``, which keeps X packed: 0.5625 byte an element)
Bias gradient    db = sum dY

The estimator is straight-through with no clip mask. In which dtype operands are quantized is `linear_state`'s matter.
`QATLinear` adds no parameter and no buffer; a live ``nn.Linear`` becomes one by assigning its class. It knows neither a
model nor diffusers.

A model has hundreds of these layers, and a GPU is done with a small one in 20 us: what a forward costs the host counts.
So attributes and autocast are read once, no cast or view is made that changes nothing, there is no autograd node
without gradients, and with them one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from qatpatch import kernels
from qatpatch.autocast import autocast_dtype, without_autocast
from qatpatch.kernels import ops
from qatpatch.linear_state import LinearSettings, LinearState, cast, check_dtypes, check_width, differentiated
from qatpatch.recomputation import Call, remember
from qatpatch.reuse import Kept


class _Once(NamedTuple):
    """What one call may take from earlier ones."""

    weight: Kept | None  # the quantized weight, inside a scope that keeps it
    state: LinearState | None  # of a layer that shares its input
    source: torch.Tensor  # that input, before any cast


def _once(state: LinearState, source: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, kernel: str) -> _Once | None:
    """None where nothing can be: most layers, and wherever calls are not plain (`ops.is_plain`)."""
    keeper, sharing = state.switch.weights, state.shares_input and state.settings.activations
    if (keeper is None and not sharing) or not ops.is_plain(x, weight):
        return None
    kept = None if keeper is None else keeper.find(state, weight, state.settings.global_scale, kernel)
    return _Once(kept, state if sharing and state.calibration is None else None, source)


def _quantized_input(
    rows: torch.Tensor, input_scale: torch.Tensor | None, rule: str, kernel: str, run: ops.Calls, pack: bool
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None]:
    """Operand and scale of x (M, K), and x packed where ``pack`` says so."""
    if not pack:
        return *run.operand(rows, input_scale, rule, kernel), None
    packed = run.quantize(rows, input_scale, rule, kernel)
    return run.packed_operand(*packed, rows.shape[-1], rows.dtype, rule, kernel), packed[2], packed


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    settings: LinearSettings,
    kernel: str,
    out_dtype: torch.dtype,
    once: _Once | None = None,
    *,
    pack: bool = False,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None]:
    """Output (..., N) of x (..., K), weight (N, K) and bias (N) in the compute dtype; and x packed, where asked for."""
    run, rule = ops.calls(x, weight), settings.global_scale
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if once is None and not pack:
        y = run.linear(rows, weight, bias, input_scale, settings.activations, out_dtype, rule, kernel)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0]), None
    kept, sharer = (None, None) if once is None else (once.weight, once.state)
    quantized = key = None
    if sharer is not None:
        key = sharer.group, settings, kernel, x.dtype, pack
        quantized = sharer.switch.input.find(sharer, once.source, key)
    missing = settings.activations and quantized is None
    if missing and kept is None and not pack:
        xq, x_scale, w, w_scale = ops.operands(rows, weight, input_scale, rule, kernel)
        quantized = xq, x_scale, None
    else:
        w, w_scale = run.operand(weight, None, rule, kernel) if kept is None else kept.operand(weight)
        if missing:
            quantized = _quantized_input(rows, input_scale, rule, kernel, run, pack)
    if sharer is not None and missing:
        sharer.switch.input.keep(sharer, once.source, key, quantized)
    xq, x_scale, packed = quantized or (rows, None, None)
    y = run.matmul(xq, x_scale, w, w_scale, bias, out_dtype, rule, kernel)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0]), packed


class _QATLinear(torch.autograd.Function):
    """The three GEMMs, of what `_product` takes. ``call`` is the forward's `Call`, None where nothing recomputes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        input_scale: torch.Tensor | None,
        settings: LinearSettings,
        kernel: str,
        out_dtype: torch.dtype,
        once: _Once | None,
        call: Call | None,
    ) -> torch.Tensor:
        x_wants, weight_wants = ctx.needs_input_grad[:2]
        pack = weight_wants and settings.backward == "quantized"
        y, packed = _product(x, weight, bias, input_scale, settings, kernel, out_dtype, once, pack=pack)
        ctx.settings, ctx.kernel, ctx.columns, ctx.dtype = settings, kernel, x.shape[-1], x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.call = call
        kept_x = (None, None, None)
        if weight_wants:
            kept_x = packed if packed is not None else (x, None, None)
        ctx.save_for_backward(weight if x_wants else None, *kept_x, None if call is None else call.code)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, x, block_scale, x_scale, code = ctx.saved_tensors
        if ctx.call is not None:
            ctx.call.confirm(code)
        rule, dx, dw, db = ctx.settings.global_scale, None, None, None
        x_wants, weight_wants, bias_wants, *_ = ctx.needs_input_grad
        with without_autocast(dy.device):
            dy = cast(dy, ctx.dtype)
            rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
            if x_wants:
                if ctx.settings.backward == "quantized":
                    weight = _dense(*ops.calls(dy, weight).operand(weight, None, rule, ctx.kernel), ctx)
                dx = rows @ weight
                dx = dx if dy.dim() == 2 else dx.view(*dy.shape[:-1], ctx.columns)
            if weight_wants:
                if block_scale is not None:
                    unpack = ops.calls(dy, x).packed_operand
                    operand = unpack(x, block_scale, x_scale, ctx.columns, ctx.dtype, rule, ctx.kernel)
                    x = _dense(operand, x_scale, ctx)
                dw = rows.t() @ x.reshape(-1, ctx.columns)
            if ctx.bias_dtype is not None and bias_wants:
                db = cast(rows.sum(0), ctx.bias_dtype)
        return dx, dw, db, None, None, None, None, None, None


def _observe(state: LinearState, x: torch.Tensor) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "a forward inside qatpatch.calibrate is being compiled, and so cannot be observed; run it eagerly"
        )
    state.calibration(x)


def _dense(operand: torch.Tensor, scale: torch.Tensor, ctx: Any) -> torch.Tensor:
    """The dequantized values of a GEMM operand, in the compute dtype."""
    if kernels.kernel_named(ctx.kernel).folded(ctx.settings.global_scale, ctx.dtype):
        return cast(operand, ctx.dtype)
    # A scale () does not widen a 16-bit operand by itself.
    wide = cast(operand, torch.float32) if ctx.dtype is torch.float32 else operand
    return (wide * scale).to(ctx.dtype)


class QATLinear(nn.Linear):
    """``nn.Linear`` that computes with NVFP4 operands and learns straight through. Made by class assignment.

    Input (..., in_features) in float32, bfloat16 or float16; output as ``nn.Linear`` in the same autocast state. An
    input in
    another dtype than the weight's is accepted in float32 and converted; any other mismatch raises, as ``nn.Linear``
    does.
    """

    quantization: LinearState
    qatpatch_kind = "QATLinear"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.quantization
        mode, call = state.mode, None
        if not torch.compiler.is_compiling():
            mode, call = state.history.enter(mode, training=self.training)
        if mode == "dense":
            return remember(nn.functional.linear(x, self.weight, self.bias), call)
        return self._quantized(x, call)

    def _quantized(self, x: torch.Tensor, call: Call | None) -> torch.Tensor:
        state, weight, bias, device = self.quantization, self.weight, self.bias, x.device
        autocast, weight_dtype = autocast_dtype(device), weight.dtype
        dtype = state.compute_dtype(autocast, weight_dtype, training=self.training)
        check_dtypes(x.dtype, weight_dtype, autocast)
        check_width(x, self.in_features)
        source, x, weight = x, cast(x, dtype), cast(weight, dtype)
        bias = None if bias is None else cast(bias, dtype)
        if state.calibration is not None:
            _observe(state, x)
        kernel = state.kernel("train", device)
        arguments = (
            x,
            weight,
            bias,
            state.input_scale(x),
            state.settings,
            kernel,
            autocast or weight_dtype,
        )
        once = None if torch.compiler.is_compiling() else _once(state, source, x, weight, kernel)
        if differentiated(x, weight, bias):
            return _QATLinear.apply(*arguments, once, call)
        return _product(*arguments, once)[0]

    def to(self, *args: Any, **kwargs: Any) -> QATLinear:
        """As `nn.Module.to`. Tools that cast layer by layer call it on the layer itself, and must not narrow it."""
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        if dtype is not None:
            self._refuse_narrow(dtype, self.weight.element_size())
        return super().to(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QATLinear:
        if not self.weight.is_meta:
            self._refuse_narrow(fn(self.weight.detach().reshape(-1)[:0]).dtype, 2)
        return super()._apply(fn, recurse)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool, *rest: list[str]
    ) -> None:
        """As `nn.Linear`; nothing of a packed layer, also with strict=False: its bias belongs to another weight."""
        if f"{prefix}weight_packed" in state_dict:
            rest[-1].append(
                f"{prefix[:-1]} trains, and the state dict has it packed (of a deployed model); read packed weights "
                "with qatpatch.load, or load the weights from before deploy"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)

    def _refuse_narrow(self, dtype: torch.dtype, bytes_needed: int) -> None:
        if self.weight.requires_grad and dtype.is_floating_point and dtype.itemsize < bytes_needed:
            raise RuntimeError(
                f"a patched layer that trains cannot store its {self.weight.dtype} weight as {dtype} (layerwise "
                "casting?): its master weight would be lost; freeze it, or qatpatch.deploy the model first"
            )

    def extra_repr(self) -> str:
        s = self.quantization.settings
        inputs = f"input_scale={s.input_scale}" if s.activations else "weight_only"
        return f"{super().extra_repr()}, nvfp4, {inputs}, global_scale={s.global_scale}, mode={self.quantization.mode}"
