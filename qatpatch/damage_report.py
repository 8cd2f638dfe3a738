"""`SensitivityReport`: what quantizing each layer alone does to a model, ranked; as a table, a plot and a profile."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from qatpatch.errors import PlanError, nearest
from qatpatch.profiles import Profile, Rule
from qatpatch.receipts import Receipt, Table, counted, warning_tables

MEASURES = ("error", "loss_change")
_ROWS = 20
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What quantizing one group of layers does, while all others run dense.

    Attributes:
        name: of the group; a layer's own where each is one.
        linears, attentions: names of its layers.
        error: relative error of the model's output, see `qatpatch.sensitivity`.
        loss_change: mean loss minus the dense model's; None without a loss.
        dense_bytes: what the weights of its linears take unquantized, in the dtype they have.
        work: multiply-adds of its layers in all batches together.
    """

    name: str
    linears: tuple[str, ...]
    attentions: tuple[str, ...]
    error: float
    loss_change: float | None
    dense_bytes: int
    work: int


@dataclass(frozen=True, kw_only=True, repr=False)
class SensitivityReport(Receipt):
    """The result of `qatpatch.sensitivity`.

    Attributes:
        model_class: of the model.
        base: the profile that patches exactly the layers that were measured, by name.
        damages: one `Damage` a group, largest error first.
        batches: how many.
        error, loss_change: with all layers quantized together.
        loss: mean of the dense model; None without a loss.
        unreached: layers that no batch reached, so that nothing is known of them.
    """

    model_class: str
    base: Profile
    damages: tuple[Damage, ...]
    batches: int
    error: float
    loss_change: float | None = None
    loss: float | None = None
    unreached: tuple[str, ...] = ()

    def ranked(self, by: str = "error") -> tuple[Damage, ...]:
        """The groups, worst first, ``by`` ``"error"`` or ``"loss_change"``.

        Raises:
            ValueError: another measure, or the loss change where no loss was given.
        """
        if by not in MEASURES:
            raise ValueError(f"by={by!r} is no measure{nearest(by, MEASURES)}")
        if by == "loss_change" and self.loss is None:
            raise ValueError("by='loss_change' needs a loss: qatpatch.sensitivity(model, batches, loss=...)")
        return tuple(sorted(self.damages, key=lambda damage: -getattr(damage, by)))

    def profile(
        self,
        *,
        keep_dense_bytes: int | None = None,
        keep_dense_work: float | None = None,
        by: str = "error",
        name: str | None = None,
    ) -> Profile:
        """A profile that keeps the worst groups dense within a budget, for ``qatpatch.apply(model, profile=...)``.

        Worst first, each that still fits; one that does not is passed over for the next. Groups that do no damage stay
        quantized, and so do attentions alone under a budget of bytes, which they do not use up.

        Args:
            keep_dense_bytes: of weights that may stay dense, in the dtype they have now.
            keep_dense_work: share (0 to 1) of all measured multiply-adds that may run dense: what speed depends on.
                Give one of the two.
            by: ``"error"`` or ``"loss_change"``.
            name: of the new profile.

        Raises:
            ValueError: none or both budgets, a budget out of range, an unknown measure.
            PlanError: nothing would stay quantized.
        """
        if (keep_dense_bytes is None) == (keep_dense_work is None):
            raise ValueError("give one budget: keep_dense_bytes=... or keep_dense_work=...")
        if keep_dense_bytes is not None and keep_dense_bytes < 0:
            raise ValueError(f"keep_dense_bytes is a number of bytes, 0 or more, got {keep_dense_bytes}")
        if keep_dense_bytes is not None and 0 < keep_dense_bytes < 1:
            total = sum(damage.dense_bytes for damage in self.damages)
            raise ValueError(
                f"keep_dense_bytes is a number of bytes, not a share, got {keep_dense_bytes}; of all {total} bytes "
                f"that share is {int(keep_dense_bytes * total)}"
            )
        if keep_dense_work is not None and not 0 <= keep_dense_work <= 1:
            raise ValueError(f"keep_dense_work is a share between 0 and 1, got {keep_dense_work}")
        ranked = self.ranked(by)
        kept = self._within(ranked, keep_dense_bytes, keep_dense_work, by)
        names = {layer for _, damage in kept for layer in (*damage.linears, *damage.attentions)}
        if all(layer in names for rule in self.base.rules for layer in rule.match):
            raise PlanError("this budget keeps every layer dense, so nothing is left to quantize; choose a smaller one")
        rules = self._rules(kept, names, by)
        return dataclasses.replace(self.base, name=name or f"{self.base.name}, worst kept dense", rules=rules)

    def _rules(self, kept: list[tuple[int, Damage]], names: set[str], by: str) -> tuple[Rule, ...]:
        """Those of `base`, behind skips of ``kept``, whose layers are ``names``."""
        rules = []
        # A skip of an attention would also match the linears below it: those are decided first.
        for kind in ("linear", "attention"):
            for rank, damage in kept:
                layers = damage.linears if kind == "linear" else damage.attentions
                rules.append(Rule(match=layers, action="skip", reason=self._reason(damage, rank, by)))
            for rule in self.base.rules:
                if rule.action == kind:
                    left = tuple(layer for layer in rule.match if layer not in names)
                    rules.append(dataclasses.replace(rule, match=left))
        return tuple(rule for rule in rules if rule.match)

    def _within(
        self, ranked: tuple[Damage, ...], budget: int | None, share: float | None, by: str
    ) -> list[tuple[int, Damage]]:
        """(rank, group) of what a budget of bytes or a share of the work holds."""
        left = budget if budget is not None else share * sum(damage.work for damage in self.damages)
        kept = []
        for rank, damage in enumerate(ranked, 1):
            cost = damage.work if budget is None else damage.dense_bytes
            if getattr(damage, by) > 0 and cost > 0 and cost <= left:
                kept.append((rank, damage))
                left -= cost
        return kept

    def _reason(self, damage: Damage, rank: int, by: str) -> str:
        change = f"output by {100 * damage.error:.3g} %" if by == "error" else f"loss by {damage.loss_change:.3g}"
        return f"Kept dense: {damage.name} alone changes the {change}, rank {rank} of {len(self.damages)}."

    def _tables(self) -> list[Table]:
        title = (
            f"sensitivity of {self.model_class}, profile {self.base.name}: with all quantized the output is "
            f"{100 * self.error:.3g} % off"
        )
        title += f", the loss {self.loss_change:+.3g} from {self.loss:.4g}" if self.loss is not None else ""
        total = sum(damage.work for damage in self.damages)
        rows = []
        for rank, damage in enumerate(self.damages[:_ROWS], 1):
            loss = [] if damage.loss_change is None else [f"{damage.loss_change:+.3g}"]
            cost = (f"{damage.dense_bytes / _MIB:.2f}", f"{100 * damage.work / max(1, total):.2f}")
            rows.append((str(rank), damage.name, f"{100 * damage.error:.3g}", *loss, *cost))
        loss = [] if self.loss is None else ["loss change"]
        header = ("rank", "quantized alone", "output error, %", *loss, "dense, MiB", "work, %")
        tables: list[Table] = [(f"{title} ({counted(self.batches, 'batch', 'batches')})", [header, *rows])]
        if len(self.damages) > len(rows):
            tables.append((f"and {len(self.damages) - len(rows)} more that do less", []))
        return [*tables, *warning_tables([f"no batch reached {name}: nothing is known" for name in self.unreached])]

    def plot(self, ax: Any = None, *, top: int = 30, by: str = "error") -> Any:
        """Bars of the ``top`` worst groups, worst on top; needs matplotlib.

        Args:
            ax: matplotlib Axes to draw on; None makes a figure.

        Returns:
            The Axes.
        """
        damages = self.ranked(by)[:top]
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError("plot needs matplotlib: pip install matplotlib") from error
            _, ax = pyplot.subplots(figsize=(8, 1 + 0.25 * len(damages)), layout="constrained")
        scale = 100 if by == "error" else 1
        ax.barh([damage.name for damage in damages], [scale * getattr(damage, by) for damage in damages])
        ax.invert_yaxis()
        ax.set_xlabel("relative output error, %" if by == "error" else "change of the loss")
        ax.set_title(f"{self.model_class}: one group quantized at a time")
        return ax
