"""save and load: strict, atomic, self-describing."""

from __future__ import annotations

import json
import os
import struct

import pytest
import safetensors.torch
import torch
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs
from torch import nn

import qatpatch
from qatpatch import CheckpointError, Profile, Rule
from qatpatch.checkpoint import WEIGHTS_NAME

ANY_LINEAR = Profile(name="all", rules=(Rule(match=("*",), action="linear"),))


@pytest.fixture
def saved(tmp_path):
    model = tiny_wan(layers=1)
    qatpatch.apply(model)
    qatpatch.deploy(model)
    qatpatch.save(model, tmp_path / "out")
    return model, tmp_path / "out"


def header(file):
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        return json.loads(opened.read(length)), length


def rewrite(directory, *, description=None, tensors=None):
    """Write the file again with changed description or tensors."""
    file = directory / WEIGHTS_NAME
    loaded, meta = safetensors.torch.load_file(file), json.loads(header(file)[0]["__metadata__"]["qatpatch"])
    metadata = {"qatpatch": json.dumps({**meta, **(description or {})})}
    safetensors.torch.save_file({**loaded, **(tensors or {})}, file, metadata=metadata)


def drop(directory, *names):
    file = directory / WEIGHTS_NAME
    meta = header(file)[0]["__metadata__"]
    kept = {k: t for k, t in safetensors.torch.load_file(file).items() if k not in names}
    safetensors.torch.save_file(kept, file, metadata=meta)


def test_the_file_holds_packed_weights_and_no_dense_ones(saved):
    model, directory = saved
    tensors = header(directory / WEIGHTS_NAME)[0]
    entry = {k.rsplit(".", 1)[1]: v for k, v in tensors.items() if k.startswith("blocks.0.attn1.to_q.")}
    assert {k: (v["dtype"], v["shape"]) for k, v in entry.items()} == {
        "weight_packed": ("U8", [256, 128]),
        "weight_scale": ("U8", [256, 16]),
        "weight_global_scale": ("U8", [4]),
        "bias": ("F32", [256]),
    }
    config = json.loads((directory / "config.json").read_text())
    assert config["_class_name"] == "WanTransformer3DModel" and config["num_layers"] == 1
    assert len(config["quantization_config"]["linears"]) == 10
    assert sorted(os.listdir(directory)) == ["config.json", WEIGHTS_NAME]


def test_loaded_models_are_deployed_eval_models(saved):
    model, directory = saved
    loaded = qatpatch.load(directory)
    assert not loaded.training and type(loaded).__name__ == "WanTransformer3DModel"
    assert qatpatch.report(loaded).linears == qatpatch.report(model).linears
    assert not any(t.is_meta for t in (*loaded.parameters(), *loaded.buffers()))
    assert not any(p.requires_grad for p in loaded.parameters())
    for (name, ours), (other, theirs) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other and torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    with pytest.raises(qatpatch.PlanError, match="deployed already"):
        qatpatch.deploy(loaded)
    qatpatch.save(loaded, directory.parent / "again")
    assert (directory.parent / "again" / WEIGHTS_NAME).read_bytes() == (directory / WEIGHTS_NAME).read_bytes()


def test_retained_weights_are_saved_and_work(tmp_path):
    model = tiny_ltx2(layers=1)
    data = ltx2_inputs(model)
    dense = run(model, data)
    qatpatch.apply(model)
    with qatpatch.stage(model, "base"):
        base = run(model, data)
    qatpatch.deploy(model, retain_original_weights=True)
    qatpatch.save(model, tmp_path)
    loaded = qatpatch.load(tmp_path)
    with qatpatch.dense(loaded):
        assert torch.equal(run(loaded, data), dense)
    with qatpatch.stage(loaded, "base"):
        assert torch.equal(run(loaded, data), base)


def test_a_dtype_request_reaches_everything_but_packed_storage(saved):
    model, directory = saved
    loaded = qatpatch.load(directory, dtype=torch.bfloat16)
    packed = {n: b for n, b in model.named_buffers() if b.dtype is torch.uint8}
    assert all(torch.equal(b, dict(loaded.named_buffers())[n]) for n, b in packed.items())
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.isfinite(run(loaded, wan_inputs(loaded))).all()
    with pytest.raises(CheckpointError, match="float64 is not one of"):
        qatpatch.load(directory, dtype=torch.float64)


def test_other_models_load_into_an_instance_that_is_given(tmp_path):
    def build():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(60, 32), nn.GELU(), nn.Linear(32, 8))

    model, x = build(), torch.randn(5, 60)
    qatpatch.apply(model, ANY_LINEAR)
    qatpatch.deploy(model)
    qatpatch.save(model, tmp_path)
    with pytest.raises(CheckpointError, match="holds a Sequential.*pass model="):
        qatpatch.load(tmp_path)
    with torch.device("meta"):
        skeleton = build()
    assert torch.equal(qatpatch.load(tmp_path, model=skeleton)(x), model(x))
    with pytest.raises(CheckpointError, match="model= is a Linear"):
        qatpatch.load(tmp_path, model=nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="a linear of shape \\[32, 60\\]"):
        qatpatch.load(tmp_path, model=nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8)))
    with pytest.raises(CheckpointError, match="2 of the model has no bias, and the checkpoint has one"):
        qatpatch.load(tmp_path, model=nn.Sequential(nn.Linear(60, 32), nn.GELU(), nn.Linear(32, 8, bias=False)))


def test_a_bias_that_only_the_given_instance_has_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    qatpatch.apply(model, ANY_LINEAR)
    qatpatch.deploy(model)
    qatpatch.save(model, tmp_path)
    with pytest.raises(CheckpointError, match="0 of the model has a bias, and the checkpoint has none"):
        qatpatch.load(tmp_path, model=nn.Sequential(nn.Linear(64, 32)))


def test_save_refuses_what_is_not_deployed_and_names_the_way_out(tmp_path):
    model = tiny_wan(layers=1)
    with pytest.raises(CheckpointError, match="not patched(?s:.*)deploy(?s:.*)export"):
        qatpatch.save(model, tmp_path / "x")
    qatpatch.apply(model)
    with pytest.raises(CheckpointError, match="not deployed.*deploy.*export"):
        qatpatch.save(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_truncated_foreign_and_other_versions_are_refused(saved, tmp_path):
    _, directory = saved
    file = directory / WEIGHTS_NAME
    whole = file.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated or no safetensors file"):
            qatpatch.load(directory)
    file.write_bytes(whole)
    rewrite(directory, description={"version": "99"})
    with pytest.raises(CheckpointError, match="format version '99', and this qatpatch reads '1'"):
        qatpatch.load(directory)
    safetensors.torch.save_file({"weight": torch.zeros(4, dtype=torch.uint8)}, file)
    with pytest.raises(CheckpointError, match="was not written by qatpatch.save"):
        qatpatch.load(directory)
    with pytest.raises(CheckpointError, match="there is no"):
        qatpatch.load(tmp_path / "nowhere")


def test_missing_wrong_and_extra_tensors_are_refused(saved):
    _, directory = saved
    whole = (directory / WEIGHTS_NAME).read_bytes()
    key = "blocks.0.attn1.to_q."

    def refused(message):
        with pytest.raises(CheckpointError, match=message):
            qatpatch.load(directory)
        (directory / WEIGHTS_NAME).write_bytes(whole)

    drop(directory, key + "weight_scale")
    refused("takes exactly")
    drop(directory, *(key + n for n in ("weight_packed", "weight_scale", "weight_global_scale", "bias")))
    refused("Missing key")
    drop(directory, "proj_out.bias")
    refused("Missing key")
    rewrite(directory, tensors={"stranger": torch.zeros(3)})
    refused("Unexpected key")
    rewrite(directory, tensors={key + "weight": torch.zeros(256, 256)})
    refused("Dense weights do not fit")
    rewrite(directory, tensors={key + "weight_packed": torch.zeros(256, 64, dtype=torch.uint8)})
    refused("size mismatch")
    rewrite(directory, tensors={key + "weight_scale": torch.zeros(256, 16)})
    refused("must be torch.uint8")
    rewrite(directory, tensors={"proj_out.bias": torch.zeros(16, dtype=torch.float64)})
    refused("dtype torch.float64")
    (directory / "config.json").unlink()  # which would be compared first
    for damage, message in (
        ({"class": "os"}, "no model of the installed diffusers"),
        ({"class": "AutoencoderKL.__init__"}, "no model of the installed diffusers"),
        ({"linears": []}, "lacks 'linears'"),
        ({"config": {"num_layers": "x"}}, "does not build"),
    ):
        rewrite(directory, description=damage)
        refused(message)
    tensors = safetensors.torch.load_file(directory / WEIGHTS_NAME)
    safetensors.torch.save_file(tensors, directory / WEIGHTS_NAME, metadata={"qatpatch": "{"})
    refused("damaged")


def test_deployed_state_dicts_between_models_load_whole_or_not_at_all():
    def build(seed):
        model = tiny_wan(layers=1, seed=seed)
        qatpatch.apply(model)
        qatpatch.deploy(model)
        return model

    one, two = build(0), build(1)
    state = one.state_dict()
    two.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), two.state_dict().values(), strict=True))
    three = build(1)
    before = {k: v.clone() for k, v in three.state_dict().items() if k.startswith("blocks.0.attn1.to_q.")}
    broken = {k: v for k, v in state.items() if k != "blocks.0.attn1.to_q.weight_scale"}
    dense = tiny_wan(layers=1).state_dict()
    for strict in (True, False):
        for wrong in (broken, dense):
            with pytest.raises(RuntimeError, match="takes exactly"):
                three.load_state_dict(wrong, strict=strict)
            now = three.state_dict()
            assert all(torch.equal(now[k], v) for k, v in before.items())


@pytest.mark.parametrize("write", ["save", "modelopt", "compressed-tensors", "comfy", "convert"])
def test_nothing_is_written_over_dense_weights(write, tmp_path):
    """The model may come from there, and nothing brings them back."""
    model = tiny_wan(layers=1)
    model.save_pretrained(tmp_path / "dense")
    before = {name: (tmp_path / "dense" / name).read_bytes() for name in os.listdir(tmp_path / "dense")}
    qatpatch.apply(model, input_scale="unit")
    qatpatch.deploy(model)
    qatpatch.save(model, tmp_path / "packed")
    targets = [tmp_path / "dense", tmp_path / "packed"]  # replacing packed weights is fine
    if write == "comfy":
        targets = [target / WEIGHTS_NAME for target in targets]

    def to(target):
        if write == "save":
            qatpatch.save(model, target)
        elif write == "convert":
            qatpatch.convert(tmp_path / "packed", target, "modelopt")
        else:
            qatpatch.export(model, target, write)

    with pytest.raises(CheckpointError, match="not packed.*would be lost; write elsewhere"):
        to(targets[0])
    assert {name: (tmp_path / "dense" / name).read_bytes() for name in os.listdir(tmp_path / "dense")} == before
    if write != "convert":
        to(targets[1])


def test_a_directory_with_a_file_and_an_index_says_not_which_is_meant(saved):
    """save_pretrained in shards leaves an older single file where it is."""
    _, directory = saved
    other = tiny_wan(layers=1, seed=1)
    qatpatch.apply(other)
    qatpatch.deploy(other)
    other.save_pretrained(directory, max_shard_size="500KB")
    assert (directory / WEIGHTS_NAME).exists() and (directory / f"{WEIGHTS_NAME}.index.json").exists()
    for path in (directory, directory / WEIGHTS_NAME):
        with pytest.raises(CheckpointError, match="nothing says which is meant.*remove the file, or the index"):
            qatpatch.load(path)
        with pytest.raises(CheckpointError, match="nothing says which is meant"):
            qatpatch.convert(path, directory / "x", "modelopt", without_input_scale=False)
    for write in (qatpatch.save, lambda m, p: qatpatch.export(m, p, "modelopt")):
        with pytest.raises(CheckpointError, match="sharded model.*another directory"):
            write(other, directory)
    (directory / WEIGHTS_NAME).unlink()
    loaded = qatpatch.load(directory)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), other.state_dict().values(), strict=True)
    )
    with pytest.raises(CheckpointError, match="sharded model.*another directory"):
        qatpatch.export(other, directory, "modelopt")


def test_a_failed_save_leaves_the_old_files_whole(saved, monkeypatch):
    model, directory = saved
    before = {name: (directory / name).read_bytes() for name in os.listdir(directory)}

    def fails(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError, match="No space left"):
        qatpatch.save(model, directory)
    monkeypatch.undo()
    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(CheckpointError, match="No space left"):
        qatpatch.save(model, directory)
    assert {name: (directory / name).read_bytes() for name in os.listdir(directory)} == before


def test_changed_contents_are_refused(saved):
    model, directory = saved
    file = directory / WEIGHTS_NAME
    whole = file.read_bytes()
    start = 8 + header(file)[1]
    for offset in (start, (start + len(whole)) // 2, len(whole) - 1):
        file.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        with pytest.raises(CheckpointError, match="checksum differs"):
            qatpatch.load(directory)
    file.write_bytes(whole)
    state = safetensors.torch.load_file(file)
    q, k = (f"blocks.0.attn1.to_{name}.weight_packed" for name in "qk")
    rewrite(directory, tensors={q: state[k], k: state[q]})
    with pytest.raises(CheckpointError, match="checksum differs"):
        qatpatch.load(directory)
    file.write_bytes(whole)
    for change in ({"attentions": {}}, {"skipped": 3}, {"weights": "x"}, {"scheme": "zzz"}, {"computed_buffers": [1]}):
        rewrite(directory, description=change)
        with pytest.raises(CheckpointError):
            qatpatch.load(directory)
        file.write_bytes(whole)


@pytest.mark.parametrize("loader", ["load", "convert", "from_pretrained"])
def test_a_config_that_is_not_the_saved_one_is_refused(saved, loader, tmp_path):
    from diffusers import WanTransformer3DModel

    model, directory = saved
    qatpatch.register_diffusers()
    file = directory / "config.json"
    whole = json.loads(file.read_text())

    def read(**more):
        if loader == "convert":
            return qatpatch.convert(directory, tmp_path / "c.safetensors", "comfy", without_input_scale=True)
        return (
            qatpatch.load(directory) if loader == "load" else WanTransformer3DModel.from_pretrained(directory, **more)
        )

    for change in (
        {"num_layers": 2},
        {"eps": 1e-2},
        {"num_attention_heads": 4, "attention_head_dim": 64},
        {"patch_size": [1, 2, 1]},
    ):
        file.write_text(json.dumps(whole | change))
        with pytest.raises(CheckpointError, match="not the config that.*" + ".*".join(sorted(change))):
            read()
    file.write_text(json.dumps({key: value for key, value in whole.items() if key != "ffn_dim"}))
    with pytest.raises(CheckpointError, match=r"ffn_dim: .* there, 128 saved"):
        read()
    file.write_text(json.dumps(whole | {"_diffusers_version": "0.1", "_name_or_path": "x", "unheard_of": 1}))
    read()
    if loader == "from_pretrained":
        with pytest.raises(CheckpointError, match="eps: 0.5 there"):
            read(eps=0.5)
        return
    for wrong in ("[]", "{", json.dumps(whole | {"_class_name": "LTX2VideoTransformer3DModel"})):
        file.write_text(wrong)
        with pytest.raises(CheckpointError, match="config.json"):
            read()
    file.unlink()
    read()


def test_diffusers_refuses_the_files_that_it_cannot_read(saved, monkeypatch):
    from diffusers import WanTransformer3DModel
    from diffusers.quantizers import auto

    for table in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(table, "qatpatch", raising=False)  # another test of this process may have registered it
    with pytest.raises(ValueError, match="qatpatch"):
        WanTransformer3DModel.from_pretrained(saved[1])


def test_a_processor_that_was_replaced_after_deploy_is_no_silent_loss(saved):
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model, directory = saved
    before = (directory / WEIGHTS_NAME).read_bytes()
    model.blocks[0].attn1.processor = WanAttnProcessor()
    with pytest.raises(CheckpointError, match="lost its QAT attention"):
        qatpatch.save(model, directory)
    with pytest.raises(qatpatch.PlanError, match="lost its QAT attention"), qatpatch.infer_attention(model):
        pass
    assert (directory / WEIGHTS_NAME).read_bytes() == before


@pytest.mark.parametrize("arguments", [dict(path=None), dict(path=""), dict(device="foo"), dict(device="meta")])
def test_wrong_arguments_of_load_are_named(saved, arguments):
    with pytest.raises(CheckpointError, match="path is|device="):
        qatpatch.load(**{"path": saved[1], **arguments})
