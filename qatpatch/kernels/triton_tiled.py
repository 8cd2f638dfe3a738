"""The NVFP4 quantizer for foreign GEMMs: packed codes, and block scales in 128x4 tiles (`layouts`), in Triton.

One program quantizes what one tile of scales covers: 128 rows x 4 blocks, 128 bytes of each bfloat16 row. So it reads
whole cache lines, and writes its 512 scale bytes as they lie, padding included: rows and blocks beyond the edge are
read as zeros, whose scale byte is 0. No buffer is cleared before.

Codes and bytes are those of `qatpatch.nvfp4`, bit for bit, on every architecture from sm_80 on: the arithmetic is
`triton_nvfp4_kernels._quantize_tile`, which uses no FP4 or FP8 instruction.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from qatpatch.kernels import triton_nvfp4_launch as launch
from qatpatch.kernels.layouts import TILE_COLUMNS, TILE_ROWS, tiled_shape
from qatpatch.kernels.triton_launch import Launcher
from qatpatch.kernels.triton_nvfp4_kernels import _quantize_tile
from qatpatch.nvfp4 import BLOCK_SIZE, padded_length

WARPS = 8


@triton.jit(do_not_specialize=["rows", "per_row", "tiles_per_row"], do_not_specialize_on_alignment=["scale"])
def quantize_tiled_kernel(x, words, scales, scale, rows, per_row, tiles_per_row, columns, row_stride):
    """words (rows, 2 * per_row): int32, eight codes each; scales: E4M3 bytes, 512 for each program.

    x has ``rows`` rows of ``columns`` elements, ``row_stride`` apart, ``per_row`` blocks each.
    """
    tile = tl.program_id(0)
    index = tl.arange(0, 512)
    row = (tile // tiles_per_row) * 128 + index // 16 + index // 4 % 4 * 32
    block = (tile % tiles_per_row) * 4 + index % 4
    column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    pointers = x + row.to(tl.int64)[:, None] * row_stride + column
    values = tl.load(pointers, mask=(row < rows)[:, None] & (column < columns), other=0.0).to(tl.float32)
    word, byte = _quantize_tile(values, tl.load(scale), 512)
    place = (row.to(tl.int64) * per_row + block)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(words + place, word, mask=((row < rows) & (block < per_row))[:, None])
    tl.store(scales + tile.to(tl.int64) * 512 + index, byte.to(tl.uint8))


def quantize_activation(x: Tensor, *, global_scale: Tensor | None, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_tiled` of ``x`` (M, K), and the scale (): the one given, else by ``rule`` over the whole of x."""
    scale = launch.global_scale(x, launch.rule_number(rule)) if global_scale is None else global_scale.clone()
    return *quantize_tiled(x, scale), scale


def quantize_tiled(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` (M, K) under a decode scale ().

    Returns:
        Packed codes uint8 ``(M, ceil16(K) / 2)``, even element in the low nibble, and E4M3 scale bytes uint8 in 128x4
        tiles, ``(M padded to 128, K / 16 padded to 4)``, padding zero; both contiguous.
    """
    packed, scales = empty_tiled(x)
    if x.numel():
        if x.stride(1) != 1 and x.shape[1] > 1:
            x = x.contiguous()
        rows, columns = x.shape
        tiles_per_row = scales.shape[1] // TILE_COLUMNS
        integers = rows, padded_length(columns) // BLOCK_SIZE, tiles_per_row, columns, x.stride(0)
        programs = scales.shape[0] // TILE_ROWS * tiles_per_row
        _launcher()(programs, (x, packed.view(torch.int32), scales, global_scale), integers)
    return packed, scales


def empty_tiled(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `quantize_tiled` returns for ``x`` (M, K), uninitialised: its shapes, dtypes and strides."""
    rows, columns = x.shape
    blocks = padded_length(columns) // BLOCK_SIZE
    packed = x.new_empty((rows, 8 * blocks), dtype=torch.uint8)
    return packed, x.new_empty(tiled_shape(rows, blocks), dtype=torch.uint8)


@lru_cache(maxsize=1)
def _launcher() -> Launcher:
    return Launcher(quantize_tiled_kernel, {}, {"num_warps": WARPS, "enable_fp_fusion": False})
