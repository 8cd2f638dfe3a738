"""The doctor: what this machine has, which kernels run on it, and whether their numbers are right.

``python -m qatpatch doctor`` prints the environment and one line for every kernel and device: the reason why the kernel
cannot run there, or what came of running its `proof`, emulated kernels included. The text is Markdown, to be read as it
is or pasted into a report. Nothing is downloaded and no model is needed; kernels that compile on first use do so here.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qatpatch import __version__, kernels
from qatpatch.kernels import proof
from qatpatch.kernels.requirements import installed_version

PACKAGES = (
    "torch",
    "triton",
    "diffusers",
    "flashinfer-python",
    "nvidia-cutlass-dsl",
    "nvidia-cudnn-frontend",
    "quack-kernels",
    "fastvideo-kernel",
    "sageattn3",
    "flash-attn",
    "flash-attn-4",
    "accelerate",
    "peft",
    "torchao",
)
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One kernel on one device.

    Attributes:
        kernel, op, native: of its row.
        device: ``"cpu"``, ``"cuda:0"``, ...
        architecture: ``"sm_90"``, ``"cpu"``.
        usable: whether it can run there.
        proven: whether its proof was passed; None where it was not run.
        cases, worst: of the proof: how many cases, and the largest error as a fraction of its bound.
        reason: why it is not usable, or what the proof found.
    """

    kernel: str
    op: str
    native: bool
    device: str
    architecture: str
    usable: bool
    proven: bool | None
    cases: int = 0
    worst: float = 0.0
    reason: str = ""

    @property
    def state(self) -> str:
        """The finding in one phrase."""
        if not self.usable:
            return f"no: {self.reason}"
        if not self.proven:
            return f"FAILED: {self.reason}"
        return f"ok: {self.cases} cases, largest error {self.worst:.2f} of its bound"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that the doctor found.

    Attributes:
        environment: name -> value.
        packages: name -> version, of those that are installed.
        findings: kernel by kernel, device by device.
    """

    environment: dict[str, str]
    packages: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether no usable kernel failed its proof."""
        return all(finding.proven is not False for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"healthy": self.healthy}

    def __str__(self) -> str:
        environment = [("", "found"), *self.environment.items()]
        packages = [("package", "version"), *self.packages.items()]
        found = [("kernel", "op", "numbers", "device", "state")]
        for f in self.findings:
            where = f.device if f.device == f.architecture else f"{f.device} ({f.architecture})"
            found.append((f.kernel, f.op, "native" if f.native else "emulated", where, f.state))
        return "\n\n".join(_markdown(rows) for rows in (environment, packages, found))


def diagnose(
    devices: Iterable[torch.device] | None = None, progress: Callable[[str], None] = lambda line: None
) -> Diagnosis:
    """Look at every kernel on ``devices`` (by default the CPU and every CUDA device).

    Args:
        progress: called with one line before each proof that is run.
    """
    findings = []
    for device in kernels.present_devices() if devices is None else devices:
        for kernel in kernels.TABLE:
            findings.append(_find(kernel, device, progress))
    versions = {name: installed_version(name) for name in PACKAGES}
    return Diagnosis(
        environment=environment(),
        packages={name: version for name, version in versions.items() if version is not None},
        findings=tuple(findings),
    )


def environment() -> dict[str, str]:
    """Versions and devices, by name."""
    found = {
        "qatpatch": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "CUDA of torch": torch.version.cuda or "none",
        "driver": _driver(),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 1024**3
        architecture = kernels.architecture_of(torch.device("cuda", index))
        found[f"cuda:{index}"] = f"{properties.name}, {architecture}, {memory:.0f} GiB"
    return found


def _find(kernel: kernels.Kernel, device: torch.device, progress: Callable[[str], None]) -> Finding:
    about = dict(
        kernel=kernel.name,
        op=kernel.op,
        native=kernel.native,
        device=str(device),
        architecture=kernels.architecture_of(device),
    )
    reason = kernel.unavailable_reason(device)
    if reason is not None:
        return Finding(**about, usable=False, proven=None, reason=reason)
    progress(f"running {kernel.name} on {device} ...")
    outcome = proof.examine(kernel, device)
    return Finding(
        **about,
        usable=True,
        proven=outcome.reason is None,
        cases=outcome.cases,
        worst=outcome.worst,
        reason=outcome.reason or "",
    )


def _driver() -> str:
    """Version of the NVIDIA driver, where the kernel module tells."""
    try:
        words = _DRIVER.read_text().split()
    except OSError:
        return "none found"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    # The last column holds sentences: padding it would wrap every line of a terminal.
    widths[-1] = len(rows[0][-1])
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("-" * max(3, w) for w in widths) + " |")
    return "\n".join(lines)
