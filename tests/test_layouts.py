"""Foreign layouts against their definition byte by byte, flashinfer's own CPU code, and the fork's permutation."""

from __future__ import annotations

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch
from test_triton_scaled import RAGGED, awkward, tiles_by_definition

from qatpatch import nvfp4
from qatpatch.kernels import layouts

REFERENCE = "flashinfer.batch_invariant.quantization.nvfp4_reference"


def scale_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 127, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class TestTiles:
    @pytest.mark.parametrize("rows, columns", RAGGED)
    def test_definition_and_inverse(self, rows, columns):
        scales = scale_bytes(rows, -(-columns // 16))
        tiled = layouts.tile_scales(scales)
        assert tiled.shape == layouts.tiled_shape(*scales.shape) and tiled.is_contiguous()
        np.testing.assert_array_equal(tiled.numpy(), tiles_by_definition(scales.numpy()))
        assert torch.equal(layouts.untile_scales(tiled, *scales.shape), scales)
        assert torch.equal(layouts.untile_scales(tiled.flatten(), *scales.shape), scales)

    @pytest.mark.parametrize("rows, columns", RAGGED)
    @pytest.mark.parametrize("rule", nvfp4.GLOBAL_SCALE_RULES)
    def test_flashinfer_reference_bit_for_bit(self, rows, columns, rule):
        """Packed bytes, tiled scales with their padding, and alpha, given the same encode scale."""
        reference = oracle.outside_module(REFERENCE)
        torch.manual_seed(rows)
        columns = nvfp4.padded_length(columns)  # their rows are whole blocks
        x, weight = awkward(rows, columns).nan_to_num(nan=1.0, posinf=2.0), torch.randn(48, columns) * 0.02
        encodes = []
        for tensor in (x, weight):
            q = nvfp4.quantize(tensor, global_scale=nvfp4.choose_global_scale(tensor, rule))
            encode = layouts.encode_scale(q.global_scale)
            packed, tiled, _ = reference.quantize_reference(tensor, encode)
            assert torch.equal(layouts.tile_scales(q.block_scale.view(torch.uint8)), tiled)
            # In a block whose scale is zero their codes are +-6 and ours 0: both decode to 0.
            alive = (q.block_scale.float() != 0).unsqueeze(-1)
            ours, theirs = (p.reshape(len(tensor), -1, 8) for p in (q.packed, packed))
            assert torch.equal(torch.where(alive, ours, 0), torch.where(alive, theirs, 0))
            mine = nvfp4.dequantize_without_global_scale(q).double() / float(encode)
            decoded = reference.dequantize(packed, tiled, encode, *tensor.shape)
            assert torch.equal(mine, decoded.view(tensor.shape))
            encodes.append(encode)
        scales = [nvfp4.choose_global_scale(t, rule) for t in (x, weight)]
        alpha = layouts.gemm_alpha(*scales)
        assert alpha.shape == (1,) and alpha.dtype is torch.float32
        theirs = 1.0 / (encodes[0] * encodes[1])  # as flashinfer's documentation forms it
        assert torch.equal(alpha, theirs.reshape(1)) if rule == "pow2" else abs(alpha / theirs - 1) < 4e-7

    def test_leading_axes_dtypes_strides_and_meta(self):
        scales = scale_bytes(2, 3, 130, 6).transpose(0, 1)
        tiled = layouts.tile_scales(scales)
        assert tiled.shape == (3, 2, 256, 8)
        for i in range(3):
            for j in range(2):
                np.testing.assert_array_equal(tiled[i, j].numpy(), tiles_by_definition(scales[i, j].numpy()))
        assert torch.equal(layouts.untile_scales(tiled, 130, 6), scales)
        e4m3 = layouts.tile_scales(scales.contiguous().view(torch.float8_e4m3fn))
        assert e4m3.dtype is torch.float8_e4m3fn and torch.equal(e4m3.view(torch.uint8), tiled)
        meta = layouts.tile_scales(scales.to("meta"))
        assert (meta.shape, meta.stride(), meta.dtype) == (tiled.shape, tiled.stride(), tiled.dtype)

    @pytest.mark.parametrize("shape", [(0, 4), (5, 0)])
    def test_empty(self, shape):
        tiled = layouts.tile_scales(scale_bytes(*shape))
        assert tiled.shape == layouts.tiled_shape(*shape)
        assert layouts.untile_scales(tiled, *shape).shape == shape

    def test_refusals(self):
        with pytest.raises(TypeError, match="torch.float32"):
            layouts.tile_scales(torch.ones(4, 4))
        with pytest.raises(ValueError, match="rows and columns"):
            layouts.tile_scales(scale_bytes(4))
        with pytest.raises(ValueError, match="256 x 4 bytes"):
            layouts.untile_scales(scale_bytes(128, 4), 130, 4)
        with pytest.raises(TypeError, match="torch.int16"):
            layouts.untile_scales(torch.zeros(128, 4, dtype=torch.int16), 128, 4)


class TestAttentionScales:
    @pytest.mark.parametrize("tokens", [1, 31, 128, 150])
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_fork_layout(self, tokens, head_dim):
        scales = scale_bytes(2, tokens, 3, head_dim // 16)
        found = layouts.attention_scales(scales)
        tiles, depth = -(-tokens // 128), head_dim // 64
        assert found.shape == (32, 4, tiles, 4, depth, 3, 2)
        head = tiles * depth * 512
        # The fork's: a permutation of a contiguous (B, H, tiles, depth, 32, 4, 4), innermost axis at stride 1.
        wanted = torch.empty(2, 3, tiles, depth, 32, 4, 4).permute(4, 5, 2, 6, 3, 1, 0).stride()
        assert found.stride() == wanted == (16, 4, depth * 512, 1, 512, head, 3 * head)
        for s in range(tokens):
            for c in range(depth * 4):
                assert torch.equal(found[s % 32, s % 128 // 32, s // 128, c % 4, c // 4].t(), scales[:, s, :, c])
        assert int(found.sum(dtype=torch.int64)) == int(scales.sum(dtype=torch.int64))  # all else is zero
        assert torch.equal(layouts.attention_scales_to_linear(found, tokens), scales)

    def test_refusal(self):
        with pytest.raises(ValueError, match="multiples of 64"):
            layouts.attention_scales(scale_bytes(1, 4, 2, 6))


def test_nibbles():
    packed = torch.arange(256, dtype=torch.uint8)
    swapped = layouts.swap_nibbles(packed)
    assert swapped.tolist() == [(b % 16) * 16 + b // 16 for b in range(256)]
    assert torch.equal(layouts.swap_nibbles(swapped), packed)
    with pytest.raises(TypeError, match="torch.int8"):
        layouts.swap_nibbles(packed.view(torch.int8))


def test_encode_and_decode_scales():
    powers = torch.tensor([2.0**k for k in range(-126, 127)])
    assert torch.equal(layouts.encode_scale(powers), powers.flip(0))
    assert torch.equal(layouts.decode_scale(layouts.encode_scale(powers)), powers)
    amax = torch.tensor(3.7)
    assert float(layouts.decode_scale(2688 / amax)) == pytest.approx(3.7 / 2688, rel=1e-7)
    assert float(layouts.encode_scale(torch.tensor(2.0**-140))) == np.finfo(np.float32).max


def test_aligned():
    buffer = torch.arange(64, dtype=torch.uint8)
    assert layouts.aligned(buffer) is buffer
    moved = layouts.aligned(buffer[3:])
    assert moved.data_ptr() % 16 == 0 and torch.equal(moved, buffer[3:])
