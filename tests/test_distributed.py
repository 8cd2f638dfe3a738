"""Several processes: sharded weights and shared sequences give the numbers of one process.

Every test starts two processes that talk through gloo; the checks run inside them.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs

import qatpatch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

WORLD = 2
MODELS = {"ltx2": (tiny_ltx2, ltx2_inputs), "wan": (tiny_wan, wan_inputs)}


def together(check: Callable[..., None], *arguments: Any, world: int = WORLD, seconds: int = 240) -> None:
    """Run ``check(rank, *arguments)`` in ``world`` processes of one group; raise what any of them raises."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _process,
            (check, world, f"file://{folder}/store", arguments),
            nprocs=world,
            join=False,
            start_method="spawn",
        )
        try:
            deadline = time.monotonic() + seconds
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{check.__name__} did not end within {seconds} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()


def _process(rank: int, check: Callable[..., None], world: int, store: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # diffusers asks for an accelerator's index; the CPU counts as one device.
    torch.accelerator.device_count = lambda: 1
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    try:
        check(rank, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def step(model, data, *, checkpointing=False, audio=False):
    """Output of a training forward, and the gradients of its backward by name."""
    model.train().zero_grad()
    (model.enable_gradient_checkpointing if checkpointing else model.disable_gradient_checkpointing)()
    out, *rest = model(**data)
    loss = out.square().mean() + (rest[0].square().mean() if audio else 0.0)
    loss.backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def summed(gradients):
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return gradients


def distance(one, other):
    """The largest distance of two gradients of a name, relative to that of the whole."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / other[n].norm().clamp(min=1e-8)) for n in one)


def check_context(rank, name, order, arguments):
    from context import enable_context_parallel

    make, inputs = MODELS[name]
    single = make(layers=1)
    data = inputs(single, batch=2)
    if name == "ltx2":
        data["encoder_attention_mask"][1, 7:] = 0  # padded text
        levels = torch.rand(2, data["hidden_states"].shape[1], generator=torch.Generator().manual_seed(3))
        data |= {"timestep": 1000 * levels, "audio_timestep": torch.full((2,), 700.0)}
    else:
        data["timestep"] = torch.full((2,), 500.0)
    model = copy.deepcopy(single)
    qatpatch.apply(single, **arguments)
    if order == "apply first":
        qatpatch.apply(model, **arguments)
        model = copy.deepcopy(model)
    enable_context_parallel(model, WORLD)
    if order != "apply first":
        qatpatch.apply(model, **arguments)
    audio = name == "ltx2"
    wanted, gradients = step(single, data, audio=audio)
    for checkpointing in (False, True):
        out, own = step(model, data, checkpointing=checkpointing, audio=audio)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        assert distance(summed(own), gradients) < 2e-4
    for block in (contextlib.nullcontext, qatpatch.infer_attention):
        if arguments.get("attention", True) or block is contextlib.nullcontext:
            with block(single), block(model):
                torch.testing.assert_close(run(model.eval(), data), run(single.eval(), data), rtol=1e-5, atol=1e-5)
    qatpatch.deploy(single)
    qatpatch.deploy(model)
    torch.testing.assert_close(run(model, data), run(single, data), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "order", "arguments"),
    [
        ("ltx2", "apply first", {"global_scale": "amax"}),
        ("ltx2", "parallel first", {}),
        ("wan", "parallel first", {"backward": "quantized", "global_scale": "amax"}),
        ("wan", "apply first", {"attention": False, "global_scale": "amax"}),
    ],
)
def test_a_shared_sequence_gives_what_one_process_gives(name, order, arguments):
    together(check_context, name, order, arguments)
