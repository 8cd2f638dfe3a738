"""What a path is where it names no packed model, and what to name instead: the sentences of `load`, `inspect` and
`convert`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_SHOWN = 3


def misnamed(path: Path, wanted: str) -> str:
    """Why nothing is read from ``path``, a file or directory as the caller named it, and what to name.

    Args:
        path: no safetensors file, and no directory with a file ``wanted``; it may not exist.
    """
    if path.is_file():
        return _file(path)
    if path.is_dir():
        return _directory(path, wanted)
    return (
        f"there is no {path}; a directory that qatpatch.save or save_pretrained wrote is read, and files of modelopt, "
        "comfy and compressed-tensors"
    )


def _file(path: Path) -> str:
    if path.suffix == ".json":
        return f"{path} says what a model is, and its weights are beside it; name the directory, {path.parent}"
    if path.suffix in _PICKLES:
        return (
            f"{path} is a file of torch.save, a pickle, which is never read; name a directory of qatpatch.save or a "
            ".safetensors file"
        )
    return f"{path} is no .safetensors file; name a directory of qatpatch.save or a .safetensors file"


def _directory(path: Path, wanted: str) -> str:
    parts = sorted(part for part in path.glob("transformer*") if (part / "config.json").is_file())
    if parts:
        return f"{path} is a whole pipeline; name its transformer, {_listed(parts, ' or ')}"
    files = sorted(path.glob("*.safetensors"))
    if files:
        return f"{path} holds {_listed(file.name for file in files)} and no {wanted}; name the file that is meant"
    pickles = sorted(file for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        return f"{path} holds pickles ({_listed(file.name for file in pickles)}), which are never read"
    return f"there is no safetensors file in {path}; name a directory of qatpatch.save or save_pretrained"


def _listed(names: Iterable[object], joint: str = ", ") -> str:
    names = [str(name) for name in names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return joint.join(names[:_SHOWN]) + more
