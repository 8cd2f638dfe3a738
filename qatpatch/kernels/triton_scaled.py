"""The native linear kernel of our own: an NVFP4 x NVFP4 GEMM on FP4 tensor cores, through Triton's ``tl.dot_scaled``.

    y = round((Xc * Xs) (Wc * Ws)^T * x_scale * weight_scale + bias)      c: E2M1 codes, s: E4M3 block scales

Both global scales and the bias go onto the FP32 accumulator; one rounding to the output dtype (float32, bfloat16 or
float16). Block scales come in 128x4 tiles (`layouts`), which is how the tensor cores read them: on sm_100 they are
copied from shared memory to tensor memory as they lie. Ragged shapes are masked: any M and N, any K after padding to
16. Weight-only layers are not served: both operands of the instruction are FP4.

**What has been seen.** Compiled, never run: no GPU with FP4 units was at hand. For each architecture in `TARGETS`, with
every Triton from the version there to 3.9, the PTX multiplies by the block-scaled FP4 instruction alone
(``tcgen05.mma`` or ``mma.sync`` with ``kind::mxf4nvf4.block_scale``). In Triton's interpreter, with that one
instruction computed by numpy, the kernel's addresses, masks and epilogue are right. Tiles were chosen from the
compiler's reports on registers and shared memory, not from timings.

**Triton before 3.7.1 is refused on sm_100 and sm_103.** It compiles, but leaves out the proxy fence between the loads
into shared memory (``cp.async``) and the ``tcgen05`` instructions that read them: a race that may give right numbers
for long (github.com/pytorch/pytorch/issues/181248 saw it on a B200). ``mma.sync`` on sm_120 needs no such fence.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qatpatch.errors import KernelUnavailable
from qatpatch.kernels import layouts
from qatpatch.kernels.triton_launch import Launcher
from qatpatch.kernels.triton_linear import quantize
from qatpatch.kernels.triton_tiled import quantize_activation

__all__ = ["alignment_reason", "quantize", "quantize_activation", "scaled_matmul"]


class Tile(NamedTuple):
    """Output tile (m, n: multiples of 128), depth of a step (multiple of 64), warps and pipeline stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Two programs fit into an SM of sm_100, so that the epilogue of one runs beside the products of the other.
_TILE_10 = Tile(128, 128, 256, 4, 3)
_TILE_12 = Tile(128, 128, 128, 8, 4)
# Capability -> its tile, and the lowest Triton version whose code is right.
TARGETS = {
    (10, 0): (_TILE_10, (3, 7, 1)),
    (10, 3): (_TILE_10, (3, 7, 1)),
    (12, 0): (_TILE_12, (3, 6, 0)),
    (12, 1): (_TILE_12, (3, 8, 0)),
}
GROUP = 8


@triton.jit
def _tiles_to_rows(scales, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Scales (ROWS, BLOCKS) of tiles (ROWS / 128, 128 * BLOCKS) as they lie in memory."""
    tiles = tl.reshape(scales, [ROWS // 128, BLOCKS // 4, 32, 4, 4])
    return tl.reshape(tl.permute(tiles, [0, 3, 2, 1, 4]), [ROWS, BLOCKS])


@triton.jit(do_not_specialize=["M", "tiles"], do_not_specialize_on_alignment=["bias", "alpha_a", "alpha_b"])
def scaled_matmul_kernel(
    a, b, a_scales, b_scales, bias, alpha_a, alpha_b, out, M, N, blocks, tiles,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out (M, N) of packed codes a (M, 8 * blocks) and b (N, 8 * blocks), and their scales, ``tiles`` tiles a row."""
    width = blocks * 8  # in this form a compiler knows that rows are 8 bytes apart, or 128
    # Programs walk GROUP_M row tiles together, so that the column tiles they share stay in L2.
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * cols)
    height = tl.minimum(rows - group * GROUP_M, GROUP_M)
    inside = tl.program_id(0) % (GROUP_M * cols)
    row0 = (group * GROUP_M + inside % height) * BLOCK_M
    col0 = (inside // height) * BLOCK_N

    row, col, k = row0 + tl.arange(0, BLOCK_M), col0 + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K // 2)
    # Rows beyond the edge read the last row again and are not stored: no mask in the loop. So do tiles of scales.
    a_tile = a + tl.minimum(row, M - 1).to(tl.int64)[:, None] * width + k[None, :]
    b_tile = b + tl.minimum(col, N - 1).to(tl.int64)[:, None] * width + k[None, :]
    STEP: tl.constexpr = BLOCK_K * 8  # bytes of 128 rows' scales a step
    byte = tl.arange(0, STEP)
    a_row = tl.minimum(row0 // 128 + tl.arange(0, BLOCK_M // 128), tl.cdiv(M, 128) - 1).to(tl.int64)
    b_row = tl.minimum(col0 // 128 + tl.arange(0, BLOCK_N // 128), tl.cdiv(N, 128) - 1).to(tl.int64)
    pitch = tiles * 512
    E4M3: tl.constexpr = tl.pointer_type(tl.float8e4nv)
    a_scale_tile = a_scales.to(E4M3, bitcast=True) + a_row[:, None] * pitch + byte[None, :]
    b_scale_tile = b_scales.to(E4M3, bitcast=True) + b_row[:, None] * pitch + byte[None, :]

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, tl.cdiv(width, BLOCK_K // 2)):
        if EVEN_K:
            a_part, b_part = tl.load(a_tile), tl.load(b_tile)
            a_scale, b_scale = tl.load(a_scale_tile), tl.load(b_scale_tile)
        else:
            inside_k = (step * (BLOCK_K // 2) + k < width)[None, :]
            a_part, b_part = tl.load(a_tile, mask=inside_k, other=0), tl.load(b_tile, mask=inside_k, other=0)
            inside_tiles = (step * STEP + byte < pitch)[None, :]
            a_scale = tl.load(a_scale_tile, mask=inside_tiles, other=0.0)
            b_scale = tl.load(b_scale_tile, mask=inside_tiles, other=0.0)
        a_scale = _tiles_to_rows(a_scale, BLOCK_M, BLOCK_K // 16)
        b_scale = _tiles_to_rows(b_scale, BLOCK_N, BLOCK_K // 16)
        total = tl.dot_scaled(a_part, a_scale, "e2m1", tl.trans(b_part), b_scale, "e2m1", total)
        a_tile += BLOCK_K // 2
        b_tile += BLOCK_K // 2
        a_scale_tile += STEP
        b_scale_tile += STEP

    # The smaller factor first: their product could leave FP32's range where the result does not.
    first, second = tl.load(alpha_a), tl.load(alpha_b)
    total = total * tl.minimum(first, second) * tl.maximum(first, second)
    if HAS_BIAS:
        total += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    mask = (row < M)[:, None] & (col < N)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * N + col[None, :], total.to(out.dtype.element_ty), mask=mask)


def alignment_reason(in_features: int, out_features: int) -> str | None:
    """Why a layer of this size cannot be served: never, every shape can."""
    return None


def scaled_matmul(
    x: Tensor,
    x_block_scale: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_block_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """``(x weight^T) * x_scale * weight_scale + bias``, FP32 up to one rounding.

    Args:
        x, weight: packed codes uint8 ``(M, ceil16(K) / 2)`` and ``(N, ceil16(K) / 2)``, contiguous.
        x_block_scale, weight_block_scale: uint8, 128x4 tiles, contiguous.
        x_scale, weight_scale: float32 (), decode direction.
        bias: (N), any floating dtype, or None.
        out_dtype: float32, bfloat16 or float16.
        tile: default: the one for the device.

    Returns:
        ``(M, N)``, contiguous.

    Raises:
        KernelUnavailable: the device has no FP4 tensor cores, or Triton is too old for it.
    """
    out = x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)
    if out.numel():
        (rows, columns), blocks = out.shape, x.shape[1] // 8
        tile = tile or _tile(x.device)
        x, weight = layouts.aligned(x), layouts.aligned(weight)
        _launcher(tile, bias is not None, blocks % (tile.k // 16) == 0)(
            -(-rows // tile.m) * -(-columns // tile.n),
            (x, weight, x_block_scale, weight_block_scale, None if bias is None else bias.contiguous(),
             x_scale, weight_scale, out),
            (rows, columns, blocks, x_block_scale.shape[1] // 4),
        )  # fmt: skip
    return out


@lru_cache(maxsize=64)
def _launcher(tile: Tile, has_bias: bool, even_k: bool) -> Launcher:
    constants = {
        "HAS_BIAS": has_bias, "EVEN_K": even_k,
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP_M": GROUP,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return Launcher(scaled_matmul_kernel, constants, options)


def _tile(device: torch.device) -> Tile:
    capability = torch.cuda.get_device_capability(device)
    tile, minimum = TARGETS.get(capability, (None, ()))
    if tile is None:
        found = "sm_{}{}".format(*capability)
        raise KernelUnavailable(f"triton_nvfp4 needs FP4 tensor cores (sm_100, 103, 120 or 121), this is {found}")
    if _triton_version() < minimum:
        wanted = "Triton {}.{}.{}".format(*minimum)
        raise KernelUnavailable(
            f"triton_nvfp4 needs {wanted} or newer on sm_{capability[0]}{capability[1]}, this is "
            f"{triton.__version__}; pip install -U triton"
        )
    return tile


@lru_cache(maxsize=1)
def _triton_version() -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)\.?(\d*)", triton.__version__)
    return tuple(int(number or 0) for number in numbers.groups()) if numbers else (0, 0, 0)
