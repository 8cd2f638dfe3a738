"""What the wrappers of foreign attention kernels share: the contract at our side of the call.

Each wrapper is a module of its own (`fastvideo_attention`, `fa4_attention`, `flashinfer_attention`) around one package.
They are forward-only, take no mask, no grouped heads and no LSE, and give contiguous BSHD in the dtype of q, as
`reference_attention.forward` does. Operands are copied into the layout that the package wants, never passed on: one
of its relatives subtracts a mean from the caller's K in place. float32 operands are rounded to bfloat16 first.

**What has been seen.** The calls are checked with stand-ins on the CPU that read every argument by the packages'
published contracts, and with their sources. None of these kernels has run here: no GPU with FP4 units was at hand.
`proof` runs each before it is first bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from qatpatch.autocast import without_autocast

_HALVES = (torch.bfloat16, torch.float16)

Result = tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]


def refuse(name: str, served: str, scheme: str, attn_mask: torch.Tensor | None, train: bool) -> None:
    """Raise on what a native attention kernel does not do.

    Raises:
        ValueError: another scheme.
        NotImplementedError: a mask, or training.
    """
    if scheme != served:
        raise ValueError(f"{name} computes {served}, and scheme={scheme!r} was asked for")
    if attn_mask is not None:
        raise NotImplementedError(f"{name} takes no mask; use triton_attention or reference_attention, which honour it")
    if train:
        raise NotImplementedError(f"{name} has no backward; train with triton_attention or reference_attention")


def half_dtype(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit type in which operands of ``dtype`` are handed over."""
    return dtype if dtype in _HALVES else torch.bfloat16


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """A contiguous 16-bit copy (B, H, S, D) of ``x`` (B, S, H, D), which the kernel may change."""
    batch, length, heads, dim = x.shape
    return torch.empty((batch, heads, length, dim), dtype=half_dtype(x.dtype), device=x.device).copy_(x.transpose(1, 2))


def heads_last(out: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D), contiguous, in the dtype and length of ``like``, of ``out`` (B, H, S or more, D)."""
    return out[:, :, : like.shape[1]].transpose(1, 2).to(like.dtype).contiguous()


def result(out: torch.Tensor) -> Result:
    """What `reference_attention.forward` returns for inference; the statistics, which these kernels lack, are NaN."""
    batch, length, heads, _ = out.shape
    nothing = torch.full((batch, heads, length), torch.nan, dtype=torch.float32, device=out.device)
    return out, None, nothing, nothing.clone()


@contextlib.contextmanager
def launching(device: torch.device) -> Iterator[None]:
    """Around a foreign call: it launches on the current device, and autocast would lower the products inside it."""
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with torch.no_grad(), without_autocast(device), current:
        yield
