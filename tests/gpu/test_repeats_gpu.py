"""Every kernel a hundred times over, in memory that holds NaN: the same bits each time. A race would show."""

from __future__ import annotations

import contextlib

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from kernel_calls import BY_TORCH, attention_calls, linear_calls, values

from qatpatch.kernels import triton_attention, triton_linear, triton_tiled

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
REPEATS = 100


def poison() -> None:
    """Blocks of every size that calls take, filled with NaN bytes and freed: the allocator hands them out next."""
    sizes = [1 << power for power in range(9, 24)] * 3
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE) for size in sizes]
    del blocks


@contextlib.contextmanager
def deterministic(wanted: bool):
    """torch's own switch, without its filling of empty memory, which would hide what a kernel leaves unwritten."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def bits(tensors) -> list[torch.Tensor]:
    return [t.contiguous().view(-1).view(torch.uint8) for t in tensors if t is not None]


def repeat(calls) -> None:
    for name, call in calls.items():
        with deterministic(BY_TORCH in name):
            poison()
            first = [t.clone() for t in bits(call())]
            differ = torch.zeros((), dtype=torch.bool, device=DEVICE)
            for _ in range(REPEATS):
                poison()
                for found, wanted in zip(bits(call()), first, strict=True):
                    differ |= (found != wanted).any()
        assert not differ.item(), name


def test_linear_kernels():
    calls = linear_calls(triton_linear, DEVICE)
    x = values(131, 100, seed=6, device=DEVICE)
    calls["tiled quantizer"] = lambda: triton_tiled.quantize_activation(x, global_scale=None, rule="pow2")
    assert "kept operand" in calls
    repeat(calls)


def test_attention_kernels():
    repeat(attention_calls(triton_attention, DEVICE))
