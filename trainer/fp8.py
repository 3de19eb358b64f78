"""--fp8_base: the frozen weights of the blocks stored as float8_e4m3fn, computed in the precision of the run.

float8 halves what bf16 needs and no matrix product is done in it, so it runs wherever torch does, CPUs included. A weight
is brought up at each use, in forward and again in backward: keeping the larger copy for backward would undo the saving.
Only matrices are stored so; norms, biases and embeddings stay as they are, at under 1 % of the size.
"""

import torch
from torch import nn


def is_block_linear(name: str, module: nn.Module) -> bool:
    """Is this one of the matrices of the double or single blocks?"""
    return isinstance(module, nn.Linear) and name.startswith(("transformer_blocks.", "single_transformer_blocks."))


class UpcastLinear(torch.autograd.Function):
    """y = x Wᵀ + b with a frozen W of a smaller dtype; only W as stored is kept for backward."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad @ weight.to(grad.dtype), None, None


class Fp8Linear(nn.Linear):
    """A Linear whose weight is float8_e4m3fn. Made from a Linear in place (`adopt`), so that names stay the same."""

    @staticmethod
    def adopt(module: nn.Module) -> None:
        module.__class__ = Fp8Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return UpcastLinear.apply(x.to(dtype), self.weight, bias)
