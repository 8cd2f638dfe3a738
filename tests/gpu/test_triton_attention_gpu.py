"""The Triton attention kernels on a GPU, against the FP32 reference of the same scheme on the same device."""

from __future__ import annotations

import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import qatpatch.attention as ops
from qatpatch.kernels import reference_attention as reference
from qatpatch.kernels import triton_attention as kernels
from qatpatch.kernels import triton_attention_dense as dense

pytestmark = pytest.mark.gpu
NAMES = ("out", "out_hp", "row_max", "row_sum", "dq", "dk", "dv")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that the allocator hands out next holds NaN: nothing unwritten may be read or returned."""
    torch.manual_seed(0)
    blocks = [torch.full((1 << size,), math.nan, device="cuda") for size in range(10, 25) for _ in range(3)]
    del blocks


def operands(batch, queries, keys, heads, dim, dtype=BF16, gain=1.0):
    shapes = [(batch, length, heads, dim) for length in (queries, keys, keys, queries)]
    q, k, v, d_out = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    return [q * gain, k, v, d_out]


def run(module, data, scheme="sage3", mask=None):
    *qkv, d_out = data
    fixed = {"scheme": scheme, "scale": qkv[0].shape[-1] ** -0.5, "attn_mask": mask}
    forward = module.forward(*qkv, train=True, **fixed)
    return dict(zip(NAMES, (*forward, *module.backward(d_out, *qkv, *forward[1:], **fixed)), strict=True))


def cosine(a, b):
    a, b = a.double().flatten(), b.double().flatten()
    norm = a.norm() * b.norm()
    return 1.0 if norm == 0 and torch.equal(a, b) else float(a @ b / norm)


def check(data, scheme="sage3", mask=None):
    """Bars of the kernels: 0.9999 for the output, 0.999 for gradients; the LSE to rounding. Returns the results."""
    found, wanted = run(kernels, data, scheme, mask), run(reference, [x.float() for x in data], scheme, mask)
    lse, wanted_lse = (x["row_max"] + x["row_sum"].log() for x in (found, wanted))
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-3)
    for name in ("out", "out_hp", "dq", "dk", "dv"):
        assert found[name].shape == wanted[name].shape and found[name].is_contiguous(), name
        assert found[name].dtype == data[0].dtype and found[name].isfinite().all(), name
        bar = 0.9999 if name.startswith("out") else 0.999
        # One key: P is 1 whatever the scores are, and these gradients are the rounding of zero.
        if data[1].shape[1] > 1 or name not in ("dq", "dk"):
            assert cosine(found[name], wanted[name]) >= bar, (name, cosine(found[name], wanted[name]))
    return found


def same_bits(one, other):
    for name in NAMES:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("scheme", ["sage3", "fa4"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 64),
        (2, 9, 9, 3, 64),
        (1, 127, 127, 2, 128),
        (2, 129, 193, 2, 128),
        (1, 503, 64, 2, 64),
        (1, 33, 1001, 2, 128),
        (1, 1001, 503, 1, 128),
        (1, 1001, 1, 1, 64),
    ],
    ids=str,
)
def test_lengths(shape, scheme):
    check(operands(*shape), scheme)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_input_types(dtype):
    for scheme in ("sage3", "fa4"):
        check(operands(2, 200, 300, 2, 128, dtype), scheme)


def test_every_tail_of_keys():
    for tail in range(128):
        data = operands(1, 40, 256 + tail, 1, 64)
        found, wanted = run(kernels, data), run(reference, [x.float() for x in data])
        assert min(cosine(found[name], wanted[name]) for name in ("out", "dq", "dk", "dv")) > 0.999, tail
        mask = torch.arange(384, device="cuda").view(1, 1, 1, -1) < 256 + tail
        padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 128 - tail), value=math.nan) for x in data[1:3]]
        masked = run(kernels, [data[0], *padded, data[3]], mask=mask)
        for name in ("out", "dq"):
            assert cosine(masked[name], wanted[name]) > 0.999, (tail, name)
        for name in ("dk", "dv"):
            assert cosine(masked[name][:, : 256 + tail], wanted[name]) > 0.999, (tail, name)
            assert not masked[name][:, 256 + tail :].any(), (tail, name)


@pytest.mark.parametrize("shape", [(1, 300, 500, 2, 128), (1, 2112, 2112, 1, 64)], ids=str)
def test_sharp_attention(shape):
    check(operands(*shape, gain=3.0))


MASKS = (
    "key", "query_2d", "head_and_key", "query_only", "full", "dead_rows", "nothing_valid", "last_tile_hidden",
    "minus_9984_bf16", "minus_inf", "finite_bias", "bias_fp16_and_invalid",
)  # fmt: skip


def masks(batch=2, heads=2, queries=150, keys=333):
    def random(*shape):
        return torch.rand(shape, device="cuda") < 0.6

    per_key, full = random(batch, 1, 1, keys), random(batch, heads, queries, keys)
    dead = full.clone()
    dead[:, 0, 3:9], dead[1] = False, False
    bias = torch.randn(1, heads, queries, keys, device="cuda")
    return {
        "key": per_key,
        "query_2d": random(queries, keys),
        "head_and_key": random(1, heads, 1, keys),
        "query_only": random(1, 1, queries, 1),
        "full": full,
        "dead_rows": dead,
        "nothing_valid": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device="cuda"),
        "last_tile_hidden": (torch.arange(keys, device="cuda") < 300).view(1, 1, 1, keys),
        "minus_9984_bf16": torch.where(per_key, 0.0, -10000.0).bfloat16(),
        "minus_inf": torch.where(full, 0.0, -torch.inf),
        "finite_bias": bias,
        "bias_fp16_and_invalid": torch.where(random(1, 1, queries, keys), bias, -1000.0).half(),
    }


@pytest.mark.parametrize("scheme", ["sage3", "fa4"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, scheme):
    check(operands(2, 150, 333, 2, 64), scheme, masks()[name])


@pytest.mark.parametrize("name", ["key", "head_and_key", "dead_rows", "minus_9984_bf16"])
def test_invalid_memory_is_never_used(name):
    data, mask = operands(2, 150, 333, 2, 128), masks()[name]
    valid = (mask if mask.dtype == torch.bool else mask > -1000).expand(2, 2, 150, 333)
    key, row = ~valid.any(2).permute(0, 2, 1), ~valid.any(3).permute(0, 2, 1)
    clean = run(kernels, data, mask=mask)
    for poison in (math.nan, math.inf):
        q, k, v, d_out = (x.clone() for x in data)
        k[key], v[key], q[row], d_out[row] = poison, -poison, poison, poison
        same_bits(run(kernels, [q, k, v, d_out], mask=mask), clean)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_mask_that_masks_nothing_and_a_repeat_change_no_bit(dim):
    data = operands(2, 250, 333, 2, dim)
    plain = check(data)
    same_bits(run(kernels, data), plain)
    everything = torch.ones(2, 1, 1, 333, dtype=torch.bool, device="cuda")
    for mask in (everything, everything.expand(2, 1, 250, 333), torch.zeros(2, 1, 1, 333, device="cuda", dtype=BF16)):
        same_bits(run(kernels, data, mask=mask), plain)
    infer = kernels.forward(*data[:3], scheme="sage3", scale=dim**-0.5, train=False)
    assert infer[1] is None and torch.equal(infer[0], plain["out"]) and torch.equal(infer[3], plain["row_sum"])


def test_strided_operands():
    data = operands(2, 250, 333, 2, 128)
    plain = run(kernels, data)
    head_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in data]
    sliced = [torch.randn(*x.shape[:3], 300, device="cuda", dtype=BF16)[..., 33:161].copy_(x) for x in data]
    transposed = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in data]
    for views in (head_first, sliced, transposed):
        same_bits(run(kernels, views), plain)


@pytest.mark.parametrize("scheme", ["sage3", "fa4"])
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty_operands(lengths, scheme):
    found = run(kernels, operands(1, *lengths, 2, 64), scheme)
    assert found["out"].shape == (1, lengths[0], 2, 64) and found["dk"].shape == (1, lengths[1], 2, 64)
    assert not any(found[name].any() for name in ("out", "dq", "dk", "dv"))
    torch.cuda.synchronize()


def test_fa4_is_the_same_by_both_routes(monkeypatch):
    data = operands(1, 500, 700, 2, 128)
    fused = check(data, "fa4")
    monkeypatch.setattr(dense, "backend_for", lambda call: None)
    own = check(data, "fa4")
    assert min(cosine(fused[name], own[name]) for name in ("out", "dq", "dk", "dv")) > 0.9999
    torch.testing.assert_close(
        fused["row_max"] + fused["row_sum"].log(), own["row_max"] + own["row_sum"].log(), rtol=1e-3, atol=1e-3
    )


def test_long_attention_keeps_dv():
    """Against attention of the unrounded operands: the scheme's own error, the same at every length."""
    for length in (128, 2112, 9360):
        data = operands(1, length, length, 1, 128)
        leaves = [x.float().transpose(1, 2).requires_grad_() for x in data[:3]]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves)
        wanted = torch.autograd.grad(out, leaves, data[3].float().transpose(1, 2))
        found = run(kernels, data)
        for name, grad, bar in zip(("dq", "dk", "dv"), wanted, (0.979, 0.979, 0.983), strict=True):
            assert cosine(found[name].transpose(1, 2), grad) >= bar, (length, name)


def test_past_two_to_the_31_elements():
    """Rows at the end of a tensor of 2^31 elements and more, and a view with a huge row stride: bit for bit."""
    queries = (1 << 31) // (8 * 128) + 200
    q, k, v, d_out = operands(1, 300, 70, 8, 128)
    long_q = torch.empty(1, queries, 8, 128, device="cuda", dtype=BF16).normal_()
    long_q[:, -300:] = q
    fixed = {"scheme": "sage3", "scale": 128**-0.5}
    whole, part = kernels.forward(long_q, k, v, train=True, **fixed), kernels.forward(q, k, v, train=True, **fixed)
    assert torch.equal(whole[0][:, -300:], part[0]) and torch.equal(whole[1][:, -300:], part[1])
    assert torch.equal(whole[2][:, :, -300:], part[2]) and torch.equal(whole[3][:, :, -300:], part[3])
    long_d = torch.zeros_like(long_q)
    long_d[:, -300:] = d_out
    dq, dk, dv = kernels.backward(long_d, long_q, k, v, *whole[1:], **fixed)
    small = kernels.backward(d_out, q, k, v, *part[1:], **fixed)
    assert torch.equal(dq[:, -300:], small[0]) and not dq[:, :-300].any()
    assert cosine(dk, small[1]) > 0.99999 and cosine(dv, small[2]) > 0.99999
    del long_q, long_d, whole, dq
    torch.cuda.empty_cache()
    row, storage = 1 << 23, torch.empty(300 << 23, device="cuda", dtype=BF16)
    wide = [storage.as_strided(x.shape, (0, row, 128, 1), i << 12).copy_(x) for i, x in enumerate((q, k, v, d_out))]
    same_bits(run(kernels, wide), run(kernels, [q, k, v, d_out]))


@pytest.mark.parametrize("scheme", ["sage3", "fa4"])
def test_opcheck(scheme):
    """Batch 2, lengths that are no multiple of a tile, and operands that are not contiguous."""
    q = torch.randn(2, 3, 150, 64, device="cuda", dtype=BF16).transpose(1, 2)
    k = torch.randn(2, 201, 6, 64, device="cuda", dtype=BF16)[:, :, ::2]
    v = torch.randn(2, 201, 3, 72, device="cuda", dtype=BF16)[..., 3:67]
    for mask in (None, torch.rand(2, 1, 1, 201, device="cuda") < 0.6):
        arguments = (q, k, v, mask, 0.125, scheme, "triton_attention")
        torch.library.opcheck(ops.attention_forward, (*arguments, False))
        _, *saved = ops.attention_forward(*arguments, True)
        saved = (torch.randn_like(q), q, k, v, *saved, mask, 0.125, scheme, "triton_attention")
        torch.library.opcheck(ops.attention_backward, saved, test_utils=("test_schema", "test_faketensor"))


def test_runs_on_the_current_stream_and_device():
    data = operands(1, 200, 200, 2, 64)
    plain = run(kernels, data)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = run(kernels, data)
    stream.synchronize()
    same_bits(found, plain)
    if torch.cuda.device_count() > 1:
        same_bits({k: v.to("cuda:0") for k, v in run(kernels, [x.to("cuda:1") for x in data]).items()}, plain)
