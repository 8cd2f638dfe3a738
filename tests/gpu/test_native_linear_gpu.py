"""The kernels for FP4 tensor cores on a GPU: the quantizer to the bit on any, the GEMMs where they run.

On sm_90 Triton from 3.9 on computes `tl.dot_scaled` with bfloat16 products, exact ones: there the GEMM's own work
(addresses, masks, pipelining, epilogue) is checked on hardware, though not the FP4 instruction.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import triton

from qatpatch import nvfp4
from qatpatch.kernels import flashinfer_linear, layouts, triton_scaled, triton_tiled

DEVICE = torch.device("cuda", 0)
CAPABILITY = torch.cuda.get_device_capability(DEVICE)
NATIVE = CAPABILITY in triton_scaled.TARGETS
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
SHAPES = [(1, 16), (3, 100), (65, 24), (127, 64), (128, 64), (130, 17), (300, 208), (1000, 4096), (77, 16384)]


def poison(size: int = 1 << 26) -> None:
    """Leaves 0xA5 in the memory that the next small allocations get."""
    for length in (1 << 9, 1 << 12, 1 << 16, 1 << 20, size):
        blocks = [torch.full((length,), 0xA5, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
        del blocks


@pytest.mark.gpu
@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tiled_quantizer_bit_for_bit(rows, columns, dtype):
    torch.manual_seed(rows)
    x = torch.randn(rows, columns, device=DEVICE) * torch.logspace(-3, 3, rows, device=DEVICE)[:, None]
    x[rows // 2] = 0.0
    if rows > 4:
        x[1, 0], x[2, -1] = float("nan"), float("inf")
    x = x.to(dtype)
    for view in (x, torch.cat([x, x], 1)[:, :columns], x.t().contiguous().t()):
        for rule, given in (("pow2", None), ("amax", None), ("pow2", torch.tensor(0.0137, device=DEVICE))):
            poison()
            packed, tiled, scale = triton_tiled.quantize_activation(view, global_scale=given, rule=rule)
            host = view.cpu().contiguous()
            wanted_scale = nvfp4.choose_global_scale(host, rule) if given is None else given.cpu()
            wanted = nvfp4.quantize(host, global_scale=wanted_scale)
            assert float(scale) == float(wanted_scale)
            assert torch.equal(packed.cpu(), wanted.packed)
            assert torch.equal(tiled.cpu(), layouts.tile_scales(wanted.block_scale.view(torch.uint8)))


def operand(rows: int, columns: int, seed: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Packed codes, tiled scales and global scale on the GPU, and the float64 values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 1, rows)[:, None] / columns**0.5
    q = nvfp4.quantize(x)
    tiled = layouts.tile_scales(q.block_scale.view(torch.uint8))
    return tuple(t.to(DEVICE) for t in (q.packed, tiled, q.global_scale)), nvfp4.dequantize(q).double()


def check(function, rows: int, columns: int, out: int, dtype: torch.dtype, roundings: int, **options) -> None:
    (x, x_values), (weight, w_values) = operand(rows, columns, 0), operand(out, columns, 1)
    for bias in (None, torch.randn(out).bfloat16()):
        poison()
        found = function(*x, *weight, None if bias is None else bias.to(DEVICE), out_dtype=dtype, **options).cpu()
        wanted, size = x_values @ w_values.T, x_values.abs() @ w_values.abs().T
        if bias is not None:
            wanted, size = wanted + bias.double(), size + bias.double().abs()
        bound = size * 2.0**-20 + roundings * torch.finfo(dtype).eps / 2 * (wanted.abs() + size * 2.0**-20 + 1)
        assert found.shape == wanted.shape and ((found.double() - wanted).abs() <= bound).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows, columns, out", [(1, 16, 1), (5, 100, 130), (300, 4096, 512), (257, 272, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_gemm(rows, columns, out, dtype):
    options = {}
    if not NATIVE:
        if CAPABILITY[0] != 9 or TRITON < (3, 9):
            pytest.skip(f"tl.dot_scaled runs on sm_100 to sm_121, and from Triton 3.9 on sm_90; this is {CAPABILITY}")
        options["tile"] = triton_scaled.Tile(128, 128, 128, 8, 2)
    elif triton_scaled._triton_version() < triton_scaled.TARGETS[CAPABILITY][1]:
        pytest.skip(f"this Triton ({triton.__version__}) is too old for {CAPABILITY}")
    check(triton_scaled.scaled_matmul, rows, columns, out, dtype, 1, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("rows, columns, out", [(1, 32, 32), (5, 96, 160), (300, 4096, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flashinfer_gemm(rows, columns, out, dtype):
    if not NATIVE or importlib.util.find_spec("flashinfer") is None:
        pytest.skip(f"flashinfer's mm_fp4 needs flashinfer and an sm_100 to sm_121 GPU; this is {CAPABILITY}")
    assert flashinfer_linear.alignment_reason(columns, out) is None
    check(flashinfer_linear.scaled_matmul, rows, columns, out, dtype, 2)


@pytest.mark.gpu
def test_other_gpus_are_refused():
    if NATIVE:
        pytest.skip("this GPU has FP4 tensor cores")
    (x, _), (weight, _) = operand(4, 64, 0), operand(8, 64, 1)
    with pytest.raises(RuntimeError, match="needs FP4 tensor cores"):
        triton_scaled.scaled_matmul(*x, *weight, None, out_dtype=torch.bfloat16)
