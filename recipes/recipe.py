"""The recipe: what a YAML file may say, typed.

Every key is checked before anything is loaded. An unknown key or name is an error that names the nearest valid one, and
all errors of a file come together. Paths inside a recipe are relative to the recipe's own folder, ``output`` to the
folder that the command runs in.

Deliberately not here: anything that runs. A recipe is a value.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qatpatch import list_kernels
from qatpatch.errors import PlanError, nearest
from qatpatch.profiles import PROFILES, find_profile
from qatpatch.profiles.rules import check_size


class RecipeError(ValueError):
    """A recipe, or something that it names, cannot be used; the message says what to change."""


class Section(BaseModel):
    """A part of the recipe: frozen, and without room for unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# diffusers' class of a family's transformer.
FAMILIES = {"ltx2": "LTX2VideoTransformer3DModel", "wan": "WanTransformer3DModel"}


class TinyModel(Section):
    """A randomly initialised transformer: tiny as a rule, and of any size.

    Attributes:
        config: arguments of the family's class, see `FAMILIES`.
        weights: a safetensors file of an earlier run (``transformer/diffusion_pytorch_model.safetensors`` of a dense
            one) to start from, instead of random values.
        text_tokens: length of the fixed random text embedding that stands for a caption.
        audio_tokens: zeros that stand for audio.
        init: ``whole`` makes the weights as the class does, in every process; ``shards`` draws each process's own shard
            on its device, for models that fit nowhere whole (needs ``parallel.sharding: fsdp2``).
    """

    kind: Literal["tiny"]
    family: Literal["ltx2", "wan"] = "ltx2"
    config: dict[str, Any]
    text_tokens: Annotated[int, Field(ge=1)] = 8
    audio_tokens: Annotated[int, Field(ge=1)] = 4
    init: Literal["whole", "shards"] = "whole"
    weights: Path | None = None

    @model_validator(mode="after")
    def _known_arguments(self) -> TinyModel:
        import diffusers

        model = getattr(diffusers, FAMILIES[self.family])
        known = [name for name in inspect.signature(model.__init__).parameters if name != "self"]
        wrong = [
            f"config.{name}: {FAMILIES[self.family]} has no such argument{nearest(name, known)}"
            for name in self.config
            if name not in known
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


class PretrainedModel(Section):
    """A model in diffusers' folder layout (``transformer/``, ``vae/``, ``text_encoder/``, ...).

    Attributes:
        path: a folder, or the name of a repository on the Hugging Face hub.
        dtype: of the trained weights.
        text_length: tokens that a caption is padded to; 512 for the released Wan models.
        use_cross_timestep: True for LTX-2.3 and newer, see ``LTX2VideoTransformer3DModel.forward``.
    """

    kind: Literal["pretrained"]
    family: Literal["ltx2", "wan"] = "ltx2"
    path: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    text_length: Annotated[int, Field(ge=1)] = 1024
    use_cross_timestep: bool = False


class Clip(Section):
    """Consecutive frames of one video file.

    Attributes:
        file: a path, or with ``package`` the name of one of that package's data files.
        package: an installed distribution that carries video files. It is never imported.
        start: index of the first frame.
        stride: every how many frames one is taken.
        caption: for the text encoder.
    """

    file: str
    package: str | None = None
    start: Annotated[int, Field(ge=0)] = 0
    stride: Annotated[int, Field(ge=1)] = 1
    caption: str = ""


class Data(Section):
    """What is trained on.

    Attributes:
        clips: the clips; with ``manifest`` added to them.
        manifest: a JSONL file with one `Clip` a line.
        frames, height, width: of every clip, in pixels; larger videos are scaled to cover and cropped at the centre.
        latents: how pixels become latents: a fixed invertible rearrangement, or the model's own VAE.
        patch: side of the patch that ``space_to_depth`` moves into channels.
        mean, std: of the clips' bytes, for ``space_to_depth``: what a VAE's ``latents_mean`` and ``latents_std`` are.
        cache: folder of the latent cache; by default inside the output folder.
        workers: processes that read the cache ahead.
    """

    clips: tuple[Clip, ...] = ()
    manifest: Path | None = None
    frames: Annotated[int, Field(ge=2)]
    height: Annotated[int, Field(ge=2)]
    width: Annotated[int, Field(ge=2)]
    latents: Literal["space_to_depth", "vae"]
    patch: Annotated[int, Field(ge=1)] = 16
    mean: Annotated[float, Field(ge=0, le=255)] = 128.0
    std: Annotated[float, Field(gt=0)] = 64.0
    cache: Path | None = None
    workers: Annotated[int, Field(ge=0)] = 0


class Quantization(Section):
    """Arguments of `qatpatch.apply`, the kernel that validation runs (`qatpatch.infer_attention`), and when it starts.

    Attributes:
        start_step: the first step that trains quantized; those before it train the same model dense.
    """

    profile: str = "auto"
    linear: bool = True
    attention: bool = True
    activations: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    target: str | None = None
    input_scale: Literal["dynamic", "unit"] = "dynamic"
    global_scale: Literal["pow2", "amax"] = "pow2"
    backward: Literal["high_precision", "quantized"] = "high_precision"
    infer_kernel: str | None = None
    start_step: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _known_names(self) -> Quantization:
        wrong = []
        is_file = self.profile.endswith((".toml", ".yaml", ".yml"))
        if not is_file and self.profile not in ("auto", *PROFILES):
            wrong.append(f"profile: there is no profile {self.profile!r}{nearest(self.profile, ('auto', *PROFILES))}")
        kernels = ["native", *(kernel.name for kernel in list_kernels() if kernel.op == "attention")]
        if self.infer_kernel is not None and self.infer_kernel not in kernels:
            hint = nearest(self.infer_kernel, kernels)
            wrong.append(f"infer_kernel: there is no attention kernel {self.infer_kernel!r}{hint}")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `qatpatch.apply`."""
        return self.model_dump(exclude={"infer_kernel", "start_step"})


class Flow(Section):
    """Flow matching: ``x_t = (1 - sigma) x_0 + sigma * noise``.

    Attributes:
        given: what a sample starts from: the clean first frame (LTX-2's image to video, Wan 2.2's TI2V), or nothing
            (text to video).
        prediction: what the model's output is read as, ``x_0`` or the velocity ``noise - x_0``.
        sigmas: distribution of the noise levels in training.
        shift: ``s * t / (1 + (s - 1) * t)`` is applied to every noise level; ``ltx2`` takes s from the token count.
        sigma_min: smallest noise level in training.
    """

    given: Literal["first_frame", "nothing"] = "first_frame"
    prediction: Literal["x0", "velocity"]
    sigmas: Literal["uniform", "logit_normal"] = "uniform"
    shift: Annotated[float, Field(gt=0)] | Literal["ltx2"] = 1.0
    sigma_min: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Train(Section):
    """The loop.

    Attributes:
        device: ``auto`` takes the accelerator when there is one.
        threads: CPU threads of torch; results on a CPU are the same only for the same number.
        accumulate: micro-batches an optimizer step.
        schedule: after a linear warm-up the learning rate stays, or follows a half cosine down to ``final_rate`` times
            its value.
        ema_decay: of the averaged weights that are validated and deployed; 0 for none.
        target: what the output is trained towards: the data, or what a ``teacher`` predicts (distillation), a frozen
            copy of the model as it was loaded, which is never quantized. With ``lora`` it is the frozen base itself,
            without adapters and dense for that one call: no copy.
        compile: compile the repeated blocks (`torch.compile`) for training; sampling runs them eagerly.
        optimizer: AdamW with float32 moments, or with 8-bit ones: torchao's (anywhere) or bitsandbytes' (one GPU).
    """

    steps: Annotated[int, Field(ge=1)]
    batch_size: Annotated[int, Field(ge=1)] = 1
    accumulate: Annotated[int, Field(ge=1)] = 1
    learning_rate: Annotated[float, Field(gt=0)]
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "cosine"] = "cosine"
    final_rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.98
    target: Literal["data", "teacher"] = "data"
    optimizer: Literal["adamw", "adamw8bit", "bitsandbytes8bit"] = "adamw"
    gradient_checkpointing: bool = False
    compile: bool = False
    mixed_precision: Literal["no", "bf16"] = "no"
    device: Literal["auto", "cpu"] = "auto"
    threads: Annotated[int, Field(ge=1)] | None = None


class Lora(Section):
    """Low-rank adapters: only they are trained, and they are merged before the model is packed.

    Attributes:
        targets: ends of the names of the layers that get one.
        alpha: the adapters' product is scaled by ``alpha / rank``; by default 1.
    """

    rank: Annotated[int, Field(ge=1)] = 32
    alpha: Annotated[float, Field(gt=0)] | None = None
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")


class Parallel(Section):
    """How several processes (``torchrun``, ``accelerate launch``) share the work. With one, nothing is shared.

    Attributes:
        sharding: ``none`` keeps whole weights in every process; ``fsdp2`` shards weights, gradients and optimizer
            state, with float32 masters and ``train.mixed_precision`` as compute dtype.
        context: processes that share one sequence (Ulysses), by tokens; needs ``fsdp2``.
    """

    sharding: Literal["none", "fsdp2"] = "none"
    context: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _parts_fit(self) -> Parallel:
        if self.context > 1 and self.sharding != "fsdp2":
            raise ValueError("context above 1 needs sharding: fsdp2, which sums what the processes of a sequence add")
        return self


class Validation(Section):
    """Sampling while training: the first clips, from fixed noise.

    Attributes:
        every: steps between two validations; 0 for none before the end.
        sampler_steps: Euler steps.
        seed: of the noise.
        clips: how many clips, from the first.
        offload_optimizer: move the optimizer's state to the CPU while sampling.
    """

    every: Annotated[int, Field(ge=0)] = 100
    sampler_steps: Annotated[int, Field(ge=1)] = 8
    seed: int = 1
    clips: Annotated[int, Field(ge=1)] = 1
    offload_optimizer: bool = False


class Checkpoint(Section):
    """Full training states: ``every`` how many steps (0 for none), and how many to ``keep``."""

    every: Annotated[int, Field(ge=0)] = 0
    keep: Annotated[int, Field(ge=1)] = 2


class Gate(Section):
    """What the reloaded packed model must reach, or the run fails.

    Attributes:
        ms_ssim: at least this against the ground truth.
        dense_figure: JSON file of a ``--dense`` run of the same steps and seed.
        dense_margin: MS-SSIM that may be lost against it.
    """

    ms_ssim: Annotated[float, Field(ge=0, le=1)]
    dense_figure: Path | None = None
    dense_margin: Annotated[float, Field(ge=0, le=1)] = 0.1


class Recipe(Section):
    """A whole recipe file.

    Attributes:
        name: of the recipe, by default the file's.
        seed: of weights, noise and data order.
        output: folder of the run.
    """

    name: str
    seed: int = 0
    output: Path
    model: Annotated[TinyModel | PretrainedModel, Field(discriminator="kind")]
    data: Data
    quantization: Quantization = Quantization()
    flow: Flow
    train: Train
    lora: Lora | None = None
    parallel: Parallel = Parallel()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    gate: Gate | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        if self.data.latents == "vae" and self.model.kind == "tiny":
            raise ValueError("data.latents 'vae' needs model.kind 'pretrained': a tiny model has no VAE")
        if self.data.latents == "space_to_depth":
            for side in ("height", "width"):
                if getattr(self.data, side) % self.data.patch:
                    raise ValueError(
                        f"data.{side} {getattr(self.data, side)} is not a multiple of data.patch {self.data.patch}"
                    )
        if self.model.kind == "tiny" and self.model.init == "shards" and self.model.weights is not None:
            raise ValueError("model.weights is read whole and model.init shards never holds a whole model: drop one")
        if self.model.kind == "tiny" and self.model.init == "shards" and self.parallel.sharding != "fsdp2":
            raise ValueError("model.init shards needs parallel.sharding fsdp2: without it there are no shards")
        if self.train.optimizer == "bitsandbytes8bit" and self.parallel.sharding == "fsdp2":
            raise ValueError(
                "train.optimizer bitsandbytes8bit quantizes whole tensors on one GPU and does not know shards, whose "
                "state it would mix up; use adamw8bit with parallel.sharding fsdp2"
            )
        if not self.data.clips and self.data.manifest is None:
            raise ValueError("data names no video: add data.clips or data.manifest")
        return self


def load_recipe(path: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read and check a recipe file.

    Args:
        path: the YAML file.
        overrides: dotted keys and their values, for example ``{"train.steps": 50}``, set before the check.

    Raises:
        RecipeError: the file is missing or does not parse, or with every key and name that is wrong.
    """
    path = Path(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
        check_size(data)
    except OSError as error:
        siblings = sorted(file.name for file in path.parent.glob("*.yaml"))
        hint = nearest(path.name, siblings) if siblings else ""
        raise RecipeError(f"the recipe {path} cannot be read: {error.strerror}{hint}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"the recipe {path} does not parse: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"the recipe {path} must hold sections, got {type(data).__name__}")
    data.setdefault("name", path.stem)
    for key, value in (overrides or {}).items():
        _override(data, key, value)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        lines = "\n".join(f"  {_explain(entry)}" for entry in error.errors())
        raise RecipeError(f"{path}:\n{lines}") from error
    return _resolved(recipe, path.parent)


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a key that is given twice, where YAML would silently keep the last."""


def _construct_mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def _override(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise RecipeError(f"--set {key}: {section} is no section of the recipe")
    data[last] = value


def _explain(entry: dict[str, Any]) -> str:
    """One line for one pydantic error: where, what, and the nearest valid name."""
    location = entry["loc"]
    where = ".".join(str(part) for part in location if part not in ("tiny", "pretrained"))
    kind, found = entry["type"], entry.get("input")
    if kind == "extra_forbidden":
        section = _section_at(location[:-1])
        return f"{where}: unknown key{nearest(str(location[-1]), section.model_fields)}"
    if kind == "missing":
        return f"{where}: missing, and it has no default"
    if kind == "literal_error":
        choices = [str(choice) for choice in _choices(location)]
        return f"{where}: {found!r} is not a choice{nearest(str(found), choices)}"
    if kind == "union_tag_invalid":
        return f"{where}.kind: {entry['ctx']['tag']!r} is not a choice{nearest(entry['ctx']['tag'], _TAGS)}"
    if kind == "union_tag_not_found":
        return f"{where}.kind: missing; known: {', '.join(_TAGS)}"
    if kind == "value_error":
        message = str(entry["ctx"]["error"])
        return f"{where}.{message}" if where else message
    return f"{where}: {entry['msg'][0].lower()}{entry['msg'][1:]}, got {found!r}"


_TAGS = {"tiny": TinyModel, "pretrained": PretrainedModel}


def _section_at(location: tuple[Any, ...]) -> type[Section]:
    """The section class that a pydantic location points into."""
    section: type[Section] = Recipe
    for part in location:
        if part in _TAGS:
            section = _TAGS[part]
        elif isinstance(part, str) and part in section.model_fields:
            annotation = section.model_fields[part].annotation
            candidates = [annotation, *getattr(annotation, "__args__", ())]
            section = next((c for c in candidates if inspect.isclass(c) and issubclass(c, Section)), section)
    return section


def _choices(location: tuple[Any, ...]) -> tuple[Any, ...]:
    names = [part for part in location if isinstance(part, str)]
    for depth in range(len(names) - 1, -1, -1):
        section = _section_at(location[: location.index(names[depth])])
        if names[depth] in section.model_fields:
            annotation = section.model_fields[names[depth]].annotation
            literals = [a for a in (annotation, *getattr(annotation, "__args__", ())) if hasattr(a, "__args__")]
            return tuple(value for literal in literals for value in literal.__args__ if isinstance(value, str))
    return ()


def _resolved(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with the paths it holds made absolute, and its profile file read once, to fail early."""

    def absolute(path: Path | None) -> Path | None:
        return None if path is None else (folder / path.expanduser()).resolve()

    clips = tuple(
        clip if clip.package else clip.model_copy(update={"file": str(absolute(Path(clip.file)))})
        for clip in recipe.data.clips
    )
    data = recipe.data.model_copy(
        update={"clips": clips, "manifest": absolute(recipe.data.manifest), "cache": absolute(recipe.data.cache)}
    )
    update: dict[str, Any] = {"data": data}
    if recipe.gate is not None:
        update["gate"] = recipe.gate.model_copy(update={"dense_figure": absolute(recipe.gate.dense_figure)})
    if recipe.quantization.profile.endswith((".toml", ".yaml", ".yml")):
        profile = str(absolute(Path(recipe.quantization.profile)))
        try:
            find_profile(profile, ())
        except PlanError as error:
            raise RecipeError(f"quantization.profile: {error}") from error
        update["quantization"] = recipe.quantization.model_copy(update={"profile": profile})
    if recipe.model.kind == "tiny":
        update["model"] = recipe.model.model_copy(update={"weights": absolute(recipe.model.weights)})
    elif (folder / Path(recipe.model.path).expanduser()).exists():
        update["model"] = recipe.model.model_copy(update={"path": str(absolute(Path(recipe.model.path)))})
    return recipe.model_copy(update=update)
