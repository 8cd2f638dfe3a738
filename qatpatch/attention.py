"""QAT attention as operators: BSHD in and out, differentiable, one node in a compiled graph.

`qat_attention` is what a patched module calls while training: the forward of a scheme (`sage3`, `fa4`; the maths is in
`qatpatch.kernels.reference_attention`) with a straight-through backward. `quantized_attention` is the same forward
without a backward, for validation and deployed models; where a gradient would be lost it raises.

Both go through two custom operators, so that `torch.compile(fullgraph=True)`, `torch.export` and the meta device see an
opaque call with exact shapes, dtypes and strides:

- ``qatpatch::attention_forward(q, k, v, attn_mask, scale, scheme, kernel, train) -> (out, out_hp, row_max, row_sum)``
- ``qatpatch::attention_backward(d_out, q, k, v, out_hp, row_max, row_sum, attn_mask, scale, scheme, kernel)
  -> (dq, dk, dv)``

``kernel`` names the row whose module does the work, fixed at the forward and repeated in the backward. An operator may
not return one tensor twice or none at all, so ``out_hp`` is an empty tensor when not training, and for `fa4`, where it
equals ``out`` (which the backward then keeps: like SDPA's, it must not be changed in place before the backward).
The backward keeps q, k, v, out_hp, row_max, row_sum and the mask; nothing of size S_q x S_k.

Deliberately not here: the `dense` scheme (the original attention), dropout, causal masks, grouped queries, gradients of
a mask or of the LSE, and casting: under autocast the operands arrive in one dtype or are refused.
"""

from __future__ import annotations

import math

import torch

from qatpatch import kernels
from qatpatch.errors import KernelUnavailable, nearest
from qatpatch.kernels import reference_attention

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def qat_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scheme: str = "sage3",
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """Attention on fake-quantized operands, with straight-through gradients for q, k and v.

    Args:
        q: (B, S_q, H, D) float32, bfloat16 or float16, any strides.
        k: (B, S_k, H, D) of q's dtype and device, any strides.
        v: as k.
        scheme: ``"sage3"`` or ``"fa4"``, what the training simulates.
        scale: softmax scale; ``1 / sqrt(D)`` by default.
        attn_mask: boolean (True = attend) or additive (a bias <= -1000 hides the key), 2-D (S_q, S_k) or 4-D,
            broadcast from (B, H, S_q, S_k). A query that may see no key gives 0.
        kernel: the name of a kernel row; by default the one for q's device and the scheme.

    Returns:
        (B, S_q, H, D) in q's dtype, contiguous.

    Raises:
        ValueError: unknown scheme, or shapes or devices that do not fit together.
        TypeError: dtypes that differ or are not supported.
        KernelUnavailable: no kernel row serves the scheme on this device, or not the one asked for.
        RuntimeError: `attn_mask` wants a gradient.
    """
    mask = _check_inputs(q, k, v, scheme, attn_mask)
    if torch.is_grad_enabled() and mask is not None and mask.requires_grad:
        raise RuntimeError(
            "attn_mask requires grad, but QAT attention has no gradient for a mask; pass attn_mask.detach()"
        )
    train = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    name = _kernel_name("train", scheme, q, kernel)
    row = kernels.kernel_named(name)
    if row.device_types and q.device.type not in (*row.device_types, "meta"):
        reason = row.unavailable_reason(q.device)
        raise KernelUnavailable(f"kernel={kernel!r} was asked for, and q is on {q.device}: {reason}; leave kernel out")
    return attention_forward(q, k, v, mask, _resolve_scale(scale, q), scheme, name, train)[0]


def quantized_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scheme: str = "sage3",
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    kernel: str | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The forward of `qat_attention` alone, with the same arguments and, on the same kernel, the same bits.

    Args:
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        ``out`` (B, S_q, H, D) in q's dtype, contiguous; with `return_lse`, ``(out, lse)`` where lse is float32
        (B, H, S_q), in natural logarithms, -inf for a query that may see no key.

    Raises:
        RuntimeError: gradients are enabled and q, k, v or the mask wants one.
        KernelUnavailable: also for a kernel that takes no mask, or gives no log-sum-exp, where it is asked to.
        ValueError, TypeError: as `qat_attention`.
    """
    mask = _check_inputs(q, k, v, scheme, attn_mask, (*kernels.ATTENTION_SCHEMES, kernels.SMOOTHED_SCHEME))
    operands = {"q": q, "k": k, "v": v} | ({} if mask is None else {"attn_mask": mask})
    wanting = [name for name, x in operands.items() if x.requires_grad]
    if torch.is_grad_enabled() and wanting:
        raise RuntimeError(
            f"forward-only attention was given {', '.join(wanting)} with requires_grad=True: "
            "gradients would be lost; leave infer_attention or use torch.no_grad()"
        )
    name = _kernel_name("infer", scheme, q, kernel, masked=mask is not None)
    if return_lse and not kernels.kernel_named(name).returns_lse:
        raise KernelUnavailable(
            f"the kernel {name} gives no log-sum-exp; ask for one that does, as kernel='triton_attention' or "
            "'reference_attention'"
        )
    out, _, row_max, row_sum = attention_forward(q, k, v, mask, _resolve_scale(scale, q), scheme, name, False)
    return (out, row_max + row_sum.log()) if return_lse else out


@torch.library.custom_op("qatpatch::attention_forward", mutates_args=())
def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float,
    scheme: str,
    kernel: str,
    train: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator below `qat_attention` and `quantized_attention`; arguments must have passed their checks.

    Returns:
        ``out, out_hp, row_max, row_sum`` of the kernel's `forward`; ``out_hp`` is empty, of shape (0,), for `fa4` (it
        equals ``out``) and when not `train`.
    """
    module = kernels.kernel_named(kernel).load()
    out, out_hp, row_max, row_sum = module.forward(
        q, k, v, scheme=scheme, scale=scale, attn_mask=attn_mask, train=train
    )
    keep = train and scheme != "fa4"
    return out, out_hp if keep else q.new_empty(0), row_max, row_sum


@attention_forward.register_fake
def _(q, k, v, attn_mask, scale, scheme, kernel, train):
    batch, length, heads, _ = q.shape
    out = q.new_empty(q.shape)
    out_hp = q.new_empty(q.shape) if train and scheme != "fa4" else q.new_empty(0)
    row_max, row_sum = (q.new_empty((batch, heads, length), dtype=torch.float32) for _ in range(2))
    return out, out_hp, row_max, row_sum


@torch.library.custom_op("qatpatch::attention_backward", mutates_args=())
def attention_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_hp: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float,
    scheme: str,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients ``dq, dk, dv`` of `attention_forward`'s first result, contiguous, from what a training forward kept."""
    module = kernels.kernel_named(kernel).load()
    return module.backward(d_out, q, k, v, out_hp, row_max, row_sum, scheme=scheme, scale=scale, attn_mask=attn_mask)


@attention_backward.register_fake
def _(d_out, q, k, v, out_hp, row_max, row_sum, attn_mask, scale, scheme, kernel):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, attn_mask, ctx.scale, ctx.scheme, ctx.kernel, train = inputs
    out, out_hp, row_max, row_sum = output
    if not train:
        raise RuntimeError(
            "attention_forward was called with train=False on inputs that want gradients; pass train=True"
        )
    ctx.save_for_backward(q, k, v, out if ctx.scheme == "fa4" else out_hp, row_max, row_sum, attn_mask)
    ctx.mark_non_differentiable(out_hp, row_max, row_sum)


def _backward(ctx, d_out, *_):
    *saved, attn_mask = ctx.saved_tensors
    grads = attention_backward(d_out, *saved, attn_mask, ctx.scale, ctx.scheme, ctx.kernel)
    wanted = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False))
    return *wanted, None, None, None, None, None


attention_forward.register_autograd(_backward, setup_context=_setup_context)


def _kernel_name(stage: str, scheme: str, q: torch.Tensor, asked: str | None, masked: bool = False) -> str:
    """The kernel row for a call: the one asked for where it computes the scheme, else the first usable one."""
    if asked is None:
        return kernels.resolved_name("attention", stage, scheme, str(q.device), head_dim=q.shape[-1], masked=masked)
    row = kernels.kernel_named(asked, "attention")
    if scheme not in row.schemes:
        raise KernelUnavailable(
            f"kernel={asked!r} was asked to compute attention with scheme {scheme}, and it computes "
            f"{' and '.join(row.schemes)}; leave kernel out, or see qatpatch.list_kernels()"
        )
    if masked and not row.honours_masks:
        raise KernelUnavailable(
            f"kernel={asked!r} takes no mask, and attn_mask was given; leave kernel out for one that honours it"
        )
    return asked


def _resolve_scale(scale: float | None, q: torch.Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def _check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scheme: str,
    attn_mask: torch.Tensor | None,
    schemes: tuple[str, ...] = kernels.ATTENTION_SCHEMES,
) -> torch.Tensor | None:
    """Raise on what no kernel can compute; the mask as 4-D. Reads shapes and types alone, never values."""
    if scheme not in schemes:
        hint = nearest(scheme, schemes)
        raise ValueError(f"scheme={scheme!r} is not a quantized attention scheme{hint}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"attention takes 4-D (B, S, H, D) operands, got {shapes}; a head axis may not be flattened")
    if k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2]:
        raise ValueError(
            f"q, k and v need equally many heads (axis 2 of BSHD), got {shapes}; grouped queries are not trained here "
            "(no target model has them): repeat k and v, and check that operands are not (B, H, S, D)"
        )
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape (B, S_k, H, D), got {shapes}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"q, k and v must agree in batch and head_dim, got {shapes}")
    if q.shape[3] == 0:
        raise ValueError(f"head_dim is 0, got {shapes}")
    dtypes = f"q {q.dtype}, k {k.dtype}, v {v.dtype}"
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {dtypes}; cast them to the compute dtype first")
    if q.dtype not in _DTYPES:
        raise TypeError(f"attention takes float32, bfloat16 or float16 operands, got {dtypes}")
    for name, x in (("k", k), ("v", v), ("attn_mask", attn_mask)):
        if x is not None and x.device != q.device:
            raise ValueError(f"q is on {q.device} and {name} on {x.device}; move them to one device")
    if attn_mask is None:
        return None
    return reference_attention.mask_4d(attn_mask, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
