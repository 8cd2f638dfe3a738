"""How the Triton attention kernels are launched: the table of block sizes, and one function a direction.

The table is data: it decides speed alone. The same call on the same architecture takes the same launches, always.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qatpatch.kernels.triton_attention_backward import key_value_gradient_kernel, query_gradient_kernel
from qatpatch.kernels.triton_attention_forward import KEY_MASK, forward_kernel
from qatpatch.kernels.triton_attention_operands import quantize_key_value_kernel
from qatpatch.kernels.triton_attention_rounding import HIDDEN_LOG2
from qatpatch.kernels.triton_launch import Launcher

_LOG2_E = 1.4426950408889634
_TILE = 64
_GROUP = 16
# Rows that both backward kernels' blocks of queries and of keys divide.
_PADDING = 128


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one kernel is cut.

    Attributes:
        rows, keys: queries and keys of a block; a forward's keys are always 64.
        warps, stages: warps of a program, depth of its software pipeline.
        reload: keep the rounded left operand in shared memory (see `triton_attention_forward`).
        early: in the dK and dV kernel, compute dO Vq^T before the softmax instead of after it.
        tma: read operands through tensor descriptors, which needs sm_90.
    """

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
# Measured on an H200, against the alternatives that the benchmark knows, on four shapes.
_WGMMA_DEEP = Launch(rows=64, keys=64, warps=4, stages=3)
_WGMMA_QUERY = Launch(rows=128, keys=64, warps=8, stages=3)
_WGMMA_KEYS = Launch(rows=64, keys=128, warps=8, stages=3)
_TCGEN05 = Launch(rows=128, keys=64, warps=8, stages=2)
_TCGEN05_KEYS = Launch(rows=64, keys=128, warps=8, stages=2)
_MMA_SYNC = Launch(rows=64, keys=64, warps=4, stages=2, tma=False)
_MMA_SYNC_WIDE = Launch(rows=64, keys=64, warps=8, stages=2, tma=False)
_MMA_SYNC_NARROW = Launch(rows=32, keys=64, warps=4, stages=2, tma=False)

# By compute capability's major number and head dimension: what compiles without spilling registers and fits the shared
# memory, twice on a multiprocessor for sm_90. `benchmarks/attention_bench.py --candidates` times the alternatives.
LAUNCHES: dict[tuple[int, int], Launches] = {
    (8, 64): _uniform(_MMA_SYNC, train=_MMA_SYNC_WIDE, key_value_gradient=_MMA_SYNC_NARROW),
    (8, 128): _uniform(_MMA_SYNC_WIDE, infer=_MMA_SYNC),
    (9, 64): _uniform(_WGMMA),
    (9, 128): _uniform(_WGMMA_DEEP, query_gradient=_WGMMA_QUERY, key_value_gradient=_WGMMA_KEYS),
    (10, 64): _uniform(_TCGEN05, key_value_gradient=_TCGEN05_KEYS),
    (10, 128): _uniform(_TCGEN05, key_value_gradient=_TCGEN05_KEYS),
    (12, 64): _uniform(_MMA_SYNC, train=_MMA_SYNC_WIDE, key_value_gradient=_MMA_SYNC_NARROW),
    (12, 128): _uniform(_MMA_SYNC_WIDE, infer=_MMA_SYNC),
}


def launches(device: torch.device, head_dim: int) -> Launches:
    """The row of `LAUNCHES` for a device: its architecture's, else the one of the nearest older architecture."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    known = [m for m, dim in LAUNCHES if dim == head_dim and m <= major]
    return LAUNCHES[max(known), head_dim]


@dataclass(frozen=True, kw_only=True)
class Call:
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


def launch_forward(
    call: Call, train: bool, launch: Launches
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    q = call.q
    batch, query_length, heads, head_dim = q.shape
    cut = launch.train if train and call.scheme == "sage3" else launch.infer
    operand = _forward_operand(call)
    keys, values, bias = key_value_operands(call, operand, _TILE)
    padded_keys = keys.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    keep = train and call.scheme == "sage3"
    out_hp = torch.empty_like(out) if keep else out
    row_max = torch.empty((batch, heads, query_length), dtype=torch.float32, device=q.device)
    row_sum = torch.empty_like(row_max)
    padded = _round_up(query_length, cut.rows)
    queries = torch.empty((batch * heads, padded, head_dim), dtype=operand, device=q.device)
    run = launcher(
        forward_kernel,
        cut,
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
    )
    keys, values = _rows_of(keys, _TILE, cut), _rows_of(values, _TILE, cut)
    tensors = q, keys, values, bias, _pointer(call.mask, q), out, out_hp, row_max, row_sum, queries
    lengths = query_length, padded, call.k.shape[1], padded_keys, heads
    run(padded // cut.rows * batch * heads, tensors, (*lengths, *call.factors, *bsh_strides(q), *call.mask_strides))
    return out, (out_hp if train else None), row_max, row_sum


def launch_backward(
    call: Call,
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
    keys, values, bias = key_value_operands(call, operand, _PADDING)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    padded = _round_up(query_length, _PADDING)
    queries = torch.empty((batch * heads, padded, head_dim), dtype=operand, device=q.device)
    d_out_scaled = torch.empty_like(queries)
    shift = torch.empty((batch * heads, padded), dtype=torch.float32, device=q.device)
    delta = torch.empty_like(shift)
    lengths = (query_length, padded, key_length, keys.shape[1], heads)
    cut = launch.query_gradient
    constants = {
        "HEAD_DIM": head_dim,
        "MASK": call.kind,
        "ADDITIVE": call.additive,
        "QUANTIZE_P": call.scheme == "sage3",
        "OPERAND": _triton_dtype(operand),
    }
    run = launcher(
        query_gradient_kernel,
        cut,
        **constants,
        ROWS=cut.rows,
        KEYS=cut.keys,
        TAIL=key_length % cut.keys != 0,
        RELOAD=cut.reload,
        TMA=cut.tma,
    )
    tensors = (
        q, d_out, out_hp.contiguous(), _rows_of(keys, cut.keys, cut), _rows_of(values, cut.keys, cut), bias,
        _pointer(call.mask, q), row_max, row_sum, d_q, queries, d_out_scaled, shift, delta,
    )  # fmt: skip
    strides = (*bsh_strides(q), *bsh_strides(d_out), *call.mask_strides)
    run(padded // cut.rows * batch * heads, tensors, (*lengths, *call.factors, *strides))
    cut = launch.key_value_gradient
    run = launcher(
        key_value_gradient_kernel,
        cut,
        **constants,
        ROWS=cut.rows,
        KEYS=cut.keys,
        PACKED=not call.interpreted,
        EARLY=cut.early,
        TMA=cut.tma,
    )
    # d_k first: a tensor tells the launcher its device.
    rows = tuple(_rows_of(x, cut.rows, cut) for x in (queries, d_out_scaled))
    columns = tuple(_rows_of(x, cut.keys, cut) for x in (keys, values))
    tensors = (d_k, d_v, *rows, *columns, bias, _pointer(call.mask, q), shift, delta)
    blocks = triton.cdiv(key_length, cut.keys)
    run(blocks * batch * heads, tensors, (*lengths, *call.factors, *call.mask_strides))
    return d_q, d_k, d_v


@lru_cache(maxsize=256)
def launcher(kernel: Any, cut: Launch | None, **constants: Any) -> Launcher:
    """``kernel`` with compile-time ``constants``, cut as ``cut`` says; None: one warp, nothing pipelined."""
    options = {"num_warps": 1} if cut is None else {"num_warps": cut.warps, "num_stages": cut.stages}
    return Launcher(kernel, constants, {**options, "enable_fp_fusion": False})


def key_value_operands(
    call: Call, operand: torch.dtype, multiple: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounded K and V (B * H, S_pad, D) and, for a mask by key, the bias (B * H, S_pad) FP32; see the kernel."""
    k, v = call.k, call.v
    batch, key_length, heads, head_dim = k.shape
    padded = _round_up(key_length, multiple)
    keys = torch.empty((batch * heads, padded, head_dim), dtype=operand, device=k.device)
    values = torch.empty_like(keys)
    by_key = call.kind == KEY_MASK.value
    bias = torch.empty((batch * heads, padded) if by_key else (1,), dtype=torch.float32, device=k.device)
    # (B, H, S_k): the mask itself where it depends on the key alone, else which keys any query sees.
    mask = call.mask[:, :, 0] if by_key else call.alive
    strides = (0, 0, 0) if mask is None else _broadcast_strides(mask)
    run = launcher(
        quantize_key_value_kernel,
        None,
        HEAD_DIM=head_dim,
        TILE=_GROUP,
        MASKED=mask is not None,
        ADDITIVE=mask is not None and mask.is_floating_point(),
        WRITE_BIAS=by_key,
        QUANTIZE_V=call.scheme == "sage3",
    )
    numbers = key_length, padded, heads, 1.0 / call.scale, call.hidden, *bsh_strides(k), *bsh_strides(v), *strides
    run(padded // _GROUP * batch * heads, (k, v, _pointer(mask, k), keys, values, bias), numbers)
    return keys, values, bias


def _forward_operand(call: Call) -> torch.dtype:
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


def bsh_strides(x: torch.Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _broadcast_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides with 0 along axes of size 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
