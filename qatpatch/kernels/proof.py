"""Proof before trust: a kernel is run on the device it is to serve, and compared with the reference.

Packages that import may be built for another chip, read scales in another layout, or leave memory unwritten, all
without an error. So the first bind of a native kernel to a device runs small cases that such faults cannot survive:
ragged sizes, zero blocks and rows, huge and tiny tensors, every global-scale rule; each twice, over memory filled with
two patterns that are NaN or enormous in every type. Both runs must give the same finite bits, and agree with the
reference of `nvfp4` and `reference_attention`, computed on the CPU.

==========  =========================================================================================================
linear      ``|y - y64| <= eps * (|x w| + |bias|) + 2^-13 * sum |terms|`` an element; y64 in FP64 from the same codes
attention   of each head, ``|out - ref| / |ref|`` over all rows, and of each row over the rows' mean norm. `_BOUNDS`
            lie between what a tile of 128 keys instead of 64 costs (0.018 and 0.05 for `sage3`, measured) and what
            dense attention differs by (0.10 to 0.34, and 0.12 to 0.8)
==========  =========================================================================================================

A native linear row's module exposes ``quantize``, ``quantize_activation`` and ``scaled_matmul`` (`native_ops`).

The outcome is kept for the process, by row, device and package versions. Deliberately not here: speed, and shapes of
any one model. A kernel that corrupts its CUDA context takes the process with it; nothing in the process can help that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from qatpatch import nvfp4
from qatpatch.kernels import SMOOTHED_SCHEME, Kernel, kernel_named, reference_attention
from qatpatch.kernels.proof_cases import ATTENTION_CASES, LINEAR_CASES, AttentionCase, LinearCase
from qatpatch.kernels.requirements import installed_version

# 0xFF is NaN in FP32, BF16, FP16 and E4M3; 0x7F is NaN in E4M3 and FP16 and 3.4e38 in FP32 and BF16.
_POISON = (0xFF, 0x7F)
_ACCUMULATION = 2.0**-13
# (over all rows of a head, of the worst row): see the module's table. `sage3_smoothed` has no reference of its own and
# is compared with dense attention.
_BOUNDS = {"sage3": (0.06, 0.15), "fa4": (0.02, 0.05), SMOOTHED_SCHEME: (0.3, 0.9)}
_EMPTY = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What running a kernel's cases gave.

    Attributes:
        cases: how many ran.
        worst: largest error among them as a fraction of its bound; inf where a result was not finite or not repeatable.
        reason: why the kernel is not to be trusted, None where it is.
    """

    cases: int
    worst: float
    reason: str | None


class _Fault(Exception):
    """A case whose result is wrong; the message says how."""


def refusal(kernel: Kernel, device: torch.device) -> str | None:
    """Why ``kernel`` is not to be trusted on ``device``; None where it is. Runs once for the process."""
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return (
                "it has not been compared with the reference on this device yet, and cannot be while a CUDA graph is "
                "captured; run one forward before"
            )
    return _kept(kernel.name, str(device), _versions(kernel)).reason


def examine(kernel: Kernel, device: torch.device | str) -> Outcome:
    """Run ``kernel``'s cases on ``device`` now, emulated kernels too."""
    device = torch.device(device)
    count, worst, where = 0, 0.0, ""
    try:
        module = kernel.load()
        with _undisturbed(device):
            for label, error in _errors(kernel, module, device):
                count += 1
                if not error <= worst:
                    worst, where = error, label
    except _Fault as fault:
        return Outcome(cases=count, worst=float("inf"), reason=f"it disagrees with the reference: {fault}")
    except Exception as error:  # whatever a foreign package raises is the reason why it is not used
        text = " ".join(str(error).split())[:400]
        return Outcome(
            cases=count, worst=float("inf"), reason=f"its proof could not run: {type(error).__name__}: {text}"
        )
    if worst > 1.0:
        reason = f"it disagrees with the reference: {where}: error {worst:.3g} times its bound"
        return Outcome(cases=count, worst=worst, reason=reason)
    return Outcome(cases=count, worst=worst, reason=None)


@functools.cache
def _kept(name: str, device: str, versions: tuple[tuple[str, str | None], ...]) -> Outcome:
    return examine(kernel_named(name), device)


def _versions(kernel: Kernel) -> tuple[tuple[str, str | None], ...]:
    names = ["torch", *(r.distribution for r in kernel.requires if r.distribution)]
    return tuple((name, installed_version(name)) for name in dict.fromkeys(names))


def _errors(kernel: Kernel, module: ModuleType, device: torch.device) -> Iterator[tuple[str, float]]:
    """(case, error as a fraction of its bound), case by case."""
    if kernel.op == "linear":
        for case in LINEAR_CASES:
            if kernel.shape_reason((case.out_features, case.in_features)) is None:
                yield case.label, _linear_error(kernel, module, case, device)
        return
    for scheme in kernel.schemes:
        for dim in kernel.head_dims or (64, 128):
            for case in ATTENTION_CASES:
                if case.masked and not kernel.honours_masks:
                    continue
                if scheme == SMOOTHED_SCHEME and not case.mild:
                    continue
                label = f"{scheme}, head dimension {dim}, {case.label}"
                yield label, _attention_error(module, case, scheme, dim, device, label)


def _linear_error(kernel: Kernel, module: ModuleType, case: LinearCase, device: torch.device) -> float:
    x, weight, bias = case.tensors()
    scale = None if case.global_scale is None else torch.tensor(case.global_scale, dtype=torch.float32)
    operands = [None if t is None else t.to(device) for t in (x, weight, bias, scale)]
    product = _native_product if kernel.native else _emulated_product
    y = _twice(lambda: product(module, *operands, case), device, case.label).double()
    xq, wq = _exact(x, scale, case.rule), _exact(weight, None, case.rule)
    exact, terms = xq @ wq.T, xq.abs() @ wq.abs().T
    offset = torch.zeros((), dtype=torch.float64) if bias is None else bias.double()
    allowed = torch.finfo(case.dtype).eps * (exact.abs() + offset.abs()) + _ACCUMULATION * terms
    return _fraction((y - exact - offset).abs(), allowed)


def _exact(x: torch.Tensor, scale: torch.Tensor | None, rule: str) -> torch.Tensor:
    """The quantized ``x`` in FP64, by the definition."""
    scale = nvfp4.choose_global_scale(x, rule) if scale is None else scale
    quantized = nvfp4.quantize(x, global_scale=scale)
    return nvfp4.dequantize_without_global_scale(quantized).double() * scale.double()


def _native_product(
    module: ModuleType,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    case: LinearCase,
) -> torch.Tensor:
    from qatpatch.kernels import layouts

    packed, block_scale, weight_scale = module.quantize(weight, global_scale=None, rule=case.rule)
    operand = module.quantize_activation(x, global_scale=scale, rule=case.rule)
    tiled = layouts.tile_scales(block_scale)
    return module.scaled_matmul(*operand, packed, tiled, weight_scale, bias, out_dtype=case.dtype)


def _emulated_product(
    module: ModuleType,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    case: LinearCase,
) -> torch.Tensor:
    packed = module.quantize(weight, global_scale=None, rule=case.rule)
    w = module.packed_operand(*packed, columns=weight.shape[1], dtype=x.dtype, rule=case.rule)
    xq, x_scale = module.operand(x, global_scale=scale, rule=case.rule)
    return module.matmul(xq, x_scale, w, packed[2], bias, out_dtype=case.dtype, rule=case.rule)


def _attention_error(
    module: ModuleType, case: AttentionCase, scheme: str, dim: int, device: torch.device, label: str
) -> float:
    q, k, v, mask = case.tensors(dim)
    scale = case.scale * dim**-0.5
    operands = [None if t is None else t.to(device) for t in (q, k, v, mask)]
    given = [None if t is None else t.clone() for t in operands]

    def run() -> torch.Tensor:
        *qkv, attn_mask = operands
        return module.forward(*qkv, scheme=scheme, scale=scale, attn_mask=attn_mask, train=False)[0]

    out = _twice(run, device, label).float()
    if any(before is not None and not torch.equal(before, t) for before, t in zip(given, operands, strict=True)):
        raise _Fault(f"{label}: it changes its input")
    if scheme == SMOOTHED_SCHEME:
        heads_first = (t.float().transpose(1, 2) for t in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=scale).transpose(1, 2)
    else:
        options = dict(scheme=scheme, scale=scale, attn_mask=mask, train=False)
        expected = reference_attention.forward(q, k, v, **options)[0].float()
    error, size = (out - expected).norm(dim=3), expected.norm(dim=3)
    typical = size.square().mean(1, keepdim=True).sqrt()
    overall, worst_row = _BOUNDS[scheme]
    whole = _fraction(error.square().mean(1).sqrt(), overall * typical.squeeze(1))
    return max(whole, _fraction(error, worst_row * torch.maximum(size, typical)))


def _fraction(error: torch.Tensor, allowed: torch.Tensor) -> float:
    """Largest error over what is allowed; where nothing is, inf for any error."""
    return torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


def _twice(run: Callable[[], torch.Tensor], device: torch.device, label: str) -> torch.Tensor:
    """The result of ``run`` on the CPU, after it was the same over both kinds of poisoned memory."""
    results = []
    for byte in _POISON:
        _litter(device, byte)
        with _Poisoned(byte):
            results.append(run().cpu())
    first, second = results
    wrong = int((~first.isfinite()).sum())
    if wrong:
        raise _Fault(f"{label}: {wrong} of {first.numel()} results are not finite (memory that nobody wrote?)")
    if not torch.equal(first, second):
        differ = int((first != second).sum())
        raise _Fault(f"{label}: {differ} of {first.numel()} results depend on what was in memory before")
    return first


class _Poisoned(TorchDispatchMode):
    """Fills every tensor that torch hands out uninitialised with one byte."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        self._byte = byte

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY and isinstance(out, torch.Tensor) and out.numel() and not out.is_meta:
            storage = torch.empty(0, dtype=torch.uint8, device=out.device).set_(out.untyped_storage())
            storage.fill_(self._byte)
        return out


def _litter(device: torch.device, byte: int) -> None:
    """Leave ``byte`` in the memory that the allocator hands out next: what C++ code takes escapes `_Poisoned`."""
    sizes = [1 << n for n in range(9, 22) for _ in range(2)]
    blocks = [torch.full((size,), byte, dtype=torch.uint8, device=device) for size in sizes]
    del blocks


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """No gradients, autocast, default device or dispatch mode of the caller's; its device current; one CPU thread.

    The first look-up may come while a compiler or an estimate runs the model on fake tensors.

    The reference works on tiny tensors: where cores are busy, waiting for a second thread takes 25 times as long.
    """
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    autocast = torch.autocast(device.type, enabled=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            with autocast, torch.device("cpu"), current:
                yield
    finally:
        torch.set_num_threads(threads)
