"""QAT attention on one GPU against dense attention, in one run: forward and backward, ratios and TFLOP/s.

    PYTHONPATH=. python benchmarks/attention_bench.py [--shapes 0,1,2,3] [--candidates] [--minutes 4] [--out FILE]

First accuracy, which also compiles every kernel: cosines against an FP32 computation of the same scheme, and against
FP32 attention of the unrounded operands. Each case runs in a process of its own, several at once; a launch that fails,
or does not come back, is reported and left out. Then times: CUDA events, random data, medians, variants taking turns.
The baseline is torch's SDPA on the same BSHD tensors, by cuDNN and by flash; ratios are over cuDNN. ``replayed`` calls
come from a CUDA graph, without the host. FLOPs are those of
dense attention, so that the columns compare. The tables come last.

``--candidates`` times other launches of each kernel than those of `triton_attention_launch.LAUNCHES` too.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from qatpatch.kernels import reference_attention
from qatpatch.kernels import triton_attention as kernels
from qatpatch.kernels.triton_attention_launch import Launch, Launches, launches

# batch, heads, queries, keys, head_dim
SHAPES = ((1, 32, 4290, 4290, 128), (1, 32, 4290, 1024, 128), (1, 12, 16384, 16384, 128), (1, 12, 32760, 32760, 128))
# Field of `Launches` -> other launches than the table's.
CANDIDATES: dict[str, tuple[Launch, ...]] = {
    "train": (
        Launch(rows=64, keys=64, warps=4, stages=3),
        Launch(rows=64, keys=64, warps=4, stages=2, reload=False),
        Launch(rows=64, keys=64, warps=4, stages=2, tma=False),
        Launch(rows=128, keys=64, warps=8, stages=3),
        Launch(rows=128, keys=64, warps=8, stages=3, tma=False),
    ),
    "infer": (
        Launch(rows=64, keys=64, warps=4, stages=3),
        Launch(rows=64, keys=64, warps=4, stages=2, reload=False),
        Launch(rows=64, keys=64, warps=4, stages=2, tma=False),
        Launch(rows=128, keys=64, warps=8, stages=3),
        Launch(rows=64, keys=64, warps=4, stages=1),
    ),
    "query_gradient": (
        Launch(rows=64, keys=64, warps=4, stages=2, reload=False),
        Launch(rows=64, keys=64, warps=4, stages=2, tma=False),
        Launch(rows=128, keys=64, warps=8, stages=3),
        Launch(rows=128, keys=128, warps=8, stages=2),
    ),
    "key_value_gradient": (
        Launch(rows=64, keys=64, warps=4, stages=2, early=True),
        Launch(rows=64, keys=64, warps=4, stages=2, tma=False),
        Launch(rows=64, keys=128, warps=8, stages=2),
        Launch(rows=64, keys=128, warps=8, stages=3),
        Launch(rows=64, keys=128, warps=8, stages=2, tma=False),
    ),
}
# scheme, shape as in SHAPES, gain of q, mask: against FP32 of the same scheme.
ACCURACY = (
    ("sage3", (1, 4, 1111, 777, 128), 1.0, None),
    ("sage3", (1, 4, 1111, 777, 128), 3.0, None),
    ("sage3", (2, 3, 503, 1001, 64), 1.0, None),
    ("sage3", (2, 4, 333, 777, 128), 1.0, "key"),
    ("sage3", (2, 4, 333, 777, 128), 1.0, "full"),
    ("fa4", (1, 4, 1111, 777, 128), 1.0, None),
    ("fa4", (2, 3, 503, 1001, 64), 1.0, None),
    ("fa4", (2, 4, 333, 777, 128), 1.0, "key"),
)
LENGTHS = (128, 2112, 9360, 32760)
JOB_SECONDS = 150


def tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, gain: float = 1.0) -> list[torch.Tensor]:
    """q, k, v, d_out of random normals, BSHD; q times ``gain``."""
    batch, heads, queries, keys, dim = shape
    sizes = [(batch, length, heads, dim) for length in (queries, keys, keys, queries)]
    made = [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]
    return [made[0] * gain, *made[1:]]


def run(module, data: list[torch.Tensor], scheme: str, mask=None, **options) -> dict[str, torch.Tensor]:
    """All results of a kernel module, by name."""
    *qkv, d_out = data
    fixed = {"scheme": scheme, "scale": qkv[0].shape[-1] ** -0.5, "attn_mask": mask} | options
    out, *kept = module.forward(*qkv, train=True, **fixed)
    grads = module.backward(d_out, *qkv, *kept, **fixed)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def cosines(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> str:
    return "  ".join(f"{name} {cosine(found[name], wanted[name]):.6f}" for name in wanted)


def base_launches() -> Launches:
    return launches(torch.device("cuda", torch.cuda.current_device()), 128)


def candidates() -> list[tuple[str, Launch]]:
    return [(field, launch) for field, others in CANDIDATES.items() for launch in others]


def label(launch: Launch) -> str:
    flags = ("" if launch.reload else " registers") + ("" if launch.tma else " pointers") + " early" * launch.early
    return f"{launch.rows}x{launch.keys} w{launch.warps} s{launch.stages}{flags}"


def check_candidate(field: str, launch: Launch) -> None:
    """Run one launch on small problems, with and without a partial tile of keys; prints cosines."""
    chosen = replace(base_launches(), **{field: launch})
    for shape in ((1, 2, 300, 330, 128), (1, 2, 256, 256, 128)):
        data = tensors(shape)
        *qkv, d_out = data
        fixed = {"scheme": "sage3", "scale": 128**-0.5}
        wide = run(reference_attention, [x.float() for x in data], "sage3")
        if field in ("train", "infer"):
            wide = {"out": wide["out"]}
            found = {"out": kernels.forward(*qkv, train=field == "train", launch=chosen, **fixed)[0]}
        else:
            del wide["out"]
            _, out_hp, *stats = reference_attention.forward(*qkv, train=True, **fixed)
            grads = kernels.backward(d_out, *qkv, out_hp, *stats, launch=chosen, **fixed)
            found = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        print(f"{field} {label(launch)} {shape}  {cosines(found, wide)}")
        if not all(cosine(found[name], wide[name]) > 0.999 for name in wide):
            raise SystemExit("wrong numbers")


def check_scheme(scheme: str, shape: tuple[int, ...], gain: float, kind: str | None) -> None:
    """Cosines with FP32 of the same scheme, and whether a second run and inference give the same bits."""
    data = tensors(shape, gain=gain)
    batch, heads, queries, keys, dim = shape
    mask = None
    if kind is not None:
        mask = torch.rand(batch, 1, queries if kind == "full" else 1, keys, device="cuda") < 0.6
    wide = run(reference_attention, [x.float() for x in data], scheme, mask)
    found, again = (run(kernels, data, scheme, mask) for _ in range(2))
    *qkv, _ = data
    infer = kernels.forward(*qkv, scheme=scheme, scale=dim**-0.5, attn_mask=mask, train=False)[0]
    same = all(torch.equal(found[name], again[name]) for name in found)
    print(f"{scheme} {shape} q*{gain:g} mask {kind}  {cosines(found, wide)}  repeats {same}"
          f"  infer equals train {torch.equal(infer, found['out'])}")  # fmt: skip


def check_length(length: int) -> None:
    """Cosines of `sage3` with FP32 attention of the unrounded operands, one head."""
    data = tensors((1, 1, length, length, 128))
    *qkv, d_out = (x.float().transpose(1, 2) for x in data)
    leaves = [x.requires_grad_() for x in qkv]
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = scaled_dot_product_attention(*leaves)
        grads = torch.autograd.grad(out, leaves, d_out)
    wide = dict(zip(("out", "dq", "dk", "dv"), (x.transpose(1, 2) for x in (out.detach(), *grads)), strict=True))
    print(f"sage3 {length} tokens, with unrounded attention  {cosines(run(kernels, data, 'sage3'), wide)}")


def jobs(with_candidates: bool) -> list[tuple[Callable, tuple]]:
    accuracy = [(check_scheme, case) for case in ACCURACY] + [(check_length, (length,)) for length in LENGTHS]
    return accuracy + [(check_candidate, case) for case in candidates() if with_candidates]


def run_jobs(with_candidates: bool) -> list[tuple[str, Launch]]:
    """Every job in its own process, 16 at a time; prints what they say, returns the candidates that passed."""

    def attempt(index: int) -> tuple[bool, str]:
        command = [sys.executable, __file__, "--job", str(index)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=JOB_SECONDS)
        except subprocess.TimeoutExpired:
            return False, f"no answer in {JOB_SECONDS} s"
        if done.returncode == 0:
            return True, done.stdout.strip()
        return False, (done.stdout.strip() + " " + (done.stderr.strip().splitlines() or ["no message"])[-1])[:400]

    todo = jobs(with_candidates)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(attempt, range(len(todo))))
    for (function, case), (passed, text) in zip(todo, answers, strict=True):
        print(text if passed else f"FAILED {function.__name__}{case}: {text}", flush=True)
    return [case for (function, case), (passed, _) in zip(todo, answers, strict=True)
            if passed and function is check_candidate]  # fmt: skip


def milliseconds(calls: dict[str, Callable[[], object]], repeats: int = 7, sample: float = 12.0) -> dict[str, float]:
    """Median time of each call; they take turns, so that a drifting clock meets all of them."""

    def timed(call: Callable[[], object], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, math.ceil(sample / timed(call, 2)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    turns = list(calls.items())
    for _ in range(repeats):
        for name, call in turns:
            times[name].append(timed(call, counts[name]))
        turns.append(turns.pop(0))  # whoever follows a call that draws little power finds a faster clock
    return {name: statistics.median(values) for name, values in times.items()}


def dense_calls(data: list[torch.Tensor], backend: SDPBackend) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward and backward of SDPA on BSHD tensors."""
    *qkv, d_out = (x.detach().transpose(1, 2) for x in data)
    leaves = [x.requires_grad_() for x in qkv]

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*leaves)

    out = forward()
    return forward, lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)


def qat_calls(data: list[torch.Tensor], scheme: str, launch: Launches) -> dict[str, Callable[[], object]]:
    *qkv, d_out = data
    fixed = {"scheme": scheme, "scale": qkv[0].shape[-1] ** -0.5, "launch": launch}
    kept = kernels.forward(*qkv, train=True, **fixed)[1:]
    return {
        "train": lambda: kernels.forward(*qkv, train=True, **fixed),
        "infer": lambda: kernels.forward(*qkv, train=False, **fixed),
        "backward": lambda: kernels.backward(d_out, *qkv, *kept, **fixed),
    }


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A replay of ``call`` from a CUDA graph: the GPU's part alone."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each GPU kernel of one call, by name."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return {event.key[:40]: event.self_device_time_total / 1e3 for event in profile.key_averages()}


def measure(shape: tuple[int, ...], usable: list[tuple[str, Launch]], deadline: float) -> dict:
    """Times of one shape: the baselines and the table's launches together, then each candidate beside the table's."""
    torch.manual_seed(2)
    data = tensors(shape)
    calls: dict[str, Callable[[], object]] = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        calls[f"{name} forward"], calls[f"{name} backward"] = dense_calls(data, backend)
    for scheme in ("sage3", "fa4"):
        ours = qat_calls(data, scheme, base_launches())
        calls |= {f"{scheme} {name}": call for name, call in ours.items() if (scheme, name) != ("fa4", "infer")}
    for name in ("cudnn forward", "sage3 train", "sage3 infer", "fa4 train"):
        calls[f"{name}, replayed"] = captured(calls[name])
    result = {"shape": shape, "times": milliseconds(calls), "kernels": {}, "candidates": []}
    for name in ("sage3 train", "sage3 backward", "fa4 train"):
        try:
            result["kernels"][name] = kernel_times(calls[name])
        except RuntimeError as error:
            print(f"no profile: {error}", flush=True)
            break
    for field, launch in usable:
        if time.monotonic() > deadline:
            break
        part = field if field in ("train", "infer") else "backward"
        try:
            call = qat_calls(data, "sage3", replace(base_launches(), **{field: launch}))[part]
            took = milliseconds({"it": call}, repeats=3)["it"]
        except RuntimeError as error:
            print(f"FAILED {field} {label(launch)}: {str(error)[:200]}", flush=True)
            continue
        result["candidates"].append({"kernel": field, "launch": label(launch), "part": part, "ms": took})
    return result


def print_tables(results: list[dict]) -> None:
    for result in results:
        batch, heads, queries, keys, dim = result["shape"]
        times = result["times"]
        gflop = 4e-9 * batch * heads * queries * keys * dim
        print(f"\nB{batch} H{heads} {queries}x{keys} D{dim}   ms, TFLOP/s, over cuDNN")
        for name, ms in times.items():
            backward = "backward" in name
            base = times["cudnn backward" if backward else "cudnn forward"]
            if name.endswith("replayed"):
                base = times["cudnn forward, replayed"]
            rate = gflop * (2.5 if backward else 1.0) / ms
            print(f"  {name:26s} {ms:9.3f} {rate:8.0f} {ms / base:7.2f}")
        dense = times["cudnn forward"] + times["cudnn backward"]
        print(f"  fa4 forward + backward over cuDNN {(times['fa4 train'] + times['fa4 backward']) / dense:.3f};"
              f" sage3 {(times['sage3 train'] + times['sage3 backward']) / dense:.3f};"
              f" infer over train {times['sage3 infer'] / times['sage3 train']:.3f}")  # fmt: skip
        for name, parts in result["kernels"].items():
            listed = ", ".join(f"{key} {ms:.3f}" for key, ms in sorted(parts.items(), key=lambda x: -x[1])[:5])
            print(f"  kernels of {name}: {listed}")
        for row in result["candidates"]:
            table = times[f"sage3 {row['part']}"]
            print(f"  {row['kernel']:20s} {row['launch']:28s} {row['ms']:9.3f} {row['ms'] / table:6.3f} of the table's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(map(str, range(len(SHAPES)))), help="indices into SHAPES")
    parser.add_argument("--candidates", action="store_true", help="time other launches too")
    parser.add_argument("--minutes", type=float, default=4.0, help="no new candidate is timed after this long")
    parser.add_argument("--out", type=Path, help="write all numbers here, as JSON")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("attention_bench needs a CUDA GPU, and torch finds none")
    torch.manual_seed(0)
    if options.job is not None:
        function, case = jobs(True)[options.job]
        function(*case)
        return
    start = time.monotonic()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    usable = run_jobs(options.candidates)
    print(f"accuracy done at {time.monotonic() - start:.0f} s", flush=True)
    results = []
    for index in map(int, options.shapes.split(",")):
        results.append(measure(SHAPES[index], usable, start + 60 * options.minutes))
        print(f"{SHAPES[index]} done at {time.monotonic() - start:.0f} s", flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))
    print_tables(results)


if __name__ == "__main__":
    main()
