"""Every model that a profile ships for, in full size, as data; `profile_models` has tiny ones of them.

Only what differs from the class's defaults is written here. `LINEARS` says which layer names must
be patched, written from the models' layers, not from the profiles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

JOINT = r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
FF = r"ff(_context)?\.net\.(0\.proj|2)"
SINGLE = r"single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out)"
WAN = r"(vace_)?blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ffn\.net\.(0\.proj|2))"
LTX2_CROSS = r"audio_to_video_attn\.(to_q|to_out\.0)|video_to_audio_attn\.to_[kv]"
VIDEO_ROWS = r"attn1\.(to_[qkv]|to_out\.0)|attn2\.(to_q|to_out\.0)|ff\.net\.(0\.proj|2)"
LINEARS = {
    "ltx2": rf"transformer_blocks\.\d+\.({VIDEO_ROWS}|{LTX2_CROSS})",
    "ltx": rf"transformer_blocks\.\d+\.({VIDEO_ROWS})",
    "wan": rf"{WAN}|face_adapter\.\d+\.to_(q|k|v|out)",
    "wan_animate2": r"blocks\.\d+\.((self|cross)_attn\.(to_[qkv]|to_out\.0)|ffn\.[02])",
    "hunyuan_video": rf"transformer_blocks\.\d+\.({JOINT}|{FF})|{SINGLE}",
    "hunyuan_video15": rf"transformer_blocks\.\d+\.({JOINT}|{FF})",
    "cogvideox": r"transformer_blocks\.\d+\.(attn1\.(to_[qkv]|to_out\.0)|ff\.net\.(0\.proj|2))",
    "mochi": rf"transformer_blocks\.\d+\.(attn1\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|{FF})",
    "kandinsky5": (
        r"visual_transformer_blocks\.\d+\."
        r"((self|cross)_attention\.(to_(query|key|value)|out_layer)|feed_forward\.(in|out)_layer)"
    ),
    "cosmos": r"transformer_blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|attn2\.q_img|ff\.net\.(0\.proj|2))",
    "flux": rf"transformer_blocks\.\d+\.({JOINT}|{FF})|{SINGLE}",
    "flux2": (
        rf"transformer_blocks\.\d+\.({JOINT}|ff(_context)?\.linear_(in|out))"
        r"|single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)"
    ),
    "chroma": rf"transformer_blocks\.\d+\.({JOINT}|{FF})|{SINGLE}",
    "qwen_image": rf"transformer_blocks\.\d+\.({JOINT}|(img|txt)_mlp\.net\.(0\.proj|2))",
    "sd3": rf"transformer_blocks\.\d+\.({JOINT}|{FF}|attn2\.(to_[qkv]|to_out\.0))",
    "z_image": r"(layers|noise_refiner)\.\d+\.(attention\.(to_[qkv]|to_out\.0)|feed_forward\.w[123])",
}
LINEARS = {name: re.compile(pattern) for name, pattern in LINEARS.items()}


@dataclass(frozen=True)
class FullSize:
    """A released model: its class and configuration, its size in 10^9 parameters, and how many layers are patched."""

    title: str
    profile: str
    cls: str
    billions: float
    linears: int
    attentions: int
    config: dict[str, Any] = field(default_factory=dict)


_LTX23 = dict(
    gated_attn=True,
    audio_gated_attn=True,
    cross_attn_mod=True,
    audio_cross_attn_mod=True,
    perturbed_attn=True,
    use_prompt_embeddings=False,
)
_VACE_13B = dict(num_attention_heads=12, ffn_dim=8960, num_layers=30, vace_layers=list(range(0, 30, 2)))
_SD35 = dict(qk_norm="rms_norm")

FULL_SIZE = (
    FullSize("LTX-2", "ltx2", "LTX2VideoTransformer3DModel", 18.88, 576, 96),
    FullSize("LTX-2.3", "ltx2", "LTX2VideoTransformer3DModel", 18.99, 576, 96, _LTX23),
    FullSize(
        "LTX-2.5",
        "ltx2",
        "LTX2VideoTransformer3DModel",
        18.99,
        576,
        96,
        {**_LTX23, "ff_bias": False, "use_keyframes_abs_pos_embedding": True},
    ),
    FullSize("LTX-Video 2B", "ltx", "LTXVideoTransformer3DModel", 1.92, 224, 28),
    FullSize(
        "LTX-Video 13B",
        "ltx",
        "LTXVideoTransformer3DModel",
        13.04,
        384,
        48,
        dict(num_layers=48, attention_head_dim=128, cross_attention_dim=4096),
    ),
    FullSize(
        "Wan 2.1 T2V 1.3B",
        "wan",
        "WanTransformer3DModel",
        1.42,
        300,
        30,
        dict(num_attention_heads=12, ffn_dim=8960, num_layers=30),
    ),
    FullSize("Wan 2.1 T2V 14B, Wan 2.2 T2V A14B (each expert)", "wan", "WanTransformer3DModel", 14.29, 400, 40),
    FullSize(
        "Wan 2.1 I2V 14B",
        "wan",
        "WanTransformer3DModel",
        16.39,
        400,
        40,
        dict(in_channels=36, image_dim=1280, added_kv_proj_dim=5120),
    ),
    FullSize("Wan 2.2 I2V A14B (each expert)", "wan", "WanTransformer3DModel", 14.29, 400, 40, dict(in_channels=36)),
    FullSize(
        "Wan 2.2 TI2V 5B",
        "wan",
        "WanTransformer3DModel",
        5.0,
        300,
        30,
        dict(num_attention_heads=24, ffn_dim=14336, num_layers=30, in_channels=48, out_channels=48),
    ),
    FullSize("VACE 1.3B", "wan", "WanVACETransformer3DModel", 2.15, 450, 45, _VACE_13B),
    FullSize("VACE 14B", "wan", "WanVACETransformer3DModel", 17.34, 480, 48),
    FullSize(
        "Wan 2.2 Animate 14B", "wan", "WanAnimateTransformer3DModel", 17.27, 432, 40, dict(added_kv_proj_dim=5120)
    ),
    FullSize("Wan Animate 2", "wan_animate2", "WanAnimate2Transformer3DModel", 16.39, 400, 0),
    FullSize("HunyuanVideo", "hunyuan_video", "HunyuanVideoTransformer3DModel", 12.82, 440, 60),
    FullSize("HunyuanVideo 1.5", "hunyuan_video15", "HunyuanVideo15Transformer3DModel", 8.33, 648, 54),
    FullSize("CogVideoX 2B", "cogvideox", "CogVideoXTransformer3DModel", 1.69, 180, 0),
    FullSize(
        "CogVideoX 5B",
        "cogvideox",
        "CogVideoXTransformer3DModel",
        5.57,
        252,
        0,
        dict(num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True),
    ),
    FullSize("Mochi 1", "mochi", "MochiTransformer3DModel", 10.03, 573, 0),
    FullSize(
        "Kandinsky 5 Lite",
        "kandinsky5",
        "Kandinsky5Transformer3DModel",
        2.01,
        320,
        32,
        dict(model_dim=1792, ff_dim=7168, in_visual_dim=16, out_visual_dim=16),
    ),
    FullSize(
        "Kandinsky 5 Pro",
        "kandinsky5",
        "Kandinsky5Transformer3DModel",
        18.12,
        600,
        60,
        dict(model_dim=4096, ff_dim=16384, num_visual_blocks=60, num_text_blocks=4, axes_dims=(32, 48, 48)),
    ),
    FullSize("Cosmos 7B", "cosmos", "CosmosTransformer3DModel", 7.24, 280, 0),
    FullSize(
        "Cosmos with an image context",
        "cosmos",
        "CosmosTransformer3DModel",
        8.65,
        308,
        0,
        dict(img_context_dim_in=1024, use_crossattn_projection=True),
    ),
    FullSize("Flux.1", "flux", "FluxTransformer2DModel", 11.9, 418, 57, dict(guidance_embeds=True)),
    FullSize("Flux.2", "flux2", "Flux2Transformer2DModel", 32.22, 192, 56),
    FullSize("Chroma", "chroma", "ChromaTransformer2DModel", 8.9, 418, 57),
    FullSize("Qwen-Image", "qwen_image", "QwenImageTransformer2DModel", 20.43, 720, 60),
    FullSize(
        "Stable Diffusion 3 medium",
        "sd3",
        "SD3Transformer2DModel",
        2.03,
        285,
        0,
        dict(num_layers=24, num_attention_heads=24, caption_projection_dim=1536),
    ),
    FullSize(
        "Stable Diffusion 3.5 medium",
        "sd3",
        "SD3Transformer2DModel",
        2.24,
        337,
        0,
        dict(
            **_SD35,
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            dual_attention_layers=tuple(range(13)),
        ),
    ),
    FullSize(
        "Stable Diffusion 3.5 large",
        "sd3",
        "SD3Transformer2DModel",
        8.06,
        453,
        0,
        dict(**_SD35, num_layers=38, num_attention_heads=38, caption_projection_dim=2432),
    ),
    FullSize("Z-Image", "z_image", "ZImageTransformer2DModel", 6.15, 224, 32),
)


def on_meta(cls: str, config: dict[str, Any]) -> nn.Module:
    import diffusers

    with torch.device("meta"):
        return getattr(diffusers, cls)(**config)
