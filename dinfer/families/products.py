"""Matrix products of float16 and bfloat16, also on CPUs that have no instructions for them."""

from functools import cache

import torch
import torch.nn.functional as F

FEW = 8
"""Rows from which ``linear`` turns the weights into float32: at 4 both ways take about as long (1,536 x 576, Zen 3)."""


@cache
def in_hardware(device: str, dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of ``dtype`` on a device of this type by more than plain loops.

    On a CPU without AVX-512 (or AMX) its products of 16 bits are 6 (``F.linear``) to 50 times (``@``) slower than those
    of float32; those of float16 are on nearly every CPU.
    """
    if device != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    return getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported")()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear``: [rows, out] of ``x`` [rows, in], ``weight`` [out, in] and ``bias`` [out], of one dtype; by way of
    float32, rounded once, where that is faster.
    """
    if len(x) < FEW or in_hardware(x.device.type, x.dtype):
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def product(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x`` [tokens, neuron] @ ``rows`` [neuron, hidden], of one dtype; by way of float32 where that is faster."""
    if in_hardware(x.device.type, x.dtype):
        return x @ rows
    return (x.float() @ rows.float()).to(x.dtype)
