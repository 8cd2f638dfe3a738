"""A run on disk and in memory: its folder, its checkpoints, its reports, and what its phases share."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from flow import Batch, Settings
from latents import Codec
from recipe import Recipe, RecipeError
from tqdm import tqdm

# What a fresh run replaces in a folder that an earlier run left.
_RUN_FILES = (
    "scores.json",
    "metrics.jsonl",
    "checkpoints",
    "reports",
    "tensorboard",
    "transformer",
    "transformer-nvfp4",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every phase of a run shares.

    Attributes:
        dense: train without quantization.
        output: the run's folder.
        cached: cache file of every clip.
        truth: ground truth of the validation clips: batch of one, frames in [0, 1], frames a second.
    """

    recipe: Recipe
    dense: bool
    output: Path
    accelerator: Accelerator
    settings: Settings
    codec: Codec
    cached: list[Path]
    truth: list[tuple[Batch, torch.Tensor, float]]

    def say(self, topic: str, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(f"{topic:<10}{text}", file=sys.stdout)
            sys.stdout.flush()


class Progress:
    """The step of a checkpoint, in the form that accelerate stores."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def claim_folder(output: Path, recipe: Recipe, *, resume: Path | None, overwrite: bool) -> None:
    """Make ``output`` this run's folder. A finished earlier run in it is replaced.

    Raises:
        RecipeError: it holds checkpoints of a run that has not finished, and neither flag says what to do with them.
    """
    marker = output / "recipe.json"
    output.mkdir(parents=True, exist_ok=True)
    if resume is not None:
        log = resume.parent.parent / "metrics.jsonl"
        if log.exists() and log.parent.resolve() != output.resolve():
            shutil.copy(log, output)
    elif marker.exists():
        kept = checkpoints(output)
        if kept and not overwrite and not (output / "scores.json").exists():
            raise RecipeError(
                f"{output} holds an unfinished run ({kept[-1].name}): --resume {output} continues it, --overwrite "
                "starts anew in its place, --output takes another folder"
            )
        for name in _RUN_FILES:
            path = output / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    marker.write_text(recipe.model_dump_json(indent=2) + "\n", encoding="utf-8")


def find_checkpoint(path: Path, recipe: Recipe, dense: bool) -> Path:
    """The checkpoint that ``--resume path`` means: the folder itself, or the last one of a run's folder.

    Raises:
        RecipeError: there is none, or it is of a run with other settings.
    """
    found = path if (path / "recipe.json").exists() and path.name.startswith("step_") else None
    if found is None:
        kept = checkpoints(path)
        if not kept:
            raise RecipeError(
                f"--resume {path}: no checkpoint there (a run's folder, or checkpoints/step_... inside one)"
            )
        found = kept[-1]
    old = json.loads((found / "recipe.json").read_text(encoding="utf-8"))
    new = json.loads(json.dumps(essence(recipe, dense)))
    changed = sorted(_differences(old, new))
    if changed:
        raise RecipeError(
            f"--resume {found}: a resumed run continues exactly, but these settings differ from the checkpoint's: "
            f"{', '.join(changed)}"
        )
    return found


def _differences(old: Any, new: Any, where: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = old.keys() | new.keys()
        return [line for key in keys for line in _differences(old.get(key), new.get(key), f"{where}.{key}".strip("."))]
    return [] if old == new else [f"{where} ({old!r} there, {new!r} here)"]


def save_checkpoint(run: Run, step: int) -> None:
    """The full training state; the folder gets its name when it is complete, and old ones go."""
    folder = run.output / "checkpoints"
    partial, final = folder / "partial", folder / f"step_{step:06d}"
    if run.accelerator.is_main_process:
        for old in (partial, final):
            shutil.rmtree(old, ignore_errors=True)
    run.accelerator.wait_for_everyone()
    run.accelerator.save_state(str(partial))
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        (partial / "recipe.json").write_text(json.dumps(essence(run.recipe, run.dense), indent=2), encoding="utf-8")
        partial.rename(final)
        for old in checkpoints(run.output)[: -run.recipe.checkpoint.keep]:
            shutil.rmtree(old)
    run.accelerator.wait_for_everyone()


def checkpoints(output: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted((output / "checkpoints").glob("step_*"))


def essence(recipe: Recipe, dense: bool) -> dict[str, Any]:
    """What decides a run's numbers: two runs that agree in it are the same."""
    parts = recipe.model_dump(mode="json", exclude={"name", "output", "validation", "checkpoint", "gate"})
    for section, name in (("data", "cache"), ("data", "workers"), ("quantization", "infer_kernel")):
        parts[section].pop(name)
    return {**parts, "dense": dense}


def write_report(run: Run, name: str, report: Any) -> None:
    """A qatpatch receipt as text and HTML."""
    if run.accelerator.is_main_process:
        folder = run.output / "reports"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.txt").write_text(str(report) + "\n", encoding="utf-8")
        (folder / f"{name}.html").write_text(report._repr_html_(), encoding="utf-8")
