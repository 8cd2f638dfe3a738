"""Rules over names: whole components, counts on full-size models, files."""

from __future__ import annotations

import re

import pytest
import torch

import qatpatch
from qatpatch.profiles import LTX2, PROFILES, WAN, find_profile, load_profile, matches

# Written from the table of layer names, not from the profile.
LTX2_LINEARS = re.compile(
    r"^transformer_blocks\.\d+\.(attn1\.(to_q|to_k|to_v|to_out\.0)|attn2\.(to_q|to_out\.0)|audio_to_video_attn\.(to_q|to_out\.0)"
    r"|video_to_audio_attn\.(to_k|to_v)|ff\.net\.(0\.proj|2))$"
)
WAN_LINEARS = re.compile(
    r"^(vace_)?blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ffn\.net\.(0\.proj|2))$|^face_adapter\.\d+\.to_(q|k|v|out)$"
)


def on_meta(name: str, **config):
    import diffusers

    with torch.device("meta"):
        return getattr(diffusers, name)(**config)


LTX23 = dict(
    gated_attn=True,
    audio_gated_attn=True,
    cross_attn_mod=True,
    audio_cross_attn_mod=True,
    perturbed_attn=True,
)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {**LTX23, "use_prompt_adaln_single": True},
        {**LTX23, "ff_bias": False, "use_keyframes_abs_pos_embedding": True},
    ],
    ids=["2.0", "2.3", "2.5"],
)
def test_full_size_ltx2_counts(config):
    model = on_meta("LTX2VideoTransformer3DModel", **config)
    plan = qatpatch.build_plan(model)
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert plan.profile == "ltx2"
    assert set(plan.linears) == {name for name in linears if LTX2_LINEARS.match(name)}
    assert len(plan.linears) == 576
    assert set(plan.attentions) == {f"transformer_blocks.{i}.attn{j}" for i in range(48) for j in (1, 2)}
    assert plan.parameters == pytest.approx(0.68, abs=0.005)
    refine = {name.split(".", 2)[2] for name, action in plan.linears.items() if action.settings.refine_only}
    assert refine == {"audio_to_video_attn.to_q", "video_to_audio_attn.to_k", "video_to_audio_attn.to_v"}
    assert sum(action.settings.refine_only for action in plan.linears.values()) == 144
    assert set(plan.skipped) == (linears - set(plan.linears)) | {
        f"transformer_blocks.{i}.{name}"
        for i in range(48)
        for name in ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
    }
    assert all(reason.endswith(".") and len(reason.split()) >= 5 for reason in plan.skipped.values())


T2V_13B = dict(num_attention_heads=12, ffn_dim=8960, num_layers=30)
I2V_14B = dict(in_channels=36, image_dim=1280, added_kv_proj_dim=5120)
TI2V_5B = dict(num_attention_heads=24, ffn_dim=14336, num_layers=30, in_channels=48, out_channels=48)
VACE_13B = dict(num_attention_heads=12, ffn_dim=8960, num_layers=30, vace_layers=list(range(0, 30, 2)))


@pytest.mark.parametrize(
    ("name", "config", "linears", "attentions"),
    [
        ("WanTransformer3DModel", T2V_13B, 300, 30),
        ("WanTransformer3DModel", {}, 400, 40),
        ("WanTransformer3DModel", I2V_14B, 400, 40),
        ("WanTransformer3DModel", TI2V_5B, 300, 30),
        ("WanVACETransformer3DModel", VACE_13B, 450, 45),
        ("WanVACETransformer3DModel", {}, 480, 48),
        ("WanAnimateTransformer3DModel", {}, 432, 40),
    ],
)
def test_full_size_wan_counts(name, config, linears, attentions):
    model = on_meta(name, **config)
    plan = qatpatch.build_plan(model)
    names = {n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert plan.profile == "wan"
    assert set(plan.linears) == {n for n in names if WAN_LINEARS.match(n)}
    assert (len(plan.linears), len(plan.attentions)) == (linears, attentions)
    assert all(n.endswith(".attn1") for n in plan.attentions)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("blocks.1", "blocks.1.attn1.to_q", True),
        ("blocks.1", "blocks.1", True),
        ("blocks.1", "blocks.10.attn1.to_q", False),
        ("attn1", "audio_attn1.to_q", False),
        ("*.attn1", "transformer_blocks.0.audio_attn1.to_q", False),
        ("*.attn1", "transformer_blocks.0.attn1.to_q", True),
        ("transformer_blocks.*.ff.net.2", "transformer_blocks.0.audio_ff.net.2", False),
        ("*.to_v", "transformer_blocks.0.audio_to_video_attn.to_q", False),
        ("blocks.*.attn1", "vace_blocks.0.attn1", False),
    ],
)
def test_patterns_match_whole_components(pattern, name, expected):
    assert matches(pattern, name) is expected


def test_auto_picks_by_class_and_names_what_it_knows():
    assert find_profile("auto", ["Sub", "WanTransformer3DModel", "Module"]) is WAN
    with pytest.raises(qatpatch.PlanError, match="no profile for Linear.*ltx2.*wan"):
        find_profile("auto", ["Linear"])
    with pytest.raises(qatpatch.PlanError, match="did you mean 'ltx2'"):
        find_profile("ltx-2", ["Linear"])


TOML = """
scheme = "fa4"
default_reason = "Not asked for."
[[rules]]
match = ["layers.*.up"]
action = "linear"
refine_only = true
[[rules]]
match = "layers.*.down"
action = "skip"
reason = "It is small."
[[counts]]
container = "layers"
linears = 1
"""


def test_profiles_from_files(tmp_path):
    (tmp_path / "mine.toml").write_text(TOML)
    profile = load_profile(tmp_path / "mine.toml")
    assert (profile.name, profile.scheme, profile.rules[0].match) == ("mine", "fa4", ("layers.*.up",))
    assert profile.rules[0].refine_only and profile.staged and profile.counts[0].linears == 1
    (tmp_path / "mine.yaml").write_text(
        "rules:\n- {match: [layers.*.up], action: linear, refine_only: true}\n"
        "- {match: layers.*.down, action: skip, reason: It is small.}\n"
        "counts:\n- {container: layers, linears: 1}\nscheme: fa4\ndefault_reason: Not asked for.\n"
    )
    assert load_profile(tmp_path / "mine.yaml") == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules = 3", "rules is a list"),
        ("[[rules]]\nmatch = ['a']\naction = 'linaer'", "did you mean 'linear'"),
        ("[[rules]]\nmatch = ['a']\nacton = 'linear'", "did you mean 'action'"),
        ("[[rules]]\nmatch = ['a']\naction = 'skip'", "without a reason"),
        ("[[rules]]\nmatch = [1]\naction = 'linear'", "list of strings"),
        ("[[rules]]\naction = 'linear'", "match"),
        ("scheme = 'sage4'\n[[rules]]\nmatch = ['a']\naction = 'linear'", "did you mean 'sage3'"),
        ("nonsense", "does not parse"),
        ("[[counts]]\ncontainer = 'a'\nlinears = 'x'\n[[rules]]\nmatch=['a']\naction='linear'", "is a int"),
    ],
)
def test_bad_profile_files_name_the_file_and_the_fault(tmp_path, text, message):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(qatpatch.PlanError, match=message) as error:
        load_profile(file)
    assert "bad.toml" in str(error.value)
    with pytest.raises(qatpatch.PlanError, match="cannot be read"):
        load_profile(tmp_path / "missing.toml")


def test_every_skip_rule_of_the_shipped_profiles_says_why():
    assert set(PROFILES) == {"ltx2", "wan"} and PROFILES["ltx2"] is LTX2
    for profile in PROFILES.values():
        for rule in profile.rules:
            assert bool(rule.reason) == (rule.action == "skip"), rule
