"""A full-size LTX-2 (18.9B parameters, random weights, bf16) on one GPU: dense, patched and deployed, side by side.

    PYTHONPATH=. python benchmarks/ltx2_bench.py [--attention] [--target sm_120] [--compile] [--keep GiB]

4290 video tokens (11 x 15 x 26), 1024 text tokens with an all-ones mask, 126 audio tokens. A train step is a forward
and a backward with gradient checkpointing. Times are CUDA events, medians, of one model before the patch, after it, and
deployed. Memory is what the allocator holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import qatpatch

GIB = 1024**3


def build(layers: int) -> torch.nn.Module:
    from diffusers import LTX2VideoTransformer3DModel

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LTX2VideoTransformer3DModel(num_layers=layers, rope_type="split")
    finally:
        torch.set_default_dtype(torch.float32)


def inputs() -> dict[str, Any]:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    mask = torch.ones(1, 1024, device="cuda", dtype=torch.bfloat16)
    return dict(
        hidden_states=noise(1, 4290, 128),
        audio_hidden_states=noise(1, 126, 128),
        encoder_hidden_states=noise(1, 1024, 3840),
        audio_encoder_hidden_states=noise(1, 1024, 3840),
        timestep=torch.full((1,), 500.0, device="cuda", dtype=torch.bfloat16),
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        num_frames=11,
        height=15,
        width=26,
        fps=24.0,
        audio_num_frames=126,
        return_dict=False,
    )


def milliseconds(call: Callable[[], object], samples: int) -> float:
    call()
    times = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def wall(call: Callable[[], object]) -> tuple[float, object]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", action="store_true", help="patch the attentions too")
    parser.add_argument("--target", default=None)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument(
        "--compile", action="store_true", help="compile the blocks (diffusers' compile_repeated_blocks)"
    )
    parser.add_argument("--no-step", action="store_true", help="leave the train step out")
    parser.add_argument("--keep", type=float, default=0, help="measure once more with so many GiB of weights kept")
    parser.add_argument("--out")
    options = parser.parse_args()
    model, data = build(options.layers), inputs()
    if options.compile:
        model.compile_repeated_blocks(fullgraph=True)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results["bytes dense"] = torch.cuda.memory_allocated()

    def forward() -> None:
        with torch.no_grad():
            model(**data)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**data)[0].float().square().mean().backward()

    model.enable_gradient_checkpointing()
    kinds = (("forward", forward),) if options.no_step else (("forward", forward), ("step", step))

    def measure(state: str) -> None:
        for name, call in kinds:
            model.train(name == "step")
            call()
            torch.cuda.reset_peak_memory_stats()
            results[f"{name} {state} ms"] = milliseconds(call, options.samples)
            results[f"{name} {state} peak GiB"] = torch.cuda.max_memory_allocated() / GIB
            print(f"{name} {state}: {results[f'{name} {state} ms']:.1f} ms", flush=True)
        model.zero_grad(set_to_none=True)

    measure("bf16")
    seconds, report = wall(lambda: qatpatch.apply(model, attention=options.attention, target=options.target))
    results["apply s"], results["patched"] = seconds, (len(report.linears), len(report.attentions))
    measure("patched")
    if options.keep:
        with qatpatch.reuse_weights(model, memory_limit=int(options.keep * GIB)) as kept:
            measure("kept")
            results["weights kept"] = repr(kept)
    for state in ("patched", "kept") if options.keep else ("patched",):
        for name, _ in kinds:
            results[f"{name} {state} ratio"] = results[f"{name} {state} ms"] / results[f"{name} bf16 ms"]
    model.eval().requires_grad_(False)
    with torch.no_grad():
        patched = model(**data)[0]
    seconds, receipt = wall(lambda: qatpatch.deploy(model))
    results["deploy s"], results["held GiB"] = seconds, torch.cuda.memory_allocated() / GIB
    results["freed GiB"] = receipt.bytes_freed / GIB
    with torch.no_grad():
        deployed = model(**data)[0]
    results["deployed equal"] = torch.equal(patched, deployed)
    results["deployed forward ms"] = milliseconds(forward, options.samples)
    results["deployed forward ratio"] = results["deployed forward ms"] / results["forward bf16 ms"]
    if options.out:
        with open(options.out, "w") as file:
            json.dump(results, file, indent=1)
    for name, value in results.items():
        print(f"{name:26} {value if not isinstance(value, float) else format(value, '.4f')}")


if __name__ == "__main__":
    main()
