"""The Triton NVFP4 kernels on a GPU: bit for bit the torch reference, whatever the layout, size, stream or device.

The reference runs on the CPU copy of the same tensor (`qatpatch.nvfp4`); matmuls are checked against float64.
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qatpatch import nvfp4
from qatpatch.kernels import ops, triton_linear
from qatpatch.kernels import triton_nvfp4_launch as launch
from qatpatch.kernels.triton_nvfp4_kernels import RAW

DEVICE = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROW = "triton_linear"


class kernels:
    """The launches, with the scale chosen where none is given."""

    scaled_matmul = staticmethod(launch.scaled_matmul)

    @staticmethod
    def amax(x):
        return launch.global_scale(x, RAW.value)

    @staticmethod
    def quantize(x, *, global_scale=None, rule="pow2"):
        return triton_linear.quantize(x, global_scale=global_scale, rule=rule)

    @staticmethod
    def operand(x, *, global_scale=None, rule="pow2", dtype=None, apply_global_scale=True):
        dtype = dtype or x.dtype
        if global_scale is None and rule == "pow2" and apply_global_scale:
            return launch.operand_pow2(x, dtype)
        if global_scale is None:
            global_scale = launch.global_scale(x, launch.rule_number(rule))
        return launch.operand(x, global_scale, dtype, apply_global_scale), global_scale

    @staticmethod
    def dequantize(packed, block_scale, global_scale, columns, *, dtype, apply_global_scale=True):
        return launch.dequantize(packed, block_scale, global_scale, columns, dtype, apply_global_scale)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def _same(found: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    """Equal shape, dtype and bits; a NaN equals any other."""
    found, wanted = found.detach().cpu(), wanted.detach().cpu()
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), what
    if found.is_floating_point():
        nan = found.isnan() & wanted.isnan()
        integer = {2: torch.int16, 4: torch.int32}[found.element_size()]
        found, wanted = (t.masked_fill(nan, 0.0).contiguous().view(integer) for t in (found, wanted))
    differ = found != wanted
    assert not differ.any(), f"{what}: {int(differ.sum())} of {differ.numel()}, first at {differ.nonzero()[0].tolist()}"


def _check_against_reference(x: torch.Tensor, dtypes=(None,)) -> None:
    """All kernels on x (on the device) against `nvfp4` on a contiguous CPU copy."""
    host = x.detach().cpu().contiguous()
    _same(kernels.amax(x), nvfp4.finite_amax(host), "amax")
    scales = {rule: nvfp4.choose_global_scale(host, rule) for rule in ("pow2", "amax")}
    scales["foreign"] = torch.tensor(0.0137)
    for name, scale in scales.items():
        given = {"rule": name} if name != "foreign" else {"global_scale": scale.to(x.device)}
        wanted = nvfp4.quantize(host, global_scale=scale)
        packed, block_scale, found = kernels.quantize(x, **given)
        _same(found, scale, f"{name} global scale")
        _same(block_scale, wanted.block_scale.view(torch.uint8), f"{name} block scales")
        _same(packed, wanted.packed, f"{name} codes")
        for dtype in dtypes:
            dtype = dtype or x.dtype
            for apply in (True, False):
                reference = nvfp4.round_to_nvfp4(host, scale, dtype=dtype, apply_global_scale=apply)
                operand, found = kernels.operand(x, dtype=dtype, apply_global_scale=apply, **given)
                assert operand.is_contiguous()
                _same(operand, reference, f"{name} operand {dtype} apply={apply}")
                _same(found, scale, f"{name} operand's global scale")
                back = kernels.dequantize(
                    packed, block_scale, found, x.shape[-1], dtype=dtype, apply_global_scale=apply
                )
                _same(back, reference, f"{name} dequantized {dtype} apply={apply}")


def _heavy(rows: int, columns: int) -> torch.Tensor:
    return torch.distributions.StudentT(1.5).sample((rows, columns)).clamp(-1e30, 1e30)


def _spread(rows: int, columns: int) -> torch.Tensor:
    """Blocks over many binades: subnormal and zero block scales in every tile."""
    exponents = torch.randint(-30, 20, (rows, -(-columns // 16))).float().repeat_interleave(16, 1)[:, :columns]
    return torch.randn(rows, columns) * torch.exp2(exponents)


def _adversarial() -> torch.Tensor:
    """(rows, 64): non-finite values, signed zeros, tiny and huge rows."""
    x = torch.randn(40, 64)
    x[0, 3], x[1, 20], x[2, 63], x[3] = float("inf"), float("nan"), -float("inf"), float("nan")
    x[4], x[5], x[6, :16], x[7] = 0.0, -0.0, 1e-30, x[7] * 1e-36
    x[8], x[9], x[10, 0], x[11] = x[8] * 1e-38, x[9] * 1e-44, -1e4, x[11] * 1e20
    return x


def _ties() -> torch.Tensor:
    """Every E4M3 scale times every E2M1 midpoint, one ulp below, on and above."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    middle = torch.cat([middle, -middle, torch.tensor([0.0, 6.0])])
    middle = (scales[:, None] * middle).view(torch.int32)
    return (
        torch.cat([middle + d for d in (-1, 0, 1)]).clamp(min=-0x7F800000).view(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    )


def _halfway() -> torch.Tensor:
    """Block amaxes whose sixth lies halfway between two E4M3 numbers, or an ulp off."""
    amax = 6 * torch.arange(17, 32, 2) / 16 * torch.exp2(torch.arange(-12, 9)).unsqueeze(1)
    amax = torch.stack([amax.view(torch.int32) + d for d in (-1, 0, 1)]).view(torch.float32).reshape(-1, 1)
    return torch.cat([amax, torch.rand(len(amax), 15) * amax], 1)


KINDS = ["normal", "weights", "heavy", "spread", "adversarial", "ties", "halfway", "tiny", "zero", "nan"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_equals_the_reference(kind, dtype):
    x = {
        "normal": lambda: torch.randn(300, 1024),
        "weights": lambda: torch.randn(1024, 512) * 0.02,
        "heavy": lambda: _heavy(257, 1024),
        "spread": lambda: _spread(128, 1024),
        "adversarial": _adversarial,
        "ties": _ties,
        "halfway": _halfway,
        "tiny": lambda: torch.randn(64, 64) * torch.logspace(-36, -44, 64)[:, None],
        "zero": lambda: torch.zeros(64, 64),
        "nan": lambda: torch.full((64, 64), float("nan")),
    }[kind]()
    _check_against_reference(x.to(DEVICE, dtype))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (lambda: torch.randn(300, 1024), lambda: torch.randn(1024, 1024) * 0.02),
        (lambda: _spread(512, 1024), lambda: torch.randn(16, 1024)),
        (lambda: torch.randn(1, 1024), lambda: _spread(2048, 1024)),
        (_adversarial, lambda: torch.full((3, 64), float("nan"))),
        (lambda: torch.zeros(2, 3, 64), lambda: _heavy(257, 64)),
        (lambda: torch.randn(5, 100), lambda: torch.randn(7, 100)),
        (lambda: torch.randn(0, 64), lambda: torch.randn(7, 64)),
    ],
    ids=["normal", "repaired", "one row", "adversarial", "3-D", "ragged", "empty"],
)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_both_operands_at_once_equal_each_alone(x, weight, dtype):
    for left, right in ((x(), weight()), (weight(), x())):
        left, right = left.to(DEVICE, dtype), right.to(DEVICE, dtype)
        for _ in range(2):  # compiled, then launched directly
            found = launch.operand_pair_pow2(left, right, dtype)
            for tensor, operand, scale in zip((left, right), found[::2], found[1::2], strict=True):
                host = tensor.cpu()
                wanted = nvfp4.choose_global_scale(host)
                _same(scale, wanted, "global scale")
                _same(operand, nvfp4.round_to_nvfp4(host, wanted, dtype=dtype), "operand")


def test_launches_of_one_shape_look_at_every_address():
    """Aligned, unaligned and aligned again: what was compiled for one class of arguments never runs on another."""
    buffer = torch.randn(64 * 256 + 8, device=DEVICE, dtype=BF16)
    weight, one = torch.randn(256, 256, device=DEVICE, dtype=BF16), torch.ones(3, device=DEVICE)
    for offset in (0, 8, 1, 0, 3, 1, 8):
        x = buffer[offset : offset + 64 * 256].view(64, 256)
        _same(kernels.operand(x)[0], kernels.operand(x.clone())[0], f"operand at {offset}")
        _same(launch.operand_pair_pow2(x, weight, BF16)[0], kernels.operand(x.clone())[0], f"pair at {offset}")
        for found, wanted in zip(kernels.quantize(x), kernels.quantize(x.clone()), strict=True):
            _same(found, wanted, f"quantized at {offset}")
        found = kernels.scaled_matmul(x, weight, one[offset % 3], one[0], None, BF16)
        _same(found, kernels.scaled_matmul(x.clone(), weight, one[0], one[0], None, BF16), f"matmul at {offset}")


def test_a_tensor_on_the_host_is_refused_by_a_compiled_launch_too():
    x, scale = torch.randn(64, 256, device=DEVICE), torch.ones((), device=DEVICE)
    for _ in range(2):
        launch.operand(x, scale, BF16, True)
    with pytest.raises(ValueError, match="cpu"):
        launch.operand(x, scale.cpu(), BF16, True)
    torch.cuda.synchronize()


def test_profiler_hooks_hear_of_direct_launches():
    import triton

    x, heard = torch.randn(64, 256, device=DEVICE, dtype=BF16), []
    for _ in range(2):
        wanted = kernels.operand(x)[0]
    hooks, hook = triton.knobs.runtime.launch_enter_hook, lambda metadata: heard.append(metadata.get()["name"])
    hooks.add(hook)
    try:
        found = kernels.operand(x)[0]
    finally:
        hooks.remove(hook)
    _same(found, wanted)
    assert heard == ["operand_kernel_pow2", "repair_kernel_pow2"]


def test_patched_linear_captured_in_a_graph():
    from qatpatch.linear import QATLinear
    from qatpatch.linear_state import LinearSettings, LinearState
    from qatpatch.packed_linear import NVFP4Linear

    layer = torch.nn.Linear(256, 128, device=DEVICE, dtype=BF16)
    layer.__class__, layer.quantization = QATLinear, LinearState(LinearSettings())
    packed, x = NVFP4Linear.from_linear(layer, retain=False), torch.randn(2, 40, 256, device=DEVICE, dtype=BF16)

    def run():
        with torch.no_grad():
            return layer(x), packed(x)

    for _ in range(2):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    x.copy_(torch.randn_like(x) * 7)
    graph.replay()
    left, right = kernels.operand(x.view(80, 256))[0], kernels.operand(layer.weight.detach())[0]
    exact = left.double() @ right.double().T + layer.bias.double()
    for found, again in zip(results, run(), strict=True):
        _same(found, again)
        error = (found.view(80, 128).double() - exact).square().mean().sqrt()
        assert error <= 1.05 * (exact.to(BF16).double() - exact).square().mean().sqrt()


def test_float16_and_other_output_types():
    _check_against_reference(torch.randn(64, 512, device=DEVICE, dtype=FP16))
    _check_against_reference(torch.randn(64, 512, device=DEVICE), dtypes=(BF16, FP16))


@pytest.mark.parametrize("columns", [8, 24, 60, 100])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_ragged_rows_are_padded_not_regrouped(columns, dtype):
    x = torch.randn(77, columns, device=DEVICE)
    x[5] *= 100
    _check_against_reference(x.to(dtype))


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.randn(70, 512, device=DEVICE, dtype=BF16)[:, 64:320],
        lambda: torch.randn(70, 515, device=DEVICE, dtype=BF16)[:, 3:259],
        lambda: torch.randn(64 * 256 + 1, device=DEVICE, dtype=BF16)[1:].view(64, 256),
        lambda: torch.randn(256, 70, device=DEVICE, dtype=BF16).t(),
        lambda: torch.randn(4, 30, 96, device=DEVICE, dtype=BF16)[:, 5:20],
        lambda: torch.randn(4, 8, 30, 64, device=DEVICE, dtype=BF16).transpose(1, 2),
        lambda: torch.randn(1, 256, device=DEVICE, dtype=BF16).expand(40, 256),
        lambda: torch.randn(200, device=DEVICE, dtype=BF16),
    ],
    ids=["strided", "unaligned stride", "unaligned start", "transposed", "3-D slice", "permuted", "expanded", "1-D"],
)
def test_any_layout(view):
    _check_against_reference(view())


def test_packed_codes_at_an_unaligned_address():
    packed, block_scale, scale = kernels.quantize(torch.randn(32, 64, device=DEVICE))
    moved = torch.empty(packed.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(packed.shape).copy_(packed)
    wanted = kernels.dequantize(packed, block_scale, scale, 64, dtype=BF16)
    _same(kernels.dequantize(moved, block_scale, scale, 64, dtype=BF16), wanted)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)])
def test_empty(shape):
    x = torch.empty(shape, device=DEVICE, dtype=BF16)
    packed, block_scale, scale = kernels.quantize(x)
    assert packed.shape == (*shape[:-1], -(-shape[-1] // 16) * 8) and float(scale) == 1.0
    operand, scale = kernels.operand(x)
    assert operand.shape == x.shape and operand.dtype == BF16 and float(scale) == 1.0
    assert kernels.dequantize(packed, block_scale, scale, shape[-1], dtype=FP32).shape == x.shape
    assert float(kernels.amax(x)) == 0.0
    weight, one = torch.randn(32, shape[-1], device=DEVICE, dtype=BF16), torch.ones((), device=DEVICE)
    bias = torch.randn(32, device=DEVICE)
    out = kernels.scaled_matmul(x, weight, one, one, bias, FP32)
    _same(out, bias.expand(*shape[:-1], 32))
    torch.cuda.synchronize()


def test_every_element_is_written():
    """Fresh outputs land in memory that was just filled with NaN."""
    x = torch.randn(100, 1000, device=DEVICE, dtype=BF16)
    wanted = kernels.operand(x)[0].clone()
    for _ in range(3):
        junk = [torch.full((100, 1000), float("nan"), device=DEVICE, dtype=BF16) for _ in range(3)]
        del junk
        _same(kernels.operand(x)[0], wanted)


@pytest.mark.parametrize("more", [-1, 0, 3])
def test_about_2_to_the_31_elements(more):
    """Just below, at and above."""
    columns, rows = 4096, 2**31 // 4096 + more
    x = torch.randn(64, columns, device=DEVICE, dtype=BF16).repeat(rows // 64 + 1, 1)[:rows]
    x[-5:] = torch.randn(5, columns, device=DEVICE, dtype=BF16)
    x[-1, -1] = 100.0  # the amax is the last element
    assert float(kernels.amax(x)) == 100.0
    operand, scale = kernels.operand(x)
    _same(operand[-5:], kernels.operand(x[-5:], global_scale=scale)[0], "operand")
    del operand
    packed, block_scale, _ = kernels.quantize(x, global_scale=scale)
    tail_packed, tail_scale, _ = kernels.quantize(x[-5:], global_scale=scale)
    _same(packed[-5:], tail_packed, "codes")
    _same(block_scale[-5:], tail_scale, "block scales")
    del x
    dense = kernels.dequantize(packed, block_scale, scale, columns, dtype=BF16)
    _same(dense[-5:], kernels.dequantize(tail_packed, tail_scale, scale, columns, dtype=BF16), "dequantized")


def test_narrow_view_with_a_huge_row_stride():
    buffer = torch.empty(2**32 + 4096, device=DEVICE, dtype=BF16)
    x = buffer.as_strided((3, 60), (2**31, 1)).copy_(torch.randn(3, 60))
    _check_against_reference(x)
    weight, one = torch.randn(32, 60, device=DEVICE, dtype=BF16), torch.ones((), device=DEVICE)
    _same(
        kernels.scaled_matmul(x, weight, one, one, None, FP32),
        kernels.scaled_matmul(x.clone(), weight, one, one, None, FP32),
    )


def test_non_default_stream():
    x = torch.randn(4096, 4096, device=DEVICE, dtype=BF16)
    wanted = kernels.operand(x * 3)[0]
    launch.operand_pair_pow2(x, x, BF16)  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a launch on the default stream would read x * 3 before it is written
        found = kernels.operand(x * 3)[0]
        pair = launch.operand_pair_pow2(x * 3, x, BF16)[0]
    stream.synchronize()
    _same(found, wanted)
    _same(pair, wanted)


def test_graph_capture_and_no_synchronisation():
    x = torch.randn(300, 256, device=DEVICE, dtype=BF16)
    weight, bias = torch.randn(128, 256, device=DEVICE, dtype=BF16), torch.randn(128, device=DEVICE, dtype=BF16)

    def run():
        packed, block_scale, scale = kernels.quantize(weight, rule="amax")
        dense = kernels.dequantize(packed, block_scale, scale, 256, dtype=BF16, apply_global_scale=False)
        left, alpha = kernels.operand(x, rule="amax", apply_global_scale=False)
        return kernels.operand(x)[0], kernels.scaled_matmul(left, dense, alpha, scale, bias, BF16), kernels.amax(x)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    x.copy_(torch.randn_like(x) * 7)
    graph.replay()
    for found, wanted in zip(results, run(), strict=True):
        _same(found, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_second_device_while_the_first_is_current():
    with torch.cuda.device(0):
        _check_against_reference(torch.randn(64, 512, device="cuda:1", dtype=BF16))


def test_repeatable():
    x = _spread(512, 1024).to(DEVICE, BF16)
    first = (*kernels.quantize(x), *kernels.operand(x))
    for _ in range(20):
        for found, wanted in zip((*kernels.quantize(x), *kernels.operand(x)), first, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("rule", ["pow2", "amax", "foreign"])
@pytest.mark.parametrize("shape", [(300, 1024, 320), (130, 100, 72), (33, 4096, 4096), (1, 16, 8)], ids=str)
def test_scaled_matmul_rounds_once(rule, shape):
    rows, depth, columns = shape
    x, weight = torch.randn(rows, depth, device=DEVICE), torch.randn(columns, depth, device=DEVICE) * 0.02
    bias = torch.randn(columns, device=DEVICE)
    given = {"rule": rule} if rule != "foreign" else {"global_scale": torch.tensor(3.7e-4, device=DEVICE)}
    a, alpha = kernels.operand(x.to(BF16), apply_global_scale=False, **given)
    b, beta = kernels.operand(weight.to(BF16), apply_global_scale=False, **given)
    for factor in (bias, None):
        exact = (a.double() @ b.double().T) * alpha.double() * beta.double()
        exact = exact if factor is None else exact + factor.double()
        for dtype in (BF16, FP32):
            out = kernels.scaled_matmul(a, b, alpha, beta, factor, dtype)
            error = (out.double() - exact).square().mean().sqrt()
            if dtype == FP32:
                assert error <= 2e-5 * exact.square().mean().sqrt()
            else:
                assert error <= 1.05 * (exact.to(BF16).double() - exact).square().mean().sqrt()


def test_scaled_matmul_takes_any_rows_and_extreme_scales():
    a = torch.randn(2, 50, 128, device=DEVICE, dtype=BF16)
    weight = torch.randn(48, 256, device=DEVICE, dtype=BF16)[:, ::2]
    alpha, beta = torch.tensor(1e-36, device=DEVICE), torch.tensor(1e36, device=DEVICE)
    exact = a.double() @ weight.double().T
    for first, second in ((alpha, beta), (beta, alpha)):
        out = kernels.scaled_matmul(a, weight, first, second, torch.ones((), device=DEVICE).expand(48), FP32)
        torch.testing.assert_close(out.double(), exact + 1, rtol=1e-4, atol=1e-3)
    strided = kernels.scaled_matmul(a[:, 3:40, :], weight, alpha, beta, None, FP32)
    torch.testing.assert_close(strided.double(), exact[:, 3:40], rtol=1e-4, atol=1e-3)


def test_all_matmul_tiles_agree_with_float64():
    a, b = torch.randn(500, 512, device=DEVICE, dtype=FP16), torch.randn(600, 512, device=DEVICE, dtype=FP16)
    one, exact = torch.ones((), device=DEVICE), a.double() @ b.double().T
    capability = torch.cuda.get_device_capability()
    _, *tiles = next(row for row in launch.MATMUL_TILES if capability >= row[0])
    for tile in tiles:
        out = launch.scaled_matmul(a, b, one, one, None, FP32, tile)
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-3)


def test_operators_and_their_fakes():
    x = torch.randn(3, 20, 100, device=DEVICE, dtype=BF16)[:, 2:17]
    scale, weight = torch.tensor(0.01, device=DEVICE), torch.randn(24, 100, device=DEVICE, dtype=BF16)
    packed, block_scale, _ = kernels.quantize(x)
    packed_weight = kernels.quantize(weight)
    a, b = torch.randn(5, 7, 64, device=DEVICE, dtype=BF16), torch.randn(24, 64, device=DEVICE, dtype=BF16)
    bias = torch.randn(24, device=DEVICE, dtype=BF16)
    for operator, arguments in (
        (ops.quantize, (x, None, "amax", ROW)),
        (ops.quantize, (x, scale, "pow2", ROW)),
        (ops.operand, (x, None, "amax", ROW)),
        (ops.operand, (x, scale, "amax", ROW)),
        (ops.operand, (x, None, "pow2", ROW)),
        (ops.operand, (x.half(), None, "pow2", ROW)),
        (ops.operand, (x.float(), scale, "pow2", ROW)),
        (ops.linear, (x, weight, None, None, True, BF16, "pow2", ROW)),
        (ops.linear, (x, weight, None, scale, True, BF16, "amax", ROW)),
        (ops.linear, (x, weight, None, None, False, BF16, "amax", ROW)),
        (ops.packed_linear, (x, *packed_weight, None, None, True, BF16, "pow2", ROW)),
        (ops.packed_linear, (x, *packed_weight, None, scale, True, FP32, "amax", ROW)),
        (ops.packed_operand, (packed, block_scale, scale, 100, BF16, "pow2", ROW)),
        (ops.packed_operand, (packed, block_scale, scale, 100, FP16, "amax", ROW)),
        (ops.matmul, (a, scale, b, scale, None, BF16, "amax", ROW)),
        (ops.matmul, (a, scale, b, scale, bias, FP32, "pow2", ROW)),
        (ops.matmul, (a, None, b, scale, bias, BF16, "amax", ROW)),
    ):
        torch.library.opcheck(operator, arguments)


def test_compiles_without_graph_breaks():
    def function(x, weight, bias):
        packed, block_scale, scale = ops.quantize(weight, None, "amax", ROW)
        dense = ops.packed_operand(packed, block_scale, scale, weight.shape[1], BF16, "amax", ROW)
        left, alpha = ops.operand(x, None, "amax", ROW)
        return ops.operand(x, None, "pow2", ROW)[0] + 1, ops.matmul(left, alpha, dense, scale, bias, BF16, "amax", ROW)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    weight, bias = torch.randn(48, 100, device=DEVICE, dtype=BF16), torch.randn(48, device=DEVICE, dtype=BF16)
    for rows in (7, 130):
        x = torch.randn(2, rows, 100, device=DEVICE, dtype=BF16)
        for found, wanted in zip(compiled(x, weight, bias), function(x, weight, bias), strict=True):
            _same(found, wanted)


def test_refusals():
    x = torch.randn(4, 32, device=DEVICE)
    with pytest.raises(ValueError, match="cpu"):
        kernels.quantize(x.cpu())
    with pytest.raises(ValueError, match="cpu"):
        kernels.operand(x, global_scale=torch.ones(()))
    with pytest.raises(TypeError, match="float64"):
        kernels.operand(x.double())
    with pytest.raises(ValueError, match="not a rule"):
        kernels.operand(x, rule="max", dtype=BF16)
    with pytest.raises(ValueError, match="float32"):
        kernels.quantize(x, global_scale=torch.ones(2, device=DEVICE))
    with pytest.raises(ValueError, match="axis"):
        kernels.quantize(x[0, 0])
    with pytest.raises(ValueError, match="packed codes"):
        kernels.dequantize(*kernels.quantize(x), 40, dtype=BF16)
    with pytest.raises(TypeError, match="bfloat16"):
        kernels.scaled_matmul(x, x, x[0, 0], x[0, 0], None, BF16)
