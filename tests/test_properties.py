"""Laws that hold for any input: of the format, over anything a tensor may be; of the public calls, in any order.

The laws of the format compare quantizations with each other, not with a second implementation (test_nvfp4 does that).
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import qatpatch
from qatpatch import CheckpointError, KernelUnavailable, PlanError, Profile, Rule, nvfp4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def tensors(draw, *, non_finite=False, dtypes=DTYPES):
    """(..., K) tensors of any strides, subnormal to 1e30, with zero blocks and outliers."""
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 70))
    dtype = draw(st.sampled_from(dtypes))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = random.standard_normal((*batch, rows, columns))
    largest = 4 if dtype is torch.float16 else 30
    kind = draw(st.sampled_from(("even", "rows", "elements", "sparse")))
    size = 10.0 ** draw(st.integers(-44, largest))
    if kind == "rows":
        x *= 10.0 ** random.integers(-6, 7, (*batch, rows, 1))
    elif kind == "elements":
        x *= np.exp(3 * random.standard_normal(x.shape))
    elif kind == "sparse":
        x *= random.random(x.shape) < 0.1
    x = torch.from_numpy(np.clip(x * size, -3e38, 3e38)).to(torch.float32)
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    if non_finite:
        flat = x.view(-1)
        for _ in range(draw(st.integers(0, 3))):
            bad = draw(st.sampled_from((float("nan"), float("inf"), -float("inf"))))
            flat[draw(st.integers(0, flat.numel() - 1))] = bad
    layout = draw(st.sampled_from(("plain", "transposed", "strided", "offset")))
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "offset":
        return torch.nn.functional.pad(x, (3, 5))[..., 3:-5]
    return x


def same(a: nvfp4.NVFP4Tensor, b: nvfp4.NVFP4Tensor) -> bool:
    return (
        torch.equal(a.packed, b.packed)
        and torch.equal(a.block_scale.view(torch.uint8), b.block_scale.view(torch.uint8))
        and torch.equal(a.global_scale, b.global_scale)
        and a.shape == b.shape
    )


class TestFormat:
    @FEW
    @given(tensors(non_finite=True))
    def test_strides_are_no_part_of_the_numbers(self, x):
        assert same(nvfp4.quantize(x), nvfp4.quantize(x.contiguous()))

    @FEW
    @given(tensors(non_finite=True))
    def test_shapes_and_dtypes(self, x):
        q = nvfp4.quantize(x)
        padded = -(-x.shape[-1] // 16) * 16
        assert q.packed.shape == (*x.shape[:-1], padded // 2) and q.packed.dtype is torch.uint8
        assert q.block_scale.shape == (*x.shape[:-1], padded // 16) and q.block_scale.dtype is torch.float8_e4m3fn
        assert q.global_scale.shape == () and q.global_scale.dtype is torch.float32
        for dtype in DTYPES:
            y = nvfp4.dequantize(q, dtype=dtype)
            assert y.shape == x.shape and y.dtype is dtype

    @FEW
    @given(tensors())
    def test_the_error_of_an_element_is_bounded_by_its_block(self, x):
        x = x.float()
        q = nvfp4.quantize(x)
        y = nvfp4.dequantize(q)
        assert torch.isfinite(y).all()
        blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
        amax = blocks.abs().amax(-1, keepdim=True).double()
        step = q.global_scale.double() * 2.0**-9  # the smallest block scale above 0
        # The grid is at most 2 apart at 6, a rounded scale at most 1/16 off, and below its smallest step all is lost.
        bound = amax * (1 / 6 + 1 / 16) + 6 * step + 1e-45
        # Below 2^-128 a scale has no finite reciprocal, the format clamps it, and values shrink; none grows.
        scale = q.block_scale.double()[..., None] * q.global_scale.double()
        bound = torch.where(scale < 2.0**-127, amax.maximum(bound), bound)
        error = (torch.nn.functional.pad(y, (0, -y.shape[-1] % 16)).unflatten(-1, (-1, 16)).double() - blocks).abs()
        assert (error <= bound).all()

    @FEW
    @given(tensors())
    def test_signs_are_independent_of_magnitudes(self, x):
        q, mirrored = nvfp4.quantize(x), nvfp4.quantize(-x)
        assert torch.equal(q.block_scale.view(torch.uint8), mirrored.block_scale.view(torch.uint8))
        assert torch.equal(nvfp4.dequantize(q), -nvfp4.dequantize(mirrored))

    @FEW
    @given(tensors(dtypes=(torch.float32,)), st.integers(-20, 20))
    def test_powers_of_two_move_through_the_global_scale(self, x, exponent):
        amax = x.abs().max().item()
        assume(1e-25 < amax < 1e25)
        q, moved = nvfp4.quantize(x), nvfp4.quantize(x * 2.0**exponent)
        assume((x * 2.0**exponent / 2.0**exponent == x).all())  # subnormal elements lose bits by the multiplication
        assert torch.equal(q.packed, moved.packed)
        assert torch.equal(q.block_scale.view(torch.uint8), moved.block_scale.view(torch.uint8))
        assert moved.global_scale == q.global_scale * 2.0**exponent

    @FEW
    @given(tensors(non_finite=True), st.randoms(use_true_random=False))
    def test_rows_do_not_know_each_other(self, x, random):
        order = list(range(x.shape[-2]))
        random.shuffle(order)
        permuted, q = nvfp4.quantize(x[..., order, :]), nvfp4.quantize(x)
        assert torch.equal(permuted.packed, q.packed[..., order, :])

    @FEW
    @given(tensors(non_finite=True))
    def test_what_is_not_finite_stays_in_its_block_and_visible(self, x):
        y = nvfp4.dequantize(nvfp4.quantize(x))
        pad = (0, -x.shape[-1] % 16)
        bad = (~torch.isfinite(torch.nn.functional.pad(x, pad))).unflatten(-1, (-1, 16)).any(-1, keepdim=True)
        shown = ~torch.isfinite(torch.nn.functional.pad(y, pad)).unflatten(-1, (-1, 16))
        inside = torch.nn.functional.pad(torch.ones_like(y), pad).bool().unflatten(-1, (-1, 16))
        assert torch.equal(shown & inside, bad & inside)
        clean = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
        untouched = ~bad.expand_as(inside).flatten(-2)[..., : x.shape[-1]]
        assert torch.equal(y[untouched], nvfp4.dequantize(nvfp4.quantize(clean))[untouched])

    @FEW
    @given(tensors(), st.sampled_from(("pow2", "amax")))
    def test_the_straight_through_gradient_is_the_gradient(self, x, rule_):
        x = x.detach().clone().requires_grad_()
        y = qatpatch.fake_quantize(x, global_scale=nvfp4.quantize(x.detach()).global_scale)
        assert y.dtype is x.dtype and y.shape == x.shape
        gradient = torch.randn_like(y)
        y.backward(gradient)
        assert torch.equal(x.grad, gradient)


def refusals() -> tuple[type[BaseException], ...]:
    return PlanError, KernelUnavailable, CheckpointError


class Branch(nn.Module):
    """Linears one after another; widths fit because each is followed by a pad or cut to ``width``."""

    def __init__(self, width: int, names_and_layers: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.width = width
        for name, layer in names_and_layers:
            self.add_module(name, layer)

    def forward(self, x):
        for layer in self.children():
            y = layer(x if isinstance(layer, Branch) else x[..., : layer.in_features])
            x = x + torch.nn.functional.pad(y, (0, self.width - y.shape[-1]))
        return x


NAMES = ("to_q", "0", "weight_", "linear", "proj-out", "a b", "blocks", "gate", "лин", "base_layer", "x" * 60)


@st.composite
def trees(draw):
    """A module tree with layers of odd sizes, shared layers, tied weights, odd names, frozen parts."""
    width = draw(st.sampled_from((24, 32, 40)))
    torch.manual_seed(draw(st.integers(0, 1000)))
    layers: list[nn.Linear] = []

    def layer() -> nn.Linear:
        if layers and draw(st.integers(0, 4)) == 0:
            return draw(st.sampled_from(layers))
        made = nn.Linear(draw(st.integers(1, width)), draw(st.integers(1, width)), bias=draw(st.booleans()))
        twins = [other for other in layers if other.weight.shape == made.weight.shape]
        if twins and draw(st.booleans()):
            made.weight = twins[0].weight
        made.requires_grad_(draw(st.integers(0, 3)) > 0)
        layers.append(made)
        return made

    def branch(depth: int) -> Branch:
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
        inner = depth < 2
        return Branch(width, [(n, branch(depth + 1) if inner and draw(st.booleans()) else layer()) for n in names])

    tree = branch(0)
    if not layers:
        tree.add_module("last", layer())
    return tree.to(draw(st.sampled_from((torch.float32, torch.bfloat16))))


EVERYTHING = Profile(name="everything", rules=(Rule(match="*", action="linear"),))


def bits(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees())
def test_apply_and_remove_over_any_tree(tree):
    x = torch.randn(3, tree.width).to(next(tree.parameters()).dtype)
    before, keys = bits(tree, x), list(tree.state_dict())
    classes = {name: type(m) for name, m in tree.named_modules(remove_duplicate=False)}
    parameters = {name: (id(p), p.requires_grad) for name, p in tree.named_parameters(remove_duplicate=False)}
    report = qatpatch.apply(tree, EVERYTHING, attention=False)
    assert {id(tree.get_submodule(n)) for n in report.linears} == {
        id(m) for m in tree.modules() if isinstance(m, nn.Linear)
    }
    out = tree(x.clone().requires_grad_())
    out.float().sum().backward()
    wanted = {n for n, p in tree.named_parameters() if p.requires_grad}
    assert {n for n, p in tree.named_parameters() if p.grad is not None} == wanted
    assert list(tree.state_dict()) == keys
    qatpatch.remove(tree)
    assert {name: type(m) for name, m in tree.named_modules(remove_duplicate=False)} == classes
    assert {n: (id(p), p.requires_grad) for n, p in tree.named_parameters(remove_duplicate=False)} == parameters
    assert torch.equal(bits(tree, x), before)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees())
def test_deploy_keeps_the_numbers_of_any_tree(tree):
    dtype = next(tree.parameters()).dtype
    x = torch.randn(3, tree.width).to(dtype)
    qatpatch.apply(tree, EVERYTHING, attention=False)
    tree.eval()
    quantized = bits(tree, x)
    qatpatch.deploy(tree)
    assert torch.equal(bits(tree, x), quantized)
    # No dense weight is left under any name.
    assert not [name for name, _ in tree.named_parameters(remove_duplicate=False) if name.endswith(".weight")]


class AnyOrder(RuleBasedStateMachine):
    """The public calls in any order: each works or raises a named error, and the model stays usable."""

    @initialize(tree=trees())
    def begin(self, tree):
        self.model, self.x = tree, torch.randn(2, tree.width).to(next(tree.parameters()).dtype)
        self.original = bits(self.model, self.x)
        self.keys = list(self.model.state_dict())
        self.deployed = self.retained = self.patched = self.trained = self.static = False

    def attempt(self, call):
        """The call's result, or None where it refused; any other error ends the test."""
        try:
            return call()
        except refusals() as error:
            assert len(str(error)) > 20  # a sentence, not a word
        except RuntimeError as error:
            self.expect_uncalibrated(error)
        return None

    def expect_uncalibrated(self, error):
        assert self.patched and self.static and "calibrate" in str(error), error

    @rule(static=st.booleans(), rule_=st.sampled_from(("pow2", "amax")), activations=st.booleans())
    def apply(self, static, rule_, activations):
        scale = "static" if static and activations else "dynamic"
        done = self.attempt(
            lambda: qatpatch.apply(
                self.model, EVERYTHING, input_scale=scale, global_scale=rule_, activations=activations, attention=False
            )
        )
        assert (done is not None) == (not self.patched)
        if done is not None:
            self.patched, self.static = True, scale == "static"

    @rule()
    def remove(self):
        done = self.attempt(lambda: qatpatch.remove(self.model) or True)
        assert (done is not None) == (self.patched and (not self.deployed or self.retained))
        if done is not None:
            self.patched = self.deployed = False

    @rule(retain=st.booleans())
    def deploy(self, retain):
        done = self.attempt(lambda: qatpatch.deploy(self.model, retain_original_weights=retain))
        if done is not None:
            assert self.patched and not self.deployed
            self.deployed = True
            self.retained = retain

    @rule()
    def calibrate(self):
        def run():
            with qatpatch.calibrate(self.model):
                bits(self.model, self.x)
            return True

        self.attempt(run)

    @rule(kind=st.sampled_from(("dense", "infer_attention", "reuse_weights", "stage")))
    def block(self, kind):
        arguments = ("base",) if kind == "stage" else ()

        def run():
            with getattr(qatpatch, kind)(self.model, *arguments):
                return bits(self.model, self.x)

        out = self.attempt(run)
        if out is not None and kind == "dense" and not self.trained:
            assert torch.equal(out, self.original)

    @rule()
    def copy(self):
        twin = copy.deepcopy(self.model)
        assert qatpatch.is_patched(twin) == qatpatch.is_patched(self.model)

    @rule()
    def state(self):
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(state)

    @precondition(lambda self: not self.deployed)
    @rule()
    def train(self):
        if not [p for p in self.model.parameters() if p.requires_grad]:
            return
        optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        try:
            self.model(self.x).float().square().mean().backward()
        except RuntimeError as error:
            self.expect_uncalibrated(error)
            return
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.trained = True

    @rule(toggle=st.booleans())
    def mode(self, toggle):
        self.model.train(toggle)

    @invariant()
    def is_usable(self):
        if not hasattr(self, "model"):
            return
        assert qatpatch.is_patched(self.model) == self.patched
        try:
            out = bits(self.model, self.x)
        except RuntimeError as error:
            self.expect_uncalibrated(error)
            return
        assert out.shape == self.original.shape and out.dtype is self.original.dtype
        assert torch.isfinite(out).all()
        if not self.patched and not self.trained:
            assert torch.equal(out, self.original)
        if not self.deployed:
            assert list(self.model.state_dict()) == self.keys


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=150, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_deployed_tree_refuses_dense_and_remove_with_the_way_out():
    tree = Branch(32, [("a", nn.Linear(32, 32))])
    qatpatch.apply(tree, EVERYTHING, attention=False)
    qatpatch.deploy(tree)
    for call in (lambda: qatpatch.remove(tree), lambda: qatpatch.dense(tree).__enter__()):
        with pytest.raises(PlanError, match="retain_original_weights"):
            call()
