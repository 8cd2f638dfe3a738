"""Methods of a patched model that would take the patch out or spoil what trains, without a word: they raise instead.

A method is refused by an attribute of the same name on the one module, which Python finds before the class's; the class
is untouched, and `release` takes the attributes off. What does not go by a method (an attribute that is assigned) is
found later, by `report`, `deploy` and `save`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from qatpatch.units import bypassed_layers

_REFUSED = {
    "fuse_projections": (
        "fuse_qkv_projections would put one plain, dense projection in the place of patched ones, which would then "
        "never run; fuse nothing, or qatpatch.remove the patch first"
    ),
    "set_processor": (
        "set_attn_processor would take the NVFP4 attention out; set processors before qatpatch.apply, which keeps "
        "what they do (exclude=... keeps an attention dense)"
    ),
    "enable_layerwise_casting": (
        "enable_layerwise_casting would store the weights that train in fewer bits, and what the optimizer adds to "
        "them would be lost; qatpatch.deploy the model first, whose packed weights no casting touches"
    ),
}


def install(model: nn.Module, linears: Iterable[str], attentions: Iterable[str], *, training: bool) -> None:
    """Guard a model with patched layers at these paths; ``training``: their weights are not packed yet."""
    for path in attentions:
        _guard(model.get_submodule(path), "set_processor", "fuse_projections")
    for path in linears:
        parent = path.removesuffix(".base_layer").rpartition(".")[0]
        _guard(model.get_submodule(parent), "fuse_projections")
    if training:
        _guard(model, "enable_layerwise_casting")
        model.register_forward_pre_hook(AdapterGuard())


def release(model: nn.Module, names: Iterable[str] = tuple(_REFUSED)) -> None:
    """Take guards off the model and all of its modules, the `AdapterGuard` in any case (packed weights need none)."""
    for module in model.modules():
        for name in names:
            if is_guarded(module, name):
                delattr(module, name)
    for key in [key for key, hook in model._forward_pre_hooks.items() if _is_ours(hook)]:
        del model._forward_pre_hooks[key]


class AdapterGuard:
    """The hook before a patched model's forward: raises where peft adapters that came since bypass patched layers.

    It looks at the model again when its ``peft_config`` changed. Compiled models are looked at by their receipts alone.
    """

    qatpatch_kind = "AdapterGuard"

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        seen = tuple((vars(model).get("peft_config") or {}).items())
        if seen == self._seen:
            return
        for layer, problem in bypassed_layers(model):
            if hasattr(type(layer), "qatpatch_kind"):
                raise RuntimeError(f"an adapter was added to a patched layer, and {problem}")
        self._seen = seen


def is_guarded(module: nn.Module, name: str) -> bool:
    """Whether the method ``name`` of the module is refused, also across reloads of this package."""
    guard = vars(module).get(name)
    return isinstance(guard, functools.partial) and guard.func.__module__ == __name__


def _is_ours(hook: Any) -> bool:
    """Recognised by marker, so also across reloads of this package."""
    return getattr(hook, "qatpatch_kind", None) == "AdapterGuard"


def _guard(module: nn.Module, *names: str) -> None:
    for name in names:
        if hasattr(type(module), name):
            vars(module)[name] = functools.partial(_refuse, name)


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(_REFUSED[name])
