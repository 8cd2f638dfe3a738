"""infer_attention, dense, stage: what runs inside, and that exactly the state found comes back."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from models import ltx2_inputs, run, tiny_ltx2, tiny_wan, wan_inputs
from torch import nn

import qatpatch
from qatpatch import KernelUnavailable, PlanError


@pytest.fixture
def ltx2():
    model = tiny_ltx2()
    data = ltx2_inputs(model)
    dense = run(model, data)
    qatpatch.apply(model)
    return model, data, dense, run(model, data)


def test_infer_attention_says_what_it_bound(ltx2, caplog):
    model, data, _, out = ltx2
    caplog.set_level("INFO", logger="qatpatch")
    with qatpatch.infer_attention(model) as receipt:
        assert torch.equal(run(model, data), out)
        inside = qatpatch.report(model).layers["transformer_blocks.0.attn1"]
    assert receipt.line == (
        "infer_attention: 4 modules, arch=cpu kernel=reference_attention scheme=sage3 simulated=yes native=no"
    )
    assert receipt.line in caplog.messages and inside.state == "infer"
    assert qatpatch.report(model).layers["transformer_blocks.0.attn1"].state == "train"


def test_dense_is_the_original_model_with_current_weights(ltx2):
    model, data, dense, out = ltx2
    with qatpatch.dense(model):
        assert torch.equal(run(model, data), dense)
        assert {layer.state for layer in qatpatch.report(model).layers.values()} == {"dense"}
    assert torch.equal(run(model, data), out)


def test_stage_base_runs_the_refine_only_layers_dense(ltx2):
    model, data, dense, out = ltx2
    with qatpatch.stage(model, "base") as receipt:
        base = run(model, data)
    assert len(receipt.modules) == 6 and "stage 'base'" in receipt.line
    with qatpatch.stage(model, "refine"):
        assert torch.equal(run(model, data), out)
    # The same by excluding those layers from the patch.
    qatpatch.remove(model)
    names = ("audio_to_video_attn.to_q", "video_to_audio_attn.to_k", "video_to_audio_attn.to_v")
    qatpatch.apply(model, exclude=tuple(f"transformer_blocks.*.{name}" for name in names))
    assert torch.equal(run(model, data), base) and not torch.equal(base, out) and not torch.equal(base, dense)


def test_axes_take_the_innermost_block_still_open_in_any_order_of_closing(ltx2):
    model, data, dense, out = ltx2
    with qatpatch.stage(model, "base"):
        base = run(model, data)
    a, b, c = qatpatch.dense(model), qatpatch.infer_attention(model), qatpatch.stage(model, "base")
    a.__enter__()
    c.__enter__()
    assert torch.equal(run(model, data), dense)
    b.__enter__()
    mixed = run(model, data)
    assert not torch.equal(mixed, dense) and not torch.equal(mixed, out)
    a.__exit__(None, None, None)
    assert torch.equal(run(model, data), base)
    c.__exit__(None, None, None)
    assert torch.equal(run(model, data), out)
    b.__exit__(None, None, None)
    assert torch.equal(run(model, data), out)
    assert {layer.state for layer in qatpatch.report(model).layers.values()} == {"train"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_every_exit_restores(ltx2, error):
    model, data, _, out = ltx2
    for block in (qatpatch.dense(model), qatpatch.infer_attention(model), qatpatch.stage(model, "base")):
        with pytest.raises(error), block:
            raise error
    assert torch.equal(run(model, data), out)
    model.train()
    model(**data)[0].square().mean().backward()
    assert model.transformer_blocks[0].attn1.to_q.weight.grad.abs().sum() > 0


def test_a_failure_while_entering_restores(ltx2, monkeypatch):
    model, data, _, out = ltx2
    import qatpatch.swap

    class Broken:
        def info(self, *arguments):
            raise KeyboardInterrupt

    monkeypatch.setattr(qatpatch.swap, "logger", Broken())
    for block in (qatpatch.dense(model), qatpatch.infer_attention(model)):
        with pytest.raises(KeyboardInterrupt):
            block.__enter__()
    assert torch.equal(run(model, data), out)


def test_infer_attention_never_loses_gradients(ltx2):
    model, data, _, _ = ltx2
    for training in (True, False):
        model.train(training)
        with qatpatch.infer_attention(model), pytest.raises(RuntimeError, match="gradients would be lost"):
            model(**data)
    model.zero_grad()
    model(**data)[0].square().mean().backward()
    for block in model.transformer_blocks:
        for layer in (block.attn1.to_q, block.attn1.to_k, block.attn1.to_v, block.attn2.to_q):
            assert layer.weight.grad.abs().sum() > 0


def test_swaps_that_cannot_be_are_errors_with_the_reason():
    model = tiny_wan(layers=1)
    for swap in (qatpatch.infer_attention, qatpatch.dense):
        with pytest.raises(PlanError, match="not patched"), swap(model):
            pass
    with pytest.raises(PlanError, match="not patched, so it has no stages.*leave stage out"):
        with qatpatch.stage(model, "base"):
            pass
    qatpatch.apply(model, attention=False)
    with pytest.raises(PlanError, match="has no QAT attention"), qatpatch.infer_attention(model):
        pass
    with pytest.raises(PlanError, match="has no stages.*'wan'"), qatpatch.stage(model, "base"):
        pass
    with pytest.raises(PlanError, match="did you mean 'refine'"), qatpatch.stage(model, "refined"):
        pass
    qatpatch.remove(model)
    qatpatch.apply(model)
    with (
        pytest.raises(KernelUnavailable, match="reference_attention: emulates"),
        qatpatch.infer_attention(model, "native"),
    ):
        pass
    for typo, meant in (("sage4", "sage3"), ("fa_4", "fa4"), ("naitive", "native"), ("triton_atention", "triton_att")):
        said = f"no attention kernel called '{typo}'; did you mean '{meant}"
        with pytest.raises(KernelUnavailable, match=said), qatpatch.infer_attention(model, typo):
            pass
    with (
        pytest.raises(KernelUnavailable, match="no attention kernel called"),
        qatpatch.infer_attention(model, "reference_linear"),
    ):
        pass


def test_two_models_in_two_threads_swap_without_touching_each_other():
    models = [tiny_wan(layers=1, seed=s) for s in (0, 1)]
    data = wan_inputs(models[0], frames=1, height=4, width=4)
    dense = [run(m, data) for m in models]
    for model in models:
        qatpatch.apply(model)
    out = [run(m, data) for m in models]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(30):
            with qatpatch.dense(models[i]):
                if not torch.equal(run(models[i], data), dense[i]):
                    wrong.append(i)
            if not torch.equal(run(models[i], data), out[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["unpatched", "train", "infer", "dense", "deployed"])
def test_padded_text_tokens_never_change_ltx2(dtype, state):
    model = tiny_ltx2(dtype)
    data = ltx2_inputs(model, frames=2, text=16)
    data["encoder_attention_mask"][:, 9:] = 0
    data["audio_encoder_attention_mask"][:, 9:] = 0
    other = copy.deepcopy(data)
    for key in ("encoder_hidden_states", "audio_encoder_hidden_states"):
        other[key][:, 9:] = torch.randn_like(other[key][:, 9:]) * 30
    if state != "unpatched":
        qatpatch.apply(model)
    if state == "deployed":
        qatpatch.deploy(model)
    swap = {"infer": qatpatch.infer_attention, "dense": qatpatch.dense}.get(state)
    with swap(model) if swap else torch.no_grad():
        first = run(model, data)
        assert torch.isfinite(first).all() and torch.equal(first, run(model, other))
    visible = copy.deepcopy(data)
    visible["encoder_hidden_states"][:, 3] += 3
    assert not torch.equal(run(model, visible), run(model, data))


def test_ltx2s_all_ones_mask_leaves_attn2_quantized():
    model = tiny_ltx2()
    data = ltx2_inputs(model)
    qatpatch.apply(model, linear=False, exclude=("transformer_blocks.*.attn1",))
    out = run(model, data)
    without = {**data, "encoder_attention_mask": None, "audio_encoder_attention_mask": None}
    assert torch.equal(run(model, without), out)
    with qatpatch.dense(model):
        assert not torch.equal(run(model, data), out)


def test_switching_adds_one_compiled_graph_each_and_no_more():
    from torch._dynamo.testing import CompileCounterWithBackend

    model = tiny_wan(layers=1)
    data = wan_inputs(model, frames=1, height=4, width=4)
    qatpatch.apply(model)
    eager = run(model, data)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert torch.equal(run(compiled, data), eager) and counter.frame_count == 1
    for _ in range(2):
        with qatpatch.infer_attention(compiled):
            assert torch.equal(run(compiled, data), eager)
        assert torch.equal(run(compiled, data), eager)
    assert counter.frame_count == 2
    assert isinstance(compiled, nn.Module) and qatpatch.is_patched(compiled)


def test_another_scheme_runs_only_where_it_is_asked_for_by_name(ltx2):
    model, data, _, out = ltx2
    with qatpatch.infer_attention(model, kernel="fa4") as receipt:
        other = run(model, data)
    assert "scheme=fa4 simulated=no" in receipt.line and not torch.equal(other, out)
    with qatpatch.infer_attention(model, kernel="sage3") as receipt:
        assert torch.equal(run(model, data), out)
    assert "scheme=sage3 simulated=yes" in receipt.line
    qatpatch.deploy(model, attention_kernel="fa4")
    assert torch.equal(run(model, data), other)
    assert not qatpatch.report(model).layers["transformer_blocks.0.attn1"].simulated
