"""save_pretrained and from_pretrained of deployed models and pipelines: bit-equal, or refused with the reason."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs

import qatpatch
from qatpatch import CheckpointError, PlanError
from qatpatch.checkpoint import INDEX_NAME, WEIGHTS_NAME

MODELS = {"ltx2": (tiny_ltx2, ltx2_inputs), "wan": (tiny_wan, wan_inputs)}


@pytest.fixture(autouse=True)
def registered():
    qatpatch.register_diffusers()


def deployed(name="wan", dtype=torch.float32, *, retain=False, **arguments):
    make, inputs = MODELS[name]
    model = make(dtype, layers=arguments.pop("layers", 1))
    qatpatch.apply(model, **arguments)
    qatpatch.deploy(model, retain_original_weights=retain)
    return model, inputs(model)


def same(one, two):
    """Names, dtypes, bits and what the patch computes with."""
    for (name, ours), (other, theirs) in zip(one.state_dict().items(), two.state_dict().items(), strict=True):
        assert name == other and ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    for (name, ours), (_, theirs) in zip(one.named_buffers(), two.named_buffers(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    ours, theirs = qatpatch.report(one), qatpatch.report(two)
    assert ours.layers == theirs.layers and (ours.profile, ours.scheme) == (theirs.profile, theirs.scheme)
    for name in ours.linears:
        a, b = (model.get_submodule(name).quantization for model in (one, two))
        assert a.settings == b.settings and a.trained_dtype == b.trained_dtype


def contents(file):
    """Metadata and tensors of a file; their order in the header is not fixed."""
    with safetensors.safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    return metadata, {name: tensor.tolist() for name, tensor in safetensors.torch.load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shards", [None, "400KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_comes_back_bit_for_bit(name, shards, dtype, tmp_path):
    model, data = deployed(name, dtype)
    out = run(model, data)
    model.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    assert (tmp_path / INDEX_NAME).exists() == bool(shards)
    loaded = type(model).from_pretrained(tmp_path)
    same(model, loaded)
    assert torch.equal(run(loaded, data), out)
    assert not loaded.training and not any(t.is_meta for t in (*loaded.parameters(), *loaded.buffers()))
    again = qatpatch.load(tmp_path)  # one header for both
    same(model, again)
    assert torch.equal(run(again, data), out)
    loaded.save_pretrained(tmp_path / "again", **({"max_shard_size": shards} if shards else {}))
    for file in tmp_path.glob("*.safetensors"):
        assert contents(tmp_path / "again" / file.name) == contents(file)


SETTINGS = {
    "fa4": dict(target="sm_100"),
    "weight only": dict(activations=False, attention=False),
    "unit": dict(input_scale="unit", global_scale="amax", exclude=("blocks.0.ffn",)),
    "quantized backward": dict(backward="quantized", linear=True, attention=False),
}


@pytest.mark.parametrize("arguments", SETTINGS.values(), ids=SETTINGS)
def test_settings_come_back(arguments, tmp_path):
    model, data = deployed(**arguments)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    same(model, loaded)
    assert torch.equal(run(loaded, data), run(model, data))


def test_the_trained_dtype_and_calibrated_scales_come_back(tmp_path):
    model = tiny_wan(layers=1)
    data = wan_inputs(model)
    qatpatch.apply(model, input_scale="static")
    with torch.no_grad(), qatpatch.calibrate(model):
        model(**data)
    with torch.autocast("cpu", torch.bfloat16):
        model.train()(**data)[0].sum().backward()
    qatpatch.deploy(model.eval())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    same(model, loaded)
    assert loaded.blocks[0].attn1.to_q.quantization.trained_dtype is torch.bfloat16
    assert loaded.blocks[0].attn1.to_q.quantization.settings.static_scale is not None
    assert torch.equal(run(loaded, data), run(model, data))


def test_retained_weights_and_stages_come_back_and_can_be_removed(tmp_path):
    model, data = deployed("ltx2", retain=True)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    same(model, loaded)
    for block in (qatpatch.dense, lambda m: qatpatch.stage(m, "base")):
        with block(model), block(loaded):
            assert torch.equal(run(loaded, data), run(model, data))
    dense = tiny_ltx2(layers=1)
    qatpatch.remove(loaded)
    assert "quantization_config" not in loaded.config and not hasattr(loaded, "hf_quantizer")
    assert torch.equal(run(loaded, data), run(dense, data))
    loaded.to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    assert not qatpatch.is_patched(type(model).from_pretrained(tmp_path / "dense"))


@pytest.mark.parametrize("name", MODELS)
def test_a_dtype_request_reaches_all_but_packed_storage(name, tmp_path):
    model, _ = deployed(name)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    packed = {n: b for n, b in model.named_buffers() if b.dtype is torch.uint8}
    assert packed and all(torch.equal(b, loaded.get_buffer(n)) for n, b in packed.items())
    fp32 = type(model)._keep_in_fp32_modules or ()
    for path, parameter in loaded.named_parameters():
        kept = any(part in path.split(".") for part in fp32)
        assert parameter.dtype is (torch.float32 if kept else torch.bfloat16), path
    layers = [loaded.get_submodule(n) for n in qatpatch.report(loaded).linears]
    assert {layer.compute_dtype for layer in layers} == {torch.bfloat16}
    for dtype in (torch.float64, torch.float8_e4m3fn):
        with pytest.raises(CheckpointError, match="is not one of float32, bfloat16, float16"):
            type(model).from_pretrained(tmp_path, torch_dtype=dtype)


def test_layers_without_bias_follow_the_dtype_request_too(tmp_path):
    model = tiny_ltx2(layers=1, ff_bias=False)
    qatpatch.apply(model)
    qatpatch.deploy(model)
    model.save_pretrained(tmp_path)
    for loaded in (
        type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16),
        qatpatch.load(tmp_path, dtype=torch.bfloat16),
    ):
        layer = loaded.transformer_blocks[0].ff.net[2]
        assert layer.bias is None and layer.compute_dtype is torch.bfloat16
        assert torch.isfinite(run(loaded, ltx2_inputs(loaded))).all()


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto", "balanced"])
def test_device_maps(device_map, tmp_path):
    model, data = deployed()
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    loaded = type(model).from_pretrained(tmp_path, device_map=device_map)
    same(model, loaded)
    assert torch.equal(run(loaded, data), run(model, data))


def test_a_device_map_that_puts_packed_layers_on_a_disk_is_refused(tmp_path):
    model, _ = deployed()
    model.save_pretrained(tmp_path / "model")
    places = {name.partition(".")[0] for name in model.state_dict()}
    device_map = {place: "cpu" for place in places - {"blocks"}} | {"blocks": "disk"}
    with pytest.raises(CheckpointError, match="blocks.0.attn1.to_q on the disk.*enable_group_offload"):
        type(model).from_pretrained(tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "off")


def pipeline(transformer):
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline

    vae = AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    scheduler = FlowMatchEulerDiscreteScheduler()
    return WanPipeline(transformer=transformer, vae=vae, scheduler=scheduler, tokenizer=None, text_encoder=None)


@pytest.mark.parametrize("written_by", ["pipeline", "qatpatch"])
def test_a_whole_pipeline_comes_back(written_by, tmp_path):
    from diffusers import DiffusionPipeline

    model, data = deployed()
    out = run(model, data)
    pipeline(model).save_pretrained(tmp_path, max_shard_size="300KB" if written_by == "pipeline" else "10GB")
    if written_by == "qatpatch":
        qatpatch.save(model, tmp_path / "transformer")
    for dtype in ({}, {"torch_dtype": torch.bfloat16}):
        loaded = DiffusionPipeline.from_pretrained(tmp_path, tokenizer=None, text_encoder=None, **dtype)
        transformer = loaded.transformer
        assert loaded.vae.dtype is dtype.get("torch_dtype", torch.float32)
        packed = {n: b for n, b in model.named_buffers() if b.dtype is torch.uint8}
        assert all(torch.equal(b, transformer.get_buffer(n)) for n, b in packed.items())
        if not dtype:
            same(model, transformer)
            assert torch.equal(run(transformer, data), out)


def test_files_of_save_are_read_by_diffusers_without_a_warning(tmp_path, caplog):
    model, data = deployed()
    qatpatch.save(model, tmp_path)
    caplog.clear()
    loaded = type(model).from_pretrained(tmp_path)
    same(model, loaded)
    assert not [record for record in caplog.records if "not expected" in record.message], caplog.text
    assert torch.equal(run(loaded, data), run(model, data))


UNREGISTERED = """
import sys
import qatpatch, diffusers
from diffusers.quantizers import auto
before = dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
assert "qatpatch" not in before[0]
try:
    diffusers.WanTransformer3DModel.from_pretrained(sys.argv[1])
except ValueError as error:
    assert "qatpatch" in str(error), error
else:
    raise SystemExit("it was read")
qatpatch.register_diffusers()
qatpatch.register_diffusers()
for table, old in zip((auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING), before):
    assert {k: v for k, v in table.items() if k != "qatpatch"} == old and len(table) == len(old) + 1
diffusers.WanTransformer3DModel.from_pretrained(sys.argv[1])
"""


def test_registration_happens_when_asked_and_changes_no_entry(tmp_path):
    deployed()[0].save_pretrained(tmp_path)
    root = os.path.dirname(os.path.dirname(qatpatch.__file__))
    script = f"import sys; sys.path.insert(0, {root!r})\n{UNREGISTERED}"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_name_that_another_package_took_is_refused(monkeypatch):
    from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "qatpatch", dict)
    with pytest.raises(PlanError, match="builtins.dict"):
        qatpatch.register_diffusers()


def rewrite(directory, change, *, header=None):
    """Write the file again with other tensors."""
    file = directory / WEIGHTS_NAME
    with safetensors.safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    safetensors.torch.save_file(change(safetensors.torch.load_file(file)), file, metadata=header or metadata)


KEY = "blocks.0.attn1.to_q.weight_packed"
DAMAGES = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != KEY}, "1 tensors are missing .*weight_packed"),
    "missing dense": (lambda t: {k: v for k, v in t.items() if k != "proj_out.bias"}, "missing .*proj_out.bias"),
    "extra": (lambda t: {**t, "stranger": torch.zeros(3)}, "1 tensors are too many .stranger"),
    "shape": (lambda t: {**t, KEY: torch.zeros(256, 64, dtype=torch.uint8)}, "size mismatch for blocks.0.attn1"),
    "dense shape": (lambda t: {**t, "proj_out.bias": torch.zeros(7)}, "size mismatch for proj_out.bias"),
    "dtype": (lambda t: {**t, KEY: torch.zeros(256, 128)}, "must be torch.uint8, the file has torch.float32"),
    "double": (lambda t: {**t, "proj_out.bias": torch.zeros(16, dtype=torch.float64)}, "the file has None"),
    "changed": (lambda t: {**t, KEY: t[KEY] ^ 1}, "checksum differs"),
    "changed dense": (lambda t: {**t, "proj_out.bias": t["proj_out.bias"] + 1}, "checksum differs"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_do_not_fit_are_errors_and_not_warnings(damage, tmp_path):
    model, _ = deployed()
    model.save_pretrained(tmp_path)
    change, message = DAMAGES[damage]
    rewrite(tmp_path, change)
    for arguments in ({}, {"torch_dtype": torch.bfloat16}, {"device_map": "cpu"}):
        with pytest.raises(CheckpointError, match=message):
            type(model).from_pretrained(tmp_path, **arguments)
    with pytest.raises(ValueError):
        type(model).from_pretrained(tmp_path, ignore_mismatched_sizes=True, low_cpu_mem_usage=False)


def test_shards_of_other_models_foreign_headers_and_truncation_are_refused(tmp_path):
    model, _ = deployed()
    other, _ = deployed(input_scale="unit")
    for name, each in (("one", model), ("two", other)):
        each.save_pretrained(tmp_path / name, max_shard_size="300KB")
    shard = sorted(p.name for p in (tmp_path / "one").glob("*.safetensors"))[-1]
    whole = (tmp_path / "one" / shard).read_bytes()
    (tmp_path / "one" / shard).write_bytes((tmp_path / "two" / shard).read_bytes())
    for load in (type(model).from_pretrained, qatpatch.load):
        with pytest.raises(CheckpointError, match="not of the same model"):
            load(tmp_path / "one")
    (tmp_path / "one" / shard).write_bytes(whole[:-10])
    for load in (type(model).from_pretrained, qatpatch.load):
        with pytest.raises(CheckpointError, match="truncated"):
            load(tmp_path / "one")
    model.save_pretrained(tmp_path / "three")
    rewrite(tmp_path / "three", lambda t: t, header={"format": "pt"})
    with pytest.raises(CheckpointError, match="was not written by qatpatch.save"):
        type(model).from_pretrained(tmp_path / "three")


def test_the_wrong_class_and_dense_weights_are_refused(tmp_path):
    from diffusers import LTX2VideoTransformer3DModel

    from qatpatch.diffusers_quantizer import NVFP4Config

    model, _ = deployed()
    model.save_pretrained(tmp_path / "packed")
    with pytest.raises((CheckpointError, ValueError)):
        LTX2VideoTransformer3DModel.from_pretrained(tmp_path / "packed")
    dense = tiny_wan(layers=1)
    dense.save_pretrained(tmp_path / "dense")
    model, data = deployed()
    model.save_pretrained(tmp_path / "packed")
    with pytest.warns(UserWarning, match="The `quantization_config` from the model will be used"):
        loaded = type(model).from_pretrained(tmp_path / "packed", quantization_config=NVFP4Config())
    assert torch.equal(run(loaded, data), run(model, data))
    with pytest.raises(CheckpointError, match="load this one without quantization_config, then qatpatch.apply"):
        type(dense).from_pretrained(tmp_path / "dense", quantization_config=NVFP4Config())
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "qatpatch"}
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="was not written by qatpatch.save"):
        type(dense).from_pretrained(tmp_path / "dense")


def test_what_cannot_be_saved_is_refused_before_a_file_is_written(tmp_path):
    from peft import LoraConfig

    model, _ = deployed()
    model.add_adapter(LoraConfig(r=8, target_modules=["to_q"]))
    with pytest.raises(CheckpointError, match="2 layers .* are wrapped by adapters.*save_lora_adapter"):
        model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="wrapped by adapters"):
        pipeline(model).save_pretrained(tmp_path / "pipeline")
    assert list(tmp_path.glob("*.safetensors")) == [] and not (tmp_path / "config.json").exists()
    model.unload_lora()
    with pytest.raises(CheckpointError, match="leave out safe_serialization=False"):
        model.save_pretrained(tmp_path, safe_serialization=False)
    model.save_pretrained(tmp_path)
    model.blocks[0].attn1.processor = type(model.blocks[0].attn2.processor)()
    with pytest.raises(CheckpointError, match="lost its QAT attention"):
        model.save_pretrained(tmp_path)


def test_save_does_not_write_beside_shards_that_would_be_read_instead(tmp_path):
    model, _ = deployed()
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    with pytest.raises(CheckpointError, match="sharded model.*another directory"):
        qatpatch.save(model, tmp_path)
    assert not (tmp_path / WEIGHTS_NAME).exists()


def test_copies_and_pickles_save_themselves(tmp_path):
    model, data = deployed()
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for other in (copied, pickled):
            other.proj_out.bias += 1
    for name, other in (("copied", copied), ("pickled", pickled)):
        other.save_pretrained(tmp_path / name)
        assert torch.equal(run(type(model).from_pretrained(tmp_path / name), data), run(other, data))
    del model
    copied.save_pretrained(tmp_path / "later")


def test_a_loaded_model_refuses_what_diffusers_refuses_of_quantized_ones(tmp_path):
    model, _ = deployed()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Casting a quantized model"):
        loaded.to(torch.bfloat16)
    with pytest.raises(PlanError, match="cannot be dequantized"):
        loaded.dequantize()
    with pytest.raises(PlanError, match="is deployed already"):
        qatpatch.deploy(loaded)


def test_a_model_of_another_quantizer_is_not_deployed():
    model = tiny_wan(layers=1)
    qatpatch.apply(model)
    model.hf_quantizer = object()
    with pytest.raises(PlanError, match="diffusers loaded this model with its object"):
        qatpatch.deploy(model)


def test_what_diffusers_says_where_nothing_is_registered_is_in_the_documentation(tmp_path, monkeypatch):
    from diffusers.quantizers import auto

    model, _ = deployed()
    model.save_pretrained(tmp_path)
    for table in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(table, "qatpatch")
    said = "Unknown quantization type, got qatpatch"
    with pytest.raises(ValueError, match=said):
        type(model).from_pretrained(tmp_path)
    page = Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md"
    (row,) = [line for line in page.read_text().splitlines() if said in line]
    assert "qatpatch.register_diffusers()" in row
