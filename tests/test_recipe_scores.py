"""Scores against values computed by hand, the score table, the log, and the figures."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from figures import contact_sheet, curves, page, smoothed
from scores import BETAS, MetricLog, latent_scores, mean_scores, ms_ssim, psnr, read_log, score, table


def clip(seed: int, frames: int = 2, height: int = 48, width: int = 64) -> torch.Tensor:
    """Smooth random frames in [0, 1]."""
    coarse = torch.rand(frames, 3, height // 8, width // 8, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear").clamp(0, 1)


def ms_ssim_by_hand(a: np.ndarray, b: np.ndarray) -> float:
    """MS-SSIM of Wang, Simoncelli and Bovik 2003 in float64: Gaussian window of 11, sigma 1.5, three scales with the
    first three of their weights renormalised, 2 x 2 means between scales. Contrast over whole windows only, the last
    scale's similarity over every pixel of the mirrored frame."""
    weights = np.array([0.0448, 0.2856, 0.3001])
    weights /= weights.sum()
    offsets = np.arange(11) - 5
    window = np.exp(-(offsets**2) / (2 * 1.5**2))
    window /= window.sum()

    def blur(x):
        rows = np.apply_along_axis(lambda v: np.convolve(v, window, "valid"), -1, x)
        return np.apply_along_axis(lambda v: np.convolve(v, window, "valid"), -2, rows)

    values = []
    for frame_a, frame_b in zip(a, b, strict=True):
        product, x, y = 1.0, frame_a, frame_b
        for scale, weight in enumerate(weights):
            last = scale == len(weights) - 1
            if last:
                x, y = (np.pad(v, ((0, 0), (5, 5), (5, 5)), mode="reflect") for v in (x, y))
            mx, my = blur(x), blur(y)
            vx, vy, cov = blur(x * x) - mx * mx, blur(y * y) - my * my, blur(x * y) - mx * my
            contrast = (2 * cov + 0.03**2) / (vx + vy + 0.03**2)
            luminance = (2 * mx * my + 0.01**2) / (mx**2 + my**2 + 0.01**2)
            product *= max((contrast * luminance if last else contrast).mean(), 0.0) ** weight
            if not last:
                x, y = (v.reshape(3, v.shape[1] // 2, 2, v.shape[2] // 2, 2).mean((2, 4)) for v in (x, y))
        values.append(product)
    return float(np.mean(values))


def test_ms_ssim_equals_the_formula():
    a = clip(0)
    for share, low, high in ((0.2, 0.9, 0.99), (0.6, 0.2, 0.9)):
        b = (1 - share) * a + share * clip(1)
        expected = ms_ssim_by_hand(a.double().numpy(), b.double().numpy())
        assert low < expected < high
        assert ms_ssim(a, b) == pytest.approx(expected, abs=1e-4)
    assert ms_ssim(a, a) == pytest.approx(1.0, abs=1e-6)
    assert sum(BETAS) == pytest.approx(1.0) and len(BETAS) == 3


def test_ms_ssim_refuses_sides_that_three_scales_do_not_fit():
    with pytest.raises(ValueError, match="41 pixels"):
        ms_ssim(clip(0, height=40), clip(1, height=40))


def test_psnr_and_latent_scores_by_hand():
    truth = torch.full((1, 3, 2, 2), 0.5)
    assert psnr(truth + 0.1, truth) == pytest.approx(20.0, abs=1e-4)  # -10 log10(0.01)
    assert psnr(truth, truth) == math.inf
    z = torch.tensor([3.0, 4.0])
    mse, snr, cosine = latent_scores(torch.tensor([3.0, 2.0]), z)
    assert mse == pytest.approx(2.0)
    assert snr == pytest.approx(10 * math.log10(25 / 4))
    assert cosine == pytest.approx((9 + 8) / (5 * math.sqrt(13)))
    assert latent_scores(z, z)[1] == math.inf


def test_scores_leave_the_given_first_frame_out():
    frames, latents = clip(0, frames=3), torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    spoilt, spoilt_latents = frames.clone(), latents.clone()
    spoilt[0], spoilt_latents[:, 0] = 1 - spoilt[0], 9.0
    result = score(spoilt, frames, spoilt_latents, latents)
    assert result.ms_ssim == pytest.approx(1.0, abs=1e-6)
    assert (result.psnr, result.latent_mse, result.latent_cosine) == (math.inf, 0.0, pytest.approx(1.0))
    other = score(frames + 0.1, frames, latents * 0.9, latents)
    mean = mean_scores([other, other])
    assert mean == other
    lines = table({"first": other, "second": result}).splitlines()
    assert len(lines) == 3 and lines[0].split()[0] == "MS-SSIM"
    assert lines[1].startswith("first ") and "20.00" in lines[1] and "inf" in lines[2]


def test_the_log_drops_what_a_resumed_run_writes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    for step in range(1, 6):
        log.write(step, loss=1.0 / step)
    resumed = MetricLog(path, after=3)
    assert [row["step"] for row in read_log(path)] == [1, 2, 3]
    resumed.write(4, loss=0.5, ms_ssim=0.1)
    assert read_log(path)[-1] == {"step": 4, "loss": 0.5, "ms_ssim": 0.1}
    MetricLog(path)
    assert read_log(path) == [] and read_log(tmp_path / "none.jsonl") == []
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_smoothing_starts_at_the_first_value():
    assert smoothed((2.0, 2.0, 2.0)) == pytest.approx([2.0] * 3)
    weights = [0.95**2 * 0.05, 0.95 * 0.05, 0.05]
    expected = sum(w * v for w, v in zip(weights, (1.0, 5.0, 3.0), strict=True)) / sum(weights)
    assert smoothed((1.0, 5.0, 3.0))[-1] == pytest.approx(expected)


def test_figures_are_pictures_and_the_page_shows_them(tmp_path):
    from matplotlib.image import imread

    contact_sheet(tmp_path / "contact_sheet.png", {"truth": clip(0, frames=12), "after": clip(1, frames=12)})
    rows = [{"step": i, "loss": 1 / i} for i in range(1, 9)] + [{"step": 9, "loss": 0.1, "ms_ssim": 0.7}]
    curves(tmp_path / "curves.png", rows, dense=0.9)
    curves(tmp_path / "empty.png", [])
    for name in ("contact_sheet.png", "curves.png", "empty.png"):
        image = imread(tmp_path / name)
        assert min(image.shape[:2]) > 200 and float(image[..., :3].std()) > 0.01
    page(
        tmp_path / "index.html",
        "a <run>",
        "t < 1",
        {"deploy": "<table></table>"},
        {"after": "videos/after.mp4"},
        {"recipe": "{a: <b>}"},
    )
    text = (tmp_path / "index.html").read_text()
    for part in (
        "a &lt;run&gt;",
        "t &lt; 1",
        "<summary>recipe</summary><pre>{a: &lt;b&gt;}</pre>",
        "<table></table>",
        'src="videos/after.mp4"',
        "contact_sheet.png",
        "curves.png",
    ):
        assert part in text
