"""The diffusers attention seam: the only file that knows diffusers' private names.

A patched attention module gets a *copy* of its own processor whose class is a subclass made here. The subclass answers
``_attention_backend`` with an entry of ours in diffusers' backend registry, so that the projections, norms and rotary
embeddings of the processor run as they are and only the attention itself changes. The entry's name is a pseudo-member
of diffusers' closed enum: it enters none of the enum's maps and replaces nothing, so models that are not patched cannot
see it. ``_attention_backend`` is a property: `set_attention_backend` on a patched model reaches only what its attention
runs outside ours (`dense`), and never takes the quantized attention out.

``__call__`` keeps its signature (LTX-2 filters arguments by it). Masks are honoured by the kernels or refused; what a
QAT attention
cannot do (causal, dropout, grouped heads, ring attention) is refused too: diffusers itself would drop it.

Under diffusers' context parallelism (Ulysses) a call exchanges tokens for heads, computes its heads over the whole
sequence as one process would, and exchanges back.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qatpatch import kernels
from qatpatch.attention import qat_attention, quantized_attention
from qatpatch.autocast import autocast_dtype
from qatpatch.parallel import gather_mask, gather_sequence, scatter_sequence
from qatpatch.recomputation import Call, CallHistory, remember
from qatpatch.switch import AttentionChoice, Switch

_TRAIN = AttentionChoice(mode="train")
# A registry entry is shared by all processors, so what belongs to one call travels beside it. Compiled regions do
# without.
_RUNNING: contextvars.ContextVar[_Running | None] = contextvars.ContextVar("qatpatch_running", default=None)


class AttentionState:
    """A patched attention's scheme and what it computes now. Copies with the module, independent afterwards.

    Attributes:
        scheme: the scheme that training simulates.
        head_dim: of its queries; None where only a call tells (graphs).
        switch: the model's open blocks.
        deployed: what runs after deploy when no block is open; None before.
        dense_backend: the processor's own backend, for mode ``"dense"``.
        original: the processor that was there before.
    """

    def __init__(self, scheme: str, switch: Switch, original: Any, head_dim: int | None = None) -> None:
        self.scheme = scheme
        self.head_dim = head_dim
        self.switch = switch
        self.deployed: AttentionChoice | None = None
        self.dense_backend: Any = getattr(original, "_attention_backend", None)
        self.original = original
        self.history = CallHistory()
        self._kernels: dict[tuple[Any, ...], str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # What was resolved holds for this process: a file may be read where other kernels run.
        return {**vars(self), "_kernels": {}}

    @property
    def choice(self) -> AttentionChoice:
        """What the attention runs now."""
        if self.switch.attention is not None:
            return self.switch.attention
        return self.deployed if self.deployed is not None else _TRAIN

    def kernel(
        self, choice: AttentionChoice, device: torch.device, head_dim: int | None = None, masked: bool = False
    ) -> tuple[str, str]:
        """(scheme, kernel name) of what ``choice`` runs on ``device``, resolved on first use there.

        With a mask to honour (``masked``), a kernel that takes none gives way to one of the same scheme.
        """
        scheme = choice.scheme or self.scheme
        if choice.kernel is not None and (not masked or kernels.honours_masks(choice.kernel)):
            return scheme, choice.kernel
        stage = "train" if choice.mode == "train" else "infer"
        key = stage, scheme, device, head_dim or self.head_dim, masked
        if key not in self._kernels:
            self._kernels[key] = kernels.resolved_name(
                "attention", stage, scheme, str(device), head_dim=key[3], masked=masked
            )
        return scheme, self._kernels[key]


@dataclass(frozen=True)
class _Running:
    """One call of a patched processor: what it must compute, and the `Call` that its output must remember."""

    state: AttentionState
    choice: AttentionChoice
    call: Call | None


def is_diffusers_model(model: nn.Module) -> bool:
    """Whether diffusers' own saving and loading applies to ``model``; imports nothing."""
    classes = ((base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__)
    return ("diffusers", "ModelMixin") in classes


def group_offload(model: nn.Module) -> str | None:
    """Where diffusers' group offloading puts weights between their uses: "memory", "disk", or None where it is off."""
    hooks = (registry.get_hook("group_offloading") for registry in _hook_registries(model))
    groups = [hook.group for hook in hooks if hook is not None]
    if not groups:
        return None
    return "disk" if any(group.offload_to_disk_path for group in groups) else "memory"


def is_cast_layerwise(model: nn.Module) -> bool:
    """Whether diffusers' layerwise casting stores parts of the model in another dtype than they compute in."""
    return any(registry.get_hook("layerwise_casting") is not None for registry in _hook_registries(model))


def forget_cached(model: nn.Module) -> None:
    """Empty diffusers' caches (``enable_cache``): they hold what the model computed with other numbers."""
    for registry in _hook_registries(model):
        registry.reset_stateful_hooks(recurse=False)


def is_averaged(model: nn.Module) -> bool:
    """Whether a diffusers EMAModel is alive whose averages have the shapes of the model's parameters."""
    if "diffusers.training_utils" not in sys.modules:
        return False
    averages = [o.shadow_params for o in gc.get_objects() if type(o).__name__ == "EMAModel"]
    shapes = [parameter.shape for parameter in model.parameters()]
    return any([average.shape for average in own] == shapes for own in averages)


def _hook_registries(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        registry = vars(module).get("_diffusers_hook")
        if hasattr(registry, "get_hook"):
            yield registry


def forget_quantizer(model: nn.Module) -> None:
    """Take off what `diffusers_quantizer` and diffusers' loader left on a deployed model."""
    if vars(model).pop("hf_quantizer", None) is None:
        return
    for name in ("is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    rest = {key: value for key, value in model._internal_dict.items() if key != "quantization_config"}
    model._internal_dict = type(model._internal_dict)(rest)


def unsupported_reason(module: nn.Module) -> str | None:
    """Why the seam cannot reach an attention module; None when it can."""
    processor = getattr(module, "processor", None)
    if processor is None:
        return "It has no attention processor, so there is no seam to patch."
    if isinstance(processor, nn.Module):
        return (
            f"Its processor {type(processor).__name__} is a module of its own, which cannot be copied "
            f"without its weights."
        )
    if getattr(processor, "qatpatch_kind", None):
        return "It is patched already."
    if not hasattr(type(processor), "_attention_backend"):
        return (
            f"Its processor {type(processor).__name__} calls scaled_dot_product_attention itself instead of diffusers' "
            "attention dispatch, so there is no seam to patch."
        )
    return None


def is_attention(module: nn.Module) -> bool:
    """Whether ``module`` is an attention layer with a processor, diffusers' convention."""
    return callable(getattr(module, "processor", None)) and (hasattr(module, "heads") or hasattr(module, "num_heads"))


def is_patched_attention(module: nn.Module) -> bool:
    """Whether the module's processor is one of ours, also across reloads of this package."""
    return getattr(getattr(module, "processor", None), "qatpatch_kind", None) == "QATAttention"


def attention_state(module: nn.Module) -> AttentionState:
    """The state of a patched attention module."""
    return module.processor.quantization


def head_dim(module: nn.Module) -> int:
    """The module's head dimension: its own word, else inner width over heads."""
    for name in ("head_dim", "dim_head"):
        if isinstance(getattr(module, name, None), int):
            return getattr(module, name)
    inner = getattr(module, "inner_dim", None)
    if not isinstance(inner, int):
        inner = getattr(module, "to_q" if hasattr(module, "to_q") else "to_query").out_features
    return inner // (module.heads if hasattr(module, "heads") else module.num_heads)


def attach(module: nn.Module, scheme: str, switch: Switch) -> None:
    """Patch ``module``'s attention in place; its own processor object is kept for `detach`."""
    original = module.processor
    processor = copy.copy(original)
    processor.__class__ = _patched_class(type(original))
    processor.quantization = AttentionState(scheme, switch, original, head_dim(module))
    module.processor = processor
    # Entries that come later would invalidate graphs compiled before them.
    backend_entry("dense", "", None)
    backend_entry("train", scheme, None)
    for mode in ("infer", "deployed"):
        for unmasked in (False, True):
            backend_entry(mode, scheme, None, unmasked)


def detach(module: nn.Module) -> None:
    """Put the original processor object back, with the backend and the parallelism that were set meanwhile."""
    patched = module.processor
    original = patched.quantization.original
    if patched.quantization.dense_backend is not getattr(original, "_attention_backend", None):
        original._attention_backend = patched.quantization.dense_backend
    if getattr(patched, "_parallel_config", None) is not getattr(original, "_parallel_config", None):
        original._parallel_config = patched._parallel_config
    module.processor = original


@torch.compiler.assume_constant_result
def backend_entry(mode: str, scheme: str, kernel: str | None, unmasked: bool = False) -> Any:
    """The registry entry that runs attention in ``mode``: a constant to the compiler.

    ``unmasked``: the model call's masks mask nothing (`masks`), so that the attention is run without.
    """
    return _registered(mode, scheme, kernel, unmasked)


@functools.cache
def _registered(mode: str, scheme: str, kernel: str | None, unmasked: bool) -> Any:
    """Add an entry to diffusers' registry, on first use."""
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        _AttentionBackendRegistry,
        dispatch_attention_fn,
    )

    name = "_".join(("qatpatch", mode, scheme, kernel or "any", *(("unmasked",) if unmasked else ())))
    entry = str.__new__(AttentionBackendName, name)
    entry._name_, entry._value_ = name, name

    def backend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> torch.Tensor:
        running = None if torch.compiler.is_compiling() else _RUNNING.get()
        if mode == "dense":
            arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            dense = running.state.dense_backend
            out = dispatch_attention_fn(*arguments, backend=dense, parallel_config=_parallel_config)
        else:
            # Flex attention's BlockMask comes this way too.
            block_mask = type(attn_mask).__name__ if not isinstance(attn_mask, torch.Tensor | None) else None
            refuse_unsupported(dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa, attn_mask=block_mask)
            group, name = _ulysses_group(_parallel_config), kernel
            # What a rank saw of the masks may not be all: with a shared sequence they are honoured.
            dropped = unmasked and group is None
            if running is not None:
                masked = attn_mask is not None and not dropped
                name = running.state.kernel(running.choice, query.device, query.shape[-1], masked)[1]
            run = functools.partial(run_attention, mode=mode, scheme=scheme, kernel=name, unmasked=dropped)
            if group is None:
                out = run(query, key, value, attn_mask, scale)
            else:
                if attn_mask is not None:
                    attn_mask = gather_mask(attn_mask, query.shape[1], key.shape[1], query.shape[2], group)
                operands = (gather_sequence(x, group) for x in (query, key, value))
                out = scatter_sequence(run(*operands, attn_mask, scale), group)
        return out if running is None else remember(out, running.call)

    _AttentionBackendRegistry.register(entry, supports_context_parallel=True)(backend)
    return entry


def _ulysses_group(parallel_config: Any) -> Any:
    """The ranks that share a sequence by Ulysses; None where nobody does.

    Raises:
        NotImplementedError: for every other context parallelism.
    """
    config = getattr(parallel_config, "context_parallel_config", None)
    if config is None:
        return None
    if config.ring_degree > 1:
        raise NotImplementedError(
            f"the model runs ring attention (ring_degree={config.ring_degree}), where every rank sees the keys in "
            "another order and in parts; NVFP4 attention quantizes along the keys and would compute other numbers than "
            "one process: use ContextParallelConfig(ulysses_degree=...)"
        )
    if config.ulysses_anything:
        raise NotImplementedError(
            "NVFP4 attention exchanges equal parts, and ulysses_anything=True allows unequal ones; pad the sequence to "
            "a multiple of ulysses_degree and leave ulysses_anything out"
        )
    return config._ulysses_mesh.get_group()


class SharedSequence:
    """Who shares the tokens of a model's forward, as its context parallelism says at the time of the call.

    Refers to the model weakly. A deep copy refers to the model's copy; pickling drops it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self) -> Any:
        """The process group, or None where every rank has whole sequences."""
        config = getattr(self._model(), "_parallel_config", None)
        config = getattr(config, "context_parallel_config", None)
        return None if config is None else config._flattened_mesh.get_group()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedSequence | None:
        copied = memo.get(id(self._model()))
        return None if copied is None else SharedSequence(copied)


def run_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float | None,
    *,
    mode: str,
    scheme: str,
    kernel: str | None,
    unmasked: bool = False,
) -> torch.Tensor:
    """Quantized attention, BSHD in and out, in autocast's dtype where autocast is on (as SDPA does).

    Mode ``"train"`` is differentiable, ``"infer"`` refuses to lose gradients, and ``"deployed"`` is ``"infer"``
    except that adapters on packed layers may train: where gradients are needed it runs the train kernel of the same
    scheme. ``kernel=None`` is the first usable one, and with a mask so is a kernel that takes none. ``unmasked`` says
    that ``attn_mask`` masks nothing: it is left out, except where gradients are needed.
    """
    dtype = autocast_dtype(query.device)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if mode == "deployed" and torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        mode, kernel = "train", None
    elif unmasked:
        attn_mask = None
    if attn_mask is not None and kernel is not None and not kernels.honours_masks(kernel):
        kernel = None
    function = qat_attention if mode == "train" else quantized_attention
    return function(query, key, value, scheme=scheme, scale=scale, attn_mask=attn_mask, kernel=kernel)


def refuse_unsupported(**asked: Any) -> None:
    """Raise for anything the model asks of its attention that NVFP4 attention does not do."""
    for name, value in asked.items():
        if value:
            raise NotImplementedError(
                f"the model asks its attention for {name}={value}, which NVFP4 attention does not support; exclude "
                "that module from the patch (exclude=...) to keep it dense"
            )


@functools.cache
def _patched_class(base: type) -> type:
    """A subclass of the processor class ``base`` whose attention is ours. One a base, so that blocks share a graph."""

    @functools.wraps(base.__call__)
    def call(self: Any, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return base.__call__(self, attn, *args, **kwargs)
        state = self.quantization
        if state.switch.context is None and _ulysses_group(getattr(self, "_parallel_config", None)) is not None:
            raise RuntimeError(
                "context parallelism was enabled on a patched model that came out of a pickle, or on a part of one, "
                "whose linears cannot know it; qatpatch.remove the patch, apply it again, then enable_parallelism"
            )
        choice, this_call = state.history.enter(state.choice, training=attn.training)
        token = _RUNNING.set(_Running(state, choice, this_call))
        try:
            return base.__call__(self, attn, *args, **kwargs)
        finally:
            _RUNNING.reset(token)

    def read(self: Any) -> Any:
        state = self.quantization
        running = None if torch.compiler.is_compiling() else _RUNNING.get()
        choice = state.choice if running is None else running.choice
        if choice.mode == "dense" and (running is None or running.call is None):
            return state.dense_backend
        unmasked = state.switch.unmasked and choice.mode in ("infer", "deployed")
        return backend_entry(choice.mode, choice.scheme or state.scheme, choice.kernel, unmasked)

    def write(self: Any, backend: Any) -> None:
        self.quantization.dense_backend = backend

    def reduce(self: Any, protocol: int) -> tuple[Any, ...]:
        return _rebuild, (base, dict(self.__dict__))

    return type(
        f"QAT{base.__name__}",
        (base,),
        {
            "__call__": call,
            "__doc__": f"{base.__name__} with NVFP4 attention.",
            "__module__": __name__,
            "__reduce_ex__": reduce,
            "_attention_backend": property(read, write),
            "qatpatch_kind": "QATAttention",
        },
    )


def _rebuild(base: type, attributes: dict[str, Any]) -> Any:
    """Unpickle or copy a patched processor: make the class anew, then restore the attributes."""
    processor = object.__new__(_patched_class(base))
    processor.__dict__.update(attributes)
    return processor
