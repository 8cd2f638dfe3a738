"""Names and sentences that several profiles share."""

from __future__ import annotations

IN_BLOCKS_ONLY = "Outside the blocks (embeddings, modulation, output projection)."
SHORT_CONTEXT = "Cross attention to a short context: the profile quantizes self-attention only."
TEXT_ROWS = "Its rows are text tokens alone, before they join the others: little time, and the text is sensitive."
IMAGE_ROWS = "Its rows are the tokens of one image: little time."
MODULATION = "Modulation computed from the timestep: one row a sample, and it steers the whole block."
OWN_SDPA = (
    "Its processor calls scaled_dot_product_attention itself instead of diffusers' attention dispatch, so there is no "
    "seam to patch."
)

# An attention over the tokens of a picture or video and those of a text together, with projections for each.
JOINT_PROJECTIONS = (
    *("to_q", "to_k", "to_v", "to_out.0"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
)


def under(container: str, *names: str) -> tuple[str, ...]:
    """Patterns of ``names`` in every block of ``container``."""
    return tuple(f"{container}.*.{name}" for name in names)


def joint_block(attention: str, *feed_forwards: str) -> tuple[str, ...]:
    """The linears of a block with joint attention, and of its feed-forwards for each stream."""
    return (*(f"{attention}.{name}" for name in JOINT_PROJECTIONS), *feed_forwards)
