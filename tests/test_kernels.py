"""The table: literal rows, every refusal with its reason, decided for the device that was asked about."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import qatpatch
from qatpatch import KernelUnavailable, kernels
from qatpatch.kernels import TABLE, Kernel, Requirement, resolve


def test_rows_are_unique_and_load():
    names = [kernel.name for kernel in TABLE]
    assert len(set(names)) == len(names)
    for kernel in TABLE:
        if kernel.unavailable_reason("cpu") is None:
            module = kernel.load()
            wanted = {
                "linear": ("operand", "packed_operand", "quantize", "matmul"),
                "attention": ("forward", "backward") if "train" in kernel.stages else ("forward",),
            }
            assert all(callable(getattr(module, name)) for name in wanted[kernel.op])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_reference_serves_every_device(device):
    assert resolve("linear", stage="train", scheme="nvfp4", device=device).name == "reference_linear"
    assert resolve("attention", stage="infer", scheme="fa4", device=device).name == "reference_attention"


def test_refusals_name_every_row():
    with pytest.raises(KernelUnavailable, match="reference_linear: computes nvfp4, not int8"):
        resolve("linear", stage="train", scheme="int8", device="cpu")
    with pytest.raises(KernelUnavailable, match="reference_linear: emulates the numbers"):
        resolve("linear", stage="train", scheme="nvfp4", device="cpu", name="native")
    with pytest.raises(KernelUnavailable, match="did you mean 'reference_linear'"):
        resolve("linear", stage="train", scheme="nvfp4", device="cpu", name="reference_liner")


def test_requirements_are_checked_on_the_device_asked_about(monkeypatch):
    row = Kernel(
        name="x",
        op="linear",
        stages=("train",),
        schemes=("nvfp4",),
        module="nowhere",
        device_types=("cuda",),
        minimum_capability=(10, 0),
        requires=(Requirement(distribution="a-package-that-is-not-there", install="pip install it"),),
    )
    assert row.unavailable_reason("cpu") == "runs on cuda, not on cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert row.unavailable_reason("cuda:0") == "needs a CUDA device, and torch finds none"
    capabilities = {0: (9, 0), 1: (10, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[torch.device(device).index])
    assert row.unavailable_reason("cuda:0") == "needs sm_100 or newer, this is sm_90"
    missing = "needs a-package-that-is-not-there, which is not installed; pip install it"
    assert row.unavailable_reason("cuda:1") == missing
    assert dataclasses.replace(row, requires=()).unavailable_reason("cuda:1") is None
    assert kernels.architecture_of("cuda:1") == "sm_100"


def test_list_kernels_prints_every_row_and_where_it_runs():
    listed = qatpatch.list_kernels()
    text = str(listed)
    assert len(listed) == len(TABLE) and all(kernel.name in text for kernel in TABLE)
    assert "usable on cpu" in text


def test_the_docs_name_every_row():
    page = (Path(__file__).resolve().parent.parent / "docs" / "kernels.md").read_text()
    assert all(f"`{kernel.name}`" in page for kernel in TABLE)
