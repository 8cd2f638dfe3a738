"""What a packed file holds, and what is wrong with it: `inspect_file`, behind ``qatpatch inspect``.

No model is needed and one tensor is held at a time. What is wrong is collected, not raised: a file that cannot be read
as anything still says so as data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qatpatch.checkpoint import (
    CONFIG_NAME,
    HEADER_KEY,
    WEIGHTS_NAME,
    checked,
    config_skeleton,
    open_stored,
    opened_files,
    refuse_shards,
    weights_file,
)
from qatpatch.errors import CheckpointError
from qatpatch.formats import Format, check_block_scale, check_global_scale, identify
from qatpatch.linear_state import fixed_input_scale
from qatpatch.nvfp4 import BLOCK_SIZE
from qatpatch.receipts import Receipt, Table, counted, grouped_members
from qatpatch.tensor_files import TensorFile, read_json_file


@dataclass(frozen=True, kw_only=True)
class PackedLayer:
    """One packed layer of a file.

    Attributes:
        name: in the file.
        shape: (rows, columns), logical where the file tells, else as stored.
        weight_only: whether its input stays unquantized.
        global_scale, input_scale: decode direction; None where the file has none.
        block_scales: smallest and largest; None where they cannot be read.
        zero_blocks: share of blocks whose scale is 0.
        problem: what is wrong with it, or an empty string.
    """

    name: str
    shape: tuple[int, int]
    weight_only: bool
    global_scale: float | None = None
    input_scale: float | None = None
    block_scales: tuple[float, float] | None = None
    zero_blocks: float = 0.0
    problem: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Inspection(Receipt):
    """Attributes:
    file: where it is; the directory where there are shards.
    format: ``"qatpatch"``, ``"modelopt"``, ``"comfy"``, ``"compressed-tensors"``, or None where nothing says.
    model: class of the model, where the file or the config.json beside it tells.
    layers: the packed ones.
    tensors: how many the file holds.
    nbytes: of all tensors.
    problems: everything that is wrong; empty for a file that is in order.
    shards: how many files were read together.
    """

    file: str
    format: str | None
    model: str | None
    layers: tuple[PackedLayer, ...]
    tensors: int
    nbytes: int
    problems: tuple[str, ...]
    shards: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def _tables(self) -> list[Table]:
        shards = f", {self.shards} shards" if self.shards > 1 else ""
        title = (
            f"{self.file}{shards}: format {self.format or 'unknown'}, {self.model or 'model unknown'}, "
            f"{counted(len(self.layers), 'packed layer')}, {counted(self.tensors, 'tensor')}, "
            f"{self.nbytes / 1e6:.1f} MB"
        )
        layers = {layer.name: layer for layer in self.layers}
        groups = grouped_members(layers, key=lambda n: (str(layers[n].shape), str(layers[n].weight_only)))
        rows = [_cells(pattern, [layers[name] for name in names]) for pattern, names in groups]
        header = ("layers", "count", "shape", "quantized", "global scale", "input scale", "block scales", "zero blocks")
        wrong = [(problem,) for problem in self.problems]
        tables = [
            (title, [header, *rows] if rows else []),
            (counted(len(wrong), "problem") if wrong else "nothing is wrong", [("problem",), *wrong] if wrong else []),
        ]
        return [
            (printable(title), [tuple(printable(cell) for cell in row) for row in table]) for title, table in tables
        ]


def inspect_file(path: str | os.PathLike[str]) -> Inspection:
    """Look at a safetensors file of any format that is read, or the directory with one (or with shards of `save`'s).

    Raises:
        CheckpointError: it is missing, truncated or no safetensors file.
    """
    path = weights_file(path)
    opened = opened_files(path)
    file = opened[0]
    found, model, layers, problems = None, None, (), []
    try:
        if HEADER_KEY in file.metadata:
            found = HEADER_KEY
            model, layers = _own(path)
        elif len(opened) > 1:
            refuse_shards(opened)
        else:
            config = read_json_file(path.parent / CONFIG_NAME) if (path.parent / CONFIG_NAME).is_file() else None
            config = config if isinstance(config, dict) else {}
            model = config.get("_class_name")
            described, names = identify(file, config)
            found = described.name
            layers = tuple(_foreign(file, described, name, weight_only) for name, weight_only in sorted(names.items()))
            if path.name == WEIGHTS_NAME and not any(layer.problem for layer in layers):
                _fit_model(path, config)
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        known = isinstance(error, CheckpointError)
        problems.append(str(error) if known else f"the description is damaged: {error!r}")
    problems += [f"{layer.name}: {layer.problem}" for layer in layers if layer.problem]
    return Inspection(
        file=str(path if len(opened) == 1 else path.parent),
        format=found,
        model=model,
        layers=layers,
        tensors=sum(len(shard.specs) for shard in opened),
        nbytes=sum(spec.nbytes for shard in opened for spec in shard.specs.values()),
        shards=len(opened),
        problems=tuple(problems),
    )


def _fit_model(path: Path, config: dict[str, Any]) -> None:
    """Raise where a file of another tool does not fit the model of the config.json beside it, if diffusers has that."""
    try:
        skeleton = config_skeleton(config)
    except (CheckpointError, KeyError):
        return
    stored, _ = open_stored(path, skeleton)
    for name, layer in stored.description["linears"].items():
        if any(size % BLOCK_SIZE for size in layer["shape"]):
            stored.tensor(f"{name}.weight_packed")


def _own(path: Path) -> tuple[str, tuple[PackedLayer, ...]]:
    stored = checked(open_stored(path)[0], path)
    layers = []
    for name, entry in stored.description["linears"].items():
        rows, columns = entry["shape"]
        settings = entry["settings"]
        first = entry["paths"][0]
        layers.append(
            _layer(
                name,
                (rows, columns),
                not settings["activations"],
                lambda first=first: stored.tensor(f"{first}.weight_scale"),
                lambda first=first: stored.tensor(f"{first}.weight_global_scale").view(torch.float32),
                lambda settings=settings: fixed_input_scale(settings),
            )
        )
    return stored.description["class"], tuple(layers)


def _foreign(file: TensorFile, found: Format, name: str, weight_only: bool) -> PackedLayer:
    rows, half = file.specs[f"{name}.{found.codes}"].shape

    def input_scale() -> float | None:
        key = f"{name}.{found.input_scale}"
        return float(found.read_scale(file.tensor(key))) if key in file.specs else None

    return _layer(
        name,
        (rows, 2 * half),
        weight_only,
        lambda: found.linear_block_scale(file.tensor(f"{name}.{found.block_scale}"), rows, 2 * half),
        lambda: found.read_scale(file.tensor(f"{name}.{found.global_scale}")),
        input_scale,
    )


def _layer(
    name: str,
    shape: tuple[int, int],
    weight_only: bool,
    block_scale: Callable[[], torch.Tensor],
    global_scale: Callable[[], torch.Tensor],
    input_scale: Callable[[], float | None],
) -> PackedLayer:
    found: dict[str, Any] = {}
    problems = []
    for key, read in (("global_scale", global_scale), ("input_scale", input_scale)):
        try:
            value = read()
            if isinstance(value, torch.Tensor):
                check_global_scale(value)
            found[key] = None if value is None else float(value)
        except CheckpointError as error:
            problems.append(f"{key}: {error}")
    try:
        scale = block_scale()
        values = scale.view(torch.float8_e4m3fn).float()
        if scale.numel() and not values.isnan().any():
            found["block_scales"] = (float(values.min()), float(values.max()))
            found["zero_blocks"] = float((values == 0).float().mean())
        check_block_scale(scale)
    except CheckpointError as error:
        problems.append(str(error))
    return PackedLayer(name=name, shape=shape, weight_only=weight_only, problem="; ".join(problems), **found)


def _cells(pattern: str, layers: list[PackedLayer]) -> tuple[str, ...]:
    first = layers[0]
    ranges = [layer.block_scales for layer in layers if layer.block_scales is not None]
    blocks = f"{min(r[0] for r in ranges):g} to {max(r[1] for r in ranges):g}" if ranges else "-"
    return (
        pattern,
        str(len(layers)),
        " x ".join(str(size) for size in first.shape),
        "weight" if first.weight_only else "weight and input",
        _range([layer.global_scale for layer in layers]),
        _range([layer.input_scale for layer in layers]),
        blocks,
        f"{100 * max(layer.zero_blocks for layer in layers):.1f} %",
    )


def _range(scales: list[float | None]) -> str:
    known = [scale for scale in scales if scale is not None]
    if not known:
        return "-"
    low, high = min(known), max(known)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def printable(text: str) -> str:
    """Names come from files that nobody vouches for: no control character of theirs reaches a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
