"""The kernel table: one literal row per kernel, and `resolve`, which chooses.

A row says what a kernel computes (op, scheme, stages), where it runs (device types, capabilities) and what it needs
(installed packages). `resolve` returns the first usable row or raises `KernelUnavailable` with every row's reason; it
never falls back to another scheme. It decides for one device and remembers nothing.

A row's module is imported on first use and exposes, by op:

- linear: ``operand``, ``operands``, ``packed_operand``, ``quantize``, ``matmul`` (see `reference_nvfp4`);
- attention: ``forward``, ``backward`` (see `reference_attention`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from dataclasses import dataclass
from types import ModuleType

import torch

from qatpatch.errors import KernelUnavailable, nearest

ATTENTION_SCHEMES = ("sage3", "fa4")
# The architectures whose FP4 attention kernels each scheme simulates.
SCHEME_OF_TARGET = {"sm_120": "sage3", "sm_121": "sage3", "sm_100": "fa4", "sm_103": "fa4"}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One row of the table.

    Attributes:
        name: unique name, as receipts print it.
        op: ``"linear"`` or ``"attention"``.
        stages: where it may be bound: ``"train"``, ``"infer"`` (attention inside `infer_attention`), ``"deploy"``.
        schemes: what it computes: ``"nvfp4"`` for linears, ``"sage3"`` or ``"fa4"`` for attention.
        module: imported on first use.
        native: True when it computes on FP4 tensor cores, False when it emulates the numbers.
        device_types: device types it runs on; empty for any.
        minimum_capability: lowest CUDA capability, for kernels that run on CUDA.
        requires: distributions that must be installed.
        head_dims: attention: head dimensions that it serves; empty for any.
        folds_pow2: linear: power-of-two global scales are part of bfloat16 operands (exact there), so that a plain GEMM
            needs no scale.
        float32_operands: linear: operands are float32 whatever the compute dtype, else 16-bit.
        summary: one line for `list_kernels`.
    """

    name: str
    op: str
    stages: tuple[str, ...]
    schemes: tuple[str, ...]
    module: str
    native: bool = False
    device_types: tuple[str, ...] = ()
    minimum_capability: tuple[int, int] | None = None
    requires: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    folds_pow2: bool = False
    float32_operands: bool = False
    summary: str = ""

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the GEMM operands for compute dtype ``dtype``; 16-bit ones hold ``code * block_scale`` exactly."""
        if self.float32_operands:
            return torch.float32
        return torch.bfloat16 if dtype is torch.float32 else dtype

    def folded(self, rule: str, dtype: torch.dtype) -> bool:
        """Whether operands of compute dtype ``dtype`` hold their global scale."""
        return self.folds_pow2 and rule == "pow2" and self.operand_dtype(dtype) is torch.bfloat16

    def unavailable_reason(self, device: torch.device | str) -> str | None:
        """Why this kernel cannot run on ``device``; None when it can."""
        device = torch.device(device)
        if self.device_types and device.type not in self.device_types:
            return f"runs on {' or '.join(self.device_types)}, not on {device.type}"
        for package in self.requires:
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                return f"needs the package {package}, which is not installed (pip install {package})"
        if self.minimum_capability and device.type == "cuda":
            if not torch.cuda.is_available():
                return "needs a CUDA device, and torch finds none"
            capability = torch.cuda.get_device_capability(device)
            if capability < self.minimum_capability:
                return f"needs {architecture(self.minimum_capability)} or newer, this is {architecture(capability)}"
        return None

    def load(self) -> ModuleType:
        """The module with the kernel's functions."""
        return sys.modules.get(self.module) or importlib.import_module(self.module)


TABLE: tuple[Kernel, ...] = (
    Kernel(
        name="triton_linear",
        op="linear",
        stages=("train", "deploy"),
        schemes=("nvfp4",),
        module="qatpatch.kernels.triton_linear",
        device_types=("cuda",),
        minimum_capability=(8, 0),
        requires=("triton",),
        folds_pow2=True,
        summary="Triton quantizers around a 16-bit tensor-core GEMM, sm_80 and up",
    ),
    Kernel(
        name="reference_linear",
        op="linear",
        stages=("train", "deploy"),
        schemes=("nvfp4",),
        module="qatpatch.kernels.reference_nvfp4",
        float32_operands=True,
        summary="plain torch, any device: the definition of the numbers",
    ),
    Kernel(
        name="triton_attention",
        op="attention",
        stages=("train", "infer"),
        schemes=ATTENTION_SCHEMES,
        module="qatpatch.kernels.triton_attention",
        device_types=("cuda",),
        minimum_capability=(8, 0),
        requires=("triton",),
        head_dims=(64, 128),
        summary="Triton, P quantized in registers; fa4 on torch's dense attention, sm_80 and up",
    ),
    Kernel(
        name="reference_attention",
        op="attention",
        stages=("train", "infer"),
        schemes=ATTENTION_SCHEMES,
        module="qatpatch.kernels.reference_attention",
        summary="plain torch, any device: the definition of the numbers",
    ),
)

_BY_NAME = {kernel.name: kernel for kernel in TABLE}


def architecture(capability: tuple[int, int]) -> str:
    """``(10, 0)`` as ``"sm_100"``."""
    return f"sm_{capability[0]}{capability[1]}"


def architecture_of(device: torch.device | str) -> str:
    """``"sm_90"`` for a CUDA device, else the device type."""
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        return architecture(torch.cuda.get_device_capability(device))
    return device.type


def kernel_named(name: str) -> Kernel:
    """The row called ``name``.

    Raises:
        KernelUnavailable: there is no such row.
    """
    kernel = _BY_NAME.get(name)
    if kernel is None:
        raise KernelUnavailable(f"there is no kernel called {name!r}{nearest(name, _BY_NAME)}")
    return kernel


def resolve(
    op: str,
    *,
    stage: str,
    scheme: str,
    device: torch.device | str,
    name: str | None = None,
    head_dim: int | None = None,
) -> Kernel:
    """The first usable row for ``op`` at ``stage`` computing ``scheme`` on ``device``.

    Args:
        op: ``"linear"`` or ``"attention"``.
        stage: ``"train"``, ``"infer"`` or ``"deploy"``.
        scheme: ``"nvfp4"``, ``"sage3"`` or ``"fa4"``.
        device: where the tensors live. Meta tensors resolve like the CPU's: shapes only.
        name: a row's name, ``"native"`` for FP4 tensor cores only, or None for the first that is usable.
        head_dim: of an attention, where it is known.

    Raises:
        KernelUnavailable: no row fits; the message holds each one's reason.
    """
    device = torch.device(device)
    if name not in (None, "native"):
        kernel_named(name)
    reasons = []
    for kernel in TABLE:
        if kernel.op != op or (name not in (None, "native") and kernel.name != name):
            continue
        if stage not in kernel.stages:
            reason = f"serves {' and '.join(kernel.stages)}, not {stage}"
        elif scheme not in kernel.schemes:
            reason = f"computes {' or '.join(kernel.schemes)}, not {scheme}"
        elif head_dim is not None and kernel.head_dims and head_dim not in kernel.head_dims:
            reason = f"serves head dimensions {' and '.join(map(str, kernel.head_dims))}, not {head_dim}"
        elif name == "native" and not kernel.native:
            reason = "emulates the numbers, and kernel='native' asks for FP4 tensor cores"
        else:
            reason = kernel.unavailable_reason(device)
        if reason is None:
            return kernel
        reasons.append(f"  {kernel.name}: {reason}")
    asked = f"{op} {stage} with scheme {scheme} on {architecture_of(device)}"
    asked += (f", head dimension {head_dim}" if head_dim else "") + (f", kernel={name!r}" if name else "")
    found = "\n".join(reasons) or f"  there is no {op} kernel" + (f" called {name!r}" if name else "")
    raise KernelUnavailable(f"no kernel for {asked}:\n{found}")


@torch.compiler.assume_constant_result
def resolved_name(op: str, stage: str, scheme: str, device: str, head_dim: int | None = None) -> str:
    """`resolve(...).name`, a constant to the compiler, which then never descends into the look-up."""
    return resolve(op, stage=stage, scheme=scheme, device=device, head_dim=head_dim).name


class KernelList(tuple[Kernel, ...]):
    """Rows with a table for ``print`` and notebooks."""

    def _rows(self) -> list[tuple[str, ...]]:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        here = architecture_of(device)
        rows = []
        for kernel in self:
            usable = next((d for d in (device, torch.device("cpu")) if kernel.unavailable_reason(d) is None), None)
            state = f"usable on {architecture_of(usable)}" if usable else f"no: {kernel.unavailable_reason(device)}"
            native = "native" if kernel.native else "emulated"
            rows.append((kernel.name, kernel.op, "/".join(kernel.stages), "/".join(kernel.schemes), native, state))
        return [("kernel", "op", "stages", "schemes", "numbers", f"here ({here})"), *rows]

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    __repr__ = __str__


def list_kernels() -> KernelList:
    """Every kernel row; printing it shows which are usable here, or the reason why not."""
    return KernelList(TABLE)
