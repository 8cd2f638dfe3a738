"""`apply`, `remove`, `report`: patch a live model in place, all or nothing, and undo it exactly.

Invariants of a patched model:

- the same Parameter objects under the same names: optimizers, EMA, state dicts and sharding see no change;
- linears have their class assigned (`QATLinear`), attentions a processor of their own (`dispatch`), and methods that
  would take these out again raise (`guards`); nothing else is touched;
- the model holds one `Record` in its ``__dict__`` (no parameter, buffer or module) with what `remove` and `report`
  need.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qatpatch import dispatch, guards, kernels, masks
from qatpatch.errors import KernelUnavailable, PlanError
from qatpatch.graphs import is_rewritten, restore, rewrite
from qatpatch.kernels import Kernel
from qatpatch.linear import QATLinear
from qatpatch.linear_state import LinearState
from qatpatch.packed_linear import NVFP4Linear
from qatpatch.plan import RECORD, Action, Plan, build_plan, patched_modules
from qatpatch.profiles import Profile
from qatpatch.receipts import LayerReceipt, PatchReport, Refusal, refusals
from qatpatch.reuse import input_group
from qatpatch.switch import Switch
from qatpatch.units import (
    bypassed_layers,
    forget_bound_forward,
    is_graph,
    is_hooked,
    kind_of,
    layer_at,
    replace_layer,
    unwrap,
)

logger = logging.getLogger("qatpatch")


@dataclass(kw_only=True)
class Record:
    """What a patched model remembers about its patch. Copies with the model.

    Attributes:
        profile, scheme, staged, skipped, warnings, total_parameters: from the plan.
        linears, attentions: name -> attribute paths.
        switch: shared by all its layers.
        deployed: after `deploy`.
        weights: parameters covered by the patched linears.
        mask_arguments: of the model's forward, from the profile.
    """

    profile: str
    scheme: str
    staged: bool
    skipped: dict[str, str]
    warnings: tuple[str, ...]
    total_parameters: int
    linears: dict[str, tuple[str, ...]]
    attentions: dict[str, tuple[str, ...]]
    weights: int
    switch: Switch = field(default_factory=Switch)
    deployed: bool = False
    mask_arguments: tuple[str, ...] = ()

    @property
    def is_foreign(self) -> bool:
        """Whether the model was read from a file of another tool, which says nothing of attention or training."""
        return self.scheme == "dense"


def apply(
    model: nn.Module,
    profile: Profile | str | Path = "auto",
    *,
    linear: bool = True,
    attention: bool = True,
    activations: bool = True,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    target: str | None = None,
    input_scale: str = "dynamic",
    global_scale: str = "pow2",
    backward: str = "high_precision",
    strict: bool = True,
) -> PatchReport:
    """Patch ``model`` in place for NVFP4 quantization-aware training: all or nothing, undone by `remove`.

    Arguments and errors are those of `build_plan`, which explains each. Works before or after an optimizer, EMA, peft
    adapters, ``fully_shard`` and ``torch.compile``; before offload and layerwise-casting hooks.

    Returns:
        The receipt, a `PatchReport`.

    Raises:
        PlanError: anything that does not fit; the model is untouched. A model that is already patched asks for
            `remove` first.
    """
    model = unwrap(model)
    plan = build_plan(
        model,
        profile,
        linear=linear,
        attention=attention,
        activations=activations,
        include=include,
        exclude=exclude,
        target=target,
        input_scale=input_scale,
        global_scale=global_scale,
        backward=backward,
        strict=strict,
    )
    record = _record(plan)
    record.switch.context = dispatch.SharedSequence(model)
    done: list[Action] = []
    try:
        if is_graph(model):
            settings = {name: action.settings for name, action in plan.linears.items()}
            schemes = {name: action.scheme for name, action in plan.attentions.items()}
            rewrite(model, settings, schemes, record.switch)
        else:
            for action in (*plan.linears.values(), *plan.attentions.values()):
                done.append(action)
                _commit(model, action, record.switch)
            guards.install(model, _all(record.linears), _all(record.attentions), training=True)
        vars(model)[RECORD] = record
        dispatch.forget_cached(model)
        receipt = report(model)
        for warning in plan.warnings:
            logger.warning("apply: %s", warning)
        logger.info(
            "apply: %d linears, %d attentions, profile=%s scheme=%s",
            len(plan.linears),
            len(plan.attentions),
            plan.profile,
            plan.scheme,
        )
        return receipt
    except BaseException:  # up to the last line: whoever is interrupted has no receipt and must find no patch
        for action in done:
            _undo(model.get_submodule(action.paths[0]))
        if is_rewritten(model):
            restore(model)
        guards.release(model)
        vars(model).pop(RECORD, None)
        raise


def remove(model: nn.Module) -> None:
    """Undo `apply`: classes, processors and keys are those from before, bit for bit; trained weights stay trained.

    Raises:
        PlanError: the model is not patched, `deploy` purged dense weights, layers have hooks that hold on to the
            patched forward, or a reentrant checkpoint's backward is still to come; the model is as it was.
    """
    model = unwrap(model)
    record = patch_record(model)
    layers = {name: layer_at(model, paths[0]) for name, paths in record.linears.items()}
    purged = [name for name, layer in layers.items() if is_purged(layer)]
    if purged:
        raise PlanError(
            f"{len(purged)} layers ({purged[0]}, ...) were packed by deploy and their dense weights purged, so the "
            "patch cannot be removed; load the original weights, or deploy with retain_original_weights=True"
        )
    hooked = [name for name, layer in layers.items() if layer is not None and is_hooked(layer)]
    if hooked:
        raise PlanError(
            f"{len(hooked)} layers ({hooked[0]}, ...) have a hook (offload, accelerate, layerwise casting) that holds "
            "on to the patched forward; take the hooks off first"
        )
    waiting = waiting_problem(model, record)
    if waiting:
        raise PlanError(waiting)
    if is_graph(model):
        restore(model)
    else:
        for paths in (*record.linears.values(), *record.attentions.values()):
            _undo_everywhere(model, paths)
        guards.release(model)
    masks.uninstall(model)
    dispatch.forget_quantizer(model)
    dispatch.forget_cached(model)
    del vars(model)[RECORD]
    logger.info("remove: %d linears, %d attentions", len(record.linears), len(record.attentions))


def is_patched(model: nn.Module) -> bool:
    """Whether anything in ``model`` is patched (training or deployed)."""
    model = unwrap(model)
    return RECORD in vars(model) or bool(patched_modules(model))


def report(model: nn.Module) -> PatchReport:
    """The receipt of a live model, as it is now: inside blocks it shows what runs inside them.

    Raises:
        PlanError: the model is not patched.
    """
    model = unwrap(model)
    record = patch_record(model)
    layers: dict[str, LayerReceipt] = {}
    rows: dict[str, Kernel] = {}
    warnings = list(record.warnings)
    if record.is_foreign:
        warnings.append(
            f"read from a file of another tool ({record.profile}), which does not say how it was trained: 'simulated' "
            "says that these are the numbers of the file, not that training saw them"
        )
    passed_over = PassedOver()
    bypassed = {id(layer): problem for layer, problem in bypassed_layers(model)}
    for kind, names in (("linear", record.linears), ("attention", record.attentions)):
        for name, paths in names.items():
            module = layer_at(model, paths[0])
            device = device_of(module, model)
            layer, row = _layer_receipt(kind, module, device)
            if id(module) in bypassed:
                layer, row = _dense_receipt(kind, "replaced", bypassed[id(module)]), None
            layers[name] = layer
            if row is not None:
                rows[name] = row
            if row is not None and layer.state != "dense":
                stage = "train" if layer.state == "train" else "deploy" if kind == "linear" else "infer"
                passed_over.add(module, row, stage, layer.scheme, device)
            if layer.state == "replaced":
                warnings.append(f"{name}: {layer.note}")
    return PatchReport(
        model_class=type(model).__name__,
        profile=record.profile,
        scheme=record.scheme,
        linears=tuple(record.linears),
        attentions=tuple(record.attentions),
        skipped=dict(record.skipped),
        kernels=rows,
        layers=layers,
        parameters=record.weights / max(1, record.total_parameters),
        warnings=tuple(warnings),
        architecture=passed_over.architecture,
        refused=passed_over.refusals,
        masked_calls=record.switch.masks.masked,
    )


class PassedOver:
    """Why the kernels that the table prefers do not run, collected over layers; looked up once for like layers."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], dict[str, str]] = {}
        self._layers: list[dict[str, str]] = []
        self._architectures: dict[str, None] = {}

    def add(self, module: nn.Module, row: Kernel, stage: str, scheme: str, device: torch.device) -> None:
        """Count a layer on ``device`` that runs ``row`` at ``stage`` for ``scheme``."""
        state = layer_state(row.op, module)
        if row.op == "linear":
            shape, bias = (module.out_features, module.in_features), module.bias is not None
            limits = state.limits(shape, module.compute_dtype if kind_of(module) == "NVFP4Linear" else None, bias)
        else:
            limits = {"head_dim": state.head_dim}
        key = row, stage, scheme, device, *limits.values()
        if key not in self._found:
            self._found[key] = _refused_before(row, stage, scheme, device, limits)
        self._layers.append(self._found[key])
        self._architectures[kernels.architecture_of(device)] = None

    @property
    def architecture(self) -> str:
        """Where the layers are; several joined by commas."""
        return ", ".join(self._architectures)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What was passed over, by kernel and reason."""
        return refusals(self._layers)


def _refused_before(
    row: Kernel, stage: str, scheme: str, device: torch.device, limits: dict[str, Any]
) -> dict[str, str]:
    """name -> reason of the rows that serve the stage and come before ``row``."""
    try:
        refused = kernels.resolution(row.op, stage=stage, scheme=scheme, device=device, **limits).refused
    except KernelUnavailable:
        return {}
    before = itertools.takewhile(lambda kernel: kernel.name != row.name, kernels.TABLE)
    return {k.name: refused[k.name] for k in before if k.name in refused and stage in k.stages}


def patch_record(model: nn.Module) -> Record:
    """The record of a patched model (already unwrapped).

    Raises:
        PlanError: the model, or the module that was given, is not the one that was patched.
    """
    record = vars(model).get(RECORD)
    if record is not None:
        return record
    found = patched_modules(model)
    if found:
        raise PlanError(
            f"{type(model).__name__} holds patched modules ({next(iter(found))}, ...) but is not the module that "
            "qatpatch.apply was called on; pass that one"
        )
    raise PlanError(f"this {type(model).__name__} is not patched; call qatpatch.apply(model) first")


def attention_states(model: nn.Module, record: Record) -> list[Any]:
    """The `AttentionState` of every patched attention, in the record's order.

    Raises:
        PlanError: somebody took the patch out of one (set_attn_processor).
    """
    states = [layer_state("attention", layer_at(model, paths[0])) for paths in record.attentions.values()]
    for name, state in zip(record.attentions, states, strict=True):
        if state is None:
            raise PlanError(
                f"{name} lost its QAT attention (set_attn_processor?); put the processor back, or remove the patch "
                "and apply again"
            )
    return states


def waiting_problem(model: nn.Module, record: Record) -> str | None:
    """Why the model's layers must stay as they are now: a backward is going to run them again; None where none is."""
    for kind, names in (("linear", record.linears), ("attention", record.attentions)):
        for name, paths in names.items():
            state = layer_state(kind, layer_at(model, paths[0]))
            if state is not None and state.history.waiting:
                return (
                    f"{name} ran under gradient checkpointing with use_reentrant=True, and its backward, which runs it "
                    "again, is still to come; run the backward, or delete the loss and outputs, first"
                )
    return None


def is_purged(module: nn.Module | None) -> bool:
    """Whether a packed linear has lost its dense weight."""
    return kind_of(module) == "NVFP4Linear" and module.dense_weight is None


def replace_module(model: nn.Module, paths: Iterable[str], new: nn.Module) -> None:
    """Put ``new`` at every path."""
    for path in paths:
        replace_layer(model, path, new)


# What `nn.Linear`, `QATLinear` and `NVFP4Linear` bring themselves.
_OWN = frozenset(
    "training in_features out_features quantization weight bias dense_weight weight_packed weight_scale "
    "weight_global_scale weight_scale_tiled forward _dtype _tiled_from _trainable".split()
)


def move_extras(old: nn.Module, new: nn.Module) -> None:
    """Give ``new`` what others put on ``old``: hooks (the same dictionaries, so that handles work), attributes."""
    for name, value in vars(old).items():
        if name.startswith("_") and "hook" in name:
            if name in vars(new):  # torch's own: those of offloading hold on to the old layer
                vars(new)[name] = value
        elif name in ("_parameters", "_buffers", "_modules"):
            vars(new)[name].update({key: kept for key, kept in value.items() if key not in _OWN})
        elif name == "_non_persistent_buffers_set":
            vars(new)[name].update(value - _OWN)
        elif name not in _OWN and getattr(value, "__self__", None) is not old:
            vars(new)[name] = value


def _all(paths: dict[str, tuple[str, ...]]) -> list[str]:
    return [path for own in paths.values() for path in own]


def _record(plan: Plan) -> Record:
    return Record(
        profile=plan.profile,
        scheme=plan.scheme,
        staged=plan.staged,
        skipped=dict(plan.skipped),
        warnings=plan.warnings,
        total_parameters=plan.total_parameters,
        linears={name: action.paths for name, action in plan.linears.items()},
        attentions={name: action.paths for name, action in plan.attentions.items()},
        weights=sum(action.parameters for action in plan.linears.values()),
        mask_arguments=plan.mask_arguments,
    )


def _commit(model: nn.Module, action: Action, switch: Switch) -> None:
    module = model.get_submodule(action.paths[0])
    if action.kind == "attention":
        dispatch.attach(module, action.scheme, switch)
        return
    forget_bound_forward(module)
    module.quantization = LinearState(action.settings, switch, input_group(action.paths[0]))
    module.__class__ = QATLinear


def _undo(module: nn.Module) -> None:
    """Take the patch out of one module; nothing where there is none."""
    if kind_of(module) == "QATLinear":
        forget_bound_forward(module)
        module.__class__ = nn.Linear
    if isinstance(module, nn.Linear):
        vars(module).pop("quantization", None)
    elif dispatch.is_patched_attention(module):
        dispatch.detach(module)


def _undo_everywhere(model: nn.Module, paths: tuple[str, ...]) -> None:
    module = layer_at(model, paths[0])
    if kind_of(module) == "NVFP4Linear":
        replace_module(model, paths, _dense_again(module))
    elif module is not None:
        _undo(module)


def _dense_again(module: NVFP4Linear) -> nn.Linear:
    """A plain linear with the retained weight of a packed one."""
    linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    linear.weight = module.dense_weight
    linear.bias = module.bias
    linear.weight.requires_grad_(module._trainable)
    move_extras(module, linear)
    return linear.train(module.training)


def device_of(module: nn.Module | None, model: nn.Module) -> torch.device:
    """Where a layer computes: its own first parameter or buffer, else the model's."""
    for owner in (module, model):
        if owner is not None:
            tensor = next(itertools.chain(owner.parameters(), owner.buffers()), None)
            if tensor is not None:
                return tensor.device
    return torch.device("cpu")


def _layer_receipt(kind: str, module: nn.Module | None, device: torch.device) -> tuple[LayerReceipt, Kernel | None]:
    """What a layer runs now, and the kernel row that serves it."""
    state = layer_state(kind, module)
    if state is None:
        note = (
            "the module is gone" if module is None else f"it is a {type(module).__name__} now; the patch was taken out"
        )
        return _dense_receipt(kind, "replaced", note), None
    deployed = kind_of(module) == "NVFP4Linear" or getattr(state, "deployed", None) is not None
    try:
        if kind == "linear":
            mode, scheme = state.mode, "nvfp4"
            row = kernels.kernel_named(module.kernel(device) if deployed else state.kernel("train", device))
            simulated = True
        else:
            choice = state.choice
            mode = choice.mode
            scheme, name = ("dense", "") if mode == "dense" else state.kernel(choice, device)
            row = kernels.kernel_named(name) if name else None
            simulated = scheme == state.scheme
    except KernelUnavailable as error:
        return _dense_receipt(kind, "unavailable", str(error)), None
    if mode == "dense":
        return _dense_receipt(kind, "dense", ""), row
    note = _note(module, state, row) if kind == "linear" else ""
    shown = "deployed" if deployed and mode in ("quantized", "deployed") else "train" if mode == "quantized" else mode
    return (
        LayerReceipt(
            kind=kind, state=shown, kernel=row.name, scheme=scheme, simulated=simulated, native=row.native, note=note
        ),
        row,
    )


def layer_state(kind: str, module: nn.Module | None) -> Any:
    """The `LinearState` or `AttentionState` of a patched module; None where it is not patched."""
    if module is None:
        return None
    if kind == "linear":
        return getattr(module, "quantization", None) if kind_of(module) else None
    if kind_of(module) == "QATGraphAttention":
        return module.quantization
    return dispatch.attention_state(module) if dispatch.is_patched_attention(module) else None


def _dense_receipt(kind: str, state: str, note: str) -> LayerReceipt:
    return LayerReceipt(kind=kind, state=state, kernel="-", scheme="dense", simulated=False, native=False, note=note)


def _note(module: nn.Module, state: LinearState, row: Kernel) -> str:
    parts = []
    if not state.settings.activations:
        parts.append("weight only")
    if state.settings.refine_only:
        parts.append("refine only")
    if kind_of(module) == "NVFP4Linear":
        parts.append("dense weight kept" if module.dense_weight is not None else "dense weight purged")
    parts.append(kernels.two_roundings(row, module.bias is not None))
    return ", ".join(filter(None, parts))
