"""lru: fetch what is predicted, evict what was predicted longest ago."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import FREE, STEP_SIGNATURE, Beliefs
from dinfer.policies.words import choose, count, increment, planes_of, write_ids

AGE_BITS = 8
"""Ages saturate at 255 tokens."""


@njit(STEP_SIGNATURE, cache=True)
def _step(parameters, ages, resident, predicted, future, window, fetch, evict):
    words = resident.size
    pool, chosen = np.empty(words, np.uint64), np.empty(words, np.uint64)
    for i in range(words):
        pool[i] = predicted[i] & ~resident[i]
    missing = count(pool)
    spare = 0
    for i in range(words):
        chosen[i] = resident[i] & ~predicted[i]
    spare = count(chosen)
    n = min(window, missing, spare)
    if n > 0:
        choose(ages, AGE_BITS, n, False, pool, chosen)
        write_ids(chosen, fetch)
        for i in range(words):
            pool[i] = resident[i] & ~predicted[i]
        choose(ages, AGE_BITS, n, True, pool, chosen)
        write_ids(chosen, evict)
    for i in range(words):
        chosen[i] = ~predicted[i]
    increment(ages, AGE_BITS, chosen)
    for b in range(AGE_BITS):
        for i in range(words):
            ages[b, i] &= ~predicted[i]
    return max(n, 0)


@dataclass(frozen=True)
class Lru:
    """Least recently used, set-wise: a layer's whole predicted set is used at once.

    When the window is short, the most recently used of the missing come first.
    """

    name: ClassVar[str] = "lru"
    moves: ClassVar[bool] = True
    clairvoyant: ClassVar[bool] = False
    step: ClassVar[object] = staticmethod(_step)

    def init(self, spec: ModelSpec, placement: Placement, frequency: np.ndarray) -> np.ndarray:
        """Ages as bit planes; at the start the rarer a neuron was offline, the older it is."""
        return planes_of(np.rint((1 - frequency) * 255).astype(np.int64), AGE_BITS)

    def parameters(self, beliefs: Beliefs = FREE) -> np.ndarray:
        """None."""
        return np.zeros(1)
