"""The sparse FFN of one layer on the CPU: compiled, without the GIL, near the speed of a pure read.

Rows lie neuron by neuron, [neuron, matrix, row] in the order gate, up, down (up, down if
ungated). numba has no 16-bit floats, so the integer type of a view says what it holds: VIEWS.

What makes it fast: rows are read once; meanwhile those of a later neuron are asked for, line by
line; four neurons share one pass over the output, and two rows of quants one over x.
"""

import math

import numpy as np
from numba import njit, types
from numba.extending import overload

from dinfer.exec import kernels_quant
from dinfer.exec.vectors import (
    LANES,
    add,
    ask,
    copy,
    load,
    load_part,
    multiply_add,
    parity,
    plain,
    splat,
    store,
    store_part,
    total,
    xor,
)
from dinfer.model import ModelSpec

VIEWS = {"float32": "float32", "bfloat16": "uint16", "float16": "int16", "int8": "int8", "int4": "uint8"}
"""Weight dtype -> dtype of the view that the kernels take; the bits stay as they are."""

ACTIVATION_CODES = {"relu": 0, "fatrelu": 0, "drelu": 1, "silu": 2, "gelu": 3}
"""Activation -> the code that ``ffn`` takes."""

_NO_BIAS = np.empty(0, np.float32)

_DRELU, _SILU, _GELU = 1, 2, 3
_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715
_GROUP = 4  # neurons that share one pass over the output
_AHEAD_BYTES = 12288  # how far ahead rows are asked for, at least
_LEAD_BYTES = 8192  # the same where neurons are read whole: further ahead, rows leave the first cache again
_NEAR_BYTES = 2048  # how far ahead a down row is asked for whose neuron was not foreseen


@plain
def _float_dot(weights, start, x, words, room, ahead):
    """Sum of weights[start + i] * x[i]; asks for the weights from ``ahead`` on."""
    a, b = splat(np.float32(0)), splat(np.float32(0))
    blocks = x.size // (2 * LANES) * (2 * LANES)
    for i in range(0, blocks, 2 * LANES):
        ask(weights, ahead + i)
        a = multiply_add(load(weights, start + i), load(x, i), a)
        j = i + LANES
        ask(weights, ahead + j)
        b = multiply_add(load(weights, start + j), load(x, j), b)
    whole = x.size // LANES * LANES
    if blocks < whole:
        ask(weights, ahead + blocks)
        a = multiply_add(load(weights, start + blocks), load(x, blocks), a)
    if whole < x.size:
        rest = x.size - whole
        b = multiply_add(load_part(weights, start + whole, rest), load_part(x, whole, rest), b)
    return total(add(a, b))


@plain
def _float_dot_pair(weights, start, other, x, words, room, ahead, other_ahead):
    """``_dot`` of two rows, one after the other: sharing the loads of x did not pay."""
    first = _float_dot(weights, start, x, words, room, ahead)
    return first, _float_dot(weights, other, x, words, room, other_ahead)


@plain
def _float_add_rows(weights, factors, starts, out, room, aheads):
    """Add factors[k] * weights[starts[k] + i] to out[i], four rows; asks for those at ``aheads``.

    Four rows share each load and store of ``out``. A row with factor 0 must be readable.
    """
    a, b, c, d = splat(factors[0]), splat(factors[1]), splat(factors[2]), splat(factors[3])
    p, q, r, s = starts[0], starts[1], starts[2], starts[3]
    next_p, next_q, next_r, next_s = aheads[0], aheads[1], aheads[2], aheads[3]
    whole = out.size // LANES * LANES
    for i in range(0, whole, LANES):
        ask(weights, next_p + i)
        total = multiply_add(a, load(weights, p + i), load(out, i))
        ask(weights, next_q + i)
        total = multiply_add(b, load(weights, q + i), total)
        ask(weights, next_r + i)
        total = multiply_add(c, load(weights, r + i), total)
        ask(weights, next_s + i)
        total = multiply_add(d, load(weights, s + i), total)
        store(out, i, total)
    if whole < out.size:
        rest = out.size - whole
        total = load_part(out, whole, rest)
        total = multiply_add(a, load_part(weights, p + whole, rest), total)
        total = multiply_add(b, load_part(weights, q + whole, rest), total)
        total = multiply_add(c, load_part(weights, r + whole, rest), total)
        total = multiply_add(d, load_part(weights, s + whole, rest), total)
        store_part(out, whole, rest, total)


def _by_kind(over_floats, over_quants):
    """A function of compiled code that is ``over_quants`` where weights are int8 or uint8, else ``over_floats``."""

    def chosen(weights, *rest):
        raise NotImplementedError("compiled code calls it")

    @overload(chosen, strict=False, jit_options={"nogil": True, "_nrt": False})
    def choose(weights, *rest):
        return (over_quants if weights.dtype in (types.int8, types.uint8) else over_floats).py_func

    return chosen


@plain
def _float_unpack(weights, x, words, room):
    """Nothing to do."""


_unpack = _by_kind(_float_unpack, kernels_quant.unpack)
_dot = _by_kind(_float_dot, kernels_quant.dot)
_dot_pair = _by_kind(_float_dot_pair, kernels_quant.dot_pair)
_add_rows = _by_kind(_float_add_rows, kernels_quant.add_rows)


@plain
def _activate(activation, gate):
    """act(gate); the ReLU kinds come here above their threshold only."""
    if activation == _SILU:
        return np.float32(gate / (1 + math.exp(-np.float64(gate))))
    if activation == _GELU:
        wide = np.float64(gate)
        inner = _GELU_SCALE * (wide + _GELU_CUBIC * wide * wide * wide)
        return np.float32(0.5 * wide * (1 + math.tanh(inner)))
    return gate


def ffn_cpu(
    spec: ModelSpec,
    rows: np.ndarray,
    x: np.ndarray,
    ids: np.ndarray,
    out: np.ndarray,
    values: np.ndarray,
    threshold: float,
    bias: np.ndarray | None = None,
    active: np.ndarray | None = None,
    predicted: bool = False,
    gate_threshold: float = 0.0,
) -> int:
    """Add the neurons ``ids`` of a layer, applied to ``x``, to ``out``; return how many are active.

    rows [neuron, matrix, row] C-contiguous, float32 or a view of VIEWS; x, out float32 [hidden]; all
    are fastest from the start of a cache line on.
    ids int32 [n], ascending for speed, each within rows (not checked). values float32 [n] gets
    act(gate) * up, or 0 where inactive; active bool [n] who is active (a dReLU's value may be 0).
    bias float32 [neuron] is added to up, or to the only pre-activation if ungated.
    threshold, rounded to float32: ReLU kinds are inactive iff gate <= threshold, their up and down
    then stay unread; magnitude kinds iff abs(value) <= threshold, their down then does, or, where
    gate_threshold is above 0, iff abs(act(gate)) <= gate_threshold, whose up then does too.
    predicted says that most of ``ids`` are active, so that whole neurons are asked for ahead of
    time; it changes nothing but the speed.
    """
    if bias is None:
        bias = _NO_BIAS
    if active is None:
        active = np.empty(len(ids), np.bool_)
    code = ACTIVATION_CODES[spec.activation]
    return ffn(rows, x, ids, out, values, active, bias, threshold, code, predicted, gate_threshold)


@njit(nogil=True, cache=True)
def ffn(rows, x, ids, out, values, active, bias, threshold, activation, predicted, gate_threshold):
    """``ffn_cpu`` compiled: bias [0] for none, activation of ACTIVATION_CODES, all else alike."""
    quantised = rows.itemsize == 1
    words = np.empty(x.size + 2 * LANES if quantised else 0, np.int16)
    room = np.empty(7 * (x.size // LANES) if quantised else 0, np.float32)
    _unpack(rows.reshape(rows.size), x, words, room)
    limit, least = np.float32(threshold), np.float32(gate_threshold)
    if predicted or activation > _DRELU and gate_threshold <= 0:
        return _ffn_at_once(rows, x, words, room, ids, out, values, active, bias, limit, activation, predicted, least)
    return _ffn_in_passes(rows, x, words, room, ids, out, values, active, bias, limit, activation, least)


@plain
def _dot_row(ids, k, dots, row):
    """Where the ``k``-th of the rows begins that dots read of ``ids``, ``dots`` a neuron; at most the last neuron's."""
    return ids[min(k // dots, ids.size - 1)] * (dots + 1) * row + k % dots * row


@njit(nogil=True)
def _ffn_at_once(rows, x, words, room, ids, out, values, active, bias, limit, activation, predicted, least):
    """``ffn`` where all rows before the last are read for certain, or very likely: neuron by neuron."""
    weights, row, gated = rows.reshape(rows.size), rows.shape[2], rows.shape[1] == 3
    dots = rows.shape[1] - 1
    size, down = rows.shape[1] * row, dots * row
    relu, near = activation <= _DRELU, _NEAR_BYTES // rows.itemsize
    together = 2 if rows.itemsize == 1 else 1  # rows that a dot reads at once
    lead = max(together, math.ceil(_LEAD_BYTES / (row * rows.itemsize)))
    starts, aheads = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)
    factors = np.empty(_GROUP, np.float32)
    waiting, found, last = 0, 0, ids.size - 1
    next_gate = np.float32(0)
    for j in range(ids.size):
        start, ahead = ids[j] * size, _dot_row(ids, dots * j + lead, dots, row)
        values[j], active[j] = 0, False
        up = np.float32(1)
        if gated:
            next_ahead = _dot_row(ids, dots * j + lead + 1, dots, row)
            gate, up = _dot_pair(weights, start, start + row, x, words, room, ahead, next_ahead)
            if bias.size:
                up += bias[ids[j]]
            if activation == _DRELU:
                up = max(up, np.float32(0))
        else:
            if j % 2 == 0:
                other, other_ahead = ids[min(j + 1, last)] * size, ids[min(j + 1 + lead, last)] * size
                gate, next_gate = _dot_pair(weights, start, other, x, words, room, ahead, other_ahead)
            else:
                gate = next_gate
            if bias.size:
                gate += bias[ids[j]]
        if relu and gate <= limit:
            continue
        value = _activate(activation, gate)
        if not relu and least > 0 and abs(value) <= least:
            continue
        value *= up
        if not relu and abs(value) <= limit:
            continue
        values[j], active[j] = value, True
        found += 1
        if value == 0:
            continue
        next_down = ids[min(j + _GROUP, last)] * size + down if predicted else start + down + near
        factors[waiting], starts[waiting], aheads[waiting] = value, start + down, next_down
        waiting += 1
        if waiting == _GROUP:
            _add_rows(weights, factors, starts, out, room, aheads)
            waiting = 0
    if waiting:
        for k in range(waiting, _GROUP):
            factors[k], starts[k], aheads[k] = 0, starts[0], starts[0]
        _add_rows(weights, factors, starts, out, room, aheads)
    return found


@njit(nogil=True)
def _ffn_in_passes(rows, x, words, room, ids, out, values, active, bias, limit, activation, least):
    """``ffn`` where the gates decide what is read: all gates, then the ups of those that pass, then the downs.

    Which rows come next is known in each pass, so that each is asked for before it is read and no other is: neuron by
    neuron, most of the ups would be asked for in vain or too late. A NaN passes.
    """
    weights, row, gated = rows.reshape(rows.size), rows.shape[2], rows.shape[1] == 3
    size, down = rows.shape[1] * row, (rows.shape[1] - 1) * row
    relu, further, last = activation <= _DRELU, 1 + _AHEAD_BYTES // (row * rows.itemsize), ids.size - 1
    kept = np.empty(ids.size, np.int64)
    passed, found, adding = 0, 0, 0
    for j in range(0, ids.size, 2):
        k = min(j + 1, last)
        ahead, other_ahead = ids[min(j + further, last)] * size, ids[min(k + further, last)] * size
        start, other = ids[j] * size, ids[k] * size
        values[j], values[k] = _dot_pair(weights, start, other, x, words, room, ahead, other_ahead)
    for j in range(ids.size):
        gate = values[j]
        if not gated and bias.size:
            gate += bias[ids[j]]
        value = _activate(activation, gate)
        active[j] = not (gate <= limit if relu else abs(value) <= least)
        values[j] = value if active[j] else np.float32(0)
        kept[passed] = j
        passed += active[j]
    for i in range(passed):
        j, ahead = kept[i], ids[kept[min(i + further, passed - 1)]] * size + row
        if gated:
            up = _dot(weights, ids[j] * size + row, x, words, room, ahead)
            if bias.size:
                up += bias[ids[j]]
            values[j] *= max(up, np.float32(0)) if activation == _DRELU else up
        if not relu and abs(values[j]) <= limit:
            values[j], active[j] = 0, False
        found += active[j]
        kept[adding] = j
        adding += values[j] != 0
    starts, aheads = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)
    factors = np.empty(_GROUP, np.float32)
    for i in range(0, adding, _GROUP):
        for k in range(_GROUP):
            j = kept[min(i + k, adding - 1)]
            factors[k], starts[k] = values[j] if i + k < adding else 0, ids[j] * size + down
            aheads[k] = ids[kept[min(i + k + max(_GROUP, further), adding - 1)]] * size + down
        _add_rows(weights, factors, starts, out, room, aheads)
    return found


@njit(nogil=True, cache=True)
def copy_rows(source, ids, destination, slots):
    """Copy neuron ids[i] of ``source`` to place slots[i] of ``destination``, for each i in order.

    Both are C-contiguous [neuron, ...] with equal neurons of any one dtype. ids, slots int32 [n].
    """
    size = source.size // source.shape[0]
    taken, given = source.reshape(source.size), destination.reshape(destination.size)
    for i in range(ids.size):
        copy(given, slots[i] * size, taken, ids[i] * size, size)


@njit(nogil=True, cache=True)
def read_rows(words, ids):
    """Exclusive or of all words of the neurons ``ids``: a pure read, the limit of ``ffn``'s speed.

    words uint32 [neuron, word], C-contiguous. ids int32 [n]. Prefetches as ``ffn`` does.
    """
    flat, size = words.reshape(words.size), words.shape[1]
    whole = size // LANES * LANES
    odd, rest, last = np.uint32(0), np.uint32(0), ids.size - 1
    for j in range(ids.size):
        start, ahead = ids[j] * size, ids[min(j + 1, last)] * size
        if whole:
            ask(flat, ahead)
            folded = load(flat, start)
            for i in range(LANES, whole, LANES):
                ask(flat, ahead + i)
                folded = xor(folded, load(flat, start + i))
            odd ^= parity(folded)
        for i in range(whole, size):
            rest ^= flat[start + i]
    return odd ^ rest
