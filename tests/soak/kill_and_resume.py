"""Kill a training run at random moments, resume it each time, and compare its end with a run that nobody killed.

    python tests/soak/kill_and_resume.py recipes/tiny_ltx2_overfit.yaml --kills 20 --set train.steps=60

A kill is SIGKILL at a random moment after the run's first logged step: in a step, a validation, a checkpoint, the
export. The recipe needs ``checkpoint.every``. Exit status 1 where losses or the exported file differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "recipes" / "train.py"
EXPORT = "transformer-nvfp4/diffusion_pytorch_model.safetensors"


def soak(recipe: Path, folder: Path, *, kills: int, seed: int = 0, arguments: tuple[str, ...] = ()) -> list[str]:
    """Run twice, once whole and once with ``kills`` kills; returns what differs, nothing when all is equal."""
    whole, killed = folder / "whole", folder / "killed"
    began = time.monotonic()
    finish(start(recipe, whole, "--overwrite", *arguments), whole)
    seconds = time.monotonic() - began
    steps = len(losses_of(whole))
    chance = random.Random(seed)
    done = 0
    while done < kills:
        process = start(recipe, killed, *_how_to_go_on(killed), *arguments)
        before = len(losses_of(killed))
        while process.poll() is None and len(losses_of(killed)) <= before and not (killed / "scores.json").exists():
            time.sleep(0.05)
        time.sleep(chance.uniform(0, seconds / (kills + 1)))
        if process.poll() is not None and process.returncode != 0:
            return [f"the run ended with status {process.returncode} after {done} kills, see {_log(killed)}"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        done += 1
        print(f"kill {done}: after {len(losses_of(killed))} of {steps} steps", flush=True)
        if (killed / "scores.json").exists():
            break
    if not (killed / "scores.json").exists():
        finish(start(recipe, killed, *_how_to_go_on(killed), *arguments), killed)
    wrong = []
    if losses_of(whole) != losses_of(killed):
        wrong.append("the losses differ")
    if (whole / EXPORT).read_bytes() != (killed / EXPORT).read_bytes():
        wrong.append("the exported files differ")
    wrong += [f"{path} was left behind" for path in killed.rglob("*.partial")]
    return wrong


def start(recipe: Path, output: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(TRAIN), str(recipe), "--output", str(output), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(TRAIN.parents[1])}
    output.parent.mkdir(parents=True, exist_ok=True)
    with _log(output).open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _log(output: Path) -> Path:
    """What the last process of a run printed."""
    return output.with_name(f"{output.name}.log")


def finish(process: subprocess.Popen[bytes], output: Path) -> None:
    if process.wait():
        raise RuntimeError(f"the run failed, see {_log(output)}: {_log(output).read_text(encoding='utf-8')[-2000:]}")


def _how_to_go_on(output: Path) -> tuple[str, ...]:
    return ("--resume", str(output)) if list((output / "checkpoints").glob("step_*")) else ("--overwrite",)


def losses_of(output: Path) -> list[tuple[int, float]]:
    """By step, of the lines that are whole."""
    log = output / "metrics.jsonl"
    lines = log.read_text(encoding="utf-8").split("\n")[:-1] if log.exists() else []
    return [(row["step"], row["loss"]) for row in map(json.loads, filter(None, lines))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("outputs/soak"))
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    changes = tuple(part for change in options.set for part in ("--set", change))
    wrong = soak(options.recipe, options.folder, kills=options.kills, seed=options.seed, arguments=changes)
    print("\n".join(wrong) or f"equal after {options.kills} kills")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
