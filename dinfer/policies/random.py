"""random: fetch what is predicted, evict any; what a policy must beat."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from dinfer.errors import InputError
from dinfer.model import ModelSpec
from dinfer.placement import Placement
from dinfer.policies.protocol import FREE, STEP_SIGNATURE, Beliefs
from dinfer.policies.words import choose, count, plain, scratch_sets

LOT_BITS = 12
"""A lot is a number below 4,096; the lowest ids come first among equal lots."""

SEED, TOKEN, ROWS = range(3)
"""Rows of the state: a layer's seed and the token's number in the first word."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@plain
def _mix(x):
    # splitmix64's finaliser
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


@plain
def _draw_lots(key, words, lots):
    for b in range(lots.shape[0]):
        for i in range(words):
            lots[b, i] = _mix(key + np.uint64(i * LOT_BITS + b) * _GOLDEN)


@njit(STEP_SIGNATURE, cache=True)
def _step(parameters, state, resident, predicted, future, window, fetch, evict):
    words = resident.size
    scratch = scratch_sets(LOT_BITS + 2, words)
    lots, pool, chosen = scratch[:LOT_BITS], scratch[LOT_BITS][:words], scratch[LOT_BITS + 1][:words]
    for i in range(words):
        pool[i] = predicted[i] & ~resident[i]
        chosen[i] = resident[i] & ~predicted[i]
    n = min(window, count(pool), count(chosen))
    if n > 0:
        _draw_lots(_mix(state[SEED, 0] + state[TOKEN, 0] * _GOLDEN + np.uint64(parameters[0])), words, lots)
        choose(lots, LOT_BITS, n, True, pool, fetch)
        for i in range(words):
            pool[i] = resident[i] & ~predicted[i]
        choose(lots, LOT_BITS, n, True, pool, evict)
    state[TOKEN, 0] += np.uint64(1)
    return max(n, 0)


@dataclass(frozen=True)
class Random:
    """Random replacement: fetches predicted neurons and evicts any that are not predicted.

    A neuron's lot is drawn from ``seed``, layer and the token's number, never from a clock.
    """

    seed: int = 0
    name: ClassVar[str] = "random"
    moves: ClassVar[bool] = True
    clairvoyant: ClassVar[bool] = False
    step: ClassVar[object] = staticmethod(_step)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**53:
            raise InputError(f"random: seed is {self.seed}; it must be at least 0 and below 2**53")

    def init(self, spec: ModelSpec, placement: Placement, frequency: np.ndarray) -> np.ndarray:
        """A seed for each layer, and the token's number."""
        state = np.zeros((spec.layers, ROWS, spec.words), np.uint64)
        state[:, SEED, 0] = np.arange(1, spec.layers + 1, dtype=np.uint64) << np.uint64(32)
        return state

    def parameters(self, beliefs: Beliefs = FREE) -> np.ndarray:
        """The seed."""
        return np.array([float(self.seed)])
