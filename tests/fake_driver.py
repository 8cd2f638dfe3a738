"""A Triton driver for a made-up NVIDIA device that launches nothing: for tests of how kernels are launched.

For processes of their own: it replaces Triton's driver, and `JITFunction.run` by one that compiles only. Each direct
launch (`qatpatch.kernels.triton_launch`) is compared with what the JIT chooses for the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

STREAM = 77


def install(capability: int, shared_memory: int) -> tuple[list[str], list[str]]:
    """Names of the kernels launched from now on, through the JIT and directly."""
    run, jit, direct = JITFunction.run, [], []

    class Utils:
        def get_device_properties(self, device):
            return {"max_shared_mem": shared_memory}

        def load_binary(self, name, kernel, shared, device):
            return object(), name, 0, 0, 1024

        def unload_module(self, module):
            pass

    class Launch:
        def __init__(self, source, metadata):
            self.kernel, self.metadata = source.fn, metadata

        def __call__(self, x, y, z, stream, function, packed_metadata, launch_metadata, enter, leave, *args):
            options = {name: getattr(self.metadata, name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
            chosen = run(self.kernel, *args, grid=(x, y, z), warmup=True, **options)
            if chosen.metadata.hash != self.metadata.hash or (y, z) != (1, 1) or stream != STREAM:
                raise SystemExit(f"{self.kernel.fn.__name__}: the direct launch runs another kernel for {args}")
            direct.append(self.kernel.fn.__name__)

    class Device:
        utils, launcher_cls = Utils(), Launch

        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return -1  # of tensors on the CPU

        def get_current_stream(self, device=None):
            return STREAM

    def compile_only(self, *args, grid, warmup, **options):
        jit.append(self.fn.__name__)
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    driver.set_active(Device())
    return jit, direct


def twice(call: Callable[[], object], jit: list[str], direct: list[str]) -> None:
    """Make ``call`` twice: the second time every launch must be direct."""
    before, launched = len(jit), len(direct)
    call()
    once = len(jit) - before + len(direct) - launched
    compiled, launched = len(jit), len(direct)
    call()
    if len(jit) != compiled or len(direct) - launched != once:
        raise SystemExit(f"the second time {jit[compiled:]} went through the JIT, {direct[launched:]} directly")
