"""AdamW in float32 or 8 bit, behind what the trainer needs of it.

moments float32     torch.optim.AdamW                     8 bytes a parameter
moments 8 bit       torchao.optim.AdamW8bit               2 bytes, on plain and on sharded parameters
                    bitsandbytes.optim.AdamW8bit          2 bytes, plain parameters on one GPU
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from recipe import RecipeError, Train


def build_optimizer(options: Train, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The recipe's optimizer over ``parameters``.

    Raises:
        RecipeError: its package is not installed.
    """
    arguments = dict(lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay)
    try:
        if options.optimizer == "adamw8bit":
            from torchao.optim import AdamW8bit
        elif options.optimizer == "bitsandbytes8bit":
            from bitsandbytes.optim import AdamW8bit
        else:
            parameters = list(parameters)
            # One kernel for all of them; on a CPU the plain steps, whose bits the recorded figures hold.
            return torch.optim.AdamW(parameters, fused=parameters[0].is_cuda, **arguments)
    except ImportError as error:
        package = "torchao" if options.optimizer == "adamw8bit" else "bitsandbytes"
        raise RecipeError(
            f"train.optimizer {options.optimizer} needs {package}, which cannot be imported ({error}): "
            f"pip install {package}, or use adamw"
        ) from error
    return AdamW8bit(parameters, **arguments)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of every parameter group; torchao keeps it in a tensor that its compiled step reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip_gradients(parameters: list[torch.nn.Parameter], largest: float) -> float:
    """Scale gradients to a norm of at most ``largest``; returns the norm before, over all shards."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, largest)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
