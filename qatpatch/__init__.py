"""qatpatch: patch other people's diffusion transformers in place, to be trained for NVFP4 and run in it.

    report = qatpatch.apply(pipe.transformer, profile="ltx2")
    with qatpatch.infer_attention(pipe.transformer): ...
    qatpatch.deploy(pipe.transformer)

Names are imported on first use: importing the package loads torch and the format, neither diffusers nor a kernel.
"""

from __future__ import annotations

import importlib
from typing import Any

from qatpatch import nvfp4
from qatpatch.errors import CheckpointError, KernelUnavailable, PlanError

__version__ = "0.1.0"

_PUBLIC = {
    "Count": "profiles",
    "DeployReport": "receipts",
    "PatchReport": "receipts",
    "Plan": "plan",
    "Profile": "profiles",
    "Rule": "profiles",
    "apply": "patch",
    "audit": "coverage",
    "build_plan": "plan",
    "calibrate": "calibration",
    "convert": "exporting",
    "dense": "swap",
    "deploy": "deployment",
    "export": "exporting",
    "fake_quantize": "straight_through",
    "infer_attention": "swap",
    "is_patched": "patch",
    "list_kernels": "kernels",
    "load": "checkpoint",
    "load_profile": "profiles",
    "qat_attention": "attention",
    "register_diffusers": "diffusers_quantizer",
    "remove": "patch",
    "report": "patch",
    "reuse_weights": "swap",
    "save": "checkpoint",
    "sensitivity": "damage",
    "stage": "swap",
}

__all__ = [
    "CheckpointError",
    "KernelUnavailable",
    "PlanError",
    "__version__",
    "nvfp4",
    *_PUBLIC,
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
