"""The Triton NVFP4 kernels without a GPU: they build for every architecture, and their arithmetic is exact.

Two things can be had on a CPU. Triton compiles ahead of time to machine code: that each kernel still builds, without
spilling registers, is checked for sm_80 to sm_121. And Triton's interpreter runs the kernels on CPU tensors: exact for
the float32 and integer operations that they consist of (not for bf16 results, fp8, or bf16 dots, so none of those is
tested here). The interpreter is chosen by Triton's own environment variable when Triton is imported, hence the child
process: this file, run as a script.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from qatpatch.kernels import kernel_named, requirements, triton_linear
from qatpatch.kernels import triton_nvfp4_launch as launch

ROOT = Path(__file__).parents[1]
# Capability -> bytes of shared memory that a program may take.
CAPABILITIES = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376}

# The integers in ALIGNED are compiled as multiples of 16.
ALIGNED = ("columns", "row_stride", "N", "K", "a_stride", "b_stride")
POINTERS = {
    "peaks": "*fp32", "stats": "*fp32", "prints": "*i32", "words": "*i32", "scales": "*u8",
    "scale": "*fp32", "x_scale": "*fp32", "w_scale": "*fp32",
    "bias": "*bf16", "alpha_a": "*fp32", "alpha_b": "*fp32",
}  # fmt: skip
FLAT, ROWS = {"FLAT": True}, {"FLAT": False}
MATMUL = {"HAS_BIAS": True, "GROUP_M": 8}
# name -> kernel, dtype of x and out, its tile in the launch module, compile-time arguments.
CASES = {
    "peaks": ("peaks_kernel", "bf16", "PEAKS_TILE", FLAT),
    "peaks, rows": ("peaks_kernel", "fp32", "PEAKS_TILE", ROWS),
    "amax": ("global_scale_kernel", "fp32", None, {"RULE": 0, "CHUNK": 4096}),
    "global scale, pow2": ("global_scale_kernel", "fp32", None, {"RULE": 1, "CHUNK": 4096}),
    "global scale, amax": ("global_scale_kernel", "fp32", None, {"RULE": 2, "CHUNK": 4096}),
    "operand": ("operand_kernel", "bf16", "OPERAND_TILE", {"APPLY": True, **FLAT}),
    "operand, rows": ("operand_kernel", "fp16", "OPERAND_TILE", {"APPLY": False, **ROWS}),
    "pow2 operand": ("operand_kernel_pow2", "bf16", "OPERAND_TILE", FLAT),
    "pow2 operand, rows": ("operand_kernel_pow2", "fp32", "OPERAND_TILE", ROWS),
    "kept operand": ("kept_operand_kernel_pow2", "bf16", "OPERAND_TILE", {}),
    "repair": ("repair_kernel_pow2", "bf16", "OPERAND_TILE", {"CHUNK": 4096, "LANES": 64, **FLAT}),
    "pow2 pair": ("operand_pair_kernel_pow2", "bf16", "OPERAND_TILE", FLAT),
    "repair, pair": ("repair_pair_kernel_pow2", "bf16", "OPERAND_TILE", {"CHUNK": 4096, "LANES": 64, **FLAT}),
    "quantize": ("quantize_kernel", "bf16", "QUANTIZE_TILE", FLAT),
    "quantize, rows": ("quantize_kernel", "fp32", "QUANTIZE_TILE", ROWS),
    "dequantize": ("dequantize_kernel", "bf16", "DEQUANTIZE_TILE", {"APPLY": True, **FLAT}),
    "dequantize, rows": ("dequantize_kernel", "fp16", "DEQUANTIZE_TILE", {"APPLY": False, **ROWS}),
    "matmul": ("matmul_kernel", "bf16", None, {"EVEN_K": True, **MATMUL}),
    "matmul, few rows": ("matmul_kernel", "fp16", None, {"EVEN_K": False, **MATMUL}),
}


def _compile(name: str, capability: int) -> str:
    """Build one case; returns "" or what is wrong with it."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qatpatch.kernels import triton_nvfp4_kernels, triton_nvfp4_launch

    kernel_name, dtype, tile_name, constants = CASES[name]
    options = {"num_warps": 8, "enable_fp_fusion": False}
    if tile_name:
        tile = getattr(triton_nvfp4_launch, tile_name)
        constants = {**constants, "BLOCKS": tile.blocks}
        options["num_warps"] = tile.warps
    if kernel_name == "matmul_kernel":
        row = next(r for r in triton_nvfp4_launch.MATMUL_TILES if divmod(capability, 10) >= r[0])
        tile = row[2] if "few" in name else row[1]
        constants = {**constants, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
        options |= {"num_warps": tile.warps, "num_stages": tile.stages}
    kernel = getattr(triton_nvfp4_kernels, kernel_name)
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        tensor = argument in ("x", "w", "out", "x_out", "w_out", "a", "b")
        signature[argument] = f"*{dtype}" if tensor else POINTERS.get(argument, "i32")
        if signature[argument].startswith("*") or argument in ALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    problems = []
    if dtype == "bf16" and constants.get("FLAT", name == "kept operand") and "v4.b32" not in built.asm["ptx"]:
        problems.append("moves less than 16 bytes at a time")
    if ".ftz" in built.asm["ptx"]:
        problems.append("flushes subnormal numbers")
    if built.metadata.shared > CAPABILITIES[capability]:
        problems.append(f"takes {built.metadata.shared} bytes of shared memory")
    if stack := _stack_bytes(built.asm["cubin"]):
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


def test_newton_step_gives_the_rounded_reciprocal_of_every_block_scale():
    """The one approximate instruction: from any start within 4 ulp, in exact rational arithmetic with FMA roundings."""

    def rounded(value: Fraction) -> Fraction:  # to 24 significant bits, nearest even
        exponent = math.frexp(float(value))[1]
        unit = Fraction(2) ** (exponent - 24)
        return round(value / unit) * unit

    for eighths in range(8, 16):
        scale = Fraction(eighths, 8)
        wanted = rounded(1 / scale)
        for ulps in range(-4, 5):
            start = wanted + ulps * Fraction(2) ** (math.frexp(float(wanted))[1] - 24)
            residual = 1 - scale * start
            assert rounded(start * (rounded(residual) if residual else 0) + start) == wanted


def _child(task: str, **environment: str) -> str:
    search_path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, __file__, task],
        env={**os.environ, "PYTHONPATH": search_path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_arithmetic_is_exact_in_the_interpreter():
    assert "all exact" in _child("interpret", TRITON_INTERPRET="1")


def test_launches_specialise_and_compile():
    """What ahead-of-time compilation does not see: how launches look at each argument, call after call."""
    assert "all compiled" in _child("launch")


def test_without_triton_the_rows_say_so(monkeypatch):
    monkeypatch.setattr(requirements, "installed_version", lambda name: None)
    for row in ("triton_linear", "triton_attention"):
        (reason,) = [requirement.unmet_reason((9, 0)) for requirement in kernel_named(row).requires]
        assert reason.startswith("needs triton >=3.6, which is not installed") and "pip install triton" in reason


def test_what_cannot_be_launched_is_refused():
    """Before any launch, so on CPU tensors too."""
    x, one = torch.randn(4, 32), torch.ones(())
    codes, scales = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    a, b = torch.randn(4, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    for call in (
        lambda: launch.global_scale(x.double(), 1),
        lambda: launch.quantize(x.double(), one),
        lambda: launch.operand(x.int(), one, torch.bfloat16, True),
        lambda: launch.operand_pow2(x.double(), torch.bfloat16),
        lambda: launch.operand_pair_pow2(x.double(), x.double(), torch.bfloat16),
    ):
        with pytest.raises(TypeError, match="expected float32, bfloat16 or float16, got torch.(float64|int32)"):
            call()
    for call in (lambda: launch.quantize(x[0, 0], one), lambda: launch.operand_pow2(x[0, 0], torch.bfloat16)):
        with pytest.raises(ValueError, match="needs an axis"):
            call()
    for scale in (torch.ones(2), one.double(), torch.ones(0)):
        for call in (
            lambda scale=scale: launch.quantize(x, scale),
            lambda scale=scale: launch.operand(x, scale, torch.bfloat16, True),
            lambda scale=scale: launch.dequantize(codes, scales, scale, 32, torch.bfloat16, True),
            lambda scale=scale: launch.scaled_matmul(a, b, scale, one, None, torch.bfloat16),
            lambda scale=scale: launch.scaled_matmul(a, b, one, scale, None, torch.bfloat16),
        ):
            with pytest.raises(ValueError, match="expected one float32 number as global scale"):
                call()
    for wrong in ((codes, scales, 40), (codes, scales[:, :1], 32), (codes, scales[:3], 32), (codes[:, :8], scales, 32)):
        *packed, columns = wrong
        with pytest.raises(ValueError, match=f"{columns} columns need packed codes"):
            launch.dequantize(*packed, one, columns, torch.bfloat16, True)
    with pytest.raises(TypeError, match="uint8"):
        launch.dequantize(codes, scales.view(torch.float8_e4m3fn), one, 32, torch.bfloat16, True)
    for left, right in ((x, x), (a, b.half())):
        with pytest.raises(TypeError, match="two bfloat16 or two float16"):
            launch.scaled_matmul(left, right, one, one, None, torch.bfloat16)
    with pytest.raises(ValueError, match="weight"):
        launch.scaled_matmul(a[:, :16], b, one, one, None, torch.bfloat16)
    for bias in (torch.ones(7), torch.ones(8, 1), torch.ones(8).double()):
        with pytest.raises(ValueError, match="expected a bias"):
            launch.scaled_matmul(a, b, one, one, bias, torch.bfloat16)
    with pytest.raises(ValueError, match="rule='max' is not a rule; choose one of pow2, amax"):
        triton_linear.quantize(x, global_scale=None, rule="max")


def interpreted_checks() -> None:
    """Run in the child process: every kernel on CPU tensors against `qatpatch.nvfp4`, bit for bit."""
    from qatpatch import nvfp4
    from qatpatch.kernels import triton_nvfp4_launch as launch
    from qatpatch.kernels.triton_nvfp4_kernels import AMAX, POW2, RAW

    tile = launch.Tile(16, 4)
    torch.manual_seed(0)
    normal = torch.randn(6, 96)
    wide = torch.exp(4 * torch.randn(8, 64)) * normal[0, :64].sign()
    wide[0, 0] = 1e9  # most other blocks get subnormal or zero scales: work for the repair
    odd = torch.randn(8, 64)
    odd[0, 3], odd[1, 20], odd[2], odd[3, :16] = float("inf"), float("nan"), -0.0, 1e-30
    odd[4] *= 1e-38
    scales = torch.arange(1, 127, 6, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = torch.tensor([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 6])
    middle = (scales[:, None] * middle).view(torch.int32)
    ties = torch.stack([middle, middle + 1, middle - 1]).view(torch.float32).reshape(-1, 16)
    # Block amaxes whose sixth lies halfway between two E4M3 numbers, or one ulp off.
    halfway = 6 * torch.arange(17, 32, 2) / 16 * torch.tensor([[2.0**-12], [2.0**-8], [1.0], [2.0**8]])
    halfway = torch.stack([halfway.view(torch.int32) + d for d in (-1, 0, 1)]).view(torch.float32).reshape(-1, 1)
    inputs = {
        "normal": normal,
        "halfway": torch.cat([halfway, torch.rand(len(halfway), 15) * halfway], 1),
        "wide": wide,
        "odd": odd,
        "ties": torch.where(ties.isfinite(), ties, 0.0),
        "ragged": torch.randn(5, 100) * torch.logspace(-6, 3, 5)[:, None],
        "one short block": torch.randn(4, 8),
        "strided": torch.randn(5, 128)[:, 24:88],
        "transposed": torch.randn(40, 5).t(),
        "tiny": torch.randn(4, 32) * 1e-36,
        "tinier": torch.randn(4, 32) * 5e-39,
        "subnormal": torch.randn(4, 32) * 1e-44,
        "huge": torch.randn(4, 32) * 3e37,
        "zero": torch.zeros(3, 32).copysign(torch.randn(3, 1)),
        "nan": torch.full((3, 32), float("nan")),
    }
    for name, x in inputs.items():
        pow2 = nvfp4.choose_global_scale(x)
        operand, scale = launch.operand_pow2(x, torch.float32, tile)
        _same(scale, pow2, name, "pow2 scale")
        _same(operand, nvfp4.round_to_nvfp4(x, pow2, dtype=torch.float32), name, "pow2 operand")
        found = launch.operand_pair_pow2(x, wide, torch.float32, tile)
        for tensor, operand, scale in zip((x, wide), found[::2], found[1::2], strict=True):
            wanted = nvfp4.choose_global_scale(tensor)
            _same(scale, wanted, name, "pow2 scale in a pair")
            _same(operand, nvfp4.round_to_nvfp4(tensor, wanted, dtype=torch.float32), name, "in a pair")
        _same(launch.global_scale(x, RAW.value, tile), nvfp4.finite_amax(x), name, "amax")
        _same(launch.global_scale(x, POW2.value, tile), pow2, name, "pow2 rule")
        amax_scale = nvfp4.choose_global_scale(x, "amax")
        _same(launch.global_scale(x, AMAX.value, tile), amax_scale, name, "amax rule")
        for scale, apply in ((pow2, False), (amax_scale, True), (torch.tensor(0.0137), False)):
            wanted = nvfp4.quantize(x, global_scale=scale)
            packed, block_scale = launch.quantize(x, scale, tile)
            _same(packed, wanted.packed, name, "codes")
            _same(block_scale, wanted.block_scale.view(torch.uint8), name, "block scales")
            dense = nvfp4.dequantize(wanted) if apply else nvfp4.dequantize_without_global_scale(wanted)
            _same(launch.operand(x, scale, torch.float32, apply, tile), dense, name, "operand")
            back = launch.dequantize(packed, block_scale, scale, x.shape[-1], torch.float32, apply, tile)
            _same(back, dense, name, "dequantized")
    _check_kept(launch, nvfp4, tile)
    for rows, columns, depth in ((5, 24, 40), (33, 17, 64), (1, 16, 0)):
        a, b, bias = torch.randn(rows, depth).half(), torch.randn(columns, depth).half(), torch.randn(columns)
        alpha, beta = torch.tensor(3e38), torch.tensor(1e-38)  # total * alpha alone would overflow
        small = launch.MatmulTile(16, 16, 32, 1, 1)
        out = launch.scaled_matmul(a, b, alpha, beta, bias, torch.float32, small)
        wanted = a.double() @ b.double().T * alpha.double() * beta.double() + bias.double()
        if not torch.allclose(out.double(), wanted, rtol=1e-5, atol=1e-5):
            raise SystemExit(f"matmul {rows} x {depth} x {columns}: {(out - wanted).abs().max()} off")
    print("all exact")


def _check_kept(launch, nvfp4, tile) -> None:
    """A kept weight: after any change the bits of a fresh quantization, and what did not change is not written."""
    weight = torch.randn(40, 64).half()  # ten tiles of 16 blocks
    kept = launch.kept_buffers(weight, torch.float32, tile)

    def step(what: str, untouched: int) -> None:
        """Quantize; ``untouched`` tiles, poisoned before, must have been left alone, and the rest must be right."""
        before = kept.operand.clone()
        poison = kept.operand.view(10, -1)
        poison[:, 0] = 12345.0
        found, scale = launch.kept_operand_pow2(weight, kept, tile)
        left = poison[:, 0] == 12345.0
        if int(left.sum()) != untouched:
            raise SystemExit(f"kept, {what}: {int(left.sum())} tiles untouched instead of {untouched}")
        poison[:, 0] = torch.where(left, before.view(10, -1)[:, 0], poison[:, 0])
        wanted = nvfp4.choose_global_scale(weight.float())
        _same(scale, wanted, "kept scale", what)
        _same(found, nvfp4.round_to_nvfp4(weight.float(), wanted, dtype=torch.float32), "kept operand", what)

    step("first", 0)
    step("unchanged", 10)
    weight.data.view(-1)[300] += 0.5  # what no version counter shows
    step("one element", 9)
    weight.data.view(-1)[[5, 6]] = weight.view(-1)[[6, 5]]
    step("two elements of one word changed places", 9)
    weight.data.view(-1)[[2, 200]] = weight.view(-1)[[200, 2]]
    step("two elements of one tile changed places", 9)
    weight.data.view(-1)[1030] = -weight.view(-1)[1030]
    step("a sign", 9)
    weight.data.view(-1, 16)[3] *= 1e-3
    weight.data.view(-1)[2440] = 100.0  # another global scale: the small block's scale becomes subnormal
    step("a subnormal block scale by another tile's amax", 8)
    step("the same", 9)  # the repaired tile is done again each time
    weight.data.view(-1)[2440] = 0.5
    step("normal again: what the repair wrote is stale", 8)
    step("and kept", 10)
    weight.data.view(-1)[0] = float("nan")
    step("NaN", 9)
    step("NaN kept", 10)


def _same(found: torch.Tensor, wanted: torch.Tensor, *what: str) -> None:
    """Equal shape, dtype and bits; a NaN equals any other."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise SystemExit(f"{what}: {found.shape} {found.dtype} instead of {wanted.shape} {wanted.dtype}")
    if found.is_floating_point():
        nan = found.isnan() & wanted.isnan()
        found, wanted = found.masked_fill(nan, 0.0), wanted.masked_fill(nan, 0.0)
        found, wanted = found.contiguous().view(torch.int32), wanted.contiguous().view(torch.int32)
    if not torch.equal(found, wanted):
        raise SystemExit(f"{what}: {int((found != wanted).sum())} of {found.numel()} differ")


def launch_checks() -> None:
    """Run in the child process: every launch of this module's kernels."""
    from qatpatch.kernels import triton_nvfp4_launch as launch

    check_launches(90, _launches(launch), {kernel for kernel, *_ in CASES.values()})


def check_launches(capability: int, calls: Iterable[Callable[[], object]], kernels: set[str]) -> None:
    """Launches up to the driver, on a driver that claims a device of ``capability``; ``kernels`` are all launched.

    Each call is made twice: the first time through Triton's JIT, which compiles, the second time directly. What a
    direct launch runs must be what the JIT chooses for the same arguments.
    """
    import fake_driver

    jit, direct = fake_driver.install(capability, CAPABILITIES[capability])
    for call in calls:
        fake_driver.twice(call, jit, direct)
    if set(direct) != kernels:
        raise SystemExit(f"launched directly: {sorted(set(direct))}")
    print(f"all compiled: {len(jit)} by the JIT, {len(direct)} direct")


def _launches(launch):
    """Calls that differ in whatever Triton specialises on: dtypes, alignments, integers (1, multiples of 16, wide)."""

    def shifted(rows, columns, offset):
        return torch.randn(rows * columns + offset)[offset:].view(rows, columns)

    inputs = (
        torch.randn(300, 512).bfloat16(),
        torch.randn(7, 100).bfloat16(),
        shifted(7, 64, 3),
        torch.randn(1, 1),
    )
    alike = (torch.randn(1, 1), torch.randn(7, 60), torch.randn(7, 64)[:, :60], torch.randn(7, 60).half())
    one, (_, large, small) = torch.ones(()), launch.MATMUL_TILES[1]
    for x in inputs:
        for rule in (0, 1, 2) if x is inputs[0] else (1,):
            yield lambda x=x, rule=rule: launch.global_scale(x, rule)
        scale = torch.ones(3)[len(x) % 3]
        packed, block_scale = launch.quantize(x, scale)
        yield lambda x=x, scale=scale: launch.quantize(x, scale)
        yield lambda x=x, scale=scale: launch.operand(x, scale, x.dtype, True)
        yield lambda x=x: launch.operand_pow2(x, x.dtype)
        if launch.is_keepable(x):
            kept = launch.kept_buffers(x, x.dtype)
            yield lambda x=x, kept=kept: launch.kept_operand_pow2(x, kept)
        yield lambda x=x: launch.operand_pair_pow2(x, x[: len(x) // 2 + 1], x.dtype)
        yield lambda x=x, p=packed, b=block_scale: launch.dequantize(p, b, one, x.shape[-1], x.dtype, True)
    for x in alike:
        yield lambda x=x: launch.operand(x, one, torch.float32, True)
    for tiles in (16, 2**31):
        yield lambda tiles=tiles: launch._global_scale_launcher(1)(1, (one, one), (tiles,))
    for x in inputs[:2]:
        weight = torch.randn(48, x.shape[-1]).to(x.dtype)
        for a in (x, x[:1], x.repeat(1, 2)[:, 1 : 1 + x.shape[-1]]):
            yield lambda a=a, w=weight: launch.scaled_matmul(a, w, one, one, None, a.dtype, small)
        yield lambda x=x, w=weight: launch.scaled_matmul(x, w, one, one, one.expand(48), torch.float32, large)


if __name__ == "__main__":
    {"interpret": interpreted_checks, "launch": launch_checks}[sys.argv[1]]()
