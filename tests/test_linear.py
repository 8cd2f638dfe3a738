"""`QATLinear` and `NVFP4Linear` against float64 products of operands that the numpy oracle quantized.

What is exact is compared exactly: gradients in float32, packed bytes, and the deployed forward with the trained one.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import nvfp4_oracle as oracle
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from qatpatch import nvfp4
from qatpatch.kernels import ops
from qatpatch.linear import QATLinear
from qatpatch.linear_state import LinearSettings, LinearState
from qatpatch.packed_linear import NVFP4Linear, PurgedWeight

KERNEL = "reference_linear"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RULES = nvfp4.GLOBAL_SCALE_RULES


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_linear(
    columns: int = 64, rows: int = 48, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    linear = nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(normal(rows, columns, seed=columns) * 0.05)
        if bias:
            linear.bias.copy_(normal(rows, seed=3))
    return linear.to(dtype)


def patch(linear: nn.Linear, **settings) -> QATLinear:
    linear.__class__ = QATLinear
    linear.quantization = LinearState(LinearSettings(**settings))
    return linear


def patched_linear(columns: int = 64, rows: int = 48, *, bias=True, dtype=torch.float32, **settings) -> QATLinear:
    return patch(plain_linear(columns, rows, bias=bias, dtype=dtype), **settings)


def packed_linear(*args, retain: bool = False, **kwargs) -> NVFP4Linear:
    return NVFP4Linear.from_linear(patched_linear(*args, **kwargs).eval(), retain=retain)


def oracle_values(x: torch.Tensor, scale: float | None = None, rule: str = "pow2") -> torch.Tensor:
    """Dequantized ``x``: float64 and exact."""
    return torch.from_numpy(oracle.quantize(x.detach().float().numpy(), global_scale=scale, rule=rule).values)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def assert_one_rounding(y: torch.Tensor, exact: torch.Tensor) -> None:
    """RMS error within 1.05x of rounding the exact result once to y's dtype; in float32 close to accumulation error."""
    assert y.shape == exact.shape
    error = rms(y.detach().double() - exact)
    if y.dtype == torch.float32:
        assert error <= 1e-6 * rms(exact)
    else:
        assert error <= 1.05 * rms(exact.to(y.dtype).double() - exact)


def packed_state(layer: NVFP4Linear) -> list[torch.Tensor]:
    return [layer.weight_packed.clone(), layer.weight_scale.clone(), layer.weight_global_scale.clone()]


def assert_packed_unchanged(layer: NVFP4Linear, before: list[torch.Tensor]) -> None:
    for now, then in zip(packed_state(layer), before, strict=True):
        assert now.dtype == torch.uint8 and torch.equal(now, then)


def without(key: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda state: {k: v for k, v in state.items() if k != key}


# What must not load into a packed layer, made from the state dict of another packed one.
MISFITS = {
    "no codes": without("weight_packed"),
    "no scales": without("weight_scale"),
    "no global scale": without("weight_global_scale"),
    "no bias": without("bias"),
    "only a bias": lambda s: {"bias": s["bias"]},
    "dense": lambda s: {"weight": torch.ones(48, 64), "bias": s["bias"]},
    "dense besides packed": lambda s: {**s, "weight": torch.ones(48, 64)},
    "with a retained weight": lambda s: {**s, "dense_weight": torch.ones(48, 64)},
    "scales as E4M3": lambda s: {**s, "weight_scale": s["weight_scale"].view(torch.float8_e4m3fn)},
    "scales as numbers": lambda s: {**s, "weight_scale": s["weight_scale"].view(torch.float8_e4m3fn).float()},
    "codes as numbers": lambda s: {**s, "weight_packed": s["weight_packed"].float()},
    "wider": lambda s: {**packed_linear(128).state_dict(), "bias": s["bias"]},
    "fewer scales": lambda s: {**s, "weight_scale": s["weight_scale"][:, :3]},
    "global scale as a number": lambda s: {**s, "weight_global_scale": torch.tensor([0.01])},
    "shorter bias": lambda s: {**s, "bias": s["bias"][:47]},
}


class TestForward:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("bias", [True, False])
    def test_own_scales(self, dtype, rule, bias):
        layer = patched_linear(512, 96, bias=bias, dtype=dtype, global_scale=rule)
        x = normal(128, 512, dtype=dtype)
        exact = oracle_values(x, rule=rule) @ oracle_values(layer.weight, rule=rule).T
        assert_one_rounding(layer(x), exact + layer.bias.double() if bias else exact)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rule", RULES)
    def test_foreign_scales(self, rule, dtype):
        """A weight and an input scale that no rule of ours would give."""
        x, weight, bias = normal(128, 512, dtype=dtype), normal(96, 512, seed=5) * 0.05, normal(96, seed=3, dtype=dtype)
        q, scale = nvfp4.quantize(weight, global_scale=7.77e-5), 2.0**-10 if rule == "pow2" else 0.00123
        layer = NVFP4Linear(
            packed=q.packed,
            block_scale=q.block_scale.view(torch.uint8),
            global_scale=q.global_scale,
            in_features=512,
            bias=nn.Parameter(bias),
            dense_weight=None,
            dtype=dtype,
            quantization=LinearState(LinearSettings(input_scale="static", static_scale=scale, global_scale=rule)),
        )
        exact = oracle_values(x, scale) @ oracle_values(weight, 7.77e-5).T + bias.double()
        assert_one_rounding(layer(x), exact)

    @pytest.mark.parametrize("columns", [8, 24, 60, 100])
    def test_ragged_columns_with_one_large_row(self, columns):
        layer, x = patched_linear(columns), normal(6, columns)
        with torch.no_grad():
            layer.weight[5] *= 100
            x[2] *= 100
        assert_one_rounding(layer(x), oracle_values(x) @ oracle_values(layer.weight).T + layer.bias.double())
        assert torch.equal(NVFP4Linear.from_linear(layer, retain=False)(x), layer(x))

    def test_narrow_view_with_a_huge_row_stride(self):
        """Rows 2^31 elements apart: the memory between them is never touched."""
        x = torch.empty(2**32 + 64, dtype=torch.bfloat16).as_strided((3, 60), (2**31, 1)).copy_(normal(3, 60))
        layer = patched_linear(60, dtype=torch.bfloat16)
        for module in (layer, NVFP4Linear.from_linear(layer, retain=False)):
            assert torch.equal(module(x), module(x.contiguous()))

    @pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (2, 1, 3, 64), (0, 64), (2, 0, 64)])
    def test_leading_axes(self, shape):
        layer, x = patched_linear(), normal(*shape).requires_grad_()
        y = layer(x)
        assert y.shape == (*shape[:-1], 48)
        if y.numel():
            assert_one_rounding(y, oracle_values(x) @ oracle_values(layer.weight).T + layer.bias.double())
        y.sum().backward()
        assert x.grad.shape == x.shape and layer.weight.grad.shape == (48, 64)
        assert x.numel() or not layer.weight.grad.any() and not layer.bias.grad.any()

    def test_non_contiguous_input(self):
        layer, x = patched_linear(), normal(64, 5, 3).permute(2, 1, 0)
        assert torch.equal(layer(x), layer(x.contiguous()))

    def test_weight_only(self):
        layer = patched_linear(512, 96, dtype=torch.bfloat16, activations=False)
        x = normal(128, 512, dtype=torch.bfloat16)
        assert_one_rounding(layer(x), x.double() @ oracle_values(layer.weight).T + layer.bias.double())

    def test_unit_input_scale(self):
        layer, x = patched_linear(input_scale="unit"), normal(6, 64) * 0.01
        exact = oracle_values(x, 1.0) @ oracle_values(layer.weight).T + layer.bias.double()
        assert_one_rounding(layer(x), exact)
        assert rms(oracle_values(x, 1.0) - oracle_values(x)) > 0

    @pytest.mark.parametrize(("rule", "scale"), [("pow2", 2.0**-5), ("amax", 0.0321)])
    def test_static_input_scale(self, rule, scale):
        layer, x = patched_linear(input_scale="static", static_scale=scale, global_scale=rule), normal(6, 64)
        exact = oracle_values(x, scale) @ oracle_values(layer.weight, rule=rule).T + layer.bias.double()
        assert_one_rounding(layer(x), exact)
        for uncalibrated in (patched_linear(input_scale="static"), packed_linear(input_scale="static")):
            with pytest.raises(RuntimeError, match="qatpatch.calibrate"):
                uncalibrated(x)

    def test_open_dense_block_runs_plain_linear(self):
        plain = plain_linear()
        layer, x, block = patch(copy.deepcopy(plain)), normal(6, 64), object()
        quantized = layer(x)
        layer.quantization.switch.open(block, linear="dense")
        assert torch.equal(layer(x), plain(x))
        layer.quantization.switch.close(block)
        assert torch.equal(layer(x), quantized) and not torch.equal(quantized, plain(x))

    def test_class_assignment_adds_nothing(self):
        plain = plain_linear()
        before = {name: id(parameter) for name, parameter in plain.named_parameters()}
        layer = patch(plain)
        assert {name: id(parameter) for name, parameter in layer.named_parameters()} == before
        assert list(layer.state_dict()) == ["weight", "bias"]


class TestDtypes:
    @pytest.mark.parametrize(
        ("weight", "given", "autocast"),
        [
            *((dtype, dtype, None) for dtype in DTYPES),
            (torch.float32, torch.float32, torch.bfloat16),
            (torch.float32, torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float32, torch.float16),
            (torch.bfloat16, torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.bfloat16, torch.float16),
        ],
    )
    @pytest.mark.parametrize("activations", [True, False])
    def test_as_nn_linear(self, weight, given, autocast, activations):
        """Output and gradients have the dtypes of a plain layer in the same autocast state; packed likewise."""
        plain = plain_linear(dtype=weight)
        layer = patch(copy.deepcopy(plain), activations=activations)
        results = []
        for module in (plain, layer):
            x = normal(4, 64, dtype=given).requires_grad_()
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                y = module(x)
                results.append([y.dtype])
            y.sum().backward()
            results[-1] += [x.grad.dtype, module.weight.grad.dtype, module.bias.grad.dtype]
        assert results[0] == results[1]
        packed = NVFP4Linear.from_linear(layer.eval(), retain=False)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            assert packed(normal(4, 64, dtype=given)).dtype == results[0][0]

    def test_float32_activations_into_a_half_layer(self):
        layer, x = patched_linear(dtype=torch.bfloat16), normal(4, 64).requires_grad_()
        y = layer(x)
        assert y.dtype == torch.bfloat16 and torch.equal(y, layer(x.bfloat16()))
        y.sum().backward()
        assert x.grad.dtype == torch.float32

    @pytest.mark.parametrize("make", [patched_linear, packed_linear])
    def test_other_mismatches_raise_as_nn_linear_does(self, make):
        with pytest.raises(RuntimeError, match="bfloat16.*float32"):
            make()(normal(4, 64, dtype=torch.bfloat16))

    def test_operands_are_quantized_from_the_autocast_dtype(self):
        layer, x = patched_linear(512, 96), normal(128, 512)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        exact = oracle_values(x.bfloat16()) @ oracle_values(layer.weight.bfloat16()).T + layer.bias.bfloat16().double()
        assert_one_rounding(y, exact)
        half = copy.deepcopy(layer).bfloat16()
        assert torch.equal(y, half(x.bfloat16()))
        from_float32 = oracle_values(layer.weight) != oracle_values(layer.weight.bfloat16())
        assert 0.01 < from_float32.double().mean() < 0.1  # the order of the two roundings is visible

    def test_backward_inside_autocast_is_not_rounded(self):
        layer, x, dy = patched_linear(), normal(4, 64).requires_grad_(), normal(4, 48, seed=1)
        y = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            y.backward(dy)
        assert torch.equal(x.grad, dy @ layer.weight) and torch.equal(layer.weight.grad, dy.T @ x)


class _Products(TorchDispatchMode):
    """Counts matrix products and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.sums = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        self.sums += func is torch.ops.aten.sum.dim_IntList
        return func(*args, **(kwargs or {}))


class _Called(TorchDispatchMode):
    """Names of the qatpatch operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "qatpatch":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def _gradients(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), normal(*y.shape, seed=9))


def saved_by(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    return saved


class TestGradients:
    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("columns", [60, 64])
    @pytest.mark.parametrize("activations", [True, False])
    @pytest.mark.parametrize("backward", ["high_precision", "quantized"])
    def test_equal_the_formulas_in_float32(self, backward, activations, columns, rule):
        layer = patched_linear(columns, backward=backward, activations=activations, global_scale=rule)
        x, dy = normal(3, 5, columns).requires_grad_(), normal(3, 5, 48, seed=1)
        layer(x).backward(dy)
        rows, weight, dy_rows = x.detach().reshape(15, columns), layer.weight.detach(), dy.reshape(15, 48)
        if backward == "quantized":
            weight = oracle_values(weight, rule=rule).float()
            rows = oracle_values(rows, rule=rule).float() if activations else rows
        assert torch.equal(x.grad, (dy_rows @ weight).view_as(x))
        assert torch.equal(layer.weight.grad, dy_rows.T @ rows)
        assert torch.equal(layer.bias.grad, dy_rows.sum(0))

    def test_do_not_depend_on_the_order_of_sums(self):
        """Small integers: every partial sum is exact, so float64 says the same."""
        layer = patched_linear()
        generator = torch.Generator().manual_seed(0)
        x, dy = (torch.randint(-8, 9, (16, size), generator=generator).float() for size in (64, 48))
        with torch.no_grad():
            layer.weight.copy_(torch.randint(-8, 9, (48, 64), generator=generator))
        x.requires_grad_()
        layer(x).backward(dy)
        assert torch.equal(x.grad.double(), dy.double() @ layer.weight.double())
        assert torch.equal(layer.weight.grad.double(), dy.double().T @ x.double())
        assert torch.equal(layer.bias.grad.double(), dy.double().sum(0))

    @pytest.mark.parametrize("backward", ["high_precision", "quantized"])
    def test_under_autocast(self, backward):
        """The formulas in bfloat16, on bfloat16 operands, handed to float32 parameters."""
        layer, x, dy = (
            patched_linear(backward=backward),
            normal(6, 64).requires_grad_(),
            normal(6, 48, seed=1).bfloat16(),
        )
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        y.backward(dy)
        rows, weight = x.detach().bfloat16(), layer.weight.detach().bfloat16()
        if backward == "quantized":
            rows, weight = oracle_values(rows).bfloat16(), oracle_values(weight).bfloat16()
        assert torch.equal(x.grad, (dy @ weight).float())
        assert torch.equal(layer.weight.grad, (dy.T @ rows).float())
        assert torch.equal(layer.bias.grad, dy.sum(0).float())

    @pytest.mark.parametrize("backward", ["high_precision", "quantized"])
    @pytest.mark.parametrize(
        ("x_wants", "weight_wants", "bias_wants"),
        [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False, None) if a or b or c],
    )
    def test_only_those_asked_for(self, backward, x_wants, weight_wants, bias_wants):
        layer = patched_linear(bias=bias_wants is not None, backward=backward)
        layer.weight.requires_grad_(weight_wants)
        if bias_wants is not None:
            layer.bias.requires_grad_(bias_wants)
        x = normal(6, 64).requires_grad_(x_wants)
        y = layer(x)
        with _Products() as counted:
            y.backward(torch.ones_like(y))
        assert (counted.products, counted.sums) == (x_wants + weight_wants, bool(bias_wants))
        assert (x.grad is not None, layer.weight.grad is not None) == (x_wants, weight_wants)
        assert bias_wants is None or (layer.bias.grad is not None) == bias_wants
        kept = {tuple(tensor.shape) for tensor in saved_by(layer, x) if tensor.is_floating_point() and tensor.dim() > 1}
        assert ((6, 64) in kept) == (weight_wants and backward == "high_precision")
        assert ((48, 64) in kept) == x_wants

    def test_nothing_is_kept_without_gradients(self):
        layer, x = patched_linear(), normal(6, 64).requires_grad_()
        with torch.no_grad():
            assert not layer(x).requires_grad and not saved_by(layer, x)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("backward", "most"), [("quantized", 0.60), ("high_precision", None)])
    def test_bytes_kept_per_activation(self, backward, most, dtype):
        layer, x = patched_linear(1024, 32, dtype=dtype, backward=backward), normal(64, 1024, dtype=dtype)
        kept = sum(t.nbytes for t in saved_by(layer, x.requires_grad_()) if t.shape != layer.weight.shape)
        assert kept <= (most or dtype.itemsize) * x.numel() + 64
        assert kept >= 0.5 * x.numel()

    def test_sgd_moves_a_zero_weight(self):
        layer = patched_linear()
        with torch.no_grad():
            layer.weight.zero_()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(normal(6, 64)).square().sum().backward()
        optimizer.step()
        assert layer.weight.abs().max() > 0 and layer.weight.isfinite().all()


class TestHonesty:
    @pytest.mark.parametrize(
        "settings", [{}, {"global_scale": "amax"}, {"input_scale": "unit"}, {"activations": False}]
    )
    def test_zero_blocks_and_zero_weights_stay_finite(self, settings):
        one_dead_block = patched_linear(**settings)
        with torch.no_grad():
            one_dead_block.weight.mul_(0.2)[7, 16:32] = 0
        zero_weight = patched_linear(**settings)
        with torch.no_grad():
            zero_weight.weight.zero_()
        for layer in (one_dead_block, zero_weight):
            for x in (normal(6, 64) * 1e-2, torch.zeros(6, 64)):
                x.requires_grad_()
                for results in (layer(x), NVFP4Linear.from_linear(layer, retain=False)(x)):
                    assert results.isfinite().all()
                    if layer is zero_weight or not x.any():
                        assert torch.equal(results, layer.bias.expand(6, 48))
                layer.zero_grad()
                layer(x).sum().backward()
                assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("rule", RULES)
    def test_non_finite_input_gives_nan_in_its_row_alone(self, value, rule):
        layer, x = patched_linear(global_scale=rule), normal(6, 64)
        x[0, 0] = 5.0  # the largest element, before and after
        clean = layer(x)
        x[2, 40] = value
        for module in (layer, NVFP4Linear.from_linear(layer, retain=False)):
            y = module(x)
            assert y[2].isnan().all()
            others = torch.arange(6) != 2
            torch.testing.assert_close(y[others], clean[others])

    @pytest.mark.parametrize("rule", RULES)
    def test_tiny_and_huge_input_is_not_lost(self, rule):
        """Inputs of 1e-36 keep the format's error of about 13 %, and one of 1e30 is no infinity."""
        layer, x = patched_linear(bias=False, global_scale=rule), normal(6, 64) * 1e-36
        huge = normal(6, 64)
        huge[2, 40] = 1e30
        for module in (layer, NVFP4Linear.from_linear(layer, retain=False)):
            exact = x.double() @ layer.weight.double().T
            assert rms(module(x).double() - exact) < 0.2 * rms(exact)
            assert module(huge).isfinite().all() and module(huge)[2].abs().max() > 1e28

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_non_finite_weight_gives_nan_in_its_column_alone(self, value):
        layer, x = patched_linear(), normal(6, 64)
        with torch.no_grad():
            layer.weight[11, 3] = value
        for module in (layer, NVFP4Linear.from_linear(layer, retain=False)):
            spoiled = module(x).isnan()
            assert spoiled[:, 11].all() and spoiled.sum() == 6

    def test_layerwise_casting_is_refused_where_it_would_lose_the_master_weight(self):
        layer = patched_linear()
        before = copy.deepcopy(layer.state_dict())
        with pytest.raises(RuntimeError, match="layerwise casting.*freeze it, or qatpatch.deploy"):
            layer.to(torch.float8_e4m3fn)
        assert all(torch.equal(layer.state_dict()[key], before[key]) for key in before)
        layer.requires_grad_(False).to(torch.float8_e4m3fn)
        assert layer.weight.dtype == torch.float8_e4m3fn


class TestPacked:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("columns", [60, 64])
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"global_scale": "amax"},
            {"activations": False},
            {"input_scale": "unit"},
            {"input_scale": "static", "static_scale": 0.0321, "global_scale": "amax"},
            {"backward": "quantized", "bias": False},
        ],
        ids=str,
    )
    def test_equals_the_patched_layer_bit_for_bit(self, settings, columns, dtype):
        layer = patched_linear(columns, dtype=dtype, **settings).eval()
        packed = NVFP4Linear.from_linear(layer, retain=False).eval()
        for shape in ((columns,), (5, columns), (2, 3, columns), (0, columns), (2, 0, columns)):
            x = normal(*shape, dtype=dtype)
            y = packed(x)
            assert y.dtype == dtype and y.shape == (*shape[:-1], 48) and torch.equal(y, layer(x))

    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("columns", [60, 64])
    def test_trained_under_autocast_evaluated_outside(self, columns, rule):
        layer, x = patched_linear(columns, global_scale=rule), normal(7, columns)
        with torch.autocast("cpu", torch.bfloat16):
            layer(x).square().sum().backward()
        torch.optim.SGD(layer.parameters(), lr=1e-3).step()
        layer.eval()
        packed = NVFP4Linear.from_linear(layer, retain=False).eval()
        outside = layer(x)
        assert outside.dtype == torch.float32 and torch.equal(packed(x), outside)
        with torch.autocast("cpu", torch.bfloat16):
            inside = layer(x)
            assert torch.equal(packed(x), inside)
        assert torch.equal(outside.bfloat16(), inside)  # the same operands; the output is rounded once more
        expected = oracle.quantize(layer.weight.detach().bfloat16().float().numpy(), rule=rule)
        assert packed.weight_packed.numpy().tobytes() == expected.packed.tobytes()

    @pytest.mark.parametrize(("rows", "columns"), [(48, 64), (48, 60), (1, 1), (7, 100)])
    def test_storage(self, rows, columns):
        layer = patched_linear(columns, rows)
        dense = weakref.ref(layer.weight)
        packed = NVFP4Linear.from_linear(layer, retain=False)
        expected = oracle.quantize(layer.weight.detach().numpy())
        assert packed.weight_packed.numpy().tobytes() == expected.packed.tobytes()
        assert packed.weight_scale.numpy().tobytes() == expected.scales.tobytes()
        assert packed.weight_global_scale.numpy().tobytes() == expected.global_scale.tobytes()
        buffers = list(packed.buffers())
        assert {b.dtype for b in buffers} == {torch.uint8} and [n for n, _ in packed.named_parameters()] == ["bias"]
        nbytes = sum(b.untyped_storage().nbytes() for b in buffers)
        assert nbytes == nvfp4.packed_nbytes(rows, columns) == rows * -(-columns // 16) * 9 + 4
        del layer
        gc.collect()
        assert dense() is None

    def test_retained_weight(self):
        plain = plain_linear()
        layer, x, block = patch(copy.deepcopy(plain)), normal(6, 64), object()
        packed = NVFP4Linear.from_linear(layer, retain=True)
        assert packed.dense_weight is layer.weight and isinstance(packed.weight, PurgedWeight)
        assert torch.equal(packed(x), layer(x))
        packed.quantization.switch.open(block, linear="dense")
        assert torch.equal(packed(x), plain(x))

    def test_purged_layer_cannot_run_dense(self):
        packed = packed_linear()
        packed.quantization.switch.open(object(), linear="dense")
        with pytest.raises(RuntimeError, match="retain_original_weights=True"):
            packed(normal(6, 64))

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize(
        "convert",
        [
            lambda m: m.to(torch.bfloat16),
            lambda m: m.half(),
            lambda m: m.half().float(),
            lambda m: m.to("cpu", torch.bfloat16),
            lambda m: m.to(memory_format=torch.channels_last),
            lambda m: nn.Sequential(m).bfloat16()[0],
        ],
    )
    def test_conversions_leave_the_packed_weight_alone(self, convert, bias):
        packed, plain = packed_linear(bias=bias), plain_linear(bias=bias)
        before = packed_state(packed)
        packed, dtype = convert(packed), convert(plain).weight.dtype
        assert_packed_unchanged(packed, before)
        x = normal(6, 64, dtype=dtype)
        assert packed.weight.dtype == packed.compute_dtype == packed(x).dtype == dtype
        exact = oracle_values(x) @ oracle_values(plain_linear(bias=bias).weight).T
        if bias:
            assert torch.equal(packed.bias, plain.bias)
            exact += plain.bias.double()
        assert_one_rounding(packed(x), exact)

    def test_layerwise_casting_leaves_the_packed_weight_alone(self):
        packed, x = packed_linear(), normal(6, 64)
        before, y = packed_state(packed), packed(x)
        packed.to(torch.float8_e4m3fn)
        assert_packed_unchanged(packed, before)
        packed.to(torch.float32)
        assert_packed_unchanged(packed, before)
        torch.testing.assert_close(packed(x), y, atol=0.2, rtol=0)  # the bias went through E4M3

    def test_input_and_bias_gradient(self):
        """For adapters on packed layers: dX = dY Wq, db = sum dY."""
        packed, x, dy = packed_linear(60), normal(2, 3, 60).requires_grad_(), normal(2, 3, 48, seed=1)
        packed(x).backward(dy)
        assert torch.equal(x.grad, dy @ oracle_values(plain_linear(60).weight).float())
        assert torch.equal(packed.bias.grad, dy.reshape(-1, 48).sum(0))

    @pytest.mark.parametrize("make", [patched_linear, packed_linear])
    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_are_equal_and_independent(self, clone, make):
        layer, x = make(60), normal(6, 60)
        twin, y = clone(layer), layer(x)
        assert type(twin) is type(layer) and torch.equal(twin(x), y)
        tensors = zip((*layer.parameters(), *layer.buffers()), (*twin.parameters(), *twin.buffers()), strict=True)
        assert all(ours.data_ptr() != theirs.data_ptr() for ours, theirs in tensors)
        with torch.no_grad():
            for tensor in (*twin.parameters(), *twin.buffers()):
                tensor.zero_()
        twin.quantization.settings = LinearSettings(activations=False)
        twin.quantization.switch.open(object(), linear="dense")
        assert torch.equal(layer(x), y) and layer.quantization.mode == "quantized"


class TestPurgedWeight:
    def test_answers_questions(self):
        packed = packed_linear(60, dtype=torch.bfloat16)
        weight = packed.weight
        assert isinstance(weight, PurgedWeight)
        assert (weight.shape, weight.dtype, weight.device) == ((48, 60), torch.bfloat16, torch.device("cpu"))
        assert weight.ndim == 2 and weight.numel() == 2880 and weight.size(1) == 60 and not weight.is_meta
        assert weight.is_floating_point() and not weight.requires_grad and "48, 60" in repr(weight)

    @pytest.mark.parametrize(
        "use",
        [
            lambda w: w + 1,
            lambda w: w.sum(),
            lambda w: w @ torch.ones(64, 2),
            lambda w: nn.functional.linear(torch.ones(2, 64), w),
            lambda w: w.copy_(torch.ones(48, 64)),
            lambda w: w.clone(),
            lambda w: w.float(),
            lambda w: w.add_(1),
            lambda w: torch.cat([w, w]),
            lambda w: w[0],
        ],
    )
    def test_refuses_arithmetic(self, use):
        packed = packed_linear(dtype=torch.bfloat16)
        before = packed_state(packed)
        with pytest.raises(RuntimeError, match="qatpatch.deploy.*retain_original_weights=True"):
            use(packed.weight)
        assert_packed_unchanged(packed, before)

    def test_refuses_a_merge_into_data(self):
        packed = packed_linear()
        before = packed_state(packed)
        with pytest.raises(RuntimeError, match="before deploy.*retain_original_weights=True"):
            packed.weight.data += 1
        with pytest.raises(RuntimeError, match="retain_original_weights=True"):
            packed.reset_parameters()
        with pytest.raises((RuntimeError, AttributeError, KeyError)):
            packed.weight = nn.Parameter(torch.ones(48, 64))
        assert_packed_unchanged(packed, before)

    def test_refuses_new_data(self):
        """Assigned to the stand-in it would be lost without a word."""
        packed = packed_linear()
        with pytest.raises(RuntimeError, match="retain_original_weights=True"):
            packed.weight.data = torch.ones(48, 64)


class TestStateDict:
    def test_there_and_back(self):
        packed, other, x = packed_linear(60), packed_linear(60), normal(6, 60)
        with torch.no_grad():
            for tensor in (*other.parameters(), *other.buffers()):
                tensor.zero_()
        other.load_state_dict(packed.state_dict())
        assert torch.equal(other(x), packed(x))

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("name", MISFITS)
    def test_what_does_not_fit_changes_nothing(self, name, strict):
        packed = packed_linear()
        before, bias = packed_state(packed), packed.bias.detach().clone()
        other = packed_linear()
        with torch.no_grad():
            other.bias.add_(1)
            for buffer in other.buffers():
                buffer.bitwise_xor_(1)
        given = MISFITS[name](other.state_dict())
        for module, prefix in ((packed, ""), (nn.Sequential(packed), "0.")):
            with pytest.raises(RuntimeError, match="Error.s. in loading state_dict"):
                module.load_state_dict({prefix + key: value for key, value in given.items()}, strict=strict)
            assert_packed_unchanged(packed, before)
            assert torch.equal(packed.bias, bias)

    def test_the_error_says_what_fits(self):
        with pytest.raises(
            RuntimeError, match="0 is packed NVFP4.*weight_packed.*has bias, weight. Dense weights do not fit"
        ):
            nn.Sequential(packed_linear()).load_state_dict({"0.weight": torch.ones(48, 64), "0.bias": torch.ones(48)})

    def test_a_layer_that_is_not_named_is_left_alone(self):
        model = nn.Sequential(packed_linear(), nn.LayerNorm(48))
        before = packed_state(model[0])
        model.load_state_dict({"1.weight": torch.ones(48), "1.bias": torch.ones(48)}, strict=False)
        assert_packed_unchanged(model[0], before)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({"1.weight": torch.ones(48), "1.bias": torch.ones(48)})


class TestOperators:
    @pytest.mark.parametrize("scale", [None, torch.tensor(0.0123)], ids=["own", "foreign"])
    @pytest.mark.parametrize("op", [ops.operand, ops.quantize], ids=["operand", "quantize"])
    def test_opcheck_of_quantizers(self, op, scale):
        for x in (normal(2, 5, 60), normal(2, 5, 60, dtype=torch.bfloat16).transpose(0, 1)):
            torch.library.opcheck(op, (x, scale, "amax", KERNEL))

    def test_opcheck_of_packed_operand(self):
        packed = ops.quantize(normal(5, 60), None, "pow2", KERNEL)
        for dtype in DTYPES:
            torch.library.opcheck(ops.packed_operand, (*packed, 60, dtype, "pow2", KERNEL))

    def test_opcheck_of_matmul(self):
        x, weight, scale = normal(2, 5, 60), normal(7, 60), torch.tensor(2.0)
        for bias, dtype in ((None, torch.float32), (normal(7), torch.bfloat16)):
            torch.library.opcheck(ops.matmul, (x, scale, weight, scale, bias, dtype, "pow2", KERNEL))

    @pytest.mark.parametrize("activations", [True, False], ids=["w4a4", "w4a16"])
    @pytest.mark.parametrize("scale", [None, torch.tensor(0.0123)], ids=["own", "foreign"])
    def test_opcheck_of_whole_forwards(self, scale, activations):
        x, weight = normal(2, 5, 60), normal(7, 60, seed=1)
        packed = ops.quantize(weight, None, "pow2", KERNEL)
        for bias, dtype in ((None, torch.float32), (normal(7), torch.bfloat16)):
            rest = bias, scale, activations, dtype, "pow2", KERNEL
            torch.library.opcheck(ops.linear, (x, weight, *rest))
            torch.library.opcheck(ops.packed_linear, (x, *packed, *rest))

    @pytest.mark.parametrize("settings", [{}, {"backward": "quantized"}, {"activations": False}], ids=str)
    def test_eager_leaves_the_dispatcher_out_and_changes_nothing(self, settings):
        """A dispatch mode sees the operators; nothing else does, and the bits are the same."""
        layer, x = patched_linear(60, **settings), normal(2, 5, 60).requires_grad_()
        packed, called = NVFP4Linear.from_linear(layer, retain=False), _Called()
        plain = (*_gradients(layer, x), packed(x))
        with called:
            moded = (*_gradients(layer, x), packed(x))
        assert all(torch.equal(a, b) for a, b in zip(plain, moded, strict=True))
        wanted = {"packed_linear", "matmul" if settings.get("backward") else "linear"}
        assert wanted <= called.names
        assert ops.calls(x, layer.weight) is not ops.calls(x.to("meta"), layer.weight.to("meta"))

    def test_forward_mode_derivatives_are_refused(self):
        """Neither layer has them, with gradients off too: never a result without its tangent."""
        x = normal(5, 60)
        for module in (patched_linear(60), packed_linear(60)):
            with torch.no_grad(), forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
                module(forward_ad.make_dual(x, x))

    @pytest.mark.parametrize("rule", RULES)
    def test_operand_equals_the_packed_operand(self, rule):
        x = normal(4, 60, dtype=torch.bfloat16)
        operand, scale = ops.operand(x, None, rule, KERNEL)
        packed = ops.quantize(x, None, rule, KERNEL)
        assert torch.equal(ops.packed_operand(*packed, 60, x.dtype, rule, KERNEL), operand)
        assert torch.equal(packed[2], scale)
        assert torch.equal(operand.double() * scale.double(), oracle_values(x, rule=rule))


class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("backward", ["high_precision", "quantized"])
    def test_training_equals_eager(self, backward, autocast):
        results = []
        for compiled in (False, True):
            layer, x = patched_linear(60, backward=backward), normal(2, 5, 60).requires_grad_()
            run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = run(x)
            y.backward(normal(2, 5, 48, seed=1).to(y.dtype))
            results.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*results, strict=True))

    @pytest.mark.parametrize(
        "settings",
        [{}, {"activations": False}, {"input_scale": "static", "static_scale": 0.0321, "global_scale": "amax"}],
        ids=str,
    )
    def test_evaluation_equals_eager(self, settings):
        layer, x = patched_linear(60, **settings).eval(), normal(2, 5, 60)
        packed = NVFP4Linear.from_linear(layer, retain=False)
        for module in (layer, packed):
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    y = compiled(x)
                assert torch.equal(y, module(x)) and torch.equal(y, layer(x))
