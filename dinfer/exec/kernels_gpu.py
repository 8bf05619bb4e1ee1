"""The device's part of an FFN over its slots, in torch; kernels_triton.py has the same for a GPU with Triton."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from dinfer.families.products import linear, product
from dinfer.families.quantise import dequantise
from dinfer.model import ModelSpec

Ffn = Callable[..., tuple[torch.Tensor, torch.Tensor]]

CHUNK = 2048
"""Quantised neurons that are turned into floats at a time."""


def device_ffn(device: torch.device) -> Ffn:
    """The ``ffn`` for ``device``: Triton's on a GPU where Triton is installed, else torch's."""
    if device.type == "cuda" and find_spec("triton"):
        from dinfer.exec import kernels_triton

        return kernels_triton.ffn
    return ffn


def ffn(
    rows: torch.Tensor,
    x: torch.Tensor,
    spec: ModelSpec,
    up_bias: torch.Tensor | None,
    threshold: float | torch.Tensor,
    picked: torch.Tensor | None = None,
    gate_threshold: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sum [tokens, hidden] of the neurons in ``rows`` [neuron, matrix, hidden or row_bytes] and their values.

    ``x`` [tokens, hidden] is the FFN's input, ``up_bias`` [neuron] or None; ``picked`` int64 names the rows to
    compute (None: all). The values [tokens, picked] are 0 where a neuron is inactive: its gate is at most ``threshold``
    and ``spec.gate_threshold`` (ReLU kinds), or its value's magnitude at most ``threshold`` (magnitude kinds, where
    it is above 0), one for all or [neuron], or the magnitude of its activation at most ``gate_threshold``
    [neuron] or [tokens, neuron].
    """
    if picked is not None:
        rows, up_bias = rows[picked], None if up_bias is None else up_bias[picked]
    if rows.dtype == torch.uint8:
        return _quantised_ffn(rows, x, spec, up_bias, threshold, gate_threshold)
    relu = spec.sparsity_kind == "relu"
    values = neuron_values(rows, x, spec, up_bias, gate_threshold, threshold if relu else 0.0)
    if not relu and (isinstance(threshold, torch.Tensor) or threshold > 0):
        values = values.masked_fill(values.abs() <= threshold, 0)
    return product(values, rows[:, -1]), values


def _quantised_ffn(
    rows: torch.Tensor,
    x: torch.Tensor,
    spec: ModelSpec,
    up_bias: torch.Tensor | None,
    threshold: float | torch.Tensor,
    gate_threshold: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    total, values = torch.zeros_like(x), [x.new_zeros(x.shape[0], 0)]
    for start in range(0, rows.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        bias, value, gate = (
            each[..., part] if isinstance(each, torch.Tensor) else each
            for each in (up_bias, threshold, gate_threshold)
        )
        floats = dequantise(rows[part], spec.dtype, x.dtype)
        added, some = ffn(floats, x, spec, bias, value, gate_threshold=gate)  # type: ignore[arg-type]
        total += added
        values.append(some)
    return total, torch.cat(values, dim=1)


def neuron_values(
    rows: torch.Tensor,
    x: torch.Tensor,
    spec: ModelSpec,
    up_bias: torch.Tensor | None,
    gate_threshold: torch.Tensor | None = None,
    raised: float | torch.Tensor = 0.0,
) -> torch.Tensor:
    """What each neuron multiplies its down row by: [tokens, neuron]."""
    gate = linear(x, rows[:, 0], up_bias)
    active = activate(gate, spec, raised)
    if gate_threshold is not None:
        active = active.masked_fill(active.abs() <= gate_threshold, 0)
    if not spec.gated:
        return active
    up = linear(x, rows[:, 1])
    return active * (F.relu(up) if spec.activation == "drelu" else up)


def activate(gate: torch.Tensor, spec: ModelSpec, raised: float | torch.Tensor = 0.0) -> torch.Tensor:
    """The model's activation function, of ReLU kinds with ``raised`` (one for all or [neuron]) above its own t."""
    if spec.activation == "silu":
        return F.silu(gate)
    if spec.activation == "gelu":
        return F.gelu(gate, approximate="tanh")
    if isinstance(raised, torch.Tensor):
        return torch.where(gate > raised.clamp(min=spec.gate_threshold), gate, 0)
    least = max(raised, spec.gate_threshold)
    return torch.where(gate > least, gate, 0) if least else F.relu(gate)
