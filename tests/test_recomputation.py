"""Gradient checkpointing across swaps: a recomputation repeats its forward, or raises."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from models import ltx2_inputs, tiny_ltx2, tiny_wan, wan_inputs
from torch.utils.checkpoint import checkpoint

import qatpatch
from qatpatch.recomputation import CallHistory, remember

MODELS = {"ltx2": (tiny_ltx2, ltx2_inputs), "wan": (tiny_wan, wan_inputs)}
plain = contextlib.nullcontext


def patched(name, **arguments):
    make, inputs = MODELS[name]
    model = make(layers=1)
    data = inputs(model, frames=2)
    qatpatch.apply(model, **arguments)
    return model.train(), data


def gradients(model, data, *, forward=plain, backward=plain, checkpointing=None):
    """Gradients of one step, forward and backward each in a block; checkpointing: None, "diffusers" or "reentrant"."""
    model.zero_grad()
    model.disable_gradient_checkpointing()
    if checkpointing == "diffusers":
        model.enable_gradient_checkpointing()
    elif checkpointing == "reentrant":
        model.enable_gradient_checkpointing(lambda m, *args: checkpoint(m.__call__, *args, use_reentrant=True))
        data = {**data, "hidden_states": data["hidden_states"].clone().requires_grad_()}
    with forward():
        loss = model(**data)[0].square().mean()
    with backward():
        loss.backward()
    attn = (model.transformer_blocks if hasattr(model, "transformer_blocks") else model.blocks)[0].attn1
    return torch.cat([p.grad.flatten() for p in attn.parameters()])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", ["diffusers", "reentrant"])
def test_checkpointing_changes_no_gradient(name, checkpointing):
    model, data = patched(name)
    expected = gradients(model, data)
    assert torch.equal(gradients(model, data, checkpointing=checkpointing), expected)
    with qatpatch.dense(model):
        dense = gradients(model, data)
        assert torch.equal(gradients(model, data, checkpointing=checkpointing), dense)
    assert not torch.equal(dense, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("swap", ["infer_attention", "dense", "stage"])
@pytest.mark.parametrize("checkpointing", ["diffusers", "reentrant"])
def test_a_swap_between_forward_and_backward_changes_no_gradient(name, swap, checkpointing):
    if (name, swap) == ("wan", "stage"):
        name = "ltx2"  # only LTX-2 has stages
    model, data = patched(name)

    def block():
        return qatpatch.stage(model, "base") if swap == "stage" else getattr(qatpatch, swap)(model)

    expected = gradients(model, data)
    assert torch.equal(gradients(model, data, backward=block, checkpointing=checkpointing), expected)
    if swap != "infer_attention":
        inside = gradients(model, data, forward=block)
        assert torch.equal(gradients(model, data, forward=block, checkpointing=checkpointing), inside)
        assert not torch.equal(inside, expected) or swap == "stage"


def test_infer_attention_around_a_checkpointed_forward_raises():
    model, data = patched("wan")
    for checkpointing in (None, "diffusers", "reentrant"):
        with pytest.raises(RuntimeError, match="gradients would be lost"):
            gradients(model, data, forward=lambda: qatpatch.infer_attention(model), checkpointing=checkpointing)


def test_two_forwards_in_different_modes_keep_their_own():
    model, data = patched("wan")

    def both(checkpointing):
        model.zero_grad()
        model.disable_gradient_checkpointing()
        if checkpointing:
            model.enable_gradient_checkpointing()
        first = model(**data)[0].square().mean()
        with qatpatch.dense(model):
            second = model(**data)[0].square().mean()
        (first + second).backward()
        return model.blocks[0].attn1.to_q.weight.grad.clone()

    assert torch.equal(both(True), both(False))


def test_an_order_that_cannot_be_followed_raises():
    model, data = patched("wan")
    model.enable_gradient_checkpointing()
    first = model(**data)[0].square().mean()
    with qatpatch.dense(model):
        second = model(**data)[0].square().mean()
    with pytest.raises(RuntimeError):
        first.backward()
    del second
    model.enable_gradient_checkpointing(lambda m, *args: checkpoint(m.__call__, *args, use_reentrant=True))
    grad_data = {**data, "hidden_states": data["hidden_states"].clone().requires_grad_()}
    first = model(**grad_data)[0].square().mean()
    with qatpatch.dense(model):
        second = model(**grad_data)[0].square().mean()
    with pytest.raises(RuntimeError, match="entered or left between its forward and its backward"):
        (first + second).backward()


def test_an_order_that_could_not_be_followed_does_not_spoil_the_steps_after_it():
    model, data = patched("wan")
    expected = gradients(model, data)
    for _ in range(2):
        assert torch.equal(gradients(model, data, checkpointing="reentrant"), expected)
        grad_data = {**data, "hidden_states": data["hidden_states"].clone().requires_grad_()}
        first = model(**grad_data)[0].square().mean()
        with qatpatch.dense(model):
            second = model(**grad_data)[0].square().mean()
        with pytest.raises(RuntimeError, match="entered or left"):
            second.backward()
        del first, second
        gc.collect()
        assert torch.equal(gradients(model, data, checkpointing="reentrant"), expected)


def test_a_wrong_guess_is_found_by_the_saved_mode():
    history, x = CallHistory(), torch.ones(3, requires_grad=True)
    mode = ["a"]

    def layer(value):
        entered, call = history.enter(mode[0], training=True)
        return remember(value * (2.0 if entered == "a" else 3.0), call)

    first = checkpoint(layer, x, use_reentrant=False)
    mode[0] = "b"
    second = checkpoint(layer, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="its forward ran as a"):
        first.sum().backward()
    second.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))


def test_calls_live_as_long_as_their_graph_and_are_not_copied():
    history, x = CallHistory(), torch.ones(3, requires_grad=True)
    _, call = history.enter("a", training=True)
    y, alive = remember(x * 2, call), weakref.ref(call)
    del call
    assert alive() is not None and copy.deepcopy(history) is not history
    del y
    gc.collect()
    assert alive() is None


def test_remember_keeps_in_place_changes_and_saved_outputs_working():
    history, x = CallHistory(), torch.ones(3, requires_grad=True)
    _, call = history.enter("a", training=True)
    y = remember(x * 2, call)
    y.add_(1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    z = remember(x.exp(), call)  # exp saves its output
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_validation_in_training_mode_does_not_disturb_checkpointing():
    model, data = patched("ltx2")
    for checkpointing in ("diffusers", "reentrant"):
        expected = gradients(model, data, checkpointing=checkpointing)
        for swap in (qatpatch.infer_attention, qatpatch.dense, lambda m: qatpatch.stage(m, "base")):
            with torch.no_grad(), swap(model):
                model(**data)
        assert torch.equal(gradients(model, data, checkpointing=checkpointing), expected)
