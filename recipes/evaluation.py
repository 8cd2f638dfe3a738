"""Evaluation: sample the validation clips, score the samples, judge the gate."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from flow import sample
from recipe import Gate
from runs import Run
from scores import Scores, mean_scores, score

import qatpatch

# Frames (F, 3, H, W) in [0, 1] and the latents (C, F', H', W') that they were decoded from.
Sample = tuple[torch.Tensor, torch.Tensor]


def inference(run: Run, model: torch.nn.Module) -> AbstractContextManager[Any]:
    """`qatpatch.infer_attention`, for a run that has QAT attentions; yields its receipt, or None."""
    if run.dense or not run.recipe.quantization.attention:
        return contextlib.nullcontext()
    return qatpatch.infer_attention(run.accelerator.unwrap_model(model), run.recipe.quantization.infer_kernel)


def validate(run: Run, model: torch.nn.Module) -> tuple[list[Sample], Scores]:
    """Sample with what will be deployed: quantized numbers and the inference attention kernel."""
    training = model.training
    model.eval()
    try:
        with inference(run, model):
            return generate(run, model)
    finally:
        model.train(training)


def generate(run: Run, model: torch.nn.Module) -> tuple[list[Sample], Scores]:
    """Sample every validation clip from its first frame, as the model is now, and score the samples."""
    samples, options = [], run.recipe.validation
    for index, (batch, _, _) in enumerate(run.truth):
        with run.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
            latents = sample(
                model,
                run.settings,
                batch,
                steps=options.sampler_steps,
                seed=options.seed + index,
                device=run.accelerator.device,
            )[0]
        samples.append((run.codec.decode(latents), latents))
    return samples, compare(run, samples)


def compare(run: Run, samples: list[Sample]) -> Scores:
    """Mean scores of samples against the validation clips."""
    pairs = zip(samples, run.truth, strict=True)
    return mean_scores([score(s[0], frames, s[1], batch["latents"][0]) for s, (batch, frames, _) in pairs])


@contextlib.contextmanager
def averaged(ema: EMAModel | None, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """The averaged weights inside the block, the trained ones again after it."""
    if ema is None:
        yield
        return
    exchange(ema.shadow_params, parameters)
    try:
        yield
    finally:
        exchange(ema.shadow_params, parameters)


@torch.no_grad()
def exchange(averages: list[torch.Tensor], parameters: list[torch.nn.Parameter]) -> None:
    """Swap two lists of tensors in place, one tensor at a time: nothing is held twice."""
    for average, parameter in zip(averages, parameters, strict=True):
        kept = parameter.clone()
        parameter.copy_(average)
        average.copy_(kept)


def judge(run: Run, gate: Gate, final: Scores) -> tuple[float | None, list[str]]:
    """The recorded figure of the dense run (None without one), and what the gate finds missing."""
    failures = []
    if final.ms_ssim < gate.ms_ssim:
        failures.append(f"MS-SSIM {final.ms_ssim:.4f} is below the recipe's gate.ms_ssim {gate.ms_ssim}")
    if run.dense or gate.dense_figure is None:
        return None, failures
    renew = "measure it again with --dense --record"
    try:
        recorded = json.loads(gate.dense_figure.read_text(encoding="utf-8"))
        figure, about = recorded["ms_ssim"], (recorded["steps"], recorded["seed"])
    except (OSError, ValueError, KeyError) as error:
        return None, [*failures, f"gate.dense_figure {gate.dense_figure} cannot be read ({error}); {renew}"]
    if about != (run.recipe.train.steps, run.recipe.seed):
        return None, [
            *failures,
            f"gate.dense_figure is of {about[0]} steps and seed {about[1]}, this run is not; {renew}",
        ]
    verdict = f"MS-SSIM {final.ms_ssim:.4f}, dense run {figure:.4f}, at most {gate.dense_margin} may be lost"
    if final.ms_ssim < figure - gate.dense_margin:
        failures.append(verdict)
    run.say("gate", verdict)
    return figure, failures
