"""`deploy`: pack every patched linear to NVFP4, purge the originals, bind the attention kernels.

Everything that can fail is checked before the first layer changes. Then one layer at a time is packed, put in place and
its dense weight let go, so that the peak is the model plus one layer. Weights are packed in the dtype that training
quantized
them in. Layers that may still have to run dense (the refine-only ones, or all on request) keep their weight beside the
packed one. Memory is measured, and where a dense weight outlives its layer the receipt names who holds it.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from qatpatch import dispatch, guards, kernels
from qatpatch.errors import KernelUnavailable, PlanError, problem_lines
from qatpatch.graphs import forget_original
from qatpatch.linear import QATLinear
from qatpatch.packed_linear import NVFP4Linear
from qatpatch.patch import (
    PassedOver,
    Record,
    attention_states,
    device_of,
    is_purged,
    layer_state,
    move_extras,
    patch_record,
    replace_module,
    waiting_problem,
)
from qatpatch.receipts import DeployReport
from qatpatch.swap import bind_infer, watch_masks
from qatpatch.switch import AttentionChoice
from qatpatch.units import (
    bypassed_layers,
    computed_parameter,
    is_graph,
    is_hooked,
    kind_of,
    layer_at,
    merged_layers,
    unwrap,
)

logger = logging.getLogger("qatpatch")

_AVERAGED = (
    "an EMAModel with the shapes of this model's parameters is alive, and the model has fewer parameters now: its step "
    "and copy_to would pair the wrong ones and fail half-way; use copy_to before deploy, then drop it"
)
_MERGED = (
    "an adapter is merged into it (fuse_lora, merge_adapter) and still attached: unfuse_lora and disable_adapters "
    "would add it a second time to packed weights; take it off with unload_lora (peft: merge_and_unload), or unmerge it"
)

_OPTIMIZER = "the optimizer"
_OPTIMIZED = (
    "an optimizer still holds the dense weights of packed layers: training on with it would change nothing in these "
    "layers, and its memory stays taken; drop it, and build a new one for what is left to train"
)


@torch.no_grad()
def deploy(
    model: nn.Module,
    *,
    retain_original_weights: bool = False,
    attention_kernel: str | None = None,
    linear_kernel: str | None = None,
) -> DeployReport:
    """Pack the patched linears of ``model`` to NVFP4 in place and purge the originals.

    Args:
        model: a patched model, or a wrapper of one.
        retain_original_weights: keep every dense weight beside the packed one, so that `dense` works and `remove`
            can undo.
            By default only the refine-only layers keep theirs (they run dense in the stage ``base``).
        attention_kernel: as ``kernel`` of `infer_attention`; default: the first usable one of the trained scheme.
        linear_kernel: a kernel's name for every linear, ``"native"`` for FP4 tensor cores only; default: the first
            usable one for each. It is not saved with the model.

    Returns:
        A `DeployReport` with the bytes before, after and freed, measured.

    Raises:
        PlanError: the model is not patched, is deployed already, or has layers that cannot be packed now (meta or
            sharded
            weights, offload hooks, the patch taken out); it is untouched.
        KernelUnavailable: no kernel of the trained scheme is usable here, or the one that is asked for does not serve
            some layer; the model is untouched.
    """
    model = unwrap(model)
    record = patch_record(model)
    if record.deployed:
        raise PlanError(f"this {type(model).__name__} is deployed already; there is nothing left to pack")
    layers = {name: layer_at(model, paths[0]) for name, paths in record.linears.items()}
    _check(model, record, layers)
    devices = {p.device for p in model.parameters()}
    attention = _attention_choices(model, record, attention_kernel)
    if linear_kernel is not None:
        _check_kernel(layers, linear_kernel)
    for layer in layers.values():
        layer.quantization.deploy_kernel = linear_kernel
    before, allocated = model_bytes(model), _allocated(devices)
    averaged = dispatch.is_averaged(model)
    watched: dict[str, _Watched] = {}
    retained = []
    for name in list(layers):
        layer = layers.pop(name)
        if kind_of(layer) == "NVFP4Linear":  # packed by a deploy that was interrupted
            if not is_purged(layer):
                retained.append(name)
            continue
        retain = retain_original_weights or layer.quantization.settings.refine_only
        packed = NVFP4Linear.from_linear(layer, retain=retain)
        move_extras(layer, packed)
        packed.train(layer.training)
        if retain:
            retained.append(name)
        else:
            watched[name] = _Watched(layer.weight)
        replace_module(model, record.linears[name], packed)
        del layer, packed
    if is_graph(model) and len(retained) < len(record.linears):
        forget_original(model)
    for state, choice in attention:
        state.deployed = choice
    guards.release(model, ("enable_layerwise_casting",))
    dispatch.forget_cached(model)
    if dispatch.is_diffusers_model(model):
        from qatpatch import diffusers_quantizer

        diffusers_quantizer.attach(model)
    watch_masks(model, record, [state for state, _ in attention], [choice for _, choice in attention])
    for name in retained:
        layer_at(model, record.linears[name][0]).freeze_dense()
    record.deployed = True  # last: what was interrupted before can be taken up again
    report = _receipt(model, record, before, allocated, devices, watched, tuple(retained))
    kept = [layer_at(model, record.linears[name][0]).dense_weight for name in retained]
    optimized = any(holder.startswith(_OPTIMIZER) for holder in report.held.values()) or _is_optimized(kept)
    notes = (_AVERAGED,) * averaged + (_OPTIMIZED,) * optimized
    for note in notes:
        logger.warning("deploy: %s", note)
    return dataclasses.replace(report, notes=(*report.notes, *notes))


def model_bytes(model: nn.Module) -> int:
    """Bytes of the storages behind a model's parameters and buffers, each counted once."""
    storages = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = _local(tensor).untyped_storage()
        storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


class _Watched:
    """A dense weight that should be gone soon."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.parameter = weakref.ref(weight)
        self.storage = StorageWeakRef(weight.untyped_storage())
        self.nbytes = weight.untyped_storage().nbytes()


def _check(model: nn.Module, record: Record, layers: dict[str, nn.Module]) -> None:
    problems = problem_lines((name, problem) for name, layer in layers.items() if (problem := _problem(layer)))
    merged = merged_layers(model)
    attached = [(name, _MERGED) for name, layer in layers.items() if any(layer is module for module in merged)]
    bypassed = bypassed_layers(model)
    attached += [(name, why) for name, layer in layers.items() for module, why in bypassed if module is layer]
    problems += problem_lines(attached)
    waiting = waiting_problem(model, record)
    if waiting:
        problems.append(waiting)
    other = getattr(model, "hf_quantizer", None)
    if other is not None and type(other).__module__ != "qatpatch.diffusers_quantizer":
        problems.append(
            f"diffusers loaded this model with its {type(other).__name__}, which cannot save packed layers beside its "
            "own; load the weights unquantized"
        )
    if dispatch.group_offload(model) is not None:
        problems.append(
            "group offloading holds on to the dense weights and may have them on a disk; deploy before "
            "enable_group_offload"
        )
    fused = [path for path, m in model.named_modules() if getattr(m, "fused_projections", False) is True]
    if fused:
        problems.append(f"{fused[0]} has fused projections, which run dense beside the patched ones; unfuse first")
    if problems:
        shown = problems[:10] + ([f"... and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise PlanError(
            f"cannot deploy this {type(model).__name__}; it is untouched:\n" + "\n".join(f"  - {p}" for p in shown)
        )


def _problem(layer: nn.Module) -> str | None:
    """Why a layer cannot be packed now; None where it can, or is."""
    if kind_of(layer) == "NVFP4Linear":
        return None
    if kind_of(layer) != "QATLinear":
        return f"it is a {type(layer).__name__} now; its patch was taken out"
    if _uncalibrated(layer):
        return "input_scale='static' and no scale yet; run forwards inside qatpatch.calibrate"
    computed = computed_parameter(layer)
    if computed:
        return computed
    if is_hooked(layer):
        return "a hook (offload, accelerate, layerwise casting) replaced its forward; take it off first"
    if layer.weight.is_meta:
        return "a meta weight, which holds no numbers to pack; load the weights first"
    if type(layer.weight).__name__ == "DTensor":
        return (
            "its weight is sharded; gather the weights (torch.distributed.checkpoint.state_dict.get_model_state_dict "
            "with full_state_dict=True), load them into an unsharded model in the dtype that trained "
            "(mixed precision's param_dtype), and apply and deploy there"
        )
    return None


def _uncalibrated(layer: QATLinear) -> bool:
    settings = layer.quantization.settings
    return settings.activations and settings.input_scale == "static" and settings.static_scale is None


def _check_kernel(layers: dict[str, nn.Module], kernel: str) -> None:
    """Raise where ``kernel`` does not serve one of the layers."""
    asked: dict[tuple[Any, ...], str] = {}
    for name, layer in layers.items():
        shape, bias = (layer.out_features, layer.in_features), layer.bias is not None
        dtype = layer.compute_dtype if kind_of(layer) == "NVFP4Linear" else layer.weight.dtype
        limits = layer.quantization.limits(shape, dtype, bias)
        asked.setdefault((device_of(layer, layer), *limits.items()), name)
    for (device, *limits), name in asked.items():
        try:
            kernels.resolve("linear", stage="deploy", scheme="nvfp4", device=device, name=kernel, **dict(limits))
        except KernelUnavailable as error:
            raise KernelUnavailable(f"linear_kernel={kernel!r} does not serve {name}: {error}") from None


def _attention_choices(model: nn.Module, record: Record, kernel: str | None) -> list[tuple[Any, AttentionChoice]]:
    choices = []
    for paths, state in zip(record.attentions.values(), attention_states(model, record), strict=True):
        module = layer_at(model, paths[0])
        choice, _ = bind_infer(state.scheme, device_of(module, model), kernel, state.head_dim)
        choices.append((state, AttentionChoice(mode="deployed", scheme=choice.scheme, kernel=choice.kernel)))
    return choices


def _receipt(
    model: nn.Module,
    record: Record,
    before: int,
    allocated: int | None,
    devices: set[torch.device],
    watched: dict[str, _Watched],
    retained: tuple[str, ...],
) -> DeployReport:
    alive = {name: w for name, w in watched.items() if not w.storage.expired()}
    if alive:
        gc.collect()
        alive = {name: w for name, w in alive.items() if not w.storage.expired()}
    after = model_bytes(model)
    own = {StorageWeakRef(_local(t).untyped_storage()) for t in (*model.parameters(), *model.buffers())}
    shared = {name for name, w in alive.items() if w.storage in own}
    # What another layer of the model still uses is part of "after" already; tied weights are one storage.
    outside = {w.storage: w.nbytes for name, w in alive.items() if name not in shared}
    held = sum(outside.values())
    freed = before - after - held
    if allocated is not None:
        freed = allocated - _allocated(devices)
    rows, passed_over, notes = {}, PassedOver(), Counter()
    for name, paths in record.linears.items():
        module = layer_at(model, paths[0])
        device = module.weight_packed.device
        rows[name] = kernels.kernel_named(module.kernel(device))
        notes[rows[name].name, kernels.two_roundings(rows[name], module.bias is not None)] += 1
        passed_over.add(module, rows[name], "deploy", "nvfp4", device)
    for name, paths in record.attentions.items():
        module = layer_at(model, paths[0])
        state, device = layer_state("attention", module), device_of(module, model)
        scheme, kernel = state.kernel(state.deployed, device)
        rows[name] = kernels.kernel_named(kernel)
        passed_over.add(module, rows[name], "infer", scheme, device)
    report = DeployReport(
        model_class=type(model).__name__,
        packed=tuple(record.linears),
        retained=retained,
        attentions=tuple(record.attentions),
        kernels=rows,
        architecture=passed_over.architecture,
        refused=passed_over.refusals,
        bytes_before=before,
        bytes_after=after,
        bytes_freed=freed,
        bytes_held=held,
        held=_holders(alive, shared),
        notes=tuple(f"{kernel}, in {count} layers: {note}" for (kernel, note), count in notes.items() if note),
    )
    logger.info(
        "deploy: %d linears packed, %d kept dense too, %d attentions, %d bytes -> %d, freed %d",
        len(report.packed),
        len(report.retained),
        len(report.attentions),
        before,
        after,
        freed,
    )
    if report.held:
        holders = ", ".join(sorted(set(report.held.values())))
        logger.warning("deploy: %d dense weights are still in memory, held by %s", len(report.held), holders)
    return report


def _holders(alive: dict[str, _Watched], shared: set[str]) -> dict[str, str]:
    """Who keeps each surviving weight: optimizers by class, else the types of the objects that refer to it."""
    if not alive:
        return {}
    optimizers = _optimizers()
    held = {}
    for name, watched in alive.items():
        parameter = watched.parameter()
        if parameter is None:
            held[name] = "an autograd graph, or a tensor that shares its storage"
            continue
        if name in shared:
            held[name] = "another layer of the model, which shares it"
            continue
        owners = [_optimizer_name(o) for o in optimizers if _contains(_optimized(o), parameter)]
        held[name] = ", ".join(sorted(owners, reverse=True)) or _referrers(parameter)
    return held


def _optimizers() -> list[torch.optim.Optimizer]:
    return [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]


def _is_optimized(weights: list[nn.Parameter]) -> bool:
    """Whether an optimizer is alive that has one of these weights."""
    wanted = {id(weight) for weight in weights}
    return bool(wanted) and any(id(p) in wanted for o in _optimizers() for p in _optimized(o))


def _optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    if name == "AcceleratedOptimizer":  # around the real one, which is found too
        return "accelerate (accelerator.free_memory() lets go)"
    return f"{_OPTIMIZER} {name}"


def _optimized(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _contains(tensors: Iterable[torch.Tensor], wanted: torch.Tensor) -> bool:
    return any(tensor is wanted for tensor in tensors)


def _referrers(parameter: torch.Tensor) -> str:
    # Frames and cells are this function's own callers.
    kinds = sorted({type(r).__name__ for r in gc.get_referrers(parameter)} - {"frame", "cell"})
    return "a reference in a " + ", ".join(kinds) if kinds else "an open autograd graph, or a local variable"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if type(tensor).__name__ == "DTensor" else tensor


def _allocated(devices: Iterable[torch.device]) -> int | None:
    """Bytes allocated on the CUDA devices among ``devices``; None where there is none."""
    cuda = [device for device in devices if device.type == "cuda"]
    return sum(torch.cuda.memory_allocated(device) for device in cuda) if cuda else None
