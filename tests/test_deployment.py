"""deploy: the same numbers from packed storage, and the dense weights really gone."""

from __future__ import annotations

import functools
import gc
import weakref

import accelerate
import pytest
import torch
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs
from torch import nn
from torch.nn.utils import prune

import qatpatch
from qatpatch import PlanError, Profile, Rule
from qatpatch.packed_linear import NVFP4Linear

MODELS = {"ltx2": (tiny_ltx2, ltx2_inputs), "wan": (tiny_wan, wan_inputs)}
MODES = ("fp32", "bf16", "autocast")
ANY_LINEAR = Profile(name="all", rules=(Rule(match=("*",), action="linear"),))


def in_mode(mode):
    return torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")


def trained(name, mode, *, big=False, **config):
    """A patched model after one training forward and backward in its precision, in eval mode, and inputs."""
    make, inputs = MODELS[name]
    model = make(torch.bfloat16 if mode == "bf16" else torch.float32, **config)
    size = {"ltx2": dict(frames=5, height=8, width=8), "wan": dict(frames=5, height=16, width=16)}[name] if big else {}
    data = inputs(model, **size)
    qatpatch.apply(model)
    model.train()
    with in_mode(mode):
        model(**data)[0].float().square().mean().backward()
    model.zero_grad()
    return model.eval(), data


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_eval_infer_deployed_and_loaded_are_equal_bit_for_bit(name, mode, tmp_path):
    model, data = trained(name, mode, big=True)  # 320 video tokens
    with in_mode(mode):
        out = run(model, data)
        with qatpatch.infer_attention(model):
            assert torch.equal(run(model, data), out)
        qatpatch.deploy(model)
        assert torch.equal(run(model, data), out)
        qatpatch.save(model, tmp_path)
        assert torch.equal(run(qatpatch.load(tmp_path), data), out)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_with_60_inputs_is_equal_too(mode, tmp_path):
    model, data = trained("wan", mode, ffn_dim=60)
    assert model.blocks[0].ffn.net[2].in_features == 60
    with in_mode(mode):
        out = run(model, data)
        qatpatch.deploy(model)
        qatpatch.save(model, tmp_path)
        for deployed in (model, qatpatch.load(tmp_path)):
            assert torch.equal(run(deployed, data), out)
    packed = model.blocks[0].ffn.net[2]
    assert packed.weight_packed.shape == (256, 32) and packed.weight_scale.shape == (256, 4)


def test_evaluation_outside_autocast_sees_the_weights_of_training():
    model, data = trained("wan", "autocast")
    out = run(model, data)
    qatpatch.deploy(model)
    assert torch.equal(run(model, data), out)


def test_weights_were_packed_in_the_dtype_of_training():
    packed = {}
    for mode in ("fp32", "autocast"):
        model, _ = trained("wan", mode)
        weight = model.blocks[0].attn1.to_q.weight.detach().clone()
        qatpatch.deploy(model)
        packed[mode] = model.blocks[0].attn1.to_q.nvfp4_weight()
        source = weight if mode == "fp32" else weight.bfloat16()
        assert torch.equal(packed[mode].packed, qatpatch.nvfp4.quantize(source).packed)
    assert not torch.equal(packed["fp32"].packed, packed["autocast"].packed)


def test_storage_is_packed_and_the_dense_weights_are_gone():
    model, _ = trained("ltx2", "fp32")
    names = qatpatch.report(model).linears
    weights = {name: weakref.ref(model.get_submodule(name).weight) for name in names}
    shapes = {name: model.get_submodule(name).weight.shape for name in names}
    refine = {name for name in names if model.get_submodule(name).quantization.settings.refine_only}
    before = {n: p.numel() for n, p in model.named_parameters()}
    report = qatpatch.deploy(model)
    for name in names:
        layer, (rows, columns) = model.get_submodule(name), shapes[name]
        assert type(layer) is NVFP4Linear and isinstance(layer, nn.Linear)
        stored = sum(b.nbytes for b in layer.buffers())
        assert stored == rows * columns * 9 // 16 + 4
        kept = name in refine
        assert (weights[name]() is not None and layer.dense_weight is not None) if kept else weights[name]() is None
        assert (f"{name}.dense_weight" in model.state_dict()) == kept and f"{name}.weight" not in model.state_dict()
    assert set(report.packed) == set(names) and set(report.retained) == refine and report.held == {}
    purged = sum(4 * before[f"{n}.weight"] for n in names if n not in refine)
    packed = sum(shapes[n].numel() * 9 // 16 + 4 for n in names)
    assert report.bytes_before - report.bytes_after == purged - packed == report.bytes_freed
    assert qatpatch.deployment.model_bytes(model) == report.bytes_after
    assert "24 linears packed, 6 of them kept dense too" in str(report) and "<table>" in report._repr_html_()
    live = qatpatch.report(model)
    assert {layer.state for layer in live.layers.values()} == {"deployed"}


def test_refine_only_layers_run_dense_in_the_base_stage_after_deploy():
    model, data = trained("ltx2", "fp32")
    with qatpatch.stage(model, "base"):
        base = run(model, data)
    out = run(model, data)
    qatpatch.deploy(model)
    with qatpatch.stage(model, "base"):
        assert torch.equal(run(model, data), base)
    assert torch.equal(run(model, data), out)
    with qatpatch.infer_attention(model) as receipt:
        assert torch.equal(run(model, data), out) and "nothing to swap" in receipt.line
    with pytest.raises(PlanError, match="18 layers .* cannot run dense.*retain_original_weights=True"):
        with qatpatch.dense(model):
            pass
    with pytest.raises(PlanError, match="retain_original_weights=True"):
        qatpatch.remove(model)


def test_retained_weights_keep_dense_and_remove_working():
    model = tiny_ltx2()
    data = ltx2_inputs(model)
    dense, keys = run(model, data), list(model.state_dict())
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    ids = {n: id(p) for n, p in model.named_parameters()}
    qatpatch.apply(model)
    out = run(model, data)
    report = qatpatch.deploy(model, retain_original_weights=True)
    assert report.retained == report.packed and report.bytes_freed <= 0
    with qatpatch.dense(model):
        assert torch.equal(run(model, data), dense)
    assert torch.equal(run(model, data), out)
    qatpatch.remove(model)
    assert torch.equal(run(model, data), dense) and list(model.state_dict()) == keys
    assert {n: id(p) for n, p in model.named_parameters()} == ids
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert not any(isinstance(m, NVFP4Linear) for m in model.modules())


@pytest.mark.parametrize("frozen", [False, True])
def test_retained_weights_cannot_train_apart_from_the_packed_ones(frozen):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    model[1].weight.requires_grad_(not frozen)
    qatpatch.apply(model, ANY_LINEAR)
    x = torch.randn(5, 64)
    model(x).square().sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    qatpatch.deploy(model, retain_original_weights=True)
    before = [layer.dense_weight.clone() for layer in model]
    assert not any(layer.dense_weight.requires_grad for layer in model)
    for everything in (False, True):
        model.requires_grad_(everything)
        with qatpatch.dense(model):
            model(x.requires_grad_()).square().sum().backward()
        optimizer.step()
    assert x.grad.abs().sum() > 0
    assert all(torch.equal(layer.dense_weight, weight) for layer, weight in zip(model, before, strict=True))
    qatpatch.remove(model)
    assert [layer.weight.requires_grad for layer in model] == [True, not frozen]


def test_deploy_twice_and_apply_after_deploy_are_errors():
    model, _ = trained("wan", "fp32")
    qatpatch.deploy(model)
    classes = {n: type(m) for n, m in model.named_modules()}
    with pytest.raises(PlanError, match="is deployed already"):
        qatpatch.deploy(model)
    kept = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    qatpatch.apply(kept, ANY_LINEAR)
    qatpatch.deploy(kept, retain_original_weights=True)
    with pytest.raises(PlanError, match=r"is deployed .*kept its dense weights; call qatpatch.remove\(model\) first"):
        qatpatch.apply(kept, ANY_LINEAR)
    qatpatch.remove(kept)
    qatpatch.apply(kept, ANY_LINEAR)
    with pytest.raises(PlanError, match="is deployed .*Load the original weights"):
        qatpatch.apply(model)
    assert {n: type(m) for n, m in model.named_modules()} == classes


def test_what_cannot_be_packed_is_refused_before_anything_changes():
    with torch.device("meta"):
        model = tiny_wan(layers=1)
    qatpatch.apply(model)
    with pytest.raises(PlanError, match="blocks.0.attn1.to_q, blocks.0.attn1.to_k and 8 more: a meta weight"):
        qatpatch.deploy(model)
    model = tiny_wan(layers=1)
    qatpatch.apply(model)
    model.blocks[0].ffn.net[2].forward = functools.partial(model.blocks[0].ffn.net[2].forward)
    with pytest.raises(PlanError, match="ffn.net.2: a hook"):
        qatpatch.deploy(model)
    assert not any(isinstance(m, NVFP4Linear) for m in model.modules())


def test_an_interrupted_deploy_leaves_a_working_model_and_can_go_on(monkeypatch):
    model, data = trained("wan", "fp32")
    out, calls = run(model, data), []
    original = NVFP4Linear.from_linear.__func__

    def fails(cls, linear, **arguments):
        calls.append(linear)
        if len(calls) == 7:
            raise MemoryError
        return original(cls, linear, **arguments)

    monkeypatch.setattr(NVFP4Linear, "from_linear", classmethod(fails))
    with pytest.raises(MemoryError):
        qatpatch.deploy(model)
    calls.clear()
    assert torch.equal(run(model, data), out)
    monkeypatch.undo()
    qatpatch.deploy(model)
    assert torch.equal(run(model, data), out) and sum(isinstance(m, NVFP4Linear) for m in model.modules()) == 20


def test_receipts_say_why_better_kernels_do_not_run():
    model = tiny_ltx2(torch.bfloat16)
    report = qatpatch.apply(model)
    # Training knows no native kernel; on this machine it runs the last row.
    elsewhere = "runs on cuda, not on cpu"
    assert report.architecture == "cpu" and {(r.kernel, r.reason, r.layers) for r in report.refused} == {
        ("triton_linear", elsewhere, 24),
        ("triton_attention", elsewhere, 4),
    }
    with qatpatch.infer_attention(model) as receipt:
        asked = {r.kernel: r.reason for r in receipt.refused}
    assert asked == {
        "attn_qat_infer": elsewhere,
        "fa4_fp4": "computes fa4, not sage3",
        "flashinfer_attention": (
            "computes another scheme, sage3_smoothed: only on request, kernel='flashinfer_attention'"
        ),
        "triton_attention": elsewhere,
    }
    for receipt in (qatpatch.deploy(model), qatpatch.report(model)):
        assert receipt.architecture == "cpu" and "not used because" in str(receipt)
        found = {r.kernel: (r.reason, r.layers) for r in receipt.refused}
        assert found == {name: (reason, 4) for name, reason in asked.items()} | {
            "flashinfer": (elsewhere, 24),
            "triton_nvfp4": (elsewhere, 24),
            "triton_linear": (elsewhere, 24),
        }


@pytest.mark.parametrize("holder", ["optimizer", "graph", "list"])
def test_the_receipt_names_who_still_holds_a_weight(holder):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    qatpatch.apply(model, ANY_LINEAR)
    if holder == "optimizer":
        held = torch.optim.AdamW(model.parameters())
    elif holder == "graph":
        held = model(torch.randn(3, 64, requires_grad=True))
    else:
        held = [model[0].weight, model[1].weight]
    report = qatpatch.deploy(model)
    assert set(report.held) == {"0", "1"}
    word = {"optimizer": "the optimizer AdamW", "graph": "open autograd graph", "list": "list"}[holder]
    assert all(word in reason for reason in report.held.values()), report.held
    assert report.bytes_freed == report.bytes_before - report.bytes_after - 2 * 64 * 64 * 4
    assert report.bytes_held == 2 * 64 * 64 * 4 and "held by others" in str(report) and "32,768" in str(report)
    assert report.bytes_freed < 0 and "below 0: packed came, dense stayed" in str(report)
    said = "an optimizer still holds the dense weights of packed layers"
    assert any(said in note for note in report.notes) == (holder == "optimizer") == (said in str(report))
    del held
    gc.collect()


def test_an_optimizer_of_retained_weights_trains_nothing_and_that_is_said():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x = torch.randn(3, 64)
    qatpatch.apply(model, ANY_LINEAR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    biases_alone = torch.optim.AdamW([model[0].bias, model[1].bias])
    said = "training on with it would change nothing in these layers"
    report = qatpatch.deploy(model, retain_original_weights=True)
    assert report.held == {} and any(said in note for note in report.notes)
    packed = [layer.weight_packed.clone() for layer in model]
    model(x).square().mean().backward()
    optimizer.step()
    assert all(torch.equal(layer.weight_packed, before) for layer, before in zip(model, packed, strict=True))
    del optimizer
    qatpatch.remove(model)
    qatpatch.apply(model, ANY_LINEAR)
    report = qatpatch.deploy(model, retain_original_weights=True)
    assert biases_alone and not any(said in note for note in report.notes)


def test_what_accelerate_keeps_is_named_and_its_advice_frees_it(caplog):
    accelerator = accelerate.Accelerator(cpu=True)

    def deployed(before_deploy):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        qatpatch.apply(model, ANY_LINEAR)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.randn(3, 64)).square().mean())
        optimizer.step()
        del optimizer
        before_deploy()
        return qatpatch.deploy(model)

    report = deployed(lambda: None)
    holder = "the optimizer AdamW, accelerate (accelerator.free_memory() lets go)"
    assert set(report.held.values()) == {holder} and report.bytes_held == 2 * 64 * 64 * 4
    assert holder in caplog.text and "build a new one for what is left to train" in caplog.text
    report = deployed(accelerator.free_memory)
    assert report.held == {} and report.notes == () and report.bytes_held == 0 and "held by" not in str(report)
    assert report.bytes_before == report.bytes_after + report.bytes_freed


def test_the_peak_is_the_model_plus_one_layer(monkeypatch):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    qatpatch.apply(model, ANY_LINEAR)
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []
    original = NVFP4Linear.from_linear.__func__

    def counted(cls, linear, **arguments):
        alive.append(sum(w() is not None for w in weights))
        return original(cls, linear, **arguments)

    monkeypatch.setattr(NVFP4Linear, "from_linear", classmethod(counted))
    qatpatch.deploy(model)
    assert alive == [6, 5, 4, 3, 2, 1]


def test_hooks_and_handles_move_to_the_packed_layer():
    model = nn.Sequential(nn.Linear(64, 64))
    seen = []
    handle = model[0].register_forward_hook(lambda *arguments: seen.append(1))
    qatpatch.apply(model, ANY_LINEAR)
    qatpatch.deploy(model)
    model(torch.randn(2, 64))
    assert seen == [1]
    handle.remove()
    model(torch.randn(2, 64))
    assert seen == [1]


def test_what_others_put_on_a_layer_stays_through_deploy_and_remove():
    model, seen = nn.Sequential(nn.Linear(64, 64)), []
    model[0].register_full_backward_hook(lambda *a: seen.append("backward"))
    model[0].register_full_backward_pre_hook(lambda *a: seen.append("backward pre"))
    model[0].register_forward_hook(lambda *a: seen.append("forward"))
    model[0].tag, model[0]._private = "mine", [1]
    model[0].register_buffer("steps", torch.ones(3))
    model[0].register_buffer("scratch", torch.ones(3), persistent=False)
    model[0].extra, model[0].inner = nn.Parameter(torch.ones(2)), nn.LayerNorm(4)
    qatpatch.apply(model, ANY_LINEAR)
    kept = {key: value for key, value in model.state_dict().items() if "weight" not in key}
    stages = [
        lambda: None,
        lambda: qatpatch.deploy(model, retain_original_weights=True),
        lambda: qatpatch.remove(model),
    ]
    for change in stages:
        change()
        seen.clear()
        model(torch.randn(3, 64, requires_grad=True)).sum().backward()
        assert sorted(seen) == ["backward", "backward pre", "forward"]
        assert model[0].tag == "mine" and model[0]._private == [1] and torch.equal(model[0].scratch, torch.ones(3))
        assert kept.keys() <= model.state_dict().keys() and isinstance(model[0].inner, nn.LayerNorm)
    assert type(model[0]) is nn.Linear and not [key for key in vars(model[0]) if "qat" in key or "trainable" in key]


_PRUNE = functools.partial(prune.random_unstructured, amount=0.5)


@pytest.mark.parametrize(
    ("put", "name"),
    [
        pytest.param(nn.utils.weight_norm, "weight", marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
        (nn.utils.parametrizations.weight_norm, "weight"),
        (nn.utils.spectral_norm, "weight"),
        (nn.utils.parametrizations.spectral_norm, "weight"),
        (_PRUNE, "weight"),
        (_PRUNE, "bias"),
    ],
)
def test_weights_that_are_computed_from_others_are_refused(put, name, tmp_path):
    """They were put on after apply, and would have run on what deploy left."""
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(3, 64)
    qatpatch.apply(model, ANY_LINEAR, input_scale="unit")
    put(model[0], name=name)
    model.eval()
    out = model(x)
    with pytest.raises(PlanError, match=f"0: its {name} is computed from other tensors.*make it plain"):
        qatpatch.deploy(model)
    with pytest.raises(qatpatch.CheckpointError, match=f"0: its {name} is computed from other tensors"):
        qatpatch.export(model, tmp_path / "x.safetensors", "comfy", original_names=False)
    assert torch.equal(model(x), out)


def test_adapters_run_on_packed_layers_and_cannot_be_fused():
    from peft import LoraConfig

    model, data = trained("wan", "fp32")
    config = LoraConfig(r=8, target_modules=["to_q", "net.2"], init_lora_weights=False)
    qatpatch.deploy(model)
    plain = run(model, data)
    packed = {n: b.clone() for n, b in model.named_buffers() if "weight" in n}
    model.add_adapter(config)
    adapted = run(model, data)
    assert not torch.equal(adapted, plain)
    model.set_adapters(["default"], 0.0)
    assert torch.equal(run(model, data), plain)
    model.set_adapters(["default"], 1.0)
    model.train()
    model(**data)[0].square().mean().backward()
    assert model.blocks[0].attn1.to_q.lora_B["default"].weight.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="before deploy"):
        model.fuse_lora()
    model.unload_lora()
    assert torch.equal(run(model.eval(), data), plain)
    assert {n: b for n, b in model.named_buffers() if "weight" in n}.keys() == packed.keys()
    assert all(torch.equal(dict(model.named_buffers())[n], b) for n, b in packed.items())


def test_merged_adapters_are_quantized_as_one_weight():
    from peft import LoraConfig

    model, data = trained("wan", "fp32")
    model.add_adapter(LoraConfig(r=8, target_modules=["to_q"], init_lora_weights=False))
    wrapped = model.blocks[0].attn1.to_q
    merged = wrapped.base_layer.weight + wrapped.get_delta_weight("default")
    model.fuse_lora()
    model.unload_lora()
    qatpatch.deploy(model)
    assert torch.equal(model.blocks[0].attn1.to_q.nvfp4_weight().packed, qatpatch.nvfp4.quantize(merged).packed)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.float()])
def test_casts_never_touch_packed_storage(cast):
    model, data = trained("wan", "fp32")
    qatpatch.deploy(model)
    before = {n: b.clone() for n, b in model.named_buffers() if b.dtype is torch.uint8}
    cast(model)
    after = {n: b for n, b in model.named_buffers() if b.dtype is torch.uint8}
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    layer = model.blocks[0].attn1.to_q
    assert layer.bias.dtype == layer.weight.dtype == next(model.parameters()).dtype
    assert torch.isfinite(run(model, {k: _like(v, model) for k, v in data.items()})).all()


def _like(value, model):
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(next(model.parameters()).dtype) if is_float else value


def adapted(*, first: bool):
    """A tiny Wan with a LoRA on to_q, added before or after the patch; and the adapter's config."""
    from peft import LoraConfig

    model = tiny_wan(layers=1)
    config = LoraConfig(r=8, target_modules=["to_q"], init_lora_weights=False)
    torch.manual_seed(5)
    if first:
        model.add_adapter(config)
    qatpatch.apply(model)
    if not first:
        torch.manual_seed(5)
        model.add_adapter(config)
    return model, wan_inputs(model)


@pytest.mark.parametrize("first", [True, False])
def test_adapters_in_either_order_report_deploy_and_remove(first):
    model, data = adapted(first=first)
    assert {layer.state for layer in qatpatch.report(model).layers.values()} == {"train"}
    out = run(model, data)
    qatpatch.remove(model)
    assert not qatpatch.is_patched(model) and not torch.equal(run(model, data), out)
    qatpatch.apply(model)
    assert torch.equal(run(model, data), out)
    qatpatch.deploy(model)
    assert torch.equal(run(model, data), out) and isinstance(model.blocks[0].attn1.to_q.base_layer, NVFP4Linear)


@pytest.mark.parametrize("first", [True, False])
def test_merged_and_unloaded_adapters_leave_a_patch_that_works(first, tmp_path):
    model, data = adapted(first=first)
    model.fuse_lora()
    model.unload_lora()
    out = run(model, data)
    assert {layer.state for layer in qatpatch.report(model).layers.values()} == {"train"}
    qatpatch.deploy(model)
    qatpatch.save(model, tmp_path)
    assert torch.equal(run(model, data), out) and torch.equal(run(qatpatch.load(tmp_path), data), out)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("by", ["diffusers", "peft", "peft, nested"])
def test_adapters_that_are_merged_and_still_attached_are_refused(by, first):
    """unfuse_lora and disable_adapters take the merge back, and could not from packed weights."""
    if by == "diffusers":
        model, data = adapted(first=first)
        owner = model
        owner.fuse_lora()
    else:
        import peft

        owner = model = tiny_wan(layers=1)
        data = wan_inputs(model)
        if not first:
            qatpatch.apply(model)
        owner = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False))
        if by == "peft, nested":
            owner = peft.get_peft_model(owner, peft.IA3Config(target_modules=["to_q"], feedforward_modules=[]))
        if first:
            qatpatch.apply(model)
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.merge()
    out = run(model, data)
    with pytest.raises(PlanError, match="blocks.0.attn1.to_q.*still attached.*unload_lora"):
        qatpatch.deploy(model)
    assert torch.equal(run(model, data), out)
    if by == "diffusers":
        owner.unload_lora()
    else:
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.unmerge()
    out = run(model, data)
    qatpatch.deploy(model)
    assert torch.equal(run(model, data), out)


def test_an_adapter_has_no_place_in_a_saved_model(tmp_path):
    model, _ = adapted(first=True)
    qatpatch.deploy(model)
    with pytest.raises(qatpatch.CheckpointError, match="2 layers .*blocks.0.attn1.to_q, .* are wrapped by adapters"):
        qatpatch.save(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_models_that_were_never_in_training_mode_deploy_what_autocast_quantized():
    for grad in (True, False):
        model = tiny_wan(layers=1)
        data = wan_inputs(model)
        qatpatch.apply(model)
        with in_mode("autocast"), torch.set_grad_enabled(grad):
            model(**data)
        with in_mode("autocast"):
            out = run(model, data)
            qatpatch.deploy(model)
            assert torch.equal(run(model, data), out)


def test_uncalibrated_and_fused_models_are_refused_before_anything_is_purged():
    model = tiny_wan(layers=1)
    qatpatch.apply(model, input_scale="static")
    with pytest.raises(PlanError, match="no scale yet.*qatpatch.calibrate"):
        qatpatch.deploy(model)
    model = tiny_wan(layers=1)
    qatpatch.apply(model)
    attention = model.blocks[0].attn1
    type(attention).fuse_projections(attention)  # past the guard
    with pytest.raises(PlanError, match="fused projections"):
        qatpatch.deploy(model)
    assert not any(isinstance(m, NVFP4Linear) for m in model.modules())
    model = tiny_wan(layers=1)
    model.fuse_qkv_projections()
    with pytest.raises(PlanError, match="fuse_qkv_projections replaced"):
        qatpatch.apply(model)


def test_a_weight_that_another_layer_shares_is_not_counted_as_held_twice():
    model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False)})
    model["b"].weight = model["a"].weight
    qatpatch.apply(model, Profile(name="a", rules=(Rule(match=("a",), action="linear"),)))
    report = qatpatch.deploy(model)
    assert report.bytes_freed == report.bytes_before - report.bytes_after == -(64 * 64 * 9 // 16 + 4)
    assert report.held == {"a": "another layer of the model, which shares it"}


@pytest.mark.parametrize("held", [False, True])
def test_tied_weights_are_freed_once(held):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    model[2].weight = nn.Parameter(model[0].weight.data)  # another parameter of the same storage
    qatpatch.apply(model, ANY_LINEAR)
    keep = model[0].weight if held else None
    report = qatpatch.deploy(model)
    packed = 3 * (64 * 64 * 9 // 16 + 4)
    assert report.bytes_before - report.bytes_after == 64 * 64 * 4 - packed
    assert report.bytes_freed == (-packed if held else 64 * 64 * 4 - packed)
    assert bool(report.held) == held
    del keep


def test_deployed_biases_train_and_packed_bytes_refuse_other_dtypes():
    model = nn.Sequential(nn.Linear(64, 32))
    qatpatch.apply(model, ANY_LINEAR)
    qatpatch.deploy(model)
    model(torch.randn(5, 64)).sum().backward()
    assert torch.equal(model[0].bias.grad, torch.full((32,), 5.0))
    with pytest.raises(RuntimeError, match="cannot be converted to another dtype"):
        model.type(torch.bfloat16)
    assert model[0].weight_packed.dtype is torch.uint8
