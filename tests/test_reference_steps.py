"""Fixed steps against figures recorded with `reference_steps.py`, which says how to record them anew."""

from __future__ import annotations

import pytest
import reference_steps
import torch
from reference_steps import CURVE_TOLERANCE, differences, recorded, tolerance
from test_recipe_train import _fresh_accelerator  # noqa: F401

CPU = torch.device("cpu")


def test_gradient_norms_of_a_step_on_the_cpu():
    found = reference_steps.tiny(CPU)
    known = recorded()["cpu"]
    assert differences(found, {name: known[name] for name in found}, tolerance("cpu")) == []


@pytest.mark.slow
def test_losses_of_the_tiny_recipe():
    found = reference_steps.curve(CPU)["tiny recipe"]
    assert differences(found, recorded()["cpu"]["tiny recipe"], CURVE_TOLERANCE) == []
    assert found[-1] < found[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradient_norms_of_a_step_on_a_gpu():
    device = torch.device("cuda")
    kind = reference_steps.device_kind(device)
    known = recorded().get(kind, {})
    if "tiny ltx2" not in known:
        pytest.skip(f"nothing is recorded for {kind}: python tests/reference_steps.py tiny --record")
    found = reference_steps.tiny(device)
    assert differences(found, {name: known[name] for name in found}, tolerance(kind)) == []


def test_a_figure_that_moved_is_named():
    known = {"a": {"loss": 1.0, "|grad x|": 2.0}, "curve": [1.0, 0.5]}
    moved = {"a": {"loss": 1.0, "|grad x|": 2.02}, "curve": [1.0, 0.6]}
    assert differences(known, known, 5e-3) == []
    assert sorted(differences(moved, known, 5e-3)) == [
        "a |grad x|: 2.02, recorded 2",
        "curve, step 2: 0.6, recorded 0.5",
    ]
    assert differences({"a": {}}, {"a": {"loss": 1.0}}, 1.0) == ["a loss: not in both"]
