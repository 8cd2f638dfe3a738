"""Masks and kernels that take none: read once a model call, honoured wherever they mask, and nothing left behind."""

from __future__ import annotations

import copy
import dataclasses
import io
import sys
import types

import pytest
import torch
from models import ltx2_inputs, run, tiny_ltx2
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import qatpatch
from qatpatch import KernelUnavailable, attention, kernels
from qatpatch.kernels import Kernel, reference_attention
from qatpatch.masks import mask_nothing

ATTENTION = "transformer_blocks.{}.attn{}"


@pytest.fixture
def maskless(monkeypatch):
    """A native row for the CPU that takes no mask; its module counts calls."""
    module = types.ModuleType("kernel_without_masks")
    module.calls = 0

    def forward(q, k, v, *, scheme, scale, attn_mask=None, train):
        assert attn_mask is None and not train
        module.calls += 1
        return reference_attention.forward(q, k, v, scheme=scheme, scale=scale, train=False)

    module.forward = forward
    row = Kernel(
        name="maskless",
        op="attention",
        stages=("infer",),
        schemes=("sage3",),
        module=module.__name__,
        native=True,
        device_types=("cpu",),
        head_dims=(64, 128),
        honours_masks=False,
        returns_lse=False,
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kernels, "TABLE", (row, *kernels.TABLE))
    monkeypatch.setitem(kernels._BY_NAME, row.name, row)
    kernels.resolve("attention", stage="infer", scheme="sage3", device="cpu")  # proven here, not in a counted call
    module.calls = 0
    return module


@pytest.fixture
def ltx2():
    model = tiny_ltx2()
    data = ltx2_inputs(model)
    qatpatch.apply(model)
    return model, data


def padded(data, length=5):
    """The same inputs with the text masked from `length` on."""
    mask = torch.ones_like(data["encoder_attention_mask"])
    mask[:, length:] = 0
    return {**data, "encoder_attention_mask": mask}


class Syncs(TorchDispatchMode):
    """Counts values read by the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def hooks(model):
    found = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())
    return sum(type(hook).__name__ in ("MaskEntry", "MaskExit") for hook in found)


def test_a_mask_of_ones_leaves_every_attention_on_the_kernel(ltx2, maskless):
    model, data = ltx2
    expected = run(model, data)
    with qatpatch.infer_attention(model) as receipt:
        assert torch.equal(run(model, data), expected)
        run(model, data)
    assert receipt.kernel == "maskless" and receipt.native and maskless.calls == 8
    assert (receipt.masks.calls, receipt.masked_calls) == (2, 0)
    assert "masks that mask something: in 0 of 2 model calls" in str(receipt)


@pytest.mark.parametrize("kernel", [None, "native", "maskless"])
def test_a_mask_that_masks_is_honoured_by_the_layers_that_are_given_it(ltx2, maskless, kernel):
    model, data = ltx2
    data = padded(data)
    expected = run(model, data)
    assert not torch.equal(expected, run(model, padded(data, 12)))
    with qatpatch.infer_attention(model, kernel=kernel) as receipt:
        assert torch.equal(run(model, data), expected)
        assert maskless.calls == 2  # attn1 of both blocks
        # What was decided holds for one call.
        assert torch.equal(run(model, padded(data, 12)), run(model, {**data, "encoder_attention_mask": None}))
    assert receipt.kernel == "maskless" and (receipt.masks.calls, receipt.masked_calls) == (3, 1)
    assert maskless.calls == 2 + 4 + 4


def test_masked_text_never_changes_the_output(ltx2, maskless):
    model, data = ltx2
    data = padded(data)
    other = {**data, "encoder_hidden_states": data["encoder_hidden_states"].clone()}
    other["encoder_hidden_states"][:, 5:] = 100.0
    with qatpatch.infer_attention(model):
        assert torch.equal(run(model, data), run(model, other))


def test_masks_by_position_booleans_and_zeros(ltx2, maskless):
    model, data = ltx2
    names = ["hidden_states", "audio_hidden_states", "encoder_hidden_states", "audio_encoder_hidden_states", "timestep"]
    with qatpatch.infer_attention(model) as receipt:
        data["encoder_attention_mask"] = data["encoder_attention_mask"].bool()
        run(model, data)
        assert maskless.calls == 4
        zeros = torch.zeros(1, 1, 12)  # an additive mask that masks nothing: honoured all the same
        run(model, {**data, "encoder_attention_mask": zeros})
        assert maskless.calls == 6 and receipt.masked_calls == 1
        with torch.no_grad():
            named = {k: v for k, v in data.items() if k not in names}
            model(*(data[name] for name in names), **named)
        assert maskless.calls == 10


def test_one_synchronisation_a_call_and_none_where_the_kernel_honours_masks(ltx2, request):
    model, data = ltx2
    with qatpatch.infer_attention(model) as receipt, Syncs() as plain:
        run(model, data)
    assert receipt.masks is None and not hooks(model)
    request.getfixturevalue("maskless")
    with qatpatch.infer_attention(model), Syncs() as syncs:
        run(model, data)
        run(model, padded(data))
    assert syncs.count - 2 * plain.count == 2


def test_hooks_are_there_only_while_they_are_needed(ltx2, maskless):
    model, data = ltx2
    assert not hooks(model)
    a, b = qatpatch.infer_attention(model), qatpatch.infer_attention(model)
    a.__enter__()
    b.__enter__()
    assert hooks(model) == 2
    a.__exit__(None, None, None)
    assert hooks(model) == 2
    b.__exit__(None, None, None)
    assert not hooks(model)
    with pytest.raises(KeyError), qatpatch.infer_attention(model):
        raise KeyError
    assert not hooks(model)
    with qatpatch.infer_attention(model, kernel="reference_attention"):
        assert not hooks(model)


def test_a_call_that_fails_leaves_no_decision(ltx2, maskless):
    model, data = ltx2
    switch = model._qatpatch.switch
    with qatpatch.infer_attention(model):
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            run(model, {**data, "hidden_states": torch.zeros(1, 2, 3, 4, 5)})
        assert switch.masks.calls == 1 and not switch.unmasked


def test_deployed_models_decide_too_and_lose_the_hooks_with_the_patch(ltx2, maskless):
    model, data = ltx2
    expected, expected_masked = run(model, data), run(model, padded(data))
    report = qatpatch.deploy(model, retain_original_weights=True)
    assert report.kernels[ATTENTION.format(0, 1)].name == "maskless" and hooks(model) == 2
    assert torch.equal(run(model, data), expected) and maskless.calls == 4
    assert torch.equal(run(model, padded(data)), expected_masked) and maskless.calls == 6
    assert qatpatch.report(model).masked_calls == 1
    with qatpatch.infer_attention(model):
        run(model, data)
    assert hooks(model) == 2
    qatpatch.remove(model)
    assert not hooks(model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_on_a_deployed_model_train_with_the_mask(ltx2, maskless, checkpointing):
    """A recomputation comes when the call is over: it must meet the mask that its forward met."""
    model, data = ltx2
    qatpatch.deploy(model)
    model.train()
    grads = []
    for name in (None, "reference_attention"):
        for module in (block.attn2 for block in model.transformer_blocks):
            state = module.processor.quantization
            state.deployed = dataclasses.replace(state.deployed, kernel=name)
        if checkpointing:
            model.enable_gradient_checkpointing()
        x = data["hidden_states"].clone().requires_grad_()
        model(**{**data, "hidden_states": x})[0].square().sum().backward()
        grads.append(x.grad)
    assert maskless.calls == 0 and torch.equal(*grads) and grads[0].any()


def test_nothing_is_read_from_fake_tensors(ltx2, maskless):
    model, data = ltx2
    with qatpatch.infer_attention(model) as receipt, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in data.items()}
        assert run(model, fake).shape == data["hidden_states"].shape
    assert receipt.masks.calls == 0


def test_copies_and_files_decide_for_themselves(ltx2, maskless, tmp_path):
    model, data = ltx2
    qatpatch.deploy(model)
    expected = run(model, padded(data))
    twin = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    qatpatch.save(model, tmp_path)
    for other in (twin, torch.load(buffer, weights_only=False), qatpatch.load(tmp_path)):
        maskless.calls = 0
        assert torch.equal(run(other, padded(data)), expected) and maskless.calls == 2
        assert other._qatpatch.switch.masks.masked == 1
    assert model._qatpatch.switch.masks.masked == 1


def test_without_names_of_arguments_every_mask_is_honoured(maskless):
    model = tiny_ltx2()
    data = ltx2_inputs(model)
    rules = (
        qatpatch.Rule(match="transformer_blocks.*.attn1", action="attention"),
        qatpatch.Rule(match="transformer_blocks.*.attn2", action="attention"),
    )
    qatpatch.apply(model, qatpatch.Profile(name="mine", rules=rules), linear=False)
    expected = run(model, data)
    with qatpatch.infer_attention(model) as receipt:
        assert torch.equal(run(model, data), expected)
    assert maskless.calls == 2 and receipt.masks.calls == 0 and not hooks(model)


def test_blocks_compiled_on_their_own_follow_the_decision(ltx2, maskless):
    model, data = ltx2
    expected, expected_masked = run(model, data), run(model, padded(data))
    torch._dynamo.reset()
    for block in model.transformer_blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    with qatpatch.infer_attention(model) as receipt:
        assert torch.allclose(run(model, data), expected, atol=1e-5)
        assert maskless.calls == 4
        assert torch.allclose(run(model, padded(data)), expected_masked, atol=1e-5)
        assert maskless.calls == 6
        assert torch.allclose(run(model, data), expected, atol=1e-5)
        assert maskless.calls == 10
        with torch._dynamo.config.patch(error_on_recompile=True):
            run(model, data)
            run(model, padded(data))
    assert receipt.masked_calls == 2
    torch._dynamo.reset()


def test_inside_a_compiled_model_nothing_is_read_and_masks_are_honoured(maskless):
    """The hooks are traced with the model: reading a mask would break its graph."""

    class Model(torch.nn.Module):
        def forward(self, x, encoder_attention_mask=None):
            unmasked = self.switch.unmasked
            return x + (0.0 if unmasked else 1.0)

    from qatpatch.masks import install
    from qatpatch.switch import Switch

    model = Model()
    model.switch = Switch()
    install(model, model.switch, ("encoder_attention_mask",), [])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(2), encoder_attention_mask=torch.ones(2)), torch.ones(2))
    assert model.switch.masks.calls == 0


def test_graph_modules_follow_the_decision(maskless):
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.to_q = torch.nn.Linear(64, 64)

        def forward(self, x, mask):
            q = self.to_q(x).unflatten(-1, (1, 64)).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention()

        def forward(self, x, mask):
            return self.attn(x, mask[:, None, None, :])

    torch.manual_seed(0)
    x, ones = torch.randn(2, 9, 64), torch.ones(2, 9, dtype=torch.bool)
    half = ones.clone()
    half[:, 4:] = False
    graph = torch.export.export(Model(), (x, ones)).module()
    rules = (qatpatch.Rule(match="attn", action="attention"),)
    profile = qatpatch.Profile(name="mine", rules=rules, mask_arguments=("mask",))
    qatpatch.apply(graph, profile, linear=False)
    with torch.no_grad():
        expected, expected_half = graph(x, ones), graph(x, half)
        with qatpatch.infer_attention(graph) as receipt:
            assert torch.equal(graph(x, ones), expected) and maskless.calls == 1
            assert torch.equal(graph(x, half), expected_half) and maskless.calls == 1
    assert receipt.masked_calls == 1


def test_ones_alone_mask_nothing():
    ones, half = torch.ones(2, 3), torch.tensor([[1.0, 1.0, 0.0]])
    assert mask_nothing([ones, ones.bool(), ones.long()])
    assert not mask_nothing([ones, half]) and not mask_nothing([torch.zeros(2, 3)])
    assert not mask_nothing([torch.full((2, 3), float("nan"))])


def test_a_call_by_hand_with_a_mask_or_for_the_lse_says_what_the_kernel_lacks(maskless):
    q = torch.randn(1, 5, 1, 64)
    mask = torch.ones(5, 5, dtype=torch.bool)
    assert torch.equal(attention.quantized_attention(q, q, q, attn_mask=mask), attention.quantized_attention(q, q, q))
    assert maskless.calls == 1
    with pytest.raises(KernelUnavailable, match="'maskless' takes no mask"):
        attention.quantized_attention(q, q, q, attn_mask=mask, kernel="maskless")
    with pytest.raises(KernelUnavailable, match="maskless gives no log-sum-exp"):
        attention.quantized_attention(q, q, q, return_lse=True)
