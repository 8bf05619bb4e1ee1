"""One token through all layers on the CPU, compiled: what ``exec/host.py`` calls on each of its threads.

Every thread runs the same function on its share of the rows and heads, and meets the others at a barrier after each
matrix. The residual and the norms are computed by all of them alike: that is cheaper than to share them.
"""

import math
import platform
import time
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dinfer.exec.kernels_cpu import _GROUP, _float_add_rows, _float_dot, ffn
from dinfer.exec.vectors import _BITS, _I32, _I64, FLOATS, LANES, _call, _mask, _pointer, _stored, _vector, load_part

BARRIERS = 4
"""Barriers of a layer: after qkv, the heads, o and the FFN; the head adds one a token."""

_CLOCK = getattr(time, "CLOCK_UPTIME_RAW", time.CLOCK_MONOTONIC)
"""The clock that time.perf_counter reads: the first on macOS."""

_PAUSES = {
    "x86_64": ("llvm.x86.sse2.pause", []),
    "aarch64": ("llvm.aarch64.hint", [1]),
    "arm64": ("llvm.aarch64.hint", [1]),
}
"""How a spinning thread lets the other thread of its core work, by platform.machine()."""

_SPINS = 4096  # loads before a waiting thread offers its core to others; some 50 us


_plain = njit(nogil=True, _nrt=False)
"""njit that counts no references: nothing here allocates, and counting those of a tuple of arrays at each call takes
the compiler most of its time."""


class Matrices(NamedTuple):
    """Weights as views (kernels_cpu.VIEWS), C-contiguous; biases and norms float32, an empty last axis for none.

    qkv [layer, (heads + 2 kv_heads) * head_dim, hidden], o [layer, hidden, heads * head_dim], neurons
    [layer, neuron, matrix, hidden], head [vocab, hidden]; norms [layer, 2, hidden] and ``norm`` [2, hidden] are
    weight and bias; cos, sin [position, head_dim].
    """

    qkv: np.ndarray
    qkv_bias: np.ndarray
    o: np.ndarray
    o_bias: np.ndarray
    neurons: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray
    head: np.ndarray
    attention_norm: np.ndarray
    ffn_norm: np.ndarray
    norm: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


class Rules(NamedTuple):
    """How a token is computed: ``rms`` norms else layer norms, ``activation`` of kernels_cpu.ACTIVATION_CODES.

    ``thresholds`` float32 [layer] and ``predicted`` are ``ffn``'s, ``windows`` int64 [layer] 0 for a global layer.
    """

    rms: bool
    epsilon: float
    activation: int
    predicted: bool
    thresholds: np.ndarray
    windows: np.ndarray


class Scratch(NamedTuple):
    """What the threads share, float32 where nothing else is said.

    hidden, x, parts [thread, hidden]; scores [thread, context]; turned [thread, head_dim]; starts int64 and factors
    [thread, 4]; qkv, mixed and o hold one layer's result; values and active bool [neuron]; found int32 [thread, layer];
    logits [vocab]; ``times`` float64 [layer, 2]: when attention and FFN ended, in seconds of time.perf_counter;
    ``sync`` int64 [1] counts arrivals at the barriers.
    """

    hidden: np.ndarray
    x: np.ndarray
    parts: np.ndarray
    scores: np.ndarray
    turned: np.ndarray
    starts: np.ndarray
    factors: np.ndarray
    qkv: np.ndarray
    mixed: np.ndarray
    o: np.ndarray
    values: np.ndarray
    active: np.ndarray
    found: np.ndarray
    logits: np.ndarray
    times: np.ndarray
    sync: np.ndarray


@intrinsic
def _arrive(typing_context, counter):
    """Add one to counter[0], seen by all threads."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], _I64, arguments[0], _I64(0))
        builder.atomic_rmw("add", pointer, _I64(1), "seq_cst")
        return context.get_dummy_value()

    return types.void(counter), generate


@intrinsic
def _seen(typing_context, counter):
    """counter[0] as the other threads left it; what they wrote before is then visible."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], _I64, arguments[0], _I64(0))
        if pause := _PAUSES.get(platform.machine()):
            _call(builder, pause[0], ir.VoidType(), [_I32(value) for value in pause[1]])
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(counter), generate


@intrinsic
def _offer_core(typing_context):
    """Let another thread of the system run on this core."""

    def generate(context, builder, signature, arguments):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _now(typing_context):
    """Seconds of the clock that time.perf_counter reads."""

    def generate(context, builder, signature, arguments):
        shape = ir.FunctionType(_I32, [_I32, _I64.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, shape, "clock_gettime")
        spec = cgutils.alloca_once(builder, _I64, size=2)
        builder.call(function, [_I32(_CLOCK), spec])
        whole, rest = (builder.load(builder.gep(spec, [_I64(i)])) for i in range(2))
        double = ir.DoubleType()
        nano = builder.fmul(builder.sitofp(rest, double), double(1e-9))
        return builder.fadd(builder.sitofp(whole, double), nano)

    return types.float64(), generate


@intrinsic
def _keep(typing_context, array, index, count, floats):
    """Write the first ``count`` of 32 floats to ``array`` [n] from ``index`` on, rounded to its kind."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        vector, bits = _stored(kind), _BITS[kind.dtype]
        pointer = _pointer(context, builder, kind, vector, *arguments[:2])
        encoded = _encode(builder, arguments[3], kind.dtype)
        name = f"llvm.masked.store.v{LANES}{'f' if kind.dtype == types.float32 else 'i'}{bits}.p0"
        rest = [pointer, _I32(bits // 8), _mask(builder, arguments[2])]
        _call(builder, name, ir.VoidType(), [encoded, *rest])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, FLOATS), generate


def _encode(builder, floats, dtype):
    """32 floats as they lie in a view of ``dtype``, rounded to nearest even."""
    if dtype == types.int16:
        return builder.bitcast(builder.fptrunc(floats, _vector(ir.HalfType())), _vector(ir.IntType(16)))
    if dtype == types.uint16:
        words = _vector(_I32)

        def all_lanes(value):
            return ir.Constant(words, [value] * LANES)

        bits = builder.bitcast(floats, words)
        odd = builder.and_(builder.lshr(bits, all_lanes(16)), all_lanes(1))
        rounded = builder.add(bits, builder.add(odd, all_lanes(0x7FFF)))
        return builder.trunc(builder.lshr(rounded, all_lanes(16)), _vector(ir.IntType(16)))
    return floats


@_plain
def _dot(weights, start, x, ahead):
    """``_float_dot``; a layer's matrices and the cache are never quantised."""
    return _float_dot(weights, start, x, x, x, ahead)


@_plain
def _meet(sync, target):
    """Wait until ``target`` arrivals have been counted."""
    _arrive(sync)
    spins = 0
    while _seen(sync) < target:
        spins += 1
        if spins > _SPINS:
            _offer_core()


@_plain
def _add_to(hidden, other):
    for i in range(hidden.size):
        hidden[i] += other[i]


@njit(nogil=True, _nrt=False, fastmath={"reassoc"})
def _sum(x):
    total = np.float32(0)
    for i in range(x.size):
        total += x[i]
    return total


@_plain
def _norm(hidden, weight_bias, rms, epsilon, x):
    """The norm of ``hidden`` [hidden] to ``x``: RMS, or LayerNorm with its bias."""
    size = np.float32(hidden.size)
    if rms:
        scale = np.float32(1) / np.float32(math.sqrt(_dot(hidden, 0, hidden, 0) / size + epsilon))
        for i in range(hidden.size):
            x[i] = hidden[i] * scale * weight_bias[0, i]
        return
    mean = _sum(hidden) / size
    for i in range(hidden.size):
        x[i] = hidden[i] - mean
    scale = np.float32(1) / np.float32(math.sqrt(_dot(x, 0, x, 0) / size + epsilon))
    for i in range(hidden.size):
        x[i] = x[i] * scale * weight_bias[0, i] + weight_bias[1, i]


@_plain
def _rows(matrix, x, bias, me, threads, out):
    """This thread's share of ``matrix`` [row, column] @ ``x`` (+ ``bias`` [row] or []) to ``out`` [row]."""
    rows, columns = matrix.shape
    flat = matrix.reshape(matrix.size)
    first, last = me * rows // threads, (me + 1) * rows // threads
    for row in range(first, last):
        value = _dot(flat, row * columns, x, min(row + 1, rows - 1) * columns)
        if bias.size:
            value += bias[row]
        out[row] = value


@_plain
def _turn(x, cos, sin, turned):
    """Rotary position: ``x`` [head_dim] turned by the angles of one position; copied where there are none."""
    half = x.size // 2
    if not cos.size:
        for i in range(x.size):
            turned[i] = x[i]
        return
    for i in range(half):
        turned[i] = x[i] * cos[i] - x[i + half] * sin[i]
        turned[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half]


@_plain
def _keep_row(row, flat, start):
    """Write ``row`` float32 [n] to the cache at ``start``."""
    for i in range(0, row.size, LANES):
        count = min(LANES, row.size - i)
        _keep(flat, start + i, count, load_part(row, i, count))


@_plain
def _attend(q, flat, keys, values, first, position, scores, mixed, starts, factors):
    """One head's attention of ``q`` [head_dim] to ``mixed``; keys and values start there in the cache ``flat``."""
    size, scale = q.size, np.float32(1 / math.sqrt(q.size))
    largest = np.float32(-np.inf)
    for at in range(first, position + 1):
        score = _dot(flat, keys + at * size, q, keys + min(at + 1, position) * size) * scale
        scores[at] = score
        largest = max(largest, score)
    total = np.float32(0)
    for at in range(first, position + 1):
        scores[at] = math.exp(scores[at] - largest)
        total += scores[at]
    for i in range(size):
        mixed[i] = 0
    for at in range(first, position + 1, _GROUP):
        for k in range(_GROUP):
            inside = at + k <= position
            starts[k] = values + (at + k if inside else position) * size
            factors[k] = scores[at + k] / total if inside else np.float32(0)
        _float_add_rows(flat, factors, starts, mixed, mixed, starts)


@_plain
def _heads(matrices, kv, layer, position, window, me, threads, s):
    """This thread's share of the heads: turns, keeps keys and values, attends."""
    kv_heads, context, size = kv.shape[2], kv.shape[3], kv.shape[4]
    heads = s.mixed.size // size
    group, flat = heads // kv_heads, kv.reshape(kv.size)
    cos, sin = matrices.cos[position], matrices.sin[position]
    first = max(0, position + 1 - window) if window else 0
    kept = -1
    for head in range(me * heads // threads, (me + 1) * heads // threads):
        own = head // group
        keys = ((2 * layer) * kv_heads + own) * context * size
        values = ((2 * layer + 1) * kv_heads + own) * context * size
        if own != kept:  # two threads may keep the same: the same bytes
            at = (heads + own) * size
            _turn(s.qkv[at : at + size], cos, sin, s.turned[me])
            _keep_row(s.turned[me], flat, keys + position * size)
            at += kv_heads * size
            _keep_row(s.qkv[at : at + size], flat, values + position * size)
            kept = own
        _turn(s.qkv[head * size : (head + 1) * size], cos, sin, s.turned[me])
        out = s.mixed[head * size : (head + 1) * size]
        _attend(s.turned[me], flat, keys, values, first, position, s.scores[me], out, s.starts[me], s.factors[me])


@_plain
def _neurons(matrices, rules, layer, ids, me, threads, s):
    """This thread's share of the FFN's neurons ``ids`` to its own part."""
    first, last = me * ids.size // threads, (me + 1) * ids.size // threads
    for i in range(s.x.shape[1]):
        s.parts[me, i] = 0
    s.found[me, layer] = ffn(
        matrices.neurons[layer], s.x[me], ids[first:last], s.parts[me], s.values[first:last], s.active[first:last],
        matrices.up_bias[layer], rules.thresholds[layer], rules.activation, rules.predicted, 0.0,
    )  # fmt: skip


@njit(nogil=True, cache=True, _nrt=False)
def token(me, threads, arrivals, matrices, rules, kv, position, ids, ends, s):
    """Thread ``me``'s part of one token: from its hidden state ``s.hidden[me]`` to the logits.

    ``kv`` [layer, 2, kv_heads, context, head_dim] as a view; ``ids`` int32 holds layer after layer the neurons to
    compute, layer i's ending at ``ends[i]``; ``arrivals`` counts those at the barriers before this token.
    """
    layers = matrices.qkv.shape[0]
    hidden, x = s.hidden[me], s.x[me]
    start = 0
    for layer in range(layers):
        _norm(hidden, matrices.attention_norm[layer], rules.rms, rules.epsilon, x)
        _rows(matrices.qkv[layer], x, matrices.qkv_bias[layer], me, threads, s.qkv)
        arrivals += threads
        _meet(s.sync, arrivals)
        _heads(matrices, kv, layer, position, rules.windows[layer], me, threads, s)
        arrivals += threads
        _meet(s.sync, arrivals)
        _rows(matrices.o[layer], s.mixed, matrices.o_bias[layer], me, threads, s.o)
        arrivals += threads
        _meet(s.sync, arrivals)
        _add_to(hidden, s.o)
        _norm(hidden, matrices.ffn_norm[layer], rules.rms, rules.epsilon, x)
        if me == 0:
            s.times[layer, 0] = _now()
        _neurons(matrices, rules, layer, ids[start : ends[layer]], me, threads, s)
        start = ends[layer]
        arrivals += threads
        _meet(s.sync, arrivals)
        for part in range(threads):
            _add_to(hidden, s.parts[part])
        if matrices.down_bias.size:
            _add_to(hidden, matrices.down_bias[layer])
        if me == 0:
            s.times[layer, 1] = _now()
    _norm(hidden, matrices.norm, rules.rms, rules.epsilon, x)
    _rows(matrices.head, x, matrices.norm[0, :0], me, threads, s.logits)
    _meet(s.sync, arrivals + threads)
