"""What the study trains on and is judged by: windows of real videos.

A video is decoded once for each height. A training window takes nine frames of one of them, a random crop, every first
or every second frame, forwards or backwards, mirrored or not, the colours in any order; all of it is a function of seed
and index. Held-out windows are centre crops of a video that training never reads, at evenly spaced starts.
"""

from __future__ import annotations

import functools

import av
import torch
from clips import locate, read_clip
from latents import Codec, seeded
from recipe import Clip, Data
from torch.utils.data import Dataset

STRIDES = (1, 2)


@functools.cache
def shape_of(clip: Clip) -> tuple[int, int, int]:
    """Frames, height and width of a video file."""
    with av.open(str(locate(clip))) as container:
        stream = container.streams.video[0]
        return stream.frames or sum(1 for _ in container.decode(stream)), stream.height, stream.width


@functools.cache
def read_whole(clip: Clip, height: int, width: int) -> tuple[torch.Tensor, float]:
    """All frames of a video, uint8 (F, 3, H, W), and their rate; read once a process."""
    return read_clip(clip, frames=shape_of(clip)[0], height=height, width=width)


class Windows(Dataset):
    """Random windows of training videos.

    Args:
        data: the recipe's: clips, and the size of a window.
        heights: to scale the videos to.
        text: what every sample holds beside latents and rate.
        count: how many there are.
    """

    def __init__(
        self,
        data: Data,
        codec: Codec,
        *,
        heights: tuple[int, ...],
        text: dict[str, torch.Tensor],
        count: int,
        seed: int,
    ):
        self.data, self.codec, self.text, self.count, self.seed = data, codec, text, count, seed
        self.videos = []
        for clip in data.clips:
            _, full_height, full_width = shape_of(clip)
            for height in (height for height in heights if height <= full_height):
                self.videos.append(read_whole(clip, height, round(full_width * height / full_height)))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = seeded(self.seed, "window", index)

        def draw(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        video, rate = self.videos[draw(len(self.videos))]
        stride, size = STRIDES[draw(len(STRIDES))], (self.data.height, self.data.width)
        start = draw(len(video) - (self.data.frames - 1) * stride)
        top, left = draw(video.shape[2] - size[0] + 1), draw(video.shape[3] - size[1] + 1)
        frames = _take(video, start, stride, self.data.frames)[..., top : top + size[0], left : left + size[1]]
        if draw(2):
            frames = frames.flip(0)
        if draw(2):
            frames = frames.flip(3)
        frames = frames[:, torch.randperm(3, generator=generator)]
        return {"latents": self.codec.encode(frames), **self.text, "rate": torch.tensor(rate / stride)}


def held_out(clip: Clip, data: Data, codec: Codec, text: dict[str, torch.Tensor], count: int) -> list[dict]:
    """``count`` windows of a whole clip, evenly spaced: samples with ``frames`` (F, 3, H, W) in [0, 1] added.

    Where the clip is too short for different starts, some are the same; each gets noise of its own.
    """
    video, rate = read_whole(clip, data.height, data.width)
    samples = []
    for number in range(count):
        stride = STRIDES[number % len(STRIDES)]
        last = len(video) - 1 - (data.frames - 1) * stride
        frames = _take(video, last * number // max(1, count - 1), stride, data.frames)
        latents = codec.encode(frames)
        samples.append(
            {"latents": latents, **text, "rate": torch.tensor(rate / stride), "frames": frames.float() / 255}
        )
    return samples


def stacked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Samples as one batch."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _take(video: torch.Tensor, start: int, stride: int, frames: int) -> torch.Tensor:
    return video[start : start + (frames - 1) * stride + 1 : stride]
