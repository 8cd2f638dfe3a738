"""`save` and `load` of deployed models: one safetensors file that says all about itself, and a config.json beside it.

=========================  =====================================================================================
header metadata            ``qatpatch``: JSON with the format version, the model's class and config, every packed layer
                           (logical shape, settings, dtypes) and every attention (scheme)
tensors                    the state dict: ``X.weight_packed``, ``X.weight_scale``, ``X.weight_global_scale`` (uint8),
                           ``X.bias``, retained ``X.dense_weight``, and everything that was not patched
config.json                the same description for people and other tools; `load` reads the header
=========================  =====================================================================================

The file is written beside its place and renamed, so a killed save leaves the old one whole. Loading is strict: names,
shapes, dtypes and version must fit, and every packed layer must be whole; no model comes back partly unquantized.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qatpatch import dispatch, nvfp4
from qatpatch.errors import CheckpointError, PlanError
from qatpatch.linear_state import BACKWARDS, COMPUTE_DTYPES, INPUT_SCALES, LinearSettings, LinearState
from qatpatch.packed_linear import NVFP4Linear
from qatpatch.patch import Record, attention_states, is_purged, patch_record, replace_module
from qatpatch.plan import RECORD
from qatpatch.reuse import input_group
from qatpatch.stored_models import PackedModel, read_foreign
from qatpatch.swap import bind_infer, watch_masks
from qatpatch.switch import AttentionChoice, Switch
from qatpatch.tensor_files import Spec, TensorFile, read_json, read_json_file, replace_file, write_tensors
from qatpatch.units import adapters, is_graph, layer_at, logical, unwrap

logger = logging.getLogger("qatpatch")

HEADER_KEY = "qatpatch"
VERSION = "1"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
CONFIG_NAME = "config.json"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in COMPUTE_DTYPES}


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a deployed model to the directory ``path``: ``diffusion_pytorch_model.safetensors`` and ``config.json``.

    Retained dense weights are written too. Existing files are replaced atomically.

    Raises:
        CheckpointError: the model is not deployed (the message names `deploy` and `export`), or cannot be written.
    """
    directory = _path(path)
    try:
        model = unwrap(model)
        record = patch_record(model)
    except PlanError as error:
        raise CheckpointError(
            f"save writes deployed models: {error}. Then call qatpatch.deploy(model); for a model that is still "
            "training, qatpatch.export writes formats of other tools"
        ) from error
    if not record.deployed:
        raise CheckpointError(
            f"this {type(model).__name__} is patched but not deployed, so it has no packed weights to save; call "
            "qatpatch.deploy(model) first, or qatpatch.export to write one that is still training"
        )
    if is_graph(model):
        raise CheckpointError("graph modules have no config to rebuild them from; save the eager model instead")
    description = _describe(model, record)
    tensors = {name: writable(name, tensor) for name, tensor in model.state_dict().items()}
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_model(directory, PackedModel(description=description, specs=specs, tensor=tensors.__getitem__))
    logger.info("save: %d packed linears, %d tensors to %s", len(description["linears"]), len(tensors), directory)


def write_model(directory: Path, model: PackedModel) -> None:
    """Write our own format: `WEIGHTS_NAME` and config.json. Each tensor is asked for twice."""
    checksums = {name: _checksum(model.tensor(name)) for name in sorted(model.specs)}
    description = model.description | {"version": VERSION, "checksums": checksums}
    description["digest"] = _digest(description)
    # In one order: equal models should be equal files.
    description = dict(sorted(description.items()))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        metadata = {HEADER_KEY: json.dumps(description)}
        write_tensors(directory / WEIGHTS_NAME, model.specs, metadata, model.tensor)
        replace_file(directory / CONFIG_NAME, lambda temporary: temporary.write_text(_config_json(description)))
    except OSError as error:
        raise CheckpointError(f"cannot write to {directory}: {error}") from error


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    model: nn.Module | str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Read what `save` wrote, or packed NVFP4 of ModelOpt, ComfyUI or compressed-tensors (`formats`).

    Args:
        path: the directory (or the safetensors file in it).
        device: where the model goes.
        dtype: float32, bfloat16 or float16 for everything that is not packed; default: as saved. Packed weights
            and scales
            never change.
        model: an unpatched instance of the saved architecture to load into, on any device or meta, or a directory with
            its diffusers config.json. Needed only for models that are not diffusers', which cannot be rebuilt from
            their config, and for files without a config, as ComfyUI's are.

    Returns:
        The deployed model, in eval mode. Files of other tools say nothing of attention: it is dense there.

    Raises:
        CheckpointError: the file is missing, truncated, of another version or in no format that its metadata names, or
            does not fit the model.
        KernelUnavailable: no kernel here computes the scheme that the attention was trained for.
    """
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise CheckpointError(f"dtype={dtype} is not one of float32, bfloat16, float16")
    device = _device(device)
    file = weights_file(path)
    stored, skeleton = open_stored(file, model)
    description = stored.description
    if skeleton is None:
        skeleton = _skeleton(description)
    tensors = {name: stored.tensor(name) for name in stored.specs}
    try:
        record = _prepare(skeleton, description, device)
        damaged = _damaged(description, tensors) if "checksums" in description else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the description in {file} is damaged: {error!r}") from error
    tensors = {k: t.to(device, dtype if t.is_floating_point() else None) for k, t in tensors.items()}
    _fill(skeleton, tensors, file)
    if damaged:
        raise CheckpointError(f"{file}: {damaged} is not what was saved (its checksum differs); the file was changed")
    _move_rest(skeleton, device, description.get("computed_buffers", {}), dtype)
    _compare_config(file.parent / CONFIG_NAME, description)
    record.switch.context = dispatch.SharedSequence(skeleton)
    vars(skeleton)[RECORD] = record
    logger.info("load: %d packed linears from %s", len(record.linears), file)
    return skeleton.eval()


def weights_file(path: str | os.PathLike[str]) -> Path:
    """The safetensors file that ``path``, a directory or the file itself, stands for."""
    path = _path(path)
    return path / WEIGHTS_NAME if path.is_dir() or path.suffix != ".safetensors" else path


def open_stored(
    file: Path, model: nn.Module | str | os.PathLike[str] | None = None
) -> tuple[PackedModel, nn.Module | None]:
    """A file of any format that is read, and the unpatched model that it is for: ``model``, or for a file of another
    tool one with its parameters on meta; None for our own, which says all about itself.
    """
    if not file.is_file():
        raise CheckpointError(f"there is no {file}; qatpatch.load reads the directory that qatpatch.save wrote")
    opened = TensorFile(file)
    if HEADER_KEY in opened.metadata:
        description = _parse(opened.metadata, file)
        stored = PackedModel(description=description, specs=opened.specs, tensor=opened.tensor)
        return stored, None if model is None else _given_skeleton(model, description)
    config = read_json_file(file.parent / CONFIG_NAME) if (file.parent / CONFIG_NAME).is_file() else None
    config = config if isinstance(config, dict) else None
    if HEADER_KEY in (config or {}) and file.name == WEIGHTS_NAME:
        raise CheckpointError(f"{file} was not written by qatpatch.save, and the config.json beside it was")
    skeleton = skeleton_for(file, config, model)
    wanted = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    stored = read_foreign(opened, config, type(skeleton).__name__, wanted)
    stored.description.update(config=plain_config(skeleton), computed_buffers=_computed_buffers(skeleton))
    return stored, skeleton


def skeleton_for(
    file: Path, config: dict[str, Any] | None, model: nn.Module | str | os.PathLike[str] | None
) -> nn.Module:
    """The model that a file of another tool is for: the one that is given, else of the config.json beside it."""
    if isinstance(model, nn.Module):
        return _given_skeleton(model, None)
    if model is not None:
        directory = _path(model)
        config = read_json_file(directory / CONFIG_NAME if directory.is_dir() else directory)
    if not isinstance(config, dict) or not isinstance(config.get("_class_name"), str):
        raise CheckpointError(
            f"nothing says which model {file} is for (no config.json of diffusers beside it); pass model=, an "
            "unpatched instance of it or a directory with its config.json"
        )
    return config_skeleton(config)


def config_skeleton(config: dict[str, Any]) -> nn.Module:
    """The model of a diffusers config.json, parameters on meta."""
    fields = {key: value for key, value in config.items() if not key.startswith("_")}
    for other in (HEADER_KEY, "quantization_config"):
        fields.pop(other, None)
    return _skeleton({"class": config["_class_name"], "config": fields})


def _describe(model: nn.Module, record: Record) -> dict[str, Any]:
    wrapped = adapters(model)
    if wrapped:
        raise CheckpointError(
            f"{wrapped[0]} is wrapped by an adapter, which this file has no place for; save the adapter with peft or "
            "diffusers, unload it, then save the model"
        )
    linears = {}
    for name, paths in record.linears.items():
        module = layer_at(model, paths[0])
        if not isinstance(module, NVFP4Linear):
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
        "computed_buffers": _computed_buffers(model),
    }


def plain_config(model: nn.Module) -> dict[str, Any]:
    """A diffusers model's config as JSON holds it; empty for other models."""
    config = {key: value for key, value in dict(getattr(model, "config", {})).items() if not key.startswith("_")}
    return json.loads(json.dumps(config, default=list))


def _computed_buffers(model: nn.Module) -> dict[str, str]:
    """Floating buffers that are in no state dict (rotary tables): the class computes them, the dtype is the model's."""
    saved = set(model.state_dict())
    return {
        name: str(buffer.dtype).removeprefix("torch.")
        for name, buffer in model.named_buffers()
        if name not in saved and buffer.is_floating_point()
    }


def _config_json(description: dict[str, Any]) -> str:
    """diffusers' config keys, with ours beside them."""
    rest = {key: value for key, value in description.items() if key not in ("class", "config")}
    # diffusers refuses a quantization method that it does not know, instead of reading packed weights as noise.
    config = {"_class_name": description["class"], **description["config"]}
    config["quantization_config"] = {"quant_method": HEADER_KEY}
    return json.dumps({**config, "qatpatch": {"version": VERSION, **rest}}, indent=2) + "\n"


def writable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; CheckpointError where a file has no place for it."""
    check_writable(name, tensor)
    return tensor.detach().cpu().contiguous()


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


def _path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise CheckpointError(f"path is the directory of a model, got {path!r}")
    return Path(path)


def _device(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise CheckpointError(f"device={device!r} cannot hold a model here: {error}") from error
    if device.type == "meta":
        raise CheckpointError("device='meta' holds no numbers; load to a device that does")
    return device


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())


def _digest(description: dict[str, Any]) -> int:
    """Of everything that the description says but the digest itself."""
    rest = {key: value for key, value in description.items() if key != "digest"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def checked(stored: PackedModel, file: Path) -> PackedModel:
    """The same, every tensor compared with its checksum when it is read; files of others have none."""
    description = stored.description
    if "checksums" not in description:
        return stored
    if description.get("digest") != _digest(description):
        raise CheckpointError(f"{file}: the description is not what was saved (its checksum differs)")

    def tensor(name: str) -> torch.Tensor:
        found = stored.tensor(name)
        if description["checksums"].get(name) != _checksum(found):
            raise CheckpointError(f"{file}: {name} is not what was saved (its checksum differs); the file was changed")
        return found

    return PackedModel(description=description, specs=stored.specs, tensor=tensor)


def _damaged(description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str | None:
    """The first tensor that is not the one that was saved, or "the description"; None where all is as saved."""
    if description.get("digest") != _digest(description):
        return "the description"
    checksums = description["checksums"]
    return next((name for name, t in tensors.items() if checksums.get(name) != _checksum(t)), None)


def _compare_config(file: Path, description: dict[str, Any]) -> None:
    """Warn where config.json, which is for people and other tools, no longer says what the file does."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        same = all(config.get(key) == value for key, value in description["config"].items())
    except (OSError, ValueError, AttributeError):
        same = not file.exists()
    if not same:
        logger.warning("load: %s differs from the header of the weights, which is what counts", file)


def _parse(metadata: dict[str, str], file: Path) -> dict[str, Any]:
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
    for key, kind in wanted.items():
        if not isinstance(description.get(key), kind):
            raise CheckpointError(f"the description in {file} lacks {key!r}")
    return description


def _skeleton(description: dict[str, Any]) -> nn.Module:
    """The saved class with its config; parameters on meta, computed buffers real."""
    import diffusers

    name = description["class"]
    cls = getattr(diffusers, name, None) if name.isidentifier() and not name.startswith("_") else None
    if not (isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin)):
        raise CheckpointError(
            f"the checkpoint holds a {name}, which is no model of the installed diffusers; pass model=, an "
            f"unpatched instance of it"
        )
    try:
        with _ParametersOnMeta():
            return cls.from_config(description["config"])
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"the config in the checkpoint does not build a {name}: {error}") from error


def _given_skeleton(model: nn.Module | str | os.PathLike[str], description: dict[str, Any] | None) -> nn.Module:
    if not isinstance(model, nn.Module):
        directory = _path(model)
        model = skeleton_for(directory, None, directory)
    model = unwrap(model)
    if description is not None and type(model).__name__ != description["class"]:
        raise CheckpointError(f"the checkpoint holds a {description['class']}, model= is a {type(model).__name__}")
    if RECORD in vars(model):
        raise CheckpointError("model= must be an unpatched instance; this one is patched")
    return model


class _ParametersOnMeta(torch.overrides.TorchFunctionMode):
    """Layers allocate their parameters with ``torch.empty``: on meta here. Buffers that are computed stay real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _prepare(model: nn.Module, description: dict[str, Any], device: torch.device) -> Record:
    """Put packed layers (on meta) and patched attentions in place."""
    switch, states = Switch(), []
    for name, layer in description["linears"].items():
        for path in layer["paths"]:
            _expect_linear(model, name, path, layer)
        replace_module(model, layer["paths"], _packed_on_meta(name, layer, switch))
    for name, attention in description["attentions"].items():
        module = _submodule(model, name, attention["paths"][0])
        reason = dispatch.unsupported_reason(module)
        if reason is not None:
            raise CheckpointError(f"{name} cannot take its QAT attention: {reason}")
        dispatch.attach(module, attention["scheme"], switch)
        state = dispatch.attention_state(module)
        choice, _ = bind_infer(attention["deployed_scheme"], device, None, state.head_dim)
        state.deployed = AttentionChoice(mode="deployed", scheme=choice.scheme, kernel=choice.kernel)
        states.append(state)
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


def _packed_on_meta(name: str, layer: dict[str, Any], switch: Switch) -> NVFP4Linear:
    try:
        rows, columns = (int(size) for size in layer["shape"])
        dtype, settings = _DTYPES[layer["dtype"]], LinearSettings(**layer["settings"])
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


def _submodule(model: nn.Module, name: str, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise CheckpointError(
            f"the checkpoint has {name}, and the model built from its config has no {path}"
        ) from error


def _fill(model: nn.Module, tensors: dict[str, torch.Tensor], file: Path) -> None:
    wrong = [name for name, t in tensors.items() if t.dtype is not torch.uint8 and t.dtype not in COMPUTE_DTYPES]
    if wrong:
        raise CheckpointError(f"{file}: {wrong[0]} has dtype {tensors[wrong[0]].dtype}, which no saved model has")
    try:
        model.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{file} does not fit the model: {error}") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _move_rest(model: nn.Module, device: torch.device, computed: dict[str, str], dtype: torch.dtype | None) -> None:
    """Move and convert computed buffers (not in the file), and prove that nothing is left on meta."""
    model.to(device)
    for name, saved_dtype in computed.items():
        owner, _, child = name.rpartition(".")
        buffers = _submodule(model, name, owner)._buffers
        target = dtype or getattr(torch, saved_dtype, None)
        if not isinstance(target, torch.dtype) or buffers.get(child) is None:
            raise CheckpointError(
                f"the checkpoint was saved with a computed buffer {name} ({saved_dtype}), and the model has none"
            )
        buffers[child] = buffers[child].to(target)
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if left:
        raise CheckpointError(f"{len(left)} tensors ({left[0]}, ...) are neither in the file nor computed by the model")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
