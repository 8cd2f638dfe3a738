"""Train long with validation swaps every few steps, and compare with a run that never validates.

    python tests/soak/validate_often.py recipes/tiny_ltx2_overfit.yaml --steps 2000 --every 20

Every loss must be finite, the last checkpoint the same bytes as without a single swap, and the process's memory flat:
what it holds in the second half of the run is at most ``--growth`` over the most that it held in the first. Exit status
1 where one of them is not so.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

from kill_and_resume import finish, losses_of, start

# Of the first steps' memory, while caches fill, nothing is asked.
WARM_UP = 0.1


def soak(recipe: Path, folder: Path, *, steps: int, every: int, growth: float = 0.02, **changes: object) -> list[str]:
    """Run with and without validation; returns what is wrong, nothing when all is well."""
    common = {"train.steps": steps, "checkpoint.every": steps, "checkpoint.keep": 1, **changes}
    arguments = [part for key, value in common.items() for part in ("--set", f"{key}={value}")]
    plain, swapped = folder / "plain", folder / "swapped"
    memory = _run(recipe, swapped, [*arguments, "--set", f"validation.every={every}"])
    _run(recipe, plain, [*arguments, "--set", "validation.every=0"])
    losses = losses_of(swapped)
    wrong = []
    if len(losses) != steps or not all(math.isfinite(loss) for _, loss in losses):
        wrong.append(f"{len(losses)} losses for {steps} steps, or some that are not finite")
    if losses != losses_of(plain):
        wrong.append("validation changed the losses")
    if _checkpoint(swapped) != _checkpoint(plain):
        wrong.append("validation changed the last checkpoint")
    return wrong + grown(memory, steps, growth)


def grown(memory: list[tuple[int, int]], steps: int, growth: float) -> list[str]:
    """What is wrong with the memory, of ``(steps done, bytes held)``."""
    first = [size for step, size in memory if WARM_UP * steps < step <= steps / 2]
    second = [size for step, size in memory if step > steps / 2]
    if not first or not second:
        return ["the run was too short to see its memory"]
    print(
        f"most memory held: {max(first) / 2**20:.1f} MiB in the first half, {max(second) / 2**20:.1f} MiB in the second"
    )
    if max(second) > (1 + growth) * max(first):
        return [f"memory grew from {max(first)} to {max(second)} bytes"]
    return []


def _run(recipe: Path, output: Path, arguments: list[str]) -> list[tuple[int, int]]:
    """Train; returns steps logged and bytes held, sampled while it trains."""
    process, held = start(recipe, output, "--overwrite", *arguments), []
    status = Path(f"/proc/{process.pid}/statm")
    while process.poll() is None:
        done = len(losses_of(output))
        try:
            held.append((done, 4096 * int(status.read_text().split()[1])))
        except (OSError, IndexError):  # it ended
            break
        time.sleep(0.25)
    finish(process, output)
    last = len(losses_of(output))
    return [(step, size) for step, size in held if 0 < step < last]  # deploying and reloading come after the last step


def _checkpoint(output: Path) -> dict[str, bytes]:
    """The last checkpoint: every tensor of model, optimizer and averages, by file."""
    (folder,) = (output / "checkpoints").glob("step_*")
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.distcp")}
    if not found:
        raise RuntimeError(f"no tensors in {folder}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--growth", type=float, default=0.02)
    parser.add_argument("--folder", type=Path, default=Path("outputs/soak"))
    options = parser.parse_args()
    wrong = soak(options.recipe, options.folder, steps=options.steps, every=options.every, growth=options.growth)
    print("\n".join(wrong) or f"{options.steps} steps, a swap every {options.every}: all is as without")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
