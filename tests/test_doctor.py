"""The doctor: what it says of this machine, of a kernel that is wrong, and with which exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from test_proof import LastRowUnwritten, Linear, bind

from qatpatch import kernels
from qatpatch.cli import main
from qatpatch.doctor import diagnose

ROOT = Path(__file__).resolve().parent.parent


def test_it_runs_as_a_command_and_names_every_kernel():
    command = [sys.executable, "-m", "qatpatch", "doctor", "--device", "cpu"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    for kernel in kernels.TABLE:
        (line,) = [line for line in lines if line.startswith(f"| {kernel.name} ")]
        if kernel.device_types:
            assert line.endswith("| no: runs on cuda, not on cpu |")
        else:
            assert "| ok: " in line and "of its bound |" in line
    assert "| torch " in run.stdout and torch.__version__ in run.stdout
    assert "running reference_attention on cpu ..." in run.stderr
    # Markdown: every table has its rule below the header, and every row its columns.
    tables = run.stdout.split("\n\n")
    assert len(tables) == 3
    for table in tables:
        head, rule, *rows = table.strip().splitlines()
        assert set(rule) == {"|", "-", " "} and rows
        assert {line.count("|") for line in (head, rule, *rows)} == {head.count("|")}


def test_a_wrong_kernel_is_told_and_counts_in_the_exit_status(monkeypatch, capsys):
    row = bind(monkeypatch, LastRowUnwritten())
    assert main(["doctor", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if row.name in line]
    assert "FAILED: it disagrees with the reference" in line and "not finite" in line
    right = bind(monkeypatch, Linear())
    monkeypatch.setattr(kernels, "TABLE", tuple(k for k in kernels.TABLE if k is not row))
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    data = json.loads(capsys.readouterr().out)
    found = {finding["kernel"]: finding for finding in data["findings"]}
    assert found[right.name]["proven"] is True and found[right.name]["native"] and data["healthy"]
    assert found["flashinfer"]["usable"] is False and found["flashinfer"]["proven"] is None
    assert data["packages"]["torch"] and data["environment"]["python"]


def test_an_unknown_device_is_an_error_that_lists_what_there_is(capsys):
    assert main(["doctor", "--device", "cuda:7"]) == 2
    assert "there is no device cuda:7 here; there is cpu" in capsys.readouterr().err


def test_every_device_is_looked_at_on_its_own(monkeypatch):
    capabilities = {0: (9, 0), 1: (12, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[torch.device(device).index])
    monkeypatch.setattr(kernels, "TABLE", tuple(k for k in kernels.TABLE if k.native))
    found = diagnose([torch.device("cuda:0"), torch.device("cuda:1")]).findings
    states = {(f.kernel, f.architecture): f.reason for f in found}
    assert states["attn_qat_infer", "sm_90"] == "runs on sm_120, not on sm_90"
    assert states["attn_qat_infer", "sm_120"].startswith("needs fastvideo-kernel >=0.3.5,<0.4, which is not installed")
