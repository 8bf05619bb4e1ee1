"""The inner loops of ``kernels_cpu`` over rows of int8 or int4 quants (docs/quantisation.md).

Dots are taken in integers, where x is int16 with a scale for each 32: its error is about 3e-5 of the value, and floats
took twice the time. Down rows are added in floats. int4 quants are used as 0..15; the 8 that they are too large by
comes off once a row, in sums of scales.
"""

import numpy as np

from dinfer.exec.vectors import (
    HALF,
    LANES,
    LINE_BYTES,
    add,
    add_products,
    ask,
    at,
    group_bytes,
    largest,
    load,
    load_floats,
    load_group,
    load_half,
    load_halves,
    multiply_add,
    plain,
    put,
    splat,
    splat_half,
    store,
    store_words,
    total,
    zeros,
)

_STEP = HALF.count  # scales that are taken at a time
_UNIT = 32  # bytes of quants that ``add_products`` takes: a group of int8, two of int4
_WORD_LIMIT = np.float32(32767)
_TINY = np.float32(1e-30)  # a group of x below it counts as 0


@plain
def unpack(weights, x, words, room):
    """Fill ``words`` int16 [hidden + 64] and ``room`` float32 [7 * groups] with what the dots need of x.

    ``room`` is the scales of the words, int4's offsets, then five times space for the scales of a row.
    """
    groups, nibbles = x.size // LANES, group_bytes(weights) < LANES
    for i in range(words.size - 4 * LANES, words.size):
        words[i] = 0
    for group in range(groups):
        floats = load(x, LANES * group)
        most = largest(floats)
        factor = _WORD_LIMIT / most if most > _TINY else np.float32(0)
        first = LANES * group
        second = first + _STEP
        if nibbles:
            first = 2 * LANES * (group // 2) + _STEP * (group % 2)
            if group == groups - 1 and groups % 2:  # its unit starts a group early, on words of 0
                first += _STEP
            second = first + LANES
        words_sum = store_words(words, first, second, floats, factor)
        room[group] = most / _WORD_LIMIT + np.float32(0) * total(floats)  # a NaN or infinity stays one
        room[groups + group] = np.float32(-8 * words_sum if nibbles else 0)


@plain
def _scale_dot(weights, start, groups, room, place, ahead):
    """Write row scale * x scale of each group to ``room`` from ``place`` on; returns what int4's offsets add."""
    nibbles, whole = group_bytes(weights) < LANES, groups // _STEP * _STEP
    off, rest = zeros(), np.float32(0)
    for group in range(0, whole, _STEP):
        ask(weights, ahead + 2 * group)
        both = multiply_add(load_halves(weights, start + 2 * group), load_floats(room, group), zeros())
        store(room, place + group, both)
        if nibbles:
            off = multiply_add(both, load_floats(room, groups + group), off)
    for group in range(whole, groups):
        one = load_half(weights, start + 2 * group) * at(room, group)
        put(room, place + group, one)
        rest += one * at(room, groups + group)
    return total(off) + rest if nibbles else np.float32(0)


@plain
def dot(weights, start, x, words, room, ahead):
    """Sum of weights * x over the row at byte ``start``; asks for the row at ``ahead``."""
    size, groups = group_bytes(weights), x.size // LANES
    quants, unit, scales = groups * size, _UNIT // size, 2 * groups
    rest = _scale_dot(weights, start + quants, groups, room, scales, ahead + quants)
    a, b = zeros(), zeros()
    pairs = quants // (2 * _UNIT)
    for pair in range(pairs):
        step, group = 2 * _UNIT * pair, 2 * unit * pair
        ask(weights, ahead + step)
        a = add_products(weights, start + step, words, LANES * group, room, scales + group, a)
        k, group = start + step + _UNIT, group + unit
        b = add_products(weights, k, words, LANES * group, room, scales + group, b)
    for group in range(2 * unit * pairs, groups, unit):
        first = min(group, groups - unit)
        a = add_products(weights, start + first * size, words, LANES * group, room, scales + first, a)
    return total(add(a, b)) + rest


@plain
def dot_pair(weights, start, other, x, words, room, ahead, other_ahead):
    """``dot`` of two rows at once, which share each load of x."""
    size, groups = group_bytes(weights), x.size // LANES
    quants, unit, scales, others = groups * size, _UNIT // size, 2 * groups, 3 * groups
    rest = _scale_dot(weights, start + quants, groups, room, scales, ahead + quants)
    other_rest = _scale_dot(weights, other + quants, groups, room, others, other_ahead + quants)
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    pairs = quants // (2 * _UNIT)
    for pair in range(pairs):
        step, group = 2 * _UNIT * pair, 2 * unit * pair
        ask(weights, ahead + step)
        a = add_products(weights, start + step, words, LANES * group, room, scales + group, a)
        ask(weights, other_ahead + step)
        c = add_products(weights, other + step, words, LANES * group, room, others + group, c)
        k, m, group = start + step + _UNIT, other + step + _UNIT, group + unit
        b = add_products(weights, k, words, LANES * group, room, scales + group, b)
        d = add_products(weights, m, words, LANES * group, room, others + group, d)
    for group in range(2 * unit * pairs, groups, unit):
        first = min(group, groups - unit)
        a = add_products(weights, start + first * size, words, LANES * group, room, scales + first, a)
        c = add_products(weights, other + first * size, words, LANES * group, room, others + first, c)
    return total(add(a, b)) + rest, total(add(c, d)) + other_rest


@plain
def _scale_rows(weights, start, factor, room, k, ahead, groups):
    """Write row scale * ``factor`` of each group to row k of ``room``, and -8 times it onto int4's offsets."""
    nibbles, whole, many = group_bytes(weights) < LANES, groups // _STEP * _STEP, splat_half(factor)
    place, offsets, eight = (2 + k) * groups, 6 * groups, splat_half(np.float32(-8))
    for group in range(0, whole, _STEP):
        ask(weights, ahead + 2 * group)
        scaled = multiply_add(load_halves(weights, start + 2 * group), many, zeros())
        store(room, place + group, scaled)
        if nibbles:
            so_far = load_floats(room, offsets + group) if k else zeros()
            store(room, offsets + group, multiply_add(scaled, eight, so_far))
    for group in range(whole, groups):
        one = load_half(weights, start + 2 * group) * factor
        put(room, place + group, one)
        put(room, offsets + group, (at(room, offsets + group) if k else np.float32(0)) - 8 * one)


@plain
def _add_groups(weights, k, p, q, r, s, out, room, group, groups):
    """Add the groups at byte ``k`` of the four rows to 32 of ``out``."""
    sums, place = load(out, LANES * group), 2 * groups + group
    if group_bytes(weights) < LANES:
        sums = add(sums, splat(at(room, 6 * groups + group)))
    sums = multiply_add(load_group(weights, p + k), splat(at(room, place)), sums)
    sums = multiply_add(load_group(weights, q + k), splat(at(room, place + groups)), sums)
    sums = multiply_add(load_group(weights, r + k), splat(at(room, place + 2 * groups)), sums)
    sums = multiply_add(load_group(weights, s + k), splat(at(room, place + 3 * groups)), sums)
    store(out, LANES * group, sums)


@plain
def add_rows(weights, factors, starts, out, room, aheads):
    """Add factors[k] * weights[starts[k] + i] to out[i], four rows; asks for those at ``aheads``."""
    size, groups = group_bytes(weights), out.size // LANES
    quants = groups * size
    for k in range(4):
        _scale_rows(weights, starts[k] + quants, factors[k], room, k, aheads[k] + quants, groups)
    p, q, r, s = starts[0], starts[1], starts[2], starts[3]
    next_p, next_q, next_r, next_s = aheads[0], aheads[1], aheads[2], aheads[3]
    many = LINE_BYTES // size  # groups of a line
    whole = groups // many * many
    for first in range(0, whole, many):
        ask(weights, next_p + first * size)
        ask(weights, next_q + first * size)
        ask(weights, next_r + first * size)
        ask(weights, next_s + first * size)
        for group in range(first, first + many):
            _add_groups(weights, group * size, p, q, r, s, out, room, group, groups)
    for group in range(whole, groups):
        _add_groups(weights, group * size, p, q, r, s, out, room, group, groups)
