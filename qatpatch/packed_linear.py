"""`NVFP4Linear`: a deployed linear, its weight packed and its dense one purged.

    y = Xq Wq^T + bias        with the packed Wq: the numbers that `QATLinear` trained

It replaces the object, and its storage is uint8 throughout (codes, E4M3 bytes, the FP32 global scale as four bytes), so
that no ``.to(dtype)``, autocast or loader can change it. `PurgedWeight` stands where the dense weight was: models ask a
few layers for its dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from qatpatch import kernels, nvfp4
from qatpatch.autocast import autocast_dtype, without_autocast
from qatpatch.kernels import layouts, native_ops, ops
from qatpatch.linear import QATLinear
from qatpatch.linear_state import COMPUTE_DTYPES, LinearState, cast, check_dtypes, check_width, differentiated

_PURGED = (
    "{} needs a dense weight, and qatpatch.deploy packed this one; nothing can be added to or read from packed "
    "weights. Merge adapters (fuse_lora, merge_and_unload) before deploy (unfuse_lora undoes what was merged into "
    "other layers now); retain_original_weights=True keeps weights to run layers dense"
)


class PurgedWeight(torch.Tensor):
    """Stands for a weight that was packed: shape, dtype and device, no memory, and no arithmetic.

    Also where the dense one is retained: a tool that added something to that one would change nothing that runs.
    """

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


def quantized_source(linear: QATLinear) -> torch.Tensor:
    """The weight in the dtype that training quantized it in."""
    weight = linear.weight.detach()
    return weight.to(linear.quantization.trained_dtype or weight.dtype)


def packed_weight(
    linear: QATLinear, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, block scale bytes and global scale (uint8, uint8, float32) of a layer's weight: what deploy keeps.

    Args:
        linear: a layer that trains.
        global_scale: float32 (), decode direction; default: by the layer's rule.
    """
    state, weight = linear.quantization, linear.weight
    kernel = state.kernel("deploy", weight.device, tuple(weight.shape), weight.dtype, linear.bias is not None)
    return ops.quantize(quantized_source(linear), global_scale, state.settings.global_scale, kernel)


class NVFP4Linear(nn.Linear):
    """A deployed linear: packed weight (out_features, in_features), the compute it was trained for.

    Buffers, all uint8: ``weight_packed`` (N, ceil16(K)/2), element 2j in the low nibble; ``weight_scale`` (N,
    ceil(K/16)), E4M3 bytes, linear; ``weight_global_scale`` (4), the bytes of one FP32 decode scale. ``bias`` (N) is
    the parameter from before; ``dense_weight`` (N, K) is there where the original was retained. ``weight`` answers
    dtype, shape and device, and no more. ``weight_scale_tiled``, in no state dict, is there once a native kernel needed
    it: the block scales again in 128x4 tiles, 1/16 byte an element.
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
        self._tiled_from: tuple[int, int] | None = None
        self._trainable = False  # the dense weight, should it be put back
        self.bias = bias
        self.dense_weight = dense_weight
        self.quantization = quantization
        self._dtype = dtype

    @classmethod
    def from_linear(cls, linear: QATLinear, *, retain: bool) -> NVFP4Linear:
        """Pack ``linear``; ``retain`` keeps its dense weight as ``dense_weight`` (the same Parameter)."""
        state, weight = linear.quantization, linear.weight
        packed, block_scale, global_scale = packed_weight(linear)
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
        if kernels.kernel_named(layer.kernel(weight.device)).native:
            layer.tiled_scale()
        return layer

    def freeze_dense(self) -> None:
        """Let no step of an optimizer move the retained weight away from the packed one."""
        self._trainable = self._trainable or self.dense_weight.requires_grad
        self.dense_weight.requires_grad_(False).grad = None

    @property
    def weight(self) -> torch.Tensor:
        """A `PurgedWeight`, which answers shape, dtype and device."""
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
            return nn.functional.linear(x, self.dense_weight.detach(), self.bias)
        if differentiated(x, self.bias):
            return _PackedLinear.apply(x, self.bias, self)
        return self._packed(x)

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        state, host_dtype, device = self.quantization, self.compute_dtype, x.device
        autocast, packed, bias = autocast_dtype(device), self.weight_packed, self.bias
        check_dtypes(x.dtype, host_dtype, autocast)
        check_width(x, self.in_features)
        dtype = autocast or state.trained_dtype or host_dtype
        out_dtype = autocast or host_dtype
        kernel = self.kernel(device, out_dtype)
        native = kernels.kernel_named(kernel).native
        run = (native_ops if native else ops).calls(x, packed)
        rows = cast(x, dtype)
        rows = rows if x.dim() == 2 else rows.reshape(-1, self.in_features)
        global_scale = self.weight_global_scale.view(torch.float32).reshape(())
        rule = state.settings.global_scale
        bias = None if bias is None else cast(bias.detach(), dtype)
        activations, weight = state.settings.activations, (packed, self.weight_scale, global_scale)
        share = activations and state.shares_input and run.direct
        if not (native or share):
            y = run.packed_linear(
                rows, *weight, bias, state.input_scale(x) if activations else None, activations, out_dtype, rule, kernel
            )
            return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)
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
            w = run.packed_operand(*weight, self.in_features, dtype, rule, kernel)
            y = run.matmul(*quantized, w, global_scale, bias, out_dtype, rule, kernel)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def kernel(self, device: torch.device, out_dtype: torch.dtype | None = None) -> str:
        """The kernel that computes on ``device`` with ``out_dtype`` (default: outside autocast)."""
        shape = (self.out_features, self.in_features)
        return self.quantization.kernel("deploy", device, shape, out_dtype or self.compute_dtype, self.bias is not None)

    def tiled_scale(self) -> torch.Tensor:
        """The block scales as native kernels read them (`layouts.tile_scales`): kept until those are others."""
        scale, tiled = self.weight_scale, getattr(self, "weight_scale_tiled", None)
        if torch.compiler.is_compiling():
            return layouts.tile_scales(scale) if tiled is None else tiled
        source = scale.data_ptr(), 0 if scale.is_inference() else scale._version
        if tiled is None or self._tiled_from != source:
            tiled = layouts.tile_scales(scale)
            if type(tiled) is torch.Tensor:  # no fake tensor of somebody's estimate
                # Registered only now: accelerate's offload hooks do not bear buffers that are None.
                self.register_buffer("weight_scale_tiled", tiled, persistent=False)
                self._tiled_from = source
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

    def _settings(self) -> dict[str, Any]:
        """What the packed weight was trained with, as the metadata of a state dict carries it."""
        trained = self.quantization.trained_dtype
        settings = asdict(self.quantization.settings)
        return {**settings, "in_features": self.in_features, "computes_in": str(trained or self.compute_dtype)}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["qatpatch"] = self._settings()

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
        self._buffers.pop("weight_scale_tiled", None)
        theirs = local_metadata.get("qatpatch", self._settings())
        if theirs != self._settings():
            differing = sorted(key for key in self._settings() if theirs.get(key) != self._settings()[key])
            error_msgs.append(
                f"{prefix[:-1]} was packed with other settings than the state dict's: "
                + ", ".join(f"{key}={theirs.get(key)!r} there, {self._settings()[key]!r} here" for key in differing)
            )
            return
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
            elif key == prefix + "weight_packed" and not self._fits(state_dict[key]):
                error_msgs.append(
                    f"{key} has codes beyond the {self.in_features} inputs of the layer: it is of a wider layer"
                )
            else:
                continue
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _fits(self, packed: torch.Tensor) -> bool:
        """Whether codes of the layer's stored width may be of its logical one."""
        unpadded = self.in_features % nvfp4.BLOCK_SIZE == 0
        return unpadded or packed.is_meta or nvfp4.padding_is_zero(packed, self.in_features)

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
