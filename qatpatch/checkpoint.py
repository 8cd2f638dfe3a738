"""`save` and `load` of deployed models: one safetensors file that says all about itself, and a config.json beside it.

=========================  =====================================================================================
header metadata            ``qatpatch``: what `qatpatch.description` says of the model
tensors                    the state dict: ``X.weight_packed``, ``X.weight_scale``, ``X.weight_global_scale`` (uint8),
                           ``X.bias``, retained ``X.dense_weight``, and everything that was not patched
config.json                the same description for people and other tools; `load` reads the header, and refuses another
                           config beside it
=========================  =====================================================================================

The file is written beside its place and renamed, so a killed save leaves the old one whole. Loading is strict: names,
shapes, dtypes and version must fit, and every packed layer must be whole; no model comes back partly unquantized.
Files that diffusers' ``save_pretrained`` wrote of a deployed model have the same headers, also where they are sharded.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from qatpatch import dispatch
from qatpatch.description import (
    HEADER_KEY,
    VERSION,
    checksum,
    computed_buffers,
    convert_computed,
    damaged,
    describe,
    digest,
    parse,
    plain_config,
    prepare,
    same_config,
    same_description,
    seal,
    writable,
)
from qatpatch.errors import CheckpointError, PlanError
from qatpatch.formats import dense_model, packed_names
from qatpatch.linear_state import COMPUTE_DTYPES
from qatpatch.misnamed import misnamed
from qatpatch.patch import is_patched, patch_record
from qatpatch.plan import RECORD
from qatpatch.stored_models import PackedModel, read_foreign
from qatpatch.tensor_files import Spec, TensorFile, read_json_file, replace_file, write_tensors
from qatpatch.units import is_graph, module_units, unwrap

logger = logging.getLogger("qatpatch")

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
INDEX_NAME = "diffusion_pytorch_model.safetensors.index.json"
CONFIG_NAME = "config.json"


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
        hint = ""
        if isinstance(model, nn.Module) and not is_patched(model):
            hint = (
                ", train, then qatpatch.deploy(model). A dense model is saved by its own save_pretrained; "
                "qatpatch.export writes formats of other tools, also while training"
            )
        raise CheckpointError(f"save writes deployed models: {error}{hint}") from error
    if not record.deployed:
        raise CheckpointError(
            f"this {type(model).__name__} is patched but not deployed, so it has no packed weights to save; call "
            "qatpatch.deploy(model) first, or qatpatch.export to write one that is still training"
        )
    if is_graph(model):
        raise CheckpointError("graph modules have no config to rebuild them from; save the eager model instead")
    description = describe(model, record)
    tensors = {name: writable(name, tensor) for name, tensor in model.state_dict().items()}
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_model(directory, PackedModel(description=description, specs=specs, tensor=tensors.__getitem__))
    logger.info("save: %d packed linears, %d tensors to %s", len(description["linears"]), len(tensors), directory)


def write_model(directory: Path, model: PackedModel) -> None:
    """Write our own format: `WEIGHTS_NAME` and config.json. Each tensor is asked for twice."""
    check_target(directory / WEIGHTS_NAME)
    description = seal(model.description, ((name, model.tensor(name)) for name in sorted(model.specs)))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        metadata = {HEADER_KEY: json.dumps(description)}
        write_tensors(directory / WEIGHTS_NAME, model.specs, metadata, model.tensor)
        replace_file(directory / CONFIG_NAME, lambda temporary: temporary.write_text(_config_json(description)))
    except OSError as error:
        raise CheckpointError(f"cannot write to {directory}: {error}") from error


def check_target(file: Path) -> None:
    """Refuse to write ``file`` over dense weights, which nothing brings back, or beside a sharded model.

    Raises:
        CheckpointError: it would be lost, or nobody could say which of the two is meant.
    """
    if file.name == WEIGHTS_NAME and (file.parent / INDEX_NAME).exists():
        raise CheckpointError(
            f"{file.parent} holds a sharded model ({INDEX_NAME}), which would be read instead of what is saved now; "
            "write to another directory, or remove that one's files"
        )
    try:
        packed = not file.is_file() or any(spec.dtype is torch.uint8 for spec in TensorFile(file).specs.values())
    except CheckpointError:
        return  # no weights are lost with a file that cannot be read
    if not packed:
        raise CheckpointError(
            f"{file} holds weights that are not packed, perhaps those that this model comes from, and they would be "
            "lost; write elsewhere, or remove that file first"
        )


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    model: nn.Module | str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Read a packed model: of `save`, of diffusers' ``save_pretrained``, of ModelOpt, ComfyUI or compressed-tensors.

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
    record = prepare(skeleton, description, device, dtype)
    changed = damaged(description, tensors) if "checksums" in description else None
    tensors = {k: t.to(device, dtype if t.is_floating_point() else None) for k, t in tensors.items()}
    _fill(skeleton, tensors, file)
    if changed:
        raise CheckpointError(f"{file}: {changed} is not what was saved (its checksum differs); the file was changed")
    _move_rest(skeleton, device, description, dtype)
    record.switch.context = dispatch.SharedSequence(skeleton)
    vars(skeleton)[RECORD] = record
    if dispatch.is_diffusers_model(skeleton):
        from qatpatch import diffusers_quantizer

        diffusers_quantizer.attach(skeleton)
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
    opened = opened_files(file)
    files = [shard.path for shard in opened]
    if HEADER_KEY in opened[0].metadata:
        description = same_description([parse(shard.metadata, shard.path) for shard in opened], files)
        if len(files) > 1 or file.name == WEIGHTS_NAME:
            _compare_config(file.parent / CONFIG_NAME, description)
        holder = {name: shard for shard in opened for name in shard.specs}
        specs = {name: shard.specs[name] for name, shard in holder.items()}
        stored = PackedModel(description=description, specs=specs, tensor=lambda name: holder[name].tensor(name))
        return stored, None if model is None else _given_skeleton(model, description)
    if len(files) > 1:
        refuse_shards(opened)
    config = read_json_file(file.parent / CONFIG_NAME) if (file.parent / CONFIG_NAME).is_file() else None
    config = config if isinstance(config, dict) else None
    if config is not None and is_ours(config) and file.name == WEIGHTS_NAME:
        raise CheckpointError(f"{file} was not written by qatpatch.save, and the config.json beside it was")
    skeleton = skeleton_for(file, config, model)
    wanted = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    stored = read_foreign(opened[0], config, type(skeleton).__name__, wanted)
    stored.description.update(
        config=plain_config(skeleton),
        computed_buffers=computed_buffers(skeleton),
        skipped=_left_dense(skeleton, stored.description),
    )
    return stored, skeleton


def _left_dense(skeleton: nn.Module, description: dict[str, Any]) -> dict[str, str]:
    """What a file of another tool leaves dense, with the reason, as a plan has it."""
    reasons = {
        "linear": f"The file, of format {description['profile']}, holds it dense.",
        "attention": f"A file of format {description['profile']} keeps no attention, so it is dense.",
    }
    units = (unit for unit in module_units(skeleton) if unit.name not in description["linears"])
    return {unit.name: reasons[unit.kind] for unit in units}


def opened_files(file: Path) -> list[TensorFile]:
    """The file, or all shards of the index beside it.

    Raises:
        CheckpointError: there is neither; the message says what is there.
    """
    return [TensorFile(shard) for shard in _shards(file)]


def refuse_shards(opened: list[TensorFile]) -> NoReturn:
    """Raise for several files that are not ours."""
    directory = opened[0].path.parent
    if not any(packed_names(shard.specs) for shard in opened):
        raise CheckpointError(dense_model(directory))
    raise CheckpointError(f"{directory} holds shards of another tool, which are not read; merge them to one file")


def _shards(file: Path) -> list[Path]:
    """The file, or where it is none all that the index beside it names."""
    index = file.parent / INDEX_NAME
    if file.is_file() and file.name == WEIGHTS_NAME and index.is_file():
        raise CheckpointError(
            f"{file.parent} holds one model in {WEIGHTS_NAME} and one in the shards of {INDEX_NAME}, and nothing says "
            "which is meant (diffusers reads the shards); remove the file, or the index and its shards"
        )
    if file.is_file() or not index.is_file():
        if not file.is_file():
            raise CheckpointError(misnamed(file.parent if file.name == WEIGHTS_NAME else file, WEIGHTS_NAME))
        return [file]
    try:
        names = sorted(set(read_json_file(index)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}") from error
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(f"{index} is damaged: it names no files beside it")
    return [file.parent / name for name in names]


def is_ours(config: dict[str, Any]) -> bool:
    """Whether a config.json lies beside weights that `save`, or diffusers for us, wrote."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == HEADER_KEY


def skeleton_for(
    file: Path, config: dict[str, Any] | None, model: nn.Module | str | os.PathLike[str] | None
) -> nn.Module:
    """The model that a file of another tool is for: the one that is given, else of the config.json beside it."""
    if isinstance(model, nn.Module):
        return _given_skeleton(model, None)
    if model is not None:
        directory = _path(model, "model")
        config = read_json_file(directory / CONFIG_NAME if directory.is_dir() else directory)
    if not isinstance(config, dict) or not isinstance(config.get("_class_name"), str):
        raise CheckpointError(
            f"nothing says which model {file} is for (no config.json of diffusers beside it); name a "
            "directory with its config.json (model=, --model on the command line), or pass an unpatched instance"
        )
    return config_skeleton(config)


def config_skeleton(config: dict[str, Any]) -> nn.Module:
    """The model of a diffusers config.json, parameters on meta."""
    fields = {key: value for key, value in config.items() if not key.startswith("_")}
    fields.pop("quantization_config", None)
    return _skeleton({"class": config["_class_name"], "config": fields})


def _config_json(description: dict[str, Any]) -> str:
    """diffusers' config keys, with ours as its quantization config.

    Where our method is not registered diffusers refuses it by name, instead of reading packed weights as noise.
    """
    rest = {key: value for key, value in description.items() if key not in ("class", "config")}
    config = {"_class_name": description["class"], **description["config"]}
    quantization = {"quant_method": HEADER_KEY, "version": VERSION, **rest}
    return json.dumps({**config, "quantization_config": quantization}, indent=2) + "\n"


def _path(path: str | os.PathLike[str], argument: str = "path") -> Path:
    if isinstance(path, str | os.PathLike) and str(path):
        return Path(path)
    given = repr(path) if path is None or isinstance(path, str) else f"a {type(path).__name__}"
    given = f"the class {path.__name__}" if isinstance(path, type) else given
    hint = "; the other choice is an unpatched instance, such as Class.from_config gives" if argument == "model" else ""
    raise CheckpointError(f"{argument} is the directory of a model, got {given}{hint}")


def _device(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise CheckpointError(f"device={device!r} cannot hold a model here: {error}") from error
    if device.type == "meta":
        raise CheckpointError("device='meta' holds no numbers; load to a device that does")
    return device


def _compare_config(file: Path, description: dict[str, Any]) -> None:
    """Refuse weights beside a config.json that describes another model; none at all is fine."""
    if not file.exists():
        return
    config = read_json_file(file)
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is no object; write the one back that was saved, or remove it")
    config = {**config, "_class_name": config.get("_class_name", description["class"])}
    same_config(config, {**description["config"], "_class_name": description["class"]}, file)


def checked(stored: PackedModel, file: Path) -> PackedModel:
    """The same, every tensor compared with its checksum when it is read; files of others have none."""
    description = stored.description
    if "checksums" not in description:
        return stored
    if description.get("digest") != digest(description):
        raise CheckpointError(f"{file}: the description is not what was saved (its checksum differs)")
    differing = sorted(stored.specs.keys() ^ description["checksums"].keys())
    if differing:
        raise CheckpointError(f"{file}: {differing[0]} is not as it was saved: it was added, or taken out")

    def tensor(name: str) -> torch.Tensor:
        found = stored.tensor(name)
        if description["checksums"].get(name) != checksum(found):
            raise CheckpointError(f"{file}: {name} is not what was saved (its checksum differs); the file was changed")
        return found

    return PackedModel(description=description, specs=stored.specs, tensor=tensor)


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
        directory = _path(model, "model")
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


def _move_rest(model: nn.Module, device: torch.device, description: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Move and convert computed buffers (not in the file), and prove that nothing is left on meta."""
    model.to(device)
    convert_computed(model, description, dtype)
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if left:
        raise CheckpointError(f"{len(left)} tensors ({left[0]}, ...) are neither in the file nor computed by the model")
