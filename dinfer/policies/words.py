"""Compiled set operations on bit-packed words; what every policy's step is made of."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from dinfer.policies.lanes import add, load, over_blocks, popcounts, spread, store, total

_ONE = np.uint64(1)
COUNT_BITS = 6
"""Planes of a frequency counter, which saturates at 63."""

_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def plain(function):
    """``njit`` for functions that allocate nothing: without reference counts, which take half of a replay's time."""
    return njit(function, _nrt=False)


def inlined(function):
    """``plain``, and compiled into its caller: loops over a constant number of planes are then unrolled."""
    return njit(function, _nrt=False, forceinline=True)


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


@intrinsic
def leading_zeros(typing_context, word):
    """How many bits stand above the highest set one of a uint64; 64 when it is 0."""

    def generate(context, builder, signature, arguments):
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@njit
def scratch_sets(rows, words):
    """Room for sets [rows, at least words], each at the start of a cache line: half the time of those astride."""
    width = (words + 7) // 8 * 8
    memory = np.empty(rows * width + 7, np.uint64)
    start = (-(memory.ctypes.data // 8)) % 8
    return memory[start : start + rows * width].reshape(rows, width)


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
def write_ids(words, n, out):
    """Write the ``n`` members of the set into ``out`` (room for 64 ids a word) in ascending order."""
    if n < words.size:
        _write_ids(words, out, 2)
    elif n < 4 * words.size:
        _write_ids(words, out, 4)
    else:
        _write_ids(words, out, 8)


@njit(inline="always")
def _write_ids(words, out, several):
    # ``several`` ids at once, needed or not: what a word lacks is overwritten, which costs less than a wrong guess
    n = np.int64(0)
    for i in range(words.size):
        word, end = words[i], n + np.int64(popcount(words[i]))
        while True:
            for j in range(several):
                out[n + j] = np.int32(64 * i + np.int64(lowest_bit(word)))
                word &= word - _ONE
            n += several
            if n >= end:
                break
        n = end


@plain
def add_lowest(pool, k, chosen):
    """Add the ``k`` lowest ids of ``pool`` to ``chosen``."""
    for start in range(0, pool.size, 32):
        if k <= 0:
            return
        end = min(start + 32, pool.size)
        members = np.int64(count(pool[start:end]))
        if members <= k:
            for i in range(start, end):
                chosen[i] |= pool[i]
            k -= members
            continue
        for i in range(start, end):
            word, members = pool[i], np.int64(popcount(pool[i]))
            while members > k:  # without its highest bit
                word ^= _ONE << (np.uint64(63) - leading_zeros(word))
                members -= 1
            chosen[i] |= word
            k -= members
            if k == 0:
                return


@plain
def choose(planes, bits, k, largest, pool, chosen):
    """Put into ``chosen`` the ``k`` members of ``pool`` whose value is largest (or smallest), lowest ids first.

    A neuron's value is the number whose bit ``b`` stands in ``planes[b]``, for ``b`` below ``bits``. ``pool`` is
    used up. A radix selection from the highest bit down, one pass over the words for each bit.
    """
    flip = spread(np.uint64(0) if largest else _ALL)
    first = total(_begin(pool.size, _zero(), pool, planes[bits - 1], flip, chosen))
    for b in range(bits - 1, -1, -1):
        lower = planes[max(b - 1, 0)]
        if first >= k:  # those that come first by this bit go on
            first = total(_keep(pool.size, _zero(), pool, planes[b], flip, lower))
        else:  # those are in, the others go on
            k -= first
            first = total(_take(pool.size, _zero(), pool, planes[b], flip, lower, chosen))
    add_lowest(pool, k, chosen)


@over_blocks
def _begin(i, lanes, first, pool, plane, flip, chosen):
    store(chosen, i, lanes, _zero())
    return add(first, popcounts(load(pool, i, lanes) & (load(plane, i, lanes) ^ flip)))


@over_blocks
def _keep(i, lanes, first, pool, plane, flip, lower):
    members = load(pool, i, lanes) & (load(plane, i, lanes) ^ flip)
    store(pool, i, lanes, members)
    return add(first, popcounts(members & (load(lower, i, lanes) ^ flip)))


@over_blocks
def _take(i, lanes, first, pool, plane, flip, lower, chosen):
    members = load(pool, i, lanes)
    taken = members & (load(plane, i, lanes) ^ flip)
    members = members ^ taken
    store(chosen, i, lanes, load(chosen, i, lanes) | taken)
    store(pool, i, lanes, members)
    return add(first, popcounts(members & (load(lower, i, lanes) ^ flip)))


@plain
def count_gainful(values, bits, most, outside, inside):
    """The largest n whose n-th best of ``outside`` still exceeds the n-th worst of ``inside``; uses both sets up.

    At most ``most``: no more is asked for. For a cut c, min(#outside above c, #inside up to c) swaps gain; the two
    cross once, so find c bit by bit.
    """
    above, below, best = np.int64(0), np.int64(0), np.int64(0)
    reach = _reach(outside.size, (_zero(), _zero()), outside, inside, values[bits - 1])
    for b in range(bits - 1, -1, -1):
        enter, leave = total(reach[0]), total(reach[1])
        best = max(best, min(above + enter, below + leave))
        if best >= most:
            return most
        higher = above + enter > below + leave  # the cut's bit is 1
        if higher:
            below += leave
        else:
            above += enter
        flip = spread(np.uint64(0) if higher else _ALL)
        reach = _narrow(
            outside.size, (_zero(), _zero()), outside, inside, values[b], flip, values[max(b - 1, 0)]
        )
    return best


@plain
def count_above(values, bits, most, members, others):
    """How many of ``others`` have a larger value than every one of ``members``; at least ``most`` where it is more.

    Uses both sets up. Follows the largest value of ``members``, bit by bit.
    """
    above, equal = np.int64(0), count(others)
    reach = _reach(members.size, (_zero(), _zero()), members, others, values[bits - 1])
    for b in range(bits - 1, -1, -1):
        some, without = total(reach[0]), total(reach[1])
        if some > 0:
            equal -= without
        else:
            above += equal - without
            equal = without
        if above >= most:
            return above
        flip = spread(np.uint64(0) if some > 0 else _ALL)
        reach = _narrow(
            members.size, (_zero(), _zero()), members, others, values[b], flip, values[max(b - 1, 0)]
        )
    return above


@over_blocks
def _reach(i, lanes, sums, outside, inside, plane):
    # how many of each set stand above and below a cut between this bit's 1 and its 0
    bit = load(plane, i, lanes)
    enter, leave = load(outside, i, lanes) & bit, load(inside, i, lanes) & ~bit
    return add(sums[0], popcounts(enter)), add(sums[1], popcounts(leave))


@over_blocks
def _narrow(i, lanes, sums, outside, inside, plane, flip, lower):
    # keep those that have the cut's bit, and reach for the lower one
    kept, bit = load(plane, i, lanes) ^ flip, load(lower, i, lanes)
    enter, leave = load(outside, i, lanes) & kept, load(inside, i, lanes) & kept
    store(outside, i, lanes, enter)
    store(inside, i, lanes, leave)
    return add(sums[0], popcounts(enter & bit)), add(sums[1], popcounts(leave & ~bit))


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
def weigh(counters, first, members, second, others, values, bits):
    """Write into ``values`` the ``counters``, plus ``first`` for ``members``, plus ``second`` for ``others``.

    Counters have COUNT_BITS (6) planes, values have 7 or 8 ``bits``; sums saturate at ``2 ** bits - 1``.
    """
    _weigh(members.size, _zero(), counters, first, members, second, others, values, bits)


@over_blocks
def _weigh(i, lanes, sums, counters, first, members, second, others, values, bits):
    # written out plane by plane: in a loop over them LLVM keeps none in registers, and takes twice as long
    given = (first, load(members, i, lanes), second, load(others, i, lanes))
    v0, carry = _add_digit(0, load(counters[0], i, lanes), given, (_zero(), _zero()))
    v1, carry = _add_digit(1, load(counters[1], i, lanes), given, carry)
    v2, carry = _add_digit(2, load(counters[2], i, lanes), given, carry)
    v3, carry = _add_digit(3, load(counters[3], i, lanes), given, carry)
    v4, carry = _add_digit(4, load(counters[4], i, lanes), given, carry)
    v5, carry = _add_digit(5, load(counters[5], i, lanes), given, carry)
    v6, carry = _add_digit(6, _zero(), given, carry)
    if bits > 7:
        v7, carry = _add_digit(7, _zero(), given, carry)
        store(values[7], i, lanes, v7 | carry[0] | carry[1])
    over = carry[0] | carry[1]
    store(values[0], i, lanes, v0 | over)
    store(values[1], i, lanes, v1 | over)
    store(values[2], i, lanes, v2 | over)
    store(values[3], i, lanes, v3 | over)
    store(values[4], i, lanes, v4 | over)
    store(values[5], i, lanes, v5 | over)
    store(values[6], i, lanes, v6 | over)
    return sums


@inlined
def _add_digit(b, digit, given, carry):
    first, members, second, others = given
    addend = members & spread(_ALL if (first >> b) & 1 else np.uint64(0))
    partial = digit ^ addend
    middle, over = partial ^ carry[0], (digit & addend) | (carry[0] & partial)
    addend = others & spread(_ALL if (second >> b) & 1 else np.uint64(0))
    partial = middle ^ addend
    return partial ^ carry[1], (over, (middle & addend) | (carry[1] & partial))


@njit(inline="always")
def _zero():
    return spread(np.uint64(0))


@njit(cache=True)
def swap(resident, fetch, evict):
    """Replace the set ``evict`` by the set ``fetch`` in ``resident``, all [words]."""
    for i in range(resident.size):
        resident[i] = (resident[i] & ~evict[i]) | fetch[i]


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


def ids(words: np.ndarray, n: int) -> np.ndarray:
    """The ``n`` members of a set, int32 [n], ascending."""
    out = np.empty(64 * len(words), np.int32)
    write_ids(words, n, out)
    return out[:n].copy()


def planes_of(values: np.ndarray, bits: int) -> np.ndarray:
    """Bit planes uint64 [layer, bits, words] of integer ``values`` [layer, neuron]."""
    from dinfer.bits import pack

    return np.stack([pack((values >> b) & 1) for b in range(bits)], axis=1)
