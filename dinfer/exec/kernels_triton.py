"""The device's part of an FFN over its slots, and the copy of scattered pinned rows, as Triton kernels.

Rows are read where they lie: no slot is gathered into another tensor, and quantised rows (docs/quantisation.md) are
decoded in registers. The FFN takes two launches. The first gives each slot's value: the gates of a block of slots, then
the up rows of those alone whose gate is active. The second sums the down rows of the slots whose value is not 0; each
program owns some columns and takes the slots in order, so that the sum has the same bits each time.

Trip counts are constants or ``while`` loops: the interpreter of Triton before 3.7 takes no other with numpy 2.4.
"""

import torch
import triton
import triton.language as tl

from dinfer.model import ModelSpec

VALUE_SLOTS, VALUE_COLUMNS = 16, 512
"""Slots of one program of the first launch, and the columns that it reads at once."""

SUM_SLOTS, SUM_COLUMNS, SUM_WARPS = 1024, 32, 16
"""Slots that a program of the second launch reads at once, and its columns."""

COPY_PROGRAMS, COPY_WORDS = 16, 8192
"""Programs of a copy, few so that the FFN keeps most of the GPU, and the 16-bit words that each reads at once."""

ACTIVATION_CODES = {"relu": 0, "fatrelu": 0, "drelu": 1, "silu": 2, "gelu": 3}
PLAIN_BITS = 16
QUANTISED_BITS = {"int8": 8, "int4": 4}

_DRELU, _SILU, _GELU = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_PLAIN, _GROUP = tl.constexpr(PLAIN_BITS), tl.constexpr(32)


def ffn(
    rows: torch.Tensor,
    x: torch.Tensor,
    spec: ModelSpec,
    up_bias: torch.Tensor | None,
    threshold: float,
    picked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sum [tokens, hidden] of the neurons in ``rows`` and their values float32 [tokens, picked].

    Arguments and meaning as in ``kernels_gpu.ffn``; what is summed stays float32 until the end.
    """
    count = rows.shape[0] if picked is None else len(picked)
    tokens, hidden = x.shape
    bits = QUANTISED_BITS.get(spec.dtype, PLAIN_BITS)
    scales = rows if bits == PLAIN_BITS else rows.view(torch.float16)
    values = torch.empty((tokens, count), dtype=torch.float32, device=x.device)
    total = torch.empty_like(x)
    layout = {
        "HIDDEN": hidden, "MATRICES": rows.shape[1], "ROW": rows.shape[2], "BITS": bits, "PICKED": picked is not None,
        "enable_fp_fusion": True,
    }  # fmt: skip
    picked = rows if picked is None else picked
    relu = spec.sparsity_kind == "relu"
    gate_threshold, value_threshold = (max(threshold, spec.gate_threshold), 0.0) if relu else (0.0, threshold)
    _slot_values[(tokens, triton.cdiv(count, VALUE_SLOTS))](
        rows, scales, x, x if up_bias is None else up_bias, values, count, gate_threshold, value_threshold, picked,
        **layout, BIASED=up_bias is not None, GATED=spec.gated, ACTIVATION=ACTIVATION_CODES[spec.activation],
        SLOTS=VALUE_SLOTS, COLUMNS=min(VALUE_COLUMNS, max(32, triton.next_power_of_2(hidden))),
    )  # fmt: skip
    _slot_sums[(tokens, triton.cdiv(hidden, SUM_COLUMNS))](
        rows, scales, values, total, count, picked,
        **layout, SLOTS=SUM_SLOTS, COLUMNS=SUM_COLUMNS, num_warps=SUM_WARPS,
    )  # fmt: skip
    return total, values


def copy_scattered(host: torch.Tensor, ids: torch.Tensor, target: torch.Tensor, slots: torch.Tensor) -> None:
    """Copy rows ``ids`` of ``host`` [neuron, ...] to rows ``slots`` of ``target`` [slot, ...] in one launch.

    On CUDA ``host`` and the lists ``ids`` and ``slots`` are pinned: the kernel reads them across the link, so they must
    stay until it has ended, which torch does not see to.
    """
    source, place = host.view(torch.int16), target.view(torch.int16)
    programs = min(len(ids), COPY_PROGRAMS)
    _copy_scattered[(programs,)](source, ids, place, slots, len(ids), WORDS=source[0].numel(), BLOCK=COPY_WORDS)


@triton.jit
def _weights(
    rows, scales, starts, wanted, first, HIDDEN: tl.constexpr, BITS: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Weights float32 [SLOTS, COLUMNS] from column ``first`` on of the rows that start at ``starts``; else 0."""
    at = first + tl.arange(0, COLUMNS)
    mask = wanted[:, None] & (at < HIDDEN)[None, :]
    if BITS == _PLAIN:
        weights = tl.load(rows + starts[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        if BITS == 8:
            packed = tl.load(rows + starts[:, None] + at[None, :], mask=mask, other=0)
            weights = packed.to(tl.int8, bitcast=True).to(tl.float32)
        else:  # a byte holds a weight of the first and one of the second half of its group
            lane = tl.arange(0, COLUMNS)
            byte = first // 2 + lane // _GROUP * (_GROUP // 2) + lane % (_GROUP // 2)
            packed = tl.load(rows + starts[:, None] + byte[None, :], mask=mask, other=0).to(tl.int32)
            shift = lane % _GROUP // (_GROUP // 2) * 4
            weights = (((packed >> shift[None, :]) & 15) - 8).to(tl.float32)
        GROUPS: tl.constexpr = COLUMNS // _GROUP
        group = first // _GROUP + tl.arange(0, GROUPS)
        behind = starts // 2 + HIDDEN * BITS // 16  # the scales, counted in float16
        known = wanted[:, None] & (group < HIDDEN // _GROUP)[None, :]
        scale = tl.load(scales + behind[:, None] + group[None, :], mask=known, other=0.0).to(tl.float32)
        spread = tl.broadcast_to(scale[:, :, None], (SLOTS, GROUPS, _GROUP))
        weights *= tl.reshape(spread, (SLOTS, COLUMNS))
    return weights


@triton.jit
def _dots(
    rows, scales, starts, wanted, x,
    HIDDEN: tl.constexpr, BITS: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dot products float32 [SLOTS] of ``x`` [HIDDEN] with the rows that start at ``starts``; 0 if not wanted."""
    sums = tl.zeros((SLOTS,), tl.float32)
    for first in range(0, HIDDEN, COLUMNS):
        weights = _weights(rows, scales, starts, wanted, first, HIDDEN, BITS, SLOTS, COLUMNS)
        at = first + tl.arange(0, COLUMNS)
        given = tl.load(x + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
        sums += tl.sum(weights * given[None, :], axis=1)
    return sums


@triton.jit(do_not_specialize=["count"])
def _slot_values(
    rows, scales, x, bias, values, count, gate_threshold, value_threshold, picked,
    HIDDEN: tl.constexpr, MATRICES: tl.constexpr, ROW: tl.constexpr, BITS: tl.constexpr,
    PICKED: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    at = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    wanted = at < count
    slots = at.to(tl.int64)
    if PICKED:
        slots = tl.load(picked + at, mask=wanted, other=0)
    starts = slots * (MATRICES * ROW)
    x += token * HIDDEN
    gate = _dots(rows, scales, starts, wanted, x, HIDDEN, BITS, SLOTS, COLUMNS)
    if BIASED:
        gate += tl.load(bias + slots, mask=wanted, other=0.0).to(tl.float32)
    active = wanted
    if ACTIVATION == _SILU:
        value = gate * tl.sigmoid(gate)
    elif ACTIVATION == _GELU:  # by tanh(u) = 2 sigmoid(2 u) - 1
        value = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = wanted & (gate > gate_threshold)
        value = tl.where(active, gate, 0.0)
    if GATED:
        if tl.max(active.to(tl.int32), axis=0) > 0:
            up = _dots(rows, scales, starts + ROW, active, x, HIDDEN, BITS, SLOTS, COLUMNS)
            if ACTIVATION == _DRELU:
                up = tl.maximum(up, 0.0)
            value *= up
    value = tl.where(tl.abs(value) <= value_threshold, 0.0, value)
    tl.store(values + token * count + at, value, mask=wanted)


@triton.jit(do_not_specialize=["count"])
def _slot_sums(
    rows, scales, values, total, count, picked,
    HIDDEN: tl.constexpr, MATRICES: tl.constexpr, ROW: tl.constexpr, BITS: tl.constexpr,
    PICKED: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, first = tl.program_id(0), tl.program_id(1) * COLUMNS
    sums = tl.zeros((COLUMNS,), tl.float32)
    start = 0
    while start < count:
        at = start + tl.arange(0, SLOTS)
        value = tl.load(values + token * count + at, mask=at < count, other=0.0)
        active = value != 0
        if tl.max(active.to(tl.int32), axis=0) > 0:
            slots = at.to(tl.int64)
            if PICKED:
                slots = tl.load(picked + at, mask=active, other=0)
            starts = (slots * MATRICES + MATRICES - 1) * ROW
            weights = _weights(rows, scales, starts, active, first, HIDDEN, BITS, SLOTS, COLUMNS)
            sums += tl.sum(value[:, None] * weights, axis=0)
        start += SLOTS
    column = first + tl.arange(0, COLUMNS)
    tl.store(total + token * HIDDEN + column, sums.to(total.dtype.element_ty), mask=column < HIDDEN)


@triton.jit(do_not_specialize=["count"])
def _copy_scattered(host, ids, target, slots, count, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    while row < count:
        source = tl.load(ids + row).to(tl.int64) * WORDS
        place = tl.load(slots + row).to(tl.int64) * WORDS
        for first in range(0, WORDS, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(target + place + at, tl.load(host + source + at, mask=at < WORDS), mask=at < WORDS)
        row += tl.num_programs(0)
