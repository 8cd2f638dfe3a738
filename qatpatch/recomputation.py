"""Gradient checkpointing meets swaps: a recomputation must repeat what its forward computed.

`infer_attention`, `dense` and `stage` change what a patched layer computes. Gradient checkpointing runs a layer again
during the backward pass, when another block may be open. So each layer keeps a `CallHistory`:

- a forward under autograd leaves a `Call` (its mode) that lives as long as its graph; a recomputation takes the mode of
  the youngest one that was not differentiated yet;
- a node of the graph saves the mode as a tensor, `Call.code`: the layer's own node, or one that `remember` puts behind
  its output. Checkpointing replaces saved tensors by recomputed ones, so a node that finds another mode than its own
  (`Call.confirm`) knows that the guess was wrong, and raises;
- reentrant checkpointing runs its forward without autograd, so there only its own node can be asked whether its
  backward is still to come: a recomputation raises unless all forwards for which it is ran in one mode.
  `CallHistory.waiting` says whether there are any, which neither `remove` nor `deploy` may change.

Compiled regions need none of this: their recomputation is compiled with the mode they were traced with.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from functools import lru_cache
from typing import Any

import torch
import torch.utils.checkpoint

_ADVICE = (
    "gradient checkpointing recomputes a layer during backward, and a qatpatch block (infer_attention, dense, stage) "
    "was entered or left between its forward and its backward in a way that cannot be followed; run the backward "
    "before the block changes, or use checkpoint(..., use_reentrant=False)"
)


_REENTRANT_FORWARD = torch.utils.checkpoint.CheckpointFunction.forward.__code__


class Call:
    """One forward of one layer: alive as long as the graph it is part of."""

    __slots__ = ("mode", "differentiated", "_code", "_codes", "__weakref__")

    def __init__(self, mode: Any, codes: dict[Any, torch.Tensor]) -> None:
        self.mode = mode
        self._codes = codes  # those of the layer: making one costs more than the rest of a call
        self.differentiated = False
        self._code: torch.Tensor | None = None

    @property
    def code(self) -> torch.Tensor:
        """The mode as a tensor (), int64, on the CPU, for a graph to save: a recomputation replaces it by its own."""
        if self._code is None:
            self._code = self._codes.get(self.mode)
            if self._code is None:
                self._code = torch.tensor(_number(self.mode), device="cpu")
                if type(self._code) is torch.Tensor:  # not a fake one, of a mode that is active now
                    self._codes[self.mode] = self._code
        return self._code

    def confirm(self, recomputed: torch.Tensor) -> None:
        """Mark this call as differentiated; ``recomputed`` is what its graph saved as `code`.

        Raises:
            RuntimeError: the recomputation ran in another mode.
        """
        if recomputed is not self._code and not torch.equal(recomputed, self.code):
            raise RuntimeError(f"{_ADVICE} (its forward ran as {self.mode})")
        self.differentiated = True


@lru_cache(maxsize=64)
def _number(mode: Any) -> int:
    return zlib.crc32(repr(mode).encode())


class CallHistory:
    """The forwards of one layer whose recomputation may still come. Copies and pickles start empty."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[Call]] = []
        self._codes: dict[Any, torch.Tensor] = {}
        self._reentrant: list[tuple[weakref.ref[Any], Any]] = []  # node of a checkpoint and its forward's mode
        self._latest: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CallHistory:
        return CallHistory()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return CallHistory, ()

    @property
    def waiting(self) -> bool:
        """Whether a forward under reentrant checkpointing has its backward, which runs it again, still before it."""
        return any((node := ref()) is not None and not _differentiated(node) for ref, _ in self._reentrant)

    def _reentrant_modes(self) -> set[Any]:
        """The modes of the forwards under reentrant checkpointing whose backward is still to come."""
        alive = [(node, mode) for ref, mode in self._reentrant if (node := ref()) is not None]
        modes = {mode for _, mode in alive}
        if len(modes) > 1:  # else what the nodes saved, perhaps on another device, need not be looked at
            modes = {mode for node, mode in alive if not _differentiated(node)}
        return modes

    def enter(self, mode: Any, *, training: bool) -> tuple[Any, Call | None]:
        """The mode this call must compute, and its `Call` for `remember` (None where autograd is off).

        Args:
            mode: what the layer would compute by the blocks open now (hashable, with a telling repr).
            training: whether the layer is in training mode.

        Raises:
            RuntimeError: a recomputation whose forward's mode cannot be known.
        """
        if torch._C._current_graph_task_id() == -1:
            return self._ordinary(mode, training)
        alive = [call for ref in self._calls if (call := ref()) is not None]
        if alive:
            # Autograd differentiates the youngest forward first; a second backward starts from the youngest again.
            call = next((c for c in reversed(alive) if not c.differentiated), alive[-1])
            return call.mode, call
        modes = self._reentrant_modes()
        if len(modes) > 1:
            raise RuntimeError(f"{_ADVICE} (its forwards ran as {' and '.join(sorted(map(str, modes)))})")
        # Without any, nothing that this layer computed is part of what is differentiated: only its repetition must fit.
        known = next(iter(modes), mode if self._latest is None else self._latest)
        return known, Call(known, self._codes) if torch.is_grad_enabled() else None

    def _ordinary(self, mode: Any, training: bool) -> tuple[Any, Call | None]:
        if not torch.is_grad_enabled():
            if training and (node := _reentrant_checkpoint()) is not None:
                self._reentrant = [(ref, own) for ref, own in self._reentrant if ref() is not None]
                self._reentrant.append((weakref.ref(node), mode))
            return mode, None
        self._latest = mode
        call = Call(mode, self._codes)
        self._calls = [ref for ref in self._calls if ref() is not None]
        self._calls.append(weakref.ref(call))
        return mode, call


def _reentrant_checkpoint() -> Any:
    """The graph node of `torch.utils.checkpoint` with use_reentrant=True that this forward runs for, or None.

    It lives as long as the graph, and its backward runs the forward again.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT_FORWARD:
            return frame.f_locals["ctx"]
        frame = frame.f_back
    return None


def _differentiated(node: Any) -> bool:
    """Whether a node's backward ran, and freed what it saved."""
    try:
        return not node.saved_tensors
    except RuntimeError:
        return True


class _Remember(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, call: Call) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(call.code)
        # Neither a view nor marked dirty: it shares memory and version, so that in-place changes behave as without
        # this node.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call.confirm(*ctx.saved_tensors)
        return grad, None


def remember(output: torch.Tensor, call: Call | None) -> torch.Tensor:
    """``output`` with ``call`` (from `CallHistory.enter`, None without autograd) tied to its graph; no copy."""
    if call is None or output.grad_fn is None:
        return output
    return _Remember.apply(output, call)
