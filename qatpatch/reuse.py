"""What is quantized once and used again: weights inside a scope, and the input that q, k and v of an attention share.

**Weights.** Between a forward and its recomputation by gradient checkpointing, between micro-batches, and through all
steps of a sampling loop a weight is the same. Inside a scope (`reuse_weights`, `infer_attention`) its quantized operand
is kept. Nothing that torch tells proves that a weight is unchanged: writes through ``.data``, resharding and
collectives leave no trace in its version. So the proof is the weight itself: each use reads it again and compares it
with what the kept operand was made of, exactly in the reference kernels, and by a 64-bit fingerprint of every 8192
elements in the Triton ones, where a change goes unnoticed once in 2^64. What has changed is quantized anew, on the
device, with no host synchronisation. What is saved is writing: a read alone takes half the time of a quantization.

Kept operands take two bytes a weight (the reference more) up to a limit, first come, first kept: in a loop over all
layers that beats dropping the least recent. They die with the scope. A CUDA graph that is being captured, compiled
regions and sharded (DTensor) weights quantize as usual.

**Inputs.** to_q, to_k and to_v of one attention are called with one tensor in a row: it is quantized for the first and
used for the others, each once; a second call of the same layer quantizes anew. That holds for the layers that train
(operands for a 16-bit GEMM) and for the deployed ones (packed codes and tiled scales on FP4 tensor cores). Compiled
regions call one operator a quantization. The compiler removes its repetitions from graphs with a backward; without one,
in compiled inference, each projection quantizes.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from qatpatch.kernels import kernel_named

# A CUDA device's share for kept operands, and the limit elsewhere.
_DEVICE_SHARE = 8
_LIMIT = 1 << 30
# The projections of one attention that take the same input, as diffusers, transformers and Wan's own code name them.
_SAME_INPUT = frozenset(
    "to_q to_k to_v add_q_proj add_k_proj add_v_proj to_added_q to_added_k to_added_v "
    "q_proj k_proj v_proj to_query to_key to_value q k v query key value".split()
)


class Kept(Protocol):
    """A kernel module's quantized weight that knows what it was made of; its ``keep(weight, rule)`` makes one."""

    nbytes: int

    def operand(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The operand and global scale of ``weight``, of what is kept as far as that is still the weight's."""
        ...


class KeptWeights:
    """The quantized weights of one scope.

    Attributes:
        limit: bytes that may be kept; None until the first weight tells the device, then an eighth of a CUDA device's
            memory, elsewhere 1 GiB.
        nbytes: bytes that are kept.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.nbytes = 0
        self._kept: dict[tuple[Any, ...], Kept | None] = {}

    def __len__(self) -> int:
        """Quantized weights that are kept."""
        return sum(kept is not None for kept in self._kept.values())

    def __repr__(self) -> str:
        limit = "" if self.limit is None else f" of {self.limit / 2**30:.2f}"
        return f"KeptWeights({len(self)} weights, {self.nbytes / 2**30:.2f}{limit} GiB)"

    def find(self, owner: object, weight: torch.Tensor, rule: str, kernel: str) -> Kept | None:
        """What is kept for ``weight``, made now where there is room; None where it must be quantized as usual."""
        stream = None
        if weight.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return None
            # Another stream would see fingerprints before the operands that they stand for.
            stream = torch.cuda.current_stream(weight.device).cuda_stream
        key = (id(owner), weight.dtype, weight.shape, weight.device, kernel, rule, stream)
        try:
            return self._kept[key]
        except KeyError:
            kept = self._kept[key] = self._keep(weight, rule, kernel)
            return kept

    def _keep(self, weight: torch.Tensor, rule: str, kernel: str) -> Kept | None:
        if self.limit is None:
            self.limit = _LIMIT
            if weight.is_cuda:
                self.limit = torch.cuda.get_device_properties(weight.device).total_memory // _DEVICE_SHARE
        keep = getattr(kernel_named(kernel).load(), "keep", None)
        if keep is None or self.nbytes + 2 * weight.numel() > self.limit:
            return None
        kept = keep(weight, rule)
        if kept is None or self.nbytes + kept.nbytes > self.limit:
            return None
        self.nbytes += kept.nbytes
        return kept

    def clear(self) -> None:
        """Forget everything; the memory is free."""
        self._kept.clear()
        self.nbytes = 0


def input_group(path: str) -> str | None:
    """The attention whose q, k or v projection ``path`` (a module path) names; None for any other layer."""
    parent, _, name = path.removesuffix(".base_layer").rpartition(".")
    return parent if name in _SAME_INPUT else None


class SharedInput:
    """The input of an attention's projections, quantized once. Copies and pickles start empty."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[torch.Tensor], tuple[Any, ...], set[int], Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        return SharedInput()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return SharedInput, ()

    def find(self, owner: object, x: torch.Tensor, key: tuple[Any, ...]) -> Any:
        """What was kept for ``x`` and ``key`` by another layer than ``owner``, once; else None."""
        last = self._last
        if last is None or last[0]() is not x or id(owner) in last[2] or last[1] != _circumstances(x, key):
            return None
        last[2].add(id(owner))
        return last[3]

    def keep(self, owner: object, x: torch.Tensor, key: tuple[Any, ...], quantized: Any) -> None:
        """Keep what ``owner`` made of ``x``, instead of anything before, as long as ``x`` lives."""
        circumstances = _circumstances(x, key)
        if circumstances is not None:
            self._last = (weakref.ref(x, self._forget), circumstances, {id(owner)}, quantized)

    def clear(self) -> None:
        """Forget the input."""
        self._last = None

    def _forget(self, reference: weakref.ref[torch.Tensor]) -> None:
        last = self._last
        if last is not None and last[0] is reference:
            self._last = None


def _circumstances(x: torch.Tensor, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """``key`` and what else must be equal for two calls with ``x`` to see one value; None where that is unknown."""
    if x.is_inference():  # without a version
        return None
    if not x.is_cuda:
        return (*key, x._version)
    # What a graph that is being captured computes, only this graph may use.
    stream = torch.cuda.current_stream(x.device).cuda_stream
    return (*key, x._version, stream, torch.cuda.is_current_stream_capturing())
