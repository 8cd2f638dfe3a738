"""A live model seen as a `PackedModel`: what `export` writes from, whether it is deployed or still training.

A layer that trains is packed when one of its tensors is asked for, with the function that `deploy` packs with, so both
give the same bytes. Nothing of it is kept but the last layer's codes and every layer's global scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from qatpatch import nvfp4
from qatpatch.description import check_writable, plain_config, writable
from qatpatch.errors import CheckpointError, PlanError
from qatpatch.packed_linear import packed_weight, quantized_source
from qatpatch.patch import Record, patch_record
from qatpatch.reuse import input_group
from qatpatch.stored_models import PACKED_PARTS, PackedModel, packed_specs
from qatpatch.tensor_files import Spec
from qatpatch.units import adapters, computed_parameter, is_graph, kind_of, layer_at, unwrap


def live_model(model: nn.Module, share_qkv: bool) -> PackedModel:
    """A patched model as it would be saved after `deploy`; tensors are made when asked for, under ``no_grad``.

    Args:
        model: deployed or still training, or a wrapper of one; it is not changed.
        share_qkv: the q, k and v projections of one attention share their scales (`export`).

    Raises:
        CheckpointError: it is not patched, or not in a state that a file can hold.
    """
    try:
        model = unwrap(model)
        record = patch_record(model)
    except PlanError as error:
        raise CheckpointError(f"export writes patched models: {error}") from error
    _check_live(model, record)
    layers = {name: layer_at(model, paths[0]) for name, paths in record.linears.items()}
    scales = _Scales(layers)
    shared = _shared_scales(layers, scales) if share_qkv else {}
    tensors = model.state_dict()
    linears: dict[str, Any] = {}
    makers: dict[str, Callable[[], torch.Tensor]] = {}
    specs = {}
    for name, layer in layers.items():
        settings = asdict(layer.quantization.settings) | shared.get(name, {})
        shape = (layer.out_features, layer.in_features)
        linears[name] = {"paths": list(record.linears[name]), "shape": list(shape), "settings": settings}
        if kind_of(layer) == "NVFP4Linear":
            continue
        for path in record.linears[name]:
            tensors[f"{path}.dense_weight"] = tensors.pop(f"{path}.weight")
            for index, (part, spec) in enumerate(packed_specs(*shape).items()):
                specs[f"{path}.{part}"] = spec
                makers[f"{path}.{part}"] = scales.part(name, index)
    for name, tensor in tensors.items():
        check_writable(name, tensor)
        specs[name] = Spec(tensor.dtype, tuple(tensor.shape))

    def tensor(name: str) -> torch.Tensor:
        return makers[name]() if name in makers else writable(name, tensors[name])

    description = {"class": type(model).__name__, "config": plain_config(model), "linears": linears}
    return PackedModel(description=description, specs=specs, tensor=tensor)


def _check_live(model: nn.Module, record: Record) -> None:
    if is_graph(model):
        raise CheckpointError("graph modules have no config that other tools could build; export the eager model")
    wrapped = adapters(model)
    if wrapped:
        raise CheckpointError(
            f"{wrapped[0]} is wrapped by an adapter, which these files have no place for; merge it into the weights "
            "before deploy (merge_and_unload, fuse_lora and unload), or unload it"
        )
    fused = [path for path, m in model.named_modules() if getattr(m, "fused_projections", False) is True]
    if fused:
        raise CheckpointError(f"{fused[0]} has fused projections, which run beside the patched ones; unfuse first")
    for name, paths in record.linears.items():
        layer = layer_at(model, paths[0])
        if kind_of(layer) not in ("QATLinear", "NVFP4Linear"):
            raise CheckpointError(f"{name} is a {type(layer).__name__} now; its patch was taken out")
        computed = computed_parameter(layer) if kind_of(layer) == "QATLinear" else None
        if computed:
            raise CheckpointError(f"{name}: {computed}")
        if layer.weight.is_meta and kind_of(layer) == "QATLinear":
            raise CheckpointError(f"{name} has a meta weight, which holds no numbers; load the weights first")


class _Scales:
    """Packs the layers of a model that trains, each when it is asked for; the last one is kept."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        self.layers = layers
        self.chosen: dict[str, torch.Tensor] = {}
        self._last: tuple[str, tuple[torch.Tensor, ...]] | None = None

    def global_scale(self, name: str) -> torch.Tensor:
        if name not in self.chosen:
            layer = self.layers[name]
            rule = layer.quantization.settings.global_scale
            self.chosen[name] = nvfp4.choose_global_scale(quantized_source(layer), rule)
        return self.chosen[name]

    def part(self, name: str, index: int) -> Callable[[], torch.Tensor]:
        """Of `PACKED_PARTS`, made on the CPU."""

        def make() -> torch.Tensor:
            if PACKED_PARTS[index] == "weight_global_scale":
                return self.global_scale(name).cpu().reshape(1).view(torch.uint8)
            if self._last is None or self._last[0] != name:
                self._last = name, packed_weight(self.layers[name], self.global_scale(name))
            return self._last[1][index].cpu().view(torch.uint8)

        return make


def _shared_scales(layers: dict[str, nn.Module], scales: _Scales) -> dict[str, dict[str, float]]:
    """Have the projections of one attention share their scales; name -> settings that change by it."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        group = input_group(name)
        if group is not None and not layer.quantization.settings.refine_only:
            groups[group].append(name)
    changed = {}
    for group, names in groups.items():
        inputs = [layers[name].quantization.settings.static_scale for name in names]
        packed = [layers[name] for name in names if kind_of(layers[name]) == "NVFP4Linear"]
        if packed:
            weights = {bytes(layer.weight_global_scale.tolist()) for layer in packed}
            if len(packed) < len(names) or len(weights) > 1 or len(set(inputs)) > 1:
                raise CheckpointError(
                    f"q, k and v of {group} are packed with scales of their own, and sharing one would take "
                    "quantizing their dense weights again; export with share_qkv=True before deploy"
                )
            continue
        largest = torch.stack([scales.global_scale(name) for name in names]).amax()
        known = [scale for scale in inputs if scale is not None]
        for name in names:
            scales.chosen[name] = largest
            if known:
                changed[name] = {"static_scale": max(known)}
    return changed
