"""safetensors files, one tensor at a time: read with every claim of the header checked, written with the same bytes
for the same tensors.

`TensorFile` reads on demand, so that a file is never in memory as a whole; `write_tensors` takes what it writes from a
function, tensor by tensor. safetensors' own writer wants all tensors at once and keeps metadata in no fixed order.
Writing is atomic: beside its place, then renamed over it.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch

from qatpatch.errors import CheckpointError

# A header is JSON that is parsed as a whole; safetensors itself stops here.
MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 1 << 24
_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Spec(NamedTuple):
    """What a file says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class TensorFile:
    """An open safetensors file.

    Attributes:
        path: where it is.
        metadata: the header's strings.
        specs: name -> `Spec`, of every tensor.

    Raises:
        CheckpointError: missing, truncated, no safetensors file, or a header whose sizes, offsets or types do not hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"there is no file {path}")
        try:
            self._file = safetensors.safe_open(path, framework="pt", device="cpu")
            self.metadata: dict[str, str] = self._file.metadata() or {}
            self.specs = {name: self._spec(name) for name in self._file.keys()}  # noqa: SIM118 (not a dict)
        except (safetensors.SafetensorError, OSError, MemoryError) as error:
            raise CheckpointError(f"{path} is truncated or no safetensors file: {error}") from error

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        try:
            return self._file.get_tensor(name)
        except (safetensors.SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error

    def _spec(self, name: str) -> Spec:
        entry = self._file.get_slice(name)
        dtype = _DTYPES.get(entry.get_dtype())
        if dtype is None:
            raise CheckpointError(f"{self.path}: {name} has dtype {entry.get_dtype()}, which no NVFP4 file holds")
        return Spec(dtype, tuple(entry.get_shape()))


def write_tensors(
    path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str], tensor: Callable[[str], torch.Tensor]
) -> None:
    """Write a safetensors file atomically.

    Args:
        path: replaced if it exists.
        specs: name -> what it will hold.
        metadata: strings for the header.
        tensor: name -> the tensor, called once each; one is held at a time.

    Raises:
        CheckpointError: the header is larger than readers take.
        OSError: the disk says no; what was at ``path`` is untouched.
    """
    # Wide dtypes first: every tensor then starts at a multiple of its element size.
    order = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in order:
        spec = specs[name]
        end = offset + spec.nbytes
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the header of {path} would be {len(encoded)} bytes; readers take {MAX_HEADER_BYTES}")

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            for name in order:
                file.write(_bytes_of(name, tensor(name), specs[name]))

    replace_file(path, write)


def replace_file(file: Path, write: Callable[[Path], Any]) -> None:
    """Write beside ``file`` and rename over it; the temporary name is never taken for a model."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".partial", dir=file.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(text: str | bytes, what: str) -> Any:
    """The value of a JSON text from a file that nobody vouches for.

    Raises:
        CheckpointError: too long, no JSON, or nested without end.
    """
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{what} is {len(text)} bytes long")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is no JSON: {type(error).__name__} {str(error)[:200]}") from error


def read_json_file(path: Path) -> Any:
    """The value of a small JSON file; CheckpointError where it is not one."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is {path.stat().st_size} bytes long, too long for a config")
        return read_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _bytes_of(name: str, tensor: torch.Tensor, spec: Spec) -> memoryview:
    if tensor.dtype is not spec.dtype or tuple(tensor.shape) != spec.shape:
        raise CheckpointError(f"{name} turned out {Spec(tensor.dtype, tuple(tensor.shape))}, the header says {spec}")
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def expect_names(
    found: Collection[str], wanted: Collection[str], fit: str, missing: str = "are missing", extra: str = "are too many"
) -> None:
    """Compare two sets of names; ``fit`` says what would not fit what, ``missing`` and ``extra`` how names differ.

    Raises:
        CheckpointError: names of either side that the other has not.
    """
    differing = ((sorted(set(wanted) - set(found)), missing), (sorted(set(found) - set(wanted)), extra))
    said = [
        f"{len(names)} tensors {how} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for names, how in differing
        if names
    ]
    if said:
        raise CheckpointError(f"{fit}: {' and '.join(said)}")
