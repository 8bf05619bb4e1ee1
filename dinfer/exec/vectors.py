"""Vectors for compiled kernels: LLVM vectors of 32 or 16 lanes as numba intrinsics.

LLVM splits them into those of the CPU at hand: 32 floats are two of 512 bits, four of 256, eight of 128. Nothing here
names an instruction set, so the same kernels compile for AVX-512, AVX2, SSE2 and NEON.

Indices count elements of a contiguous array of one dimension and are not checked, nor may they be negative.
"""

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel, register_default
from numba.extending import intrinsic

plain = njit(nogil=True, _nrt=False)
"""``njit`` for inner functions, which take arrays and make none: without counting references to them."""

LANES = 32
LINE_BYTES = 64
_BITS = {types.float32: 32, types.uint32: 32, types.uint16: 16, types.int16: 16, types.int8: 8, types.uint8: 8}
_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F16, _F32 = ir.HalfType(), ir.FloatType()


class _Vector(types.Type):
    """``count`` floats, or words of 32 bits, in registers."""

    def __init__(self, element, count):
        self.element, self.count = element, count
        super().__init__(name=f"vector({element}, {count})")


@register_default(_Vector)
class _VectorModel(PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _vector(_F32 if kind.element == types.float32 else _I32, kind.count))


FLOATS, WORDS = _Vector(types.float32, LANES), _Vector(types.uint32, LANES)
HALF = _Vector(types.float32, LANES // 2)


def _vector(element, count=LANES):
    return ir.VectorType(element, count)


def _filled(element, value, count=LANES):
    return ir.Constant(_vector(element, count), [value] * count)


def _call(builder, name, result, arguments, **flags):
    """Call the LLVM intrinsic ``name``."""
    shape = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, shape, name)
    return builder.call(function, arguments, **flags)


def _pointer(context, builder, kind, target, array, index):
    """Pointer to ``target`` at element ``index`` of a contiguous array of one dimension."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


def _read(context, builder, kind, target, array, index):
    """A ``target`` that lies at element ``index``, aligned as elements are."""
    pointer = _pointer(context, builder, kind, target, array, index)
    return builder.load(pointer, align=_BITS[kind.dtype] // 8)


def _stored(kind):
    """The vector type of 32 elements as they lie in an array of type ``kind``."""
    return _vector(_F32 if kind.dtype == types.float32 else ir.IntType(_BITS[kind.dtype]))


def _decode(builder, loaded, dtype):
    """Floats of 32 loaded weights of the view's ``dtype``; words of 32 bits stay what they are."""
    if dtype == types.int16:
        return builder.fpext(builder.bitcast(loaded, _vector(_F16)), _vector(_F32))
    if dtype == types.uint16:
        words, shift = _vector(_I32), _filled(_I32, 16)
        return builder.bitcast(builder.shl(builder.zext(loaded, words), shift), _vector(_F32))
    return loaded


def _pick(builder, vector, lanes):
    """The given lanes of ``vector``."""
    undefined, lanes = ir.Constant(vector.type, ir.Undefined), ir.Constant(_vector(_I32, len(lanes)), lanes)
    return builder.shuffle_vector(vector, undefined, lanes)


def _join(builder, first, second):
    """Both vectors, one after the other."""
    lanes = list(range(2 * first.type.count))
    return builder.shuffle_vector(first, second, ir.Constant(_vector(_I32, len(lanes)), lanes))


def _halves(builder, vector):
    middle = vector.type.count // 2
    return _pick(builder, vector, list(range(middle))), _pick(builder, vector, list(range(middle, 2 * middle)))


def _spread(builder, scalar, count=LANES):
    """``count`` times ``scalar``."""
    single = builder.insert_element(ir.Constant(_vector(scalar.type, 1), ir.Undefined), scalar, _I32(0))
    return _pick(builder, single, [0] * count)


def _mask(builder, count):
    """The first ``count`` of 32 lanes."""
    lanes = ir.Constant(_vector(_I64), list(range(LANES)))
    return builder.icmp_unsigned("<", lanes, _spread(builder, count))


def _fused(builder, a, b, c):
    return _call(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, [a, b, c])


@intrinsic
def load(typing_context, array, index):
    """Elements index .. index + 31 of ``array`` [n] as floats; uint32 as words."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        return _decode(builder, _read(context, builder, kind, _stored(kind), *arguments), kind.dtype)

    vector = WORDS if array.dtype == types.uint32 else FLOATS
    return vector(array, types.int64), generate


@intrinsic
def load_part(typing_context, array, index, count):
    """Elements index .. index + count - 1 of ``array`` [n] as floats, then zeros."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        vector, bits = _stored(kind), _BITS[kind.dtype]
        pointer = _pointer(context, builder, kind, vector, *arguments[:2])
        name = f"llvm.masked.load.v{LANES}{'f' if kind.dtype == types.float32 else 'i'}{bits}.p0"
        rest = [_I32(bits // 8), _mask(builder, arguments[2]), ir.Constant(vector, None)]
        return _decode(builder, _call(builder, name, vector, [pointer, *rest]), kind.dtype)

    return FLOATS(array, types.int64, types.int64), generate


@intrinsic
def store(typing_context, array, index, floats):
    """Write 32 or 16 floats to ``array`` float32 [n] from ``index`` on."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], arguments[2].type, *arguments[:2])
        builder.store(arguments[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, floats), generate


@intrinsic
def store_part(typing_context, array, index, count, floats):
    """Write the first ``count`` of 32 floats to ``array`` float32 [n] from ``index`` on."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        pointer = _pointer(context, builder, kind, _stored(kind), *arguments[:2])
        rest = [pointer, _I32(4), _mask(builder, arguments[2])]
        name = f"llvm.masked.store.v{LANES}f32.p0"
        _call(builder, name, ir.VoidType(), [arguments[3], *rest])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, FLOATS), generate


@intrinsic
def splat(typing_context, value):
    """32 times ``value`` float32."""

    def generate(context, builder, signature, arguments):
        return _spread(builder, arguments[0])

    return FLOATS(types.float32), generate


@intrinsic
def zeros(typing_context):
    """16 zeros."""

    def generate(context, builder, signature, arguments):
        return _filled(_F32, 0.0, HALF.count)

    return HALF(), generate


@intrinsic
def add(typing_context, a, b):
    """a + b."""

    def generate(context, builder, signature, arguments):
        return builder.fadd(*arguments)

    return a(a, a), generate


@intrinsic
def multiply_add(typing_context, a, b, c):
    """a * b + c, fused where the CPU can."""

    def generate(context, builder, signature, arguments):
        return _fused(builder, *arguments)

    return a(a, a, a), generate


@intrinsic
def total(typing_context, floats):
    """The sum of all lanes."""

    def generate(context, builder, signature, arguments):
        name = f"llvm.vector.reduce.fadd.v{floats.count}f32"
        return _call(builder, name, _F32, [_F32(-0.0), *arguments], fastmath=["reassoc"])

    return types.float32(floats), generate


@intrinsic
def largest(typing_context, floats):
    """The largest magnitude of 32 floats; a NaN is passed over."""

    def generate(context, builder, signature, arguments):
        magnitudes = _call(builder, f"llvm.fabs.v{LANES}f32", _vector(_F32), arguments)
        return _call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", _F32, [magnitudes])

    return types.float32(FLOATS), generate


@intrinsic
def xor(typing_context, a, b):
    """a ^ b."""

    def generate(context, builder, signature, arguments):
        return builder.xor(*arguments)

    return WORDS(WORDS, WORDS), generate


@intrinsic
def parity(typing_context, words):
    """The exclusive or of 32 words."""

    def generate(context, builder, signature, arguments):
        return _call(builder, f"llvm.vector.reduce.xor.v{LANES}i32", _I32, arguments)

    return types.uint32(WORDS), generate


@intrinsic
def ask(typing_context, array, index):
    """Prefetch elements index .. index + 31, at least a line; loads and prefetches keep their order around it.

    Without the order LLVM issues prefetches in clusters, which costs up to a tenth of the speed.
    """

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        nothing = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(nothing, "", "~{memory}", side_effect=True), [])
        start = _pointer(context, builder, kind, _I8, *arguments)
        for offset in range(0, LANES * _BITS[kind.dtype] // 8, LINE_BYTES):
            line = builder.gep(start, [_I64(offset)])
            flags = [_I32(0), _I32(3), _I32(1)]  # to read, into all caches, data
            _call(builder, "llvm.prefetch.p0", ir.VoidType(), [line, *flags])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def copy(typing_context, destination, to, source, start, count):
    """Copy ``count`` elements of ``source`` from ``start`` on to ``destination`` at ``to``."""

    def generate(context, builder, signature, arguments):
        target = _pointer(context, builder, signature.args[0], _I8, *arguments[:2])
        origin = _pointer(context, builder, signature.args[2], _I8, *arguments[2:4])
        size = context.get_abi_sizeof(context.get_data_type(signature.args[2].dtype))
        cgutils.raw_memcpy(builder, target, origin, arguments[4], size)
        return context.get_dummy_value()

    return types.void(destination, types.int64, source, types.int64, types.int64), generate


@intrinsic
def load_halves(typing_context, array, index):
    """16 little-endian float16 at byte ``index`` of ``array`` [n] of bytes, as floats."""

    def generate(context, builder, signature, arguments):
        stored = _vector(_F16, HALF.count)
        return builder.fpext(_read(context, builder, signature.args[0], stored, *arguments), _vector(_F32, HALF.count))

    return HALF(array, types.int64), generate


@intrinsic
def load_half(typing_context, array, index):
    """The little-endian float16 at byte ``index`` of ``array`` [n] of bytes."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(_read(context, builder, signature.args[0], _F16, *arguments), _F32)

    return types.float32(array, types.int64), generate


@intrinsic
def load_floats(typing_context, array, index):
    """16 floats of ``array`` float32 [n] from ``index`` on."""

    def generate(context, builder, signature, arguments):
        return _read(context, builder, signature.args[0], _vector(_F32, HALF.count), *arguments)

    return HALF(array, types.int64), generate


@intrinsic
def splat_half(typing_context, value):
    """16 times ``value`` float32."""

    def generate(context, builder, signature, arguments):
        return _spread(builder, arguments[0], HALF.count)

    return HALF(types.float32), generate


@intrinsic
def at(typing_context, array, index):
    """Element ``index`` of ``array`` [n], which is not negative: saves numba's test."""

    def generate(context, builder, signature, arguments):
        return builder.load(_pointer(context, builder, signature.args[0], _F32, *arguments), align=4)

    return types.float32(array, types.int64), generate


@intrinsic
def put(typing_context, array, index, value):
    """Write ``value`` to element ``index`` of ``array`` float32 [n]."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], _F32, *arguments[:2])
        builder.store(arguments[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.float32), generate


@intrinsic
def store_words(typing_context, array, index, second, floats, factor):
    """Write 32 floats times ``factor`` as int16 to ``array``: 16 at ``index``, 16 at ``second``; returns their sum."""

    def generate(context, builder, signature, arguments):
        kind, (data, *places, floats, factor) = signature.args[0], arguments
        scaled = builder.fmul(floats, _spread(builder, factor))
        rounded = _call(builder, f"llvm.rint.v{LANES}f32", _vector(_F32), [scaled])
        words = _call(builder, f"llvm.fptosi.sat.v{LANES}i32.v{LANES}f32", _vector(_I32), [rounded])  # a NaN is 0
        for place, half in zip(places, _halves(builder, builder.trunc(words, _vector(_I16))), strict=True):
            builder.store(half, _pointer(context, builder, kind, half.type, data, place), align=2)
        return _call(builder, f"llvm.vector.reduce.add.v{LANES}i32", _I32, [words])

    return types.int32(array, types.int64, types.int64, FLOATS, types.float32), generate


def _pair_sums(builder, weights, words):
    """Sums int32 [n / 2] of neighbouring products of int16 [n]; one instruction (pmaddwd, smlal) on most CPUs."""
    wide = _vector(_I32, weights.type.count)
    products = builder.mul(builder.sext(weights, wide), builder.sext(words, wide))
    even = _pick(builder, products, list(range(0, wide.count, 2)))
    return builder.add(even, _pick(builder, products, list(range(1, wide.count, 2))))


def _nibbles(builder, raw, element):
    """Low and high nibbles of a vector of bytes, each 0..15."""
    wide = _vector(element, raw.type.count)
    spread = builder.zext(raw, wide)
    low = builder.and_(spread, _filled(element, 15, wide.count))
    return low, builder.lshr(spread, _filled(element, 4, wide.count))


@intrinsic
def add_products(typing_context, weights, index, words, place, scales, group, sums):
    """``sums`` [16] + scale * weight * word over the 32 bytes of quants at ``index``; which lane holds what is open.

    int8 ``weights`` hold one group of 32, uint8 two groups of nibbles. ``words`` int16 [n] from ``place`` on are one's
    32, or the low nibbles' 32 and the high nibbles' 32. ``scales`` float32 [n] from ``group`` on: one, or two.
    """

    def generate(context, builder, signature, arguments):
        quants, index, x, place, scales, group, sums = arguments
        kinds = signature.args

        def x_words(offset):
            return _read(context, builder, kinds[2], _vector(_I16), x, builder.add(place, _I64(offset)))

        raw = _read(context, builder, kinds[0], _vector(_I8), quants, index)
        if weights.dtype == types.int8:
            products = _pair_sums(builder, builder.sext(raw, _vector(_I16)), x_words(0))
            scale = _spread(builder, _read(context, builder, kinds[4], _F32, scales, group), HALF.count)
        else:
            low, high = _nibbles(builder, raw, _I16)
            products = builder.add(_pair_sums(builder, low, x_words(0)), _pair_sums(builder, high, x_words(LANES)))
            two = _read(context, builder, kinds[4], _vector(_F32, 2), scales, group)
            scale = _pick(builder, two, [0] * 8 + [1] * 8)
        return _fused(builder, builder.sitofp(products, _vector(_F32, HALF.count)), scale, sums)

    places = types.int64
    return HALF(weights, places, words, places, scales, places, HALF), generate


@intrinsic
def load_group(typing_context, weights, index):
    """The 32 quants of the group at byte ``index`` as floats: int8 as they are, uint8 as nibbles 0..15."""

    def generate(context, builder, signature, arguments):
        kind = signature.args[0]
        if weights.dtype == types.int8:
            raw = _read(context, builder, kind, _vector(_I8), *arguments)
            return builder.sitofp(builder.sext(raw, _vector(_I32)), _vector(_F32))
        raw = _read(context, builder, kind, _vector(_I8, HALF.count), *arguments)
        return builder.sitofp(_join(builder, *_nibbles(builder, raw, _I32)), _vector(_F32))

    return FLOATS(weights, types.int64), generate


@intrinsic
def group_bytes(typing_context, weights):
    """Bytes of 32 quants of ``weights``: 32 of int8, 16 of uint8, which holds nibbles; a constant to the compiler."""

    def generate(context, builder, signature, arguments):
        return _I64(LANES if weights.dtype == types.int8 else HALF.count)

    return types.int64(weights), generate
