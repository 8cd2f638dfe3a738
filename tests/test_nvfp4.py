"""The NVFP4 format against `nvfp4_oracle`, bytes worked out by hand, flashinfer's CPU reference and torchao."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qatpatch import nvfp4

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
FLT_MAX = torch.finfo(torch.float32).max
# Ours, and decode scales that other tools' files may bring: any positive FP32 number.
FOREIGN = (1.0, 0.0123, 3.7e-4, 2.0**-7, 7.7e8, 1e-30)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heavy_tailed(*shape: int, seed: int = 1) -> torch.Tensor:
    """Student t with 1.5 degrees of freedom, rows scaled over eight decades."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-6, 2, size=(*shape[:-1], 1))
    return torch.from_numpy((rng.standard_t(1.5, size=shape) * scale).astype(np.float32))


def around(values: np.ndarray) -> np.ndarray:
    """Each float32 value with its two neighbours."""
    values = values.astype(np.float32)
    return np.concatenate([np.nextafter(values, np.float32(-np.inf)), values, np.nextafter(values, np.float32(np.inf))])


def code_midpoints() -> torch.Tensor:
    """Blocks led by a 6, so that at global scale 1 the block scale is 1 and the rest are the codes' own units."""
    midpoints = around((oracle.E2M1[:-1] + oracle.E2M1[1:]) / 2)
    midpoints = np.concatenate([midpoints, -midpoints, [0.0, -0.0, -6.0]])
    blocks = np.full((len(midpoints) // 15, 16), 6.0, np.float32)
    blocks[:, 1:] = midpoints.reshape(-1, 15)
    return torch.from_numpy(blocks)


def scale_midpoints() -> torch.Tensor:
    """One block a row whose amax / 6 is (next to) each midpoint of two E4M3 values, in a ramp; and some beyond 448."""
    midpoints = (oracle.E4M3[:-1] + oracle.E4M3[1:]) / 2
    amax = around(np.concatenate([6 * midpoints, [2688.0, 2784.0, 2785.0, 3000.0, 1e6]]))
    ramp = np.linspace(-1, 1, 16, dtype=np.float32)
    return torch.from_numpy(amax[:, None] * ramp)


def one_spoiled(value: float) -> torch.Tensor:
    x = normal(4, 48, seed=3)
    x[1, 20] = value
    return x


def one_dead_block() -> torch.Tensor:
    x = normal(8, 64, seed=4) * 1e-2
    x[3, 16:32] = 0
    x[5, 16] = -0.0
    return x


INPUTS = {
    "normal": normal(64, 256),
    "heavy tailed": heavy_tailed(64, 256),
    "midpoints of E2M1": code_midpoints(),
    "midpoints of E4M3": scale_midpoints(),
    "all zero": torch.zeros(4, 64),
    "negative zero": torch.full((2, 32), -0.0),
    "one dead block": one_dead_block(),
    "tiny": normal(8, 64) * 1e-36,
    "subnormal": normal(8, 64) * 1e-40,
    "smallest": torch.full((1, 16), 1e-45),
    "huge": normal(8, 64) * 1e30,
    "one huge": one_spoiled(1e30),
    "largest": one_spoiled(FLT_MAX),
    "all largest": torch.full((2, 16), -FLT_MAX),
    "one inf": one_spoiled(float("inf")),
    "one -inf": one_spoiled(float("-inf")),
    "one nan": one_spoiled(float("nan")),
    "nothing finite": torch.full((2, 32), float("nan")),
}


def quantize(x: torch.Tensor, scale: float | None, rule: str) -> nvfp4.NVFP4Tensor:
    return nvfp4.quantize(x, global_scale=nvfp4.choose_global_scale(x, rule) if scale is None else scale)


def assert_same_bits(x: torch.Tensor, scale: float | None = None, rule: str = "pow2") -> None:
    """Global scale, scale bytes, codes and decoded values of ``x`` equal the oracle's."""
    q = quantize(x, scale, rule)
    expected = oracle.quantize(x.float().numpy(), global_scale=scale, rule=rule)
    assert q.global_scale.shape == () and q.global_scale.dtype == torch.float32
    assert q.global_scale.numpy().tobytes() == expected.global_scale.tobytes()
    leading = x.shape[:-1]
    assert q.packed.shape == (*leading, expected.packed.shape[-1]) and q.packed.dtype == torch.uint8
    assert q.block_scale.shape == (*leading, expected.scales.shape[-1]) and q.block_scale.dtype == torch.float8_e4m3fn
    assert q.shape == x.shape and q.packed.is_contiguous() and q.block_scale.is_contiguous()
    np.testing.assert_array_equal(scale_bytes(q), expected.scales)
    np.testing.assert_array_equal(q.packed.reshape(expected.packed.shape).numpy(), expected.packed)
    decoded = nvfp4.dequantize(q)
    assert decoded.shape == x.shape and decoded.dtype == torch.float32
    with np.errstate(over="ignore"):  # what rounds up beyond FLT_MAX decodes to infinity
        np.testing.assert_array_equal(decoded.numpy(), expected.values.astype(np.float32))
    operand = nvfp4.dequantize_without_global_scale(q)
    np.testing.assert_array_equal(operand.numpy(), expected.operand)
    for apply, there_and_back in ((True, decoded), (False, operand)):
        rounded = nvfp4.round_to_nvfp4(x, q.global_scale, dtype=torch.float32, apply_global_scale=apply)
        np.testing.assert_array_equal(rounded.numpy(), there_and_back.numpy())


def scale_bytes(q: nvfp4.NVFP4Tensor) -> np.ndarray:
    return q.block_scale.view(torch.uint8).reshape(math.prod(q.shape[:-1]), q.block_scale.shape[-1]).numpy()


def packed_bytes(q: nvfp4.NVFP4Tensor) -> str:
    return q.packed.numpy().tobytes().hex()


class TestAgainstTheOracle:
    @pytest.mark.parametrize("rule", nvfp4.GLOBAL_SCALE_RULES)
    @pytest.mark.parametrize("name", INPUTS)
    def test_own_scales(self, name, rule):
        assert_same_bits(INPUTS[name], rule=rule)

    @pytest.mark.parametrize("scale", FOREIGN)
    @pytest.mark.parametrize("name", INPUTS)
    def test_foreign_scales(self, name, scale):
        assert_same_bits(INPUTS[name], scale=scale)

    @pytest.mark.parametrize("rule", nvfp4.GLOBAL_SCALE_RULES)
    @pytest.mark.parametrize("columns", [1, 8, 15, 17, 24, 60, 100])
    def test_ragged_rows_are_padded_and_never_share_a_block(self, columns, rule):
        x = normal(7, columns, seed=columns)
        x[3] *= 100
        assert_same_bits(x, rule=rule)
        scale = nvfp4.choose_global_scale(x, rule)
        whole = nvfp4.quantize(x, global_scale=scale)
        for row in range(len(x)):
            alone = nvfp4.quantize(x[row], global_scale=scale)
            assert torch.equal(alone.packed, whole.packed[row])
            assert torch.equal(alone.block_scale.view(torch.uint8), whole.block_scale[row].view(torch.uint8))

    def test_padding_holds_zero_codes(self):
        q = nvfp4.quantize(torch.ones(3, 17))
        assert q.packed.shape == (3, 16)
        assert not q.packed[:, 9:].any() and not (q.packed[:, 8] >> 4).any()

    def test_zero_columns(self):
        q = nvfp4.quantize(torch.empty(4, 0))
        assert q.packed.shape == (4, 0) and q.global_scale == 1 and nvfp4.dequantize(q).shape == (4, 0)

    @pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 60)])
    def test_zero_rows(self, shape):
        assert_same_bits(torch.empty(shape))
        assert nvfp4.quantize(torch.empty(shape)).global_scale == 1

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_dtypes_are_read_as_float32(self, dtype):
        assert_same_bits(heavy_tailed(16, 80).clamp(-6e4, 6e4).to(dtype))

    def test_layouts(self):
        x = normal(6, 5, 64, seed=7)
        assert_same_bits(x)
        assert_same_bits(normal(48, seed=8))
        for view in (x.transpose(0, 1), x.permute(2, 1, 0), x[:, ::2], x[..., ::3], x[0, :1].expand(9, 64)):
            assert_same_bits(view)

    @pytest.mark.parametrize("shape", [(1030, 1024), (2, 600_001)])
    def test_longer_than_one_chunk(self, shape):
        x = normal(*shape, seed=9)
        x[-1, -1] = 50.0
        assert_same_bits(x)

    def test_default_scale_is_the_pow2_rule(self):
        x = INPUTS["heavy tailed"]
        assert packed_bytes(nvfp4.quantize(x)) == packed_bytes(quantize(x, None, "pow2"))
        assert nvfp4.quantize(x).global_scale == nvfp4.choose_global_scale(x)

    def test_scale_forms(self):
        x = normal(2, 32)
        for scale in (torch.tensor(0.01), torch.tensor([0.01]), np.float32(0.01).item()):
            assert nvfp4.quantize(x, global_scale=scale).global_scale == torch.tensor(0.01)

    def test_input_is_left_alone(self):
        x = normal(4, 32).requires_grad_()
        before = x.detach().clone()
        q = nvfp4.quantize(x)
        assert torch.equal(x.detach(), before)
        assert not any(t.requires_grad for t in (q.packed, q.global_scale, nvfp4.dequantize(q)))

    def test_meta_tensors_give_shapes(self):
        q = nvfp4.quantize(torch.empty(3, 60, device="meta", dtype=torch.bfloat16))
        assert q.packed.shape == (3, 32) and q.block_scale.shape == (3, 4) and q.packed.is_meta
        assert nvfp4.dequantize(q, torch.bfloat16).shape == (3, 60)


class TestGoldenBytes:
    """Worked out by hand from the definition."""

    def test_every_code(self):
        # amax 6 and global scale 1: 6 * f32(1/6) rounds to 1.0, whose E4M3 byte is exponent 7, mantissa 0: 0x38. The
        # codes are 0 to 7 and, with the sign bit, 8 to 15; byte j holds element 2j low and 2j+1 high.
        x = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        q = nvfp4.quantize(x, global_scale=1.0)
        assert q.block_scale.view(torch.uint8).tolist() == [0x38]
        assert packed_bytes(q) == "1032547698badcfe"

    def test_ties_go_to_the_even_code(self):
        # Block scale 1 as above. 0.25 is between codes 0 and 1: 0. 0.75 (1|2): 2. 1.25 (2|3): 2. 1.75 (3|4): 4.
        # 2.5 (4|5): 4. 3.5 (5|6): 6. 5 (6|7): 6. 6: 7. The same with the sign bit.
        ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
        q = nvfp4.quantize(torch.tensor(ties + [-t for t in ties]), global_scale=1.0)
        assert packed_bytes(q) == "20426476a8caecfe"

    def test_two_levels_of_scale(self):
        # amax 1: 2688 * 2^-12 = 0.656 < 1 <= 2688 * 2^-11 = 1.3125, so the global scale is 2^-11 and encode 2048.
        # Block 0: 2048 / 6 = 341.33, E4M3 steps by 32 there: 352 = 1.375 * 2^8, exponent 15, mantissa 3: 0x7B.
        #   x * 2048 / 352: 1 -> 5.82 -> 6 (7); 0.5 -> 2.91 -> 3 (5); 0.1 -> 0.58 -> 0.5 (1); -0.75 -> -4.36 -> -4 (14);
        #   0.01 -> 0.06 -> 0 (0); -0.01 -> -0 (8). Pairs (7,5) (1,14) (0,8): 57 e1 80, then zeros.
        # Block 1: amax 0.01: 20.48 / 6 = 3.413, steps of 0.25: 3.5 = 1.75 * 2^1, exponent 8, mantissa 6: 0x46.
        #   x * 2048 / 3.5: 0.01 -> 5.85 -> 6 (7); -0.004 -> -2.34 -> -2 (12); 0.0005 -> 0.29 -> 0.5 (1);
        #   0.0004 -> 0.234 -> 0 (0). Pairs (7,12) (1,0): c7 01.
        # Block 2, all zero: scale byte 0 and zero codes.
        # Block 3: amax 1e-6: 0.002048 / 6 = 0.000341, under half of 2^-9, the smallest E4M3 value: scale 0 and codes 0.
        # Block 4: amax 5e-6: 0.01024 / 6 = 0.001707, nearest 2^-9, the byte 0x01. x * 2048 * 512: 5.24 -> 6 (7).
        x = torch.zeros(1, 80)
        x[0, :6] = torch.tensor([1.0, 0.5, 0.1, -0.75, 0.01, -0.01])
        x[0, 16:20] = torch.tensor([0.01, -0.004, 0.0005, 0.0004])
        x[0, 48] = -1e-6
        x[0, 64] = 5e-6
        q = nvfp4.quantize(x)
        assert q.global_scale == 2.0**-11
        assert q.block_scale.view(torch.uint8).tolist() == [[0x7B, 0x46, 0x00, 0x00, 0x01]]
        zeros = "00" * 8
        assert packed_bytes(q) == "57e180" + "00" * 5 + "c701" + "00" * 6 + zeros + zeros + "07" + "00" * 7
        decoded = nvfp4.dequantize(q)
        assert decoded[0, 0] == 6 * 352 / 2048 and decoded[0, 17] == -2 * 3.5 / 2048

    def test_largest_element_is_exact_with_the_amax_rule(self):
        # amax 21: 21 / 2688 = 2^-7, encode 128; 21 * 128 / 6 = 448, the byte 0x7E; 21 * 128 / 448 = 6, the code 7.
        x = torch.tensor([[21.0, -10.5] + [0.0] * 14])
        q = quantize(x, None, "amax")
        assert q.global_scale == 2.0**-7 and q.block_scale.view(torch.uint8).item() == 0x7E
        assert packed_bytes(q) == "d7" + "00" * 7  # -10.5 -> -3, the code 13
        assert torch.equal(nvfp4.dequantize(q), x)

    def test_recorded_blocks(self):
        """Blocks of many magnitudes, with the bytes that flashinfer 0.7.4's CPU reference gave for them."""
        for case in json.loads((GOLDEN / "nvfp4_blocks.json").read_text()):
            x = torch.tensor([float.fromhex(v) for v in case["x"]]).reshape(case["shape"])
            q = nvfp4.quantize(x, global_scale=float.fromhex(case["global_scale"]))
            assert packed_bytes(q) == case["packed"]
            assert scale_bytes(q).tobytes().hex() == case["block_scale"]


class TestGlobalScale:
    def test_pow2_at_its_edges(self):
        edges = around(np.array([2688.0 * 2.0**k for k in range(-137, 117)]))
        amax = np.concatenate([edges, around(2.0 ** np.arange(-148.0, 128)), [0.0, 1e-45, 1e-36, FLT_MAX]])
        amax = amax[np.isfinite(amax)].astype(np.float32)
        found = nvfp4.global_scale_of_amax(torch.from_numpy(amax), "pow2").numpy()
        np.testing.assert_array_equal(found, [oracle.pow2_scale(a) for a in amax])

    @pytest.mark.parametrize(
        ("amax", "scale"),
        [
            (2688.0, 1.0),
            (2687.99, 1.0),
            (2688.0005, 2.0),
            (1344.0, 0.5),
            (1.0, 2.0**-11),
            (0.0, 1.0),
            (1e-36, 2.0**-126),
            (1e-45, 2.0**-126),
            (FLT_MAX, 2.0**117),  # 2^128 / 2688 = 2^116.6
        ],
    )
    def test_pow2_by_hand(self, amax, scale):
        assert nvfp4.global_scale_of_amax(torch.tensor(amax)).item() == scale

    def test_pow2_keeps_the_largest_block_scale_in_the_top_octave(self):
        amax = torch.from_numpy((2.0 ** np.random.default_rng(0).uniform(-100, 100, 4000)).astype(np.float32))
        scaled = amax.double() / nvfp4.global_scale_of_amax(amax).double() / 6
        assert scaled.max() <= 448 and scaled.min() > 224

    def test_amax_rule(self):
        amax = np.concatenate([np.abs(INPUTS["heavy tailed"].numpy()).ravel(), [0.0, 1e-45, 1e-36, FLT_MAX]])
        found = nvfp4.global_scale_of_amax(torch.from_numpy(amax.astype(np.float32)), "amax").numpy()
        np.testing.assert_array_equal(found, [oracle.amax_scale(a) for a in amax.astype(np.float32)])

    def test_amax_is_over_the_finite_elements_of_the_whole_tensor(self):
        x = normal(5, 3, 40)
        x[4, 2, 39], x[0, 0, 0], x[1, 1, 1] = -77.0, float("inf"), float("nan")
        assert nvfp4.finite_amax(x).item() == 77.0
        assert nvfp4.finite_amax(torch.full((2, 3), float("nan"))).item() == 0.0
        assert nvfp4.finite_amax(torch.empty(0, 16)).item() == 0.0
        assert nvfp4.finite_amax(torch.tensor(-3.0)).item() == 3.0


class TestNumbers:
    def test_rounding_to_e2m1(self):
        rng = np.random.default_rng(0)
        x = np.concatenate(
            [rng.uniform(-8, 8, 100_000), 10.0 ** rng.uniform(-45, 38, 10_000), [np.inf, -np.inf, 0.0, -0.0]]
        )
        x = np.concatenate([x.astype(np.float32), code_midpoints().numpy().ravel()])
        expected = np.copysign(oracle.E2M1[oracle.nearest_index(np.abs(x), oracle.E2M1)], x)
        found = nvfp4.round_e2m1(torch.from_numpy(x.copy())).numpy()
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(x))

    def test_rounding_to_e4m3(self):
        midpoints = around((oracle.E4M3[:-1] + oracle.E4M3[1:]) / 2)
        x = np.concatenate(
            [midpoints, around(oracle.E4M3[1:]), np.linspace(0, 500, 50_001), [0.0, 1e-45, 464.0, 1e30, np.inf]]
        )
        x = x.astype(np.float32)
        found = nvfp4.round_e4m3(torch.from_numpy(x)).view(torch.uint8).numpy()
        np.testing.assert_array_equal(found, oracle.nearest_index(x, oracle.E4M3))
        assert nvfp4.round_e4m3(torch.tensor([float("nan")])).view(torch.uint8).item() == oracle.SCALE_NAN

    def test_codes_and_nibbles(self):
        codes = torch.arange(16, dtype=torch.uint8)
        values = nvfp4.decode_e2m1(codes)
        np.testing.assert_array_equal(values.numpy(), np.concatenate([oracle.E2M1, -oracle.E2M1]))
        assert values.signbit().tolist() == [False] * 8 + [True] * 8
        assert torch.equal(nvfp4.encode_e2m1(values), codes)
        packed = nvfp4.pack_codes(torch.tensor([[0x1, 0x2, 0xF, 0x0]], dtype=torch.uint8))
        assert packed.tolist() == [[0x21, 0x0F]]
        every_byte = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
        unpacked = nvfp4.unpack_codes(every_byte)
        assert unpacked.shape == (4, 128) and unpacked[0, 18:22].tolist() == [9, 0, 10, 0]
        assert torch.equal(nvfp4.pack_codes(unpacked), every_byte)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_every_product_of_code_and_block_scale_is_exact(self, dtype):
        """16 codes times the 127 non-negative E4M3 numbers, subnormals included."""
        scales = torch.arange(127, dtype=torch.uint8).reshape(127, 1)
        q = nvfp4.NVFP4Tensor(
            packed=nvfp4.pack_codes(torch.arange(16, dtype=torch.uint8)).repeat(127, 1),
            block_scale=scales.view(torch.float8_e4m3fn),
            global_scale=torch.tensor(1.0),
            shape=torch.Size((127, 16)),
        )
        found = nvfp4.dequantize_without_global_scale(q, dtype).double().numpy()
        np.testing.assert_array_equal(found, oracle.E4M3[:, None] * np.concatenate([oracle.E2M1, -oracle.E2M1]))

    @pytest.mark.parametrize("factor", [1e-30, 0.02, 1.0, 1e30])
    def test_pow2_is_exact_in_bfloat16(self, factor):
        x = normal(64, 128) * factor
        expected = oracle.quantize(x.numpy()).values
        np.testing.assert_array_equal(nvfp4.dequantize(nvfp4.quantize(x), torch.bfloat16).double().numpy(), expected)

    def test_amax_rule_is_not_exact_in_bfloat16(self):
        x = normal(64, 128)
        q = quantize(x, None, "amax")
        exact = oracle.quantize(x.numpy(), rule="amax").values
        found = nvfp4.dequantize(q, torch.bfloat16)
        assert (found.double().numpy() != exact).mean() > 0.5
        assert torch.equal(
            found, torch.from_numpy(exact.astype(np.float32)).bfloat16()
        )  # the FP32 product, rounded once

    @pytest.mark.parametrize("x", [INPUTS["normal"], INPUTS["one dead block"], normal(5, 60) * 1e-20], ids=str.__call__)
    def test_quantizing_again_changes_nothing(self, x):
        once = nvfp4.quantize(x)
        again = nvfp4.quantize(nvfp4.dequantize(once), global_scale=once.global_scale)
        # A scale below 2^-6 is an E4M3 subnormal, too coarse to survive: it may halve, or round to zero.
        normal_scale = once.block_scale.float() >= 2.0**-6
        dead = once.block_scale.float() == 0
        assert (normal_scale | dead).all()
        assert torch.equal(again.packed, once.packed)
        assert torch.equal(again.block_scale.view(torch.uint8), once.block_scale.view(torch.uint8))
        anew = nvfp4.quantize(nvfp4.dequantize(once))
        assert torch.equal(nvfp4.dequantize(anew), nvfp4.dequantize(once))

    @pytest.mark.parametrize(
        ("factor", "expected"),
        [(1.0, (20.436, 20.431, 20.431)), (0.02, (20.438, 20.435, 20.049))],
        ids=["N(0, 1)", "N(0, 0.02)"],
    )
    def test_signal_to_noise(self, factor, expected):
        """dB by rule (amax, pow2, fixed 1.0), averaged over eight phases of amax within one octave."""
        decibel = []
        for phase in range(8):
            x = normal(64, 1024, seed=5) * factor * 2.0 ** (phase / 8)
            row = []
            for scale in (nvfp4.choose_global_scale(x, "amax"), None, 1.0):
                noise = nvfp4.dequantize(nvfp4.quantize(x, global_scale=scale)).double() - x.double()
                row.append(10 * math.log10(float(x.double().square().sum() / noise.square().sum())))
            decibel.append(row)
        assert np.mean(decibel, axis=0) == pytest.approx(expected, abs=0.1)


class _CastsToE4M3(TorchDispatchMode):
    """Collects the numbers, NaN left out, that are handed to casts from another type to E4M3."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) and out.dtype == torch.float8_e4m3fn:
            source = args[-1]
            if source.dtype != out.dtype:
                self.given.append(source[~source.isnan()].abs().flatten())
        return out


class TestHonesty:
    """Nothing is hidden by saturation, by NaN or by a division by zero."""

    @pytest.mark.parametrize("scale", [None, "amax", 1e-6])
    def test_block_scales_are_clamped_before_the_cast(self, scale):
        # torch's CPU cast saturates, CUDA's may give NaN, so the value is looked at before the cast.
        for x in (INPUTS["midpoints of E4M3"], INPUTS["normal"] * 1e3, INPUTS["largest"], INPUTS["one inf"]):
            with _CastsToE4M3() as casts:
                quantize(x, scale if scale != "amax" else None, "amax" if scale == "amax" else "pow2")
            assert casts.given and torch.cat(casts.given).max() <= 448

    @pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
    @pytest.mark.parametrize("rule", nvfp4.GLOBAL_SCALE_RULES)
    def test_non_finite_stays_visible_in_its_block_alone(self, value, rule):
        x = one_spoiled(value)
        q = quantize(x, None, rule)
        spoiled = torch.zeros(4, 3, dtype=torch.bool)
        spoiled[1, 1] = True
        assert ((q.block_scale.view(torch.uint8) == oracle.SCALE_NAN) == spoiled).all()
        decoded = nvfp4.dequantize(q)
        assert torch.equal(decoded.isnan(), spoiled.repeat_interleave(16, dim=1))
        assert not (decoded == 0)[~spoiled.repeat_interleave(16, dim=1)].all()

    @pytest.mark.parametrize("rule", nvfp4.GLOBAL_SCALE_RULES)
    def test_tiny_numbers_survive(self, rule):
        x = normal(8, 64) * 1e-36
        decoded = nvfp4.dequantize(quantize(x, None, rule))
        assert decoded.isfinite().all()
        error = (decoded.double() - x.double()).square().sum() / x.double().square().sum()
        assert error < 0.01  # as for any normal data: about 20 dB

    @pytest.mark.parametrize("rule", nvfp4.GLOBAL_SCALE_RULES)
    def test_zero_blocks_give_exact_zeros(self, rule):
        for x in (INPUTS["all zero"], INPUTS["negative zero"], INPUTS["one dead block"]):
            q = quantize(x, None, rule)
            decoded = nvfp4.dequantize(q)
            assert decoded.isfinite().all() and not decoded[x == 0].any()
            assert not (q.block_scale.view(torch.uint8) == oracle.SCALE_NAN).any()

    @pytest.mark.parametrize("scale", [1e-45, 1e-40, 2.0**-128, 2.0**-126, 1e38, FLT_MAX])
    def test_extreme_foreign_scales_never_make_nan_of_finite_input(self, scale):
        x = torch.tensor([[0.0] * 16 + [1.0] * 16])
        assert not nvfp4.dequantize(nvfp4.quantize(x, global_scale=scale)).isnan().any()

    def test_largest_number_does_not_become_infinite(self):
        assert nvfp4.dequantize(nvfp4.quantize(torch.full((1, 16), 3.2e38))).isfinite().all()


class TestErrors:
    @pytest.mark.parametrize("x", [torch.ones(16, dtype=torch.int32), torch.ones(16, dtype=torch.bool), [1.0] * 16])
    def test_input_must_be_floating_point(self, x):
        with pytest.raises(TypeError, match="floating-point.*(int32|bool|list)"):
            nvfp4.quantize(x)

    def test_input_needs_an_axis(self):
        with pytest.raises(ValueError, match="0-dimensional"):
            nvfp4.quantize(torch.tensor(1.0))

    @pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), 1e-50, 1e39])
    def test_scale_must_be_positive_and_finite(self, scale):
        for given in (scale, torch.tensor(scale, dtype=torch.float64)):
            with pytest.raises(ValueError, match="positive and finite"):
                nvfp4.quantize(torch.ones(16), global_scale=given)

    @pytest.mark.parametrize("shape", [(2,), (1, 2), (0,)])
    def test_scale_must_be_one_number(self, shape):
        with pytest.raises(ValueError, match="one number"):
            nvfp4.quantize(torch.ones(16), global_scale=torch.ones(shape))

    def test_unknown_rule(self):
        with pytest.raises(ValueError, match="'max'.*pow2, amax"):
            nvfp4.choose_global_scale(torch.ones(16), "max")


class TestOutsideQuantizers:
    @pytest.mark.parametrize("scale", [None, "amax", *FOREIGN])
    def test_flashinfer_reference_bit_for_bit(self, scale):
        reference = oracle.outside_module("flashinfer.batch_invariant.quantization.nvfp4_reference")
        for name, x in INPUTS.items():
            if not x.isfinite().all():
                continue  # theirs gives no NaN scale
            q = quantize(x, scale if scale != "amax" else None, "amax" if scale == "amax" else "pow2")
            packed, block_scale, _ = reference.quantize_reference(x, 1.0 / q.global_scale)
            rows, columns = x.shape
            block_scale = reference.unswizzle_sf_128x4(block_scale.reshape(-1).view(torch.uint8), rows, columns)
            np.testing.assert_array_equal(scale_bytes(q), block_scale.numpy(), err_msg=name)
            alive = (block_scale != 0).unsqueeze(-1)
            ours, theirs = (p.reshape(rows, -1, 8) for p in (q.packed, packed))
            assert torch.equal(torch.where(alive, ours, 0), torch.where(alive, theirs, 0)), name
            # Where the scale is zero their codes are +-6 and ours 0: both decode to 0.
            assert not torch.where(alive, 0, ours).any(), name

    def test_torchao_agrees_but_for_its_other_order_of_divisions(self):
        quantizer = oracle.outside_module("torchao.prototype.mx_formats.nvfp4_tensor").nvfp4_quantize
        x = normal(256, 1024, seed=11)
        for rule in nvfp4.GLOBAL_SCALE_RULES:
            q = quantize(x, None, rule)
            block_scale, packed = quantizer(x, 16, per_tensor_scale=q.global_scale)
            codes = nvfp4.unpack_codes(packed.view(torch.uint8)) != nvfp4.unpack_codes(q.packed)
            assert codes.float().mean() <= 0.002
            assert (block_scale.view(torch.uint8) != q.block_scale.view(torch.uint8)).float().mean() <= 0.002


_PEAK = """
import torch
from qatpatch import nvfp4

def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

weight = torch.empty(16384, 4096).normal_(std=0.02)
q = nvfp4.quantize(weight[:64])
before = peak()
q = nvfp4.quantize(weight)
print(peak() - before)
"""


def test_a_large_weight_needs_little_memory_besides_itself():
    """256 MiB of float32 pack to 36 MiB, and the peak stays under one more copy of the weight."""
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(done.stdout) < 256


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 50, 63, 64])
def test_codes_in_the_padding_are_seen(columns):
    x = torch.ones(3, columns)
    packed = nvfp4.quantize(-x).packed
    width = 2 * packed.shape[1]
    assert all(nvfp4.padding_is_zero(packed, kept) == (kept >= columns) for kept in range(width + 1))
