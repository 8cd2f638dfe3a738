"""Patched blocks of LTX-2 and Wan on a GPU: captured, compiled, checkpointed, and with quantized weights kept."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from models import ltx2_inputs, tiny_ltx2, tiny_wan, wan_inputs
from torch import nn
from torch.utils.checkpoint import checkpoint

import qatpatch
from qatpatch import nvfp4
from qatpatch.kernels import ops
from qatpatch.linear import QATLinear
from qatpatch.linear_state import LinearSettings, LinearState
from qatpatch.packed_linear import NVFP4Linear

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODELS = {"ltx2": (tiny_ltx2, ltx2_inputs), "wan": (tiny_wan, wan_inputs)}


@pytest.fixture(params=MODELS)
def patched(request):
    make, inputs = MODELS[request.param]
    torch._dynamo.reset()

    def build(dtype):
        model = make(dtype, layers=1)
        return model.cuda(), {k: v.cuda() if torch.is_tensor(v) else v for k, v in inputs(model).items()}

    yield build
    torch._dynamo.reset()


def layer(columns=2048, rows=1024, dtype=BF16, **settings):
    torch.manual_seed(0)
    linear = nn.Linear(columns, rows, device="cuda", dtype=dtype)
    linear.__class__, linear.quantization = QATLinear, LinearState(LinearSettings(**settings))
    return linear


def step(model, function, data):
    model.zero_grad(set_to_none=True)
    out = function(**data)[0]
    out.float().square().mean().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12))


@pytest.mark.parametrize("state", ["train", "infer", "deployed"])
def test_compiled_without_graph_breaks_and_as_eager(patched, state):
    """In float32: in bfloat16 Inductor leaves out roundings between the kernels, and codes follow."""
    model, data = patched(FP32)
    qatpatch.apply(model)
    twin = copy.deepcopy(model)
    if state == "deployed":
        qatpatch.deploy(model)
        qatpatch.deploy(twin)
    twin.compile_repeated_blocks(fullgraph=True)
    if state == "train":
        model.train()
        twin.train()
        wanted, gradients = step(model, model, data)
        found, compiled = step(twin, twin, data)
        noise = {n: relative(compiled[n], g) for n, g in gradients.items() if g.float().norm() > 1e-6}
        assert max(noise.values()) < 0.02, noise
    else:
        with torch.no_grad(), contextlib.ExitStack() as blocks:
            if state == "infer":
                for each in (model, twin):
                    blocks.enter_context(qatpatch.infer_attention(each))
            wanted, found = model(**data)[0], twin(**data)[0]
    assert relative(found, wanted) < 5e-3
    assert torch._dynamo.utils.counters["graph_break"] == {}


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("attention", [True, False])
def test_what_was_trained_is_what_is_deployed(patched, dtype, attention, tmp_path):
    model, data = patched(dtype)
    qatpatch.apply(model, attention=attention)
    model.eval()
    with torch.no_grad():
        wanted = model(**data)[0]
        assert torch.equal(model(**data)[0], wanted)
        if attention:
            with qatpatch.infer_attention(model):
                assert torch.equal(model(**data)[0], wanted)
        qatpatch.deploy(model)
        assert torch.equal(model(**data)[0], wanted)
        qatpatch.save(model, tmp_path / "model")
        assert torch.equal(qatpatch.load(tmp_path / "model", device="cuda")(**data)[0], wanted)


@pytest.mark.parametrize("state", ["train", "infer", "deployed"])
def test_a_block_is_captured_in_a_cuda_graph(patched, state):
    """Nothing in a patched block waits for the device, and a replay follows new inputs and new weights."""
    model, data = patched(BF16)
    qatpatch.apply(model)
    if state == "deployed":
        qatpatch.deploy(model)
    model.train(state == "train")

    def context():
        return qatpatch.infer_attention(model) if state == "infer" else contextlib.nullcontext()

    block = model.transformer_blocks[0] if hasattr(model, "transformer_blocks") else model.blocks[0]
    arguments = {}

    def remember(module, args, kwargs):
        arguments.update(args=args, kwargs=kwargs)

    handle = block.register_forward_pre_hook(remember, with_kwargs=True)
    with context(), torch.no_grad():
        model(**data)
    handle.remove()
    args = [a.clone() if torch.is_tensor(a) else a for a in arguments["args"]]
    kwargs = {k: v.clone() if torch.is_tensor(v) else v for k, v in arguments["kwargs"].items()}
    hidden = args[0] if args else kwargs["hidden_states"]
    weights = [p for p in block.parameters() if p.is_floating_point()]

    def run():
        if state != "train":
            with torch.no_grad():
                out = block(*args, **kwargs)
            return [out[0] if isinstance(out, tuple) else out]
        out = block(*args, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        return [out.detach(), *torch.autograd.grad(out.float().square().mean(), weights, allow_unused=True)]

    with context():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
        hidden.copy_(torch.randn_like(hidden))
        if state != "deployed":
            with torch.no_grad():
                weights[-1].mul_(1.5)
                for p in weights:
                    p.data.add_(torch.randn_like(p) * 0.01)
        graph.replay()
        torch.cuda.synchronize()
        for found, wanted in zip(captured, run(), strict=True):
            if found is not None:
                # Split accumulations of cuBLAS and atomics aside these are the same kernels.
                assert relative(found, wanted) < 1e-2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_kept_weights_in_checkpointed_training(use_reentrant):
    """Steps with an optimizer, micro-batches and recomputation: the bits of training without."""

    def train(reuse):
        torch.manual_seed(1)
        net = nn.Sequential(layer(), nn.GELU(), layer(1024, 2048))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        vars(net[0])["quantization"].switch = vars(net[2])["quantization"].switch
        losses = []
        if reuse:
            from qatpatch.reuse import KeptWeights

            kept = KeptWeights()
            net[0].quantization.switch.open("scope", weights=kept)
        for number in range(4):
            for micro in range(2):
                generator = torch.Generator("cuda").manual_seed(2 * number + micro)
                x = torch.randn(300, 2048, device="cuda", dtype=BF16, generator=generator).requires_grad_()
                loss = checkpoint(net, x, use_reentrant=use_reentrant).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            net[0].weight.data[number].mul_(-2)  # unseen by any version counter
            optimizer.zero_grad()
        if reuse:
            assert len(kept) == 2 and kept.nbytes < 2.02 * 2 * net[0].weight.numel()
        return losses, [p.detach() for p in net.parameters()]

    plain, reused = train(False), train(True)
    for found, wanted in zip((*reused[0], *reused[1]), (*plain[0], *plain[1]), strict=True):
        assert torch.equal(found, wanted)


def test_kept_weights_are_not_written_again_and_never_stale():
    weight = torch.randn(1024, 2048, device="cuda", dtype=BF16)
    from qatpatch.kernels import triton_linear

    kept = triton_linear.keep(weight, "pow2")
    for change in (
        lambda: None,
        lambda: weight.data[5, 7].add_(1.0),
        lambda: weight.data[900:].mul_(1e4),  # other blocks become subnormal
        lambda: weight.data[900:].mul_(1e-4),
        lambda: weight.data[0, :16].fill_(float("nan")),
        lambda: weight.data.copy_(torch.randn_like(weight)),
        lambda: weight.data.copy_(weight.data.flip(0)),
    ):
        change()
        for _ in range(2):
            operand, scale = kept.operand(weight)
            wanted, wanted_scale = triton_linear.operand(weight, global_scale=None, rule="pow2")
            assert torch.equal(operand.view(torch.int16), wanted.view(torch.int16)) and torch.equal(scale, wanted_scale)
    version = operand.clone()
    operand[3, 3] = 77.0
    assert kept.operand(weight)[0][3, 3] == 77.0 and not torch.equal(version, operand)
    assert triton_linear.keep(weight.half(), "pow2") is None and triton_linear.keep(weight, "amax") is None
    assert triton_linear.keep(weight[:, ::2], "pow2") is None and triton_linear.keep(weight[:8], "pow2") is None


def test_kept_weights_of_a_validation_block():
    model = tiny_ltx2(BF16, layers=1, num_attention_heads=8, cross_attention_dim=1024).cuda()
    data = {k: v.cuda() if torch.is_tensor(v) else v for k, v in ltx2_inputs(model).items()}
    qatpatch.apply(model)
    with torch.no_grad():
        with qatpatch.infer_attention(model, memory_limit=0):
            wanted = model(**data)[0]
        with qatpatch.reuse_weights(model) as kept, qatpatch.infer_attention(model):
            for _ in range(3):
                assert torch.equal(model(**data)[0], wanted)
            assert len(kept) > 0
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            before = len(kept)
            with torch.cuda.stream(stream):
                assert torch.equal(model(**data)[0], wanted)
            assert len(kept) == 2 * before  # one for each stream


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("rule", ["pow2", "amax", "foreign"])
def test_one_rounding(dtype, rule):
    """RMS error against float64 of the quantized operands within 1.05 of rounding that once to the output dtype."""
    settings = {"global_scale": "pow2" if rule == "pow2" else "amax"}
    if rule == "foreign":
        settings |= {"input_scale": "static", "static_scale": 0.00137}
    linear = layer(dtype=dtype, **settings)
    x = torch.randn(300, 2048, device="cuda").to(dtype)
    host = [t.detach().cpu() for t in (x, linear.weight)]
    scales = [nvfp4.choose_global_scale(t, settings["global_scale"]) for t in host]
    if rule == "foreign":
        scales[0] = torch.tensor(0.00137)
    left, right = (
        nvfp4.dequantize(nvfp4.quantize(t, global_scale=s), dtype=torch.float64).cuda()
        for t, s in zip(host, scales, strict=True)
    )
    exact = left @ right.T + linear.bias.detach().double()
    with torch.no_grad():
        found = linear(x)
    error = (found.double() - exact).square().mean().sqrt()
    if dtype is FP32:  # only the order of sums is left
        assert error <= 3e-6 * exact.square().mean().sqrt()
    else:
        assert error <= 1.05 * (exact.to(dtype).double() - exact).square().mean().sqrt()
    packed = NVFP4Linear.from_linear(linear, retain=False)
    with torch.no_grad():
        assert torch.equal(packed(x), found)


def test_bytes_kept_per_activation():
    """What the graph holds of an input that nobody else keeps: 0.5625 byte an element, and the scale."""
    linear = layer(backward="quantized")
    x = torch.randn(2, 1000, 2048, device="cuda", dtype=BF16, requires_grad=True)
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        out = linear(x)
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        del out
    assert 0.5 * x.numel() < kept <= 0.60 * x.numel()


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 60), (5, 128), (0, 64)], ids=str)
@pytest.mark.parametrize("rule", ["pow2", "amax"])
def test_opcheck(shape, rule):
    x = torch.randn(shape, device="cuda", dtype=BF16)
    if shape == (5, 128):
        x = torch.randn(128, 5, device="cuda", dtype=BF16).t()
    columns = shape[-1]
    weight = torch.randn(48, columns, device="cuda", dtype=BF16)
    name, scale = "triton_linear", torch.tensor(0.013, device="cuda")
    for given in (None, scale):
        torch.library.opcheck(ops.operand, (x, given, rule, name))
        torch.library.opcheck(ops.linear, (x, weight, None, given, True, BF16, rule, name))
        torch.library.opcheck(ops.quantize, (x, given, rule, name))
    packed = ops.quantize(weight, None, rule, name)
    torch.library.opcheck(ops.packed_operand, (*packed, columns, BF16, rule, name))
    (xq, x_scale), (w, w_scale) = ops.operand(x, None, rule, name), ops.operand(weight, None, rule, name)
    bias = torch.randn(48, device="cuda", dtype=BF16)
    torch.library.opcheck(ops.packed_linear, (x, *packed, None, None, True, BF16, rule, name))
    torch.library.opcheck(ops.matmul, (xq, x_scale, w, w_scale, bias, BF16, rule, name))


@pytest.mark.parametrize("scheme", ["sage3", "fa4"])
def test_memory_kept_by_attention(scheme):
    """Beyond what dense attention keeps (Q, K, V, O and the LSE) at most 2.2 bytes for each element of those four."""
    shape = (1, 2048, 8, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))

    def held(attend):
        attend().sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = attend()
        after = torch.cuda.memory_allocated()
        del out
        return after - before

    dense = held(
        lambda: nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    )
    ours = held(lambda: qatpatch.qat_attention(q, k, v, scheme=scheme))
    assert ours - dense <= 2.2 * 4 * q.numel(), (ours - dense) / (4 * q.numel())
