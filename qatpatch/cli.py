"""The command line: ``qatpatch COMMAND``, or ``python -m qatpatch COMMAND``.

Exit status 0: done; 1: what was looked at is wrong, or what was asked cannot be done; 2: the command is unclear.
Errors are one sentence on stderr. With ``--json`` stdout holds JSON and nothing else.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import qatpatch
from qatpatch import checkpoint, exporting, inspection, patch, plan
from qatpatch.errors import CheckpointError, KernelUnavailable, PlanError
from qatpatch.stored_models import PREFIX
from qatpatch.tensor_files import read_json_file

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ExportFormat = Annotated[str, typer.Option("--format", help="modelopt, comfy or compressed-tensors.")]
ConvertFormat = Annotated[str, typer.Option("--format", help="modelopt, comfy, compressed-tensors or qatpatch.")]
ModelDir = Annotated[Path, typer.Argument(help="A diffusers transformer: the directory with its config.json.")]
ProfileName = Annotated[str, typer.Option(help="A profile's name, or a TOML or YAML file with one.")]
Include = Annotated[list[str] | None, typer.Option(help="Pattern of further modules to patch (repeatable).")]
Exclude = Annotated[list[str] | None, typer.Option(help="Pattern of modules to leave dense (repeatable).")]
WeightOnly = Annotated[bool, typer.Option("--weight-only", help="Leave inputs unquantized (W4A16).")]
WithoutInputScale = Annotated[
    bool, typer.Option("--without-input-scale", help="comfy: let ComfyUI scale inputs on each call.")
]
DiffusersNames = Annotated[bool, typer.Option("--diffusers-names", help="comfy: keep diffusers' key names.")]
Prefix = Annotated[str, typer.Option(help="comfy: what every key begins with.")]
MetadataFrom = Annotated[
    Path | None, typer.Option(help="comfy: take over the header of this safetensors file (the original release).")
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="qatpatch")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    return 0


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """What goes wrong in a named way becomes a sentence and an exit status."""

    @functools.wraps(command)
    def run(*arguments: Any, **keywords: Any) -> None:
        try:
            command(*arguments, **keywords)
        except (PlanError, CheckpointError, KernelUnavailable, OSError) as error:
            _fail(str(error))

    return run


def _fail(message: str, status: int = 1) -> None:
    print(f"error: {inspection.printable(message)}", file=sys.stderr)
    raise typer.Exit(status)


def _version(asked: bool) -> None:
    if asked:
        print(f"qatpatch {qatpatch.__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and leave.")
    ] = False,
) -> None:
    """Patch diffusion transformers for NVFP4, and look at packed files."""


@app.command()
@_told
def doctor(
    as_json: Json = False,
    device: Annotated[list[str] | None, typer.Option(help="Only this one (repeatable): cpu, cuda:0.")] = None,
) -> None:
    """Which kernels run on this machine, and whether their numbers are right.

    Prints the environment and every kernel on every device: why it cannot run there, or what came of comparing it with
    the reference. Exit status 1 if a kernel that can run is wrong.
    """
    from qatpatch.doctor import diagnose
    from qatpatch.kernels import present_devices

    present = {str(found): found for found in present_devices()}
    missing = [name for name in device or () if name not in present]
    if missing:
        _fail(f"there is no device {', '.join(missing)} here; there is {', '.join(present)}", 2)
    devices = [present[name] for name in device] if device else None
    diagnosis = diagnose(devices, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(diagnosis.as_dict(), indent=2) if as_json else diagnosis)
    raise typer.Exit(0 if diagnosis.healthy else 1)


@app.command("plan")
@_told
def plan_(
    model_dir: ModelDir,
    profile: ProfileName = "auto",
    include: Include = None,
    exclude: Exclude = None,
    target: Annotated[str | None, typer.Option(help="Architecture whose attention is simulated: sm_120, ...")] = None,
    weight_only: WeightOnly = False,
    as_json: Json = False,
) -> None:
    """What a patch of the model would do. Only its config.json is read; no weights are needed."""
    model = checkpoint.config_skeleton(_dense_config(model_dir, "`qatpatch inspect` shows what it holds"))
    found = plan.build_plan(
        model,
        profile,
        include=include or (),
        exclude=exclude or (),
        target=target,
        activations=not weight_only,
    )
    print(json.dumps(asdict(found), indent=2) if as_json else found)


@app.command()
@_told
def inspect(
    file: Annotated[Path, typer.Argument(help="A packed safetensors file, or the directory with one.")],
    as_json: Json = False,
) -> None:
    """What a packed file holds: format, layers, scales, and everything that is wrong. Exit status 1 if anything is."""
    found = inspection.inspect_file(file)
    _show(found, as_json)
    raise typer.Exit(1 if found.problems else 0)


@app.command()
@_told
def convert(
    source: Annotated[Path, typer.Argument(help="A packed file of any format, or the directory with one.")],
    target: Annotated[Path, typer.Argument(help="A .safetensors file for comfy, else a directory.")],
    format: ConvertFormat,
    model: Annotated[
        Path | None, typer.Option(help="Directory with the config.json of the model, where the source has none.")
    ] = None,
    without_input_scale: WithoutInputScale = False,
    diffusers_names: DiffusersNames = False,
    prefix: Prefix = PREFIX,
    metadata_from: MetadataFrom = None,
    as_json: Json = False,
) -> None:
    """Turn a packed file into another format, bit for bit."""
    exporting.convert(
        source,
        target,
        format,
        model=model,
        without_input_scale=without_input_scale,
        original_names=not diffusers_names,
        prefix=prefix,
        metadata_from=metadata_from,
    )
    _show(inspection.inspect_file(target), as_json)


@app.command()
@_told
def export(
    model_dir: ModelDir,
    target: Annotated[Path, typer.Argument(help="A .safetensors file for comfy, else a directory.")],
    format: ExportFormat,
    profile: ProfileName = "auto",
    include: Include = None,
    exclude: Exclude = None,
    weight_only: WeightOnly = False,
    share_qkv: Annotated[bool, typer.Option("--share-qkv", help="One scale for q, k and v of an attention.")] = False,
    dtype: Annotated[str, typer.Option(help="Of what stays dense: bfloat16, float16 or float32.")] = "bfloat16",
    without_input_scale: WithoutInputScale = False,
    diffusers_names: DiffusersNames = False,
    prefix: Prefix = PREFIX,
    metadata_from: MetadataFrom = None,
    as_json: Json = False,
) -> None:
    """Quantize a dense model as a profile says, and write it in the format of another tool.

    Weights are rounded as they are: train first for the quality of a trained model. Input scales need calibration on
    forwards of your own (qatpatch.calibrate), so from here comes --weight-only, or comfy --without-input-scale.
    """
    config = _dense_config(model_dir, "use `qatpatch convert`")
    exporting.format_named(format)
    _refuse_source(model_dir, target)
    dtypes = {str(known).removeprefix("torch."): known for known in (torch.bfloat16, torch.float16, torch.float32)}
    if dtype not in dtypes:
        _fail(f"--dtype {dtype} is none of {', '.join(dtypes)}", 2)
    if not (weight_only or without_input_scale):
        raise CheckpointError(_no_scales(format))
    cls = type(checkpoint.config_skeleton(config))
    model = cls.from_pretrained(
        _model_dir(model_dir), torch_dtype=dtypes[dtype], local_files_only=True, use_safetensors=True
    )
    patch.apply(
        model, profile, attention=False, activations=not weight_only, include=include or (), exclude=exclude or ()
    )
    exporting.export(
        model,
        target,
        format,
        share_qkv=share_qkv,
        without_input_scale=without_input_scale,
        original_names=not diffusers_names,
        prefix=prefix,
        metadata_from=metadata_from,
    )
    _show(inspection.inspect_file(target), as_json)


def _model_dir(path: Path) -> Path:
    """The directory of the transformer, also where a pipeline's is given."""
    inner = path / "transformer"
    return inner if not (path / checkpoint.CONFIG_NAME).is_file() and inner.is_dir() else path


def _refuse_source(model_dir: Path, target: Path) -> None:
    """Nothing is written into the directory that is read: its weights or its config would be replaced."""
    if target.resolve().is_relative_to(model_dir.resolve()):
        raise CheckpointError(f"the target {target} lies in the directory that is read, {model_dir}; write elsewhere")


def _no_scales(format: str) -> str:
    comfy = ", or --without-input-scale for ComfyUI alone" if format == "comfy" else ""
    return (
        f"{format} stores input scales, which take forwards of your own: in Python qatpatch.apply(model, "
        f"input_scale='static'), qatpatch.calibrate, qatpatch.export. From here: --weight-only{comfy}"
    )


def _dense_config(path: Path, otherwise: str) -> dict[str, Any]:
    """The config.json of a model that is not packed yet; an error that says what to do ``otherwise``."""
    config = _config(path)
    if "quantization_config" in config:
        raise CheckpointError(f"{path} is packed already; {otherwise}")
    return config


def _config(path: Path) -> dict[str, Any]:
    if path.is_file():
        raise CheckpointError(f"{path} is a file; name the directory with the model's config.json, {path.parent}")
    config = read_json_file(_model_dir(path) / checkpoint.CONFIG_NAME)
    if not isinstance(config, dict) or not isinstance(config.get("_class_name"), str):
        raise CheckpointError(f"{path} has no config.json of a diffusers model (one with _class_name)")
    return config


def _show(found: inspection.Inspection, as_json: bool) -> None:
    print(json.dumps(found.as_dict(), indent=2) if as_json else found)
