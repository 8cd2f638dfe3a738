"""Static input scales from the user's own forwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qatpatch
from qatpatch import PlanError, Profile, Rule

ANY_LINEAR = Profile(name="all", rules=(Rule(match=("*",), action="linear"),))


def build(**arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    qatpatch.apply(model, ANY_LINEAR, **arguments)
    return model


def test_the_scale_is_that_of_the_largest_input_seen():
    model = build(input_scale="static")
    x = torch.randn(8, 64)
    with pytest.raises(RuntimeError, match="qatpatch.calibrate"):
        model(x)
    keys = list(model.state_dict())
    with qatpatch.calibrate(model), torch.no_grad():
        model(x)
        model(x * 5)
        model(x * 2)
    amax = float((x * 5).abs().max())
    exponent = 0
    while 2.0**exponent * 2688 >= 2 * amax:
        exponent -= 1
    assert model[0].quantization.settings.static_scale == 2.0**exponent
    assert list(model.state_dict()) == keys
    out = model(x)
    assert torch.equal(model(torch.cat([x, x * 4]))[:8], out)  # no dependence on batch neighbours
    twin = build()
    assert torch.equal(twin(torch.cat([x, x * 5]))[:8], out)  # dynamic, with the same largest input
    model.eval()
    qatpatch.deploy(model)
    assert torch.equal(model(x), out)


def test_calibrate_refuses_what_it_cannot_do():
    with pytest.raises(PlanError, match="another input_scale"), qatpatch.calibrate(build()):
        pass
    with pytest.raises(PlanError, match="no forward reached"), qatpatch.calibrate(build(input_scale="static")):
        pass
    with pytest.raises(PlanError, match="not patched"), qatpatch.calibrate(nn.Linear(2, 2)):
        pass
    model = build(input_scale="unit")
    qatpatch.deploy(model)
    with pytest.raises(PlanError, match="before deploy"), qatpatch.calibrate(model):
        pass


def test_an_exception_inside_keeps_the_old_scales():
    model = build(input_scale="static")
    with pytest.raises(ValueError), qatpatch.calibrate(model), torch.no_grad():
        model(torch.randn(2, 64))
        raise ValueError
    assert model[0].quantization.settings.static_scale is None and model[0].quantization.calibration is None


def test_input_without_a_finite_number_changes_no_scale():
    model = build(input_scale="static")
    with qatpatch.calibrate(model), torch.no_grad():
        model(torch.randn(2, 64))
    before = model[0].quantization.settings
    with pytest.raises(PlanError, match="no finite number"), qatpatch.calibrate(model), torch.no_grad():
        model(torch.full((2, 64), float("nan")))
    assert model[0].quantization.settings == before
    with qatpatch.calibrate(model):
        with pytest.raises(PlanError, match="do not nest"), qatpatch.calibrate(model):
            pass
        model(torch.randn(2, 64))
