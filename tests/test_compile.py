"""torch.compile of patched models: one graph, no break, the bits of eager, in every state."""

from __future__ import annotations

import contextlib

import pytest
import torch
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs
from torch._dynamo.testing import CompileCounterWithBackend

import qatpatch

MODELS = {"ltx2": (tiny_ltx2, ltx2_inputs), "wan": (tiny_wan, wan_inputs)}


@pytest.fixture(params=MODELS)
def model(request):
    make, inputs = MODELS[request.param]
    model = make(layers=1)
    torch._dynamo.reset()
    yield model, inputs(model, frames=1)
    torch._dynamo.reset()


def compiled(model):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, fullgraph=True, backend=counter), counter


def gradients(model, function, data):
    model.zero_grad()
    function(**data)[0].square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"target": "sm_100", "backward": "quantized"}], ids=["sage3", "fa4"])
def test_training_has_one_graph_and_the_gradients_of_eager(model, arguments):
    model, data = model
    qatpatch.apply(model, **arguments)
    model.train()
    expected = gradients(model, model, data)
    function, counter = compiled(model)
    found = gradients(model, function, data)
    # AOT gives zeros where eager gives none.
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert all(not grad.any() for name, grad in found.items() if name not in expected)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_infer_and_deployed_have_one_graph_each_and_the_bits_of_eager(model):
    model, data = model
    qatpatch.apply(model)
    eager = run(model, data)
    function, counter = compiled(model)
    with qatpatch.infer_attention(model):
        assert torch.equal(run(function, data), eager)
    assert counter.frame_count == 1
    qatpatch.deploy(model)
    function, counter = compiled(model)
    assert torch.equal(run(function, data), eager) and counter.frame_count == 1


@pytest.mark.parametrize("state", ["train", "infer", "deployed"])
def test_repeated_blocks_share_one_graph(state):
    """However many blocks there are: nothing that tells one from another may be a constant of the graph."""
    torch._dynamo.reset()
    blocks = torch._dynamo.config.recompile_limit + 2
    model = tiny_wan(layers=blocks)
    data = wan_inputs(model, frames=1)
    qatpatch.apply(model)
    if state == "deployed":
        qatpatch.deploy(model)
    model.train(state == "train")
    counter = CompileCounterWithBackend("eager")
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    context = qatpatch.infer_attention(model) if state == "infer" else contextlib.nullcontext()
    with context, torch.set_grad_enabled(state == "train"):
        model(**data)
    assert counter.frame_count == 1
    torch._dynamo.reset()
