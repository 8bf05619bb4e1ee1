"""belady: knows the future; fetches what is used soonest, evicts what is used last."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import STEP_SIGNATURE
from dinfer.policies.words import add_lowest, count, popcount, write_ids


@njit
def _soonest(pool, k, future, chosen):
    # put into chosen the k members of pool whose next use comes first
    for i in range(pool.size):
        chosen[i] = 0
    for t in range(future.shape[0]):
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
        if k == 0:
            return
    add_lowest(pool, k, chosen)


@njit
def _latest(pool, k, future, chosen):
    # put into chosen the k members of pool whose next use comes last or never
    for i in range(pool.size):
        chosen[i] = 0
    left = count(pool)
    for t in range(future.shape[0]):
        n = np.int64(0)
        for i in range(pool.size):
            n += np.int64(popcount(pool[i] & future[t, i]))
        if left - n < k:
            for i in range(pool.size):
                used = pool[i] & future[t, i]
                chosen[i] |= pool[i] ^ used
                pool[i] = used
            add_lowest(pool, k - (left - n), chosen)
            return
        for i in range(pool.size):
            pool[i] &= ~future[t, i]
        left -= n
    add_lowest(pool, k, chosen)


@njit(STEP_SIGNATURE, cache=True)
def _step(parameters, state, resident, predicted, future, window, fetch, evict):
    words = resident.size
    pool, chosen = np.empty(words, np.uint64), np.empty(words, np.uint64)
    for i in range(words):
        pool[i] = predicted[i] & ~resident[i]
        chosen[i] = resident[i] & ~predicted[i]
    n = min(window, count(pool), count(chosen))
    if n <= 0:
        return 0
    _soonest(pool, n, future, chosen)
    write_ids(chosen, fetch)
    for i in range(words):
        pool[i] = resident[i] & ~predicted[i]
    _latest(pool, n, future, chosen)
    write_ids(chosen, evict)
    return n


@dataclass(frozen=True)
class Belady:
    """Clairvoyant replacement, set-wise: the bound for what any cache can do when the window does not bind.

    Then every step hits min(slots, active) neurons, and where every active set fits the slots no policy with as many
    hits fetches fewer. A window that binds is another matter, as nothing is fetched before the token that uses it.
    Runs only where the future is known: in the simulator and in a replay.
    """

    name: ClassVar[str] = "belady"
    moves: ClassVar[bool] = True
    clairvoyant: ClassVar[bool] = True
    step: ClassVar[object] = staticmethod(_step)

    def init(self, spec: ModelSpec, placement: Placement, frequency: np.ndarray) -> np.ndarray:
        """No state: one unused row a layer."""
        return np.zeros((spec.layers, 1, spec.words), np.uint64)

    def parameters(self) -> np.ndarray:
        """None."""
        return np.zeros(1)
