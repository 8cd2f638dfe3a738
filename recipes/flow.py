"""Flow matching for LTX-2 and Wan: noise, model call, loss, sampler.

    x_t = (1 - sigma) x_0 + sigma noise        velocity = noise - x_0 = (x_t - x_0) / sigma

Image to video (``flow.given: first_frame``): the tokens of the first latent frame are given. They stay clean, at noise
level 0, and are left out of the loss; so ``sigma`` is one number a token, and timesteps are ``1000 sigma``. Text to
video (``nothing``): every token has the same noise level. The model's output is read as ``x_0`` or as the velocity
(``flow.prediction``); the sampler steps along the velocity either way.

A token here is one latent pixel. Wan joins 2 x 2 of them and takes one timestep for each of its own tokens, or one a
sample.

Audio: LTX-2 carries audio tokens in every call, and the clips here have no sound. A pretrained model gets pure noise at
noise level 1 for it (audio unknown), in training and in sampling; a tiny one, which never heard anything, gets zeros.
Audio takes no part in the loss.

Deliberately not here: classifier-free guidance, and the terminal stretch of LTX-2's scheduler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from latents import pack_tokens, unpack_tokens
from recipe import Flow, Recipe

TIMESTEPS = 1000.0

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every model call of a run shares.

    Attributes:
        family: of the model.
        flow: the recipe's section.
        dtype: of the model's inputs.
        frames: of a clip, in pixels.
        audio_tokens: how many zeros stand for audio; None is noise, as many tokens as LTX-2 has for the clip's length.
        use_cross_timestep: see ``LTX2VideoTransformer3DModel.forward``.
    """

    family: str = "ltx2"
    flow: Flow
    dtype: torch.dtype
    frames: int
    audio_tokens: int | None
    use_cross_timestep: bool

    @classmethod
    def of(cls, recipe: Recipe) -> Settings:
        tiny = recipe.model.kind == "tiny"
        dtype = torch.float32 if tiny else getattr(torch, recipe.model.dtype)
        if recipe.parallel.sharding == "fsdp2":  # no autocast there: inputs come in the compute dtype
            dtype = compute_dtype(recipe)
        return cls(
            family=recipe.model.family,
            flow=recipe.flow,
            dtype=dtype,
            frames=recipe.data.frames,
            audio_tokens=recipe.model.audio_tokens if tiny else None,
            use_cross_timestep=False if tiny else recipe.model.use_cross_timestep,
        )


def compute_dtype(recipe: Recipe) -> torch.dtype:
    """What a sharded model computes in; its masters are float32."""
    return torch.bfloat16 if recipe.train.mixed_precision == "bf16" else torch.float32


def shift_of(flow: Flow, tokens: int) -> float:
    """The shift ``s`` of ``s t / (1 + (s - 1) t)``. ``ltx2``: ``exp(mu)``, mu linear in the token count, 0.95 at 1024
    and 2.05 at 4096 (the scheduler settings of the released LTX-2)."""
    if flow.shift == "ltx2":
        return math.exp(0.95 + (2.05 - 0.95) * (tokens - 1024) / (4096 - 1024))
    return flow.shift


def shifted(t: torch.Tensor, shift: float) -> torch.Tensor:
    """Noise levels pushed towards 1 for shift > 1; 0 and 1 stay."""
    return shift * t / (1 + (shift - 1) * t)


def draw_noise_levels(flow: Flow, count: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """``count`` noise levels in [sigma_min, 1]."""
    if flow.sigmas == "uniform":
        t = torch.rand(count, generator=generator)
    else:
        t = torch.sigmoid(torch.randn(count, generator=generator))
    return shifted(t, shift_of(flow, tokens)).clamp(min=flow.sigma_min)


def free_tokens(grid: tuple[int, int, int], given: str = "first_frame") -> torch.Tensor:
    """(N, 1): 0 for the tokens of the first latent frame where it is given, 1 for those to be generated."""
    free = torch.ones(grid)
    if given == "first_frame":
        free[0] = 0
    return free.reshape(-1, 1)


def velocity_from_x0(noisy: torch.Tensor, x0: torch.Tensor, sigma: torch.Tensor | float) -> torch.Tensor:
    """``(x_t - x_0) / sigma``."""
    return (noisy - x0) / sigma


def x0_from_velocity(noisy: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor | float) -> torch.Tensor:
    """``x_t - sigma velocity``."""
    return noisy - sigma * velocity


def call_model(
    model: torch.nn.Module,
    settings: Settings,
    noisy: torch.Tensor,
    sigma: torch.Tensor,
    batch: Batch,
    grid: tuple[int, int, int],
    generator: torch.Generator,
) -> torch.Tensor:
    """The raw video output, float32 (B, N, C).

    Args:
        noisy: (B, N, C), the given tokens clean.
        sigma: (B,), noise level of the tokens to be generated.
        batch: ``text`` (B, L, D), ``rate`` (B,) in frames a second; for LTX-2 ``audio_text`` and ``text_mask`` (B, L).
        grid: latent frames, height, width.
        generator: of the audio noise.
    """
    if settings.family == "wan":
        return _call_wan(model, settings, noisy, sigma, batch, grid)
    return _call_ltx2(model, settings, noisy, sigma, batch, grid, generator)


def _call_wan(
    model: torch.nn.Module,
    settings: Settings,
    noisy: torch.Tensor,
    sigma: torch.Tensor,
    batch: Batch,
    grid: tuple[int, int, int],
) -> torch.Tensor:
    timestep = TIMESTEPS * sigma
    if settings.flow.given == "first_frame":
        patch = getattr(model, "module", model).config.patch_size
        own = tuple(size // p for size, p in zip(grid, patch, strict=True))
        timestep = timestep[:, None] * free_tokens(own).to(noisy.device)[None, :, 0]
    (video,) = model(
        hidden_states=unpack_tokens(noisy, grid).to(settings.dtype),
        timestep=timestep,
        encoder_hidden_states=batch["text"].to(noisy.device, settings.dtype),
        return_dict=False,
    )
    return pack_tokens(video.float())


def _call_ltx2(
    model: torch.nn.Module,
    settings: Settings,
    noisy: torch.Tensor,
    sigma: torch.Tensor,
    batch: Batch,
    grid: tuple[int, int, int],
    generator: torch.Generator,
) -> torch.Tensor:
    inner = getattr(model, "module", model)
    device, count = noisy.device, len(noisy)
    rates = batch["rate"].tolist()
    if settings.audio_tokens is None:
        audio_tokens = max(1, round(settings.frames / min(rates) * inner.audio_rope.audio_latents_per_second))
        audio = torch.randn(count, audio_tokens, inner.config.audio_in_channels, generator=generator)
    else:
        audio_tokens = settings.audio_tokens
        audio = torch.zeros(count, audio_tokens, inner.config.audio_in_channels)
    unknown = torch.full((count,), TIMESTEPS, device=device)
    timestep = TIMESTEPS * sigma
    video, _ = model(
        hidden_states=noisy.to(settings.dtype),
        audio_hidden_states=audio.to(device, settings.dtype),
        encoder_hidden_states=batch["text"].to(device, settings.dtype),
        audio_encoder_hidden_states=batch["audio_text"].to(device, settings.dtype),
        timestep=timestep[:, None] * free_tokens(grid, settings.flow.given).to(device)[None, :, 0],
        audio_timestep=unknown,
        sigma=timestep,
        audio_sigma=unknown,
        encoder_attention_mask=batch["text_mask"].to(device),
        audio_encoder_attention_mask=batch["text_mask"].to(device),
        num_frames=grid[0],
        height=grid[1],
        width=grid[2],
        video_coords=torch.cat([inner.rope.prepare_video_coords(1, *grid, device, fps=rate) for rate in rates]),
        audio_num_frames=audio_tokens,
        use_cross_timestep=settings.use_cross_timestep,
        return_dict=False,
    )
    return video.float()


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What a loss draws, on the CPU: ``sigma`` (B,), ``noise`` (B, N, C), and where further noise comes from."""

    sigma: torch.Tensor
    noise: torch.Tensor
    generator: torch.Generator

    @classmethod
    def draw(cls, flow: Flow, shape: tuple[int, int, int], generator: torch.Generator) -> Noise:
        """For ``shape``: samples, tokens, channels."""
        count, tokens, _ = shape
        sigma = draw_noise_levels(flow, count, tokens, generator)
        return cls(sigma=sigma, noise=torch.randn(shape, generator=generator), generator=generator)


def sample_losses(
    model: torch.nn.Module,
    settings: Settings,
    batch: Batch,
    noise: Noise | torch.Generator,
    device: torch.device,
    teacher: torch.nn.Module | None = None,
) -> torch.Tensor:
    """(B,): mean squared error of the model's output over the tokens to be generated, for each sample of the batch.

    Against ``x_0`` or the velocity, whichever the output is read as; the first is the second weighted by sigma squared.
    Or against what ``teacher`` makes of the same inputs.
    All noise is drawn on the CPU, so that every device sees the same; it may have been drawn before.
    """
    grid = tuple(batch["latents"].shape[2:])
    clean = pack_tokens(batch["latents"]).float().to(device)
    if isinstance(noise, torch.Generator):
        noise = Noise.draw(settings.flow, tuple(clean.shape), noise)
    sigma, generator, noise = noise.sigma.to(device), noise.generator, noise.noise.to(device)
    free = free_tokens(grid, settings.flow.given).to(device)
    level = sigma[:, None, None] * free
    noisy = (1 - level) * clean + level * noise
    target = clean if settings.flow.prediction == "x0" else noise - clean
    if teacher is not None:
        before_audio = generator.get_state()
        with torch.no_grad():
            target = call_model(teacher, settings, noisy, sigma, batch, grid, generator)
        generator.set_state(before_audio)
    output = call_model(model, settings, noisy, sigma, batch, grid, generator)
    return ((output - target).square() * free).sum((1, 2)) / (free.sum() * clean.shape[2])


def training_loss(*arguments: Any) -> torch.Tensor:
    """The mean of `sample_losses`, which takes the same arguments."""
    return sample_losses(*arguments).mean()


@torch.no_grad()
def sample(
    model: torch.nn.Module, settings: Settings, batch: Batch, *, steps: int, seed: int, device: torch.device
) -> torch.Tensor:
    """Generate latents (B, C, F, H, W), float32 on the CPU, from the first latent frame of ``batch`` where it is given.

    Euler steps from noise level 1 to 0; the same seed gives the same noise on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    grid = tuple(batch["latents"].shape[2:])
    given = pack_tokens(batch["latents"]).float().to(device)
    free = free_tokens(grid, settings.flow.given).to(device)
    levels = shifted(torch.linspace(1, 0, steps + 1), shift_of(settings.flow, given.shape[1])).tolist()
    x = torch.where(free > 0, torch.randn(given.shape, generator=generator).to(device), given)
    for now, after in zip(levels[:-1], levels[1:], strict=True):
        sigma = torch.full((len(x),), now, device=device)
        output = call_model(model, settings, x, sigma, batch, grid, generator)
        velocity = velocity_from_x0(x, output, now) if settings.flow.prediction == "x0" else output
        x = torch.where(free > 0, x + (after - now) * velocity, given)
    return unpack_tokens(x, grid).cpu()
