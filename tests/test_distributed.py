"""Several processes: sharded weights and shared sequences give the numbers of one process.

Every test starts two processes that talk through gloo; the checks run inside them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    assert one.keys() >= other.keys()
    # FSDP2 gives zeros to parameters that are no part of a loss.
    assert not any(gradient.any() for name, gradient in one.items() if name not in other)
    return max(float((one[n] - other[n]).norm() / other[n].norm().clamp(min=1e-8)) for n in other)


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


class Scales(TorchDispatchMode):
    """The weights' global scales that the linears of a forward compute with."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.qatpatch.linear.default:
            _, weight, *_, rule, _ = args
            self.seen.append(float(qatpatch.nvfp4.choose_global_scale(weight, rule)))
        return out


def scales_of(model, data):
    """By a forward; as the linears run, in order."""
    with Scales() as scales:
        run(model, data)
    assert scales.seen
    return scales.seen


SMALL = dict(
    layers=1, num_attention_heads=1, cross_attention_dim=128, audio_num_attention_heads=1, audio_cross_attention_dim=64
)


@functools.cache
def shapes():
    """A model that says how large its inputs are."""
    return tiny_ltx2(**SMALL)


def sample(step, index):
    return ltx2_inputs(shapes(), frames=2, seed=100 * step + index)


def train(model, optimizer, steps, indices):
    """Losses of ``steps`` steps; the micro-batches ``indices`` are accumulated to one step."""
    losses = []
    for number in steps:
        total = 0.0
        for index in indices:
            data = sample(number, index)
            target = data["hidden_states"].roll(1, -1)
            loss = (model(**data)[0] - target).square().mean()
            (loss / len(indices)).backward()
            total += float(loss.detach()) / len(indices)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def mean_over_ranks(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()


def alone(rank):
    """A mesh of this process only."""
    return DeviceMesh("cpu", torch.arange(WORLD).unsqueeze(1), mesh_dim_names=("replica", "alone"))["alone"]


def sharded(mesh, order, **arguments):
    from sharding import shard

    model = tiny_ltx2(**SMALL).train()
    if order == "apply first":
        qatpatch.apply(model, **arguments)
    shard(model, mesh=mesh, compute=torch.float32)
    if order != "apply first":
        qatpatch.apply(model, **arguments)
    model.enable_gradient_checkpointing()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def whole(tensors):
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}


def swapped_backward(model):
    """Gradients of a forward with training attention whose backward, and so its recomputation, runs in a swap."""
    model.train().enable_gradient_checkpointing()
    loss = model(**sample(0, 0))[0].square().mean()
    with qatpatch.infer_attention(model):
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def check_sharded_training(rank, folder):
    from sharding import load_state, save_state

    both = DeviceMesh("cpu", torch.arange(WORLD))
    plain = tiny_ltx2(**SMALL)
    qatpatch.apply(plain, global_scale="amax")
    wanted = scales_of(plain, sample(0, 0))
    for order in ("apply first", "shard first"):
        model, _ = sharded(both, order, global_scale="amax")
        assert isinstance(next(model.parameters()), DTensor)
        assert scales_of(model, sample(0, 0)) == wanted
        with pytest.raises(qatpatch.PlanError, match="gather the weights"):
            qatpatch.deploy(model)

        # Blocks are sharded again after their forward, and recomputed in the backward, as their forward was.
        gradients = swapped_backward(model)
        assert distance({n: g.full_tensor() for n, g in gradients.items()}, swapped_backward(plain)) < 1e-5

    two, two_optimizer = sharded(both, "apply first")
    one, one_optimizer = sharded(alone(rank), "shard first")
    together = mean_over_ranks(train(two, two_optimizer, range(20), [rank]))
    accumulated = train(one, one_optimizer, range(20), range(WORLD))
    torch.testing.assert_close(together, accumulated, rtol=1e-3, atol=0)
    assert scales_of(two, sample(0, 0)) == scales_of(one, sample(0, 0))

    # Two write, one reads, and the other way round.
    save_state(Path(folder) / "two", two, two_optimizer)
    reader, reader_optimizer = sharded(alone(rank), "apply first")
    load_state(Path(folder) / "two", reader, reader_optimizer)
    assert_same(whole(reader.state_dict()), whole(two.state_dict()))
    continued = mean_over_ranks(train(two, two_optimizer, range(20, 22), [rank]))
    torch.testing.assert_close(
        train(reader, reader_optimizer, range(20, 22), range(WORLD)), continued, rtol=1e-3, atol=0
    )


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.slow
def test_sharded_weights_train_as_whole_ones(tmp_path):
    together(check_sharded_training, str(tmp_path))


def check_calibration(rank):
    model = torch.nn.ModuleDict({"both": torch.nn.Linear(32, 32), "one": torch.nn.Linear(32, 32)})
    rules = (qatpatch.Rule(match=("*",), action="linear"),)
    qatpatch.apply(model, qatpatch.Profile(name="all", rules=rules), input_scale="static", global_scale="amax")
    inputs = [torch.randn(8, 32, generator=torch.Generator().manual_seed(i)) * (i + 1) for i in range(WORLD)]
    everything = torch.cat(inputs).abs().flatten().sort().values

    def scales():
        return [model[name].quantization.settings.static_scale for name in ("both", "one")]

    for percentile, expected in ((100, everything[-1]), (90, everything[460])):  # 461 of 512 are 90 %
        with qatpatch.calibrate(model, percentile=percentile) as receipt:
            model["both"](inputs[rank])
            if rank == 1:
                model["one"](inputs[rank])
        assert receipt.ranks == WORLD and receipt.unreached == ()
        together = torch.tensor(scales())
        assert float(together[0]) == pytest.approx(float(expected) / 2688, rel=2**-7)
        dist.broadcast(together, 0)
        assert together.tolist() == torch.tensor(scales()).tolist()
    with qatpatch.calibrate(model, across_ranks=False) as receipt:
        model["both"](inputs[rank])
    assert receipt.ranks == 1 and receipt.unreached == ("one",)
    assert scales()[0] == pytest.approx(float(inputs[rank].abs().max()) / 2688, rel=1e-6)


def test_calibration_takes_all_ranks_together():
    together(check_calibration)


def check_what_is_refused(rank):
    from context import enable_context_parallel
    from diffusers import ContextParallelConfig

    torch.accelerator.device_count = lambda: 1  # of this process, for diffusers
    for config, expected in (
        (ContextParallelConfig(ring_degree=2), "ring_degree=2"),
        (ContextParallelConfig(ulysses_degree=2, ulysses_anything=True), "pad the sequence"),
    ):
        model = tiny_wan(layers=1)
        qatpatch.apply(model)
        model.enable_parallelism(config=config)
        with pytest.raises(NotImplementedError, match=expected):
            run(model, wan_inputs(model))
    with pytest.raises(ValueError, match="multiple of 2 heads"):
        enable_context_parallel(tiny_ltx2(num_attention_heads=1, cross_attention_dim=128), 2)

    # Taking the patch out leaves the parallelism; a part of a model does not know who shares its sequences.
    plain, model = tiny_wan(layers=1), tiny_wan(layers=1)
    data = wan_inputs(model)
    qatpatch.apply(model)
    enable_context_parallel(model, 2)
    part = pickle.loads(pickle.dumps(tiny_patched_attention()))
    part.processor._parallel_config = model._parallel_config
    with pytest.raises(RuntimeError, match="came out of a pickle"):
        part(torch.zeros(1, 4, 256), None, None, None)
    qatpatch.remove(model)
    torch.testing.assert_close(run(model, data), run(plain, data), rtol=1e-5, atol=1e-5)


def tiny_patched_attention():
    model = tiny_wan(layers=1)
    qatpatch.apply(model)
    return model.blocks[0].attn1


def test_parallelism_that_would_change_numbers_is_refused():
    together(check_what_is_refused)
