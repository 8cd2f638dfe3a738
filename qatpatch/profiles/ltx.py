"""LTX-2 and LTX-Video: linears whose rows are video tokens, and attention of video tokens."""

from __future__ import annotations

from qatpatch.profiles.common import IN_BLOCKS_ONLY, SHORT_CONTEXT, under
from qatpatch.profiles.rules import Count, Profile, Rule

_BLOCK = "transformer_blocks.*"

LTX2 = Profile(
    name="ltx2",
    models=("LTX2VideoTransformer3DModel",),
    rules=(
        Rule(
            match=(f"{_BLOCK}.attn1.to_gate_logits", f"{_BLOCK}.*.to_gate_logits"),
            action="skip",
            reason="Its output has one number a head (N = 32), which FP4 GEMMs do not support.",
        ),
        Rule(
            match=(f"{_BLOCK}.audio_attn1", f"{_BLOCK}.audio_attn2", f"{_BLOCK}.audio_ff"),
            action="skip",
            reason="The audio branch stays dense: few tokens, little time, attention with head dimension 64.",
        ),
        Rule(
            match=(
                f"{_BLOCK}.audio_to_video_attn.to_q",
                f"{_BLOCK}.video_to_audio_attn.to_k",
                f"{_BLOCK}.video_to_audio_attn.to_v",
            ),
            action="linear",
            refine_only=True,
        ),
        Rule(
            match=(
                f"{_BLOCK}.attn1.to_q",
                f"{_BLOCK}.attn1.to_k",
                f"{_BLOCK}.attn1.to_v",
                f"{_BLOCK}.attn1.to_out.0",
                f"{_BLOCK}.attn2.to_q",
                f"{_BLOCK}.attn2.to_out.0",
                f"{_BLOCK}.audio_to_video_attn.to_out.0",
                f"{_BLOCK}.ff.net.0.proj",
                f"{_BLOCK}.ff.net.2",
            ),
            action="linear",
        ),
        Rule(match=(f"{_BLOCK}.attn1", f"{_BLOCK}.attn2"), action="attention"),
        Rule(
            match=(f"{_BLOCK}.attn2.to_k", f"{_BLOCK}.attn2.to_v"),
            action="skip",
            reason="Its rows are text tokens: little time, and the text context is sensitive.",
        ),
        Rule(
            match=(f"{_BLOCK}.audio_to_video_attn", f"{_BLOCK}.video_to_audio_attn"),
            action="skip",
            reason="Cross-modal with head dimension 64, or with rows that are audio tokens: stays dense.",
        ),
        Rule(
            match=("time_embed.linear",),
            action="skip",
            reason=(
                "Timestep modulation steers every block; FastVideo lists it without attaching it, "
                "Lightricks excludes it."
            ),
        ),
    ),
    counts=(Count(container="transformer_blocks", linears=12, attentions=2),),
    mask_arguments=("encoder_attention_mask", "audio_encoder_attention_mask", "video_self_attention_mask"),
    default_reason="Outside the video path of the blocks (embeddings, modulation, input and output projections).",
)

LTX = Profile(
    name="ltx",
    models=("LTXVideoTransformer3DModel",),
    rules=(
        Rule(
            match=under(
                "transformer_blocks",
                *("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "attn2.to_q", "attn2.to_out.0"),
                *("ff.net.0.proj", "ff.net.2"),
            ),
            action="linear",
        ),
        Rule(match=under("transformer_blocks", "attn1"), action="attention"),
        Rule(
            match=under("transformer_blocks", "attn2.to_k", "attn2.to_v"),
            action="skip",
            reason="Its rows are text tokens: little time, and the text context is sensitive.",
        ),
        Rule(match=under("transformer_blocks", "attn2"), action="skip", reason=SHORT_CONTEXT),
    ),
    counts=(Count(container="transformer_blocks", linears=8, attentions=1),),
    default_reason=IN_BLOCKS_ONLY,
)

PROFILES = (LTX2, LTX)
