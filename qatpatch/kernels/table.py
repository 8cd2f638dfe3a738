"""`Kernel` and `TABLE`: one literal row per kernel, in the order in which they are tried.

A row says what a kernel computes (op, scheme, stages), where it runs (device types, capabilities, shapes) and what it
needs (`Requirement`s). Its module is imported on first use and exposes, by op:

- linear: ``operand``, ``operands``, ``packed_operand``, ``quantize``, ``matmul`` (see `reference_nvfp4`); native rows
  ``quantize``, ``quantize_activation``, ``scaled_matmul`` (see `native_ops`);
- attention: ``forward``, and ``backward`` where the row trains (see `reference_attention`).
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType

import torch

from qatpatch.kernels.requirements import Capability, Requirement, architecture
from qatpatch.nvfp4 import padded_length

ATTENTION_SCHEMES = ("sage3", "fa4")
# Not trained by anybody here: kernels that compute it run only where they are asked for by name.
SMOOTHED_SCHEME = "sage3_smoothed"
# The architectures whose FP4 attention kernels each scheme simulates.
SCHEME_OF_TARGET = {"sm_120": "sage3", "sm_121": "sage3", "sm_100": "fa4", "sm_103": "fa4"}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One row of the table.

    Attributes:
        name: unique name, as receipts print it.
        op: ``"linear"`` or ``"attention"``.
        stages: where it may be bound: ``"train"``, ``"infer"`` (attention inside `infer_attention`), ``"deploy"``.
        schemes: what it computes: ``"nvfp4"`` for linears; ``"sage3"``, ``"fa4"``, ``"sage3_smoothed"`` for attention.
        module: imported on first use.
        native: True when it computes on FP4 tensor cores, False when it emulates the numbers. Native kernels are bound
            only after `proof` has run them.
        explicit_only: bound only where it is asked for by name.
        device_types: device types it runs on; empty for any.
        minimum_capability: lowest CUDA capability, for kernels that run on CUDA.
        capabilities: the CUDA capabilities that it runs on; empty for all from `minimum_capability` on.
        refusals: (capability, reason) where a capability that looks fit is not.
        requires: packages that must be installed, and how.
        multiples: linear: what out_features and in_features (padded to whole blocks) must be multiples of.
        weight_only: linear: False for a kernel that needs a quantized input.
        out_dtypes: linear: output dtypes that it serves; empty for any.
        rounds_before_bias: linear: True for a kernel that adds a bias to its rounded output, and so rounds twice. Not
            bound to a layer with a bias unless it is asked for by name.
        head_dims: attention: head dimensions that it serves; empty for any.
        honours_masks: attention: False for a kernel that takes no mask.
        returns_lse: attention: False for a kernel that gives no softmax statistics.
        folds_pow2: linear: power-of-two global scales are part of bfloat16 operands (exact there), so that a plain GEMM
            needs no scale.
        float32_operands: linear: operands are float32 whatever the compute dtype, else 16-bit.
        summary: one line for `list_kernels`.
    """

    name: str
    op: str
    stages: tuple[str, ...]
    schemes: tuple[str, ...]
    module: str
    native: bool = False
    explicit_only: bool = False
    device_types: tuple[str, ...] = ()
    minimum_capability: Capability | None = None
    capabilities: tuple[Capability, ...] = ()
    refusals: tuple[tuple[Capability, str], ...] = ()
    requires: tuple[Requirement, ...] = ()
    multiples: tuple[int, int] = (1, 1)
    weight_only: bool = True
    out_dtypes: tuple[torch.dtype, ...] = ()
    rounds_before_bias: bool = False
    head_dims: tuple[int, ...] = ()
    honours_masks: bool = True
    returns_lse: bool = True
    folds_pow2: bool = False
    float32_operands: bool = False
    summary: str = ""

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the GEMM operands for compute dtype ``dtype``; 16-bit ones hold ``code * block_scale`` exactly."""
        if self.float32_operands:
            return torch.float32
        return torch.bfloat16 if dtype is torch.float32 else dtype

    def folded(self, rule: str, dtype: torch.dtype) -> bool:
        """Whether operands of compute dtype ``dtype`` hold their global scale."""
        return self.folds_pow2 and rule == "pow2" and self.operand_dtype(dtype) is torch.bfloat16

    def unavailable_reason(self, device: torch.device | str) -> str | None:
        """Why this kernel cannot run on ``device``; None when it can.

        Devices are looked at before packages, so that nothing is imported where it could not run anyway. Numbers are
        not: that is `proof`.
        """
        return self.device_reason(device) or self.package_reason(device)

    def device_reason(self, device: torch.device | str) -> str | None:
        """Why ``device`` itself is none that this kernel runs on; None where it is one."""
        device = torch.device(device)
        if self.device_types and device.type not in self.device_types:
            return f"runs on {' or '.join(self.device_types)}, not on {device.type}"
        if device.type != "cuda" or not (self.minimum_capability or self.capabilities):
            return None
        if not torch.cuda.is_available():
            return "needs a CUDA device, and torch finds none"
        return self._capability_reason(torch.cuda.get_device_capability(device))

    def package_reason(self, device: torch.device | str) -> str | None:
        """Why what is installed does not serve ``device``, one of those that it runs on; None where it does."""
        capability = None
        if torch.device(device).type == "cuda" and (self.minimum_capability or self.capabilities):
            capability = torch.cuda.get_device_capability(device)
        reasons = (requirement.unmet_reason(capability) for requirement in self.requires)
        return next((reason for reason in reasons if reason is not None), None)

    def _capability_reason(self, capability: Capability) -> str | None:
        for refused, reason in self.refusals:
            if capability == refused:
                return f"does not run on {architecture(capability)}: {reason}"
        if self.capabilities and capability not in self.capabilities:
            listed = [architecture(c) for c in self.capabilities]
            served = " and ".join(filter(None, (", ".join(listed[:-1]), listed[-1])))
            return f"runs on {served}, not on {architecture(capability)}"
        if self.minimum_capability and capability < self.minimum_capability:
            return f"needs {architecture(self.minimum_capability)} or newer, this is {architecture(capability)}"
        return None

    def shape_reason(self, shape: tuple[int, int]) -> str | None:
        """Why a linear of ``shape`` (out_features, in_features) cannot be served; None when it can."""
        padded = shape[0], padded_length(shape[1])
        for label, size, given, multiple in zip(
            ("out_features", "in_features"), padded, shape, self.multiples, strict=True
        ):
            if size % multiple:
                return f"needs {label} to be a multiple of {multiple}, this layer has {given}"
        return None

    def load(self) -> ModuleType:
        """The module with the kernel's functions."""
        return sys.modules.get(self.module) or importlib.import_module(self.module)


SM_80, SM_100, SM_103, SM_120, SM_121 = (8, 0), (10, 0), (10, 3), (12, 0), (12, 1)

_TRITON = Requirement(
    distribution="triton", versions=">=3.6", install="CUDA builds of torch bring it, else pip install triton"
)

TABLE: tuple[Kernel, ...] = (
    Kernel(
        name="flashinfer",
        op="linear",
        stages=("deploy",),
        schemes=("nvfp4",),
        module="qatpatch.kernels.flashinfer_linear",
        native=True,
        device_types=("cuda",),
        capabilities=(SM_100, SM_103, SM_120, SM_121),
        requires=(
            _TRITON,
            Requirement(
                distribution="flashinfer-python",
                versions=">=0.6.8,<0.8",
                module="flashinfer",
                function="mm_fp4",
                parameters=("a", "b", "a_descale", "b_descale", "alpha", "out_dtype", "backend"),
                install=(
                    "pip install 'flashinfer-python>=0.7,<0.8' brings nvidia-cutlass-dsl>=4.8 and needs nvcc of CUDA "
                    "12.8 or newer at its first call; beside the FP4 FlashAttention-4 fork it is "
                    "flashinfer-python==0.6.8 with nvidia-cutlass-dsl==4.4.2"
                ),
            ),
        ),
        multiples=(32, 32),
        weight_only=False,
        out_dtypes=(torch.bfloat16, torch.float16),
        rounds_before_bias=True,
        summary="flashinfer's mm_fp4 on operands quantized by our own kernels; layers without a bias",
    ),
    Kernel(
        name="triton_nvfp4",
        op="linear",
        stages=("deploy",),
        schemes=("nvfp4",),
        module="qatpatch.kernels.triton_scaled",
        native=True,
        device_types=("cuda",),
        capabilities=(SM_100, SM_103, SM_120, SM_121),
        requires=(
            _TRITON,
            Requirement(
                distribution="triton",
                versions=">=3.7.1",
                capabilities=(SM_100, SM_103),
                because="older ones leave out a fence before the tensor cores read, a race",
                install="pip install 'triton>=3.7.1', with a torch that takes it",
            ),
            Requirement(
                distribution="triton",
                versions=">=3.8",
                capabilities=(SM_121,),
                because="older ones do not compile the block-scaled product there",
                install="pip install 'triton>=3.8', with a torch that takes it",
            ),
        ),
        weight_only=False,
        summary="our own Triton GEMM on block-scaled FP4 tensor cores",
    ),
    Kernel(
        name="triton_linear",
        op="linear",
        stages=("train", "deploy"),
        schemes=("nvfp4",),
        module="qatpatch.kernels.triton_linear",
        device_types=("cuda",),
        minimum_capability=SM_80,
        requires=(_TRITON,),
        folds_pow2=True,
        summary="Triton quantizers around a 16-bit tensor-core GEMM, sm_80 and up",
    ),
    Kernel(
        name="reference_linear",
        op="linear",
        stages=("train", "deploy"),
        schemes=("nvfp4",),
        module="qatpatch.kernels.reference_nvfp4",
        float32_operands=True,
        summary="plain torch, any device: the definition of the numbers",
    ),
    Kernel(
        name="attn_qat_infer",
        op="attention",
        stages=("infer",),
        schemes=("sage3",),
        module="qatpatch.kernels.fastvideo_attention",
        native=True,
        device_types=("cuda",),
        capabilities=(SM_120,),
        refusals=((SM_121, "the wheels of fastvideo-kernel hold code for sm_120a alone, which does not load there"),),
        requires=(
            Requirement(
                distribution="fastvideo-kernel",
                versions=">=0.3.5,<0.4",
                module="attn_qat_infer",
                function="sageattn_blackwell",
                parameters=("q", "k", "v", "per_block_mean", "single_level_p_quant", "sm_scale"),
                impostor="not the attention that training simulates",
                conflicts=(("sageattn3", "both install fp4attn_cuda and fp4quant_cuda, with different arguments"),),
                install=(
                    "pip install fastvideo-kernel==0.3.5 (wheels for Python 3.12 with torch 2.12.0), in an environment "
                    "without SageAttention3"
                ),
            ),
        ),
        head_dims=(64, 128),
        honours_masks=False,
        returns_lse=False,
        summary="fastvideo-kernel's FP4 attention, sm_120",
    ),
    Kernel(
        name="fa4_fp4",
        op="attention",
        stages=("infer",),
        schemes=("fa4",),
        module="qatpatch.kernels.fa4_attention",
        native=True,
        device_types=("cuda",),
        capabilities=(SM_100, SM_103),
        requires=(
            _TRITON,
            Requirement(
                module="flash_attn.cute.interface",
                function="flash_attn_func",
                parameters=("q", "k", "v", "softmax_scale", "mSFQ", "mSFK"),
                impostor="that is mainline FlashAttention-4, which has the same name and no FP4",
                install=(
                    "install the FP4 fork hao-ai-lab/flash-attention-fp4 in its place, with nvidia-cutlass-dsl==4.4.2, "
                    "quack-kernels==0.4.1 and, if at all, flashinfer-python==0.6.8"
                ),
            ),
            Requirement(
                distribution="nvidia-cutlass-dsl",
                versions=">=4.4.2,<4.6",
                because="the fork does not build with others, flashinfer 0.7 needs 4.8: not in one environment",
                install="pip install nvidia-cutlass-dsl==4.4.2 quack-kernels==0.4.1 flashinfer-python==0.6.8",
            ),
        ),
        head_dims=(64, 128),
        honours_masks=False,
        returns_lse=False,
        summary="the FP4 fork of FlashAttention-4, sm_100 and sm_103",
    ),
    Kernel(
        name="flashinfer_attention",
        op="attention",
        stages=("infer",),
        schemes=(SMOOTHED_SCHEME,),
        module="qatpatch.kernels.flashinfer_attention",
        native=True,
        explicit_only=True,
        device_types=("cuda",),
        capabilities=(SM_120, SM_121),
        requires=(
            Requirement(
                distribution="flashinfer-python",
                versions=">=0.6.18,<0.8",
                module="flashinfer",
                function="nvfp4_attention_sm120_fwd",
                parameters=("q_fp4", "k_fp4", "v_fp4_t", "qk_correction", "sm_scale", "unpadded_k_len"),
                install="pip install 'flashinfer-python>=0.7,<0.8', with nvcc of CUDA 12.8 or newer",
            ),
        ),
        head_dims=(64, 128),
        honours_masks=False,
        returns_lse=False,
        summary="flashinfer's FP4 attention, which smooths Q and K: numbers that no training here simulates",
    ),
    Kernel(
        name="triton_attention",
        op="attention",
        stages=("train", "infer"),
        schemes=ATTENTION_SCHEMES,
        module="qatpatch.kernels.triton_attention",
        device_types=("cuda",),
        minimum_capability=SM_80,
        requires=(_TRITON,),
        head_dims=(64, 128),
        summary="Triton, P quantized in registers; fa4 on torch's dense attention, sm_80 and up",
    ),
    Kernel(
        name="reference_attention",
        op="attention",
        stages=("train", "infer"),
        schemes=ATTENTION_SCHEMES,
        module="qatpatch.kernels.reference_attention",
        summary="plain torch, any device: the definition of the numbers",
    ),
)
