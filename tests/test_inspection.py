"""inspect_file: what a file holds and everything that is wrong with it, without a model."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from models import tiny_wan

import qatpatch
from qatpatch.formats import FORMATS
from qatpatch.inspection import inspect_file
from qatpatch.tensor_files import TensorFile

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("inspected")
    model = tiny_wan(layers=2)
    qatpatch.apply(model, input_scale="unit")
    qatpatch.deploy(model)
    qatpatch.save(model, root / "qatpatch")
    paths = {"qatpatch": root / "qatpatch" / WEIGHTS}
    for format in FORMATS:
        target = root / "comfy.safetensors" if format == "comfy" else root / format
        qatpatch.export(model, target, format)
        paths[format] = target if format == "comfy" else target / WEIGHTS
    return model, paths


def changed(path, to, change):
    """The file again with some tensors changed; its metadata and config stay."""
    file = TensorFile(path)
    tensors = {name: file.tensor(name).clone() for name in file.specs}
    change(tensors)
    to.mkdir(exist_ok=True)
    config = path.parent / "config.json"
    if config.exists():
        (to / "config.json").write_bytes(config.read_bytes())
    safetensors.torch.save_file(tensors, to / WEIGHTS, metadata=file.metadata)
    return to / WEIGHTS


@pytest.mark.parametrize("format", ["qatpatch", *FORMATS])
def test_every_format_is_told_with_its_layers_and_scales(files, format):
    model, paths = files
    found = inspect_file(paths[format])
    assert found.format == format and found.problems == () and len(found.layers) == 20
    assert found.model == (None if format == "comfy" else "WanTransformer3DModel")
    assert found.tensors == len(TensorFile(paths[format]).specs)
    name = "model.diffusion_model.blocks.1.ffn.0" if format == "comfy" else "blocks.1.ffn.net.0.proj"
    (layer,) = [layer for layer in found.layers if layer.name == name]
    deployed = model.blocks[1].ffn.net[0].proj
    assert layer.shape == (128, 256) and not layer.weight_only
    assert layer.global_scale == float(deployed.nvfp4_weight().global_scale)
    scales = deployed.nvfp4_weight().block_scale.float()
    assert layer.block_scales == (float(scales.min()), float(scales.max())) and layer.zero_blocks == 0.0
    assert layer.input_scale == 1.0
    json.dumps(found.as_dict(), allow_nan=False)
    text = str(found)
    assert f"format {format}" in text and "nothing is wrong" in text
    assert ("blocks.*.cross_attn.o" if format == "comfy" else "blocks.*.attn2.to_out.0") in text


@pytest.mark.parametrize("format", FORMATS)
def test_numbers_that_are_wrong_are_named_with_their_layer(files, format, tmp_path):
    layer = "model.diffusion_model.blocks.0.self_attn.q" if format == "comfy" else "blocks.0.attn1.to_q"
    found = FORMATS[format]

    def spoil(tensors):
        scale = tensors[f"{layer}.{found.block_scale}"].view(torch.uint8)
        scale.view(-1)[:3] = 0x7F
        other = layer.replace(".q", ".k").replace("to_q", "to_k")
        tensors[f"{other}.{found.global_scale}"].fill_(0)
        tensors[f"{other}.{found.input_scale}"].fill_(float("inf"))

    seen = inspect_file(changed(files[1][format], tmp_path / "x", spoil))
    assert seen.format == format and len(seen.problems) == 2
    assert any(f"{layer}: 3 of 4096 block scales are NaN" in problem for problem in seen.problems)
    assert any("global_scale: the global scale is 0.0" in p and "input_scale: " in p for p in seen.problems)
    json.dumps(seen.as_dict(), allow_nan=False)


def test_files_of_ours_that_were_changed(files, tmp_path):
    def spoil(tensors):
        tensors["blocks.0.attn1.to_q.weight_scale"][0, 0] ^= 1

    seen = inspect_file(changed(files[1]["qatpatch"], tmp_path / "x", spoil))
    assert seen.format == "qatpatch" and "checksum differs" in seen.problems[0]


def test_a_layout_that_is_not_the_one_that_is_stated(files, tmp_path):
    """Scales in rows and columns where the metadata says tiles: the shape tells where it is no multiple of a tile."""
    layer = "model.diffusion_model.blocks.0.self_attn.q"

    def untile(tensors):
        tensors[f"{layer}.weight_scale"] = (
            tensors[f"{layer}.weight_scale"].view(torch.uint8)[:, :12].contiguous().view(torch.float8_e4m3fn)
        )

    seen = inspect_file(changed(files[1]["comfy"], tmp_path / "x", untile))
    assert seen.layers == () and "comfy has float8_e4m3fn [256, 16] for these codes" in seen.problems[0]
    file = changed(
        files[1]["modelopt"], tmp_path / "y", lambda tensors: tensors.pop("blocks.0.attn1.to_q.weight_scale")
    )
    assert "blocks.0.attn1.to_q.weight_scale is missing" in inspect_file(file).problems[0]


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_a_bias_that_is_missing_is_missed_where_a_config_says_of_which_model(files, format, tmp_path):
    file = changed(files[1][format], tmp_path / "x", lambda tensors: tensors.pop("blocks.0.attn1.to_q.bias"))
    assert "of the model are missing (blocks.0.attn1.to_q.bias)" in inspect_file(file).problems[0]
    with pytest.raises(qatpatch.CheckpointError, match="missing .blocks.0.attn1.to_q.bias"):
        qatpatch.convert(tmp_path / "x", tmp_path / "y", "qatpatch")
    own = changed(files[1]["qatpatch"], tmp_path / "z", lambda tensors: tensors.pop("blocks.0.attn1.to_q.bias"))
    assert "blocks.0.attn1.to_q.bias is not as it was saved" in inspect_file(own).problems[0]
    with pytest.raises(qatpatch.CheckpointError, match="is not as it was saved"):
        qatpatch.convert(tmp_path / "z", tmp_path / "y", format)


def test_files_without_metadata_say_what_is_missing(files, tmp_path):
    file = TensorFile(files[1]["comfy"])
    tensors = {name: file.tensor(name) for name in file.specs if not name.endswith("comfy_quant")}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    seen = inspect_file(tmp_path / "x.safetensors")
    assert seen.format is None and "_quantization_metadata in its header" in seen.problems[0]
    assert "format unknown" in str(seen) and "\n1 problem\n" in str(seen)


def test_names_reach_no_terminal_as_they_are(tmp_path):
    safetensors.torch.save_file({"evil\x1b]0;x\x07.weight_scale": torch.zeros(1)}, tmp_path / "x.safetensors")
    seen = inspect_file(tmp_path / "x.safetensors")
    assert "\x1b" in seen.problems[0] and "\x1b" not in str(seen) and "evil\\x1b" in str(seen)
