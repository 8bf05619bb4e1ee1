"""Compiled set operations on bit-packed words; what every policy's step is made of."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def plain(function):
    """``njit`` for functions that allocate nothing: without reference counts, which take half of a replay's time."""
    return njit(function, _nrt=False)


@intrinsic
def popcount(typing_context, word):
    """Set bits of a uint64."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic
def lowest_bit(typing_context, word):
    """Index of the lowest set bit of a uint64; 64 when it is 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@njit(inline="always")
def count(words):
    """Members of a set: words [words]."""
    total = np.uint64(0)
    for i in range(words.size):
        total += popcount(words[i])
    return np.int64(total)


@njit(inline="always")
def count_split(members, other):
    """How many of ``members`` are in ``other``, and how many are not."""
    inside, outside = np.uint64(0), np.uint64(0)
    for i in range(members.size):
        inside += popcount(members[i] & other[i])
        outside += popcount(members[i] & ~other[i])
    return np.int64(inside), np.int64(outside)


@plain
def write_ids(words, out):
    """Write the set's ids into ``out`` (room for 64 ids a word) in ascending order; returns how many."""
    n = np.int64(0)
    for i in range(words.size):
        word, end = words[i], n + np.int64(popcount(words[i]))
        # two ids at once, needed or not: what a word lacks is overwritten, which costs less than a wrong guess
        while True:
            for j in range(2):
                out[n + j] = np.int32(64 * i + np.int64(lowest_bit(word)))
                word &= word - _ONE
            if word == 0:
                break
            n += 2
        n = end
    return n


@plain
def add_lowest(pool, k, chosen):
    """Add the ``k`` lowest ids of ``pool`` to ``chosen``."""
    for start in range(0, pool.size, 32):
        if k <= 0:
            return
        end = min(start + 32, pool.size)
        total = np.uint64(0)
        for i in range(start, end):
            total += popcount(pool[i])
        if np.int64(total) <= k:
            for i in range(start, end):
                chosen[i] |= pool[i]
            k -= np.int64(total)
            continue
        for i in range(start, end):
            word = pool[i]
            while k > 0 and word:
                chosen[i] |= word & (~word + _ONE)
                word &= word - _ONE
                k -= 1


@plain
def choose(planes, bits, k, largest, pool, chosen):
    """Put into ``chosen`` the ``k`` members of ``pool`` whose value is largest (or smallest), lowest ids first.

    A neuron's value is the number whose bit ``b`` stands in ``planes[b]``, for ``b`` below ``bits``. ``pool`` is
    used up. A radix selection from the highest bit down, one pass over the words for each bit.
    """
    flip = np.uint64(0) if largest else _ALL
    top = np.uint64(0)
    for i in range(pool.size):
        chosen[i] = 0
        top += popcount(pool[i] & (planes[bits - 1, i] ^ flip))
    first = np.int64(top)  # how many come first by this bit
    for b in range(bits - 1, -1, -1):
        lower = planes[max(b - 1, 0)]
        if first >= k:
            first = _keep(pool, planes[b], flip, lower)
        else:
            k -= first
            first = _take(pool, chosen, planes[b], flip, lower)
    add_lowest(pool, k, chosen)


@plain
def _keep(pool, plane, flip, lower):
    # those that come first go on; returns how many of them come first by the lower bit
    first = np.uint64(0)
    for i in range(pool.size):
        pool[i] &= plane[i] ^ flip
        first += popcount(pool[i] & (lower[i] ^ flip))
    return np.int64(first)


@plain
def _take(pool, chosen, plane, flip, lower):
    # those that come first are in, the others go on; returns how many of these come first by the lower bit
    first = np.uint64(0)
    for i in range(pool.size):
        taken = pool[i] & (plane[i] ^ flip)
        chosen[i] |= taken
        pool[i] ^= taken
        first += popcount(pool[i] & (lower[i] ^ flip))
    return np.int64(first)


@plain
def count_gainful(values, bits, outside, inside):
    """The largest n whose n-th best of ``outside`` still exceeds the n-th worst of ``inside``; uses both sets up.

    For a cut c, min(#outside above c, #inside up to c) swaps gain; the two cross once, so find c bit by bit.
    """
    above, below, best = np.int64(0), np.int64(0), np.int64(0)
    enter, leave = _reach(outside, inside, values[bits - 1])
    for b in range(bits - 1, -1, -1):
        best = max(best, min(above + enter, below + leave))
        if above + enter > below + leave:  # the cut is higher: its bit is 1
            below += leave
            enter, leave = _narrow(outside, inside, values[b], np.uint64(0), values[max(b - 1, 0)])
        else:
            above += enter
            enter, leave = _narrow(outside, inside, values[b], ~np.uint64(0), values[max(b - 1, 0)])
    return best


@plain
def _reach(outside, inside, plane):
    # how many of each set stand above and below a cut between this bit's 1 and its 0
    enter, leave = np.uint64(0), np.uint64(0)
    for i in range(plane.size):
        enter += popcount(outside[i] & plane[i])
        leave += popcount(inside[i] & ~plane[i])
    return np.int64(enter), np.int64(leave)


@plain
def _narrow(outside, inside, plane, flip, lower):
    # keep those that have the cut's bit, and reach for the lower one
    enter, leave = np.uint64(0), np.uint64(0)
    for i in range(plane.size):
        outside[i] &= plane[i] ^ flip
        inside[i] &= plane[i] ^ flip
        enter += popcount(outside[i] & lower[i])
        leave += popcount(inside[i] & ~lower[i])
    return np.int64(enter), np.int64(leave)


@plain
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


@plain
def halve(planes, bits):
    """Halve every value, rounding down."""
    for i in range(planes.shape[1]):
        for b in range(bits):
            planes[b, i] = planes[b + 1, i] if b + 1 < bits else np.uint64(0)


@plain
def add_constant(planes, bits, constant, members, carry):
    """Add ``constant`` to the value of ``members``, saturating at ``2 ** bits - 1``; ``carry`` [words] is scratch."""
    for i in range(carry.size):
        carry[i] = 0
    for b in range(bits):
        _add(planes[b], members, _ALL if (constant >> b) & 1 else np.uint64(0), carry)
    if count(carry) > 0:
        for b in range(bits):
            for i in range(carry.size):
                planes[b, i] |= carry[i]


@plain
def _add(plane, members, bit, carry):
    for i in range(plane.size):
        value, addend = plane[i], members[i] & bit
        plane[i] = value ^ addend ^ carry[i]
        carry[i] = (value & addend) | (carry[i] & (value ^ addend))


@njit(cache=True)
def swap(resident, fetch, evict, n):
    """Replace the first ``n`` of ``evict`` by those of ``fetch`` in ``resident`` [words]."""
    for j in range(n):
        resident[evict[j] >> 6] &= ~(_ONE << np.uint64(evict[j] & 63))
        resident[fetch[j] >> 6] |= _ONE << np.uint64(fetch[j] & 63)


@njit(cache=True)
def add_members(words, ids, values):
    """Add to the set those of ``ids`` whose value is not 0; returns how many."""
    n = 0
    for j in range(ids.size):
        if values[j] != 0:
            words[ids[j] >> 6] |= _ONE << np.uint64(ids[j] & 63)
            n += 1
    return n


@njit(cache=True)
def count_members(words, ids):
    """How many of ``ids`` are in the set."""
    n = np.uint64(0)
    for j in range(ids.size):
        n += (words[ids[j] >> 6] >> np.uint64(ids[j] & 63)) & _ONE
    return np.int64(n)


def planes_of(values: np.ndarray, bits: int) -> np.ndarray:
    """Bit planes uint64 [layer, bits, words] of integer ``values`` [layer, neuron]."""
    from dinfer.bits import pack

    return np.stack([pack((values >> b) & 1) for b in range(bits)], axis=1)
