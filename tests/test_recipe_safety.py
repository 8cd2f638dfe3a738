"""A recipe is a value: whatever stands in one, it runs and imports nothing, and the error says what is wrong.

Each attack would create a file, ``fired``, or import the module ``planted``, which creates it. The last test checks
that both alarms ring.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from test_patch import ANY_LINEAR
from test_recipe_schema import RECIPES, VALID

sys.path.insert(0, str(RECIPES))

import networks
import torch
import train
from clips import locate
from latents import all_clips
from recipe import Clip, Recipe, RecipeError, load_recipe

import qatpatch
from qatpatch import PlanError, load_profile


@pytest.fixture
def fired(tmp_path, monkeypatch):
    """The file that an attack would leave; the test fails where it is there in the end."""
    file = tmp_path / "fired"
    (tmp_path / "planted.py").write_text(f"open({str(file)!r}, 'w').close()\nclass Model: pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield file
    sys.modules.pop("planted", None)
    assert not file.exists()


def tags(file) -> list[str]:
    """YAML values that a loader of Python objects would run."""
    return [
        f"!!python/object/apply:os.mkdir ['{file}']",
        f"!!python/object/apply:subprocess.check_output [['touch', '{file}']]",
        f"!!python/object/new:os.mkdir ['{file}']",
        "!!python/object:planted.Model {}",
        "!!python/name:planted.Model",
        "!!python/module:planted",
        f'!!python/object/apply:eval [\'open("{file}", "w")\']',
        "!planted.Model {}",
    ]


@pytest.mark.parametrize("number", range(8))
def test_tags_of_python_objects_are_no_yaml_here(number, fired):
    value = tags(fired)[number]
    recipe, profile = Path("mine.yaml"), Path("profile.yaml")
    for text in (f"{yaml.safe_dump(VALID)}seed: {value}\n", value, f"{value}: 1\n"):
        recipe.write_text(text, encoding="utf-8")
        with pytest.raises(RecipeError, match="does not parse: could not determine a constructor"):
            load_recipe(recipe)
        profile.write_text(text, encoding="utf-8")
        with pytest.raises(PlanError, match="does not parse: could not determine a constructor"):
            load_profile(profile)
    with pytest.raises(SystemExit):
        train.parse(["mine.yaml", "--set", f"seed={value}"])


def recipe_with(key: str, value) -> Path:
    data = deepcopy(VALID)
    *sections, last = key.split(".")
    target = data
    for section in sections:
        target = target.setdefault(section, {})
    target[last] = value
    path = Path("mine.yaml")
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


# Every key whose value is a name of something; what else may stand there is typed.
NAMES = (
    "model.kind", "model.family", "model.init", "data.latents", "quantization.profile", "quantization.input_scale",
    "quantization.global_scale", "quantization.backward", "quantization.infer_kernel", "flow.given", "flow.prediction",
    "flow.sigmas", "flow.shift", "train.schedule", "train.target", "train.optimizer", "train.mixed_precision",
    "train.device", "parallel.sharding",
)  # fmt: skip
# What tools with dotted targets, templates or shells in their configurations would run.
VALUES = ("planted.Model", "planted:Model", "planted", "${planted}", "$(touch fired)", "`touch fired`", "{{ planted }}")


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", NAMES)
def test_names_are_choices_and_no_import_paths(key, value, fired):
    with pytest.raises(RecipeError, match=key.replace(".", r"\.")):
        load_recipe(recipe_with(key, value))
    assert "planted" not in sys.modules


@pytest.mark.parametrize("value", VALUES)
def test_a_target_is_an_architecture(value, fired):
    recipe = load_recipe(recipe_with("quantization.target", value))
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    with pytest.raises(PlanError, match="is no architecture"):
        qatpatch.apply(model, **{**recipe.quantization.arguments(), "profile": ANY_LINEAR})
    assert "planted" not in sys.modules


@pytest.mark.parametrize("key", ["_target_", "__class__", "class_path", "model._target_", "train.callbacks", "hooks"])
def test_keys_that_name_code_elsewhere_are_unknown(key, fired):
    with pytest.raises(RecipeError, match="unknown key"):
        load_recipe(recipe_with(key, "planted.Model"))


@pytest.mark.parametrize("name", ["__init__", "__class__", "_name_or_path", "self", "cls", "planted.Model"])
def test_the_configuration_of_a_model_holds_arguments_of_its_class(name, fired):
    with pytest.raises(RecipeError, match="has no such argument"):
        load_recipe(recipe_with("model.config", {"num_layers": 1, name: "planted.Model"}))


@pytest.mark.parametrize(
    "value", ["$(touch fired)", "${HOME}/x", "a; touch fired", "| touch fired", "../../x", "/etc/x"]
)
def test_text_stays_text(value, fired):
    """Paths and free text: nothing is expanded but a leading ~, and nothing is looked up."""
    recipe = load_recipe(recipe_with("output", value))
    assert str(recipe.output) == value
    assert load_recipe(recipe_with("name", value)).name == value
    clips = load_recipe(recipe_with("data.clips", [{"file": value, "caption": value}])).data.clips
    assert clips[0].file == str((Path.cwd() / value).resolve()) and clips[0].caption == value
    with pytest.raises(RecipeError, match="there is no video"):
        locate(clips[0])
    Path("list.jsonl").write_text(json.dumps({"file": value}) + "\n", encoding="utf-8")
    assert all_clips(load_recipe(recipe_with("data.manifest", "list.jsonl")).data)[1].file == clips[0].file


@pytest.mark.parametrize("package", ["planted", "../planted", "/tmp", "planted.Model", "os; touch fired", ""])
def test_a_clip_comes_from_an_installed_package_that_is_not_imported(package, fired):
    with pytest.raises((RecipeError, ValueError), match="package|distribution"):
        locate(Clip(file="x.mp4", package=package))
    assert "planted" not in sys.modules


@pytest.mark.parametrize("file", ["../torch/__init__.py", "/etc/passwd", "__init__.py", "METADATA"])
def test_a_package_gives_its_videos_alone(file, fired):
    with pytest.raises(RecipeError, match="has no video"):
        locate(Clip(file=file, package="torch"))


def test_what_no_memory_holds_is_refused_before_anything_prints_it(fired):
    bomb = "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}' if i else 'x'] * 9)}]\n" for i in range(9))
    for text in (bomb, yaml.safe_dump(VALID) + bomb, f"{bomb}name: *b8\n"):
        for load, error in ((load_recipe, RecipeError), (load_profile, PlanError)):
            Path("mine.yaml").write_text(text, encoding="utf-8")
            with pytest.raises(error, match="more than 100000 values") as caught:
                load("mine.yaml")
            assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"a: " + b"{b: " * 20_000, b"\xff\xfe\x00", b"a: \x00", b"a: &a [*a]"]
)
def test_what_is_no_recipe_is_one_clear_error(content, fired):
    Path("mine.yaml").write_bytes(content)
    with pytest.raises(RecipeError):
        load_recipe("mine.yaml")
    assert train.main(["mine.yaml"]) == 2
    for name in ("profile.yaml", "profile.toml"):
        Path(name).write_bytes(content)
        with pytest.raises(PlanError):
            load_profile(name)
    Path("list.jsonl").write_bytes(content)
    with pytest.raises(RecipeError):
        all_clips(load_recipe(recipe_with("data.manifest", "list.jsonl")).data)


def pretrained(index: dict) -> Recipe:
    """A recipe for a pipeline folder with this ``model_index.json``."""
    folder = Path("pipe")
    (folder / "text_encoder").mkdir(parents=True, exist_ok=True)
    index = {"_class_name": "LTX2ImageToVideoPipeline", "_diffusers_version": "0.42.0", **index}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    path = recipe_with("model", {"kind": "pretrained", "path": "pipe"})
    return load_recipe(path, {"data.latents": "vae"})


PARTS = {"tokenizer": ["transformers", "GemmaTokenizer"], "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}


@pytest.mark.parametrize("library", ["planted", "planted.inner", "os"])
def test_a_pipeline_folder_brings_no_library(library, fired):
    recipe = pretrained({**PARTS, "scheduler": [library, "Model"]})
    with pytest.raises(RecipeError, match=f"cannot be loaded .*{library}"):
        networks.load_text_encoder(recipe, torch.device("cpu"))
    assert "planted" not in sys.modules


def test_a_pipeline_folder_brings_no_code(fired):
    for name in ("pipeline", "transformers", "text_encoder/transformers", "text_encoder/modeling"):
        Path("pipe", name).parent.mkdir(parents=True, exist_ok=True)
        Path("pipe", f"{name}.py").write_text(Path("planted.py").read_text(encoding="utf-8"), encoding="utf-8")
    for index in ({"text_encoder": ["transformers", "Model"]}, {"text_encoder": ["modeling", "Model"]}):
        with pytest.raises(RecipeError, match="cannot be loaded"):
            networks.load_text_encoder(pretrained({**PARTS, **index}), torch.device("cpu"))
    with pytest.raises(RecipeError, match="cannot be loaded"):
        networks.load_text_encoder(pretrained({"_class_name": ["pipeline", "Model"]}), torch.device("cpu"))


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_a_pickle_is_no_weight_file(part, fired):
    import os
    import pickle

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(fired),)

    recipe = pretrained(PARTS)
    folder = Path("pipe", part)
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    for name in ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors"):
        (folder / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(RecipeError, match="cannot be loaded"):
            if part == "vae":
                networks.build_codec(recipe, torch.device("cpu"))
            else:
                networks.build_transformer(recipe)


def test_the_alarms_ring(tmp_path, monkeypatch):
    """What the attacks would do, done: so that their silence means something."""
    file = tmp_path / "fired"
    (tmp_path / "planted.py").write_text(f"open({str(file)!r}, 'w').close()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yaml.unsafe_load("!!python/module:planted")
    sys.modules.pop("planted", None)
    assert file.exists()
    file.unlink()
    yaml.unsafe_load(tags(file)[0])
    assert file.is_dir()
