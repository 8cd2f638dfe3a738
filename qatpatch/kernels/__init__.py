"""Which kernel runs: `resolve` walks the table, and every row that it passes over keeps its reason.

The rows are in `table`, what they need from outside in `requirements`. `resolution` returns the first usable row with
the reasons of the better ones, or raises `KernelUnavailable` with every row's; it never falls back to another scheme.
It decides for one device and remembers nothing, except what `proof` found: a native kernel is bound to a device only
after it has agreed there with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from qatpatch.errors import KernelUnavailable, nearest
from qatpatch.kernels.requirements import Requirement, architecture
from qatpatch.kernels.table import ATTENTION_SCHEMES, SCHEME_OF_TARGET, SMOOTHED_SCHEME, TABLE, Kernel

__all__ = [
    "ATTENTION_SCHEMES",
    "SCHEME_OF_TARGET",
    "SMOOTHED_SCHEME",
    "TABLE",
    "Kernel",
    "KernelList",
    "Requirement",
    "Resolution",
    "architecture",
    "architecture_of",
    "honours_masks",
    "kernel_named",
    "list_kernels",
    "present_devices",
    "resolution",
    "resolve",
    "resolved_name",
    "two_roundings",
]
_BY_NAME = {kernel.name: kernel for kernel in TABLE}


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What a look-up found.

    Attributes:
        kernel: the row to run.
        architecture: of the device that it was resolved for: ``"sm_90"``, ``"cpu"``.
        scheme: what it computes.
        refused: name -> reason, of every row before it in the table that serves the same op.
        note: what the row does otherwise than it should, and was bound for all that since it was asked for by name.
    """

    kernel: Kernel
    architecture: str
    scheme: str
    refused: dict[str, str]
    note: str = ""


def architecture_of(device: torch.device | str) -> str:
    """``"sm_90"`` for a CUDA device, else the device type."""
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        return architecture(torch.cuda.get_device_capability(device))
    return device.type


def present_devices() -> tuple[torch.device, ...]:
    """The CPU and every CUDA device of this machine."""
    return torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))


def kernel_named(name: str, op: str | None = None, others: Iterable[str] = ()) -> Kernel:
    """The row called ``name``.

    Args:
        op: the row must serve it; None: any.
        others: what might have been meant besides such rows.

    Raises:
        KernelUnavailable: there is no such row; the message shows the nearest of those that would do.
    """
    kernel = _BY_NAME.get(name)
    if kernel is None or op not in (None, kernel.op):
        kind = f"{op} kernel" if op else "kernel"
        known = [row.name for row in _BY_NAME.values() if op in (None, row.op)]
        raise KernelUnavailable(f"there is no {kind} called {name!r}{nearest(name, (*known, *others))}")
    return kernel


def resolution(
    op: str,
    *,
    stage: str,
    scheme: str,
    device: torch.device | str,
    name: str | None = None,
    head_dim: int | None = None,
    shape: tuple[int, int] | None = None,
    weight_only: bool = False,
    out_dtype: torch.dtype | None = None,
    bias: bool = False,
    masked: bool = False,
    prove: Callable[[Kernel, torch.device], str | None] | None = None,
) -> Resolution:
    """The first usable row for ``op`` at ``stage`` computing ``scheme`` on ``device``, and why not the ones before it.

    Args:
        op: ``"linear"`` or ``"attention"``.
        stage: ``"train"``, ``"infer"`` or ``"deploy"``.
        scheme: ``"nvfp4"``, ``"sage3"``, ``"fa4"`` or ``"sage3_smoothed"``.
        device: where the tensors live. Meta tensors resolve like the CPU's: shapes only.
        name: a row's name, ``"native"`` for FP4 tensor cores only, or None for the first that is usable.
        head_dim: of an attention, where it is known.
        shape: (out_features, in_features) of a linear, where it is known.
        weight_only: the linear's input stays unquantized.
        out_dtype: of a linear, where it is known.
        bias: the linear has one.
        masked: the attention has a mask that must be honoured.
        prove: the reason why a native row may not be trusted on a device, None where it may; `proof.refusal` by
            default.

    Raises:
        KernelUnavailable: no row fits; the message holds each one's reason.
    """
    device = torch.device(device)
    if name not in (None, "native"):
        kernel_named(name, op, ("native",))
    refused: dict[str, str] = {}
    for kernel in TABLE:
        if kernel.op != op or (name not in (None, "native") and kernel.name != name):
            continue
        reason = _unasked_reason(kernel, stage, scheme, name) or kernel.device_reason(device)
        if reason is None:
            reason = _unfit_reason(kernel, head_dim, shape, weight_only, out_dtype, masked)
        note = two_roundings(kernel, bias)
        if reason is None and note and name != kernel.name:
            reason = f"{note}; triton_nvfp4 rounds once"
        if reason is None:
            reason = kernel.package_reason(device)
        if reason is None and kernel.native:
            reason = (prove or _proof)(kernel, device)
        if reason is None:
            here = architecture_of(device)
            return Resolution(kernel=kernel, architecture=here, scheme=scheme, refused=dict(refused), note=note)
        refused[kernel.name] = reason
    asked = f"{op} {stage} with scheme {scheme} on {architecture_of(device)}"
    asked += (f", head dimension {head_dim}" if head_dim else "") + (f", (out, in) = {shape}" if shape else "")
    asked += (", with a bias" if bias else "") + (", with a mask" if masked else "")
    asked += f", kernel={name!r}" if name else ""
    found = "\n".join(f"  {row}: {reason}" for row, reason in refused.items())
    found = found or f"  there is no {op} kernel"
    raise KernelUnavailable(f"no kernel for {asked}:\n{found}")


def resolve(
    op: str,
    *,
    stage: str,
    scheme: str,
    device: torch.device | str,
    name: str | None = None,
    **limits: Any,
) -> Kernel:
    """`resolution`'s row."""
    return resolution(op, stage=stage, scheme=scheme, device=device, name=name, **limits).kernel


def _unasked_reason(kernel: Kernel, stage: str, scheme: str, name: str | None) -> str | None:
    """Why a row is not what was asked for; None when it is."""
    if stage not in kernel.stages:
        return f"serves {' and '.join(kernel.stages)}, not {stage}"
    if kernel.explicit_only and name != kernel.name:
        return f"computes another scheme, {kernel.schemes[0]}: only on request, kernel={kernel.name!r}"
    if scheme not in kernel.schemes:
        return f"computes {' or '.join(kernel.schemes)}, not {scheme}"
    if name == "native" and not kernel.native:
        return "emulates the numbers, and kernel='native' asks for FP4 tensor cores"
    return None


def _unfit_reason(
    kernel: Kernel,
    head_dim: int | None,
    shape: tuple[int, int] | None,
    weight_only: bool,
    out_dtype: torch.dtype | None,
    masked: bool,
) -> str | None:
    """Why a row does not serve such operands, on any device; None when it does."""
    if head_dim is not None and kernel.head_dims and head_dim not in kernel.head_dims:
        return f"serves head dimensions {' and '.join(map(str, kernel.head_dims))}, not {head_dim}"
    if masked and not kernel.honours_masks:
        return "takes no mask"
    if weight_only and not kernel.weight_only:
        return "multiplies FP4 by FP4, and this layer's input stays unquantized"
    if out_dtype is not None and kernel.out_dtypes and out_dtype not in kernel.out_dtypes:
        *names, asked = (str(dtype).removeprefix("torch.") for dtype in (*kernel.out_dtypes, out_dtype))
        return f"writes {' or '.join(names)}, not {asked}"
    return None if shape is None else kernel.shape_reason(shape)


def two_roundings(kernel: Kernel, bias: bool) -> str:
    """What a row does wrong to a layer with a ``bias``; empty where it rounds once."""
    if bias and kernel.rounds_before_bias:
        return "adds a bias after its own rounding: two roundings where the format promises one"
    return ""


def _proof(kernel: Kernel, device: torch.device) -> str | None:
    from qatpatch.kernels import proof

    return proof.refusal(kernel, device)


@torch.compiler.assume_constant_result
def resolved_name(
    op: str,
    stage: str,
    scheme: str,
    device: str,
    head_dim: int | None = None,
    shape: tuple[int, int] | None = None,
    weight_only: bool = False,
    out_dtype: torch.dtype | None = None,
    bias: bool = False,
    masked: bool = False,
    name: str | None = None,
) -> str:
    """`resolve(...).name`, a constant to the compiler, which then never descends into the look-up."""
    limits = dict(
        head_dim=head_dim, shape=shape, weight_only=weight_only, out_dtype=out_dtype, bias=bias, masked=masked
    )
    return resolve(op, stage=stage, scheme=scheme, device=device, name=name, **limits).name


@torch.compiler.assume_constant_result
def honours_masks(name: str) -> bool:
    """Whether the row called ``name`` takes a mask: a constant to the compiler."""
    return kernel_named(name).honours_masks


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
    """Every kernel row; printing it shows which are usable here, or the reason why not.

    Numbers are not looked at: ``python -m qatpatch doctor`` runs every usable kernel against the reference.
    """
    return KernelList(TABLE)
