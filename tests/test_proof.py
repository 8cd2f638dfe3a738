"""The proof catches planted faults, each alone, and passes what is right; nothing of it stays in the process."""

from __future__ import annotations

import dataclasses
import io
import random
import re
import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from qatpatch import KernelUnavailable, attention, kernels, nvfp4
from qatpatch.kernels import Kernel, kernel_named, layouts, proof, reference_attention, reference_nvfp4, resolution
from qatpatch.kernels.proof_cases import ATTENTION_CASES, LINEAR_CASES
from qatpatch.linear import QATLinear
from qatpatch.linear_state import LinearSettings, LinearState
from qatpatch.packed_linear import NVFP4Linear


class Linear(types.ModuleType):
    """A right native linear kernel for the CPU, with places to plant faults in. Reads tiled scales, as real ones do."""

    def __init__(self):
        super().__init__("stand_in_linear")

    def quantize(self, x, *, global_scale, rule):
        return reference_nvfp4.quantize(x, global_scale=global_scale, rule=rule)

    def quantize_activation(self, x, *, global_scale, rule):
        packed, scales, scale = reference_nvfp4.quantize(x, global_scale=global_scale, rule=rule)
        return self.codes(packed), self.tiles(scales), scale

    def scaled_matmul(self, x, x_tiled, x_scale, weight, weight_tiled, weight_scale, bias, *, out_dtype):
        left, right = self.operand(x, x_tiled), self.operand(weight, weight_tiled)
        y = self.alpha(left @ right.T, x_scale, weight_scale)
        if bias is not None:
            y = y + bias.float()
        return self.output(y.to(out_dtype))

    def operand(self, packed, tiled):
        scales = layouts.untile_scales(tiled, packed.shape[0], packed.shape[1] // 8).view(torch.float8_e4m3fn)
        values = nvfp4.decode_e2m1(nvfp4.unpack_codes(packed))
        return (values.unflatten(1, (-1, 16)) * self.block_scales(scales).float().unsqueeze(-1)).flatten(1)

    def codes(self, packed):
        return packed

    def tiles(self, scales):
        return layouts.tile_scales(scales)

    def block_scales(self, scales):
        return scales

    def alpha(self, y, x_scale, weight_scale):
        return y * x_scale * weight_scale

    def output(self, y):
        return y


class SwappedNibbles(Linear):
    def codes(self, packed):
        return layouts.swap_nibbles(packed)


class LinearScales(Linear):
    """Scales left row-major, in a buffer of the right size."""

    def tiles(self, scales):
        rows, blocks = layouts.tiled_shape(*scales.shape)
        tiled = torch.zeros(rows * blocks, dtype=torch.uint8)
        tiled[: scales.numel()] = scales.flatten()
        return tiled.view(rows, blocks)


class ScalesIgnored(Linear):
    def block_scales(self, scales):
        return torch.ones_like(scales)


class AlphaIgnored(Linear):
    def alpha(self, y, x_scale, weight_scale):
        return y


class AlphaTwice(Linear):
    def alpha(self, y, x_scale, weight_scale):
        return y * (x_scale * weight_scale) ** 2


class AlphaInBfloat16(Linear):
    """The sum rounded before its scales: a second rounding of every result under `amax` scales."""

    def alpha(self, y, x_scale, weight_scale):
        return (y.bfloat16() * (x_scale * weight_scale).bfloat16()).float()


class EncodeForDecode(Linear):
    def alpha(self, y, x_scale, weight_scale):
        return y / x_scale / weight_scale


class LastRowUnwritten(Linear):
    def output(self, y):
        out = torch.empty_like(y)
        out[:-1] = y[:-1]
        return out


class TailTileUnwritten(Linear):
    """Whole tiles of 128 rows only."""

    def output(self, y):
        out = torch.empty(y.shape, dtype=y.dtype)
        whole = y.shape[0] // 128 * 128
        out[:whole] = y[:whole]
        return out


class OnlyBytesUnwritten(Linear):
    """Padding of the scale tiles is taken for scales: right wherever that memory happens to be zero."""

    def tiles(self, scales):
        rows, blocks = layouts.tiled_shape(*scales.shape)
        raw = torch.empty((rows, blocks), dtype=torch.uint8)
        raw[: scales.shape[0], : scales.shape[1]] = scales
        return layouts.tile_scales(raw)

    def operand(self, packed, tiled):
        padding = layouts.untile_scales(tiled, *tiled.shape)[packed.shape[0] :].view(torch.float8_e4m3fn)
        return super().operand(packed, tiled) + padding.float().sum()


class BiasDropped(Linear):
    def scaled_matmul(self, *operands, out_dtype):
        return super().scaled_matmul(*operands[:-1], None, out_dtype=out_dtype)


class NotRepeatable(Linear):
    def output(self, y):
        return y * (1 + random.random() * 1e-2)


class Raises(Linear):
    def output(self, y):
        raise RuntimeError("no kernel image is available for execution on the device")


class Float16Accumulator(Linear):
    def alpha(self, y, x_scale, weight_scale):
        return super().alpha(y.half().float(), x_scale, weight_scale)


class ZeroBlocksAreNaN(Linear):
    """0 / 0 in a block without a value."""

    def operand(self, packed, tiled):
        values = super().operand(packed, tiled)
        blocks = values.unflatten(1, (-1, 16))
        return torch.where(blocks.abs().amax(-1, keepdim=True) == 0, torch.nan, blocks).flatten(1)


def bind(monkeypatch, module, **fields):
    """A native row for the CPU, first in the table, whose module is `module`."""
    name = f"stand_in_{type(module).__name__}"
    defaults = dict(
        name=name, op="linear", stages=("deploy",), schemes=("nvfp4",), module=name, native=True, device_types=("cpu",)
    )
    row = Kernel(**{**defaults, **fields})
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernels, "TABLE", (row, *kernels.TABLE))
    monkeypatch.setitem(kernels._BY_NAME, row.name, row)
    proof._kept.cache_clear()
    return row


def resolved(row):
    scheme, stage = row.schemes[0], row.stages[0]
    return resolution(row.op, stage=stage, scheme=scheme, device="cpu", head_dim=64 if row.op == "attention" else None)


def test_a_right_kernel_is_trusted_and_runs_once(monkeypatch):
    module = Linear()
    row = bind(monkeypatch, module)
    assert resolved(row).kernel is row
    outcome = proof.examine(row, "cpu")
    assert outcome.reason is None and outcome.cases == len(LINEAR_CASES) and 0 < outcome.worst < 1
    # The outcome is kept: a kernel that breaks later in the process is not run again.
    module.output = lambda y: y * 0
    assert resolved(row).kernel is row


FAULTS = {
    SwappedNibbles: r"error .* times its bound",
    LinearScales: r"error .* times its bound",
    ScalesIgnored: r"error .* times its bound",
    AlphaIgnored: r"error .* times its bound",
    AlphaTwice: r"error .* times its bound|not finite",
    EncodeForDecode: r"error .* times its bound|not finite",
    AlphaInBfloat16: r"error .* times its bound",
    Float16Accumulator: r"error .* times its bound|not finite",
    BiasDropped: r"error .* times its bound",
    LastRowUnwritten: r"not finite \(memory that nobody wrote\?\)",
    TailTileUnwritten: r"not finite \(memory that nobody wrote\?\)",
    OnlyBytesUnwritten: r"not finite \(memory that nobody wrote\?\)",
    ZeroBlocksAreNaN: r"not finite",
    NotRepeatable: r"depend on what was in memory before",
    Raises: r"its proof could not run: RuntimeError: no kernel image is available",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_of_a_linear_kernel_is_caught(fault, monkeypatch):
    row = bind(monkeypatch, fault())
    found = resolved(row)
    assert found.kernel.name == "reference_linear"
    reason = found.refused[row.name]
    assert reason.startswith(("it disagrees with the reference", "its proof could not run"))
    assert re.search(FAULTS[fault], reason), reason
    with pytest.raises(KernelUnavailable, match=f"{row.name}: it"):
        kernels.resolve("linear", stage="deploy", scheme="nvfp4", device="cpu", name="native")


class Attention(types.ModuleType):
    """A right attention kernel with tiles of 128 keys, as the real one of sm_120 has."""

    def __init__(self):
        super().__init__("stand_in_attention")

    def forward(self, q, k, v, *, scheme, scale, attn_mask=None, train):
        options = dict(scheme=scheme, scale=scale, attn_mask=attn_mask, train=False, tile=128)
        out, *rest = reference_attention.forward(q, k, v, **options)
        return self.changed(out, q, k, v, scale), *rest

    def changed(self, out, q, k, v, scale):
        return out


class ServedInBfloat16(Attention):
    def changed(self, out, q, k, v, scale):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, scale=scale).transpose(1, 2)


class KeysSmoothed(Attention):
    def forward(self, q, k, v, **options):
        return super().forward(q, (k.float() - k.float().mean(1, keepdim=True)).to(k.dtype), v, **options)


class OtherScheme(Attention):
    def forward(self, q, k, v, **options):
        other = {"sage3": "fa4", "fa4": "sage3"}[options.pop("scheme")]
        return super().forward(q, k, v, scheme=other, **options)


class ScaleIgnored(Attention):
    def forward(self, q, k, v, **options):
        return super().forward(q, k, v, **{**options, "scale": q.shape[3] ** -0.5})


class PaddedKeysCount(Attention):
    """Keys padded to 128 with zeros take part in the softmax."""

    def forward(self, q, k, v, **options):
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % 128)) for x in (k, v))
        return super().forward(q, k, v, **options)


class HeadsExchanged(Attention):
    def changed(self, out, q, k, v, scale):
        return out.flip(2)


class LastQueryUnwritten(Attention):
    def changed(self, out, q, k, v, scale):
        written = torch.empty_like(out)
        written[:, :-1] = out[:, :-1]
        return written


class LastQueryZero(Attention):
    def changed(self, out, q, k, v, scale):
        out[:, -1:] = 0
        return out


class KeysChanged(Attention):
    def changed(self, out, q, k, v, scale):
        k -= k.mean(1, keepdim=True)
        return out


ATTENTION_FAULTS = {
    ServedInBfloat16: "times its bound",
    KeysSmoothed: "times its bound",
    OtherScheme: "times its bound",
    ScaleIgnored: "times its bound",
    PaddedKeysCount: "times its bound",
    HeadsExchanged: "times its bound",
    LastQueryUnwritten: "not finite",
    LastQueryZero: "times its bound",
    KeysChanged: "it changes its input|depend on what was in memory",
}


@pytest.mark.parametrize("scheme", ["sage3", "fa4"])
def test_a_right_attention_kernel_is_trusted(scheme, monkeypatch):
    fields = dict(op="attention", stages=("infer",), schemes=(scheme,), head_dims=(64, 128), honours_masks=False)
    row = bind(monkeypatch, Attention(), **fields)
    assert resolved(row).kernel is row
    outcome = proof.examine(row, "cpu")
    assert outcome.cases == 2 * sum(not case.masked for case in ATTENTION_CASES) and outcome.worst < 0.6


@pytest.mark.parametrize("scheme", ["sage3", "fa4"])
@pytest.mark.parametrize("fault", ATTENTION_FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_of_an_attention_kernel_is_caught(fault, scheme, monkeypatch):
    fields = dict(op="attention", stages=("infer",), schemes=(scheme,), head_dims=(64,), honours_masks=False)
    row = bind(monkeypatch, fault(), **fields)
    found = resolved(row)
    assert found.kernel.name == "reference_attention"
    assert re.search(ATTENTION_FAULTS[fault], found.refused[row.name]), found.refused[row.name]


def test_a_kernel_that_honours_masks_is_tried_with_one(monkeypatch):
    class MaskDropped(Attention):
        def forward(self, q, k, v, **options):
            return super().forward(q, k, v, **{**options, "attn_mask": None})

    fields = dict(op="attention", stages=("infer",), schemes=("sage3",), head_dims=(64,))
    row = bind(monkeypatch, MaskDropped(), **fields)
    assert "masked" in resolved(row).refused[row.name]


def test_smoothed_attention_is_compared_with_dense_attention(monkeypatch):
    class Smoothed(Attention):
        def forward(self, q, k, v, **options):
            centred = (k.float() - k.float().mean(1, keepdim=True)).to(k.dtype)
            return super().forward(q, centred, v, **{**options, "scheme": "sage3"})

    fields = dict(op="attention", stages=("infer",), schemes=("sage3_smoothed",), head_dims=(64, 128))
    row = bind(monkeypatch, Smoothed(), **fields, honours_masks=False)
    assert proof.examine(row, "cpu").reason is None

    class HeadsExchangedToo(Smoothed):
        changed = HeadsExchanged.changed

    row = bind(monkeypatch, HeadsExchangedToo(), **fields, honours_masks=False)
    assert "times its bound" in proof.examine(row, "cpu").reason


@pytest.mark.parametrize("name", ["reference_linear", "reference_attention"])
def test_the_reference_passes_its_own_proof(name):
    outcome = proof.examine(kernel_named(name), "cpu")
    assert outcome.reason is None and outcome.worst < 0.6 and outcome.cases >= 10


def test_a_proof_disturbs_nothing(monkeypatch):
    row = bind(monkeypatch, Linear())
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert proof.examine(row, "cpu").reason is None
        assert torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled()
    with torch.device("meta"):
        assert proof.examine(row, "cpu").reason is None
        assert torch.empty(1).is_meta
    assert torch.equal(torch.get_rng_state(), state)


def test_a_proof_runs_on_real_tensors_where_the_model_runs_on_fake_ones(monkeypatch):
    row = bind(monkeypatch, Linear())
    with FakeTensorMode():
        assert resolved(row).kernel is row
        assert isinstance(torch.empty(1), FakeTensor)
    row = bind(monkeypatch, AlphaIgnored())
    with FakeTensorMode():
        assert "times its bound" in resolved(row).refused[row.name]


def test_what_was_resolved_stays_in_the_process(monkeypatch):
    """A model saved where a native kernel ran may be loaded where there is none."""
    layer = torch.nn.Linear(64, 64)
    layer.quantization, layer.__class__ = LinearState(LinearSettings()), QATLinear
    layer = NVFP4Linear.from_linear(layer, retain=False)
    x = torch.randn(3, 64)
    row = bind(monkeypatch, Linear())
    layer.quantization._kernels.clear()
    layer(x)
    assert row.name in layer.quantization._kernels.values()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    monkeypatch.setattr(kernels, "TABLE", kernels.TABLE[1:])
    other = torch.load(file, weights_only=False)
    other(x)
    assert set(other.quantization._kernels.values()) == {"reference_linear"}


def test_each_device_and_version_is_proven_anew(monkeypatch):
    seen = []
    monkeypatch.setattr(
        proof, "examine", lambda kernel, device: seen.append(device) or proof.Outcome(cases=1, worst=0.0, reason=None)
    )
    proof._kept.cache_clear()
    row = dataclasses.replace(kernel_named("reference_linear"), native=True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in ("cuda:0", "cuda:1", "cuda", "cuda:0"):
        assert proof.refusal(row, torch.device(device)) is None
    assert [str(device) for device in seen] == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(proof, "installed_version", lambda name: "another")
    proof.refusal(row, torch.device("cuda:0"))
    assert len(seen) == 3
    proof._kept.cache_clear()


def test_a_proof_waits_for_the_end_of_a_graph_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    row = dataclasses.replace(kernel_named("reference_linear"), native=True)
    assert "cannot be while a CUDA graph is captured" in proof.refusal(row, torch.device("cuda:0"))


def test_a_compiled_layer_binds_a_proven_kernel(monkeypatch):
    """The first look-up may happen while a compiler traces."""
    fields = dict(op="attention", stages=("infer",), schemes=("sage3",), head_dims=(64,), honours_masks=False)
    bind(monkeypatch, Attention(), **fields)
    torch._dynamo.reset()
    q = torch.randn(1, 9, 1, 64)
    compiled = torch.compile(lambda x: attention.quantized_attention(x, x, x), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), attention.quantized_attention(q, q, q))
    assert proof._kept.cache_info().misses == 1
    row = bind(monkeypatch, ServedInBfloat16(), **fields)
    torch._dynamo.reset()
    compiled(q)
    assert row.name in resolved(row).refused
    torch._dynamo.reset()


@pytest.mark.parametrize("cases", [LINEAR_CASES, ATTENTION_CASES], ids=["linear", "attention"])
def test_cases_do_not_depend_on_the_default_dtype(cases):
    arguments = (64,) if cases is ATTENTION_CASES else ()
    wanted = [case.tensors(*arguments) for case in cases]
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = [case.tensors(*arguments) for case in cases]
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(
            a is b is None or torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(ours, theirs, strict=True)
        )
