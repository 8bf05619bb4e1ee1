"""Eight words, that is 512 neurons, in registers: what the loops of words.py go by.

LLVM's own vectorising leaves up to 31 of a set's words to be done one by one, and 11,008 neurons are 172
words. It splits these eight lanes into what the CPU at hand has: one register of 512 bits, two of 256, four
of 128. A set is gone through as ``for i in range(0, n, LANES)``; what the last block lacks reads as 0 and is
not written.
"""

import operator
from typing import ClassVar

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel, register_default
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin

LANES = 8
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_I64, LANES)


class _Block(types.Type):
    """Eight words in registers."""

    def __init__(self):
        super().__init__(name="block")


@register_default(_Block)
class _BlockModel(PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _VECTOR)


BLOCK = _Block()


def _call(builder, name, result, arguments):
    """Call the LLVM intrinsic ``name``."""
    shape = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, shape, name), arguments)


def _spread(builder, word):
    """Eight times ``word``."""
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), word, _I32(0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), zeros)


def _place(context, builder, kind, array, index):
    """Pointer to the block at word ``index`` of ``array`` [words]."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _VECTOR.as_pointer())


def _mask(builder, lanes):
    """The first ``lanes`` of the eight."""
    return builder.icmp_signed("<", ir.Constant(_VECTOR, list(range(LANES))), _spread(builder, lanes))


@intrinsic
def load(typing_context, words, index, lanes):
    """Words index .. index + lanes - 1 of ``words``, then zeros."""

    def generate(context, builder, signature, arguments):
        pointer = _place(context, builder, signature.args[0], *arguments[:2])
        rest = [pointer, _I32(8), _mask(builder, arguments[2]), ir.Constant(_VECTOR, None)]
        return _call(builder, f"llvm.masked.load.v{LANES}i64.p0", _VECTOR, rest)

    return BLOCK(words, types.int64, types.int64), generate


@intrinsic
def store(typing_context, words, index, lanes, block):
    """Write the first ``lanes`` of ``block`` to words index .. index + lanes - 1 of ``words``."""

    def generate(context, builder, signature, arguments):
        pointer = _place(context, builder, signature.args[0], *arguments[:2])
        rest = [arguments[3], pointer, _I32(8), _mask(builder, arguments[2])]
        _call(builder, f"llvm.masked.store.v{LANES}i64.p0", ir.VoidType(), rest)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64, BLOCK), generate


@intrinsic
def spread(typing_context, word):
    """Eight times ``word``."""

    def generate(context, builder, signature, arguments):
        return _spread(builder, arguments[0])

    return BLOCK(types.uint64), generate


@intrinsic
def add(typing_context, a, b):
    """The lanes of ``a`` and ``b`` added, as numbers."""

    def generate(context, builder, signature, arguments):
        return builder.add(*arguments)

    return BLOCK(BLOCK, BLOCK), generate


@intrinsic
def popcounts(typing_context, block):
    """Set bits of each lane."""

    def generate(context, builder, signature, arguments):
        return _call(builder, f"llvm.ctpop.v{LANES}i64", _VECTOR, arguments)

    return BLOCK(BLOCK), generate


@intrinsic
def total(typing_context, block):
    """The sum of the lanes, int64."""

    def generate(context, builder, signature, arguments):
        return _call(builder, f"llvm.vector.reduce.add.v{LANES}i64", _I64, arguments)

    return types.int64(BLOCK), generate


def _operator(operation, instruction, arity):
    """Let ``operation`` work on blocks, by this instruction of the builder."""

    class _Template(ConcreteTemplate):
        cases: ClassVar = [signature(BLOCK, *[BLOCK] * arity)]

    def lower(context, builder, signature, arguments):
        return getattr(builder, instruction)(*arguments)

    infer_global(operation)(_Template)
    lower_builtin(operation, *[BLOCK] * arity)(lower)


_operator(operator.and_, "and_", 2)
_operator(operator.or_, "or_", 2)
_operator(operator.xor, "xor", 2)
_operator(operator.invert, "not_", 1)


def over_blocks(body):
    """A loop over the blocks of sets of ``n`` words: ``loop(n, sums, ...)`` calls ``body(i, lanes, sums, ...)``.

    ``i`` is a block's first word and ``lanes`` how many words it has, 8 but for the last; ``body`` returns the
    sums, as the loop does. A block of eight is loaded and stored without a mask.
    """
    block = njit(body, _nrt=False, forceinline=True)

    @njit(_nrt=False, forceinline=True)
    def loop(n, sums, *arguments):
        whole = n - n % LANES
        for i in range(0, whole, LANES):
            sums = block(i, LANES, sums, *arguments)
        return block(whole, n - whole, sums, *arguments)

    return loop
