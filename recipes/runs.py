"""A run on disk and in memory: its folder, its checkpoints, its reports, and what its phases share."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.training_utils import EMAModel
from flow import Batch, Settings
from latents import Codec
from recipe import Recipe, RecipeError
from sharding import load_state, save_state
from torch.utils.data import Dataset
from tqdm import tqdm

# What a fresh run replaces in a folder that an earlier run left.
_RUN_FILES = (
    "scores.json",
    "metrics.jsonl",
    "checkpoints",
    "reports",
    "environment.json",
    "tensorboard",
    "transformer",
    "transformer-nvfp4",
)


class OutOfTime(Exception):
    """A run stopped at its time limit, after writing a checkpoint to continue from."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every phase of a run shares.

    Attributes:
        dense: train without quantization.
        output: the run's folder.
        samples: what is trained on: by index a dict of tensors, ``latents`` (C, F, H, W) and what a text encoder gives.
        truth: ground truth of the validation clips: batch of one, frames in [0, 1], frames a second.
        deadline: of `time.monotonic`, when training stops and leaves a checkpoint; None for no limit.
        replica, replicas: which share of a step's batch this process has, and how many shares there are. Processes of
            one context share a replica.
    """

    recipe: Recipe
    dense: bool
    output: Path
    accelerator: Accelerator
    settings: Settings
    codec: Codec
    samples: Dataset
    truth: list[tuple[Batch, torch.Tensor, float]]
    deadline: float | None = None
    replica: int = 0
    replicas: int = 1

    @property
    def sharded(self) -> bool:
        return self.recipe.parallel.sharding == "fsdp2"

    def say(self, topic: str, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(f"{topic:<10}{text}", file=sys.stdout)
            sys.stdout.flush()


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
    write_text(marker, recipe.model_dump_json(indent=2) + "\n")


def find_checkpoint(path: Path, recipe: Recipe, dense: bool, replicas: int = 1) -> Path:
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
    new = json.loads(json.dumps(essence(recipe, dense, replicas)))
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


def save_checkpoint(
    run: Run, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ema: EMAModel | None
) -> None:
    """The full training state; the folder gets its name when it is complete, and old ones go."""
    folder = run.output / "checkpoints"
    partial, final = folder / "partial", folder / f"step_{step:06d}"
    if run.accelerator.is_main_process:
        for old in (partial, final):
            _discard(old)
    run.accelerator.wait_for_everyone()
    save_state(partial, model, optimizer, **_beside_the_model(model, ema, step))
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        record = essence(run.recipe, run.dense, run.replicas)
        (partial / "recipe.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
        partial.rename(final)
        for old in checkpoints(run.output)[: -run.recipe.checkpoint.keep]:
            _discard(old)
    run.accelerator.wait_for_everyone()


def load_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ema: EMAModel | None
) -> int:
    """Bring a model, its optimizer and averages to where `save_checkpoint` was; returns the step."""
    found = load_state(folder, model, optimizer, **_beside_the_model(model, ema, 0))
    if ema is not None:
        for shadow, saved in zip(ema.shadow_params, found["ema"].values(), strict=True):
            shadow.copy_(saved)
        ema.optimization_step = int(found["progress"]["averaged"])
    return int(found["progress"]["step"])


def _beside_the_model(model: torch.nn.Module, ema: EMAModel | None, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """What a checkpoint holds but weights and optimizer state."""
    progress = {"step": torch.tensor(step)}
    if ema is None:
        return {"progress": progress}
    progress["averaged"] = torch.tensor(ema.optimization_step)
    names = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {"progress": progress, "ema": dict(zip(names, ema.shadow_params, strict=True))}


def _discard(folder: Path) -> None:
    """Remove a folder; whenever that is interrupted, what is left does not look like a checkpoint."""
    doomed = folder.with_name("removed")
    shutil.rmtree(doomed, ignore_errors=True)
    if folder.exists():
        folder.rename(doomed)
        shutil.rmtree(doomed)


def environment(device: torch.device) -> dict[str, Any]:
    """What a run ran on: versions, device, processes, command line."""
    packages = {}
    for name in ("qatpatch", "torch", "triton", "diffusers", "transformers", "accelerate", "peft", "safetensors", "av"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    packages["torch"] = torch.__version__  # with its build
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages,
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU",
        "capability": "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
        "command": sys.argv,
    }


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def checkpoints(output: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted((output / "checkpoints").glob("step_*"))


def essence(recipe: Recipe, dense: bool, replicas: int = 1) -> dict[str, Any]:
    """What decides a run's numbers: two runs that agree in it are the same, up to the order of sums where the number of
    processes differs. Of ``accumulate`` and the number of replicas it is their product."""
    apart = {"name", "output", "validation", "checkpoint", "gate", "parallel"}
    parts = recipe.model_dump(mode="json", exclude=apart)
    parts["train"]["accumulate"] *= replicas
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
