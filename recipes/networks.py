"""Where models come from: a tiny random LTX-2 or Wan, or a pretrained one with its VAE and text encoder.

Deliberately not here: quantization. What this module returns is plain diffusers.
"""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import diffusers
import torch
from latents import Codec, SpaceToDepth, TextEncoder, VideoVAE, WanVAE, seeded
from recipe import FAMILIES, PretrainedModel, Recipe, RecipeError, TinyModel
from safetensors import SafetensorError
from safetensors.torch import load_file

_PARTS = {
    "ltx2": ("transformer", "vae", "text_encoder", "tokenizer", "connectors"),
    "wan": ("transformer", "vae", "text_encoder", "tokenizer"),
}


def build_transformer(recipe: Recipe) -> torch.nn.Module:
    """The transformer to train: on the CPU, in train mode, every parameter trainable.

    With ``model.init: shards`` it is on meta, for `sharding.materialise` with `draw_shard`.

    Raises:
        RecipeError: the configuration does not fit the data, or the folder is no such model.
    """
    if recipe.model.kind == "tiny":
        torch.manual_seed(recipe.seed)
        with torch.device("meta") if recipe.model.init == "shards" else contextlib.nullcontext():
            model = transformer_class(recipe)(**recipe.model.config)
        if recipe.model.weights is not None:
            _read_weights(model, recipe.model.weights)
    else:
        dtype = getattr(torch, recipe.model.dtype)
        model = _load(transformer_class(recipe), recipe.model, "transformer", dtype=dtype)
    if recipe.train.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    return model.train().requires_grad_(True)


def _read_weights(model: torch.nn.Module, path: Path) -> None:
    """Replace every weight by the file's.

    Raises:
        RecipeError: the file is missing, or of a model of other names or shapes.
    """
    try:
        model.load_state_dict(load_file(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise RecipeError(
            f"model.weights {path} cannot be read into the model that model.config describes: {error}"
        ) from error


def draw_shard(generator: torch.Generator, name: str, shard: torch.Tensor) -> None:
    """Random values for the rows of a parameter that one process holds, about as large as the class would draw them."""
    if name.endswith("weight") and shard.dim() == 1:
        shard.fill_(1.0)  # norms
    elif shard.dim() > 1:
        scale = 1.0 if "scale_shift_table" in name else 1 / 3  # the variance that nn.Linear gives is 1 / (3 columns)
        shard.normal_(0.0, (scale / shard.shape[1]) ** 0.5, generator=generator)
    else:
        shard.zero_()


def transformer_class(recipe: Recipe) -> type[torch.nn.Module]:
    """diffusers' class of the transformer."""
    return getattr(diffusers, FAMILIES[recipe.model.family])


def build_codec(recipe: Recipe, device: torch.device) -> Codec:
    """Pixels to latents, as ``data.latents`` says."""
    if recipe.data.latents == "space_to_depth":
        return SpaceToDepth(recipe.data.patch, recipe.data.mean, recipe.data.std)
    wan = recipe.model.family == "wan"
    kind = diffusers.AutoencoderKLWan if wan else diffusers.AutoencoderKLLTX2Video
    # Wan's pipelines decode in float32, whatever the transformer computes in.
    dtype = torch.float32 if wan else getattr(torch, recipe.model.dtype)
    vae = _load(kind, recipe.model, "vae", dtype=dtype).eval().requires_grad_(False).to(device)
    return (WanVAE if wan else VideoVAE)(vae, text_fingerprint(recipe))


def text_fingerprint(recipe: Recipe) -> str:
    """What text embeddings depend on but the caption."""
    if recipe.model.kind == "tiny":
        return f"random/{recipe.seed}/{recipe.model.text_tokens}/{_text_widths(recipe.model)}"
    return f"{recipe.model.path}@{recipe.model.revision}/{recipe.model.text_length}/{recipe.model.dtype}"


def load_text_encoder(recipe: Recipe, device: torch.device) -> TextEncoder:
    """Captions to the tensor ``text`` (L, D) of a training sample; for LTX-2 ``audio_text``, ``text_mask`` too.

    The tiny model has no text encoder: its embedding is fixed noise, the same for every caption, with the mask of ones
    that LTX-2's pipelines pass. A pretrained one takes the text encoder and connectors of its pipeline.
    """
    if recipe.model.kind == "tiny":
        length, (width, audio_width) = recipe.model.text_tokens, _text_widths(recipe.model)
        text = torch.randn(length, width, generator=seeded(recipe.seed, "text"))
        if recipe.model.family == "wan":
            return lambda caption: {"text": text}
        audio_text = torch.randn(length, audio_width, generator=seeded(recipe.seed, "audio text"))
        return lambda caption: {"text": text, "audio_text": audio_text, "text_mask": torch.ones(length)}

    return (_wan_text if recipe.model.family == "wan" else _ltx2_text)(recipe.model, device)


def _wan_text(model: PretrainedModel, device: torch.device) -> TextEncoder:
    absent = dict.fromkeys(("transformer", "transformer_2", "vae"))
    pipe = _load(diffusers.WanPipeline, model, None, dtype=getattr(torch, model.dtype), **absent)
    pipe.text_encoder.to(device)

    @torch.no_grad()
    def encode(caption: str) -> dict[str, torch.Tensor]:
        options = dict(do_classifier_free_guidance=False, max_sequence_length=model.text_length, device=device)
        return {"text": pipe.encode_prompt(caption, **options)[0][0].float()}

    return encode


def _ltx2_text(model: PretrainedModel, device: torch.device) -> TextEncoder:
    absent = dict.fromkeys(("transformer", "vae", "audio_vae", "vocoder"))
    pipe = _load(diffusers.LTX2ImageToVideoPipeline, model, None, dtype=getattr(torch, model.dtype), **absent)
    pipe.text_encoder.to(device)
    pipe.connectors.to(device)

    @torch.no_grad()
    def encode(caption: str) -> dict[str, torch.Tensor]:
        embeddings, mask, _, _ = pipe.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=model.text_length, device=device
        )
        text, audio_text, mask = pipe.connectors(embeddings, mask)
        return {"text": text[0].float(), "audio_text": audio_text[0].float(), "text_mask": mask[0].float()}

    return encode


def _text_widths(model: TinyModel) -> tuple[int, int]:
    """Channels of the video's and the audio's text embeddings, by the transformer's arguments."""
    config = model.config
    if model.family == "wan":
        return (config.get("text_dim", 4096),) * 2
    if config.get("use_prompt_embeddings", True):
        return (config.get("caption_channels", 3840),) * 2
    return config.get("cross_attention_dim", 4096), config.get("audio_cross_attention_dim", 2048)


def release(device: torch.device) -> None:
    """Give the memory of dropped models back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _load(cls: type, model: PretrainedModel, subfolder: str | None, **options: Any) -> Any:
    """``cls.from_pretrained``, with errors that say what is missing."""
    root = Path(model.path)
    if root.is_dir() and subfolder and not (root / subfolder).is_dir():
        found = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
        raise RecipeError(
            f"model.path {root} has no folder {subfolder!r}; a diffusers {model.family} has "
            f"{', '.join(_PARTS[model.family])}, this has "
            f"{', '.join(found) or 'no folders'}"
        )
    if subfolder:
        options["subfolder"] = subfolder
    try:
        return cls.from_pretrained(model.path, revision=model.revision, use_safetensors=True, **options)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{cls.__name__} cannot be loaded from {model.path!r}: {error}. model.path is a folder in diffusers' "
            "layout or a repository on the Hugging Face hub that you can read"
        ) from error


def check_fit(recipe: Recipe, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Refuse, before the first step, latents that the transformer cannot take.

    Raises:
        RecipeError: with both sizes.
    """
    channels, wanted = batch["latents"].shape[1], model.config.in_channels
    if channels != wanted:
        if isinstance(recipe.model, TinyModel):
            advice = f"set model.config.in_channels and out_channels to {channels}"
        else:
            advice = "use data.latents: vae"
        raise RecipeError(f"the latents have {channels} channels, the transformer takes {wanted}: {advice}")
    if recipe.model.family == "wan":
        grid, patch = tuple(batch["latents"].shape[2:]), tuple(model.config.patch_size)
        if any(size % p for size, p in zip(grid, patch, strict=True)):
            raise RecipeError(
                f"the latents have {grid} frames, rows and columns, of which the transformer joins {patch}: change "
                "data.height and data.width so that they divide"
            )
        return
    if model.config.patch_size != 1 or model.config.patch_size_t != 1:
        raise RecipeError(
            "this recipe packs one latent pixel a token, as every released LTX-2 does; the transformer has patch_size "
            f"{model.config.patch_size} and patch_size_t {model.config.patch_size_t}"
        )
