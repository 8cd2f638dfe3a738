"""Tiny models of real diffusers classes, and inputs for them. Seeded, CPU, a few hundred tokens at most."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def tiny_ltx2(dtype: torch.dtype = torch.float32, *, layers: int = 2, seed: int = 0, **config: Any) -> nn.Module:
    """An LTX-2 with head dim 128 for video and 64 for audio, as the released one."""
    from diffusers import LTX2VideoTransformer3DModel

    torch.manual_seed(seed)
    settings = dict(
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=128,
        cross_attention_dim=256,
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=2,
        audio_attention_head_dim=64,
        audio_cross_attention_dim=128,
        num_layers=layers,
        caption_channels=32,
        rope_type="split",
    )
    model = LTX2VideoTransformer3DModel(**{**settings, **config})
    return _spread(model).to(dtype).eval()


def ltx2_inputs(
    model: nn.Module, *, frames: int = 3, height: int = 4, width: int = 4, batch: int = 1, text: int = 12, seed: int = 1
) -> dict[str, Any]:
    """Inputs for `tiny_ltx2`: frames * height * width video tokens, 5 audio tokens, an all-ones text mask."""
    generator = torch.Generator().manual_seed(seed)
    parameter = next(model.parameters())
    config = model.config

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(parameter.dtype)

    captions = config.caption_channels
    if not config.use_prompt_embeddings if "use_prompt_embeddings" in config else False:
        captions = config.cross_attention_dim
    return dict(
        hidden_states=noise(batch, frames * height * width, config.in_channels),
        audio_hidden_states=noise(batch, 5, config.audio_in_channels),
        encoder_hidden_states=noise(batch, text, captions),
        audio_encoder_hidden_states=noise(batch, text, captions),
        timestep=torch.full((batch,), 500.0).to(parameter.dtype),
        encoder_attention_mask=torch.ones(batch, text),
        audio_encoder_attention_mask=torch.ones(batch, text),
        num_frames=frames,
        height=height,
        width=width,
        fps=8.0,
        audio_num_frames=5,
        return_dict=False,
    )


def tiny_wan(dtype: torch.dtype = torch.float32, *, layers: int = 2, seed: int = 0, **config: Any) -> nn.Module:
    """A Wan with head dim 128."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(seed)
    settings = dict(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=128,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=64,
        ffn_dim=128,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
    )
    return _spread(WanTransformer3DModel(**{**settings, **config})).to(dtype).eval()


def wan_inputs(
    model: nn.Module, *, frames: int = 3, height: int = 8, width: int = 8, batch: int = 1, text: int = 12, seed: int = 1
) -> dict[str, Any]:
    """Inputs for `tiny_wan`: frames * height/2 * width/2 video tokens."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    return dict(
        hidden_states=torch.randn(batch, 4, frames, height, width, generator=generator).to(dtype),
        encoder_hidden_states=torch.randn(batch, text, 32, generator=generator).to(dtype),
        timestep=torch.full((batch,), 500.0),
        return_dict=False,
    )


def run(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The model's first output, without autograd."""
    with torch.no_grad():
        return model(**inputs)[0]


def _spread(model: nn.Module) -> nn.Module:
    """Give zero-initialised and constant parameters values, so that every layer matters in the output."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                continue
            if "scale_shift_table" in name or parameter.std() == 0 or parameter.numel() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model
