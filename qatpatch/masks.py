"""Masks and kernels that take none: whether a model call's masks mask anything is decided once, where the call begins.

diffusers' LTX-2 pipelines pass a text mask of ones on every call, and native attention kernels take no mask. Three
wrong ways out: dropping it; running every masked layer on a slower kernel, whatever the mask says; asking the mask in
each layer, which stops the GPU 48 times a step. So, only where a kernel that takes no mask may be bound, the model gets
a pair of hooks (`install`; gone with the patch, `uninstall`). Before a forward, `MaskEntry` reads the masks among the
model's arguments that the profile names, in one host synchronisation:

- all ones (or True): they mask nothing. `Switch.unmasked` holds for this call, and attentions leave their mask out.
- anything else: attentions that are given a mask run a kernel of the same scheme that honours it; the others are not
  concerned. Such calls are counted, in `MaskCount`.

A mask of zeros counts as masking: the same zeros mean "nothing" in an additive mask and "everything" in a boolean one.
A profile names every argument that its model's attention masks are made of. Without such names, and where nothing can
be read (in a compiled model, on fake tensors, while a CUDA graph is captured), masks are honoured. So they are where
gradients are wanted: a recomputation comes after the call, when nothing is known of it any more; and where ranks share
a sequence, since each may hold a part of the mask.

The hooks cost nothing to layers: blocks compiled on their own read a flag of the switch. Deliberately not here: what a
mask means to a kernel (`kernels.reference_attention`), which kernel honours it (`kernels.resolution`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from qatpatch import kernels
from qatpatch.switch import Switch


class MaskEntry:
    """The hook before a model's forward. Copies and pickles with the model, like the state that it refers to.

    Args:
        switch: the model's.
        arguments: names of the forward's arguments that its attention masks are made of.
        states: the `AttentionState` of every patched attention.
    """

    qatpatch_kind = "MaskEntry"

    def __init__(self, switch: Switch, arguments: tuple[str, ...], states: list[Any]) -> None:
        self.switch = switch
        self.arguments = arguments
        self.states = states

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self.switch.unmasked = False
        masks = self._masks(model, args, kwargs)
        if not masks or not all(map(_readable, masks)) or not self._matters(masks[0].device):
            return
        self.switch.unmasked = mask_nothing(masks)
        self.switch.masks.calls += 1
        self.switch.masks.masked += not self.switch.unmasked

    def _masks(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The masks of this call, by keyword or by position."""
        given = dict(kwargs)
        if args:
            names = list(inspect.signature(model.forward).parameters)
            given.update(zip(names, args, strict=False))
        found = (given.get(name) for name in self.arguments)
        return [mask for mask in found if isinstance(mask, torch.Tensor)]

    def _matters(self, device: torch.device) -> bool:
        """Whether any attention runs a kernel now that takes no mask."""
        return any(
            choice.mode in ("infer", "deployed") and not kernels.honours_masks(state.kernel(choice, device)[1])
            for state in self.states
            if (choice := state.choice)
        )


class MaskExit:
    """The hook behind a model's forward, exceptions included: what was decided holds for one call."""

    qatpatch_kind = "MaskExit"

    def __init__(self, switch: Switch) -> None:
        self.switch = switch

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.switch.unmasked = False


def _readable(mask: torch.Tensor) -> bool:
    """Whether the host may look at the values: a plain tensor with memory, no transform and no capture under way."""
    if type(mask) not in (torch.Tensor, nn.Parameter) or mask.is_meta:
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def mask_nothing(masks: Iterable[torch.Tensor]) -> bool:
    """Whether all masks are ones throughout; one host synchronisation."""
    masks = list(masks)
    ones = [(mask == 1).all().to(masks[0].device) for mask in masks]
    return bool(torch.stack(ones).all())


def may_meet_maskless(states: Iterable[Any], choices: Iterable[Any]) -> bool:
    """Whether a kernel that takes no mask could be bound, on any device of this machine.

    Args:
        states: `AttentionState`s.
        choices: the `AttentionChoice` of each.
    """
    wanted = {(choice.scheme or state.scheme, choice.kernel) for state, choice in zip(states, choices, strict=True)}
    rows = [row for row in kernels.TABLE if row.op == "attention" and not row.honours_masks]
    rows = [row for row in rows if any(_fits(row, scheme, name) for scheme, name in wanted)]
    return any(row.unavailable_reason(device) is None for row in rows for device in kernels.present_devices())


def install(model: nn.Module, switch: Switch, arguments: tuple[str, ...], states: list[Any]) -> None:
    """Give ``model`` the hooks, once; nothing without arguments to read."""
    if not arguments or any(_is_ours(hook) for hook in model._forward_pre_hooks.values()):
        return
    model.register_forward_pre_hook(MaskEntry(switch, arguments, states), prepend=True, with_kwargs=True)
    model.register_forward_hook(MaskExit(switch), always_call=True)


def uninstall(model: nn.Module) -> None:
    """Take the hooks off ``model``; nothing where there are none."""
    for key in [key for key, hook in model._forward_pre_hooks.items() if _is_ours(hook)]:
        del model._forward_pre_hooks[key]
        model._forward_pre_hooks_with_kwargs.pop(key, None)
    for key in [key for key, hook in model._forward_hooks.items() if _is_ours(hook)]:
        del model._forward_hooks[key]
        model._forward_hooks_always_called.pop(key, None)


def _fits(row: kernels.Kernel, scheme: str, name: str | None) -> bool:
    if name is not None:
        return row.name == name
    return scheme in row.schemes and not row.explicit_only


def _is_ours(hook: Any) -> bool:
    """Recognised by marker, so also across reloads of this package."""
    return getattr(hook, "qatpatch_kind", None) in ("MaskEntry", "MaskExit")
