"""Tools of diffusers, peft and accelerate on patched models: each works, or is refused with the sentence that
docs/diffusers.md says, whether it comes before apply, after apply or after deploy."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import tempfile
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from diffusers import FirstBlockCacheConfig, MagCacheConfig, PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from diffusers.hooks import FasterCacheConfig, SeaCacheConfig, TextKVCacheConfig
from diffusers.training_utils import EMAModel
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs
from peft import LoraConfig
from test_diffusers import pipeline
from torch.utils.checkpoint import checkpoint

import qatpatch
from qatpatch import CheckpointError, PlanError
from qatpatch.packed_linear import NVFP4Linear

CPU = torch.device("cpu")
MODELS = {"ltx2": (tiny_ltx2, ltx2_inputs), "wan": (tiny_wan, wan_inputs)}
MOMENTS = ("before apply", "after apply", "after deploy")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "diffusers.md"


@functools.cache
def documented() -> dict[str, dict[str, str]]:
    """The table of the page: tool -> moment -> what is said of it."""
    header, _, *rows = re.search(r"^\| tool \|.*?\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0].splitlines()[:-1]
    names = [cell.strip() for cell in header.strip("|").split("|")[1:]]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0].replace("`", ""): dict(zip(names, row[1:], strict=True)) for row in cells}


def computed(model, data):
    """The output of a call inside a cache context, which caches ask for."""
    with model.cache_context("cond"):
        return run(model, data)


@functools.cache
def expected(name, layers=1):
    """The output of a patched model that no tool touched."""
    make, inputs = MODELS[name]
    model = make(layers=layers)
    qatpatch.apply(model)
    return run(model, inputs(model))


def used(name, moment, tool, layers=1):
    """A model with the tool used on it at the moment, and inputs; deployed at the last one."""
    make, inputs = MODELS[name]
    model = make(layers=layers)
    data = inputs(model)
    if moment == "before apply":
        tool(model)
    qatpatch.apply(model)
    if moment == "after deploy":
        qatpatch.deploy(model)
    if moment != "before apply":
        tool(model)
    return model, data


def whole(model):
    """The patch is where it was: nothing was taken out, and no dense weight lies beside a packed one."""
    report = qatpatch.report(model)
    deployed = any(isinstance(module, NVFP4Linear) for module in model.modules())
    assert {layer.state for layer in report.layers.values()} == {"deployed" if deployed else "train"}
    assert report.warnings == () and len(report.layers) == len(report.linears) + len(report.attentions)
    for module in model.modules():
        assert not isinstance(module, NVFP4Linear) or "weight" not in {*module._parameters, *module._buffers}


def changes_nothing(tool, *, layers=1):
    """A check that the model computes what it computed without the tool."""

    def check(name, moment):
        model, data = used(name, moment, tool, layers)
        assert torch.equal(computed(model, data), expected(name, layers))
        whole(model)

    return check


# PEFT.

LORA = dict(r=8, target_modules=["to_q", "net.2"], init_lora_weights=False)


def adapted(name, moment):
    def add(model):
        torch.manual_seed(3)
        model.add_adapter(LoraConfig(**LORA), adapter_name="one")

    return used(name, moment, add)


def adapters(name, moment):
    model, data = adapted(name, moment)
    out = run(model, data)
    assert not torch.equal(out, expected(name))
    model.add_adapter(LoraConfig(**LORA), adapter_name="two")
    model.set_adapters(["one", "two"], [0.5, 0.5])
    assert not torch.equal(run(model, data), out)
    model.delete_adapters("two")
    model.set_adapters("one")
    assert torch.equal(run(model, data), out)
    model.disable_adapters()
    assert torch.equal(run(model, data), expected(name))
    model.enable_adapters()
    model.train()
    model(**data)[0].square().mean().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if ".attn1.to_q.lora_B" in n)
    whole(model.eval())
    model.unload_lora()
    assert torch.equal(run(model, data), expected(name))
    whole(model)


def adapter_files(name, moment, directory):
    model, data = adapted(name, moment)
    out = run(model, data)
    model.save_lora_adapter(directory, adapter_name="one")
    model.unload_lora()
    model.load_lora_adapter(str(directory), prefix=None, adapter_name="one", use_safetensors=True)
    assert torch.equal(run(model, data), out)
    whole(model)
    other, _ = used(name, "after deploy", lambda model: None)  # trained on one, used on the other
    other.load_lora_adapter(str(directory), prefix=None, adapter_name="one", use_safetensors=True)
    assert torch.equal(run(other, data), out)


def fusion(name, moment):
    model, data = adapted(name, moment)
    out = run(model, data)
    layer = next(m for n, m in model.named_modules() if n.endswith("attn1.to_q"))
    merged = layer.base_layer.weight + layer.get_delta_weight("one")
    model.fuse_lora()
    assert torch.equal(layer.base_layer.weight, merged)
    whole(model)
    model.unfuse_lora()
    assert torch.allclose(run(model, data), out, atol=1e-4)


# Offloading.


def group_offload(level, **more):
    arguments = more | (dict(num_blocks_per_group=1) if level == "block_level" else {})
    return lambda model: model.enable_group_offload(
        onload_device=CPU, offload_device=CPU, offload_type=level, **arguments
    )


def group_offload_to_disk(name, moment):
    with tempfile.TemporaryDirectory() as directory:
        changes_nothing(group_offload("leaf_level", offload_to_disk_path=directory))(name, moment)
        assert list(Path(directory).iterdir())


def dispatched(model):
    accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)


# Casting, fusing, attention.


def layerwise(storage):
    def check(name, moment):
        def cast(model):
            model.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)

        model, data = used(name, moment, cast)
        plain, _ = used(name, moment, lambda model: None)
        packed = {n: b for n, b in plain.named_buffers() if b.dtype is torch.uint8}
        assert packed and all(torch.equal(b, model.get_buffer(n)) for n, b in packed.items())
        rounded = [n for n, p in model.named_parameters() if p.dtype is storage]
        assert rounded
        with torch.no_grad():
            for path in rounded:
                plain.get_parameter(path).copy_(plain.get_parameter(path).to(storage))
        assert torch.equal(run(model, data), run(plain, data))
        whole(model)
        with pytest.raises(CheckpointError, match="save before enable_layerwise_casting"):
            model.save_pretrained("nowhere")

    return check


def fuse(model):
    if not hasattr(model.config, "rope_type"):
        return model.fuse_qkv_projections()
    for module in model.modules():  # LTX-2's own loop fails on its audio attention, patched or not
        if type(module).__name__ == "LTX2Attention" and module.to_q.in_features == module.to_k.in_features:
            module.fuse_projections()
    return None


def set_processors(model):
    model.set_attn_processor({name: type(p)() for name, p in model.attn_processors.items()})


def backends(model):
    model.set_attention_backend("_native_math")
    model.reset_attention_backend()
    model.set_attention_backend("native")


def inside_a_backend(name, moment):
    from diffusers.models.attention_dispatch import attention_backend

    model, data = used(name, moment, lambda model: None)
    with attention_backend("_native_math"):
        assert torch.equal(run(model, data), expected(name))
    whole(model)


# Caches.


def cache(make):
    """Filled at the moment: what it kept from other numbers must not come back, a first call computes as without."""

    def check(name, moment):
        def fill(model):
            model.enable_cache(make())
            for _ in range(5):
                computed(model, data)

        data = MODELS[name][1](MODELS[name][0](layers=2))
        model, data = used(name, moment, fill, layers=2)
        if moment != "before apply":
            model._reset_stateful_cache()  # as pipelines do after each sample; `apply` and `deploy` do the rest
        assert torch.equal(computed(model, data), expected(name, 2))
        whole(model)
        computed(model, data)
        if moment != "after deploy":
            qatpatch.deploy(model)
            assert torch.equal(computed(model, data), expected(name, 2))
        model.disable_cache()
        assert torch.equal(run(model, data), expected(name, 2))

    return check


def broadcast():
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, cross_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    )


def faster():
    return FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        is_guidance_distilled=True,
        current_timestep_callback=lambda: 900,  # before the steps that it skips
        attention_weight_callback=lambda module: 0.5,
    )


# Training and pipelines.


def averages(name, moment):
    made = []
    model, data = used(name, moment, lambda model: made.append(EMAModel(model.parameters(), decay=0.5)))
    (ema,) = made
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    for _ in range(2):  # its first steps copy
        ema.step(model.parameters())
    for average, parameter, old in zip(ema.shadow_params, model.parameters(), before, strict=True):
        decay = ema.cur_decay_value
        step = old + (1 - ema.get_decay(1)) * (parameter - old)
        assert torch.allclose(average, step + (1 - decay) * (parameter - step), atol=1e-6)
    ema.copy_to(model.parameters())
    assert torch.isfinite(run(model, data)).all()
    whole(model)


def pipe_of(model):
    if hasattr(model.config, "audio_in_channels"):
        from diffusers import FlowMatchEulerDiscreteScheduler, LTX2Pipeline

        others = ("vae", "audio_vae", "text_encoder", "tokenizer", "connectors", "vocoder")
        return LTX2Pipeline(FlowMatchEulerDiscreteScheduler(), transformer=model, **dict.fromkeys(others))
    return pipeline(model)


def from_pipe(model):
    pipe = pipe_of(model)
    assert type(pipe).from_pipe(pipe).transformer is model


def to_bfloat16(name, moment):
    model, data = used(name, moment, lambda model: pipe_of(model).to(torch.bfloat16))
    make, inputs = MODELS[name]
    bf16 = inputs(model)
    if moment == "after deploy":
        plain, _ = used(name, moment, lambda model: None)
        packed = {n: b for n, b in plain.named_buffers() if b.dtype is torch.uint8}
        assert packed and all(torch.equal(b, model.get_buffer(n)) for n, b in packed.items())
        assert torch.isfinite(run(model, bf16)).all()
    else:
        reference = make(layers=1).to(torch.bfloat16)
        qatpatch.apply(reference)
        assert torch.equal(run(model, bf16), run(reference, bf16))
    whole(model)


def compiled(model):
    model.compile_repeated_blocks(backend="eager", fullgraph=True)


def checkpointed(name, moment):
    def enable(model):
        model.enable_gradient_checkpointing()

    gradients = []
    for tool in (enable, lambda model: None):
        model, data = used(name, moment, tool)
        model.train()
        model(**data)[0].square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        whole(model.eval())
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    assert all(torch.equal(gradients[0][n], grad) for n, grad in gradients[1].items())


TOOLS = {
    "add_adapter, set_adapters, disable_adapters, delete_adapters, unload_lora": adapters,
    "save_lora_adapter, load_lora_adapter": adapter_files,
    "fuse_lora, unfuse_lora": fusion,
    "enable_group_offload, block_level": changes_nothing(group_offload("block_level")),
    "enable_group_offload, leaf_level": changes_nothing(group_offload("leaf_level")),
    "enable_group_offload, leaf_level, offload_to_disk_path": group_offload_to_disk,
    "accelerate.cpu_offload": changes_nothing(lambda model: accelerate.cpu_offload(model, execution_device=CPU)),
    "accelerate.cpu_offload_with_hook": changes_nothing(
        lambda model: accelerate.cpu_offload_with_hook(model, execution_device=CPU)
    ),
    "accelerate.dispatch_model": changes_nothing(dispatched),
    "enable_layerwise_casting, float8_e4m3fn": layerwise(torch.float8_e4m3fn),
    "enable_layerwise_casting, bfloat16": layerwise(torch.bfloat16),
    "fuse_qkv_projections": changes_nothing(fuse),
    "unfuse_qkv_projections": changes_nothing(lambda model: model.unfuse_qkv_projections()),
    "set_attn_processor": changes_nothing(set_processors),
    "set_attention_backend, reset_attention_backend": changes_nothing(backends),
    "attention_backend": inside_a_backend,
    "enable_cache, PyramidAttentionBroadcastConfig": cache(broadcast),
    "enable_cache, FasterCacheConfig": cache(faster),
    "enable_cache, TaylorSeerCacheConfig": cache(lambda: TaylorSeerCacheConfig(cache_interval=2)),
    "enable_cache, TextKVCacheConfig": cache(TextKVCacheConfig),
    "enable_cache, FirstBlockCacheConfig": cache(lambda: FirstBlockCacheConfig(threshold=0.0)),
    "enable_cache, MagCacheConfig": cache(lambda: MagCacheConfig(mag_ratios=[1.0] * 8, num_inference_steps=8)),
    "enable_cache, SeaCacheConfig": cache(SeaCacheConfig),
    "EMAModel": averages,
    "DiffusionPipeline.from_pipe": changes_nothing(from_pipe),
    "pipe.to(dtype)": to_bfloat16,
    "compile_repeated_blocks": changes_nothing(compiled),
    "enable_gradient_checkpointing": checkpointed,
}
# diffusers itself knows these for Wan's blocks and not for LTX-2's, or fails on LTX-2 (its ValueError says so).
WAN_ONLY = {name for name in TOOLS if name.endswith(("FirstBlockCacheConfig", "MagCacheConfig", "SeaCacheConfig"))}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_works_or_is_refused_as_documented(tool, moment, name, tmp_path):
    if name == "ltx2" and tool in WAN_ONLY:
        with pytest.raises(ValueError, match="LTX2VideoTransformerBlock'> not registered"):
            TOOLS[tool](name, moment)
        return
    arguments = (tmp_path,) if TOOLS[tool] is adapter_files else ()
    said = documented()[tool][moment]
    if said.startswith("works"):
        TOOLS[tool](name, moment, *arguments)
        return
    (sentence,) = re.fullmatch(r"refused: `(.+)`", said).groups()
    with pytest.raises((PlanError, RuntimeError), match=re.escape(sentence)):
        TOOLS[tool](name, moment, *arguments)


def test_the_table_lists_exactly_the_tools_that_are_run():
    assert list(documented()) == list(TOOLS)


def take_off_group_offload(model):
    from diffusers.hooks.group_offloading import _GROUP_OFFLOADING

    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        if registry is not None:
            registry.remove_hook(_GROUP_OFFLOADING, recurse=False)


HOOKS = {
    "group offload": (group_offload("leaf_level"), take_off_group_offload),
    "dispatch": (dispatched, remove_hook_from_submodules),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", MODELS)
def test_hooks_that_were_taken_off_are_in_nobodys_way(name, hook):
    put_on, take_off = HOOKS[hook]
    make, inputs = MODELS[name]
    model = make(layers=1)
    data = inputs(model)
    dense = run(model, data)
    put_on(model)
    take_off(model)
    qatpatch.apply(model)
    assert torch.equal(run(model, data), expected(name))
    whole(model)
    put_on(model)
    with pytest.raises(PlanError, match="take the hooks off first"):
        qatpatch.remove(model)
    with pytest.raises(PlanError, match="a hook .* replaced its forward; take it off first"):
        qatpatch.deploy(model)
    assert torch.equal(run(model, data), expected(name))
    take_off(model)
    qatpatch.remove(model)
    assert torch.equal(run(model, data), dense)
    qatpatch.apply(model)
    put_on(model)
    take_off(model)
    qatpatch.deploy(model)
    assert torch.equal(run(model, data), expected(name))
    whole(model)


REFUSED = {
    "fuse_qkv_projections": fuse,
    "set_attn_processor": set_processors,
    "enable_layerwise_casting": lambda model: model.enable_layerwise_casting(storage_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("tool", REFUSED)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_refused_changed_nothing(name, tool):
    model, data = used(name, "after apply", lambda model: None)
    for packed in (False, True):
        if packed:
            qatpatch.deploy(model)
        with (
            pytest.raises(RuntimeError, match=tool) if not packed or "casting" not in tool else contextlib.nullcontext()
        ):
            REFUSED[tool](model)
        if not packed or "casting" not in tool:
            assert torch.equal(run(model, data), expected(name))
        whole(model)


@pytest.mark.parametrize("name", MODELS)
def test_deploy_wants_weights_that_no_group_offload_holds(name):
    model, data = used(name, "after apply", group_offload("block_level"))
    with pytest.raises(PlanError, match="deploy before enable_group_offload"):
        qatpatch.deploy(model)
    assert torch.equal(run(model, data), expected(name))
    whole(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_never_serves_what_was_computed_with_other_numbers(name):
    make, inputs = MODELS[name]
    model = make(layers=2)
    data = inputs(model)
    dense = run(model, data)
    qatpatch.apply(model)
    model.enable_cache(broadcast())
    computed(model, data)
    with qatpatch.dense(model):
        assert torch.equal(computed(model, data), dense)
    assert torch.equal(computed(model, data), expected(name, 2))
    with pytest.raises(PlanError, match="call disable_cache first"):
        qatpatch.sensitivity(model, [data], progress=False)
    qatpatch.remove(model)
    assert torch.equal(computed(model, data), dense)


@pytest.mark.parametrize("name", MODELS)
def test_deploy_names_an_average_that_no_longer_fits(name, caplog):
    model = MODELS[name][0](layers=1)
    ema, other = EMAModel(model.parameters()), EMAModel(torch.nn.Linear(3, 3).parameters())
    qatpatch.apply(model)
    report = qatpatch.deploy(model)
    assert any("EMAModel with the shapes" in note for note in report.notes) and "EMAModel" in caplog.text
    assert "EMAModel" in str(report)
    with pytest.raises(RuntimeError):
        ema.step(model.parameters())
    del ema
    model = MODELS[name][0](layers=1)
    qatpatch.apply(model)
    assert qatpatch.deploy(model).notes == () and len(other.shadow_params) == 2


def averaged(*, patched, moment="before apply"):
    """Four steps of fixed updates, the average's state loaded into a new one half-way; the model and its average."""
    model = tiny_wan(layers=1)
    ema = EMAModel(model.parameters(), decay=0.9) if moment == "before apply" else None
    if patched:
        qatpatch.apply(model)
    ema = ema or EMAModel(model.parameters(), decay=0.9)
    generator = torch.Generator().manual_seed(0)
    for number in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
        ema.step(model.parameters())
        if number == 1:
            state = copy.deepcopy(ema.state_dict())
            ema = EMAModel(model.parameters(), decay=0.1)
            ema.load_state_dict(state)
    return model, ema


@pytest.mark.parametrize("moment", ["before apply", "after apply"])
def test_averages_equal_those_of_an_unpatched_model_and_swap_with_the_attention(moment):
    _, plain = averaged(patched=False)
    model, ema = averaged(patched=True, moment=moment)
    assert len(ema.shadow_params) == len(plain.shadow_params)
    assert all(map(torch.equal, ema.shadow_params, plain.shadow_params))
    data = wan_inputs(model, frames=1)
    out, names = run(model, data), [name for name, _ in model.named_parameters()]
    results = []
    for around in (True, False):  # the averaged weights go in around the block, or inside it
        with contextlib.nullcontext() if around else qatpatch.infer_attention(model):
            ema.store(model.parameters())
            ema.copy_to(model.parameters())
            with qatpatch.infer_attention(model) if around else contextlib.nullcontext():
                results.append(run(model, data))
            ema.restore(model.parameters())
        assert torch.equal(run(model, data), out)
    assert torch.equal(*results) and not torch.equal(results[0], out)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("change", [qatpatch.remove, qatpatch.deploy])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_patch_does_not_change_between_a_checkpointed_forward_and_its_backward(reentrant, change):
    model = tiny_wan(layers=1)
    data = wan_inputs(model)
    data["hidden_states"].requires_grad_()  # reentrant checkpointing asks for it
    qatpatch.apply(model)
    model.train().enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=reentrant))
    loss = model(**data)[0].square().mean()
    with pytest.raises(PlanError, match="its backward") if reentrant else contextlib.nullcontext():
        change(model)
    if reentrant:
        loss.backward()
        assert model.blocks[0].attn1.to_q.weight.grad.abs().sum() > 0
        change(model)
        return
    with pytest.raises(RuntimeError, match="different number of tensors was saved"):
        loss.backward()


def test_fusing_on_packed_layers_can_be_undone_in_the_others():
    model = tiny_wan(layers=1)
    data = wan_inputs(model)
    qatpatch.apply(model, exclude=("blocks.0.attn1.to_q",))
    qatpatch.deploy(model)
    model.add_adapter(LoraConfig(**LORA))
    out = run(model, data)
    with pytest.raises(RuntimeError, match="unfuse_lora undoes"):
        model.fuse_lora()
    model.unfuse_lora()
    assert torch.allclose(run(model, data), out, atol=1e-4)


@pytest.mark.parametrize("patched", [True, False])
def test_offloaded_weights_get_no_gradients_from_accelerate_patched_or_not(patched):
    model = tiny_wan(layers=1)
    data = wan_inputs(model)
    if patched:
        qatpatch.apply(model)
    accelerate.cpu_offload(model, execution_device=CPU)
    model.train()(**data)[0].square().mean().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loaded_pipeline_keeps_its_dtype_by_sharing_components(tmp_path):
    qatpatch.register_diffusers()
    model, data = used("wan", "after deploy", lambda model: None)
    model.save_pretrained(tmp_path)
    pipe = pipeline(type(model).from_pretrained(tmp_path))
    for cast in (lambda: pipe.to(torch.bfloat16), lambda: type(pipe).from_pipe(pipe)):
        with pytest.raises(ValueError, match="Casting a quantized model"):
            cast()
    other = type(pipe)(**pipe.components)
    assert torch.equal(run(other.transformer, data), expected("wan"))
