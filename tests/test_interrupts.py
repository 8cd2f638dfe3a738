"""Interrupted at any line: every public call that changes a model leaves it as it was, or as a second call can finish.

A trace function raises KeyboardInterrupt at the first visit of one line of the package after the other, until a call
comes through: what Ctrl-C in a notebook does, at every place where it can.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from models import run, tiny_wan, wan_inputs
from test_patch import ANY_LINEAR, snapshot
from torch import nn

import qatpatch
from qatpatch import PlanError

PACKAGE = Path(qatpatch.__file__).parent
# What only reads: an interrupt there is one before anything changed.
PURE = ("plan.py", "units.py", "receipts.py", "nvfp4.py", "profiles/*.py", "kernels/*.py")
IGNORED = {str(path) for pattern in PURE for path in PACKAGE.glob(pattern)}


FEW = ("blocks.*.ffn", "blocks.*.attn2", "blocks.*.attn1.to_k", "blocks.*.attn1.to_v")


class Interrupt:
    """Raises KeyboardInterrupt at the first line of the package that is not among ``seen``, and adds it."""

    def __init__(self, seen: set[tuple[str, int]]) -> None:
        self.seen = seen
        self.line: tuple[str, int] | None = None

    def __call__(self, frame, event, argument):
        name = frame.f_code.co_filename
        if self.line is not None or not name.startswith(str(PACKAGE)) or name in IGNORED:
            return None
        if event == "line" and (name, frame.f_lineno) not in self.seen:
            self.line = (name, frame.f_lineno)
            self.seen.add(self.line)
            raise KeyboardInterrupt
        return self


def every_line(call, check, prepare=tuple) -> int:
    """Interrupt ``call`` at each of its lines in turn, with ``check`` after each; how many there were.

    ``prepare`` gives the arguments of both, anew for each interrupt.
    """
    seen: set[tuple[str, int]] = set()
    while True:
        arguments = prepare()
        interrupt, before = Interrupt(seen), sys.gettrace()
        sys.settrace(interrupt)
        try:
            call(*arguments)
            return len(seen)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        path, line = interrupt.line
        try:
            check(*arguments)
        except Exception as error:
            raise AssertionError(f"interrupted at {Path(path).relative_to(PACKAGE)}:{line}: {error!r}") from error


@pytest.fixture(scope="module")
def wan():
    """A patched model (few layers: only the first visit of a line is interrupted), inputs, and its output."""
    model = tiny_wan(layers=1)
    data = wan_inputs(model, frames=1, height=4, width=4)
    qatpatch.apply(model, exclude=FEW)
    return model, data, run(model, data)


def test_apply_leaves_no_patch_without_a_receipt():
    model = tiny_wan(layers=1)
    before = snapshot(model)

    def untouched():
        assert not qatpatch.is_patched(model)
        now = snapshot(model)
        assert now == before, [key for key in now if now[key] != before[key]]

    assert every_line(lambda: qatpatch.apply(model, exclude=FEW), untouched) > 80
    assert qatpatch.is_patched(model)


def test_apply_leaves_a_graph_as_it_was():
    torch.manual_seed(0)
    graph, x = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(64, 32), nn.GELU())), torch.randn(4, 64)
    code, out, before = graph.code, graph(x), {n: id(m) for n, m in graph.named_modules()}

    def untouched():
        assert not qatpatch.is_patched(graph) and graph.code == code and torch.equal(graph(x), out)
        assert {n: id(m) for n, m in graph.named_modules()} == before

    assert every_line(lambda: qatpatch.apply(graph, ANY_LINEAR), untouched) > 60


def enter_and_leave(model, kind):
    if kind == "nested":
        with qatpatch.dense(model), qatpatch.infer_attention(model):
            pass
    else:
        with getattr(qatpatch, kind)(model):
            pass


@pytest.mark.parametrize("kind", ["infer_attention", "dense", "reuse_weights", "nested"])
def test_blocks_close_whether_they_are_interrupted_on_entry_or_on_exit(kind, wan):
    model, _, _ = wan
    switch = qatpatch.patch.patch_record(model).switch
    before, hooks = snapshot(model), (list(model._forward_hooks), list(model._forward_pre_hooks))

    def closed():
        assert (switch.linear, switch.attention, switch.stage, switch.weights) == (None,) * 4 and not switch._open
        assert (list(model._forward_hooks), list(model._forward_pre_hooks)) == hooks
        assert snapshot(model) == before

    assert every_line(lambda: enter_and_leave(model, kind), closed) > 25


def test_after_all_that_a_model_computes_and_trains_as_before(wan):
    model, data, out = wan
    assert torch.equal(run(model, data), out)
    model(**data)[0].square().mean().backward()
    assert model.blocks[0].attn1.to_q.weight.grad.abs().sum() > 0
    model.zero_grad()


def test_remove_can_be_called_again(wan):
    before = snapshot(tiny_wan(layers=1))

    def finished(model):
        if qatpatch.is_patched(model):
            qatpatch.remove(model)
        now = snapshot(model)
        assert all(now[key] == before[key] for key in ("classes", "attributes", "keys"))

    assert every_line(qatpatch.remove, finished, lambda: [copy.deepcopy(wan[0])]) > 40


def test_deploy_leaves_a_model_that_works_and_can_be_called_again(wan):
    patched, data, out = wan

    def finished(model):
        assert torch.equal(run(model, data), out)
        try:
            report = qatpatch.deploy(model)
            assert len(report.packed) == 2 and report.retained == ()
        except PlanError as error:
            assert "is deployed already" in str(error)
        assert {layer.state for layer in qatpatch.report(model).layers.values()} == {"deployed"}
        assert model.hf_quantizer is not None and "enable_layerwise_casting" not in vars(model)
        assert torch.equal(run(model, data), out)

    assert every_line(qatpatch.deploy, finished, lambda: [copy.deepcopy(patched)]) > 100


def test_calibrate_sets_every_scale_or_none():
    model, x = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16)), torch.randn(4, 64)
    qatpatch.apply(model, ANY_LINEAR, input_scale="static")

    def scales():
        return {layer.quantization.settings.static_scale for layer in model}

    with qatpatch.calibrate(model):
        model(x)
    before = scales()

    def call():
        with qatpatch.calibrate(model):
            model(x * 100)

    def old():
        assert scales() == before or not scales() & before
        assert all(layer.quantization.calibration is None for layer in model)

    assert every_line(call, old) > 100
    assert not scales() & before
