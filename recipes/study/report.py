"""The study's tables, pictures and verdicts, from what its stages measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from figures import contact_sheet, curves, save_figure, smoothed
from matplotlib.figure import Figure
from plan import SCOPES, Study, tasks_of
from recipe import RecipeError
from runs import write_text
from safetensors.torch import load_file
from verdicts import Verdict, closer, difference, mean, recovered, same_when_deployed, standard_error

KINDS = ("base", "ptq", "control", "ptq of control", "qat", "qad")
# The dense model that a kind is to come close to, and for trained kinds what it is without training.
REFERENCES = {kind: "base" if kind in ("base", "ptq", "qad") else "control" for kind in KINDS}
UNTRAINED = {"qat": "ptq of control", "qad": "ptq"}
Rows = dict[tuple[str, str, int], dict[str, Any]]


def write_report(out: Path, study: Study) -> bool:
    """Write ``out/report``; returns whether every bar is passed.

    Raises:
        RecipeError: models of the study are not measured yet.
    """
    tasks = [task for stage in ("base", "control", "qat", "qad") for task in tasks_of(stage, study)]
    files = {task.name: out / "measured" / f"{task.name}.json" for task in tasks}
    missing = [name for name, path in files.items() if not path.exists()]
    if missing:
        raise RecipeError(f"not measured yet: {', '.join(missing)}; run the stages base, control, qat and qad first")
    measured = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items()}
    rows = {(r["kind"], r["scope"], r["seed"]): r for record in measured.values() for r in record["rows"]}
    verdicts = judge(rows, study.seeds)

    folder = out / "report"
    folder.mkdir(exist_ok=True)
    results = {
        "study": asdict(study),
        "environment": measured["base-0"]["environment"],
        "seconds": {name: record["seconds"] for name, record in measured.items()},
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "rows": list(rows.values()),
    }
    write_text(folder / "results.json", json.dumps(results) + "\n")
    text = "\n\n".join(
        (verdict_table(verdicts), loss_table(rows, study.seeds), sample_table(rows, study.seeds), time_table(measured))
    )
    write_text(folder / "study.md", text + "\n")
    curves(folder / "base.png", measured["base-0"]["curve"])
    training_curves(folder / "training.png", {name: r["curve"] for name, r in measured.items()}, study.seeds[0])
    bars(folder / "bars.png", rows, study.seeds)
    sheets(folder, out / "measured", study.seeds[0])
    print(f"{text}\n\n{folder}")
    return all(verdict.passed for verdict in verdicts)


def judge(rows: Rows, seeds: Sequence[int]) -> list[Verdict]:
    """The bars of the study."""

    def losses(kind: str, scope: str, key: str = "losses") -> list[list[float]]:
        return [rows[kind, scope, seed][key] for seed in seeds]

    def likeness(kind: str) -> list[float]:
        return [mean(rows[kind, "both", seed]["against_dense"]["ms_ssim"]) for seed in seeds]

    return [
        recovered(losses("control", ""), losses("ptq of control", "both"), losses("qat", "both")),
        closer(likeness("qad"), likeness("ptq")),
        same_when_deployed(losses("qat", "both", "before_deploy"), losses("qat", "both")),
    ]


def verdict_table(verdicts: list[Verdict]) -> str:
    lines = [f"| {v.bar} | {'passed' if v.passed else 'MISSED'} | {v.figures} |" for v in verdicts]
    return "\n".join(("| bar | | figures |", "| --- | --- | --- |", *lines))


def variants(kinds: Sequence[str] = KINDS) -> list[tuple[str, str]]:
    """Kinds with their scopes, in the order of the tables."""
    return [(kind, scope) for kind in kinds for scope in (("",) if kind in ("base", "control", "still") else SCOPES)]


def loss_table(rows: Rows, seeds: Sequence[int]) -> str:
    """Held-out losses, their spread over seeds, and the paired difference from the dense reference with its standard
    error. The reference is the base for what starts and ends there (ptq, qad), the control for the others."""
    lines = ["| held-out loss | quantized | mean | spread over seeds | over the reference | share of the gap left |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for kind, scope in variants():
        losses = [rows[kind, scope, seed]["losses"] for seed in seeds]
        means = [mean(one) for one in losses]
        reference = [rows[REFERENCES[kind], "", seed]["losses"] for seed in seeds]
        excess, error = difference(losses, reference)
        share = ""
        if kind in UNTRAINED:
            gap, _ = difference([rows[UNTRAINED[kind], scope, seed]["losses"] for seed in seeds], reference)
            share = f"{excess / gap:.1%}" if gap > 0 else "no gap"
        away = f"{excess:+.3g} ± {error:.1g} ({REFERENCES[kind]})" if REFERENCES[kind] != kind else ""
        lines.append(f"| {kind} | {scope} | {mean(means):.5f} | {spread(means):.2g} | {away} | {share} |")
    return "\n".join(lines)


def sample_table(rows: Rows, seeds: Sequence[int]) -> str:
    """Scores of the samples: mean over windows and seeds, ± the spread over the seeds' means."""
    lines = ["| 8-step samples | quantized | MS-SSIM to dense | PSNR to dense | MS-SSIM to clip | PSNR to clip |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for kind, scope in variants(("still", *KINDS)):
        cells = []
        for reference in ("against_dense", "against_clip"):
            for score, digits in (("ms_ssim", 4), ("psnr", 2)):
                means = [mean(rows[kind, scope, seed][reference][score]) for seed in seeds]
                itself = kind == "base" and reference == "against_dense"
                cells.append("" if itself else f"{mean(means):.{digits}f} ± {spread(means):.{digits}f}")
        name = "first frame held still" if kind == "still" else kind
        lines.append(f"| {name} | {scope} | {' | '.join(cells)} |")
    return "\n".join(lines)


def time_table(measured: dict[str, dict[str, Any]]) -> str:
    lines = ["| model | seconds | of them training |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {r['seconds']['all']} | {r['seconds']['training']} |" for name, r in measured.items()]
    lines.append(f"| together | {sum(r['seconds']['all'] for r in measured.values()):.0f} | |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> float:
    """Standard deviation over seeds; 0 for one seed."""
    return standard_error(values) * len(values) ** 0.5 if len(values) > 1 else 0.0


def training_curves(path: Path, logs: dict[str, list[dict[str, Any]]], seed: int) -> None:
    """Smoothed losses of the runs of one seed: towards the data, and towards the teacher (another loss)."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, kinds in zip(figure.subplots(1, 2), (("control", "qat"), ("qad",)), strict=True):
        for kind in kinds:
            for scope in ("",) if kind == "control" else SCOPES:
                name = "-".join(filter(None, (kind, scope, str(seed))))
                steps, values = zip(*((row["step"], row["loss"]) for row in logs[name]), strict=True)
                axis.plot(steps, smoothed(values), label=f"{kind} {scope}".strip(), linewidth=1.2)
        axis.set(title="loss towards the data" if "qat" in kinds else "loss towards the teacher", xlabel="step")
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    save_figure(figure, path)


def bars(path: Path, rows: Rows, seeds: Sequence[int]) -> None:
    """Held-out loss over the dense reference's and MS-SSIM to the dense samples; whiskers are the spread over seeds."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss_axis, score_axis = figure.subplots(1, 2)
    dense = {(kind, seed): mean(rows[kind, "", seed]["losses"]) for kind in ("base", "control") for seed in seeds}
    shown = [v for v in variants() if v[1]]
    labels = [f"{kind}\n{scope}" for kind, scope in shown]
    excess = [[mean(rows[*v, seed]["losses"]) - dense[REFERENCES[v[0]], seed] for seed in seeds] for v in shown]
    likeness = [[mean(rows[*v, seed]["against_dense"]["ms_ssim"]) for seed in seeds] for v in shown]
    colours = [f"C{KINDS.index(kind)}" for kind, _ in shown]
    for axis, values in ((loss_axis, excess), (score_axis, likeness)):
        axis.bar(labels, [mean(v) for v in values], yerr=[spread(v) for v in values], color=colours, capsize=3)
        axis.tick_params(axis="x", labelsize=6, rotation=60)
        axis.grid(axis="y", alpha=0.3)
    loss_axis.set_title("held-out loss over the dense reference's", fontsize=9)
    score_axis.set_title("MS-SSIM to the dense model's samples", fontsize=9)
    lowest = min(min(v) for v in likeness)
    score_axis.set_ylim(max(0.0, lowest - 0.1 * (1 - lowest)), 1.0)
    save_figure(figure, path)


def sheets(folder: Path, measured: Path, seed: int) -> None:
    """Contact sheets of a held-out window, and of a window that was trained on."""
    frames: dict[str, torch.Tensor] = {}
    for name in ("base-0", f"qat-both-{seed}", f"qad-both-{seed}"):
        frames |= load_file(measured / f"{name}.safetensors")
    names = {"clip": "clip", "dense": f"base {seed}"}
    names |= {kind.upper(): f"{kind} both {seed}" for kind in ("ptq", "qat", "qad")}
    contact_sheet(folder / "held_out.jpg", {label: frames[name][0] / 255 for label, name in names.items()})
    pairs = {f"{label} {window}": frames[name][window] for window in (0, 1) for label, name in _SEEN.items()}
    contact_sheet(folder / "trained_on.jpg", {label: clip / 255 for label, clip in pairs.items()})


_SEEN = {"clip": "seen", "dense": "seen base"}
