"""What a patched linear costs the host: microseconds of Python and launches a call, next to ``nn.Linear``.

    PYTHONPATH=. python benchmarks/overhead_bench.py [--size 32] [--profile "QAT step"]

On a CUDA device the real kernels run on tensors too small to matter, so that the host is what takes the time: calls are
timed with ``time.perf_counter`` and no synchronisation in between. Without one the kernels are replaced by functions
that compute nothing but the matrix product, and what remains is the layers' own Python. The least of many short samples
is printed, which other processes disturb least; then a profile of one phase.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from patched import qat_linear
from torch import Tensor, nn

from qatpatch.kernels import reference_nvfp4
from qatpatch.packed_linear import NVFP4Linear

CALLS = 20


def microseconds(call: Callable[[], object], samples: int) -> float:
    """Least time of a call; the device is idle when a sample starts and never waited for within one."""
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(samples):
        synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS)
    return min(times) * 1e6


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def stub_kernels(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On the CPU, kernels that hand their input on; on CUDA the real ones."""
    if device.type == "cuda":
        return contextlib.nullcontext()
    one = torch.ones(())
    return mock.patch.multiple(
        reference_nvfp4,
        operand=lambda x, **_: (x, one),
        operands=lambda x, weight, **_: (x, one, weight, one),
        quantize=lambda x, **_: (x, x, one),
        packed_operand=lambda packed, *_, columns, dtype, **__: packed.new_empty((len(packed), columns), dtype=dtype),
        matmul=lambda x, x_scale, weight, weight_scale, bias, **_: F.linear(x, weight, bias),
    )


def phases(size: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Name -> one call of it."""

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def linear() -> nn.Linear:
        return nn.Linear(size, size, device=device, dtype=dtype)

    x = torch.randn(1, size, size, device=device, dtype=dtype)
    grad = torch.randn_like(x)
    wanted = x.clone().requires_grad_()
    plain, qat = linear(), qat_linear(linear())
    with torch.no_grad():
        weight_only = qat_linear(linear())
        weight_only.quantization.settings = replace(weight_only.quantization.settings, activations=False)
        packed, packed_w4a16 = (NVFP4Linear.from_linear(m, retain=False) for m in (qat_linear(linear()), weight_only))

    def without_grad(module: nn.Module) -> Callable[[], object]:
        def call() -> None:
            with torch.no_grad():
                module(x)

        return call

    def forward(module: nn.Module) -> Callable[[], object]:
        return lambda: module(wanted)

    def step(module: nn.Module) -> Callable[[], object]:
        inputs = (wanted, *module.parameters())
        return lambda: torch.autograd.grad(module(wanted), inputs, grad)

    return {
        "nn.Linear, no_grad": without_grad(plain),
        "QAT, no_grad": without_grad(qat),
        "deployed, no_grad": without_grad(packed),
        "deployed W4A16, no_grad": without_grad(packed_w4a16),
        "nn.Linear forward": forward(plain),
        "QAT forward": forward(qat),
        "nn.Linear step": step(plain),
        "QAT step": step(qat),
        **(kernel_phases(x[0], plain.weight.detach()) if device.type == "cuda" else {}),
    }


def kernel_phases(x: Tensor, weight: Tensor) -> dict[str, Callable[[], object]]:
    """The launches by themselves, allocations included."""
    from qatpatch.kernels import triton_nvfp4_launch as launch

    scale = torch.ones((), device=x.device)
    packed, block_scale = launch.quantize(weight, scale)
    return {
        "operand, 2 launches": lambda: launch.operand_pow2(x, x.dtype),
        "both operands, 2 launches": lambda: launch.operand_pair_pow2(x, weight, x.dtype),
        "dequantize, 1 launch": lambda: launch.dequantize(packed, block_scale, scale, x.shape[-1], x.dtype, True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=32, help="rows, in_features and out_features")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--profile", default="QAT step", help="the phase to profile")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    print(torch.cuda.get_device_name() if device.type == "cuda" else "CPU, stub kernels", f"torch {torch.__version__}")
    with stub_kernels(device):
        calls = phases(options.size, device)
        for name, call in calls.items():
            print(f"{name:28} {microseconds(call, options.samples):8.1f} us", flush=True)
        call = calls[options.profile]
        with cProfile.Profile() as profile:
            for _ in range(1000):
                call()
        synchronize()
    print(f"1000 times {options.profile}:")
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
