"""Tiny models of every class that a profile ships for, with inputs to train them on; `models` has LTX-2 and Wan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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
