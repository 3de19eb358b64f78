"""What the heavy imports set."""

import pytest

from trainer import imports

torch = pytest.importorskip("torch")


def test_the_attention_of_cudnn_is_off_because_its_gradients_can_be_nan():
    imports.heavy()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
