"""What is done often: swaps and patches over and over, in threads, interrupted anywhere. Nothing is left behind."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs
from torch import nn

import qatpatch
from qatpatch import Profile, Rule

BLOCKS = {
    "infer_attention": lambda model: qatpatch.infer_attention(model),
    "dense": lambda model: qatpatch.dense(model),
    "reuse_weights": lambda model: qatpatch.reuse_weights(model),
    "stage": lambda model: qatpatch.stage(model, "base"),
}


def grown(work, cycles: int) -> tuple[int, int]:
    """Objects, and bytes in tensors among them, that ``cycles`` of ``work`` leave behind, after a few that fill caches.

    What was there before is frozen: it is neither counted nor collected.
    """
    for _ in range(3):
        work()
    gc.collect()
    gc.freeze()
    try:
        for _ in range(cycles):
            work()
        gc.collect()
        new = gc.get_objects()
    finally:
        gc.unfreeze()
    return len(new), sum(t.nbytes for t in new if type(t) in (torch.Tensor, nn.Parameter))


@pytest.fixture(scope="module")
def wan():
    model = tiny_wan(layers=1)
    return model, wan_inputs(model, frames=1, height=4, width=4)


@pytest.mark.parametrize("kind", [k for k in BLOCKS if k != "stage"])
def test_200_swaps_leave_nothing(kind, wan):
    model, data = wan
    qatpatch.apply(model)
    try:

        def cycle():
            with BLOCKS[kind](model):
                run(model, data)

        objects, held = grown(cycle, 200)
        assert objects < 100 and held == 0
    finally:
        qatpatch.remove(model)


def test_50_patches_leave_nothing(wan):
    model, data = wan

    def cycle():
        qatpatch.apply(model)
        run(model, data)
        qatpatch.remove(model)

    objects, held = grown(cycle, 50)
    assert objects < 100 and held == 0


def test_training_steps_leave_nothing(wan):
    model, data = wan
    qatpatch.apply(model)
    try:

        def cycle():
            model(**data)[0].sum().backward()
            model.zero_grad(set_to_none=True)

        objects, held = grown(cycle, 30)
        assert objects < 100 and held == 0
    finally:
        qatpatch.remove(model)


def test_models_that_were_patched_or_deployed_die():
    for deployed in (False, True):
        model = tiny_wan(layers=1)
        data = wan_inputs(model, frames=1, height=4, width=4)
        qatpatch.apply(model)
        with qatpatch.infer_attention(model):
            run(model, data)
        if deployed:
            qatpatch.deploy(model)
            run(model, data)
        dead = weakref.ref(model)
        del model
        gc.collect()
        assert dead() is None


def test_two_models_swap_500_times_in_two_threads():
    profile = Profile(name="all", rules=(Rule(match="*", action="linear"),))
    models = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval() for _ in range(2)]
    x = torch.randn(4, 32)
    dense = [m(x).detach() for m in models]
    for model in models:
        qatpatch.apply(model, profile, attention=False)
    quantized = [m(x).detach() for m in models]
    wrong: list[str] = []
    start = threading.Barrier(2)

    def work(i: int) -> None:
        start.wait()
        for cycle in range(500):
            with torch.no_grad(), qatpatch.dense(models[i]):
                if not torch.equal(models[i](x), dense[i]):
                    wrong.append(f"model {i} cycle {cycle}: not dense inside")
            with torch.no_grad():
                if not torch.equal(models[i](x), quantized[i]):
                    wrong.append(f"model {i} cycle {cycle}: not quantized outside")

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(old)
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, SystemExit])
@pytest.mark.parametrize("kind", BLOCKS)
def test_any_exit_at_any_layer_restores(kind, error):
    """An error out of each linear in turn, while the block is open: then as before, and a training step works."""
    model = tiny_ltx2(layers=1)
    data = ltx2_inputs(model, frames=1, height=2, width=2)
    report = qatpatch.apply(model)
    before = run(model, data)
    for name in report.linears[::3]:

        def interrupt(module, args, output):
            raise error("planted")

        handle = model.get_submodule(name).register_forward_hook(interrupt)
        with pytest.raises(error), BLOCKS[kind](model):
            run(model, data)
        handle.remove()
        assert torch.equal(run(model, data), before)
    model(**data)[0].sum().backward()
    # The last block's text projections of audio feed nothing of the video output; what is patched trains.
    assert all(model.get_submodule(name).weight.grad is not None for name in report.linears if "audio" not in name)


def test_a_generator_that_is_closed_inside_a_block_restores(wan):
    model, data = wan
    qatpatch.apply(model)
    try:
        before = run(model, data)

        def sampler():
            with qatpatch.infer_attention(model), qatpatch.dense(model):
                while True:
                    yield run(model, data)

        samples = sampler()
        assert not torch.equal(next(samples), before)
        samples.close()
        assert torch.equal(run(model, data), before)
        abandoned = sampler()
        next(abandoned)
        del abandoned
        gc.collect()
        assert torch.equal(run(model, data), before)
    finally:
        qatpatch.remove(model)
