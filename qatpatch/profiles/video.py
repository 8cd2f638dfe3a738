"""HunyuanVideo, CogVideoX, Mochi, Kandinsky 5, Cosmos."""

from __future__ import annotations

from qatpatch.profiles.common import (
    IMAGE_ROWS,
    IN_BLOCKS_ONLY,
    MODULATION,
    OWN_SDPA,
    SHORT_CONTEXT,
    TEXT_ROWS,
    joint_block,
    under,
)
from qatpatch.profiles.rules import Count, Profile, Rule

_FEED_FORWARDS = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
_REFINER = Rule(match=("context_embedder",), action="skip", reason=TEXT_ROWS)

HUNYUAN_VIDEO = Profile(
    name="hunyuan_video",
    models=("HunyuanVideoTransformer3DModel",),
    rules=(
        _REFINER,
        Rule(match=under("transformer_blocks", *joint_block("attn", *_FEED_FORWARDS)), action="linear"),
        Rule(
            match=under("single_transformer_blocks", "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"),
            action="linear",
        ),
        Rule(match=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"), action="attention"),
        Rule(
            match=(*under("transformer_blocks", "norm1", "norm1_context"), *under("single_transformer_blocks", "norm")),
            action="skip",
            reason=MODULATION,
        ),
    ),
    counts=(
        Count(container="transformer_blocks", linears=12, attentions=1),
        Count(container="single_transformer_blocks", linears=5, attentions=1),
    ),
    mask_arguments=("encoder_attention_mask",),
    default_reason=IN_BLOCKS_ONLY,
)

# Without mask_arguments: an image embedding of zeros is masked too, and no argument says so.
HUNYUAN_VIDEO15 = Profile(
    name="hunyuan_video15",
    models=("HunyuanVideo15Transformer3DModel",),
    rules=(
        _REFINER,
        Rule(match=under("transformer_blocks", *joint_block("attn", *_FEED_FORWARDS)), action="linear"),
        Rule(match=("transformer_blocks.*.attn",), action="attention"),
        Rule(match=under("transformer_blocks", "norm1", "norm1_context"), action="skip", reason=MODULATION),
    ),
    counts=(Count(container="transformer_blocks", linears=12, attentions=1),),
    default_reason=IN_BLOCKS_ONLY,
)

COGVIDEOX = Profile(
    name="cogvideox",
    models=("CogVideoXTransformer3DModel",),
    rules=(
        Rule(
            match=under(
                "transformer_blocks",
                *("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
                *("ff.net.0.proj", "ff.net.2"),
            ),
            action="linear",
        ),
        Rule(match=under("transformer_blocks", "attn1"), action="skip", reason=OWN_SDPA),
        Rule(match=under("transformer_blocks", "norm1", "norm2"), action="skip", reason=MODULATION),
    ),
    counts=(Count(container="transformer_blocks", linears=6),),
    default_reason=IN_BLOCKS_ONLY,
)

MOCHI = Profile(
    name="mochi",
    models=("MochiTransformer3DModel",),
    rules=(
        Rule(match=under("transformer_blocks", *joint_block("attn1", *_FEED_FORWARDS)), action="linear"),
        Rule(match=under("transformer_blocks", "attn1"), action="skip", reason=OWN_SDPA),
        Rule(match=under("transformer_blocks", "norm1", "norm1_context"), action="skip", reason=MODULATION),
    ),
    counts=(Count(container="transformer_blocks", linears=12, last_lacks=3),),
    default_reason=IN_BLOCKS_ONLY,
)

_KANDINSKY5_PROJECTIONS = ("to_query", "to_key", "to_value", "out_layer")

KANDINSKY5 = Profile(
    name="kandinsky5",
    models=("Kandinsky5Transformer3DModel",),
    rules=(
        Rule(match=("text_transformer_blocks",), action="skip", reason=TEXT_ROWS),
        Rule(
            match=under(
                "visual_transformer_blocks",
                *(f"self_attention.{name}" for name in _KANDINSKY5_PROJECTIONS),
                *(f"cross_attention.{name}" for name in _KANDINSKY5_PROJECTIONS),
                *("feed_forward.in_layer", "feed_forward.out_layer"),
            ),
            action="linear",
        ),
        Rule(match=under("visual_transformer_blocks", "self_attention"), action="attention"),
        Rule(match=under("visual_transformer_blocks", "cross_attention"), action="skip", reason=SHORT_CONTEXT),
        Rule(match=under("visual_transformer_blocks", "visual_modulation"), action="skip", reason=MODULATION),
    ),
    counts=(Count(container="visual_transformer_blocks", linears=10, attentions=1),),
    default_reason=IN_BLOCKS_ONLY,
)

_COSMOS_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")

COSMOS = Profile(
    name="cosmos",
    models=("CosmosTransformer3DModel",),
    rules=(
        Rule(
            match=under(
                "transformer_blocks",
                *(f"attn1.{name}" for name in _COSMOS_PROJECTIONS),
                *(f"attn2.{name}" for name in _COSMOS_PROJECTIONS),
                *("ff.net.0.proj", "ff.net.2"),
            ),
            action="linear",
        ),
        # 2.5 attends to a picture, too.
        Rule(match=under("transformer_blocks", "attn2.q_img"), action="linear", optional=True),
        Rule(match=under("transformer_blocks", "attn2.k_img", "attn2.v_img"), action="skip", reason=IMAGE_ROWS),
        Rule(
            match=under("transformer_blocks", "attn1", "attn2"),
            action="skip",
            reason=(
                "Its processor calls diffusers' attention dispatch without a backend of its own, so there is no seam "
                "that would not reach every other model too."
            ),
        ),
        Rule(match=under("transformer_blocks", "norm1", "norm2", "norm3"), action="skip", reason=MODULATION),
    ),
    counts=(Count(container="transformer_blocks", linears=10, uncounted=under("transformer_blocks", "attn2.q_img")),),
    default_reason=IN_BLOCKS_ONLY,
)

PROFILES = (HUNYUAN_VIDEO, HUNYUAN_VIDEO15, COGVIDEOX, MOCHI, KANDINSKY5, COSMOS)
