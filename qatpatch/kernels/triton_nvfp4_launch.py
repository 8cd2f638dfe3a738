"""Launches of the NVFP4 Triton kernels: tensors to blocks, outputs, grids, tiles.

==================  =============================================================================  =================
function            result                                                                         launches
==================  =============================================================================  =================
`global_scale`      by a rule, or the largest finite magnitude (``RAW``)                           2
`quantize`          packed codes and E4M3 block scale bytes                                        1
`operand`           quantized and dequantized again, dense, under a given scale                    1
`operand_pow2`      the same under the tensor's own ``pow2`` scale, and that; a pair shares them   2
`dequantize`        dense, from packed                                                             1
`scaled_matmul`     ``(x @ w.T) * alpha_x * alpha_w + bias``, alphas on the FP32 accumulator       1
==================  =============================================================================  =================

Results equal `qatpatch.nvfp4` bit for bit on every architecture from sm_80 on (how: `triton_nvfp4_kernels`).
`triton_linear` makes a row of the table of them, `ops` the operators. All take CUDA tensors of float32, bfloat16 or
float16, run on their device's current stream, and can be captured in a CUDA graph once compiled, that is, after one
call of the kind. Nothing reads a value back from the device. Rows with a stride are read where they lie; other layouts
are copied first. What would be read beyond its end, or taken for something else, is refused. Tiles are data, chosen per
kernel and architecture: the same call always runs the same kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..nvfp4 import BLOCK_SIZE, GLOBAL_SCALE_RULES, padded_length
from . import triton_nvfp4_kernels as kernels
from .triton_launch import Launcher


class Tile(NamedTuple):
    """Blocks of 16 a program handles, and its warps."""

    blocks: int
    warps: int


class MatmulTile(NamedTuple):
    """Output tile, depth of a step, warps and pipeline stages of `scaled_matmul`."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


PEAKS_TILE = Tile(1024, 16)
OPERAND_TILE = Tile(512, 8)
QUANTIZE_TILE = Tile(512, 8)
DEQUANTIZE_TILE = Tile(256, 4)
# The first row whose capability is at most the device's; its last tile is for at most SMALL_M rows.
SMALL_M = 64
MATMUL_TILES = (
    ((12, 0), MatmulTile(128, 128, 64, 8, 2), MatmulTile(64, 64, 64, 4, 3)),
    ((9, 0), MatmulTile(128, 128, 64, 4, 4), MatmulTile(64, 128, 64, 4, 4)),
    ((8, 1), MatmulTile(128, 128, 64, 8, 2), MatmulTile(64, 64, 64, 4, 3)),
    ((8, 0), MatmulTile(128, 128, 64, 8, 3), MatmulTile(64, 64, 64, 4, 4)),
)
MATMUL_GROUP = 8
# Every program of a repair reads all peaks, so there are few: two on each SM of the largest GPUs.
REPAIR_PROGRAMS = 264
REPAIR_LANES = 64
PEAKS_CHUNK = 4096

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_RULES = {"pow2": kernels.POW2.value, "amax": kernels.AMAX.value}


def rule_number(rule: str) -> int:
    """What `global_scale` and the kernels call a rule of `nvfp4.GLOBAL_SCALE_RULES`."""
    number = _RULES.get(rule)
    if number is None:
        raise ValueError(f"rule={rule!r} is not a rule; choose one of {', '.join(GLOBAL_SCALE_RULES)}")
    return number


def _check_input(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"expected float32, bfloat16 or float16, got {x.dtype}; convert it first")


def _check_blocks(x: Tensor) -> None:
    _check_input(x)
    if not x.dim():
        raise ValueError("NVFP4 needs an axis to take blocks of 16 along, got a 0-dimensional tensor; use x.reshape(1)")


def _check_scale(scale: Tensor) -> None:
    if scale.dtype is not torch.float32 or scale.numel() != 1:
        raise ValueError(f"expected one float32 number as global scale, got {tuple(scale.shape)} of {scale.dtype}")


class _Blocks(NamedTuple):
    """A tensor as the kernels see it: arguments 1 to 4 of `_place`, and whether it is one run of whole blocks."""

    matrix: Tensor
    shape: tuple[int, int, int, int]  # blocks, blocks a row, columns, row stride
    flat: bool


def _is_flat(x: Tensor) -> bool:
    return x.is_contiguous() and x.dim() > 0 and x.shape[-1] % BLOCK_SIZE == 0


def _blocks_of(x: Tensor) -> _Blocks:
    if _is_flat(x):
        return _Blocks(x, (x.numel() // BLOCK_SIZE, 1, BLOCK_SIZE, BLOCK_SIZE), True)
    matrix = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    rows, columns = matrix.shape
    if columns > 1 and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    per_row = padded_length(columns) // BLOCK_SIZE
    if _is_flat(matrix):
        return _Blocks(matrix, (rows * per_row, 1, BLOCK_SIZE, BLOCK_SIZE), True)
    return _Blocks(matrix, (rows * per_row, per_row, columns, matrix.stride(0)), False)


@lru_cache(maxsize=256)
def _launcher(kernel: str, tile: Tile, **constants: int | bool) -> Launcher:
    options = {"num_warps": tile.warps, "enable_fp_fusion": False}
    return Launcher(getattr(kernels, kernel), {"BLOCKS": tile.blocks, **constants}, options)


@lru_cache(maxsize=4)
def _global_scale_launcher(rule: int) -> Launcher:
    options = {"num_warps": 8, "enable_fp_fusion": False}
    return Launcher(kernels.global_scale_kernel, {"RULE": rule, "CHUNK": PEAKS_CHUNK}, options)


@lru_cache(maxsize=64)
def _matmul_launcher(tile: MatmulTile, has_bias: bool, even_k: bool) -> Launcher:
    constants = {
        "HAS_BIAS": has_bias, "EVEN_K": even_k,
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP_M": MATMUL_GROUP,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return Launcher(kernels.matmul_kernel, constants, options)


def _repair_launcher(kernel: str, tile: Tile, flat: bool) -> Launcher:
    return _launcher(kernel, tile, FLAT=flat, CHUNK=PEAKS_CHUNK, LANES=REPAIR_LANES)


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, of x's shape."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _tiles(blocks: int, tile: Tile) -> int:
    return -(-blocks // tile.blocks)


def global_scale(x: Tensor, rule: int, tile: Tile = PEAKS_TILE) -> Tensor:
    """amax (RAW), or the global scale of x by a rule."""
    _check_input(x)
    scale = x.new_empty((), dtype=torch.float32)
    if not x.numel():
        return scale.fill_(0.0 if rule == kernels.RAW.value else 1.0)
    matrix, shape, flat = _blocks_of(x)
    tiles = _tiles(shape[0], tile)
    peaks = x.new_empty(tiles, dtype=torch.float32)
    _launcher("peaks_kernel", tile, FLAT=flat)(tiles, (matrix, peaks), shape)
    _global_scale_launcher(rule)(1, (peaks, scale), (tiles,))
    return scale


def quantize(x: Tensor, global_scale: Tensor, tile: Tile = QUANTIZE_TILE) -> tuple[Tensor, Tensor]:
    """Packed codes (..., ceil16(K) / 2) and E4M3 bytes (..., ceil(K / 16)), both uint8, under a decode scale ()."""
    _check_blocks(x)
    _check_scale(global_scale)
    packed, block_scale = empty_quantized(x)
    if x.numel():
        matrix, shape, flat = _blocks_of(x)
        tensors = matrix, packed.view(torch.int32), block_scale, global_scale
        _launcher("quantize_kernel", tile, FLAT=flat)(_tiles(shape[0], tile), tensors, shape)
    return packed, block_scale


def operand(x: Tensor, global_scale: Tensor, dtype: torch.dtype, apply: bool, tile: Tile = OPERAND_TILE) -> Tensor:
    """x (..., K) there and back in ``dtype``, contiguous; ``apply`` multiplies the global scale () in."""
    _check_blocks(x)
    _check_scale(global_scale)
    out = _empty(x, dtype)
    if x.numel():
        matrix, shape, flat = _blocks_of(x)
        launcher = _launcher("operand_kernel", tile, APPLY=apply, FLAT=flat)
        launcher(_tiles(shape[0], tile), (matrix, out, global_scale), shape)
    return out


def operand_pow2(x: Tensor, dtype: torch.dtype, tile: Tile = OPERAND_TILE) -> tuple[Tensor, Tensor]:
    """`operand` with the scale multiplied in, and that scale (): the tensor's own by the rule ``pow2``."""
    _check_blocks(x)
    out, scale = _empty(x, dtype), x.new_empty((), dtype=torch.float32)
    if not x.numel():
        return out, scale.fill_(1.0)
    matrix, shape, flat = _blocks_of(x)
    tiles = _tiles(shape[0], tile)
    stats = x.new_empty(2 * tiles, dtype=torch.float32)
    _launcher("operand_kernel_pow2", tile, FLAT=flat)(tiles, (matrix, out, stats), (tiles, *shape))
    repair = _repair_launcher("repair_kernel_pow2", tile, flat)
    repair(min(tiles, REPAIR_PROGRAMS), (matrix, out, stats, scale), (tiles, *shape))
    return out, scale


class KeptBuffers(NamedTuple):
    """A 16-bit weight's operand, what its tiles were made of, and its global scale ()."""

    operand: Tensor
    stats: Tensor  # (2, tiles) float32
    prints: Tensor  # (tiles, 2) int32
    scale: Tensor


def is_keepable(weight: Tensor) -> bool:
    """Whether `kept_operand_pow2` can read ``weight``: whole blocks in a row, of 16-bit elements, by 32-bit words."""
    return _is_flat(weight) and weight.element_size() == 2 and weight.storage_offset() % 2 == 0


def kept_buffers(weight: Tensor, dtype: torch.dtype, tile: Tile = OPERAND_TILE) -> KeptBuffers:
    tiles = _tiles(weight.numel() // BLOCK_SIZE, tile)
    # A tile whose floor is zero is made anew.
    stats = weight.new_zeros(2 * tiles, dtype=torch.float32)
    prints = weight.new_zeros(2 * tiles, dtype=torch.int32)
    return KeptBuffers(_empty(weight, dtype), stats, prints, weight.new_ones((), dtype=torch.float32))


def kept_operand_pow2(weight: Tensor, kept: KeptBuffers, tile: Tile = OPERAND_TILE) -> tuple[Tensor, Tensor]:
    """`operand_pow2` in ``kept``'s memory; tiles that hold what they held last time are read and not written."""
    blocks = weight.numel() // BLOCK_SIZE
    tiles = _tiles(blocks, tile)
    out, stats, prints, scale = kept
    tensors = weight, weight.detach().view(torch.int32), out, stats, prints, scale
    _launcher("kept_operand_kernel_pow2", tile)(tiles, tensors, (tiles, blocks))
    repair = _repair_launcher("repair_kernel_pow2", tile, True)
    repair(min(tiles, REPAIR_PROGRAMS), (weight, out, stats, scale), (tiles, blocks, 1, BLOCK_SIZE, BLOCK_SIZE))
    return out, scale


def operand_pair_pow2(
    x: Tensor, weight: Tensor, dtype: torch.dtype, tile: Tile = OPERAND_TILE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`operand_pow2` of both, in two launches where both are of one dtype and runs of whole blocks."""
    alike = x.dtype is weight.dtype and x.get_device() == weight.get_device()
    if not (alike and x.numel() and weight.numel() and _is_flat(x) and _is_flat(weight)):
        return *operand_pow2(x, dtype, tile), *operand_pow2(weight, dtype, tile)
    _check_input(x)
    x_out, w_out = _empty(x, dtype), _empty(weight, dtype)
    x_scale, w_scale = x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32)
    x_blocks, w_blocks = x.numel() // BLOCK_SIZE, weight.numel() // BLOCK_SIZE
    x_tiles = _tiles(x_blocks, tile)
    tiles = x_tiles + _tiles(w_blocks, tile)
    stats = x.new_empty(2 * tiles, dtype=torch.float32)
    tensors = x, weight, x_out, w_out, stats
    _launcher("operand_pair_kernel_pow2", tile, FLAT=True)(tiles, tensors, (tiles, x_tiles, x_blocks, w_blocks))
    # Each tensor gets its share of the programs, and at least one.
    programs = min(tiles, REPAIR_PROGRAMS)
    x_programs = min(max(1, programs * x_tiles // tiles), programs - 1)
    _repair_launcher("repair_pair_kernel_pow2", tile, True)(
        programs, (*tensors, x_scale, w_scale), (tiles, x_tiles, x_programs, x_blocks, w_blocks)
    )
    return x_out, x_scale, w_out, w_scale


def dequantize(
    packed: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    columns: int,
    dtype: torch.dtype,
    apply: bool,
    tile: Tile = DEQUANTIZE_TILE,
) -> Tensor:
    """(..., columns) in ``dtype`` of codes and E4M3 bytes as `quantize` gives them, times the scale with ``apply``."""
    _check_packed(packed, block_scale, columns)
    _check_scale(global_scale)
    out = packed.new_empty((*packed.shape[:-1], columns), dtype=dtype)
    if out.numel():
        packed, block_scale = packed.contiguous(), block_scale.contiguous()
        if packed.storage_offset() % 4 or packed.data_ptr() % 4:  # a slice of a file's buffer, say
            packed = packed.clone()
        blocks, per_row = block_scale.numel(), block_scale.shape[-1]
        flat = columns % BLOCK_SIZE == 0
        tensors = packed.view(torch.int32), block_scale, global_scale, out
        integers = (blocks, 1, BLOCK_SIZE) if flat else (blocks, per_row, columns)
        _launcher("dequantize_kernel", tile, APPLY=apply, FLAT=flat)(_tiles(blocks, tile), tensors, integers)
    return out


def scaled_matmul(
    x: Tensor,
    weight: Tensor,
    alpha_x: Tensor,
    alpha_weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tile: MatmulTile | None = None,
) -> Tensor:
    """``(x @ weight.T) * alpha_x * alpha_weight + bias``: FP32 up to one rounding to ``out_dtype``.

    Args:
        x: bfloat16 or float16 ``(..., K)``.
        weight: ``(N, K)``, of x's dtype.
        alpha_x, alpha_weight: float32 ``()``.
        bias: ``(N,)`` of any of the three dtypes, or None.
    """
    _check_product(x, weight, bias)
    _check_scale(alpha_x)
    _check_scale(alpha_weight)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)
    if not out.numel():
        return out
    columns, depth = weight.shape
    rows = out.numel() // columns
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (x.reshape(rows, depth), weight))
    bias = None if bias is None else bias.contiguous()
    tile = tile or _matmul_tile(rows, x.device)
    _matmul_launcher(tile, bias is not None, depth % tile.k == 0)(
        -(-rows // tile.m) * -(-columns // tile.n),
        (a, b, bias, alpha_x, alpha_weight, out),
        (rows, columns, depth, a.stride(0), b.stride(0)),
    )
    return out


def _check_packed(packed: Tensor, block_scale: Tensor, columns: int) -> None:
    if packed.dtype is not torch.uint8 or block_scale.dtype is not torch.uint8:
        raise TypeError(f"packed codes and block scales are uint8, got {packed.dtype} and {block_scale.dtype}")
    blocks = padded_length(columns) // BLOCK_SIZE
    if packed.shape[-1] != 8 * blocks or block_scale.shape != (*packed.shape[:-1], blocks):
        raise ValueError(
            f"{columns} columns need packed codes (..., {8 * blocks}) and block scales (..., {blocks}) over the same "
            f"leading axes, got {tuple(packed.shape)} and {tuple(block_scale.shape)}"
        )


def _check_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dtype is not weight.dtype or x.dtype not in DTYPES[1:]:
        raise TypeError(f"scaled_matmul takes two bfloat16 or two float16 operands, got {x.dtype} and {weight.dtype}")
    if not x.dim() or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected x (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in DTYPES):
        raise ValueError(f"expected a bias ({weight.shape[0]},), got {tuple(bias.shape)} of {bias.dtype}")


def _matmul_tile(rows: int, device: torch.device) -> MatmulTile:
    capability = torch.cuda.get_device_capability(device)
    for minimum, large, small in MATMUL_TILES:
        if capability >= minimum:
            return small if rows <= SMALL_M else large
    found = "sm_{}{}".format(*capability)
    raise ValueError(f"scaled_matmul needs sm_80 or newer, found {found}; use the reference kernels")


def empty_quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `quantize` returns for ``x`` (..., K), uninitialised."""
    blocks = padded_length(x.shape[-1]) // BLOCK_SIZE
    packed = x.new_empty((*x.shape[:-1], 8 * blocks), dtype=torch.uint8)
    return packed, x.new_empty((*x.shape[:-1], blocks), dtype=torch.uint8)
