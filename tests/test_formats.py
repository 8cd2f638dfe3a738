"""Layouts of other tools by an independent account of them, and what is refused when a file does not say what it is."""

from __future__ import annotations

import copy
import json

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_ltx2, tiny_wan
from torch import nn

import qatpatch
from qatpatch import CheckpointError, nvfp4
from qatpatch.formats import COMFY, COMPRESSED_TENSORS, FORMATS, MODELOPT, quantization_config

CONFIG = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"input_activations": {"num_bits": 4}}},
    },
}


def lattice(rows, columns, seed=0):
    """A quantized weight whose codes and scales are all different where they can be."""
    generator = torch.Generator().manual_seed(seed)
    return nvfp4.quantize(torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 150), columns=st.integers(1, 150), name=st.sampled_from(sorted(FORMATS)))
def test_there_and_back_is_the_same_bits(rows, columns, name):
    found, q = FORMATS[name], lattice(rows, columns)
    if columns % 16 and name != "comfy":
        with pytest.raises(CheckpointError, match="no multiple of 16"):
            found.specs(rows, columns)
        return
    specs = found.specs(rows, columns)
    codes, scale = found.write_codes(q.packed), found.write_block_scale(q.block_scale.view(torch.uint8))
    global_scale = found.write_scale(q.global_scale)
    for part, tensor in ((found.codes, codes), (found.block_scale, scale), (found.global_scale, global_scale)):
        assert (tensor.dtype, tuple(tensor.shape)) == (specs[part].dtype, specs[part].shape)
    assert torch.equal(found.read_codes(codes, rows, columns), q.packed)
    assert torch.equal(found.read_block_scale(scale, rows, columns), q.block_scale.view(torch.uint8))
    assert torch.equal(found.read_scale(global_scale), q.global_scale)


def test_where_every_element_lies():
    """Element by element, from the description of the layouts, not from the functions that make them."""
    rows, columns = 130, 96
    q = lattice(rows, columns)
    codes = nvfp4.unpack_codes(q.packed)
    a, b = MODELOPT.write_codes(q.packed), COMFY.write_codes(q.packed)
    tiles = COMFY.write_block_scale(q.block_scale.view(torch.uint8)).view(torch.uint8).flatten()
    assert b.shape == (144, 48) and not b[rows:].any()
    for r, k in ((0, 0), (0, 1), (5, 94), (129, 95), (64, 33)):
        assert (int(a[r, k // 2]) >> (4 * (k % 2))) & 15 == codes[r, k]
        assert (int(b[r, k // 2]) >> (4 * (1 - k % 2))) & 15 == codes[r, k]
        c = k // 16
        place = (r // 128 * 2 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        assert tiles[place] == q.block_scale.view(torch.uint8)[r, c]
    assert float(COMPRESSED_TENSORS.write_scale(q.global_scale)) == 1 / float(q.global_scale)


@given(amax=st.floats(2.0**-60, 2.0**60))
def test_a_reciprocal_scale_is_off_by_one_unit_at_most(amax):
    scale = nvfp4.global_scale_of_amax(torch.tensor(amax, dtype=torch.float32), "amax")
    back = COMPRESSED_TENSORS.read_scale(COMPRESSED_TENSORS.write_scale(scale))
    assert abs(int(back.view(torch.int32)) - int(scale.view(torch.int32))) <= 1
    power = nvfp4.global_scale_of_amax(torch.tensor(amax, dtype=torch.float32), "pow2")
    assert torch.equal(COMPRESSED_TENSORS.read_scale(COMPRESSED_TENSORS.write_scale(power)), power)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("found", FORMATS.values(), ids=FORMATS)
def test_scales_that_are_none(found, scale):
    for convert in (found.write_scale, found.read_scale):
        with pytest.raises(CheckpointError, match="must be positive and finite"):
            convert(torch.tensor([scale]))


class Skeleton(nn.Module):
    def __init__(self, columns=64):
        super().__init__()
        self.layer = nn.Linear(columns, 128)
        self.other = nn.Linear(8, 8)


def parts(found, prefix="", q=None):
    """A complete layer of a format, and the dense rest of `Skeleton`."""
    q = q or lattice(128, 64)
    made = {
        found.codes: found.write_codes(q.packed),
        found.block_scale: found.write_block_scale(q.block_scale.view(torch.uint8)),
        found.global_scale: found.write_scale(q.global_scale),
        found.input_scale: found.write_scale(torch.tensor(0.5)),
        "bias": torch.zeros(128),
    }
    made = {f"layer.{part}": tensor for part, tensor in made.items()}
    made |= {"other.weight": torch.zeros(8, 8), "other.bias": torch.zeros(8)}
    return {prefix + key: tensor for key, tensor in made.items()}


def layerwise(*names, format="nvfp4", **more):
    layers = {name: {"format": format, **more} for name in names}
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


@pytest.fixture
def load(tmp_path):
    def load(tensors, metadata=None, config=None, model=None):
        (tmp_path / "config.json").unlink(missing_ok=True)
        if config is not None:
            text = config if isinstance(config, str) else json.dumps({"quantization_config": config})
            (tmp_path / "config.json").write_text(text)
        safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata=metadata)
        return qatpatch.load(tmp_path / "x.safetensors", model=model or Skeleton())

    return load


class TestIdentify:
    def test_each_format_by_its_own_metadata(self, load):
        wanted = nvfp4.dequantize(lattice(128, 64))
        loads = [
            load(parts(MODELOPT), config=CONFIG["modelopt"]),
            load(parts(MODELOPT), metadata={"quantization_config": json.dumps(CONFIG["modelopt"])}),
            load(parts(COMFY), metadata=layerwise("layer")),
            load(parts(COMFY) | {"layer.comfy_quant": said({"format": "nvfp4"})}),
            load(parts(COMFY, "model.diffusion_model."), metadata=layerwise("model.diffusion_model.layer")),
            load(parts(COMPRESSED_TENSORS), config=CONFIG["compressed-tensors"]),
        ]
        for model in loads:
            assert torch.equal(nvfp4.dequantize(model.layer.nvfp4_weight()), wanted)
            assert model.layer.quantization.settings.static_scale == 0.5
            assert type(model.other) is nn.Linear

    @pytest.mark.parametrize("found", FORMATS.values(), ids=FORMATS)
    def test_without_metadata_nothing_is_guessed(self, load, found):
        with pytest.raises(CheckpointError, match="does not say how: _quantization_metadata.*comfy_quant.*missing"):
            load(parts(found))

    def test_a_modelopt_file_with_the_metadata_of_the_other_is_not_decoded(self, load):
        """Shapes agree with tiles here (128 x 64), so contradiction in the metadata is all there is."""
        said = {"quantization_config": json.dumps(CONFIG["modelopt"])}
        with pytest.raises(CheckpointError, match="both _quantization_metadata"):
            load(parts(MODELOPT), metadata=layerwise("layer") | said)

    @pytest.mark.parametrize("name", ["diffusion_pytorch_model.safetensors", "comfy.safetensors"])
    def test_a_config_beside_a_single_file_is_of_another_model(self, tmp_path, name):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIG["modelopt"]}))
        safetensors.torch.save_file(parts(COMFY), tmp_path / name, metadata=layerwise("layer"))
        if name == "comfy.safetensors":
            loaded = qatpatch.load(tmp_path / name, model=Skeleton())
            assert torch.equal(loaded.layer.weight_packed, lattice(128, 64).packed)
        else:
            with pytest.raises(CheckpointError, match="both _quantization_metadata"):
                qatpatch.load(tmp_path / name, model=Skeleton())

    def test_dense_files(self, load):
        with pytest.raises(CheckpointError, match="holds no packed NVFP4 layer"):
            load({"other.weight": torch.zeros(8, 8)})

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo is 'FP8'; read are NVFP4, W4A16_NVFP4"),
            ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; read are modelopt"),
            ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format is 'pack-quantized'"),
            (CONFIG["compressed-tensors"] | {"config_groups": {"a": {}, "b": {}}}, "2 config_groups"),
            (CONFIG["modelopt"] | {"group_size": 32}, "group_size in quantization_config is 32; NVFP4 has 16"),
            (CONFIG["modelopt"] | {"config_groups": [1]}, "config_groups is no object"),
            (
                CONFIG["modelopt"] | {"config_groups": {"a": {"weights": {}}}},
                "quant_algo NVFP4 and input_act.* disagree",
            ),
            (
                {
                    "quant_method": "modelopt",
                    "quant_algo": "W4A16_NVFP4",
                    "config_groups": {"a": {"input_activations": {}}},
                },
                "quant_algo W4A16_NVFP4 and input_activations of config_groups disagree",
            ),
            (CONFIG["modelopt"] | {"config_groups": {"a": {"weights": 4, "input_activations": {}}}}, "is no object"),
            ([1], "quantization_config of .* is list"),
            pytest.param("[" * 100_000, "no JSON", id="deep"),
            ("{", "no JSON"),
        ],
    )
    def test_configs_of_something_else(self, load, config, message):
        with pytest.raises(CheckpointError, match=message):
            load(parts(MODELOPT), config=config)

    @pytest.mark.parametrize("part", ["weights", "input_activations"])
    @pytest.mark.parametrize("found", [MODELOPT, COMPRESSED_TENSORS], ids=lambda found: found.name)
    def test_configs_of_other_numbers(self, load, found, part):
        whole = quantization_config(found, False, [])
        load(parts(found), config=whole)
        for key, value in (
            ("num_bits", 8),
            ("num_bits", "4"),
            ("num_bits", None),
            ("type", "int"),
            ("group_size", 32),
            ("group_size", "16"),
            ("strategy", "group"),
            ("symmetric", False),
        ):
            config = copy.deepcopy(whole)
            config["config_groups"]["group_0"][part][key] = value
            with pytest.raises(CheckpointError, match=f"{key} in {part} of .* is {value!r}; NVFP4 has"):
                load(parts(found), config=config)

    @pytest.mark.parametrize(
        ("metadata", "tensors", "message"),
        [
            (
                layerwise("layer", full_precision_matrix_mult="false"),
                {},
                "full_precision.*'false'; it is true or false",
            ),
            (None, {"layer.comfy_quant": {"format": "nvfp4", "full_precision_matrix_mult": 1}}, "is 1; it is true or"),
            (
                layerwise("layer"),
                {"layer.comfy_quant": {"format": "nvfp4", "full_precision_matrix_mult": True}},
                "disagree on full_precision",
            ),
            (layerwise("layer", format="float8_e4m3fn"), {}, "layer is 'float8_e4m3fn'; only files"),
            (layerwise("elsewhere"), {}, "elsewhere.weight is missing"),
            (layerwise(), {}, "belongs to no NVFP4 layer"),
            ({"_quantization_metadata": "[]"}, {}, "lists no layers"),
            pytest.param({"_quantization_metadata": "[" * 100_000}, {}, "no JSON", id="deep"),
            (layerwise("layer"), {"x.comfy_quant": {"format": "nvfp4"}}, "disagree on layer"),
            (None, {"layer.comfy_quant": [1]}, "layer is None"),
            (None, {"layer.comfy_quant": "x" * 5000}, "not a few bytes of JSON"),
        ],
    )
    def test_comfy_metadata_that_does_not_fit(self, load, metadata, tensors, message):
        tensors = {name: said(value) for name, value in tensors.items()}
        with pytest.raises(CheckpointError, match=message):
            load(parts(COMFY) | tensors, metadata=metadata)

    @pytest.mark.parametrize("found", FORMATS.values(), ids=FORMATS)
    def test_layers_that_are_not_whole(self, load, found):
        say = dict(metadata=layerwise("layer")) if found is COMFY else dict(config=CONFIG[found.name])
        whole = parts(found)
        for part in (found.codes, found.block_scale, found.global_scale):
            broken = {k: t for k, t in whole.items() if k != f"layer.{part}"}
            with pytest.raises(CheckpointError):
                load(broken, **say)
        for part, wrong in (
            (found.codes, torch.zeros(128, 32)),
            (found.codes, torch.zeros(128, 16, dtype=torch.uint8)),
            (found.codes, torch.zeros(128, 0, dtype=torch.uint8)),
            (found.block_scale, torch.zeros(128, 4)),
            (found.block_scale, torch.zeros(128, 8).to(torch.float8_e4m3fn)),
            (found.global_scale, torch.ones(2)),
            (found.global_scale, torch.ones((), dtype=torch.bfloat16)),
            (found.global_scale, torch.zeros(found.scale_shape)),
            (found.input_scale, torch.full(found.scale_shape, float("nan"))),
            (found.input_scale, torch.ones(3)),
        ):
            with pytest.raises(CheckpointError):
                load(whole | {f"layer.{part}": wrong}, **say)
        nan = whole[f"layer.{found.block_scale}"].view(torch.uint8).clone()
        nan[0, 0] = 0x7F
        with pytest.raises(CheckpointError, match="layer: 1 of 512 block scales are NaN"):
            load(whole | {f"layer.{found.block_scale}": nan.view(torch.float8_e4m3fn)}, **say)
        with pytest.raises(CheckpointError, match="belongs to no NVFP4 layer"):
            load(whole | {"other.weight": torch.zeros(8, 8, dtype=torch.uint8)}, **say)
        with pytest.raises(CheckpointError, match="layer.weight_packed is missing|pre_quant_scale.*belongs to no"):
            load(whole | {"layer.pre_quant_scale": torch.ones(64)}, **say)
        if found is not COMFY:
            with pytest.raises(CheckpointError, match="input_(global_)?scale is missing; the file says W4A4"):
                load({k: t for k, t in whole.items() if k != f"layer.{found.input_scale}"}, **say)

    def test_layers_that_are_not_the_models(self, load):
        with pytest.raises(
            CheckpointError, match=r"layer.weight is uint8 \[128, 32\], and layer of the model \(128 x 96"
        ):
            load(parts(MODELOPT), config=CONFIG["modelopt"], model=Skeleton(96))
        with pytest.raises(CheckpointError, match="layer is packed, and the Linear has no such layer"):
            load(parts(MODELOPT), config=CONFIG["modelopt"], model=nn.Linear(4, 4))
        with pytest.raises(CheckpointError, match="1 tensors of the model are missing .other.bias"):
            load({k: t for k, t in parts(MODELOPT).items() if k != "other.bias"}, config=CONFIG["modelopt"])

    @pytest.mark.parametrize("found", FORMATS.values(), ids=FORMATS)
    def test_a_bias_that_one_side_alone_has(self, load, found):
        say = dict(metadata=layerwise("layer")) if found is COMFY else dict(config=CONFIG[found.name])
        with pytest.raises(CheckpointError, match=r"1 tensors of the model are missing .layer.bias"):
            load({k: t for k, t in parts(found).items() if k != "layer.bias"}, **say)
        without = Skeleton()
        without.layer.bias = None
        with pytest.raises(CheckpointError, match=r"1 tensors are none of the model's .layer.bias"):
            load(parts(found), model=without, **say)

    def test_names_are_never_paths(self, load, tmp_path):
        before = sorted(p.name for p in tmp_path.parent.iterdir())
        for name in ("../evil", "/etc/passwd", "a/../../b", "layer\x1b[31m"):
            with pytest.raises(CheckpointError):
                load(parts(MODELOPT) | {f"{name}.weight": torch.zeros(2)}, config=CONFIG["modelopt"])
        assert sorted(p.name for p in tmp_path.parent.iterdir()) == before


class TestWhichModel:
    def test_comfy_files_need_a_model_or_its_config(self, tmp_path):
        model = tiny_wan(layers=1)
        qatpatch.apply(model, input_scale="unit")
        qatpatch.export(model, tmp_path / "x.safetensors", "comfy")
        with pytest.raises(CheckpointError, match="nothing says which model.*model=, --model"):
            qatpatch.load(tmp_path / "x.safetensors")
        model.save_config(tmp_path / "config")
        loaded = qatpatch.load(tmp_path / "x.safetensors", model=tmp_path / "config")
        assert type(loaded).__name__ == "WanTransformer3DModel" and not loaded.training
        for wrong in (tmp_path / "nowhere", tmp_path):
            with pytest.raises(CheckpointError, match="cannot read"):
                qatpatch.load(tmp_path / "x.safetensors", model=wrong)
        with pytest.raises(CheckpointError, match="has no such layer"):
            qatpatch.load(tmp_path / "x.safetensors", model=tiny_ltx2(layers=1))
        qatpatch.apply(other := tiny_wan(layers=1))
        with pytest.raises(CheckpointError, match="must be an unpatched instance"):
            qatpatch.load(tmp_path / "x.safetensors", model=other)

    @pytest.mark.parametrize("name", ["os", "AutoencoderKL.__init__", "_Private", "NoSuchModel"])
    def test_a_config_names_models_of_diffusers_only(self, tmp_path, name):
        safetensors.torch.save_file(parts(MODELOPT), tmp_path / "x.safetensors")
        text = json.dumps({"_class_name": name, "quantization_config": CONFIG["modelopt"]})
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match="no model of the installed diffusers"):
            qatpatch.load(tmp_path / "x.safetensors")


def said(value):
    text = value if isinstance(value, str) else json.dumps(value)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)
