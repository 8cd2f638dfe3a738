"""Flow matching: formulas against numpy, what the model is given, and the sampler."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from flow import (
    Settings,
    draw_noise_levels,
    free_tokens,
    sample,
    shift_of,
    shifted,
    training_loss,
    velocity_from_x0,
    x0_from_velocity,
)
from latents import pack_tokens
from models import tiny_ltx2
from recipe import Flow

GRID = (3, 2, 2)
TOKENS, CHANNELS = 12, 5
CPU = torch.device("cpu")


class Recorder(torch.nn.Module):
    """Stands for the transformer: keeps what it was given, answers with ``answer(x, call)``."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.calls = answer, []
        self.config = SimpleNamespace(audio_in_channels=4)
        self.audio_rope = SimpleNamespace(audio_latents_per_second=25.0)
        self.rope = SimpleNamespace(
            prepare_video_coords=lambda b, f, h, w, d, fps: torch.full((b, 3, f * h * w, 2), fps)
        )

    def forward(self, **call):
        self.calls.append(call)
        return self.answer(call["hidden_states"], call), None


def settings(prediction="x0", **changes) -> Settings:
    values = dict(dtype=torch.float32, frames=9, audio_tokens=None, use_cross_timestep=False)
    return Settings(flow=Flow(prediction=prediction, sigma_min=0.1), **{**values, **changes})


def batch_of(count: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "latents": torch.randn(count, CHANNELS, *GRID, generator=generator),
        "text": torch.randn(count, 6, 8, generator=generator),
        "audio_text": torch.randn(count, 6, 8, generator=generator),
        "text_mask": torch.ones(count, 6),
        "rate": torch.tensor([25.0, 10.0])[:count],
    }


def test_velocity_and_x0_are_two_readings_of_one_line():
    rng = np.random.default_rng(0)
    x0, noise = rng.standard_normal((2, 4, 3)), rng.standard_normal((2, 4, 3))
    sigma = np.array([0.3, 0.9])[:, None, None]
    noisy = (1 - sigma) * x0 + sigma * noise
    as_torch = [torch.from_numpy(a) for a in (noisy, x0, sigma)]
    np.testing.assert_allclose(velocity_from_x0(*as_torch).numpy(), noise - x0, atol=1e-12)
    velocity = torch.from_numpy(noise - x0)
    np.testing.assert_allclose(x0_from_velocity(as_torch[0], velocity, as_torch[2]).numpy(), x0, atol=1e-12)


def test_shift_keeps_the_ends_and_follows_the_formula():
    t = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    expected = [3 * v / (1 + 2 * v) for v in (0.0, 0.25, 0.5, 1.0)]
    assert shifted(t, 3.0).tolist() == pytest.approx(expected)
    assert torch.equal(shifted(t, 1.0), t)
    flow = Flow(prediction="velocity", shift="ltx2")
    assert shift_of(flow, 1024) == pytest.approx(math.exp(0.95))
    assert shift_of(flow, 4096) == pytest.approx(math.exp(2.05))
    assert shift_of(Flow(prediction="x0", shift=2.5), 99) == 2.5


@pytest.mark.parametrize("sigmas", ["uniform", "logit_normal"])
def test_noise_levels_have_the_distribution_that_was_asked_for(sigmas):
    flow = Flow(prediction="x0", sigmas=sigmas, sigma_min=0.05, shift=2.0)
    levels = draw_noise_levels(flow, 20000, 100, torch.Generator().manual_seed(0))
    assert 0.05 <= float(levels.min()) and float(levels.max()) <= 1.0
    median = 2 * 0.5 / 1.5  # both distributions have the median 1/2, and the shift is monotone
    assert float(levels.median()) == pytest.approx(median, abs=0.01)
    quartile = {"uniform": 0.25, "logit_normal": 1 / (1 + math.exp(0.6745))}[sigmas]
    assert float(levels.quantile(0.25)) == pytest.approx(2 * quartile / (1 + quartile), abs=0.01)


@pytest.mark.parametrize("prediction", ["x0", "velocity"])
def test_the_loss_is_the_mean_square_over_generated_tokens(prediction):
    """The answer is the input plus 1: loss and noisy input are rebuilt in numpy from the recorded call."""
    batch, model = batch_of(), Recorder(lambda x, call: x + 1)
    loss = training_loss(model, settings(prediction), batch, torch.Generator().manual_seed(5), CPU)
    call = model.calls[0]
    noisy, clean = call["hidden_states"].numpy(), pack_tokens(batch["latents"]).numpy()
    np.testing.assert_array_equal(noisy[:, :4], clean[:, :4])  # the first frame is given clean
    sigma = call["sigma"].numpy() / 1000
    assert ((sigma >= 0.1) & (sigma <= 1)).all() and sigma[0] != sigma[1]
    timestep = call["timestep"].numpy()
    assert (timestep[:, :4] == 0).all()
    np.testing.assert_allclose(timestep[:, 4:], np.repeat(sigma[:, None] * 1000, 8, 1), rtol=1e-6)
    s = sigma[:, None, None]
    noise = (noisy - (1 - s) * clean) / s
    assert abs(noise[:, 4:].mean()) < 0.4 and 0.7 < noise[:, 4:].std() < 1.3
    target = clean if prediction == "x0" else noise - clean
    expected = np.square(noisy + 1 - target)[:, 4:].mean()
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_the_model_is_given_what_ltx2s_pipeline_gives():
    batch, model = batch_of(), Recorder(lambda x, call: x)
    training_loss(model, settings(), batch, torch.Generator().manual_seed(0), CPU)
    call = model.calls[0]
    assert (call["num_frames"], call["height"], call["width"]) == GRID
    assert torch.equal(call["encoder_hidden_states"], batch["text"])
    assert torch.equal(call["audio_encoder_hidden_states"], batch["audio_text"])
    assert call["encoder_attention_mask"].shape == (2, 6) and bool((call["encoder_attention_mask"] == 1).all())
    # each clip has its own frame rate, and audio is unknown: noise of the longest clip's length at noise level 1
    assert call["video_coords"][:, 0, 0, 0].tolist() == [25.0, 10.0]
    assert call["audio_hidden_states"].shape == (2, round(9 / 10 * 25), 4) and call["audio_num_frames"] == 22
    assert bool((call["audio_timestep"] == 1000).all()) and bool((call["audio_sigma"] == 1000).all())
    assert float(call["audio_hidden_states"].std()) > 0.5
    training_loss(model, settings(audio_tokens=3), batch, torch.Generator().manual_seed(0), CPU)
    assert torch.equal(model.calls[1]["audio_hidden_states"], torch.zeros(2, 3, 4))


def test_the_same_generator_gives_the_same_step():
    batch = batch_of()
    losses = [
        float(training_loss(Recorder(lambda x, call: x), settings(), batch, torch.Generator().manual_seed(s), CPU))
        for s in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("prediction", ["x0", "velocity"])
def test_a_perfect_model_is_sampled_exactly(prediction):
    """A model that knows the clip: each Euler step moves along the line to it, so any number of steps ends there."""
    batch = batch_of(1)
    clean = pack_tokens(batch["latents"])

    def answer(x, call):
        return clean if prediction == "x0" else (x - clean) / (call["sigma"][:, None, None] / 1000)

    for steps in (1, 5):
        model = Recorder(answer)
        latents = sample(model, settings(prediction), batch, steps=steps, seed=3, device=CPU)
        assert latents.shape == batch["latents"].shape
        torch.testing.assert_close(latents, batch["latents"], atol=2e-6, rtol=0)
        assert torch.equal(latents[:, :, 0], batch["latents"][:, :, 0])
        assert [float(call["sigma"]) / 1000 for call in model.calls] == pytest.approx(
            [1 - i / steps for i in range(steps)]
        )


def test_the_sampler_is_euler_along_the_velocity():
    """A model whose x0 is half its input, against the recursion written out in numpy."""
    batch = batch_of(1)
    model = Recorder(lambda x, call: 0.5 * x)
    latents = sample(model, settings(), batch, steps=4, seed=9, device=CPU)
    x = model.calls[0]["hidden_states"].numpy().astype(np.float64)
    given = pack_tokens(batch["latents"]).numpy()
    np.testing.assert_array_equal(x[:, :4].astype(np.float32), given[:, :4])
    for now, after in zip((1.0, 0.75, 0.5, 0.25), (0.75, 0.5, 0.25, 0.0), strict=True):
        x = x + (after - now) * (x - 0.5 * x) / now
        x[:, :4] = given[:, :4]
    np.testing.assert_allclose(pack_tokens(latents).numpy(), x, atol=1e-5)


def test_samples_depend_on_the_seed_alone():
    batch = batch_of(1)
    torch.manual_seed(0)
    first = sample(Recorder(lambda x, call: 0 * x), settings("velocity"), batch, steps=2, seed=4, device=CPU)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again = sample(Recorder(lambda x, call: 0 * x), settings("velocity"), batch, steps=2, seed=4, device=CPU)
    assert torch.equal(torch.get_rng_state(), state)  # validation leaves training's random numbers alone
    assert torch.equal(first, again)
    other = sample(Recorder(lambda x, call: 0 * x), settings("velocity"), batch, steps=2, seed=5, device=CPU)
    assert not torch.equal(first, other)


def test_a_real_ltx2_takes_the_call_and_sees_the_frame_rate():
    model = tiny_ltx2(layers=1, in_channels=CHANNELS, out_channels=CHANNELS, caption_channels=8, audio_in_channels=4)
    batch = batch_of(1)
    loss = training_loss(model, settings(), batch, torch.Generator().manual_seed(0), CPU)
    loss.backward()
    assert math.isfinite(loss.item())
    assert float(model.transformer_blocks[0].attn1.to_q.weight.grad.abs().sum()) > 0
    slow = {**batch, "rate": torch.tensor([5.0])}
    kwargs = dict(steps=1, seed=0, device=CPU)
    one, two = (sample(model, settings(audio_tokens=2), b, **kwargs) for b in (batch, slow))
    assert not torch.equal(one, two)


def test_free_tokens_are_all_but_the_first_frames():
    assert free_tokens((3, 2, 1)).flatten().tolist() == [0, 0, 1, 1, 1, 1]
