"""Every model that a profile ships for: full-size configurations as data, and a tiny one with inputs to train it on.

Of a full-size model only what differs from the class's defaults is written here. `LINEARS` says which layer names must
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
    """A released model: its class and configuration, and how many layers are patched."""

    title: str
    profile: str
    cls: str
    linears: int
    attentions: int
    config: dict[str, Any] = field(default_factory=dict)


_LTX23 = dict(
    gated_attn=True, audio_gated_attn=True, cross_attn_mod=True, audio_cross_attn_mod=True, perturbed_attn=True
)
_VACE_13B = dict(num_attention_heads=12, ffn_dim=8960, num_layers=30, vace_layers=list(range(0, 30, 2)))
_SD35 = dict(qk_norm="rms_norm")

FULL_SIZE = (
    FullSize("LTX-2", "ltx2", "LTX2VideoTransformer3DModel", 576, 96),
    FullSize("LTX-2.3", "ltx2", "LTX2VideoTransformer3DModel", 576, 96, {**_LTX23, "use_prompt_adaln_single": True}),
    FullSize(
        "LTX-2.5",
        "ltx2",
        "LTX2VideoTransformer3DModel",
        576,
        96,
        {**_LTX23, "ff_bias": False, "use_keyframes_abs_pos_embedding": True},
    ),
    FullSize("LTX-Video 2B", "ltx", "LTXVideoTransformer3DModel", 224, 28),
    FullSize(
        "LTX-Video 13B",
        "ltx",
        "LTXVideoTransformer3DModel",
        384,
        48,
        dict(num_layers=48, attention_head_dim=128, cross_attention_dim=4096),
    ),
    FullSize(
        "Wan 2.1 T2V 1.3B",
        "wan",
        "WanTransformer3DModel",
        300,
        30,
        dict(num_attention_heads=12, ffn_dim=8960, num_layers=30),
    ),
    FullSize("Wan 2.1 T2V 14B, Wan 2.2 T2V A14B (each expert)", "wan", "WanTransformer3DModel", 400, 40),
    FullSize(
        "Wan 2.1 I2V 14B",
        "wan",
        "WanTransformer3DModel",
        400,
        40,
        dict(in_channels=36, image_dim=1280, added_kv_proj_dim=5120),
    ),
    FullSize("Wan 2.2 I2V A14B (each expert)", "wan", "WanTransformer3DModel", 400, 40, dict(in_channels=36)),
    FullSize(
        "Wan 2.2 TI2V 5B",
        "wan",
        "WanTransformer3DModel",
        300,
        30,
        dict(num_attention_heads=24, ffn_dim=14336, num_layers=30, in_channels=48, out_channels=48),
    ),
    FullSize("VACE 1.3B", "wan", "WanVACETransformer3DModel", 450, 45, _VACE_13B),
    FullSize("VACE 14B", "wan", "WanVACETransformer3DModel", 480, 48),
    FullSize("Wan 2.2 Animate 14B", "wan", "WanAnimateTransformer3DModel", 432, 40, dict(added_kv_proj_dim=5120)),
    FullSize("Wan Animate 2", "wan_animate2", "WanAnimate2Transformer3DModel", 400, 0),
    FullSize("HunyuanVideo", "hunyuan_video", "HunyuanVideoTransformer3DModel", 440, 60),
    FullSize("HunyuanVideo 1.5", "hunyuan_video15", "HunyuanVideo15Transformer3DModel", 648, 54),
    FullSize("CogVideoX 2B", "cogvideox", "CogVideoXTransformer3DModel", 180, 0),
    FullSize(
        "CogVideoX 5B",
        "cogvideox",
        "CogVideoXTransformer3DModel",
        252,
        0,
        dict(num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True),
    ),
    FullSize("Mochi 1", "mochi", "MochiTransformer3DModel", 573, 0),
    FullSize(
        "Kandinsky 5 Lite",
        "kandinsky5",
        "Kandinsky5Transformer3DModel",
        320,
        32,
        dict(model_dim=1792, ff_dim=7168, in_visual_dim=16, out_visual_dim=16),
    ),
    FullSize(
        "Kandinsky 5 Pro",
        "kandinsky5",
        "Kandinsky5Transformer3DModel",
        600,
        60,
        dict(model_dim=4096, ff_dim=16384, num_visual_blocks=60, num_text_blocks=4, axes_dims=(32, 48, 48)),
    ),
    FullSize("Cosmos 7B", "cosmos", "CosmosTransformer3DModel", 280, 0),
    FullSize(
        "Cosmos with an image context",
        "cosmos",
        "CosmosTransformer3DModel",
        308,
        0,
        dict(img_context_dim_in=1024, use_crossattn_projection=True),
    ),
    FullSize("Flux.1", "flux", "FluxTransformer2DModel", 418, 57, dict(guidance_embeds=True)),
    FullSize("Flux.2", "flux2", "Flux2Transformer2DModel", 192, 56),
    FullSize("Chroma", "chroma", "ChromaTransformer2DModel", 418, 57),
    FullSize("Qwen-Image", "qwen_image", "QwenImageTransformer2DModel", 720, 60),
    FullSize(
        "Stable Diffusion 3 medium",
        "sd3",
        "SD3Transformer2DModel",
        285,
        0,
        dict(num_layers=24, num_attention_heads=24, caption_projection_dim=1536),
    ),
    FullSize(
        "Stable Diffusion 3.5 medium",
        "sd3",
        "SD3Transformer2DModel",
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
        453,
        0,
        dict(**_SD35, num_layers=38, num_attention_heads=38, caption_projection_dim=2432),
    ),
    FullSize("Z-Image", "z_image", "ZImageTransformer2DModel", 224, 32),
)


def on_meta(cls: str, config: dict[str, Any]) -> nn.Module:
    import diffusers

    with torch.device("meta"):
        return getattr(diffusers, cls)(**config)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


_HEADS = dict(num_attention_heads=2, attention_head_dim=64, num_layers=2)
_WAN = dict(
    **_HEADS,
    text_dim=32,
    freq_dim=32,
    ffn_dim=96,
    rope_max_seq_len=32,
)
_VIDEO = dict(hidden_states=_noise(1, 4, 2, 8, 8), timestep=torch.tensor([500.0]))
_IDS = dict(txt_ids=torch.zeros(6, 3), img_ids=torch.cartesian_prod(*[torch.arange(n) for n in (1, 4, 4)]).float())
_WAN_TEXT = dict(encoder_hidden_states=_noise(1, 6, 32))
_MASK = torch.tensor([[1, 1, 1, 1, 0, 0]])

# Layers of the last block whose output nobody reads: they get no gradient in the dense model either.
UNREAD = {
    "hunyuan_video15": r"transformer_blocks\.1\.(attn\.(add_q_proj|to_add_out)|ff_context\.net\.(0\.proj|2))",
    "mochi": r"transformer_blocks\.1\.attn1\.add_q_proj",
    "qwen_image": r"transformer_blocks\.1\.(attn\.(add_q_proj|to_add_out)|txt_mlp\.net\.(0\.proj|2))",
    "sd3": r"transformer_blocks\.1\.attn\.add_q_proj",
}

# Case -> class, configuration, inputs.
TINY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ltx": (
        "LTXVideoTransformer3DModel",
        dict(**_HEADS, in_channels=8, out_channels=8, cross_attention_dim=128, caption_channels=32),
        dict(
            hidden_states=_noise(1, 16, 8),
            encoder_hidden_states=_noise(1, 6, 32),
            timestep=torch.tensor([500.0]),
            encoder_attention_mask=_MASK,
            num_frames=1,
            height=4,
            width=4,
        ),
    ),
    "wan_vace": (
        "WanVACETransformer3DModel",
        dict(**_WAN, in_channels=4, out_channels=4, vace_layers=[0], vace_in_channels=8),
        dict(**_VIDEO, **_WAN_TEXT, control_hidden_states=_noise(1, 8, 2, 8, 8)),
    ),
    "wan_i2v": (
        "WanTransformer3DModel",
        dict(**_WAN, in_channels=4, out_channels=4, image_dim=16, added_kv_proj_dim=128, pos_embed_seq_len=None),
        dict(**_VIDEO, **_WAN_TEXT, encoder_hidden_states_image=_noise(1, 4, 16)),
    ),
    "wan_animate": (
        "WanAnimateTransformer3DModel",
        dict(
            **_WAN,
            in_channels=12,
            latent_channels=4,
            out_channels=4,
            image_dim=16,
            motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
            motion_encoder_size=16,
            motion_style_dim=8,
            motion_dim=4,
            motion_encoder_dim=16,
            face_encoder_hidden_dim=16,
            face_encoder_num_heads=2,
            inject_face_latents_blocks=2,
        ),
        dict(
            hidden_states=_noise(1, 12, 3, 8, 8),
            timestep=torch.tensor([500.0]),
            **_WAN_TEXT,
            encoder_hidden_states_image=_noise(1, 4, 16),
            pose_hidden_states=_noise(1, 4, 2, 8, 8),
            face_pixel_values=_noise(1, 3, 5, 16, 16),
        ),
    ),
    "hunyuan_video": (
        "HunyuanVideoTransformer3DModel",
        dict(
            **_HEADS,
            in_channels=4,
            out_channels=4,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=32,
            pooled_projection_dim=8,
            rope_axes_dim=(16, 24, 24),
        ),
        dict(
            **_VIDEO,
            encoder_hidden_states=_noise(1, 6, 32),
            encoder_attention_mask=_MASK,
            pooled_projections=_noise(1, 8),
            guidance=torch.tensor([1000.0]),
        ),
    ),
    "hunyuan_video15": (
        "HunyuanVideo15Transformer3DModel",
        dict(
            **_HEADS,
            in_channels=4,
            out_channels=4,
            num_refiner_layers=1,
            text_embed_dim=32,
            text_embed_2_dim=16,
            image_embed_dim=8,
            rope_axes_dim=(16, 24, 24),
        ),
        dict(
            hidden_states=_noise(1, 4, 1, 4, 4),
            timestep=torch.tensor([500.0]),
            encoder_hidden_states=_noise(1, 6, 32),
            encoder_attention_mask=_MASK,
            encoder_hidden_states_2=_noise(1, 3, 16),
            encoder_attention_mask_2=torch.tensor([[1, 1, 0]]),
            image_embeds=torch.zeros(1, 5, 8),
        ),
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        dict(
            **_HEADS,
            in_channels=4,
            out_channels=4,
            time_embed_dim=16,
            text_embed_dim=32,
            sample_width=8,
            sample_height=8,
            sample_frames=5,
            max_text_seq_length=6,
        ),
        dict(
            hidden_states=_noise(1, 2, 4, 8, 8),
            encoder_hidden_states=_noise(1, 6, 32),
            timestep=torch.tensor([500.0]),
        ),
    ),
    "mochi": (
        "MochiTransformer3DModel",
        dict(**_HEADS, in_channels=4, pooled_projection_dim=16, text_embed_dim=32, time_embed_dim=16),
        dict(**_VIDEO, encoder_hidden_states=_noise(1, 6, 32), encoder_attention_mask=_MASK.bool()),
    ),
    "kandinsky5": (
        "Kandinsky5Transformer3DModel",
        dict(
            in_text_dim=32,
            in_text_dim2=8,
            time_dim=16,
            model_dim=128,
            ff_dim=96,
            num_text_blocks=1,
            num_visual_blocks=2,
        ),
        dict(
            hidden_states=_noise(1, 2, 8, 8, 4),
            encoder_hidden_states=_noise(1, 6, 32),
            timestep=torch.tensor([500.0]),
            pooled_projections=_noise(1, 8),
            visual_rope_pos=[torch.arange(2), torch.arange(4), torch.arange(4)],
            text_rope_pos=torch.arange(6),
        ),
    ),
    "cosmos": (
        "CosmosTransformer3DModel",
        dict(
            **_HEADS,
            in_channels=4,
            out_channels=4,
            text_embed_dim=32,
            adaln_lora_dim=8,
            concat_padding_mask=False,
            max_size=(4, 16, 16),
        ),
        dict(
            **_VIDEO,
            encoder_hidden_states=_noise(1, 6, 32),
            attention_mask=None,
            fps=16,
        ),
    ),
    "flux": (
        "FluxTransformer2DModel",
        dict(
            **_HEADS,
            in_channels=4,
            num_single_layers=1,
            joint_attention_dim=32,
            pooled_projection_dim=8,
            axes_dims_rope=(16, 24, 24),
        ),
        dict(
            hidden_states=_noise(1, 16, 4),
            encoder_hidden_states=_noise(1, 6, 32),
            pooled_projections=_noise(1, 8),
            timestep=torch.tensor([0.5]),
            **_IDS,
        ),
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        dict(
            **_HEADS,
            in_channels=4,
            num_single_layers=2,
            joint_attention_dim=32,
            timestep_guidance_channels=16,
            axes_dims_rope=(16, 16, 16, 16),
        ),
        dict(
            hidden_states=_noise(1, 16, 4),
            encoder_hidden_states=_noise(1, 6, 32),
            timestep=torch.tensor([0.5]),
            guidance=torch.tensor([4.0]),
            img_ids=torch.cartesian_prod(*[torch.arange(n) for n in (1, 4, 4, 1)]),
            txt_ids=torch.zeros(6, 4),
        ),
    ),
    "chroma": (
        "ChromaTransformer2DModel",
        dict(
            **_HEADS,
            in_channels=4,
            num_single_layers=1,
            joint_attention_dim=32,
            axes_dims_rope=(16, 24, 24),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
        dict(
            hidden_states=_noise(1, 16, 4),
            encoder_hidden_states=_noise(1, 6, 32),
            timestep=torch.tensor([0.5]),
            attention_mask=torch.cat([_MASK, torch.ones(1, 16, dtype=torch.long)], 1).bool(),
            **_IDS,
        ),
    ),
    "qwen_image": (
        "QwenImageTransformer2DModel",
        dict(**_HEADS, in_channels=16, out_channels=4, joint_attention_dim=32, axes_dims_rope=(16, 24, 24)),
        dict(
            hidden_states=_noise(1, 16, 16),
            encoder_hidden_states=_noise(1, 6, 32),
            encoder_hidden_states_mask=_MASK,
            timestep=torch.tensor([0.5]),
            img_shapes=[(1, 4, 4)],
        ),
    ),
    "sd3": (
        "SD3Transformer2DModel",
        dict(
            **_HEADS,
            sample_size=8,
            in_channels=4,
            out_channels=4,
            joint_attention_dim=32,
            caption_projection_dim=128,
            pooled_projection_dim=16,
            pos_embed_max_size=8,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        dict(
            hidden_states=_noise(1, 4, 8, 8),
            encoder_hidden_states=_noise(1, 6, 32),
            pooled_projections=_noise(1, 16),
            timestep=torch.tensor([500.0]),
        ),
    ),
    "z_image": (
        "ZImageTransformer2DModel",
        dict(
            in_channels=4,
            dim=128,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=32,
            axes_dims=[16, 24, 24],
            axes_lens=[64, 32, 32],
        ),
        dict(x=[_noise(4, 1, 8, 8)], t=torch.tensor([0.5]), cap_feats=[_noise(6, 32)]),
    ),
}


def tiny(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model on the CPU with every parameter away from zero, and inputs for it."""
    import diffusers

    cls, config, inputs = TINY[name]
    torch.manual_seed(0)
    model = getattr(diffusers, cls)(**config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() == 1 or parameter.std() == 0:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.eval(), inputs
