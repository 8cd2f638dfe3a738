"""FSDP2: parameters, gradients and optimizer state in shards; float32 master weights with 16-bit compute.

`shard` calls torch's ``fully_shard`` on every transformer block and on the model. A patched model needs nothing
special: it has no parameters of its own, and inside a forward every weight is whole, so global scales are those of the
full tensor. Patching before or after `shard` is the same.

    masters float32 --all-gather--> compute dtype --forward, backward--> gradients --reduce in float32--> shards

Inputs are not cast: rotary tables and noise levels stay in float32, and the caller gives what the model computes on in
the compute dtype. The model then computes what one in that dtype would.

Checkpoints are `torch.distributed.checkpoint` folders that hold tensors by name and nothing else, and load into any
number of processes. (The format's own index, ``.metadata``, is a pickle: read only folders that you trust.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(model: nn.Module, *, mesh: DeviceMesh | None = None, compute: torch.dtype = torch.bfloat16) -> None:
    """Shard ``model`` in place over a one-dimensional ``mesh`` (by default every rank), with float32 masters.

    Args:
        model: patched or not, on any device or meta. Block by block it is converted to float32 and moved to the mesh's
            device, so that no device ever holds all of it.
        compute: dtype of the gathered parameters.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks_of(model):
        fully_shard(block.float(), mesh=mesh, mp_policy=policy)
    rest = [p for p in model.parameters() if not isinstance(p, DTensor)]
    for parameter in rest:
        parameter.data = parameter.data.float()
    fully_shard(model, mesh=mesh, mp_policy=policy)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a diffusers transformer, by the class names that it lists."""
    names = set(getattr(model, "_repeated_blocks", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def materialise(model: nn.Module, device: torch.device, fill: Callable[[str, torch.Tensor], None]) -> None:
    """Give a sharded model that was built on meta its memory, a shard on each rank and nowhere the whole.

    Args:
        fill: called with the name and the local shard of each parameter.
    """
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if buffers:
        raise ValueError(
            f"{buffers[0]} is a buffer on meta, whose values only its class can compute; build it for real"
        )
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter.to_local())


def save_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    **extra: Any,
) -> None:
    """Write weights, optimizer state, and ``extra`` (tensors in dicts) to a new folder. All of ``group`` must call it.

    Hyperparameters are the recipe's and are not written.
    """
    parameters, states = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": states["state"], **extra}
    dcp.save(state, checkpoint_id=folder, process_group=group)


def load_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Read what `save_state` wrote, in place, whatever number of processes wrote it; returns ``extra``, filled."""
    parameters, states = get_state_dict(model, optimizer)
    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    # A parameter that never had a gradient was saved without a state; here a fresh optimizer made one up.
    stateless = [n for n in states["state"] if not any(key.startswith(f"optimizer.{n}.") for key in saved)]
    made_up = {name: states["state"].pop(name) for name in stateless}
    state = {"model": parameters, "optimizer": states["state"], **extra}
    dcp.load(state, storage_reader=reader, process_group=group)
    states["state"].update(made_up)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states)
    named = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    for name in stateless:
        optimizer.state.pop(named[name], None)
    return {name: state[name] for name in extra}


@contextlib.contextmanager
def state_on_the_cpu(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside the block the optimizer's state lies in host memory, and its own device is free for something else."""
    moved = []
    for parameter, state in optimizer.state.items():
        for name in [n for n, value in state.items() if isinstance(value, torch.Tensor) and value.dim()]:
            value = state.pop(name)
            local = value.to_local() if isinstance(value, DTensor) else value
            spec = (value.device_mesh, value.placements, value.shape, value.stride()) if local is not value else None
            moved.append((parameter, name, local.to("cpu"), local.device, spec))
            del value, local
    try:
        yield
    finally:
        for parameter, name, held, device, spec in moved:
            local = held.to(device)
            if spec is not None:
                mesh, placements, shape, stride = spec
                local = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
            optimizer.state[parameter][name] = local


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The full state dict on the CPU of rank 0; empty on the others. Every rank calls it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if not dist.is_initialized():
        return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    return get_model_state_dict(model, options=options)
