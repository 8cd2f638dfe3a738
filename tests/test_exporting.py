"""export and convert: every file is decoded by the package that it is for, and every package's own file is read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import format_oracle
import pytest
import safetensors.torch
import torch
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs
from torch import nn

import qatpatch
from qatpatch import CheckpointError, PlanError, Profile, Rule, nvfp4
from qatpatch.formats import FORMATS
from qatpatch.tensor_files import TensorFile

PACKAGE = {"modelopt": "modelopt", "comfy": "comfy-kitchen", "compressed-tensors": "compressed-tensors"}
ANY_LINEAR = Profile(name="all", rules=(Rule(match=("*",), action="linear"),))
PREFIX = "model.diffusion_model."


def calibrated(build, inputs, **options):
    model = build(layers=1)
    qatpatch.apply(model, input_scale="static", **options)
    with qatpatch.calibrate(model):
        run(model, inputs(model))
    return model


def target_of(directory, format):
    return directory / "model.safetensors" if format == "comfy" else directory


def file_of(directory, format):
    return directory / ("model.safetensors" if format == "comfy" else "diffusion_pytorch_model.safetensors")


def packed_layers(model):
    return {n: m for n, m in model.named_modules() if type(m).__name__ == "NVFP4Linear"}


def decoded(model):
    return {name: nvfp4.dequantize(layer.nvfp4_weight()) for name, layer in packed_layers(model).items()}


def ragged():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(60, 24), nn.GELU(), nn.Linear(24, 130), nn.GELU(), nn.Linear(130, 7))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Tiny models, their files in every format, and what the packages make of them: one process for each package."""
    root = tmp_path_factory.mktemp("formats")
    models = {
        "wan": calibrated(tiny_wan, wan_inputs),
        "wan-amax": calibrated(tiny_wan, wan_inputs, global_scale="amax"),
        "ltx2": calibrated(tiny_ltx2, ltx2_inputs),
    }
    weight_only = tiny_wan(layers=1)
    qatpatch.apply(weight_only, activations=False)
    models["wan-weight-only"] = weight_only
    for name, model in models.items():
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        for format in FORMATS:
            qatpatch.export(model, target_of(root / "training" / name / format, format), format=format)
        after = model.state_dict()
        assert list(before) == list(after) and all(torch.equal(before[k], after[k]) for k in before)
        assert qatpatch.report(model).linears and not packed_layers(model)
        qatpatch.deploy(model)
        for format in FORMATS:
            qatpatch.export(model, target_of(root / "deployed" / name / format, format), format=format)
    odd = ragged()
    qatpatch.apply(odd, ANY_LINEAR, input_scale="unit")
    qatpatch.deploy(odd)
    models["ragged"] = odd
    qatpatch.export(odd, root / "deployed" / "ragged" / "comfy" / "model.safetensors", "comfy", original_names=False)
    dense = {n: t for n, t in tiny_wan(layers=1, seed=5).state_dict().items()}
    targets = {n: dense[f"{n}.weight"] for n in qatpatch.report(models["wan"]).linears}
    safetensors.torch.save_file({n: t.contiguous() for n, t in targets.items()}, root / "dense.safetensors")
    todo = {}
    for format, package in PACKAGE.items():
        todo[package] = tasks = [
            ("decode", file_of(root / "deployed" / name / format, format), root / "decoded" / format / name)
            for name in models
            if file_of(root / "deployed" / name / format, format).exists()
        ]
        theirs = root / "theirs" / format / file_of(root, format).name
        tasks += [("write", root / "dense.safetensors", theirs)]
        tasks += [("decode", theirs, root / "decoded" / format / "theirs")]
        if format == "comfy":
            other = file_of(root / "deployed" / "ltx2" / "modelopt", "modelopt")
            tasks += [("decode_any", other, root / "comfy_reads_modelopt")]
        if format == "modelopt":
            tasks += [("write_for_comfy", root / "dense.safetensors", root / "theirs" / "both.safetensors")]
            tasks += [("decode", file_of(root / "deployed" / "ltx2" / "comfy", "comfy"), root / "modelopt_reads_comfy")]
    format_oracle.run(todo)
    return root, models


CASES = [(f, n) for f in FORMATS for n in ("wan", "wan-amax", "ltx2", "wan-weight-only")] + [("comfy", "ragged")]


@pytest.mark.parametrize(("format", "name"), CASES)
def test_the_package_decodes_what_is_deployed(world, format, name):
    root, models = world
    theirs = safetensors.torch.load_file(root / "decoded" / format / name)
    ours = decoded(models[name])
    refine = {n for n, m in packed_layers(models[name]).items() if m.quantization.settings.refine_only}
    assert bool(refine) == (name == "ltx2")
    assert len(theirs) == len(ours) - len(refine)
    if format == "comfy":
        names = original(models[name], ours) if name != "ragged" else {n: PREFIX + n for n in ours}
        theirs = {n: theirs[names[n]] for n in ours if n not in refine}
        theirs = {n: t[: ours[n].shape[0], : ours[n].shape[1]] for n, t in theirs.items()}
    for layer, weight in theirs.items():
        if name == "wan-amax":
            # Three factors that are no powers of two: the order of products counts. compressed-tensors has bfloat16.
            rtol = 2**-7 if format == "compressed-tensors" else 2**-22
            torch.testing.assert_close(weight, ours[layer], rtol=rtol, atol=0)
        else:
            assert torch.equal(weight, ours[layer]), layer


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["wan", "wan-amax", "ltx2", "wan-weight-only"])
def test_a_model_that_trains_is_written_as_the_deployed_one(world, format, name):
    root, _ = world
    one, two = (file_of(root / state / name / format, format) for state in ("training", "deployed"))
    assert one.read_bytes() == two.read_bytes()
    if format != "comfy":
        assert (one.parent / "config.json").read_bytes() == (two.parent / "config.json").read_bytes()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["wan", "wan-amax", "wan-weight-only"])
def test_what_was_written_is_read_back_bit_for_bit(world, format, name, tmp_path):
    root, models = world
    path = target_of(root / "deployed" / name / format, format)
    loaded = qatpatch.load(path, model=tiny_wan(layers=1, seed=9) if format == "comfy" else None)
    source = models[name].state_dict()
    for key, tensor in loaded.state_dict().items():
        if format == "compressed-tensors" and name == "wan-amax" and key.endswith("weight_global_scale"):
            close = (tensor.view(torch.float32), source[key].view(torch.float32))
            torch.testing.assert_close(*close, rtol=2**-23, atol=0)
        else:
            assert torch.equal(tensor, source[key]) and tensor.dtype == source[key].dtype, key
    if name == "wan":
        # Attention is dense in what other tools' files say, so the linears alone are compared.
        x = torch.randn(3, 256)
        for layer, module in packed_layers(loaded).items():
            settings = module.quantization.settings
            assert settings == packed_layers(models[name])[layer].quantization.settings
        assert torch.equal(loaded.blocks[0].attn1.to_q(x), models[name].blocks[0].attn1.to_q(x))
    again = target_of(tmp_path / "again", format)
    qatpatch.export(loaded, again, format=format)
    first, second = file_of(root / "deployed" / name / format, format), file_of(tmp_path / "again", format)
    if not (format == "compressed-tensors" and name == "wan-amax"):
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("format", FORMATS)
def test_files_of_the_packages_are_read(world, format):
    root, _ = world
    path = root / "theirs" / format / file_of(root, format).name
    theirs = safetensors.torch.load_file(root / "decoded" / format / "theirs")
    stored = TensorFile(path)
    skeleton = nn.ModuleDict()
    for name in safetensors.torch.load_file(root / "dense.safetensors"):
        grow(skeleton, name, safetensors.torch.load_file(root / "dense.safetensors")[name].shape)
    loaded = qatpatch.load(path, model=skeleton)
    layers = packed_layers(loaded)
    assert len(layers) == len(theirs) == 10
    for name, layer in layers.items():
        key = PREFIX + name if format == "comfy" else name
        ours = nvfp4.dequantize(layer.nvfp4_weight())
        if format == "compressed-tensors":
            torch.testing.assert_close(ours, theirs[key], rtol=2**-7, atol=0)
            codes = stored.tensor(f"{key}.weight_packed")
            assert torch.equal(layer.weight_packed, codes)
            assert torch.equal(layer.weight_scale, stored.tensor(f"{key}.weight_scale").view(torch.uint8))
            assert layer.quantization.settings.static_scale == pytest.approx(1 / 768, rel=1e-7)
        else:
            torch.testing.assert_close(ours, theirs[key], rtol=2**-22, atol=0)
            scale = stored.tensor(f"{key}.weight_scale_2")
            assert torch.equal(layer.weight_global_scale.view(torch.float32), scale.reshape(1))
        error = (ours - safetensors.torch.load_file(root / "dense.safetensors")[name]).norm() / theirs[key].norm()
        assert 0.08 < error < 0.11
        assert layer.quantization.settings.input_scale == ("dynamic" if format == "comfy" else "static")


def grow(root, name, shape):
    """Put a linear at a dotted path of nested ModuleDicts."""
    *parents, last = name.split(".")
    for part in parents:
        if part not in root:
            root[part] = nn.ModuleDict()
        root = root[part]
    root[last] = nn.Linear(shape[1], shape[0], bias=False)


def original(model, layers):
    from qatpatch.key_names import original_names

    names = original_names(type(model).__name__, [f"{n}.weight" for n in layers])
    return {key.removesuffix(".weight"): PREFIX + name.removesuffix(".weight") for key, name in names.items()}


def test_each_layout_read_as_the_other_is_noise_that_only_metadata_prevents(world):
    """The traps: what raises nothing in the packages, and what is refused here."""
    root, models = world
    ours = decoded(models["ltx2"])
    names = original(models["ltx2"], ours)
    wrong = safetensors.torch.load_file(root / "comfy_reads_modelopt")
    layer = "transformer_blocks.0.attn1.to_q"
    assert (wrong[layer] - ours[layer]).norm() / ours[layer].norm() > 1.3
    wrong = safetensors.torch.load_file(root / "modelopt_reads_comfy")
    assert (wrong[names[layer]] - ours[layer]).norm() / ours[layer].norm() > 1.3
    # The same tensors by name, dtype and shape in both files: nothing but metadata tells them apart.
    a = TensorFile(file_of(root / "deployed" / "ltx2" / "modelopt", "modelopt")).specs
    b = TensorFile(file_of(root / "deployed" / "ltx2" / "comfy", "comfy")).specs
    for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        assert a[f"{layer}.{part}"] == b[f"{names[layer]}.{part}"]


def test_modelopts_own_file_for_comfyui_is_refused(world):
    """Its scales are tiled and its nibbles are not swapped, while the header claims ComfyUI's layout."""
    root, _ = world
    with pytest.raises(CheckpointError, match="both _quantization_metadata.*and quantization_config.*noise"):
        qatpatch.load(root / "theirs" / "both.safetensors", model=tiny_wan(layers=1))


@pytest.mark.parametrize("name", ["wan", "ltx2"])
def test_diffusers_reads_modelopt_files(world, name):
    from diffusers import BFLQuantizationConfig

    root, models = world
    directory = root / "deployed" / name / "modelopt"
    read = type(models[name]).from_single_file(
        str(directory / "diffusion_pytorch_model.safetensors"),
        config=str(directory),
        quantization_config=BFLQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )
    from diffusers.quantizers.bfl.utils import BFLNVFP4Linear, dequantize_nvfp4

    found = {n: m for n, m in read.named_modules() if isinstance(m, BFLNVFP4Linear)}
    ours = decoded(models[name])
    dense = {n for n, m in packed_layers(models[name]).items() if m.quantization.settings.refine_only}
    assert set(found) == set(ours) - dense and len(found) == (9 if name == "ltx2" else 10)
    for layer, module in found.items():
        assert torch.equal(dequantize_nvfp4(module.weight, module.weight_scale, module.weight_scale_2), ours[layer])
        assert float(module.input_scale) == packed_layers(models[name])[layer].quantization.settings.static_scale
    for layer in dense:
        assert torch.equal(read.get_submodule(layer).weight, models[name].get_submodule(layer).dense_weight)
    inputs = (wan_inputs if name == "wan" else ltx2_inputs)(read)
    assert torch.isfinite(run(read, inputs)).all()


def test_comfy_files_have_the_original_names_and_both_metadata(world):
    root, models = world
    file = TensorFile(root / "deployed" / "ltx2" / "comfy" / "model.safetensors")
    assert all(key.startswith(PREFIX) for key in file.specs)
    assert PREFIX + "audio_patchify_proj.weight" in file.specs and PREFIX + "adaln_single.linear.bias" in file.specs
    said = json.loads(file.metadata["_quantization_metadata"])
    assert said["format_version"] == "1.0" and len(said["layers"]) == 9
    from diffusers.loaders.single_file_utils import convert_ltx2_transformer_to_diffusers

    dense = {k: torch.zeros(0) for k in file.specs if k.endswith((".weight", ".bias")) or "scale_shift_table" in k}
    assert set(convert_ltx2_transformer_to_diffusers(dense)) == set(tiny_ltx2(layers=1).state_dict())
    weight_only = TensorFile(root / "deployed" / "wan-weight-only" / "comfy" / "model.safetensors")
    (entry,) = {json.dumps(e) for e in json.loads(weight_only.metadata["_quantization_metadata"])["layers"].values()}
    assert json.loads(entry) == {"format": "nvfp4", "full_precision_matrix_mult": True}
    assert not any(key.endswith(".input_scale") for key in weight_only.specs)


def test_weight_only_files_say_so(world):
    root, _ = world
    config = json.loads((root / "deployed" / "wan-weight-only" / "modelopt" / "config.json").read_text())
    said = config["quantization_config"]
    assert said["quant_algo"] == "W4A16_NVFP4" and "input_activations" not in said["config_groups"]["group_0"]
    assert config["_class_name"] == "WanTransformer3DModel" and "proj_out" in said["ignore"]
    file = TensorFile(root / "deployed" / "wan-weight-only" / "modelopt" / "diffusion_pytorch_model.safetensors")
    assert not any(key.endswith(".input_scale") for key in file.specs)
    assert json.loads(file.metadata["quantization_config"]) == said
    loaded = qatpatch.load(root / "deployed" / "wan-weight-only" / "compressed-tensors")
    assert {m.quantization.settings.activations for m in packed_layers(loaded).values()} == {False}


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", ["qatpatch", *FORMATS])
def test_convert_between_all_formats(world, source, target, tmp_path):
    root, models = world
    start = target_of(root / "deployed" / "wan" / source, source)
    config = root / "deployed" / "wan" / "modelopt"
    if source == target:
        with pytest.raises(CheckpointError, match="the same file"):
            qatpatch.convert(start, start, target, model=config)
        return
    model = config if source == "comfy" else None
    qatpatch.convert(start, target_of(tmp_path / "out", target), target, model=model)
    if target == "qatpatch":
        loaded = qatpatch.load(tmp_path / "out")
        for key, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, models["wan"].state_dict()[key]), key
        qatpatch.save(loaded, tmp_path / "again")
        names = os.listdir(tmp_path / "out")
        assert all((tmp_path / "again" / n).read_bytes() == (tmp_path / "out" / n).read_bytes() for n in names)
        return
    expected = file_of(root / "deployed" / "wan" / target, target)
    assert file_of(tmp_path / "out", target).read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["wan", "ltx2"])
def test_our_own_files_are_converted_as_the_model_is_exported(world, format, name, tmp_path):
    root, models = world
    qatpatch.save(models[name], tmp_path / "own")
    qatpatch.convert(tmp_path / "own", target_of(tmp_path / "out", format), format)
    expected = file_of(root / "deployed" / name / format, format)
    assert file_of(tmp_path / "out", format).read_bytes() == expected.read_bytes()
    qatpatch.convert(tmp_path / "own", tmp_path / "copy", "qatpatch")
    assert all(f.read_bytes() == (tmp_path / "copy" / f.name).read_bytes() for f in (tmp_path / "own").iterdir())
    if name == "ltx2":  # whose last tensor belongs to a layer that is written dense
        return
    file = tmp_path / "own" / "diffusion_pytorch_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="checksum differs"):
        qatpatch.convert(tmp_path / "own", target_of(tmp_path / "damaged", format), format)
    assert not file_of(tmp_path / "damaged", format).exists()


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_read_from_another_tool_says_what_is_dense_and_why(format, tmp_path):
    model = tiny_wan(layers=1)
    profile = qatpatch.apply(model, input_scale="unit")
    qatpatch.deploy(model)
    qatpatch.export(model, target_of(tmp_path / "file", format), format)
    given = tiny_wan(layers=1) if format == "comfy" else None
    loaded = qatpatch.load(target_of(tmp_path / "file", format), model=given)
    qatpatch.save(loaded, tmp_path / "own")
    for read in (loaded, qatpatch.load(tmp_path / "own")):
        report = qatpatch.report(read)
        assert set(report.skipped) == set(profile.skipped) | set(profile.attentions)
        assert all(f"A file of format {format} keeps no attention" in report.skipped[n] for n in profile.attentions)
        assert all(
            f"of format {format}, holds it dense" in report.skipped[n] for n in profile.skipped if "attn" not in n
        )
        assert f"another tool ({format}), which does not say how it was trained" in str(report)
        with pytest.raises(PlanError, match=rf"another tool \({format}\), which keeps no attention: it is dense here"):
            qatpatch.infer_attention(read).__enter__()
    assert "does not say how it was trained" not in str(qatpatch.report(model))


class TestInputScales:
    """What the message says to do is done here, and works."""

    def lacking(self, source, format, tmp_path):
        write = qatpatch.convert if isinstance(source, Path) else qatpatch.export
        with pytest.raises(CheckpointError, match="10 layers ") as raised:
            write(source, target_of(tmp_path / "never", format), format)
        assert ("--without-input-scale" in str(raised.value)) == (format == "comfy")
        assert not (tmp_path / "never").exists()
        return str(raised.value)

    @pytest.mark.parametrize("format", FORMATS)
    def test_the_advice_for_a_patched_model(self, format, tmp_path):
        model = tiny_wan(layers=1)
        qatpatch.apply(model)
        for retained in (False, True):
            if retained:
                qatpatch.deploy(model, retain_original_weights=True)
            said = self.lacking(model, format, tmp_path)
            assert "qatpatch.remove(model), then qatpatch.apply(model, input_scale='static')" in said
        qatpatch.remove(model)
        qatpatch.apply(model, input_scale="static")
        said = self.lacking(model, format, tmp_path)
        assert "run forwards inside `with qatpatch.calibrate(model):` first" in said and "apply" not in said
        with qatpatch.calibrate(model):
            run(model, wan_inputs(model))
        qatpatch.export(model, target_of(tmp_path, format), format)

    @pytest.mark.parametrize("format", FORMATS)
    def test_the_advice_for_what_is_packed(self, format, tmp_path):
        model = tiny_wan(layers=1)
        qatpatch.apply(model)
        qatpatch.deploy(model)
        qatpatch.save(model, tmp_path / "packed")
        for source in (model, qatpatch.load(tmp_path / "packed"), tmp_path / "packed"):
            said = self.lacking(source, format, tmp_path)
            assert "load the dense weights that they were made of anew, qatpatch.apply" in said
            assert "remove" not in said  # which is refused once the dense weights are gone

    def test_a_dynamic_patch_is_refused_and_told_to_calibrate(self, tmp_path):
        model = tiny_wan(layers=1)
        qatpatch.apply(model)
        for format in FORMATS:
            with pytest.raises(CheckpointError, match="10 layers .*input_scale='dynamic'.*qatpatch.calibrate"):
                qatpatch.export(model, target_of(tmp_path, format), format)
        assert not os.listdir(tmp_path)
        qatpatch.export(model, tmp_path / "x.safetensors", "comfy", without_input_scale=True)
        assert not any(k.endswith(".input_scale") for k in TensorFile(tmp_path / "x.safetensors").specs)
        loaded = qatpatch.load(tmp_path / "x.safetensors", model=tiny_wan(layers=1))
        assert {m.quantization.settings.input_scale for m in packed_layers(loaded).values()} == {"dynamic"}
        with pytest.raises(CheckpointError, match="without_input_scale is for format='comfy'"):
            qatpatch.export(model, tmp_path / "a", "modelopt", without_input_scale=True)

    def test_a_static_patch_without_scales_is_refused(self, tmp_path):
        model = tiny_wan(layers=1)
        qatpatch.apply(model, input_scale="static")
        with pytest.raises(CheckpointError, match="never calibrated"):
            qatpatch.export(model, tmp_path / "a", "modelopt")

    def test_unit_scales_are_ones(self, tmp_path):
        model = tiny_wan(layers=1)
        qatpatch.apply(model, input_scale="unit")
        qatpatch.export(model, tmp_path, "modelopt")
        file = TensorFile(tmp_path / "diffusion_pytorch_model.safetensors")
        assert float(file.tensor("blocks.0.attn1.to_q.input_scale")) == 1.0


class TestSharedScales:
    @staticmethod
    def scales(directory):
        file = TensorFile(directory / "diffusion_pytorch_model.safetensors")
        layers = [f"blocks.0.attn1.to_{x}" for x in "qkv"]
        return [{float(file.tensor(f"{n}.{p}")) for n in layers} for p in ("weight_scale_2", "input_scale")], file

    def test_q_k_and_v_share_the_largest(self, tmp_path):
        model = calibrated(tiny_wan, wan_inputs, global_scale="amax")
        with torch.no_grad():
            model.blocks[0].attn1.to_k.weight.mul_(3.0)
        qatpatch.export(model, tmp_path / "own", "modelopt")
        own, _ = self.scales(tmp_path / "own")
        qatpatch.export(model, tmp_path / "shared", "modelopt", share_qkv=True)
        shared, file = self.scales(tmp_path / "shared")
        assert [len(s) for s in own] == [3, 1] and [len(s) for s in shared] == [1, 1]
        assert shared[0] == {max(own[0])}
        # Quantized again with that scale, by the format's own rule.
        wanted = nvfp4.quantize(model.blocks[0].attn1.to_q.weight, global_scale=max(own[0]))
        assert torch.equal(file.tensor("blocks.0.attn1.to_q.weight"), wanted.packed)
        assert model.blocks[0].attn1.to_q.quantization.settings.static_scale in own[1]
        with pytest.raises(KeyError):
            file.specs["blocks.0.attn1.to_q.dense_weight"]

    def test_packed_weights_cannot_share_unless_they_do(self, tmp_path):
        model = calibrated(tiny_wan, wan_inputs, global_scale="amax")
        qatpatch.deploy(model)
        with pytest.raises(CheckpointError, match="q, k and v of blocks.0.attn1 .*share_qkv=True before deploy"):
            qatpatch.export(model, tmp_path / "a", "modelopt", share_qkv=True)
        equal = tiny_wan(layers=1)
        qatpatch.apply(equal, input_scale="unit")
        with torch.no_grad():
            for attention in (equal.blocks[0].attn1, equal.blocks[0].attn2):
                for layer in (attention.to_q, attention.to_k, attention.to_v):
                    layer.weight.clamp_(-0.01, 0.01)
        qatpatch.deploy(equal)
        qatpatch.export(equal, tmp_path / "equal", "modelopt", share_qkv=True)
        qatpatch.export(equal, tmp_path / "plain", "modelopt")
        name = "diffusion_pytorch_model.safetensors"
        assert (tmp_path / "equal" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


class TestRefusals:
    def test_models_that_are_not_patched(self, tmp_path):
        with pytest.raises(CheckpointError, match="not patched.*qatpatch.apply"):
            qatpatch.export(tiny_wan(layers=1), tmp_path, "modelopt")
        with pytest.raises(CheckpointError, match="works on a torch.nn.Module"):
            qatpatch.export("model", tmp_path, "modelopt")

    def test_unknown_formats_suggest_the_nearest(self, tmp_path):
        with pytest.raises(CheckpointError, match="'compressed_tensors'.*did you mean 'compressed-tensors'"):
            qatpatch.export(tiny_wan(layers=1), tmp_path, "compressed_tensors")
        with pytest.raises(CheckpointError, match="did you mean 'qatpatch'"):
            qatpatch.convert(tmp_path, tmp_path, "qatpach")

    @pytest.mark.parametrize(
        "wrong", [dict(prefix=None), dict(prefix=5), dict(original_names=1), dict(without_input_scale="x")], ids=str
    )
    def test_options_of_another_type(self, tmp_path, wrong):
        for write in (qatpatch.export, qatpatch.convert):
            with pytest.raises(CheckpointError, match=f"{next(iter(wrong))} is .*, got"):
                write(tiny_wan(layers=1), tmp_path / "x.safetensors", format="comfy", **wrong)

    def test_lengths_that_readers_have_no_blocks_for(self, tmp_path):
        model = ragged()
        qatpatch.apply(model, ANY_LINEAR, input_scale="unit")
        for format in ("modelopt", "compressed-tensors"):
            with pytest.raises(CheckpointError, match="^0: in_features=60 is no multiple of 16.*comfy, which pads"):
                qatpatch.export(model, tmp_path, format)

    def test_padded_layers_come_back(self, world):
        root, models = world
        loaded = qatpatch.load(root / "deployed" / "ragged" / "comfy" / "model.safetensors", model=ragged())
        x = torch.randn(5, 60)
        assert torch.equal(loaded(x), models["ragged"](x))

    def test_padded_layers_do_not_go_into_narrower_ones(self, tmp_path):
        """ComfyUI's files hold padded sizes alone: codes in the padding tell that they are of a larger layer."""
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 128))
        qatpatch.apply(model, ANY_LINEAR, input_scale="unit")
        file = tmp_path / "x.safetensors"
        qatpatch.export(model, file, "comfy", original_names=False)
        with torch.device("meta"):
            narrow = nn.Sequential(nn.Linear(52, 32), nn.Linear(32, 128))
            short = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 120))
        short[1].bias = nn.Parameter(torch.empty(128, device="meta"))
        for skeleton, shape in ((narrow, "32 x 52"), (short, "120 x 32")):
            with pytest.raises(CheckpointError, match=f"codes beyond the {shape} of the model's layer"):
                qatpatch.convert(file, tmp_path / "y", "qatpatch", model=skeleton)
            with pytest.raises(CheckpointError, match=f"codes beyond the {shape} of the model's layer"):
                qatpatch.load(file, model=skeleton)

    def test_the_target_fits_the_format(self, tmp_path):
        model = tiny_wan(layers=1)
        qatpatch.apply(model, input_scale="unit")
        with pytest.raises(CheckpointError, match="comfy is one file"):
            qatpatch.export(model, tmp_path / "directory", "comfy")
        with pytest.raises(CheckpointError, match="modelopt is a directory"):
            qatpatch.export(model, tmp_path / "x.safetensors", "modelopt")

    def test_numbers_that_are_not_finite(self, tmp_path):
        model = tiny_wan(layers=1)
        qatpatch.apply(model, input_scale="unit")
        qatpatch.export(model, tmp_path, "modelopt")
        before = (tmp_path / "diffusion_pytorch_model.safetensors").read_bytes()
        with torch.no_grad():
            model.blocks[0].attn1.to_k.weight[3, 17] = float("nan")
        with pytest.raises(CheckpointError, match="blocks.0.attn1.to_k: 1 of 4096 block scales are NaN"):
            qatpatch.export(model, tmp_path, "modelopt")
        assert (tmp_path / "diffusion_pytorch_model.safetensors").read_bytes() == before
        assert sorted(os.listdir(tmp_path)) == ["config.json", "diffusion_pytorch_model.safetensors"]

    def test_adapters_meta_weights_and_lost_patches(self, tmp_path):
        from peft import LoraConfig

        model = tiny_wan(layers=1)
        qatpatch.apply(model, input_scale="unit")
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
        with pytest.raises(CheckpointError, match="wrapped by an adapter.*merge"):
            qatpatch.export(model, tmp_path, "modelopt")
        with torch.device("meta"):
            meta = tiny_wan(layers=1)
        qatpatch.apply(meta, input_scale="unit")
        with pytest.raises(CheckpointError, match="meta weight"):
            qatpatch.export(meta, tmp_path, "modelopt")
        lost = tiny_wan(layers=1)
        qatpatch.apply(lost, input_scale="unit")
        lost.blocks[0].attn1.to_q = nn.Linear(256, 256)
        with pytest.raises(CheckpointError, match="attn1.to_q is a Linear now"):
            qatpatch.export(lost, tmp_path, "modelopt")

    def test_a_failed_write_leaves_the_old_file(self, world, tmp_path, monkeypatch):
        _, models = world
        qatpatch.export(models["wan"], tmp_path, "modelopt")
        before = {n: (tmp_path / n).read_bytes() for n in os.listdir(tmp_path)}

        def fails(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(CheckpointError, match="No space left"):
            qatpatch.export(models["wan-amax"], tmp_path, "modelopt")
        assert {n: (tmp_path / n).read_bytes() for n in os.listdir(tmp_path)} == before


def test_the_header_of_the_original_is_taken_over(world, tmp_path):
    _, models = world
    metadata = {"config": '{"transformer": {}}', "model_version": "2.5", "quantization_config": "{}"}
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "original.safetensors", metadata=metadata)
    qatpatch.export(
        models["ltx2"], tmp_path / "a.safetensors", "comfy", metadata_from=tmp_path / "original.safetensors"
    )
    said = TensorFile(tmp_path / "a.safetensors").metadata
    assert said["config"] == metadata["config"] and said["model_version"] == "2.5"
    assert "quantization_config" not in said and len(json.loads(said["_quantization_metadata"])["layers"]) == 9


def test_files_hold_the_transformer_among_other_components(world, tmp_path):
    """An all-in-one file of LTX-2: its other components are left out, a stray tensor of the transformer is not."""
    root, models = world
    file = TensorFile(root / "deployed" / "ltx2" / "comfy" / "model.safetensors")
    tensors = {key: file.tensor(key) for key in file.specs}
    others = {"vae.decoder.conv.weight": torch.zeros(2), PREFIX + "video_embeddings_connector.x.weight": torch.zeros(2)}
    safetensors.torch.save_file(tensors | others, tmp_path / "a.safetensors", metadata=file.metadata)
    loaded = qatpatch.load(tmp_path / "a.safetensors", model=root / "deployed" / "ltx2" / "modelopt")
    assert len(packed_layers(loaded)) == 9
    stray = {PREFIX + "stranger.weight": torch.zeros(2)}
    safetensors.torch.save_file(tensors | stray, tmp_path / "b.safetensors", metadata=file.metadata)
    with pytest.raises(CheckpointError, match="none of the model's .stranger.weight"):
        qatpatch.load(tmp_path / "b.safetensors", model=tiny_ltx2(layers=1))


def test_weights_are_quantized_in_the_dtype_that_training_used(tmp_path):
    model = tiny_wan(layers=1)
    qatpatch.apply(model, input_scale="unit")
    qatpatch.export(model, tmp_path / "before", "modelopt")
    with torch.autocast("cpu", torch.bfloat16):
        model(**wan_inputs(model))[0].float().sum().backward()
    qatpatch.export(model, tmp_path / "trained", "modelopt")
    qatpatch.deploy(model)
    qatpatch.export(model, tmp_path / "deployed", "modelopt")
    before, trained, deployed = (
        file_of(tmp_path / name, "modelopt").read_bytes() for name in ("before", "trained", "deployed")
    )
    assert trained == deployed != before
