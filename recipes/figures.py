"""What a run leaves to look at: contact sheet, curves, and one HTML page that shows all of it."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import torch
from clips import to_bytes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MOST_COLUMNS = 9


def contact_sheet(path: Path, clips: dict[str, torch.Tensor]) -> None:
    """A PNG with one row a clip, (F, 3, H, W) in [0, 1], nine of its frames at most, first and last included."""
    count = len(next(iter(clips.values())))
    columns = torch.linspace(0, count - 1, min(count, MOST_COLUMNS)).round().long().unique().tolist()
    height, width = next(iter(clips.values())).shape[-2:]
    cell = 1.5
    figure = Figure(figsize=(cell * len(columns), (cell * height / width + 0.25) * len(clips)), layout="constrained")
    axes = figure.subplots(len(clips), len(columns), squeeze=False)
    for row, (name, frames) in zip(axes, clips.items(), strict=True):
        for axis, index in zip(row, columns, strict=True):
            axis.imshow(to_bytes(frames[index]).permute(1, 2, 0).numpy(), interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(f"{name}, frame 0" if index == 0 else str(index), fontsize=7, loc="left")
    save_figure(figure, path)


def curves(path: Path, rows: list[dict[str, Any]], dense: float | None = None) -> None:
    """A PNG with the loss and MS-SSIM over the steps; ``dense`` is drawn as a level line."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    loss_axis, score_axis = figure.subplots(1, 2)
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    if losses:
        steps, values = zip(*losses, strict=True)
        loss_axis.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=0.8)
        loss_axis.plot(steps, smoothed(values), color="tab:blue", linewidth=1.5)
    loss_axis.set(title="training loss", xlabel="step", yscale="log")
    scores = [(row["step"], row["ms_ssim"]) for row in rows if "ms_ssim" in row]
    if scores:
        score_axis.plot(*zip(*scores, strict=True), marker="o", color="tab:orange", label="this run")
    if dense is not None:
        score_axis.axhline(dense, color="gray", linestyle="--", linewidth=1, label="dense run, end")
    score_axis.set(title="MS-SSIM of the sample against the ground truth", xlabel="step", ylim=(None, 1))
    if score_axis.get_legend_handles_labels()[0]:
        score_axis.legend(loc="lower right", fontsize=8)
    for axis in (loss_axis, score_axis):
        axis.grid(alpha=0.3)
    save_figure(figure, path)


def smoothed(values: tuple[float, ...], weight: float = 0.95) -> list[float]:
    """Exponential moving average, corrected for its start."""
    result, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        result.append(total / norm)
    return result


def page(path: Path, title: str, table: str, reports: dict[str, str], videos: dict[str, str]) -> None:
    """An HTML page next to the run's files: the score table, videos, figures and reports (already HTML)."""
    shown = "".join(
        f'<figure><video src="{html.escape(file)}" controls loop muted autoplay></video>'
        f"<figcaption>{html.escape(name)}</figcaption></figure>"
        for name, file in videos.items()
    )
    sections = "".join(f"<h2>{html.escape(name)}</h2>{text}" for name, text in reports.items())
    path.write_text(
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title>"
        "<style>body{font:14px sans-serif;max-width:70em;margin:2em auto}"
        "figure{display:inline-block;margin:0 1em 1em 0}"
        "table{border-collapse:collapse}td,th{padding:2px 8px;text-align:left}img{max-width:100%}</style>"
        f"<h1>{html.escape(title)}</h1><pre>{html.escape(table)}</pre>{shown}"
        f'<p><img src="contact_sheet.png" alt="contact sheet"></p><p><img src="curves.png" alt="curves"></p>{sections}',
        encoding="utf-8",
    )


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's ending."""
    # The Agg canvas by hand: no display is needed and pyplot's global state stays untouched.
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150)
