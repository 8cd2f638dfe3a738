"""Train a diffusion transformer for NVFP4, validate it in NVFP4, deploy it, and check what was deployed.

    python recipes/train.py recipes/tiny_ltx2_overfit.yaml
    accelerate launch recipes/train.py my_recipe.yaml --set train.learning_rate=1e-5

The order: read the recipe, cache latents and text embeddings, patch, train (`train` below is the loop), then pack,
purge, save, reload, sample, and compare. ``--dense`` does the same without a single call of qatpatch: the baseline.

A run is a function of its recipe: weights, noise and data order come from the seed and the step's number, so a run that
was resumed ends with the same bits as one that was not.

What is left in the output folder: ``index.html`` (everything at one glance), ``videos/``, ``contact_sheet.png``,
``curves.png``, ``metrics.jsonl``, ``tensorboard/``, ``reports/`` (patch, swap, deploy), ``scores.json``,
``checkpoints/``, and ``transformer-nvfp4/``, the packed model.

Exit status: 0; 1 when the recipe's gate is missed; 2 for a recipe or model that cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Packages that torch and diffusers look for on their own report at import what they cannot use here.
for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)

try:
    import tensorboard  # noqa: F401  (accelerate's tracker imports it late)
    import torch
    import yaml
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration
    from clips import read_clip, write_video
    from diffusers.training_utils import EMAModel
    from figures import contact_sheet, curves, page
    from flow import Batch, Settings, sample, training_loss
    from latents import Codec, LatentDataset, StepBatches, all_clips, cache_clips, loader, seeded
    from networks import build_codec, build_transformer, check_fit, load_text_encoder, release, text_fingerprint
    from recipe import Recipe, RecipeError, load_recipe
    from scores import MetricLog, Scores, mean_scores, read_log, score, table
    from tqdm import tqdm

    import qatpatch
except ModuleNotFoundError as error:
    raise SystemExit(
        f"recipes/train.py needs {error.name}, which is not installed: pip install 'qatpatch[train]' "
        "(in a checkout: pip install -e '.[train]')"
    ) from None


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


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    started = time.monotonic()
    try:
        run = prepare(options)
        model, before = train(run, options.resume)
        scores, samples = finish(run, model, before)
        failures = conclude(run, scores, samples, judged=not options.overridden, record=options.record, started=started)
    except (RecipeError, qatpatch.PlanError, qatpatch.KernelUnavailable, qatpatch.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def prepare(options: argparse.Namespace) -> Run:
    """Everything that comes before the model: recipe, folder, accelerator, latent cache, ground truth."""
    recipe = load_recipe(options.recipe, options.overrides)
    output = _output_folder(recipe, options)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    accelerator = Accelerator(
        cpu=recipe.train.device == "cpu",
        mixed_precision=recipe.train.mixed_precision,
        gradient_accumulation_steps=recipe.train.accumulate,
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=str(output), logging_dir=str(output)),
    )
    if accelerator.is_main_process:
        _claim(output, recipe, options)
    device = accelerator.device
    codec = build_codec(recipe, device)
    with accelerator.main_process_first():
        cached = cache_clips(
            recipe.data,
            recipe.data.cache or output / "cache",
            codec,
            text_fingerprint(recipe),
            lambda: load_text_encoder(recipe, device),
            lambda clips: tqdm(clips, desc="encoding", disable=None, leave=False),
        )
    release(device)  # of the text encoder
    truth = []
    data, dataset = recipe.data, LatentDataset(cached)
    for index, clip in enumerate(all_clips(data)[: recipe.validation.clips]):
        frames, rate = read_clip(clip, frames=data.frames, height=data.height, width=data.width)
        batch = {name: tensor[None] for name, tensor in dataset[index].items()}
        truth.append((batch, frames.float() / 255, rate))
    run = Run(
        recipe=recipe,
        dense=options.dense,
        output=output,
        accelerator=accelerator,
        settings=Settings.of(recipe),
        codec=codec,
        cached=cached,
        truth=truth,
    )
    first = truth[0][0]["latents"][0]
    run.say("recipe", f"{recipe.name}, {recipe.train.steps} steps, seed {recipe.seed}{', dense' if run.dense else ''}")
    run.say("data", f"{len(cached)} clip(s) of {data.frames} x {data.height} x {data.width}, {first[0].numel()} tokens of {len(first)}")
    return run


def train(run: Run, resume: Path | None) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The loop.

    Returns:
        The trained model with its averaged weights, and what it generated before the first step.
    """
    recipe, accelerator, options = run.recipe, run.accelerator, run.recipe.train
    model = build_transformer(recipe)
    check_fit(recipe, model, LatentDataset(run.cached)[0])
    run.say("model", f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {accelerator.device}")
    if not run.dense:
        report = qatpatch.apply(model, **recipe.quantization.arguments())
        _write_report(run, "patch", report)
        run.say(
            "patch",
            f"{len(report.linears)} linears ({100 * report.parameters:.0f} % of the parameters) and "
            f"{len(report.attentions)} attentions train as NVFP4, scheme {report.scheme}",
        )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ema = EMAModel(parameters, decay=options.ema_decay, foreach=True)
    progress = Progress()
    accelerator.register_for_checkpointing(ema, progress)
    before = validate(run, model)[1]
    if resume:
        accelerator.load_state(str(resume))
        ema.to(accelerator.device)
        run.say("resume", f"after step {progress.step}, from {resume}")
    if accelerator.is_main_process:
        log = MetricLog(run.output / "metrics.jsonl", progress.step)
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": progress.step + 1}})

    batches = iter(
        loader(
            run.cached,
            StepBatches(
                clips=len(run.cached),
                batch_size=options.batch_size,
                seed=recipe.seed,
                first=progress.step * options.accumulate,
                total=options.steps * options.accumulate,
                rank=accelerator.process_index,
                world=accelerator.num_processes,
            ),
            recipe.data.workers,
        )
    )
    bar = tqdm(
        total=options.steps, initial=progress.step, desc="training", unit="step", disable=None if accelerator.is_main_process else True
    )
    began = time.monotonic()
    for step in range(progress.step + 1, options.steps + 1):
        rate = learning_rate(recipe, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses = []
        for micro in range(options.accumulate):
            with accelerator.accumulate(model):
                noise = seeded(recipe.seed, "noise", step, micro, accelerator.process_index)
                with accelerator.autocast():
                    loss = training_loss(model, run.settings, next(batches), noise, accelerator.device)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(parameters, options.grad_clip)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        ema.step(parameters)
        progress.step = step

        row = {"loss": float(accelerator.gather(torch.stack(losses)).mean()), "grad_norm": float(norm), "learning_rate": rate}
        if not math.isfinite(row["loss"]):
            raise RecipeError(f"the loss is {row['loss']} at step {step}; lower train.learning_rate ({options.learning_rate})")
        last = step == options.steps
        if last or (recipe.validation.every and step % recipe.validation.every == 0):
            with averaged(ema, parameters, options.ema_decay):
                scores, _ = validate(run, model)
            row |= scores.as_dict()
            pace = (time.monotonic() - began) / (step - bar.initial)
            run.say(
                f"step {step}",
                f"loss {row['loss']:.4f}  MS-SSIM {scores.ms_ssim:.4f}  PSNR {scores.psnr:.1f} dB   "
                f"{pace:.2f} s/step, {pace * (options.steps - step):.0f} s left",
            )
        accelerator.log(row, step=step)
        if accelerator.is_main_process:
            log.write(step, **row)
        if last or (recipe.checkpoint.every and step % recipe.checkpoint.every == 0):
            save_checkpoint(run, step)
        bar.set_postfix(loss=f"{row['loss']:.4f}", refresh=False)
        bar.update()
    bar.close()
    accelerator.end_training()
    if options.ema_decay:
        ema.copy_to(parameters)
    # Packing frees the dense weights only if nobody else holds them: not the optimizer, not gradients, not the EMA.
    model.zero_grad(set_to_none=True)
    accelerator.free_memory()
    return accelerator.unwrap_model(model, keep_fp32_wrapper=False), before
