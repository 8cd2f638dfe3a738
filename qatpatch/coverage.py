"""`audit`: one forward that proves what a patch reaches.

On any device, meta included (a full-size model takes seconds and no memory), it reports for every target whether its
forward ran, every attention call by module, shapes, mask and kernel, and every weight that was used outside its layer's
own forward, where no patch can see it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qatpatch.patch import patch_record
from qatpatch.plan import RECORD, build_plan
from qatpatch.receipts import Receipt, Table
from qatpatch.units import layer_at, unwrap


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One attention call.

    Attributes:
        module: name of the innermost attention module around it, ``""`` outside any.
        query, key: shapes (B, S, H, D) for QAT attention, as SDPA got them (B, H, S, D) for dense.
        mask: shape of the mask, None without one.
        kernel: a kernel's name, or ``"sdpa"``.
    """

    module: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    mask: tuple[int, ...] | None
    kernel: str


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Receipt):
    """What one forward reached.

    Attributes:
        reached: target name -> whether its forward ran.
        attention_calls: every call, in order.
        stray_weights: target name -> operator that used its weight outside the layer's own forward.
    """

    reached: dict[str, bool]
    attention_calls: tuple[AttentionCall, ...]
    stray_weights: dict[str, str]

    @property
    def unreached(self) -> tuple[str, ...]:
        """Targets whose forward never ran: patching them does nothing."""
        return tuple(name for name, reached in self.reached.items() if not reached)

    def _tables(self) -> list[Table]:
        done = sum(self.reached.values())
        tables: list[Table] = [(f"{done} of {len(self.reached)} targets reached", [])]
        if self.unreached:
            tables.append(("", [("never reached",), *((name,) for name in self.unreached)]))
        if self.stray_weights:
            tables.append(("", [("weight used outside its layer", "by"), *self.stray_weights.items()]))
        calls = Counter((c.kernel, str(c.query), str(c.key), str(c.mask or "none")) for c in self.attention_calls)
        rows = [(str(count), *key) for key, count in calls.items()]
        return [*tables, ("attention calls", [("count", "kernel", "query", "key", "mask"), *rows])]


@torch.no_grad()
def audit(model: nn.Module, **inputs: Any) -> AuditReport:
    """Run one forward of ``model`` with ``inputs`` and report what it reached.

    Args:
        model: a patched model (its targets are audited), or an unpatched one (those that ``profile="auto"`` would
            patch).
        inputs: what the model's forward takes, on its device; meta tensors for a meta model.

    Raises:
        PlanError: an unpatched model that no profile fits.
    """
    root = unwrap(model)
    if RECORD in vars(root):
        record = patch_record(root)
        targets = {**record.linears, **record.attentions}
    else:
        plan = build_plan(root)
        targets = {name: action.paths for name, action in {**plan.linears, **plan.attentions}.items()}
    watch = _Watch(root, targets)
    with watch.hooked(), _SDPACalls(watch), _Operators(watch):
        model(**inputs)
    return AuditReport(
        reached=watch.reached,
        attention_calls=tuple(watch.calls),
        stray_weights=watch.stray,
    )


class _Watch:
    """What the hooks and modes record."""

    def __init__(self, model: nn.Module, targets: dict[str, tuple[str, ...]]) -> None:
        self.modules = {name: layer_at(model, paths[0]) for name, paths in targets.items()}
        self.reached = dict.fromkeys(targets, False)
        self.calls: list[AttentionCall] = []
        self.stray: dict[str, str] = {}
        self.active: list[str] = []
        self.names = {id(module): name for name, module in self.modules.items()}
        for path, module in model.named_modules():
            if callable(getattr(module, "processor", None)):
                self.names.setdefault(id(module), path)
        self.watched = [m for m in model.modules() if id(m) in self.names]
        self.owners: dict[int, str] = {}
        for name, module in self.modules.items():
            weight = module._parameters.get("weight")
            if weight is not None:
                self.owners[weight.untyped_storage()._cdata] = name

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        try:
            for module in self.watched:
                handles.append(module.register_forward_pre_hook(self._enter))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self.names[id(module)]
        self.active.append(name)
        if name in self.reached:
            self.reached[name] = True

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.active.pop()

    def attention(self, query: Any, key: Any, mask: Any, kernel: str) -> None:
        self.calls.append(
            AttentionCall(
                module=self.active[-1] if self.active else "",
                query=tuple(query.shape),
                key=tuple(key.shape),
                mask=None if mask is None else tuple(mask.shape),
                kernel=kernel,
            )
        )

    def operator(self, name: str, arguments: Any) -> None:
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                owner = self.owners.get(leaf.untyped_storage()._cdata)
                if owner is not None and owner not in self.active:
                    self.stray.setdefault(owner, name)


class _SDPACalls(TorchFunctionMode):
    """Records dense attention calls."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            self.watch.attention(named["query"], named["key"], named.get("attn_mask"), "sdpa")
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """Records QAT attention calls and the use of watched weights."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.qatpatch.attention_forward.default:
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            self.watch.attention(named["q"], named["k"], named.get("attn_mask"), named["kernel"])
        self.watch.operator(str(func), (args, kwargs))
        return func(*args, **(kwargs or {}))
