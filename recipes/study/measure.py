"""What is measured on a model: held-out losses, pair by pair, and samples against two references.

A pair is a held-out window with a noise level and noise that depend on the study's seed and the pair's number alone, so
that the losses of two models can be subtracted pair by pair. Samples start from noise that depends on the seed alone.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from clips import to_bytes
from flow import sample, sample_losses
from latents import seeded
from plan import SCOPES, Study
from runs import Run
from scores import ms_ssim, psnr
from train import record_dtype
from windows import stacked

import qatpatch


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Windows of the held-out clip: ``pairs`` for the loss, ``sampled`` (one batch), and its frames, uint8."""

    pairs: list[dict[str, torch.Tensor]]
    sampled: dict[str, torch.Tensor]
    frames: torch.Tensor

    @classmethod
    def of(cls, study: Study, windows: Any) -> HeldOut:
        """``windows`` gives a number of evenly spaced windows."""
        batches, size = study.pairs
        pairs = windows(batches * size)
        # Neighbours in time go to different batches.
        grouped = [stacked(pairs[start::batches]) for start in range(batches)]
        for batch in grouped:
            batch.pop("frames")
        sampled = stacked(windows(study.sampled))
        return cls(pairs=grouped, frames=to_bytes(sampled.pop("frames")), sampled=sampled)


@contextlib.contextmanager
def inference(run: Run, model: torch.nn.Module) -> Any:
    """No gradients, the run's autocast, eager blocks."""
    model.eval()
    with torch.no_grad(), run.accelerator.autocast(), torch.compiler.set_stance("force_eager"):
        yield


def losses(run: Run, model: torch.nn.Module, held_out: HeldOut, seed: int) -> list[float]:
    """One flow-matching loss a pair."""
    found = []
    with inference(run, model):
        for number, batch in enumerate(held_out.pairs):
            noise = seeded(seed, "held out", number)
            found += sample_losses(model, run.settings, batch, noise, run.accelerator.device).tolist()
    return [float(f"{loss:.7g}") for loss in found]


def sampled(run: Run, model: torch.nn.Module, batch: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
    """Frames, uint8 (B, F, 3, H, W), of samples from the first frames of ``batch``."""
    steps = run.recipe.validation.sampler_steps
    with inference(run, model):
        latents = sample(model, run.settings, batch, steps=steps, seed=seed, device=run.accelerator.device)
    return torch.stack([to_bytes(run.codec.decode(one)) for one in latents])


def compare(frames: torch.Tensor, reference: torch.Tensor) -> dict[str, list[float]]:
    """MS-SSIM and PSNR of every sample, uint8, without its first frame, which was given."""
    pairs = [(a[1:] / 255, b[1:] / 255) for a, b in zip(frames, reference, strict=True)]
    return {
        "ms_ssim": [round(ms_ssim(a, b), 5) for a, b in pairs],
        "psnr": [round(min(psnr(a, b), 99.0), 3) for a, b in pairs],  # 99 stands for equal
    }


def pack(run: Run, model: torch.nn.Module, scope: str) -> torch.nn.Module:
    """Patch a dense model in place and deploy it, with no training in between."""
    linear, attention = SCOPES[scope]
    arguments = run.recipe.quantization.arguments() | {"linear": linear, "attention": attention}
    qatpatch.apply(model, **arguments)
    return deploy(run, model)


def deploy(run: Run, model: torch.nn.Module) -> torch.nn.Module:
    """Pack a patched model in place, in the dtype that training computes in."""
    record_dtype(run, model)
    qatpatch.deploy(model, attention_kernel=run.recipe.quantization.infer_kernel)
    return model
