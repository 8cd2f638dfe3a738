"""Launches of the NVFP4 Triton kernels: tensors to blocks, outputs, grids, tiles.

Every function here is the body of an operator of `triton_nvfp4`, which checks the arguments. Nothing reads a value back
from the device. Tiles are data, chosen per kernel and architecture: the same call always runs the same kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..nvfp4 import BLOCK_SIZE, padded_length
from . import triton_nvfp4_kernels as kernels


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


PEAKS_TILE = Tile(512, 8)
OPERAND_TILE = Tile(512, 8)
QUANTIZE_TILE = Tile(512, 8)
DEQUANTIZE_TILE = Tile(512, 8)
# The first row whose capability is at most the device's; its last tile is for at most SMALL_M rows.
SMALL_M = 64
MATMUL_TILES = (
    ((12, 0), MatmulTile(128, 128, 64, 8, 2), MatmulTile(64, 64, 64, 4, 3)),
    ((9, 0), MatmulTile(128, 256, 64, 8, 3), MatmulTile(64, 128, 64, 4, 4)),
    ((8, 1), MatmulTile(128, 128, 64, 8, 2), MatmulTile(64, 64, 64, 4, 3)),
    ((8, 0), MatmulTile(128, 128, 64, 8, 3), MatmulTile(64, 64, 64, 4, 4)),
)
MATMUL_GROUP = 8
# Every program of a repair reads all peaks, so there are few: two on each SM of the largest GPUs.
REPAIR_PROGRAMS = 264
REPAIR_LANES = 64
PEAKS_CHUNK = 4096


class _Blocks(NamedTuple):
    """A tensor as the kernels see it: arguments 1 to 4 of `_place`, and whether it is one run of whole blocks."""

    matrix: Tensor
    blocks: int
    per_row: int
    columns: int
    row_stride: int
    flat: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.blocks, self.per_row, self.columns, self.row_stride


def _blocks_of(x: Tensor) -> _Blocks:
    matrix = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    rows, columns = matrix.shape
    if columns > 1 and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    per_row = padded_length(columns) // BLOCK_SIZE
    if columns % BLOCK_SIZE == 0 and matrix.is_contiguous():
        return _Blocks(matrix, rows * per_row, 1, BLOCK_SIZE, BLOCK_SIZE, True)
    return _Blocks(matrix, rows * per_row, per_row, columns, matrix.stride(0), False)


def _options(tile: Tile) -> dict[str, int | bool]:
    return {"BLOCKS": tile.blocks, "num_warps": tile.warps, "enable_fp_fusion": False}


def global_scale(x: Tensor, rule: int, tile: Tile = PEAKS_TILE) -> Tensor:
    """amax (RAW), or the global scale of x by a rule."""
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    if not x.numel():
        return scale.fill_(0.0 if rule == kernels.RAW.value else 1.0)
    b = _blocks_of(x.detach())
    tiles = triton.cdiv(b.blocks, tile.blocks)
    peaks = torch.empty(tiles, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        kernels.peaks_kernel[(tiles,)](b.matrix, peaks, *b.shape, FLAT=b.flat, **_options(tile))
        kernels.global_scale_kernel[(1,)](
            peaks, scale, tiles, RULE=rule, CHUNK=PEAKS_CHUNK, num_warps=8, enable_fp_fusion=False
        )
    return scale


def quantize(x: Tensor, global_scale: Tensor, tile: Tile = QUANTIZE_TILE) -> tuple[Tensor, Tensor]:
    packed, block_scale = empty_quantized(x)
    if x.numel():
        b = _blocks_of(x.detach())
        with torch.cuda.device_of(x):
            kernels.quantize_kernel[(triton.cdiv(b.blocks, tile.blocks),)](
                b.matrix, packed.view(torch.int32), block_scale, global_scale, *b.shape, FLAT=b.flat, **_options(tile)
            )
    return packed, block_scale


def operand(x: Tensor, global_scale: Tensor, dtype: torch.dtype, apply: bool, tile: Tile = OPERAND_TILE) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        b = _blocks_of(x.detach())
        with torch.cuda.device_of(x):
            kernels.operand_kernel[(triton.cdiv(b.blocks, tile.blocks),)](
                b.matrix, out, global_scale, *b.shape, APPLY=apply, FLAT=b.flat, **_options(tile)
            )
    return out


def operand_pow2(x: Tensor, dtype: torch.dtype, tile: Tile = OPERAND_TILE) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    if not x.numel():
        return out, scale.fill_(1.0)
    b = _blocks_of(x.detach())
    tiles = triton.cdiv(b.blocks, tile.blocks)
    peaks, floors = (torch.empty(tiles, dtype=torch.float32, device=x.device) for _ in range(2))
    with torch.cuda.device_of(x):
        kernels.operand_kernel_pow2[(tiles,)](b.matrix, out, peaks, floors, *b.shape, FLAT=b.flat, **_options(tile))
        kernels.repair_kernel_pow2[(min(tiles, REPAIR_PROGRAMS),)](
            b.matrix, out, peaks, floors, scale, tiles, *b.shape,
            FLAT=b.flat, CHUNK=PEAKS_CHUNK, LANES=REPAIR_LANES, **_options(tile),
        )  # fmt: skip
    return out, scale


def dequantize(
    packed: Tensor,
    block_scale: Tensor,
    global_scale: Tensor,
    columns: int,
    dtype: torch.dtype,
    apply: bool,
    tile: Tile = DEQUANTIZE_TILE,
) -> Tensor:
    out = torch.empty((*packed.shape[:-1], columns), dtype=dtype, device=packed.device)
    if out.numel():
        packed, block_scale = packed.contiguous(), block_scale.contiguous()
        if packed.storage_offset() % 4 or packed.data_ptr() % 4:  # a slice of a file's buffer, say
            packed = packed.clone()
        per_row, flat = block_scale.shape[-1], columns % BLOCK_SIZE == 0
        with torch.cuda.device_of(packed):
            kernels.dequantize_kernel[(triton.cdiv(block_scale.numel(), tile.blocks),)](
                packed.view(torch.int32), block_scale, global_scale, out,
                block_scale.numel(), 1 if flat else per_row, BLOCK_SIZE if flat else columns,
                APPLY=apply, FLAT=flat, **_options(tile),
            )  # fmt: skip
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
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    columns, depth = weight.shape
    rows = out.numel() // columns
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (x.detach().reshape(rows, depth), weight.detach()))
    bias = None if bias is None else bias.detach().contiguous()
    tile = tile or _matmul_tile(rows, x.device)
    with torch.cuda.device_of(x):
        kernels.matmul_kernel[(triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n),)](
            a, b, bias, alpha_x, alpha_weight, out, rows, columns, depth, a.stride(0), b.stride(0),
            HAS_BIAS=bias is not None, EVEN_K=depth % tile.k == 0,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=MATMUL_GROUP,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _matmul_tile(rows: int, device: torch.device) -> MatmulTile:
    capability = torch.cuda.get_device_capability(device)
    for minimum, large, small in MATMUL_TILES:
        if capability >= minimum:
            return small if rows <= SMALL_M else large
    found = "sm_{}{}".format(*capability)
    raise ValueError(f"scaled_matmul needs sm_80 or newer, found {found}; use the reference kernels")


def empty_quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = padded_length(x.shape[-1]) // BLOCK_SIZE
    packed = x.new_empty((*x.shape[:-1], 8 * blocks), dtype=torch.uint8)
    return packed, x.new_empty((*x.shape[:-1], blocks), dtype=torch.uint8)
