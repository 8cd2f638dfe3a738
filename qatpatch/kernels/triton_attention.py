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
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qatpatch.kernels import triton_attention_forward as forward_kernels
from qatpatch.kernels.reference_attention import INVALID_BIAS, mask_4d
from qatpatch.kernels.triton_attention_backward import key_value_gradient_kernel, query_gradient_kernel
from qatpatch.kernels.triton_attention_operands import quantize_key_value_kernel, quantize_query_key_kernel
from qatpatch.kernels.triton_attention_rounding import HIDDEN_LOG2

HEAD_DIMS = (64, 128)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LOG2_E = 1.4426950408889634
_TILE = 64
_GROUP = 16
# Rows that both backward kernels' blocks of queries and of keys divide.
_PADDING = 128


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one kernel is cut: queries and keys of a block, warps, and depth of the software pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int
    reload: bool = True
    early: bool = False
    tma: bool = True


@dataclass(frozen=True, kw_only=True)
class Launches:
    """The four kernels of one architecture and head dimension. None of the numbers changes a result's accuracy."""

    train: Launch
    infer: Launch
    query_gradient: Launch
    key_value_gradient: Launch


def _uniform(launch: Launch, **others: Launch) -> Launches:
    names = ("train", "infer", "query_gradient", "key_value_gradient")
    return Launches(**{name: others.get(name, launch) for name in names})


_WGMMA = Launch(rows=64, keys=64, warps=4, stages=2)
_TCGEN05 = Launch(rows=128, keys=64, warps=8, stages=2)
_MMA_SYNC = Launch(rows=64, keys=64, warps=4, stages=2, tma=False)
_MMA_SYNC_WIDE = Launch(rows=64, keys=64, warps=8, stages=2, tma=False)

# By compute capability's major number and head dimension. Chosen for sm_90 by measurement on an H200; elsewhere by
# what compiles without spilling registers and fits the shared memory.
LAUNCHES: dict[tuple[int, int], Launches] = {
    (8, 64): _uniform(_MMA_SYNC, key_value_gradient=Launch(rows=32, keys=64, warps=4, stages=2, tma=False)),
    (8, 128): _uniform(_MMA_SYNC_WIDE, infer=_MMA_SYNC),
    (9, 64): _uniform(_WGMMA),
    (9, 128): _uniform(_WGMMA),
    (10, 64): _uniform(_TCGEN05, key_value_gradient=Launch(rows=64, keys=128, warps=8, stages=2)),
    (10, 128): _uniform(_TCGEN05, key_value_gradient=Launch(rows=64, keys=128, warps=8, stages=2)),
    (12, 64): _uniform(_MMA_SYNC, key_value_gradient=Launch(rows=32, keys=64, warps=4, stages=2, tma=False)),
    (12, 128): _uniform(_MMA_SYNC_WIDE, infer=_MMA_SYNC),
}


def launches(device: torch.device, head_dim: int) -> Launches:
    """The row of `LAUNCHES` for a device: its architecture's, else the one of the nearest older architecture."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    known = [m for m, dim in LAUNCHES if dim == head_dim and m <= major]
    return LAUNCHES[max(known), head_dim]


def unsupported_reason(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run such operands; None when they can."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in _DTYPES:
        return f"{dtype} is not one of {', '.join(map(str, _DTYPES))}"
    return None


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What every kernel of one call is told: shapes, factors, and the mask in the form that kernels read.

    ``mask`` is 4-D (boolean as uint8) with its strides in ``mask_strides`` (0 along broadcast axes) and ``kind`` one of
    the forward's MASK values. ``alive`` is a boolean (1|B, 1|H, 1|S_k) for a FULL_MASK: some query sees the key.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scheme: str
    scale: float
    kind: int
    mask: torch.Tensor | None
    alive: torch.Tensor | None

    @property
    def step(self) -> float:
        """Scores times this are powers of two."""
        return self.scale * _LOG2_E

    @property
    def hidden(self) -> float:
        """The score of a key that a mask hides."""
        return HIDDEN_LOG2.value / self.step

    @property
    def factors(self) -> tuple[float, float, float, float]:
        return self.scale, 1.0 / self.scale, self.step, self.hidden

    @property
    def mask_strides(self) -> tuple[int, int, int, int]:
        return _broadcast_strides(self.mask) if self.mask is not None else (0, 0, 0, 0)

    @property
    def additive(self) -> bool:
        return self.mask is not None and self.mask.is_floating_point()

    @property
    def interpreted(self) -> bool:
        """CPU tensors only ever reach Triton's interpreter, which knows neither BF16 arithmetic nor assembly."""
        return self.q.device.type == "cpu"


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
        backend = _dense_backend(call)
        if backend is not None:
            out, row_max, row_sum = _dense_forward(call, backend)
            return out, out if train else None, row_max, row_sum
        return _forward(call, train, launch or launches(q.device, q.shape[-1]))


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
        backend = _dense_backend(call)
        if backend is not None:
            return _dense_backward(call, backend, d_out, out_hp, row_max, row_sum)
        return _backward(call, d_out, out_hp, row_max, row_sum, launch or launches(q.device, q.shape[-1]))


def _prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scheme: str, scale: float, attn_mask: torch.Tensor | None
) -> _Call:
    if scheme not in ("sage3", "fa4"):
        raise ValueError(f"scheme={scheme!r} is not computed here; choose sage3 or fa4")
    if not 0.0 < scale < math.inf:
        raise ValueError(f"the softmax scale must be positive and finite for Triton kernels, got {scale}")
    reason = unsupported_reason(q.shape[-1], q.dtype)
    if reason is not None:
        raise NotImplementedError(f"Triton attention: {reason}; use the reference kernel")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    mask, kind, alive = None, forward_kernels.NO_MASK.value, None
    if attn_mask is not None:
        mask = mask_4d(attn_mask, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
        kind = forward_kernels.KEY_MASK.value if mask.shape[2] == 1 else forward_kernels.FULL_MASK.value
        if kind == forward_kernels.FULL_MASK.value:
            alive = mask.any(2) if mask.dtype == torch.bool else ~(mask.amax(2) <= INVALID_BIAS)
            alive = alive.view(torch.uint8)
        if mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
    return _Call(q=q, k=k, v=v, scheme=scheme, scale=scale, kind=kind, mask=mask, alive=alive)


def _forward(
    call: _Call, train: bool, launch: Launches
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    q = call.q
    batch, query_length, heads, head_dim = q.shape
    cut = launch.train if train and call.scheme == "sage3" else launch.infer
    operand = _forward_operand(call)
    keys, values, bias = _key_value_operands(call, operand, _TILE)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    keep = train and call.scheme == "sage3"
    out_hp = torch.empty_like(out) if keep else out
    row_max = torch.empty((batch, heads, query_length), dtype=torch.float32, device=q.device)
    row_sum = torch.empty_like(row_max)
    padded = _round_up(query_length, cut.rows)
    queries = torch.empty((batch * heads, padded, head_dim), dtype=operand, device=q.device)
    forward_kernels.forward_kernel[(padded // cut.rows * batch * heads,)](
        q,
        _rows_of(keys, _TILE, cut),
        _rows_of(values, _TILE, cut),
        bias,
        _pointer(call.mask, q),
        out,
        out_hp,
        row_max,
        row_sum,
        queries,
        query_length,
        padded,
        call.k.shape[1],
        keys.shape[1],
        heads,
        *call.factors,
        *_bsh_strides(q),
        *call.mask_strides,
        HEAD_DIM=head_dim,
        ROWS=cut.rows,
        MASK=call.kind,
        ADDITIVE=call.additive,
        TAIL=call.k.shape[1] % _TILE != 0,
        QUANTIZE_P=call.scheme == "sage3",
        TRAIN=keep,
        PACKED=not call.interpreted,
        RELOAD=cut.reload,
        TMA=cut.tma,
        OPERAND=_triton_dtype(operand),
        num_warps=cut.warps,
        num_stages=cut.stages,
        enable_fp_fusion=False,
    )
    return out, (out_hp if train else None), row_max, row_sum


def _backward(
    call: _Call,
    d_out: torch.Tensor,
    out_hp: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    launch: Launches,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = call.q, call.k, call.v
    batch, query_length, heads, head_dim = q.shape
    key_length = k.shape[1]
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    operand = torch.float32 if call.interpreted else torch.bfloat16
    keys, values, bias = _key_value_operands(call, operand, _PADDING)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    padded = _round_up(query_length, _PADDING)
    queries = torch.empty((batch * heads, padded, head_dim), dtype=operand, device=q.device)
    d_out_scaled = torch.empty_like(queries)
    shift = torch.empty((batch * heads, padded), dtype=torch.float32, device=q.device)
    delta = torch.empty_like(shift)
    lengths = (query_length, padded, key_length, keys.shape[1], heads)
    cut = launch.query_gradient
    query_gradient_kernel[(padded // cut.rows * batch * heads,)](
        q,
        d_out,
        out_hp.contiguous(),
        _rows_of(keys, cut.keys, cut),
        _rows_of(values, cut.keys, cut),
        bias,
        _pointer(call.mask, q),
        row_max,
        row_sum,
        d_q,
        queries,
        d_out_scaled,
        shift,
        delta,
        *lengths,
        *call.factors,
        *_bsh_strides(q),
        *_bsh_strides(d_out),
        *call.mask_strides,
        HEAD_DIM=head_dim,
        ROWS=cut.rows,
        KEYS=cut.keys,
        MASK=call.kind,
        ADDITIVE=call.additive,
        TAIL=key_length % cut.keys != 0,
        QUANTIZE_P=call.scheme == "sage3",
        RELOAD=cut.reload,
        TMA=cut.tma,
        OPERAND=_triton_dtype(operand),
        num_warps=cut.warps,
        num_stages=cut.stages,
        enable_fp_fusion=False,
    )
    cut = launch.key_value_gradient
    key_value_gradient_kernel[(triton.cdiv(key_length, cut.keys) * batch * heads,)](
        _rows_of(queries, cut.rows, cut),
        _rows_of(d_out_scaled, cut.rows, cut),
        _rows_of(keys, cut.keys, cut),
        _rows_of(values, cut.keys, cut),
        bias,
        _pointer(call.mask, q),
        shift,
        delta,
        d_k,
        d_v,
        *lengths,
        *call.factors,
        *call.mask_strides,
        HEAD_DIM=head_dim,
        ROWS=cut.rows,
        KEYS=cut.keys,
        MASK=call.kind,
        ADDITIVE=call.additive,
        QUANTIZE_P=call.scheme == "sage3",
        PACKED=not call.interpreted,
        EARLY=cut.early,
        TMA=cut.tma,
        OPERAND=_triton_dtype(operand),
        num_warps=cut.warps,
        num_stages=cut.stages,
        enable_fp_fusion=False,
    )
    return d_q, d_k, d_v


def _key_value_operands(
    call: _Call, operand: torch.dtype, multiple: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounded K and V (B * H, S_pad, D) and, for a mask by key, the bias (B * H, S_pad) FP32; see the kernel."""
    k, v = call.k, call.v
    batch, key_length, heads, head_dim = k.shape
    padded = _round_up(key_length, multiple)
    keys = torch.empty((batch * heads, padded, head_dim), dtype=operand, device=k.device)
    values = torch.empty_like(keys)
    by_key = call.kind == forward_kernels.KEY_MASK.value
    bias = torch.empty((batch * heads, padded) if by_key else (1,), dtype=torch.float32, device=k.device)
    # (B, H, S_k): the mask itself where it depends on the key alone, else which keys any query sees.
    mask = call.mask[:, :, 0] if by_key else call.alive
    strides = (0, 0, 0) if mask is None else _broadcast_strides(mask)
    quantize_key_value_kernel[(padded // _GROUP * batch * heads,)](
        k,
        v,
        _pointer(mask, k),
        keys,
        values,
        bias,
        key_length,
        padded,
        heads,
        1.0 / call.scale,
        call.hidden,
        *_bsh_strides(k),
        *_bsh_strides(v),
        *strides,
        HEAD_DIM=head_dim,
        TILE=_GROUP,
        MASKED=mask is not None,
        ADDITIVE=mask is not None and mask.is_floating_point(),
        WRITE_BIAS=by_key,
        QUANTIZE_V=call.scheme == "sage3",
        num_warps=1,
        enable_fp_fusion=False,
    )
    return keys, values, bias


def _dense_backend(call: _Call) -> str | None:
    """Which of torch's fused attentions takes an `fa4` call: ``"cudnn"``, ``"flash"``, or None for Triton.

    Asks torch, which looks at the device, the shapes and the user's own switches.
    """
    if call.scheme != "fa4" or call.mask is not None or call.q.device.type != "cuda":
        return None
    operands = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    parameters = torch.backends.cuda.SDPAParams(*operands, None, 0.0, False, False)
    if torch.backends.cuda.can_use_cudnn_attention(parameters):
        return "cudnn"
    return "flash" if torch.backends.cuda.can_use_flash_attention(parameters) else None


def _dense_operands(call: _Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounded Q and K, and V, as (B, H, S, D) views of BSHD memory."""
    q, k = call.q, call.k
    batch, query_length, heads, head_dim = q.shape
    queries = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    keys = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    programs = [triton.cdiv(length, _GROUP) * batch * heads for length in (query_length, k.shape[1])]
    quantize_query_key_kernel[(sum(programs),)](
        q,
        k,
        queries,
        keys,
        programs[0],
        query_length,
        k.shape[1],
        heads,
        *_bsh_strides(q),
        *_bsh_strides(k),
        HEAD_DIM=head_dim,
        ROWS=_GROUP,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return queries.transpose(1, 2), keys.transpose(1, 2), call.v.transpose(1, 2)


def _dense_forward(call: _Call, backend: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, log-sum-exp and ones: the LSE as a row maximum whose row sum is 1."""
    q, k, v = _dense_operands(call)
    if backend == "cudnn":
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, False, False, scale=call.scale
        )
    else:
        result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=call.scale)
    lse = result[1].reshape(q.shape[:3])
    return result[0].transpose(1, 2).contiguous(), lse, torch.ones_like(lse)


def _dense_backward(
    call: _Call,
    backend: str,
    d_out: torch.Tensor,
    out: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = _dense_operands(call)
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


def _empty_forward(
    q: torch.Tensor, scheme: str, train: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """No query or no key: zeros, and the statistics of a row without a valid key."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    out_hp = (out if scheme == "fa4" else torch.zeros_like(out)) if train else None
    row_max = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
    return out, out_hp, row_max, torch.zeros_like(row_max)


def _forward_operand(call: _Call) -> torch.dtype:
    if call.scheme == "sage3" or call.q.dtype == torch.float16:
        return torch.float16
    return torch.float32 if call.interpreted else torch.bfloat16


def _rows_of(operand: torch.Tensor, rows: int, cut: Launch) -> TensorDescriptor | torch.Tensor:
    """A (B * H, S_pad, D) operand as the kernels' `rows_of` reads it, ``rows`` at a time."""
    if not cut.tma:
        return operand
    flat = operand.view(-1, operand.shape[-1])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, flat.shape[1]])


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def _pointer(tensor: torch.Tensor | None, otherwise: torch.Tensor) -> torch.Tensor:
    """A kernel takes a pointer even where it reads none."""
    return otherwise if tensor is None else tensor


def _bsh_strides(x: torch.Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _broadcast_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides with 0 along axes of size 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
