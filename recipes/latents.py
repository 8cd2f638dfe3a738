"""Latents: pixels to latents and back, the cache of encoded clips, and the order in which training reads it.

A codec turns frames, uint8 (F, 3, H, W), into latents, float32 (C, F', H', W'), and latents back into frames in [0, 1]:

- `SpaceToDepth`: every ``patch`` x ``patch`` square becomes one latent pixel of ``3 patch^2`` channels, with the values
  ``(byte - mean) / std``. No weights, and the bytes come back exactly.
- `VideoVAE`: LTX-2's own; `WanVAE`: Wan's.

The cache is one safetensors file a clip (latents, text embeddings, text mask), written once; the VAE's encoder and the
text encoder run for missing files only.

The order of training data is a function of seed and step alone, so a resumed run needs no stored position.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from clips import locate, read_clip
from pydantic import ValidationError
from recipe import Clip, Data, RecipeError
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset, Sampler

CACHE_VERSION = 1


class Codec(Protocol):
    """Frames to latents and back; ``fingerprint`` names everything that its latents depend on."""

    fingerprint: str

    def encode(self, frames: torch.Tensor) -> torch.Tensor: ...

    def decode(self, latents: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class SpaceToDepth:
    """The weightless codec; ``mean`` and ``std`` in bytes, see the module's docstring."""

    patch: int
    mean: float = 128.0
    std: float = 64.0

    @property
    def fingerprint(self) -> str:
        return f"space_to_depth/{self.patch}/{self.mean}/{self.std}"

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        count, channels, height, width = frames.shape
        p = self.patch
        values = (frames.float() - self.mean) / self.std
        values = values.reshape(count, channels, height // p, p, width // p, p)
        return values.permute(1, 3, 5, 0, 2, 4).reshape(channels * p * p, count, height // p, width // p).contiguous()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        channels, count, height, width = latents.shape
        p = self.patch
        values = latents.float().reshape(channels // (p * p), p, p, count, height, width)
        values = values.permute(3, 0, 4, 1, 5, 2).reshape(count, channels // (p * p), height * p, width * p)
        return ((values * self.std + self.mean) / 255.0).clamp(0, 1)


class VideoVAE:
    """LTX-2's VAE: ``(z - mean) * scaling_factor / std`` of the posterior's mode, as its pipelines do it.

    Args:
        vae: an ``AutoencoderKLLTX2Video`` in eval mode.
        fingerprint: what it was loaded from.
    """

    def __init__(self, vae: torch.nn.Module, fingerprint: str):
        self.vae = vae
        self.fingerprint = f"vae/{fingerprint}"

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        space, time = self._compression()
        count, _, height, width = frames.shape
        if (count - 1) % time or height % space or width % space:
            raise RecipeError(
                f"the VAE takes 1 + {time}n frames with sides that are multiples of {space}; the recipe's data has "
                f"{count} frames of {height} x {width}"
            )
        pixels = (frames.float() / 127.5 - 1.0).permute(1, 0, 2, 3)[None]
        with torch.no_grad():
            z = self.vae.encode(pixels.to(self.vae.device, self.vae.dtype)).latent_dist.mode()[0].float()
        mean, std = self._statistics(z)
        return ((z - mean) / std).cpu()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        z = latents.to(self.vae.device, torch.float32)
        mean, std = self._statistics(z)
        with torch.no_grad():
            pixels = self._decode((z * std + mean).to(self.vae.dtype)[None])[0]
        return (pixels.float().permute(1, 0, 2, 3) / 2 + 0.5).clamp(0, 1).cpu()

    def _compression(self) -> tuple[int, int]:
        """Pixels a latent pixel, in space and time."""
        return self.vae.spatial_compression_ratio, self.vae.temporal_compression_ratio

    def _statistics(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, std = (v.to(like)[:, None, None, None] for v in (self.vae.latents_mean, self.vae.latents_std))
        return mean, std / self.vae.config.scaling_factor

    def _decode(self, z: torch.Tensor) -> torch.Tensor:
        timestep = torch.zeros(1, device=z.device, dtype=z.dtype) if self.vae.config.timestep_conditioning else None
        return self.vae.decode(z, timestep, return_dict=False)[0]


class WanVAE(VideoVAE):
    """Wan's VAE (an ``AutoencoderKLWan``): ``(z - mean) / std`` of the posterior's mode."""

    def _compression(self) -> tuple[int, int]:
        return self.vae.config.scale_factor_spatial, self.vae.config.scale_factor_temporal

    def _statistics(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (self.vae.config.latents_mean, self.vae.config.latents_std)
        return tuple(torch.tensor(part).to(like)[:, None, None, None] for part in parts)

    def _decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(z, return_dict=False)[0]


def pack_tokens(latents: torch.Tensor) -> torch.Tensor:
    """(B, C, F, H, W) to the (B, F*H*W, C) that the transformer reads, frames outermost."""
    return latents.flatten(2).transpose(1, 2)


def unpack_tokens(tokens: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """The inverse of `pack_tokens` for a latent grid (F, H, W)."""
    return tokens.transpose(1, 2).unflatten(2, grid)


def all_clips(data: Data) -> list[Clip]:
    """The clips of a recipe, those of its manifest included.

    Raises:
        RecipeError: the manifest is missing, or a line of it is not a `Clip`.
    """
    clips = list(data.clips)
    if data.manifest is None:
        return clips
    try:
        lines = data.manifest.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RecipeError(f"data.manifest {data.manifest} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"data.manifest {data.manifest} is no text in UTF-8: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            clip = Clip.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            raise RecipeError(
                f"{data.manifest.name}, line {number}: {'.'.join(map(str, first['loc']))} {first['msg']} "
                f"(a line holds {', '.join(Clip.model_fields)})"
            ) from error
        if clip.package is None:
            clip = clip.model_copy(update={"file": str((data.manifest.parent / clip.file).resolve())})
        clips.append(clip)
    return clips


# What a text encoder gives for a caption: keys of a training sample.
TextEncoder = Callable[[str], dict[str, torch.Tensor]]


def cache_clips(
    data: Data,
    folder: Path,
    codec: Codec,
    text_fingerprint: str,
    load_text_encoder: Callable[[], TextEncoder],
    progress: Callable[[Sequence[Clip]], Iterator[Clip]] = iter,
) -> list[Path]:
    """Encode what the cache lacks.

    Args:
        folder: of the cache.
        codec: pixels to latents.
        text_fingerprint: everything that text embeddings depend on but the caption.
        load_text_encoder: called once, and only when a clip is missing.
        progress: wraps the missing clips while they are encoded.

    Returns:
        The cache file of every clip, in the recipe's order.
    """
    clips = all_clips(data)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [
        folder / f"{Path(clip.file).stem}-{_key(clip, data, codec, text_fingerprint)}.safetensors" for clip in clips
    ]
    missing = [clip for clip, path in zip(clips, paths, strict=True) if not path.exists()]
    if missing:
        encode_text = load_text_encoder()
        path_of = dict(zip(clips, paths, strict=True))
        for clip in progress(missing):
            frames, rate = read_clip(clip, frames=data.frames, height=data.height, width=data.width)
            tensors = {"latents": codec.encode(frames), **encode_text(clip.caption), "rate": torch.tensor(rate)}
            # Written whole or not at all: an interrupted run leaves no file that a later one would trust.
            partial = path_of[clip].with_suffix(f".{os.getpid()}.partial")
            save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial)
            os.replace(partial, path_of[clip])
    return paths


def _key(clip: Clip, data: Data, codec: Codec, text_fingerprint: str) -> str:
    status = locate(clip).stat()
    content: list[Any] = [CACHE_VERSION, clip.model_dump(), status.st_size, status.st_mtime_ns, codec.fingerprint]
    content += [data.frames, data.height, data.width, text_fingerprint]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


class LatentDataset(Dataset):
    """The cached clips, read when asked for: a dict of tensors each, without a batch axis."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return load_file(self.paths[index])


class StepBatches(Sampler[list[int]]):
    """Which clips each micro-batch holds: a function of seed and position alone.

    Every epoch is a permutation of the clips of its own; batches run on from one epoch into the next.

    Args:
        clips: number of clips.
        batch_size: of one process.
        seed: of the permutations.
        first, total: index of the first micro-batch to yield, and number of micro-batches of the whole run.
        rank, world: this process and how many there are; each takes its own part.
    """

    def __init__(
        self, *, clips: int, batch_size: int, seed: int, first: int, total: int, rank: int = 0, world: int = 1
    ):
        self.clips, self.batch_size, self.seed = clips, batch_size, seed
        self.first, self.total, self.rank, self.world = first, total, rank, world

    def __len__(self) -> int:
        return self.total - self.first

    def __iter__(self) -> Iterator[list[int]]:
        epoch, order = -1, []
        for index in range(self.first, self.total):
            start = (index * self.world + self.rank) * self.batch_size
            batch = []
            for position in range(start, start + self.batch_size):
                if position // self.clips != epoch:
                    epoch = position // self.clips
                    order = torch.randperm(self.clips, generator=seeded(self.seed, "order", epoch)).tolist()
                batch.append(order[position % self.clips])
            yield batch


def seeded(*parts: int | str) -> torch.Generator:
    """A CPU generator that is a function of ``parts``: noise that does not depend on what ran before."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def loader(samples: Dataset, batches: StepBatches, workers: int) -> DataLoader:
    """Micro-batches of samples, stacked."""
    # Without a generator of its own a loader draws a seed from torch's global one each time it starts, so a resumed run
    # would be one draw ahead.
    return DataLoader(samples, batch_sampler=batches, num_workers=workers, generator=torch.Generator())


def one_ahead(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """``function(*call)`` for each of ``calls``, the next one in a thread while the caller works on the last."""
    with ThreadPoolExecutor(1) as thread:
        coming = None
        for call in calls:
            following = thread.submit(function, *call)
            if coming is not None:
                yield coming.result()
            coming = following
        if coming is not None:
            yield coming.result()
