"""Paths that are no packed model: each says what it is, and what it says to name instead works."""

from __future__ import annotations

import pytest
import torch
from models import tiny_wan

import qatpatch
from qatpatch import CheckpointError
from qatpatch.checkpoint import INDEX_NAME
from qatpatch.inspection import inspect_file

READERS = {
    "load": qatpatch.load,
    "inspect": inspect_file,
    "convert": lambda path: qatpatch.convert(path, "never", "modelopt"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The directory of a packed model, and what lies about it."""
    root = tmp_path_factory.mktemp("misnamed")
    model = tiny_wan(layers=1)
    model.save_pretrained(root / "dense")
    model.save_pretrained(root / "dense-shards", max_shard_size="100KB")
    torch.save(model.state_dict(), root / "state.pt")
    (root / "notes.txt").write_text("hello")
    (root / "empty").mkdir()
    (root / "pickled").mkdir()
    torch.save({}, root / "pickled" / "pytorch_model.bin")
    qatpatch.apply(model, input_scale="unit")
    qatpatch.deploy(model)
    qatpatch.save(model, root / "pipeline" / "transformer")
    (root / "pipeline" / "model_index.json").write_text("{}")
    model.save_pretrained(root / "variant", variant="fp16")
    model.save_pretrained(root / "shards", max_shard_size="100KB")
    return root


CASES = {
    "pipeline/transformer/config.json": "says what a model is.*name the directory, {root}/pipeline/transformer$",
    f"shards/{INDEX_NAME}": "name the directory, {root}/shards$",
    "state.pt": "a pickle, which is never read",
    "notes.txt": "notes.txt is no .safetensors file",
    "empty": "there is no safetensors file in {root}/empty",
    "pickled": r"holds pickles \(pytorch_model.bin\)",
    "pipeline": "is a whole pipeline; name its transformer, {root}/pipeline/transformer$",
    "variant": "holds diffusion_pytorch_model.fp16.safetensors and no diffusion_pytorch_model.safetensors; name the",
    "nowhere": "there is no {root}/nowhere; ",
    "nowhere.safetensors": "there is no {root}/nowhere.safetensors; ",
    "dense": "it is a dense model.*from_pretrained, then qatpatch.apply",
    "dense-shards": "{root}/dense-shards .*it is a dense model.*from_pretrained, then qatpatch.apply",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("path", CASES)
def test_what_it_is_and_what_to_name(places, path, reader):
    message = CASES[path].format(root=places)
    if reader == "inspect" and path.startswith("dense"):  # a problem of the file, as data
        with pytest.raises(CheckpointError, match=message):
            raise CheckpointError(inspect_file(places / path).problems[0])
        return
    with pytest.raises(CheckpointError, match=message):
        READERS[reader](places / path)


@pytest.mark.parametrize("path", ["pipeline/transformer", "variant/diffusion_pytorch_model.fp16.safetensors", "shards"])
def test_what_is_named_instead_is_read(places, path, tmp_path):
    expected = qatpatch.load(places / "pipeline" / "transformer").state_dict()
    qatpatch.convert(places / path, tmp_path / "merged", "qatpatch")
    for found in (places / path, tmp_path / "merged"):
        tensors = qatpatch.load(found).state_dict()
        assert list(tensors) == list(expected) and all(torch.equal(tensors[n], t) for n, t in expected.items())
        seen = inspect_file(str(found))
        assert seen.format == "qatpatch" and seen.problems == () and len(seen.layers) == 10
        assert seen.tensors == len(expected) and seen.nbytes == sum(t.nbytes for t in expected.values())
        assert (seen.shards > 1) == (found.name == "shards") == (f", {seen.shards} shards" in str(seen))


@pytest.mark.parametrize("reader", ["load", "inspect"])
def test_a_shard_that_is_missing_is_named(places, reader, tmp_path):
    for file in (places / "shards").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    last = max(tmp_path.glob("*.safetensors"))
    last.unlink()
    with pytest.raises(CheckpointError, match=f"there is no file {last}"):
        READERS[reader](tmp_path)


def test_what_is_no_path_is_said_briefly():
    model = tiny_wan(layers=1)
    with pytest.raises(CheckpointError, match="^path is the directory of a model, got a WanTransformer3DModel$"):
        qatpatch.load(model)
    with pytest.raises(CheckpointError, match="^path is the directory of a model, got ''$"):
        qatpatch.load("")


def test_a_class_for_model_is_refused_by_the_name_of_the_argument(places):
    for path in ("pipeline/transformer", "dense"):
        with pytest.raises(CheckpointError, match="^model is the directory .*the class WanTransformer.*from_config"):
            qatpatch.load(places / path, model=type(tiny_wan(layers=1)))
