"""What a patched linear is told and what it keeps in mind: `LinearSettings`, `LinearState`, rules both layers share.

Operands are quantized in the compute dtype: autocast's where autocast is on, else the weight's, or the one that
training recorded where that is known. So an evaluation outside autocast sees the weights that training saw, and
`deploy` packs exactly those. Output dtype is what `nn.Linear` gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qatpatch import kernels
from qatpatch.parallel import shared_global_scale
from qatpatch.recomputation import CallHistory
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


def fixed_input_scale(settings: Mapping[str, Any]) -> float | None:
    """The input scale (decode) of a layer with these settings as plain data; None where no number is fixed."""
    if not settings["activations"]:
        return None
    return {"unit": 1.0, "static": settings["static_scale"]}.get(settings["input_scale"])


class LinearState:
    """A patched linear's settings and what it computes now. Copies with the layer, independent afterwards.

    Attributes:
        settings: `LinearSettings`.
        switch: the model's open blocks.
        group: what the layers that are called with the same input have in common (`reuse.input_group`), or None.
        deploy_kernel: the kernel to deploy with, by name or ``"native"``; None: the first usable one.
        trained_dtype: compute dtype of the last forward that counts as training (or, before one, under autocast).
        calibration: is shown every input, in the compute dtype; None outside `calibrate`.
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


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def differentiated(*tensors: torch.Tensor | None) -> bool:
    """Whether anybody may ask for derivatives of what is computed from ``tensors``."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def check_width(x: torch.Tensor, in_features: int) -> None:
    """Raise as `nn.Linear` does: packed rows are padded to whole blocks, so no kernel would notice."""
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise RuntimeError(
            f"the input is {tuple(x.shape)} and this layer has in_features={in_features}: the last axes must be equal"
        )


def check_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    if dtype == weight_dtype or dtype == torch.float32 or autocast:
        return
    raise RuntimeError(
        f"the input is {dtype} and the weight {weight_dtype}; nn.Linear refuses that outside autocast, and so does "
        "this layer. Convert one, or run under torch.autocast"
    )
