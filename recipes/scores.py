"""Scores of a generated clip, tables of them, and the log of a run.

Scores are over what was generated: the first frame, which was given, is left out.

- MS-SSIM of frames in [0, 1]: three scales (five need sides above 160 pixels), the first three of the usual weights
  renormalised, Gaussian kernel of 11 pixels; 1 is equal.
- PSNR in dB.
- of latents: mean squared error, signal-to-noise ratio ``10 log10(sum z^2 / sum (z - z')^2)`` in dB, cosine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torchmetrics.functional.image import multiscale_structural_similarity_index_measure

_WEIGHTS = (0.0448, 0.2856, 0.3001)
BETAS = tuple(weight / sum(_WEIGHTS) for weight in _WEIGHTS)
KERNEL = 11
# Two halvings, after which the kernel must still fit.
SMALLEST_SIDE = (KERNEL - 1) * 4 + 1


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of one sample against the ground truth; see the module's docstring."""

    ms_ssim: float
    psnr: float
    latent_mse: float
    latent_snr: float
    latent_cosine: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def ms_ssim(frames: torch.Tensor, truth: torch.Tensor) -> float:
    """MS-SSIM of (F, 3, H, W) frames in [0, 1], averaged over the frames.

    Raises:
        ValueError: a side is too short for three scales.
    """
    if min(truth.shape[-2:]) < SMALLEST_SIDE:
        raise ValueError(
            f"MS-SSIM of three scales needs sides of {SMALLEST_SIDE} pixels, got {tuple(truth.shape[-2:])}"
        )
    value = multiscale_structural_similarity_index_measure(
        frames.float(), truth.float(), data_range=1.0, kernel_size=KERNEL, betas=BETAS
    )
    return float(value)


def psnr(frames: torch.Tensor, truth: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of frames in [0, 1]."""
    error = float((frames.double() - truth.double()).square().mean())
    return math.inf if error == 0 else -10 * math.log10(error)


def latent_scores(latents: torch.Tensor, truth: torch.Tensor) -> tuple[float, float, float]:
    """Mean squared error, signal-to-noise ratio in dB, cosine."""
    a, b = latents.double().flatten(), truth.double().flatten()
    error = float((a - b).square().sum())
    signal = float(b.square().sum())
    cosine = float(a @ b) / max(float(a.norm() * b.norm()), 1e-300)
    return error / a.numel(), math.inf if error == 0 else 10 * math.log10(signal / error), cosine


def score(frames: torch.Tensor, true_frames: torch.Tensor, latents: torch.Tensor, true_latents: torch.Tensor) -> Scores:
    """All scores of one sample.

    Args:
        frames, true_frames: (F, 3, H, W) in [0, 1].
        latents, true_latents: (C, F', H', W').
    """
    mse, snr, cosine = latent_scores(latents[:, 1:], true_latents[:, 1:])
    return Scores(
        ms_ssim=ms_ssim(frames[1:], true_frames[1:]),
        psnr=psnr(frames[1:], true_frames[1:]),
        latent_mse=mse,
        latent_snr=snr,
        latent_cosine=cosine,
    )


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """The mean of every score over several clips."""
    return Scores(**{name: sum(getattr(s, name) for s in scores) / len(scores) for name in scores[0].as_dict()})


def table(rows: dict[str, Scores]) -> str:
    """Scores by name as text columns."""
    header = ("", "MS-SSIM", "PSNR dB", "latent MSE", "latent SNR dB", "latent cosine")
    cells = [header] + [
        (name, *(f"{value:.{digits}f}" for value, digits in zip(s.as_dict().values(), (4, 2, 4, 2, 4), strict=True)))
        for name, s in rows.items()
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


class MetricLog:
    """Rows of numbers, one JSON object a line; the source of every curve.

    Args:
        path: of the file.
        after: the step that the run starts after. Rows of later steps are dropped: this run writes them again.
    """

    def __init__(self, path: Path, *, after: int = 0):
        self.path = path
        kept = [row for row in read_log(path) if row["step"] <= after]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def write(self, step: int, **values: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a `MetricLog`; none where there is no file. A last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
