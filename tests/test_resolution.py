"""The resolution matrix: architectures x what is installed, the outcome and the message of each cell.

Packages are files with real metadata in a directory in front of ``sys.path``; the only thing replaced is what torch
says of the device. The expectations are written by hand, from what is known of the packages.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from qatpatch import KernelUnavailable, kernels
from qatpatch.kernels import kernel_named, proof, requirements, resolution
from qatpatch.swap import bind_infer

FLASHINFER = """
def mm_fp4(a, b, a_descale, b_descale, alpha=None, out_dtype=None, out=None, block_size=16, use_8x4_sf_layout=False,
           backend="auto", use_nvfp4=True, enable_pdl=True): pass
"""
FLASHINFER_07 = (
    FLASHINFER
    + """
def nvfp4_attention_sm120_quantize_qkv(q, k, v, per_block_mean=True): pass
def nvfp4_attention_sm120_fwd(q_fp4, k_fp4, v_fp4_t, q_scale, k_scale, v_scale_t, qk_correction, sm_scale=None,
                              causal=False, per_block_mean=True, out_dtype=None, unpadded_k_len=None): pass
"""
)
FORK = "def flash_attn_func(q, k, v, softmax_scale=None, causal=False, mSFQ=None, mSFK=None, mSFV=None): pass"
MAINLINE = "def flash_attn_func(q, k, v, softmax_scale=None, causal=False, q_descale=None, k_descale=None): pass"
FASTVIDEO = """
def sageattn_blackwell(q, k, v, attn_mask=None, is_causal=False, per_block_mean=True, single_level_p_quant=True,
                       sm_scale=None, **kwargs): pass
"""
SAGE3 = "def sageattn_blackwell(q, k, v, attn_mask=None, is_causal=False, per_block_mean=True, **kwargs): pass"

# What is installed: distribution -> version, and module -> source.
ENVIRONMENTS = {
    "absent": ({"triton": "3.9.0"}, {}),
    # The set that the FP4 fork of FlashAttention-4 works with.
    "right for the fork": (
        {
            "triton": "3.9.0",
            "flashinfer-python": "0.6.8",
            "nvidia-cutlass-dsl": "4.4.2",
            "fastvideo-kernel": "0.3.5",
        },
        {"flashinfer": FLASHINFER, "flash_attn.cute.interface": FORK, "attn_qat_infer": FASTVIDEO},
    ),
    # Today's flashinfer, beside mainline FlashAttention-4 and SageAttention3.
    "mainline": (
        {
            "triton": "3.6.0",
            "flashinfer-python": "0.7.4",
            "nvidia-cutlass-dsl": "4.8.1",
            "fastvideo-kernel": "0.3.5",
            "sageattn3": "1.0.0",
        },
        {"flashinfer": FLASHINFER_07, "flash_attn.cute.interface": MAINLINE, "attn_qat_infer": FASTVIDEO},
    ),
    "wrong versions": (
        {
            "triton": "3.5.1",
            "flashinfer-python": "0.5.3",
            "nvidia-cutlass-dsl": "4.6.0",
            "fastvideo-kernel": "0.2.6",
        },
        {"flashinfer": FLASHINFER, "flash_attn.cute.interface": FORK, "attn_qat_infer": FASTVIDEO},
    ),
    "broken": (
        {
            "triton": "3.9.0",
            "flashinfer-python": "0.7.4",
            "nvidia-cutlass-dsl": "4.4.2",
            "fastvideo-kernel": "0.3.5",
        },
        {
            "flashinfer": "raise ImportError('libcudart.so.13: cannot open shared object file')",
            "flash_attn.cute.interface": "raise AttributeError(\"module 'cutlass.cute' has no attribute 'ThrMma'\")",
            "attn_qat_infer": "import fp4attn_cuda_that_is_not_there",
        },
    ),
    "other signatures": (
        {
            "triton": "3.9.0",
            "flashinfer-python": "0.7.9",
            "nvidia-cutlass-dsl": "4.4.2",
            "fastvideo-kernel": "0.3.9",
        },
        {"flashinfer": "def mm_fp4(x, y): pass", "flash_attn": "", "attn_qat_infer": SAGE3},
    ),
}

TRITON = "CUDA builds of torch bring it, else pip install triton"
LINEAR = (
    "pip install 'flashinfer-python>=0.7,<0.8' brings nvidia-cutlass-dsl>=4.8 and needs nvcc of CUDA 12.8 or newer at "
    "its first call; beside the FP4 FlashAttention-4 fork it is flashinfer-python==0.6.8 with nvidia-cutlass-dsl==4.4.2"
)
SMOOTHED = "pip install 'flashinfer-python>=0.7,<0.8', with nvcc of CUDA 12.8 or newer"
FORK_SET = (
    "install the FP4 fork hao-ai-lab/flash-attention-fp4 in its place, with nvidia-cutlass-dsl==4.4.2, "
    "quack-kernels==0.4.1 and, if at all, flashinfer-python==0.6.8"
)
CUTLASS = (
    "the fork does not build with others, flashinfer 0.7 needs 4.8: not in one environment); "
    "pip install nvidia-cutlass-dsl==4.4.2 quack-kernels==0.4.1 flashinfer-python==0.6.8"
)
WHEELS = (
    "pip install fastvideo-kernel==0.3.5 (wheels for Python 3.12 with torch 2.12.0), in an environment without "
    "SageAttention3"
)
OLD_TRITON = f"needs triton >=3.6, found 3.5.1; {TRITON}"

# Where the row's architecture is there: why not, None for usable.
PACKAGE_REASONS = {
    "flashinfer": {
        "absent": f"needs flashinfer-python >=0.6.8,<0.8, which is not installed; {LINEAR}",
        "right for the fork": None,
        "mainline": None,
        "wrong versions": OLD_TRITON,
        "broken": (
            "flashinfer-python 0.7.4 does not import: ImportError: libcudart.so.13: cannot open "
            f"shared object file; {LINEAR}"
        ),
        "other signatures": (
            "mm_fp4 of flashinfer-python 0.7.9 has no parameters a, b, a_descale, b_descale, alpha, "
            f"out_dtype, backend; {LINEAR}"
        ),
    },
    "triton_nvfp4": {
        "absent": None,
        "right for the fork": None,
        "mainline": None,
        "wrong versions": OLD_TRITON,
        "broken": None,
        "other signatures": None,
    },
    "attn_qat_infer": {
        "absent": f"needs fastvideo-kernel >=0.3.5,<0.4, which is not installed; {WHEELS}",
        "right for the fork": None,
        "mainline": (
            "fastvideo-kernel cannot be used beside sageattn3 1.0.0: both install fp4attn_cuda and fp4quant_cuda, with "
            f"different arguments; {WHEELS}"
        ),
        "wrong versions": f"needs fastvideo-kernel >=0.3.5,<0.4, found 0.2.6; {WHEELS}",
        "broken": (
            "fastvideo-kernel 0.3.5 does not import: ModuleNotFoundError: No module named "
            f"'fp4attn_cuda_that_is_not_there'; {WHEELS}"
        ),
        "other signatures": (
            "sageattn_blackwell of fastvideo-kernel 0.3.9 has no parameters "
            f"single_level_p_quant, sm_scale: not the attention that training simulates; {WHEELS}"
        ),
    },
    "fa4_fp4": {
        "absent": f"needs flash_attn.cute.interface, which is not installed; {FORK_SET}",
        "right for the fork": None,
        "mainline": (
            "flash_attn_func of the installed flash_attn.cute.interface has no parameters mSFQ, mSFK: that is mainline "
            "FlashAttention-4, which has the same name and no FP4; "
            f"{FORK_SET}"
        ),
        "wrong versions": OLD_TRITON,
        "broken": (
            "the installed flash_attn.cute.interface does not import: AttributeError: module "
            f"'cutlass.cute' has no attribute 'ThrMma'; {FORK_SET}"
        ),
        # FlashAttention-2: the same top-level name, and nothing below it.
        "other signatures": f"needs flash_attn.cute.interface, which is not installed; {FORK_SET}",
    },
    "flashinfer_attention": {
        "absent": f"needs flashinfer-python >=0.6.18,<0.8, which is not installed; {SMOOTHED}",
        "right for the fork": f"needs flashinfer-python >=0.6.18,<0.8, found 0.6.8; {SMOOTHED}",
        "mainline": None,
        "wrong versions": f"needs flashinfer-python >=0.6.18,<0.8, found 0.5.3; {SMOOTHED}",
        "broken": (
            "flashinfer-python 0.7.4 does not import: ImportError: libcudart.so.13: cannot open "
            f"shared object file; {SMOOTHED}"
        ),
        "other signatures": f"flashinfer-python 0.7.9 has no nvfp4_attention_sm120_fwd; {SMOOTHED}",
    },
}

# Where it is not there, whatever is installed.
BLACKWELL = "runs on sm_100, sm_103, sm_120 and sm_121, not on {}"
ARCHITECTURES = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0), "sm_103": (10, 3)}
ARCHITECTURES |= {"sm_120": (12, 0), "sm_121": (12, 1)}
DEVICE_REASONS = {
    "flashinfer": {name: BLACKWELL.format(name) for name in ("sm_80", "sm_89", "sm_90")},
    "triton_nvfp4": {name: BLACKWELL.format(name) for name in ("sm_80", "sm_89", "sm_90")},
    "attn_qat_infer": {
        "sm_80": "runs on sm_120, not on sm_80",
        "sm_89": "runs on sm_120, not on sm_89",
        "sm_90": "runs on sm_120, not on sm_90",
        "sm_100": "runs on sm_120, not on sm_100",
        "sm_103": "runs on sm_120, not on sm_103",
        "sm_121": (
            "does not run on sm_121: the wheels of fastvideo-kernel hold code for sm_120a alone, which does not load "
            "there"
        ),
    },
    "fa4_fp4": {
        "sm_80": "runs on sm_100 and sm_103, not on sm_80",
        "sm_89": "runs on sm_100 and sm_103, not on sm_89",
        "sm_90": "runs on sm_100 and sm_103, not on sm_90",
        "sm_120": "runs on sm_100 and sm_103, not on sm_120",
        "sm_121": "runs on sm_100 and sm_103, not on sm_121",
    },
    "flashinfer_attention": {
        "sm_80": "runs on sm_120 and sm_121, not on sm_80",
        "sm_89": "runs on sm_120 and sm_121, not on sm_89",
        "sm_90": "runs on sm_120 and sm_121, not on sm_90",
        "sm_100": "runs on sm_120 and sm_121, not on sm_100",
        "sm_103": "runs on sm_120 and sm_121, not on sm_103",
    },
}
# Triton 3.6 leaves a fence out on sm_100, and does not compile the block-scaled product for sm_121.
RACE = (
    "needs triton >=3.7.1 on {}, found 3.6.0 (older ones leave out a fence before the tensor cores read, a race); "
    "pip install 'triton>=3.7.1', with a torch that takes it"
)
EXCEPTIONS = {
    ("triton_nvfp4", "mainline", "sm_100"): RACE.format("sm_100"),
    ("triton_nvfp4", "mainline", "sm_103"): RACE.format("sm_103"),
    ("triton_nvfp4", "mainline", "sm_121"): (
        "needs triton >=3.8 on sm_121, found 3.6.0 (older ones do not compile the block-scaled product there); "
        "pip install 'triton>=3.8', with a torch that takes it"
    ),
}

# What is chosen: linears, then attention trained for sage3, then for fa4. Every native kernel passes its proof here.
CHOSEN = {
    "absent": {
        "sm_80": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_89": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_90": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_100": ("triton_nvfp4", "triton_attention", "triton_attention"),
        "sm_103": ("triton_nvfp4", "triton_attention", "triton_attention"),
        "sm_120": ("triton_nvfp4", "triton_attention", "triton_attention"),
        "sm_121": ("triton_nvfp4", "triton_attention", "triton_attention"),
    },
    "right for the fork": {
        "sm_80": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_89": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_90": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_100": ("flashinfer", "triton_attention", "fa4_fp4"),
        "sm_103": ("flashinfer", "triton_attention", "fa4_fp4"),
        "sm_120": ("flashinfer", "attn_qat_infer", "triton_attention"),
        "sm_121": ("flashinfer", "triton_attention", "triton_attention"),
    },
    "mainline": {
        "sm_80": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_89": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_90": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_100": ("flashinfer", "triton_attention", "triton_attention"),
        "sm_103": ("flashinfer", "triton_attention", "triton_attention"),
        "sm_120": ("flashinfer", "triton_attention", "triton_attention"),
        "sm_121": ("flashinfer", "triton_attention", "triton_attention"),
    },
    # Without a Triton that fits nothing but the reference is left.
    "wrong versions": dict.fromkeys(ARCHITECTURES, ("reference_linear", "reference_attention", "reference_attention")),
    "broken": {
        "sm_80": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_89": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_90": ("triton_linear", "triton_attention", "triton_attention"),
        "sm_100": ("triton_nvfp4", "triton_attention", "triton_attention"),
        "sm_103": ("triton_nvfp4", "triton_attention", "triton_attention"),
        "sm_120": ("triton_nvfp4", "triton_attention", "triton_attention"),
        "sm_121": ("triton_nvfp4", "triton_attention", "triton_attention"),
    },
}
CHOSEN["other signatures"] = CHOSEN["broken"]
ASKED = (("linear", "deploy", "nvfp4"), ("attention", "infer", "sage3"), ("attention", "infer", "fa4"))
NATIVE = tuple(PACKAGE_REASONS)


def installed(name, tmp_path, monkeypatch):
    """Put the packages of an environment in front of all others."""
    distributions, modules = ENVIRONMENTS[name]
    for distribution, version in distributions.items():
        folder = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    for module, source in modules.items():
        *parents, leaf = module.split(".")
        folder = tmp_path
        for parent in parents:
            folder /= parent
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{leaf}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(autouse=True)
def _forget():
    """Nothing that a test imports or finds out stays."""
    known = ("flashinfer", "flash_attn", "attn_qat_infer")

    def forget():
        requirements._import_error.cache_clear()
        for module in [m for m in sys.modules if m.partition(".")[0] in known]:
            del sys.modules[module]

    forget()
    yield
    forget()


def cards(monkeypatch, *names):
    """A machine with these GPUs."""
    capabilities = [ARCHITECTURES[name] for name in names]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[torch.device(device).index])


def trusted(kernel, device):
    """A proof that every kernel passes: there is no device to run one on."""
    return None


def cell(row, environment, architecture):
    """The hand-written reason."""
    if architecture in DEVICE_REASONS[row]:
        return DEVICE_REASONS[row][architecture]
    return EXCEPTIONS.get((row, environment, architecture), PACKAGE_REASONS[row][environment])


def test_the_matrix_is_whole():
    assert NATIVE == tuple(kernel.name for kernel in kernels.TABLE if kernel.native)
    for reasons in PACKAGE_REASONS.values():
        assert reasons.keys() == ENVIRONMENTS.keys() == CHOSEN.keys()
    assert all(chosen.keys() == ARCHITECTURES.keys() for chosen in CHOSEN.values())


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_cell(architecture, environment, tmp_path, monkeypatch):
    installed(environment, tmp_path, monkeypatch)
    cards(monkeypatch, architecture)
    found = {row: kernel_named(row).unavailable_reason("cuda:0") for row in NATIVE}
    assert found == {row: cell(row, environment, architecture) for row in NATIVE}
    for (op, stage, scheme), wanted in zip(ASKED, CHOSEN[environment][architecture], strict=True):
        result = resolution(op, stage=stage, scheme=scheme, device="cuda:0", prove=trusted)
        assert (result.kernel.name, result.architecture, result.scheme) == (wanted, architecture, scheme)
        assert not result.kernel.explicit_only
        # Every row before it is there, those that serve the scheme with the cell's own words.
        before = [k for k in kernels.TABLE[: kernels.TABLE.index(result.kernel)] if k.op == op]
        assert list(result.refused) == [k.name for k in before]
        for kernel in before:
            if kernel.native and scheme in kernel.schemes:
                assert result.refused[kernel.name] == cell(kernel.name, environment, architecture)
        # kernel="native" takes the same where it is native, and refuses emulation.
        if result.kernel.native:
            assert resolution(op, stage=stage, scheme=scheme, device="cuda:0", name="native", prove=trusted) == result
        else:
            refusal = f"{wanted}: emulates the numbers, and kernel='native' asks for FP4 tensor cores"
            with pytest.raises(KernelUnavailable, match=refusal):
                resolution(op, stage=stage, scheme=scheme, device="cuda:0", name="native", prove=trusted)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_without_cuda_nothing_is_imported_and_the_reference_serves(environment, tmp_path, monkeypatch):
    installed(environment, tmp_path, monkeypatch)
    cards(monkeypatch)
    for row in NATIVE:
        assert kernel_named(row).unavailable_reason("cpu") == "runs on cuda, not on cpu"
        assert kernel_named(row).unavailable_reason("cuda:0") == "needs a CUDA device, and torch finds none"
    for (op, stage, scheme), wanted in zip(
        ASKED, ("reference_linear", "reference_attention", "reference_attention"), strict=True
    ):
        assert resolution(op, stage=stage, scheme=scheme, device="cpu", prove=trusted).kernel.name == wanted
    assert not {"flashinfer", "flash_attn", "attn_qat_infer"} & sys.modules.keys()


def test_two_cards_in_one_machine_are_decided_apart(tmp_path, monkeypatch):
    installed("right for the fork", tmp_path, monkeypatch)
    cards(monkeypatch, "sm_90", "sm_120")
    for _ in range(2):
        for (op, stage, scheme), *wanted in zip(
            ASKED, CHOSEN["right for the fork"]["sm_90"], CHOSEN["right for the fork"]["sm_120"], strict=True
        ):
            for device, name in zip(("cuda:0", "cuda:1"), wanted, strict=True):
                found = resolution(op, stage=stage, scheme=scheme, device=device, prove=trusted)
                assert found.kernel.name == name
    assert resolution(*ASKED[1][:1], stage="infer", scheme="sage3", device="cuda:0", prove=trusted).refused == {
        "attn_qat_infer": "runs on sm_120, not on sm_90",
        "fa4_fp4": "computes fa4, not sage3",
        "flashinfer_attention": (
            "computes another scheme, sage3_smoothed: only on request, kernel='flashinfer_attention'"
        ),
    }


def test_smoothing_is_bound_only_where_it_is_asked_for(tmp_path, monkeypatch):
    installed("mainline", tmp_path, monkeypatch)
    cards(monkeypatch, "sm_120")
    asked = dict(stage="infer", scheme="sage3_smoothed", device="cuda:0", prove=trusted)
    with pytest.raises(KernelUnavailable, match="flashinfer_attention: computes another scheme, sage3_smoothed"):
        resolution("attention", **asked)
    assert resolution("attention", name="flashinfer_attention", **asked).kernel.name == "flashinfer_attention"
    with pytest.raises(KernelUnavailable, match="flashinfer_attention: computes sage3_smoothed, not sage3"):
        resolution("attention", name="flashinfer_attention", **{**asked, "scheme": "sage3"})


def test_a_deployed_model_with_smoothed_attention_finds_that_kernel_again(tmp_path, monkeypatch):
    installed("mainline", tmp_path, monkeypatch)
    with pytest.raises(KernelUnavailable, match="flashinfer_attention: runs on cuda, not on cpu"):
        bind_infer("sage3_smoothed", torch.device("cpu"), None)
    cards(monkeypatch, "sm_120")
    monkeypatch.setattr(proof, "refusal", trusted)
    for scheme, name in (("sage3_smoothed", None), ("sage3", "flashinfer_attention")):
        choice, found = bind_infer(scheme, torch.device("cuda:0"), name, 128)
        assert (choice.scheme, choice.kernel) == ("sage3_smoothed", "flashinfer_attention")
        assert found.kernel.name == "flashinfer_attention"


def test_a_kernel_that_fails_its_proof_is_passed_over_with_what_was_measured(tmp_path, monkeypatch):
    installed("right for the fork", tmp_path, monkeypatch)
    cards(monkeypatch, "sm_100")

    def prove(kernel, device):
        return "it disagrees with the reference: error 12" if kernel.name == "flashinfer" else None

    found = resolution("linear", stage="deploy", scheme="nvfp4", device="cuda:0", prove=prove)
    assert found.kernel.name == "triton_nvfp4"
    assert found.refused == {"flashinfer": "it disagrees with the reference: error 12"}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"shape": (32, 4096)}, None),
        ({"shape": (24, 4096)}, "needs out_features to be a multiple of 32, this layer has 24"),
        ({"shape": (4096, 40)}, "needs in_features to be a multiple of 32, this layer has 40"),
        ({"shape": (4096, 24)}, None),  # padded to 32
        ({"weight_only": True}, "multiplies FP4 by FP4, and this layer's input stays unquantized"),
        ({"out_dtype": torch.float32}, "writes bfloat16 or float16, not float32"),
        ({"out_dtype": torch.bfloat16}, None),
        (
            {"bias": True},
            "adds a bias after its own rounding: two roundings where the format promises one; triton_nvfp4 rounds once",
        ),
        ({"bias": False}, None),
    ],
    ids=str,
)
def test_what_a_linear_asks_of_a_kernel(limits, reason, tmp_path, monkeypatch):
    installed("right for the fork", tmp_path, monkeypatch)
    cards(monkeypatch, "sm_120")
    found = resolution("linear", stage="deploy", scheme="nvfp4", device="cuda:0", prove=trusted, **limits)
    assert found.refused.get("flashinfer") == reason
    assert (found.kernel.name == "flashinfer") == (reason is None)
    assert (found.kernel.name == "triton_linear") == ("weight_only" in limits)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_cell_for_a_layer_with_a_bias(architecture, environment, tmp_path, monkeypatch):
    """flashinfer's GEMM rounds before it adds one: the next row is taken, unless flashinfer is asked for."""
    installed(environment, tmp_path, monkeypatch)
    cards(monkeypatch, architecture)
    asked = dict(stage="deploy", scheme="nvfp4", device="cuda:0", prove=trusted, bias=True)
    found = resolution("linear", **asked)
    wanted = CHOSEN[environment][architecture][0]
    if wanted == "flashinfer":
        wanted = "triton_linear" if cell("triton_nvfp4", environment, architecture) else "triton_nvfp4"
    assert found.kernel.name == wanted and found.note == ""
    # What no other layer could change, the device, is said first.
    refused = "adds a bias after its own rounding: two roundings where the format promises one"
    refused += "; triton_nvfp4 rounds once"
    if kernel_named("flashinfer").device_reason("cuda:0"):
        refused = f"runs on sm_100, sm_103, sm_120 and sm_121, not on {architecture}"
    assert found.refused["flashinfer"] == refused
    if wanted == "triton_nvfp4":
        assert resolution("linear", name="native", **asked) == found
    else:
        with pytest.raises(KernelUnavailable, match=re.escape(f"flashinfer: {refused}")):
            resolution("linear", name="native", **asked)
    if (reason := cell("flashinfer", environment, architecture)) is None:
        named = resolution("linear", name="flashinfer", **asked)
        assert named.kernel.name == "flashinfer" and named.refused == {}
        assert named.note == "adds a bias after its own rounding: two roundings where the format promises one"
        assert resolution("linear", name="flashinfer", **{**asked, "bias": False}).note == ""
    else:
        with pytest.raises(KernelUnavailable) as caught:
            resolution("linear", name="flashinfer", **asked)
        assert f"flashinfer: {reason}" in str(caught.value) and "with a bias" in str(caught.value)


@pytest.mark.parametrize(
    ("op", "stage", "scheme", "limits"),
    [
        ("linear", "deploy", "nvfp4", dict(out_dtype=torch.float32, weight_only=True, shape=(7, 7), bias=True)),
        ("attention", "infer", "sage3", dict(head_dim=96, masked=True)),
        ("attention", "infer", "fa4", dict(head_dim=96, masked=True)),
    ],
)
def test_where_a_device_cannot_run_a_kernel_that_is_the_reason(op, stage, scheme, limits):
    refused = resolution(op, stage=stage, scheme=scheme, device="cpu", **limits).refused
    asked = {name for name in refused if scheme in kernel_named(name).schemes and stage in kernel_named(name).stages}
    assert len(asked) >= 2 and all(refused[name] == "runs on cuda, not on cpu" for name in asked)


def test_a_name_that_does_not_exist_is_compared_with_those_that_would_do():
    for op, name, meant in (
        ("linear", "referense_linear", "reference_linear"),
        ("linear", "naitive", "native"),
        ("attention", "referense_atention", "reference_attention"),
    ):
        with pytest.raises(KernelUnavailable, match=f"no {op} kernel called '{name}'; did you mean '{meant}'"):
            resolution(op, stage="infer", scheme="sage3", device="cpu", name=name)
    with pytest.raises(KernelUnavailable) as raised:
        resolution("attention", stage="infer", scheme="sage3", device="cpu", name="xyz")
    assert "linear" not in str(raised.value).replace("xyz", "")


@pytest.mark.parametrize("row", ["flashinfer", "triton_nvfp4"])
def test_rows_ask_of_a_shape_what_their_modules_do(row):
    kernel = kernel_named(row)
    module = kernel.load()
    for out_features in (1, 8, 24, 32, 48, 4096):
        for in_features in (8, 16, 24, 32, 48, 60, 4096):
            theirs = module.alignment_reason(in_features, out_features)
            assert (kernel.shape_reason((out_features, in_features)) is None) == (theirs is None)


def test_the_row_of_triton_nvfp4_asks_for_the_triton_that_its_module_does(monkeypatch):
    targets = kernel_named("triton_nvfp4").load().TARGETS
    assert tuple(targets) == kernel_named("triton_nvfp4").capabilities
    for capability, (_, minimum) in targets.items():
        older = f"{minimum[0]}.{minimum[1] - 1}.9" if not minimum[2] else f"{minimum[0]}.{minimum[1]}.{minimum[2] - 1}"
        for version, fits in ((".".join(map(str, minimum)), True), (older, False)):
            monkeypatch.setattr(requirements, "installed_version", lambda name, version=version: version)
            reasons = [r.unmet_reason(capability) for r in kernel_named("triton_nvfp4").requires]
            assert (reasons == [None] * len(reasons)) == fits


def test_head_dimensions_and_masks(tmp_path, monkeypatch):
    installed("right for the fork", tmp_path, monkeypatch)
    cards(monkeypatch, "sm_120")
    asked = dict(stage="infer", scheme="sage3", device="cuda:0", prove=trusted)
    assert resolution("attention", head_dim=128, **asked).kernel.name == "attn_qat_infer"
    found = resolution("attention", head_dim=128, masked=True, **asked)
    assert found.kernel.name == "triton_attention" and found.refused["attn_qat_infer"] == "takes no mask"
    found = resolution("attention", head_dim=80, **asked)
    assert found.kernel.name == "reference_attention"
    assert found.refused["attn_qat_infer"] == "serves head dimensions 64 and 128, not 80"


def test_an_import_that_fails_is_not_tried_again(tmp_path, monkeypatch):
    installed("broken", tmp_path, monkeypatch)
    cards(monkeypatch, "sm_120")
    log = tmp_path / "log"
    (tmp_path / "flashinfer.py").write_text(f"open({str(log)!r}, 'a').write('.')\nraise OSError('again')\n")
    for _ in range(3):
        assert "OSError: again" in kernel_named("flashinfer").unavailable_reason("cuda:0")
    assert log.read_text() == "."


def test_the_signatures_that_rows_ask_for_are_those_of_flashinfer_0_7():
    """Read from its source: importing it takes seconds."""
    root = Path(sys.prefix) / "oracles" / "flashinfer"
    if not root.is_dir():
        root = Path(importlib.util.find_spec("flashinfer").origin).parent
    for row in ("flashinfer", "flashinfer_attention"):
        for requirement in kernel_named(row).requires:
            if requirement.module != "flashinfer":
                continue
            file = root / ("gemm/gemm_base.py" if row == "flashinfer" else "nvfp4_attention_sm120.py")
            found = [
                [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.FunctionDef) and node.name == requirement.function
            ]
            assert any(set(requirement.parameters) <= set(parameters) for parameters in found)
