"""LoRA on a model that trains for NVFP4, and its end: the adapters merged into the weights that deploy packs.

While training, a layer computes ``Q(W) Q(x) + B A x``: the frozen base is quantized, the adapter is not. Merged it is
``Q(W + B A) Q(x)``, another function, which is why a run scores the merged model apart.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from recipe import Lora

import qatpatch


def add_adapters(model: torch.nn.Module, options: Lora, seed: int) -> None:
    """Put float32 adapters beside the layers whose names end as ``options.targets`` say; everything else is frozen."""
    from peft import LoraConfig

    torch.manual_seed(seed)  # of the adapters' random half
    targets = list(options.targets)
    model.add_adapter(LoraConfig(r=options.rank, lora_alpha=options.alpha or options.rank, target_modules=targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


class Base:
    """An adapted model as its own teacher: called, it is what it was before the adapters, and nothing is quantized.

    Attributes:
        module: the model, for whoever asks for its configuration.
    """

    def __init__(self, model: torch.nn.Module):
        self.module = model

    def __call__(self, **inputs: Any) -> Any:
        patched = qatpatch.is_patched(self.module)
        self.module.disable_adapters()
        try:
            with qatpatch.dense(self.module) if patched else contextlib.nullcontext():
                return self.module(**inputs)
        finally:
            self.module.enable_adapters()


@torch.no_grad()
def merge_adapters(model: torch.nn.Module) -> None:
    """Add every adapter to its layer's weight and put the layer, the same object and still patched, in its place."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, module in adapted.items():
        module.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.get_base_layer())
    model._hf_peft_config_loaded = False
    model.requires_grad_(True)
