"""lfu: fetch what is predicted, evict what was predicted least often of late."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import FREE, STEP_SIGNATURE, Beliefs
from dinfer.policies.words import COUNT_BITS, choose, count, halve, increment, planes_of, scratch_sets

HALVE_EVERY = 32
"""Tokens between halvings, so that what was hot grows cold; ours, as in hot_predicted."""


@njit(STEP_SIGNATURE, cache=True)
def _step(parameters, state, resident, predicted, future, window, fetch, evict):
    words = resident.size
    scratch = scratch_sets(2, words)
    pool, chosen = scratch[0][:words], scratch[1][:words]
    for i in range(words):
        pool[i] = predicted[i] & ~resident[i]
        chosen[i] = resident[i] & ~predicted[i]
    n = min(window, count(pool), count(chosen))
    if n > 0:
        choose(state, COUNT_BITS, n, True, pool, fetch)
        for i in range(words):
            pool[i] = resident[i] & ~predicted[i]
        choose(state, COUNT_BITS, n, False, pool, evict)
    increment(state, COUNT_BITS, predicted)
    clock = COUNT_BITS
    state[clock, 0] += np.uint64(1)
    if state[clock, 0] == np.uint64(HALVE_EVERY):
        state[clock, 0] = np.uint64(0)
        halve(state, COUNT_BITS)
    return max(n, 0)


@dataclass(frozen=True)
class Lfu:
    """Least frequently used with decay, set-wise: a layer's whole predicted set is used at once.

    When the window is short, the most frequent of the missing come first; the lowest ids among equals.
    """

    name: ClassVar[str] = "lfu"
    moves: ClassVar[bool] = True
    clairvoyant: ClassVar[bool] = False
    step: ClassVar[object] = staticmethod(_step)

    def init(self, spec: ModelSpec, placement: Placement, frequency: np.ndarray) -> np.ndarray:
        """Counters as bit planes, from the offline frequency, and a row whose first word is a clock."""
        counters = planes_of(np.rint(frequency * HALVE_EVERY).astype(np.int64), COUNT_BITS)
        return np.concatenate([counters, np.zeros((spec.layers, 1, spec.words), np.uint64)], axis=1)

    def parameters(self, beliefs: Beliefs = FREE) -> np.ndarray:
        """None."""
        return np.zeros(1)
