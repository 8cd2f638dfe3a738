"""The row `triton_linear` on the CPU: its launches replaced by torch, so that what it makes of them can be checked.

What the launches themselves compute is `test_triton_nvfp4`'s and the GPU tests' subject. Here: who applies which global
scale, once, for every dtype, rule and kind of layer.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qatpatch import kernels, nvfp4
from qatpatch.linear import QATLinear
from qatpatch.linear_state import LinearSettings, LinearState
from qatpatch.packed_linear import NVFP4Linear

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class TorchLaunches:
    """What `triton_nvfp4_launch` offers, in torch; matrix products in float64."""

    @staticmethod
    def rule_number(rule):
        return rule

    @staticmethod
    def global_scale(x, rule):
        return nvfp4.choose_global_scale(x, rule)

    @staticmethod
    def operand(x, scale, dtype, apply):
        return nvfp4.round_to_nvfp4(x, scale, dtype=dtype, apply_global_scale=apply)

    @classmethod
    def operand_pow2(cls, x, dtype):
        scale = nvfp4.choose_global_scale(x, "pow2")
        return cls.operand(x, scale, dtype, True), scale

    @classmethod
    def operand_pair_pow2(cls, x, weight, dtype):
        return *cls.operand_pow2(x, dtype), *cls.operand_pow2(weight, dtype)

    @staticmethod
    def quantize(x, scale):
        q = nvfp4.quantize(x, global_scale=scale)
        return q.packed, q.block_scale.view(torch.uint8)

    @staticmethod
    def dequantize(packed, block_scale, scale, columns, dtype, apply):
        q = nvfp4.NVFP4Tensor(
            packed=packed,
            block_scale=block_scale.view(torch.float8_e4m3fn),
            global_scale=scale,
            shape=torch.Size((*packed.shape[:-1], columns)),
        )
        dense = nvfp4.dequantize(q) if apply else nvfp4.dequantize_without_global_scale(q)
        return dense.to(dtype)

    @staticmethod
    def is_keepable(weight):
        return False

    @staticmethod
    def scaled_matmul(x, weight, alpha_x, alpha_weight, bias, out_dtype):
        y = x.double() @ weight.double().T * alpha_x.double() * alpha_weight.double()
        return (y if bias is None else y + bias.double()).to(out_dtype)


@pytest.fixture(autouse=True)
def torch_launches(monkeypatch):
    from qatpatch.kernels import triton_linear

    monkeypatch.setattr(triton_linear, "launch", TorchLaunches)
    monkeypatch.setattr(kernels, "resolved_name", lambda *args, **kwargs: "triton_linear")


def layer(dtype, columns, trained=None, **settings):
    torch.manual_seed(0)
    linear = nn.Linear(columns, 24).to(dtype)
    linear.__class__, linear.quantization = QATLinear, LinearState(LinearSettings(**settings))
    linear.quantization.trained_dtype = trained
    assert linear.quantization.kernel("train", torch.device("cpu")) == "triton_linear"
    return linear


def exact(x, weight, bias, dtype, rule, activations):
    """Output in float64 of what the layer must multiply: both operands quantized in the compute dtype."""

    def rounded(t):
        t = t.detach().to(dtype)
        return nvfp4.dequantize(nvfp4.quantize(t, global_scale=nvfp4.choose_global_scale(t, rule)), dtype=torch.float64)

    left = rounded(x) if activations else x.to(dtype).double()
    return left @ rounded(weight).T + bias.detach().to(dtype).double()


@pytest.mark.parametrize("backward", ["high_precision", "quantized"])
@pytest.mark.parametrize("activations", [True, False], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("rule", ["pow2", "amax"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("columns", [64, 60])
def test_every_scale_is_applied_once(dtype, rule, activations, backward, columns):
    linear = layer(dtype, columns, global_scale=rule, activations=activations, backward=backward)
    x = torch.randn(2, 7, columns).to(dtype).requires_grad_()
    wanted = exact(x, linear.weight, linear.bias, dtype, rule, activations)
    out = linear(x)
    tolerance = {"rtol": 1e-5 if dtype is FP32 else 1e-2, "atol": 1e-5 if dtype is FP32 else 1e-2}
    torch.testing.assert_close(out.double(), wanted, **tolerance)
    grad = torch.randn_like(out)
    dx, dw = torch.autograd.grad(out, (x, linear.weight), grad)
    quantized = backward == "quantized"

    def operand(t, rounds):
        t = t.detach()
        if rounds:
            t = nvfp4.dequantize(nvfp4.quantize(t, global_scale=nvfp4.choose_global_scale(t, rule)))
        return t.double()

    rows = grad.double().reshape(14, 24)
    wide = {name: value * (1 if dtype is FP32 else 10) for name, value in tolerance.items()}
    torch.testing.assert_close(dx.double().view(14, columns), rows @ operand(linear.weight, quantized), **wide)
    kept = operand(x.reshape(14, columns), quantized and activations)
    torch.testing.assert_close(dw.double(), rows.T @ kept, **wide)
    packed = NVFP4Linear.from_linear(linear, retain=False)
    with torch.no_grad():
        torch.testing.assert_close(packed(x).double(), wanted, **tolerance)


@pytest.mark.parametrize("rule", ["pow2", "amax"])
def test_trained_in_bfloat16_evaluated_in_float32(rule):
    linear = layer(FP32, 64, trained=BF16, global_scale=rule).eval()
    x = torch.randn(7, 64)
    with torch.no_grad():
        out = linear(x)
    assert out.dtype is FP32
    wanted = exact(x, linear.weight, linear.bias, BF16, rule, True)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(NVFP4Linear.from_linear(linear, retain=False)(x), out)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("settings", [{"input_scale": "unit"}, {"input_scale": "static", "static_scale": 0.0137}])
def test_given_input_scales(dtype, settings):
    linear = layer(dtype, 64, global_scale="amax", **settings)
    x = torch.randn(7, 64).to(dtype)
    scale = torch.tensor(settings.get("static_scale", 1.0))
    left = nvfp4.dequantize(nvfp4.quantize(x, global_scale=scale), dtype=torch.float64)
    weight = linear.weight.detach()
    amax = nvfp4.choose_global_scale(weight, "amax")
    right = nvfp4.dequantize(nvfp4.quantize(weight, global_scale=amax), dtype=torch.float64)
    with torch.no_grad():
        found = linear(x).double()
    wide = 1e-5 if dtype is FP32 else 1e-2
    torch.testing.assert_close(found, left @ right.T + linear.bias.detach().double(), rtol=wide, atol=wide)


def test_a_static_scale_keeps_the_promise_of_its_rule():
    with pytest.raises(ValueError, match="power of two"):
        LinearSettings(input_scale="static", static_scale=0.0137)
    assert LinearSettings(input_scale="static", static_scale=2.0**-7).static_scale == 2.0**-7
