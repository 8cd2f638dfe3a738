"""Every emulated kernel once, on small ragged shapes: what is repeated on a GPU, and what the sanitizer watches.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/kernel_calls.py
    compute-sanitizer --tool racecheck python tests/kernel_calls.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck python tests/kernel_calls.py

Without torch's cache an access outside of a tensor is one outside of an allocation, which the tools can see. A name as
an argument runs the calls that contain it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Calls = dict[str, Callable[[], tuple[torch.Tensor, ...]]]
BY_TORCH = "by torch"  # fused attention of torch's, which sums gradients in any order unless it is told not to


def values(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Blocks over many binades, zero ones among them, so that block scales are subnormal and tiles are repaired."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-24, 6, (*shape[:-1], -(-shape[-1] // 16)), generator=generator)
    x = (
        torch.randn(shape, generator=generator)
        * torch.exp2(exponents.float()).repeat_interleave(16, -1)[..., : shape[-1]]
    )
    x[..., :16] *= torch.randint(0, 2, (*shape[:-1], 1), generator=generator)
    return x.to(device, dtype)


def linear_calls(module: ModuleType, device: torch.device) -> Calls:
    """The functions of a linear row: both rules and a given scale, whole and ragged rows, strided ones."""
    foreign = torch.tensor(0.0137, device=device)
    inputs = {
        "whole": values(130, 256, seed=0, device=device),
        "ragged": values(77, 100, seed=1, device=device),
        "strided": values(70, 515, seed=2, device=device)[:, 3:259],
        "float32": values(33, 208, seed=3, device=device, dtype=torch.float32),
    }
    calls: Calls = {}
    for name, x in inputs.items():
        weight = values(72, x.shape[1], seed=4, device=device, dtype=x.dtype)
        for rule, scale in (("pow2", None), ("amax", None), ("amax", foreign)):
            given = dict(global_scale=scale, rule=rule)
            label = f"{name} {rule if scale is None else 'given'}"
            calls[f"quantize {label}"] = lambda x=x, given=given: module.quantize(x, **given)
            calls[f"operand {label}"] = lambda x=x, given=given: module.operand(x, **given)
            calls[f"linear {label}"] = lambda x=x, w=weight, scale=scale, rule=rule: (
                _linear(module, x, w, scale, rule),
                _packed_linear(module, x, w, scale, rule),
            )
    large = values(1024, 1024, seed=5, device=device)
    kept = module.keep(large, "pow2")
    if kept is not None:
        calls["kept operand"] = lambda: kept.operand(large)
    return calls


def _linear(module, x, weight, scale, rule):
    operands = module.operands(x, weight, x_scale=scale, rule=rule)
    bias = weight[:, 0].contiguous()
    return module.matmul(*operands, bias, out_dtype=x.dtype, rule=rule)


def _packed_linear(module, x, weight, scale, rule):
    packed = module.quantize(weight, global_scale=None, rule=rule)
    dense = module.packed_operand(*packed, columns=x.shape[1], dtype=x.dtype, rule=rule)
    operand, alpha = module.operand(x, global_scale=scale, rule=rule)
    return module.matmul(operand, alpha, dense, packed[2], None, out_dtype=x.dtype, rule=rule)


def attention_calls(module: ModuleType, device: torch.device) -> Calls:
    """Forward and backward of both schemes, trained and for inference, self and cross, with and without masks."""
    calls: Calls = {}
    for number, (queries, keys, dim) in enumerate([(129, 129, 64), (70, 211, 128)]):
        shapes = [(2, length, 2, dim) for length in (queries, keys, keys, queries)]
        generator = torch.Generator().manual_seed(number)
        q, k, v, d_out = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
        seen = (torch.rand(2, 1, 1, keys, generator=generator) < 0.7).to(device)
        bias = torch.randn(1, 2, queries, keys, generator=generator).to(device)
        for scheme in ("sage3", "fa4"):
            for mask_name, mask in (("no mask", None), ("keys masked", seen), ("bias", bias)):
                route = f", {BY_TORCH}" if scheme == "fa4" and mask is None else ""
                fixed = dict(scheme=scheme, scale=dim**-0.5, attn_mask=mask)
                calls[f"attention {scheme} {queries}x{keys} {mask_name}{route}"] = (
                    lambda fixed=fixed, data=(q, k, v, d_out): _attention(module, *data, fixed)
                )
    return calls


def _attention(module, q, k, v, d_out, fixed):
    out, *saved = module.forward(q, k, v, train=True, **fixed)
    infer = module.forward(q, k, v, train=False, **fixed)[0]
    return out, *saved, infer, *module.backward(d_out, q, k, v, *saved, **fixed)


def main(wanted: str = "") -> None:
    from qatpatch.kernels import triton_attention, triton_linear, triton_tiled

    device = torch.device("cuda", 0)
    calls = linear_calls(triton_linear, device) | attention_calls(triton_attention, device)
    x = values(131, 100, seed=6, device=device)
    calls["tiled quantizer"] = lambda: triton_tiled.quantize_activation(x, global_scale=None, rule="pow2")
    for name, call in calls.items():
        if wanted in name:
            call()
            torch.cuda.synchronize()
            print(name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
