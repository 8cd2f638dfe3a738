"""The study: its verdicts on numbers worked out by hand, its windows, and every stage at a tiny size."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes" / "study"))

import run as study_run
from clips import write_video
from flow import Settings, sample_losses
from latents import SpaceToDepth
from networks import build_transformer
from plan import FULL, HELD_OUT, RECIPE, SCOPES, TINY, Task, overrides_of, tasks_of
from recipe import Clip, Data, load_recipe
from runs import checkpoints
from scores import read_log
from test_recipe_train import _fresh_accelerator  # noqa: F401
from torch._subclasses import FakeTensorMode
from verdicts import closer, difference, recovered, same_when_deployed, standard_error
from windows import Windows, held_out, stacked

STUDY = Path(study_run.__file__).parent


def test_the_standard_error_of_a_mean():
    assert standard_error([1.0, 2.0, 3.0, 4.0]) == pytest.approx(math.sqrt(5 / 3 / 4))
    assert standard_error([1.0]) == math.inf


def test_a_difference_is_paired_and_its_error_the_larger_of_two():
    """Pairs that differ by 1 exactly, whatever the losses: no error. Then seeds that disagree: theirs is larger."""
    a, b = [[3.0, 7.0], [2.0, 9.0]], [[2.0, 6.0], [1.0, 8.0]]
    assert difference(a, b) == (1.0, 0.0)
    seeds = [[1.0] * 50, [3.0] * 50]
    found, error = difference(seeds, [[0.0] * 50] * 2)
    assert (found, error) == (2.0, pytest.approx(1.0))  # sqrt(2) / sqrt(2); over the pairs it is 0.1
    pairs = [[1.0, 3.0], [1.0, 3.0]]
    assert difference(pairs, [[0.0, 0.0]] * 2)[1] == pytest.approx(math.sqrt(4 / 3 / 4))


CONTROL = [[1.0, 2.0], [1.1, 2.1], [0.9, 1.9]]


def plus(losses, *amounts):
    return [[value + amount for value in row] for row, amount in zip(losses, amounts, strict=True)]


@pytest.mark.parametrize(("left", "passed"), [(0.01, True), (0.019, True), (0.021, False), (0.2, False)])
def test_the_share_of_the_gap_decides(left, passed):
    verdict = recovered(CONTROL, plus(CONTROL, 0.1, 0.1, 0.1), plus(CONTROL, left, left, left))
    assert verdict.passed is passed
    assert verdict.figures.startswith(f"{1 - left / 0.1:.1%} (gap 0.1")


def test_a_gap_in_the_noise_is_not_judged():
    """0.1, 0.3, -0.1: a mean of 0.1 with a standard error of 0.115."""
    verdict = recovered(CONTROL, plus(CONTROL, 0.1, 0.3, -0.1), CONTROL)
    assert not verdict.passed and "no share can be judged" in verdict.figures
    assert not recovered(CONTROL, plus(CONTROL, -0.1, -0.1, -0.1), CONTROL).passed  # quantized is better: no gap


def test_every_seed_must_be_closer():
    assert closer([0.92, 0.95], [0.91, 0.94]).passed
    assert not closer([0.92, 0.94], [0.91, 0.94]).passed


def test_deployed_losses_are_compared_by_seed():
    assert same_when_deployed([[1.0, 3.0]], [[1.001, 3.0]]).passed
    assert not same_when_deployed([[1.0, 3.0], [1.0, 3.0]], [[1.0, 3.0], [1.01, 3.0]]).passed


def moving(path: Path, frames: int) -> None:
    """Every pixel of frame i is 10 i, give or take what coding loses; red is brighter on the left."""
    levels = torch.arange(frames).view(-1, 1, 1, 1).expand(frames, 3, 48, 96) * 10 / 255
    levels = levels.clone()
    levels[:, 0, :, :48] += 0.4
    write_video(path, levels, 10.0)


def windows_of(tmp_path, **changes) -> Windows:
    moving(tmp_path / "v.mp4", 20)
    data = Data(
        clips=(Clip(file=str(tmp_path / "v.mp4")),), frames=3, height=32, width=48, latents="space_to_depth", patch=16
    )
    options = dict(heights=(32, 48, 999), text={"text": torch.ones(2)}, count=200, seed=0)
    return Windows(data, SpaceToDepth(16), **{**options, **changes})


def test_windows_are_a_function_of_seed_and_index(tmp_path):
    one, two = windows_of(tmp_path), windows_of(tmp_path, seed=1)
    assert len(one) == 200 and len(one.videos) == 2  # a video is never scaled up
    again = windows_of(tmp_path)
    assert all(torch.equal(one[i]["latents"], again[i]["latents"]) for i in range(20))
    assert sum(torch.equal(one[i]["latents"], two[i]["latents"]) for i in range(20)) == 0


def test_windows_are_frames_of_the_video_in_either_direction_at_both_strides(tmp_path):
    windows, steps = windows_of(tmp_path), set()
    for index in range(100):
        frames = windows.codec.decode(windows[index]["latents"])
        assert frames.shape == (3, 3, 32, 48)
        levels = frames.mean((2, 3)).amin(1) * 255 / 10
        moved = (levels[1:] - levels[:-1]).round().int().tolist()
        assert moved[0] == moved[1]
        stride = abs(moved[0])
        assert float(windows[index]["rate"]) == pytest.approx(10 / stride)
        steps.add(moved[0])
    assert steps == {-2, -1, 1, 2}


def test_held_out_windows_span_the_clip(tmp_path):
    moving(tmp_path / "v.mp4", 20)
    clip = Clip(file=str(tmp_path / "v.mp4"))
    data = Data(clips=(clip,), frames=3, height=48, width=96, latents="space_to_depth", patch=16)
    samples = held_out(clip, data, SpaceToDepth(16), {}, 4)
    firsts = [round(float(sample["frames"][0, 2].mean()) * 255 / 10) for sample in samples]
    lasts = [round(float(sample["frames"][-1, 2].mean()) * 255 / 10) for sample in samples]
    assert firsts == [0, 5, 11, 15] and lasts == [2, 9, 13, 19]
    assert torch.allclose(SpaceToDepth(16).decode(samples[1]["latents"]), samples[1]["frames"], atol=1e-6)


def test_the_held_out_clip_is_never_trained_on():
    recipe = load_recipe(RECIPE, FULL.base)
    names = {clip.file for clip in recipe.data.clips}
    assert HELD_OUT.file not in names and "carphone_distorted.mp4" not in names  # the same scene


def test_control_qat_and_qad_differ_in_nothing_but_what_they_are():
    weights = Path("/w.safetensors")
    control = overrides_of(Task("control", "", 1), FULL, weights)
    for kind, scope in (("qat", "linear"), ("qat", "both"), ("qad", "attention")):
        other = overrides_of(Task(kind, scope, 1), FULL, weights)
        differ = {key for key in control if control[key] != other[key]}
        assert differ <= {"quantization.linear", "quantization.attention", "train.target"}
        assert (other["train.target"] == "teacher") == (kind == "qad")
        assert (other["quantization.linear"], other["quantization.attention"]) == SCOPES[scope]
    assert len(tasks_of("qat", FULL)) == 9 and len(tasks_of("control", FULL)) == 3
    for study in (FULL, TINY):
        for stage in ("base", "control", "qat", "qad"):
            for task in tasks_of(stage, study):
                load_recipe(RECIPE, overrides_of(task, study, weights))


def test_a_stage_without_its_base_and_a_folder_of_another_study_are_refused(tmp_path, capsys):
    assert study_run.main(["--stage", "qat", "--out", str(tmp_path), "--tiny"]) == 2
    assert "run --stage base first" in capsys.readouterr().err
    assert study_run.main(["--stage", "report", "--out", str(tmp_path), "--tiny"]) == 2
    assert "not measured yet: base-0, control-0" in capsys.readouterr().err
    assert study_run.main(["--stage", "base", "--out", str(tmp_path)]) == 2
    assert "a study of other sizes" in capsys.readouterr().err


@pytest.mark.slow
def test_every_stage_at_a_tiny_size_with_a_kill_in_between(tmp_path, capsys):
    command = [sys.executable, str(STUDY / "run.py"), "--stage", "base", "--out", str(tmp_path), "--tiny"]
    base = tmp_path / "runs" / "base-0"
    environment = {**os.environ, "PYTHONPATH": str(STUDY.parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not checkpoints(base):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "measured" / "base-0.json").exists()

    def stage(name, *more):
        return study_run.main(["--stage", name, "--out", str(tmp_path), "--tiny", *more])

    assert stage("base") == 0
    assert "resume    after step" in capsys.readouterr().out
    assert [row["step"] for row in read_log(base / "metrics.jsonl")] == list(range(1, 13))
    assert stage("control", "--minutes", "0") == 3
    assert "run the same command again" in capsys.readouterr().out
    assert [stage(name) for name in ("control", "qat", "qad")] == [0, 0, 0]
    (tmp_path / "measured" / "qad-both-1.json").unlink()  # as if killed before it was written
    capsys.readouterr()
    assert stage("qad") == 0
    assert capsys.readouterr().out.count("patch  ") == 1
    assert stage("report") in (0, 1)  # the bars are for the full size

    report = tmp_path / "report"
    results = json.loads((report / "results.json").read_text())
    kinds = {(row["kind"], row["scope"], row["seed"]) for row in results["rows"]}
    packed = [(kind, scope) for kind in ("ptq", "ptq of control", "qat", "qad") for scope in SCOPES]
    dense = [(kind, "") for kind in ("still", "base", "control")]
    assert kinds == {(*variant, seed) for variant in packed + dense for seed in (0, 1)}
    pairs = TINY.pairs[0] * TINY.pairs[1]
    rows = {(row["kind"], row["scope"], row["seed"]): row for row in results["rows"]}
    assert all(len(row["losses"]) == pairs for row in results["rows"] if row["kind"] != "still")
    assert rows["base", "", 0]["losses"] != rows["base", "", 1]["losses"]
    assert rows["base", "", 0]["against_dense"]["psnr"] == [99.0, 99.0]
    for scope in SCOPES:
        assert rows["ptq", scope, 0]["losses"] != rows["base", "", 0]["losses"]
        assert rows["qat", scope, 0]["losses"] != rows["ptq of control", scope, 0]["losses"]
    # Packing changes nothing on a CPU.
    assert rows["qat", "both", 1]["before_deploy"] == rows["qat", "both", 1]["losses"]
    assert [verdict["passed"] for verdict in results["verdicts"]][2] is True
    text = (report / "study.md").read_text()
    assert text.count("| qat | both |") == 2 and "first frame held still" in text
    files = sorted(path.name for path in report.iterdir())
    pictures = ["bars.png", "base.png", "held_out.jpg", "trained_on.jpg", "training.png"]
    assert files == sorted([*pictures, "results.json", "study.md"])
    assert all((report / name).stat().st_size < 300_000 for name in pictures)


def test_the_model_of_full_size_takes_what_the_study_gives_it():
    recipe = load_recipe(RECIPE, FULL.base)
    data, codec = recipe.data, SpaceToDepth(recipe.data.patch)
    frames = torch.zeros(data.frames, 3, data.height, data.width, dtype=torch.uint8)
    text = {"text": torch.zeros(4, 64), "audio_text": torch.zeros(4, 64), "text_mask": torch.ones(4)}
    batch = stacked([{"latents": codec.encode(frames), **text, "rate": torch.tensor(25.0)}])
    with FakeTensorMode(allow_non_fake_inputs=True):  # every shape is checked, nothing is computed
        model = build_transformer(recipe)
        losses = sample_losses(model, Settings.of(recipe), batch, torch.Generator(), torch.device("cpu"))
    assert losses.shape == (1,)
    assert 90e6 < sum(parameter.numel() for parameter in model.parameters()) < 110e6
