"""`qatpatch.attention` and the reference kernel against an oracle of their own, and as operators."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention_oracle import attention as oracle
from models import run as forward
from models import tiny_wan, wan_inputs
from torch.utils._python_dispatch import TorchDispatchMode

import qatpatch
import qatpatch.attention as ops
from qatpatch.attention import qat_attention, quantized_attention
from qatpatch.errors import KernelUnavailable
from qatpatch.kernels import reference_attention as reference

SCHEMES = ("sage3", "fa4")
NAMES = ("out", "out_hp", "row_max", "row_sum", "dq", "dk", "dv")


def operands(batch, queries, keys, heads, dim, seed=0, dtype=torch.float32):
    """q, k, v, d_out of random normals."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, heads, dim) for length in (queries, keys, keys, queries)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(q, k, v, d_out, scheme, mask=None, scale=None):
    """Every result of the reference kernel, by name."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    forward = reference.forward(q, k, v, scheme=scheme, scale=scale, attn_mask=mask, train=True)
    grads = reference.backward(d_out, q, k, v, *forward[1:], scheme=scheme, scale=scale, attn_mask=mask)
    return dict(zip(NAMES, (*forward, *grads), strict=True))


def expected(q, k, v, d_out, scheme, mask=None, **options):
    arrays = [x.numpy() for x in (q, k, v, d_out)]
    mask = mask if mask is None else (mask if mask.dtype == torch.bool else mask.float()).numpy()
    return oracle(*arrays, scheme=scheme, scale=q.shape[-1] ** -0.5, mask=mask, **options)


def assert_close(got, want):
    """To FP32 accumulation (dk, dv: over all queries); a code of P that rounds the other way is 1e-4 off or more."""
    for name in NAMES:
        atol = 2e-5 if name in ("dk", "dv") else 3e-6
        np.testing.assert_allclose(got[name].numpy(), want[name], rtol=2e-6, atol=atol, err_msg=name)


def assert_same_bits(got, want):
    for name in NAMES:
        assert torch.equal(got[name], want[name]), name


def cosine(a, b):
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


# --- the reference kernel against the oracle -------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 64),
        (2, 9, 9, 3, 64),
        (1, 127, 127, 1, 128),
        (2, 129, 193, 2, 64),
        (1, 193, 17, 1, 128),
        (1, 503, 64, 1, 64),
        (1, 33, 503, 2, 128),
        (1, 17, 1001, 1, 64),
        (1, 1001, 1, 1, 64),
        (1, 20, 70, 2, 40),
        (1, 20, 70, 1, 256),
    ],
    ids=str,
)
def test_self_and_cross_lengths_match_the_oracle(scheme, shape):
    data = operands(*shape)
    assert_close(run(*data, scheme), expected(*data, scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_badly_scaled_operands_match_the_oracle(scheme):
    q, k, v, d_out = operands(1, 70, 150, 2, 64, seed=3)
    q, k = q * 3.0, k * torch.logspace(-2, 1, 150)[None, :, None, None]
    v = v * torch.logspace(-5, 3, 64)
    v[:, 16:32], k[:, 20:40], q[:, :5] = 0.0, 0.0, 0.0
    got, want = run(q, k, v, d_out, scheme), expected(q, k, v, d_out, scheme)
    for name in NAMES:
        np.testing.assert_allclose(
            got[name].numpy(), want[name], rtol=2e-5, atol=2e-6 * np.abs(want[name]).max(), err_msg=name
        )


def random_mask(*shape, seed=1, share=0.6):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def masks(batch=2, heads=2, queries=37, keys=90):
    """Masks of every rank and kind, by name; all but "head_and_key" leave each key to some query."""
    per_key = random_mask(batch, 1, 1, keys)
    full = random_mask(batch, heads, queries, keys)
    dead_rows = full.clone()
    dead_rows[:, 0, 3:9] = False
    dead_rows[1] = False
    bias = torch.randn(1, heads, queries, keys, generator=torch.Generator().manual_seed(2))
    return {
        "key": per_key,
        "query_2d": random_mask(queries, keys),
        "row_2d": random_mask(1, keys),
        "head": torch.tensor([True, False]).view(1, 2, 1, 1),
        "head_and_key": random_mask(1, heads, 1, keys),
        "query_only": random_mask(1, 1, queries, 1),
        "full": full,
        "dead_rows": dead_rows,
        "nothing_valid": torch.zeros(1, 1, 1, 1, dtype=torch.bool),
        "tail": (torch.arange(keys) < 70).view(1, 1, 1, keys),
        "last_tile_hidden": (torch.arange(keys) < 50).view(1, 1, 1, keys),
        "minus_1000": torch.where(per_key, 0.0, -1000.0),
        "additive_dead_rows": torch.where(dead_rows, 0.0, -9984.0),
        "minus_10000": torch.where(per_key, 0.0, -10000.0),
        "minus_9984_bf16": torch.where(per_key, 0.0, -10000.0).bfloat16(),
        "minus_inf": torch.where(full, 0.0, -torch.inf),
        "finite_bias": bias,
        "bias_fp16_and_invalid": torch.where(random_mask(1, 1, queries, keys), bias, -1000.0).half(),
        "just_valid": torch.where(per_key, 0.0, -999.0),
        "all_just_valid": torch.full((1, 1, 1, keys), -990.0),
    }


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", masks())
def test_masks_match_the_oracle(scheme, name):
    mask, data = masks()[name], operands(2, 37, 90, 2, 64)
    got, want = run(*data, scheme, mask), expected(*data, scheme, mask)
    if name != "all_just_valid":  # -990 leaves FP32 scores an ulp of 6e-5, which rounds codes of P the other way
        assert_close(got, want)
    for result in NAMES:
        np.testing.assert_allclose(got[result].numpy(), want[result], rtol=1e-4, atol=2e-2, err_msg=result)


def test_the_bf16_text_mask_of_a_model_is_minus_9984():
    assert masks()["minus_9984_bf16"].min().item() == -9984.0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_mask_that_masks_nothing_changes_no_bit(scheme):
    data = operands(2, 70, 90, 2, 64)
    plain = run(*data, scheme)
    assert_same_bits(run(*data, scheme, torch.ones(2, 1, 1, 90, dtype=torch.bool)), plain)
    assert_same_bits(run(*data, scheme, torch.ones(70, 90, dtype=torch.bool)), plain)
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_bits(run(*data, scheme, torch.zeros(2, 1, 1, 90, dtype=dtype)), plain)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["key", "head_and_key", "tail", "minus_1000", "dead_rows", "additive_dead_rows"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_invalid_memory_is_never_used(scheme, name, poison):
    q, k, v, d_out = operands(2, 37, 90, 2, 64)
    mask = masks()[name]
    valid = mask if mask.dtype == torch.bool else mask > -1000
    valid = valid.expand(2, 2, 37, 90)
    dead_key = ~valid.any(2).permute(0, 2, 1)
    dead_row = ~valid.any(3).permute(0, 2, 1)
    clean = run(q, k, v, d_out, scheme, mask)
    k[dead_key], v[dead_key], q[dead_row], d_out[dead_row] = poison, -poison, poison, poison
    assert dead_key.any()
    poisoned = run(q, k, v, d_out, scheme, mask)
    assert_same_bits(poisoned, clean)
    assert not poisoned["dk"][dead_key].any() and not poisoned["dv"][dead_key].any()
    assert not poisoned["out"][dead_row].any() and not poisoned["dq"][dead_row].any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_tail_of_keys_beside_memory_of_nan(scheme):
    """Key lengths of 65 to 127 beyond a tile of 128, cut from buffers that hold NaN around them; twice."""
    for tail in range(65, 128, 2):
        length, data = 128 + tail, operands(1, 9, 128 + tail, 1, 64, seed=tail)
        buffers = [torch.full((1, x.shape[1] + 70, 3, 64), math.nan) for x in data]
        cut = [b[:, 3 : 3 + x.shape[1], 1:2].copy_(x) for b, x in zip(buffers, data, strict=True)]
        got = run(*cut, scheme)
        assert_close(got, expected(*data, scheme))
        assert_same_bits(run(*cut, scheme), got)
        assert all(got[name].isfinite().all() for name in NAMES) and got["dk"].shape[1] == length


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_operands_stay_visible(scheme, which, value):
    data = operands(1, 20, 30, 1, 64)
    data[which][0, 7, 0, 3] = value
    out = run(*data, scheme)["out"]
    affected = out[0, 7] if which == 0 else out
    assert not affected.isfinite().all()  # an infinite V is not rounded by fa4, and stays infinite
    if which == 0:
        assert out[0, :7].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_16_bit_operands_compute_in_fp32_and_round_once(scheme, dtype):
    data = operands(2, 129, 193, 2, 64, dtype=dtype)
    got, wide = run(*data, scheme), run(*[x.float() for x in data], scheme)
    for name in ("out", "out_hp", "dv"):
        assert torch.equal(got[name], wide[name].to(dtype)), name
    for name in ("row_max", "row_sum"):
        assert torch.equal(got[name], wide[name]), name
    for name in ("dq", "dk"):  # delta is read from out_hp as stored
        assert got[name].dtype == dtype
        assert cosine(got[name], wide[name]) > 0.9999, name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_work_is_split_without_changing_results_and_holds_no_large_temporary(scheme, monkeypatch):
    data = operands(2, 129, 193, 3, 64)
    mask = random_mask(2, 3, 129, 193)
    whole = run(*data, scheme, mask)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 1 << 13)
    with LargestResult() as largest:
        split = run(*data, scheme, mask)
    for name in NAMES:
        torch.testing.assert_close(split[name], whole[name], rtol=2e-6, atol=2e-5)
    # The operands are the largest tensors left (74 k elements); S_q x S_k of all heads would be 149 k.
    assert largest.nbytes <= 4 * 2 * 193 * 3 * 64


class LargestResult(TorchDispatchMode):
    """Notes the largest memory that any operation's result stands on, views of the caller's tensors apart."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self.nbytes = max(self.nbytes, item.untyped_storage().nbytes())
        return result


# --- gradients, accuracy, order --------------------------------------------------------------------------------------


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rounded):
        return rounded.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_equal_autograd_through_the_same_scheme(scheme, masked):
    """float64 autograd over softmax attention whose operands and P are replaced by their rounded values."""
    from attention_oracle import nvfp4, p_in_fp4

    q, k, v, d_out = (x[0, :, 0] for x in operands(1, 70, 150, 1, 64, seed=5))
    valid = random_mask(70, 150) if masked else torch.ones(70, 150, dtype=torch.bool)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    q_, k_ = (_StraightThrough.apply(x, torch.from_numpy(nvfp4(x.detach().numpy()))) for x in leaves[:2])
    v_ = leaves[2]
    if scheme == "sage3":
        v_ = _StraightThrough.apply(v_, torch.from_numpy(nvfp4(v.T.numpy()).T))
    scores = (q_ @ k_.T / 8.0).masked_fill(~valid, -torch.inf)
    p = scores.softmax(-1)
    if scheme == "sage3":
        shifted = (scores - scores.amax(-1, keepdim=True)).exp().detach()
        p = _StraightThrough.apply(p, torch.from_numpy(p_in_fp4(shifted.numpy())) / shifted.sum(-1, keepdim=True))
    grads = torch.autograd.grad(p @ v_, leaves, d_out.double())

    got = [x.clone().requires_grad_() for x in (q, k, v)]
    out = qat_attention(*(x[None, :, None] for x in got), scheme=scheme, attn_mask=valid)
    for mine, theirs in zip(torch.autograd.grad(out, got, d_out[None, :, None]), grads, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-6, atol=3e-6)


def test_operands_on_the_grid_make_fa4_plain_attention():
    """Where rounding changes nothing, output and gradients are those of ordinary attention."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.tensor([-6.0, -3.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0])
    # One 6 a group of 16 makes its scale 1.
    q, k = (grid[torch.randint(10, (1, n, 2, 64), generator=generator)] for n in (50, 70))
    q[..., ::16], k[..., ::16] = 6.0, -6.0
    v, d_out = operands(1, 50, 70, 2, 64)[2:]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    plain = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), scale=0.02)
    grads = torch.autograd.grad(plain, leaves, d_out.double().transpose(1, 2))
    got = run(q, k, v, d_out, "fa4", scale=0.02)
    torch.testing.assert_close(got["out"].double(), plain.transpose(1, 2), rtol=1e-5, atol=1e-6)
    for name, theirs in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(got[name].double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tokens", [512, 2112])
def test_gradients_stay_close_to_plain_attention_at_every_length(scheme, tokens):
    """dV must not vanish at long sequences, which it does when the normalised P is quantized."""
    q, k, v, d_out = operands(1, tokens, tokens, 1, 128)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    plain = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves))
    grads = torch.autograd.grad(plain, leaves, d_out.double().transpose(1, 2))
    got = run(q, k, v, d_out, scheme)
    assert cosine(got["dv"], grads[2]) >= 0.983
    assert cosine(got["dq"], grads[0]) >= 0.979
    assert cosine(got["dk"], grads[1]) >= 0.979


@pytest.mark.parametrize("options", [{"last_first": False}, {"tile": 128}, {"tile": 16}])
def test_the_walk_over_the_keys_is_part_of_sage3_alone(options):
    q, k, v, d_out = operands(1, 64, 1001, 1, 128)
    common = {"scale": 128**-0.5, "train": False}
    for scheme in SCHEMES:
        usual = reference.forward(q, k, v, scheme=scheme, **common)[0]
        other = reference.forward(q, k, v, scheme=scheme, **common, **options)[0]
        want = expected(q, k, v, d_out, scheme, **options)["out"]
        np.testing.assert_allclose(other.numpy(), want, rtol=2e-6, atol=3e-6)
        if scheme == "fa4":
            torch.testing.assert_close(other, usual, rtol=2e-6, atol=1e-6)
        else:
            assert 0.995 < cosine(other, usual) < 0.99999


# --- the operators ---------------------------------------------------------------------------------------------------


def leaves(*shape, dtype=torch.float32):
    return [x.requires_grad_() for x in operands(*shape, dtype=dtype)[:3]]


def strided(batch, queries, keys, heads, dim):
    """q, k, v non-contiguous in three ways: a transposed BHSD tensor, every other head, a slice of a wider row."""
    q = torch.randn(batch, heads, queries, dim).transpose(1, 2)
    k = torch.randn(batch, keys, 2 * heads, dim)[:, :, ::2]
    v = torch.randn(batch, keys, heads, dim + 8)[..., 3 : dim + 3]
    return [x.requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("masked", [False, True])
def test_opcheck(scheme, masked):
    torch.manual_seed(0)
    q, k, v = strided(2, 33, 57, 3, 64)
    mask = random_mask(2, 1, 1, 57) if masked else None
    torch.library.opcheck(ops.attention_forward, (q, k, v, mask, 0.125, scheme, "reference_attention", True))
    q, k, v = (x.detach() for x in (q, k, v))
    torch.library.opcheck(ops.attention_forward, (q, k, v, mask, 0.125, scheme, "reference_attention", False))
    _, out_hp, row_max, row_sum = reference.forward(q, k, v, scheme=scheme, scale=0.125, attn_mask=mask, train=True)
    d_out = torch.randn(2, 3, 33, 64).transpose(1, 2)
    saved = (d_out, q, k, v, out_hp, row_max, row_sum, mask, 0.125, scheme, "reference_attention")
    torch.library.opcheck(ops.attention_backward, saved, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_strides_change_nothing(scheme):
    torch.manual_seed(0)
    inputs = strided(2, 129, 193, 2, 64)
    out = qat_attention(*inputs, scheme=scheme)
    copies = [x.detach().contiguous().requires_grad_() for x in inputs]
    plain = qat_attention(*copies, scheme=scheme)
    assert out.is_contiguous() and torch.equal(out, plain)
    upstream = torch.randn(2, 2, 129, 64)
    grads = torch.autograd.grad(out, inputs, upstream.transpose(1, 2))
    for mine, theirs in zip(grads, torch.autograd.grad(plain, copies, upstream.transpose(1, 2).clone()), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled_equals_eager_in_one_graph(scheme):
    torch.manual_seed(0)
    inputs, mask = strided(2, 33, 57, 2, 64), torch.where(random_mask(2, 1, 1, 57), 0.0, -10000.0)

    def step(q, k, v, mask):
        return qat_attention(q, k, v, scheme=scheme, attn_mask=mask) * 2.0

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for attn_mask in (None, mask):
        results = []
        for function in (step, compiled):
            out = function(*inputs, attn_mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(eager, graph) and eager.stride() == graph.stride()
    infer = torch.compile(quantized_attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out, lse = infer(*inputs, scheme=scheme, attn_mask=mask, return_lse=True)
        plain = quantized_attention(*inputs, scheme=scheme, attn_mask=mask, return_lse=True)
    assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_meta_tensors_give_shapes_dtypes_and_strides(scheme):
    # 2^17 tokens: computing would need 2 TiB.
    q, k, v = (torch.empty(1, n, 32, 128, device="meta", dtype=torch.bfloat16) for n in (1 << 17, 1 << 17, 1 << 17))
    out, lse = quantized_attention(q, k, v, scheme=scheme, return_lse=True)
    assert (out.device.type, out.dtype, out.shape, out.is_contiguous()) == ("meta", q.dtype, q.shape, True)
    assert (lse.dtype, lse.shape) == (torch.float32, (1, 32, 1 << 17))
    inputs = [x.requires_grad_() for x in (q.transpose(1, 2).contiguous().transpose(1, 2), k, v)]
    grads = torch.autograd.grad(qat_attention(*inputs, scheme=scheme).sum(), inputs)
    for grad, x in zip(grads, inputs, strict=True):
        assert (grad.device.type, grad.dtype, grad.shape, grad.is_contiguous()) == ("meta", x.dtype, x.shape, True)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "shape", [(2, 0, 9, 2, 64), (2, 9, 0, 2, 64), (0, 9, 9, 2, 64), (2, 9, 9, 0, 64), (1, 0, 0, 1, 64)]
)
def test_empty_operands(scheme, shape):
    batch, queries, keys, heads, dim = shape
    inputs = leaves(*shape, dtype=torch.bfloat16)
    for mask in (None, torch.ones(batch, 1, 1, keys, dtype=torch.bool), torch.zeros(queries, keys)):
        out = qat_attention(*inputs, scheme=scheme, attn_mask=mask)
        assert out.shape == inputs[0].shape and out.dtype == torch.bfloat16 and not out.any()
        grads = torch.autograd.grad(out.sum(), inputs)
        assert all(
            g.shape == x.shape and g.dtype == x.dtype and not g.any() for g, x in zip(grads, inputs, strict=True)
        )
        with torch.no_grad():
            _, lse = quantized_attention(*inputs, scheme=scheme, attn_mask=mask, return_lse=True)
        assert lse.shape == (batch, heads, queries) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_evaluation_and_inference_give_the_same_bits(scheme, dtype):
    inputs, mask = leaves(2, 129, 193, 2, 64, dtype=dtype), random_mask(2, 1, 1, 193)
    train = qat_attention(*inputs, scheme=scheme, attn_mask=mask)
    assert train.requires_grad
    with torch.no_grad():
        assert torch.equal(qat_attention(*inputs, scheme=scheme, attn_mask=mask), train)
        assert torch.equal(quantized_attention(*inputs, scheme=scheme, attn_mask=mask), train)
    with torch.inference_mode():
        assert torch.equal(quantized_attention(*inputs, scheme=scheme, attn_mask=mask), train)
    assert torch.equal(quantized_attention(*(x.detach() for x in inputs), scheme=scheme, attn_mask=mask), train)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast_changes_nothing(scheme):
    """An operator's body runs with autocast on: left alone, its matmuls would turn to bf16."""
    inputs = leaves(1, 33, 70, 2, 64)
    plain = qat_attention(*inputs, scheme=scheme)
    grads = torch.autograd.grad(plain.square().sum(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = qat_attention(*inputs, scheme=scheme)
        assert out.dtype == torch.float32 and torch.equal(out, plain)
        for mine, theirs in zip(torch.autograd.grad(out.square().sum(), inputs), grads, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lse_is_that_of_the_quantized_scores(scheme):
    data = operands(2, 37, 90, 2, 64)
    mask = masks()["dead_rows"]
    out, lse = quantized_attention(*data[:3], scheme=scheme, attn_mask=mask, return_lse=True)
    want = expected(*data, scheme, mask)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse.numpy(), want["row_max"] + np.log(want["row_sum"]), rtol=1e-6, atol=1e-6)
    assert lse.dtype == torch.float32 and bool((lse[1] == -math.inf).all()) and not out[1].any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_graph_keeps_nothing_of_the_size_of_the_scores(scheme):
    inputs, kept = leaves(1, 193, 257, 1, 64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        qat_attention(*inputs, scheme=scheme)
    q, k, stats = (1, 193, 1, 64), (1, 257, 1, 64), (1, 1, 193)
    assert sorted(kept) == sorted([q, k, k, q, stats, stats])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_the_output_is_differentiable(scheme):
    results = ops.attention_forward(*leaves(1, 9, 9, 1, 64), None, 0.125, scheme, "reference_attention", True)
    assert [x.requires_grad for x in results] == [True, False, False, False]


def test_checkpointed_attention_has_the_same_gradients():
    inputs = leaves(1, 70, 90, 2, 64)
    plain = torch.autograd.grad(qat_attention(*inputs).square().sum(), inputs)
    for reentrant in (False, True):
        fresh = [x.detach().clone().requires_grad_() for x in inputs]
        torch.utils.checkpoint.checkpoint(qat_attention, *fresh, use_reentrant=reentrant).square().sum().backward()
        for mine, theirs in zip(fresh, plain, strict=True):
            assert torch.equal(mine.grad, theirs)


def test_gradients_reach_only_what_asks_for_them():
    q, k, v, d_out = operands(1, 20, 30, 1, 64)
    v.requires_grad_()
    qat_attention(q, k, v).backward(d_out)
    assert torch.equal(v.grad, run(q, k, v.detach(), d_out, "sage3")["dv"])
    assert q.grad is None and k.grad is None


def test_scale_is_applied_to_the_scores():
    q, k, v, _ = operands(1, 20, 30, 1, 64)
    assert torch.equal(qat_attention(q, k, v), qat_attention(q, k, v, scale=0.125))
    assert not torch.equal(qat_attention(q, k, v), qat_attention(q, k, v, scale=0.25))
    assert torch.equal(qat_attention(q, k, v), qat_attention(q, k, v, kernel="reference_attention"))


# --- refusals --------------------------------------------------------------------------------------------------------


def make(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("function", [qat_attention, quantized_attention])
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ([make(1, 4, 2, 64)] * 3, {"scheme": "sage"}, ValueError, "'sage'.*did you mean 'sage3'"),
        ([make(1, 4, 2, 64)] * 3, {"scheme": "dense"}, ValueError, "'dense'.*fa4, sage3"),
        ([make(1, 4, 128)] * 3, {}, ValueError, r"4-D.*\(1, 4, 128\)"),
        ([make(1, 4, 8, 64), make(1, 4, 2, 64), make(1, 4, 2, 64)], {}, ValueError, "equally many heads.*grouped"),
        ([make(1, 4, 2, 64), make(1, 5, 2, 64), make(1, 6, 2, 64)], {}, ValueError, r"one shape.*\(1, 5, 2, 64\)"),
        ([make(1, 4, 2, 64), make(2, 5, 2, 64), make(2, 5, 2, 64)], {}, ValueError, "agree in batch"),
        ([make(1, 4, 2, 64), make(1, 5, 2, 32), make(1, 5, 2, 32)], {}, ValueError, "head_dim"),
        ([make(1, 4, 2, 0)] * 3, {}, ValueError, "head_dim is 0"),
        ([make(1, 4, 2, 64), make(1, 4, 2, 64), make(1, 4, 2, 64).bfloat16()], {}, TypeError, "one dtype.*bfloat16"),
        ([make(1, 4, 2, 64).double()] * 3, {}, TypeError, "float64"),
        ([make(1, 4, 2, 64).long()] * 3, {}, TypeError, "int64"),
        ([make(1, 4, 2, 64)] * 3, {"attn_mask": make(1, 4, 4)}, ValueError, r"\(1, 4, 4\).*\(1, 2, 4, 4\)"),
        ([make(1, 4, 2, 64)] * 3, {"attn_mask": make(3, 4)}, ValueError, r"\(3, 4\)"),
        ([make(1, 4, 2, 64)] * 3, {"attn_mask": make(1, 1, 1, 5)}, ValueError, r"\(1, 1, 1, 5\)"),
        ([make(1, 4, 2, 64)] * 3, {"attn_mask": make(4, 4).long()}, TypeError, "int64.*mask.bool"),
        ([make(1, 4, 2, 64)] * 3, {"attn_mask": make(4, 4).to("meta")}, ValueError, "attn_mask on meta"),
        ([make(1, 4, 2, 64)] * 3, {"kernel": "reference_atention"}, KernelUnavailable, "did you mean"),
        ([make(1, 4, 2, 64)] * 3, {"kernel": "reference_linear"}, KernelUnavailable, "no attention kernel called"),
    ],
)
def test_bad_input_is_named(function, arguments, options, error, message):
    with pytest.raises(error, match=message):
        function(*arguments, **options)


def test_forward_only_attention_refuses_to_lose_gradients():
    q, k, v = operands(1, 4, 4, 1, 64)[:3]
    k.requires_grad_()
    with pytest.raises(RuntimeError, match="given k with requires_grad.*leave infer_attention or use torch.no_grad"):
        quantized_attention(q, k, v)
    with torch.no_grad():
        quantized_attention(q, k, v)


def test_a_mask_has_no_gradient():
    q, k, v = operands(1, 4, 4, 1, 64)[:3]
    mask = torch.zeros(4, 4, requires_grad=True)
    for function in (qat_attention, quantized_attention):
        with pytest.raises(RuntimeError, match="attn_mask"):
            function(q, k, v, attn_mask=mask)
        with torch.no_grad():
            function(q, k, v, attn_mask=mask)


def test_the_reference_checks_its_own_arguments():
    q, k, v = operands(1, 4, 4, 1, 64)[:3]
    for options, message in (({"scheme": "fa3"}, "fa4"), ({"scheme": "sage3", "tile": 24}, "multiple of 16")):
        with pytest.raises(ValueError, match=message):
            reference.forward(q, k, v, scale=1.0, train=False, **options)
    with pytest.raises(RuntimeError, match="train=True"):
        ops.attention_forward(q.requires_grad_(), k, v, None, 1.0, "sage3", "reference_attention", False)


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default_dtype(request):
    """Chosen by a test with `torch.set_default_dtype`; float32 again afterwards."""
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_default_dtype_changes_nothing(default_dtype, scheme):
    q, k, v, d_out = operands(1, 40, 70, 2, 64)
    mask = torch.ones(1, 1, 40, 70, dtype=torch.bool).tril(20)
    wanted = run(q, k, v, d_out, scheme, mask)
    torch.set_default_dtype(default_dtype)
    assert_same_bits(run(q, k, v, d_out, scheme, mask), wanted)


def test_the_default_dtype_changes_no_model(default_dtype):
    def stages(dtype, data):
        model = tiny_wan(layers=1)
        qatpatch.apply(model, input_scale="static", global_scale="amax", backward="quantized")
        torch.set_default_dtype(dtype)
        with qatpatch.calibrate(model, percentile=99.9), torch.no_grad():
            model(**data)
        model(**data)[0].square().mean().backward()
        yield model.blocks[0].attn1.to_q.weight.grad.clone()
        with qatpatch.infer_attention(model):
            yield forward(model, data)
        qatpatch.deploy(model)
        yield forward(model, data)

    results = []
    for dtype in (torch.float32, default_dtype):
        torch.set_default_dtype(torch.float32)
        results.append(list(stages(dtype, wan_inputs(tiny_wan(layers=1)))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3 * float(theirs.abs().max()))
