"""safetensors files: what is written is what safetensors itself reads, and no header is believed."""

from __future__ import annotations

import json
import os
import struct
import weakref

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qatpatch import CheckpointError
from qatpatch.tensor_files import Spec, TensorFile, read_json, read_json_file, write_tensors

TENSORS = {
    "z.weight": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
    "a.scale": torch.tensor([1.0, 0.5]).to(torch.float8_e4m3fn),
    "a.global": torch.tensor(0.25),
    "m.bias": torch.randn(3).to(torch.bfloat16),
    "empty": torch.zeros(0, 4),
}


def write(path, tensors=TENSORS, metadata=None, order=None):
    specs = {name: Spec(tensors[name].dtype, tuple(tensors[name].shape)) for name in order or tensors}
    write_tensors(path, specs, metadata or {"format": "pt", "b": "2", "a": "1"}, tensors.__getitem__)


def raw(path, header, data=b""):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def entry(start, end, shape, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_safetensors_reads_what_is_written_and_the_other_way_round(tmp_path):
    write(tmp_path / "ours")
    read = safetensors.torch.load_file(tmp_path / "ours")
    assert {n: (t.dtype, t.shape) for n, t in read.items()} == {n: (t.dtype, t.shape) for n, t in TENSORS.items()}
    assert all(
        bytes(read[n].view(torch.uint8).flatten().tolist()) == bytes(t.view(torch.uint8).flatten().tolist())
        for n, t in TENSORS.items()
        if t.dim()
    )
    safetensors.torch.save_file(TENSORS, tmp_path / "theirs", metadata={"x": "y"})
    file = TensorFile(tmp_path / "theirs")
    assert file.metadata == {"x": "y"} and file.specs["m.bias"] == Spec(torch.bfloat16, (3,))
    assert torch.equal(file.tensor("z.weight"), TENSORS["z.weight"])


def test_bytes_depend_on_nothing_but_the_tensors(tmp_path):
    write(tmp_path / "one")
    write(tmp_path / "two", order=list(reversed(TENSORS)), metadata={"a": "1", "b": "2", "format": "pt"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    header = json.loads((tmp_path / "one").read_bytes()[8:].split(b"}}")[0] + b"}}")
    for name, place in header.items():
        if name != "__metadata__":
            assert place["data_offsets"][0] % TENSORS[name].element_size() == 0


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'{"a": 3}',
        pytest.param(b"[" * 100_000, id="deep"),
        {"a": entry(0, 4, [8])},  # shorter than its shape
        {"a": entry(0, 1 << 40, [1 << 40])},  # longer than the file
        {"a": entry(0, 4, [4]), "b": entry(2, 6, [4])},  # overlapping
        {"a": entry(0, 4, [4]), "b": entry(6, 8, [2])},  # with a hole
        {"a": entry(4, 0, [4])},
        {"a": entry(0, 8, [1 << 62, 1 << 62])},  # a product that wraps
        {"a": entry(0, 8, [-8])},
        {"a": entry(0, 8, [8], "U9")},
        {"a": entry(0, 8, [1], "C64")},  # known to safetensors, and to no NVFP4 file
        {"__metadata__": {"a": 1}, "b": entry(0, 8, [8])},
    ],
)
def test_headers_that_lie_are_refused(tmp_path, header):
    with pytest.raises(CheckpointError, match="truncated or no safetensors file|no NVFP4 file holds"):
        TensorFile(raw(tmp_path / "x.safetensors", header, b"\0" * 8))


def test_a_header_length_is_not_believed(tmp_path):
    for length in (1 << 62, (1 << 64) - 1, 1 << 31):
        (tmp_path / "x").write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(CheckpointError, match="truncated or no safetensors file"):
            TensorFile(tmp_path / "x")


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), flips=st.lists(st.tuples(st.integers(0, 399), st.integers(1, 255)), max_size=4))
def test_damaged_files_are_read_or_refused_and_nothing_else(tmp_path_factory, cut, flips):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    write(path)
    data = bytearray(path.read_bytes())
    for place, bits in flips:
        data[place % len(data)] ^= bits
    path.write_bytes(bytes(data[: len(data) - min(cut, len(data))]))
    try:
        file = TensorFile(path)
        for name in file.specs:
            file.tensor(name)
    except CheckpointError:
        pass


def test_what_turns_out_otherwise_than_announced_leaves_no_file(tmp_path):
    specs = {"a": Spec(torch.uint8, (4,))}
    for tensor in (torch.zeros(5, dtype=torch.uint8), torch.zeros(4)):
        with pytest.raises(CheckpointError, match="a turned out"):
            write_tensors(tmp_path / "x", specs, {}, lambda name, tensor=tensor: tensor)
    assert not os.listdir(tmp_path)


def test_one_tensor_is_held_at_a_time(tmp_path):
    alive, most = weakref.WeakSet(), []

    def tensor(name):
        made = torch.zeros(1000)
        most.append(len(alive))
        alive.add(made)
        return made

    write_tensors(tmp_path / "x", {f"{i}": Spec(torch.float32, (1000,)) for i in range(20)}, {}, tensor)
    assert most == [0] * 20


def test_json_of_strangers(tmp_path):
    with pytest.raises(CheckpointError, match="it is no JSON: RecursionError"):
        read_json("[" * 200_000, "it")
    with pytest.raises(CheckpointError, match="no JSON"):
        read_json(b"\xff\xfe", "it")
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(CheckpointError, match="too long for a config"):
        read_json_file(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_json_file(tmp_path / "nowhere.json")
