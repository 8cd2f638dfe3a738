"""What a kernel needs from outside this package, and how it is told from what merely looks like it.

A `Requirement` is checked from the cheap to the expensive: is the distribution installed, is its version one that the
row was written for, is nothing installed that overwrites its modules, does it import, and has the function the
parameters that we pass. The last is how a fork is told from the mainline package whose name it shares.

Nothing is imported before versions fit, an import that fails is not tried again for the same version, and its error's
text is the reason. Deliberately not here: which device a kernel runs on (`table`), whether its numbers are right
(`proof`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from dataclasses import dataclass

Capability = tuple[int, int]


def architecture(capability: Capability) -> str:
    """``(10, 0)`` as ``"sm_100"``."""
    return f"sm_{capability[0]}{capability[1]}"


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """One package that a kernel needs.

    Attributes:
        distribution: its name in package metadata; empty for a package without a dependable one, found by `module`.
        versions: a version specifier as in pyproject files, ``">=0.6.8,<0.8"``; empty for any.
        module: imported to see whether the package works; empty where metadata suffices.
        function: of `module`, called by the kernel.
        parameters: what its signature must have.
        impostor: what the package is where `parameters` are missing.
        conflicts: (distribution, why) of packages that must not be installed beside it.
        capabilities: CUDA capabilities on which it is needed; empty for all.
        because: why these versions, appended to the refusal.
        install: what to do, appended to the refusal.
    """

    distribution: str = ""
    versions: str = ""
    module: str = ""
    function: str = ""
    parameters: tuple[str, ...] = ()
    impostor: str = ""
    conflicts: tuple[tuple[str, str], ...] = ()
    capabilities: tuple[Capability, ...] = ()
    because: str = ""
    install: str = ""

    @property
    def name(self) -> str:
        """What to call it: the distribution, or the module where it has none."""
        return self.distribution or self.module

    def unmet_reason(self, capability: Capability | None = None) -> str | None:
        """Why the installed packages do not meet this; None where they do.

        Args:
            capability: of the device, None for one that is not CUDA.
        """
        if self.capabilities and capability not in self.capabilities:
            return None
        version = installed_version(self.distribution) if self.distribution else None
        reason = self._absent(version) or self._wrong_version(version, capability) or self._conflict()
        if reason is None and self.module:
            reason = self._unimportable(version) or self._impostor(version)
        return None if reason is None else "; ".join(part for part in (reason, self.install) if part)

    def _absent(self, version: str | None) -> str | None:
        wanted = f"{self.name} {self.versions}".rstrip()
        if self.distribution:
            return f"needs {wanted}, which is not installed" if version is None else None
        top = self.module.partition(".")[0]
        return None if _is_findable(top) else f"needs {wanted}, which is not installed"

    def _wrong_version(self, version: str | None, capability: Capability | None) -> str | None:
        if not self.versions or version is None:
            return None
        from packaging.specifiers import SpecifierSet

        # A local or development build of a version counts as that version.
        if SpecifierSet(self.versions).contains(version, prereleases=True):
            return None
        on = f" on {architecture(capability)}" if self.capabilities and capability else ""
        because = f" ({self.because})" if self.because else ""
        return f"needs {self.name} {self.versions}{on}, found {version}{because}"

    def _conflict(self) -> str | None:
        for other, why in self.conflicts:
            version = installed_version(other)
            if version is not None:
                return f"{self.name} cannot be used beside {other} {version}: {why}"
        return None

    def _unimportable(self, version: str | None) -> str | None:
        error = _import_error(self.module, version)
        if error is None:
            return None
        if not self.distribution and error.startswith("ModuleNotFoundError") and _names_part_of(self.module, error):
            return f"needs {self.module}, which is not installed"
        return f"{self._found(version)} does not import: {error}"

    def _impostor(self, version: str | None) -> str | None:
        if not self.function:
            return None
        found = self._found(version)
        function = getattr(importlib.import_module(self.module), self.function, None)
        if function is None:
            reason = f"{found} has no {self.function}"
        else:
            missing = [name for name in self.parameters if name not in _parameters(function)]
            if not missing:
                return None
            reason = f"{self.function} of {found} has no parameters {', '.join(missing)}"
        return f"{reason}: {self.impostor}" if self.impostor else reason

    def _found(self, version: str | None) -> str:
        return f"{self.name} {version}" if version else f"the installed {self.module}"


def _is_findable(top_level: str) -> bool:
    if top_level in sys.modules:
        return True
    return importlib.util.find_spec(top_level) is not None


def _names_part_of(module: str, error: str) -> bool:
    """Whether the module that the error misses is ``module`` or a package around it."""
    parts = module.split(".")
    return any(f"'{'.'.join(parts[: i + 1])}'" in error for i in range(len(parts)))


@functools.cache
def _import_error(module: str, version: str | None) -> str | None:
    """Import ``module``; what went wrong, None where nothing did. Kept for the process, by ``version``."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a package built for other versions fails in any way: AttributeError, OSError, ...
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    return None


def _parameters(function: object) -> frozenset[str]:
    """Names of a function's parameters; none where it does not tell."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()
