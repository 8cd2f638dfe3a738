"""audit: what a forward reaches, on any device."""

from __future__ import annotations

import pytest
import torch
from models import ltx2_inputs, tiny_ltx2, tiny_wan, wan_inputs
from torch import nn

import qatpatch
from qatpatch import Profile, Rule

FULL_SIZE = dict(num_frames=11, height=15, width=26, audio_num_frames=126, return_dict=False)


def full_size_inputs():
    def empty(*shape):
        return torch.empty(shape, device="meta")

    return dict(
        hidden_states=empty(1, 4290, 128),
        audio_hidden_states=empty(1, 126, 128),
        encoder_hidden_states=empty(1, 1024, 3840),
        audio_encoder_hidden_states=empty(1, 1024, 3840),
        timestep=empty(1),
        encoder_attention_mask=empty(1, 1024),
        audio_encoder_attention_mask=empty(1, 1024),
        **FULL_SIZE,
    )


@pytest.mark.slow
def test_a_full_size_ltx2_reaches_every_target_on_meta():
    from diffusers import LTX2VideoTransformer3DModel

    with torch.device("meta"):
        model = LTX2VideoTransformer3DModel()
    qatpatch.apply(model)
    report = qatpatch.audit(model, **full_size_inputs())
    assert len(report.reached) == 672 and report.unreached == () and report.stray_weights == {}
    quantized = [c for c in report.attention_calls if c.kernel == "reference_attention"]
    assert [c.module.rsplit(".", 1)[1] for c in quantized] == ["attn1", "attn2"] * 48
    assert {(c.query, c.key, c.mask) for c in quantized} == {
        ((1, 4290, 32, 128), (1, 4290, 32, 128), None),
        ((1, 4290, 32, 128), (1, 1024, 32, 128), (1, 32, 1, 1024)),
    }
    assert len(report.attention_calls) == 288 and sum(c.kernel == "sdpa" for c in report.attention_calls) == 192


@pytest.mark.parametrize("patched", [True, False])
def test_tiny_models_are_audited_with_or_without_a_patch(patched):
    model = tiny_ltx2()
    if patched:
        qatpatch.apply(model)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    report = qatpatch.audit(model, **ltx2_inputs(model))
    assert len(report.reached) == 28 and report.unreached == ()
    kernels = {c.kernel for c in report.attention_calls if c.module.endswith("0.attn1")}
    assert kernels == ({"reference_attention"} if patched else {"sdpa"})
    assert "28 of 28 targets reached" in str(report) and "<table>" in report._repr_html_()
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_fused_projections_leave_targets_that_are_named():
    model = tiny_wan(layers=1)
    qatpatch.apply(model)
    for name in ("attn1", "attn2"):  # around the method of the module, which the patch refuses
        attention = model.blocks[0].get_submodule(name)
        type(attention).fuse_projections(attention)
    report = qatpatch.audit(model, **wan_inputs(model))
    attn1 = {f"blocks.0.attn1.{n}" for n in ("to_q", "to_k", "to_v")}
    assert set(report.unreached) == attn1 | {"blocks.0.attn2.to_k", "blocks.0.attn2.to_v"}
    assert "blocks.0.attn1.to_q" in str(report)


def test_a_weight_used_outside_its_layer_is_named():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x):
            return self.up(x) @ self.up.weight

    model = Tied()
    qatpatch.apply(model, Profile(name="p", rules=(Rule(match=("up",), action="linear"),)))
    report = qatpatch.audit(model, x=torch.randn(2, 32))
    assert report.reached == {"up": True} and "mm" in report.stray_weights["up"]
