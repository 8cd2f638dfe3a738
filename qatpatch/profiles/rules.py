"""`Rule`, `Count`, `Profile`: which layers of a model are patched, as data; and reading them from files.

A profile is an ordered tuple of `Rule`s over module names; the first rule that matches a module decides. Names are
diffusers'. A pattern matches a name that it equals or that lies below it, in whole components (``blocks.1`` never
matches ``blocks.10``, ``attn1`` never ``audio_attn1``); ``*`` matches anything, dots included. `Count`s say how many
layers each block must yield, so that a renamed layer is an error and not a silent omission.

A user's own profile is a `Profile` value or a TOML or YAML file with the same fields; nothing is registered.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from qatpatch.errors import PlanError, nearest
from qatpatch.kernels import ATTENTION_SCHEMES

ACTIONS = ("linear", "attention", "skip")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What happens to the modules that match.

    Attributes:
        match: patterns over module names; one may be given as a plain string.
        action: ``"linear"`` and ``"attention"`` patch modules of that kind, ``"skip"`` leaves modules of both
            kinds dense.
        reason: for skips, one sentence.
        refine_only: linears that run dense in the stage ``base``.
        optional: an action rule whose patterns may match nothing (parts that only some variants have).
    """

    match: tuple[str, ...]
    action: str
    reason: str = ""
    refine_only: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.match, str):
            object.__setattr__(self, "match", (self.match,))

    def matches(self, name: str) -> bool:
        return any(matches(pattern, name) for pattern in self.match)


@dataclass(frozen=True, kw_only=True)
class Count:
    """Layers that each block of a container must yield.

    Attributes:
        container: name of the module that holds the blocks.
        linears, attentions: a block.
        last_lacks: linears that the last block has fewer (it need not update the text that nobody reads any more).
        uncounted: patterns of layers that only some blocks have, so that they cannot be counted.
        optional: the model may be without such blocks.
    """

    container: str
    linears: int = 0
    attentions: int = 0
    last_lacks: int = 0
    uncounted: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Ordered rules for a family of models.

    Attributes:
        name: as reports print it.
        models: class names that ``profile="auto"`` and the class check accept; empty for any class.
        rules: first match decides; modules that no rule matches are skipped with ``default_reason``.
        counts: what must hold, a block.
        scheme: attention scheme that training simulates where ``target`` is not given.
        mask_arguments: arguments of the model's forward that all its attention masks are made of. They are read, once a
            call, only where a kernel that takes no mask is bound; without names such kernels give way to others
            wherever a mask is passed.
        default_reason: for modules that no rule names.
    """

    name: str
    models: tuple[str, ...] = ()
    rules: tuple[Rule, ...]
    counts: tuple[Count, ...] = ()
    scheme: str = "sage3"
    mask_arguments: tuple[str, ...] = ()
    default_reason: str = "No rule of the profile names it, so it stays in full precision."

    @property
    def staged(self) -> bool:
        """Whether the model has the stages ``base`` and ``refine``."""
        return any(rule.refine_only for rule in self.rules)


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches ``name`` or one of its parents, in whole components."""
    if "*" not in pattern:
        return name == pattern or name.startswith(f"{pattern}.")
    return _expression(pattern).fullmatch(name) is not None


@lru_cache(maxsize=1024)
def _expression(pattern: str) -> re.Pattern[str]:
    expression = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.compile(rf"{expression}(\..*)?")


def load_profile(path: str | Path) -> Profile:
    """Read a profile from a TOML or YAML file with the fields of `Profile`, `Rule` and `Count`.

    Raises:
        PlanError: the file is missing, does not parse, or holds unknown or missing fields.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = "" if path.suffix else f"; a shipped profile is asked for by its name alone, profile={path.name!r}"
        raise PlanError(f"the profile file {path} cannot be read: {error.strerror or error}{hint}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"the profile file {path} is no text in UTF-8: {error}") from error
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else _parse_yaml(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"the profile file {path} does not parse: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"the profile file {path} must hold the fields of a profile, got {type(data).__name__}")
    try:
        return profile_from_dict({"name": path.stem, **data})
    except PlanError as error:
        raise PlanError(f"the profile file {path}: {error}") from error


def profile_from_dict(data: dict[str, Any]) -> Profile:
    """A profile from plain data (what a file holds)."""
    rules = tuple(_build(Rule, rule, f"rules[{i}]") for i, rule in enumerate(_list(data, "rules")))
    counts = tuple(_build(Count, count, f"counts[{i}]") for i, count in enumerate(_list(data, "counts")))
    profile = _build(Profile, {**data, "rules": rules, "counts": counts}, "profile")
    for index, rule in enumerate(rules):
        if rule.action not in ACTIONS:
            raise PlanError(f"rules[{index}].action {rule.action!r} is unknown{nearest(rule.action, ACTIONS)}")
        if rule.action == "skip" and not rule.reason:
            raise PlanError(f"rules[{index}] skips without a reason; say why in one sentence")
    if profile.scheme not in ATTENTION_SCHEMES:
        raise PlanError(f"scheme {profile.scheme!r} is unknown{nearest(profile.scheme, ATTENTION_SCHEMES)}")
    return profile


def check_size(data: Any, limit: int = 100_000) -> None:
    """Refuse parsed YAML whose aliases make a few lines into more than any memory holds, before anything prints it.

    Raises:
        ValueError: it has more than ``limit`` values, each alias counted where it stands.
    """
    waiting, count = [data], 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > limit:
            raise ValueError(f"it holds more than {limit} values; write out what its aliases repeat, and less of it")
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise PlanError("a YAML profile needs PyYAML (pip install 'qatpatch[train]'); TOML works without") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    check_size(data)
    return data


def _list(data: dict[str, Any], key: str) -> list[Any]:
    value = data.get(key, [])
    if not isinstance(value, list | tuple):
        raise PlanError(f"{key} is a list, got {type(value).__name__}")
    return list(value)


def _build(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise PlanError(f"{where} holds fields, got {type(data).__name__}")
    known = {f.name: f for f in fields(cls)}
    for key in data:
        if key not in known:
            raise PlanError(f"{where} has no field {key!r}{nearest(key, known)}")
    values = {}
    for key, value in data.items():
        kind = str(known[key].type)
        if kind.startswith("tuple[str"):
            value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else value
            if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
                raise PlanError(f"{where}.{key} is a list of strings, got {value!r}")
        elif kind in ("str", "bool", "int") and type(value).__name__ != kind:
            raise PlanError(f"{where}.{key} is a {kind}, got {value!r}")
        values[key] = value
    try:
        return cls(**values)
    except TypeError as error:
        raise PlanError(f"{where}: {error}") from error
