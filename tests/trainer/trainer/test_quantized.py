"""Weights stored in fewer bits: their size, their gradients, and a training that is nearly the same."""

import pytest
import torch
from flux_parts import arguments, loaded, steps

from trainer import quantized

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("kind", "bits", "most"),
    [("float8", 8, 0.05), ("float8_scaled", 8.3, 0.05), ("int8", 8.3, 0.02), ("nf4", 4.6, 0.15)],
)
def test_stored_blocks_are_small_and_train_nearly_the_same(model, kind, bits, most):
    args = arguments()
    original, small = loaded(model), loaded(model, kind=kind)
    layers = [m for m in small[0].modules() if isinstance(m, quantized.StoredLinear)]
    assert len(layers) == 2 * 14 + 4 * 6
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    kept = sum(t.nbytes for layer in layers for t in (layer.weight, layer.scales) if t is not None)
    assert 8 * kept / numbers < bits * 1.1
    assert small[0].x_embedder.weight.dtype == torch.float32
    first, second = steps(*original, args), steps(*small, args)
    assert first != second
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) < most
    assert all(torch.isfinite(p).all() for p in small[1].values())


@pytest.mark.parametrize("kind", quantized.KINDS)
def test_the_gradient_through_a_stored_matrix_is_that_of_its_value(kind):
    plain = torch.nn.Linear(64, 6).requires_grad_(False)
    small = torch.nn.Linear(64, 6).requires_grad_(False)
    small.bias.data = plain.bias.data.clone()
    stored, scales = quantized.store(plain.weight.data, kind)
    quantized.convert(small, stored, scales)
    plain.weight.data = quantized.restore(stored, scales, (6, 64), torch.float32)
    x = torch.randn(3, 64)
    gradients = []
    for layer in (plain, small):
        at = x.clone().requires_grad_(True)
        layer(at).square().sum().backward()
        gradients.append(at.grad)
    assert torch.allclose(*gradients)
