"""Wan 2.1 and 2.2 with VACE and Animate: every projection and feed-forward of the blocks, and self-attention.

A Wan 2.2 A14B pipeline has two such transformers; each is patched on its own.
"""

from __future__ import annotations

from qatpatch.profiles.common import IMAGE_ROWS, IN_BLOCKS_ONLY, SHORT_CONTEXT, under
from qatpatch.profiles.rules import Count, Profile, Rule

_LINEARS = (
    "attn1.to_q",
    "attn1.to_k",
    "attn1.to_v",
    "attn1.to_out.0",
    "attn2.to_q",
    "attn2.to_k",
    "attn2.to_v",
    "attn2.to_out.0",
    "ffn.net.0.proj",
    "ffn.net.2",
)

WAN = Profile(
    name="wan",
    models=("WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel"),
    rules=(
        Rule(match=under("blocks", *_LINEARS), action="linear"),
        Rule(match=under("vace_blocks", *_LINEARS), action="linear", optional=True),
        Rule(
            match=under("face_adapter", "to_q", "to_k", "to_v", "to_out"),
            action="linear",
            optional=True,
        ),
        Rule(match=("blocks.*.attn1",), action="attention"),
        Rule(match=("vace_blocks.*.attn1",), action="attention", optional=True),
        Rule(
            match=("blocks.*.attn2.add_k_proj", "blocks.*.attn2.add_v_proj"),
            action="skip",
            reason=IMAGE_ROWS,
        ),
        Rule(
            match=("blocks.*.attn2", "vace_blocks.*.attn2"),
            action="skip",
            reason=SHORT_CONTEXT,
        ),
        Rule(
            match=("face_adapter",),
            action="skip",
            reason="Attention to a handful of face tokens: the profile quantizes self-attention only.",
        ),
        Rule(
            match=("vace_blocks.*.proj_in", "vace_blocks.*.proj_out"),
            action="skip",
            reason="Joins the control branch to the main one; left out of the broad set.",
        ),
    ),
    counts=(
        Count(container="blocks", linears=10, attentions=1),
        Count(container="vace_blocks", linears=10, attentions=1, optional=True),
        Count(container="face_adapter", linears=4, optional=True),
    ),
    default_reason=IN_BLOCKS_ONLY,
)

_ANIMATE2_LINEARS = (
    *(
        f"{attention}.{name}"
        for attention in ("self_attn", "cross_attn")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    ),
    "ffn.0",
    "ffn.2",
)

WAN_ANIMATE2 = Profile(
    name="wan_animate2",
    models=("WanAnimate2Transformer3DModel",),
    rules=(
        Rule(match=under("blocks", *_ANIMATE2_LINEARS), action="linear"),
        Rule(match=under("blocks", "cross_attn.add_k_proj", "cross_attn.add_v_proj"), action="skip", reason=IMAGE_ROWS),
        Rule(match=under("blocks", "cross_attn"), action="skip", reason=SHORT_CONTEXT),
        Rule(
            match=under("blocks", "self_attn"),
            action="skip",
            reason="Its masks are flex attention's BlockMasks, which only diffusers' flex backend takes.",
        ),
    ),
    counts=(Count(container="blocks", linears=10),),
    default_reason=IN_BLOCKS_ONLY,
)

PROFILES = (WAN, WAN_ANIMATE2)
