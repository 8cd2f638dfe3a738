"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from models import tiny_wan

import qatpatch
from qatpatch.cli import main

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    """A dense model's directory, a deployed one's, and the directory of all."""
    root = tmp_path_factory.mktemp("cli")
    model = tiny_wan(layers=1)
    model.save_pretrained(root / "dense")
    qatpatch.apply(model, input_scale="unit")
    qatpatch.deploy(model)
    qatpatch.save(model, root / "packed")
    return root


def run(capsys, *arguments, status=0):
    """stdout and stderr of a command that ends with ``status``."""
    assert main([str(argument) for argument in arguments]) == status
    return capsys.readouterr()


class TestPlan:
    def test_it_reads_the_config_alone(self, capsys, wan, tmp_path):
        (tmp_path / "transformer").mkdir()
        (tmp_path / "transformer" / "config.json").write_bytes((wan / "dense" / "config.json").read_bytes())
        out = run(capsys, "plan", tmp_path / "transformer").out
        assert "plan for WanTransformer3DModel, profile wan: 10 linears" in out
        assert run(capsys, "plan", tmp_path).out == out  # a pipeline's directory
        data = json.loads(run(capsys, "plan", tmp_path, "--json", "--weight-only").out)
        assert data["profile"] == "wan" and len(data["linears"]) == 10
        assert data["linears"]["blocks.0.attn1.to_q"]["settings"]["activations"] is False
        data = json.loads(run(capsys, "plan", tmp_path, "--json", "--exclude", "*.ffn").out)
        assert len(data["linears"]) == 8

    def test_what_does_not_fit_is_one_error(self, capsys, wan, tmp_path):
        error = run(capsys, "plan", wan / "dense", "--profile", "wam", status=1)
        assert error.out == "" and "did you mean 'wan'" in error.err and "Traceback" not in error.err
        assert "cannot read" in run(capsys, "plan", tmp_path, status=1).err
        (tmp_path / "config.json").write_text('{"_class_name": "os"}')
        assert "no model of the installed diffusers" in run(capsys, "plan", tmp_path, status=1).err
        (tmp_path / "config.json").write_text("{}")
        assert "no config.json of a diffusers model" in run(capsys, "plan", tmp_path, status=1).err


class TestConvertAndInspect:
    def test_a_round_through_every_format(self, capsys, wan, tmp_path):
        steps = [
            ("modelopt", tmp_path / "a", []),
            ("comfy", tmp_path / "b.safetensors", []),
            ("compressed-tensors", tmp_path / "c", ["--model", wan / "dense"]),
            ("qatpatch", tmp_path / "d", []),
        ]
        source = wan / "packed"
        for format, target, more in steps:
            out = run(capsys, "convert", source, target, "--format", format, *more).out
            assert f"format {format}" in out and "nothing is wrong" in out
            data = json.loads(run(capsys, "inspect", target, "--json").out)
            assert data["format"] == format and len(data["layers"]) == 10 and data["problems"] == []
            source = target
        first, last = (qatpatch.load(wan / "packed"), qatpatch.load(tmp_path / "d"))
        assert all((a == b).all() for a, b in zip(first.state_dict().values(), last.state_dict().values(), strict=True))

    def test_json_is_all_of_stdout(self, capsys, wan, tmp_path):
        data = json.loads(run(capsys, "convert", wan / "packed", tmp_path, "--format", "modelopt", "--json").out)
        assert data["format"] == "modelopt"

    def test_problems_are_the_exit_status(self, capsys, wan, tmp_path):
        run(capsys, "convert", wan / "packed", tmp_path, "--format", "modelopt")
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"]["quant_method"] = "unknown"
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert json.loads(run(capsys, "inspect", tmp_path, "--json").out)["problems"] == []  # its header says it too
        file = tmp_path / WEIGHTS
        file.write_bytes(file.read_bytes().replace(b"quant_algo", b"quant_alga"))
        seen = run(capsys, "inspect", tmp_path, "--json", status=1)
        assert "quant_algo is None" in json.loads(seen.out)["problems"][0]
        file.write_bytes(file.read_bytes()[:-1])
        seen = run(capsys, "inspect", tmp_path, "--json", status=1)
        assert seen.out == "" and seen.err.startswith("error: ") and "truncated" in seen.err

    def test_unknown_names_suggest_the_nearest(self, capsys, wan, tmp_path):
        error = run(capsys, "convert", wan / "packed", tmp_path, "--format", "model-opt", status=1).err
        assert "did you mean 'modelopt'" in error
        assert "inspect" in run(capsys, "inspct", wan, status=2).err
        assert "--format" in run(capsys, "convert", wan / "packed", tmp_path, "--fromat", "comfy", status=2).err
        assert (
            "did you mean 'comfy'" in run(capsys, "export", wan / "dense", tmp_path, "--format", "comfi", status=1).err
        )


class TestExport:
    def test_a_dense_model_weight_only(self, capsys, wan, tmp_path):
        arguments = ("export", wan / "dense", tmp_path / "a", "--format", "modelopt", "--weight-only")
        data = json.loads(run(capsys, *arguments, "--dtype", "float32", "--json").out)
        assert len(data["layers"]) == 10 and all(layer["weight_only"] for layer in data["layers"])
        model = tiny_wan(layers=1)
        qatpatch.apply(model, activations=False)
        qatpatch.export(model, tmp_path / "b", "modelopt")
        assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()

    @pytest.mark.parametrize(
        ("source", "target"),
        [(".", "."), (".", "x.safetensors")]
        + [
            (source, t)
            for source in (".", "transformer")
            for t in ("transformer", "transformer/../transformer/x", "link")
        ],
    )
    def test_nothing_is_written_into_the_source(self, capsys, wan, tmp_path, source, target):
        """Whether the model's directory or its pipeline's is given: the dense weights there may be the only ones."""
        shutil.copytree(wan / "dense", tmp_path / "pipe" / "transformer")
        (tmp_path / "pipe" / "link").symlink_to(tmp_path / "pipe" / "transformer")
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
        format = "comfy" if target.endswith(".safetensors") else "modelopt"
        arguments = ("export", tmp_path / "pipe" / source, tmp_path / "pipe" / target, "--weight-only")
        error = run(capsys, *arguments, "--format", format, status=1).err
        assert "lies in the directory that is read" in error
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before

    def test_comfy_in_the_names_of_either(self, capsys, wan, tmp_path):
        arguments = ("export", wan / "dense", tmp_path / "a.safetensors", "--format", "comfy", "--without-input-scale")
        names = {layer["name"] for layer in json.loads(run(capsys, *arguments, "--json").out)["layers"]}
        assert "model.diffusion_model.blocks.0.self_attn.q" in names
        more = ("--diffusers-names", "--prefix", "", "--exclude", "*.ffn", "--json")
        names = {layer["name"] for layer in json.loads(run(capsys, *arguments, *more).out)["layers"]}
        assert "blocks.0.attn1.to_q" in names and len(names) == 8

    def test_what_needs_more_is_told(self, capsys, wan, tmp_path):
        target = tmp_path / "x"
        error = run(capsys, "export", wan / "dense", target, "--format", "modelopt", status=1)
        assert "qatpatch.calibrate" in error.err and error.out == "" and not target.exists()
        error = run(capsys, "export", wan / "packed", target, "--format", "modelopt", status=1)
        assert "packed already; use `qatpatch convert`" in error.err
        error = run(capsys, "export", wan / "dense", target, "--format", "modelopt", "--dtype", "int8", status=2)
        assert "--dtype int8 is none of bfloat16" in error.err


def test_help_names_every_command(capsys):
    out = run(capsys, "--help").out
    for command in ("doctor", "plan", "inspect", "convert", "export"):
        assert command in out
        assert run(capsys, command, "--help").out


def test_it_runs_as_a_module_without_a_traceback(wan, tmp_path):
    command = [sys.executable, "-m", "qatpatch", "inspect", str(tmp_path / "nowhere.safetensors"), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"error: there is no file {tmp_path / 'nowhere.safetensors'}\n"
