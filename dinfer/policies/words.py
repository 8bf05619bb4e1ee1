"""Compiled set operations on bit-packed words; what every policy's step is made of."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@intrinsic
def popcount(typing_context, word):
    """Set bits of a uint64."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def lowest_bit(typing_context, word):
    """Index of the lowest set bit of a uint64 that is not 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@njit(inline="always")
def count(words):
    """Members of a set: words [words]."""
    total = np.uint64(0)
    for i in range(words.size):
        total += popcount(words[i])
    return np.int64(total)


@njit(inline="always")
def count_both(a, b):
    """Members of both sets."""
    total = np.uint64(0)
    for i in range(a.size):
        total += popcount(a[i] & b[i])
    return np.int64(total)


@njit
def write_ids(words, out):
    """Write the set's ids into ``out`` in ascending order; returns how many."""
    n = 0
    for i in range(words.size):
        word = words[i]
        while word:
            out[n] = np.int32(64 * i + np.int64(lowest_bit(word)))
            word &= word - _ONE
            n += 1
    return n


@njit
def add_lowest(pool, k, chosen):
    """Add the ``k`` lowest ids of ``pool`` to ``chosen``."""
    for i in range(pool.size):
        if k <= 0:
            return
        word = pool[i]
        n = np.int64(popcount(word))
        if n <= k:
            chosen[i] |= word
            k -= n
            continue
        while k > 0:
            chosen[i] |= word & (~word + _ONE)
            word &= word - _ONE
            k -= 1


@njit
def choose(planes, bits, k, largest, pool, chosen):
    """Put into ``chosen`` the ``k`` members of ``pool`` whose value is largest (or smallest), lowest ids first.

    A neuron's value is the number whose bit ``b`` stands in ``planes[b]``, for ``b`` below ``bits``. ``pool`` is
    used up. A radix selection from the highest bit down: one pass over the words for each bit.
    """
    for i in range(pool.size):
        chosen[i] = 0
    flip = np.uint64(0) if largest else _ALL
    for b in range(bits - 1, -1, -1):
        if k <= 0:
            return
        n = np.uint64(0)
        for i in range(pool.size):
            n += popcount(pool[i] & (planes[b, i] ^ flip))
        found = np.int64(n)
        if found >= k:
            for i in range(pool.size):
                pool[i] &= planes[b, i] ^ flip
        else:
            for i in range(pool.size):
                better = pool[i] & (planes[b, i] ^ flip)
                chosen[i] |= better
                pool[i] ^= better
            k -= found
    add_lowest(pool, k, chosen)


@njit
def count_above(planes, bits, threshold, members):
    """How many ``members`` have a value (as in ``choose``) above ``threshold``."""
    total = np.uint64(0)
    for i in range(members.size):
        above, equal = np.uint64(0), members[i]
        for b in range(bits - 1, -1, -1):
            if (threshold >> b) & 1:
                equal &= planes[b, i]
            else:
                above |= equal & planes[b, i]
                equal &= ~planes[b, i]
        total += popcount(above)
    return np.int64(total)


@njit
def increment(planes, bits, members):
    """Add 1 to the value of ``members``, saturating at ``2 ** bits - 1``."""
    for i in range(members.size):
        full = _ALL
        for b in range(bits):
            full &= planes[b, i]
        carry = members[i] & ~full
        for b in range(bits):
            overflow = planes[b, i] & carry
            planes[b, i] ^= carry
            carry = overflow


@njit
def halve(planes, bits):
    """Halve every value, rounding down."""
    for b in range(bits - 1):
        planes[b, :] = planes[b + 1, :]
    planes[bits - 1, :] = 0


@njit
def add_constant(planes, bits, constant, members):
    """Add ``constant`` to the value of ``members``; the sum must fit ``bits``."""
    for i in range(members.size):
        carry = np.uint64(0)
        for b in range(bits):
            addend = members[i] if (constant >> b) & 1 else np.uint64(0)
            value = planes[b, i]
            planes[b, i] = value ^ addend ^ carry
            carry = (value & addend) | (carry & (value ^ addend))


@njit(cache=True, nogil=True)
def swap(resident, fetch, evict, n):
    """Replace the first ``n`` of ``evict`` by those of ``fetch`` in ``resident`` [words]."""
    for j in range(n):
        resident[evict[j] >> 6] &= ~(_ONE << np.uint64(evict[j] & 63))
        resident[fetch[j] >> 6] |= _ONE << np.uint64(fetch[j] & 63)


@njit(cache=True, nogil=True)
def add_members(words, ids, values):
    """Add to the set those of ``ids`` whose value is not 0; returns how many."""
    n = 0
    for j in range(ids.size):
        if values[j] != 0:
            words[ids[j] >> 6] |= _ONE << np.uint64(ids[j] & 63)
            n += 1
    return n


def planes_of(values: np.ndarray, bits: int) -> np.ndarray:
    """Bit planes uint64 [layer, bits, words] of integer ``values`` [layer, neuron]."""
    from dinfer.bits import pack

    return np.stack([pack((values >> b) & 1) for b in range(bits)], axis=1)
