"""The Triton NVFP4 kernels without a GPU: they build for every architecture, and their arithmetic is exact.

Two things can be had on a CPU. Triton compiles ahead of time to machine code: that each kernel still builds, without
spilling registers, is checked for sm_80 to sm_121. And Triton's interpreter runs the kernels on CPU tensors: exact for
the float32 and integer operations that they consist of (not for bf16 results, fp8, or bf16 dots, so none of those is
tested here). The interpreter is chosen by Triton's own environment variable when Triton is imported, hence the child
process: this file, run as a script.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
CAPABILITIES = (80, 89, 90, 100, 103, 120, 121)

# name -> kernel, dtype of x and out, compile-time arguments, warps. Arguments that divide by 16 are marked by `ALIGNED`.
POINTERS = {
    "peaks": "*fp32", "floors": "*fp32", "scale": "*fp32", "words": "*i32", "scales": "*u8",
    "bias": "*bf16", "alpha_a": "*fp32", "alpha_b": "*fp32",
}  # fmt: skip
ALIGNED = ("columns", "row_stride", "N", "K", "a_stride", "b_stride")
FLAT, ROWS = {"FLAT": True}, {"FLAT": False}
MATMUL = {"HAS_BIAS": True, "GROUP_M": 8}
CASES = {
    "peaks": ("peaks_kernel", "bf16", {"BLOCKS": 512, **FLAT}, 8),
    "peaks-rows": ("peaks_kernel", "fp32", {"BLOCKS": 512, **ROWS}, 8),
    "global_scale": ("global_scale_kernel", "fp32", {"RULE": 1, "CHUNK": 4096}, 8),
    "global_scale-amax": ("global_scale_kernel", "fp32", {"RULE": 2, "CHUNK": 4096}, 8),
    "operand": ("operand_kernel", "bf16", {"BLOCKS": 256, "APPLY": True, **FLAT}, 8),
    "operand-rows": ("operand_kernel", "fp16", {"BLOCKS": 256, "APPLY": False, **ROWS}, 8),
    "operand_pow2": ("operand_kernel_pow2", "bf16", {"BLOCKS": 256, **FLAT}, 8),
    "operand_pow2-rows": ("operand_kernel_pow2", "fp32", {"BLOCKS": 256, **ROWS}, 8),
    "repair_pow2": ("repair_kernel_pow2", "bf16", {"BLOCKS": 256, "CHUNK": 4096, "LANES": 64, **FLAT}, 8),
    "quantize": ("quantize_kernel", "bf16", {"BLOCKS": 256, **FLAT}, 8),
    "quantize-rows": ("quantize_kernel", "fp32", {"BLOCKS": 256, **ROWS}, 8),
    "dequantize": ("dequantize_kernel", "bf16", {"BLOCKS": 512, "APPLY": True, **FLAT}, 8),
    "dequantize-rows": ("dequantize_kernel", "fp16", {"BLOCKS": 512, "APPLY": False, **ROWS}, 8),
    "matmul": ("matmul_kernel", "bf16", {"EVEN_K": True, **MATMUL}, None),
    "matmul-small": ("matmul_kernel", "fp16", {"EVEN_K": False, **MATMUL}, None),
}


def _compile(name: str, capability: int) -> str:
    """Build one case; returns "" or what is wrong with it."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qatpatch.kernels import triton_nvfp4_kernels, triton_nvfp4_launch

    kernel_name, dtype, constants, warps = CASES[name]
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if kernel_name == "matmul_kernel":
        row = next(r for r in triton_nvfp4_launch.MATMUL_TILES if divmod(capability, 10) >= r[0])
        tile = row[2] if name.endswith("small") else row[1]
        constants = {**constants, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
        options |= {"num_warps": tile.warps, "num_stages": tile.stages}
    kernel = getattr(triton_nvfp4_kernels, kernel_name)
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        tensor = argument in ("x", "out", "a", "b")
        signature[argument] = f"*{dtype}" if tensor else POINTERS.get(argument, "i32")
        if signature[argument].startswith("*") or argument in ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    problems = []
    if b".target sm_" not in built.asm["ptx"].encode() or not built.asm["cubin"]:
        problems.append("no machine code")
    if ".ftz" in built.asm["ptx"]:
        problems.append("flushes subnormal numbers")
    if "fma.rn" in built.asm["ptx"] and not ("operand" in name or "repair" in name or "quantize" in name):
        problems.append("fuses a multiplication and an addition")
    if " .local " in built.asm["ptx"]:
        problems.append("keeps an array in local memory")
    stack = _stack_bytes(built.asm["cubin"])
    if stack:
        problems.append(f"spills {stack} bytes a thread")
    return ", ".join(problems)


def _stack_bytes(cubin: bytes) -> int:
    from tempfile import NamedTemporaryFile

    from triton import knobs

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(text.split("STACK:")[1].split()[0])


@pytest.fixture(scope="module")
def builds() -> dict[tuple[str, int], str]:
    jobs = [(name, capability) for capability in CAPABILITIES for name in CASES]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return dict(zip(jobs, pool.map(_compile, *zip(*jobs, strict=True), chunksize=8), strict=True))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_builds_without_a_gpu(builds, capability):
    assert {name: builds[name, capability] for name in CASES if builds[name, capability]} == {}


def test_arithmetic_is_exact_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "all exact" in done.stdout


def test_import_needs_triton_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in list(sys.modules):
        if name.startswith("qatpatch.kernels.triton_"):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="pip install triton"):
        importlib.import_module("qatpatch.kernels.triton_nvfp4")
