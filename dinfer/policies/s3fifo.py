"""s3fifo: three queues, set-wise; most newcomers leave the small one before they enter the main one."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import FREE, STEP_SIGNATURE, Beliefs
from dinfer.policies.words import add_lowest, choose, count, increment, plain, planes_of, scratch_sets

YOUTH_BITS = 6
"""Tokens left of a neuron's youth, from 63 down: the lower, the longer ago it entered its queue."""

USE_BITS = 2
"""Uses since then saturate at 3 (S3-FIFO)."""

BITS = YOUTH_BITS + USE_BITS
SMALL, GHOST, ROWS = range(BITS, BITS + 3)
"""Rows of the state: youth and uses as bit planes; then the residents in the small queue, and the ghosts."""


@plain
def _use(state, resident, predicted, pool):
    # one more use for residents that are predicted
    for i in range(pool.size):
        pool[i] = resident[i] & predicted[i]
    increment(state[YOUTH_BITS:BITS], USE_BITS, pool)


@plain
def _promote(state, share, slots, resident):
    # the small queue is over its share: all that were used since they came enter the main queue anew
    small = np.int64(0)
    for i in range(resident.size):
        state[SMALL, i] &= resident[i]
    small = count(state[SMALL])
    if small <= np.int64(share * slots):
        return
    for i in range(resident.size):
        used = np.uint64(0)
        for b in range(YOUTH_BITS, BITS):
            used |= state[b, i]
        used &= state[SMALL, i]
        state[SMALL, i] ^= used
        _enter(state, i, used)


@plain
def _enter(state, i, members):
    # youngest and unused
    for b in range(YOUTH_BITS):
        state[b, i] |= members
    for b in range(YOUTH_BITS, BITS):
        state[b, i] &= ~members


@plain
def _choose_evicted(state, share, slots, resident, predicted, n, pool, part, chosen):
    # from the small queue what is over its share, then from the main one; fewest uses first, then the oldest
    for i in range(pool.size):
        pool[i] = state[SMALL, i] & ~predicted[i]
    first = min(n, count(pool), max(count(state[SMALL]) - np.int64(share * slots), 0))
    choose(state, BITS, first, False, pool, chosen)
    for i in range(pool.size):
        pool[i] = resident[i] & ~state[SMALL, i] & ~predicted[i]
    second = min(n - first, count(pool))
    choose(state, BITS, second, False, pool, part)
    for i in range(pool.size):
        chosen[i] |= part[i]
        pool[i] = state[SMALL, i] & ~predicted[i] & ~chosen[i]
    choose(state, BITS, n - first - second, False, pool, part)
    for i in range(pool.size):
        chosen[i] |= part[i]


@plain
def _leave(state, evicted):
    # from the small queue to the ghosts, from the main queue for good
    for i in range(evicted.size):
        state[GHOST, i] |= evicted[i] & state[SMALL, i]
        state[SMALL, i] &= ~evicted[i]
        _enter(state, i, evicted[i])


@plain
def _choose_fetched(state, missing, n, pool, chosen):
    # ghosts first, the lowest ids among equals
    for i in range(pool.size):
        pool[i] = missing[i] & state[GHOST, i]
        chosen[i] = np.uint64(0)
    known = min(n, count(pool))
    add_lowest(pool, known, chosen)
    for i in range(pool.size):
        pool[i] = missing[i] & ~state[GHOST, i]
    add_lowest(pool, n - known, chosen)


@plain
def _arrive(state, fetched):
    # ghosts to the main queue, the others to the small one
    for i in range(fetched.size):
        state[SMALL, i] |= fetched[i] & ~state[GHOST, i]
        state[GHOST, i] &= ~fetched[i]
        _enter(state, i, fetched[i])


@plain
def _grow_older(state):
    # youth falls by 1, down to 0; a ghost without any is forgotten
    for i in range(state.shape[1]):
        left = np.uint64(0)
        for b in range(YOUTH_BITS):
            left |= state[b, i]
        borrow = left
        for b in range(YOUTH_BITS):
            state[b, i] ^= borrow
            borrow &= state[b, i]
        state[GHOST, i] &= left


@njit(STEP_SIGNATURE, cache=True)
def _step(parameters, state, resident, predicted, future, window, fetch, evict):
    words, share = resident.size, parameters[0]
    scratch = scratch_sets(3, words)
    missing, pool, part = scratch[0][:words], scratch[1][:words], scratch[2][:words]
    slots = count(resident)
    _use(state, resident, predicted, pool)
    _promote(state, share, slots, resident)
    for i in range(words):
        missing[i] = predicted[i] & ~resident[i]
        pool[i] = resident[i] & ~predicted[i]
    n = min(window, count(missing), count(pool))
    if n > 0:
        _choose_evicted(state, share, slots, resident, predicted, n, pool, part, evict)
        _leave(state, evict)
        _choose_fetched(state, missing, n, pool, fetch)
        _arrive(state, fetch)
    _grow_older(state)
    return max(n, 0)


@dataclass(frozen=True)
class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023), set-wise: a layer's whole predicted set is used at once.

    Newcomers enter the small queue. Once it holds more than its ``share`` of the slots, those that were used
    again move to the main queue, and the others leave first and are remembered as ghosts; a ghost that is
    fetched enters the main queue. What differs from the sequential rule: all of one token enter a queue
    together, what is predicted now is never evicted, the main queue evicts by fewest uses and then by age
    (the order in which its hand would come by, which takes one use each time it passes, without those uses
    being lost), and ghosts are forgotten by age, 63 tokens, and not by number.
    """

    share: float = 0.1
    name: ClassVar[str] = "s3fifo"
    moves: ClassVar[bool] = True
    clairvoyant: ClassVar[bool] = False
    step: ClassVar[object] = staticmethod(_step)

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InputError(f"s3fifo: share is {self.share}; it must be between 0 and 1")

    def init(self, spec: ModelSpec, placement: Placement, frequency: np.ndarray) -> np.ndarray:
        """All residents in the main queue, unused, the rarer offline the older; no ghosts."""
        planes = planes_of(np.rint(frequency * (2**YOUTH_BITS - 1)).astype(np.int64), YOUTH_BITS)
        others = np.zeros((spec.layers, ROWS - YOUTH_BITS, spec.words), np.uint64)
        return np.concatenate([planes, others], axis=1)

    def parameters(self, beliefs: Beliefs = FREE) -> np.ndarray:
        """The small queue's share of the slots."""
        return np.array([self.share])
