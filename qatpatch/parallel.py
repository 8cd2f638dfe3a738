"""Sequence shards: what quantized layers must agree on where every rank of a group holds a part of the tokens.

Context parallelism gives each of the P ranks of a group S/P of a sequence's S tokens. Two things then need the others:

- the global scale of an activation, a property of the whole tensor: its amax is the maximum over the group
  (`shared_global_scale`). Never over data-parallel ranks, whose tensors are others;
- attention, whose queries see all keys. Ulysses exchanges tokens for heads before it and back after it, so that each
  rank computes H/P heads over the whole sequence, with the numbers of one process:

      gather_sequence: (B, S/P, H, D) -> (B, S, H/P, D)        scatter_sequence: the inverse, and its gradient

Deliberately not here: who is in a group (`qatpatch.dispatch` reads diffusers' configuration), and ring attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from qatpatch import nvfp4


def shared_global_scale(x: torch.Tensor, rule: str, group: dist.ProcessGroup) -> torch.Tensor:
    """The global scale (decode direction, float32 ``()``) of the tensor whose shards the ranks of ``group`` hold.

    Every rank must call it. No host synchronisation.
    """
    amax = nvfp4.finite_amax(x)
    dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return nvfp4.global_scale_of_amax(amax, rule)


def gather_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All tokens of this rank's share of the heads: (B, S/P, H, D) to (B, S, H/P, D), contiguous. Differentiable.

    Raises:
        ValueError: H is not a multiple of the group's size.
    """
    ranks = dist.get_world_size(group)
    if x.shape[2] % ranks:
        raise ValueError(f"Ulysses over {ranks} ranks needs a multiple of {ranks} heads, got {x.shape[2]}")
    return _Exchange.apply(x, group, True)


def scatter_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All heads of this rank's share of the tokens: (B, S, H/P, D) to (B, S/P, H, D), contiguous. Differentiable."""
    return _Exchange.apply(x, group, False)


def gather_mask(mask: torch.Tensor, queries: int, keys: int, heads: int, group: dist.ProcessGroup) -> torch.Tensor:
    """A mask for the shapes behind `gather_sequence`: whole along the sequence, this rank's heads.

    Args:
        mask: 2-D (S_q, S_k) or 4-D, broadcast from (B, H, S_q, S_k); each sequence axis of size 1, of a shard's length
            or of the whole one's.
        queries, keys: lengths of this rank's shards.
        heads: H, before the exchange.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return mask
    for axis, shard in ((-1, keys), (-2, queries)):
        if mask.dim() >= -axis and mask.shape[axis] == shard and shard > 1:
            mask = gather_tokens(mask, axis, group)
    if mask.dim() == 4 and mask.shape[1] == heads and heads > 1:
        mask = mask.chunk(ranks, dim=1)[dist.get_rank(group)]
    return mask


def gather_tokens(x: torch.Tensor, axis: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole of a tensor that is split along ``axis``, equal parts. Its gradient is summed over the group.

    So it fits where every rank computes its own share of a loss from the whole.
    """
    return _Gather.apply(x, axis, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.axis, ctx.group = axis, group
        part = x.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group), dim=ctx.axis)[dist.get_rank(ctx.group)], None, None


class _Exchange(torch.autograd.Function):
    """Tokens for heads (``gather``) or back; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, gather: bool) -> torch.Tensor:
        ctx.group, ctx.gather = group, gather
        return _exchange(x, group, gather)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchange(grad, ctx.group, not ctx.gather), None, None


def _exchange(x: torch.Tensor, group: dist.ProcessGroup, gather: bool) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    batch, length, heads, width = x.shape
    if gather:
        parts = x.reshape(batch, length, ranks, heads // ranks, width).permute(2, 0, 1, 3, 4)
        parts = _all_to_all(parts, group)  # (P, B, S/P, H/P, D), by the sender: its tokens
        return parts.transpose(0, 1).reshape(batch, ranks * length, heads // ranks, width)
    parts = x.reshape(batch, ranks, length // ranks, heads, width).transpose(0, 1)
    parts = _all_to_all(parts, group)  # (P, B, S/P, H/P, D), by the sender: its heads
    return parts.permute(1, 2, 0, 3, 4).reshape(batch, length // ranks, ranks * heads, width)


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Entry i of the leading axis goes to rank i; what comes back is ordered by its sender."""
    received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received
