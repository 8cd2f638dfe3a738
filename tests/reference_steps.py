"""Figures of fixed training steps, recorded to notice when numerics move: gradient norms, and the tiny recipe's losses.

    python tests/reference_steps.py tiny --record     # small LTX-2 and Wan, patched; on the GPU where there is one
    python tests/reference_steps.py full --record     # LTX-2 of full size with random weights: one GPU of 140 GB
    python tests/reference_steps.py curve --record    # 20 losses of recipes/tiny_ltx2_overfit.yaml, on the CPU

Without ``--record`` they are compared with ``reference_steps.json``; exit status 1 where they differ by more than the
tolerance of the device kind. Figures are kept by device kind: ``cpu``, or a GPU's architecture (``sm_90``).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from models import ltx2_inputs, tiny_ltx2, tiny_wan, wan_inputs

import qatpatch

FILE = Path(__file__).with_suffix(".json")
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "tiny_ltx2_overfit.yaml"

# Relative, by device kind. Another CPU or GPU kernel sums in another order, and a value that then rounds to the other
# side of a 4-bit step moves a gradient norm by far more than the sum did.
TOLERANCES = {"cpu": 5e-3, "gpu": 2e-2}
# Losses of successive steps carry those differences on.
CURVE_TOLERANCE = 2e-2


def device_kind(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def tolerance(kind: str) -> float:
    return TOLERANCES["cpu" if kind == "cpu" else "gpu"]


def step(model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, float]:
    """One forward and backward of a patched model: its loss, and gradient norms by part of the model."""
    qatpatch.apply(model)
    model.train()
    output = model(**inputs)[0].float()
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    loss = (output - target).square().mean()
    loss.backward()
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            part = _part(name)
            squares[part] = squares.get(part, 0.0) + float(parameter.grad.float().norm()) ** 2
    norms = {part: math.sqrt(square) for part, square in squares.items()}
    return {"loss": float(loss.detach()), **{f"|grad {part}|": norm for part, norm in norms.items()}}


def _part(name: str) -> str:
    """``blocks.3.attn1``-like for what lies in a block, the first component for the rest; indices left out."""
    components = [c for c in name.split(".") if not c.isdigit()]
    return ".".join(components[:2] if "blocks" in components[0] else components[:1])


def tiny(device: torch.device) -> dict[str, dict[str, float]]:
    """Small patched models in float32."""
    models = {"ltx2": (tiny_ltx2(), ltx2_inputs), "wan": (tiny_wan(), wan_inputs)}
    return {
        f"tiny {name}": step(model.to(device), _to(inputs(model), device)) for name, (model, inputs) in models.items()
    }


def full(device: torch.device) -> dict[str, dict[str, float]]:
    """LTX-2 as large as the released one, bfloat16 weights drawn on the device, 4290 video and 1024 text tokens."""
    from diffusers import LTX2VideoTransformer3DModel
    from networks import draw_shard

    with torch.device("meta"):
        model = LTX2VideoTransformer3DModel(rope_type="split").to(torch.bfloat16)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw_shard(generator, name, parameter)
    model.enable_gradient_checkpointing()
    inputs = ltx2_inputs(model, frames=11, height=15, width=26, text=1024)
    return {"full ltx2": step(model, _to(inputs, device))}


def curve(device: torch.device) -> dict[str, list[float]]:
    """Losses of the tiny recipe's first 20 steps, all warm-up: the length of the run does not matter."""
    import train
    from scores import read_log

    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(RECIPE), "--output", folder, "--steps", "20", "--overwrite", "--set", "validation.every=0"]
        if train.main(arguments):
            raise RuntimeError("the run failed")
        return {"tiny recipe": [row["loss"] for row in read_log(Path(folder) / "metrics.jsonl")]}


def differences(found: Any, recorded: Any, rtol: float, where: str = "") -> list[str]:
    """What is not as recorded, one line each."""
    if isinstance(found, dict):
        lines = [f"{where} {key}: not in both" for key in found.keys() ^ recorded.keys()]
        return lines + [
            line
            for key in found.keys() & recorded.keys()
            for line in differences(found[key], recorded[key], rtol, f"{where} {key}".strip())
        ]
    if isinstance(found, list):
        pairs = enumerate(zip(found, recorded, strict=True), start=1)
        return [line for number, (a, b) in pairs for line in differences(a, b, rtol, f"{where}, step {number}")]
    return [] if math.isclose(found, recorded, rel_tol=rtol) else [f"{where}: {found:.7g}, recorded {recorded:.7g}"]


def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def _to(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tiny", "full", "curve"))
    parser.add_argument("--record", action="store_true", help="write the figures down instead of comparing them")
    parser.add_argument("--output", type=Path, default=FILE, help="the file to write")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available() and options.what != "curve"
    device = torch.device("cuda" if on_gpu else "cpu")
    kind = device_kind(device)
    figures = {"tiny": tiny, "full": full, "curve": curve}[options.what](device)
    print(json.dumps({kind: figures}, indent=2))
    if options.record:
        everything = recorded()
        everything.setdefault(kind, {}).update(figures)
        options.output.write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")
        return 0
    known = {name: recorded().get(kind, {}).get(name) for name in figures}
    if None in known.values():
        print(f"nothing is recorded for {kind}")
        return 1
    wrong = differences(figures, known, CURVE_TOLERANCE if options.what == "curve" else tolerance(kind))
    print("\n".join(wrong) or "as recorded")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
