"""`fake_quantize`: the numbers of the format, the gradient of the identity."""

from __future__ import annotations

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch

import qatpatch
from qatpatch.straight_through import fake_quantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 64), (3, 5, 60), (16,), (0, 64)])
def test_forward_is_the_format_and_backward_the_identity(shape, dtype):
    x = normal(*shape).to(dtype).requires_grad_()
    y = fake_quantize(x)
    assert y.dtype == dtype and y.shape == x.shape
    # Exact in every dtype: the power-of-two global scale leaves 6 significant bits.
    np.testing.assert_array_equal(y.detach().double().numpy(), oracle.quantize(x.detach().float().numpy()).values)
    gradient = normal(*shape, seed=1).to(dtype)
    y.backward(gradient)
    assert x.grad.dtype == dtype and torch.equal(x.grad, gradient)


@pytest.mark.parametrize("scale", [1.0, 0.0123, torch.tensor(3.7e-4)])
def test_given_scale(scale):
    x = normal(8, 64)
    expected = oracle.quantize(x.numpy(), global_scale=float(scale)).values
    np.testing.assert_array_equal(fake_quantize(x, global_scale=scale).numpy(), expected.astype(np.float32))


def test_no_clip_mask():
    """What saturates (scale clamped to 448) and what flushes to zero keeps its gradient."""
    x = torch.tensor([[1e6, 1.0] + [1e-3] * 14]).requires_grad_()
    y = fake_quantize(x, global_scale=1.0)
    assert y[0, 0] == 6 * 448 and not y[0, 1:].any()
    gradient = normal(1, 16, seed=2)
    y.backward(gradient)
    assert torch.equal(x.grad, gradient)


def test_zero_blocks_give_zeros_and_gradients():
    x = normal(4, 48) * 1e-2
    x[2, 16:32] = 0
    for values in (x, torch.zeros(2, 32)):
        leaf = values.clone().requires_grad_()
        y = fake_quantize(leaf)
        assert y.isfinite().all() and not y[values == 0].any()
        y.sum().backward()
        assert torch.equal(leaf.grad, torch.ones_like(values))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_input_stays_visible(value):
    x = normal(2, 32)
    x[1, 20] = value
    spoiled = fake_quantize(x).isnan()
    assert spoiled[1, 16:].all() and not spoiled[0].any() and not spoiled[1, :16].any()


def test_views_and_graphs():
    x = normal(6, 32).requires_grad_()
    y = fake_quantize(x.t()[:, ::2]) * 3
    np.testing.assert_array_equal(y.detach().numpy() / 3, oracle.quantize(x.detach().t()[:, ::2].numpy()).values)
    y.sum().backward()
    expected = torch.zeros(6, 32)
    expected[::2] = 3
    assert torch.equal(x.grad, expected)


def test_without_gradients():
    assert not fake_quantize(normal(2, 16)).requires_grad
    with torch.no_grad():
        assert not fake_quantize(normal(2, 16).requires_grad_()).requires_grad


def test_errors():
    with pytest.raises(TypeError, match="floating-point.*int64"):
        fake_quantize(torch.arange(16))
    with pytest.raises(ValueError, match="0-dimensional"):
        fake_quantize(torch.tensor(1.0))
    with pytest.raises(ValueError, match="positive and finite"):
        fake_quantize(normal(2, 16), global_scale=-1.0)
    with pytest.raises(ValueError, match="one number"):
        fake_quantize(normal(2, 16), global_scale=torch.ones(2))


def test_public_name():
    assert qatpatch.fake_quantize is fake_quantize
