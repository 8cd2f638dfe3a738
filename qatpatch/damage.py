"""`sensitivity`: which layers does quantization hurt? One group at a time is quantized, all others run dense.

    error = sqrt(mean over output tensors of  sum |y_q - y|^2 / sum |y|^2)        sums over all batches and elements

with y from the dense model. The groups are switched by giving each layer a `Switch` of this module's for the time of
the measurement, so nothing of the model's own state is written. Errors of single layers do not add up to the error of
all: they say where to look.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qatpatch.damage_report import Damage, SensitivityReport
from qatpatch.errors import PlanError, nearest
from qatpatch.patch import Record, apply, layer_state, patch_record, remove
from qatpatch.plan import RECORD
from qatpatch.profiles import Profile, Rule
from qatpatch.recomputation import CallHistory
from qatpatch.switch import AttentionChoice, Switch
from qatpatch.units import layer_at, unwrap

Batch = Any
GROUPS = ("layer", "block")


def sensitivity(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    loss: Callable[[Any, Batch], torch.Tensor | float] | None = None,
    group: str | Callable[[str], str] = "layer",
    progress: bool = True,
    profile: Profile | str | Path | None = None,
    **arguments: Any,
) -> SensitivityReport:
    """Measure the damage of quantizing each layer alone, against the dense model; the model is left as it was.

    It runs eagerly, in eval mode, without gradients and with the same random numbers in every forward. The cost is a
    forward per group and batch, and two more per batch. Open blocks hold (`infer_attention`: the attention that it
    binds is measured), except `dense`.

    Args:
        model: patched (before `deploy`), or not: then it is patched for the time of the measurement.
        batches: inputs of the model's forward: dicts of keyword arguments, tuples or lists of positional ones, or
            tensors. All are kept in memory, with one output each.
        loss: of a batch, ``loss(output, batch)``, a scalar; may draw random numbers.
        group: ``"layer"``, ``"block"`` (all layers below the first number of their name: one forward per block), or a
            function from a layer's name to its group's.
        progress: show a bar when it takes more than a few seconds.
        profile: of `apply`, for a model that is not patched; ``"auto"`` by default.
        **arguments: the other arguments of `apply`, likewise.

    Returns:
        A `SensitivityReport`: print it, or call its ``plot`` or ``profile``.

    Raises:
        PlanError: what `apply` raises, arguments of `apply` for a patched model, a deployed model, a cache that
            is enabled, or static scales that were never calibrated.
        ValueError: no batch, or one that is not in a list, an unknown group, outputs without a tensor or with NaN or
            infinity in the dense model.
    """
    model = unwrap(model)
    if isinstance(batches, Mapping | torch.Tensor | str):
        raise ValueError(
            f"batches is a list of batches, got one {type(batches).__name__}; for a single batch write [batch]"
        )
    batches = list(batches)
    if not batches:
        raise ValueError("sensitivity needs at least one batch of inputs")
    grouping = _grouping(group)
    if RECORD in vars(model):
        if profile is not None or arguments:
            raise PlanError(
                "this model is patched, and its patch is what is measured; leave out profile and the arguments of "
                "apply, or qatpatch.remove(model) first"
            )
        return _measured(model, batches, loss, grouping, progress)
    apply(model, "auto" if profile is None else profile, **arguments)
    try:
        return _measured(model, batches, loss, grouping, progress)
    finally:
        remove(model)


def _grouping(group: str | Callable[[str], str]) -> Callable[[str], str]:
    if callable(group):
        return group
    if group not in GROUPS:
        raise ValueError(f"group={group!r} is neither a function nor known{nearest(group, GROUPS)}")
    return _block_of if group == "block" else lambda name: name


def _block_of(name: str) -> str:
    """``blocks.3`` of ``blocks.3.attn1.to_q``; the whole name where it has no number."""
    found = re.match(r"(?:.+?\.)?\d+(?=\.|$)", name)
    return found[0] if found else name


@dataclass
class _Layer:
    """A patched layer and its state."""

    kind: str
    name: str
    module: nn.Module
    state: Any


@dataclass
class _Score:
    """The errors of one setting, summed over batches on the device."""

    squares: list[torch.Tensor] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)

    def add(self, tensors: Sequence[torch.Tensor], dense: Sequence[torch.Tensor]) -> None:
        found = [(a.float() - b.float()).double().square().sum() for a, b in zip(tensors, dense, strict=True)]
        self.squares = [a + b for a, b in zip(self.squares, found, strict=True)] if self.squares else found

    def error(self, norms: Sequence[torch.Tensor]) -> float:
        """The relative error; infinite where the output is not finite, or not zero like the dense one."""
        shares = [
            float(square / norm) if square != 0 else 0.0 for square, norm in zip(self.squares, norms, strict=True)
        ]
        mean = sum(shares) / len(shares)
        return mean**0.5 if mean == mean else float("inf")

    def loss(self) -> float | None:
        return sum(map(float, self.losses)) / len(self.losses) if self.losses else None


def _measured(
    model: nn.Module, batches: list[Batch], loss: Any, grouping: Callable[[str], str], progress: bool
) -> SensitivityReport:
    from tqdm.auto import tqdm

    record = patch_record(model)
    layers = _layers(model, record)
    groups: dict[str, list[_Layer]] = {}
    for layer in layers:
        groups.setdefault(grouping(layer.name), []).append(layer)
    with _prepared(model, layers, record.switch) as quantized, torch.no_grad():
        dense, reference = [], _Score()
        for batch in batches:
            tensors = _forward(model, batch, loss, reference)
            if not all(bool(t.isfinite().all()) for t in tensors):
                raise ValueError(
                    "the dense model's output holds NaN or infinity, so no error can be measured against it"
                )
            dense.append(tensors)
        # Outputs may differ in number of elements from batch to batch, not in number.
        norms = [sum(t.double().square().sum() for t in tensors) for tensors in zip(*dense, strict=True)]

        def score(chosen: list[_Layer], work: dict[str, int] | None = None) -> _Score:
            found = _Score()
            with quantized(chosen), contextlib.nullcontext() if work is None else _counted(layers, work):
                for batch, tensors in zip(batches, dense, strict=True):
                    found.add(_forward(model, batch, loss, found), tensors)
            return found

        work: dict[str, int] = {}
        together = score(layers, work)
        damages = []
        for name, members in tqdm(groups.items(), desc="sensitivity", disable=not progress, delay=3):
            damages.append(_damage(name, members, score(members), norms, reference.loss(), work))
    damages.sort(key=lambda damage: -damage.error)
    base_loss = reference.loss()
    return SensitivityReport(
        model_class=type(model).__name__,
        base=_base(record, layers),
        damages=tuple(damages),
        batches=len(batches),
        error=together.error(norms),
        loss=base_loss,
        loss_change=None if base_loss is None else together.loss() - base_loss,
        unreached=tuple(layer.name for layer in layers if layer.name not in work),
    )


def _layers(model: nn.Module, record: Record) -> list[_Layer]:
    """The patched layers, or an error where one cannot run both ways."""
    if record.deployed:
        raise PlanError("sensitivity measures a model before deploy: packed layers cannot run dense")
    if getattr(model, "is_cache_enabled", False):
        raise PlanError(
            "sensitivity compares forwards, and the cache of this model (enable_cache) would serve parts of one to "
            "another; call disable_cache first"
        )
    found = []
    for kind, names in (("linear", record.linears), ("attention", record.attentions)):
        for name, paths in names.items():
            module = layer_at(model, paths[0])
            state = layer_state(kind, module)
            if state is None:
                raise PlanError(f"{name} lost its patch since apply; remove the patch and apply it again")
            settings = getattr(state, "settings", None)
            if settings and settings.input_scale == "static" and settings.static_scale is None:
                raise PlanError(f"{name} has no static input scale yet; run forwards inside qatpatch.calibrate first")
            found.append(_Layer(kind, name, module, state))
    return found


@contextlib.contextmanager
def _prepared(model: nn.Module, layers: list[_Layer], switch: Switch) -> Iterator[Any]:
    """The model in eval mode with all layers dense; yields a context that quantizes some. Restores everything."""
    dense, quantized = Switch(), Switch()
    dense.context = quantized.context = switch.context
    dense.open(dense, linear="dense", attention=AttentionChoice(mode="dense"))
    quantized.open(quantized, stage=switch.stage)
    if switch.attention is not None and switch.attention.mode != "dense":
        quantized.open(quantized, attention=switch.attention)
    before = [dict(vars(layer.state)) for layer in layers]
    training = [module for module in model.modules() if module.training]

    @contextlib.contextmanager
    def chosen(some: list[_Layer]) -> Iterator[None]:
        try:
            for layer in some:
                layer.state.switch = quantized
            yield
        finally:
            for layer in some:
                layer.state.switch = dense

    try:
        for module in training:
            module.training = False
        for layer in layers:
            layer.state.switch, layer.state.history = dense, CallHistory()
        with torch.compiler.set_stance("force_eager"):
            yield chosen
    finally:
        for layer, attributes in zip(layers, before, strict=True):
            vars(layer.state).clear()
            vars(layer.state).update(attributes)
        for module in training:
            module.training = True


def _forward(model: nn.Module, batch: Batch, loss: Any, score: _Score) -> list[torch.Tensor]:
    """The output's floating-point tensors; the loss goes to ``score``. Leaves random generators as they were."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        if isinstance(batch, dict):
            output = model(**batch)
        elif isinstance(batch, tuple | list):
            output = model(*batch)
        else:
            output = model(batch)
        if loss is not None:
            value = loss(output, batch)
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ValueError(f"loss returns one number, got a tensor of shape {tuple(value.shape)}")
            score.losses.append(value)
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not tensors:
        raise ValueError(
            f"the model's output, a {type(output).__name__}, holds no floating-point tensor that can be found; have it "
            "return tensors, or a tuple or dict of them (return_dict=False)"
        )
    return tensors


def _damage(
    name: str,
    members: list[_Layer],
    score: _Score,
    norms: list[torch.Tensor],
    dense_loss: float | None,
    work: dict[str, int],
) -> Damage:
    linears = [layer for layer in members if layer.kind == "linear"]
    weights = [layer.module.weight for layer in linears]
    return Damage(
        name=name,
        linears=tuple(layer.name for layer in linears),
        attentions=tuple(layer.name for layer in members if layer.kind == "attention"),
        error=score.error(norms),
        loss_change=None if dense_loss is None else score.loss() - dense_loss,
        dense_bytes=sum(weight.numel() * weight.element_size() for weight in weights),
        work=sum(work.get(layer.name, 0) for layer in members),
    )


def _base(record: Record, layers: list[_Layer]) -> Profile:
    """The profile that patches these layers, by name."""
    rules = []
    for refine_only in (False, True):
        names = (x.name for x in layers if x.kind == "linear" and x.state.settings.refine_only == refine_only)
        rules.append(Rule(match=tuple(names), action="linear", refine_only=refine_only))
    rules.append(Rule(match=tuple(layer.name for layer in layers if layer.kind == "attention"), action="attention"))
    return Profile(
        name=record.profile,
        rules=tuple(rule for rule in rules if rule.match),
        scheme=record.scheme,
        mask_arguments=record.mask_arguments,
        default_reason=f"Not among the layers that profile {record.profile!r} patched when it was measured.",
    )


@contextlib.contextmanager
def _counted(layers: list[_Layer], work: dict[str, int]) -> Iterator[None]:
    """Add each layer's multiply-adds to ``work``."""
    names = {id(layer.module): layer for layer in layers}
    active: list[str] = []

    def enter(module: nn.Module, args: Any) -> None:
        name = names[id(module)].name
        active.append(name)
        work.setdefault(name, 0)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        name = active.pop()
        if names[id(module)].kind == "linear" and output is not None:
            work[name] += output.numel() * module.in_features

    class Attentions(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.ops.qatpatch.attention_forward.default:
                named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
                # Two products of queries and keys, over all heads.
                work[active[-1]] += 2 * named["q"].numel() * named["k"].shape[1]
            return func(*args, **kwargs)

    handles = []
    try:
        for layer in layers:
            handles.append(layer.module.register_forward_pre_hook(enter))
            handles.append(layer.module.register_forward_hook(leave, always_call=True))
        with Attentions():
            yield
    finally:
        for handle in handles:
            handle.remove()
