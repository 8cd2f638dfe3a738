"""Flux.1, Flux.2, Chroma, Qwen-Image, Stable Diffusion 3, Z-Image."""

from __future__ import annotations

from qatpatch.profiles.common import IN_BLOCKS_ONLY, MODULATION, OWN_SDPA, TEXT_ROWS, joint_block, under
from qatpatch.profiles.rules import Count, Profile, Rule

_FEED_FORWARDS = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
_ATTENTIONS = Rule(match=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"), action="attention")
# Single-stream blocks: attention beside the feed-forward, whose way out (proj_out) serves both.
_FLUX_LINEARS = (
    Rule(match=under("transformer_blocks", *joint_block("attn", *_FEED_FORWARDS)), action="linear"),
    Rule(
        match=under("single_transformer_blocks", "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"),
        action="linear",
    ),
)
_FLUX_COUNTS = (
    Count(container="transformer_blocks", linears=12, attentions=1),
    Count(container="single_transformer_blocks", linears=5, attentions=1),
)

FLUX = Profile(
    name="flux",
    models=("FluxTransformer2DModel",),
    rules=(
        *_FLUX_LINEARS,
        _ATTENTIONS,
        Rule(
            match=(*under("transformer_blocks", "norm1", "norm1_context"), *under("single_transformer_blocks", "norm")),
            action="skip",
            reason=MODULATION,
        ),
    ),
    counts=_FLUX_COUNTS,
    default_reason=IN_BLOCKS_ONLY,
)

CHROMA = Profile(
    name="chroma",
    models=("ChromaTransformer2DModel",),
    rules=(*_FLUX_LINEARS, _ATTENTIONS),
    counts=_FLUX_COUNTS,
    mask_arguments=("attention_mask",),
    default_reason=IN_BLOCKS_ONLY,
)

# The projections of a single-stream block are fused with its feed-forward: one linear in, one out.
FLUX2 = Profile(
    name="flux2",
    models=("Flux2Transformer2DModel",),
    rules=(
        Rule(
            match=under(
                "transformer_blocks",
                *joint_block("attn", "ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
            ),
            action="linear",
        ),
        Rule(match=under("single_transformer_blocks", "attn.to_qkv_mlp_proj", "attn.to_out"), action="linear"),
        _ATTENTIONS,
    ),
    counts=(
        Count(container="transformer_blocks", linears=12, attentions=1),
        Count(container="single_transformer_blocks", linears=2, attentions=1),
    ),
    default_reason=IN_BLOCKS_ONLY,
)

QWEN_IMAGE = Profile(
    name="qwen_image",
    models=("QwenImageTransformer2DModel",),
    rules=(
        Rule(
            match=under(
                "transformer_blocks",
                *joint_block("attn", "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
            ),
            action="linear",
        ),
        Rule(match=under("transformer_blocks", "attn"), action="attention"),
        Rule(match=under("transformer_blocks", "img_mod", "txt_mod"), action="skip", reason=MODULATION),
    ),
    counts=(Count(container="transformer_blocks", linears=12, attentions=1),),
    mask_arguments=("encoder_hidden_states_mask",),
    default_reason=IN_BLOCKS_ONLY,
)

SD3 = Profile(
    name="sd3",
    models=("SD3Transformer2DModel",),
    rules=(
        Rule(match=under("transformer_blocks", *joint_block("attn", *_FEED_FORWARDS)), action="linear"),
        # The first blocks of 3.5 medium attend to the picture alone, too.
        Rule(
            match=under("transformer_blocks", "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0"),
            action="linear",
            optional=True,
        ),
        Rule(match=under("transformer_blocks", "attn", "attn2"), action="skip", reason=OWN_SDPA),
        Rule(match=under("transformer_blocks", "norm1", "norm1_context"), action="skip", reason=MODULATION),
    ),
    counts=(
        Count(container="transformer_blocks", linears=12, last_lacks=3, uncounted=under("transformer_blocks", "attn2")),
    ),
    default_reason=IN_BLOCKS_ONLY,
)

_Z_IMAGE_LINEARS = (
    *("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
    *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
)

Z_IMAGE = Profile(
    name="z_image",
    models=("ZImageTransformer2DModel",),
    rules=(
        Rule(match=("context_refiner",), action="skip", reason=TEXT_ROWS),
        Rule(match=(*under("layers", *_Z_IMAGE_LINEARS), *under("noise_refiner", *_Z_IMAGE_LINEARS)), action="linear"),
        Rule(match=("layers.*.attention", "noise_refiner.*.attention"), action="attention"),
        Rule(match=("layers.*.adaLN_modulation", "noise_refiner.*.adaLN_modulation"), action="skip", reason=MODULATION),
    ),
    counts=(
        Count(container="layers", linears=7, attentions=1),
        Count(container="noise_refiner", linears=7, attentions=1),
    ),
    default_reason=IN_BLOCKS_ONLY,
)

PROFILES = (FLUX, FLUX2, CHROMA, QWEN_IMAGE, SD3, Z_IMAGE)
