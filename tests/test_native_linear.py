"""Native linear kernels as the layers reach them, on stand-ins with the production contracts: operators, flashinfer's
call, `NVFP4Linear` bound to a native row, eager and compiled.
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import weakref
from types import SimpleNamespace

import native_standin as standin
import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch
from models import ltx2_inputs, run, tiny_ltx2
from test_triton_scaled import RAGGED
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import qatpatch
from qatpatch import kernels
from qatpatch.kernels import flashinfer_linear, layouts, native_ops
from qatpatch.linear import QATLinear
from qatpatch.linear_state import LinearSettings, LinearState
from qatpatch.packed_linear import NVFP4Linear

ROWS = (standin.NATIVE_ROW, standin.FLASHINFER_ROW)


@pytest.fixture(autouse=True)
def _standins(monkeypatch):
    """The stand-ins are rows of the table, the stand-in for mm_fp4 is flashinfer, our quantizer runs in plain torch."""
    monkeypatch.setattr(kernels, "_BY_NAME", {**kernels._BY_NAME, **{row.name: row for row in ROWS}})
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mm_fp4=standin.mm_fp4))
    monkeypatch.setattr(flashinfer_linear, "quantize", standin.quantize)
    monkeypatch.setattr(flashinfer_linear, "quantize_activation", standin.quantize_activation)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request, monkeypatch):
    monkeypatch.setattr(kernels, "TABLE", (request.param, *kernels.TABLE))
    # It passes its proof: a layer that fell back to emulation would pass many of the tests below.
    assert kernels.resolve("linear", stage="deploy", scheme="nvfp4", device="cpu") is request.param
    return request.param


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(rows: int, columns: int, out: int) -> list[torch.Tensor]:
    x = standin.quantize_activation(normal(rows, columns), global_scale=None, rule="pow2")
    packed, block_scale, scale = standin.quantize(normal(out, columns, seed=1), global_scale=None, rule="amax")
    return [*x, packed, layouts.tile_scales(block_scale), scale]


class TestOperators:
    @pytest.mark.parametrize("rows, columns", RAGGED[::3])
    @pytest.mark.parametrize("scale", [None, 0.25])
    def test_quantize_activation(self, rows, columns, scale):
        scale = None if scale is None else torch.tensor(scale)
        arguments = normal(rows, columns), scale, "amax", standin.NATIVE_ROW.name
        opcheck(native_ops.quantize_activation, arguments)
        real, fake = native_ops.quantize_activation(*arguments), on_meta(native_ops.quantize_activation, arguments)
        assert [layout(t) for t in real] == [layout(t) for t in fake]

    @pytest.mark.parametrize("kernel", ROWS, ids=lambda row: row.name)
    @pytest.mark.parametrize("rows", [1, 5, 130])
    @pytest.mark.parametrize("bias", [False, True])
    def test_scaled_matmul(self, kernel, rows, bias):
        bias = normal(64) if bias else None
        arguments = *operands(rows, 96, 64), bias, torch.float16, kernel.name
        opcheck(native_ops.scaled_matmul, arguments)
        real, fake = native_ops.scaled_matmul(*arguments), on_meta(native_ops.scaled_matmul, arguments)
        assert layout(real) == layout(fake)

    def test_no_rows(self, row):
        x = native_ops.quantize_activation(normal(0, 64), torch.ones(()), "pow2", row.name)
        weight = operands(1, 64, 32)[3:]
        assert native_ops.scaled_matmul(*x, *weight, None, torch.bfloat16, row.name).shape == (0, 32)


def on_meta(operator, arguments):
    return operator(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))


def layout(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype


class TestFlashinfer:
    def test_alignment(self):
        assert flashinfer_linear.alignment_reason(4096, 4096) is None
        assert flashinfer_linear.alignment_reason(4090, 64) is None  # padded to 4096 in storage
        assert "in_features=4112 and out_features=100" in flashinfer_linear.alignment_reason(4112, 100)
        assert "multiples of 32" in flashinfer_linear.alignment_reason(64, 40)

    def test_call_fits_the_signature_of_0_7(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "flashinfer")
        signature = inspect.signature(oracle.outside_module("flashinfer.gemm.gemm_base").mm_fp4)
        calls = []

        def record(*args, **kwargs):
            calls.append(signature.bind(*args, **kwargs).arguments)
            return standin.mm_fp4(*args, **kwargs)

        monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mm_fp4=record))
        flashinfer_linear.scaled_matmul(*operands(3, 64, 32), None, out_dtype=torch.bfloat16)
        assert calls[0]["out_dtype"] is torch.bfloat16 and calls[0]["alpha"].shape == (1,)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_one_rounding_without_a_bias_and_two_with(self, dtype):
        x, bias = operands(70, 64, 96), normal(96, dtype=dtype)
        exact = standin.product(*x[:2], *x[3:5]) * float(x[2]) * float(x[5])
        once = flashinfer_linear.scaled_matmul(*x, None, out_dtype=dtype)
        twice = flashinfer_linear.scaled_matmul(*x, bias, out_dtype=dtype)
        assert torch.equal(once, exact.float().to(dtype))
        assert torch.equal(twice, (once.float() + bias.float()).to(dtype))

    def test_float32_output_is_refused(self):
        with pytest.raises(ValueError, match="triton_nvfp4"):
            flashinfer_linear.scaled_matmul(*operands(3, 64, 32), None, out_dtype=torch.float32)

    def test_an_odd_address_is_copied(self):
        x = operands(5, 64, 32)
        buffer = torch.cat([torch.zeros(3, dtype=torch.uint8), x[3].flatten()])
        moved = [*x[:3], buffer[3:].view_as(x[3]), *x[4:]]
        wanted = flashinfer_linear.scaled_matmul(*x, None, out_dtype=torch.bfloat16)
        assert torch.equal(flashinfer_linear.scaled_matmul(*moved, None, out_dtype=torch.bfloat16), wanted)


def deployed(
    columns: int = 96, out: int = 64, *, dtype=torch.bfloat16, kernel=None, bias=True, **settings
) -> NVFP4Linear:
    torch.manual_seed(0)
    layer = nn.Linear(columns, out, bias=bias).to(dtype)
    layer.__class__ = QATLinear
    layer.quantization = LinearState(LinearSettings(**settings))
    layer.quantization.deploy_kernel = kernel
    return NVFP4Linear.from_linear(layer, retain=False)


def exact(layer: NVFP4Linear, x: torch.Tensor) -> np.ndarray:
    """float64 output of the layer's stored weight, by the oracle."""
    xq = oracle.quantize(x.float().numpy(), rule=layer.quantization.settings.global_scale)
    q = layer.nvfp4_weight()
    weight = oracle.quantize(np.zeros(q.shape, np.float32))
    packed = q.packed.numpy()
    weight.codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    weight.scales, weight.global_scale = layer.weight_scale.numpy(), np.float32(q.global_scale)
    y = xq.values.reshape(-1, x.shape[-1]) @ weight.values.T + layer.bias.detach().double().numpy()
    return y.reshape(*x.shape[:-1], -1)


class TestLayer:
    @pytest.mark.parametrize("rule", ["pow2", "amax"])
    def test_forward(self, row, rule):
        layer, x = deployed(kernel=row.name, global_scale=rule), normal(2, 70, 96)
        with torch.no_grad():
            y = layer(x)
        wanted = exact(layer, x)
        assert y.shape == (2, 70, 64) and y.dtype is torch.bfloat16
        roundings = 1 if row is standin.NATIVE_ROW else 2
        assert (np.abs(y.double().numpy() - wanted) <= roundings * 2.0**-8 * (np.abs(wanted) + 1)).all()
        if row is standin.NATIVE_ROW:
            assert torch.equal(y, torch.from_numpy(wanted).float().bfloat16())

    def test_an_input_of_another_width_is_refused(self, row):
        layer = deployed(kernel=row.name)
        for width in (90, 64, 192):
            with torch.no_grad(), pytest.raises(RuntimeError, match="in_features=96"):
                layer(normal(2, 70, width))

    def test_a_bias_is_rounded_with_the_product_unless_the_row_is_asked_for(self, monkeypatch):
        monkeypatch.setattr(kernels, "TABLE", (standin.FLASHINFER_ROW, standin.NATIVE_ROW, *kernels.TABLE))
        x, name = normal(70, 96), standin.FLASHINFER_ROW.name
        layer, plain, asked = deployed(), deployed(bias=False), deployed(kernel=name)
        found = [each.kernel(torch.device("cpu")) for each in (layer, plain, asked)]
        assert found == [standin.NATIVE_ROW.name, name, name]
        with torch.no_grad():
            assert torch.equal(layer(x), torch.from_numpy(exact(layer, x)).float().bfloat16())
            once = plain(x)
            assert torch.equal(asked(x), (once.float() + asked.bias.float()).bfloat16())

    def test_float32_and_autocast_and_ragged_input(self, monkeypatch):
        monkeypatch.setattr(kernels, "TABLE", (standin.NATIVE_ROW, *kernels.TABLE))
        layer, x = deployed(columns=50, out=7, dtype=torch.float32), normal(3, 50, dtype=torch.float32)
        with torch.no_grad():
            y = layer(x)
            with torch.autocast("cpu", torch.bfloat16):
                low = layer(x)
        assert y.dtype is torch.float32 and low.dtype is torch.bfloat16
        assert np.allclose(y.numpy(), exact(layer, x), rtol=1e-6, atol=1e-6)
        bias = layer.bias.detach()
        layer.bias = nn.Parameter(bias.bfloat16().float())
        assert np.allclose(low.float().numpy(), exact(layer, x.bfloat16()), rtol=2.0**-8, atol=1e-6)

    def test_gradients_are_those_of_the_emulated_row(self, row, monkeypatch):
        layer, x = deployed(kernel=row.name), normal(5, 96).requires_grad_()
        layer(x).float().square().sum().backward()
        native = x.grad.clone(), layer.bias.grad.clone()
        monkeypatch.setattr(kernels, "TABLE", kernels.TABLE[1:])
        layer, x.grad = deployed(), None
        layer(x).float().square().sum().backward()
        for ours, theirs in zip(native, (x.grad, layer.bias.grad), strict=True):
            assert torch.allclose(ours.float(), theirs.float(), rtol=0.05, atol=0.5)

    def test_compiles_to_one_graph_with_the_bits_of_eager(self, row):
        x = normal(2, 33, 96)
        for prepared in (False, True):
            layer, counter = deployed(kernel=row.name), CompileCounterWithBackend("aot_eager")
            with torch.no_grad():
                wanted = layer(x)
                if not prepared:  # as after a load
                    layer.load_state_dict(layer.state_dict())
                function = torch.compile(layer, fullgraph=True, backend=counter)
                assert torch.equal(function(x), wanted)
                assert torch.equal(function(x), wanted)
            assert counter.frame_count == 1
            names = {str(node.target) for node in counter.graphs[0].graph.nodes if node.op == "call_function"}
            assert {"qatpatch.quantize_activation.default", "qatpatch.scaled_matmul.default"} <= names
            assert hasattr(layer, "weight_scale_tiled") == prepared

    def test_compiles_with_dynamic_rows_and_gradients(self, row):
        layer = deployed(kernel=row.name)
        function = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (5, 130):
            x = normal(rows, 96).requires_grad_()
            wanted = x.detach().clone().requires_grad_()
            layer(wanted).float().sum().backward()
            function(x).float().sum().backward()
            assert torch.equal(x.grad, wanted.grad)


class TestTiledScale:
    """What is derived from the stored scales follows them, and is in no file."""

    def test_derived_once_and_in_no_state_dict(self, row):
        layer = deployed(kernel=row.name)
        keys = set(layer.state_dict())
        kept = layer.weight_scale_tiled  # from deploy on
        with torch.no_grad():
            layer(normal(4, 96))
        assert layer.weight_scale_tiled is kept and kept.numel() == 128 * 8
        assert torch.equal(layers_scales(layer), layer.weight_scale)
        assert set(layer.state_dict()) == keys

    def test_follows_loads_writes_casts_and_copies(self, row):
        layer, x = deployed(kernel=row.name), normal(4, 96)
        other = deployed(kernel=row.name)
        with torch.no_grad():
            other.weight_scale.fill_(0x40)
            layer(x)
            layer.load_state_dict(other.state_dict())
            assert not hasattr(layer, "weight_scale_tiled")
            assert torch.equal(layer(x), other(x))
            layer.weight_scale.fill_(0x38)
            other.weight_scale = torch.full_like(other.weight_scale, 0x38)
            assert torch.equal(layer(x), other(x)) and torch.equal(layers_scales(layer), layer.weight_scale)
            twin = copy.deepcopy(layer)
            twin.weight_scale.fill_(0x30)
            assert not torch.equal(twin(x), layer(x))
            assert torch.equal(layers_scales(layer.half()), layer.weight_scale)
            swapped = {"weight_scale": torch.full_like(layer.weight_scale, 0x20)}
            before = layer(x.half())
            assert not torch.equal(torch.func.functional_call(layer, swapped, x.half()), before)
            assert torch.equal(layer(x.half()), before)

    def test_inference_mode_and_meta(self, row):
        with torch.inference_mode():
            layer = deployed(kernel=row.name)
            y = layer(normal(4, 96))
        with torch.no_grad():
            assert torch.equal(layer(normal(4, 96)), y)
        layer = deployed(kernel=row.name).to("meta")
        layer.quantization._kernels["deploy", "meta", None, (64, 96), torch.bfloat16, True, row.name] = row.name
        with torch.no_grad():
            assert layer(normal(4, 96).to("meta")).shape == (4, 64)


def test_a_model_deployed_on_a_native_row_saves_loads_and_compiles(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "flashinfer")  # diffusers looks for it
    model = tiny_ltx2(layers=1)
    data = ltx2_inputs(model, frames=1)
    qatpatch.apply(model)
    trained = run(model, data)
    monkeypatch.setattr(kernels, "TABLE", (standin.NATIVE_ROW, *kernels.TABLE))
    report = qatpatch.deploy(model)
    assert "native_standin" in str(report)
    assert report.bytes_after == qatpatch.deployment.model_bytes(model)  # the tiled scales are counted
    found = run(model, data)
    assert torch.allclose(found, trained, rtol=1e-4, atol=1e-4)
    qatpatch.save(model, tmp_path)
    loaded = qatpatch.load(tmp_path)
    assert torch.equal(run(loaded, data), found)
    compiled = torch.compile(qatpatch.load(tmp_path), fullgraph=True, backend="aot_eager")
    assert torch.equal(run(compiled, data), found)


def test_the_kernel_of_linears_is_asked_for_by_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "flashinfer")  # diffusers looks for it
    monkeypatch.setattr(kernels, "TABLE", (*ROWS[::-1], *kernels.TABLE))
    model = tiny_ltx2(torch.bfloat16, layers=1)
    qatpatch.apply(model)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(mm_fp4=standin.mm_fp4))
    before = {name: type(module) for name, module in model.named_modules()}
    for kernel, reason in (
        ("triton_linear", "(?s)does not serve .*runs on cuda, not on cpu"),
        ("triton_attention", "no linear kernel called 'triton_attention'"),
        ("fflashinfer", "no linear kernel called 'fflashinfer'; did you mean 'flashinfer'"),
    ):
        with pytest.raises(qatpatch.KernelUnavailable, match=reason):
            qatpatch.deploy(model, linear_kernel=kernel)
        assert {name: type(module) for name, module in model.named_modules()} == before
    default = copy.deepcopy(model)
    receipt = qatpatch.deploy(default)
    assert {row.name for row in receipt.kernels.values() if row.op == "linear"} == {"native_standin"}
    assert receipt.notes == () and "two roundings" in str(receipt)  # among the kernels that were passed over
    receipt = qatpatch.deploy(model, linear_kernel="flashinfer_standin")
    assert {row.name for row in receipt.kernels.values() if row.op == "linear"} == {"flashinfer_standin"}
    note = "adds a bias after its own rounding: two roundings where the format promises one"
    assert receipt.notes == (f"flashinfer_standin, in {len(receipt.packed)} layers: {note}",)
    assert receipt.notes[0] in str(receipt)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layers = qatpatch.report(other).layers
        assert all(note in layers[name].note and layers[name].native for name in receipt.packed)


def layers_scales(layer: NVFP4Linear) -> torch.Tensor:
    return layouts.untile_scales(layer.weight_scale_tiled, *layer.weight_scale.shape)


class Attention(nn.Module):
    def __init__(self, kernel: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.to_q, self.to_k, self.to_v = (nn.Linear(96, 64, dtype=torch.bfloat16) for _ in range(3))
        qatpatch.apply(self, qatpatch.Profile(name="all", rules=(qatpatch.Rule(match=("*",), action="linear"),)))
        qatpatch.deploy(self, linear_kernel=kernel)

    def forward(self, x, context=None):
        context = x if context is None else context
        return torch.cat([self.to_q(x), self.to_k(context), self.to_v(context)], -1)


class TestSharedInput:
    """q, k and v quantize one input once on the native route, and no stale one ever."""

    @pytest.fixture
    def quantized(self, row, monkeypatch):
        """The shapes of the activations that the row quantizes, in order."""
        shapes, module = [], row.load()
        real = module.quantize_activation

        def noted(x, **arguments):
            shapes.append(tuple(x.shape))
            return real(x, **arguments)

        monkeypatch.setattr(module, "quantize_activation", noted)
        return shapes

    @pytest.fixture
    def net(self, row, quantized):
        net = Attention(row.name)
        quantized.clear()  # of the proof
        return net

    @staticmethod
    def apart(net, *inputs):
        """The output of a copy whose layers share nothing."""
        twin = copy.deepcopy(net)
        for layer in twin.children():
            layer.quantization.shares_input = False
        return twin(*inputs)

    def test_one_quantization_and_three_products(self, net, row, quantized, monkeypatch):
        products, real = [], row.load().scaled_matmul
        monkeypatch.setattr(
            row.load(), "scaled_matmul", lambda *args, **kwargs: products.append(1) or real(*args, **kwargs)
        )
        x = normal(2, 35, 96)
        with torch.no_grad():
            for calls in (1, 2):  # the same tensor again is quantized again: each layer takes what is kept once
                found = net(x)
                assert quantized == [(70, 96)] * calls and len(products) == 3 * calls
            assert torch.equal(found, self.apart(net, x))
        assert len(quantized) == 2 + 3

    def test_cross_attention_shares_between_k_and_v(self, net, quantized):
        x, context = normal(5, 96), normal(7, 96, seed=1)[:5]
        with torch.no_grad():
            found = net(x, context)
            assert len(quantized) == 2
            assert torch.equal(found, self.apart(net, x, context))

    def test_an_adapter_s_gradient(self, net, quantized):
        x = normal(5, 96).requires_grad_()
        (found,) = torch.autograd.grad(net(x).float().square().sum(), x)
        assert len(quantized) == 1
        (wanted,) = torch.autograd.grad(self.apart(net, x).float().square().sum(), x)
        assert torch.equal(found, wanted)

    def test_inputs_of_other_dtypes_are_cast_once_each(self, net, quantized):
        x = normal(5, 96, dtype=torch.float32)
        with torch.no_grad():
            found = net(x)
            assert len(quantized) == 1
            with torch.autocast("cpu", torch.float16):
                half = net(x)
            assert len(quantized) == 2 and half.dtype is torch.float16
            assert torch.equal(found, self.apart(net, x))

    @pytest.mark.parametrize("write", ["in place", "data", "numpy"])
    def test_the_next_call_sees_a_written_input(self, net, write):
        x = normal(5, 96, dtype=torch.float32)
        with torch.no_grad():
            net(x)
            {"in place": lambda: x.mul_(2), "data": lambda: x.data.mul_(2), "numpy": lambda: x.numpy().fill(3)}[write]()
            assert torch.equal(net(x), self.apart(net, x.clone()))

    def test_an_input_changed_in_place_between_q_and_k_is_quantized_again(self, net, quantized):
        x = normal(5, 96)
        with torch.no_grad():
            net.to_q(x)
            x.mul_(3.0)
            found = net.to_k(x)
            assert len(quantized) == 2
            assert torch.equal(found, net.to_k(x.clone()))

    def test_it_lives_no_longer_than_the_input(self, net):
        x = normal(5, 96)
        with torch.no_grad():
            net.to_q(x)
        shared = net.to_q.quantization.switch.input
        codes = weakref.ref(shared._last[3][0])
        assert codes() is not None
        del x
        gc.collect()
        assert codes() is None and shared._last is None

    def test_settings_and_groups_keep_inputs_apart(self, net, quantized):
        x, state = normal(5, 96), net.to_k.quantization
        state.settings = LinearSettings(input_scale="unit")
        with torch.no_grad():
            net.to_q(x)
            found = net.to_k(x)
            assert len(quantized) == 2
            assert torch.equal(found, self.apart(net, x)[:, 64:128])
            quantized.clear()
            net.to_v.quantization.group = "another"
            net.to_q(x), net.to_v(x)
            assert len(quantized) == 2

    def test_native_and_emulated_layers_share_nothing(self, net, quantized, monkeypatch):
        x = normal(5, 96)
        net.to_k.quantization.deploy_kernel = "reference_linear"
        with torch.no_grad():
            wanted = self.apart(net, x)
            quantized.clear()
            assert torch.equal(net(x), wanted)
            assert len(quantized) == 2  # of q, and of v after k's was kept in another form

    def test_inference_tensors_have_no_version_and_are_quantized_each_time(self, net, quantized):
        with torch.inference_mode():
            net(normal(5, 96))
        assert len(quantized) == 3

    def test_compiled_with_the_bits_of_eager(self, net):
        x = normal(5, 96)
        with torch.no_grad():
            wanted = net(x)
            assert torch.equal(torch.compile(net, fullgraph=True, backend="aot_eager")(x), wanted)
            assert torch.equal(net(x), wanted)
