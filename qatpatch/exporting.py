"""`export` and `convert`: packed models into the formats that other tools read, from a live model or from a file.

What is quantized goes through bit for bit (`formats`), what is dense keeps its dtype and its key. Layers that may have
to run dense (the refine-only ones) are written dense: a file has one weight a layer. One tensor is held at a time.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qatpatch.checkpoint import (
    CONFIG_NAME,
    HEADER_KEY,
    WEIGHTS_NAME,
    check_target,
    checked,
    open_stored,
    weights_file,
    write_model,
)
from qatpatch.errors import CheckpointError, nearest
from qatpatch.formats import (
    COMFY,
    COMFY_LAYER,
    COMFY_METADATA,
    CONFIG_KEY,
    FORMATS,
    Format,
    comfy_layer,
    comfy_metadata,
    format_named,
    quantization_config,
)
from qatpatch.key_names import original_names as names_of_origin
from qatpatch.linear_state import fixed_input_scale
from qatpatch.live_models import live_model
from qatpatch.patch import is_purged, patch_record
from qatpatch.stored_models import PACKED_PARTS, PREFIX, PackedModel
from qatpatch.tensor_files import Spec, TensorFile, replace_file, write_tensors
from qatpatch.units import layer_at, unwrap

logger = logging.getLogger("qatpatch")

_PATCH_STATIC = (
    "qatpatch.apply(model, input_scale='static'), run forwards inside `with qatpatch.calibrate(model):` and export it; "
    "or apply with activations=False for a weight-only file"
)
_ANEW = f"packed weights cannot be calibrated: load the dense weights that they were made of anew, {_PATCH_STATIC}"


@dataclass(frozen=True, kw_only=True)
class _Comfy:
    """The options that only ``comfy`` has."""

    without_input_scale: bool = False
    original_names: bool = True
    prefix: str = PREFIX
    metadata_from: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name, kind, said in (
            ("without_input_scale", bool, "True or False"),
            ("original_names", bool, "True or False"),
            ("prefix", str, "a string, empty for none"),
            ("metadata_from", str | os.PathLike | None, "the path of a safetensors file"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise CheckpointError(f"{name} is {said}, got {getattr(self, name)!r}")


@torch.no_grad()
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    format: str,
    *,
    share_qkv: bool = False,
    without_input_scale: bool = False,
    original_names: bool = True,
    prefix: str = PREFIX,
    metadata_from: str | os.PathLike[str] | None = None,
) -> None:
    """Write a patched model, deployed or still training, as another tool reads it. The model is not changed.

    Args:
        model: a patched model, or a wrapper of one. Weights that still train are quantized as `deploy` would.
        path: for ``comfy`` a ``.safetensors`` file; for the others a directory, which gets
            ``diffusion_pytorch_model.safetensors`` and ``config.json``. Files there are replaced atomically.
        format: ``"modelopt"`` (vLLM-Omni, SGLang, TensorRT-LLM, diffusers), ``"comfy"`` (ComfyUI, LTX-2 packages) or
            ``"compressed-tensors"`` (vLLM).
        share_qkv: give the q, k and v projections of one attention the same global and input scale (the largest), as
            readers that fuse them expect. Quantizes again, so only from dense weights.
        without_input_scale: ``comfy`` only: write a dynamic patch without ``input_scale``. ComfyUI then scales every
            input on the call, as the model was trained; the LTX-2 packages refuse such a file.
        original_names: ``comfy`` only: name the weights as the original release does (else as diffusers).
        prefix: ``comfy`` only: what every key begins with.
        metadata_from: ``comfy`` only: a safetensors file whose header strings are taken over, such as the original
            release: the LTX-2 packages read the model's config there.

    Raises:
        CheckpointError: the model is not patched or cannot be written in that format; the message says what to do.
    """
    comfy = _Comfy(
        without_input_scale=without_input_scale,
        original_names=original_names,
        prefix=prefix,
        metadata_from=metadata_from,
    )
    found = format_named(format)
    _write(live_model(model, share_qkv), path, found, comfy, _way_to_scales(model))


@torch.no_grad()
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str,
    *,
    model: nn.Module | str | os.PathLike[str] | None = None,
    without_input_scale: bool = False,
    original_names: bool = True,
    prefix: str = PREFIX,
    metadata_from: str | os.PathLike[str] | None = None,
) -> None:
    """Turn a packed file into another format, tensor by tensor, in the memory that the largest tensor takes.

    Args:
        source: a directory or file that `load` reads.
        target: as ``path`` of `export`; for ``"qatpatch"`` a directory, as `save` writes it.
        format: ``"qatpatch"``, or one of `export`.
        model: as in `load`; needed where nothing beside ``source`` says which model it is.
        without_input_scale: as in `export`, like the next three.
        original_names: see there.
        prefix: see there.
        metadata_from: see there.

    Raises:
        CheckpointError: the source cannot be read, or not be written in that format.
    """
    comfy = _Comfy(
        without_input_scale=without_input_scale,
        original_names=original_names,
        prefix=prefix,
        metadata_from=metadata_from,
    )
    if format != HEADER_KEY and format not in FORMATS:
        raise CheckpointError(f"format={format!r} is none{nearest(str(format), (HEADER_KEY, *FORMATS))}")
    file = weights_file(source)
    if file.exists() and weights_file(target).exists() and file.samefile(weights_file(target)):
        raise CheckpointError(f"source and target are the same file, {file}; write elsewhere")
    stored, _ = open_stored(file, model)
    stored = checked(stored, file)
    if format != HEADER_KEY:
        return _write(stored, target, FORMATS[format], comfy, _ANEW)
    _refuse_comfy_options(HEADER_KEY, comfy)
    write_model(_directory(target, HEADER_KEY), stored)
    logger.info("convert: %d packed linears to %s", len(stored.description["linears"]), target)


def _write(source: PackedModel, path: str | os.PathLike[str], found: Format, comfy: _Comfy, way: str) -> None:
    """Write ``source``; ``way`` is what to do where input scales are wanting."""
    file = _file(path) if found is COMFY else _directory(path, found.name) / WEIGHTS_NAME
    check_target(file)
    packed, dense = _split(source)
    inputs = _input_scales(packed, found, comfy, way)
    keys = _keys(source, packed, dense, found, comfy)
    specs: dict[str, Spec] = {}
    makers: dict[str, Callable[[], torch.Tensor]] = {}
    weight_only = {}
    for name, layer in packed.items():
        key = keys[f"{name}.weight"].removesuffix(".weight")
        weight_only[key] = not layer["settings"]["activations"]
        try:
            parts = found.specs(*layer["shape"])
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
        for (part, spec), ours in zip(parts.items(), PACKED_PARTS, strict=True):
            specs[f"{key}.{part}"] = spec
            makers[f"{key}.{part}"] = _maker(source, found, name, ours)
        if inputs[name] is not None:
            specs[f"{key}.{found.input_scale}"] = found.scale_spec
            makers[f"{key}.{found.input_scale}"] = _scalar(found, inputs[name])
        if found is COMFY:
            said = torch.tensor(list(comfy_layer(weight_only[key]).encode()), dtype=torch.uint8)
            specs[f"{key}.{COMFY_LAYER}"] = Spec(said.dtype, tuple(said.shape))
            makers[f"{key}.{COMFY_LAYER}"] = lambda said=said: said
    for name, ours in dense.items():
        specs[keys[name]] = source.specs[ours]
        makers[keys[name]] = lambda ours=ours: source.tensor(ours)
    kinds = set(weight_only.values())
    if found is not COMFY and len(kinds) > 1:
        raise CheckpointError(f"some layers are weight-only and some are not, and {found.name} has one rule for all")
    ignore = [
        n.removesuffix(".weight") for n in sorted(dense) if n.endswith(".weight") and _is_matrix(source, dense[n])
    ]
    config = quantization_config(found, kinds == {True}, ignore)
    metadata = {"format": "pt"}
    if found is COMFY:
        taken = TensorFile(Path(comfy.metadata_from)).metadata if comfy.metadata_from is not None else {}
        metadata = taken | metadata | {COMFY_METADATA: comfy_metadata(weight_only)}
        metadata.pop(CONFIG_KEY, None)
    else:
        metadata[CONFIG_KEY] = json.dumps(config)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(file, specs, metadata, lambda key: makers[key]())
        if config is not None:
            description = source.description
            text = {"_class_name": description["class"], **description["config"], CONFIG_KEY: config}
            replace_file(file.parent / CONFIG_NAME, lambda t: t.write_text(json.dumps(text, indent=2) + "\n"))
    except OSError as error:
        raise CheckpointError(f"cannot write to {file.parent}: {error}") from error
    logger.info("export: %d packed linears, %d dense tensors as %s to %s", len(packed), len(dense), found.name, file)


def _split(source: PackedModel) -> tuple[dict[str, Any], dict[str, str]]:
    """Path of every layer that is written packed -> what is said of it; key in the model -> our name of the rest."""
    packed, dense, parts = {}, {}, set()
    for name, layer in source.description["linears"].items():
        for path in layer["paths"]:
            parts |= {f"{path}.{part}" for part in (*PACKED_PARTS, "dense_weight")}
            if not layer["settings"]["refine_only"]:
                packed[path] = layer
            elif f"{path}.dense_weight" in source.specs:
                dense[f"{path}.weight"] = f"{path}.dense_weight"
            else:
                raise CheckpointError(f"{name} is refine-only and its dense weight is gone; deploy again")
    if not packed:
        raise CheckpointError("no layer would be packed, so there is nothing of NVFP4 to write")
    return packed, dense | {name: name for name in source.specs if name not in parts}


def _input_scales(packed: dict[str, Any], found: Format, comfy: _Comfy, way: str) -> dict[str, float | None]:
    """Path -> input scale (decode); None for weight-only layers, and where ``comfy`` is to go without."""
    if found is not COMFY:
        _refuse_comfy_options(found.name, comfy)
    scales, lacking = {}, []
    for path, layer in packed.items():
        settings = layer["settings"]
        scales[path] = fixed_input_scale(settings)
        if settings["activations"] and scales[path] is None and not comfy.without_input_scale:
            lacking.append(path)
    if lacking:
        raise CheckpointError(_no_input_scale(lacking, packed[lacking[0]]["settings"]["input_scale"], found, way))
    return scales


def _way_to_scales(model: nn.Module) -> str:
    """What gives a patched model the input scales that it lacks."""
    model = unwrap(model)
    layers = [layer_at(model, paths[0]) for paths in patch_record(model).linears.values()]
    if any(is_purged(layer) for layer in layers):
        return _ANEW
    if all(layer.quantization.settings.input_scale == "static" for layer in layers):
        return "run forwards inside `with qatpatch.calibrate(model):` first"
    return f"qatpatch.remove(model), then {_PATCH_STATIC}"


def _no_input_scale(lacking: list[str], rule: str, found: Format, advice: str) -> str:
    cause = (
        "have input_scale='static' and were never calibrated"
        if rule == "static"
        else "scale their input on each call (input_scale='dynamic')"
    )
    if found is COMFY:
        advice += (
            ". For ComfyUI alone, without_input_scale=True (on the command line --without-input-scale) leaves it out: "
            "it then scales inputs on each call too. The LTX-2 packages need it"
        )
    return f"{len(lacking)} layers ({lacking[0]}, ...) {cause}, and {found.name} stores input_scale; {advice}"


def _refuse_comfy_options(name: str, comfy: _Comfy) -> None:
    given = [key for key, value in asdict(comfy).items() if value != getattr(_Comfy(), key)]
    if given:
        raise CheckpointError(f"{', '.join(given)} is for format='comfy'; {name} has no use for it")


def _keys(
    source: PackedModel, packed: Iterable[str], dense: Iterable[str], found: Format, comfy: _Comfy
) -> dict[str, str]:
    """Key in the model -> key in the file."""
    keys = [*(f"{path}.weight" for path in packed), *dense]
    if found is not COMFY:
        return {key: key for key in keys}
    names = names_of_origin(source.description["class"], keys) if comfy.original_names else {key: key for key in keys}
    return {key: comfy.prefix + name for key, name in names.items()}


def _maker(source: PackedModel, found: Format, name: str, part: str) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        ours = source.tensor(f"{name}.{part}")
        try:
            if part == "weight_packed":
                return found.write_codes(ours)
            if part == "weight_scale":
                return found.write_block_scale(ours)
            return found.write_scale(ours.view(torch.float32))
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error

    return make


def _scalar(found: Format, scale: float) -> Callable[[], torch.Tensor]:
    return lambda: found.write_scale(torch.tensor(scale, dtype=torch.float32))


def _is_matrix(source: PackedModel, name: str) -> bool:
    return len(source.specs[name].shape) == 2


def _file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if path.suffix != ".safetensors" or path.is_dir():
        raise CheckpointError(f"comfy is one file: path ends in .safetensors, got {str(path)!r}")
    return path


def _directory(path: str | os.PathLike[str], name: str) -> Path:
    path = Path(path)
    if path.suffix == ".safetensors" or path.is_file():
        raise CheckpointError(
            f"{name} is a directory, because config.json belongs to it; got {str(path)!r}, name the directory"
        )
    return path
