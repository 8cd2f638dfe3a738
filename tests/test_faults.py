"""Faults from outside: processes killed while they write, full disks, files that were changed.

A writer leaves the old file or the new one, whole; a reader gives the model that was saved or `CheckpointError`.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from models import run, tiny_wan, wan_inputs

import qatpatch
from qatpatch import CheckpointError
from qatpatch.checkpoint import CONFIG_NAME, WEIGHTS_NAME

ROOT = Path(__file__).resolve().parent.parent
KILLS = 20

# Imports torch once, then forks writers and kills each at a random moment. Prints, per kill, which version is there.
KILLER = """
import os, random, signal, sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
import qatpatch
from models import tiny_wan, run, wan_inputs

folder, kind, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
models = []
for seed in (0, 1):
    model = tiny_wan(seed=seed, layers=1)
    qatpatch.apply(model, input_scale="static")
    with qatpatch.calibrate(model):
        run(model, wan_inputs(model))
    qatpatch.deploy(model)
    models.append(model)

def write(model):
    if kind == "save":
        qatpatch.save(model, folder)
    else:
        qatpatch.export(model, folder + "/model.safetensors", format="comfy")

def read():
    if kind == "save":
        return qatpatch.load(folder)
    return qatpatch.load(folder + "/model.safetensors", model=tiny_wan(seed=5, layers=1))

def version(model):
    packed = model.blocks[0].attn1.to_q.weight_packed
    found = [i for i, m in enumerate(models) if torch.equal(packed, m.blocks[0].attn1.to_q.weight_packed)]
    state = model.state_dict()
    whole = all(torch.equal(state[k], v) for k, v in models[found[0]].state_dict().items() if k in state)
    return found[0] if whole else "mixed"

os.makedirs(folder, exist_ok=True)
write(models[0])
started = time.perf_counter()
write(models[0])
one = time.perf_counter() - started
chance = random.Random(0)
for _ in range(kills):
    child = os.fork()
    if child == 0:
        while True:
            write(models[1])
            write(models[0])
    time.sleep(chance.uniform(0, 10 * one))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(version(read()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["save", "export"])
def test_killed_writers_leave_a_whole_file(kind, tmp_path):
    script = KILLER.format(root=str(ROOT), tests=str(ROOT / "tests"))
    killer = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model"), kind, str(KILLS)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert killer.returncode == 0, killer.stderr
    seen = killer.stdout.split()
    assert len(seen) == KILLS and set(seen) == {"0", "1"}, seen
    # What was begun and never ended is hidden and bears no name that a loader looks for.
    left = [path.name for path in (tmp_path / "model").iterdir() if path.name.endswith(".safetensors")]
    assert left == [WEIGHTS_NAME if kind == "save" else "model.safetensors"]


@pytest.fixture(scope="module")
def deployed():
    model = tiny_wan(layers=1)
    qatpatch.apply(model, input_scale="static")
    with qatpatch.calibrate(model):
        run(model, wan_inputs(model))
    qatpatch.deploy(model)
    return model


@pytest.fixture(scope="module")
def saved(deployed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    qatpatch.save(deployed, folder)
    return folder


def write_save(model, folder):
    qatpatch.save(model, folder)


def write_modelopt(model, folder):
    qatpatch.export(model, folder, format="modelopt")


def write_comfy(model, folder):
    qatpatch.export(model, folder / "model.safetensors", format="comfy")


@pytest.mark.parametrize("write", [write_save, write_modelopt, write_comfy])
def test_a_full_disk_leaves_the_old_files_and_nothing_else(write, deployed, tmp_path):
    write(deployed, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = tiny_wan(layers=1, seed=3)
    qatpatch.apply(other, input_scale="static")
    with qatpatch.calibrate(other):
        run(other, wan_inputs(other))
    qatpatch.deploy(other)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(CheckpointError, match="cannot write"):
            write(other, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("write", [write_save, write_modelopt, write_comfy])
def test_a_place_that_cannot_be_written_is_one_clear_error(write, deployed, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for place in (tmp_path / "file" / "below", Path("/proc/qatpatch")):
        with pytest.raises(CheckpointError, match="cannot write"):
            write(deployed, place)


def copy_of(saved: Path, tmp_path: Path) -> Path:
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_flipped_bits_are_refused_or_change_nothing(saved, deployed, tmp_path):
    folder = copy_of(saved, tmp_path)
    whole = (saved / WEIGHTS_NAME).read_bytes()
    data = wan_inputs(deployed)
    expected = run(deployed, data)
    (header,) = struct.unpack("<Q", whole[:8])
    chance, refused = random.Random(0), 0
    places = [chance.randrange(8 + header) for _ in range(60)] + [chance.randrange(len(whole)) for _ in range(60)]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << chance.randrange(8)
        (folder / WEIGHTS_NAME).write_bytes(changed)
        try:
            model = qatpatch.load(folder)
        except CheckpointError:
            refused += 1
        else:
            assert torch.equal(run(model, data), expected), f"bit at {place} changed the model unseen"
    assert refused > 110  # padding of the header may change


def test_truncated_files_are_refused(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    whole = (saved / WEIGHTS_NAME).read_bytes()
    chance = random.Random(1)
    for length in (0, 1, 7, 8, 9, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(30))):
        (folder / WEIGHTS_NAME).write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            qatpatch.load(folder)


def with_header(whole: bytes, change) -> bytes:
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    header = change(header) or header
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + whole[8 + length :]


def entry(header):
    return next(value for name, value in sorted(header.items()) if name != "__metadata__")


def overlap(header):
    names = sorted(n for n in header if n != "__metadata__")
    same = [n for n in names if header[n]["shape"] == header[names[0]]["shape"]]
    header[names[0]]["data_offsets"] = header[same[-1] if len(same) > 1 else names[1]]["data_offsets"]


HOSTILE = {
    "shape of a petabyte": lambda h: entry(h).update(shape=[1 << 40, 1 << 20]),
    "negative shape": lambda h: entry(h).update(shape=[-1, 5]),
    "offsets beyond the file": lambda h: entry(h).update(data_offsets=[0, 1 << 60]),
    "offsets backwards": lambda h: entry(h).update(data_offsets=[64, 0]),
    "overlapping": overlap,
    "unknown dtype": lambda h: entry(h).update(dtype="PICKLE"),
    "nested without end": lambda h: b"[" * 200_000 + b"]" * 200_000,
    "description nested without end": lambda h: h["__metadata__"].update({k: "[" * 200_000 for k in h["__metadata__"]}),
    "no description": lambda h: h.pop("__metadata__") and None,
    "not an object": lambda h: b"[1, 2, 3]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_in_bounded_memory(name, saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    (folder / WEIGHTS_NAME).write_bytes(with_header((saved / WEIGHTS_NAME).read_bytes(), HOSTILE[name]))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            qatpatch.load(folder)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_header_that_claims_to_be_huge_is_refused(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    whole = (saved / WEIGHTS_NAME).read_bytes()
    for length in (1 << 63, (1 << 64) - 1, 1 << 34):
        (folder / WEIGHTS_NAME).write_bytes(struct.pack("<Q", length) + whole[8:])
        with pytest.raises(CheckpointError):
            qatpatch.load(folder)


def described(folder: Path, change) -> None:
    """Change the description in the header, and seal it again as its writer would."""
    from qatpatch import checkpoint

    def edit(header):
        (key,) = header["__metadata__"]
        description = json.loads(header["__metadata__"][key])
        change(description)
        description.pop("digest", None)
        description["digest"] = checkpoint._digest(description)
        header["__metadata__"][key] = json.dumps(description)

    file = folder / WEIGHTS_NAME
    file.write_bytes(with_header(file.read_bytes(), edit))


CLASSES = ("os.system", "subprocess.Popen", "DiffusionPipeline", "torch.nn.Linear", "../../x", "", 5, None, ["a"])


@pytest.mark.parametrize("name", CLASSES, ids=str)
def test_a_description_cannot_name_any_class(name, saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    described(folder, lambda d: d.update({"class": name}))
    with pytest.raises(CheckpointError):
        qatpatch.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["linears"].clear(),
        lambda d: next(iter(d["linears"].values())).update(shape=[1 << 40, 1 << 40]),
        lambda d: next(iter(d["linears"].values())).update(paths=["__class__.__init__"]),
        lambda d: next(iter(d["linears"].values())).update(paths=["../../x"]),
        lambda d: next(iter(d["linears"].values())).update(paths=[]),
        lambda d: next(iter(d["linears"].values()))["settings"].update(input_scale="none"),
        lambda d: next(iter(d["linears"].values()))["settings"].update(surprise=1),
        lambda d: next(iter(d["attentions"].values())).update(scheme="exact"),
        lambda d: d.update(version=10**9),
        lambda d: d.update(config={"num_layers": "many"}),
        lambda d: d.update(linears=7),
    ],
)
def test_a_description_that_does_not_hold_is_refused(change, saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    described(folder, change)
    with pytest.raises(CheckpointError):
        qatpatch.load(folder)


def test_no_pickle_is_ever_loaded(saved, tmp_path, monkeypatch):
    """A pickle under any name that a loader could try is left alone."""
    import pickle

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    folder = tmp_path / "model"
    folder.mkdir()
    copy_of(saved, folder)
    (folder / WEIGHTS_NAME).unlink()
    for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin", "model.pt", WEIGHTS_NAME):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(CheckpointError):
            qatpatch.load(folder)
        with pytest.raises(CheckpointError):
            qatpatch.load(folder / name)
    assert not (tmp_path / "exploded").exists()
    assert (folder / CONFIG_NAME).is_file()
