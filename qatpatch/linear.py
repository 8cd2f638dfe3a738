"""`QATLinear` (training) and `NVFP4Linear` (deployed).

    y = Xq Wq^T + bias        Xq, Wq: NVFP4, blocks of 16 along in_features; FP32 accumulation, one rounding

Forward GEMM     y  = Xq Wq^T + b
Input gradient   dX = dY W         unquantized operands (``backward="high_precision"``) or
Weight gradient  dW = dY^T X       the dequantized ones (``"quantized"``, which keeps X packed: 0.5625 byte an element)
Bias gradient    db = sum dY

The estimator is straight-through with no clip mask. Operands are quantized in the compute dtype: autocast's where
autocast is on, else the weight's, or the one that training recorded where that is known. So an evaluation outside
autocast sees the weights that training saw, and `deploy` packs exactly those. Output dtype is what `nn.Linear` gives.

`QATLinear` adds no parameter and no buffer; a live ``nn.Linear`` becomes one by assigning its class. `NVFP4Linear`
replaces the object: its storage is uint8 throughout (codes, E4M3 bytes, the FP32 global scale as four bytes), so that
no ``.to(dtype)``, autocast or loader can change it. Neither knows a model or diffusers.

A model has hundreds of these layers, and a GPU is done with a small one in 20 us: what a forward costs the host counts.
So attributes and autocast are read once, no cast or view is made that changes nothing, there is no autograd node
without gradients, and with them one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from qatpatch import kernels, nvfp4
from qatpatch.autocast import autocast_dtype, without_autocast
from qatpatch.kernels import layouts, native_ops, ops
from qatpatch.parallel import shared_global_scale
from qatpatch.recomputation import Call, CallHistory, remember
from qatpatch.reuse import Kept
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

    def __post_init__(self) -> None:
        scale = self.static_scale
        if scale is not None and self.global_scale == "pow2" and math.frexp(scale)[0] != 0.5:
            raise ValueError(
                f"static_scale={scale} is no power of two, as global_scale='pow2' promises; use global_scale='amax', "
                "which takes any scale"
            )


class LinearState:
    """A patched linear's settings and what it computes now. Copies with the layer, independent afterwards.

    Attributes:
        settings: `LinearSettings`.
        switch: the model's open blocks.
        group: what the layers that are called with the same input have in common (`reuse.input_group`), or None.
        deploy_kernel: the kernel to deploy with, by name or ``"native"``; None: the first usable one.
        trained_dtype: compute dtype of the last forward that counts as training (or, before one, under autocast).
        calibration: largest input magnitudes seen, float32 (); None outside `calibrate`.
    """

    def __init__(self, settings: LinearSettings, switch: Switch | None = None, group: str | None = None) -> None:
        self.settings = settings
        self.switch = switch or Switch()
        self.group = group
        self.shares_input = group is not None  # for compilers, to which the groups of all blocks must look alike
        self.deploy_kernel: str | None = None
        self.trained_dtype: torch.dtype | None = None
        self.calibration: Callable[[torch.Tensor], None] | None = None
        self.history = CallHistory()
        self._kernels: dict[tuple[Any, ...], str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # What was resolved holds for this process: a file may be read where other kernels run.
        return {**vars(self), "_kernels": {}}

    @property
    def mode(self) -> str:
        """``"quantized"``, or ``"dense"`` where an open block says so."""
        switch = self.switch
        dense = switch.linear == "dense" or (switch.stage == "base" and self.settings.refine_only)
        return "dense" if dense else "quantized"

    def kernel(
        self,
        stage: str,
        device: torch.device,
        shape: tuple[int, int] | None = None,
        out_dtype: torch.dtype | None = None,
        bias: bool = False,
    ) -> str:
        """The kernel for tensors on ``device``, resolved on first use there.

        Native ones serve only some shapes (out_features, in_features) and output dtypes, no unquantized input, and not
        every one a bias.
        """
        asked = self.deploy_kernel if stage == "deploy" else None
        key = (stage, device.type, device.index, shape, out_dtype, bias, asked)
        name = self._kernels.get(key)
        if name is None:
            name = self._kernels[key] = kernels.resolved_name(
                "linear", stage, "nvfp4", str(device), name=asked, **self.limits(shape, out_dtype, bias)
            )
        return name

    def limits(
        self, shape: tuple[int, int] | None = None, out_dtype: torch.dtype | None = None, bias: bool = False
    ) -> dict[str, Any]:
        """What `kernels.resolution` must know of the layer."""
        return {"shape": shape, "weight_only": not self.settings.activations, "out_dtype": out_dtype, "bias": bias}

    def compute_dtype(self, autocast: torch.dtype | None, weight_dtype: torch.dtype, *, training: bool) -> torch.dtype:
        """The dtype in which operands are quantized, ``autocast`` (None: off) first; recorded for deploy."""
        dtype = autocast
        if dtype is None:
            dtype = weight_dtype if training or self.trained_dtype is None else self.trained_dtype
        if self.trained_dtype is not dtype:
            # Models that were never put in training mode train too, and weights may be packed after evaluation alone.
            counts = training or (autocast is not None and (self.trained_dtype is None or torch.is_grad_enabled()))
            if counts:
                self.trained_dtype = dtype
        return dtype

    def input_scale(self, x: torch.Tensor) -> torch.Tensor | None:
        """The fixed global scale of the input, or None where it follows the rule on each call."""
        if self.settings.input_scale == "dynamic" or self.calibration is not None:
            group = None if self.switch.context is None else self.switch.context()
            if group is None or not self.settings.activations:
                return None
            return shared_global_scale(x, self.settings.global_scale, group)
        if self.settings.input_scale == "unit":
            return torch.ones((), dtype=torch.float32, device=x.device)
        if self.settings.static_scale is None:
            raise RuntimeError(
                "input_scale='static' needs calibrated scales and this layer has none; run forwards inside "
                "`with qatpatch.calibrate(model):` first"
            )
        return torch.full((), self.settings.static_scale, dtype=torch.float32, device=x.device)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _differentiated(*tensors: torch.Tensor | None) -> bool:
    """Whether anybody may ask for derivatives of what is computed from ``tensors``."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


class _Once(NamedTuple):
    """What one call may take from earlier ones."""

    weight: Kept | None  # the quantized weight, inside a scope that keeps it
    state: LinearState | None  # of a layer that shares its input
    source: torch.Tensor | None  # that input, before any cast


# Input and weight by two operators, so that a compiler sees which inputs are equal.
_APART = _Once(None, None, None)


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
    kept, sharer = (None, None) if once is None else (once.weight, once.state)
    quantized = key = None
    if sharer is not None:
        key = sharer.group, settings, kernel, x.dtype, pack
        quantized = sharer.switch.input.find(sharer, once.source, key)
    missing = settings.activations and quantized is None
    if missing and kept is None and not pack and once is not _APART:
        xq, x_scale, w, w_scale = run.operands(rows, weight, input_scale, rule, kernel)
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
            dy = _as(dy, ctx.dtype)
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
                db = _as(rows.sum(0), ctx.bias_dtype)
        return dx, dw, db, None, None, None, None, None, None


def _dense(operand: torch.Tensor, scale: torch.Tensor, ctx: Any) -> torch.Tensor:
    """The dequantized values of a GEMM operand, in the compute dtype."""
    if kernels.kernel_named(ctx.kernel).folded(ctx.settings.global_scale, ctx.dtype):
        return _as(operand, ctx.dtype)
    # A scale () does not widen a 16-bit operand by itself.
    wide = _as(operand, torch.float32) if ctx.dtype is torch.float32 else operand
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
        _check_dtypes(x.dtype, weight_dtype, autocast)
        source, x, weight = x, _as(x, dtype), _as(weight, dtype)
        bias = None if bias is None else _as(bias, dtype)
        if state.calibration is not None and not torch.compiler.is_compiling():
            state.calibration(nvfp4.finite_amax(x))
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
        compiling = torch.compiler.is_compiling()
        once = None if compiling else _once(state, source, x, weight, kernel)
        if _differentiated(x, weight, bias):
            # Only graphs with a backward are rid of repeated operators.
            return _QATLinear.apply(*arguments, _APART if compiling and state.shares_input else once, call)
        return _product(*arguments, once)[0]

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
    "weights. Merge adapters (fuse_lora, merge_and_unload) before deploy, or deploy with "
    "retain_original_weights=True to keep running layers dense"
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
    dtype, shape and device. ``weight_scale_tiled``, in no state dict, is there once a native kernel needed it: the
    block scales again in 128x4 tiles, 1/16 byte an element.
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
        self.register_buffer("weight_scale_tiled", None, persistent=False)
        self._tiled_from: tuple[int, int] | None = None
        self.bias = bias
        self.dense_weight = dense_weight
        self.quantization = quantization
        self._dtype = dtype

    @classmethod
    def from_linear(cls, linear: QATLinear, *, retain: bool) -> NVFP4Linear:
        """Pack ``linear``; ``retain`` keeps its dense weight as ``dense_weight`` (the same Parameter)."""
        state, weight = linear.quantization, linear.weight.detach()
        source = weight.to(state.trained_dtype or weight.dtype)
        bias = linear.bias is not None
        kernel = state.kernel("deploy", weight.device, tuple(weight.shape), weight.dtype, bias)
        packed, block_scale, global_scale = ops.quantize(source, None, state.settings.global_scale, kernel)
        layer = cls(
            packed=packed,
            block_scale=block_scale,
            global_scale=global_scale,
            in_features=linear.in_features,
            bias=linear.bias,
            dense_weight=linear.weight if retain else None,
            dtype=weight.dtype,
            quantization=state,
        )
        if kernels.kernel_named(kernel).native:
            layer.tiled_scale()
        return layer

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
        if _differentiated(x, self.bias):
            return _PackedLinear.apply(x, self.bias, self)
        return self._packed(x)

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        state, host_dtype, device = self.quantization, self.compute_dtype, x.device
        autocast, packed, bias = autocast_dtype(device), self.weight_packed, self.bias
        _check_dtypes(x.dtype, host_dtype, autocast)
        dtype = autocast or state.trained_dtype or host_dtype
        out_dtype = autocast or host_dtype
        kernel = self.kernel(device, out_dtype)
        native = kernels.kernel_named(kernel).native
        run = (native_ops if native else ops).calls(x, packed)
        rows = _as(x, dtype)
        rows = rows if x.dim() == 2 else rows.reshape(-1, self.in_features)
        global_scale = self.weight_global_scale.view(torch.float32).reshape(())
        rule = state.settings.global_scale
        bias = None if bias is None else _as(bias.detach(), dtype)
        quantized = rows, None
        if state.settings.activations:
            share = state.shares_input and run.direct
            shared, key = state.switch.input, (state.group, state.settings, kernel, dtype, "deployed") if share else ()
            quantized = shared.find(state, x, key) if share else None
            if quantized is None:
                quantize = run.quantize_activation if native else run.operand
                quantized = quantize(rows, state.input_scale(x), rule, kernel)
                if share:
                    shared.keep(state, x, key, quantized)
        if native:
            y = run.scaled_matmul(*quantized, packed, self.tiled_scale(), global_scale, bias, out_dtype, kernel)
        else:
            w = run.packed_operand(packed, self.weight_scale, global_scale, self.in_features, dtype, rule, kernel)
            y = run.matmul(*quantized, w, global_scale, bias, out_dtype, rule, kernel)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def kernel(self, device: torch.device, out_dtype: torch.dtype | None = None) -> str:
        """The kernel that computes on ``device`` with ``out_dtype`` (default: outside autocast)."""
        shape = (self.out_features, self.in_features)
        return self.quantization.kernel("deploy", device, shape, out_dtype or self.compute_dtype, self.bias is not None)

    def tiled_scale(self) -> torch.Tensor:
        """The block scales as native kernels read them (`layouts.tile_scales`): kept until those are others."""
        scale, tiled = self.weight_scale, self.weight_scale_tiled
        if torch.compiler.is_compiling():
            return layouts.tile_scales(scale) if tiled is None else tiled
        source = scale.data_ptr(), 0 if scale.is_inference() else scale._version
        if tiled is None or self._tiled_from != source:
            tiled = layouts.tile_scales(scale)
            if type(tiled) is torch.Tensor:  # no fake tensor of somebody's estimate
                self.weight_scale_tiled, self._tiled_from = tiled, source
        return tiled

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> NVFP4Linear:
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight_packed.device))
        if fn(torch.empty(0, dtype=torch.uint8, device=self.weight_packed.device)).dtype is not torch.uint8:
            raise RuntimeError(
                "a deployed layer holds packed codes and scale bytes, which cannot be converted to another dtype "
                "(type()?); use .to(dtype), which converts the rest"
            )
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
        self.weight_scale_tiled = None
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
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, nvfp4 "
            f"packed, dense weight {kept}, mode={self.quantization.mode}"
        )


class _PackedLinear(torch.autograd.Function):
    """The deployed forward. For adapters on packed layers: the input's gradient is dY Wq, the bias's sum dY."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: NVFP4Linear) -> torch.Tensor:
        ctx.layer, ctx.dtype, ctx.bias_dtype = layer, x.dtype, None if bias is None else bias.dtype
        return layer._packed(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        dx = db = None
        with without_autocast(dy.device):
            if ctx.needs_input_grad[0]:
                dx = (dy @ nvfp4.dequantize(ctx.layer.nvfp4_weight(), dtype=dy.dtype)).to(ctx.dtype)
            if ctx.bias_dtype is not None and ctx.needs_input_grad[1]:
                db = dy.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return dx, db, None


def _check_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    if dtype == weight_dtype or dtype == torch.float32 or autocast:
        return
    raise RuntimeError(
        f"the input is {dtype} and the weight {weight_dtype}; nn.Linear refuses that outside autocast, and so does "
        "this layer. Convert one, or run under torch.autocast"
    )
