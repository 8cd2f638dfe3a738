"""`build_plan`: a pure walk over a model. Every linear and attention module gets an action or a skip with a reason.

All problems are collected and raised as one `PlanError`; the model is only read. The plan also holds what `apply`
needs to commit:
the path of every module (under each name that it has) and the settings it gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from qatpatch import dispatch, kernels
from qatpatch.errors import KernelUnavailable, PlanError, nearest, problem_lines
from qatpatch.graphs import graph_units
from qatpatch.linear_state import BACKWARDS, INPUT_SCALES, LinearSettings
from qatpatch.nvfp4 import GLOBAL_SCALE_RULES
from qatpatch.profiles import Profile, Rule, find_profile, matches
from qatpatch.receipts import Receipt, Table, counted, grouped, skip_table, warning_tables
from qatpatch.units import Unit, is_graph, kind_of, module_units, unwrap

RECORD = "_qatpatch"


@dataclass(frozen=True, kw_only=True)
class Action:
    """What will happen to one module.

    Attributes:
        name: module name without adapter wrappers, as reports use it.
        paths: every attribute path of the module in the model.
        kind: ``"linear"`` or ``"attention"``.
        settings: of a linear; None for attention.
        scheme: of an attention; None for linears.
        kernel: name of the kernel that trains it where the model is now.
        parameters: number of weights covered.
        note: anything a reader of the receipt should know.
    """

    name: str
    paths: tuple[str, ...]
    kind: str
    settings: LinearSettings | None = None
    scheme: str | None = None
    kernel: str
    parameters: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Receipt):
    """The result of `build_plan`.

    Attributes:
        model_class: class name of the model.
        profile: name of the profile.
        scheme: attention scheme that training will simulate.
        linears, attentions: name -> `Action`.
        skipped: name -> reason, for every other linear and attention module.
        warnings: what was asked and had no effect.
        total_parameters: of the whole model.
        staged: the profile has refine-only layers.
        mask_arguments: from the profile.
    """

    model_class: str
    profile: str
    scheme: str
    linears: dict[str, Action]
    attentions: dict[str, Action]
    skipped: dict[str, str]
    warnings: tuple[str, ...]
    total_parameters: int
    staged: bool
    mask_arguments: tuple[str, ...] = ()

    @property
    def parameters(self) -> float:
        """Share of the model's parameters that the patched linears cover."""
        return sum(a.parameters for a in self.linears.values()) / max(1, self.total_parameters)

    def _tables(self) -> list[Table]:
        title = (
            f"plan for {self.model_class}, profile {self.profile}: {counted(len(self.linears), 'linear')} "
            f"({100 * self.parameters:.1f} % of the parameters), {counted(len(self.attentions), 'attention')}, scheme "
            f"{self.scheme}"
        )
        actions = {**self.linears, **self.attentions}
        groups = grouped(actions, key=lambda name: _cells(actions[name]))
        rows = [(pattern, str(count), *_cells(actions[first])) for pattern, count, first in groups]
        header = ("modules", "count", "kind", "scheme", "kernel", "note")
        return [(title, [header, *rows]), skip_table(self.skipped), *warning_tables(self.warnings)]


def _cells(action: Action) -> tuple[str, ...]:
    stage = "refine only" if action.settings is not None and action.settings.refine_only else ""
    note = "; ".join(part for part in (stage, action.note) if part)
    return action.kind, action.scheme or "nvfp4", action.kernel, note


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `apply`, checked."""

    linear: bool
    attention: bool
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    scheme: str
    settings: LinearSettings
    strict: bool


@dataclass
class _Walk:
    """What the walk collects."""

    profile: Profile
    request: Request
    linears: dict[str, Action] = field(default_factory=dict)
    attentions: dict[str, Action] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    counted: set[str] = field(default_factory=set)


def patched_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that qatpatch patched, by path: recognised by marker, so also across reloads of this package."""
    return {
        path: module
        for path, module in model.named_modules()
        if kind_of(module) or dispatch.is_patched_attention(module)
    }


def build_plan(
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
) -> Plan:
    """What `apply` with the same arguments would do. The model is only read; meta models suffice.

    Args:
        model: a module, or a wrapper of one (DDP, ``torch.compile``, peft).
        profile: ``"auto"`` (by class), a profile's name, a `Profile`, or a TOML or YAML file with one.
        linear: patch the linears.
        attention: patch the attentions.
        activations: quantize the linears' inputs too (W4A4); False is weight-only (W4A16).
        include: patterns of further linears or attentions to patch; each must match something.
        exclude: patterns of modules to leave dense.
        target: architecture whose attention is simulated (``"sm_120"``, ``"sm_100"``, ...); default: the
            profile's scheme.
        input_scale: ``"dynamic"``, ``"unit"`` or ``"static"`` (needs `calibrate`).
        global_scale: ``"pow2"`` or ``"amax"``.
        backward: ``"high_precision"`` or ``"quantized"``.
        strict: True makes an error of a layer that is wanted and cannot be patched (its forward is hooked, it is
            quantized already, no kernel serves it), of an action rule or ``include`` that matches nothing, and of a
            profile's count that does not hold. False skips such layers, with the reason, and warns of the rest, so that
            the model may train with fewer quantized layers than was asked for.

    Returns:
        A `Plan`: print it, or show it in a notebook.

    Raises:
        PlanError: every problem in one message.
    """
    model = unwrap(model)
    class_names = [cls.__name__ for cls in type(model).__mro__]
    chosen = find_profile(profile, class_names)
    request = _checked_request(
        chosen,
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
    refuse_patched(model)
    if chosen.models and not set(chosen.models) & set(class_names) and not is_graph(model):
        raise PlanError(
            f"profile {chosen.name!r} is for {', '.join(chosen.models)}; the model is a {class_names[0]}. Choose its "
            "profile, or pass a Profile of your own"
        )
    if isinstance(model, nn.Linear) or dispatch.is_attention(model):
        raise PlanError(
            f"the model is itself a {class_names[0]}, and qatpatch patches layers inside a model; put it into one "
            "(nn.Sequential)"
        )
    walk = _Walk(profile=chosen, request=request)
    units = graph_units(model) if is_graph(model) else module_units(model)
    for unit in units:
        _decide(walk, unit)
    warnings = _check_rules(walk) + _check_counts(walk, model)
    problems = problem_lines(walk.refused) + walk.problems
    if not walk.linears and not walk.attentions and not problems:
        problems.append("nothing would be patched: no module matches an action")
    if problems:
        raise PlanError(
            f"cannot patch this {class_names[0]} with profile {chosen.name!r}; it is untouched:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    return Plan(
        model_class=class_names[0],
        profile=chosen.name,
        scheme=request.scheme,
        linears=walk.linears,
        attentions=walk.attentions,
        skipped=walk.skipped,
        warnings=tuple(warnings),
        total_parameters=sum(p.numel() for p in model.parameters()),
        staged=any(a.settings.refine_only for a in walk.linears.values() if a.settings),
        mask_arguments=chosen.mask_arguments,
    )


def refuse_patched(model: nn.Module) -> None:
    """Raise where the model holds anything patched already."""
    record = vars(model).get(RECORD)
    found = patched_modules(model)
    if record is None and not found:
        return
    if any(kind_of(m) == "NVFP4Linear" for m in found.values()):
        if all(getattr(m, "dense_weight", 0) is not None for m in found.values()):
            raise PlanError(
                f"this {type(model).__name__} is deployed (packed to NVFP4) and kept its dense weights; call "
                "qatpatch.remove(model) first"
            )
        raise PlanError(
            f"this {type(model).__name__} is deployed (packed to NVFP4); its dense weights are gone. Load the "
            "original weights anew to patch again"
        )
    inside = "" if record is not None else f" inside it ({next(iter(found))}, ...)"
    raise PlanError(f"this {type(model).__name__} is already patched{inside}; call qatpatch.remove(model) first")


def _decide(walk: _Walk, unit: Unit) -> None:
    request = walk.request
    if unit.adapter:
        walk.skipped[unit.name] = "An adapter's own weights stay in full precision."
        return
    names = unit.names or (unit.name,)
    rule, pattern = _rule_for(walk.profile, unit, names)
    if rule is not None and rule.action != "skip":
        walk.used.add(pattern)
    excluded = next((p for p in request.exclude if any(matches(p, name) for name in names)), None)
    included = next((p for p in request.include if any(matches(p, name) for name in names)), None)
    if rule is not None and rule.action == unit.kind:
        walk.counted.add(f"{unit.kind}:{unit.name}")
    if excluded is not None:
        walk.used.add(f"exclude:{excluded}")
        walk.skipped[unit.name] = f"Excluded by {excluded!r}."
        return
    if included is not None:
        walk.used.add(f"include:{included}")
    wanted = included is not None or (rule is not None and rule.action == unit.kind)
    if not wanted:
        reason = rule.reason if rule is not None and rule.action == "skip" else walk.profile.default_reason
        walk.skipped[unit.name] = reason
        return
    if not getattr(request, unit.kind):
        walk.skipped[unit.name] = f"Left out by {unit.kind}=False."
        return
    if unit.problem is not None:
        _refuse(walk, unit, unit.problem)
        return
    _accept(walk, unit, refine_only=rule.refine_only if rule is not None else False)


def _accept(walk: _Walk, unit: Unit, *, refine_only: bool) -> None:
    request = walk.request
    scheme = "nvfp4" if unit.kind == "linear" else request.scheme
    try:
        kernel = kernels.resolve(
            unit.kind, stage="train", scheme=scheme, device=unit.device, head_dim=unit.head_dim or None
        )
    except KernelUnavailable as error:
        _refuse(walk, unit, str(error))
        return
    if unit.kind == "attention":
        walk.attentions[unit.name] = Action(
            name=unit.name,
            paths=unit.paths,
            kind="attention",
            scheme=scheme,
            kernel=kernel.name,
            note=_attention_note(unit, scheme),
        )
        return
    settings = LinearSettings(
        activations=request.settings.activations,
        input_scale=request.settings.input_scale,
        global_scale=request.settings.global_scale,
        backward=request.settings.backward,
        refine_only=refine_only,
    )
    walk.linears[unit.name] = Action(
        name=unit.name,
        paths=unit.paths,
        kind="linear",
        settings=settings,
        kernel=kernel.name,
        parameters=unit.weight.numel() if unit.weight is not None else 0,
        note=_linear_note(unit),
    )


def _linear_note(unit: Unit) -> str:
    """What a linear's size means: padding, and native kernels that it will be deployed without on any GPU."""
    notes = [unit.note]
    if unit.width % 16 and not unit.note:
        notes.append(f"in_features {unit.width} is padded to whole blocks of 16")
    if unit.weight is not None:
        shape = (unit.weight.shape[0], unit.width)
        rows = [row for row in kernels.TABLE if row.op == "linear" and row.native]
        notes += [f"no kernel {row.name}: it {reason}" for row in rows if (reason := row.shape_reason(shape))]
    return "; ".join(filter(None, notes))


def _attention_note(unit: Unit, scheme: str) -> str:
    """What a head dimension means: kernels that will not serve it on any GPU."""
    rows = [row for row in kernels.TABLE if row.op == "attention" and scheme in row.schemes]
    serving = [row.name for row in rows if not row.head_dims or unit.head_dim in row.head_dims]
    if not unit.head_dim or len(serving) == len(rows):
        return unit.note
    note = f"head dimension {unit.head_dim}, which only {' and '.join(serving)} serves, on GPUs too"
    return "; ".join(filter(None, (unit.note, note)))


def _refuse(walk: _Walk, unit: Unit, reason: str) -> None:
    if walk.request.strict:
        walk.refused.append((unit.name, reason))
    else:
        walk.skipped[unit.name] = f"Cannot be patched: {reason}"


def _rule_for(profile: Profile, unit: Unit, names: tuple[str, ...]) -> tuple[Rule | None, str]:
    """The first rule that matches any of the unit's names (a shared module has several), and its pattern."""
    for rule in profile.rules:
        if rule.action not in (unit.kind, "skip"):
            continue
        for pattern in rule.match:
            if any(matches(pattern, name) for name in names):
                return rule, pattern
    return None, ""


def _check_rules(walk: _Walk) -> list[str]:
    """Patterns that matched nothing: problems for actions, warnings for exclusions."""
    request, warnings = walk.request, []
    for rule in walk.profile.rules:
        if rule.action == "skip" or rule.optional:
            continue
        for pattern in rule.match:
            if pattern not in walk.used:
                _report(walk, warnings, f"the rule {pattern!r} ({rule.action}) matches nothing")
    for pattern in request.include:
        if f"include:{pattern}" not in walk.used:
            _report(walk, warnings, f"include={pattern!r} matches no linear or attention")
    warnings += [f"exclude={p!r} matches nothing" for p in request.exclude if f"exclude:{p}" not in walk.used]
    return warnings


def _report(walk: _Walk, warnings: list[str], text: str) -> None:
    (walk.problems if walk.request.strict else warnings).append(text)


def _check_counts(walk: _Walk, model: nn.Module) -> list[str]:
    warnings: list[str] = []
    for count in walk.profile.counts:
        blocks = _block_count(model, count.container, walk.counted)
        if blocks == 0:
            if not count.optional:
                _report(walk, warnings, f"the model has no blocks under {count.container!r}")
            continue
        for kind, per_block in (("linear", count.linears), ("attention", count.attentions)):
            names = [entry.split(":", 1)[1] for entry in walk.counted if entry.startswith(f"{kind}:{count.container}.")]
            found = sum(not any(matches(pattern, name) for pattern in count.uncounted) for name in names)
            fewer = count.last_lacks if kind == "linear" else 0
            wanted = per_block * blocks - fewer
            if found != wanted:
                rule = f"{per_block} a block" + (f", {fewer} fewer in the last" if fewer else "")
                _report(
                    walk,
                    warnings,
                    f"{count.container} has {blocks} blocks, so {wanted} {kind}s must match ({rule}); {found} do",
                )
    return warnings


def _block_count(model: nn.Module, container: str, counted: set[str]) -> int:
    if is_graph(model):
        prefix = f"{container}."
        names = (entry.split(":", 1)[1] for entry in counted)
        return len({name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix)})
    try:
        return len(list(model.get_submodule(container).children()))
    except AttributeError:
        return 0


def _checked_request(profile: Profile, **arguments: Any) -> Request:
    """The arguments, or one `PlanError` with all that is wrong with them."""
    problems = []
    for name, known in (("input_scale", INPUT_SCALES), ("global_scale", GLOBAL_SCALE_RULES), ("backward", BACKWARDS)):
        if arguments[name] not in known:
            problems.append(f"{name}={arguments[name]!r} is unknown{nearest(arguments[name], known)}")
    scheme, target = profile.scheme, arguments["target"]
    if target is not None:
        scheme = kernels.SCHEME_OF_TARGET.get(target, scheme)
        if target not in kernels.SCHEME_OF_TARGET:
            problems.append(
                f"target={target!r} is no architecture with FP4 attention to simulate; it names what to deploy to, one "
                f"of {', '.join(sorted(kernels.SCHEME_OF_TARGET))} (sm_100 and sm_103: B200, B300; sm_120 and sm_121: "
                "RTX 50, DGX Spark), not what trains"
            )
    for name in ("linear", "attention", "activations", "strict"):
        if not isinstance(arguments[name], bool):
            problems.append(f"{name} is True or False, got {arguments[name]!r}")
    patterns: dict[str, tuple[str, ...]] = {}
    for name in ("include", "exclude"):
        value = arguments[name] or ()
        value = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(pattern, str) and pattern for pattern in value):
            problems.append(f"{name} holds patterns (non-empty strings), got {value!r}")
        patterns[name] = value
    if arguments["activations"] is False and arguments["input_scale"] != "dynamic":
        problems.append(
            f"activations=False leaves inputs unquantized, so input_scale={arguments['input_scale']!r} would do "
            "nothing; leave one of them out"
        )
    if not arguments["linear"] and not arguments["attention"]:
        problems.append("linear=False with attention=False leaves nothing to patch")
    if problems:
        raise PlanError("the arguments do not fit:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return Request(
        linear=arguments["linear"],
        attention=arguments["attention"],
        scheme=scheme,
        strict=arguments["strict"],
        settings=LinearSettings(
            activations=arguments["activations"],
            input_scale=arguments["input_scale"],
            global_scale=arguments["global_scale"],
            backward=arguments["backward"],
        ),
        **patterns,
    )
