"""Swaps: `infer_attention`, `dense`, `stage`, `reuse_weights`. Contexts that change how a patched model computes.

All open a block on the model's `Switch`. On any exit (exceptions and interrupts included) exactly their own block
closes, so blocks may nest and close in any order, and no other model is touched.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from qatpatch import dispatch, kernels, masks
from qatpatch.errors import PlanError, nearest
from qatpatch.patch import Record, attention_states, device_of, is_patched, is_purged, layer_state, patch_record
from qatpatch.receipts import SwapReceipt, refusals
from qatpatch.reuse import KeptWeights
from qatpatch.switch import AttentionChoice
from qatpatch.units import layer_at, unwrap

logger = logging.getLogger("qatpatch")

STAGES = ("base", "refine")


@contextlib.contextmanager
def infer_attention(
    model: nn.Module, kernel: str | None = None, *, memory_limit: int | None = None
) -> Iterator[SwapReceipt]:
    """Run the model's QAT attentions with the inference kernel: for validation while training.

    Inside, quantized weights are kept from step to step, as by `reuse_weights`, unless such a scope is open already.

    Args:
        model: a patched model, or a wrapper of one.
        kernel: a kernel's name, ``"native"`` for FP4 tensor cores only, a scheme (``"sage3"``, ``"fa4"``), or None for
            the first usable kernel of the trained scheme. Of another scheme the receipt says ``simulated=no``.
        memory_limit: bytes for the quantized weights that are kept, see `reuse_weights`; 0 keeps none.

    Yields:
        A `SwapReceipt`. On a deployed model, whose attentions run the inference kernel anyway, nothing changes.

    Raises:
        PlanError: the model is not patched, or has no QAT attention.
        KernelUnavailable: no kernel is usable here; the message holds each one's reason.
        RuntimeError: inside the block, by a forward that would need gradients through the kernel.
    """
    model = unwrap(model)
    record = patch_record(model)
    if not record.attentions:
        cause = (
            f"it was read from a file of another tool ({record.profile}), which keeps no attention: it is dense here. "
            "Files of qatpatch.save keep it"
            if record.is_foreign
            else "patched with attention=False, or a profile without attention"
        )
        raise PlanError(f"this {type(model).__name__} has no QAT attention to swap ({cause})")
    device = device_of(None, model)
    states = attention_states(model, record)
    choice, found = bind_infer(record.scheme, device, kernel, states[0].head_dim)
    row = found.kernel
    note = "deployed already: nothing to swap" if record.deployed and kernel is None else ""
    receipt = SwapReceipt(
        swap="infer_attention",
        modules=tuple(record.attentions),
        architecture=kernels.architecture_of(device),
        kernel=row.name,
        scheme=choice.scheme,
        simulated=choice.scheme == record.scheme,
        native=row.native,
        note=note,
        refused=refusals([found.refused] * len(record.attentions)),
        masks=None if row.honours_masks else record.switch.masks,
    )
    weights = record.switch.weights
    if weights is None or memory_limit is not None:
        weights = _kept_weights(memory_limit)
    try:
        watch_masks(model, record, states, [choice] * len(states))
        with _block(model, record, receipt, attention=choice, weights=weights):
            yield receipt
    finally:
        # Deployed models keep the hooks, and so does an outer block of this kind.
        if record.switch.attention is None and not record.deployed:
            masks.uninstall(model)


@contextlib.contextmanager
def reuse_weights(model: nn.Module, *, memory_limit: int | None = None) -> Iterator[KeptWeights]:
    """Keep quantized weights for as long as they do not change: around a training loop or a sampling loop.

    With gradient checkpointing each weight is quantized for the forward and again for its recomputation, with gradient
    accumulation for every micro-batch; inside this block a weight that did not change is only read and compared (how,
    and why no stale copy can be used: `qatpatch.reuse`). Compiled regions and weights of under a million elements on a
    GPU are quantized as usual, and so are weights that the limit leaves no room for.

    Args:
        model: a patched model, or a wrapper of one. Deployed layers have nothing to keep.
        memory_limit: bytes for what is kept, two bytes a weight and a little on a GPU. None: an eighth of a CUDA
            device's memory, elsewhere 1 GiB; 0 keeps nothing.

    Yields:
        `KeptWeights`, which says how many weights and bytes are kept.

    Raises:
        PlanError: the model is not patched.
        ValueError: a limit that is negative, or a share instead of bytes.
    """
    record = patch_record(unwrap(model))
    weights = _kept_weights(memory_limit)
    with contextlib.ExitStack() as closing:
        closing.callback(weights.clear)
        _open(record, closing, weights=weights)
        yield weights


def _kept_weights(memory_limit: int | None) -> KeptWeights:
    if memory_limit is not None and (memory_limit < 0 or 0 < memory_limit < 1):
        raise ValueError(f"memory_limit is a number of bytes, 0 to keep nothing; got {memory_limit}")
    return KeptWeights(memory_limit)


@contextlib.contextmanager
def dense(model: nn.Module) -> Iterator[SwapReceipt]:
    """Run the model with its current weights and nothing quantized: for comparison.

    Raises:
        PlanError: the model is not patched, or `deploy` purged dense weights.
    """
    model = unwrap(model)
    record = patch_record(model)
    purged = [name for name, paths in record.linears.items() if is_purged(layer_at(model, paths[0]))]
    if purged:
        raise PlanError(
            f"{len(purged)} layers ({purged[0]}, ...) cannot run dense: deploy purged their weights. Deploy with "
            "retain_original_weights=True to keep that possible"
        )
    receipt = _dense_receipt("dense", (*record.linears, *record.attentions), model, "")
    with _block(model, record, receipt, linear="dense", attention=AttentionChoice(mode="dense")):
        yield receipt


@contextlib.contextmanager
def stage(model: nn.Module, name: str) -> Iterator[SwapReceipt]:
    """Run the model in a stage: in ``"base"`` its refine-only layers run dense, in ``"refine"`` all are quantized.

    Raises:
        PlanError: the model is not patched or has no stages, the name is unknown, or a refine-only layer was purged.
    """
    model = unwrap(model)
    if name not in STAGES:
        raise PlanError(f"there is no stage {name!r}{nearest(name, STAGES)}")
    if not is_patched(model):
        raise PlanError(
            f"this {type(model).__name__} is not patched, so it has no stages and runs dense; leave stage out, or call "
            "qatpatch.apply(model) with a profile that marks layers as refine-only first"
        )
    record = patch_record(model)
    if not record.staged:
        raise PlanError(
            f"this {type(model).__name__} has no stages: profile {record.profile!r} marks no layer as refine-only; "
            "leave stage out"
        )
    modules = {n: layer_at(model, paths[0]) for n, paths in record.linears.items()}
    states = {n: layer_state("linear", m) for n, m in modules.items()}
    concerned = [n for n, state in states.items() if state is not None and state.settings.refine_only]
    purged = [n for n in concerned if is_purged(modules[n])]
    if name == "base" and purged:
        raise PlanError(f"{purged[0]} cannot run dense in the stage 'base': deploy purged its weight")
    receipt = _dense_receipt("stage", tuple(concerned), model, f"stage {name!r}")
    if name == "refine":
        row = kernels.resolve("linear", stage="train", scheme="nvfp4", device=device_of(None, model))
        receipt = SwapReceipt(
            swap="stage",
            modules=tuple(concerned),
            architecture=receipt.architecture,
            kernel=row.name,
            scheme="nvfp4",
            simulated=True,
            native=row.native,
            note=receipt.note,
        )
    with _block(model, record, receipt, stage=name):
        yield receipt


def bind_infer(
    scheme: str, device: torch.device, name: str | None, head_dim: int | None = None
) -> tuple[AttentionChoice, kernels.Resolution]:
    """The infer kernel for attention trained with ``scheme``: of that scheme, unless one of another is asked for
    by name.
    """
    if name in kernels.ATTENTION_SCHEMES:
        scheme, name = name, None
    if scheme == kernels.SMOOTHED_SCHEME and name is None:  # a deployed model that was saved
        name = next(row.name for row in kernels.TABLE if scheme in row.schemes)
    if name not in (None, "native"):
        named = kernels.kernel_named(name, "attention", (*kernels.ATTENTION_SCHEMES, "native"))
        if scheme not in named.schemes:
            scheme = named.schemes[0]
    found = kernels.resolution("attention", stage="infer", scheme=scheme, device=device, name=name, head_dim=head_dim)
    return AttentionChoice(mode="infer", scheme=scheme, kernel=None if name is None else found.kernel.name), found


def watch_masks(model: nn.Module, record: Record, states: list[Any], choices: list[AttentionChoice]) -> None:
    """Have the model's masks looked at on each call, where a kernel that takes none may run what is chosen."""
    if masks.may_meet_maskless(states, choices):
        masks.install(model, record.switch, record.mask_arguments, states)


@contextlib.contextmanager
def _block(model: nn.Module, record: Record, receipt: SwapReceipt, **axes: Any) -> Iterator[None]:
    with contextlib.ExitStack() as closing:
        closing.callback(dispatch.forget_cached, model)
        _open(record, closing, **axes)
        dispatch.forget_cached(model)
        logger.info("%s", receipt.line)
        yield


def _open(record: Record, closing: contextlib.ExitStack, **axes: Any) -> None:
    """Open a block that ``closing`` closes. Twice, which is harmless: an interrupt in the first may leave it half done,
    and the model would then stay swapped without a word.
    """
    key = object()
    for _ in range(2):
        closing.callback(record.switch.close, key)
    record.switch.open(key, **axes)


def _dense_receipt(swap: str, modules: tuple[str, ...], model: nn.Module, note: str) -> SwapReceipt:
    return SwapReceipt(
        swap=swap,
        modules=modules,
        architecture=kernels.architecture_of(device_of(None, model)),
        kernel="-",
        scheme="dense",
        simulated=False,
        native=False,
        note=note,
    )
