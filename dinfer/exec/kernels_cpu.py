"""The sparse FFN of one layer on the CPU: compiled, without the GIL, near the speed of a pure read.

Rows lie neuron by neuron, [neuron, matrix, hidden] in the order gate, up, down (up, down if
ungated). numba has no 16-bit floats, so the integer type of a view says which one it holds: VIEWS.

What makes it fast: rows are read once; meanwhile those of a later neuron are asked for, line by
line; and four neurons share one pass over the output. Loops are written as vectors of 32 lanes,
which LLVM splits into those of the CPU at hand: two of 512 bits, four of 256, eight of 128.

One file, because numba's cache does not notice a change in another.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel, register_default
from numba.extending import intrinsic

from dinfer.model import ModelSpec

VIEWS = {"float32": "float32", "bfloat16": "uint16", "float16": "int16"}
"""Weight dtype -> dtype of the view that the kernels take; the bits stay as they are."""

ACTIVATION_CODES = {"relu": 0, "fatrelu": 0, "drelu": 1, "silu": 2, "gelu": 3}
"""Activation -> the code that ``ffn`` takes."""

_NO_BIAS = np.empty(0, np.float32)

_DRELU, _SILU, _GELU = 1, 2, 3
_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715
_LANES = 32
_GROUP = 4  # neurons that share one pass over the output
_NEAR_BYTES = 2048  # how far ahead a down row is asked for whose neuron was not foreseen
_LINE_BYTES = 64
_BITS = {types.float32: 32, types.uint16: 16, types.int16: 16, types.uint32: 32}
_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


class _Vector(types.Type):
    """32 floats, or 32 words of 32 bits, in registers."""

    def __init__(self, element):
        self.element = element
        super().__init__(name=f"vector({element})")


@register_default(_Vector)
class _VectorModel(PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _vector(_F32 if kind.element == types.float32 else _I32))


_FLOATS, _WORDS = _Vector(types.float32), _Vector(types.uint32)


def _vector(element):
    return ir.VectorType(element, _LANES)


def _call(builder, name, result, arguments, **flags):
    """Call the LLVM intrinsic ``name``."""
    shape = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, shape, name)
    return builder.call(function, arguments, **flags)


def _pointer(context, builder, kind, target, array, index):
    """Pointer to ``target`` at element ``index`` of a contiguous array of one dimension."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


def _stored(kind):
    """The vector type of 32 elements as they lie in an array of type ``kind``."""
    return _vector(_F32 if kind.dtype == types.float32 else ir.IntType(_BITS[kind.dtype]))


def _decode(builder, loaded, dtype):
    """Floats of 32 loaded weights of the view's ``dtype``; words of 32 bits stay what they are."""
    if dtype == types.int16:
        return builder.fpext(builder.bitcast(loaded, _vector(ir.HalfType())), _vector(_F32))
    if dtype == types.uint16:
        words, shift = _vector(_I32), ir.Constant(_vector(_I32), [16] * _LANES)
        return builder.bitcast(builder.shl(builder.zext(loaded, words), shift), _vector(_F32))
    return loaded


def _spread(builder, scalar):
    """32 times ``scalar``."""
    vector = _vector(scalar.type)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    zeros = ir.Constant(_vector(_I32), [0] * _LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _mask(builder, count):
    """The first ``count`` of 32 lanes."""
    lanes = ir.Constant(_vector(_I64), list(range(_LANES)))
    return builder.icmp_unsigned("<", lanes, _spread(builder, count))


@intrinsic
def _load(typing_context, array, index):
    """Elements index .. index + 31 of ``array`` [n] as floats; uint32 as words."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        pointer = _pointer(context, builder, kind, _stored(kind), *arguments)
        loaded = builder.load(pointer, align=_BITS[kind.dtype] // 8)
        return _decode(builder, loaded, kind.dtype)

    vector = _WORDS if array.dtype == types.uint32 else _FLOATS
    return vector(array, types.int64), generate


@intrinsic
def _load_part(typing_context, array, index, count):
    """Elements index .. index + count - 1 of ``array`` [n] as floats, then zeros."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        vector, bits = _stored(kind), _BITS[kind.dtype]
        pointer = _pointer(context, builder, kind, vector, *arguments[:2])
        name = f"llvm.masked.load.v{_LANES}{'f' if kind.dtype == types.float32 else 'i'}{bits}.p0"
        rest = [_I32(bits // 8), _mask(builder, arguments[2]), ir.Constant(vector, None)]
        return _decode(builder, _call(builder, name, vector, [pointer, *rest]), kind.dtype)

    return _FLOATS(array, types.int64, types.int64), generate


@intrinsic
def _store(typing_context, array, index, floats):
    """Write 32 floats to ``array`` float32 [n] from ``index`` on."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        pointer = _pointer(context, builder, kind, _stored(kind), *arguments[:2])
        builder.store(arguments[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, _FLOATS), generate


@intrinsic
def _store_part(typing_context, array, index, count, floats):
    """Write the first ``count`` of 32 floats to ``array`` float32 [n] from ``index`` on."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        pointer = _pointer(context, builder, kind, _stored(kind), *arguments[:2])
        rest = [pointer, _I32(4), _mask(builder, arguments[2])]
        name = f"llvm.masked.store.v{_LANES}f32.p0"
        _call(builder, name, ir.VoidType(), [arguments[3], *rest])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, _FLOATS), generate


@intrinsic
def _splat(typing_context, value):
    """32 times ``value`` float32."""

    def generate(context, builder, signature, arguments):
        return _spread(builder, arguments[0])

    return _FLOATS(types.float32), generate


@intrinsic
def _add(typing_context, a, b):
    """a + b."""

    def generate(context, builder, signature, arguments):
        return builder.fadd(*arguments)

    return _FLOATS(_FLOATS, _FLOATS), generate


@intrinsic
def _multiply_add(typing_context, a, b, c):
    """a * b + c, fused where the CPU can."""

    def generate(context, builder, signature, arguments):
        return _call(builder, f"llvm.fmuladd.v{_LANES}f32", _vector(_F32), arguments)

    return _FLOATS(_FLOATS, _FLOATS, _FLOATS), generate


@intrinsic
def _total(typing_context, floats):
    """The sum of 32 floats."""

    def generate(context, builder, signature, arguments):
        name = f"llvm.vector.reduce.fadd.v{_LANES}f32"
        return _call(builder, name, _F32, [_F32(-0.0), *arguments], fastmath=["reassoc"])

    return types.float32(_FLOATS), generate


@intrinsic
def _xor(typing_context, a, b):
    """a ^ b."""

    def generate(context, builder, signature, arguments):
        return builder.xor(*arguments)

    return _WORDS(_WORDS, _WORDS), generate


@intrinsic
def _parity(typing_context, words):
    """The exclusive or of 32 words."""

    def generate(context, builder, signature, arguments):
        return _call(builder, f"llvm.vector.reduce.xor.v{_LANES}i32", _I32, arguments)

    return types.uint32(_WORDS), generate


@intrinsic
def _ask(typing_context, array, index):
    """Prefetch elements index .. index + 31; loads and prefetches keep their order around it.

    Without the order LLVM issues prefetches in clusters, which costs up to a tenth of the speed.
    """

    def generate(context, builder, signature, arguments):
        kind, byte = signature.args[0], ir.IntType(8)
        nothing = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(nothing, "", "~{memory}", side_effect=True), [])
        start = _pointer(context, builder, kind, byte, *arguments)
        for offset in range(0, _LANES * _BITS[kind.dtype] // 8, _LINE_BYTES):
            line = builder.gep(start, [_I64(offset)])
            flags = [_I32(0), _I32(3), _I32(1)]  # to read, into all caches, data
            _call(builder, "llvm.prefetch.p0", ir.VoidType(), [line, *flags])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def _copy(typing_context, destination, to, source, start, count):
    """Copy ``count`` elements of ``source`` from ``start`` on to ``destination`` at ``to``."""

    def generate(context, builder, signature, arguments):
        byte = ir.IntType(8)
        target = _pointer(context, builder, signature.args[0], byte, *arguments[:2])
        origin = _pointer(context, builder, signature.args[2], byte, *arguments[2:4])
        size = context.get_abi_sizeof(context.get_data_type(signature.args[2].dtype))
        cgutils.raw_memcpy(builder, target, origin, arguments[4], size)
        return context.get_dummy_value()

    return types.void(destination, types.int64, source, types.int64, types.int64), generate


@njit(nogil=True)
def _dot(weights, start, x, ahead):
    """Sum of weights[start + i] * x[i]; asks for the weights from ``ahead`` on."""
    zeros = _splat(np.float32(0))
    a, b, c, d = zeros, zeros, zeros, zeros
    step = 4 * _LANES
    blocks = x.size // step * step
    for i in range(0, blocks, step):
        _ask(weights, ahead + i)
        a = _multiply_add(_load(weights, start + i), _load(x, i), a)
        j = i + _LANES
        _ask(weights, ahead + j)
        b = _multiply_add(_load(weights, start + j), _load(x, j), b)
        k = j + _LANES
        _ask(weights, ahead + k)
        c = _multiply_add(_load(weights, start + k), _load(x, k), c)
        m = k + _LANES
        _ask(weights, ahead + m)
        d = _multiply_add(_load(weights, start + m), _load(x, m), d)
    whole = x.size // _LANES * _LANES
    for i in range(blocks, whole, _LANES):
        _ask(weights, ahead + i)
        a = _multiply_add(_load(weights, start + i), _load(x, i), a)
    if whole < x.size:
        rest = x.size - whole
        part = _load_part(weights, start + whole, rest)
        b = _multiply_add(part, _load_part(x, whole, rest), b)
    return _total(_add(_add(a, b), _add(c, d)))


@njit(nogil=True)
def _add_rows(factors, weights, starts, out, aheads):
    """Add factors[k] * weights[starts[k] + i] to out[i], four rows; asks for those at ``aheads``.

    Four rows share each load and store of ``out``. A row with factor 0 must be readable.
    """
    a, b, c, d = _splat(factors[0]), _splat(factors[1]), _splat(factors[2]), _splat(factors[3])
    p, q, r, s = starts[0], starts[1], starts[2], starts[3]
    next_p, next_q, next_r, next_s = aheads[0], aheads[1], aheads[2], aheads[3]
    whole = out.size // _LANES * _LANES
    for i in range(0, whole, _LANES):
        _ask(weights, next_p + i)
        total = _multiply_add(a, _load(weights, p + i), _load(out, i))
        _ask(weights, next_q + i)
        total = _multiply_add(b, _load(weights, q + i), total)
        _ask(weights, next_r + i)
        total = _multiply_add(c, _load(weights, r + i), total)
        _ask(weights, next_s + i)
        total = _multiply_add(d, _load(weights, s + i), total)
        _store(out, i, total)
    if whole < out.size:
        rest = out.size - whole
        total = _load_part(out, whole, rest)
        total = _multiply_add(a, _load_part(weights, p + whole, rest), total)
        total = _multiply_add(b, _load_part(weights, q + whole, rest), total)
        total = _multiply_add(c, _load_part(weights, r + whole, rest), total)
        total = _multiply_add(d, _load_part(weights, s + whole, rest), total)
        _store_part(out, whole, rest, total)


@njit(nogil=True)
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

    rows [neuron, matrix, hidden] C-contiguous, float32 or a view of VIEWS; x, out float32 [hidden].
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
    if gate_threshold > 0:
        return _ffn_in_passes(rows, x, ids, out, values, active, bias, threshold, activation, gate_threshold)
    weights = rows.reshape(rows.size)
    hidden, gated = rows.shape[2], rows.shape[1] == 3
    size, down = rows.shape[1] * hidden, (rows.shape[1] - 1) * hidden
    relu, limit = activation <= _DRELU, np.float32(threshold)
    near = _NEAR_BYTES // rows.itemsize
    starts, aheads = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)
    factors = np.empty(_GROUP, np.float32)
    waiting, found, last = 0, 0, ids.size - 1
    for j in range(ids.size):
        start, ahead = ids[j] * size, ids[min(j + 1, last)] * size
        values[j], active[j] = 0, False
        up = np.float32(1)
        gate = _dot(weights, start, x, ahead)
        if not gated and bias.size:
            gate += bias[ids[j]]
        if relu and gate <= limit:
            continue
        if gated:
            foreseen = predicted or not relu
            up = _dot(weights, start + hidden, x, ahead + hidden if foreseen else start + down)
            if bias.size:
                up += bias[ids[j]]
            if activation == _DRELU:
                up = max(up, np.float32(0))
        value = _activate(activation, gate) * up
        if not relu and abs(value) <= limit:
            continue
        values[j], active[j] = value, True
        found += 1
        if value == 0:
            continue
        factors[waiting], starts[waiting] = value, start + down
        next_down = ids[min(j + _GROUP, last)] * size + down
        aheads[waiting] = next_down if predicted else start + down + near
        waiting += 1
        if waiting == _GROUP:
            _add_rows(factors, weights, starts, out, aheads)
            waiting = 0
    if waiting:
        for k in range(waiting, _GROUP):
            factors[k], starts[k], aheads[k] = 0, starts[0], starts[0]
        _add_rows(factors, weights, starts, out, aheads)
    return found


@njit(nogil=True)
def _ffn_in_passes(rows, x, ids, out, values, active, bias, threshold, activation, gate_threshold):
    """``ffn`` of a magnitude kind with a gate threshold: all gates, then the ups of those that pass, then the downs.

    Which rows come next is known in each pass, so that each is asked for before it is read and no other is: neuron by
    neuron, half of the ups would be asked for in vain or too late.
    """
    weights = rows.reshape(rows.size)
    hidden, gated = rows.shape[2], rows.shape[1] == 3
    size, down = rows.shape[1] * hidden, (rows.shape[1] - 1) * hidden
    limit, least = np.float32(threshold), np.float32(gate_threshold)
    kept = np.empty(ids.size, np.int64)
    passed, found = 0, 0
    for j in range(ids.size):
        gate = _dot(weights, ids[j] * size, x, ids[min(j + 1, ids.size - 1)] * size)
        if not gated and bias.size:
            gate += bias[ids[j]]
        values[j], active[j] = _activate(activation, gate), False
        kept[passed] = j
        passed += abs(values[j]) > least
        values[j] = values[j] if abs(values[j]) > least else np.float32(0)
    for i in range(passed):
        j = kept[i]
        if gated:
            up = _dot(weights, ids[j] * size + hidden, x, ids[kept[min(i + 1, passed - 1)]] * size + hidden)
            values[j] *= up + bias[ids[j]] if bias.size else up
        active[j] = abs(values[j]) > limit
        values[j] = values[j] if active[j] else np.float32(0)
        kept[found] = j
        found += active[j]
    starts, aheads = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)
    factors = np.empty(_GROUP, np.float32)
    for i in range(0, found, _GROUP):
        for k in range(_GROUP):
            j = kept[min(i + k, found - 1)]
            factors[k], starts[k] = values[j] if i + k < found else 0, ids[j] * size + down
            aheads[k] = ids[kept[min(i + k + _GROUP, found - 1)]] * size + down
        _add_rows(factors, weights, starts, out, aheads)
    return found


@njit(nogil=True, cache=True)
def copy_rows(source, ids, destination, slots):
    """Copy neuron ids[i] of ``source`` to place slots[i] of ``destination``, for each i in order.

    Both are C-contiguous [neuron, ...] with equal neurons of any one dtype. ids, slots int32 [n].
    """
    size = source.size // source.shape[0]
    taken, given = source.reshape(source.size), destination.reshape(destination.size)
    for i in range(ids.size):
        _copy(given, slots[i] * size, taken, ids[i] * size, size)


@njit(nogil=True, cache=True)
def read_rows(words, ids):
    """Exclusive or of all words of the neurons ``ids``: a pure read, the limit of ``ffn``'s speed.

    words uint32 [neuron, word], C-contiguous. ids int32 [n]. Prefetches as ``ffn`` does.
    """
    flat, size = words.reshape(words.size), words.shape[1]
    whole = size // _LANES * _LANES
    odd, rest, last = np.uint32(0), np.uint32(0), ids.size - 1
    for j in range(ids.size):
        start, ahead = ids[j] * size, ids[min(j + 1, last)] * size
        if whole:
            _ask(flat, ahead)
            parity = _load(flat, start)
            for i in range(_LANES, whole, _LANES):
                _ask(flat, ahead + i)
                parity = _xor(parity, _load(flat, start + i))
            odd ^= _parity(parity)
        for i in range(whole, size):
            rest ^= flat[start + i]
    return odd ^ rest
