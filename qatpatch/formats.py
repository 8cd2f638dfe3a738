"""Packed NVFP4 in the files of other tools: each format as data, what its metadata says, and one tensor there and back.

================================  ========================  =========================  =====================
part of layer ``X``               ``modelopt``              ``comfy``                  ``compressed-tensors``
================================  ========================  =========================  =====================
codes, uint8                      ``X.weight``              ``X.weight``               ``X.weight_packed``
                                  (N, K/2)                  (up16 N, up16(K)/2)        (N, K/2)
                                  low nibble first          **high nibble first**      low nibble first
block scales, E4M3                ``X.weight_scale``        ``X.weight_scale``         ``X.weight_scale``
                                  (N, K/16) linear          **128x4 tiles**            (N, K/16) linear
                                                            (up128 N, up4(K/16))
global scale, FP32                ``X.weight_scale_2``      ``X.weight_scale_2``       ``X.weight_global_scale``
                                  () decode                 () decode                  (1) **encode**
input scale, FP32                 ``X.input_scale``         ``X.input_scale``          ``X.input_global_scale``
                                  () decode                 () decode, optional        (1) **encode**
metadata                          ``quantization_config``,  ``X.comfy_quant``, and     ``quantization_config``
                                  in config.json or the     ``_quantization_metadata`` in config.json
                                  header                    in the header
================================  ========================  =========================  =====================

The first two cannot be told apart by name or shape, and read as each other raise nothing: metadata alone decides.
Codes and block scales go through bit for bit. So does a global scale, but a reciprocal may be off by one unit in the
last place where the scale is no power of two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qatpatch import nvfp4
from qatpatch.errors import CheckpointError, nearest
from qatpatch.kernels import layouts
from qatpatch.tensor_files import Spec, TensorFile, read_json

COMFY_METADATA, COMFY_LAYER, CONFIG_KEY = "_quantization_metadata", "comfy_quant", "quantization_config"
_COMFY_ALIGNMENT = 16
_COMFY_LAYER_BYTES = 1 << 12
_WEIGHT_ONLY = "full_precision_matrix_mult"
_NAN_SCALE = 0x7F
_ALGORITHMS = {"NVFP4": False, "W4A16_NVFP4": True}
# What a directory's weights are called, to which the config.json there belongs.
_OF_DIRECTORIES = ("diffusion_pytorch_model.safetensors", "model.safetensors")
_COMPRESSED = "nvfp4-pack-quantized"
_NUMBERS = {
    "num_bits": 4,
    "type": "float",
    "group_size": nvfp4.BLOCK_SIZE,
    "strategy": "tensor_group",
    "symmetric": True,
}


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one tool family stores a packed layer.

    Attributes:
        name: as users give it.
        codes, block_scale, global_scale, input_scale: what follows the layer's name in a key.
        high_first: element 2j in the high nibble of byte j (else the low one).
        tiled: block scales in 128x4 tiles (else row-major), rows and columns padded.
        encode: global scales as reciprocals (else decode direction).
        scale_shape: of a global scale.
    """

    name: str
    codes: str
    block_scale: str = "weight_scale"
    global_scale: str
    input_scale: str
    high_first: bool = False
    tiled: bool = False
    encode: bool = False
    scale_shape: tuple[int, ...] = ()

    def specs(self, rows: int, columns: int) -> dict[str, Spec]:
        """Part -> what the file holds for a layer of logical shape (rows, columns), the input scale apart.

        Raises:
            CheckpointError: the format has no place for rows of that length.
        """
        if self.tiled:
            rows, columns = _up(rows), _up(columns)
        elif columns % nvfp4.BLOCK_SIZE:
            raise CheckpointError(
                f"in_features={columns} is no multiple of 16, and readers of {self.name} take in_features / 16 blocks "
                "a row; leave the layer dense (exclude=...), or export to comfy, which pads"
            )
        blocks = columns // nvfp4.BLOCK_SIZE
        scales = layouts.tiled_shape(rows, blocks) if self.tiled else (rows, blocks)
        return {
            self.codes: Spec(torch.uint8, (rows, columns // 2)),
            self.block_scale: Spec(torch.float8_e4m3fn, scales),
            self.global_scale: self.scale_spec,
        }

    @property
    def parts(self) -> tuple[str, ...]:
        """All that may follow a packed layer's name, bias apart."""
        said = (COMFY_LAYER,) if self.name == "comfy" else ()
        return self.codes, self.block_scale, self.global_scale, self.input_scale, *said

    @property
    def scale_spec(self) -> Spec:
        return Spec(torch.float32, self.scale_shape)

    def write_codes(self, packed: torch.Tensor) -> torch.Tensor:
        """(N, ceil16(K)/2), low nibble first, to the format's."""
        if not self.tiled:
            return packed
        packed = torch.nn.functional.pad(packed, (0, 0, 0, _up(len(packed)) - len(packed)))
        return layouts.swap_nibbles(packed) if self.high_first else packed

    def read_codes(self, stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The inverse of `write_codes`, for a logical shape.

        Raises:
            CheckpointError: there are codes beyond it, so it is not the shape of what is stored.
        """
        stored = layouts.swap_nibbles(stored) if self.high_first else stored
        if not (nvfp4.padding_is_zero(stored[rows:], 0) and nvfp4.padding_is_zero(stored, columns)):
            raise CheckpointError(
                f"there are codes beyond the {rows} x {columns} of the model's layer: the file is of a larger layer"
            )
        return stored[:rows, : nvfp4.padded_length(columns) // 2].contiguous()

    def write_block_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """E4M3 bytes (N, ceil(K/16)), linear, to the format's float8_e4m3fn.

        Raises:
            CheckpointError: a scale is NaN (the weight held NaN or inf) or negative.
        """
        check_block_scale(scale)
        scale = layouts.tile_scales(scale) if self.tiled else scale
        return scale.view(torch.float8_e4m3fn)

    def read_block_scale(self, stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The inverse of `write_block_scale`: uint8."""
        scale = self.linear_block_scale(stored, rows, columns)
        check_block_scale(scale)
        return scale

    def linear_block_scale(self, stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """`read_block_scale`, whatever the numbers are."""
        scale = stored.view(torch.uint8)
        blocks = nvfp4.padded_length(columns) // nvfp4.BLOCK_SIZE
        return layouts.untile_scales(scale, rows, blocks) if self.tiled else scale

    def write_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """A decode scale, float32 with one element, to the format's direction and shape."""
        check_global_scale(scale)
        return (layouts.encode_scale(scale) if self.encode else scale.clone()).reshape(self.scale_shape)

    def read_scale(self, stored: torch.Tensor) -> torch.Tensor:
        """The inverse of `write_scale`: float32 (), decode direction."""
        check_global_scale(stored)
        return (layouts.decode_scale(stored) if self.encode else stored).reshape(())


MODELOPT = Format(name="modelopt", codes="weight", global_scale="weight_scale_2", input_scale="input_scale")
COMFY = Format(
    name="comfy",
    codes="weight",
    global_scale="weight_scale_2",
    input_scale="input_scale",
    high_first=True,
    tiled=True,
)
COMPRESSED_TENSORS = Format(
    name="compressed-tensors",
    codes="weight_packed",
    global_scale="weight_global_scale",
    input_scale="input_global_scale",
    encode=True,
    scale_shape=(1,),
)
FORMATS = {f.name: f for f in (MODELOPT, COMFY, COMPRESSED_TENSORS)}


def format_named(name: str) -> Format:
    """Raises: CheckpointError, with the nearest name there is."""
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(f"format={name!r} is no format that is written here{nearest(str(name), FORMATS)}")
    return found


def check_block_scale(scale: torch.Tensor) -> None:
    """Raises: CheckpointError where block scale bytes are NaN or negative."""
    wrong = int((scale.view(torch.uint8) >= _NAN_SCALE).sum())
    if wrong:
        raise CheckpointError(f"{wrong} of {scale.numel()} block scales are NaN or negative: the weight was not finite")


def check_global_scale(scale: torch.Tensor) -> None:
    """Raises: CheckpointError where a scale is not positive and finite."""
    if not 0.0 < float(scale) < math.inf:
        raise CheckpointError(f"the global scale is {float(scale)}; it must be positive and finite")


def is_power_of_two(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


def quantization_config(found: Format, weight_only: bool, ignore: Iterable[str]) -> dict[str, Any] | None:
    """What config.json says of the weights; None for a format that does without."""
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK_SIZE, "dynamic": False}
    group: dict[str, Any] = {"targets": ["Linear"]}
    if found is MODELOPT:
        group |= {"weights": weights} | ({} if weight_only else {"input_activations": dict(weights)})
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4" if weight_only else "NVFP4",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "producer": {"name": "qatpatch"},
        }
    if found is COMPRESSED_TENSORS:
        weights |= {"strategy": "tensor_group", "symmetric": True}
        group |= {"format": _COMPRESSED, "weights": weights}
        # "local": block scales on each call, under the fixed global scale of the file.
        group["input_activations"] = None if weight_only else weights | {"dynamic": "local"}
        return {
            "quant_method": "compressed-tensors",
            "format": _COMPRESSED,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
        }
    return None


def comfy_layer(weight_only: bool) -> str:
    """The JSON that ComfyUI reads for one layer."""
    return json.dumps({"format": "nvfp4"} | ({_WEIGHT_ONLY: True} if weight_only else {}))


def comfy_metadata(layers: Mapping[str, bool]) -> str:
    """``_quantization_metadata`` of layers (full key without ``.weight`` -> weight-only)."""
    entries = {name: json.loads(comfy_layer(weight_only)) for name, weight_only in sorted(layers.items())}
    return json.dumps({"format_version": "1.0", "layers": entries})


def identify(file: TensorFile, config: Mapping[str, Any] | None) -> tuple[Format, dict[str, bool]]:
    """The format of a file and its packed layers (name in the file -> weight-only), from its metadata.

    Args:
        file: an open file.
        config: the config.json beside it, where there is one.

    Raises:
        CheckpointError: nothing says what the file holds, several things do, or they do not fit the tensors.
    """
    comfy = COMFY_METADATA in file.metadata or any(name.endswith("." + COMFY_LAYER) for name in file.specs)
    if comfy and file.path.name not in _OF_DIRECTORIES:
        config = None  # of another model: a single file may lie anywhere
    stated = _stated_config(file, config)
    if stated is not None and comfy:
        raise CheckpointError(
            f"{file.path} says both {COMFY_METADATA} (ComfyUI: high nibble first, tiled scales) and {CONFIG_KEY} "
            f"({stated.get('quant_method')}: low nibble first); ModelOpt's single-file export writes such files with "
            "its own nibble order, which ComfyUI reads as noise. Export it again without layerwise metadata and swizzle"
        )
    if comfy:
        found, layers = COMFY, _comfy_layers(file)
    elif stated is not None:
        found, layers = _configured(file, stated)
    else:
        raise CheckpointError(_unsaid(file))
    for name in layers:
        _check_layer(file, found, name)
    _check_rest(file, found, layers)
    return found, layers


def _stated_config(file: TensorFile, config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    stated = None if config is None else config.get(CONFIG_KEY)
    if CONFIG_KEY in file.metadata:
        stated = read_json(file.metadata[CONFIG_KEY], f"{CONFIG_KEY} in the header of {file.path}")
    if stated is not None and not isinstance(stated, dict):
        raise CheckpointError(f"{CONFIG_KEY} of {file.path} is {type(stated).__name__}, not an object")
    return stated


def _unsaid(file: TensorFile) -> str:
    packed = packed_names(file.specs)
    if not packed:
        return dense_model(file.path)
    return (
        f"{file.path} holds packed weights ({packed[0]}, ...) and does not say how: {COMFY_METADATA} in its header and "
        f"{COMFY_LAYER} tensors are missing (ComfyUI, LTX-2 packages), and so is {CONFIG_KEY} in its header or in a "
        "config.json beside it (ModelOpt, compressed-tensors). These differ in nibble order and scale layout, which no "
        "shape shows, so it is not guessed at"
    )


def packed_names(names: Iterable[str]) -> list[str]:
    """Those that only packed layers have."""
    return [name for name in names if name.endswith((".weight_scale", ".weight_scale_2", ".weight_packed"))]


def dense_model(path: Path) -> str:
    """What to do with weights that are not packed."""
    return (
        f"{path} holds no packed NVFP4 layer and says nothing of one: it is a dense model. Load it with its class's "
        "from_pretrained, then qatpatch.apply, train and qatpatch.deploy; `qatpatch export` packs it as it is"
    )


def _comfy_layers(file: TensorFile) -> dict[str, bool]:
    stated: dict[str, Any] = {}
    if COMFY_METADATA in file.metadata:
        said = read_json(file.metadata[COMFY_METADATA], f"{COMFY_METADATA} of {file.path}")
        stated = said.get("layers") if isinstance(said, dict) else None
        if not isinstance(stated, dict):
            raise CheckpointError(f"{COMFY_METADATA} of {file.path} lists no layers")
    own = {}
    for name, spec in file.specs.items():
        layer, _, last = name.rpartition(".")
        if last == COMFY_LAYER:
            if spec.dtype is not torch.uint8 or spec.nbytes > _COMFY_LAYER_BYTES:
                raise CheckpointError(f"{file.path}: {name} is {spec}, not a few bytes of JSON")
            own[layer] = read_json(bytes(file.tensor(name).tolist()), f"{name} of {file.path}")
    differing = sorted(set(stated) ^ set(own)) if stated and own else []
    if differing:
        raise CheckpointError(f"{file.path}: {COMFY_METADATA} and the {COMFY_LAYER} tensors disagree on {differing[0]}")
    layers = {layer: _comfy_weight_only(file, layer, entry) for layer, entry in stated.items()}
    for layer, entry in own.items():
        weight_only = _comfy_weight_only(file, layer, entry)
        if layers.setdefault(layer, weight_only) != weight_only:
            raise CheckpointError(
                f"{file.path}: {COMFY_METADATA} and the {COMFY_LAYER} tensor of {layer} disagree on {_WEIGHT_ONLY}"
            )
    return layers


def _comfy_weight_only(file: TensorFile, layer: str, entry: Any) -> bool:
    algorithm = entry.get("format") if isinstance(entry, dict) else None
    if algorithm != "nvfp4":
        raise CheckpointError(
            f"{file.path}: {layer} is {algorithm!r}; only files whose packed layers are all nvfp4 are read"
        )
    weight_only = entry.get(_WEIGHT_ONLY, False)
    if not isinstance(weight_only, bool):
        raise CheckpointError(f"{file.path}: {_WEIGHT_ONLY} of {layer} is {weight_only!r}; it is true or false")
    return weight_only


def _configured(file: TensorFile, stated: Mapping[str, Any]) -> tuple[Format, dict[str, bool]]:
    method = stated.get("quant_method")
    if method == "modelopt":
        algorithm = stated.get("quant_algo")
        if algorithm not in _ALGORITHMS:
            raise CheckpointError(f"{file.path}: quant_algo is {algorithm!r}; read are {', '.join(_ALGORITHMS)}")
        found, weight_only = MODELOPT, _ALGORITHMS[algorithm]
        groups = stated.get("config_groups") or {}
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise CheckpointError(f"{file.path}: config_groups is no object of objects")
        if any((group.get("input_activations") is None) != weight_only for group in groups.values()):
            raise CheckpointError(
                f"{file.path}: quant_algo {algorithm} and input_activations of config_groups disagree"
            )
        _check_numbers(file, {"group_size": stated.get("group_size", nvfp4.BLOCK_SIZE)}, "quantization_config")
    elif method == "compressed-tensors":
        if stated.get("format") != _COMPRESSED:
            raise CheckpointError(f"{file.path}: format is {stated.get('format')!r}; read is {_COMPRESSED}")
        groups = stated.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        if len(groups) != 1 or not isinstance(groups[0], dict):
            raise CheckpointError(f"{file.path}: {len(groups)} config_groups; files with exactly one are read")
        found, weight_only = COMPRESSED_TENSORS, groups[0].get("input_activations") is None
        groups = {"config_groups": groups[0]}
    else:
        raise CheckpointError(
            f"{file.path}: quant_method is {method!r}; read are modelopt and compressed-tensors, and ComfyUI's metadata"
        )
    for name, group in groups.items():
        for part in ("weights", "input_activations"):
            _check_numbers(file, group.get(part) or {}, f"{part} of {name}")
    marker = "." + (found.global_scale if found is MODELOPT else found.codes)
    layers = {name.removesuffix(marker): weight_only for name in file.specs if name.endswith(marker)}
    if not layers:
        raise CheckpointError(f"{file.path} says {method} and holds no *{marker}")
    return found, layers


def _check_numbers(file: TensorFile, stated: Any, whose: str) -> None:
    """Refuse metadata that describes other numbers than NVFP4; what it leaves out is not asked for."""
    if not isinstance(stated, dict):
        raise CheckpointError(f"{file.path}: {whose} is no object")
    for key, wanted in _NUMBERS.items():
        if key in stated and (stated[key] != wanted or type(stated[key]) is not type(wanted)):
            raise CheckpointError(f"{file.path}: {key} in {whose} is {stated[key]!r}; NVFP4 has {wanted!r}")


def _check_layer(file: TensorFile, found: Format, layer: str) -> None:
    codes = file.specs.get(f"{layer}.{found.codes}")
    if codes is None or codes.dtype is not torch.uint8 or len(codes.shape) != 2 or not min(codes.shape):
        raise CheckpointError(f"{file.path}: {layer}.{found.codes} is {codes or 'missing'}; expected uint8 of two axes")
    wanted = found.specs(codes.shape[0], codes.shape[1] * 2)
    for part, spec in wanted.items():
        is_at = file.specs.get(f"{layer}.{part}")
        # A scalar is written () by some and (1) by others.
        same = is_at is not None and is_at.dtype is spec.dtype and math.prod(is_at.shape) == math.prod(spec.shape)
        if not same or (part == found.block_scale and is_at.shape != spec.shape):
            raise CheckpointError(
                f"{file.path}: {layer}.{part} is {is_at or 'missing'}; {found.name} has {spec} for these codes"
            )
    scale = file.specs.get(f"{layer}.{found.input_scale}")
    if scale is not None and (scale.dtype is not torch.float32 or math.prod(scale.shape) != 1):
        raise CheckpointError(f"{file.path}: {layer}.{found.input_scale} is {scale}; expected one float32")


def _check_rest(file: TensorFile, found: Format, layers: Mapping[str, bool]) -> None:
    """Nothing packed may be left over: it would be taken for something dense."""
    taken = {f"{layer}.{part}" for layer in layers for part in found.parts}
    for name, spec in file.specs.items():
        if name not in taken and (spec.dtype.itemsize == 1 or name.endswith((".pre_quant_scale", ".weight_scale_2"))):
            raise CheckpointError(
                f"{file.path}: {name} ({spec}) belongs to no NVFP4 layer that the metadata of the file names"
            )
    for layer, weight_only in layers.items():
        if found is not COMFY and not weight_only and f"{layer}.{found.input_scale}" not in file.specs:
            raise CheckpointError(f"{file.path}: {layer}.{found.input_scale} is missing; the file says W4A4")


def _up(length: int) -> int:
    return -(-length // _COMFY_ALIGNMENT) * _COMFY_ALIGNMENT
