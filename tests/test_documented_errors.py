"""Every error that a public function's docstring names is provoked here, and no function raises without saying so.

`PROVOKE` has a case for each; a docstring that gains an error without a case fails, and so does a case that the
docstring does not name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from models import run, tiny_wan, wan_inputs
from torch import nn

import qatpatch
from qatpatch import CheckpointError, KernelUnavailable, PlanError, Profile, Rule, nvfp4

ERRORS = (PlanError, KernelUnavailable, CheckpointError, ValueError, TypeError, RuntimeError)
EVERYTHING = Profile(name="everything", rules=(Rule(match="*", action="linear"),))


def plain() -> nn.Module:
    return tiny_wan(layers=1)


def patched(**arguments) -> nn.Module:
    model = plain()
    qatpatch.apply(model, **arguments)
    return model


def deployed() -> nn.Module:
    model = patched()
    qatpatch.deploy(model)
    return model


def enter(context) -> None:
    with context:
        pass


def needs_gradients() -> None:
    model = patched()
    with qatpatch.infer_attention(model):
        model(**wan_inputs(model))


def calibrate_without_forwards() -> None:
    enter(qatpatch.calibrate(patched(input_scale="static")))


def attend(**arguments) -> torch.Tensor:
    q = torch.randn(1, 8, 2, 64)
    given = dict(q=q, k=q, v=q) | arguments
    return qatpatch.qat_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def registered_by_somebody_else() -> None:
    from diffusers.quantizers import auto

    old = auto.AUTO_QUANTIZER_MAPPING.get("qatpatch")
    auto.AUTO_QUANTIZER_MAPPING["qatpatch"] = type("Theirs", (), {})
    try:
        qatpatch.register_diffusers()
    finally:
        del auto.AUTO_QUANTIZER_MAPPING["qatpatch"]
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop("qatpatch", None)
        if old is not None:
            auto.AUTO_QUANTIZER_MAPPING["qatpatch"] = old


# (function, error) -> what raises it, given a temporary folder.
PROVOKE: dict[tuple[str, type[Exception]], Callable] = {
    ("build_plan", PlanError): lambda _: qatpatch.build_plan(plain(), profile="wam"),
    ("apply", PlanError): lambda _: qatpatch.apply(patched()),
    ("remove", PlanError): lambda _: qatpatch.remove(deployed()),
    ("report", PlanError): lambda _: qatpatch.report(plain()),
    ("audit", PlanError): lambda _: qatpatch.audit(nn.Linear(16, 16), input=torch.ones(2, 16)),
    ("calibrate", PlanError): lambda _: calibrate_without_forwards(),
    ("calibrate", ValueError): lambda _: enter(qatpatch.calibrate(patched(input_scale="static"), percentile=101)),
    ("sensitivity", PlanError): lambda _: qatpatch.sensitivity(deployed(), [wan_inputs(plain())], progress=False),
    ("sensitivity", ValueError): lambda _: qatpatch.sensitivity(plain(), [], progress=False),
    ("infer_attention", PlanError): lambda _: enter(qatpatch.infer_attention(patched(attention=False))),
    ("infer_attention", KernelUnavailable): lambda _: enter(qatpatch.infer_attention(patched(), kernel="native")),
    ("infer_attention", RuntimeError): lambda _: needs_gradients(),
    ("reuse_weights", PlanError): lambda _: enter(qatpatch.reuse_weights(plain())),
    ("reuse_weights", ValueError): lambda _: enter(qatpatch.reuse_weights(patched(), memory_limit=-1)),
    ("dense", PlanError): lambda _: enter(qatpatch.dense(deployed())),
    ("stage", PlanError): lambda _: enter(qatpatch.stage(patched(), "base")),
    ("deploy", PlanError): lambda _: qatpatch.deploy(deployed()),
    ("deploy", KernelUnavailable): lambda _: qatpatch.deploy(patched(), linear_kernel="native"),
    ("save", CheckpointError): lambda folder: qatpatch.save(patched(), folder),
    ("load", CheckpointError): lambda folder: qatpatch.load(folder),
    ("load", KernelUnavailable): lambda folder: load_another_scheme(folder),
    ("export", CheckpointError): lambda folder: qatpatch.export(patched(), folder, format="modelopt"),
    ("convert", CheckpointError): lambda folder: qatpatch.convert(folder, folder / "x", format="modelopt"),
    ("load_profile", PlanError): lambda folder: qatpatch.load_profile(folder / "none.toml"),
    ("register_diffusers", PlanError): lambda _: registered_by_somebody_else(),
    ("fake_quantize", TypeError): lambda _: qatpatch.fake_quantize(torch.ones(4, dtype=torch.int32)),
    ("fake_quantize", ValueError): lambda _: qatpatch.fake_quantize(torch.ones(16), global_scale=torch.tensor(-1.0)),
    ("qat_attention", ValueError): lambda _: attend(scheme="sage4"),
    ("qat_attention", TypeError): lambda _: attend(k=torch.randn(1, 8, 2, 64).half()),
    ("qat_attention", KernelUnavailable): lambda _: attend(kernel="triton_attention"),
    ("qat_attention", RuntimeError): lambda _: attend(attn_mask=torch.zeros(8, 8, requires_grad=True)),
    ("nvfp4.quantize", TypeError): lambda _: nvfp4.quantize(torch.ones(4, dtype=torch.int64)),
    ("nvfp4.quantize", ValueError): lambda _: nvfp4.quantize(torch.tensor(1.0)),
}
FUNCTIONS = [
    *(name for name in qatpatch.__all__ if inspect.isfunction(getattr(qatpatch, name))),
    "nvfp4.quantize",
    "nvfp4.dequantize",
]


def load_another_scheme(folder):
    """A model that was deployed for a scheme that only another GPU has a kernel for."""
    from qatpatch.kernels import table

    model = patched()
    qatpatch.deploy(model)
    qatpatch.save(model, folder)
    rows = table.TABLE
    only_native = tuple(row for row in rows if row.op == "linear" or row.native)
    with pytest.MonkeyPatch.context() as patch:
        import qatpatch.kernels as kernels

        for module in (table, kernels):
            patch.setattr(module, "TABLE", only_native, raising=False)
        qatpatch.load(folder)


def function(name: str):
    found = qatpatch
    for part in name.split("."):
        found = getattr(found, part)
    return found


def documented(name: str) -> set[str]:
    text = re.search(r"Raises:\n((?:    .*\n?|\n)*)", inspect.getdoc(function(name)) or "")
    lines = re.findall(r"^    (\w+(?:, \w+)*):", text[1], re.MULTILINE) if text else []
    return {error for line in lines for error in line.split(", ")}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_documented_error_has_a_case_and_no_other(name):
    assert {error.__name__ for function, error in PROVOKE if function == name} == documented(name)


@pytest.mark.parametrize(("name", "error"), PROVOKE, ids=lambda value: getattr(value, "__name__", value))
def test_the_error_is_raised_with_a_sentence(name, error, tmp_path):
    with pytest.raises(error) as raised:
        PROVOKE[name, error](tmp_path)
    # The most specific class that the docstring could name, with words in it.
    assert next(kind for kind in ERRORS if isinstance(raised.value, kind)) is error
    assert len(str(raised.value).split()) > 5
    if name in ("build_plan", "apply", "remove"):
        model = plain()
        assert run(model, wan_inputs(model)) is not None
