"""The study's bars, computed from its numbers.

    gap   = loss(ptq of the control) - loss(control)           both scopes on, the same pairs
    share = (loss(ptq of the control) - loss(qat)) / gap

The standard error of the gap is the larger of two: over all pairs of all seeds, and over the seeds' means. A share is
only judged where the gap is at least three of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SHARE_BAR = 0.8
RESOLVED = 3.0
# Relative. Sums in another order flip the rounding of single values to 4 bits; on average over the pairs that cancels.
DEPLOYED_BAR = 1e-3

# By seed.
Losses = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Verdict:
    """A bar, whether it is passed, and the figures that say so."""

    bar: str
    passed: bool
    figures: str


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values; infinite for a single one."""
    if len(values) < 2:
        return math.inf
    middle = mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1) / len(values))


def difference(a: Losses, b: Losses) -> tuple[float, float]:
    """The mean of ``a - b`` over all pairs, and its standard error (see the module's docstring)."""
    by_seed = [[x - y for x, y in zip(one, other, strict=True)] for one, other in zip(a, b, strict=True)]
    every = [value for values in by_seed for value in values]
    return mean(every), max(standard_error(every), standard_error([mean(values) for values in by_seed]))


def recovered(control: Losses, ptq: Losses, qat: Losses) -> Verdict:
    """How much of the quantization gap training closes."""
    gap, error = difference(ptq, control)
    bar = f"QAT recovers at least {SHARE_BAR:.0%} of the quantization gap in held-out loss"
    figures = f"gap {gap:.3g}, standard error {error:.2g}"
    if not gap >= RESOLVED * error or gap <= 0:
        return Verdict(bar, False, f"{figures}: not {RESOLVED:g} standard errors, so no share can be judged")
    share = difference(ptq, qat)[0] / gap
    seeds = [(mean(p) - mean(q)) / (mean(p) - mean(c)) for c, p, q in zip(control, ptq, qat, strict=True)]
    by_seed = ", ".join(f"{value:.1%}" for value in seeds)
    return Verdict(bar, share >= SHARE_BAR, f"{share:.1%} ({figures}; by seed {by_seed})")


def closer(qad: Sequence[float], ptq: Sequence[float]) -> Verdict:
    """Mean MS-SSIM against the dense model's samples, by seed."""
    passed = all(a > b for a, b in zip(qad, ptq, strict=True))
    figures = ", ".join(f"{a:.4f} over {b:.4f}" for a, b in zip(qad, ptq, strict=True))
    return Verdict(
        "QAD's samples are closer to the dense model's than PTQ's, by MS-SSIM, on every seed", passed, figures
    )


def same_when_deployed(trained: Losses, deployed: Losses) -> Verdict:
    """The packed model's mean loss against that of the model that trained, by seed."""
    off = [abs(mean(d) - mean(t)) / mean(t) for t, d in zip(trained, deployed, strict=True)]
    figures = f"largest relative difference {max(off):.2g}"
    return Verdict(
        f"the deployed model has the QAT model's loss within {DEPLOYED_BAR:g}", max(off) <= DEPLOYED_BAR, figures
    )
