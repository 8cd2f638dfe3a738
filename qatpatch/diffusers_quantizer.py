"""diffusers saves and loads deployed models: `register_diffusers`, and the quantizer that a deployed model carries.

`deploy` and `load` put a `NVFP4Quantizer` on a diffusers model, where ``save_pretrained`` looks for one: it refuses
what cannot be saved before a file is written, and gives every file (each shard of it) the header that `save` writes.
``from_pretrained`` finds the method in ``config.json`` and asks diffusers' table for it, where `register_diffusers`
enters it. Everything else comes from the headers: packed layers and attentions are built on the meta device, names,
shapes, dtypes and checksums are compared before a weight is placed (diffusers itself only warns), and what is not in
the files (rotary tables) gets the dtype it had. Packed codes and scales are bytes, which no dtype request converts.

This module imports diffusers, so it is imported only where a model of it is at hand.
"""

from __future__ import annotations

import json
import logging
import weakref
from enum import StrEnum
from pathlib import Path
from typing import Any

import safetensors
import torch
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import nn

from qatpatch import dispatch
from qatpatch.description import (
    HEADER_KEY,
    VERSION,
    convert_computed,
    damaged,
    describe,
    parse,
    plain_config,
    prepare,
    same_config,
    same_description,
    seal,
    writable,
)
from qatpatch.errors import CheckpointError, PlanError
from qatpatch.linear_state import COMPUTE_DTYPES
from qatpatch.patch import Record, patch_record
from qatpatch.plan import RECORD
from qatpatch.tensor_files import expect_names

logger = logging.getLogger("qatpatch")


def register_diffusers() -> None:
    """Let diffusers' ``from_pretrained`` read deployed models, for the rest of this process.

    Adds one entry, ``qatpatch``, to each of diffusers' two tables of quantization methods, and changes none. Saving
    needs no registration.

    Raises:
        PlanError: another package registered that name.
    """
    for table, ours in (
        (AUTO_QUANTIZATION_CONFIG_MAPPING, NVFP4Config),
        (AUTO_QUANTIZER_MAPPING, NVFP4Quantizer),
    ):
        found = table.get(HEADER_KEY)
        if found is not None and found.__module__ != __name__:
            raise PlanError(f"diffusers' quantization method {HEADER_KEY!r} is {found.__module__}.{found.__name__}")
        table[HEADER_KEY] = ours


def attach(model: nn.Module) -> None:
    """Have ``save_pretrained`` of a deployed model write packed weights that can be read again."""
    quantizer = NVFP4Quantizer(NVFP4Config())
    quantizer.serve(model)
    model.hf_quantizer = quantizer


class _Method(StrEnum):
    NVFP4 = HEADER_KEY


class NVFP4Config(QuantizationConfigMixin):
    """The entry ``quantization_config`` in config.json. The settings of the layers are in the headers of the weights.

    Takes and drops the description that `save` repeats there for people.
    """

    def __init__(self, quant_method: str = HEADER_KEY, version: str = VERSION, **described: Any) -> None:
        self.quant_method = _Method(quant_method)
        self.version = version

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method.value, "version": self.version}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class NVFP4Quantizer(DiffusersQuantizer):
    """What diffusers asks while it saves and loads a deployed model, in the order of the methods.

    Refers to the model weakly; copies and pickles with it.
    """

    use_keep_in_fp32_modules = True
    is_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: NVFP4Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._model: weakref.ref[nn.Module] | None = None
        self._dtype: torch.dtype | None = None
        self._headers: _Headers | None = None
        self._record: Record | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None if self._model is None else self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if state["_model"] is not None:
            self._model = weakref.ref(state["_model"])

    def serve(self, model: nn.Module) -> None:
        """Become the quantizer of a deployed model."""
        self._model = weakref.ref(model)
        model.register_to_config(quantization_config=self.quantization_config)

    # Saving.

    @property
    def is_serializable(self) -> bool:
        """True, or raises CheckpointError with what keeps the model from being saved; asked before a file is written"""
        self._describe()
        return True

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The tensors to write and the header of each file."""
        if not safe_serialization:
            raise CheckpointError(
                "packed weights need the header of a safetensors file, which says how to read them; leave out "
                "safe_serialization=False"
            )
        tensors = _untied({name: writable(name, tensor) for name, tensor in state_dict.items()})
        return tensors, {HEADER_KEY: json.dumps(seal(self._describe(), tensors.items()))}

    def _describe(self) -> dict[str, Any]:
        model = None if self._model is None else self._model()
        if model is None or RECORD not in vars(model):
            raise CheckpointError("this quantizer belongs to no deployed model; call qatpatch.deploy(model)")
        return describe(model, patch_record(model))

    # Loading.

    def validate_environment(self, torch_dtype: torch.dtype | None = None, device_map: Any = None) -> None:
        """Refuse what cannot be loaded: before anything is read, and again when the device map is settled."""
        if not self.pre_quantized:
            raise CheckpointError(
                "qatpatch packs models that it trained: load this one without quantization_config, then qatpatch.apply "
                "and qatpatch.deploy it"
            )
        if torch_dtype is not None and torch_dtype not in COMPUTE_DTYPES:
            raise CheckpointError(f"torch_dtype={torch_dtype} is not one of float32, bfloat16, float16")
        if self._record is None or not isinstance(device_map, dict):
            return
        disk = [place for place, device in device_map.items() if device == "disk"]
        packed = [name for name in self._record.linears if any(f"{name}.".startswith(f"{d}.") or not d for d in disk)]
        if packed:
            raise CheckpointError(
                f"device_map puts {packed[0]} on the disk, and accelerate brings no packed weights back from there; "
                "map it to a device or the CPU, or use enable_group_offload(offload_to_disk_path=...)"
            )

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype | None:
        """None, which means that everything comes back in the dtype it was saved in, or the one that is asked for."""
        self._dtype = torch_dtype
        return torch_dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Read all headers."""
        self._headers = _Headers([Path(file) for file in checkpoint_files])
        self._headers.expect(set(loaded_keys), "the index of the files")
        return loaded_keys

    def _process_model_before_weight_loading(self, model: nn.Module, device_map: Any = None, **kwargs: Any) -> None:
        headers = self._headers
        if type(model).__name__ != headers.description["class"]:
            raise CheckpointError(
                f"{headers.files[0]} holds a {headers.description['class']}, and this is a {type(model).__name__}"
            )
        built, saved = plain_config(model), headers.description["config"]
        known = {key: value for key, value in saved.items() if key in built}  # diffusers drops keys that it outgrew
        same_config(built, known, f"the config of this {type(model).__name__}")
        self._record = prepare(model, headers.description, _first_device(device_map), self._dtype)
        headers.expect(set(model.state_dict()), f"the {type(model).__name__}")
        headers.fit(model)

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Compare the tensors of a file with their checksums, before they are converted and placed."""
        changed = damaged(self._headers.description, state_dict)
        if changed:
            raise CheckpointError(
                f"{self._headers.files[0].parent}: {changed} is not what was saved (its checksum differs); a file was "
                "changed"
            )
        return state_dict

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        convert_computed(model, self._headers.description, self._dtype)
        self._record.switch.context = dispatch.SharedSequence(model)
        vars(model)[RECORD] = self._record
        self.serve(model)
        logger.info("from_pretrained: %d packed linears", len(self._record.linears))
        self._headers = self._record = None
        return model

    def _dequantize(self, model: nn.Module) -> nn.Module:
        raise PlanError(
            "packed weights cannot be dequantized to what they were; load the original weights, or deploy with "
            "retain_original_weights=True and use qatpatch.dense or qatpatch.remove"
        )


def _untied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same, none sharing memory: safetensors' own writer refuses tied weights."""
    apart, seen = {}, set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if tensor.numel() > 0 and storage in seen else tensor
        seen.add(storage)
    return apart


class _Headers:
    """What the headers of a model's files say: the description, and shape and dtype of every tensor."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        descriptions = []
        for file in files:
            try:
                with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
                    descriptions.append(parse(opened.metadata() or {}, file))
                    for name in opened.keys():  # noqa: SIM118 (not a dict)
                        part = opened.get_slice(name)
                        self.shapes[name] = tuple(part.get_shape())
                        self.dtypes[name] = _SAFETENSORS_DTYPES.get(part.get_dtype())
            except (safetensors.SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is truncated or no safetensors file: {error}") from error
        self.description = same_description(descriptions, files)

    def expect(self, names: set[str], whose: str) -> None:
        """Raise where the files do not hold exactly ``names``."""
        expect_names(self.shapes, names, f"{self.files[0].parent} does not fit {whose}")

    def fit(self, model: nn.Module) -> None:
        """Compare shapes, and give what is still on meta the dtypes of the files."""
        for name, tensor in model.state_dict(keep_vars=True).items():
            dtype = self.dtypes[name]
            if self.shapes[name] != tuple(tensor.shape):
                raise CheckpointError(
                    f"{self.files[0].parent}: size mismatch for {name}: {list(self.shapes[name])} in the file, "
                    f"{list(tensor.shape)} in the model"
                )
            if dtype is None or (dtype == torch.uint8) != (tensor.dtype == torch.uint8):
                raise CheckpointError(f"{self.files[0].parent}: {name} must be {tensor.dtype}, the file has {dtype}")
            if tensor.is_meta:
                tensor.data = tensor.data.to(dtype)


_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}


def _first_device(device_map: Any) -> torch.device:
    """The device that computes: the accelerator where the map may use one, else the CPU."""
    if isinstance(device_map, dict):
        places = [place for place in device_map.values() if place != "disk" and torch.device(place).type != "cpu"]
        return torch.device(places[0] if places else "cpu")
    if device_map is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.accelerator.current_accelerator()
