"""hot_predicted: DynamicInfer's two-level cache, importance v = a + lambda f."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import STEP_SIGNATURE
from dinfer.policies.words import add_constant, choose, count, count_above, halve, increment, planes_of, write_ids

COUNT_BITS = 6
"""Frequency counters saturate at 63."""

VALUE_BITS = 8
"""Importance as an integer: counter (at most 63) plus 63 / lambda (at most 126) when predicted."""

HALVE_EVERY = 32
"""Tokens between halvings: a neuron active with probability p holds a count between 32 p and 64 p."""


@njit
def _gainful(values, outside, inside, margin):
    # the largest n whose n-th best outside still exceeds the n-th worst inside by more than the margin:
    # for a cut c, min(#outside above c + margin, #inside up to c) swaps gain; the two cross once, so bisect
    total = count(inside)
    low, high, best = 0, (1 << VALUE_BITS) - 1, 0
    while low <= high:
        cut = (low + high) // 2
        enter = count_above(values, VALUE_BITS, cut + margin, outside)
        leave = total - count_above(values, VALUE_BITS, cut, inside)
        best = max(best, min(enter, leave))
        if enter > leave:
            low = cut + 1
        else:
            high = cut - 1
    return best


@njit(STEP_SIGNATURE, cache=True, nogil=True)
def _step(parameters, state, resident, predicted, future, window, fetch, evict):
    bonus, margin, pinned_share = np.int64(parameters[0]), np.int64(parameters[1]), parameters[2]
    words = resident.size
    values = np.empty((VALUE_BITS, words), np.uint64)
    outside, inside = np.empty(words, np.uint64), np.empty(words, np.uint64)
    pool, chosen = np.empty(words, np.uint64), np.empty(words, np.uint64)
    # macro level: the most frequent residents stay
    for i in range(words):
        pool[i] = resident[i]
    pinned = np.int64(pinned_share * count(resident))
    choose(state, COUNT_BITS, pinned, True, pool, chosen)
    for i in range(words):
        inside[i] = resident[i] & ~chosen[i]
        outside[i] = ~resident[i]
    # micro level: swap while the importance that enters exceeds what leaves by more than the margin
    for b in range(VALUE_BITS):
        for i in range(words):
            values[b, i] = state[b, i] if b < COUNT_BITS else np.uint64(0)
    add_constant(values, VALUE_BITS, bonus, predicted)
    n = min(window, _gainful(values, outside, inside, margin))
    if n > 0:
        for i in range(words):
            pool[i] = outside[i]
        choose(values, VALUE_BITS, n, True, pool, chosen)
        write_ids(chosen, fetch)
        choose(values, VALUE_BITS, n, False, inside, chosen)
        write_ids(chosen, evict)
    # history: count what was predicted, halve now and then
    increment(state, COUNT_BITS, predicted)
    clock = COUNT_BITS
    state[clock, 0] += np.uint64(1)
    if state[clock, 0] == np.uint64(HALVE_EVERY):
        state[clock, 0] = np.uint64(0)
        halve(state, COUNT_BITS)
    return max(n, 0)


@dataclass(frozen=True)
class HotPredicted:
    """v = a + lambda f (paper, method 2): a is predicted activity, f the frequency tracked in this sequence.

    The ``pinned`` share of the slots with the highest f never leaves (macro level); the rest is swapped by
    importance while the window lasts (micro level) and v gains more than ``margin``. The paper does not publish its
    constants: ``lam`` (lambda, at least 0.5), ``margin`` and ``pinned`` are ours.
    """

    lam: float = 1.0
    margin: float = 0.1
    pinned: float = 0.5
    name: ClassVar[str] = "hot_predicted"
    moves: ClassVar[bool] = True
    clairvoyant: ClassVar[bool] = False
    step: ClassVar[object] = staticmethod(_step)

    def __post_init__(self) -> None:
        if self.lam < 0.5:
            raise InputError(f"hot_predicted: lam is {self.lam}; it must be at least 0.5")
        if not 0 <= self.pinned <= 1 or not 0 <= self.margin <= 1:
            raise InputError(f"hot_predicted: pinned {self.pinned} and margin {self.margin} must be between 0 and 1")

    def init(self, spec: ModelSpec, placement: Placement, frequency: np.ndarray) -> np.ndarray:
        """Counters as bit planes, started from the offline frequency, and a row whose first word is a clock."""
        counters = planes_of(np.rint(frequency * 1.5 * HALVE_EVERY).astype(np.int64), COUNT_BITS)
        return np.concatenate([counters, np.zeros((spec.layers, 1, spec.words), np.uint64)], axis=1)

    def parameters(self) -> np.ndarray:
        """lambda as the integer worth of being predicted, the margin on the same scale, the pinned share."""
        scale = (2**COUNT_BITS - 1) / self.lam
        return np.array([np.rint(scale), np.rint(self.margin * scale), self.pinned])
