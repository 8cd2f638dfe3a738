"""`PackedModel`: a deployed model tensor by tensor, in the form in which `qatpatch.save` writes it; and files of other
tools seen as one.

Everything that is read (a live model, our files, files of others) is looked at as a `PackedModel`, and everything that
is written is written from one. So n formats need n readers and n writers, and no model is in memory as a whole.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from qatpatch import nvfp4
from qatpatch.errors import CheckpointError
from qatpatch.formats import COMFY, Format, identify, is_power_of_two
from qatpatch.key_names import OTHER_COMPONENTS, RULES, original_names
from qatpatch.linear_state import COMPUTE_DTYPES, LinearSettings
from qatpatch.tensor_files import Spec, TensorFile, expect_names

logger = logging.getLogger("qatpatch")

PREFIX = "model.diffusion_model."
PACKED_PARTS = ("weight_packed", "weight_scale", "weight_global_scale")


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedModel:
    """Attributes:
    description: what `save` says of a model; ``class``, ``config`` and ``linears`` at least.
    specs: name -> what the tensor is.
    tensor: name -> the tensor.
    """

    description: dict[str, Any]
    specs: dict[str, Spec]
    tensor: Callable[[str], torch.Tensor]


def packed_specs(rows: int, columns: int) -> dict[str, Spec]:
    """Our own parts of a layer of logical shape (rows, columns)."""
    width = nvfp4.padded_length(columns)
    shapes = ((rows, width // 2), (rows, width // nvfp4.BLOCK_SIZE), (4,))
    return {part: Spec(torch.uint8, shape) for part, shape in zip(PACKED_PARTS, shapes, strict=True)}


def read_foreign(
    file: TensorFile, config: Mapping[str, Any] | None, model_class: str, wanted: Mapping[str, Iterable[int]]
) -> PackedModel:
    """A file of another tool as a `PackedModel`; tensors are converted when asked for.

    Args:
        file: an open file.
        config: the config.json beside it.
        model_class: what the weights are for.
        wanted: name -> shape of everything in the state dict of the dense model.

    Raises:
        CheckpointError: the metadata is missing or at odds with the tensors, or the layers are not the model's.
    """
    found, layers = identify(file, config)
    theirs, packed = _own_names(file, found, layers, model_class, wanted)
    specs = {name: file.specs[key] for name, key in theirs.items()}
    common = Counter(spec.dtype for spec in specs.values() if spec.dtype in COMPUTE_DTYPES and len(spec.shape) > 1)
    default = common.most_common(1)[0][0] if common else torch.bfloat16
    makers: dict[str, Callable[[], torch.Tensor]] = {}
    linears = {}
    for layer, name in packed.items():
        rows, columns = wanted[f"{name}.weight"]
        _check_shape(file, found, layer, name, rows, columns)
        bias = specs.get(f"{name}.bias")
        linears[name] = {
            "paths": [name],
            "shape": [rows, columns],
            "bias": bias is not None,
            "retained": False,
            "dtype": str(default if bias is None else bias.dtype).removeprefix("torch."),
            "trained_dtype": None,
            "settings": asdict(_settings(file, found, layer, layers[layer])),
        }
        for part, spec in packed_specs(rows, columns).items():
            specs[f"{name}.{part}"] = spec
            makers[f"{name}.{part}"] = _maker(file, found, layer, part, rows, columns)

    # A bias or a dense tensor that one side alone has would change the numbers, and the shapes would still fit.
    expect_names(
        specs,
        {name for name in wanted if name.removesuffix(".weight") not in linears} | set(makers),
        f"{file.path} does not fit the model",
        "of the model are missing",
        "are none of the model's",
    )

    def tensor(name: str) -> torch.Tensor:
        return makers[name]() if name in makers else file.tensor(theirs[name])

    description = {
        "class": model_class,
        "profile": found.name,
        "scheme": "dense",
        "staged": False,
        "skipped": {},
        "weights": sum(torch.Size(entry["shape"]).numel() for entry in linears.values()),
        "total_parameters": sum(torch.Size(shape).numel() for shape in wanted.values()),
        "mask_arguments": [],
        "linears": linears,
        "attentions": {},
    }
    return PackedModel(description=description, specs=specs, tensor=tensor)


def _own_names(
    file: TensorFile, found: Format, layers: Iterable[str], model_class: str, wanted: Iterable[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Our name -> key of every dense tensor, and layer in the file -> layer of the model."""
    prefix = PREFIX if found is COMFY and all(layer.startswith(PREFIX) for layer in layers) else ""
    own = {f"{layer}.{part}" for layer in layers for part in found.parts}
    elsewhere = OTHER_COMPONENTS.get(model_class, ())
    dense, others = {}, 0
    for key in file.specs:
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and not name.startswith(elsewhere) and key not in own:
            dense[name] = key
        elif key not in own:
            others += 1
    if others:
        logger.info("load: %d tensors of %s belong to other components than the transformer", others, file.path)
    packed = {f"{layer.removeprefix(prefix)}.weight": layer for layer in layers}
    names = _naming(model_class, set(wanted), {*dense, *packed})
    for name, layer in packed.items():
        if names.get(name) is None:
            raise CheckpointError(f"{file.path}: {layer} is packed, and the {model_class} has no such layer")
    place = {key: index for index, key in enumerate(wanted)}
    return (
        {names.get(name, name): key for name, key in dense.items()},
        {packed[name]: names[name].removesuffix(".weight") for name in sorted(packed, key=lambda n: place[names[n]])},
    )


def _naming(model_class: str, wanted: set[str], found: set[str]) -> dict[str, str]:
    """Name in the file -> ours: diffusers' names, or the original ones where those fit more of what was found."""
    ours = {key: key for key in wanted}
    if found <= wanted or model_class not in RULES:
        return ours
    original = {name: key for key, name in original_names(model_class, wanted).items()}
    return original if len(found & set(original)) > len(found & wanted) else ours


def _check_shape(file: TensorFile, found: Format, layer: str, name: str, rows: int, columns: int) -> None:
    stored, wanted = file.specs[f"{layer}.{found.codes}"], found.specs(rows, columns)[found.codes]
    if stored.shape != wanted.shape:
        raise CheckpointError(
            f"{file.path}: {layer}.{found.codes} is {stored}, and {name} of the model ({rows} x {columns}) takes "
            f"{wanted}"
        )


def _settings(file: TensorFile, found: Format, layer: str, weight_only: bool) -> LinearSettings:
    """What the layer does with its input; ``pow2`` where all its scales are powers of two, as that rule promises."""
    try:
        scales = [found.read_scale(file.tensor(f"{layer}.{found.global_scale}"))]
        given = f"{layer}.{found.input_scale}" in file.specs and not weight_only
        if given:
            scales.append(found.read_scale(file.tensor(f"{layer}.{found.input_scale}")))
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {layer}: {error}") from error
    return LinearSettings(
        activations=not weight_only,
        input_scale="static" if given else "dynamic",
        static_scale=float(scales[1]) if given else None,
        global_scale="pow2" if all(is_power_of_two(float(scale)) for scale in scales) else "amax",
    )


def _maker(
    file: TensorFile, found: Format, layer: str, part: str, rows: int, columns: int
) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        try:
            if part == "weight_packed":
                return found.read_codes(file.tensor(f"{layer}.{found.codes}"), rows, columns)
            if part == "weight_scale":
                return found.read_block_scale(file.tensor(f"{layer}.{found.block_scale}"), rows, columns)
            scale = found.read_scale(file.tensor(f"{layer}.{found.global_scale}"))
            return scale.reshape(1).view(torch.uint8)
        except CheckpointError as error:
            raise CheckpointError(f"{file.path}: {layer}: {error}") from error

    return make
