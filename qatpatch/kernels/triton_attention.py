"""QAT attention in Triton: `sage3` and `fa4`, forward and backward, for sm_80 and newer.

The contract, the maths and what is determined to the bit are `reference_attention`'s. How it is computed:

==========  ===========================================================================================================
forward     K and V rounded once, in a pass of their own; Q in the attention kernel; P in registers
backward    the same pass; then dQ, which leaves the rounded Q and dO / l behind; then dK and dV
fa4         Q and K rounded in a pass, then torch's fastest dense attention, forward and backward; Triton where that
            does not apply (a mask, FP32 operands)
==========  ===========================================================================================================

Operands of every product are 16-bit whatever the input's type: the rounded Q, K, V and P are exact in FP16 and BF16.
The forward multiplies in FP16, `fa4`'s V excepted (FP16 for FP16 input, else BF16); the backward in BF16, where dO / l
and dS are rounded, as they are by a dense attention. All sums, the softmax and its statistics are FP32.

`sage3` and every Triton path give the same bits on every run. `fa4` without a mask is as reproducible as torch's own
attention on the same device: ``torch.use_deterministic_algorithms(True)`` makes its backward so.

What a backward needs and a forward would have to keep (the rounded operands) is computed again: saved are q, k, v,
``out_hp`` and two FP32 numbers a row.

Deliberately not here: autograd and validation (`qatpatch.attention`); head dimensions other than `HEAD_DIMS`.
"""

from __future__ import annotations

import contextlib
import math

import torch

try:
    import triton  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        "qatpatch.kernels.triton_attention needs Triton, which is not installed: pip install triton"
    ) from error

from qatpatch.kernels import triton_attention_dense as dense
from qatpatch.kernels.reference_attention import INVALID_BIAS, mask_4d
from qatpatch.kernels.triton_attention_forward import FULL_MASK, KEY_MASK, NO_MASK
from qatpatch.kernels.triton_attention_launch import Call, Launches, launch_backward, launch_forward, launches

HEAD_DIMS = (64, 128)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported_reason(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run such operands; None when they can."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in _DTYPES:
        return f"{dtype} is not one of {', '.join(map(str, _DTYPES))}"
    return None


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scheme: str,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    train: bool,
    launch: Launches | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """`reference_attention.forward`, on a CUDA device; q, k and v are read in place when their last stride is 1.

    Args:
        launch: how to cut the kernels; by default `launches`' row.

    Raises:
        ValueError: an unknown scheme, or a scale that is not positive.
        NotImplementedError: a head dimension or dtype of which `unsupported_reason` gives the reason.
    """
    call = _prepare(q, k, v, scheme, scale, attn_mask)
    if not q.numel() or not k.numel():
        return _empty_forward(q, scheme, train)
    with _on(q.device):
        backend = dense.backend_for(call)
        if backend is not None:
            out, row_max, row_sum = dense.forward(call, backend)
            return out, out if train else None, row_max, row_sum
        return launch_forward(call, train, launch or launches(q.device, q.shape[-1]))


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_hp: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    *,
    scheme: str,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    launch: Launches | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference_attention.backward`; `launch` and errors as in `forward`."""
    call = _prepare(q, k, v, scheme, scale, attn_mask)
    if not q.numel() or not k.numel():
        return tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    with _on(q.device):
        backend = dense.backend_for(call)
        if backend is not None:
            return dense.backward(call, backend, d_out, out_hp, row_max, row_sum)
        return launch_backward(call, d_out, out_hp, row_max, row_sum, launch or launches(q.device, q.shape[-1]))


def _prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scheme: str, scale: float, attn_mask: torch.Tensor | None
) -> Call:
    if scheme not in ("sage3", "fa4"):
        raise ValueError(f"scheme={scheme!r} is not computed here; choose sage3 or fa4")
    if not 0.0 < scale < math.inf:
        raise ValueError(f"the softmax scale must be positive and finite for Triton kernels, got {scale}")
    reason = unsupported_reason(q.shape[-1], q.dtype)
    if reason is not None:
        raise NotImplementedError(f"Triton attention: {reason}; use the reference kernel")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    mask, kind, alive = None, NO_MASK.value, None
    if attn_mask is not None:
        mask = mask_4d(attn_mask, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
        kind = KEY_MASK.value if mask.shape[2] == 1 else FULL_MASK.value
        if kind == FULL_MASK.value:
            alive = mask.any(2) if mask.dtype == torch.bool else ~(mask.amax(2) <= INVALID_BIAS)
            alive = alive.view(torch.uint8)
        if mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
    return Call(q=q, k=k, v=v, scheme=scheme, scale=float(scale), kind=kind, mask=mask, alive=alive)


def _empty_forward(
    q: torch.Tensor, scheme: str, train: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """No query or no key: zeros, and the statistics of a row without a valid key."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    out_hp = (out if scheme == "fa4" else torch.zeros_like(out)) if train else None
    row_max = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
    return out, out_hp, row_max, torch.zeros_like(row_max)


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
