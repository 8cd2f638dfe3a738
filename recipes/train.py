"""Train a diffusion transformer for NVFP4, validate it in NVFP4, deploy it, and check what was deployed.

    python recipes/train.py recipes/tiny_ltx2_overfit.yaml
    accelerate launch recipes/train.py my_recipe.yaml --set train.learning_rate=1e-5

The order: read the recipe, cache latents and text embeddings, patch, train (`train` below is the loop), then pack,
purge, save, reload, sample, and compare. ``--dense`` does the same without a single call of qatpatch: the baseline.

A run is a function of its recipe: weights, noise and data order come from the seed and the step's number, so a run that
was resumed ends with the same bits as one that was not.

What is left in the output folder: ``index.html`` (everything at one glance), ``videos/``, ``contact_sheet.png``,
``curves.png``, ``metrics.jsonl``, ``tensorboard/``, ``reports/`` (patch, swap, deploy), ``scores.json``,
``recipe.json`` and ``environment.json`` (what ran, and on what), ``checkpoints/``, and ``transformer-nvfp4/``, the
packed model.

Exit status: 0; 1 when the recipe's gate is missed; 2 for a recipe or model that cannot be used; 3 when ``--minutes``
were over before the last step, for ``--resume`` to continue.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import math
import shutil
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What some packages report while they are imported says nothing about this run.
for _name in ("torchao", "torch.utils._pytree", "diffusers", "transformers"):
    logging.getLogger(_name).setLevel(logging.ERROR)

try:
    import tensorboard  # noqa: F401  (accelerate's tracker imports it, later)
    import torch
    import torch.distributed as dist
    import yaml
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration
    from adapters import Base, add_adapters, merge_adapters
    from clips import read_clip, write_video
    from context import enable_context_parallel
    from diffusers.training_utils import EMAModel
    from evaluation import Sample, averaged, compare, generate, inference, judge, validate
    from figures import contact_sheet, curves, page
    from flow import Noise, Settings, compute_dtype, training_loss
    from latents import LatentDataset, StepBatches, all_clips, cache_clips, loader, one_ahead, seeded
    from networks import (
        build_codec,
        build_transformer,
        check_fit,
        draw_shard,
        load_text_encoder,
        release,
        text_fingerprint,
        transformer_class,
    )
    from optimizers import build_optimizer, clip_gradients, set_rate
    from recipe import Recipe, RecipeError, load_recipe
    from runs import (
        OutOfTime,
        Run,
        claim_folder,
        environment,
        find_checkpoint,
        load_checkpoint,
        save_checkpoint,
        write_report,
        write_text,
    )
    from scores import MetricLog, Scores, read_log, table
    from sharding import materialise, shard, state_on_the_cpu, whole_weights
    from torch.distributed.device_mesh import init_device_mesh
    from tqdm import tqdm

    import qatpatch
    from qatpatch.linear import QATLinear
except ModuleNotFoundError as error:
    raise SystemExit(
        f"recipes/train.py needs {error.name}, which is not installed: pip install 'qatpatch[train]' "
        "(in a checkout: pip install -e '.[train]')"
    ) from None


def main(argv: list[str] | None = None) -> int:
    """Run a recipe from the command line; the exit status is in the module's docstring."""
    options = parse(argv)
    began = time.monotonic()
    try:
        run, resume = prepare(options)
        model, before = train(run, resume)
        rows, samples = finish(run, model)
        failures = conclude(run, rows, samples, before, options, time.monotonic() - began)
        run.accelerator.wait_for_everyone()  # no process takes its side of the group away from one that is not done
        run.accelerator.end_training()
    except OutOfTime as stop:
        print(stop)
        return 3
    except (RecipeError, qatpatch.PlanError, qatpatch.KernelUnavailable, qatpatch.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; ``overrides`` holds what ``--set`` and ``--steps`` change in the recipe."""
    parser = argparse.ArgumentParser(
        prog="train.py", description="Train, validate and deploy a diffusion transformer in NVFP4, as a recipe says."
    )
    parser.add_argument("recipe", type=Path, help="the YAML recipe")
    parser.add_argument("--dense", action="store_true", help="train the same without quantization, as the baseline")
    parser.add_argument("--output", type=Path, metavar="DIR", help="the run's folder, instead of the recipe's")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="continue a run's last checkpoint, or the one named")
    parser.add_argument("--overwrite", action="store_true", help="replace an unfinished run in the output folder")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop training after M minutes, with a checkpoint")
    parser.add_argument("--steps", type=int, metavar="N", help="short for --set train.steps=N")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key, as in train.learning_rate=1e-3"
    )
    parser.add_argument("--record", action="store_true", help="with --dense: write the figure to gate.dense_figure")
    options = parser.parse_args(argv)
    if options.record and not options.dense:
        parser.error("--record writes the figure of a dense run: add --dense")
    options.overrides = {} if options.steps is None else {"train.steps": options.steps}
    for assignment in options.set:
        key, sign, value = assignment.partition("=")
        if not sign:
            parser.error(f"--set {assignment}: write KEY=VALUE, as in train.learning_rate=1e-3")
        try:
            options.overrides[key] = yaml.safe_load(value)
        except (yaml.YAMLError, RecursionError) as error:
            parser.error(f"--set {assignment}: the value does not parse: {error}")
    return options


def prepare(options: argparse.Namespace) -> tuple[Run, Path | None]:
    """Everything that comes before the model: recipe, folder, accelerator, latent cache, ground truth.

    Returns:
        The run, and the checkpoint to resume from.
    """
    recipe = load_recipe(options.recipe, options.overrides)
    processes, context = PartialState(cpu=recipe.train.device == "cpu").num_processes, recipe.parallel.context
    if processes % context:
        raise RecipeError(
            f"parallel.context {context} does not divide the {processes} processes of this run: start "
            f"{context} or a multiple (torchrun --nproc-per-node {context}), or change it"
        )
    resume = find_checkpoint(options.resume, recipe, options.dense, processes // context) if options.resume else None
    default = recipe.output.with_name(recipe.output.name + "-dense") if options.dense else recipe.output
    output = options.output or (resume.parent.parent if resume else default)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    accelerator = Accelerator(
        cpu=recipe.train.device == "cpu",
        # Sharded weights are gathered in the compute dtype, so there autocast has nothing to do.
        mixed_precision=recipe.train.mixed_precision if recipe.parallel.sharding == "none" else "no",
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=str(output), logging_dir=str(output)),
        # The loss reads the video alone, so the last audio layers get no gradient.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    if accelerator.is_main_process:
        claim_folder(output, recipe, resume=resume, overwrite=options.overwrite)
        write_text(output / "environment.json", json.dumps(environment(accelerator.device), indent=2) + "\n")
    device, data = accelerator.device, recipe.data
    codec = build_codec(recipe, device)
    with accelerator.main_process_first():
        cached = cache_clips(
            data,
            data.cache or output / "cache",
            codec,
            text_fingerprint(recipe),
            lambda: load_text_encoder(recipe, device),
            lambda clips: tqdm(clips, desc="encoding", disable=None, leave=False),
        )
    release(device)  # of the text encoder
    truth = []
    for clip, sample_file in zip(all_clips(data)[: recipe.validation.clips], LatentDataset(cached), strict=False):
        frames, rate = read_clip(clip, frames=data.frames, height=data.height, width=data.width)
        truth.append(({name: tensor[None] for name, tensor in sample_file.items()}, frames.float() / 255, rate))
    run = Run(
        recipe=recipe,
        dense=options.dense,
        output=output,
        accelerator=accelerator,
        settings=Settings.of(recipe),
        codec=codec,
        samples=LatentDataset(cached),
        deadline=None if options.minutes is None else time.monotonic() + 60 * options.minutes,
        truth=truth,
        replica=accelerator.process_index // context,
        replicas=processes // context,
    )
    channels, *grid = truth[0][0]["latents"].shape[1:]
    size = f"{data.frames} frames of {data.height} x {data.width}"
    run.say("recipe", f"{recipe.name}: {recipe.train.steps} steps, seed {recipe.seed}{', dense' if run.dense else ''}")
    run.say("data", f"{len(cached)} x {size}, {math.prod(grid)} tokens of {channels} channels each")
    return run, resume


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loop works on; ``before`` is what the model generated before its first step.

    Attributes:
        model: as it is called; `inner` is what it wraps.
        teacher: whose predictions are the target, where there is one.
        first: the step to begin with.
    """

    model: torch.nn.Module
    inner: torch.nn.Module
    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    ema: EMAModel | None
    teacher: torch.nn.Module | Base | None
    first: int
    before: list[Sample]


def start(run: Run, resume: Path | None) -> Training:
    """Build the model, patch it, spread it over the processes, and bring it to where the checkpoint was."""
    recipe, options, accelerator = run.recipe, run.recipe.train, run.accelerator
    teacher = None
    if options.target == "teacher" and recipe.lora is None:
        teacher = spread(run, build_transformer(recipe).eval().requires_grad_(False), teaches=True)
    inner = build_transformer(recipe)
    check_fit(recipe, inner, run.truth[0][0])
    size = sum(parameter.numel() for parameter in inner.parameters())
    run.say("model", f"{type(inner).__name__}, {size / 1e6:.1f} M parameters, on {accelerator.device}")
    if not run.dense:
        report = qatpatch.apply(inner, **recipe.quantization.arguments())
        write_report(run, "patch", report)
        share = f"{len(report.linears)} linears ({100 * report.parameters:.0f} % of the parameters)"
        run.say("patch", f"{share} and {len(report.attentions)} attentions, scheme {report.scheme}")

    if recipe.lora is not None:
        add_adapters(inner, recipe.lora, recipe.seed)
        count = sum(parameter.numel() for parameter in inner.parameters() if parameter.requires_grad)
        if options.target == "teacher":
            teacher = Base(inner)
        run.say("lora", f"{count / 1e6:.2f} M parameters are trained, of rank {recipe.lora.rank}")
    model = spread(run, inner)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(options, parameters)
    # All at once is faster, and holds every weight once more.
    ema = EMAModel(parameters, decay=options.ema_decay, foreach=not run.sharded) if options.ema_decay else None
    before, _ = validate(run, model)
    if options.compile:
        # The first step would tell them, and each graph would be compiled twice.
        record_dtype(run, inner)
        for whole in {inner, getattr(teacher, "module", teacher)} - {None}:
            whole.compile_repeated_blocks()
    step = 0
    if resume:
        step = load_checkpoint(resume, inner, optimizer, ema)
        run.say("resume", f"after step {step}, from {resume}")
    return Training(
        model=model,
        inner=inner,
        optimizer=optimizer,
        parameters=parameters,
        ema=ema,
        teacher=teacher,
        first=step + 1,
        before=before,
    )


def spread(run: Run, model: torch.nn.Module, *, teaches: bool = False) -> torch.nn.Module:
    """The model as the processes share it: on their devices, sharded or whole."""
    recipe, parallel, accelerator = run.recipe, run.recipe.parallel, run.accelerator
    if not run.sharded:
        return accelerator.prepare_model(model, evaluation_mode=teaches)
    if not dist.is_initialized():
        backend = "gloo" if accelerator.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if parallel.context > 1:
        shape, names = (run.replicas, 1, parallel.context), ("replica", "ring", "ulysses")
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
        enable_context_parallel(model, parallel.context, mesh)
    shard(model, compute=compute_dtype(recipe))
    if recipe.model.kind == "tiny" and recipe.model.init == "shards":
        generator = torch.Generator(accelerator.device).manual_seed(recipe.seed + 1000 * accelerator.process_index)
        materialise(model, accelerator.device, functools.partial(draw_shard, generator))
    return model


def train(run: Run, resume: Path | None) -> tuple[torch.nn.Module, list[Sample]]:
    """The loop.

    Returns:
        The trained model with its averaged weights, and what it generated before the first step.
    """
    recipe, options, accelerator = run.recipe, run.recipe.train, run.accelerator
    training = start(run, resume)
    model, optimizer, parameters = training.model, training.optimizer, training.parameters
    ema, first = training.ema, training.first
    log = MetricLog(run.output / "metrics.jsonl", after=first - 1) if accelerator.is_main_process else None
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": first}})
    order = StepBatches(
        clips=len(run.samples),
        batch_size=options.batch_size,
        seed=recipe.seed,
        first=(first - 1) * options.accumulate,
        total=options.steps * options.accumulate,
        rank=run.replica,
        world=run.replicas,
    )
    batches = iter(loader(run.samples, order, recipe.data.workers))
    micros = ((step, micro) for step in range(first, options.steps + 1) for micro in range(options.accumulate))
    # A large batch's noise takes a CPU as long as a GPU needs for a small model's step.
    noises = one_ahead(functools.partial(draw_noise, run), micros)
    # On a terminal a bar; in a log file a line now and then.
    terminal = sys.stderr.isatty()
    bar = tqdm(
        total=options.steps,
        initial=first - 1,
        desc="training",
        unit="step",
        disable=not accelerator.is_main_process,
        file=sys.stderr if terminal else sys.stdout,
        mininterval=0.1 if terminal else 20,
    )
    began = time.monotonic()

    for step in range(first, options.steps + 1):
        rate = learning_rate(recipe, step)
        set_rate(optimizer, rate)
        losses = []
        for micro in range(options.accumulate):
            last_micro = micro == options.accumulate - 1
            with stage_of(run, model, step), synchronized(accelerator, model, last_micro):
                with accelerator.autocast():
                    loss = training_loss(
                        model, run.settings, next(batches), next(noises), accelerator.device, training.teacher
                    )
                # Gradients are averaged over all processes, and those of one context add up to a gradient.
                accelerator.backward(loss * (recipe.parallel.context / options.accumulate))
            losses.append(loss.detach())
        norm = clip_gradients(parameters, options.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.step(parameters)

        row = {"loss": float(accelerator.gather(torch.stack(losses)).mean()), "grad_norm": norm, "rate": rate}
        if not math.isfinite(row["loss"]):
            raise RecipeError(f"the loss is {row['loss']} at step {step}: lower train.learning_rate, now {rate:.2g}")
        last = step == options.steps
        if last or (recipe.validation.every and step % recipe.validation.every == 0):
            aside = state_on_the_cpu(optimizer) if recipe.validation.offload_optimizer else contextlib.nullcontext()
            with aside, averaged(ema, parameters):
                _, scores = validate(run, model)
            row |= scores.as_dict()
            pace = (time.monotonic() - began) / (step - first + 1)
            left = f"{pace:.2f} s/step, {pace * (options.steps - step):.0f} s left"
            run.say(f"step {step}", f"loss {row['loss']:.4f}  MS-SSIM {scores.ms_ssim:.4f}  {left}")
        accelerator.log(row, step=step)
        if log is not None:
            log.write(step, **row)
        late = not last and out_of_time(run)
        if late or (recipe.checkpoint.every and (last or step % recipe.checkpoint.every == 0)):
            save_checkpoint(run, step, training.inner, optimizer, ema)
        bar.set_postfix(loss=f"{row['loss']:.4f}", refresh=False)
        bar.update()
        if late:
            bar.close()
            raise OutOfTime(f"stopped after step {step} of {options.steps}; --resume {run.output} continues")

    bar.close()
    if ema is not None:
        ema.copy_to(parameters)
    # Packing frees a dense weight only if nobody else holds it: not the optimizer, not a gradient, not accelerate.
    model.zero_grad(set_to_none=True)
    accelerator.free_memory()
    return accelerator.unwrap_model(model, keep_fp32_wrapper=False), training.before


def draw_noise(run: Run, step: int, micro: int) -> Noise:
    """The noise of a micro-batch: a function of seed, step and place alone."""
    channels, *grid = run.truth[0][0]["latents"].shape[1:]
    generator = seeded(run.recipe.seed, "noise", step, micro * run.replicas + run.replica, 0)
    return Noise.draw(run.recipe.flow, (run.recipe.train.batch_size, math.prod(grid), channels), generator)


def out_of_time(run: Run) -> bool:
    """Whether any process is past its deadline."""
    if run.deadline is None:
        return False
    if time.monotonic() > run.deadline:
        run.accelerator.set_trigger()
    return run.accelerator.check_trigger()


def stage_of(run: Run, model: torch.nn.Module, step: int) -> AbstractContextManager[Any]:
    """Dense while ``quantization.start_step`` has not come, for forward and backward."""
    if run.dense or step >= run.recipe.quantization.start_step:
        return contextlib.nullcontext()
    return qatpatch.dense(run.accelerator.unwrap_model(model))


def synchronized(accelerator: Accelerator, model: torch.nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Whole models exchange gradients after the last micro-batch alone; shards are reduced each time."""
    return contextlib.nullcontext() if last else accelerator.no_sync(model)


def finish(run: Run, model: torch.nn.Module) -> tuple[dict[str, Scores], list[Sample]]:
    """Deploy, save, reload, and sample at every stage.

    Returns:
        Scores by stage, the last being the model that is left on disk, and what that one generated.
    """
    model.eval()
    main = run.accelerator.is_main_process
    # What doing nothing would score: a clip that hardly moves makes any sampler look good.
    rows = {"first frame held still": compare(run, [held_still(batch, frames) for batch, frames, _ in run.truth])}
    folder = run.output / ("transformer" if run.dense else "transformer-nvfp4")
    if run.dense:
        samples, rows["trained, dense"] = validate(run, model)
        model = unsharded(run, model, torch.float32)
        if run.recipe.lora is not None and model is not None:
            merge_adapters(model)
        if main:
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            model.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        return rows, samples

    with qatpatch.dense(model):
        _, rows["trained, not quantized"] = generate(run, model)
    with inference(run, model) as receipt:
        trained, rows["trained, quantized"] = generate(run, model)
    if receipt is not None:
        write_report(run, "infer_attention", receipt)
    model = unsharded(run, model, compute_dtype(run.recipe))
    if run.sharded and not main:  # the main process has the whole model, the others are done
        run.accelerator.wait_for_everyone()
        return rows, trained
    if run.recipe.lora is not None:
        merge_adapters(model)
        with inference(run, model):
            trained, rows["adapters merged, quantized"] = generate(run, model)
    record_dtype(run, model)
    report = qatpatch.deploy(model, attention_kernel=run.recipe.quantization.infer_kernel)
    write_report(run, "deploy", report)
    run.say(
        "deploy", f"{len(report.packed)} linears packed, {report.bytes_before:,} bytes became {report.bytes_after:,}"
    )
    deployed, rows["deployed"] = generate(run, model)
    if main:
        qatpatch.save(model, folder)
    if not run.sharded:
        run.accelerator.wait_for_everyone()
    device = next(model.parameters()).device
    del model
    release(device)
    model = qatpatch.load(folder, device=device)
    reloaded, rows["reloaded from disk"] = generate(run, model)
    for name, samples in {"deployed": deployed, "reloaded": reloaded}.items():
        largest = max(float((a[1] - b[1]).abs().max()) for a, b in zip(samples, trained, strict=True))
        run.say("check", f"latents of the {name} model differ from those before deploy by at most {largest:.3g}")
    if run.sharded:
        run.accelerator.wait_for_everyone()
    return rows, reloaded


def record_dtype(run: Run, model: torch.nn.Module) -> None:
    """Tell the patched layers the dtype that training quantized in, for deploy to pack in.

    A model that was built anew from shards, or resumed after its last step, has not trained in this process.
    """
    for layer in model.modules():
        if isinstance(layer, QATLinear):
            mixed = run.recipe.train.mixed_precision == "bf16"
            layer.quantization.trained_dtype = torch.bfloat16 if mixed else layer.weight.dtype


def unsharded(run: Run, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module | None:
    """The whole model in ``dtype``, with its patch: a sharded one is built anew in the main process, None elsewhere."""
    if not run.sharded:
        return model
    weights = whole_weights(model)
    if not run.accelerator.is_main_process:
        return None
    # On meta, since every value comes from the shards.
    with torch.device("meta"):
        whole = transformer_class(run.recipe).from_config(model.config)
        if run.recipe.lora is not None:
            add_adapters(whole, run.recipe.lora, run.recipe.seed)
    whole.load_state_dict({n: weights.pop(n).to(dtype, copy=True) for n in list(weights)}, assign=True)
    if not run.dense:
        qatpatch.apply(whole, **run.recipe.quantization.arguments())
    return whole.to(run.accelerator.device).eval()


def held_still(batch: dict[str, torch.Tensor], frames: torch.Tensor) -> Sample:
    """The given first frame, repeated."""
    latents = batch["latents"][0]
    return frames[:1].expand_as(frames), latents[:, :1].expand_as(latents)


def conclude(
    run: Run,
    rows: dict[str, Scores],
    samples: list[Sample],
    before: list[Sample],
    options: argparse.Namespace,
    seconds: float,
) -> list[str]:
    """Judge the gate; write figures, videos and scores; print the table.

    Returns:
        What the run failed; empty when it passed.
    """
    if not run.accelerator.is_main_process:
        return []
    recipe, final, output = run.recipe, list(rows.values())[-1], run.output
    figure, failures = None, []
    if recipe.gate is not None and not options.overrides:
        figure, failures = judge(run, recipe.gate, final)
    record = {"recipe": recipe.name, "dense": run.dense, "steps": recipe.train.steps, "seed": recipe.seed}
    record |= {"ms_ssim": round(final.ms_ssim, 4), "torch": torch.__version__.partition("+")[0]}
    if options.record and recipe.gate is not None and recipe.gate.dense_figure is not None:
        recipe.gate.dense_figure.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        run.say("record", f"{recipe.gate.dense_figure}")
    record |= {"seconds": round(seconds, 1), "failures": failures}
    record |= {"scores": {name: scores.as_dict() for name, scores in rows.items()}}

    truth, rate = run.truth[0][1:]
    clips = {"ground truth": truth, "before training": before[0][0], "after": samples[0][0]}
    files = {name: f"videos/{name.replace(' ', '_')}.mp4" for name in clips}
    (output / "videos").mkdir(exist_ok=True)
    for name, frames in clips.items():
        # Players blur small frames: tiny ones are written with every pixel magnified.
        write_video(output / files[name], frames, rate, magnify=max(1, 384 // truth.shape[-1]))
    contact_sheet(output / "contact_sheet.png", clips)
    curves(output / "curves.png", read_log(output / "metrics.jsonl"), figure)
    text = table(rows)
    reports = {path.stem: path.read_text(encoding="utf-8") for path in sorted((output / "reports").glob("*.html"))}
    records = {name: (output / f"{name}.json").read_text(encoding="utf-8") for name in ("recipe", "environment")}
    page(output / "index.html", recipe.name, text, reports, files, records)
    # Last: a run with this file has finished.
    write_text(output / "scores.json", json.dumps(record, indent=2) + "\n")
    run.say("", f"\n{text}\n")
    if recipe.gate is not None and options.overrides:
        run.say("gate", "not judged: the command line changes the recipe")
    run.say("output", f"{output} after {seconds:.0f} s; open {output / 'index.html'}")
    return failures


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of step 1, 2, ...: linear warm-up, then constant or a half cosine down to ``final_rate``."""
    options = recipe.train
    if step <= options.warmup:
        return options.learning_rate * step / options.warmup
    if options.schedule == "constant":
        return options.learning_rate
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.learning_rate * (options.final_rate + (1 - options.final_rate) * (1 + math.cos(math.pi * done)) / 2)


if __name__ == "__main__":
    sys.exit(main())
