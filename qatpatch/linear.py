"""`QATLinear` (training) and `NVFP4Linear` (deployed).

    y = Xq Wq^T + bias        Xq, Wq: NVFP4, blocks of 16 along in_features; FP32 accumulation, one rounding

Forward GEMM     y  = Xq Wq^T + b
Input gradient   dX = dY W         unquantized operands (``backward="high_precision"``) or
Weight gradient  dW = dY^T X       the dequantized ones (``"quantized"``, which keeps X packed: 0.5625 byte an element)
Bias gradient    db = sum dY

The estimator is straight-through with no clip mask. Operands are quantized in the compute dtype: autocast's where
autocast
is on, else the weight's, or the one that training recorded where that is known. So an evaluation outside autocast sees
the weights that training saw, and `deploy` packs exactly those. Output dtype is what `nn.Linear` gives.

`QATLinear` adds no parameter and no buffer; a live ``nn.Linear`` becomes one by assigning its class. `NVFP4Linear`
replaces
the object: its storage is uint8 throughout (codes, E4M3 bytes, the FP32 global scale as four bytes), so that no
``.to(dtype)``,
autocast or loader can change it. Neither knows a model or diffusers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qatpatch import kernels, nvfp4
from qatpatch.autocast import autocast_dtype, without_autocast
from qatpatch.kernels import ops
from qatpatch.recomputation import Call, CallHistory, remember
from qatpatch.switch import Switch

INPUT_SCALES = ("dynamic", "unit", "static")
BACKWARDS = ("high_precision", "quantized")
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class LinearSettings:
    """What one linear layer's patch does; the same in training and after deploy.

    Attributes:
        activations: quantize the input too (W4A4); False is weight-only (W4A16).
        input_scale: ``"dynamic"`` (the global-scale rule on each call), ``"unit"`` (exactly 1) or ``"static"``.
        static_scale: the calibrated global scale of the input, decode direction; None until calibrated.
        global_scale: rule for global scales, ``"pow2"`` or ``"amax"``.
        backward: ``"high_precision"`` or ``"quantized"``.
        refine_only: runs dense in the stage ``base``.
    """

    activations: bool = True
    input_scale: str = "dynamic"
    static_scale: float | None = None
    global_scale: str = "pow2"
    backward: str = "high_precision"
    refine_only: bool = False


class LinearState:
    """A patched linear's settings and what it computes now. Copies with the layer, independent afterwards.

    Attributes:
        settings: `LinearSettings`.
        switch: the model's open blocks.
        trained_dtype: compute dtype of the last forward in training mode, None before one.
        calibration: largest input magnitudes seen, float32 (); None outside `calibrate`.
    """

    def __init__(self, settings: LinearSettings, switch: Switch | None = None) -> None:
        self.settings = settings
        self.switch = switch or Switch()
        self.trained_dtype: torch.dtype | None = None
        self.calibration: Callable[[torch.Tensor], None] | None = None
        self.history = CallHistory()
        self._kernels: dict[str, str] = {}

    @property
    def mode(self) -> str:
        """``"quantized"``, or ``"dense"`` where an open block says so."""
        switch = self.switch
        dense = switch.linear == "dense" or (switch.stage == "base" and self.settings.refine_only)
        return "dense" if dense else "quantized"

    def kernel(self, stage: str, device: torch.device) -> str:
        """The kernel for tensors on ``device``, resolved on first use there."""
        key = f"{stage}:{device}"
        if key not in self._kernels:
            self._kernels[key] = kernels.resolved_name("linear", stage, "nvfp4", str(device))
        return self._kernels[key]

    def compute_dtype(self, device: torch.device, weight_dtype: torch.dtype, training: bool) -> torch.dtype:
        """The dtype in which operands are quantized; recorded in training mode."""
        dtype = autocast_dtype(device)
        if dtype is None:
            dtype = weight_dtype if training or self.trained_dtype is None else self.trained_dtype
        if training and self.trained_dtype is not dtype:
            self.trained_dtype = dtype
        return dtype

    def input_scale(self, x: torch.Tensor) -> torch.Tensor | None:
        """The fixed global scale of the input, or None where it follows the rule on each call."""
        if self.settings.input_scale == "dynamic" or self.calibration is not None:
            return None
        if self.settings.input_scale == "unit":
            return torch.ones((), dtype=torch.float32, device=x.device)
        if self.settings.static_scale is None:
            raise RuntimeError(
                "input_scale='static' needs calibrated scales and this layer has none; run forwards inside "
                "`with qatpatch.calibrate(model):` first"
            )
        return torch.full((), self.settings.static_scale, dtype=torch.float32, device=x.device)


def output_dtype(x: torch.Tensor, weight_dtype: torch.dtype) -> torch.dtype:
    """What ``nn.Linear`` returns: autocast's dtype where it is on, else the weight's."""
    return autocast_dtype(x.device) or weight_dtype


class _QATLinear(torch.autograd.Function):
    """The three GEMMs. x (M, K), weight (N, K) and bias (N) all in the compute dtype."""

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
    ) -> torch.Tensor:
        rule = settings.global_scale
        w, w_scale = ops.operand(weight, None, rule, kernel)
        packed = None
        if not settings.activations:
            xq, x_scale = x, torch.ones_like(w_scale)
        elif settings.backward == "quantized" and ctx.needs_input_grad[1]:
            packed = ops.quantize(x, input_scale, rule, kernel)
            xq, x_scale = ops.packed_operand(*packed, x.shape[-1], x.dtype, rule, kernel), packed[2]
        else:
            xq, x_scale = ops.operand(x, input_scale, rule, kernel)
        y = ops.matmul(xq, x_scale, w, w_scale, bias, out_dtype, rule, kernel)
        ctx.settings, ctx.kernel, ctx.columns, ctx.dtype = settings, kernel, x.shape[-1], x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        kept_x = (None, None, None)
        if ctx.needs_input_grad[1]:
            kept_x = packed if packed is not None else (x, None, None)
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *kept_x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, x, block_scale, x_scale = ctx.saved_tensors
        rule, dx, dw, db = ctx.settings.global_scale, None, None, None
        with without_autocast(dy.device):
            dy = dy.to(ctx.dtype)
            if ctx.needs_input_grad[0]:
                if ctx.settings.backward == "quantized":
                    weight = _dense(*ops.operand(weight, None, rule, ctx.kernel), ctx)
                dx = dy @ weight
            if ctx.needs_input_grad[1]:
                if block_scale is not None:
                    operand = ops.packed_operand(x, block_scale, x_scale, ctx.columns, ctx.dtype, rule, ctx.kernel)
                    x = _dense(operand, x_scale, ctx)
                dw = dy.t() @ x
            if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
                db = dy.sum(0).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None, None


def _dense(operand: torch.Tensor, scale: torch.Tensor, ctx: Any) -> torch.Tensor:
    """The dequantized values of a GEMM operand, in the compute dtype."""
    if kernels.kernel_named(ctx.kernel).folded(ctx.settings.global_scale, ctx.dtype):
        return operand
    return (operand * scale).to(ctx.dtype)


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
        state, weight = self.quantization, self.weight
        dtype = state.compute_dtype(x.device, weight.dtype, self.training)
        _check_dtypes(x, weight.dtype)
        if state.calibration is not None and not torch.compiler.is_compiling():
            state.calibration(nvfp4.finite_amax(x.to(dtype)))
        y = _QATLinear.apply(
            x.to(dtype).reshape(-1, self.in_features),
            weight.to(dtype),
            None if self.bias is None else self.bias.to(dtype),
            state.input_scale(x),
            state.settings,
            state.kernel("train", x.device),
            output_dtype(x, weight.dtype),
        )
        return remember(y, call).view(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QATLinear:
        if self.weight.requires_grad and not self.weight.is_meta:
            probe = fn(self.weight.detach().reshape(-1)[:0])
            if probe.is_floating_point() and probe.element_size() < 2:
                raise RuntimeError(
                    f"a patched layer that trains cannot store its weight as {probe.dtype} (layerwise casting?): its "
                    "master weight would be lost; freeze it, or qatpatch.deploy the model first"
                )
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        s = self.quantization.settings
        inputs = f"input_scale={s.input_scale}" if s.activations else "weight_only"
        return f"{super().extra_repr()}, nvfp4, {inputs}, global_scale={s.global_scale}, mode={self.quantization.mode}"


_PURGED = (
    "{} needs a dense weight that qatpatch.deploy packed and purged; nothing can be added to or read from packed "
    "weights. Merge adapters (fuse_lora, merge_and_unload) before deploy, or deploy with retain_original_weights=True to "
    "keep running layers dense"
)


class PurgedWeight(torch.Tensor):
    """Stands for a weight that was packed and purged: shape, dtype and device, no memory, and no arithmetic."""

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> PurgedWeight:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    @property
    def data(self) -> PurgedWeight:
        """Itself: what is done to ``weight.data`` is refused like what is done to ``weight``."""
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise RuntimeError(_PURGED.format("setting weight.data"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PurgedWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(_PURGED.format(func))


class NVFP4Linear(nn.Linear):
    """A deployed linear: packed weight (out_features, in_features), the compute it was trained for.

    Buffers, all uint8: ``weight_packed`` (N, ceil16(K)/2), element 2j in the low nibble; ``weight_scale``
    (N, ceil(K/16)), E4M3 bytes, linear; ``weight_global_scale`` (4), the bytes of one FP32 decode scale. ``bias`` (N)
    is the parameter from before; ``dense_weight`` (N, K) is there where the original was retained. ``weight`` answers
    dtype, shape and device.
    """

    quantization: LinearState
    qatpatch_kind = "NVFP4Linear"

    def __init__(
        self,
        *,
        packed: torch.Tensor,
        block_scale: torch.Tensor,
        global_scale: torch.Tensor,
        in_features: int,
        bias: nn.Parameter | None,
        dense_weight: nn.Parameter | None,
        dtype: torch.dtype,
        quantization: LinearState,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, packed.shape[0]
        self.register_buffer("weight_packed", packed)
        self.register_buffer("weight_scale", block_scale)
        self.register_buffer("weight_global_scale", global_scale.reshape(1).view(torch.uint8))
        self.bias = bias
        self.dense_weight = dense_weight
        self.quantization = quantization
        self._dtype = dtype

    @classmethod
    def from_linear(cls, linear: QATLinear, *, retain: bool) -> NVFP4Linear:
        """Pack ``linear``; ``retain`` keeps its dense weight as ``dense_weight`` (the same Parameter)."""
        state, weight = linear.quantization, linear.weight.detach()
        source = weight.to(state.trained_dtype or weight.dtype)
        kernel = state.kernel("deploy", weight.device)
        packed, block_scale, global_scale = ops.quantize(source, None, state.settings.global_scale, kernel)
        return cls(
            packed=packed,
            block_scale=block_scale,
            global_scale=global_scale,
            in_features=linear.in_features,
            bias=linear.bias,
            dense_weight=linear.weight if retain else None,
            dtype=weight.dtype,
            quantization=state,
        )

    @property
    def weight(self) -> torch.Tensor:
        """The retained dense weight, or a `PurgedWeight` that answers shape, dtype and device."""
        if self.dense_weight is not None:
            return self.dense_weight
        shape = torch.Size((self.out_features, self.in_features))
        return PurgedWeight(shape, self.compute_dtype, self.weight_packed.device)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the computation outside autocast: that of the bias or the retained weight, else the packed one's."""
        for tensor in (self.dense_weight, self.bias):
            if tensor is not None and tensor.dtype in COMPUTE_DTYPES:
                return tensor.dtype
        return self._dtype

    def nvfp4_weight(self) -> nvfp4.NVFP4Tensor:
        """The packed weight as an `NVFP4Tensor` of logical shape (out_features, in_features)."""
        return nvfp4.NVFP4Tensor(
            packed=self.weight_packed,
            block_scale=self.weight_scale.view(torch.float8_e4m3fn),
            global_scale=self.weight_global_scale.view(torch.float32).reshape(()),
            shape=torch.Size((self.out_features, self.in_features)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.quantization.mode == "dense":
            if self.dense_weight is None:
                raise RuntimeError(
                    "this layer was packed and its dense weight purged, so it cannot run dense; deploy with "
                    "retain_original_weights=True to keep that possible"
                )
            return nn.functional.linear(x, self.dense_weight, self.bias)
        return _PackedLinear.apply(x, self)

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        state, host_dtype = self.quantization, self.compute_dtype
        _check_dtypes(x, host_dtype)
        dtype = state.compute_dtype(x.device, host_dtype, training=False)
        kernel = state.kernel("deploy", x.device)
        rows = x.to(dtype).reshape(-1, self.in_features)
        global_scale = self.weight_global_scale.view(torch.float32).reshape(())
        rule = state.settings.global_scale
        w = ops.packed_operand(
            self.weight_packed, self.weight_scale, global_scale, self.in_features, dtype, rule, kernel
        )
        if state.settings.activations:
            xq, x_scale = ops.operand(rows, state.input_scale(x), rule, kernel)
        else:
            xq, x_scale = rows, torch.ones_like(global_scale)
        bias = None if self.bias is None else self.bias.detach().to(dtype)
        y = ops.matmul(xq, x_scale, w, global_scale, bias, output_dtype(x, host_dtype), rule, kernel)
        return y.view(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> NVFP4Linear:
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight_packed.device))
        super()._apply(fn, recurse)
        if probe.dtype in COMPUTE_DTYPES:
            self._dtype = probe.dtype
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load all of a packed layer or nothing, also with strict=False: never a new bias beside an old weight."""
        own = {prefix + name for name, _ in (*self.named_parameters(), *self.named_buffers())}
        given = {key for key in state_dict if key.startswith(prefix)}
        if given and given != own:
            error_msgs.append(
                f"{prefix[:-1]} is packed NVFP4 and takes exactly "
                f"{', '.join(sorted(k[len(prefix) :] for k in own))}; the state "
                f"dict has {', '.join(sorted(k[len(prefix) :] for k in given))}. Dense weights do not fit a "
                f"deployed layer"
            )
            return
        current = {prefix + name: t for name, t in (*self.named_parameters(), *self.named_buffers())}
        for key in sorted(given):
            if state_dict[key].shape != current[key].shape:
                error_msgs.append(
                    f"size mismatch for {key}: {tuple(state_dict[key].shape)} in the state dict, "
                    f"{tuple(current[key].shape)} in the layer"
                )
            elif (state_dict[key].dtype == torch.uint8) != (current[key].dtype == torch.uint8):
                error_msgs.append(f"{key} must be {current[key].dtype}, got {state_dict[key].dtype}")
            else:
                continue
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        kept = "retained" if self.dense_weight is not None else "purged"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"nvfp4 packed, "
            f"dense weight {kept}, mode={self.quantization.mode}"
        )


class _PackedLinear(torch.autograd.Function):
    """The deployed forward; the input's gradient, for adapters on packed layers, is dY Wq."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: NVFP4Linear) -> torch.Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return layer._packed(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight = nvfp4.dequantize(ctx.layer.nvfp4_weight(), dtype=dy.dtype)
        return (dy @ weight).to(ctx.dtype), None


def _check_dtypes(x: torch.Tensor, weight_dtype: torch.dtype) -> None:
    if x.dtype == weight_dtype or x.dtype == torch.float32 or autocast_dtype(x.device):
        return
    raise RuntimeError(
        f"the input is {x.dtype} and the weight {weight_dtype}; nn.Linear refuses that outside autocast, and so "
        f"does this "
        "layer. Convert one, or run under torch.autocast"
    )
