"""Settings that every test shares."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny tensors: threads cost more than they bring, and results do not depend on how many there are."""
    torch.set_num_threads(1)
