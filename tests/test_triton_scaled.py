"""The Triton kernels for FP4 tensor cores without such a GPU: what can be known of them on a CPU.

They build for every architecture that they claim, with the block-scaled MMA instruction in their PTX. In Triton's
interpreter the quantizer is exact (its float32 and integer operations are), and the GEMM's addresses, masks and
epilogue are, once `tl.dot_scaled`, which the interpreter gets wrong, is computed by numpy from the format's value
tables. The interpreter is chosen by Triton's own environment variable when Triton is imported, hence the child process:
this file, run as a script.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch
from test_triton_nvfp4 import CAPABILITIES, _stack_bytes, check_launches

from qatpatch.errors import KernelUnavailable

ROOT = Path(__file__).parents[1]
NATIVE = (100, 103, 120, 121)
# The PTX of Triton 3.6 and of 3.9 spell the block size differently.
INSTRUCTION = {
    10: r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale\.(block16|scale_vec::4X)",
    12: r"mma\.sync\.aligned\.m16n8k64\.row\.col\.kind::mxf4nvf4\.block_scale\.scale_vec::4X"
    r"\.f32\.e2m1\.e2m1\.f32\.ue4m3",
}
POINTERS = {
    "words": "*i32", "scales": "*u8", "scale": "*fp32", "a": "*u8", "b": "*u8", "a_scales": "*u8", "b_scales": "*u8",
    "bias": "*bf16", "alpha_a": "*fp32", "alpha_b": "*fp32",
}  # fmt: skip
# name -> dtype of x or out, whether sizes are multiples of 16 (K also of the tile's), has a bias.
QUANTIZERS = {"bf16": ("bf16", True), "fp32, ragged": ("fp32", False)}
MATMULS = {
    "bf16": ("bf16", True, True),
    "fp32, no bias": ("fp32", True, False),
    "fp16, ragged": ("fp16", False, True),
}


def compile_ahead(kernel, capability: int, dtype: str, constants: dict, aligned: tuple[str, ...], options: dict):
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        signature[argument] = f"*{dtype}" if argument in ("x", "out") else POINTERS.get(argument, "i32")
        if signature[argument].startswith("*") or argument in aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"enable_fp_fusion": False, **options}
    return triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def build_quantizer(name: str, capability: int) -> str:
    """Build one case; returns "" or what is wrong with it."""
    from qatpatch.kernels import triton_tiled

    dtype, even = QUANTIZERS[name]
    aligned = ("columns", "row_stride") if even else ()
    options = {"num_warps": triton_tiled.WARPS}
    built = compile_ahead(triton_tiled.quantize_tiled_kernel, capability, dtype, {}, aligned, options)
    problems = resources(built, capability)
    if even and "ld.global.v4.b32" not in built.asm["ptx"]:
        problems.append("reads less than 16 bytes at a time")
    if ".ftz" in built.asm["ptx"]:
        problems.append("flushes subnormal numbers")
    return ", ".join(problems)


def build_matmul(name: str, capability: int) -> str:
    """Build one case; returns "" or what is wrong with it."""
    from qatpatch.kernels import triton_scaled

    dtype, even, bias = MATMULS[name]
    tile, _ = triton_scaled.TARGETS[divmod(capability, 10)]
    constants = {"HAS_BIAS": bias, "EVEN_K": even, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    constants["GROUP_M"] = triton_scaled.GROUP
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    aligned = ("N", "blocks") if even else ()
    kernel = triton_scaled.scaled_matmul_kernel
    built = compile_ahead(kernel, capability, dtype, constants, aligned, options)
    problems = resources(built, capability)
    ptx = built.asm["ptx"]
    products = re.findall(r"(?:tcgen05\.mma|mma\.sync|wgmma)[\w.:]*", ptx)
    if not products or not all(re.fullmatch(INSTRUCTION[capability // 10], p) for p in products):
        problems.append(f"multiplies by {sorted(set(products))}")
    if even and capability < 120 and "tcgen05.cp" not in ptx:
        problems.append("takes scales to tensor memory through registers")
    for loaded in ptx.split("cp.async.wait_group")[1:]:
        reader = re.search(r"tcgen05\.(cp|mma)", loaded)
        if reader and "fence.proxy.async" not in loaded[: reader.start()]:
            problems.append("reads what it loaded without a proxy fence")
    if even and "cp.async" not in ptx:
        problems.append("does not load ahead")
    return ", ".join(problems)


def resources(built, capability: int) -> list[str]:
    problems = []
    if built.metadata.shared > CAPABILITIES[capability]:
        problems.append(f"takes {built.metadata.shared} bytes of shared memory")
    if stack := _stack_bytes(built.asm["cubin"]):
        problems.append(f"spills {stack} bytes a thread")
    return problems


def _build(job: tuple[str, str, int]) -> str:
    function, name, capability = job
    return {"quantizer": build_quantizer, "matmul": build_matmul}[function](name, capability)


@pytest.fixture(scope="module")
def builds() -> dict[tuple[str, str, int], str]:
    jobs = [("quantizer", name, capability) for name in QUANTIZERS for capability in CAPABILITIES]
    jobs += [("matmul", name, capability) for name in MATMULS for capability in NATIVE]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return dict(zip(jobs, pool.map(_build, jobs, chunksize=4), strict=True))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_builds_without_a_gpu(builds, capability):
    assert {job: problem for job, problem in builds.items() if job[2] == capability and problem} == {}


def test_refusals_say_what_is_missing(monkeypatch):
    from qatpatch.kernels import triton_scaled

    def tile(capability: tuple[int, int], version: tuple[int, ...]):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(triton_scaled, "_triton_version", lambda: version)
        return triton_scaled._tile(torch.device("cuda"))

    assert tile((10, 0), (3, 7, 1)) is tile((10, 3), (3, 9, 0)) and tile((12, 0), (3, 6, 0)) is tile((12, 1), (3, 8, 0))
    for capability, version, wanted in (((10, 0), (3, 6, 0), "3.7.1"), ((12, 1), (3, 7, 1), "3.8.0")):
        with pytest.raises(KernelUnavailable, match=f"needs Triton {wanted} or newer"):
            tile(capability, version)
    with pytest.raises(KernelUnavailable, match="this is sm_90"):
        tile((9, 0), (3, 9, 0))


def test_triton_version_is_read():
    import triton

    from qatpatch.kernels import triton_scaled

    assert ".".join(map(str, triton_scaled._triton_version())) == triton.__version__.partition("+")[0]


def _child(task: str, **environment: str) -> str:
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, __file__, task],
        env={**os.environ, "PYTHONPATH": search_path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_quantizer_is_exact_in_the_interpreter():
    assert "20 shapes exact" in _child("quantize", TRITON_INTERPRET="1")


def test_matmul_reads_and_writes_the_right_places():
    assert "all right" in _child("matmul", TRITON_INTERPRET="1")


def test_launches_specialise_and_compile():
    """What ahead-of-time compilation does not see: how launches look at each argument, call after call."""
    assert "all compiled" in _child("launch")


# What follows runs in the child process.

RAGGED = [
    (1, 16), (1, 8), (2, 40), (3, 100), (7, 64), (16, 48), (31, 80), (33, 16), (63, 128), (65, 24),
    (96, 144), (127, 64), (128, 64), (129, 64), (130, 17), (160, 96), (200, 1), (255, 32), (256, 80), (300, 208),
]  # fmt: skip


def awkward(rows: int, columns: int) -> torch.Tensor:
    """Rows of many magnitudes, with a zero row, a tie, a block whose scale is zero and non-finite values."""
    x = torch.randn(rows, columns) * torch.logspace(-4, 3, rows)[:, None]
    x[rows // 2] = 0.0
    x[0, :8] = torch.tensor([6.0, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0])[:columns]
    x[-1, -16:] = -1e-30
    if rows > 4:
        x[1, 0], x[2, -1] = float("nan"), float("inf")
    return x


def tiles_by_definition(scales: np.ndarray) -> np.ndarray:
    """128x4 tiles written byte by byte."""
    rows, blocks = scales.shape
    per_row = -(-blocks // 4)
    out = np.zeros(-(-rows // 128) * per_row * 512, np.uint8)
    for r in range(rows):
        for c in range(blocks):
            out[(r // 128 * per_row + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[r, c]
    return out.reshape(-(-rows // 128) * 128, per_row * 4)


def quantizer_checks() -> None:
    from triton.runtime import interpreter

    from qatpatch.kernels.triton_tiled import quantize_activation, quantize_tiled

    # The only reduction with a function of ours, a maximum that keeps NaN, takes minutes element by element.
    def maximum(self, inputs):
        return [self.to_tensor(np.maximum.reduce(x.handle.data, self.axis), x.dtype) for x in inputs]

    interpreter.ReduceOps.generic_reduce = maximum
    torch.manual_seed(0)
    for rows, columns in RAGGED:
        x = awkward(rows, columns)
        views = {"contiguous": x, "rows apart": torch.cat([x, x], 1)[:, :columns], "transposed": x.t().contiguous().t()}
        for scale in (2.0**-7, 0.0137):
            wanted = oracle.quantize(x.numpy(), global_scale=scale)
            for name, view in views.items():
                packed, tiled = quantize_tiled(view, torch.tensor(scale))
                if not (packed.numpy() == wanted.packed).all():
                    raise SystemExit(f"{rows} x {columns} {name}: codes differ")
                if not (tiled.numpy() == tiles_by_definition(wanted.scales)).all():
                    raise SystemExit(f"{rows} x {columns} {name}: tiled scales differ")
        for rule in ("pow2", "amax"):
            wanted = oracle.quantize(x.numpy(), rule=rule)
            packed, tiled, scale = quantize_activation(x, global_scale=None, rule=rule)
            same = (packed.numpy() == wanted.packed).all() and float(scale) == wanted.global_scale
            if not (same and (tiled.numpy() == tiles_by_definition(wanted.scales)).all()):
                raise SystemExit(f"{rows} x {columns}, rule {rule}: differs")
    print(len(RAGGED), "shapes exact")


def decode(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 values of codes (R, K / 2), low nibble first, and E4M3 bytes (R, K / 16)."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    values = np.concatenate([oracle.E2M1, -oracle.E2M1])[codes]
    return values * np.repeat(np.append(oracle.E4M3, np.nan)[scales.astype(np.int64)], 16, axis=1)


def matmul_checks() -> None:
    from triton.runtime import interpreter

    from qatpatch.kernels import triton_scaled

    def dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, fast_math, a_k_packed, b_k_packed, total):
        if (a_scale.data.dtype, b_scale.data.dtype) != (np.uint8, np.uint8) or not (a_k_packed and b_k_packed):
            raise SystemExit("dot_scaled was called with other operands")
        product = decode(a.data.view(np.uint8), a_scale.data) @ decode(b.data.T.view(np.uint8), b_scale.data).T
        return interpreter.TensorHandle((total.data + product).astype(np.float32), total.dtype)

    interpreter.InterpreterBuilder.create_dot_scaled = dot_scaled
    rng = np.random.default_rng(0)
    for tile in (triton_scaled.Tile(128, 128, 128, 1, 1), triton_scaled.Tile(128, 256, 64, 1, 1)):
        for rows, columns, depth in ((1, 1, 16), (5, 130, 64), (128, 128, 128), (130, 300, 80), (257, 24, 272)):
            for bias in (None, torch.randn(columns)):
                check_matmul(tile, rng, rows, columns, depth, bias)
    print("all right")


def check_matmul(tile, rng, rows: int, columns: int, depth: int, bias: torch.Tensor | None) -> None:
    from qatpatch.kernels.triton_scaled import scaled_matmul

    a, b = (rng.integers(0, 256, (n, depth // 2), np.uint8) for n in (rows, columns))
    a_scales, b_scales = (rng.integers(0, 127, (n, depth // 16)).astype(np.uint8) for n in (rows, columns))
    a_tiled, b_tiled = (torch.from_numpy(tiles_by_definition(s)) for s in (a_scales, b_scales))
    alphas = torch.tensor(2.0**100), torch.tensor(3.0 * 2.0**-120)  # in the other order an overflow
    x, weight = (torch.from_numpy(a), a_tiled, alphas[0]), (torch.from_numpy(b), b_tiled, alphas[1])
    found = scaled_matmul(*x, *weight, bias, out_dtype=torch.float32, tile=tile)
    wanted = decode(a, a_scales) @ decode(b, b_scales).T * 3.0 * 2.0**-20
    size = np.abs(decode(a, a_scales)) @ np.abs(decode(b, b_scales)).T * 3.0 * 2.0**-20
    if bias is not None:
        wanted, size = wanted + bias.double().numpy(), size + bias.abs().double().numpy()
    if found.shape != (rows, columns) or not (np.abs(found.numpy() - wanted) <= 1e-6 * size).all():
        raise SystemExit(
            f"{rows} x {depth} x {columns}, bias {bias is not None}: off by {abs(found.numpy() - wanted).max()}"
        )


def launch_checks() -> None:
    """On a driver that claims an sm_100 device: calls that differ in whatever Triton specialises on."""
    check_launches(100, launches(), {"quantize_tiled_kernel", "scaled_matmul_kernel"})


def launches():
    from qatpatch.kernels import triton_scaled, triton_tiled

    one, bias = torch.ones(3), torch.randn(300).bfloat16()
    tile, _ = triton_scaled.TARGETS[10, 0]
    for rows, columns, out in ((1, 16, 1), (5, 100, 299), (256, 512, 256)):
        x = torch.randn(rows, columns)
        for inputs in (x, x.bfloat16(), torch.cat([x, x], 1)[:, :columns]):
            yield lambda x=inputs: triton_tiled.quantize_tiled(x, one[1])
        xq = *triton_tiled.quantize_tiled(x, one[0]), one[0]
        weight = *triton_tiled.quantize_tiled(torch.randn(out, columns), one[1]), one[1]
        for b, dtype in ((None, torch.float32), (bias[:out], torch.bfloat16), (bias[1 : out + 1], torch.bfloat16)):
            yield lambda x=xq, w=weight, b=b, dtype=dtype: triton_scaled.scaled_matmul(
                *x, *w, b, out_dtype=dtype, tile=tile
            )


if __name__ == "__main__":
    {"quantize": quantizer_checks, "matmul": matmul_checks, "launch": launch_checks}[sys.argv[1]]()
