"""Every kernel that this GPU can run passes its proof here, and the rest says why not."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qatpatch import kernels
from qatpatch.doctor import diagnose
from qatpatch.kernels import proof, reference_nvfp4

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("kernel", kernels.TABLE, ids=lambda kernel: kernel.name)
def test_a_kernel_that_runs_here_passes_its_proof(kernel):
    reason = kernel.unavailable_reason(DEVICE)
    if reason is not None:
        assert kernel.native and reason
        return
    outcome = proof.examine(kernel, DEVICE)
    assert outcome.reason is None, outcome.reason
    assert outcome.cases >= 9 and outcome.worst < 1


def test_the_doctor_finds_nothing_wrong():
    diagnosis = diagnose([DEVICE])
    assert diagnosis.healthy, str(diagnosis)
    assert torch.cuda.get_device_name(DEVICE) in str(diagnosis)


@torch.library.custom_op("qatpatch_tests::last_row_unwritten", mutates_args=())
def last_row_unwritten(y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(y)  # inside an operator: no dispatch mode sees this
    out[:-1] = y[:-1]
    return out


def test_memory_that_an_operator_leaves_unwritten_is_found(monkeypatch):
    class Module:
        quantize = staticmethod(reference_nvfp4.quantize)
        operand = staticmethod(reference_nvfp4.operand)
        packed_operand = staticmethod(reference_nvfp4.packed_operand)

        @staticmethod
        def matmul(*operands, **options):
            return last_row_unwritten(reference_nvfp4.matmul(*operands, **options))

    row = kernels.kernel_named("reference_linear")
    monkeypatch.setattr(type(row), "load", lambda self: Module)
    assert "memory" in proof.examine(row, DEVICE).reason
