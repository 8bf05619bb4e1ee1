"""belady: knows the future; the next use decides, and where the window is short all uses to come."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import FREE, STEP_SIGNATURE, Beliefs
from dinfer.policies.words import (
    add_lowest,
    choose,
    count,
    count_gainful,
    halve,
    increment,
    plain,
    popcount,
    scratch_sets,
)

WORTH_BITS = 12
"""Worth of the uses to come, saturating at 4,095; a use a half-life later is worth half as much."""

LONGEST = 16
"""Tokens of the longest half-life; ours."""

FORESIGHT = 64
"""Tokens that worth looks ahead at most; ours, for speed."""

TURNOVER = 14.0
"""How many half-lives it takes windows to turn all slots over; ours, from a scan on the presets."""


@plain
def _soonest(pool, k, future, chosen):
    # put into chosen the k members of pool whose next use comes first
    for i in range(pool.size):
        chosen[i] = 0
    left = count(pool)
    for t in range(future.shape[0]):
        if k == left:
            break
        n = np.int64(0)
        for i in range(pool.size):
            n += np.int64(popcount(pool[i] & future[t, i]))
        if n >= k:
            for i in range(pool.size):
                pool[i] &= future[t, i]
            break
        for i in range(pool.size):
            used = pool[i] & future[t, i]
            chosen[i] |= used
            pool[i] ^= used
        k -= n
        left -= n
    add_lowest(pool, k, chosen)


@plain
def _latest(pool, k, future, chosen):
    # put into chosen the k members of pool whose next use comes last or never
    left = count(pool)
    for t in range(future.shape[0]):
        if k == left:
            break
        n = np.int64(0)
        for i in range(pool.size):
            chosen[i] = pool[i] & ~future[t, i]
            n += np.int64(popcount(chosen[i]))
        if n < k:
            for i in range(pool.size):
                pool[i] &= future[t, i]
            add_lowest(pool, k - n, chosen)
            return
        for i in range(pool.size):
            pool[i] = chosen[i]
        left = n
    for i in range(pool.size):
        chosen[i] = 0
    add_lowest(pool, k, chosen)


@plain
def _half_life(slots, window):
    # tokens: the longer it takes to turn the slots over, the longer what is fetched must be of use
    return max(min(np.int64(np.float64(slots) / (TURNOVER * max(window, 1)) + 0.5), LONGEST), 1)


@plain
def _fill_worth(predicted, future, half_life, worth):
    # from far to near: add each token's uses, halve at the end of each half-life
    use = WORTH_BITS - 1
    while 2 ** (WORTH_BITS - 1 - use) < half_life:
        use -= 1  # a use now is worth 2 ** use: twice as many as there are in a half-life still fit
    for b in range(WORTH_BITS):
        for i in range(predicted.size):
            worth[b, i] = np.uint64(0)
    for t in range(min(future.shape[0], (use + 1) * half_life - 1, FORESIGHT), -1, -1):
        if (t + 1) % half_life == 0:
            halve(worth, WORTH_BITS)
        increment(worth[use:], WORTH_BITS - use, predicted if t == 0 else future[t - 1])


@plain
def _choose_worst(worth, inside, n, future, pool, chosen):
    # the n with the least worth; of those with none within sight the ones used last
    for i in range(pool.size):
        some = np.uint64(0)
        for b in range(WORTH_BITS):
            some |= worth[b, i]
        pool[i] = inside[i] & ~some
    if count(pool) >= n:
        _latest(pool, n, future, chosen)
    else:
        choose(worth, WORTH_BITS, n, False, inside, chosen)


@plain
def _swap_by_worth(resident, predicted, future, window, scratch, fetch, evict):
    # whatever enters, as long as its uses to come exceed those of what leaves
    words, worth = resident.size, scratch[3:]
    inside, outside, pool = scratch[0][:words], scratch[1][:words], scratch[2][:words]
    _fill_worth(predicted, future, _half_life(count(resident), window), worth)
    for i in range(resident.size):
        inside[i], outside[i] = resident[i], ~resident[i]
    n = count_gainful(worth, WORTH_BITS, window, outside, inside)
    if n <= 0:
        return np.int64(0)
    for i in range(resident.size):
        inside[i], outside[i] = resident[i], ~resident[i]
    choose(worth, WORTH_BITS, n, True, outside, fetch)
    _choose_worst(worth, inside, n, future, pool, evict)
    return n


@plain
def _swap_by_next_use(resident, predicted, future, window, scratch, fetch, evict):
    # all that is missing, and ahead of its use what the next token would miss beyond its window
    words, coming = resident.size, fetch
    pool, leaving = scratch[0][:words], scratch[1][:words]
    for i in range(resident.size):
        coming[i] = predicted[i] & ~resident[i]
        leaving[i] = resident[i] & ~predicted[i]
    n, spare = count(coming), count(leaving)
    if n > spare:
        n = spare
        for i in range(resident.size):
            pool[i] = coming[i]
        _soonest(pool, n, future, coming)
    early = 0
    if n < window and future.shape[0] > 0:
        for i in range(resident.size):
            pool[i] = future[0, i] & ~resident[i] & ~coming[i]
            leaving[i] &= ~future[0, i]
        early = min(count(pool) - window, window - n, count(leaving) - n)
    if early > 0:
        _soonest(pool, early, future[1:], evict)
        for i in range(resident.size):
            coming[i] |= evict[i]
        n += early
    if n <= 0:
        return np.int64(0)
    for i in range(resident.size):
        pool[i] = resident[i] & ~predicted[i]
    _latest(pool, n, future, evict)
    return n


@njit(STEP_SIGNATURE, cache=True)
def _step(parameters, state, resident, predicted, future, window, fetch, evict):
    scratch = scratch_sets(WORTH_BITS + 3, resident.size)
    missing = np.uint64(0)
    for i in range(resident.size):
        missing += popcount(predicted[i] & ~resident[i])
    if np.int64(missing) > window:
        return _swap_by_worth(resident, predicted, future, window, scratch, fetch, evict)
    return _swap_by_next_use(resident, predicted, future, window, scratch, fetch, evict)


@dataclass(frozen=True)
class Belady:
    """Clairvoyant replacement, set-wise; the bound for what any cache can do when the window does not bind.

    Then the soonest next use enters and the last one leaves: every step hits min(slots, active) neurons, and
    where every active set fits the slots no policy with as many hits fetches fewer. Where more is missing
    than the window lets in, what matters is all uses while a neuron stays: they are discounted, the more so
    the sooner the windows turn the slots over. That is a heuristic: the exact bound is a minimum-cost flow
    (benchmarks/policies.py). Runs only where the future is known: in the simulator and in a replay.
    """

    name: ClassVar[str] = "belady"
    moves: ClassVar[bool] = True
    clairvoyant: ClassVar[bool] = True
    step: ClassVar[object] = staticmethod(_step)

    def init(self, spec: ModelSpec, placement: Placement, frequency: np.ndarray) -> np.ndarray:
        """No state: one unused row a layer."""
        return np.zeros((spec.layers, 1, spec.words), np.uint64)

    def parameters(self, beliefs: Beliefs = FREE) -> np.ndarray:
        """None."""
        return np.zeros(1)
