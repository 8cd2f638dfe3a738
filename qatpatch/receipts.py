"""Receipts: what a plan, a patch, a swap or a deploy did, as data, a text table and notebook HTML."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from qatpatch.kernels import Kernel
from qatpatch.switch import MaskCount

# A title and rows of cells, the first row being the header.
Table = tuple[str, Sequence[Sequence[str]]]

_GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class LayerReceipt:
    """What one layer is and runs now.

    Attributes:
        kind: ``"linear"`` or ``"attention"``.
        state: ``"train"``, ``"infer"``, ``"dense"``, ``"deployed"`` or ``"replaced"`` (somebody took the patch out
            or runs around it).
        kernel: name of the kernel, ``"-"`` for dense.
        scheme: ``"nvfp4"``, an attention scheme or ``"dense"``.
        simulated: whether that is the scheme that training simulates.
        native: whether it runs on FP4 tensor cores.
        note: anything else worth knowing.
    """

    kind: str
    state: str
    kernel: str
    scheme: str
    simulated: bool
    native: bool
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A kernel that the table prefers to the one that runs, and why it does not.

    Attributes:
        kernel: its name.
        reason: why it was passed over.
        layers: how many layers that holds for.
    """

    kernel: str
    reason: str
    layers: int


class Receipt:
    """Text by ``str()``, HTML in notebooks, from one list of titled tables."""

    def _tables(self) -> list[Table]:
        raise NotImplementedError

    def __str__(self) -> str:
        return render(self._tables(), "text")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return render(self._tables(), "html")


@dataclass(frozen=True, kw_only=True, repr=False)
class PatchReport(Receipt):
    """The receipt of a patched model: of `apply` when it returns it, of now when `report` does.

    Attributes:
        model_class, profile, scheme: what was patched, by what, for which attention scheme.
        linears, attentions: names of the patched modules.
        skipped: name -> reason, for every other linear and attention module.
        kernels: name -> `Kernel` row that serves it where the model is.
        layers: name -> `LayerReceipt`.
        parameters: share of the model's parameters that the patched linears cover, 0 to 1.
        warnings: what was asked and had no effect, and what does not look right.
        architecture: where the layers are: ``"sm_90"``, ``"cpu"``; several joined by commas.
        refused: kernels that come before the ones that run, with the reason.
        masked_calls: model calls whose masks mask something, while a kernel that takes none was bound.
    """

    model_class: str
    profile: str
    scheme: str
    linears: tuple[str, ...]
    attentions: tuple[str, ...]
    skipped: dict[str, str]
    kernels: dict[str, Kernel]
    layers: dict[str, LayerReceipt]
    parameters: float
    warnings: tuple[str, ...] = ()
    architecture: str = ""
    refused: tuple[Refusal, ...] = ()
    masked_calls: int = 0

    def _tables(self) -> list[Table]:
        title = (
            f"{self.model_class}, profile {self.profile}: {counted(len(self.linears), 'linear')} "
            f"({100 * self.parameters:.1f} % of the "
            f"parameters), {counted(len(self.attentions), 'attention')}, scheme {self.scheme}"
            + (f", arch={self.architecture}" if self.architecture else "")
            + (f", {counted(self.masked_calls, 'masked call')}" if self.masked_calls else "")
        )
        header = ("modules", "count", "kind", "state", "kernel", "scheme", "simulated", "native", "note")
        rows = [
            (name, str(count), *_layer_cells(self.layers[first]))
            for name, count, first in grouped(self.layers, key=lambda name: _layer_cells(self.layers[name]))
        ]
        tables = [(title, [header, *rows]), *refusal_tables(self.refused), skip_table(self.skipped)]
        return [*tables, *warning_tables(self.warnings)]


@dataclass(frozen=True, kw_only=True, repr=False)
class SwapReceipt(Receipt):
    """What a swap bound.

    Attributes:
        swap: ``"infer_attention"``, ``"dense"`` or ``"stage"``.
        modules: names of the modules that it concerns.
        architecture: ``"sm_90"``, ``"cpu"``, ...
        kernel: name of the kernel, ``"-"`` for dense.
        scheme: what it computes.
        simulated: whether that is the scheme that training simulates.
        native: whether it runs on FP4 tensor cores.
        note: anything else worth knowing.
        refused: kernels that come before it, with the reason.
        masks: how many model calls had masks that mask something; counted only where the kernel takes none.
    """

    swap: str
    modules: tuple[str, ...]
    architecture: str
    kernel: str
    scheme: str
    simulated: bool
    native: bool
    note: str = ""
    refused: tuple[Refusal, ...] = ()
    masks: MaskCount | None = None

    @property
    def masked_calls(self) -> int:
        """Model calls so far whose masked attentions ran another kernel of the scheme, since theirs takes no mask."""
        return 0 if self.masks is None else self.masks.masked

    @property
    def line(self) -> str:
        """The receipt in one line."""
        line = (
            f"{self.swap}: {counted(len(self.modules), 'module')}, arch={self.architecture} kernel={self.kernel} "
            f"scheme={self.scheme} simulated={_yes(self.simulated)} native={_yes(self.native)}"
        )
        return f"{line} ({self.note})" if self.note else line

    def _tables(self) -> list[Table]:
        masks = []
        if self.masks is not None and self.masks.calls:
            masks = [(f"masks that mask something: in {self.masks.masked} of {self.masks.calls} model calls", [])]
        return [(self.line, []), *masks, *refusal_tables(self.refused)]


@dataclass(frozen=True, kw_only=True, repr=False)
class DeployReport(Receipt):
    """The receipt of `deploy`.

    Attributes:
        model_class: what was deployed.
        packed: names of the packed linears.
        retained: names of those that kept their dense weight.
        attentions: names of the attentions that were bound to an infer kernel.
        kernels: name -> `Kernel` row.
        bytes_before, bytes_after: storage of the model's parameters and buffers.
        bytes_freed: what the device got back: as the allocator reports it on CUDA, else of storages that are gone.
        bytes_held: of dense weights that left the model and are still in memory; on a CPU "before" is the sum of
            "after", "freed" and this.
        held: name of a dense weight that is still in memory -> who holds it.
        notes: what kernels that were asked for by name do otherwise than they should, and who else relied on the dense
            weights.
        architecture, refused: as in `PatchReport`.
    """

    model_class: str
    packed: tuple[str, ...]
    retained: tuple[str, ...]
    attentions: tuple[str, ...]
    kernels: dict[str, Kernel]
    bytes_before: int
    bytes_after: int
    bytes_freed: int
    held: dict[str, str]
    bytes_held: int = 0
    notes: tuple[str, ...] = ()
    architecture: str = ""
    refused: tuple[Refusal, ...] = ()

    def _tables(self) -> list[Table]:
        title = (
            f"{self.model_class} deployed: {counted(len(self.packed), 'linear')} packed, {len(self.retained)} of them "
            f"kept dense too, {counted(len(self.attentions), 'attention')}"
            + (f", arch={self.architecture}" if self.architecture else "")
        )
        memory = [
            ("memory", "GiB", "bytes"),
            *(
                (label, f"{value / _GIB:.3f}", f"{value:,}")
                for label, value in (
                    ("before", self.bytes_before),
                    ("after", self.bytes_after),
                    (
                        "freed" if self.bytes_freed >= 0 else "freed (below 0: packed came, dense stayed)",
                        self.bytes_freed,
                    ),
                    *([("held by others", self.bytes_held)] if self.bytes_held else []),
                )
            ),
        ]
        names = {row.name: row for row in self.kernels.values()}
        served = [
            (name, str(sum(k.name == name for k in self.kernels.values())), _yes(row.native))
            for name, row in names.items()
        ]
        groups = grouped(self.held, key=lambda name: (self.held[name],))
        rows = [(pattern, str(count), self.held[first]) for pattern, count, first in groups]
        held = [("dense weights still in memory", "count", "held by"), *rows] if rows else []
        tables = [(title, memory), ("", [("kernel", "layers", "native"), *served]), *refusal_tables(self.refused)]
        return [*tables, *([("", held)] if held else []), *warning_tables(self.notes)]


def render(tables: Iterable[Table], form: str) -> str:
    """Titled tables (the first row is the header) as ``"text"`` or ``"html"``."""
    parts = []
    for title, rows in tables:
        if form == "html":
            parts.append(f"<p><b>{html.escape(title)}</b></p>" if title else "")
            parts.append(_html_table(rows) if rows else "")
        else:
            parts.append(title)
            parts.append(_text_table(rows) if rows else "")
    return ("" if form == "html" else "\n").join(part for part in parts if part)


def _text_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in (("th" if i == 0 else "td", row) for i, row in enumerate(rows))
    )
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


def grouped(names: Iterable[str], key: Callable[[str], tuple[str, ...]]) -> list[tuple[str, int, str]]:
    """Names that differ in numbers only and have equal keys, as (pattern, count, first name)."""
    return [(pattern, len(members), members[0]) for pattern, members in grouped_members(names, key)]


def grouped_members(names: Iterable[str], key: Callable[[str], tuple[str, ...]]) -> list[tuple[str, list[str]]]:
    """Names that differ in numbers only and have equal keys, as (pattern, names)."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        pattern = re.sub(r"\.\d+(?=\.)", ".*", name, count=1)
        groups.setdefault((pattern, key(name)), []).append(name)
    return [(p if len(members) > 1 else members[0], members) for (p, _), members in groups.items()]


def _layer_cells(layer: LayerReceipt) -> tuple[str, ...]:
    return (
        layer.kind,
        layer.state,
        layer.kernel,
        layer.scheme,
        _yes(layer.simulated),
        _yes(layer.native),
        layer.note,
    )


def skip_table(skipped: dict[str, str]) -> Table:
    """What stays dense, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, count, first in grouped(skipped, key=lambda name: (skipped[name],)):
        reasons.setdefault(skipped[first], []).append(name if count == 1 else f"{name} ({count})")
    rows = [(_shortened(names), reason) for reason, names in reasons.items()]
    return f"left dense: {counted(len(skipped), 'module')}", [("modules", "reason"), *rows] if rows else []


def _shortened(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def warning_tables(warnings: Sequence[str]) -> list[Table]:
    """Warnings, where there are any."""
    return [("", [("warning",), *((w,) for w in warnings)])] if warnings else []


def refusal_tables(refused: Sequence[Refusal]) -> list[Table]:
    """Kernels that were passed over, where there are any."""
    rows = [(r.kernel, str(r.layers), r.reason) for r in refused]
    return [("", [("better kernel", "layers", "not used because"), *rows])] if rows else []


def refusals(found: Iterable[dict[str, str]]) -> tuple[Refusal, ...]:
    """One `Refusal` a kernel and reason, of each layer's refused rows (name -> reason)."""
    counts = Counter((name, reason) for refused in found for name, reason in refused.items())
    return tuple(Refusal(kernel=name, reason=reason, layers=count) for (name, reason), count in counts.items())


def counted(number: int, one: str, several: str = "") -> str:
    """``1 layer``, ``2 layers``; ``several`` where that is not ``one`` with an s."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
