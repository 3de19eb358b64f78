"""What the heavy imports set."""

from trainer import imports


def test_the_attention_of_cudnn_is_off_because_its_gradients_can_be_nan():
    import torch

    imports.heavy()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
