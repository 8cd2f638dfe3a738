"""Rules over names: whole components, counts on full-size models, files."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path

import pytest
import torch
from models import tiny_wan, wan_inputs
from profile_cases import FULL_SIZE, LINEARS, on_meta
from profile_models import TINY, UNREAD, tiny

import qatpatch
from qatpatch.profiles import PROFILES, find_profile, load_profile, matches

ROOT = Path(__file__).resolve().parent.parent


def linears_of(model):
    return {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


@pytest.mark.parametrize("case", FULL_SIZE, ids=lambda case: case.title)
def test_full_size_counts(case):
    model = on_meta(case.cls, case.config)
    plan = qatpatch.build_plan(model)
    linears = linears_of(model)
    assert round(plan.total_parameters / 1e9, 2) == case.billions
    assert plan.profile == case.profile
    assert set(plan.linears) == {name for name in linears if LINEARS[case.profile].fullmatch(name)}
    assert (len(plan.linears), len(plan.attentions)) == (case.linears, case.attentions)
    assert linears - set(plan.linears) <= set(plan.skipped)
    assert all(reason.endswith(".") and len(reason.split()) >= 5 for reason in plan.skipped.values())
    # The kernels that are not the reference serve every attention.
    assert not any(action.note for action in plan.attentions.values())


def test_every_profile_has_a_full_size_case_and_a_tiny_one():
    assert {case.profile for case in FULL_SIZE} == set(PROFILES) == set(LINEARS)
    classes = {cls for profile in PROFILES.values() for cls in profile.models}
    assert {case.cls for case in FULL_SIZE} == classes
    # LTX-2 and Wan have test files of their own, and Wan Animate 2 trains on the flex backend alone.
    elsewhere = {"LTX2VideoTransformer3DModel", "WanAnimate2Transformer3DModel"}
    assert {cls for cls, _, _ in TINY.values()} == classes - elsewhere


def test_ltx2_stages_and_attentions():
    plan = qatpatch.build_plan(on_meta("LTX2VideoTransformer3DModel", {}))
    assert set(plan.attentions) == {f"transformer_blocks.{i}.attn{j}" for i in range(48) for j in (1, 2)}
    refine = {name.split(".", 2)[2] for name, action in plan.linears.items() if action.settings.refine_only}
    assert refine == {"audio_to_video_attn.to_q", "video_to_audio_attn.to_k", "video_to_audio_attn.to_v"}
    assert sum(action.settings.refine_only for action in plan.linears.values()) == 144
    dense = {
        name for name, reason in plan.skipped.items() if name.endswith("_attn") or name[:-1].endswith("audio_attn")
    }
    assert len(dense) == 4 * 48


def first(output):
    """The first tensor of a model's output."""
    output = output[0]
    return output[0] if isinstance(output, list) else output


def run(model, inputs):
    with torch.no_grad():
        return first(model(**{**inputs, "return_dict": False}))


def gradients(model, inputs):
    model.zero_grad()
    first(model(**{**inputs, "return_dict": False})).square().mean().backward()
    grads = {name: module.weight.grad for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: grad.clone() for name, grad in grads.items() if grad is not None and grad.any()}


@pytest.mark.parametrize("name", TINY)
def test_every_model_trains_deploys_and_comes_back(name):
    model, inputs = tiny(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    classes = {path: (type(m), type(getattr(m, "processor", None))) for path, m in model.named_modules()}
    dense, dense_gradients = run(model, inputs), gradients(model, inputs)
    report = qatpatch.apply(model)
    assert set(report.linears) == {n for n in linears_of(model) if LINEARS[report.profile].fullmatch(n)}

    # Every patched weight learns, but those whose output the model itself throws away.
    learned = gradients(model.train(), inputs)
    assert all(grad.isfinite().all() for grad in learned.values())
    unread = {n for n in report.linears if re.fullmatch(UNREAD.get(name, "nothing"), n)}
    assert set(report.linears) - set(learned) == unread == set(report.linears) - set(dense_gradients)

    # Every target runs, and the quantized attention is exactly what the report says.
    audit = qatpatch.audit(model.eval(), **inputs)
    assert audit.unreached == () and not audit.stray_weights
    quantized = {call.module for call in audit.attention_calls if call.kernel != "sdpa"}
    assert quantized == set(report.attentions)

    out = run(model, inputs)
    assert 0 < (out - dense).norm() < 0.6 * dense.norm()
    deployed = copy.deepcopy(model)
    qatpatch.deploy(deployed)
    assert torch.equal(run(deployed, inputs), out)
    qatpatch.remove(model)
    assert torch.equal(run(model, inputs), dense)
    assert {path: (type(m), type(getattr(m, "processor", None))) for path, m in model.named_modules()} == classes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cogvideox", "scaled_dot_product_attention itself"),
        ("mochi", "scaled_dot_product_attention itself"),
        ("sd3", "scaled_dot_product_attention itself"),
        ("cosmos", "without a backend of its own"),
    ],
)
def test_models_without_the_seam_say_so(name, reason):
    model, _ = tiny(name)
    plan = qatpatch.build_plan(model)
    attentions = [path for path, module in model.named_modules() if hasattr(module, "processor")]
    assert attentions and not plan.attentions
    assert all(reason in plan.skipped[path] for path in attentions) and reason in str(plan)


@pytest.mark.parametrize("name", ["flux", "qwen_image", "hunyuan_video"])
def test_one_processor_for_all_attentions_is_not_shared_by_the_patch(name):
    model, inputs = tiny(name)
    shared = model.transformer_blocks[0].attn.processor
    for module in model.transformer_blocks:
        module.attn.processor = shared
    dense = run(model, inputs)
    qatpatch.apply(model, exclude=["transformer_blocks.1.attn"])
    assert model.transformer_blocks[1].attn.processor is shared
    assert model.transformer_blocks[0].attn.processor is not shared
    qatpatch.remove(model)
    assert model.transformer_blocks[0].attn.processor is shared and torch.equal(run(model, inputs), dense)


def test_fused_projections_are_refused_by_name():
    model, _ = tiny("flux")
    model.fuse_qkv_projections()
    with pytest.raises(qatpatch.PlanError, match=r"transformer_blocks.0.attn.to_q, .* fuse_qkv_projections"):
        qatpatch.build_plan(model)
    model.unfuse_qkv_projections()
    qatpatch.build_plan(model)


def test_a_head_dimension_that_no_fast_kernel_serves_is_noted():
    config = dict(TINY["flux"][1], attention_head_dim=32, axes_dims_rope=(8, 12, 12))
    plan = qatpatch.build_plan(on_meta("FluxTransformer2DModel", config))
    notes = {action.note for action in plan.attentions.values()}
    assert notes == {"head dimension 32, which only reference_attention serves, on GPUs too"}
    assert "only reference_attention" in str(plan)


def test_block_masks_are_refused_not_dropped():
    """Kandinsky 5's long videos: a sparse mask that only flex attention reads."""
    model, inputs = tiny("kandinsky5")
    tokens = 2 * 8 * 8
    sparse = dict(sta_mask=torch.ones(1, 1, tokens // 64, tokens // 64, dtype=torch.bool), P=0.9, to_fractal=False)
    inputs = {
        **inputs,
        "hidden_states": torch.randn(1, 2, 16, 16, 4),
        "visual_rope_pos": [torch.arange(2), torch.arange(8), torch.arange(8)],
        "sparse_params": sparse,
    }
    qatpatch.apply(model)
    with pytest.raises(NotImplementedError, match="attn_mask=BlockMask"):
        run(model, inputs)


def test_two_transformers_of_one_pipeline_are_patched_apart():
    """Wan 2.2 A14B: a transformer for high noise and one for low."""
    high, low = (tiny_wan(layers=1, seed=seed) for seed in (0, 1))
    data = wan_inputs(low)
    before = run(low, data)
    qatpatch.apply(high)
    with qatpatch.infer_attention(high):
        assert torch.equal(run(low, data), before)
    qatpatch.apply(low)
    with qatpatch.dense(high):
        assert not torch.equal(run(low, data), before)
    assert qatpatch.report(high).linears == qatpatch.report(low).linears


def table(page, header):
    """The rows of the Markdown table that begins with ``header``."""
    lines = page.split(header, 1)[1].splitlines()[2:]
    return [
        [c.strip() for c in line.strip("|").split("|")] for line in itertools.takewhile(lambda x: x[:1] == "|", lines)
    ]


def test_the_page_lists_what_ships():
    page = (ROOT / "docs" / "profiles.md").read_text()
    rows = table(page, "| profile | classes | linears | attentions |")
    assert [row[0] for row in rows] == [f"`{name}`" for name in PROFILES]
    for name, classes, _, attentions in rows:
        profile = PROFILES[name.strip("`")]
        assert re.findall(r"`(\w+)`", classes) == list(profile.models)
        assert any(rule.action == "attention" for rule in profile.rules) == (not attentions.startswith("none"))
    rows = table(page, "| model | profile | linears | attentions |")
    cases = [[case.title, f"`{case.profile}`", str(case.linears), str(case.attentions)] for case in FULL_SIZE]
    assert rows == cases


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
    assert find_profile("auto", ["Sub", "WanTransformer3DModel", "Module"]) is PROFILES["wan"]
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
    with pytest.raises(qatpatch.PlanError, match="a shipped profile is asked for by its name alone, profile='wan'"):
        load_profile("wan")


def test_every_skip_rule_of_the_shipped_profiles_says_why():
    for name, profile in PROFILES.items():
        assert profile.name == name
        for rule in profile.rules:
            assert bool(rule.reason) == (rule.action == "skip"), rule
