"""The original names of weights: what the models were published with, where diffusers calls them otherwise.

ComfyUI and the LTX-2 packages read these. The rules invert diffusers' own conversion (``from_single_file``) for the
classes below; they are data, applied in order, each a regular expression over the whole key and its replacement, until
one fits. A key that no rule fits has the same name in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from qatpatch.errors import CheckpointError

_WAN = (
    (r"condition_embedder\.time_embedder\.linear_1\.(.+)", r"time_embedding.0.\1"),
    (r"condition_embedder\.time_embedder\.linear_2\.(.+)", r"time_embedding.2.\1"),
    (r"condition_embedder\.text_embedder\.linear_1\.(.+)", r"text_embedding.0.\1"),
    (r"condition_embedder\.text_embedder\.linear_2\.(.+)", r"text_embedding.2.\1"),
    (r"condition_embedder\.time_proj\.(.+)", r"time_projection.1.\1"),
    (r"condition_embedder\.image_embedder\.norm1\.(.+)", r"img_emb.proj.0.\1"),
    (r"condition_embedder\.image_embedder\.ff\.net\.0\.proj\.(.+)", r"img_emb.proj.1.\1"),
    (r"condition_embedder\.image_embedder\.ff\.net\.2\.(.+)", r"img_emb.proj.3.\1"),
    (r"condition_embedder\.image_embedder\.norm2\.(.+)", r"img_emb.proj.4.\1"),
    (r"scale_shift_table", r"head.modulation"),
    (r"proj_out\.(.+)", r"head.head.\1"),
    (r"(\w*blocks\.\d+)\.scale_shift_table", r"\1.modulation"),
    (r"(\w*blocks\.\d+)\.norm2\.(.+)", r"\1.norm3.\2"),
    (r"(\w*blocks\.\d+)\.norm3\.(.+)", r"\1.norm2.\2"),
    (r"(\w*blocks\.\d+)\.ffn\.net\.0\.proj\.(.+)", r"\1.ffn.0.\2"),
    (r"(\w*blocks\.\d+)\.ffn\.net\.2\.(.+)", r"\1.ffn.2.\2"),
    (r"(vace_blocks\.\d+)\.proj_in\.(.+)", r"\1.before_proj.\2"),
    (r"(vace_blocks\.\d+)\.proj_out\.(.+)", r"\1.after_proj.\2"),
    *(
        (rf"(\w*blocks\.\d+)\.{ours}\.{layer}\.(.+)", rf"\1.{theirs}.{original}.\2")
        for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for layer, original in (
            ("to_q", "q"),
            ("to_k", "k"),
            ("to_v", "v"),
            (r"to_out\.0", "o"),
            ("add_k_proj", "k_img"),
            ("add_v_proj", "v_img"),
            ("norm_added_k", "norm_k_img"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    ),
)
_LTX2 = (
    (r"proj_in\.(.+)", r"patchify_proj.\1"),
    (r"audio_proj_in\.(.+)", r"audio_patchify_proj.\1"),
    (r"time_embed\.(.+)", r"adaln_single.\1"),
    (r"audio_time_embed\.(.+)", r"audio_adaln_single.\1"),
    # LTX-2.3 and later, which from_single_file of diffusers 0.42 does not convert.
    (r"(audio_)?prompt_adaln\.(.+)", lambda m: f"{m[1] or ''}prompt_adaln_single.{m[2]}"),
    (r"av_cross_attn_video_scale_shift\.(.+)", r"av_ca_video_scale_shift_adaln_single.\1"),
    (r"av_cross_attn_video_a2v_gate\.(.+)", r"av_ca_a2v_gate_adaln_single.\1"),
    (r"av_cross_attn_audio_scale_shift\.(.+)", r"av_ca_audio_scale_shift_adaln_single.\1"),
    (r"av_cross_attn_audio_v2a_gate\.(.+)", r"av_ca_v2a_gate_adaln_single.\1"),
    (r"(.+)\.video_a2v_cross_attn_scale_shift_table", r"\1.scale_shift_table_a2v_ca_video"),
    (r"(.+)\.audio_a2v_cross_attn_scale_shift_table", r"\1.scale_shift_table_a2v_ca_audio"),
    (r"(.+)\.norm_q\.(.+)", r"\1.q_norm.\2"),
    (r"(.+)\.norm_k\.(.+)", r"\1.k_norm.\2"),
)
RULES = {"WanTransformer3DModel": _WAN, "WanVACETransformer3DModel": _WAN, "LTX2VideoTransformer3DModel": _LTX2}
# What released files of a transformer hold beside it: layers that diffusers has in a model of their own.
OTHER_COMPONENTS = {"LTX2VideoTransformer3DModel": ("video_embeddings_connector.", "audio_embeddings_connector.")}
# Keys that no conversion of diffusers knows, so that nobody can say what the original is called.
_UNKNOWN = {"WanTransformer3DModel": r"condition_embedder\.image_embedder\.pos_embed"}


def original_names(model_class: str, keys: Iterable[str]) -> dict[str, str]:
    """diffusers' key -> the original one, for all ``keys`` of a model of ``model_class``.

    Raises:
        CheckpointError: the class has no rules here, or a key has no known original.
    """
    rules = RULES.get(model_class)
    if rules is None:
        raise CheckpointError(
            f"there is no table of original key names for {model_class} (there is for {', '.join(sorted(RULES))}); "
            "original_names=False writes diffusers' names, which few readers of this format know"
        )
    unknown = _UNKNOWN.get(model_class)
    names = {}
    for key in keys:
        if unknown and re.fullmatch(unknown, key):
            raise CheckpointError(f"diffusers has no original name for {key}; original_names=False keeps its own names")
        names[key] = _original(rules, key)
    return names


def _original(rules: Iterable[tuple[str, object]], key: str) -> str:
    for pattern, replacement in rules:
        match = re.fullmatch(pattern, key)
        if match:
            return replacement(match) if callable(replacement) else match.expand(replacement)
    return key
