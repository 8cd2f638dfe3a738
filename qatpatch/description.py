"""What the files of a deployed model say of it: one schema for `save`, `load` and diffusers' own saving and loading.

The header of every safetensors file has a key ``qatpatch``: JSON with the format version, the model's class and config,
every packed layer (logical shape, settings, dtypes), every attention (scheme), a checksum for each tensor of the model
and a digest of all this. Who reads it builds the model's packed layers and patched attentions from it (`prepare`),
and checks names, shapes, dtypes and checksums of what it loads into them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qatpatch import dispatch, guards, nvfp4
from qatpatch.errors import CheckpointError, PlanError
from qatpatch.kernels import ATTENTION_SCHEMES, SMOOTHED_SCHEME
from qatpatch.linear_state import BACKWARDS, COMPUTE_DTYPES, INPUT_SCALES, LinearSettings, LinearState
from qatpatch.packed_linear import NVFP4Linear
from qatpatch.patch import Record, attention_states, is_purged, replace_module
from qatpatch.reuse import input_group
from qatpatch.swap import bind_infer, watch_masks
from qatpatch.switch import AttentionChoice, Switch
from qatpatch.tensor_files import read_json
from qatpatch.units import adapters, kind_of, layer_at, logical

HEADER_KEY = "qatpatch"
VERSION = "1"
_LAYERS = ("linears", "attentions")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in COMPUTE_DTYPES}


def describe(model: nn.Module, record: Record) -> dict[str, Any]:
    """All of the description but what `seal` adds.

    Raises:
        CheckpointError: the model has something that the files have no place for, or lost a part of its patch.
    """
    wrapped = adapters(model)
    if wrapped:
        raise CheckpointError(
            f"{len(wrapped)} layers ({wrapped[0]}, ...) are wrapped by adapters, which these files have no place for; "
            "save the adapters with save_lora_adapter or peft, unload them, then save the model"
        )
    if dispatch.group_offload(model) == "disk":
        raise CheckpointError(
            "group offloading put this model's weights on a disk, so there is nothing in memory to save; save before "
            "enable_group_offload, or leave out offload_to_disk_path"
        )
    if dispatch.is_cast_layerwise(model):
        raise CheckpointError(
            "layerwise casting stores parts of this model in fewer bits than they compute in, and the files would keep "
            "what is stored; save before enable_layerwise_casting"
        )
    linears = {}
    for name, paths in record.linears.items():
        module = layer_at(model, paths[0])
        if kind_of(module) != "NVFP4Linear":
            raise CheckpointError(f"{name} is a {type(module).__name__}, not a packed layer; deploy again")
        trained = module.quantization.trained_dtype
        linears[name] = {
            "paths": [logical(model, path) for path in paths],
            "shape": [module.out_features, module.in_features],
            "bias": module.bias is not None,
            "retained": not is_purged(module),
            "dtype": _dtype_name(module.compute_dtype),
            "trained_dtype": None if trained is None else _dtype_name(trained),
            "settings": asdict(module.quantization.settings),
        }
    attentions = {}
    try:
        states = attention_states(model, record)
    except PlanError as error:
        raise CheckpointError(str(error)) from error
    for (name, paths), state in zip(record.attentions.items(), states, strict=True):
        deployed = state.deployed.scheme
        attentions[name] = {"paths": list(paths), "scheme": state.scheme, "deployed_scheme": deployed}
    return {
        "class": type(model).__name__,
        "config": plain_config(model),
        "profile": record.profile,
        "scheme": record.scheme,
        "staged": record.staged,
        "skipped": record.skipped,
        "total_parameters": record.total_parameters,
        "weights": record.weights,
        "mask_arguments": list(record.mask_arguments),
        "linears": linears,
        "attentions": attentions,
        "computed_buffers": computed_buffers(model),
    }


def plain_config(model: nn.Module) -> dict[str, Any]:
    """A diffusers model's config as JSON holds it; empty for other models."""
    config = {
        key: value
        for key, value in dict(getattr(model, "config", {})).items()
        if not key.startswith("_") and key != "quantization_config"
    }
    return json.loads(json.dumps(config, default=list))


def computed_buffers(model: nn.Module) -> dict[str, str]:
    """Floating buffers that are in no state dict (rotary tables): the class computes them, the dtype is the model's."""
    saved = set(model.state_dict())
    return {
        name: str(buffer.dtype).removeprefix("torch.")
        for name, buffer in model.named_buffers()
        if name not in saved and buffer.is_floating_point()
    }


def writable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; CheckpointError where a file has no place for it."""
    check_writable(name, tensor)
    return tensor.detach().cpu().contiguous()


def seal(description: dict[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """The description with version, checksums and digest, in one order: equal models should be equal files.

    Args:
        description: what `describe` says, of this version or an earlier seal.
        tensors: name and tensor of all that is in the files, each looked at once.
    """
    checksums = {name: checksum(tensor) for name, tensor in sorted(tensors, key=lambda item: item[0])}
    sealed = description | {"version": VERSION, "checksums": checksums}
    return dict(sorted((sealed | {"digest": digest(sealed)}).items()))


def check_writable(name: str, tensor: torch.Tensor) -> None:
    """Raises: CheckpointError where a file has no place for the tensor."""
    if tensor.dtype is not torch.uint8 and tensor.dtype not in COMPUTE_DTYPES:
        raise CheckpointError(
            f"{name} is {tensor.dtype} (layerwise casting?), which load would refuse; convert it first"
        )
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device and holds no numbers to save")
    if type(tensor).__name__ == "DTensor":
        raise CheckpointError(
            f"{name} is sharded, and a file holds whole tensors: gather them with torch.distributed.checkpoint."
            "state_dict.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)), "
            "load them into an unsharded deployed model, and save that"
        )


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())


def digest(description: dict[str, Any]) -> int:
    """Of everything that the description says but the digest itself."""
    rest = {key: value for key, value in description.items() if key != "digest"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def damaged(description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str | None:
    """The first tensor that is not the one that was saved, or "the description"; None where all is as saved."""
    if description.get("digest") != digest(description):
        return "the description"
    checksums = description["checksums"]
    return next((name for name, t in tensors.items() if checksums.get(name) != checksum(t)), None)


def parse(metadata: dict[str, str], file: Path) -> dict[str, Any]:
    """The description in a file's header.

    Raises:
        CheckpointError: there is none, it is damaged, or of another version.
    """
    if HEADER_KEY not in metadata:
        found = f"its header says {', '.join(sorted(metadata))}" if metadata else "its header says nothing"
        raise CheckpointError(
            f"{file} was not written by qatpatch.save ({found}); packed NVFP4 of other tools differs in nibble order "
            "and scale layout and cannot be told by shape, so it is not guessed at"
        )
    try:
        description = read_json(metadata[HEADER_KEY], "it")
    except CheckpointError as error:
        raise CheckpointError(f"the description in {file} is damaged: {error}") from error
    version = description.get("version") if isinstance(description, dict) else None
    if version != VERSION:
        raise CheckpointError(
            f"{file} has format version {version!r}, and this qatpatch reads {VERSION!r}; use the version that wrote it"
        )
    wanted = {"class": str, "config": dict, "linears": dict, "attentions": dict, "profile": str, "scheme": str}
    wanted["checksums"] = dict
    for key, kind in wanted.items():
        if not isinstance(description.get(key), kind):
            raise CheckpointError(f"the description in {file} lacks {key!r}")
    return description


def same_description(descriptions: list[dict[str, Any]], files: list[Path]) -> dict[str, Any]:
    """The one description that all files of a model carry.

    Raises:
        CheckpointError: they differ.
    """
    for description, file in zip(descriptions, files, strict=True):
        if description != descriptions[0]:
            raise CheckpointError(f"{file} is not of the same model as {files[0]}: their headers differ")
    return descriptions[0]


def prepare(
    model: nn.Module, description: dict[str, Any], device: torch.device, dtype: torch.dtype | None = None
) -> Record:
    """Put packed layers (on meta) and patched attentions in place, to run on ``device``.

    Args:
        dtype: what is not packed is going to be converted to it; None: as saved.

    Raises:
        CheckpointError: the model is not the one that was saved, or the description is damaged.
        KernelUnavailable: no kernel here computes the scheme that the attention was trained for.
    """
    try:
        return _prepare(model, description, device, dtype)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the description of the checkpoint is damaged: {error!r}") from error


def _prepare(model: nn.Module, description: dict[str, Any], device: torch.device, dtype: torch.dtype | None) -> Record:
    switch, states = Switch(), []
    for name, layer in description["linears"].items():
        for path in layer["paths"]:
            _expect_linear(model, name, path, layer)
        replace_module(model, layer["paths"], _packed_on_meta(name, layer, switch, dtype))
    for name, attention in description["attentions"].items():
        module = _submodule(model, name, attention["paths"][0])
        reason = dispatch.unsupported_reason(module)
        if reason is not None:
            raise CheckpointError(f"{name} cannot take its QAT attention: {reason}")
        for scheme in (attention["scheme"], attention["deployed_scheme"]):
            if scheme not in (*ATTENTION_SCHEMES, SMOOTHED_SCHEME):
                raise CheckpointError(f"the description of {name} is damaged: there is no scheme {scheme!r}")
        dispatch.attach(module, attention["scheme"], switch)
        state = dispatch.attention_state(module)
        choice, _ = bind_infer(attention["deployed_scheme"], device, None, state.head_dim)
        state.deployed = AttentionChoice(mode="deployed", scheme=choice.scheme, kernel=choice.kernel)
        states.append(state)
    paths = {key: [path for layer in description[key].values() for path in layer["paths"]] for key in _LAYERS}
    guards.install(model, *paths.values(), training=False)
    record = Record(
        profile=description["profile"],
        scheme=description["scheme"],
        staged=bool(description.get("staged")),
        skipped=dict(description.get("skipped", {})),
        warnings=(),
        total_parameters=int(description.get("total_parameters", 0)),
        linears={name: tuple(layer["paths"]) for name, layer in description["linears"].items()},
        attentions={name: tuple(layer["paths"]) for name, layer in description["attentions"].items()},
        weights=int(description.get("weights", 0)),
        switch=switch,
        deployed=True,
        mask_arguments=tuple(description.get("mask_arguments", ())),
    )
    watch_masks(model, record, states, [state.deployed for state in states])
    return record


def _packed_on_meta(name: str, layer: dict[str, Any], switch: Switch, dtype: torch.dtype | None) -> NVFP4Linear:
    try:
        rows, columns = (int(size) for size in layer["shape"])
        dtype, settings = dtype or _DTYPES[layer["dtype"]], LinearSettings(**layer["settings"])
        trained = None if layer["trained_dtype"] is None else _DTYPES[layer["trained_dtype"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the description of {name} is damaged: {error!r}") from error
    for value, known in (
        (settings.input_scale, INPUT_SCALES),
        (settings.global_scale, nvfp4.GLOBAL_SCALE_RULES),
        (settings.backward, BACKWARDS),
    ):
        if value not in known:
            raise CheckpointError(f"the description of {name} is damaged: {value!r} is none of {', '.join(known)}")
    state = LinearState(settings, switch, input_group(name))
    state.trained_dtype = trained
    width = nvfp4.padded_length(columns)
    empty = {"device": "meta", "dtype": torch.uint8}
    return NVFP4Linear(
        packed=torch.empty((rows, width // 2), **empty),
        block_scale=torch.empty((rows, width // nvfp4.BLOCK_SIZE), **empty),
        global_scale=torch.empty((), device="meta", dtype=torch.float32),
        in_features=columns,
        bias=_meta_parameter(dtype, rows) if layer["bias"] else None,
        dense_weight=_meta_parameter(dtype, rows, columns) if layer["retained"] else None,
        dtype=dtype,
        quantization=state,
    )


def _meta_parameter(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta", dtype=dtype), requires_grad=False)


def _expect_linear(model: nn.Module, name: str, path: str, layer: dict[str, Any]) -> None:
    module = _submodule(model, name, path)
    if type(module) is not nn.Linear or [module.out_features, module.in_features] != list(layer["shape"]):
        raise CheckpointError(f"{path} is {module}, and the checkpoint has a linear of shape {layer['shape']} there")


def convert_computed(model: nn.Module, description: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Give buffers that the class computes ``dtype``, or by default the one that they had in the saved model."""
    for name, saved_dtype in description.get("computed_buffers", {}).items():
        owner, _, child = name.rpartition(".")
        buffers = _submodule(model, name, owner)._buffers
        target = dtype or getattr(torch, saved_dtype, None)
        if not isinstance(target, torch.dtype) or buffers.get(child) is None:
            raise CheckpointError(
                f"the checkpoint was saved with a computed buffer {name} ({saved_dtype}), and the model has none"
            )
        buffers[child] = buffers[child].to(target)


def _submodule(model: nn.Module, name: str, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise CheckpointError(
            f"the checkpoint has {name}, and the model built from its config has no {path}"
        ) from error


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
