"""`save` and `load` of deployed models: one safetensors file that says all about itself, and a config.json beside it.

=========================  =====================================================================================
header metadata            ``qatpatch``: what `qatpatch.description` says of the model
tensors                    the state dict: ``X.weight_packed``, ``X.weight_scale``, ``X.weight_global_scale`` (uint8),
                           ``X.bias``, retained ``X.dense_weight``, and everything that was not patched
config.json                the same description for people and other tools; `load` reads the header
=========================  =====================================================================================

The file is written beside its place and renamed, so a killed save leaves the old one whole. Loading is strict: names,
shapes, dtypes and version must fit, and every packed layer must be whole; no model comes back partly unquantized.
Files that diffusers' ``save_pretrained`` wrote of a deployed model have the same headers, also where they are sharded.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from qatpatch import dispatch
from qatpatch.description import (
    HEADER_KEY,
    VERSION,
    convert_computed,
    damaged,
    describe,
    parse,
    prepare,
    same_description,
    seal,
    writable,
)
from qatpatch.errors import CheckpointError, PlanError
from qatpatch.linear_state import COMPUTE_DTYPES
from qatpatch.patch import patch_record
from qatpatch.plan import RECORD
from qatpatch.units import is_graph, unwrap

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
    if (directory / INDEX_NAME).exists():
        raise CheckpointError(
            f"{directory} holds a sharded model ({INDEX_NAME}), which would be read instead of what is saved now; "
            "save to another directory, or remove that one's files"
        )
    description = describe(model, record)
    tensors = writable(model.state_dict())
    metadata = seal(description, tensors)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _replace(directory / WEIGHTS_NAME, lambda file: safetensors.torch.save_file(tensors, file, metadata=metadata))
        _replace(directory / CONFIG_NAME, lambda file: file.write_text(_config_json(description)))
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot write to {directory}: {error}") from error
    logger.info("save: %d packed linears, %d tensors to %s", len(description["linears"]), len(tensors), directory)


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    model: nn.Module | None = None,
) -> nn.Module:
    """Read what `save` wrote, or diffusers' ``save_pretrained`` of a deployed model.

    Args:
        path: the directory (or the one safetensors file in it).
        device: where the model goes.
        dtype: float32, bfloat16 or float16 for everything that is not packed; default: as saved. Packed weights
            and scales
            never change.
        model: an unpatched instance of the saved architecture to load into, on any device or meta; needed only for
            models that are not diffusers', which cannot be rebuilt from their config.

    Returns:
        The deployed model, in eval mode.

    Raises:
        CheckpointError: the file is missing, truncated, foreign, of another version, or does not fit the model.
        KernelUnavailable: no kernel here computes the scheme that the attention was trained for.
    """
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise CheckpointError(f"dtype={dtype} is not one of float32, bfloat16, float16")
    device = _device(device)
    file = _path(path)
    file = file / WEIGHTS_NAME if file.is_dir() or file.suffix != ".safetensors" else file
    description, tensors = _read(file)
    skeleton = _skeleton(description) if model is None else _given_skeleton(model, description)
    record = prepare(skeleton, description, device, dtype)
    changed = damaged(description, tensors)
    tensors = {k: t.to(device, dtype if t.is_floating_point() else None) for k, t in tensors.items()}
    _fill(skeleton, tensors, file)
    if changed:
        raise CheckpointError(f"{file}: {changed} is not what was saved (its checksum differs); the file was changed")
    _move_rest(skeleton, device, description, dtype)
    _compare_config(file.parent / CONFIG_NAME, description)
    record.switch.context = dispatch.SharedSequence(skeleton)
    vars(skeleton)[RECORD] = record
    if dispatch.is_diffusers_model(skeleton):
        from qatpatch import diffusers_quantizer

        diffusers_quantizer.attach(skeleton)
    logger.info("load: %d packed linears from %s", len(record.linears), file)
    return skeleton.eval()


def _config_json(description: dict[str, Any]) -> str:
    """diffusers' config keys, with ours as its quantization config.

    Where our method is not registered diffusers refuses it by name, instead of reading packed weights as noise.
    """
    rest = {key: value for key, value in description.items() if key not in ("class", "config")}
    config = {"_class_name": description["class"], **description["config"]}
    quantization = {"quant_method": HEADER_KEY, "version": VERSION, **rest}
    return json.dumps({**config, "quantization_config": quantization}, indent=2) + "\n"


def _replace(file: Path, write: Any) -> None:
    """Write beside ``file`` and rename over it; the temporary name is never taken for a model."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".partial", dir=file.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


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


def _compare_config(file: Path, description: dict[str, Any]) -> None:
    """Warn where config.json, which is for people and other tools, no longer says what the file does."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        same = all(config.get(key) == value for key, value in description["config"].items())
    except (OSError, ValueError, AttributeError):
        same = not file.exists()
    if not same:
        logger.warning("load: %s differs from the header of the weights, which is what counts", file)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Description and tensors of one file, or of all that the index beside it names."""
    files = [file]
    if (file.parent / INDEX_NAME).is_file():
        try:
            names = json.loads((file.parent / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"].values()
            files = [file.parent / name for name in sorted(set(names))]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{file.parent / INDEX_NAME} is damaged: {error!r}") from error
    descriptions, tensors = [], {}
    for shard in files:
        if not shard.is_file():
            raise CheckpointError(f"there is no {shard}; qatpatch.load reads the directory that qatpatch.save wrote")
        try:
            with safetensors.safe_open(shard, framework="pt", device="cpu") as opened:
                descriptions.append(parse(opened.metadata() or {}, shard))
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard} is truncated or no safetensors file: {error}") from error
    return same_description(descriptions, files), tensors


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


def _given_skeleton(model: nn.Module, description: dict[str, Any]) -> nn.Module:
    model = unwrap(model)
    if type(model).__name__ != description["class"]:
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
