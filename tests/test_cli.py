"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from models import tiny_wan

import qatpatch
from qatpatch.cli import app, main
from qatpatch.formats import FORMATS

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
        assert error.err.endswith("From here: --weight-only\n")
        error = run(capsys, "export", wan / "dense", tmp_path / "x.safetensors", "--format", "comfy", status=1)
        assert "From here: --weight-only, or --without-input-scale for ComfyUI alone" in error.err
        error = run(capsys, "export", wan / "packed", target, "--format", "modelopt", status=1)
        assert "packed already; use `qatpatch convert`" in error.err
        error = run(capsys, "export", wan / "dense", target, "--format", "modelopt", "--dtype", "int8", status=2)
        assert "--dtype int8 is none of bfloat16" in error.err

    def test_a_file_without_scales_is_told_what_the_command_line_can_do(self, capsys, tmp_path):
        model = tiny_wan(layers=1)
        qatpatch.apply(model)
        qatpatch.deploy(model)
        qatpatch.save(model, tmp_path / "packed")
        arguments = ("convert", tmp_path / "packed", tmp_path / "x.safetensors", "--format", "comfy")
        error = run(capsys, *arguments, status=1)
        assert "on the command line --without-input-scale" in error.err and "remove" not in error.err
        run(capsys, *arguments, "--without-input-scale")


def test_packed_models_and_files_are_named_where_a_dense_directory_is_wanted(capsys, wan, tmp_path):
    error = run(capsys, "plan", wan / "packed", status=1).err
    assert "packed already; `qatpatch inspect` shows what it holds" in error
    for command in (("plan",), ("export", "--format", "modelopt", "--weight-only")):
        arguments = (
            command[0],
            wan / "dense" / "config.json",
            *([tmp_path / "x"] if command[1:] else []),
            *command[1:],
        )
        error = run(capsys, *arguments, status=1).err
        assert f"config.json is a file; name the directory with the model's config.json, {wan / 'dense'}\n" in error


def test_formats_that_a_command_takes_are_those_that_its_help_names(capsys, wan, tmp_path):
    commands = typer.main.get_command(app).commands
    for command, source, more in (("export", "dense", ("--weight-only",)), ("convert", "packed", ())):
        (option,) = (option for option in commands[command].params if option.name == "format")
        offered = set(re.split(", | or ", option.help.rstrip(".")))
        assert offered == {*FORMATS, *({"qatpatch"} if command == "convert" else ())}
        for format in offered:
            target = tmp_path / command / format / ("x.safetensors" if format == "comfy" else "x")
            run(capsys, command, wan / source, target, "--format", format, *more)


def test_version(capsys):
    assert run(capsys, "--version").out == f"qatpatch {qatpatch.__version__}\n"


def test_help_names_every_command(capsys):
    out = run(capsys, "--help").out
    for command in ("doctor", "plan", "inspect", "convert", "export"):
        assert command in out
        assert run(capsys, command, "--help").out


def test_it_runs_as_a_module_without_a_traceback(wan, tmp_path):
    command = [sys.executable, "-m", "qatpatch", "inspect", str(tmp_path / "nowhere.safetensors"), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"error: there is no {tmp_path / 'nowhere.safetensors'}; a directory that ")
    assert done.stderr.count("\n") == 1
