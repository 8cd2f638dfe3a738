"""`fa4` without a mask: torch's fastest dense attention over rounded Q and K, forward and backward.

Its gradients at the rounded operands are the straight-through ones. The log-sum-exp that torch returns is kept as a row
maximum whose row sum is 1, which is a valid pair of statistics for the Triton kernels too, and theirs for torch.
"""

from __future__ import annotations

import torch
import triton

from qatpatch.kernels.triton_attention_launch import Call, bsh_strides, launcher
from qatpatch.kernels.triton_attention_operands import quantize_query_key_kernel

_GROUP = 16


def backend_for(call: Call) -> str | None:
    """Which of torch's fused attentions takes an `fa4` call: ``"cudnn"``, ``"flash"``, or None for Triton.

    Asks torch, which looks at the device, the shapes and the user's own switches.
    """
    if call.scheme != "fa4" or call.mask is not None or call.q.device.type != "cuda":
        return None
    views = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    parameters = torch.backends.cuda.SDPAParams(*views, None, 0.0, False, False)
    if torch.backends.cuda.can_use_cudnn_attention(parameters):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(parameters) else None


def operands(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounded Q and K, and V, as (B, H, S, D) views of BSHD memory."""
    q, k = call.q, call.k
    batch, query_length, heads, head_dim = q.shape
    queries = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    keys = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    programs = [triton.cdiv(length, _GROUP) * batch * heads for length in (query_length, k.shape[1])]
    numbers = programs[0], query_length, k.shape[1], heads, *bsh_strides(q), *bsh_strides(k)
    launcher(quantize_query_key_kernel, None, HEAD_DIM=head_dim, ROWS=_GROUP)(
        sum(programs), (q, k, queries, keys), numbers
    )
    return queries.transpose(1, 2), keys.transpose(1, 2), call.v.transpose(1, 2)


def forward(call: Call, backend: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, log-sum-exp and ones: the LSE as a row maximum whose row sum is 1."""
    q, k, v = operands(call)
    if backend == "cudnn":
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, False, False, scale=call.scale
        )
    else:
        result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=call.scale)
    lse = result[1].reshape(q.shape[:3])
    return result[0].transpose(1, 2).contiguous(), lse, torch.ones_like(lse)


def backward(
    call: Call,
    backend: str,
    d_out: torch.Tensor,
    out: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = operands(call)
    lse = row_max + row_sum.log()
    d_out, out = d_out.transpose(1, 2), out.transpose(1, 2)
    lengths = (q.shape[2], k.shape[2])
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # random state: there is no dropout
    if backend == "cudnn":
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            d_out,
            q,
            k,
            v,
            out,
            lse.unsqueeze(-1),
            unused,
            unused,
            None,
            None,
            None,
            *lengths,
            0.0,
            False,
            scale=call.scale,
        )
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, lse, None, None, *lengths, 0.0, False, unused, unused, scale=call.scale
        )
    return tuple(x.transpose(1, 2).contiguous() for x in grads)
