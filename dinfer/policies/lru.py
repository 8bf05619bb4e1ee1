"""lru: fetch what is predicted, evict what was predicted longest ago."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import FREE, STEP_SIGNATURE, Beliefs
from dinfer.policies.words import choose, count, plain, planes_of, scratch_sets

AGE_BITS = 8
"""Ages saturate at 255 tokens."""


@plain
def _grow_older(ages, predicted):
    # all grow older by a token, up to 255, but for the predicted, who are as good as new
    for i in range(predicted.size):
        full = ~np.uint64(0)
        for b in range(AGE_BITS):
            full &= ages[b, i]
        carry = ~full
        for b in range(AGE_BITS):
            overflow = ages[b, i] & carry
            ages[b, i] = (ages[b, i] ^ carry) & ~predicted[i]
            carry = overflow


@njit(STEP_SIGNATURE, cache=True)
def _step(parameters, ages, resident, predicted, future, window, fetch, evict):
    words = resident.size
    scratch = scratch_sets(2, words)
    pool, chosen = scratch[0][:words], scratch[1][:words]
    for i in range(words):
        pool[i] = predicted[i] & ~resident[i]
        chosen[i] = resident[i] & ~predicted[i]
    n = min(window, count(pool), count(chosen))
    if n > 0:
        choose(ages, AGE_BITS, n, False, pool, fetch)
        for i in range(words):
            pool[i] = resident[i] & ~predicted[i]
        choose(ages, AGE_BITS, n, True, pool, evict)
    _grow_older(ages, predicted)
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
