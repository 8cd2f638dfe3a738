"""The Triton attention kernels without a GPU: their numbers in Triton's interpreter, and that they build.

Four things can be had on a CPU. The interpreter runs the kernels on CPU tensors, exact for the FP32 and FP16 operations
they then consist of; it knows no inline assembly, so a few lines of Python execute that here, from the source of the
kernels. Triton compiles ahead of time for every architecture: no register spills, no matrix product waits for the one
before it. And launches go as far as the compiled kernel under a driver that claims an sm_90 device. The interpreter and
that driver are settings of a process, hence children: this file, run as a script.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_oracle import E2M1, nearest
from attention_oracle import attention as oracle

ROOT = Path(__file__).parents[1]
# Capability -> bytes of shared memory that a program may take.
CAPABILITIES = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376}


# --- the packed rounding of P, executed from its assembly ------------------------------------------------------------


def halves(words: np.ndarray, bf16: bool) -> np.ndarray:
    """float64 values (n, 2), lower half first, of n packed registers."""
    parts = np.stack([words & 0xFFFF, words >> 16], 1).astype(np.uint16)
    if bf16:
        return (parts.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return parts.view(np.float16).astype(np.float64)


def packed(values: np.ndarray, bf16: bool = False) -> np.ndarray:
    """Registers of float64 values (n, 2), each rounded once."""
    if bf16:
        bits = torch.from_numpy(values).float().bfloat16().view(torch.int16).numpy().view(np.uint16)
    else:
        bits = values.astype(np.float16).view(np.uint16)
    return bits[:, 0].astype(np.uint32) | bits[:, 1].astype(np.uint32) << 16


def execute(function, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Run the inline assembly of a kernel function on vectors of registers: $0.. are outputs, then inputs."""
    (text,) = re.findall(r'"""\s*\{(.*?)\}\s*"""', inspect.getsource(function.fn), re.DOTALL)
    registers = {f"${outputs + i}": x for i, x in enumerate(inputs)}
    for line in filter(None, (part.strip() for part in text.split(";"))):
        operation, _, rest = line.partition(" ")
        target, *names = (name.strip() for name in rest.split(","))
        if operation == ".reg":
            continue
        values = [registers[n] if n in registers else np.uint32(int(n, 0)) for n in names]
        pairs = [
            halves(np.broadcast_to(v, inputs[0].shape), "bf16" in operation) for v in values if v.dtype == np.uint32
        ]
        registers[target] = {
            "mov.b32": lambda v, p: v[0],
            "and.b32": lambda v, p: v[0] & v[1],
            "shr.u32": lambda v, p: v[0] >> v[1],
            "cvt.rn.f16x2.f32": lambda v, p: packed(np.stack([v[1], v[0]], 1).astype(np.float64)),
            "max.f16x2": lambda v, p: packed(np.maximum(*p)),
            "mul.rn.f16x2": lambda v, p: packed(p[0] * p[1]),
            "fma.rn.f16x2": lambda v, p: packed(p[0] * p[1] + p[2]),
            "fma.rn.bf16x2": lambda v, p: packed(p[0] * p[1] + p[2], bf16=True),
        }[operation](values, pairs)
    return [registers[f"${i}"] for i in range(outputs)]


@pytest.mark.parametrize("name", ["quantized_p", "quantized_and_plain_p", "quantized_p_bf16"])
def test_assembly_rounds_p(name):
    from qatpatch.kernels import triton_attention_rounding as rounding

    x = np.linspace(0, 6, 60001, dtype=np.float32)[:60000].reshape(-1, 2)
    x[-1] = 0.0, 6.000001
    # Every E4M3 number up to 1/6, and those that a group may get.
    scale = np.array(
        [0.0, *(m / 8 * 2.0**-6 for m in range(1, 8)), *((1 + m / 8) * 2.0**e for e in (-6, -5, -4) for m in range(8))]
    )
    scale = np.resize(scale, x.shape).astype(np.float64)
    sixth = np.linspace(1e-3, 1 / 6, x.size).reshape(x.shape)
    inputs = [x[:, 0], x[:, 1], packed(scale)] + ([packed(sixth)] if name == "quantized_and_plain_p" else [])
    results = execute(getattr(rounding, name), inputs, outputs=len(inputs) - 2)
    found = halves(results[0], name.endswith("bf16"))
    exact = x.astype(np.float64)
    near = np.abs(exact[..., None] - (E2M1[1:] + E2M1[:-1]) / 2).min(-1) < 2.0**-11 * np.maximum(exact, 0.25)
    wanted = nearest(exact, E2M1) * scale
    assert np.array_equal(found[~near], wanted[~near])
    # Next to a tie the result is one of the two neighbours.
    either = [nearest(exact * (1 + d), E2M1) * scale for d in (-0.002, 0.002)]
    assert np.all((found == either[0]) | (found == either[1]))
    if len(results) == 2:
        np.testing.assert_allclose(halves(results[1], False), exact * sixth, rtol=2e-3, atol=1e-7)


# --- numbers, in the interpreter -------------------------------------------------------------------------------------


def child(task: str, **environment: str) -> str:
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


SLOW_TASKS = [pytest.param(task, marks=pytest.mark.slow) for task in ("masks", "layouts")]


@pytest.mark.parametrize("task", ["operands", "lengths", *SLOW_TASKS])
def test_numbers_in_the_interpreter(task):
    assert "all right" in child(task, TRITON_INTERPRET="1")


NAMES = ("out", "out_hp", "row_max", "row_sum", "dq", "dk", "dv")


def made(batch, queries, keys, heads, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, heads, dim) for length in (queries, keys, keys, queries)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def run(data, scheme, mask=None, infer=False):
    from qatpatch.kernels import triton_attention as kernels

    *qkv, d_out = data
    fixed = {"scheme": scheme, "scale": qkv[0].shape[-1] ** -0.5, "attn_mask": mask}
    forward = kernels.forward(*qkv, train=True, **fixed)
    if infer:
        out, out_hp, *stats = kernels.forward(*qkv, train=False, **fixed)
        assert out_hp is None
        for one, other in zip((out, *stats), (forward[0], *forward[2:]), strict=True):
            assert torch.equal(one, other), "inference differs from training"
    return dict(zip(NAMES, (*forward, *kernels.backward(d_out, *qkv, *forward[1:], **fixed)), strict=True))


def compare(found, data, scheme, mask=None):
    """With the oracle. P is kept in FP16 for out_hp, which then enters dq and dk; all else is FP32."""
    arrays = [x.numpy() for x in data]
    mask = None if mask is None else mask.numpy() if mask.dtype == torch.bool else mask.float().numpy()
    wanted = oracle(*arrays, scheme=scheme, scale=data[0].shape[-1] ** -0.5, mask=mask)
    for name in NAMES:
        loose = scheme == "sage3" and name in ("out_hp", "dq", "dk")
        np.testing.assert_allclose(
            found[name].numpy(), wanted[name], rtol=1e-5, atol=1e-3 if loose else 3e-5, err_msg=f"{scheme} {name}"
        )


def check_operands() -> None:
    """The rounding pass, bit for bit `qatpatch.nvfp4`, non-finite values and ties included."""
    from qatpatch import nvfp4
    from qatpatch.kernels import triton_attention as kernels
    from qatpatch.kernels import triton_attention_launch as launch

    torch.manual_seed(0)
    k, v = torch.randn(2, 70, 2, 64), torch.randn(2, 70, 2, 64) * torch.logspace(-6, 4, 64)
    k[0, 3, 0, 20], k[0, 4, 0, 5], k[1, 5], k[1, 6] = math.nan, math.inf, 0.0, 1e-6
    k[0, 7] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(8)
    k[0, 8], v[1, 20:40, 1, 3], v[0, :, 0, 7] = 1e5, math.inf, 1e5
    call = kernels._prepare(k, k, v, "sage3", 0.125, None)
    keys, values, _ = launch.key_value_operands(call, torch.float32, 128)
    one = torch.ones(())
    tall = torch.nn.functional.pad(v.permute(0, 2, 3, 1), (0, 10))
    wanted = nvfp4.round_to_nvfp4(k, one, dtype=torch.float32).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(keys[:, :70], wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(keys[:, 70:], wanted[:, 69:].expand(-1, 58, -1), rtol=0, atol=0)
    wanted = nvfp4.round_to_nvfp4(tall, one, dtype=torch.float32)[..., :70].transpose(2, 3).flatten(0, 1)
    torch.testing.assert_close(values[:, :70], wanted, rtol=0, atol=0, equal_nan=True)
    assert not values[:, 80:].any()


def check_lengths() -> None:
    for scheme in ("sage3", "fa4"):
        for batch, queries, keys, heads, dim in (
            (1, 1, 1, 1, 64),
            (2, 9, 9, 2, 64),
            (1, 65, 127, 1, 64),
            (1, 5, 129, 1, 128),
            (1, 130, 64, 1, 64),
            (1, 17, 193, 1, 64),
        ):
            data = made(batch, queries, keys, heads, dim)
            compare(run(data, scheme, infer=True), data, scheme)
    for tail in (1, 15, 17, 40, 63):
        data = made(1, 3, 64 + tail, 1, 64)
        compare(run(data, "sage3"), data, "sage3")
    q, k, v, d_out = made(1, 30, 150, 1, 64, seed=3)
    data = [3 * q, k * torch.logspace(-2, 1, 150)[None, :, None, None], v, d_out]
    data[1][:, 20:40] = 0.0
    found, again = run(data, "sage3"), run(data, "sage3")
    for name in NAMES:
        assert torch.equal(found[name], again[name]), name
    compare(found, data, "sage3")


def masks(batch=2, heads=2, queries=20, keys=90) -> dict[str, torch.Tensor]:
    def random(*shape):
        return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6

    per_key, full = random(batch, 1, 1, keys), random(batch, heads, queries, keys)
    dead = full.clone()
    dead[:, 0, 3:9], dead[1] = False, False
    bias = torch.randn(1, heads, queries, keys, generator=torch.Generator().manual_seed(2))
    return {
        "key": per_key,
        "query_2d": random(queries, keys),
        "row_2d": random(1, keys),
        "head_and_key": random(1, heads, 1, keys),
        "query_only": random(1, 1, queries, 1),
        "full": full,
        "dead_rows": dead,
        "nothing_valid": torch.zeros(1, 1, 1, 1, dtype=torch.bool),
        "tail": (torch.arange(keys) < 70).view(1, 1, 1, keys),
        "last_tile_hidden": (torch.arange(keys) < 50).view(1, 1, 1, keys),
        "minus_9984_bf16": torch.where(per_key, 0.0, -10000.0).bfloat16(),
        "minus_inf": torch.where(full, 0.0, -torch.inf),
        "finite_bias": bias,
        "bias_fp16_and_invalid": torch.where(random(1, 1, queries, keys), bias, -1000.0).half(),
    }


def check_masks() -> None:
    data = made(2, 20, 90, 2, 64)
    for name, mask in masks().items():
        for scheme in ("sage3", "fa4") if name in ("key", "dead_rows") else ("sage3",):
            compare(run(data, scheme, mask), data, scheme, mask)
    plain = run(data, "sage3")
    for mask in (torch.ones(2, 1, 1, 90, dtype=torch.bool), torch.zeros(20, 90), torch.zeros(2, 1, 1, 90)):
        found = run(data, "sage3", mask)
        for name in NAMES:
            assert torch.equal(found[name], plain[name]), (name, mask.shape)
    for name in ("key", "head_and_key", "minus_9984_bf16", "dead_rows"):
        mask = masks()[name]
        valid = (mask if mask.dtype == torch.bool else mask > -1000).expand(2, 2, 20, 90)
        key, row = ~valid.any(2).permute(0, 2, 1), ~valid.any(3).permute(0, 2, 1)
        clean = run(data, "sage3", mask)
        for poison in (math.nan, math.inf) if name == "key" else (math.nan,):
            q, k, v, d_out = (x.clone() for x in data)
            k[key], v[key], q[row], d_out[row] = poison, -poison, poison, poison
            found = run([q, k, v, d_out], "sage3", mask)
            for result in NAMES:
                assert torch.equal(found[result], clean[result]), (name, poison, result)


def check_layouts() -> None:
    """Strided views, empty sizes, NaN that must stay visible, and both other input types."""
    data = made(2, 20, 70, 2, 64)
    plain = run(data, "sage3")
    head_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in data]
    sliced = [torch.randn(*x.shape[:3], 200)[..., 33:97].copy_(x) for x in data]
    transposed = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in data]
    for views in (head_first, sliced, transposed):
        found = run(views, "sage3")
        for name in NAMES:
            assert torch.equal(found[name], plain[name]), name
        assert found["out"].is_contiguous() and found["dk"].is_contiguous()
    for queries, keys in ((0, 5), (5, 0)):
        found = run(made(1, queries, keys, 2, 64), "sage3")
        assert found["out"].shape == (1, queries, 2, 64) and found["dk"].shape == (1, keys, 2, 64)
        assert not any(found[name].any() for name in ("out", "dq", "dk", "dv", "row_sum"))
        assert (found["row_max"] == -torch.inf).all()
    for which in range(3):
        broken = [x.clone() for x in data]
        broken[which][0, 7, 0, 3] = math.nan
        out = run(broken, "sage3")["out"]
        assert out[0, 7, 0].isnan().any() and out[1].isfinite().all()
    for dtype in (torch.float16, torch.bfloat16):
        narrow = [x.to(dtype) for x in data]
        found, wide = run(narrow, "sage3"), run([x.float() for x in narrow], "sage3")
        for name in ("out", "out_hp", "dq", "dk", "dv"):
            assert found[name].dtype == dtype
            a, b = found[name].double().flatten(), wide[name].double().flatten()
            assert a @ b / (a.norm() * b.norm()) > 0.9999, (dtype, name)


# --- building --------------------------------------------------------------------------------------------------------


def build(kernel: str, capability: int, head_dim: int, constants: dict) -> str:
    """Compile one kernel with the table's launch; returns "" or what is wrong with it."""
    import tempfile

    from triton import compile as triton_compile
    from triton import knobs
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qatpatch.kernels import triton_attention_backward as backward
    from qatpatch.kernels import triton_attention_forward as forward
    from qatpatch.kernels import triton_attention_launch as host

    major = max(m for m, dim in host.LAUNCHES if dim == head_dim and m <= capability // 10)
    launch = getattr(host.LAUNCHES[major, head_dim], kernel)
    function = {
        "train": forward.forward_kernel,
        "infer": forward.forward_kernel,
        "query_gradient": backward.query_gradient_kernel,
        "key_value_gradient": backward.key_value_gradient_kernel,
    }[kernel]
    operand = "fp16" if kernel in ("train", "infer") else "bf16"
    settings = {
        "HEAD_DIM": head_dim, "ROWS": launch.rows, "KEYS": launch.keys, "MASK": 0, "ADDITIVE": False, "TAIL": True,
        "QUANTIZE_P": True, "TRAIN": kernel == "train", "PACKED": True, "RELOAD": launch.reload, "EARLY": launch.early,
        "TMA": launch.tma, "OPERAND": tl.float16 if operand == "fp16" else tl.bfloat16,
    } | constants  # fmt: skip
    blocks = {"key_rows": launch.keys, "value_rows": launch.keys, "query_rows": launch.rows, "d_out_rows": launch.rows}
    signature, used, attributes = {}, {}, {}
    for index, name in enumerate(function.arg_names):
        if name in settings:
            signature[name], used[(index,)] = "constexpr", settings[name]
        elif name in blocks:
            signature[name] = f"tensordesc<{operand}[{blocks[name]},{head_dim}]>" if launch.tma else f"*{operand}"
        elif name.endswith("_ptr"):
            exact = name.removesuffix("_ptr") in ("row_max", "row_sum", "shift", "delta", "bias")
            scratch = name.removesuffix("_ptr") in ("query_out", "d_out_scaled")
            signature[name] = "*fp32" if exact else f"*{operand}" if scratch else "*bf16"
        elif name in ("scale", "inverse_scale", "step", "hidden"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
        aligned = name.startswith(("query_", "d_out_")) and name.endswith(("_batch", "_row", "_head"))
        if signature[name].startswith("*") or aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": False}
    target = GPUTarget("cuda", capability, 32)
    built = triton_compile(ASTSource(function, signature, used, attributes), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        resources = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=capability == 90).stdout
    problems = []
    if stack := int(resources.split("STACK:")[1].split()[0]):
        problems.append(f"spills {stack} bytes a thread")
    if built.metadata.shared > CAPABILITIES[capability]:
        problems.append(f"takes {built.metadata.shared} bytes of shared memory")
    if capability == 90:
        products, fences = code.count("HGMMA"), code.count("WARPGROUP.ARRIVE")
        if not 0 < 2 * fences < products:
            problems.append(f"{products} wgmma in {fences} groups")
    return ", ".join(problems)


KERNELS = ("train", "infer", "query_gradient", "key_value_gradient")
QUICK = [(kernel, 90, 128, {}) for kernel in KERNELS] + [("train", 80, 128, {}), ("key_value_gradient", 80, 128, {})]
SLOW = [(kernel, capability, dim, {}) for kernel in KERNELS for capability in CAPABILITIES for dim in (64, 128)]
SLOW += [(kernel, 90, 128, {"MASK": 1}) for kernel in KERNELS]
SLOW += [(kernel, 90, 128, {"QUANTIZE_P": False}) for kernel in ("infer", "key_value_gradient")]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [QUICK, SLOW], ids=["quick", "all"])
def test_kernels_build_without_spills(cases):
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        problems = pool.map(build, *zip(*cases, strict=True))
        assert {str(case): problem for case, problem in zip(cases, problems, strict=True) if problem} == {}


def test_launches_specialise_and_compile():
    """What ahead-of-time compilation does not see: the launcher's own view of each argument, descriptors included."""
    assert "all right" in child("launch")


def check_launch() -> None:
    """Every launch up to the driver, through the JIT and then directly: both must choose the same kernel."""
    import fake_driver

    from qatpatch.kernels import triton_attention as kernels
    from qatpatch.kernels import triton_attention_dense as dense
    from qatpatch.kernels.triton_attention_launch import Call

    jit, direct = fake_driver.install(90, CAPABILITIES[90])
    Call.interpreted = property(lambda self: False)
    q, k, v, d_out = (x.bfloat16() for x in made(2, 30, 70, 3, 64))
    padding = torch.ones(2, 1, 1, 70, dtype=torch.bool)
    for scheme, mask, scale in (("sage3", None, 0.125), ("fa4", padding, 0.125), ("sage3", padding.float(), 1)):

        def both(fixed={"scheme": scheme, "scale": scale, "attn_mask": mask}):  # noqa: B006
            forward = kernels.forward(q, k, v, train=True, **fixed)
            kernels.forward(q, k, v, train=False, **fixed)
            kernels.backward(d_out, q, k, v, *forward[1:], **fixed)

        fake_driver.twice(both, jit, direct)
    fake_driver.twice(lambda: dense.operands(kernels._prepare(q, k, v, "fa4", 0.125, None)), jit, direct)
    assert {"forward_kernel", "query_gradient_kernel", "key_value_gradient_kernel"} < set(direct), direct


# --- the host's part -------------------------------------------------------------------------------------------------


def test_what_cannot_run_is_refused_with_the_reason():
    from qatpatch.kernels import triton_attention as kernels

    assert (
        kernels.unsupported_reason(64, torch.bfloat16) is None
        and kernels.unsupported_reason(128, torch.float32) is None
    )
    assert "head_dim 96" in kernels.unsupported_reason(96, torch.bfloat16)
    assert "float64" in kernels.unsupported_reason(64, torch.float64)
    x = torch.zeros(1, 4, 1, 96)
    with pytest.raises(NotImplementedError, match="head_dim 96"):
        kernels.forward(x, x, x, scheme="sage3", scale=1.0, train=False)
    x = torch.zeros(1, 4, 1, 64)
    with pytest.raises(ValueError, match="positive"):
        kernels.forward(x, x, x, scheme="sage3", scale=0.0, train=False)
    with pytest.raises(ValueError, match="sage2"):
        kernels.forward(x, x, x, scheme="sage2", scale=1.0, train=False)


def test_each_device_gets_its_own_launches(monkeypatch):
    from qatpatch.kernels import triton_attention_launch as kernels

    capabilities = {0: (8, 6), 1: (9, 0), 2: (10, 3), 3: (11, 0), 4: (12, 1)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    for index, major in enumerate((8, 9, 10, 10, 12)):
        assert kernels.launches(torch.device("cuda", index), 128) is kernels.LAUNCHES[major, 128]


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_dense_operators_take_what_they_are_given(monkeypatch, backend):
    """On the meta device: the arguments fit the operators' schemas, and results have BSHD shape."""
    from qatpatch.kernels import triton_attention as kernels
    from qatpatch.kernels import triton_attention_dense as dense

    q, k, v = (torch.empty(2, length, 4, 128, device="meta", dtype=torch.bfloat16) for length in (70, 90, 90))
    monkeypatch.setattr(dense, "operands", lambda call: tuple(x.transpose(1, 2) for x in (q, k, v)))
    call = kernels._prepare(q, k, v, "fa4", 0.1, None)
    out, row_max, row_sum = dense.forward(call, backend)
    assert out.shape == q.shape and out.is_contiguous() and row_max.shape == row_sum.shape == (2, 4, 70)
    grads = dense.backward(call, backend, torch.empty_like(q), out, row_max, row_sum)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)] and all(x.is_contiguous() for x in grads)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {
        "operands": check_operands,
        "lengths": check_lengths,
        "masks": check_masks,
        "layouts": check_layouts,
        "launch": check_launch,
    }[sys.argv[1]]()
    print("all right")
