"""--fp8_base: frozen weights of the blocks are stored as float8_e4m3fn and computed in the precision of the run.

float8 needs half the memory of bf16. No matrix product is computed in float8, so it works on any device, including CPUs. A
weight is upcast at each use, in forward and again in backward: keeping the upcast copy for backward would need the memory
that float8 saves. Only matrices are stored as float8; norms, biases and embeddings are less than 1 % of the size.
"""

import torch
from torch import nn


def is_block_linear(name: str, module: nn.Module) -> bool:
    """Whether the module is a matrix of the double or single blocks."""
    return isinstance(module, nn.Linear) and name.startswith(("transformer_blocks.", "single_transformer_blocks."))


class UpcastLinear(torch.autograd.Function):
    """y = x Wᵀ + b with a frozen W of a smaller dtype; backward keeps only the stored W."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight.to(grad.dtype), None, None


class Fp8Linear(nn.Linear):
    """A Linear with a float8_e4m3fn weight. `convert` changes an existing Linear, so that all names stay the same."""

    @staticmethod
    def convert(module: nn.Module) -> None:
        module.__class__ = Fp8Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return UpcastLinear.apply(x.to(dtype), self.weight, bias)
