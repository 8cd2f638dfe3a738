"""The packages whose files qatpatch writes and reads, each in a process of its own: they look for other packages and
act on what they find, and must not meet the ones that the tests import.

``run({package: [(task, input, output), ...]})`` starts one process for each package. Weights travel as safetensors:
``decode`` writes what the package makes of the packed layers of a file, ``write`` the file that the package makes of
dense weights.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open

ORACLES = Path(sys.prefix) / "oracles"


def run(tasks: dict[str, list[tuple[str, Path, Path]]]) -> None:
    """Do each package's tasks in order; the packages side by side, as importing them is most of the time."""
    started = {}
    for package, own in tasks.items():
        command = [sys.executable, __file__, package, json.dumps([[t, str(i), str(o)] for t, i, o in own])]
        started[package] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    outputs = {package: process.communicate()[0] for package, process in started.items()}
    for package, process in started.items():
        assert process.returncode == 0, f"{package}: {outputs[package][-4000:]}"


def header(file):
    with safe_open(file, framework="pt") as opened:
        return opened.metadata() or {}


def layers_of(tensors, part):
    return [name.removesuffix(part) for name in tensors if name.endswith(part)]


class ComfyKitchen:
    """comfy-kitchen as ComfyUI calls it: which layers are NVFP4, its metadata says."""

    def __init__(self):
        self.ck = importlib.import_module("comfy_kitchen")
        self.layout = importlib.import_module("comfy_kitchen.tensor").TensorCoreNVFP4Layout

    def decode(self, source, target):
        tensors = safetensors.torch.load_file(source)
        said = json.loads(header(source)["_quantization_metadata"])["layers"]
        own = {n: json.loads(bytes(tensors[f"{n}.comfy_quant"].tolist())) for n in layers_of(tensors, ".comfy_quant")}
        assert own == said
        self._decode(tensors, said, target)

    def decode_any(self, source, target):
        """As if the metadata said NVFP4 of every layer that looks like it."""
        tensors = safetensors.torch.load_file(source)
        self._decode(tensors, layers_of(tensors, ".weight_scale_2"), target)

    def _decode(self, tensors, layers, target):
        decoded = {}
        for name in layers:
            codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
            assert scale.dtype is torch.float8_e4m3fn
            decoded[name] = self.ck.dequantize_nvfp4(codes, tensors[f"{name}.weight_scale_2"], scale, torch.float32)
        safetensors.torch.save_file(decoded, target)

    def write(self, source, target):
        tensors, layers = {}, {}
        for name, weight in safetensors.torch.load_file(source).items():
            layer = f"model.diffusion_model.{name}"
            codes, parameters = self.layout.quantize(weight)
            for suffix, tensor in self.layout.state_dict_tensors(codes, parameters).items():
                tensors[f"{layer}.weight{suffix}"] = tensor
            layers[layer] = {"format": "nvfp4"}
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
        metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
        safetensors.torch.save_file(tensors, target, metadata=metadata)


class CompressedTensors:
    def __init__(self):
        self.nvfp4 = importlib.import_module("compressed_tensors.compressors.nvfp4").NVFP4PackedCompressor
        self.quantization = importlib.import_module("compressed_tensors.quantization")
        self.helpers = importlib.import_module("compressed_tensors.quantization.utils.helpers")

    def decode(self, source, target):
        """The config must parse into the preset's scheme, or there would be nothing to decode by."""
        config = json.loads((source.parent / "config.json").read_text())["quantization_config"]
        config.pop("quant_method")
        parsed = self.quantization.QuantizationConfig.model_validate({**config, "quant_method": "compressed-tensors"})
        (scheme,) = parsed.config_groups.values()
        preset = self.quantization.preset_name_to_scheme(
            "NVFP4A16" if not scheme.input_activations else "NVFP4", ["Linear"]
        )
        keys = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic")
        for ours, theirs in ((scheme.weights, preset.weights), (scheme.input_activations, preset.input_activations)):
            assert (ours is None) == (theirs is None)
            assert ours is None or all(getattr(ours, k) == getattr(theirs, k) for k in keys), (ours, theirs)
        tensors = safetensors.torch.load_file(source)
        decoded = {}
        for name in layers_of(tensors, ".weight_packed"):
            own = {
                p: tensors[f"{name}.{p}"]
                for p in self.nvfp4.compression_param_names(scheme)
                if f"{name}.{p}" in tensors
            }
            assert set(own) >= {"weight_packed", "weight_scale", "weight_global_scale"}
            decoded[name] = self.nvfp4.decompress(own, scheme)["weight"].float()
        safetensors.torch.save_file(decoded, target)

    def write(self, source, target):
        scheme = self.quantization.preset_name_to_scheme("NVFP4", ["Linear"])
        tensors = {}
        for name, weight in safetensors.torch.load_file(source).items():
            scale_2 = self.helpers.generate_gparam(weight.min(), weight.max())
            blocks = weight.unflatten(1, (-1, 16))
            scale, zero = self.helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, scale_2)
            own = {"weight": weight, "weight_scale": scale, "weight_global_scale": scale_2}
            for part, tensor in self.nvfp4.compress(own, scheme).items():
                tensors[f"{name}.{part}"] = tensor
            tensors[f"{name}.input_global_scale"] = torch.tensor([768.0])
        config = self.quantization.QuantizationConfig(config_groups={"group_0": scheme}, format="nvfp4-pack-quantized")
        safetensors.torch.save_file(tensors, target)
        said = {"quantization_config": json.loads(config.model_dump_json())}
        (target.parent / "config.json").write_text(json.dumps(said))


class ModelOpt:
    """Its quantizer and the functions that finish its files, loaded without the package around them, which wants scipy,
    pulp, omegaconf and more for what is not used here."""

    def __init__(self):
        quantization = "modelopt.torch.quantization"
        for name in ("modelopt", "modelopt.torch", "modelopt.torch.export", quantization):
            self._bare(name)
        for name in ("qtensor", "backends"):
            self._bare(f"{quantization}.{name}")
        self._bare(f"{quantization}.config", QuantizerCfgEntry=object)
        self._bare("modelopt.torch.utils", get_unwrapped_name=None, print_rank_0=print)
        self._bare("modelopt.torch.utils.network", temporarily_remove_accelerate_hook=None)
        utils = self._bare(f"{quantization}.utils")
        vars(utils).update(vars(importlib.import_module(f"{quantization}.utils.core_utils")))
        self.nvfp4 = importlib.import_module(f"{quantization}.qtensor.nvfp4_tensor").NVFP4QTensor
        self.finish = importlib.import_module("modelopt.torch.export.diffusers_utils")
        self.config = importlib.import_module("modelopt.torch.export.convert_hf_config")

    @staticmethod
    def _bare(name, **names):
        module = types.ModuleType(name)
        module.__path__ = [str(ORACLES.joinpath(*name.split(".")))]
        vars(module).update(names)
        sys.modules[name] = module
        return module

    def decode(self, source, target):
        tensors = safetensors.torch.load_file(source)
        decoded = {}
        for name in layers_of(tensors, ".weight_scale_2"):
            codes = tensors[f"{name}.weight"]
            packed = self.nvfp4(torch.Size((len(codes), codes.shape[1] * 2)), torch.float32, codes)
            scales = {"scale": tensors[f"{name}.weight_scale"], "double_scale": tensors[f"{name}.weight_scale_2"]}
            decoded[name] = packed.dequantize(torch.float32, block_sizes={-1: 16}, **scales)
        safetensors.torch.save_file(decoded, target)

    def _quantized(self, source):
        tensors = {}
        for name, weight in safetensors.torch.load_file(source).items():
            packed, scale, scale_2 = self.nvfp4.quantize(weight.clone(), 16)
            tensors |= {f"{name}.weight": packed._quantized_data, f"{name}.weight_scale": scale}
            tensors |= {f"{name}.weight_scale_2": scale_2, f"{name}.input_scale": torch.tensor(0.0123)}
        return tensors

    def _said(self):
        details = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}
        said = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": details}
        return self.config.convert_hf_quant_config_format(said)

    def write(self, source, target):
        safetensors.torch.save_file(self._quantized(source), target)
        (target.parent / "config.json").write_text(json.dumps({"quantization_config": self._said()}))

    def write_for_comfy(self, source, target):
        """``enable_swizzle_layout=True, padding_strategy="row", enable_layerwise_quant_metadata=True``."""
        tensors = self.finish.pad_nvfp4_weights(self._quantized(source), "row")
        tensors = self.finish.swizzle_nvfp4_scales(tensors)
        said = self._said()
        layerwise = self.finish.build_layerwise_quant_metadata(tensors, said)
        metadata = {"quantization_config": json.dumps(said), "_quantization_metadata": layerwise}
        safetensors.torch.save_file(tensors, target, metadata=metadata)


PACKAGES = {"comfy-kitchen": ComfyKitchen, "compressed-tensors": CompressedTensors, "modelopt": ModelOpt}

if __name__ == "__main__":
    sys.path.insert(0, str(ORACLES))
    oracle = PACKAGES[sys.argv[1]]()
    for task, source, target in json.loads(sys.argv[2]):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        getattr(oracle, task)(Path(source), Path(target))
