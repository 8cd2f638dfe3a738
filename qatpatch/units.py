"""What a model is made of: every linear and attention that a patch could reach, as data for the planner.

`unwrap` finds the module inside wrappers; `module_units` walks a live model (`graphs.graph_units` does the same for a
graph). Names are logical: a peft wrapper's ``base_layer`` is not part of them, so that the same rules fit before and
after adapters. A module of another kind may bear that name, and keeps it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from qatpatch import dispatch
from qatpatch.errors import PlanError
from qatpatch.linear_state import COMPUTE_DTYPES

_ADAPTER_HOST = "base_layer"
_BYPASSED = (
    "the adapter around it ({}) computes from its weight and never calls it, so the patch would never run; use a type "
    "that calls the layer (LoRA, DoRA, LoKr, OFT, ...), or exclude the layer"
)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One linear or attention that a walk found: a module, or the nodes of a graph that stand for one.

    ``paths`` are where it is, adapters' wrappers included; ``names`` the same without them, ``name`` the first.
    """

    name: str
    paths: tuple[str, ...]
    names: tuple[str, ...] = ()
    kind: str
    problem: str | None
    adapter: bool = False
    weight: torch.Tensor | None = None
    width: int = 0
    head_dim: int = 0
    device: torch.device
    note: str = ""


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP, ``torch.compile`` and peft wrappers.

    Raises:
        PlanError: for anything that is no module, or a wrapper that hides the parameters.
    """
    while True:
        if not isinstance(model, nn.Module):
            hint = ""
            if hasattr(model, "transformer") or hasattr(model, "unet"):
                hint = "; pass pipe.transformer"
            elif isinstance(model, str | os.PathLike):
                hint = (
                    f" {str(model)!r}; load the model first: with its class's from_pretrained, or with qatpatch.load "
                    "where it is packed"
                )
            raise PlanError(f"qatpatch works on a torch.nn.Module, got {type(model).__name__}{hint}")
        if "_orig_mod" in model._modules:
            model = model._orig_mod
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "FullyShardedDataParallel":
            raise PlanError(
                "FullyShardedDataParallel (FSDP1) flattens the parameters away; apply before wrapping, or use "
                "fully_shard (FSDP2)"
            )
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def is_graph(model: nn.Module) -> bool:
    """Whether the model is a graph module (torch.fx or torch.export), rewritten node by node."""
    return isinstance(model, torch.fx.GraphModule)


def module_units(model: nn.Module) -> list[Unit]:
    """Every linear and attention module of a live model, once each, with all its paths."""
    units: dict[int, Unit] = {}
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) or dispatch.is_attention(module):
            paths.setdefault(id(module), []).append(path)
    devices = {p.device for p in model.parameters()}
    fallback = next(iter(devices), torch.device("cpu"))
    bypassed = {id(layer): problem for layer, problem in bypassed_layers(model)}
    for path, module in model.named_modules():
        if id(module) not in paths or id(module) in units:
            continue
        own = tuple(paths[id(module)])
        if isinstance(module, nn.Linear):
            units[id(module)] = Unit(
                name=logical(model, path),
                paths=own,
                names=tuple(dict.fromkeys(logical(model, p) for p in own)),
                kind="linear",
                problem=linear_problem(module) or _read_problem(model, path) or bypassed.get(id(module)),
                adapter=_is_adapter(model, path),
                weight=module.weight if isinstance(getattr(module, "weight", None), torch.Tensor) else None,
                width=module.in_features,
                device=getattr(module.weight, "device", fallback),
            )
        else:
            parameter = next(module.parameters(), None)
            units[id(module)] = Unit(
                name=logical(model, path),
                paths=own,
                names=tuple(dict.fromkeys(logical(model, p) for p in own)),
                kind="attention",
                problem=dispatch.unsupported_reason(module),
                head_dim=dispatch.head_dim(module) if dispatch.unsupported_reason(module) is None else 0,
                device=fallback if parameter is None else parameter.device,
            )
    return list(units.values())


def _read_problem(model: nn.Module, path: str) -> str | None:
    """Why the module around a linear would run without calling it; None where it calls."""
    parent, child = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
    if getattr(parent, "fused_projections", False) is True and child.startswith(("to_", "add_")):
        return "fuse_qkv_projections replaced the projections beside it, so it may never run; unfuse first"
    if getattr(type(parent), "forward", None) is nn.TransformerEncoderLayer.forward:
        return (
            "nn.TransformerEncoderLayer reads its weight in evaluation and does not call it (torch's fast path), so "
            "the patch would run in training alone; exclude it"
        )
    return None


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook (offload, accelerate, layerwise casting) put a forward on the instance, hiding the class's.

    Hooks that were taken off leave the class's own forward there, bound: it hides nothing until the class changes.
    """
    forward = vars(module).get("forward")
    own = getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward
    return forward is not None and not own


def forget_bound_forward(module: nn.Module) -> None:
    """Before the class of a module that is not hooked changes: drop what `is_hooked` let pass."""
    vars(module).pop("forward", None)


def linear_problem(module: nn.Linear) -> str | None:
    """Why a linear cannot be patched; None when it can."""
    if is_hooked(module):
        return (
            "its forward was replaced by a hook (offload, accelerate, layerwise casting), which would bypass the patch "
            "silently; apply before such hooks"
        )
    if type(module) is not nn.Linear:
        return (
            f"it is a {type(module).__name__}, not a plain nn.Linear (already quantized, parametrized or "
            f"sharded on its own?)"
        )
    if type(module.weight).__name__ not in ("Parameter", "DTensor"):
        return f"its weight is a {type(module.weight).__name__} (already quantized?)"
    if module.weight.dtype not in COMPUTE_DTYPES:
        return f"its weight is {module.weight.dtype}; NVFP4 training takes float32, bfloat16 or float16"
    return None


def computed_parameter(module: nn.Linear) -> str | None:
    """Why a patched linear has no weight or bias of its own to pack; None where it has."""
    for name in ("weight", "bias"):
        if name not in module._parameters:
            return (
                f"its {name} is computed from other tensors on each forward (weight_norm, spectral_norm, prune, "
                "parametrize?); make it plain first (remove_weight_norm, prune.remove, remove_parametrizations)"
            )
    return None


def kind_of(module: nn.Module | None) -> str | None:
    """``QATLinear``, ``NVFP4Linear`` or ``QATGraphAttention``; None for any other module.

    By the marker of its class, which holds across reloads of this package, as in notebooks: ``isinstance`` does not.
    """
    return getattr(type(module), "qatpatch_kind", None)


def layer_at(model: nn.Module, path: str) -> nn.Module | None:
    """The layer that was at ``path``, also where adapters wrapped it since or were unloaded; None where it is gone."""
    place = _place(model, path)
    return None if place is None else place[0]._modules[place[1]]


def replace_layer(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put ``new`` where `layer_at` finds the layer."""
    parent, child = _place(model, path)
    parent._modules[child] = new


def _place(model: nn.Module, path: str) -> tuple[nn.Module, str] | None:
    """The module that holds the layer of ``path``, and the name it has there."""
    parent, child = model, None
    for part in path.split("."):
        holder = parent if child is None else parent._modules[child]
        if part == _ADAPTER_HOST and part not in holder._modules:
            continue
        if part not in holder._modules and is_wrapper(holder):
            holder = holder._modules[_ADAPTER_HOST]
        if part not in holder._modules:
            return None
        parent, child = holder, part
    while child is not None and is_wrapper(parent._modules[child]):
        parent, child = parent._modules[child], _ADAPTER_HOST
    return None if child is None else (parent, child)


def is_wrapper(module: nn.Module) -> bool:
    """Whether a peft adapter wraps the layer ``base_layer`` of ``module``, and that is not just a module's own name."""
    return _ADAPTER_HOST in module._modules and hasattr(type(module), "adapter_layer_names")


def adapters(model: nn.Module) -> list[str]:
    """Paths of the modules that adapters wrap."""
    return [path for path, module in model.named_modules() if is_wrapper(module)]


def merged_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that adapters were merged into and still wrap: peft takes the adapters out again on its own."""
    found = []
    for module in model.modules():
        if is_wrapper(module) and getattr(module, "merged_adapters", ()):
            found.append(_wrapped(module))
    return found


def _wrapped(module: nn.Module) -> nn.Module:
    """The layer inside all adapter wrappers."""
    while is_wrapper(module):
        module = module._modules[_ADAPTER_HOST]
    return module


class _Reached(Exception):
    pass


def _reach(*args: Any, **kwargs: Any) -> None:
    raise _Reached


def bypassed_layers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The linears whose forward never runs since an adapter around them computes from their weight, and why.

    Each kind of adapter is tried out on fake tensors: enabled, unmerged, and around a stand-in for the layer.
    """
    found, known = [], {}
    for module in model.modules():
        if not is_wrapper(module):
            continue
        layer = _wrapped(module)
        if not isinstance(layer, nn.Linear):
            continue
        key = type(module), tuple(getattr(module, "active_adapters", ()))
        if key not in known:
            known[key] = _bypasses(module, layer)
        if known[key]:
            found.append((layer, _BYPASSED.format(type(module).__name__)))
    return found


def _bypasses(wrapper: nn.Module, layer: nn.Linear) -> bool:
    inner = wrapper._modules[_ADAPTER_HOST]
    stand_in = object.__new__(type("_StandIn", (type(inner),), {"forward": _reach}))
    vars(stand_in).update(vars(inner))
    vars(stand_in).pop("forward", None)
    tried = object.__new__(type(wrapper))
    vars(tried).update(vars(wrapper), _disable_adapters=False, merged_adapters=[])
    vars(tried)["_modules"] = {**wrapper._modules, _ADAPTER_HOST: stand_in}
    weight = layer.weight
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            tried(torch.empty(1, layer.in_features, dtype=weight.dtype, device=weight.device))
    except Exception:  # the stand-in's, or one that a tuner raises on such an input: nothing is known against it
        return False
    return True


def logical(model: nn.Module, path: str) -> str:
    """A path without adapter wrappers: what the name would be without them, also after they were unloaded."""
    holder, kept = model, []
    for part in path.split("."):
        inside = part in holder._modules
        if part != _ADAPTER_HOST or (inside and not is_wrapper(holder)):
            kept.append(part)
        holder = holder._modules[part] if inside else holder
    return ".".join(kept)


def _is_adapter(model: nn.Module, path: str) -> bool:
    """Whether the module is an adapter's own (it lies in a wrapper beside the wrapped layer)."""
    holder = model
    for part in path.split("."):
        if is_wrapper(holder) and part != _ADAPTER_HOST:
            return True
        holder = holder._modules[part]
    return False
