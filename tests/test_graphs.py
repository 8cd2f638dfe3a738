"""Exported and traced graphs: the same profile, the same numbers, the same undo."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from models import run, tiny_wan, wan_inputs
from torch import nn

import qatpatch
from qatpatch import PlanError, Profile, Rule, deployment
from qatpatch.linear import QATLinear
from qatpatch.packed_linear import NVFP4Linear

ANY_LINEAR = Profile(name="all", rules=(Rule(match=("*",), action="linear"),))


@pytest.fixture(scope="module")
def exported():
    model = tiny_wan(layers=1)
    data = wan_inputs(model, frames=1)
    return model, data, torch.export.export(model, (), data, strict=False)


def call(graph, data):
    with torch.no_grad():
        return graph(**data)[0]


def test_an_exported_graph_is_patched_like_the_live_model(exported):
    model, data, program = exported
    graph = program.module()
    keys, out = list(graph.state_dict()), call(graph, data)
    with pytest.raises(PlanError, match="knows no profile for GraphModule"):
        qatpatch.apply(graph)
    live = tiny_wan(layers=1)
    expected = qatpatch.apply(live)
    report = qatpatch.apply(graph, "wan")
    assert (report.linears, report.attentions) == (expected.linears, expected.attentions)
    assert report.parameters == pytest.approx(expected.parameters)
    assert list(graph.state_dict()) == keys and type(graph.blocks.get_submodule("0.attn1.to_q")) is QATLinear
    quantized = run(live, data)
    assert torch.equal(call(graph, data), quantized)
    with qatpatch.infer_attention(graph):
        assert torch.equal(call(graph, data), quantized)
    with qatpatch.dense(graph):
        assert torch.equal(call(graph, data), out)
    graph(**data)[0].sum().backward()
    assert graph.blocks.get_submodule("0.attn1.to_q").weight.grad.abs().sum() > 0
    qatpatch.remove(graph)
    assert torch.equal(call(graph, data), out) and list(graph.state_dict()) == keys
    assert not qatpatch.is_patched(graph)


def test_an_exported_graph_deploys_and_purges(exported):
    _, data, program = exported
    graph = torch.export.export(tiny_wan(layers=1), (), data, strict=False).module()
    qatpatch.apply(graph, "wan")
    out = call(graph, data)
    report = qatpatch.deploy(graph)
    assert report.held == {} and len(report.packed) == 10
    assert isinstance(graph.blocks.get_submodule("0.attn1.to_q"), NVFP4Linear)
    assert torch.equal(call(graph, data), out) and not any(k.endswith("to_q.weight") for k in graph.state_dict())
    with pytest.raises(PlanError, match="purged"):
        qatpatch.remove(graph)
    with pytest.raises(qatpatch.CheckpointError, match="graph modules"):
        qatpatch.save(graph, "unused")


def test_a_traced_module_is_patched():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))
    graph, x = torch.fx.symbolic_trace(copy.deepcopy(model)), torch.randn(4, 64)
    out = graph(x)
    report = qatpatch.apply(graph, ANY_LINEAR)
    assert report.linears == ("0", "2") and not torch.equal(graph(x), out)
    qatpatch.apply(model, ANY_LINEAR)
    assert torch.equal(graph(x), model(x))
    qatpatch.remove(graph)
    assert torch.equal(graph(x), out)


def test_a_failure_while_rewriting_leaves_the_graph_as_it_was(exported, monkeypatch):
    import qatpatch.graphs

    _, data, program = exported
    graph = program.module()
    code, classes = graph.code, {n: type(m) for n, m in graph.named_modules()}

    class Broken(nn.Module):
        def __init__(self, *arguments):
            raise KeyboardInterrupt

    monkeypatch.setattr(qatpatch.graphs, "QATGraphAttention", Broken)
    with pytest.raises(KeyboardInterrupt):
        qatpatch.apply(graph, "wan")
    assert {n: type(m) for n, m in graph.named_modules()} == classes and not qatpatch.is_patched(graph)
    assert graph.code == code


def test_an_interrupted_deploy_of_a_graph_lets_go_of_the_dense_weights(monkeypatch):
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8)))
    x = torch.randn(4, 64)
    qatpatch.apply(graph, ANY_LINEAR)
    out, weights = graph(x).detach(), [weakref.ref(graph.get_submodule(name).weight) for name in ("0", "2")]

    def fails(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(deployment, "forget_original", fails)
        with pytest.raises(KeyboardInterrupt):
            qatpatch.deploy(graph)
    assert torch.equal(graph(x), out)
    qatpatch.deploy(graph)
    gc.collect()
    assert torch.equal(graph(x), out) and [weight() for weight in weights] == [None, None]
