"""Plan, apply, remove and report: all or nothing, exactly undone, structure and not only outputs."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs
from torch import nn

import qatpatch
from qatpatch import PlanError, Profile, Rule
from qatpatch.linear import QATLinear

MODELS = {"ltx2": (tiny_ltx2, ltx2_inputs), "wan": (tiny_wan, wan_inputs)}
ANY_LINEAR = Profile(name="all", rules=(Rule(match=("*",), action="linear"),))


class MLP(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, 96)
        self.down = nn.Linear(96, width)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def snapshot(model: nn.Module) -> dict:
    """Everything about a model's structure that a patch must put back."""
    return {
        "classes": {name: type(m) for name, m in model.named_modules()},
        "modules": {name: id(m) for name, m in model.named_modules()},
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "processors": {n: id(m.processor) for n, m in model.named_modules() if hasattr(m, "processor")},
        "processor_state": {n: dict(vars(m.processor)) for n, m in model.named_modules() if hasattr(m, "processor")},
        "parameters": {name: (id(p), p.requires_grad) for name, p in model.named_parameters()},
        "keys": list(model.state_dict()),
    }


@pytest.mark.parametrize("name", MODELS)
def test_apply_then_remove_leaves_the_model_as_it_was(name):
    make, inputs = MODELS[name]
    model = make()
    twin, data = copy.deepcopy(model), inputs(model)
    before, out = snapshot(model), run(model, data)
    report = qatpatch.apply(model)
    assert list(model.state_dict()) == before["keys"]
    assert {n: (id(p), p.requires_grad) for n, p in model.named_parameters()} == before["parameters"]
    patched = run(model, data)
    assert not torch.equal(patched, out) and torch.isfinite(patched).all()
    assert torch.equal(run(twin, data), out)
    assert all(type(model.get_submodule(n)) is QATLinear for n in report.linears)
    assert not any(isinstance(m, QATLinear) for m in twin.modules())
    qatpatch.remove(model)
    assert snapshot(model) == before
    assert torch.equal(run(model, data), out) and torch.equal(run(twin, data), out)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("parts", [{"attention": False}, {"linear": False}])
def test_each_half_of_the_patch_changes_the_output(name, parts):
    make, inputs = MODELS[name]
    model = make()
    data = inputs(model)
    out, report = run(model, data), qatpatch.apply(model, **parts)
    half = run(model, data)
    assert not torch.equal(half, out)
    left_out = report.linears if "linear" in parts else report.attentions
    assert left_out == () and any("Left out by" in reason for reason in report.skipped.values())
    qatpatch.remove(model)
    qatpatch.apply(model)
    assert not torch.equal(run(model, data), half)


def test_the_report_names_layers_kernels_and_reasons():
    model = tiny_ltx2()
    report = qatpatch.apply(model, profile="ltx2")
    assert (len(report.linears), len(report.attentions)) == (24, 4)
    assert {k.name for n, k in report.kernels.items() if n in report.linears} == {"reference_linear"}
    covered = sum(model.get_submodule(n).weight.numel() for n in report.linears)
    assert report.parameters == pytest.approx(covered / sum(p.numel() for p in model.parameters()))
    text, html = str(report), report._repr_html_()
    assert "24 linears" in text and "reference_attention" in text and "Its rows are text tokens" in text
    assert html.startswith("<p>") and "<table>" in html and "<script" not in html
    layer = report.layers["transformer_blocks.0.attn1"]
    assert (layer.state, layer.scheme, layer.simulated, layer.native) == ("train", "sage3", True, False)
    assert report == qatpatch.report(model) and qatpatch.is_patched(model)


def test_a_plan_is_pure_and_equals_what_apply_does():
    model = tiny_wan()
    before = snapshot(model)
    plan = qatpatch.build_plan(model, exclude=("blocks.0.ffn",))
    assert snapshot(model) == before and not qatpatch.is_patched(model)
    assert "18 linears" in str(plan) and "<table>" in plan._repr_html_()
    report = qatpatch.apply(model, exclude=("blocks.0.ffn",))
    assert tuple(plan.linears) == report.linears and plan.skipped == report.skipped
    assert report.skipped["blocks.0.ffn.net.2"] == "Excluded by 'blocks.0.ffn'."


@pytest.mark.parametrize("target", ["sm_120", "sm_100"])
def test_the_target_picks_the_attention_scheme(target):
    model = tiny_wan().train()
    data = wan_inputs(model)
    report = qatpatch.apply(model, target=target)
    assert report.scheme == {"sm_120": "sage3", "sm_100": "fa4"}[target]
    model(**data)[0].square().mean().backward()
    for projection in ("to_q", "to_k", "to_v"):
        assert model.blocks[0].attn1.get_submodule(projection).weight.grad.abs().sum() > 0


BAD = [
    (dict(profile="ltx-2"), "no profile 'ltx-2'; did you mean 'ltx2'"),
    (dict(profile="ltx2"), "profile 'ltx2' is for LTX2VideoTransformer3DModel; the model is a WanTransformer3DModel"),
    (dict(profile=3), "profile is a name"),
    (dict(include=("blocks.*.attn3",)), "include='blocks..*.attn3' matches no linear"),
    (dict(target="sm_90"), "target='sm_90' is no architecture with FP4 attention"),
    (dict(input_scale="statc"), "did you mean 'static'"),
    (dict(global_scale="pow3"), "did you mean 'pow2'"),
    (dict(backward="quantised"), "did you mean 'quantized'"),
    (dict(linear=False, attention=False), "leaves nothing to patch"),
    (dict(activations="no"), "activations is True or False"),
    (dict(exclude=("*",)), "nothing would be patched"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[str(b[0]) for b in BAD])
def test_bad_arguments_have_clear_errors_and_an_untouched_model(arguments, message):
    model = tiny_wan(layers=1)
    before = snapshot(model)
    for function in (qatpatch.build_plan, qatpatch.apply):
        with pytest.raises(PlanError, match=message):
            function(model, **arguments)
    assert snapshot(model) == before


def test_a_rule_that_matches_nothing_and_a_wrong_count_are_errors_that_list_everything():
    model = MLP()
    profile = Profile(
        name="mine",
        rules=(Rule(match=("up", "sideways"), action="linear"), Rule(match=("nowhere",), action="skip", reason="x y.")),
        counts=(qatpatch.Count(container="blocks", linears=2),),
    )
    with pytest.raises(PlanError, match="sideways.*matches nothing(?s:.*)no blocks under 'blocks'"):
        qatpatch.apply(model, profile)
    report = qatpatch.apply(model, profile, strict=False)
    assert report.linears == ("up",) and len(report.warnings) == 2
    qatpatch.remove(model)
    with pytest.raises(PlanError, match="2 blocks, so 20 linears must match"):
        wan = tiny_wan()
        del wan.blocks[1].ffn.net[2]
        qatpatch.apply(wan)


def test_apply_twice_is_one_clear_error_and_one_layer_of_patching():
    model = tiny_wan(layers=1)
    qatpatch.apply(model)
    patched = snapshot(model)
    for arguments in ({}, {"profile": "wan"}, {"profile": ANY_LINEAR}):
        with pytest.raises(PlanError, match="already patched; call qatpatch.remove"):
            qatpatch.apply(model, **arguments)
    assert snapshot(model)["modules"] == patched["modules"]
    with pytest.raises(PlanError, match="already patched"):
        qatpatch.apply(nn.ModuleDict({"inner": model}), ANY_LINEAR)
    with pytest.raises(PlanError, match="is not the module that qatpatch.apply was called on"):
        qatpatch.remove(model.blocks)
    qatpatch.remove(model)
    for function in (qatpatch.remove, qatpatch.report, qatpatch.deploy):
        with pytest.raises(PlanError, match="is not patched; call qatpatch.apply"):
            function(model)


def test_a_replaced_forward_is_refused_or_skipped():
    model = MLP()
    model.up.forward = functools.partial(model.up.forward)
    with pytest.raises(PlanError, match="up: its forward was replaced by a hook"):
        qatpatch.apply(model, ANY_LINEAR)
    report = qatpatch.apply(model, ANY_LINEAR, strict=False)
    assert report.linears == ("down",) and "forward was replaced" in report.skipped["up"]


def test_linears_that_are_not_plain_are_refused():
    class Special(nn.Linear):
        pass

    model = MLP()
    model.up = Special(64, 96)
    model.down = model.down.double()
    with pytest.raises(PlanError, match="up: it is a Special(?s:.*)down: its weight is torch.float64"):
        qatpatch.apply(model, ANY_LINEAR)
    assert type(model.down) is nn.Linear


def test_what_is_no_module_gets_a_hint():
    class Pipe:
        transformer = MLP()

    with pytest.raises(PlanError, match="pass pipe.transformer"):
        qatpatch.apply(Pipe(), ANY_LINEAR)
    for path in ("model", Path("model")):
        with pytest.raises(PlanError, match=f"got {type(path).__name__} 'model'; load the model first.*qatpatch.load"):
            qatpatch.is_patched(path)


def test_failure_half_way_leaves_nothing_patched(monkeypatch):
    model = tiny_wan()
    before, calls = snapshot(model), []
    from qatpatch import dispatch

    attach = dispatch.attach

    def fails(module, *arguments):
        calls.append(module)
        if len(calls) == 2:
            raise KeyboardInterrupt
        attach(module, *arguments)

    monkeypatch.setattr(dispatch, "attach", fails)
    with pytest.raises(KeyboardInterrupt):
        qatpatch.apply(model)
    assert snapshot(model) == before


def test_shared_modules_are_patched_once_under_every_name():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["b"] = model["a"]
    report = qatpatch.apply(model, ANY_LINEAR)
    assert report.linears == ("a", "c") and model["a"] is model["b"]
    qatpatch.deploy(model)
    assert model["a"] is model["b"] and type(model["b"]).__name__ == "NVFP4Linear"


def test_a_deepcopy_stays_patched_and_is_independent():
    model = tiny_wan()
    data = wan_inputs(model)
    qatpatch.apply(model)
    out = run(model, data)
    with qatpatch.dense(model):
        twin = copy.deepcopy(model)
        assert torch.equal(run(twin, data), out) and not torch.equal(run(model, data), out)
    assert qatpatch.report(twin).linears == qatpatch.report(model).linears
    with qatpatch.dense(twin):
        assert torch.equal(run(model, data), out)
    qatpatch.remove(twin)
    assert not qatpatch.is_patched(twin) and qatpatch.is_patched(model) and torch.equal(run(model, data), out)
    again = pickle.loads(pickle.dumps(model))
    assert qatpatch.is_patched(again) and torch.equal(run(again, data), out)


def test_wrapped_models_are_unwrapped():
    model = MLP()
    compiled = torch.compile(model, backend="eager")
    report = qatpatch.apply(compiled, ANY_LINEAR)
    assert report.model_class == "MLP" and type(model.up) is QATLinear and qatpatch.is_patched(compiled)
    with qatpatch.dense(nn.DataParallel(model)) as receipt:
        assert receipt.modules == ("up", "down")
    qatpatch.remove(compiled)


def test_optimizer_made_before_apply_still_trains():
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    qatpatch.apply(model, ANY_LINEAR)
    weight = model.up.weight.detach().clone()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.up.weight, weight)


@pytest.mark.parametrize("moment", ["before prepare", "after prepare"])
def test_an_optimizer_made_before_apply_trains_under_accelerate(moment):
    accelerator = accelerate.Accelerator(cpu=True)
    model = tiny_wan(layers=1)
    data = wan_inputs(model, frames=1, height=4, width=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: id(p) for name, p in model.named_parameters()}
    if moment == "before prepare":
        qatpatch.apply(model)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    if moment == "after prepare":
        qatpatch.apply(prepared)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    accelerator.backward(prepared(**data)[0].square().mean())
    optimizer.step()
    assert {name: id(p) for name, p in accelerator.unwrap_model(prepared).named_parameters()} == before
    linears = qatpatch.report(prepared).linears
    assert len(linears) == 10
    assert all(not torch.equal(weights[f"{name}.weight"], model.get_submodule(name).weight) for name in linears)


@pytest.mark.parametrize("materialise", ["assign", "to_empty"])
def test_a_model_on_meta_is_patched_by_its_shapes_and_loaded_later(materialise):
    loaded = tiny_wan(layers=1, seed=3)
    state, data = loaded.state_dict(), wan_inputs(loaded, frames=1)
    qatpatch.apply(loaded)
    out = run(loaded, data)
    with torch.device("meta"):
        model = tiny_wan(layers=1)
    assert qatpatch.apply(model).linears == qatpatch.report(loaded).linears
    with pytest.raises(PlanError, match="meta weight"):
        qatpatch.deploy(model)
    if materialise == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(state, assign=materialise == "assign")
    model.rope = tiny_wan(layers=1).rope  # its buffers are computed, and in no state dict
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert torch.equal(run(model, data), out)
    qatpatch.deploy(model)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert torch.equal(run(model, data), out)


def test_adapters_before_and_after_apply_give_the_same_patch():
    from peft import LoraConfig

    outs, data = [], None
    for adapter_first in (True, False):
        model = tiny_wan()
        data = data or wan_inputs(model)
        config = LoraConfig(r=8, target_modules=["to_q", "to_v", "net.2"], init_lora_weights=False)

        def add(model=model, config=config):
            torch.manual_seed(7)
            model.add_adapter(config)

        if adapter_first:
            add()
        report = qatpatch.apply(model)
        if not adapter_first:
            add()
        assert len(report.linears) == 20 and "blocks.0.attn1.to_q" in report.linears
        assert type(model.blocks[0].attn1.to_q.base_layer) is QATLinear
        assert type(model.blocks[0].attn1.to_q.lora_A["default"]) is nn.Linear
        outs.append(run(model, data))
    assert torch.equal(*outs)


def test_other_models_in_the_process_do_not_change():
    """A VAE with one head of 512 in its attentions, a text encoder, and a second transformer of the same class."""
    from diffusers import AutoencoderKL
    from diffusers.models import attention_dispatch, attention_processor
    from diffusers.models.transformers import transformer_wan
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    blocks = dict(down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",))
    vae = AutoencoderKL(block_out_channels=(512,), layers_per_block=1, **blocks).eval()
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50)
    text, other = BertModel(BertConfig(**sizes)).eval(), tiny_wan(layers=1, seed=3)
    pixels, tokens, data = torch.randn(1, 3, 8, 8), torch.arange(9)[None], wan_inputs(other, frames=1)
    watched = (nn, nn.functional, nn.Linear, nn.Module, torch, attention_dispatch, attention_processor, transformer_wan)

    def outputs():
        with torch.no_grad():
            return vae(pixels).sample, text(tokens).last_hidden_state, run(other, data)

    def functions():
        return [
            {k: id(v) for k, v in vars(place).items() if callable(v) and not k.startswith("__")} for place in watched
        ]

    attention = vae.encoder.mid_block.attentions[0]
    assert (attention.heads, attention.to_q.out_features) == (1, 512)
    before, found = outputs(), functions()
    model = tiny_wan(layers=1)

    def same():
        return functions() == found and all(map(torch.equal, outputs(), before))

    qatpatch.apply(model)
    run(model, data)
    assert same()
    for block in (qatpatch.infer_attention, qatpatch.dense):
        with block(model):
            run(model, data)
            assert same()
    qatpatch.deploy(model)
    run(model, data)
    assert same()


def test_set_attention_backend_cannot_take_the_patch_out():
    from diffusers.models.attention_dispatch import AttentionBackendName

    model = tiny_wan()
    data, members = wan_inputs(model), list(AttentionBackendName)
    qatpatch.apply(model, linear=False)
    out = run(model, data)
    for block in model.blocks:
        block.attn1.set_attention_backend("_native_math")
    assert torch.equal(run(model, data), out)
    with qatpatch.dense(model):
        dense = run(model, data)
    model.reset_attention_backend()
    assert torch.equal(run(model, data), out) and not torch.equal(dense, out)
    assert list(AttentionBackendName) == members


def test_a_processor_that_was_replaced_is_reported_and_left_alone():
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model = tiny_wan(layers=1)
    qatpatch.apply(model)
    theirs = WanAttnProcessor()
    with pytest.raises(RuntimeError, match="set_attn_processor would take"):
        model.blocks[0].attn1.set_processor(theirs)
    model.blocks[0].attn1.processor = theirs  # past the guard
    report = qatpatch.report(model)
    assert report.layers["blocks.0.attn1"].state == "replaced" and "blocks.0.attn1" in report.warnings[0]
    with pytest.raises(PlanError, match="lost its QAT attention"):
        qatpatch.deploy(model)
    qatpatch.remove(model)
    assert model.blocks[0].attn1.processor is theirs


def test_reloading_the_package_keeps_patched_models_recognised():
    model = tiny_wan(layers=1)
    qatpatch.apply(model)
    modules = [m for name, m in sorted(sys.modules.items()) if name.split(".")[0] == "qatpatch"]
    saved = {m: dict(vars(m)) for m in modules}
    try:
        reloaded = importlib.reload(qatpatch)
        importlib.reload(importlib.import_module("qatpatch.linear"))
        assert reloaded.is_patched(model)
        with pytest.raises(ValueError, match="already patched"):
            reloaded.apply(model)
    finally:
        for module, content in saved.items():
            vars(module).update(content)


def test_unsupported_attention_requests_are_refused():
    from qatpatch.dispatch import refuse_unsupported

    model = tiny_wan(layers=1)
    qatpatch.apply(model)
    with pytest.raises(NotImplementedError, match="is_causal=True.*exclude"):
        refuse_unsupported(is_causal=True, dropout_p=0.0)


def test_remove_refuses_hooks_that_hold_on_to_the_patch():
    model = MLP()
    qatpatch.apply(model, ANY_LINEAR)
    model.up.forward = functools.partial(model.up.forward)
    with pytest.raises(PlanError, match="up, ...\\) have a hook"):
        qatpatch.remove(model)
    assert type(model.up) is QATLinear
    del model.up.forward
    qatpatch.remove(model)
    assert snapshot(model)["classes"]["up"] is nn.Linear


def test_rules_match_every_name_of_a_shared_module():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["b"] = model["a"]
    assert qatpatch.build_plan(model, ANY_LINEAR, exclude=("b",)).linears.keys() == {"c"}
    profile = Profile(name="b", rules=(Rule(match=("b",), action="linear"),))
    assert qatpatch.build_plan(model, profile, exclude=None).linears.keys() == {"a"}


def test_a_package_that_is_imported_anew_works():
    code = (
        "import sys, torch, qatpatch, qatpatch.kernels.ops\n"
        "for name in [n for n in sys.modules if n.split('.')[0] == 'qatpatch']: del sys.modules[name]\n"
        "import qatpatch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(32, 32))\n"
        "qatpatch.apply(model, qatpatch.Profile(name='all', rules=(qatpatch.Rule(match=('*',), action='linear'),)))\n"
        "print(model(torch.ones(1, 32)).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "[1, 32]" in done.stdout, done.stderr


def test_layers_that_are_read_and_not_called_are_refused_or_skipped():
    """In evaluation torch's encoder layer computes from the weights of its linears."""
    model = nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Linear(64, 64)).eval()
    x = torch.randn(2, 5, 64)
    before = run_plain(model, x)
    with pytest.raises(PlanError, match="self_attn.out_proj: it is a NonDyn(?s:.*)0.linear1, 0.linear2: .*fast path"):
        qatpatch.apply(model, ANY_LINEAR)
    assert torch.equal(run_plain(model, x), before)
    report = qatpatch.apply(model, ANY_LINEAR, strict=False)
    assert report.linears == ("1",) and "fast path" in report.skipped["0.linear1"]
    assert all(qatpatch.audit(model, input=x).reached.values())

    class Own(nn.TransformerEncoderLayer):
        def forward(self, x):
            return self.linear2(self.linear1(x))

    own = nn.Sequential(Own(64, 4, 128)).eval()
    assert len(qatpatch.apply(own, ANY_LINEAR, exclude=("*.out_proj",)).linears) == 2
    assert all(qatpatch.audit(own, input=x).reached.values())


def test_a_model_that_is_itself_a_layer_is_refused():
    for model in (nn.Linear(64, 64), tiny_wan(layers=1).blocks[0].attn1):
        for call in (qatpatch.build_plan, qatpatch.apply):
            with pytest.raises(PlanError, match="the model is itself a .*put it into one"):
                call(model, ANY_LINEAR)


def run_plain(model, x):
    with torch.no_grad():
        return model(x)
