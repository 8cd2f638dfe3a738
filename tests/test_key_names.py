"""Original key names: diffusers' own conversion takes each back to the key that it came from."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanVACETransformer3DModel
from diffusers.loaders import single_file_utils
from models import tiny_ltx2, tiny_wan

from qatpatch import CheckpointError
from qatpatch.key_names import original_names


def tiny_vace():
    shape = dict(num_attention_heads=2, attention_head_dim=16, ffn_dim=32, num_layers=2, freq_dim=16, text_dim=16)
    return WanVACETransformer3DModel(in_channels=4, out_channels=4, vace_layers=[0], vace_in_channels=8, **shape)


WAN, LTX2 = (
    single_file_utils.convert_wan_transformer_to_diffusers,
    single_file_utils.convert_ltx2_transformer_to_diffusers,
)
CASES = {
    "wan": (lambda: tiny_wan(layers=1), WAN),
    "wan image to video": (lambda: tiny_wan(layers=1, image_dim=64, added_kv_proj_dim=256), WAN),
    "wan vace": (tiny_vace, WAN),
    "ltx2": (lambda: tiny_ltx2(layers=1), LTX2),
    "ltx2 gated": (
        lambda: tiny_ltx2(layers=1, gated_attn=True, audio_gated_attn=True, use_prompt_embeddings=False),
        LTX2,
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_diffusers_converts_every_original_name_back(case, prefix):
    build, convert = CASES[case]
    model = build()
    keys = list(model.state_dict())
    names = original_names(type(model).__name__, keys)
    assert len(set(names.values())) == len(keys)
    assert any(names[key] != key for key in keys)
    # Each tensor is its own key's number: not the set of keys alone must come back, but each to its own.
    checkpoint = {prefix + names[key]: torch.tensor(number) for number, key in enumerate(keys)}
    assert {k: int(t) for k, t in convert(checkpoint).items()} == {key: number for number, key in enumerate(keys)}


def test_names_that_released_files_have():
    names = original_names(
        "LTX2VideoTransformer3DModel",
        [
            "transformer_blocks.3.audio_to_video_attn.norm_q.weight",
            "audio_time_embed.emb.timestep_embedder.linear_1.bias",
            "prompt_adaln.linear.weight",
            "audio_prompt_adaln.linear.weight",
            "transformer_blocks.0.attn1.to_out.0.weight",
        ],
    )
    assert list(names.values()) == [
        "transformer_blocks.3.audio_to_video_attn.q_norm.weight",
        "audio_adaln_single.emb.timestep_embedder.linear_1.bias",
        "prompt_adaln_single.linear.weight",
        "audio_prompt_adaln_single.linear.weight",
        "transformer_blocks.0.attn1.to_out.0.weight",
    ]
    wan = original_names("WanTransformer3DModel", ["blocks.7.attn2.to_out.0.weight", "blocks.7.norm2.bias"])
    assert list(wan.values()) == ["blocks.7.cross_attn.o.weight", "blocks.7.norm3.bias"]


def test_classes_and_keys_without_an_original_are_refused():
    with pytest.raises(
        CheckpointError, match="no table of original key names for FluxTransformer2DModel.*original_names"
    ):
        original_names("FluxTransformer2DModel", ["x.weight"])
    with pytest.raises(CheckpointError, match="no original name for .*pos_embed"):
        original_names("WanTransformer3DModel", ["condition_embedder.image_embedder.pos_embed"])
