"""Frozen weights in fewer bits, computed in the precision of the run: float8, int8 or NF4 (QLoRA, arXiv:2305.14314).

No matrix product is computed in these types, so they work on any device, including CPUs. A weight is restored at each
use, in forward and again in backward: keeping the restored copy for backward would need the memory that is saved. Only
matrices are stored so; norms, biases and embeddings are less than 1 % of the size. The layer stays an nn.Linear, so
peft puts its plain LoRA layer around it and need not be told how the base is stored (its own 4-bit layer depends on
`is_loaded_in_4bit` of the model).
"""

import torch
from torch import nn

KINDS = ("float8", "float8_scaled", "int8", "nf4")
SCALED = KINDS[1:]  # kinds with a tensor of scales beside the weight
SCALES = "scales"
NF4_BLOCK = 64  # numbers that share a scale
LARGEST = {"float8_scaled": 448.0, "int8": 127.0}  # of the type


def store(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A matrix [out, in] as it is kept, and its scales: of each row [out, 1], of NF4_BLOCK numbers, or None."""
    if kind == "float8":
        return weight.to(torch.float8_e4m3fn), None
    if kind == "nf4":
        from bitsandbytes.functional import quantize_4bit

        packed, state = quantize_4bit(weight.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4")
        return packed, state.absmax
    scales = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST[kind]
    whole = weight.float() / scales
    return (whole.round().to(torch.int8) if kind == "int8" else whole.to(torch.float8_e4m3fn)), scales


def restore(
    stored: torch.Tensor, scales: torch.Tensor | None, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The matrix of a stored one, in `dtype`."""
    if scales is None:
        return stored.to(dtype)
    if stored.dtype != torch.uint8:
        return stored.to(dtype) * scales.to(dtype)
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState(scales, shape=torch.Size(shape), dtype=dtype, blocksize=NF4_BLOCK, quant_type="nf4")
    return dequantize_4bit(stored, state)


class Product(torch.autograd.Function):
    """y = x Wᵀ + b with a frozen stored W; backward keeps only the stored W."""

    @staticmethod
    def forward(ctx, x, stored, scales, bias, shape):
        """x: [..., in]; stored, scales, shape: as `restore` takes them."""
        ctx.save_for_backward(stored, scales)
        ctx.shape = shape
        return nn.functional.linear(x, restore(stored, scales, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx, grad):
        """The gradient of x alone."""
        stored, scales = ctx.saved_tensors
        return grad @ restore(stored, scales, ctx.shape, grad.dtype), None, None, None, None


class StoredLinear(nn.Linear):
    """A Linear whose weight is stored. `convert` changes an existing Linear, so that all names stay the same."""

    scales: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out], in the type of autocast or of x."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return Product.apply(x.to(dtype), self.weight, self.scales, bias, (self.out_features, self.in_features))


def convert(module: nn.Linear, weight: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Make a Linear one with this stored weight."""
    module.__class__ = StoredLinear
    module.weight = nn.Parameter(weight, requires_grad=False)
    module.register_parameter(SCALES, None if scales is None else nn.Parameter(scales, requires_grad=False))
