"""Context parallelism: every rank of a group computes a part of the video tokens, with the numbers of one process.

`enable_context_parallel` calls diffusers' own ``enable_parallelism`` (Ulysses). For LTX-2 it brings a plan, since the
one of diffusers 0.42 knows neither rotary embeddings of ``rope_type="split"``, nor those between video and audio, nor
noise levels of single tokens:

    video tokens       split; self attention exchanges tokens for heads
    text, audio        whole on every rank, so attention over their keys needs nobody else
    audio to video     audio's queries need every video token: gathered in front of that module

Every rank gets the whole video output and computes the same loss. Its gradients are its share: **summed** over the
group they are those of one process. Where gradients are averaged over the group (DDP, FSDP), multiply the loss by its
size. The audio output is whole on every rank already, so its gradient is divided by the size.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, LTX2VideoTransformer3DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

from qatpatch.parallel import gather_tokens

# Their keys are whole on every rank.
_LOCAL = ("attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")


def enable_context_parallel(
    model: torch.nn.Module, degree: int, mesh: dist.device_mesh.DeviceMesh | None = None
) -> dist.ProcessGroup:
    """Split the tokens of ``model``'s forward over ``degree`` ranks, before or after `qatpatch.apply`.

    Args:
        model: a diffusers transformer, not yet parallel.
        degree: ranks a sequence; video tokens and heads must be multiples of it.
        mesh: with the dimensions ``ring`` (of size 1) and ``ulysses``, where the world has other ranks too.

    Returns:
        The group that shares a sequence.

    Raises:
        ValueError: heads that ``degree`` does not divide.
    """
    heads = model.config.num_attention_heads
    if heads % degree:
        raise ValueError(f"context parallelism over {degree} ranks needs a multiple of {degree} heads, got {heads}")
    is_ltx2 = isinstance(model, LTX2VideoTransformer3DModel)
    config = ContextParallelConfig(ulysses_degree=degree, mesh=mesh)
    # diffusers takes the rank modulo the number of accelerators, which a machine without any has 0 of.
    devices = max(1, torch.accelerator.device_count())
    with mock.patch.object(torch.accelerator, "device_count", lambda: devices):
        model.enable_parallelism(config=config, cp_plan=_ltx2_plan(model) if is_ltx2 else None)
    group = config._ulysses_mesh.get_group()
    if not is_ltx2:
        return group
    for block in model.transformer_blocks:
        for name in _LOCAL:
            getattr(block, name).processor._parallel_config = None
        hook = functools.partial(_gather_video, group=group)
        block.video_to_audio_attn.register_forward_pre_hook(hook, with_kwargs=True)
    model.audio_proj_out.register_forward_hook(functools.partial(_share_of_gradient, ranks=degree))
    return group


def _ltx2_plan(model: LTX2VideoTransformer3DModel) -> dict[str, Any]:
    # (B, T, D), or by heads (B, H, T, D/2)
    axis, dims = (2, 4) if model.config.rope_type == "split" else (1, 3)
    rotary = {i: ContextParallelInput(split_dim=axis, expected_dims=dims, split_output=True) for i in (0, 1)}
    return {
        "": {
            "hidden_states": ContextParallelInput(split_dim=1, expected_dims=3),
            # One noise level a token; one a sample has a single axis and stays.
            "timestep": ContextParallelInput(split_dim=1, expected_dims=2),
        },
        "rope": rotary,
        "cross_attn_rope": rotary,
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }


def _gather_video(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, group: dist.ProcessGroup
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pre-hook of the attention whose keys are video tokens: all of them, and their rotary embedding."""
    kwargs = dict(kwargs, encoder_hidden_states=gather_tokens(kwargs["encoder_hidden_states"], 1, group))
    rotary = kwargs["key_rotary_emb"]
    kwargs["key_rotary_emb"] = tuple(gather_tokens(x, -2, group) for x in rotary)
    return args, kwargs


def _share_of_gradient(module: torch.nn.Module, args: Any, output: torch.Tensor, *, ranks: int) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / ranks)
