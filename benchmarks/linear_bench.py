"""NVFP4 linears on one GPU, side by side in one run: QAT against bf16 and torchao, deployed, the kernels, their tiles.

    PYTHONPATH=. python benchmarks/linear_bench.py [--parts kernels,linear,deployed,matmul] [--out results.json]

Kernel times are replays of a CUDA graph over rotating buffers of random data (larger together than L2), so that neither
launch gaps nor the cache flatter them; ``share`` is of the bandwidth of a device-to-device copy measured in the same
run, counting the fewest bytes that must move. Linear times are eager, between CUDA events, the variants taking turns:

- ``qatpatch``: the layer that `qatpatch.apply` makes; ``weights kept``: the same inside `qatpatch.reuse_weights`;
- ``graph``: the same replayed from a CUDA graph, without the host (the bf16 layer's time is then a replay's too);
- ``torchao``: torchao's NVFP4 numerics through ``torch.compile`` (its own QAT layer needs Blackwell), with the same
  backward; left out where torchao is not installed.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from patched import qat_linear
from torch import Tensor, nn

from qatpatch.kernels import triton_linear
from qatpatch.kernels import triton_nvfp4_launch as launch
from qatpatch.kernels.triton_nvfp4_kernels import POW2, RAW
from qatpatch.reuse import KeptWeights

SHAPES = (  # M, K, N
    (4290, 4096, 4096),
    (4290, 4096, 16384),
    (4290, 16384, 4096),
    (16384, 4096, 4096),
    (16384, 4096, 16384),
    (32760, 1536, 8960),
)
OPERANDS = ((4290, 4096), (4290, 16384))
TILES = tuple(launch.Tile(*t) for t in ((128, 4), (256, 4), (256, 8), (512, 8), (512, 16), (1024, 16)))
READ_TILES = tuple(launch.Tile(*t) for t in ((256, 4), (512, 8), (1024, 8), (1024, 16)))
MATMUL_TILES = tuple(
    launch.MatmulTile(*t)
    for t in ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4))
)
BF16 = torch.bfloat16
ROTATION_BYTES = 512 << 20


def replay_microseconds(call: Callable[[Tensor], object], inputs: Sequence[Tensor]) -> float:
    """Median time of one call, from replays of a graph that makes it once on each input and keeps every result."""
    for x in inputs[:2]:
        call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(x) for x in inputs]
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(inputs))
    del results
    return statistics.median(times[2:])


def turns_milliseconds(variants: dict[str, Callable[[], object]], *, sample_ms: float = 25, samples: int = 7) -> dict:
    """Median time of one call of each variant; they take turns, so that a drifting clock meets all of them."""
    iterations = {}
    for name, call in variants.items():
        for _ in range(3):
            call()
        iterations[name] = max(2, math.ceil(sample_ms / _event_milliseconds(call, 2)))
    times: dict[str, list[float]] = {name: [] for name in variants}
    turns = list(variants.items())
    for _ in range(samples):
        for name, call in turns:
            times[name].append(_event_milliseconds(call, iterations[name]))
        turns.append(turns.pop(0))  # whoever follows a variant that draws little power finds a faster clock
    return {name: statistics.median(values) for name, values in times.items()}


def _event_milliseconds(call: Callable[[], object], iterations: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(iterations):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / iterations


def copy_bandwidth() -> float:
    """GB/s of a large device-to-device copy, read and written."""
    source = torch.randn(1 << 29, device="cuda", dtype=BF16)
    target = torch.empty_like(source)
    return 4 * source.numel() / turns_milliseconds({"copy": lambda: target.copy_(source)})["copy"] / 1e6


def gemm_rate() -> float:
    """TFLOP/s of a large bf16 GEMM of random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    return 2 * 8192**3 / turns_milliseconds({"gemm": lambda: a @ b}, sample_ms=50)["gemm"] / 1e9


class FakeQuantized(torch.autograd.Function):
    """Forward on what ``fake_quantize`` makes of both operands, straight-through backward on the originals."""

    @staticmethod
    def forward(ctx, x, weight, bias, fake_quantize):
        ctx.save_for_backward(x, weight)
        return F.linear(fake_quantize(x), fake_quantize(weight), bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0), None


def torchao_fake_quantize() -> Callable[[Tensor], Tensor] | None:
    """There and back by torchao's quantizer with its two-level scales, compiled; None where torchao is missing."""
    try:
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    except ImportError:
        return None

    @torch.compile
    def fake_quantize(x: Tensor) -> Tensor:
        scale = per_tensor_amax_to_scale(x.abs().max())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(x.dtype)

    return fake_quantize


def one_pass(x: Tensor, tile: launch.Tile) -> Tensor:
    return launch.operand_pow2(x, BF16, tile)[0]


def two_passes(x: Tensor, tile: launch.Tile) -> Tensor:
    return launch.operand(x, launch.global_scale(x, POW2.value), BF16, True, tile)


class KernelBench:
    """Times kernels over rotating inputs of one shape, prints and records each."""

    def __init__(self, shape: tuple[int, int], copy_gbps: float) -> None:
        self.shape, self.copy_gbps, self.rows = shape, copy_gbps, []
        count = max(2, ROTATION_BYTES // (4 * shape[0] * shape[1]))
        self.inputs = [torch.randn(shape, device="cuda", dtype=BF16) for _ in range(count)]

    def measure(self, kernel: str, tile: launch.Tile, bytes_per_element: float, call, inputs=None) -> None:
        us = replay_microseconds(call, inputs or self.inputs)
        share = self.shape[0] * self.shape[1] * bytes_per_element / us / 1e3 / self.copy_gbps
        row = {
            "kernel": kernel,
            "shape": "{}x{}".format(*self.shape),
            "tile": str(tuple(tile)),
            "us": us,
            "share": share,
        }
        self.rows.append(row)
        print(f"{kernel:28} {row['shape']:>12} tile {row['tile']:12} {us:8.1f} us {share:6.1%}", flush=True)

    def tiles(self) -> None:
        scale = launch.operand_pow2(self.inputs[0], BF16)[1]
        packed = {id(x): launch.quantize(x, scale) for x in self.inputs}

        def unpack(x: Tensor, tile: launch.Tile) -> Tensor:
            return launch.dequantize(*packed[id(x)], scale, x.shape[-1], BF16, True, tile)

        for tile in READ_TILES:
            self.measure("amax", tile, 2, lambda x, t=tile: launch.global_scale(x, RAW.value, t))
        for tile in TILES:
            self.measure("operand pow2, one pass", tile, 4, lambda x, t=tile: one_pass(x, t))
            self.measure("operand, scale given", tile, 4, lambda x, t=tile: launch.operand(x, scale, BF16, True, t))
            self.measure("dequantize", tile, 2.5625, lambda x, t=tile: unpack(x, t))
        for tile in TILES[2:4]:
            self.measure("operand pow2, two passes", tile, 4, lambda x, t=tile: two_passes(x, t))
            self.measure("quantize, scale given", tile, 2.5625, lambda x, t=tile: launch.quantize(x, scale, t))

    def repair(self) -> None:
        """The second launch of the one-pass operand: how many programs, and what the worst input costs."""
        usual, tile = launch.REPAIR_PROGRAMS, launch.OPERAND_TILE
        try:
            for programs in (66, 132, 264, 528):
                launch.REPAIR_PROGRAMS = programs
                self.measure(f"one pass, {programs} repairers", tile, 4, lambda x: one_pass(x, tile))
        finally:
            launch.REPAIR_PROGRAMS = usual
        worst = [x * 1e-4 for x in self.inputs]
        for x in worst:
            x[:, 0] = 1e4
        self.measure("one pass, all repaired", tile, 4, lambda x: one_pass(x, tile), worst)


def bench_kernels(copy_gbps: float) -> list[dict]:
    rows = []
    for shape in OPERANDS:
        bench = KernelBench(shape, copy_gbps)
        bench.tiles()
        bench.repair()
        rows += bench.rows
    return rows


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A replay of ``call`` from a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def bench_linear(m: int, k: int, n: int, fake_quantize: Callable[[Tensor], Tensor] | None) -> dict:
    plain = nn.Linear(k, n, device="cuda", dtype=BF16)
    nn.init.normal_(plain.weight, std=0.02)
    patched, keeping = qat_linear(copy.deepcopy(plain)), qat_linear(copy.deepcopy(plain))
    x = torch.randn(m, k, device="cuda", dtype=BF16, requires_grad=True)
    grad = torch.randn(m, n, device="cuda", dtype=BF16)
    inputs = (x, plain.weight, plain.bias)

    def step(module: nn.Module) -> Callable[[], object]:
        return lambda: torch.autograd.grad(module(x), (x, *module.parameters()), grad)

    variants = {"bf16": step(plain), "qatpatch": step(patched), "weights kept": step(keeping)}
    variants |= {"bf16 graph": captured(step(plain)), "graph": captured(step(patched))}
    keeping.quantization.switch.open("scope", weights=KeptWeights())
    times = turns_milliseconds(variants, samples=10)
    row = {"shape": f"{m}x{k}x{n}", "bf16_ms": times["bf16"], "qat_ms": times["qatpatch"]}
    row["tflops"] = 6 * m * k * n / times["qatpatch"] / 1e9
    row |= {name: times[name] / times["bf16"] for name in variants if "graph" not in name and name != "bf16"}
    row["graph"] = times["graph"] / times["bf16 graph"]
    if fake_quantize is not None:  # by itself: it spends most of its time on memory, and the clock rises
        other = lambda: torch.autograd.grad(FakeQuantized.apply(*inputs, fake_quantize), inputs, grad)  # noqa: E731
        pair = turns_milliseconds({"bf16": variants["bf16"], "torchao": other})
        row["torchao"] = pair["torchao"] / pair["bf16"]
    print(row, flush=True)
    return row


def bench_deployed(m: int, k: int, n: int) -> dict:
    x, weight = (torch.randn(r, k, device="cuda", dtype=BF16) for r in (m, n))
    bias = torch.randn(n, device="cuda", dtype=BF16)
    packed, block_scale, scale = triton_linear.quantize(weight * 0.02, global_scale=None, rule="pow2")

    def dense() -> Tensor:
        return launch.dequantize(packed, block_scale, scale, k, BF16, True)

    with torch.no_grad():
        times = turns_milliseconds(
            {
                "bf16": lambda: F.linear(x, weight, bias),
                "w4a4": lambda: F.linear(launch.operand_pow2(x, BF16)[0], dense(), bias),
                "w4a16": lambda: F.linear(x, dense(), bias),
            }
        )
    row = {"shape": f"{m}x{k}x{n}", "bf16_ms": times["bf16"]}
    row |= {name: times[name] / times["bf16"] for name in ("w4a4", "w4a16")}
    print("deployed forward", row, flush=True)
    return row


def bench_matmul(m: int, k: int, n: int) -> list[dict]:
    a, b = (torch.randn(r, k, device="cuda", dtype=BF16) for r in (m, n))
    bias, one = torch.randn(n, device="cuda", dtype=BF16), torch.ones((), device="cuda")
    variants: dict[str, Callable[[], Tensor]] = {"cuBLAS": lambda: F.linear(a, b, bias)}
    for tile in MATMUL_TILES:
        variants[str(tuple(tile))] = lambda t=tile: launch.scaled_matmul(a, b, one, one, bias, BF16, t)
    rows = [
        {"shape": f"{m}x{k}x{n}", "tile": name, "tflops": 2 * m * k * n / ms / 1e9}
        for name, ms in turns_milliseconds(variants).items()
    ]
    print("scaled_matmul", *rows, sep="\n", flush=True)
    return rows


def summary(results: dict) -> str:
    """The best tile of each kernel, the deployed forwards, and last the QAT linears."""
    lines = []
    best: dict[tuple[str, str], dict] = {}
    for row in results.get("kernels", ()):
        key = row["kernel"], row["shape"]
        if key not in best or row["us"] < best[key]["us"]:
            best[key] = row
    for (kernel, shape), row in best.items():
        lines.append(f"best {kernel:28} {shape:>12} {row['tile']:12} {row['us']:8.1f} us {row['share']:6.1%}")
    lines += [f"scaled_matmul {r['shape']:>18} {r['tile']:22} {r['tflops']:6.0f}" for r in results.get("matmul", ())]
    for r in results.get("deployed", ()):
        lines.append(f"deployed {r['shape']:>18} {r['bf16_ms']:9.3f} ms, W4A4 {r['w4a4']:.3f}, W4A16 {r['w4a16']:.3f}")
    lines.append(
        f"{results['device']}, torch {torch.__version__}: copy {results['copy_gbps']:.0f} GB/s, "
        f"bf16 GEMM {results['gemm_tflops']:.0f} TFLOP/s"
    )
    rows = results.get("linear", ())
    if rows:
        names = [name for name in ("qatpatch", "weights kept", "graph", "torchao") if name in rows[0]]
        header = "".join(f"{name:>14}" for name in names)
        lines.append("QAT forward and backward, times of bf16's:")
        lines.append(f"{'M x K x N':>18} {'bf16 ms':>9} {'qat ms':>9}{header} {'TFLOP/s':>8} {'of GEMM':>8}")
        for r in rows:
            ratios = "".join(f"{r[name]:14.3f}" for name in names)
            share = r["tflops"] / results["gemm_tflops"]
            lines.append(
                f"{r['shape']:>18} {r['bf16_ms']:9.3f} {r['qat_ms']:9.3f}{ratios} {r['tflops']:8.0f} {share:8.1%}"
            )
        means = "".join(f"{statistics.geometric_mean(r[name] for r in rows):14.3f}" for name in names)
        lines.append(f"{'geometric mean':>38}{means}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="kernels,linear,deployed,matmul")
    parser.add_argument("--out", help="write all numbers to this JSON file")
    options = parser.parse_args()
    parts = options.parts.split(",")
    torch.manual_seed(0)

    results = {"device": torch.cuda.get_device_name(), "copy_gbps": copy_bandwidth(), "gemm_tflops": gemm_rate()}
    if "kernels" in parts:
        results["kernels"] = bench_kernels(results["copy_gbps"])
    if "linear" in parts:
        fake_quantize = torchao_fake_quantize()
        results["linear"] = [bench_linear(*shape, fake_quantize) for shape in SHAPES]
    if "deployed" in parts:
        results["deployed"] = [bench_deployed(*shape) for shape in SHAPES]
    if "matmul" in parts:
        results["matmul"] = [row for shape in (SHAPES[0], SHAPES[4]) for row in bench_matmul(*shape)]
    if options.out:
        with open(options.out, "w") as file:
            json.dump(results, file, indent=1)
    print(summary(results))


if __name__ == "__main__":
    main()
