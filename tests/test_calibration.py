"""Static input scales from the user's own forwards."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import torch.utils.checkpoint
from models import run, tiny_wan, wan_inputs
from torch import nn

import qatpatch
from qatpatch import PlanError, Profile, Rule, calibration

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
    for percentile in (0, -1, 100.5, float("nan"), "x", None):
        with pytest.raises(ValueError, match="at most 100"):
            with qatpatch.calibrate(build(input_scale="static"), percentile=percentile):
                pass
    for share in (0.999, 1, 1e-3):
        said = rf"in percent.*percentile={100 * share:g}"
        with pytest.raises(ValueError, match=said), qatpatch.calibrate(build(input_scale="static"), percentile=share):
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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_broken_inputs_change_no_scale(value):
    model = build(input_scale="static")
    with qatpatch.calibrate(model), torch.no_grad():
        model(torch.randn(2, 64))
    before = model[0].quantization.settings
    x = torch.randn(2, 64)
    x[1, 3] = value
    with pytest.raises(PlanError, match="NaN or infinity"), qatpatch.calibrate(model), torch.no_grad():
        model(x)
    with pytest.raises(PlanError, match="only zeros"), qatpatch.calibrate(model), torch.no_grad():
        model(torch.zeros(2, 64))
    with pytest.raises(PlanError, match="percentile 50"), qatpatch.calibrate(model, percentile=50), torch.no_grad():
        model(torch.cat([torch.zeros(3, 64), torch.ones(1, 64)]))
    assert model[0].quantization.settings == before


def test_blocks_do_not_nest():
    model = build(input_scale="static")
    with qatpatch.calibrate(model):
        with pytest.raises(PlanError, match="do not nest"), qatpatch.calibrate(model):
            pass
        model(torch.randn(2, 64))


def sorted_percentile(values, percentile):
    """The smallest of ``values`` that at least so many percent of them do not exceed: by sorting."""
    ordered = sorted(abs(float(v)) for v in values.flatten())
    return ordered[max(1, math.ceil(len(ordered) * percentile / 100)) - 1]


@pytest.mark.parametrize("percentile", [1.01, 50.0, 99.0, 99.9, 99.999])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_percentile_is_that_of_all_elements_of_all_forwards(dtype, percentile):
    model = build(input_scale="static", global_scale="amax").to(dtype)
    torch.manual_seed(3)
    first, second = torch.randn(40, 64).to(dtype), (torch.randn(7, 64) * 30).to(dtype)
    with torch.no_grad(), qatpatch.calibrate(model, percentile=percentile) as receipt:
        model(first)
        model(second)
    expected = sorted_percentile(torch.cat([first, second]), percentile)
    seen = receipt.layers["0"]
    if dtype is torch.bfloat16:
        assert seen.magnitude == expected
    assert expected <= seen.magnitude <= min(expected * (1 + 2**-7), seen.amax)
    assert seen.scale == model[0].quantization.settings.static_scale == pytest.approx(seen.magnitude / 2688, rel=1e-6)
    assert seen.calls == 2 and seen.amax == float(torch.cat([first, second]).abs().max())


def test_many_elements_are_counted_in_parts(monkeypatch):
    x, whole, parts = torch.randn(1000), torch.zeros(1 << 15, dtype=torch.int64), torch.zeros(1 << 15).long()
    calibration.count_magnitudes(x, whole)
    monkeypatch.setattr(calibration, "_CHUNK", 7)
    calibration.count_magnitudes(x, parts)
    assert torch.equal(whole, parts) and int(whole.sum()) == 1000


def test_layers_that_no_forward_reached_are_named(caplog):
    model = nn.ModuleDict({"used": nn.Linear(32, 32), "unused": nn.Linear(32, 32)})
    qatpatch.apply(model, ANY_LINEAR, input_scale="static")
    with qatpatch.calibrate(model) as receipt:
        model["used"](torch.randn(2, 32))
    assert receipt.unreached == receipt.uncalibrated == ("unused",) and list(receipt.layers) == ["used"]
    assert (
        "no forward reached unused" in caplog.text and "unused" in str(receipt) and "<table>" in receipt._repr_html_()
    )
    with pytest.raises(RuntimeError, match="qatpatch.calibrate"):
        model["unused"](torch.randn(2, 32))
    with pytest.raises(PlanError, match="unused"):
        qatpatch.deploy(model)
    with qatpatch.calibrate(model) as receipt:
        model["unused"](torch.randn(2, 32))
    assert receipt.unreached == ("used",) and receipt.uncalibrated == ()


def test_compiled_models_are_observed_too():
    """Compiled before, compiled outside and in place: the scales of the eager forward, and graphs that still hold."""
    x = torch.randn(8, 64)
    eager, model = (build(input_scale="static") for _ in range(2))
    with qatpatch.calibrate(eager), torch.no_grad():
        eager(x)
    torch._dynamo.reset()
    model[0].quantization.settings = dataclasses.replace(model[0].quantization.settings, static_scale=2.0**-20)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        before = compiled(x)
        with qatpatch.calibrate(compiled):
            compiled(x)
        assert model[0].quantization.settings == eager[0].quantization.settings
        assert torch.equal(compiled(x), eager(x)) and not torch.equal(before, eager(x))
    torch._dynamo.reset()


def test_autocast_and_gradient_checkpointing_are_seen_as_they_run():
    x = torch.randn(8, 64)
    model = build(input_scale="static", global_scale="amax")
    with torch.autocast("cpu", torch.bfloat16), qatpatch.calibrate(model) as receipt:
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        out.float().sum().backward()
    assert receipt.layers["0"].amax == float(x.bfloat16().abs().max())


def test_scales_survive_training_copies_deploy_save_and_load(tmp_path):
    model = tiny_wan(layers=1)
    data = wan_inputs(model)
    qatpatch.apply(model, input_scale="static", attention=False)
    with qatpatch.calibrate(model, percentile=99.9), torch.no_grad():
        model(**data)
    scales = {
        name: model.get_submodule(name).quantization.settings.static_scale for name in qatpatch.report(model).linears
    }
    assert len(scales) == 10 and None not in scales.values()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(**data)[0].square().mean().backward()
    optimizer.step()
    twin = copy.deepcopy(model).eval()
    expected = run(twin, data)
    qatpatch.deploy(twin)
    qatpatch.save(twin, tmp_path / "m")
    loaded = qatpatch.load(tmp_path / "m")
    for each in (model, twin, loaded):
        found = {name: each.get_submodule(name).quantization.settings.static_scale for name in scales}
        assert found == scales
    assert torch.equal(run(loaded, data), expected)
