"""`sensitivity`: the damage of a layer, against a model of which only that layer is patched; no trace left."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from models import ltx2_inputs, tiny_ltx2, tiny_wan, wan_inputs
from torch import nn

import qatpatch
from qatpatch import PlanError, Profile, Rule, damage

ANY_LINEAR = Profile(name="all", rules=(Rule(match=("*",), action="linear"),))


class Net(nn.Module):
    """Blocks of two linears, with dropout; ``planted`` makes one lose all but its largest weights when quantized."""

    def __init__(self, planted: str = "", blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 48), "down": nn.Linear(48, 32)}) for _ in range(blocks)
        )
        self.unused = nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.5)
        if planted:
            with torch.no_grad():
                # The first input of every 16 is always 0 here, so that this changes nothing in the dense model.
                self.get_submodule(planted).weight[:, ::16] = 1e4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            mask = torch.arange(48) % 16 != 0
            x = x + block["down"](self.dropout(torch.tanh(block["up"](x * mask[:32])) * mask))
        return x


def alone(build, names, data, **arguments):
    """The relative error of a fresh model that is patched in ``names`` only."""
    model = build()
    linears, attentions = (
        [n for n in names if isinstance(model.get_submodule(n), nn.Linear) is k] for k in (True, False)
    )
    rules = [Rule(match=tuple(linears), action="linear"), Rule(match=tuple(attentions), action="attention")]
    with torch.no_grad():
        dense = [model(**d)[0].double() for d in data]
        qatpatch.apply(model, Profile(name="one", rules=tuple(rule for rule in rules if rule.match)), **arguments)
        quantized = [model(**d)[0].double() for d in data]
    squares = sum(((q - d) ** 2).sum() for q, d in zip(quantized, dense, strict=True))
    return float(torch.sqrt(squares / sum((d**2).sum() for d in dense)))


@pytest.mark.parametrize("planted", ["blocks.0.down", "blocks.1.up", "blocks.2.down"])
def test_a_planted_layer_ranks_first(planted):
    x = torch.randn(64, 32)
    report = qatpatch.sensitivity(Net(planted).eval(), [x], profile=ANY_LINEAR)
    worst, second = report.damages[:2]
    assert worst.name == planted and worst.error > 3 * second.error
    assert len(report.damages) == 7 and report.unreached == ("unused",)
    profile = report.profile(keep_dense_bytes=worst.dense_bytes)
    model = Net(planted).eval()
    plan = qatpatch.build_plan(model, profile)
    assert set(plan.linears) == {d.name for d in report.damages} - {planted}
    assert f"{planted} alone" in plan.skipped[planted] and "rank 1 of 7" in plan.skipped[planted]
    dense = model(x)
    qatpatch.apply(model, profile)
    assert (model(x) - dense).norm() / dense.norm() < worst.error / 3


@pytest.mark.parametrize("patched", [False, True], ids=["unpatched", "patched"])
def test_errors_are_those_of_models_with_that_layer_alone(patched):
    """Linears and attentions, over two batches."""
    model = tiny_wan(layers=1)
    data = [wan_inputs(model, seed=seed) for seed in (1, 2)]
    if patched:
        qatpatch.apply(model)
    report = qatpatch.sensitivity(model, data)
    assert qatpatch.is_patched(model) is patched
    found = {d.name: d.error for d in report.damages}
    assert len(found) == 11 and [d.error for d in report.damages] == sorted(found.values(), reverse=True)
    for name in ("blocks.0.attn1", "blocks.0.attn1.to_q", "blocks.0.attn2.to_out.0", "blocks.0.ffn.net.2"):
        expected = alone(lambda: tiny_wan(layers=1), [name], data)
        assert expected > 0 and found[name] == pytest.approx(expected, rel=1e-6), name
    everything = alone(lambda: tiny_wan(layers=1), list(found), data)
    assert report.error == pytest.approx(everything, rel=1e-6)


def test_several_outputs_count_alike():
    """LTX-2 gives video and audio: a mean of their squared relative errors."""
    model = tiny_ltx2(layers=1)
    data = ltx2_inputs(model, frames=1)
    report = qatpatch.sensitivity(model, [data], group=lambda name: name.split(".")[2])
    with torch.no_grad():
        dense = model(**data)
        qatpatch.apply(model, exclude=["*.attn2", "*.audio_to_video_attn", "*.video_to_audio_attn", "*.ff"])
        quantized = model(**data)
    shares = [((q - d).double().norm() / d.double().norm()) ** 2 for q, d in zip(quantized, dense, strict=True)]
    error = {d.name: d.error for d in report.damages}["attn1"]
    assert error == pytest.approx(float((sum(shares) / 2) ** 0.5), rel=1e-5)


def snapshot(model):
    """Everything that a measurement could leave behind."""
    found = {}
    for path, module in model.named_modules():
        attributes = {k: v for k, v in vars(module).items() if not k.startswith("_forward")}
        states = [
            s
            for s in (
                getattr(module, "quantization", None),
                getattr(getattr(module, "processor", None), "quantization", None),
            )
            if s
        ]
        hooks = (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._forward_hooks_always_called))
        state = [{k: v for k, v in vars(s).items() if k != "_kernels"} for s in states]
        found[path] = (type(module), type(getattr(module, "processor", None)), attributes, hooks, state)
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return found, tensors, grads, torch.get_rng_state()


def assert_untouched(before, after):
    for path, (cls, processor, attributes, hooks, state) in before[0].items():
        now = after[0][path]
        assert (cls, processor, hooks) == (now[0], now[1], now[3]), path
        assert attributes.keys() == now[2].keys() and len(state) == len(now[4])
        for key, value in attributes.items():
            assert value is now[2][key] or value == now[2][key], (path, key)
        for old, new in zip(state, now[4], strict=True):
            assert old.keys() == new.keys() and all(old[key] is new[key] for key in old), path
    assert before[1].keys() == after[1].keys() and all(torch.equal(v, after[1][k]) for k, v in before[1].items())
    assert all(g is after[2][n] or torch.equal(g, after[2][n]) for n, g in before[2].items())
    assert torch.equal(before[3], after[3])


@pytest.mark.parametrize("patched", [False, True], ids=["unpatched", "patched"])
def test_the_model_is_untouched(patched):
    model = tiny_wan(layers=1)
    data = wan_inputs(model, frames=1)
    if patched:
        qatpatch.apply(model)
        with torch.autocast("cpu", torch.bfloat16):
            model(**data)  # a trained dtype to lose
    model.train()
    model.blocks[0].attn1.eval()
    model(**data)[0].mean().backward()
    before = snapshot(model)

    def draws(output, batch):
        return (output[0] * torch.randn_like(output[0])).mean()

    report = qatpatch.sensitivity(model, [data], loss=draws, group="block")
    assert_untouched(before, snapshot(model))
    again = qatpatch.sensitivity(model, [data], loss=draws, group="block")
    assert again == report  # deterministic, to the bit
    calls = []

    def breaks(output, batch):
        calls.append(output)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        qatpatch.sensitivity(model, [data], loss=breaks)
    assert_untouched(before, snapshot(model))


def test_open_blocks_hold_and_close():
    model = tiny_ltx2(layers=1)
    data = ltx2_inputs(model, frames=1)
    qatpatch.apply(model)
    with qatpatch.stage(model, "base"):
        base = {d.name: d.error for d in qatpatch.sensitivity(model, [data]).damages}
    refine = {d.name: d.error for d in qatpatch.sensitivity(model, [data]).damages}
    staged = "transformer_blocks.0.audio_to_video_attn.to_q"
    assert base[staged] == 0 < refine[staged]
    with qatpatch.infer_attention(model, kernel="fa4"):
        other = {d.name: d.error for d in qatpatch.sensitivity(model, [data]).damages}
    assert other["transformer_blocks.0.attn1"] != refine["transformer_blocks.0.attn1"]
    with qatpatch.dense(model):
        assert {d.name: d.error for d in qatpatch.sensitivity(model, [data]).damages} == refine


@pytest.mark.parametrize("group, groups", [("layer", 7), ("block", 4), (lambda name: name.split(".")[-1], 3)])
def test_groups_bound_the_number_of_forwards(group, groups):
    model, forwards = Net().eval(), []
    model.register_forward_hook(lambda *_: forwards.append(1))
    report = qatpatch.sensitivity(model, [torch.randn(4, 32)] * 2, group=group, profile=ANY_LINEAR)
    assert len(report.damages) == groups and len(forwards) == 2 * (groups + 2)
    assert sum(len(d.linears) for d in report.damages) == 7


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("blocks.3.attn1.to_q", "blocks.3"),
        ("transformer.blocks.12.ff.net.0.proj", "transformer.blocks.12"),
        ("blocks.3", "blocks.3"),
        ("0", "0"),
        ("proj_out", "proj_out"),
        ("conv2d.weight", "conv2d.weight"),
    ],
)
def test_blocks_end_at_the_first_number(name, group):
    assert damage._block_of(name) == group


def test_batches_come_as_keywords_positions_or_tensors():
    x = torch.randn(4, 32)
    first, *others = (qatpatch.sensitivity(Net().eval(), [b], profile=ANY_LINEAR) for b in ({"x": x}, (x,), [x], x))
    assert all(other == first for other in others)
    model = tiny_wan(layers=1)
    data = wan_inputs(model, frames=1)
    tuples = qatpatch.sensitivity(model, [data], group="block")
    assert qatpatch.sensitivity(model, ({**data, "return_dict": True} for _ in range(1)), group="block") == tuples


def test_losses_are_means_and_changes():
    clean, model = (Net("blocks.1.up").eval() for _ in range(2))
    data = [torch.randn(8, 32) for _ in range(3)]

    def loss(out, x):
        with torch.no_grad():
            return (out - 1.5 * clean(x)).square().mean()

    report = qatpatch.sensitivity(model, data, loss=loss, profile=ANY_LINEAR)
    with torch.no_grad():
        expected = sum(float(loss(model(x), x)) for x in data) / 3
        qatpatch.apply(model, ANY_LINEAR)
        quantized = sum(float(loss(model(x), x)) for x in data) / 3
    assert report.loss == pytest.approx(expected, rel=1e-6)
    assert report.loss_change == pytest.approx(quantized - expected, rel=1e-4)
    ranked = report.ranked("loss_change")
    changes = {d.name: d.loss_change for d in ranked}
    assert list(changes.values()) == sorted(changes.values(), reverse=True)
    qatpatch.remove(model)
    qatpatch.apply(model, dataclasses.replace(ANY_LINEAR, rules=(Rule(match=("blocks.1.up",), action="linear"),)))
    with torch.no_grad():
        alone = sum(float(loss(model(x), x)) for x in data) / 3
    assert changes["blocks.1.up"] == pytest.approx(alone - expected, rel=1e-4)
    profile = report.profile(keep_dense_bytes=ranked[0].dense_bytes, by="loss_change")
    assert profile.rules[0].match == (ranked[0].name,) and "changes the loss by" in profile.rules[0].reason


@pytest.mark.parametrize("by", ["error", "loss_change"])
@pytest.mark.parametrize("share", [0.0, 0.07, 0.31, 0.8])
def test_profiles_of_real_models_keep_the_budget(share, by):
    model = tiny_ltx2(layers=1)
    data = ltx2_inputs(model, frames=1)
    report = qatpatch.sensitivity(model, [data], loss=lambda out, batch: out[0].square().mean())
    before = qatpatch.build_plan(model)
    weights = {name: model.get_submodule(name).weight.nbytes for name in before.linears}
    budget = int(share * sum(weights.values()))
    profile = report.profile(keep_dense_bytes=budget, by=by)
    plan = qatpatch.build_plan(model, profile)
    kept = set(before.linears) - set(plan.linears)
    spent = 0
    for row in report.ranked(by):
        fits = row.linears and getattr(row, by) > 0 and spent + weights[row.name] <= budget
        assert (row.name in kept) == bool(fits), row
        spent += weights[row.name] if fits else 0
    # The stages and everything else of the patch remain.
    assert set(plan.attentions) == set(before.attentions) and plan.mask_arguments == before.mask_arguments
    assert plan.scheme == before.scheme and plan.model_class == before.model_class
    for name, action in plan.linears.items():
        assert action.settings == before.linears[name].settings


def test_an_attention_is_kept_without_its_linears():
    model = tiny_wan(layers=1)
    data = wan_inputs(model, frames=1)
    report = qatpatch.sensitivity(model, [data])
    attention = next(d for d in report.damages if d.attentions)
    report = dataclasses.replace(report, damages=(dataclasses.replace(attention, error=9.0), *report.damages))
    total = sum(d.work for d in report.damages)
    plan = qatpatch.build_plan(model, report.profile(keep_dense_work=attention.work / total))
    assert attention.name not in plan.attentions and len(plan.linears) == 10


def test_work_is_counted_in_multiply_adds():
    model = tiny_wan(layers=1)  # dim 256, feed-forward 128, 2 heads of 128
    report = qatpatch.sensitivity(model, [wan_inputs(model, batch=2)] * 2, group="layer")
    work = {d.name.removeprefix("blocks.0."): d.work for d in report.damages}
    tokens, text, calls = 3 * 4 * 4, 12, 2 * 2
    assert work["attn1.to_q"] == work["attn2.to_out.0"] == calls * tokens * 256 * 256
    assert work["attn2.to_k"] == calls * text * 256 * 256
    assert work["ffn.net.0.proj"] == work["ffn.net.2"] == calls * tokens * 256 * 128
    assert work["attn1"] == calls * 2 * tokens * tokens * 256


def test_graphs_and_adapted_models_are_measured_like_plain_ones():
    from peft import LoraConfig

    model = tiny_wan(layers=1)
    data = wan_inputs(model, frames=1)
    expected = qatpatch.sensitivity(model, [data])
    graph = torch.export.export(model, (), data, strict=False).module()
    found = qatpatch.sensitivity(graph, [data], profile="wan")
    assert found.damages == expected.damages and not qatpatch.is_patched(graph)
    profile = found.profile(keep_dense_bytes=found.damages[0].dense_bytes)
    assert len(qatpatch.build_plan(model, profile).linears) == 9
    model.add_adapter(LoraConfig(target_modules=["to_q", "to_v"], r=2))
    adapted = qatpatch.sensitivity(model, [data])  # fresh adapters add zero
    assert [d.name for d in adapted.damages] == [d.name for d in expected.damages]
    assert len(qatpatch.build_plan(model, profile).linears) == 9


def test_compiled_models_are_measured_eagerly():
    x = torch.randn(4, 32)
    expected = qatpatch.sensitivity(Net().eval(), [x], profile=ANY_LINEAR)
    torch._dynamo.reset()
    model = Net().eval()
    model.compile(backend="eager")
    assert qatpatch.sensitivity(torch.compile(model, backend="eager"), [x], profile=ANY_LINEAR) == expected
    torch._dynamo.reset()


def test_an_output_that_breaks_is_the_worst():
    score = damage._Score()
    score.add([torch.tensor([float("nan"), 1.0])], [torch.tensor([1.0, 1.0])])
    assert score.error([torch.tensor(2.0)]) == float("inf")
    score = damage._Score()
    score.add([torch.ones(2), torch.zeros(2)], [torch.zeros(2), torch.zeros(2)])
    assert score.error([torch.zeros(()), torch.zeros(())]) == float("inf")
    score = damage._Score()
    score.add([torch.zeros(2)], [torch.zeros(2)])
    assert score.error([torch.zeros(())]) == 0.0


def test_what_cannot_be_measured_is_an_error():
    x = torch.randn(4, 32)

    def measure(model=None, batches=(x,), **arguments):
        return qatpatch.sensitivity(Net().eval() if model is None else model, batches, **arguments)

    with pytest.raises(ValueError, match="at least one batch"):
        measure(batches=[], profile=ANY_LINEAR)
    for one in (dict(x=x), x):
        with pytest.raises(ValueError, match=rf"one {type(one).__name__}; for a single batch write \[batch\]"):
            measure(batches=one, profile=ANY_LINEAR)
    with pytest.raises(ValueError, match="did you mean 'layer'"):
        measure(group="layers", profile=ANY_LINEAR)
    with pytest.raises(PlanError, match="no profile for Net"):
        measure()
    with pytest.raises(ValueError, match="one number"):
        measure(loss=lambda out, batch: out, profile=ANY_LINEAR)
    with pytest.raises(ValueError, match="dense model's output holds NaN"):
        measure(batches=[x / 0], profile=ANY_LINEAR)
    with pytest.raises(ValueError, match="no floating-point tensor"):
        model = nn.Sequential(nn.Linear(32, 32), nn.Flatten())
        model[1].forward = lambda y: "text"
        measure(model, profile=ANY_LINEAR)
    assert not qatpatch.is_patched(model)
    patched = Net().eval()
    qatpatch.apply(patched, ANY_LINEAR, input_scale="static")
    with pytest.raises(PlanError, match="leave out profile"):
        measure(patched, profile=ANY_LINEAR)
    with pytest.raises(PlanError, match="qatpatch.calibrate"):
        measure(patched)
    deployed = copy.deepcopy(Net().eval())
    qatpatch.apply(deployed, ANY_LINEAR)
    qatpatch.deploy(deployed)
    with pytest.raises(PlanError, match="before deploy"):
        measure(deployed)
