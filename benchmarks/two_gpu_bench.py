"""Two ranks against one: sharded training, context parallelism, and a packed model over two devices.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/two_gpu_bench.py [--parts tiny full packed] [--layers 48]
    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/two_gpu_bench.py --device cpu     # the same code, tiny, gloo

tiny     FSDP2 over 2 ranks, batch 1 each, against 1 rank that accumulates 2: losses of 20 steps, global scales,
         checkpoints across 1 and 2; Ulysses over 2 against one process, outputs and gradients.
full     LTX-2 (18.9B parameters with 48 layers, random), 4290 video and 1024 text tokens a rank: float32 masters in
         shards, bfloat16 compute, gradient checkpointing, 8-bit AdamW. The step dense, then patched: time and memory.
         No rank ever holds the whole model in float32.
packed   LTX-2 in bfloat16, patched and deployed on one device, then split over two by accelerate's device map.

Prints a markdown table last; the exit status is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import qatpatch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

from context import enable_context_parallel  # noqa: E402
from sharding import blocks_of, load_state, materialise, save_state, shard  # noqa: E402

GIB = 1024**3
STEPS = 20
TIME_BAR, MEMORY_BAR = 1.30, 1.05
TINY: dict[str, Any] = dict(
    in_channels=16,
    out_channels=16,
    num_attention_heads=2,
    attention_head_dim=128,
    cross_attention_dim=256,
    audio_in_channels=8,
    audio_out_channels=8,
    audio_num_attention_heads=2,
    audio_attention_head_dim=64,
    audio_cross_attention_dim=128,
    caption_channels=32,
    rope_type="split",
)


@dataclass
class Bench:
    """One rank's view of the run, and the rows of the table.

    Attributes:
        host: a group for words between the processes, which occupies no GPU.
        compute: what models compute in.
    """

    device: torch.device
    rank: int
    world: int
    host: dist.ProcessGroup
    options: argparse.Namespace
    rows: list[tuple[str, str, str, bool]] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def compute(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    def row(self, what: str, found: str, bar: str = "-", passed: bool = True) -> None:
        self.rows.append((what, found, bar, passed))
        self.say(f"{what}: {found} (bar {bar}){'' if passed else '  MISSED'}")

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", flush=True)

    def largest(self, value: float) -> float:
        """Over the ranks."""
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, value, group=self.host)
        return max(everyone)

    def mean(self, values: list[float]) -> list[float]:
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, values, group=self.host)
        return [statistics.fmean(at) for at in zip(*everyone, strict=True)]

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


_BEGAN = time.monotonic()


def ltx2(config: dict[str, Any], device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A random LTX-2; the same seed gives the same weights on every rank."""
    from diffusers import LTX2VideoTransformer3DModel

    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LTX2VideoTransformer3DModel(**config)
    finally:
        torch.set_default_dtype(torch.float32)


def inputs(
    model: nn.Module, grid: tuple[int, int, int], text: int, audio: int, dtype: torch.dtype, device: Any, seed: int
) -> dict[str, Any]:
    """One sample; noise levels and positions stay in float32."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    mask = torch.ones(1, text, device=device, dtype=dtype)
    return dict(
        hidden_states=noise(1, math.prod(grid), config.in_channels),
        audio_hidden_states=noise(1, audio, config.audio_in_channels),
        encoder_hidden_states=noise(1, text, config.caption_channels),
        audio_encoder_hidden_states=noise(1, text, config.caption_channels),
        timestep=torch.full((1,), 500.0, device=device),
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        num_frames=grid[0],
        height=grid[1],
        width=grid[2],
        fps=24.0,
        audio_num_frames=audio,
        return_dict=False,
    )


def loss_of(model: nn.Module, data: dict[str, Any]) -> torch.Tensor:
    """Something to learn: the input's own channels, moved by one."""
    return (model(**data)[0].float() - data["hidden_states"].float().roll(1, -1)).square().mean()


class Scales(TorchDispatchMode):
    """Collects the weights' global scales that the linears of a forward compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.qatpatch.linear.default:
            _, weight, *_, rule, _ = args
            self.seen.append(float(qatpatch.nvfp4.choose_global_scale(weight, rule)))
        return out


def scales_of(model: nn.Module, data: dict[str, Any]) -> list[float]:
    scales = Scales()
    with torch.no_grad(), scales:
        model(**data)
    return scales.seen


# tiny


def tiny(bench: Bench) -> None:
    both = DeviceMesh(bench.device.type, torch.arange(bench.world))
    names = ("replica", "alone")
    alone = DeviceMesh(bench.device.type, torch.arange(bench.world).unsqueeze(1), mesh_dim_names=names)["alone"]
    sample = functools.cache(functools.partial(_tiny_sample, bench))

    def sharded(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = ltx2({**TINY, "num_layers": 2}, bench.device, torch.float32)
        qatpatch.apply(model)
        model.train().enable_gradient_checkpointing()
        shard(model, mesh=mesh, compute=bench.compute)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, micro: Any) -> list[float]:
        losses = []
        for step in steps:
            total = 0.0
            for index in micro:
                loss = loss_of(model, sample(step, index))
                (loss / len(micro)).backward()
                total += float(loss.detach()) / len(micro)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        return losses

    two, two_optimizer = sharded(both)
    one, one_optimizer = sharded(alone)
    together = bench.mean(train(two, two_optimizer, range(STEPS), [bench.rank]))
    accumulated = train(one, one_optimizer, range(STEPS), range(bench.world))
    worst = bench.largest(max(abs(a - b) / b for a, b in zip(together, accumulated, strict=True)))
    fell = f"{together[0]:.4f} to {together[-1]:.4f}"
    bench.row(f"losses of {STEPS} steps, 2 ranks against 1 ({fell})", f"{worst:.2e} relative", "<= 1e-3", worst <= 1e-3)
    ours, theirs = scales_of(two, sample(0, 0)), scales_of(one, sample(0, 0))
    bench.row(f"global scales of {len(ours)} linears after training", *_verdict(bool(ours) and ours == theirs))

    folder = _shared_folder(bench)
    for name, written, state, mine, theirs in (
        ("2 ranks, read by 1", two, two_optimizer, both, alone),
        ("1 rank, read by 2", one, one_optimizer, alone, both),
    ):
        # Every rank has a lone model of its own, all equal; rank 0's is the one that is read.
        target = folder / (name[0] if mine is both else f"{name[0]}_{bench.rank}")
        save_state(target, written, state, group=mine.get_group())
        dist.barrier(group=bench.host)
        reader, reader_optimizer = sharded(theirs)
        source = target if mine is both else target.with_name("1_0")
        load_state(source, reader, reader_optimizer, group=theirs.get_group())
        same = _same(written.state_dict(), reader.state_dict()) and _same(_moments(state), _moments(reader_optimizer))
        bench.row(f"checkpoint of {name}: weights and moments", *_verdict(bench.largest(not same) == 0))
    dist.barrier(group=bench.host)
    if bench.rank == 0:
        shutil.rmtree(folder)
    _ulysses(bench)


def _tiny_sample(bench: Bench, step: int, index: int) -> dict[str, Any]:
    shape = ltx2({**TINY, "num_layers": 0}, "meta", torch.float32)
    return inputs(shape, (3, 4, 4), 12, 5, bench.compute, bench.device, 1000 * step + index)


def _ulysses(bench: Bench) -> None:
    def build() -> nn.Module:
        model = ltx2({**TINY, "num_layers": 2}, bench.device, torch.float32).train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.std() == 0:
                    parameter.add_(0.05 * torch.randn_like(parameter))
        qatpatch.apply(model)
        return model

    single, split = build(), build()
    data = inputs(single, (4, 8, 8), 16, 6, torch.float32, bench.device, 5)
    enable_context_parallel(split, bench.world)
    outs, gradients = [], []
    for model in (single, split):
        out = model(**data)[0]
        (out - data["hidden_states"].roll(1, -1)).square().mean().backward()
        outs.append(out.detach())
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for gradient in gradients[1].values():
        dist.all_reduce(gradient)
    away = bench.largest(_distance(outs[1], outs[0]))
    bench.row("Ulysses over 2 against one process, float32: output", f"{away:.1e} relative", "<= 1e-3", away <= 1e-3)
    away = bench.largest(max(_distance(gradients[1][n], g) for n, g in gradients[0].items()))
    bench.row("the same: gradients", f"{away:.1e} relative", "<= 1e-2", away <= 1e-2)
    with torch.no_grad(), qatpatch.infer_attention(single), qatpatch.infer_attention(split):
        away = bench.largest(_distance(split(**data)[0], single(**data)[0]))
    bench.row("the same inside infer_attention: output", f"{away:.1e} relative", "<= 1e-3", away <= 1e-3)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-12))


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(_whole(t), _whole(other[n])) for n, t in one.items())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """By position, since names are the model's."""
    moments = {}
    for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
        for name, value in optimizer.state.get(parameter, {}).items():
            moments[f"{index}.{name}"] = value
    return moments


def _verdict(equal: bool) -> tuple[str, str, bool]:
    return ("equal" if equal else "different"), "equal", equal


def _shared_folder(bench: Bench) -> Path:
    name: list[Any] = [tempfile.mkdtemp(prefix="two_gpu_bench_") if bench.rank == 0 else None]
    dist.broadcast_object_list(name, src=0, group=bench.host)
    return Path(name[0])


# full


def full(bench: Bench) -> None:
    options = bench.options
    size = {} if bench.on_gpu else TINY
    model = ltx2({**size, "num_layers": options.layers, "rope_type": "split"}, "meta", torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    model.train().enable_gradient_checkpointing()
    if options.compile:
        for block in blocks_of(model):
            block.forward = torch.compile(block.forward, fullgraph=True)
    shard(model, compute=torch.bfloat16)
    materialise(model, bench.device, functools.partial(_random, torch.Generator(bench.device).manual_seed(bench.rank)))
    optimizer = _optimizer(options.optimizer, model)
    bench.say(f"full: {count / 1e9:.2f}B parameters in shards, {_allocated(bench):.1f} GiB a rank")
    shape = ((11, 15, 26), 1024, 126) if bench.on_gpu else ((2, 4, 4), 12, 5)
    data = inputs(model, *shape, torch.bfloat16, bench.device, 100 + bench.rank)

    dense = _measure(bench, "dense", model, optimizer, data)
    report = qatpatch.apply(model)
    watched = next(p for n, p in model.named_parameters() if n.endswith("attn1.to_q.weight"))
    before = watched.to_local().clone()
    patched = _measure(bench, "patched", model, optimizer, data)
    bench.row("linears, attentions patched", f"{len(report.linears)}, {len(report.attentions)}", "12, 2 a layer",
              (len(report.linears), len(report.attentions)) == (12 * options.layers, 2 * options.layers))  # fmt: skip
    bench.row("parameters", f"{count / 1e9:.2f}B, float32 masters, {options.optimizer}")
    moved = not torch.equal(before, watched.to_local())
    fine = bench.largest(not (moved and math.isfinite(patched["loss"]))) == 0
    bench.row("weights move, losses are finite", "yes" if fine else "no", "yes", fine)
    for name, bar in (("forward and backward s", None), ("optimizer s", None), ("step s", TIME_BAR)):
        _ratio(bench, name, dense, patched, bar if bench.on_gpu else None)
    if bench.on_gpu:
        _ratio(bench, "peak GiB", dense, patched, MEMORY_BAR)
    bench.row("host memory, largest", f"{_host_peak():.1f} GiB a rank")


def _random(generator: torch.Generator, name: str, shard_: torch.Tensor) -> None:
    if name.endswith("weight") and shard_.dim() > 1:
        shard_.normal_(0.0, 0.02, generator=generator)
    elif "norm" in name and name.endswith("weight"):
        shard_.fill_(1.0)
    else:
        shard_.normal_(0.0, 0.02, generator=generator)


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-5)
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=1e-5)


def _measure(
    bench: Bench, state: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, data: dict[str, Any]
) -> dict[str, float]:
    """Medians of steps after a first one, over the slower rank; what that one takes is said, not measured."""
    times: dict[str, list[float]] = {"forward and backward s": [], "optimizer s": [], "step s": []}
    loss = torch.zeros(())
    for sample in range(bench.options.samples + 1):
        if sample == 1 and bench.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier(group=bench.host)
        bench.synchronize()
        begin = time.perf_counter()
        loss = loss_of(model, data)
        loss.backward()
        loss = loss.detach()
        bench.synchronize()
        middle = time.perf_counter()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        bench.synchronize()
        end = time.perf_counter()
        bench.say(f"{state} step {sample}: {middle - begin:.2f} s and {end - middle:.2f} s, loss {float(loss):.4f}")
        if sample:
            for name, seconds in zip(times, (middle - begin, end - middle, end - begin), strict=True):
                times[name].append(bench.largest(seconds))
    result = {name: statistics.median(values) for name, values in times.items()}
    result["loss"] = float(loss)
    result["peak GiB"] = bench.largest(torch.cuda.max_memory_allocated() / GIB if bench.on_gpu else 0.0)
    return result


def _ratio(bench: Bench, name: str, dense: dict[str, float], patched: dict[str, float], bar: float | None) -> None:
    ratio = patched[name] / max(dense[name], 1e-9)
    found = f"{dense[name]:.3f} dense, {patched[name]:.3f} patched: {ratio:.3f}"
    bench.row(name, found, "-" if bar is None else f"<= {bar}", bar is None or ratio <= bar)


def _allocated(bench: Bench) -> float:
    return torch.cuda.memory_allocated() / GIB if bench.on_gpu else 0.0


def _host_peak() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


# packed


def packed(bench: Bench) -> None:
    with _one_at_a_time(bench) as mine:
        if mine:
            _packed(bench)


@contextlib.contextmanager
def _one_at_a_time(bench: Bench) -> Iterator[bool]:
    """Rank 0 works on both devices; the others wait without touching theirs."""
    dist.barrier(group=bench.host)
    yield bench.rank == 0
    dist.barrier(group=bench.host)


@torch.no_grad()
def _packed(bench: Bench) -> None:
    from accelerate import dispatch_model

    options = bench.options
    size = {} if bench.on_gpu else TINY
    dtype = torch.bfloat16
    model = ltx2({**size, "num_layers": options.layers, "rope_type": "split"}, bench.device, dtype)
    model.eval().requires_grad_(False)
    shape = ((11, 15, 26), 1024, 126) if bench.on_gpu else ((2, 4, 4), 12, 5)
    data = inputs(model, *shape, dtype, bench.device, 7)
    qatpatch.apply(model)
    report = qatpatch.deploy(model)
    single = model(**data)
    held = _allocated(bench)
    milliseconds = _milliseconds(bench, lambda: model(**data))
    devices = ("cuda:0", "cuda:1") if bench.on_gpu else ("cpu", "cpu")
    where: dict[str, Any] = {name: devices[0] for name, _ in model.named_children() if name != "transformer_blocks"}
    where |= {name: devices[0] for name, _ in model.named_parameters(recurse=False)}
    for index in range(options.layers):
        where[f"transformer_blocks.{index}"] = devices[2 * index // options.layers]
    model = dispatch_model(model, where, force_hooks=True)
    split = model(**data)
    equal = all(torch.equal(a, b) for a, b in zip(single, split, strict=True))
    away = max(_distance(b.float(), a.float()) for a, b in zip(single, split, strict=True))
    bench.row(f"packed LTX-2 ({len(report.packed)} linears) split over {' and '.join(devices)}: outputs",
              f"{'equal' if equal else 'different'} ({away:.1e} relative)", "equal", equal)  # fmt: skip
    found = f"{milliseconds:.1f} ms on one, {_milliseconds(bench, lambda: model(**data)):.1f} ms on two"
    bench.row("its forward", found)
    if bench.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        split_held = " and ".join(f"{torch.cuda.memory_allocated(d) / GIB:.1f}" for d in devices)
        bench.row("its memory", f"{held:.1f} GiB on one, {split_held} GiB on two")


def _milliseconds(bench: Bench, call: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        bench.synchronize()
        begin = time.perf_counter()
        call()
        bench.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


PARTS: dict[str, Callable[[Bench], None]] = {"tiny": tiny, "full": full, "packed": packed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--layers", type=int, help="of the full and the packed model; default 48, on the CPU 2")
    parser.add_argument("--samples", type=int, default=3, help="steps that are measured, after one that is not")
    parser.add_argument("--optimizer", choices=("adamw8bit", "adamw", "none"), default="adamw8bit")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of the full model")
    options = parser.parse_args()
    options.layers = options.layers or (48 if options.device == "cuda" else 2)
    bench = start(options)
    try:
        for name in options.parts:
            bench.say(f"--- {name}")
            PARTS[name](bench)
            gc.collect()
            if bench.on_gpu:
                torch.cuda.empty_cache()
        dist.barrier(group=bench.host)
    finally:
        dist.destroy_process_group()
    if bench.rank == 0:
        print("\n| what | found | bar | |\n| --- | --- | --- | --- |")
        for what, found, bar, passed in bench.rows:
            print(f"| {what} | {found} | {bar} | {'' if bar == '-' else 'pass' if passed else 'MISSED'} |")
    return 0 if all(passed for *_, passed in bench.rows) else 1


def start(options: argparse.Namespace) -> Bench:
    if options.device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        device = torch.device("cpu")
    else:
        rank = int(dist.get_node_local_rank())
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    return Bench(device, dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"), options)


if __name__ == "__main__":
    sys.exit(main())
