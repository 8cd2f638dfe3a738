"""`Launcher`: a Triton kernel with fixed compile-time arguments, launched without Triton's own argument binding.

Triton looks at every argument of every launch, tens of microseconds, which is longer than many of our kernels run. The
first launch of a class of arguments goes through Triton as usual; its compiled kernel is kept and run directly from
then on. The class is at least as fine as what Triton 3.6 to 3.9 specialises on for CUDA: of tensors the dtype and
whether the address is a multiple of 16, of descriptors dtype and block, of integers whether they are 1, multiples of
16, or wider than 32 bits, of everything whether it is None. Other versions, and launches that a profiler hooks into,
take Triton's own path.

Knobs that change compilation (debug, instrumentation) are read when a class is first seen, not on each launch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

Tensors = tuple[Tensor | TensorDescriptor | None, ...]
_KNOWN_VERSIONS = ((3, 6), (3, 9))
_INT32_MAX = 2**31 - 1


@lru_cache(maxsize=1)
def _version_is_known() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return _KNOWN_VERSIONS[0] <= version <= _KNOWN_VERSIONS[1]


class Launcher:
    """One kernel under one choice of compile-time arguments, launched on the device of its first tensor.

    Args:
        kernel: a function made by ``triton.jit`` whose parameters are tensors (or descriptors), then numbers, then
            ``constants``.
        constants: the compile-time parameters.
        options: ``num_warps`` and the like.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self._kernel = kernel
        self._keywords = {**constants, **options}
        self._constants = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(self, programs: int, tensors: Tensors, numbers: tuple[int | float, ...]) -> None:
        """Launch ``programs`` programs on the current stream of the device that ``tensors[0]``, a tensor, is on."""
        device = tensors[0].get_device()
        if device < 0 or device == torch.cuda.current_device():  # negative: a CPU tensor, for Triton's interpreter
            self._launch(device, programs, tensors, numbers)
        else:
            with torch.cuda.device(device):
                self._launch(device, programs, tensors, numbers)

    def _launch(self, device: int, programs: int, tensors: Tensors, numbers: tuple[int | float, ...]) -> None:
        key = _argument_class(device, tensors, numbers)
        compiled = self._compiled.get(key)
        if compiled is None or _hooked():
            compiled = self._kernel[(programs,)](*tensors, *numbers, **self._keywords)
            if isinstance(compiled, CompiledKernel) and _version_is_known():
                self._compiled[key] = compiled
            return
        # As `JITFunction.run` ends, with the kernel's compile-time arguments in their places and no launch hooks.
        compiled.run(
            programs, 1, 1, driver.active.get_current_stream(device), compiled.function, compiled.packed_metadata,
            None, None, None, *tensors, *numbers, *self._constants,
        )  # fmt: skip


def _argument_class(device: int, tensors: Tensors, numbers: tuple[int | float, ...]) -> tuple[Any, ...]:
    key: list[Any] = [device]
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        elif type(tensor) is TensorDescriptor:
            key += tensor.base.dtype, tuple(tensor.block_shape)
        else:
            key += tensor.dtype, tensor.data_ptr() % 16 == 0
    for number in numbers:
        if type(number) is float:
            key.append(-1)
        else:
            key.append((number == 1) + 2 * (number % 16 == 0) + 4 * (number > _INT32_MAX))
    return tuple(key)


def _hooked() -> bool:
    """Whether somebody listens to launches: hooks are chains, empty unless something was added."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return True
    return False
