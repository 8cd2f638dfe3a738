"""Does training for NVFP4 pay? A dense model is packed as it is (PTQ), trained for NVFP4 (QAT) and distilled into it
(QAD), and all are compared on a clip that none has seen. `plan.py` says what each variant is.

    for stage in base control qat qad report; do
        python recipes/study/run.py --stage $stage --out outputs/study
    done

Every stage but ``report`` trains: for one GPU of 80 GB or more (on an H200 each is meant to take less than 8 minutes).
After ``--minutes`` a stage stops with exit status 3, and the same command continues it; so it does after a kill.
``--tiny`` is the same on a CPU in about a minute; its numbers say nothing.

    OUT/runs/       the trainer's run directories
    OUT/measured/   one JSON file a trained model, and samples
    OUT/report/     tables, pictures, results.json, and whether the bars are passed
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import train
from measure import HeldOut, compare, deploy, losses, pack, sampled
from networks import release
from plan import FULL, HELD_OUT, RECIPE, SCOPES, TINY, Study, Task, overrides_of, tasks_of
from recipe import RecipeError
from report import write_report
from runs import OutOfTime, Run, checkpoints, environment, write_text
from safetensors.torch import load_file, save_file
from scores import read_log
from windows import Windows, held_out, stacked

STAGES = ("base", "control", "qat", "qad", "report")


def main(argv: list[str] | None = None) -> int:
    """Run one stage; the exit status is 0, 1 where the report finds a bar missed, 2 for errors, 3 for unfinished."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU; the numbers say nothing")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after so many, to be continued")
    options = parser.parse_args(argv)
    study = TINY if options.tiny else FULL
    try:
        claim(options.out, study)
        if options.stage == "report":
            return 0 if write_report(options.out, study) else 1
        return work(options.stage, study, options.out, time.monotonic() + 60 * options.minutes)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def claim(out: Path, study: Study) -> None:
    """Make ``out`` the folder of this study.

    Raises:
        RecipeError: it holds one of other sizes.
    """
    out.mkdir(parents=True, exist_ok=True)
    marker, text = out / "study.json", json.dumps(dataclasses.asdict(study), indent=2) + "\n"
    if marker.exists() and marker.read_text(encoding="utf-8") != text:
        raise RecipeError(f"{out} holds a study of other sizes (see {marker}): take another --out, or remove it")
    write_text(marker, text)


def work(stage: str, study: Study, out: Path, deadline: float) -> int:
    """The tasks of a stage that are not done yet, one after the other."""
    tasks = tasks_of(stage, study)
    if stage != "base" and not measured_file(out, Task("base", "", 0)).exists():
        raise RecipeError(f"{out} has no base model yet: run --stage base first")
    longest, scope = 0.0, None
    for number, task in enumerate(tasks, start=1):
        if measured_file(out, task).exists():
            continue
        began = time.monotonic()
        if began + longest > deadline:
            return unfinished(f"{number - 1} of {len(tasks)} models done")
        print(f"== {task.name}: model {number} of {len(tasks)}, {deadline - began:.0f} s left", flush=True)
        if task.scope != scope:
            torch.compiler.reset()
            scope = task.scope
        try:
            perform(task, study, out, deadline)
        except OutOfTime as stop:
            return unfinished(str(stop))
        longest = max(longest, time.monotonic() - began)
        print(f"== {task.name}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


def unfinished(why: str) -> int:
    print(f"not finished, {why}: run the same command again")
    return 3


def perform(task: Task, study: Study, out: Path, deadline: float) -> None:
    """Train a model, measure it, and write both down; the JSON file comes last."""
    began = time.monotonic()
    run, resume, pairs = prepare(task, study, out, deadline)
    model, _ = train.train(run, resume)
    trained = time.monotonic() - began
    rows, samples = MEASURES[task.kind](task, study, run, model, out, pairs)
    del model
    run.accelerator.end_training()
    release(run.accelerator.device)
    target = measured_file(out, task)
    target.parent.mkdir(exist_ok=True)
    save_file(samples, target.with_suffix(".safetensors"))
    record = {
        "rows": rows,
        "curve": read_log(run.output / "metrics.jsonl"),
        "seconds": {"training": round(trained, 1), "all": round(time.monotonic() - began, 1)},
        "environment": environment(run.accelerator.device),
    }
    write_text(target, json.dumps(record) + "\n")


def prepare(task: Task, study: Study, out: Path, deadline: float) -> tuple[Run, Path | None, HeldOut]:
    """The trainer's run of a task, with the study's windows in place of whole clips."""
    folder = out / "runs" / task.name
    options = train.parse([str(RECIPE), "--output", str(folder)])
    options.overrides = overrides_of(task, study, weights_file(out))
    options.dense = not task.scope
    options.resume = folder if checkpoints(folder) else None
    run, resume = train.prepare(options)
    data, batch = run.recipe.data, run.truth[0][0]
    text = {name: tensor[0] for name, tensor in batch.items() if name not in ("latents", "rate")}
    pairs = HeldOut.of(study, lambda count: held_out(HELD_OUT, data, run.codec, text, count))
    seed = run.recipe.seed
    windows = Windows(data, run.codec, heights=study.heights, text=text, count=study.windows, seed=seed)
    judged = {name: tensor[:1] for name, tensor in pairs.sampled.items()}
    truth = [(judged, pairs.frames[0] / 255, float(judged["rate"]))]
    return dataclasses.replace(run, samples=windows, truth=truth, deadline=deadline), resume, pairs


def weights_file(out: Path) -> Path:
    return (out / "runs" / "base-0" / "transformer" / "diffusion_pytorch_model.safetensors").resolve()


def measured_file(out: Path, task: Task) -> Path:
    return out / "measured" / f"{task.name}.json"


def measure_base(
    task: Task, study: Study, run: Run, model: torch.nn.Module, out: Path, pairs: HeldOut
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The dense model and its packed versions, on the held-out noise of every seed; saves the weights first."""
    model.save_pretrained(weights_file(out).parent)
    samples = {"clip": pairs.frames}
    samples |= {f"base {seed}": sampled(run, model, pairs.sampled, seed) for seed in study.seeds}
    seen = stacked([run.samples[index] for index in range(4)])
    samples["seen"] = torch.stack([(255 * run.codec.decode(one)).round().byte() for one in seen["latents"]])
    samples["seen base"] = sampled(run, model, seen, 0)
    still = pairs.frames[:, :1].expand_as(pairs.frames)
    rows = [
        {"kind": "still", "scope": "", "seed": seed, **_against(still, samples[f"base {seed}"], pairs)}
        for seed in study.seeds
    ]
    rows += [measured(run, model, "base", "", seed, pairs, samples, samples) for seed in study.seeds]
    for scope in SCOPES:
        packed = pack(run, copy.deepcopy(model), scope)
        rows += [measured(run, packed, "ptq", scope, seed, pairs, samples, samples) for seed in study.seeds]
    return rows, samples


def measure_control(
    task: Task, study: Study, run: Run, model: torch.nn.Module, out: Path, pairs: HeldOut
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """A dense control and its packed versions."""
    dense, samples = dense_samples(out), {}
    rows = [measured(run, model, "control", "", task.seed, pairs, dense, samples)]
    for scope in SCOPES:
        packed = pack(run, copy.deepcopy(model), scope)
        rows.append(measured(run, packed, "ptq of control", scope, task.seed, pairs, dense, samples))
    return rows, samples


def measure_trained(
    task: Task, study: Study, run: Run, model: torch.nn.Module, out: Path, pairs: HeldOut
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """A model that was trained for NVFP4: its loss as it trained, then everything once it is packed."""
    samples: dict[str, torch.Tensor] = {}
    before = losses(run, model, pairs, task.seed)
    row = measured(run, deploy(run, model), task.kind, task.scope, task.seed, pairs, dense_samples(out), samples)
    return [row | {"before_deploy": before}], samples


MEASURES = {"base": measure_base, "control": measure_control, "qat": measure_trained, "qad": measure_trained}


def dense_samples(out: Path) -> dict[str, torch.Tensor]:
    """What the dense base sampled, by seed."""
    return load_file(measured_file(out, Task("base", "", 0)).with_suffix(".safetensors"))


def measured(
    run: Run,
    model: torch.nn.Module,
    kind: str,
    scope: str,
    seed: int,
    pairs: HeldOut,
    dense: dict[str, torch.Tensor],
    samples: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """A row of the study; the frames that it is about go into ``samples``."""
    frames = samples.get(f"{kind} {seed}") if kind == "base" else sampled(run, model, pairs.sampled, seed)
    if kind != "base":
        samples[" ".join(filter(None, (kind, scope, str(seed))))] = frames
    row = {"kind": kind, "scope": scope, "seed": seed, "losses": losses(run, model, pairs, seed)}
    return row | _against(frames, dense[f"base {seed}"], pairs)


def _against(frames: torch.Tensor, dense: torch.Tensor, pairs: HeldOut) -> dict[str, Any]:
    return {"against_dense": compare(frames, dense), "against_clip": compare(frames, pairs.frames)}


if __name__ == "__main__":
    sys.exit(main())
