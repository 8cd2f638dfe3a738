"""The reference kernels on a CPU, beside what they stand for: `make bench`.

Times are medians of wall time on one thread. They say what tests and small experiments cost here; GPU figures are in
docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import qatpatch
from qatpatch import nvfp4

EVERY_LINEAR = qatpatch.Profile(name="every linear", rules=(qatpatch.Rule(match=("*",), action="linear"),))


def milliseconds(call: Callable[[], object], samples: int = 5) -> float:
    call()
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def linear_step(module: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(module(x).sum(), (x, *module.parameters()))


def attention_step(function: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    return lambda: torch.autograd.grad(function(*tensors).sum(), tensors)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[tuple[str, float, float | None]] = []
    weight = torch.randn(2048, 2048)
    packed = nvfp4.quantize(weight)
    rows.append(("quantize 2048 x 2048", milliseconds(lambda: nvfp4.quantize(weight)), None))
    rows.append(("dequantize 2048 x 2048", milliseconds(lambda: nvfp4.dequantize(packed)), None))
    for m, k, n in ((512, 1024, 1024), (64, 1024, 4096)):
        dense, x = nn.Linear(k, n), torch.randn(m, k, requires_grad=True)
        patched = nn.Linear(k, n)
        qatpatch.apply(nn.ModuleDict({"linear": patched}), EVERY_LINEAR)
        times = milliseconds(linear_step(patched, x)), milliseconds(linear_step(dense, x))
        rows.append((f"linear, forward and backward, {m} x {k} x {n}", *times))
    tensors = tuple(torch.randn(1, 512, 2, 128, requires_grad=True) for _ in range(3))
    for scheme in ("sage3", "fa4"):
        patched_step = attention_step(lambda *t, s=scheme: qatpatch.qat_attention(*t, scheme=s), tensors)
        times = milliseconds(patched_step), milliseconds(attention_step(sdpa, tensors))
        rows.append((f"attention {scheme}, forward and backward, 512 tokens, 2 heads", *times))
    print(f"torch {torch.__version__}, one thread")
    print(f"{'':58} {'ms':>9} {'dense ms':>9} {'ratio':>7}")
    for name, ms, dense_ms in rows:
        beside = f"{dense_ms:9.2f} {ms / dense_ms:7.2f}" if dense_ms else ""
        print(f"{name:58} {ms:9.2f} {beside}")


if __name__ == "__main__":
    main()
