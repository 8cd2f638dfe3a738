"""The wrappers of foreign attention kernels, over stand-ins that read every argument by the package's contract.

A stand-in computes on the CPU what the kernel computes, from the operands as they lie in memory, and gives its result
with the strides of the real one.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch

from qatpatch import KernelUnavailable, attention
from qatpatch.kernels import fa4_attention, fastvideo_attention, flashinfer_attention, kernel_named, reference_attention
from qatpatch.nvfp4 import decode_e2m1, unpack_codes

SHAPES = [(2, 130, 200, 2, 128), (1, 127, 65, 1, 64), (1, 1, 1, 1, 128), (1, 128, 129, 3, 64)]
ROWS = {"attn_qat_infer": "sage3", "fa4_fp4": "fa4", "flashinfer_attention": "sage3_smoothed"}


def package(monkeypatch, name, **functions):
    module = types.ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def sageattn_blackwell(
    q, k, v, attn_mask=None, is_causal=False, per_block_mean=True, single_level_p_quant=True, sm_scale=None, **kwargs
):
    """(B, H, S, D), contiguous. Works in the caller's K, as SageAttention3 does. Pads to tiles of 128, cuts again."""
    assert not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
    assert not kwargs and attn_mask is None and not is_causal and single_level_p_quant and sm_scale is not None
    assert all(x.is_contiguous() and x.dtype in (torch.bfloat16, torch.float16) for x in (q, k, v))
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    out = reference_attention.forward(q_, k_, v_, scheme="sage3", scale=sm_scale, train=False, tile=128)[0]
    k -= k.mean(dim=-2, keepdim=True)
    v.fill_(torch.nan)
    return torch.nn.functional.pad(out.transpose(1, 2), (0, 0, 0, -q.shape[2] % 128))[:, :, : q.shape[2]].contiguous()


def decoded(packed, scales):
    """float64 (B, S, H, D) of packed float4 (B, S, H, D/2) and the fork's scales, element by element of its layout."""
    batch, length, heads, half = packed.shape
    values = decode_e2m1(unpack_codes(packed.view(torch.uint8))).double()
    out = torch.empty(batch, length, heads, 2 * half, dtype=torch.float64)
    bytes_ = scales.contiguous().view(torch.float8_e4m3fn).double()
    for s in range(length):
        for c in range(half // 8):
            scale = bytes_[s % 32, s % 128 // 32, s // 128, c % 4, c // 4]  # (H, B)
            out[:, s, :, 16 * c : 16 * c + 16] = values[:, s, :, 16 * c : 16 * c + 16] * scale.T[:, :, None]
    return out


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, mSFQ=None, mSFK=None, mSFV=None):
    """BSHD: FP4 q and k in storage of whole tiles, bfloat16 v and output."""
    assert not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
    for x, scales in ((q, mSFQ), (k, mSFK)):
        batch, length, heads, half = x.shape
        tiles = -(-length // 128)
        assert x.dtype is torch.float4_e2m1fn_x2
        assert x.stride() == (tiles * 128 * heads * half, heads * half, half, 1)
        assert scales.dtype is torch.uint8 and scales.shape == (32, 4, tiles, 4, half // 32, heads, batch)
        assert scales.stride(3) == 1 and scales.permute(6, 5, 2, 4, 0, 1, 3).is_contiguous()
    assert not causal and mSFV is None and v.dtype is torch.bfloat16 and v.is_contiguous()
    scores = torch.einsum("bqhd,bkhd->bhqk", decoded(q, mSFQ), decoded(k, mSFK)) * softmax_scale
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double()).to(torch.bfloat16), None


def quantize_qkv(q, k, v, per_block_mean=True):
    """(B, H, S, D), contiguous: Q less the mean of each 128, K less its mean, padded to 128. Nothing is rounded."""
    assert all(x.is_contiguous() and x.dtype in (torch.bfloat16, torch.float16) for x in (q, k, v)) and per_block_mean
    k = k.double() - k.double().mean(-2, keepdim=True)
    q, k, v = (torch.nn.functional.pad(x.double(), (0, 0, 0, -x.shape[2] % 128)) for x in (q, k, v))
    groups = q.unflatten(2, (-1, 128))
    mean = groups.mean(3, keepdim=True)
    correction = mean.squeeze(3) @ k.mT
    return (groups - mean).flatten(2, 3), k, v.mT.contiguous(), q, k, v, correction


def nvfp4_attention_sm120_fwd(
    q_fp4, k_fp4, v_fp4_t, q_scale, k_scale, v_scale_t, qk_correction,
    sm_scale=None, causal=False, per_block_mean=True, out_dtype=torch.bfloat16, unpadded_k_len=None,
):  # fmt: skip
    assert not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
    assert not causal and per_block_mean and 0 < unpadded_k_len <= k_fp4.shape[2]
    scores = (q_fp4 @ k_fp4.mT + qk_correction.repeat_interleave(128, 2)) * sm_scale
    scores[..., unpadded_k_len:] = -torch.inf
    return (scores.softmax(-1) @ v_fp4_t.mT).to(out_dtype), scores.logsumexp(-1).float()


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    package(monkeypatch, "attn_qat_infer", sageattn_blackwell=sageattn_blackwell)
    package(monkeypatch, "flash_attn")
    package(monkeypatch, "flash_attn.cute")
    package(monkeypatch, "flash_attn.cute.interface", flash_attn_func=flash_attn_func)
    package(
        monkeypatch,
        "flashinfer",
        nvfp4_attention_sm120_quantize_qkv=quantize_qkv,
        nvfp4_attention_sm120_fwd=nvfp4_attention_sm120_fwd,
    )


def operands(shape, dtype=torch.bfloat16, seed=0):
    batch, queries, keys, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, n, heads, dim, generator=generator).to(dtype) for n in (queries, keys, keys)]


def awkward(x):
    """The same values, heads first in memory and every other element of the head dimension skipped."""
    wide = torch.full((*x.transpose(1, 2).shape[:3], 2 * x.shape[3]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x.transpose(1, 2)
    return wide[..., ::2].transpose(1, 2)


def expected(row, q, k, v, scale):
    if ROWS[row] == "sage3_smoothed":
        heads_first = (x.double().transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=scale).transpose(1, 2)
    return reference_attention.forward(q, k, v, scheme=ROWS[row], scale=scale, train=False, tile=128)[0].double()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_call_reaches_the_kernel_as_its_contract_says(row, shape, dtype):
    q, k, v = operands(shape, dtype)
    given = [x.clone() for x in (q, k, v)]
    out = attention.quantized_attention(q, k, v, scheme=ROWS[row], scale=0.11, kernel=row)
    assert out.dtype is dtype and out.is_contiguous() and out.shape == q.shape
    # float32 is rounded to bfloat16 before; `fa4` takes Q and K as they are, and V in bfloat16.
    half = torch.bfloat16 if dtype is torch.float32 else dtype
    rounded = (q, k, v.to(torch.bfloat16).to(dtype)) if row == "fa4_fp4" else (q.to(half), k.to(half), v.to(half))
    wanted = expected(row, *rounded, 0.11)
    unit = torch.finfo(torch.bfloat16 if row == "fa4_fp4" else half).eps
    assert ((out.double() - wanted).abs() <= unit * wanted.abs() + 2e-5).all()
    # The stand-in of attn_qat_infer writes over what it is given.
    assert all(torch.equal(x, before) for x, before in zip((q, k, v), given, strict=True))
    again = attention.quantized_attention(*map(awkward, given), scheme=ROWS[row], scale=0.11, kernel=row)
    assert torch.equal(again, out)


@pytest.mark.parametrize("row", ROWS)
def test_autocast_does_not_reach_the_kernel(row):
    q, k, v = operands(SHAPES[0], torch.float32)
    wanted = attention.quantized_attention(q, k, v, scheme=ROWS[row], kernel=row)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(attention.quantized_attention(q, k, v, scheme=ROWS[row], kernel=row), wanted)


@pytest.mark.parametrize("row", ROWS)
def test_nothing_that_the_kernel_cannot_do_reaches_it(row):
    module = kernel_named(row).load()
    q, k, v = operands(SHAPES[1])
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=f"{row} takes no mask"):
        module.forward(q, k, v, scheme=ROWS[row], scale=1.0, attn_mask=mask, train=False)
    with pytest.raises(NotImplementedError, match=f"{row} has no backward"):
        module.forward(q, k, v, scheme=ROWS[row], scale=1.0, train=True)
    with pytest.raises(ValueError, match=f"{row} computes {ROWS[row]}"):
        module.forward(q, k, v, scheme="other", scale=1.0, train=False)
    with pytest.raises(KernelUnavailable, match="no log-sum-exp"):
        attention.quantized_attention(q, k, v, scheme=ROWS[row], kernel=row, return_lse=True)
    assert module.forward(q, k, v, scheme=ROWS[row], scale=1.0, train=False)[2].isnan().all()


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("empty", ["queries", "keys", "batch"])
def test_nothing_to_attend_gives_zeros_without_a_launch(row, empty, monkeypatch):
    for name in ("attn_qat_infer", "flash_attn.cute.interface", "flashinfer"):
        monkeypatch.delitem(sys.modules, name)
    batch, queries, keys = (0 if empty == name else 2 for name in ("batch", "queries", "keys"))
    q, k, v = operands((batch, queries, keys, 1, 64))
    out = attention.quantized_attention(q, k, v, scheme=ROWS[row], kernel=row)
    assert out.shape == q.shape and not out.any()


def test_operands_of_fa4_are_the_codes_and_scales_of_the_format():
    x = operands((2, 130, 1, 2, 128), seed=3)[0]
    packed, scales = fa4_attention.fa4_operand(awkward(x))
    assert packed.shape == (2, 256, 2, 64) and packed.is_contiguous() and not packed[:, 130:].any()
    rounded = reference_attention._round(x).double()
    assert torch.equal(decoded(packed[:, :130].view(torch.float4_e2m1fn_x2), scales), rounded)


OPERATORS = ["fastvideo", "flashinfer", "fa4_operand", "fa4"]


def call_of(name, shape, dtype=torch.bfloat16):
    q, k, v = map(awkward, operands(shape, dtype))
    if name == "fastvideo":
        return fastvideo_attention.fastvideo_attention, (q, k, v, 0.1)
    if name == "flashinfer":
        return flashinfer_attention.flashinfer_attention, (q, k, v, 0.1)
    if name == "fa4_operand":
        return fa4_attention.fa4_operand, (q,)
    (q_packed, q_scale), (k_packed, k_scale) = fa4_attention.fa4_operand(q), fa4_attention.fa4_operand(k)
    return fa4_attention.fa4_attention, (q_packed, k_packed, v, q_scale, k_scale, q.shape[1], 0.1)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", [(2, 130, 33, 2, 64), (1, 128, 128, 1, 128)], ids=str)
def test_opcheck(name, shape):
    operator, arguments = call_of(name, shape)
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("name", OPERATORS)
def test_fakes_have_the_strides_of_the_real_results(name):
    operator, arguments = call_of(name, (2, 130, 33, 2, 64))
    real = operator(*arguments)
    fake = operator(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments))
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (real, fake)), strict=True):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype is b.dtype


@pytest.mark.parametrize("row", ROWS)
def test_fullgraph_traces_and_runs_through_the_call(row):
    torch._dynamo.reset()

    def layer(q, k, v):
        return attention.quantized_attention(q * 2, k, v, scheme=ROWS[row], kernel=row).flatten(2) + 1

    q, k, v = operands((2, 130, 70, 2, 64))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), layer(q, k, v))
