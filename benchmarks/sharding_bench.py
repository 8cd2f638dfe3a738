"""The recipes' engine under FSDP2 with one rank, against whole weights: what sharding costs with nothing to share.

    PYTHONPATH=. python benchmarks/sharding_bench.py            # an LTX-2 of 1.0 B parameters, for one GPU of 80 GB
    PYTHONPATH=. python benchmarks/sharding_bench.py --tiny     # the same on a CPU; its times say nothing

Losses are compared in float32, bit for bit, of a model of one block: with more of them FSDP2 adds up the gradients of
what several blocks read (the text) in another order. Times are of bfloat16, eager: whole weights run under autocast,
shards are gathered in bfloat16. Prints a markdown table last; the exit status is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

import train  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from scores import read_log  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

RECIPES = Path(train.__file__).parent
TIME_BAR = 1.05
# Steps that compile kernels, and settle the allocator.
WARM_UP = 5

COMMON = {
    "validation.every": 0,
    "validation.sampler_steps": 1,
    "checkpoint.every": 0,
    "train.compile": False,
    "train.warmup": 1,
}
ONE_BLOCK = {"model.config.num_layers": 1}
LARGE = {
    "model.config.num_attention_heads": 32,
    "model.config.cross_attention_dim": 4096,
    "model.config.audio_attention_head_dim": 64,
    "model.config.audio_cross_attention_dim": 128,
}


def run(folder: Path, recipe: Path, overrides: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of every step, and seconds of those after the warm-up."""
    options = train.parse([str(recipe), "--output", str(folder)])
    options.overrides = {**COMMON, **overrides}
    prepared, _ = train.prepare(options)
    train.train(prepared, None)
    prepared.accelerator.end_training()
    # Each run has a mixed precision of its own, which accelerate keeps one of in a process.
    AcceleratorState._reset_state(reset_partial_state=not dist.is_initialized())
    GradientState._reset_state()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    (event_file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(event_file.parent)).Reload()
    walls = [event.wall_time for event in events.Scalars("loss")]
    seconds = [after - before for before, after in zip(walls[:-1], walls[1:], strict=True)]
    return [row["loss"] for row in read_log(folder / "metrics.jsonl")], seconds[WARM_UP - 1 :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the tiny recipe, on a CPU")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: the first {WARM_UP} are not measured")
    recipe = RECIPES / ("tiny_ltx2_overfit.yaml" if options.tiny else "study/study.yaml")
    large = {} if options.tiny else LARGE
    losses, times = {}, {}
    with tempfile.TemporaryDirectory(prefix="sharding_bench_") as folder:
        for sharding in ("none", "fsdp2"):
            steps = {"parallel.sharding": sharding, "train.steps": WARM_UP + 5, "train.mixed_precision": "no"}
            losses[sharding], _ = run(Path(folder, f"{sharding}-fp32"), recipe, steps | ONE_BLOCK)
        for sharding in ("none", "fsdp2"):
            steps = {"parallel.sharding": sharding, "train.steps": options.steps, "train.mixed_precision": "bf16"}
            _, seconds = run(Path(folder, f"{sharding}-bf16"), recipe, steps | large)
            times[sharding] = statistics.median(seconds)
    differing = [step for step, pair in enumerate(zip(*losses.values(), strict=True), start=1) if len(set(pair)) > 1]
    ratio = times["fsdp2"] / times["none"]
    print("\n| FSDP2 with one rank, against whole weights | found | bar | |\n| --- | --- | --- | --- |")
    found = f"step {differing[0]} is the first that differs" if differing else f"all {len(losses['none'])} equal"
    print(f"| losses, float32, one block | {found} | equal | {'MISSED' if differing else 'ok'} |")
    milliseconds = f"{1e3 * times['none']:.1f} ms and {1e3 * times['fsdp2']:.1f} ms: {ratio:.3f}"
    missed = ratio > TIME_BAR
    print(f"| step, bfloat16 | {milliseconds} | <= {TIME_BAR} | {'MISSED' if missed else 'ok'} |")
    return 1 if differing or (missed and not options.tiny) else 0


if __name__ == "__main__":
    sys.exit(main())
