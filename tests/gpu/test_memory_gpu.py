"""What the device reports before and after `deploy`, alone and while somebody still holds dense weights."""

from __future__ import annotations

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from diffusers.training_utils import EMAModel
from test_patch import ANY_LINEAR
from torch import nn

import qatpatch

pytestmark = pytest.mark.gpu
SIZE = 2048
DENSE = 2 * SIZE * SIZE * 4
# Buffers that a packed layer has beside its codes and scales; the allocator rounds each up.
SLACK = 64 * 1024


def patched() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)).cuda()
    qatpatch.apply(model, ANY_LINEAR)
    return model


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def holder_of(model: nn.Sequential, kind: str) -> object:
    """Somebody who keeps the dense weights alive, whatever else that takes."""
    x = torch.randn(16, SIZE, device="cuda", requires_grad=True)
    if kind == "optimizer":
        optimizer = torch.optim.AdamW(model.parameters())
        model(x).square().mean().backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return optimizer
    if kind == "graph":
        return model(x)
    if kind == "hook":
        weights = [layer.weight for layer in model]
        other = nn.Linear(2, 2)
        other.register_forward_hook(lambda *_: weights[0].new_empty(0))
        return other
    return [layer.weight for layer in model]


def test_the_device_gets_back_what_the_receipt_says():
    model = patched()
    before = allocated()
    report = qatpatch.deploy(model)
    fell = before - allocated()
    assert report.held == {} and report.bytes_freed == fell
    assert abs(fell - (report.bytes_before - report.bytes_after)) <= SLACK
    assert fell > 0.8 * DENSE


@pytest.mark.parametrize("kind", ["optimizer", "graph", "hook", "list"])
def test_what_others_hold_stays_and_is_named(kind):
    model = patched()
    held = holder_of(model, kind)
    before = allocated()
    report = qatpatch.deploy(model)
    fell = before - allocated()
    assert set(report.held) == {"0", "1"} and report.bytes_held == DENSE
    assert report.bytes_freed == fell < 0  # packed came, dense stayed
    del held
    assert before - allocated() > 0.8 * DENSE


def test_averages_are_copies_and_keep_their_own_memory():
    model = patched()
    averages = EMAModel(model.parameters())
    before = allocated()
    report = qatpatch.deploy(model)
    fell = before - allocated()
    assert report.held == {} and report.bytes_freed == fell > 0.8 * DENSE
    assert sum(t.nbytes for t in averages.shadow_params) >= DENSE


def test_cycles_leak_nothing_on_the_device():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)).cuda()
    x = torch.randn(16, SIZE, device="cuda")

    def cycle() -> None:
        qatpatch.apply(model, ANY_LINEAR)
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=True)
        with qatpatch.dense(model), torch.no_grad():
            model(x)
        qatpatch.remove(model)

    for _ in range(3):
        cycle()
    before = allocated()
    for _ in range(50):
        cycle()
    assert allocated() == before
