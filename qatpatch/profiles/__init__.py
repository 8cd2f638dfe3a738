"""Profiles: which layers of a model are patched. The types are in `rules`, the data in the files beside it.

What a profile quantizes is what the field does: the projections and feed-forwards of the blocks that the bulk of the
tokens passes, and attention among those tokens. What runs once a sample or on a handful of tokens (embeddings,
modulation, text refiners, input and output projections) saves no time and hurts most, so it stays dense.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qatpatch.errors import PlanError, nearest
from qatpatch.profiles import image, ltx, video, wan
from qatpatch.profiles.rules import Count, Profile, Rule, load_profile, matches, profile_from_dict

__all__ = ["PROFILES", "Count", "Profile", "Rule", "find_profile", "load_profile", "matches", "profile_from_dict"]

PROFILES: dict[str, Profile] = {
    profile.name: profile for profile in (*ltx.PROFILES, *wan.PROFILES, *video.PROFILES, *image.PROFILES)
}


def find_profile(profile: Profile | str | Path, class_names: Iterable[str]) -> Profile:
    """The profile that was asked for.

    Args:
        profile: a `Profile`, the name of one, a path to a TOML or YAML file, or ``"auto"``.
        class_names: the model's class and its bases, for ``"auto"``.

    Raises:
        PlanError: an unknown name, no profile for the class, or a file that is no profile.
    """
    if isinstance(profile, Profile):
        return profile
    if isinstance(profile, Path) or str(profile).endswith((".toml", ".yaml", ".yml")):
        return load_profile(profile)
    if not isinstance(profile, str):
        raise PlanError(f"profile is a name, a Profile or a file, got {type(profile).__name__}")
    class_names = tuple(class_names)
    if profile == "auto":
        for candidate in PROFILES.values():
            if set(candidate.models) & set(class_names):
                return candidate
        known = ", ".join(f"{p.name} ({', '.join(p.models)})" for p in PROFILES.values())
        raise PlanError(
            f"profile='auto' knows no profile for {class_names[0]}; there are {known}. Pass a Profile of your own, or "
            "a TOML or YAML file with one"
        )
    if profile not in PROFILES:
        raise PlanError(f"there is no profile {profile!r}{nearest(profile, ('auto', *PROFILES))}")
    return PROFILES[profile]
