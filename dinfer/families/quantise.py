"""Weights in groups of 32 with one float16 scale each, as GGUF's Q8_0 and Q4_0 (docs/quantisation.md)."""

import numpy as np
import torch
from numba import njit

import dinfer.compiled  # noqa: F401 - sets numba's cache before anything is compiled
from dinfer.errors import InputError

GROUP = 32
QUANT_BYTES = {"int8": 32, "int4": 16}
"""Quantised dtype -> bytes of the quants of one group; its float16 scale takes two more."""


def row_bytes(width: int, dtype: str) -> int:
    """Bytes of a row of ``width`` weights; raises InputError unless that is a multiple of 32 and at least 64."""
    if width % GROUP or width < 2 * GROUP:
        raise InputError(
            f"rows of {width} weights cannot be {dtype}: they must be a multiple of {GROUP} and at least {2 * GROUP}; "
            "take a float dtype"
        )
    return width // GROUP * (QUANT_BYTES[dtype] + 2)


def quantise(weights: torch.Tensor, dtype: str) -> torch.Tensor:
    """``weights`` [..., width] of any float dtype as rows uint8 [..., row_bytes], as ggml quantises them.

    Each weight becomes the nearest multiple of its group's scale: the largest magnitude over 127 (int8), or the value
    of largest magnitude over -8 (int4). What ``dequantise`` gives in float32 becomes the same bits again.
    """
    size = QUANT_BYTES[dtype]
    rows = np.empty((*weights.shape[:-1], row_bytes(weights.shape[-1], dtype)), np.uint8)
    groups = weights.float().contiguous().numpy().reshape(-1, GROUP)
    quants, scales = np.empty((len(groups), size), np.uint8), np.empty(len(groups), np.float32)
    (_to_int8 if dtype == "int8" else _to_int4)(groups, quants, scales)
    middle = weights.shape[-1] // GROUP * size
    rows[..., :middle] = quants.reshape(*weights.shape[:-1], -1)
    rows[..., middle:] = scales.astype("<f2").view(np.uint8).reshape(*weights.shape[:-1], -1)
    return torch.from_numpy(rows)


def dequantise(rows: torch.Tensor, dtype: str, kind: torch.dtype) -> torch.Tensor:
    """``rows`` uint8 [..., row_bytes] as weights of float dtype ``kind`` [..., width] on the same device."""
    size = QUANT_BYTES[dtype]
    groups = rows.shape[-1] // (size + 2)
    scales = rows[..., groups * size :].contiguous().view(torch.float16).float()
    if rows.device.type != "cpu":
        return _dequantise_on_device(rows[..., : groups * size], scales, dtype).to(kind)
    floats = torch.empty((*rows.shape[:-1], GROUP * groups))
    flat = rows.reshape(-1, rows.shape[-1]).numpy()
    _to_floats(flat, scales.reshape(-1, groups).numpy(), dtype == "int4", floats.view(len(flat), -1).numpy())
    return floats.to(kind)


def relative_error(weights: torch.Tensor, rows: torch.Tensor, dtype: str) -> float:
    """RMS of what quantising changed over the RMS of ``weights`` [row, ...]; 0 where all are 0."""
    lost = size = 0.0
    for some, packed in zip(weights.split(1024), rows.split(1024), strict=True):
        floats = some.float()
        size += float(floats.square().sum())
        lost += float((dequantise(packed, dtype, torch.float32) - floats).square().sum())
    return (lost / size) ** 0.5 if size else 0.0


def _dequantise_on_device(quants: torch.Tensor, scales: torch.Tensor, dtype: str) -> torch.Tensor:
    groups = quants.unflatten(-1, (scales.shape[-1], QUANT_BYTES[dtype]))
    if dtype == "int8":
        whole = groups.view(torch.int8).float()
    else:
        whole = torch.cat([groups & 15, groups >> 4], dim=-1).float() - 8
    return (whole * scales[..., None]).flatten(-2)


@njit(nogil=True, cache=True)
def _to_floats(rows, scales, nibbles, floats):
    """``rows`` uint8 [row, row_bytes] with ``scales`` float32 [row, group] as ``floats`` [row, width]."""
    signed = rows.view(np.int8)
    for i in range(rows.shape[0]):
        for group in range(scales.shape[1]):
            scale, first = scales[i, group], 32 * group
            if nibbles:
                for j in range(16):
                    byte = rows[i, 16 * group + j]
                    floats[i, first + j] = scale * np.float32(np.int32(byte & 15) - 8)
                    floats[i, first + 16 + j] = scale * np.float32(np.int32(byte >> 4) - 8)
            else:
                for j in range(32):
                    floats[i, first + j] = scale * np.float32(signed[i, first + j])


@njit(nogil=True, cache=True)
def _to_int8(groups, quants, scales):
    """Q8_0: halves are rounded away from zero."""
    signed = quants.view(np.int8)
    for i in range(len(groups)):
        most = np.float32(0)
        for j in range(32):
            most = max(most, abs(groups[i, j]))
        scale = most / np.float32(127)
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        for j in range(32):
            value = groups[i, j] * inverse
            signed[i, j] = np.int8(value + np.copysign(np.float32(0.5), value))
        scales[i] = scale


@njit(nogil=True, cache=True)
def _to_int4(groups, quants, scales):
    """Q4_0: the value of largest magnitude becomes -8; a nibble holds quant + 8."""
    for i in range(len(groups)):
        most = groups[i, 0]
        for j in range(1, 32):
            if abs(groups[i, j]) > abs(most):
                most = groups[i, j]
        scale = most / np.float32(-8)
        inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
        for j in range(16):
            low = np.uint8(min(np.float32(15), groups[i, j] * inverse + np.float32(8.5)))
            high = np.uint8(min(np.float32(15), groups[i, j + 16] * inverse + np.float32(8.5)))
            quants[i, j] = low | high << np.uint8(4)
        scales[i] = scale
