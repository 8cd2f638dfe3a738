"""The recipes' engine under FSDP2 with one rank, against whole weights: what sharding costs with nothing to share.

    PYTHONPATH=. python benchmarks/sharding_bench.py            # an LTX-2 of 1.6 B parameters, for one GPU of 80 GB
    PYTHONPATH=. python benchmarks/sharding_bench.py --tiny     # the same on a CPU; its times say nothing

Losses are compared in float32, where both compute the same but for one order of sums: FSDP2 adds up the gradients of
what several blocks read (the text) within each block first. So the first loss is equal, and the others nearly. Times
are of bfloat16, eager: whole weights run under autocast, shards are gathered in bfloat16. Prints a markdown table last;
the exit status is 1 where a bar is missed.
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
# Relative, of losses after the first.
LOSS_BAR = 1e-3
# Steps that compile kernels, and settle the allocator.
WARM_UP = 5

COMMON = {
    "validation.every": 0,
    "validation.sampler_steps": 1,
    "checkpoint.every": 0,
    "train.compile": False,
    "train.warmup": 1,
}
LARGE = {"model.config.num_attention_heads": 32, "model.config.cross_attention_dim": 4096}


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
            losses[sharding], _ = run(Path(folder, f"{sharding}-fp32"), recipe, steps)
        for sharding in ("none", "fsdp2"):
            steps = {"parallel.sharding": sharding, "train.steps": options.steps, "train.mixed_precision": "bf16"}
            _, seconds = run(Path(folder, f"{sharding}-bf16"), recipe, steps | large)
            times[sharding] = statistics.median(seconds)
    pairs = list(zip(losses["none"], losses["fsdp2"], strict=True))
    worst = max(abs(whole - sharded) / whole for whole, sharded in pairs)
    equal = pairs[0][0] == pairs[0][1] and worst <= LOSS_BAR
    ratio = times["fsdp2"] / times["none"]
    print("\n| FSDP2 with one rank, against whole weights | found | bar | |\n| --- | --- | --- | --- |")
    found = f"{pairs[0][0]!r} and {pairs[0][1]!r}; largest relative difference of {len(pairs)}: {worst:.2g}"
    print(f"| losses, float32 | {found} | the first equal, all within {LOSS_BAR:g} | {'ok' if equal else 'MISSED'} |")
    milliseconds = f"{1e3 * times['none']:.1f} ms and {1e3 * times['fsdp2']:.1f} ms: {ratio:.3f}"
    missed = ratio > TIME_BAR
    print(f"| step, bfloat16 | {milliseconds} | <= {TIME_BAR} | {'MISSED' if missed else 'ok'} |")
    return 1 if not equal or (missed and not options.tiny) else 0


if __name__ == "__main__":
    sys.exit(main())
