"""`importlib.reload` of the whole package, as in a notebook: models that were patched before are still patched models.

In a process of its own, since modules that were reloaded have other classes than those that other tests imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import copy, importlib, sys, tempfile
import torch
torch.set_num_threads(1)
import qatpatch
import qatpatch.exporting, qatpatch.damage, qatpatch.diffusers_quantizer
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from models import run, tiny_wan, wan_inputs

model, static = tiny_wan(layers=1), tiny_wan(layers=1)
data = wan_inputs(model, frames=1, height=4, width=4)
dense = run(model, data)
qatpatch.apply(model)
qatpatch.apply(static, input_scale="static")
out = run(model, data)
deployed = copy.deepcopy(model)
qatpatch.deploy(deployed)
members = list(AttentionBackendName)

for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "qatpatch"]:
    importlib.reload(module)

def same(model):
    return torch.equal(run(model, data), out)

assert list(AttentionBackendName) == members
assert qatpatch.is_patched(model) and same(model)
try:
    qatpatch.apply(model)
except qatpatch.PlanError as error:
    assert "already patched" in str(error)
else:
    raise AssertionError("a second layer of patching")
with qatpatch.dense(model):
    assert torch.equal(run(model, data), dense)
with qatpatch.infer_attention(model), qatpatch.reuse_weights(model):
    assert same(model)
with qatpatch.calibrate(static):
    run(static, data)
assert {s.quantization.settings.static_scale is None for s in static.modules() if hasattr(s, "quantization")} == {False}
assert len(qatpatch.audit(model, **data).attention_calls) > 0
assert len(qatpatch.sensitivity(model, [data], group="block", progress=False).damages) == 1
directory = tempfile.mkdtemp()
qatpatch.export(static, directory, format="modelopt")
later = copy.deepcopy(model)
qatpatch.deploy(later)
for packed in (deployed, later):
    assert {layer.state for layer in qatpatch.report(packed).layers.values()} == {"deployed"} and same(packed)
    directory = tempfile.mkdtemp()
    qatpatch.save(packed, directory)
    assert same(qatpatch.load(directory))
    packed.save_pretrained(directory)
    qatpatch.register_diffusers()
    assert same(type(packed).from_pretrained(directory))
    try:
        qatpatch.remove(packed)
    except qatpatch.PlanError as error:
        assert "retain_original_weights" in str(error)
    else:
        raise AssertionError("removed without dense weights")
model.train()
model.enable_gradient_checkpointing()
model(**data)[0].square().mean().backward()
assert model.blocks[0].attn1.to_q.weight.grad.abs().sum() > 0
model.eval()
qatpatch.remove(model)
assert not qatpatch.is_patched(model) and torch.equal(run(model, data), dense)
assert type(model.blocks[0].attn1.to_q) is torch.nn.Linear
print("done")
"""


def test_models_patched_before_a_reload_go_on_working():
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-3000:]
