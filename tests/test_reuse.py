"""Reuse of quantized weights and inputs: nothing stale whatever is written how, and nothing done twice."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs
from torch import nn
from torch.utils.checkpoint import checkpoint

import qatpatch
from qatpatch import nvfp4, reuse
from qatpatch.kernels import reference_nvfp4
from qatpatch.linear import QATLinear
from qatpatch.linear_state import LinearSettings, LinearState

MODELS = {"ltx2": (tiny_ltx2, ltx2_inputs), "wan": (tiny_wan, wan_inputs)}
EVERY_LINEAR = qatpatch.Profile(name="every linear", rules=(qatpatch.Rule(match=("*",), action="linear"),))


@pytest.fixture
def quantized(monkeypatch):
    """The shapes that the reference kernels quantize, in order."""
    shapes = []
    real = reference_nvfp4.nvfp4.round_to_nvfp4

    def noted(x, *args, **kwargs):
        shapes.append(tuple(x.shape))
        return real(x, *args, **kwargs)

    monkeypatch.setattr(reference_nvfp4.nvfp4, "round_to_nvfp4", noted)
    return shapes


def small(checkpointed=False, **settings):
    """Two linears of 32 x 16 and 16 x 32, patched; their weights' shapes tell them from their inputs."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

        def body(self, x):
            return self.second(self.first(x))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=checkpointed == "reentrant") if checkpointed else self.body(x)

    torch.manual_seed(0)
    net = Net()
    qatpatch.apply(net, EVERY_LINEAR, **settings)
    return net, torch.randn(5, 16, requires_grad=True)


WEIGHTS = ((32, 16), (16, 32))


def weights_in(shapes):
    return [shape for shape in shapes if shape in WEIGHTS]


@pytest.mark.parametrize("checkpointed", ["reentrant", "not reentrant"])
def test_a_recomputation_does_not_quantize_weights_again(quantized, checkpointed):
    net, x = small(checkpointed)
    net(x).sum().backward()
    assert len(weights_in(quantized)) == 4  # forward and recomputation
    expected = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    quantized.clear()
    with qatpatch.reuse_weights(net) as kept:
        net(x).sum().backward()
        assert sorted(weights_in(quantized)) == sorted(WEIGHTS) and len(kept) == 2
    assert all(torch.equal(p.grad, expected[name]) for name, p in net.named_parameters())


def through_data(weight):
    weight.data.mul_(-1.5)


def through_a_view_of_data(weight):
    weight.data.view(-1)[7] += 3.0


def through_storage(weight):
    torch.tensor([], dtype=weight.dtype).set_(weight.untyped_storage())[3] = 9.0


def through_numpy(weight):
    weight.detach().numpy()[1, 1] = -4.0


def by_new_data(weight):
    weight.data = torch.randn_like(weight)


def by_an_optimizer(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()


def of_a_sign_of_zero(weight):
    weight.data[0, 0] = -0.0 if not weight.data[0, 0].signbit() else 0.0


@pytest.mark.parametrize(
    "write",
    [
        through_data, through_a_view_of_data, through_storage, through_numpy, by_new_data, by_an_optimizer,
        of_a_sign_of_zero,
    ],
)  # fmt: skip
def test_no_write_leaves_a_stale_weight(write):
    net, x = small()
    with torch.no_grad():
        net.first.weight[0, 0] = 0.0
    with qatpatch.reuse_weights(net):
        for _ in range(2):
            net(x)
        write(net.first.weight)
        found = net(x)
    assert torch.equal(found, net(x))


def test_a_write_between_forward_and_recomputation_is_seen():
    net, x = small("not reentrant")
    with qatpatch.reuse_weights(net):
        out = net(x)
        net.first.weight.data.mul_(2.0)
        out.sum().backward()
    rounded = [nvfp4.dequantize(nvfp4.quantize(t.detach())) for t in (x, net.first.weight)]
    hidden = nn.functional.linear(*rounded, net.first.bias.detach())
    # High-precision backward: the weight gradient of the second layer is dY^T (its recomputed input).
    torch.testing.assert_close(net.second.weight.grad, torch.ones(5, 16).T @ hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", MODELS)
def test_validation_quantizes_each_weight_once_and_changes_no_bit(family, quantized):
    make, inputs = MODELS[family]
    model = make()
    data = inputs(model)
    report = qatpatch.apply(model)
    expected = run(model, data)
    weights = {tuple(model.get_submodule(name).weight.shape) for name in report.linears}
    quantized.clear()
    with qatpatch.infer_attention(model):
        first = run(model, data)
        assert len(quantized) > len(report.linears)
        quantized.clear()
        again = run(model, data)
        inputs_only = len(quantized)
    assert torch.equal(first, expected) and torch.equal(again, expected)
    quantized.clear()
    with qatpatch.infer_attention(model, memory_limit=0):
        assert torch.equal(run(model, data), expected)
    assert len(quantized) == inputs_only + len(report.linears), weights


def test_memory_is_bounded_and_freed():
    net, x = small()
    with qatpatch.reuse_weights(net, memory_limit=6000) as kept:
        net(x)
        # In the reference: the weight, its operand (each 4 bytes an element) and the scale.
        assert len(kept) == 1 and kept.nbytes == 32 * 16 * 8 + 4
        (entry,) = [e for e in kept._kept.values() if e is not None]
        operand = weakref.ref(entry._made[1][0])
        del entry
    gc.collect()
    assert operand() is None and len(kept) == 0 and kept.nbytes == 0
    with qatpatch.reuse_weights(net, memory_limit=0) as kept:
        net(x)
        assert len(kept) == 0
    for limit in (-1, 0.5):
        with pytest.raises(ValueError, match="number of bytes"), qatpatch.reuse_weights(net, memory_limit=limit):
            pass
    with pytest.raises(qatpatch.PlanError, match="not patched"), qatpatch.reuse_weights(nn.Linear(2, 2)):
        pass


def test_scopes_nest_and_copies_start_without_one():
    net, x = small()
    with qatpatch.reuse_weights(net) as outer:
        with qatpatch.reuse_weights(net, memory_limit=0) as inner:
            net(x)
            assert len(inner) == 0 and len(outer) == 0
        twin = copy.deepcopy(net)
        twin(x)
        assert len(outer) == 0
        net(x)
        assert len(outer) == 2
    assert net.first.quantization.switch.weights is None and twin.first.quantization.switch.weights is None


def test_dtypes_and_autocast_have_their_own(quantized):
    net, x = small()
    with torch.no_grad():
        full = net(x)
        with torch.autocast("cpu", torch.bfloat16):
            half = net(x)
        with qatpatch.reuse_weights(net) as kept:
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    assert torch.equal(net(x), half)
            net.train()
            assert len(kept) == 2
    assert full.dtype == torch.float32 and half.dtype == torch.bfloat16


class Attention(nn.Module):
    """q, k and v of one input, as every attention has them."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(16, 32) for _ in range(3))
        self.to_out = nn.Linear(96, 16)

    def forward(self, x, context=None):
        context = x if context is None else context
        return self.to_out(torch.cat([self.to_q(x), self.to_k(context), self.to_v(context)], -1))


def attention(**settings):
    torch.manual_seed(0)
    net = nn.ModuleDict({"attn": Attention()})
    qatpatch.apply(net, EVERY_LINEAR, **settings)
    return net, torch.randn(7, 16)


def inputs_in(shapes):
    return shapes.count((7, 16))


@pytest.mark.parametrize("backward", ["high_precision", "quantized"])
def test_q_k_and_v_quantize_their_input_once(quantized, backward):
    net, x = attention(backward=backward)
    x.requires_grad_()
    out = net["attn"](x)
    if backward == "high_precision":
        assert inputs_in(quantized) == 1
    grads = torch.autograd.grad(out.sum(), (x, *net.parameters()))
    for name in ("to_q", "to_k", "to_v"):
        net["attn"].get_submodule(name).quantization.shares_input = False
    quantized.clear()
    apart = net["attn"](x)
    assert torch.equal(apart, out)
    if backward == "high_precision":
        assert inputs_in(quantized) == 3
    for found, wanted in zip(grads, torch.autograd.grad(apart.sum(), (x, *net.parameters())), strict=True):
        assert torch.equal(found, wanted)


def test_cross_attention_shares_between_k_and_v(quantized):
    net, x = attention()
    net["attn"](x, torch.randn(7, 16))
    assert inputs_in(quantized) == 2


def test_deployed_layers_share_too(quantized, tmp_path):
    net, x = attention()
    with torch.no_grad():
        expected = net["attn"](x)
        qatpatch.deploy(net)
        quantized.clear()
        assert torch.equal(net["attn"](x), expected)
    assert inputs_in(quantized) == 1


def in_place(x):
    x.mul_(2.0)


@pytest.mark.parametrize("write", [in_place, through_data, through_numpy])
def test_the_next_call_sees_a_written_input(write):
    net, x = attention()
    with torch.no_grad():
        net["attn"](x)
        write(x)
        found = net["attn"](x)
        assert torch.equal(found, net["attn"](x.clone()))


def test_an_input_changed_in_place_between_q_and_k_is_quantized_again(quantized):
    net, x = attention()
    with torch.no_grad():
        net["attn"].to_q(x)
        x.mul_(3.0)
        found = net["attn"].to_k(x)
        assert inputs_in(quantized) == 2
        assert torch.equal(found, net["attn"].to_k(x.clone()))


def test_a_quantized_input_lives_no_longer_than_the_input():
    net, x = attention()
    with torch.no_grad():
        net["attn"].to_q(x)
        shared = net["attn"].to_q.quantization.switch.input
        operand = weakref.ref(shared._last[3][0])
        assert operand() is not None
        del x
        gc.collect()
        assert operand() is None and shared._last is None


def test_settings_keep_inputs_apart(quantized):
    net, x = attention()
    state = net["attn"].to_k.quantization
    state.settings = LinearSettings(input_scale="unit")
    with torch.no_grad():
        found = net["attn"].to_q(x), net["attn"].to_k(x)
    assert inputs_in(quantized) == 2
    state.shares_input = False
    with torch.no_grad():
        assert torch.equal(net["attn"].to_k(x), found[1])


def test_inference_tensors_have_no_version_and_are_quantized_each_time(quantized):
    net, _ = attention()
    with torch.inference_mode():
        x = torch.randn(7, 16)
        net["attn"](x)
    assert inputs_in(quantized) == 3


def test_two_threads_with_one_model():
    net, _ = attention()
    data = [torch.randn(7, 16) for _ in range(2)]
    with torch.no_grad():
        expected = [net["attn"](x) for x in data]
    wrong = []

    def work(x, wanted):
        with torch.no_grad():
            for _ in range(200):
                if not torch.equal(net["attn"](x), wanted):
                    wrong.append(1)

    with qatpatch.reuse_weights(net):
        threads = [threading.Thread(target=work, args=pair) for pair in zip(data, expected, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "path, group",
    [
        ("blocks.3.attn1.to_q", "blocks.3.attn1"),
        ("blocks.3.attn1.to_v.base_layer", "blocks.3.attn1"),
        ("blocks.3.attn1.to_out.0", None),
        ("blocks.3.ffn.net.2", None),
        ("blocks.3.self_attn.q", "blocks.3.self_attn"),
        ("to_k", ""),
    ],
)
def test_groups(path, group):
    assert reuse.input_group(path) == group


def test_a_state_without_a_group_shares_nothing(quantized):
    linear = nn.Linear(16, 32)
    linear.quantization = LinearState(LinearSettings())
    linear.__class__ = QATLinear
    x = torch.randn(7, 16)
    with torch.no_grad():
        linear(x)
    assert linear.quantization.switch.input._last is None
