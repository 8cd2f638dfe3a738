"""Foreign layouts of NVFP4 data, all in one place: plain torch functions on any device, meta too.

qatpatch itself stores linear (row-major) block scales, the even element in the low nibble, and decode global scales
(`nvfp4`). Kernels and files of others want the following, and nothing else in the package knows how they look.

**128x4 tiled block scales** (CUTLASS, cuBLASLt, flashinfer's ``layout_128x4``, torch's ``SWIZZLE_32_4_4``). Rows are
padded to 128 and columns (blocks) to 4; every tile of 128 rows x 4 columns is 512 contiguous bytes::

    byte(r, c) = (r // 128 * tiles_per_row + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4

Padding bytes are zero: a padded block then counts as 0, whatever its codes.

**FP4 FlashAttention-4 fork**: the same tiles for each batch and head, seen through the strided axes
``(32, 4, S / 128, 4, D / 64, H, B)``.

**Encode global scales**: ``x * encode`` fills the range of E4M3 x E2M1, so ``encode = 1 / global_scale``. A GEMM's
``alpha`` is the product of its operands' decode scales.

Deliberately not here: shuffled weights (TensorRT-LLM), 8x4 tiles, the token permutation of sm_120 attention kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 128, 4
_FLT_MAX = torch.finfo(torch.float32).max


def tiled_shape(rows: int, blocks: int) -> tuple[int, int]:
    """Shape of the 128x4 tiled scales of ``rows`` rows of ``blocks`` blocks: both rounded up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-blocks // TILE_COLUMNS) * TILE_COLUMNS


def tile_scales(block_scale: Tensor) -> Tensor:
    """Linear block scales to 128x4 tiles.

    Args:
        block_scale: one-byte dtype (uint8 or float8_e4m3fn) ``(..., R, C)``, any strides.

    Returns:
        Of the same dtype, contiguous, ``(..., R padded to 128, C padded to 4)``: the matrix shape is only a name for
        that many bytes, which lie in the tiled order. Padding is zero.

    Raises:
        TypeError, ValueError: the scales are not bytes, or have fewer than two axes.
    """
    rows, blocks = _check_scales(block_scale)
    padded_rows, padded_blocks = tiled_shape(rows, blocks)
    scales = block_scale.view(torch.uint8)
    if (padded_rows, padded_blocks) != (rows, blocks):
        scales = torch.nn.functional.pad(scales, (0, padded_blocks - blocks, 0, padded_rows - rows))
    leading = block_scale.shape[:-2]
    # ..., row tile, r // 32, r % 32, column tile, c % 4
    tiles = scales.reshape(*leading, padded_rows // TILE_ROWS, 4, 32, padded_blocks // TILE_COLUMNS, TILE_COLUMNS)
    tiles = tiles.transpose(-4, -2).contiguous()
    return tiles.view(*leading, padded_rows, padded_blocks).view(block_scale.dtype)


def untile_scales(tiled: Tensor, rows: int, blocks: int) -> Tensor:
    """The inverse of `tile_scales`: contiguous ``(..., rows, blocks)`` of 128x4 tiles.

    Args:
        tiled: one-byte dtype, contiguous, as `tile_scales` returns it; or its bytes in another shape without leading
            axes (some libraries return them flat).
        rows, blocks: the logical shape.

    Raises:
        TypeError, ValueError: not bytes, or not as many as whole tiles of ``rows x blocks`` take.
    """
    padded_rows, padded_blocks = tiled_shape(rows, blocks)
    if tiled.element_size() != 1:
        raise TypeError(f"block scales are bytes (uint8 or float8_e4m3fn), got {tiled.dtype}")
    if tiled.shape[-2:] == (padded_rows, padded_blocks):
        leading = tiled.shape[:-2]
    elif tiled.numel() == padded_rows * padded_blocks:
        leading = torch.Size(())
    else:
        raise ValueError(
            f"the 128x4 tiles of {rows} rows x {blocks} blocks are {padded_rows} x {padded_blocks} bytes, got a tensor "
            f"{tuple(tiled.shape)}"
        )
    tiles = tiled.contiguous().view(torch.uint8)
    tiles = tiles.view(*leading, padded_rows // TILE_ROWS, padded_blocks // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    scales = tiles.transpose(-4, -2).reshape(*leading, padded_rows, padded_blocks)
    return scales[..., :rows, :blocks].contiguous().view(tiled.dtype)


def attention_scales(block_scale: Tensor) -> Tensor:
    """Block scales of Q or K as the FP4 FlashAttention-4 fork takes them.

    Args:
        block_scale: one-byte dtype ``(B, S, H, D / 16)``, linear, D a multiple of 64, any strides.

    Returns:
        uint8 ``(32, 4, ceil(S / 128), 4, D / 64, H, B)``, strides ``(16, 4, D / 64 * 512, 1, 512, T, H * T)`` with
        ``T = ceil(S / 128) * D / 64 * 512`` bytes a head: the scale of token s, block c is element
        ``[s % 32, s % 128 // 32, s // 128, c % 4, c // 4, h, b]``. Padded tokens have scale 0.

    Raises:
        TypeError, ValueError: other dtypes or shapes.
    """
    if block_scale.dim() != 4 or block_scale.shape[-1] % TILE_COLUMNS:
        raise ValueError(
            f"expected block scales (B, S, H, D / 16) of head dimensions that are multiples of 64, got "
            f"{tuple(block_scale.shape)}"
        )
    batch, _, heads, blocks = block_scale.shape
    tiled = tile_scales(block_scale.transpose(1, 2)).view(torch.uint8)
    tiles = tiled.view(batch, heads, tiled.shape[-2] // TILE_ROWS, blocks // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    return tiles.permute(4, 5, 2, 6, 3, 1, 0)


def attention_scales_to_linear(scales: Tensor, tokens: int) -> Tensor:
    """The inverse of `attention_scales`: contiguous uint8 ``(B, tokens, H, D / 16)``."""
    blocks, heads, batch = scales.shape[-3] * TILE_COLUMNS, *scales.shape[-2:]
    # b, h, token tile, r // 32, r % 32, block tile, c % 4
    linear = scales.permute(6, 5, 2, 1, 0, 4, 3).reshape(batch, heads, -1, blocks)
    return linear[:, :, :tokens].transpose(1, 2).contiguous()


def swap_nibbles(packed: Tensor) -> Tensor:
    """uint8 codes with the two nibbles of each byte exchanged: between low nibble first (ours) and high first."""
    if packed.dtype is not torch.uint8:
        raise TypeError(f"packed codes are uint8, got {packed.dtype}; view them as uint8 first")
    return (packed << 4) | (packed >> 4)


def encode_scale(global_scale: Tensor) -> Tensor:
    """``1 / global_scale``, the encode direction, float32 of the same shape; at most FLT_MAX, as in `nvfp4.quantize`.

    Exact, and undone by `decode_scale`, for powers of two within [2^-126, 2^126]; else rounded once.
    """
    return (1.0 / global_scale.float()).clamp(max=_FLT_MAX)


def decode_scale(encode: Tensor) -> Tensor:
    """The global scale (decode direction, float32) of a foreign encode scale; of the same shape."""
    return (1.0 / encode.float()).clamp(max=_FLT_MAX)


def gemm_alpha(x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """What a GEMM over ``code * block_scale`` is multiplied with: the product of two decode scales, float32 ``(1,)``.

    One number for two: where their product leaves FP32's range it is 0 or inf, though the result might not be.
    """
    return (x_scale.float() * weight_scale.float()).reshape(1)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor at an address that is a multiple of 16, as wide loads need it: itself, or a copy where a slice of some
    larger buffer lies elsewhere.
    """
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _check_scales(block_scale: Tensor) -> tuple[int, int]:
    if block_scale.element_size() != 1 or block_scale.dtype is torch.bool:
        raise TypeError(f"block scales are bytes (uint8 or float8_e4m3fn), got {block_scale.dtype}")
    if block_scale.dim() < 2:
        raise ValueError(f"block scales to tile have rows and columns, got shape {tuple(block_scale.shape)}")
    return block_scale.shape[-2], block_scale.shape[-1]
