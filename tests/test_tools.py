"""What other tools do to a model, before apply, after it and after deploy: each works or is refused with a sentence.

The table in docs/diffusers.md is `table()`, of the very cases that run here.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs
from peft import LoraConfig
from test_diffusers import pipeline
from torch import nn

import qatpatch
from qatpatch import PlanError
from qatpatch.packed_linear import NVFP4Linear

MODELS = {"ltx2": (tiny_ltx2, ltx2_inputs), "wan": (tiny_wan, wan_inputs)}
CPU = torch.device("cpu")
PAGE = Path(__file__).parent.parent / "docs" / "diffusers.md"

WORKS = "works"
NEVER = "-"
HOOKED = "apply before such hooks"
TAKE_OFF = "take it off first"
OFFLOADED = "deploy before enable_group_offload"
PACKED = "nothing can be added to or read from packed weights"
CAST = "what the optimizer adds to them would be lost"
FUSED = "would put one plain, dense projection in the place of patched ones"
PROCESSOR = "would take the NVFP4 attention out"


@dataclass(frozen=True, kw_only=True)
class Tool:
    """``use`` turns it on; the columns say what comes of that; ``expected`` does to a model what it does to numbers."""

    name: str
    use: Callable[[nn.Module], Any]
    before: str = WORKS
    after: str = WORKS
    then_deploy: str = WORKS
    deployed: str = WORKS
    models: tuple[str, ...] = tuple(MODELS)
    expected: Callable[[nn.Module], Any] | None = None


def lora(model, **config):
    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=8, target_modules=["to_q", "net.2"], **config))


def fuse(model):
    lora(model, init_lora_weights=False)
    model.fuse_lora()
    model.unload_lora()


def lora_file(model):
    source = type(model).from_config(model.config)
    lora(source)  # B is zero
    with tempfile.TemporaryDirectory() as folder:
        source.save_lora_adapter(folder)
        model.load_lora_adapter(folder, prefix=None)


def group_offload(kind, disk=False):
    def use(model):
        more = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        if disk:
            more["offload_to_disk_path"] = tempfile.mkdtemp()
        model.enable_group_offload(onload_device=CPU, offload_device=CPU, offload_type=kind, **more)

    return use


def casting(dtype):
    def use(model):
        model.enable_layerwise_casting(storage_dtype=dtype, compute_dtype=torch.float32)

    return use


def rounded(dtype):
    """The parameters that layerwise casting stores in ``dtype``, there and back; packed storage as it is."""

    def expected(model):
        classes = (nn.Linear, nn.Conv3d)
        skipped = ("pos_embed", "patch_embed", "norm")
        skipped += tuple(model._skip_layerwise_casting_patterns or ()) + tuple(model._keep_in_fp32_modules or ())
        for path, module in model.named_modules():
            if isinstance(module, classes) and not any(pattern in path for pattern in skipped):
                # Retained dense weights run only in dense blocks, but are stored like the rest.
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(dtype).to(parameter.dtype)

    return expected


def cache(name, **config):
    def use(model):
        import diffusers.hooks

        model.enable_cache(getattr(diffusers.hooks, name)(**config))

    return use


def attention_blocks(model):
    """The context `attention_backend`, around a call, changes nothing of a model after it."""
    from diffusers.models.attention_dispatch import attention_backend

    with attention_backend("_native_math"):
        pass


def backend_and_back(model):
    model.set_attention_backend("_native_math")
    model.reset_attention_backend()


def processors(model):
    model.set_attn_processor(type(next(iter(model.attn_processors.values())))())


def from_pipe(model):
    pipe = pipeline(model)
    again = type(pipe).from_pipe(pipe)
    assert again.transformer is model


def steps(range_name):
    return {"spatial_attention_block_skip_range": 2, range_name: (100, 800), "current_timestep_callback": lambda: 900}


GUIDED = {"attention_weight_callback": lambda _: 0.3, "tensor_format": "BFCHW", "is_guidance_distilled": True}
TIMESTEPS = "spatial_attention_timestep_skip_range"
TOOLS = [
    Tool(name="`add_adapter` (LoRA)", use=lora),
    Tool(name="`load_lora_adapter`", use=lora_file),
    Tool(name="`fuse_lora`, `unload_lora`", use=fuse, deployed=PACKED, expected=fuse),
    Tool(
        name="`enable_group_offload`, leaf level",
        use=group_offload("leaf_level"),
        before=HOOKED,
        then_deploy=TAKE_OFF,
    ),
    Tool(name="`enable_group_offload`, block level", use=group_offload("block_level"), then_deploy=OFFLOADED),
    Tool(name="`enable_group_offload`, to disk", use=group_offload("block_level", disk=True), then_deploy=OFFLOADED),
    Tool(
        name="model CPU offload (accelerate `cpu_offload_with_hook`)",
        use=lambda model: accelerate.cpu_offload_with_hook(model, "cpu"),
    ),
    Tool(
        name="sequential CPU offload (accelerate `cpu_offload`)",
        use=lambda model: accelerate.cpu_offload(model, "cpu", offload_buffers=True),
        before=HOOKED,
        then_deploy=TAKE_OFF,
    ),
    Tool(
        name="accelerate `dispatch_model`",
        use=lambda model: accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True),
        before=HOOKED,
        then_deploy=TAKE_OFF,
    ),
    Tool(
        name="accelerate `infer_auto_device_map`",
        use=lambda model: accelerate.infer_auto_device_map(model, max_memory={"cpu": "1GB"}),
    ),
    *(
        Tool(
            name=f"`enable_layerwise_casting`, {name}",
            use=casting(dtype),
            before=HOOKED,
            after=CAST,
            then_deploy=NEVER,
            expected=rounded(dtype),
        )
        for name, dtype in (("fp8", torch.float8_e4m3fn), ("bf16", torch.bfloat16))
    ),
    Tool(
        name="`fuse_qkv_projections`",
        use=lambda model: model.fuse_qkv_projections(),
        before="fuse_qkv_projections replaced the projections beside it",
        after=FUSED,
        then_deploy=NEVER,
        deployed=FUSED,
        models=("wan",),  # diffusers itself cannot fuse LTX-2
    ),
    Tool(name="`set_attn_processor`", use=processors, after=PROCESSOR, then_deploy=NEVER, deployed=PROCESSOR),
    Tool(name="`set_attention_backend`", use=lambda model: model.set_attention_backend("_native_math")),
    Tool(name="`reset_attention_backend`", use=backend_and_back),
    Tool(name="`attention_backend` (context)", use=attention_blocks),
    Tool(name="pyramid attention broadcast", use=cache("PyramidAttentionBroadcastConfig", **steps(TIMESTEPS))),
    Tool(name="FasterCache", use=cache("FasterCacheConfig", **steps(TIMESTEPS), **GUIDED)),
    Tool(name="TaylorSeer cache", use=cache("TaylorSeerCacheConfig")),
    Tool(name="text KV cache", use=cache("TextKVCacheConfig")),
    # diffusers knows no LTX-2 blocks for these three.
    Tool(name="first block cache", use=cache("FirstBlockCacheConfig", threshold=0.0), models=("wan",)),
    Tool(
        name="MagCache",
        use=cache("MagCacheConfig", num_inference_steps=4, mag_ratios=[1.0] * 4, retention_ratio=1.0),
        models=("wan",),
    ),
    Tool(name="SeaCache", use=cache("SeaCacheConfig", threshold=0.0), models=("wan",)),
    Tool(name="`enable_gradient_checkpointing`", use=lambda model: model.enable_gradient_checkpointing()),
    Tool(
        name="`compile_repeated_blocks`",
        use=lambda model: model.compile_repeated_blocks(fullgraph=True, backend="eager"),
    ),
    Tool(name="`DiffusionPipeline.from_pipe`", use=from_pipe, models=("wan",)),
    Tool(
        name="`pipe.to(dtype)`",
        use=lambda model: pipeline(model).to(torch.bfloat16),
        models=("wan",),
        expected=lambda model: nn.Module.to(model, torch.bfloat16),
    ),
]
COLUMNS = {
    "before": "before apply",
    "after": "after apply",
    "then_deploy": "deploy after it",
    "deployed": "after deploy",
}
CASES = [
    pytest.param(tool, name, column, id=f"{tool.name}-{name}-{column}".replace("`", ""))
    for tool in TOOLS
    for name in tool.models
    for column in COLUMNS
    if getattr(tool, column) is not NEVER
]


def bits(model):
    """Packed storage, wherever offloading has it now."""
    return {n: b.clone() for n, b in model.named_buffers() if b.dtype is torch.uint8 and not b.is_meta}


def computed(model, data):
    dtype = next((p.dtype for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float32)), torch.float32)
    if dtype is torch.bfloat16:
        floating = {k for k, v in data.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        data = {k: v.to(dtype) if k in floating else v for k, v in data.items()}
    with model.cache_context("test"):
        return run(model, data)


@contextlib.contextmanager
def default_backend():
    """diffusers keeps the backend that a model is set to as the default of the whole process."""
    from diffusers.models.attention_dispatch import attention_backend

    with attention_backend("native"):
        yield


@pytest.mark.parametrize(("tool", "name", "column"), CASES)
def test_each_tool_works_or_is_refused(tool, name, column):
    make, inputs = MODELS[name]
    layers = 2 if "skip" in tool.name else 1
    model, reference = make(layers=layers), make(layers=layers)
    data = inputs(model)
    outcome = getattr(tool, column)

    def steps_of(target, use):
        if column == "before" and use:
            use(target)
        qatpatch.apply(target)
        if column in ("after", "then_deploy") and use:
            use(target)
        if column in ("then_deploy", "deployed"):
            qatpatch.deploy(target)
        if column == "deployed" and use:
            use(target)

    with default_backend():
        if outcome != WORKS:
            with pytest.raises((PlanError, RuntimeError)) as caught:
                steps_of(model, tool.use)
            assert outcome in str(caught.value)
            return
        steps_of(reference, tool.expected)
        wanted, stored = computed(reference, data), bits(reference)
        steps_of(model, tool.use)
        assert torch.equal(computed(model, data), wanted)
        assert torch.equal(computed(model, data), wanted)
        states = {layer.state for layer in qatpatch.report(model).layers.values()}
        assert states == {"deployed" if column in ("then_deploy", "deployed") else "train"}
        kept = {".".join(p for p in n.split(".") if p != "base_layer"): b for n, b in bits(model).items()}
        assert all(torch.equal(b, stored[n]) for n, b in kept.items())


def table() -> str:
    """The table of the page, from the cases."""
    rows = [["tool", *COLUMNS.values()]]
    for tool in TOOLS:
        cells = [getattr(tool, column) for column in COLUMNS]
        name = tool.name if len(tool.models) > 1 else f"{tool.name} ({', '.join(tool.models)})"
        rows.append([name, *(cell if cell in (WORKS, NEVER) else f'refused: "{cell}"' for cell in cells)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def test_the_page_has_the_table_of_these_cases():
    page = PAGE.read_text()
    shown = page.partition("<!-- tools -->\n")[2].partition("\n<!-- /tools -->")[0]
    assert shown == table(), f"the table of docs/diffusers.md is to be:\n{table()}"


def patched(stage, name="wan"):
    make, inputs = MODELS[name]
    model = make(layers=1)
    data = inputs(model)
    qatpatch.apply(model)
    if stage == "deployed":
        qatpatch.deploy(model)
    return model, data


@pytest.mark.parametrize("stage", ["train", "deployed"])
@pytest.mark.parametrize("name", MODELS)
def test_adapters_train_switch_save_and_load(stage, name, tmp_path):
    model, data = patched(stage, name)
    plain = run(model, data)
    lora(model)
    trained = [p for n, p in model.named_parameters() if "lora_" in n]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    model.train()
    model(**data)[0].square().mean().backward()
    optimizer.step()
    model.eval()
    adapted = run(model, data)
    assert not torch.equal(adapted, plain)
    model.save_lora_adapter(tmp_path)
    torch.manual_seed(9)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_v"], init_lora_weights=False), adapter_name="second")
    second = run(model, data)
    model.set_adapters(["default", "second"], [1.0, 1.0])
    assert not torch.equal(run(model, data), second) and not torch.equal(second, adapted)
    model.set_adapters(["default"])
    assert torch.equal(run(model, data), adapted)
    model.disable_adapters()
    assert torch.equal(run(model, data), plain)
    model.enable_adapters()
    model.delete_adapters("second")
    model.set_adapters(["default"])
    assert torch.equal(run(model, data), adapted)
    model.unload_lora()
    assert torch.equal(run(model, data), plain)
    fresh, _ = patched(stage, name)
    fresh.load_lora_adapter(tmp_path, prefix=None)
    assert torch.equal(run(fresh, data), adapted)
    assert {layer.state for layer in qatpatch.report(fresh).layers.values()} == {stage}


def test_unfuse_gives_the_patched_weights_back():
    model, data = patched("train")
    weight = model.blocks[0].attn1.to_q.weight.detach().clone()
    lora(model, init_lora_weights=False)
    adapted = model.blocks[0].attn1.to_q
    merged = weight + adapted.get_delta_weight("default")
    model.fuse_lora()
    assert torch.equal(adapted.base_layer.weight, merged)
    model.unfuse_lora()
    torch.testing.assert_close(adapted.base_layer.weight, weight)


@pytest.mark.parametrize("retain", [True, False])
def test_fusing_into_packed_layers_is_refused_also_beside_retained_weights(retain):
    model = tiny_wan(layers=1)
    qatpatch.apply(model)
    qatpatch.deploy(model, retain_original_weights=retain)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    lora(model, init_lora_weights=False)
    adapted = run(model, wan_inputs(model))
    with pytest.raises(RuntimeError, match=PACKED):
        model.fuse_lora()
    assert torch.equal(run(model, wan_inputs(model)), adapted)
    model.unload_lora()
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_casting_functions_cannot_narrow_what_trains(dtype):
    from diffusers.hooks import apply_layerwise_casting

    model, data = patched("train")
    before = model.blocks[0].attn1.to_q.weight.detach().clone()
    with pytest.raises(RuntimeError, match="its master weight would be lost"):
        apply_layerwise_casting(model.blocks[0], dtype, torch.float32)
    assert torch.equal(model.blocks[0].attn1.to_q.weight, before)
    model, data = patched("train")
    model.to(torch.bfloat16)  # asked of the whole model, that is no casting hook
    assert model.blocks[0].attn1.to_q.weight.dtype is torch.bfloat16


def test_weights_that_group_offloading_put_on_a_disk_are_not_saved(tmp_path):
    model, _ = patched("deployed")
    group_offload("block_level", disk=True)(model)
    for save in (model.save_pretrained, lambda path: qatpatch.save(model, path)):
        with pytest.raises(qatpatch.CheckpointError, match="on a disk.*save before enable_group_offload"):
            save(tmp_path / "out")
    assert not list(tmp_path.glob("out/*.safetensors"))
    model, _ = patched("deployed")
    accelerate.cpu_offload(model, "cpu", offload_buffers=True)
    with pytest.raises(qatpatch.CheckpointError, match="meta device"):
        model.save_pretrained(tmp_path / "out")


@pytest.mark.parametrize("first", [True, False])
def test_an_average_follows_training_and_deploy_says_that_it_cannot_after(first):
    from diffusers.training_utils import EMAModel

    model, twin = tiny_wan(layers=1), tiny_wan(layers=1)
    average = EMAModel(model.parameters()) if first else None
    qatpatch.apply(model)
    average = average or EMAModel(model.parameters())
    expected = EMAModel(twin.parameters())
    with torch.no_grad():
        for each in (*model.parameters(), *twin.parameters()):
            each.mul_(1.01)
    average.step(model.parameters())
    expected.step(twin.parameters())
    assert all(torch.equal(a, b) for a, b in zip(average.shadow_params, expected.shadow_params, strict=True))
    average.copy_to(model.parameters())
    report = qatpatch.deploy(model)
    assert any("EMAModel" in note and "copy_to before deploy" in note for note in report.notes)
    assert "EMAModel" in str(report)
    del average
    other, _ = patched("train")
    expected.shadow_params.pop()
    assert qatpatch.deploy(other).notes == ()


def test_guards_go_with_the_patch_and_reach_no_other_model():
    model, other = tiny_wan(layers=1), tiny_wan(layers=1)
    attributes = {n: sorted(vars(m)) for n, m in model.named_modules()}
    qatpatch.apply(model, attention=False)
    with pytest.raises(RuntimeError, match=FUSED):
        copy.deepcopy(model).fuse_qkv_projections()
    other.fuse_qkv_projections()
    qatpatch.remove(model)
    assert {n: sorted(vars(m)) for n, m in model.named_modules()} == attributes
    model.fuse_qkv_projections()


def test_a_backend_that_was_set_meanwhile_is_there_after_remove():
    from diffusers.models.attention_dispatch import AttentionBackendName

    model, _ = patched("train")
    with default_backend():
        model.set_attention_backend("_native_math")
        qatpatch.remove(model)
    backends = {p._attention_backend for p in model.attn_processors.values()}
    assert backends == {AttentionBackendName("_native_math")}


def test_state_dicts_carry_the_settings_they_were_packed_with():
    model, data = patched("deployed")
    state = model.state_dict()
    other = tiny_wan(layers=1, seed=1)
    qatpatch.apply(other, input_scale="unit")
    qatpatch.deploy(other)
    before = {n: t.clone() for n, t in other.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="other settings.*input_scale='dynamic' there, 'unit' here"):
            other.load_state_dict(state, strict=strict)
    assert all(torch.equal(t, before[n]) for n, t in other.state_dict().items() if "weight_packed" in n)
    twin = tiny_wan(layers=1, seed=1)
    qatpatch.apply(twin)
    qatpatch.deploy(twin)
    twin.load_state_dict(state)
    assert torch.equal(run(twin, data), run(model, data))


@pytest.mark.parametrize("change", [qatpatch.remove, qatpatch.deploy])
def test_what_a_reentrant_checkpoint_is_going_to_run_again_stays(change):
    from torch.utils.checkpoint import checkpoint

    model, data = patched("train")
    model.train()
    model.enable_gradient_checkpointing(lambda m, *args: checkpoint(m.__call__, *args, use_reentrant=True))
    data["hidden_states"].requires_grad_()
    with torch.no_grad():
        model(**data)  # leaves nothing behind
    loss = model(**data)[0].square().mean()
    with pytest.raises(PlanError, match="use_reentrant=True, and its backward.*still to come"):
        change(model)
    assert not any(isinstance(m, NVFP4Linear) for m in model.modules())
    loss.backward()
    abandoned = model(**data)[0].square().mean()
    del abandoned
    change(model)
